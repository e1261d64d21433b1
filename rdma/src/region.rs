//! Memory that a mover may read or write, and runs of bytes in it. `engine-ext` registers the engine's pools here.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    fmt,
    os::fd::OwnedFd,
    ptr::NonNull,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard},
};

use crate::{
    error::MoverError,
    shm::{Backing, Pages, SharedFile},
};

/// The alignment of a [`HostRegion`], one small page.
const ALIGN: usize = 4096;

/// Names a registered region of one mover; the exporter's keys travel in the lease grant. Not a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionKey(pub u32);

/// `len` bytes from byte `offset` of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// The region, local or the peer's.
    pub region: RegionKey,
    /// First byte.
    pub offset: u64,
    /// How many bytes; zero is allowed.
    pub len: u64,
}

impl Run {
    /// One past the last byte, `None` when that is no 64 bit number.
    pub fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.len)
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "region {} [{}, +{})", self.region.0, self.offset, self.len)
    }
}

/// `{address, length}` of memory to register.
#[derive(Clone, Debug)]
pub struct Region {
    address: NonNull<u8>,
    len: u64,
    place: Place,
    /// The file it is a shared mapping of, if any: then the `shm` mover exports it.
    file: Option<SharedFile>,
    /// Keeps owned memory alive as long as the mover knows it.
    _owner: Option<Arc<HostRegion>>,
}

/// Whose memory it is.
#[derive(Clone, Debug)]
enum Place {
    /// The processor's.
    Host,
    /// A GPU's, with what its driver exported of it, if it did.
    Gpu(Option<Dmabuf>),
}

/// Where a region of GPU memory begins in a dma-buf.
#[derive(Clone, Debug)]
pub struct Dmabuf {
    /// As the GPU's driver exported it.
    pub file: Arc<OwnedFd>,
    /// The region's first byte in it.
    pub offset: u64,
}

// SAFETY: obligation 1 — a `Region` is an address, not a borrow; who made it promised (`from_raw`) or owns
// (`HostRegion`) memory that lives until the last clone is gone, on whatever thread that happens.
unsafe impl Send for Region {}
// SAFETY: obligation 1 — as above; every access goes through the kernel or raw copies, never through a reference.
unsafe impl Sync for Region {}

impl Region {
    /// Memory that somebody else owns, the engine's KV pool.
    ///
    /// # Safety
    /// Obligation 1 of style 11: `[address, address + len)` is mapped, readable and writable until the mover it is
    /// registered with has been dropped. Obligation 4: bytes exposed under a lease are not written until the lease is
    /// fenced; bytes named as destination of a read are not touched by anybody else until that read is done.
    pub unsafe fn from_raw(address: NonNull<u8>, len: u64) -> Self {
        Region {
            address,
            len,
            place: Place::Host,
            file: None,
            _owner: None,
        }
    }

    /// GPU memory that somebody else owns: `address` is the device's, which this process cannot follow. Only verbs moves
    /// it, by GPUDirect; other movers refuse it, and verbs does where no device reaches it. Then it is staged through
    /// host memory.
    ///
    /// # Safety
    /// As of [`Region::from_raw`], with mapped on the device for mapped; and obligation 2: the stream that wrote exposed
    /// bytes was synced before they are.
    pub unsafe fn of_gpu(address: NonNull<u8>, len: u64, dmabuf: Option<Dmabuf>) -> Self {
        Region {
            address,
            len,
            place: Place::Gpu(dmabuf),
            file: None,
            _owner: None,
        }
    }

    /// Whether the processor can read and write it.
    pub fn is_host(&self) -> bool {
        matches!(self.place, Place::Host)
    }

    /// What its GPU's driver exported of it.
    pub fn dmabuf(&self) -> Option<&Dmabuf> {
        match &self.place {
            Place::Host => None,
            Place::Gpu(dmabuf) => dmabuf.as_ref(),
        }
    }

    /// Says that the memory is a shared mapping of `file`, a memfd, from byte `offset`: peers on this host may map it
    /// too. The file is sealed against shrinking, so that no peer of it faults.
    ///
    /// # Errors
    /// [`MoverError::NotShareable`] when it cannot be sealed or does not reach to the end of the region.
    pub fn backed_by(mut self, file: OwnedFd, offset: u64) -> Result<Self, MoverError> {
        self.file = Some(SharedFile::seal(file, offset, self.len)?);
        Ok(self)
    }

    /// The file that peers on this host can map.
    pub(crate) fn file(&self) -> Option<&SharedFile> {
        self.file.as_ref()
    }

    /// Whether peers on this host can map it.
    pub fn is_shareable(&self) -> bool {
        self.file.is_some()
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of `run` when it lies inside.
    pub(crate) fn locate(&self, run: &Run) -> Option<NonNull<u8>> {
        if run.end()? > self.len {
            return None;
        }
        let offset = usize::try_from(run.offset).ok()?;
        // SAFETY: obligation 1 — offset ≤ len, so the result stays inside (or one past) the registered memory.
        Some(unsafe { self.address.add(offset) })
    }
}

impl From<Arc<HostRegion>> for Region {
    fn from(owner: Arc<HostRegion>) -> Self {
        let file = match &owner.memory {
            Memory::Heap => None,
            Memory::Shared(backing) => Some(backing.file.clone()),
        };
        Region {
            address: owner.address,
            len: owner.len as u64,
            place: Place::Host,
            file,
            _owner: Some(owner),
        }
    }
}

/// Owned, zeroed, page-aligned host memory: tests and benches. Its bytes are copied in and out, never borrowed, since a
/// mover may read them at the same time; two writers of one byte are the caller's fault and give either value.
pub struct HostRegion {
    address: NonNull<u8>,
    len: usize,
    memory: Memory,
}

enum Memory {
    /// Of this process alone.
    Heap,
    /// A mapping of a memfd.
    Shared(Backing),
}

// SAFETY: obligation 1 — it owns its memory until dropped, and hands out no reference into it.
unsafe impl Send for HostRegion {}
// SAFETY: obligation 1 — as above.
unsafe impl Sync for HostRegion {}

impl HostRegion {
    /// `len` zero bytes.
    ///
    /// # Panics
    /// Or aborts, like any allocation, when there is no such memory.
    pub fn new(len: usize) -> Arc<Self> {
        let layout = Self::layout(len);
        // SAFETY: obligation 1 — the layout has a size above zero; the memory is freed in `drop` alone.
        let address = unsafe { alloc_zeroed(layout) };
        let address = NonNull::new(address).unwrap_or_else(|| handle_alloc_error(layout));
        let memory = Memory::Heap;
        Arc::new(HostRegion { address, len, memory })
    }

    /// `len` zero bytes that peers on this host can map, in pages of the kind asked for.
    ///
    /// # Errors
    /// [`MoverError::System`] when there is no such memory.
    pub fn shared(len: usize, pages: Pages) -> Result<Arc<Self>, MoverError> {
        let backing = Backing::new(len, pages)?;
        let address = backing.address();
        let memory = Memory::Shared(backing);
        Ok(Arc::new(HostRegion { address, len, memory }))
    }

    /// Where it begins, for tools that ask the system about it.
    pub fn address(&self) -> usize {
        self.address.as_ptr() as usize
    }

    /// A region that holds a copy of `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Arc<Self> {
        let region = Self::new(bytes.len());
        region.write(0, bytes);
        region
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Panics
    /// If they do not fit: the caller is a test.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(
            offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len),
            "write past the region"
        );
        // SAFETY: obligation 1 — in bounds as just checked, `bytes` is borrowed and cannot overlap owned memory.
        unsafe {
            self.address
                .add(offset)
                .as_ptr()
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        }
    }

    /// Copies `len` bytes out from `offset`.
    ///
    /// # Panics
    /// If they lie outside: the caller is a test.
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "read past the region"
        );
        let mut bytes = vec![0; len];
        // SAFETY: obligation 1 — in bounds as just checked, the fresh vector cannot overlap.
        unsafe {
            bytes
                .as_mut_ptr()
                .copy_from_nonoverlapping(self.address.add(offset).as_ptr(), len)
        }
        bytes
    }

    /// Copies `len` bytes from `from` of another region to `at`, with one call of the C library's `memcpy`.
    ///
    /// # Panics
    /// If they lie outside of either, or the regions are one: the caller is a test or a bench.
    pub fn copy_from(&self, at: usize, source: &HostRegion, from: usize, len: usize) {
        let inside = |start: usize, all: usize| start.checked_add(len).is_some_and(|end| end <= all);
        assert!(inside(at, self.len) && inside(from, source.len), "copy past a region");
        assert!(self.address != source.address, "a region is not copied to itself");
        // SAFETY: obligation 1 — both in bounds as just checked, of two allocations, both borrowed.
        unsafe {
            let (to, from) = (self.address.add(at).as_ptr(), source.address.add(from).as_ptr());
            libc::memcpy(to.cast(), from.cast(), len);
        }
    }

    fn layout(len: usize) -> Layout {
        match Layout::from_size_align(len.max(1), ALIGN) {
            Ok(layout) => layout,
            Err(_) => panic!("{len} bytes are more than an address space"),
        }
    }
}

impl Drop for HostRegion {
    fn drop(&mut self) {
        if let Memory::Heap = self.memory {
            // SAFETY: obligation 1 — allocated in `new` with this layout; every `Region` of it holds an `Arc`, so none is
            // left.
            unsafe { dealloc(self.address.as_ptr(), Self::layout(self.len)) }
        }
    }
}

impl fmt::Debug for HostRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostRegion").field("len", &self.len).finish()
    }
}

/// The regions of one mover. They stay until the mover is dropped, so an address once located stays good.
#[derive(Debug, Default)]
pub(crate) struct Regions(RwLock<Vec<Region>>);

impl Regions {
    /// For a mover that copies with the processor.
    pub(crate) fn add(&self, region: Region) -> Result<RegionKey, MoverError> {
        if !region.is_host() {
            return Err(MoverError::NotHost { len: region.len });
        }
        self.add_any(region)
    }

    /// For a mover that needs no processor.
    pub(crate) fn add_any(&self, region: Region) -> Result<RegionKey, MoverError> {
        let mut regions = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let key = u32::try_from(regions.len()).map_err(|_| MoverError::TooMany {
            what: "regions",
            limit: u64::from(u32::MAX),
        })?;
        regions.push(region);
        Ok(RegionKey(key))
    }

    /// Refuses the first run that lies in no known region.
    pub(crate) fn check<'a>(&self, runs: impl IntoIterator<Item = &'a Run>) -> Result<(), MoverError> {
        let regions = self.view();
        match runs.into_iter().find(|run| regions.locate(run).is_none()) {
            Some(run) => Err(MoverError::LocalRange { run: *run }),
            None => Ok(()),
        }
    }

    /// The address of `run`, if it lies in a known region.
    pub(crate) fn locate(&self, run: &Run) -> Option<NonNull<u8>> {
        self.view().locate(run)
    }

    /// For many look-ups in a row; nothing is registered while it lives.
    pub(crate) fn view(&self) -> View<'_> {
        View(self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The regions as they are now.
pub(crate) struct View<'a>(RwLockReadGuard<'a, Vec<Region>>);

impl View<'_> {
    /// The region of that name.
    pub(crate) fn region(&self, key: RegionKey) -> Option<&Region> {
        self.0.get(usize::try_from(key.0).ok()?)
    }

    /// The address of `run`, if it lies in a known region.
    pub(crate) fn locate(&self, run: &Run) -> Option<NonNull<u8>> {
        self.region(run.region)?.locate(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(region: u32, offset: u64, len: u64) -> Run {
        Run {
            region: RegionKey(region),
            offset,
            len,
        }
    }

    #[test]
    fn bytes_come_back_as_written() {
        let region = HostRegion::new(10_000);
        region.write(7, b"kv");
        assert_eq!(region.read(6, 4), [0, b'k', b'v', 0]);
    }

    #[test]
    fn nothing_outside_a_region_is_located() {
        let regions = Regions::default();
        let key = regions.add(HostRegion::new(100).into()).unwrap();
        assert_eq!(key, RegionKey(0));
        assert!(regions.locate(&run(0, 0, 100)).is_some());
        assert!(regions.locate(&run(0, 100, 0)).is_some());
        assert!(regions.locate(&run(0, 1, 100)).is_none());
        assert!(regions.locate(&run(0, u64::MAX, 2)).is_none());
        assert!(regions.locate(&run(1, 0, 1)).is_none());
    }

    /// What a processor cannot follow is never given to a mover that copies with one.
    #[test]
    fn gpu_memory_is_registered_with_verbs_alone() {
        // SAFETY: nothing is there, and nobody follows the address, which is what is shown.
        let gpu = unsafe { Region::of_gpu(NonNull::dangling(), 100, None) };
        let regions = Regions::default();
        assert_eq!(regions.add(gpu.clone()), Err(MoverError::NotHost { len: 100 }));
        assert_eq!(regions.add_any(gpu), Ok(RegionKey(0)));
    }

    #[test]
    fn a_registered_region_outlives_its_owner() {
        let regions = Regions::default();
        let memory = HostRegion::from_bytes(b"abc");
        let weak = Arc::downgrade(&memory);
        regions.add(memory.into()).unwrap();
        assert!(weak.upgrade().is_some());
        drop(regions);
        assert!(weak.upgrade().is_none());
    }
}
