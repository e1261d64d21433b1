#!/usr/bin/env bash
# usage: scripts/test.sh [PYTEST ARGUMENTS...]
# Sets up what is missing and runs every test: Rust (nextest, doc tests), the wheel's Python tests, real SGLang engines
# with the router, and the checks of lint.sh. Stops at the first part that fails. Safe to repeat; about 8 GB of memory.
# With arguments only the engine tests run, for example: scripts/test.sh -k tokens -x
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root"

engines() { "$py" -m pytest tests/engine "$@"; }

step "set-up" scripts/setup-engine.sh
step "build router" cargo build --quiet -p kvc-router
if [ $# -gt 0 ]; then
  step "real engines" engines "$@"
  exit
fi
cargo nextest --version >/dev/null 2>&1 ||
  step "cargo-nextest is missing: compiling it (once per machine)" cargo install --locked --quiet cargo-nextest
step "rust: build tests" cargo nextest run --workspace --no-run --cargo-quiet
step "rust: tests" cargo nextest run --workspace --cargo-quiet --no-fail-fast --status-level slow --final-status-level fail
step "rust: doc tests" cargo test --workspace --doc --quiet
step "lint" scripts/lint.sh
step "python: the wheel" "$py" -m pytest python-shim/tests
step "real engines" engines
say "all tests passed"
