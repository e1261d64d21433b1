#!/usr/bin/env bash
# usage: scripts/rdma/guest.sh SCRIPT [FILE...]
# Runs SCRIPT in a fresh guest. Each FILE lands in /bin there, with the libraries it needs. TOPOLOGY names a file of
# topologies to begin with (one); the script changes it with `topology NAME`. IMAGE_ONLY=PATH stops before the boot and leaves the
# image there.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ -f "$vm/base.cpio.gz" ] || { echo "no base image: run scripts/rdma/prepare.sh" >&2; exit 125; }
script=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/root/bin"
install -m 755 "$script" "$work/root/run.sh"
install -m 755 "$here/topology.sh" "$work/root/bin/topology"
cp -r "$here/topologies" "$work/root/"
echo "${TOPOLOGY:-one}" > "$work/root/topology"
for file in "$@"; do cp -L "$file" "$work/root/bin/"; done
libraries "$@" | while read -r path; do install -D "$path" "$work/root$path"; done
# The kernel unpacks archives one after another: the base stays as it is. What follows is not compressed, since unpacking
# in the guest takes longer than reading more; the kernel then wants it at a multiple of four.
cp "$vm/base.cpio.gz" "$work/image"
truncate -s %4 "$work/image"
(cd "$work/root" && find . | cpio -o -H newc --quiet) >> "$work/image"
if [ -n "${IMAGE_ONLY:-}" ]; then
  mv "$work/image" "$IMAGE_ONLY"
  exit
fi
"$here/boot.sh" "$work/image"
