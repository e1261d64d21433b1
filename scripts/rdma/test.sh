#!/usr/bin/env bash
# usage: scripts/rdma/test.sh [TEST FILTER]
# The RDMA tests: the verbs mover against the kernel's software RoCE, in guests that prepare.sh makes. On one device and on
# two, with faults, between two machines, and on machines that lack the library or the device. A guest without a device
# fails; a machine that cannot have the emulator is told so, and the tests are skipped. `make rdmatest` calls this; `make test` does
# not yet.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$here/../.."

skipped=0
scripts/rdma/prepare.sh || skipped=$?
if [ "$skipped" = 3 ]; then
  echo "rdma tests: SKIPPED, this machine cannot run the guest (see above)"
  exit 0
elif [ "$skipped" != 0 ]; then
  exit "$skipped"
fi

# The crate is compiled optimised: the guest is emulated, and most of its time would go to test code.
cargo=(cargo test --quiet -p kvc-rdma --features verbs --config profile.dev.package.kvc-rdma.opt-level=2)
binaries=$(mktemp)
trap 'rm -f "$binaries"' EXIT
tests=(verbs verbs_faults verbs_allocations verbs_absent verbs_hosts verbs_trees)
"${cargo[@]}" --no-run --message-format json --lib "${tests[@]/#/--test=}" |
  sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' > "$binaries"
binary() { grep -E "/$1-[0-9a-f]+\$" "$binaries" | tail -1; }

# part TITLE TOPOLOGY TEST [ARGUMENTS...]: quiet unless it fails.
part() {
  local title=$1 topology=$2 test=$3 from=$SECONDS rc=0 log
  shift 3
  log=$(mktemp)
  TOPOLOGY=$topology "$here/runner.sh" "$(binary "$test")" --test-threads=1 "$@" > "$log" 2>&1 || rc=$?
  report "$title" "$rc" "$log" "$from"
}

report() {   # TITLE STATUS LOG FROM
  local counted
  counted=$(sed -n 's/.*test result: [a-zA-Z]*\. \([0-9]* passed; [0-9]* failed\).*/\1/p' "$3" | paste -sd '+')
  if [ "$2" != 0 ] || [ -z "$counted" ]; then
    cat "$3"
    echo "rdma tests: $1 FAILED (exit status $2)"
    exit 1
  fi
  echo "rdma tests: $1: $counted in $((SECONDS - $4)) s"
  rm -f "$3"
}

# The loader cannot find the library there.
without_library() {
  local from=$SECONDS rc=0 log script
  log=$(mktemp)
  script=$(mktemp)
  printf '#!/bin/busybox sh\nfind / -xdev -name "libibverbs.so*" -exec rm {} +\nKVC_RDMA_EXPECT=library exec /bin/%s\n' \
    "$(basename "$(binary verbs_absent)")" > "$script"
  "$here/guest.sh" "$script" "$(binary verbs_absent)" > "$log" 2>&1 || rc=$?
  rm -f "$script"
  report "without the library" "$rc" "$log" "$from"
}

two_machines() {
  local from=$SECONDS rc=0 log script
  log=$(mktemp)
  script=$(mktemp)
  printf '#!/bin/busybox sh\nexport KVC_RDMA_GUEST=1\nexec /bin/%s\n' "$(basename "$(binary verbs_hosts)")" > "$script"
  "$here/two-guests.sh" "$script" "$(binary verbs_hosts)" > "$log" 2>&1 || rc=$?
  rm -f "$script"
  report "two machines" "$rc" "$log" "$from"
}

# One binary for every machine: nothing of it is linked to the library.
if readelf -d "$(binary verbs_absent)" | grep -q 'NEEDED.*ibverbs'; then
  echo "rdma tests: the binary needs libibverbs.so to start: FAILED"
  exit 1
fi

if [ $# = 0 ]; then
  cargo clippy --quiet -p kvc-rdma --all-targets --features verbs -- -D warnings
  "${cargo[@]}" --doc verbs
  "$(binary kvc_rdma)" -q verbs::
  "$(binary verbs_trees)" -q
fi
part "suite, one device" one verbs "$@"
part "suite, two devices" pair verbs "$@"
[ $# = 0 ] || exit 0
part "faults" rails verbs_faults
part "keys and queue pairs" one kvc_rdma verbs::tests
part "allocations" one verbs_allocations
KVC_RDMA_EXPECT=device PASS=KVC_RDMA_EXPECT part "without a device" none verbs_absent
without_library
two_machines
