#!/usr/bin/env bash
# usage: scripts/rdma/test.sh
# The tests that need RDMA devices, over the kernel's software RoCE in guests that prepare.sh makes: the verbs mover on one
# device and on two, with faults, between two machines, and on machines that lack the library, the kernel's part or
# the device. Part of `make test`; `make rdmatest` calls it alone. A guest without a device fails. Exit status 3: this
# machine cannot have the guest, nothing was tested.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root"

# TITLE|TOPOLOGY|[NAME=VALUE...] TEST BINARY [ARGUMENTS...]: what one guest runs, in this order. Values in /bin are binaries
# too. Two guests share the machine's processors, about half of the work each.
near='suite, one device|one|verbs
keys and queue pairs|one|kvc_rdma verbs::tests
allocations|one|verbs_allocations
kvc-perf|one|KVC_PERF=/bin/kvc-perf perf verbs_is devices_says
workers|one|verbs_workers
workers: seeds|one|transfer
workers: replicas|one|sync a_backup_follows an_announcement_across a_lost_session a_reseed_from_an_owner
workers: moves|one|migration an_idle_session a_session_moves a_slow_thread two_workers'
far='suite, two devices|pair|verbs
faults|rails|verbs_faults
without a device|none|KVC_RDMA_EXPECT=device verbs_absent
workers without a device|none|KVC_RDMA_EXPECT=device verbs_workers does_not_start_without
kvc-perf without a device|none|KVC_PERF=/bin/kvc-perf perf devices_says
without the kernel modules|no-kernel|KVC_RDMA_EXPECT=kernel verbs_absent
workers without the kernel modules|no-kernel|KVC_RDMA_EXPECT=kernel verbs_workers does_not_start_without
without the library|no-library|KVC_RDMA_EXPECT=library verbs_absent
workers without the library|no-library|KVC_RDMA_EXPECT=library verbs_workers does_not_start_without
kvc-perf without the library|no-library|KVC_PERF=/bin/kvc-perf perf devices_says'

# What two guests on one wire run, both of them.
hosts='two machines|net|verbs_hosts'

work=$(mktemp -d)
trap finish EXIT
failed=0

main() {
  scripts/rdma/prepare.sh || exit
  can_build_verbs || { say "rdma: the verbs mover cannot be built here"; exit 3; }
  build
  # One binary for every machine: nothing of it is linked to the library.
  ! readelf -d "$work"/bin/* | grep 'NEEDED.*ibverbs' || die "rdma: FAILED, a binary needs libibverbs.so to start"
  set -m   # a process group for each, so that no guest outlives this script
  boot near "$near" guest.sh &
  { boot far "$far" guest.sh; boot hosts "$hosts" two-guests.sh; } &
  wait
  set +m
  tell near "$near"
  tell far "$far"
  tell hosts "$hosts"
  [ $failed = 0 ] || die "rdma: FAILED"
}

finish() {
  local group
  for group in $(jobs -p); do kill -- "-$group" 2>/dev/null || true; done
  rm -rf "$work"
}

# The workspace's test binaries that the tables name, without debug information, as $work/bin/NAME.
build() {
  local tests path name
  tests=$(binaries "$near"$'\n'"$far"$'\n'"$hosts" | grep -v '^kvc' | sed 's/^/--test=/')
  # shellcheck disable=SC2086
  cargo test --workspace --features "$(features)" --quiet --no-run --message-format json --lib $tests |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' > "$work/paths"
  mkdir "$work/bin"
  while read -r path; do
    name=$(basename "$path" | sed -E 's/-[0-9a-f]{16}$//')
    strip --strip-debug -o "$work/bin/$name" "$path"
  done < "$work/paths"
}

# The names of a table's binaries, each once.
binaries() {
  sed 's/.*|//' <<<"$1" | awk '{
    for (at = 1; at <= NF && $at ~ /=/; at++) if (sub(/.*=\/bin\//, "", $at)) print $at
    print $at}' | sort -u
}

# boot NAME TABLE SCRIPT: runs the table in the guest or guests of the script; output and status into $work/NAME.*.
boot() {
  local rc=0 files
  mkdir "$work/$1"
  echo "$2" > "$work/$1/parts"
  mapfile -t files < <(binaries "$2" | sed "s,^,$work/bin/,")
  TOPOLOGY=none MEM=1024 LIMIT=${LIMIT:-900} "$here/$3" "$here/parts.sh" "$work/$1/parts" "${files[@]}" > "$work/$1/log" 2>&1 || rc=$?
  echo $rc > "$work/$1/status"
}

# tell NAME TABLE: what came out, part by part.
tell() {
  local title log=$work/$1/log
  while IFS='|' read -r title _; do report "$title" "$log"; done <<<"$2"
  [ "$(cat "$work/$1/status")" != 0 ] || return 0
  failed=1
  grep -E '^([12]: )?(\| |guest)' "$log" | tail -30
  say "rdma: the guest FAILED (exit status $(cat "$work/$1/status"))"
}

# One line for a part, all that it printed if it failed. A part that ran no test has shown nothing: failed as well.
report() {
  local passed=0 worst=1 seconds=0
  # shellcheck disable=SC2034
  read -r passed worst seconds < <(awk -v title="$1" -v part="$work/part" '
    BEGIN {printf "" > part}
    {line = $0; sub(/^[12]: /, "", line)}
    line == "=== begin " title {on = 1}
    on {print > part}
    on && match(line, /test result: ok\. [0-9]+/) {passed += substr(line, RSTART + 17, RLENGTH - 17)}
    index(line, "=== end ") == 1 && on {on = 0; split(line, end, " "); ends++; if (end[3] > worst) worst = end[3]; seconds = end[5] - end[4]}
    END {printf "%d %d %.0f\n", passed, ends ? worst : 125, seconds}' "$2")
  if [ "$worst" = 0 ] && [ "$passed" -gt 0 ]; then
    say "rdma: $1: $passed passed in $seconds s"
  else
    cat "$work/part"
    say "rdma: $1: FAILED (exit status $worst, $passed passed)"
    failed=1
  fi
}

main
