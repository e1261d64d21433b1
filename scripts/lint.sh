#!/usr/bin/env bash
# usage: scripts/lint.sh
# Formatting, clippy, ruff, mypy, the wheel's stubs against its binary and what it is linked to, and SPECIFICATION.md against
# the tests it names.
# Changes nothing.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root"
[ -x "$venv/bin/ruff" ] && [ -f "$venv/.wheel" ] || step "set-up" scripts/setup-engine.sh

# It has to start on machines without rdma-core (ADR 0081).
needs_no_rdma_core() {
  local native
  native=$("$py" -c 'import importlib.util; print(importlib.util.find_spec("kvc._native").origin)')
  readelf -d "$native" | grep 'Shared library' >"$env_dir/needed" && ! grep ibverbs "$env_dir/needed"
}

wheel() { (cd python-shim && "$@"); }

step "cargo fmt" cargo fmt --all --check
step "ruff" "$venv/bin/ruff" check --quiet
step "ruff format" "$venv/bin/ruff" format --check --quiet
step "ruff, the wheel" wheel "$venv/bin/ruff" check --quiet
step "ruff format, the wheel" wheel "$venv/bin/ruff" format --check --quiet
step "mypy" "$py" -m mypy tests/engine demo
step "mypy, the wheel" wheel "$py" -m mypy python/kvc
step "stubtest" "$py" -m mypy.stubtest kvc._native
step "the wheel needs no rdma-core" needs_no_rdma_core
step "SPECIFICATION.md" "$py" scripts/check-spec.py
step "cargo clippy" cargo clippy --workspace --all-targets --features "$(features)" --quiet -- -D warnings
