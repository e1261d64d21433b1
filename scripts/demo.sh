#!/usr/bin/env bash
# usage: scripts/demo.sh [--scale N] [--think FACTOR]
# Sets up what is missing, then replays recorded agent sessions (demo/traces) on one prefill and two decode workers behind
# the router; then moves a live session, drains a worker and kills one. Compares every answer with a plain SGLang server's.
# Exit status 0: all tokens identical.
# About 8 GB of memory; a few minutes after the set-up. Safe to repeat.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root"

step "set-up" scripts/setup-engine.sh
step "build router" cargo build --quiet -p kvc-router
step "demo" "$py" demo/replay.py "$@"
