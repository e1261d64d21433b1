//! Why RDMA cannot be used or failed, each with its remedy on the same line. [`crate::MoverError::Verbs`] carries it.

use super::nic::Link;

/// Why GPU memory is not registered as a dma-buf.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum NoDmabuf {
    /// There is no descriptor: the GPU's driver exports none.
    #[error("the GPU's driver exported none")]
    NotExported,
    /// libibverbs has no such call.
    #[error("rdma-core is older than 34")]
    OldLibrary,
    /// The device or its driver refused it.
    #[error("errno {errno}")]
    Refused {
        /// The system's number.
        errno: i32,
    },
}

/// What the verbs mover answers beyond what every mover does.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerbsError {
    /// The library is not on this machine.
    #[error("libibverbs.so.1 cannot be loaded: install rdma-core (Debian: libibverbs1 and ibverbs-providers)")]
    NoLibrary,
    /// The library lacks a call.
    #[error("libibverbs.so.1 has no {symbol}: rdma-core is too old, 17 or newer is needed")]
    OldLibrary {
        /// The first that is missing.
        symbol: &'static str,
    },
    /// The kernel offers no user-space verbs.
    #[error("the kernel offers no RDMA (errno {errno}): load ib_uverbs and the driver of the NIC")]
    NoKernel {
        /// Of the attempt to list devices.
        errno: i32,
    },
    /// There is nothing to use.
    #[error("no RDMA device is there: check `rdma link`, or load the driver of the NIC")]
    NoDevice,
    /// A device was named that is not there.
    #[error("no RDMA device {device}: there are {found}")]
    UnknownDevice {
        /// As named.
        device: String,
        /// What is there, by name.
        found: String,
    },
    /// The port carries nothing.
    #[error("port {port} of {device} is {state}: bring its link up (`ip link set … up`, or the subnet manager for IB)")]
    PortDown {
        /// Which.
        device: String,
        /// Which.
        port: u8,
        /// As the kernel calls it.
        state: String,
    },
    /// Nothing that peers could address.
    #[error("port {port} of {device} has no RoCEv2 GID with an IPv4 address: give its network interface one")]
    NoGid {
        /// Which.
        device: String,
        /// Which.
        port: u8,
    },
    /// InfiniBand and Ethernet cannot be one path.
    #[error("{first} is {first_link} and {second} is {second_link}: name devices of one link type")]
    MixedLinks {
        /// The first device.
        first: String,
        /// Its link.
        first_link: Link,
        /// The first that differs.
        second: String,
        /// Its link.
        second_link: Link,
    },
    /// The process may not lock as much memory as it registers.
    #[error("cannot lock {bytes} bytes, the limit is {limit}: raise it (`ulimit -l unlimited`, LimitMEMLOCK=infinity)")]
    LockedMemory {
        /// Of the region.
        bytes: u64,
        /// RLIMIT_MEMLOCK.
        limit: u64,
    },
    /// The device does not take the memory.
    #[error("{device} cannot register {bytes} bytes: errno {errno}; serve this region over tcp or by staging")]
    Registration {
        /// Which.
        device: String,
        /// Of the region.
        bytes: u64,
        /// The system's number.
        errno: i32,
    },
    /// The device or its driver takes no dma-buf.
    #[error("{device} takes no dma-buf ({why}): load nvidia-peermem, or stage through host memory")]
    NoDmabuf {
        /// Which.
        device: String,
        /// Why.
        why: NoDmabuf,
    },
    /// The device reaches GPU memory in neither way.
    #[error(
        "{device} reaches no GPU memory (dma-buf: {dmabuf}; peer memory: errno {peer}): load nvidia-peermem, or stage \
         these {bytes} bytes through host memory"
    )]
    Stage {
        /// Which.
        device: String,
        /// Of the region.
        bytes: u64,
        /// Why it was not registered as a dma-buf.
        dmabuf: NoDmabuf,
        /// The system's number for registering the device's address.
        peer: i32,
    },
    /// A call to a device failed.
    #[error("{call} on {device}: errno {errno}; check `dmesg` and `ibv_devinfo -d {device}`")]
    Call {
        /// Which.
        call: &'static str,
        /// Which.
        device: String,
        /// The system's number.
        errno: i32,
    },
    /// The peer has no device that ours can reach.
    #[error("{peer} has no usable device of our link type ({link}): name matching devices with --ib-device")]
    NoPath {
        /// Who.
        peer: String,
        /// Ours.
        link: Link,
    },
    /// Every device of this mover is down.
    #[error("{device} is down: bring its link up; reads go over another mover until then")]
    DeviceDown {
        /// The last one.
        device: String,
    },
    /// A device that serves nothing more until the mover is started again.
    #[error("{device} is gone, or its completion queue overran: restart the worker once `rdma link` shows it again")]
    DeviceLost {
        /// Which.
        device: String,
    },
    /// The peer sent a key that nobody asked for, or one too short for what it exposes.
    #[error("{peer} offered a key for region {region} that covers nothing asked for: refuse it, check its version")]
    StrayKey {
        /// Who.
        peer: String,
        /// The peer's number for it.
        region: u32,
    },
    /// A work request failed at the peer or at the device.
    #[error("a read from {peer} over {device} ended with {status} (vendor {vendor:#x}): the queue pair is rebuilt")]
    Work {
        /// Who.
        peer: String,
        /// Our device.
        device: String,
        /// The completion's status by name.
        status: &'static str,
        /// The vendor's number.
        vendor: u32,
    },
}
