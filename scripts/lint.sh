#!/usr/bin/env bash
# usage: scripts/lint.sh
# Formatting, clippy, ruff, mypy, the wheel's stubs against its binary, and SPECIFICATION.md against the tests it names.
# Changes nothing.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root"
[ -x "$venv/bin/ruff" ] && [ -f "$venv/.wheel" ] || step "set-up" scripts/setup-engine.sh

wheel() { (cd python-shim && "$@"); }

step "cargo fmt" cargo fmt --all --check
step "ruff" "$venv/bin/ruff" check --quiet
step "ruff format" "$venv/bin/ruff" format --check --quiet
step "ruff, the wheel" wheel "$venv/bin/ruff" check --quiet
step "ruff format, the wheel" wheel "$venv/bin/ruff" format --check --quiet
step "mypy" "$py" -m mypy tests/engine demo
step "mypy, the wheel" wheel "$py" -m mypy python/kvc
step "stubtest" "$py" -m mypy.stubtest kvc._native
step "SPECIFICATION.md" "$py" scripts/check-spec.py
step "cargo clippy" cargo clippy --workspace --all-targets --quiet -- -D warnings
