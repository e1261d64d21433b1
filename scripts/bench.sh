#!/usr/bin/env bash
# usage: scripts/bench.sh [NAME...]
# Measures what docs/bench.md shows and prints it: proto, tcp, shm, admission, handover, router (Rust alone), turns,
# engine-admission, reseed (real engines on CPU), rdma (in a guest). Without names all of them, about 30 minutes; run it on a
# machine that does nothing else. iperf3 is installed for the comparison if it is missing. LARGE_PAGES=1, as root: shm also
# with large pages, which are switched on for as long as it runs.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root"
all="proto tcp shm admission handover router turns engine-admission reseed rdma"

iperf3_there() {
  command -v iperf3 >/dev/null && return
  local sudo=
  [ "$(id -u)" = 0 ] || sudo=sudo
  $sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends iperf3 >/dev/null
}

bench_proto() { cargo bench --quiet -p kvc-proto; }
kvc_perf() { cargo run --release --quiet -p kvc-rdma --features perf --bin kvc-perf -- "$@"; }

large_pages() {   # SHMEM_ENABLED NR_HUGEPAGES
  echo "$1" > /sys/kernel/mm/transparent_hugepage/shmem_enabled
  echo "$2" > /proc/sys/vm/nr_hugepages
}

bench_tcp() { iperf3_there && kvc_perf bench --only tcp; }
bench_shm() {
  if [ -n "${LARGE_PAGES:-}" ]; then
    local enabled reserved
    enabled=$(sed 's/.*\[\(.*\)\].*/\1/' /sys/kernel/mm/transparent_hugepage/shmem_enabled)
    reserved=$(cat /proc/sys/vm/nr_hugepages)
    trap "large_pages $enabled $reserved" EXIT   # of the subshell that a step is
    large_pages advise $((reserved + 420))       # three pools of 256 MiB
  fi
  kvc_perf bench --only shm --seconds 0.5
}
bench_rdma() {
  local rc=0
  scripts/rdma/prepare.sh || rc=$?
  [ "$rc" != 3 ] || { say "rdma: SKIPPED, this machine cannot run the guest (see above)"; return 0; }
  [ "$rc" = 0 ] && scripts/rdma/bench.sh
}
bench_admission() { cargo run --release --quiet -p kvc-engine-ext --example admission_bench; }
bench_handover() { cargo run --release --quiet -p kvc-engine-ext --example handover_bench; }
bench_router() { cargo run --release --quiet -p kvc-router --example router_bench; }
bench_turns() { scripts/setup-engine.sh --release && "$py" tests/engine/bench_turn.py turns; }
bench_engine-admission() { scripts/setup-engine.sh --release && "$py" tests/engine/bench_turn.py admission; }
bench_reseed() {
  scripts/setup-engine.sh --release && cargo build --release --quiet -p kvc-router && "$py" tests/engine/bench_reseed.py
}

say "$(nproc --all) cores, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(awk '/MemTotal/ {printf "%d GiB", $2 / 2^20}' /proc/meminfo)"
[ $# -gt 0 ] || set -- $all
for name in "$@"; do
  declare -F "bench_$name" >/dev/null || die "no bench $name: $all"
  step "bench $name" "bench_$name"
done
