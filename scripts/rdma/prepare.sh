#!/usr/bin/env bash
# usage: scripts/rdma/prepare.sh
# Everything a Debian 12 machine needs to run the RDMA tests in a guest with the kernel's software RoCE: packages, the
# distribution's kernel and the base image, in .env/rdma-vm (KVC_RDMA_VM says otherwise). Finished steps are skipped.
#
# Packages are installed with apt (as root, or through sudo). The emulator is only unpacked into the work folder, not
# installed: its package would push out other versions of qemu's tools. Exit status 3: this machine cannot have it.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages="busybox-static kmod cpio iproute2 libibverbs-dev ibverbs-providers ibverbs-utils perftest cmake libclang-dev pkg-config"
modules="crc32_generic virtio_pci virtio_net rdma_rxe ib_uverbs rdma_ucm veth dummy"
programs="rdma ibv_devinfo ibv_devices ibv_rc_pingpong ib_read_bw ib_write_bw"
plugins=/usr/lib/x86_64-linux-gnu/libibverbs   # opened with dlopen by libibverbs itself

say() { printf 'rdma guest: %s\n' "$*"; }
cannot() { say "$*"; exit 3; }

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

install_packages() {
  local missing=() package
  for package in $packages; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} = 0 ] && return
  say "installing ${missing[*]}"
  local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq)
  as_root "${apt[@]}" update || true
  as_root "${apt[@]}" install -y --no-install-recommends "${missing[@]}" >/dev/null || cannot "apt-get cannot install ${missing[*]}"
}

# The packages that installing qemu-system-x86 would bring, unpacked beside each other.
unpack_qemu() {
  [ -z "$(find_qemu)" ] || return 0
  local wanted
  wanted=$(apt-get install -s --no-install-recommends qemu-system-x86 seabios 2>/dev/null | awk '/^Inst/ {print $2}') || true
  [ -n "$wanted" ] || cannot "apt-get knows no qemu-system-x86"
  say "fetching the emulator ($(wc -w <<<"$wanted") packages, unpacked into the work folder)"
  rm -rf "$vm/debs" "$qemu_root.part"
  mkdir -p "$vm/debs" "$qemu_root.part"
  # shellcheck disable=SC2086
  (cd "$vm/debs" && apt-get download -qq $wanted) || cannot "apt-get cannot download the emulator"
  local deb
  for deb in "$vm"/debs/*.deb; do dpkg-deb -x "$deb" "$qemu_root.part"; done
  rm -rf "$vm/debs" "$qemu_root.part/usr/share/doc" "$qemu_root.part/usr/share/man"
  mv "$qemu_root.part" "$qemu_root"
}

# About 12 MB of the kernel package's 400.
unpack_kernel() {
  local package version tree
  package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image/ {print $2; exit}') || true
  [ -n "$package" ] || cannot "apt-get knows no linux-image-amd64"
  version=${package#linux-image-}
  if ! [ -e "$vm/kernel/lib/modules/$version/modules.dep" ]; then
    say "fetching $package"
    rm -rf "$vm/kernel" "$vm/debs"
    mkdir -p "$vm/kernel" "$vm/debs"
    (cd "$vm/debs" && apt-get download -qq "$package") || cannot "apt-get cannot download $package"
    tree=./lib/modules/$version/kernel
    dpkg-deb --fsys-tarfile "$vm"/debs/*.deb | tar -x -C "$vm/kernel" --wildcards \
      './boot/vmlinuz-*' "./lib/modules/$version/modules.*" "$tree/drivers/infiniband/core/*" \
      "$tree/drivers/infiniband/sw/*" "$tree/net/ipv4/udp_tunnel.ko" "$tree/net/ipv6/ip6_udp_tunnel.ko" \
      "$tree/crypto/crc32*" "$tree/drivers/net/dummy.ko" "$tree/drivers/net/veth.ko" \
      "$tree/drivers/net/virtio_net.ko" "$tree/drivers/net/net_failover.ko" "$tree/net/core/failover.ko" \
      "$tree/drivers/virtio/*" "$tree/fs/configfs/*"
    rm -rf "$vm/debs"
    depmod -b "$vm/kernel" "$version" 2>/dev/null
  fi
  cp "$vm/kernel/boot/vmlinuz-$version" "$vm/vmlinuz"
  echo "$version" > "$vm/version"
}

# The base image: busybox, iproute2, the verbs libraries and tools, the modules in load order, init.sh as process 1.
build_image() {
  local stamp image version program path module
  version=$(cat "$vm/version")
  stamp=$(cat "$here/init.sh" "$here/prepare.sh" "$vm/version" | sha256sum)
  [ -f "$vm/base.cpio.gz" ] && [ "$(cat "$vm/base.stamp" 2>/dev/null)" = "$stamp" ] && return
  say "building the base image"
  image=$(mktemp -d)
  mkdir -p "$image"/{bin,sbin,opt/bin,lib64,etc/libibverbs.d,proc,sys,dev,tmp,run,mods} "$image$plugins"
  for module in $modules; do
    modprobe -d "$vm/kernel" -S "$version" --show-depends "$module" 2>/dev/null | sed -n 's/^insmod \(.*\.ko\).*/\1/p'
  done | awk '!seen[$0]++' | while read -r path; do
    cp "$path" "$image/mods/"
    basename "$path" >> "$image/mods/order"
  done
  cp "$(command -v busybox)" "$image/bin/busybox"
  cp -L "$(command -v ip)" "$image/opt/bin/ip"   # not in /bin: busybox prefers its own
  local copied=("$(command -v ip)")
  for program in $programs; do
    path=$(command -v "$program") || cannot "$program is missing"
    cp -L "$path" "$image/bin/"
    copied+=("$path")
  done
  for path in "$plugins"/librxe-rdmav*.so; do
    cp "$path" "$image$plugins/"
    copied+=("$path")
  done
  libraries "${copied[@]}" | while read -r path; do install -D "$path" "$image$path"; done
  cp /etc/libibverbs.d/rxe.driver "$image/etc/libibverbs.d/"
  echo 'root:x:0:0:root:/:/bin/sh' > "$image/etc/passwd"
  printf '127.0.0.1 localhost\n' > "$image/etc/hosts"
  echo 'hosts: files' > "$image/etc/nsswitch.conf"
  install -m 755 "$here/init.sh" "$image/init"
  (cd "$image" && find . | cpio -o -H newc --quiet) | gzip -1 > "$vm/base.cpio.gz.part"
  mv "$vm/base.cpio.gz.part" "$vm/base.cpio.gz"
  echo "$stamp" > "$vm/base.stamp"
  rm -rf "$image"
}

[ "$(uname -m)" = x86_64 ] || cannot "the guest is x86-64, this machine is $(uname -m)"
command -v apt-get >/dev/null || cannot "no apt-get: the guest is made from Debian packages"
mkdir -p "$vm"
# /sbin holds ip, modprobe and depmod, which a plain user's PATH may lack.
PATH=$PATH:/usr/sbin:/sbin
install_packages
unpack_qemu
unpack_kernel
build_image
say "ready in $vm"
