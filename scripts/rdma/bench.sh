#!/usr/bin/env bash
# usage: scripts/rdma/bench.sh KVC_PERF
# READs by the verbs mover beside `ib_read_bw` in the same guest, in rounds that alternate so that a noisy machine hits
# both: 64 KiB and 1 MiB runs, 16 on the way. Prints every round and the ratio of the medians. The figures themselves say
# nothing about a NIC (software, emulated); the ratio says what the mover costs. ROUNDS (5).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/rounds.sh" <<'GUEST'
#!/bin/busybox sh
one() {   # SIZE BYTES COUNT
  ib_read_bw -d rxe0 -x 1 -F -s "$2" -t 16 -o 16 -n "$3" > /tmp/server 2>&1 & sleep 1
  ib_read_bw -d rxe0 -x 1 -F -s "$2" -t 16 -o 16 -n "$3" 127.0.0.1 2>&1 | awk -v size="$1" '$1 == '"$2"' {print "ib_read_bw", size, $4}'
  wait
  kvc-perf run --spawn 1 --mover verbs --movers verbs --sizes "$1" --access scattered --depth 2 --seconds 2 --rounds 1 --json 2>/tmp/err |
    awk -v size="$1" '/"gb_s"/ {sub(",", "", $2); print "kvc", size, $2 * 1000 / 1.048576}'
}
for round in $ROUNDS; do one 64k 65536 1600; one 1m 1048576 100; done
GUEST
sed -i "2i ROUNDS='$(seq -s ' ' "${ROUNDS:-5}")'" "$work/rounds.sh"
cp "$1" "$work/kvc-perf"
strip --strip-debug "$work/kvc-perf"
MEM=1024 LIMIT=${LIMIT:-900} "$here/guest.sh" "$work/rounds.sh" "$work/kvc-perf" | tee "$work/out"
# By size: the medians in MiB/s, and their ratio.
awk '$1 == "kvc" || $1 == "ib_read_bw" {all[$1, $2] = all[$1, $2] " " $3}
  function median(list,   n, i, j, t, v) {
    n = split(list, v, " ")
    for (i = 1; i < n; i++) for (j = i + 1; j <= n; j++) if (v[j] + 0 < v[i] + 0) {t = v[i]; v[i] = v[j]; v[j] = t}
    return n % 2 ? v[(n + 1) / 2] : (v[n / 2] + v[n / 2 + 1]) / 2
  }
  END {
    for (i = split("64k 1m", sizes, " "); i > 0; i--) {
      size = sizes[i]; kvc = median(all["kvc", size]); ib = median(all["ib_read_bw", size])
      if (ib > 0) printf "%s: kvc %.1f, ib_read_bw %.1f MiB/s, ratio %.2f\n", size, kvc, ib, kvc / ib
    }
  }' "$work/out"
