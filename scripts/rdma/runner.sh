#!/usr/bin/env bash
# usage: CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=scripts/rdma/runner.sh cargo test --test verbs
# A cargo runner: each test binary runs in a guest of its own (TOPOLOGY as for guest.sh). In the guest KVC_RDMA_GUEST is
# set, so a test that finds no device there fails instead of skipping; variables named in PASS travel as they are.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
binary=$1
shift
script=$(mktemp)
slim=$(mktemp -d)
trap 'rm -rf "$script" "$slim"' EXIT
{
  echo '#!/bin/busybox sh'
  echo "export KVC_RDMA_GUEST=1 RUST_BACKTRACE=1"
  for name in ${PASS:-}; do printf 'export %s=%q\n' "$name" "${!name-}"; done
  printf 'exec /bin/test-binary'
  [ $# = 0 ] || printf ' %q' "$@"
  echo
} > "$script"
strip --strip-debug -o "$slim/test-binary" "$binary" 2>/dev/null || cp "$binary" "$slim/test-binary"
"$here/guest.sh" "$script" "$slim/test-binary"
