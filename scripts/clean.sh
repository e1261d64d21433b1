#!/usr/bin/env bash
# usage: scripts/clean.sh
# Removes what set-up and builds made: .env and target.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
rm -rf "$env_dir" "$root/target"
say "removed .env and target"
