#!/bin/busybox sh
# usage in the guest: topology NAME
# Takes away every device and link that is there and makes those of /topologies/NAME.sh, between programs of one boot.
IP=/opt/bin/ip   # iproute2's: busybox has an ip of its own
set -e
for device in $(ls /sys/class/infiniband 2>/dev/null); do rdma link delete "$device"; done
for end in d0 d1 v0; do [ ! -e /sys/class/net/$end ] || $IP link del $end; done
if $IP rule | grep -q ^200:; then   # pair.sh
  $IP rule add pref 0 lookup local
  for pref in 10 11 200; do $IP rule del pref $pref; done
fi
. "/topologies/$1.sh"
