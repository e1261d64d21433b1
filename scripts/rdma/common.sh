# Sourced by the scripts here: where the guest's files are.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
vm=${KVC_RDMA_VM:-$(cd "$here/../.." && pwd)/.env/rdma-vm}   # ignored by git; prepare.sh fills it
qemu_root=$vm/qemu

# Where the emulator is: the machine's own, or the one that prepare.sh unpacked. Empty if there is none.
find_qemu() {
  command -v qemu-system-x86_64 || { [ ! -x "$qemu_root/usr/bin/qemu-system-x86_64" ] || echo "$qemu_root/usr/bin/qemu-system-x86_64"; }
}

# The shared libraries of programs, one path a line.
libraries() {
  local program
  for program in "$@"; do ldd "$program" 2>/dev/null | grep -oE '/[^ ]+\.so[^ ]*' || true; done | sort -u
}
