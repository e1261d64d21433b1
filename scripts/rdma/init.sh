#!/bin/busybox sh
# Process 1 of the guest: mounts, loads modules, makes the topology named in /topology, runs /run.sh and hands its exit
# status to the host through the debug-exit port. GUEST is the guest's number where there are two.
/bin/busybox --install -s /bin 2>/dev/null
export PATH=/bin:/sbin HOME=/ LD_LIBRARY_PATH=/lib/x86_64-linux-gnu:/usr/lib/x86_64-linux-gnu
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
for at in /tmp /run /dev/shm; do mkdir -p $at; mount -t tmpfs tmp $at; done

say() { read -r up _ < /proc/uptime; echo "[guest $up] $*"; }
finish() {   # qemu exits with (value << 1) | 1
  say "exit=$1"
  printf "\\$(printf %03o $(($1 > 126 ? 126 : $1)))" | dd of=/dev/port bs=1 seek=244 count=1 2>/dev/null
  poweroff -f
}
while read -r module; do
  insmod "/mods/$module" || { say "insmod $module failed"; finish 125; }
done < /mods/order

ulimit -l unlimited   # memory registration locks pages
ulimit -n 65536
ip link set lo up
GUEST=$(sed -n 's/.*guest=\([0-9]*\).*/\1/p' /proc/cmdline)
export GUEST
read -r topology < /topology
topology "$topology" || { say "topology $topology failed"; finish 125; }
say "up, kernel $(uname -r), devices: $(ls /sys/class/infiniband 2>/dev/null | tr '\n' ' ')"
/run.sh > /dev/ttyS1 2>&1 < /dev/null
finish $?
