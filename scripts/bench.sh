#!/usr/bin/env bash
# usage: scripts/bench.sh [NAME...]
# Measures what docs/bench.md shows and prints it: proto, rdma, admission, handover, router (Rust alone), turns, engine-admission,
# reseed (real engines on CPU). Without names all of them, about 25 minutes; run it on a machine that does nothing else.
# iperf3 is installed for the comparison if it is missing.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root"
all="proto rdma admission handover router turns engine-admission reseed"

iperf3_there() {
  command -v iperf3 >/dev/null && return
  local sudo=
  [ "$(id -u)" = 0 ] || sudo=sudo
  $sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends iperf3 >/dev/null
}

bench_proto() { cargo bench --quiet -p kvc-proto; }
bench_rdma() { iperf3_there && cargo run --release --quiet -p kvc-rdma --features perf --bin kvc-perf -- bench; }
bench_admission() { cargo run --release --quiet -p kvc-engine-ext --example admission_bench; }
bench_handover() { cargo run --release --quiet -p kvc-engine-ext --example handover_bench; }
bench_router() { cargo run --release --quiet -p kvc-router --example router_bench; }
bench_turns() { scripts/setup-engine.sh --release && "$py" tests/engine/bench_turn.py turns; }
bench_engine-admission() { scripts/setup-engine.sh --release && "$py" tests/engine/bench_turn.py admission; }
bench_reseed() {
  scripts/setup-engine.sh --release && cargo build --release --quiet -p kvc-router && "$py" tests/engine/bench_reseed.py
}

say "$(nproc) cores, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(awk '/MemTotal/ {printf "%d GiB", $2 / 2^20}' /proc/meminfo)"
[ $# -gt 0 ] || set -- $all
for name in "$@"; do
  declare -F "bench_$name" >/dev/null || die "no bench $name: $all"
  step "bench $name" "bench_$name"
done
