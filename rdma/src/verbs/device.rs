//! An opened device and what is made on it: protection domain, memory registrations, completion queue. [`super::rail`]
//! opens them; owners hold each other, so that nothing is closed under what stands on it.

use std::{
    ffi::CStr,
    io, mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    ptr::{self, NonNull},
    sync::Arc,
};

use super::{
    error::{NoDmabuf, VerbsError},
    library::{Library, ffi},
};
use crate::region::Dmabuf;

/// Completions taken off a queue at once.
pub(super) const POLLED: usize = 32;

/// Peers read and never write (XFER-1).
const ACCESS: u32 = ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0 | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;

/// An open device.
#[derive(Debug)]
pub(super) struct Device {
    raw: NonNull<ffi::ibv_context>,
    library: &'static Library,
    pub(super) name: String,
    pub(super) limits: Limits,
}

/// What it can do, cut to what is used here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) entries: u32,
    pub(super) requests: u32,
    pub(super) pieces: u32,
    /// READs that one queue pair may have begun.
    pub(super) begun: u8,
    /// READs that one queue pair answers at once.
    pub(super) answered: u8,
}

/// What a device says without being asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    PortUp(u8),
    PortDown(u8),
    /// The device is gone.
    Gone,
    /// A completion queue overran: nothing more is told on it.
    Overrun,
    Other,
}

// SAFETY: obligation 1 — libibverbs may be called from any thread; the context is closed in `drop` alone.
unsafe impl Send for Device {}
// SAFETY: obligation 1 — as above.
unsafe impl Sync for Device {}

impl Device {
    /// The names of the devices that the library can open.
    pub(super) fn names() -> Result<Vec<String>, VerbsError> {
        with_list(|library, list| {
            // SAFETY: obligation 1 — nothing is registered; the list lives until this closure ends.
            list.iter().map(|device| unsafe { name(library, *device) }).collect()
        })
    }

    pub(super) fn open(wanted: &str) -> Result<Arc<Self>, VerbsError> {
        let opened = with_list(|library, list| {
            // SAFETY: obligation 1 — nothing is registered; the list lives until this closure ends.
            let device = list
                .iter()
                .find(|device| unsafe { name(library, **device) } == wanted)?;
            // SAFETY: obligation 1 — as above; the context outlives the list, as the library promises.
            Some((library, unsafe { (library.ibv_open_device)(*device) }))
        })?;
        let (library, raw) = opened.ok_or(VerbsError::UnknownDevice {
            device: wanted.into(),
            found: Device::names()?.join(", "),
        })?;
        let raw = NonNull::new(raw).ok_or_else(|| failed("ibv_open_device", wanted))?;
        let mut device = Device {
            raw,
            library,
            name: wanted.into(),
            limits: Limits {
                entries: 0,
                requests: 0,
                pieces: 0,
                begun: 0,
                answered: 0,
            },
        };
        device.limits = device.query()?;
        // SAFETY: obligation 1 — nothing is registered; the context is open, its descriptor with it.
        nonblocking(unsafe { raw.as_ref() }.async_fd).map_err(|e| device.call("fcntl", &e))?;
        Ok(Arc::new(device))
    }

    /// The largest packets of a port, as the library counts them (1 is 256 bytes, 5 is 4096).
    pub(super) fn mtu(&self, port: u8) -> Result<u32, VerbsError> {
        // SAFETY: obligation 1 — nothing is registered; a struct of numbers may be zero.
        let mut attr: ffi::ibv_port_attr = unsafe { mem::zeroed() };
        // SAFETY: obligation 1 — as above; the call writes the first fields of the struct it is given.
        let code = unsafe { (self.library.ibv_query_port)(self.raw.as_ptr(), port, &mut attr) };
        self.check("ibv_query_port", code)?;
        Ok(attr.active_mtu)
    }

    /// Readable when [`Device::event`] has something to tell.
    pub(super) fn events(&self) -> RawFd {
        // SAFETY: obligation 1 — nothing is registered; the context is open.
        unsafe { self.raw.as_ref() }.async_fd
    }

    /// What the device says next, if anything.
    pub(super) fn event(&self) -> Option<Event> {
        // SAFETY: obligation 1 — nothing is registered; a struct of numbers and pointers may be zero.
        let mut event: ffi::ibv_async_event = unsafe { mem::zeroed() };
        // SAFETY: obligation 1 — the context is open and its descriptor does not block.
        if unsafe { (self.library.ibv_get_async_event)(self.raw.as_ptr(), &mut event) } != 0 {
            return None;
        }
        // SAFETY: obligation 1 — a port's event carries its number; of others the number is not looked at.
        let port = unsafe { event.element.port_num } as u8;
        let told = match event.event_type {
            ffi::IBV_EVENT_PORT_ACTIVE => Event::PortUp(port),
            ffi::IBV_EVENT_PORT_ERR => Event::PortDown(port),
            ffi::IBV_EVENT_DEVICE_FATAL => Event::Gone,
            ffi::IBV_EVENT_CQ_ERR => Event::Overrun,
            _ => Event::Other,
        };
        // SAFETY: obligation 1 — taken just now, acknowledged once: destroying what it names waits for that.
        unsafe { (self.library.ibv_ack_async_event)(&mut event) };
        Some(told)
    }

    pub(super) fn library(&self) -> &'static Library {
        self.library
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_context {
        self.raw.as_ptr()
    }

    /// The answer of a call that returns a number.
    pub(super) fn check(&self, call: &'static str, code: i32) -> Result<(), VerbsError> {
        match code {
            0 => Ok(()),
            code => Err(VerbsError::Call {
                call,
                device: self.name.clone(),
                errno: code.abs(),
            }),
        }
    }

    /// The answer of a call that returns a pointer and leaves its number aside.
    pub(super) fn made<T>(&self, call: &'static str, raw: *mut T) -> Result<NonNull<T>, VerbsError> {
        NonNull::new(raw).ok_or_else(|| failed(call, &self.name))
    }

    fn call(&self, call: &'static str, error: &io::Error) -> VerbsError {
        VerbsError::Call {
            call,
            device: self.name.clone(),
            errno: crate::error::errno(error),
        }
    }

    fn query(&self) -> Result<Limits, VerbsError> {
        // SAFETY: obligation 1 — nothing is registered; a struct of numbers may be zero.
        let mut attr: ffi::ibv_device_attr = unsafe { mem::zeroed() };
        // SAFETY: obligation 1 — as above, the context is open.
        let code = unsafe { (self.library.ibv_query_device)(self.raw.as_ptr(), &mut attr) };
        self.check("ibv_query_device", code)?;
        let number = |got: i32| u32::try_from(got).unwrap_or(0);
        let byte = |got: i32| u8::try_from(got).unwrap_or(if got < 0 { 0 } else { u8::MAX });
        Ok(Limits {
            entries: number(attr.max_cqe),
            requests: number(attr.max_qp_wr),
            pieces: number(attr.max_sge.min(attr.max_sge_rd.max(1))),
            begun: byte(attr.max_qp_init_rd_atom),
            answered: byte(attr.max_qp_rd_atom),
        })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: obligation 1 — whatever was made on the device holds an `Arc` of it, so nothing is left.
        unsafe { (self.library.ibv_close_device)(self.raw.as_ptr()) };
    }
}

/// A protection domain: keys of it open memory to its queue pairs alone.
#[derive(Debug)]
pub(super) struct Domain {
    raw: NonNull<ffi::ibv_pd>,
    pub(super) device: Arc<Device>,
}

// SAFETY: obligation 1 — as of `Device`.
unsafe impl Send for Domain {}
// SAFETY: obligation 1 — as of `Device`.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) fn new(device: Arc<Device>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: obligation 1 — nothing is registered; the device is open.
        let raw = unsafe { (device.library.ibv_alloc_pd)(device.raw.as_ptr()) };
        let raw = device.made("ibv_alloc_pd", raw)?;
        Ok(Arc::new(Domain { raw, device }))
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: obligation 1 — registrations and queue pairs hold an `Arc` of their domain, so none is left.
        unsafe { (self.device.library.ibv_dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// Memory that a device may read for peers and write for this process.
#[derive(Debug)]
pub(super) struct Registration {
    raw: NonNull<ffi::ibv_mr>,
    domain: Arc<Domain>,
}

// SAFETY: obligation 1 — as of `Device`; it is an address, not a borrow.
unsafe impl Send for Registration {}
// SAFETY: obligation 1 — as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// # Safety
    /// Obligation 1: `[address, address + len)` stays mapped until the registration is dropped.
    pub(super) unsafe fn host(domain: &Arc<Domain>, address: NonNull<u8>, len: u64) -> Result<Self, VerbsError> {
        // SAFETY: obligation 1 — the caller's promise.
        let registered = unsafe { Self::address(domain, address, len) };
        registered.map_err(|errno| refused(&domain.device, len, errno))
    }

    /// GPU memory (F20: exactly this range): as a dma-buf, else by its address, which works where a module of the GPU's
    /// driver answers for it (peer memory). With the second way comes why it was not the first.
    ///
    /// # Safety
    /// Obligation 1: the memory stays mapped on its device until the registration is dropped.
    pub(super) unsafe fn gpu(
        domain: &Arc<Domain>,
        address: NonNull<u8>,
        len: u64,
        dmabuf: Option<&Dmabuf>,
    ) -> Result<(Self, Option<NoDmabuf>), VerbsError> {
        let iova = address.as_ptr() as u64;
        let refused = match dmabuf {
            None => NoDmabuf::NotExported,
            Some(Dmabuf { file, offset }) => match Self::dmabuf(domain, file.as_fd(), *offset, len, iova) {
                Ok(registered) => return Ok((registered, None)),
                Err(why) => why,
            },
        };
        // SAFETY: obligation 1 — the caller's promise: on its device, which is who answers for the address.
        match unsafe { Self::address(domain, address, len) } {
            Ok(registered) => Ok((registered, Some(refused))),
            Err(peer) => Err(VerbsError::Stage {
                device: domain.device.name.clone(),
                bytes: len,
                dmabuf: refused,
                peer,
            }),
        }
    }

    /// `len` bytes from `offset` of what a GPU's driver exports; peers name them from `iova`.
    pub(super) fn dmabuf(
        domain: &Arc<Domain>,
        file: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        iova: u64,
    ) -> Result<Self, NoDmabuf> {
        let register = domain.device.library.ibv_reg_dmabuf_mr.ok_or(NoDmabuf::OldLibrary)?;
        let size = usize::try_from(len).unwrap_or(usize::MAX);
        // SAFETY: obligation 1 — the kernel holds the buffer behind `file` for as long as it is registered.
        let raw = unsafe { register(domain.raw(), offset, size, iova, file.as_raw_fd(), ACCESS as i32) };
        Self::made(domain, raw).map_err(|errno| NoDmabuf::Refused { errno })
    }

    /// # Safety
    /// Obligation 1: as of [`Registration::host`] and [`Registration::gpu`].
    unsafe fn address(domain: &Arc<Domain>, address: NonNull<u8>, len: u64) -> Result<Self, i32> {
        let size = usize::try_from(len).unwrap_or(usize::MAX);
        // SAFETY: obligation 1 — the caller's promise; peers may read and not write (XFER-1).
        let raw =
            unsafe { (domain.device.library.ibv_reg_mr)(domain.raw(), address.as_ptr().cast(), size, ACCESS as i32) };
        Self::made(domain, raw)
    }

    fn made(domain: &Arc<Domain>, raw: *mut ffi::ibv_mr) -> Result<Self, i32> {
        match NonNull::new(raw) {
            Some(raw) => Ok(Registration {
                raw,
                domain: domain.clone(),
            }),
            None => Err(crate::error::errno(&io::Error::last_os_error())),
        }
    }

    pub(super) fn local_key(&self) -> u32 {
        // SAFETY: obligation 1 — the registration is alive.
        unsafe { self.raw.as_ref() }.lkey
    }

    pub(super) fn remote_key(&self) -> u32 {
        // SAFETY: obligation 1 — the registration is alive.
        unsafe { self.raw.as_ref() }.rkey
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: obligation 1 — work that names it borrows it (`work::Batch`), so none is left.
        let code = unsafe { (self.domain.device.library.ibv_dereg_mr)(self.raw.as_ptr()) };
        if code != 0 {
            tracing::error!(
                device = self.domain.device.name,
                errno = code,
                "memory stays registered"
            );
        }
    }
}

/// Says what the limit is when it is the limit.
fn refused(device: &Device, bytes: u64, errno: i32) -> VerbsError {
    let mut limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: obligation 1 — nothing is registered; the call fills the struct it is given.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    if errno == libc::ENOMEM && limit.rlim_cur < bytes.max(1 << 20) {
        return VerbsError::LockedMemory {
            bytes,
            limit: limit.rlim_cur,
        };
    }
    VerbsError::Registration {
        device: device.name.clone(),
        bytes,
        errno,
    }
}

/// Where finished work requests are told.
#[derive(Debug)]
pub(super) struct Completions {
    raw: NonNull<ffi::ibv_cq>,
    channel: NonNull<ffi::ibv_comp_channel>,
    device: Arc<Device>,
    /// Entries it holds; one more and it is dead.
    pub(super) size: u32,
}

/// One of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Completion {
    pub(super) id: u64,
    /// `None`: the bytes are there. Else the status and the vendor's number.
    pub(super) error: Option<(u32, u32)>,
}

// SAFETY: obligation 1 — as of `Device`; polling locks inside the provider.
unsafe impl Send for Completions {}
// SAFETY: obligation 1 — as above.
unsafe impl Sync for Completions {}

impl Completions {
    pub(super) fn new(device: &Arc<Device>, size: u32) -> Result<Arc<Self>, VerbsError> {
        let size = size.min(device.limits.entries).max(1);
        let library = device.library;
        // SAFETY: obligation 1 — nothing is registered; the device is open.
        let channel = unsafe { (library.ibv_create_comp_channel)(device.raw()) };
        let channel = device.made("ibv_create_comp_channel", channel)?;
        // SAFETY: obligation 1 — as above, the channel is open.
        let raw = unsafe { (library.ibv_create_cq)(device.raw(), size as i32, ptr::null_mut(), channel.as_ptr(), 0) };
        let raw = device.made("ibv_create_cq", raw).inspect_err(|_| {
            // SAFETY: obligation 1 — made just now, used by nothing.
            unsafe { (library.ibv_destroy_comp_channel)(channel.as_ptr()) };
        })?;
        let completions = Completions {
            raw,
            channel,
            device: device.clone(),
            size,
        };
        nonblocking(completions.events()).map_err(|e| device.call("fcntl", &e))?;
        Ok(Arc::new(completions))
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_cq {
        self.raw.as_ptr()
    }

    /// Readable after a completion that [`Completions::arm`] asked for.
    pub(super) fn events(&self) -> RawFd {
        // SAFETY: obligation 1 — the channel is open.
        unsafe { self.channel.as_ref() }.fd
    }

    /// Takes up to [`POLLED`] completions.
    pub(super) fn poll(&self, into: &mut Vec<Completion>) -> Result<usize, VerbsError> {
        // SAFETY: obligation 1 — a completion is numbers, which may be zero.
        let mut polled: [ffi::ibv_wc; POLLED] = unsafe { mem::zeroed() };
        // SAFETY: obligation 1 — the queue is alive, its context with it; the call writes at most POLLED entries.
        let count = unsafe {
            let poll = (*(*self.raw()).context).ops.poll_cq;
            poll.map_or(-libc::ENOSYS, |poll| {
                poll(self.raw(), POLLED as i32, polled.as_mut_ptr())
            })
        };
        let count = usize::try_from(count).map_err(|_| VerbsError::Call {
            call: "ibv_poll_cq",
            device: self.device.name.clone(),
            errno: count.abs(),
        })?;
        into.extend(polled[..count].iter().map(|each| Completion {
            id: each.wr_id(),
            error: each.error(),
        }));
        Ok(count)
    }

    /// Asks for an event at the next completion. Those that came before are not announced: poll once more.
    pub(super) fn arm(&self) -> Result<(), VerbsError> {
        let (mut which, mut cookie, mut count) = (ptr::null_mut(), ptr::null_mut(), 0);
        // SAFETY: obligation 1 — the channel is open and does not block.
        while unsafe { (self.device.library.ibv_get_cq_event)(self.channel.as_ptr(), &mut which, &mut cookie) } == 0 {
            count += 1;
        }
        if count > 0 {
            // SAFETY: obligation 1 — all events of the channel are this queue's; its end waits for those not acknowledged.
            unsafe { (self.device.library.ibv_ack_cq_events)(self.raw(), count) };
        }
        // SAFETY: obligation 1 — the queue is alive, its context with it.
        let code = unsafe {
            let notify = (*(*self.raw()).context).ops.req_notify_cq;
            notify.map_or(libc::ENOSYS, |notify| notify(self.raw(), 0))
        };
        self.device.check("ibv_req_notify_cq", code)
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: obligation 1 — queue pairs hold an `Arc` of their queue, so none is left; the queue goes before its
        // channel.
        unsafe {
            (self.device.library.ibv_destroy_cq)(self.raw());
            (self.device.library.ibv_destroy_comp_channel)(self.channel.as_ptr());
        }
    }
}

/// Runs `work` on the list of devices.
fn with_list<T>(work: impl FnOnce(&'static Library, &[*mut ffi::ibv_device]) -> T) -> Result<T, VerbsError> {
    let library = Library::load()?;
    let mut count = 0;
    // SAFETY: obligation 1 — nothing is registered.
    let list = unsafe { (library.ibv_get_device_list)(&mut count) };
    let Some(list) = NonNull::new(list) else {
        return Err(VerbsError::NoKernel {
            errno: crate::error::errno(&io::Error::last_os_error()),
        });
    };
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: obligation 1 — nothing is registered; the list has `count` entries and lives until it is freed below.
    let result = work(library, unsafe { std::slice::from_raw_parts(list.as_ptr(), count) });
    // SAFETY: obligation 1 — as above, freed once.
    unsafe { (library.ibv_free_device_list)(list.as_ptr()) };
    Ok(result)
}

/// # Safety
/// `device` is of a list that is not freed.
unsafe fn name(library: &Library, device: *mut ffi::ibv_device) -> String {
    // SAFETY: obligation 1 — nothing is registered; the caller's promise, the name is a C string in the device.
    unsafe { CStr::from_ptr((library.ibv_get_device_name)(device)) }
        .to_string_lossy()
        .into_owned()
}

fn failed(call: &'static str, device: &str) -> VerbsError {
    let errno = crate::error::errno(&io::Error::last_os_error());
    VerbsError::Call {
        call,
        device: device.into(),
        errno,
    }
}

fn nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: obligation 1 — nothing is registered; the descriptor is open.
    let done = unsafe { libc::fcntl(fd, libc::F_SETFL, libc::fcntl(fd, libc::F_GETFL) | libc::O_NONBLOCK) };
    if done < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
