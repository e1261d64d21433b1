#!/usr/bin/env bash
# usage: scripts/rdma/two-guests.sh SCRIPT [FILE...]
# Boots two guests on one wire and runs SCRIPT in both. It sees GUEST=1 or 2; with the topology net (unless TOPOLOGY names
# another to begin with) addresses 10.88.0.1 and .2 and the device rxe0.
# Exit status 0 only if both scripts gave 0. PORT is the host's port for the wire.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
TOPOLOGY=${TOPOLOGY:-net} IMAGE_ONLY=$work/image "$here/guest.sh" "$@"
guest() {   # NUMBER listen|connect
  CPUS=1 APPEND="guest=$1 net.ifnames=0" "$here/boot.sh" "$work/image" \
    -netdev "socket,id=wire,$2=127.0.0.1:${PORT:-14831}" \
    -device "virtio-net-pci,netdev=wire,mac=52:54:00:00:00:0$1,romfile=,host_mtu=4500" > "$work/log$1" 2>&1
}
guest 1 listen & first=$!
sleep 1
one=0 two=0
guest 2 connect || two=$?
wait $first || one=$?
sed 's/^/1: /' "$work/log1"
sed 's/^/2: /' "$work/log2"
echo "two guests: $one and $two"
[ "$one" = 0 ] && [ "$two" = 0 ]
