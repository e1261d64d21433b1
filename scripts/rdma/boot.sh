#!/usr/bin/env bash
# usage: scripts/rdma/boot.sh IMAGE [QEMU ARGUMENTS...]
# Boots one guest, prints its console (each line with "| ") and the output of its script. Exit status: the script's own
# (0 to 126); 124 when it ran into LIMIT seconds (180); 125 when the guest died without a status. MEM in MiB, CPUS.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
qemu=$(find_qemu)
[ -n "$qemu" ] || { echo "no emulator: run scripts/rdma/prepare.sh" >&2; exit 125; }
firmware=()
if [[ $qemu == "$qemu_root"/* ]]; then
  export LD_LIBRARY_PATH=$qemu_root/usr/lib/x86_64-linux-gnu
  firmware=(-L "$qemu_root/usr/share/qemu" -L "$qemu_root/usr/share/seabios" -L /usr/share/seabios)
fi
image=$1
shift
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
status=0
# TCG always: a nested /dev/kvm may be there and still fail. The kernel's check of its timer panics where a busy host lets it wait.
timeout --foreground -k 5 "${LIMIT:-180}" nice -n "${NICE:-10}" "$qemu" \
  -accel tcg,thread=multi,tb-size=256 -cpu Nehalem -smp "${CPUS:-2}" -m "${MEM:-768}" \
  -machine pc -nodefaults -no-user-config -display none -no-reboot "${firmware[@]}" \
  -kernel "$vm/vmlinuz" -initrd "$image" \
  -append "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check rdinit=/init random.trust_cpu=on ${APPEND:-}" \
  -serial "file:$logs/console" -serial "file:$logs/output" \
  -device isa-debug-exit,iobase=0xf4,iosize=0x04 "$@" || status=$?
tr -d "\r" < "$logs/console" | sed "s/^/| /"
tr -d "\r" < "$logs/output"
[ "$status" != 124 ] && [ "$status" != 137 ] || { echo "guest: no end after ${LIMIT:-180} s" >&2; exit 124; }
grep -q '^\[guest .*\] exit=' "$logs/console" || { echo "guest: died without a status" >&2; exit 125; }
exit $((status >> 1))
