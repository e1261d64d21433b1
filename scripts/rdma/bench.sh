#!/usr/bin/env bash
# usage: scripts/rdma/bench.sh [KVC_PERF]
# READs by the verbs mover beside `ib_read_bw` in one guest, in rounds that alternate so that a noisy machine hits both: 64 KiB
# and 1 MiB runs, one queue pair with 16 READs on the wire on either side. The figures say nothing about a NIC (software,
# emulated); their ratio says what the mover costs. ROUNDS (5), SECONDS_EACH (2). Builds the tool if none is given; about four minutes.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tool=${1:-}
if [ -z "$tool" ]; then
  cd "$here/../.."
  cargo build --release --quiet -p kvc-rdma --features perf,verbs --bin kvc-perf
  tool=${CARGO_TARGET_DIR:-target}/release/kvc-perf
fi
strip --strip-debug -o "$work/kvc-perf" "$tool"
cat > "$work/run.sh" <<GUEST
#!/bin/busybox sh
kvc-perf bench --only verbs --rounds ${ROUNDS:-5} --seconds ${SECONDS_EACH:-2} 2>/tmp/errors   # the console is a terminal
rc=\$?
cat /tmp/errors
exit \$rc
GUEST
MEM=1024 LIMIT=${LIMIT:-900} "$here/guest.sh" "$work/run.sh" "$work/kvc-perf"
