#!/usr/bin/env bash
# usage: scripts/test.sh [PYTEST ARGUMENTS...]
# Sets up what is missing and runs every test: Rust (nextest, doc tests), RDMA in an emulated guest, the wheel's Python tests,
# real SGLang engines with the router, and the checks of lint.sh. Stops at the first part that fails; a machine that
# cannot have the guest is told so at the end. Safe to repeat; about 8 GB of memory.
# With arguments only the engine tests run, for example: scripts/test.sh -k tokens -x
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root"

# Status 3: this machine cannot have the guest.
rdma() {
  local rc=0
  rm -f "$env_dir/rdma-skipped"
  scripts/rdma/test.sh || rc=$?
  [ "$rc" != 3 ] || { touch "$env_dir/rdma-skipped"; return 0; }
  return "$rc"
}

engines() { "$py" -m pytest tests/engine "$@"; }

step "set-up" scripts/setup-engine.sh
step "build router" cargo build --quiet -p kvc-router
if [ $# -gt 0 ]; then
  step "real engines" engines "$@"
  exit
fi
cargo nextest --version >/dev/null 2>&1 ||
  step "cargo-nextest is missing: compiling it (once per machine)" cargo install --locked --quiet cargo-nextest
features=$(features)
step "rust: build tests" cargo nextest run --workspace --features "$features" --no-run --cargo-quiet
step "rust: tests" cargo nextest run --workspace --features "$features" --cargo-quiet --no-fail-fast --status-level slow --final-status-level fail
step "rust: doc tests" cargo test --workspace --features "$features" --doc --quiet
step "rust: RDMA in a guest" rdma
step "lint" scripts/lint.sh
step "python: the wheel" "$py" -m pytest python-shim/tests
step "real engines" engines
if [ -e "$env_dir/rdma-skipped" ]; then
  say "all tests passed, BUT THE RDMA TESTS WERE SKIPPED: this machine cannot have the guest (\"RDMA in a guest\" above says why)"
else
  say "all tests passed"
fi
