#!/usr/bin/env bash
# usage: scripts/lint.sh
# Formatting, clippy, ruff, mypy, the wheel's stubs against its binary, and SPECIFICATION.md against the tests it names.
# Changes nothing.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root"
[ -x "$venv/bin/ruff" ] && [ -f "$venv/.wheel" ] || step "set-up" scripts/setup-engine.sh

stubs() { "$py" -m mypy.stubtest kvc._native; }

step "cargo fmt" cargo fmt --all --check
step "cargo clippy" cargo clippy --workspace --all-targets --quiet -- -D warnings
step "ruff" "$venv/bin/ruff" check --quiet
step "ruff format" "$venv/bin/ruff" format --check --quiet
step "mypy" "$py" -m mypy python-shim/python/kvc tests/engine demo
step "stubtest" stubs
step "SPECIFICATION.md" "$py" scripts/check-spec.py
