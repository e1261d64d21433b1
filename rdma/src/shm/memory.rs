//! Memory that two processes map: the exporter's files, the importer's mappings of them, and the copy between a mapping
//! and registered memory. Regions and both sides of the `shm` mover use it; the calls that need `unsafe` are here.

use std::{
    fs, io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    ptr::NonNull,
    sync::{Arc, PoisonError, RwLock},
};

use memmap2::{Advice, MmapOptions, MmapRaw};

use crate::{
    error::{MoverError, errno},
    plan::Chunk,
    region::{RegionKey, Run, View},
};

/// Regions of one peer that are mapped at most.
const MAX_REGIONS: u32 = 1 << 16;
const SMALL_PAGE: u64 = 4 << 10;
const HUGE_PAGE: u64 = 2 << 20;

/// The pages of a [`crate::HostRegion`] that is shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// As the system gives them to shared memory, 4 KiB by default.
    #[default]
    Default,
    /// Large ones where the system's `shmem_enabled` lets advice have them.
    Transparent,
    /// Reserved ones of 2 MiB (`vm.nr_hugepages`).
    Huge,
}

/// A memfd and where a region begins in it. The descriptor is for reading alone: it is what peers are given.
#[derive(Clone, Debug)]
pub(crate) struct SharedFile {
    pub(super) file: Arc<OwnedFd>,
    pub(super) offset: u64,
}

impl SharedFile {
    /// Seals `file` against shrinking, so that who maps it never faults, and looks that it reaches to the end.
    pub(crate) fn seal(file: OwnedFd, offset: u64, len: u64) -> Result<Self, MoverError> {
        add_seals(&file, libc::F_SEAL_SHRINK).map_err(|e| refused("seals (errno)", &e))?;
        check_extent(&file, offset, len)?;
        // A descriptor of its own, without the right to write: peers read and nothing else (XFER-1).
        let file = fs::File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .map_err(|e| refused("reopening (errno)", &e))?;
        let file = Arc::new(file.into());
        Ok(SharedFile { file, offset })
    }
}

/// A memfd of our own, mapped for writing.
#[derive(Debug)]
pub(crate) struct Backing {
    map: MmapRaw,
    pub(crate) file: SharedFile,
}

impl Backing {
    pub(crate) fn new(len: usize, pages: Pages) -> Result<Self, MoverError> {
        let (flags, unit) = match pages {
            Pages::Default | Pages::Transparent => (0, SMALL_PAGE),
            Pages::Huge => (libc::MFD_HUGETLB, HUGE_PAGE),
        };
        let size = (len as u64).max(1).next_multiple_of(unit);
        let file = create(size, flags).map_err(|e| MoverError::system("memfd_create", &e))?;
        let map = MmapRaw::map_raw(&file).map_err(|e| MoverError::system("mmap", &e))?;
        if pages == Pages::Transparent {
            map.advise(Advice::HugePage)
                .map_err(|e| MoverError::system("madvise", &e))?;
        }
        add_seals(&file, libc::F_SEAL_GROW).map_err(|e| MoverError::system("fcntl", &e))?;
        let file = SharedFile::seal(file, 0, len as u64)?;
        Ok(Backing { map, file })
    }

    pub(crate) fn address(&self) -> NonNull<u8> {
        non_null(&self.map)
    }
}

/// A memfd of `size` zero bytes that can be sealed.
pub(super) fn create(size: u64, flags: libc::c_uint) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string; the call makes a descriptor or fails.
    let fd = unsafe { libc::memfd_create(c"kvc".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags) };
    let file = fs::File::from(owned(fd)?);
    file.set_len(size)?;
    Ok(file.into())
}

/// Adds seals; those that are there already are no error.
pub(super) fn add_seals(file: &OwnedFd, seals: libc::c_int) -> io::Result<()> {
    if self::seals(file)? & seals == seals {
        return Ok(());
    }
    // SAFETY: a living descriptor; the call touches no memory.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn seals(file: &OwnedFd) -> io::Result<libc::c_int> {
    // SAFETY: as above.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) } {
        -1 => Err(io::Error::last_os_error()),
        seals => Ok(seals),
    }
}

/// Takes the descriptor that a call returned, or its error.
pub(super) fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: fresh from the system, so nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn check_extent(file: &OwnedFd, offset: u64, len: u64) -> Result<(), MoverError> {
    let size = file
        .try_clone()
        .and_then(|file| fs::File::from(file).metadata())
        .map_err(|e| refused("size (errno)", &e))?
        .len();
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        end => Err(MoverError::NotShareable {
            what: "size",
            got: size,
            expected: end.unwrap_or(u64::MAX),
        }),
    }
}

fn refused(what: &'static str, error: &io::Error) -> MoverError {
    MoverError::NotShareable {
        what,
        got: errno(error) as u64,
        expected: 0,
    }
}

fn non_null(map: &MmapRaw) -> NonNull<u8> {
    // A mapping of at least one byte is never at address zero; if it were, no run would be located in it.
    NonNull::new(map.as_mut_ptr()).unwrap_or(NonNull::dangling())
}

/// A peer's region as it is seen from here, for reading.
#[derive(Debug)]
struct Mapping {
    map: MmapRaw,
    len: u64,
}

impl Mapping {
    /// Maps `[offset, offset + len)` of a file that its owner cannot shrink: reading it never faults.
    fn open(file: &OwnedFd, offset: u64, len: u64) -> Result<Self, MoverError> {
        let seals = seals(file).map_err(|e| refused("seals (errno)", &e))?;
        if seals & libc::F_SEAL_SHRINK == 0 {
            return Err(MoverError::NotShareable {
                what: "seals",
                got: seals as u64,
                expected: libc::F_SEAL_SHRINK as u64,
            });
        }
        check_extent(file, offset, len)?;
        let room = usize::try_from(len.max(1)).map_err(|_| MoverError::TooLarge {
            what: "region",
            got: len,
            limit: usize::MAX as u64,
        })?;
        let map = MmapOptions::new().offset(offset).len(room).map_raw_read_only(file);
        let map = map.map_err(|e| MoverError::system("mmap", &e))?;
        // Large pages where the owner has them; elsewhere the advice is void or refused, which changes nothing.
        let _ = map.advise(Advice::HugePage);
        Ok(Mapping { map, len })
    }

    fn locate(&self, run: &Run) -> Option<NonNull<u8>> {
        if run.end()? > self.len {
            return None;
        }
        let offset = usize::try_from(run.offset).ok()?;
        // SAFETY: obligation 1 — offset ≤ len, so the result stays inside (or one past) the mapping.
        Some(unsafe { non_null(&self.map).add(offset) })
    }
}

/// What of one peer is mapped. Mappings stay until the peer is let go.
#[derive(Debug, Default)]
pub(super) struct Maps(RwLock<Vec<Option<Mapping>>>);

impl Maps {
    /// Maps a region that the peer announces.
    pub(super) fn add(&self, key: RegionKey, file: &OwnedFd, offset: u64, len: u64) -> Result<(), MoverError> {
        if key.0 >= MAX_REGIONS {
            return Err(MoverError::TooMany {
                what: "regions of a peer",
                limit: MAX_REGIONS.into(),
            });
        }
        let mapping = Mapping::open(file, offset, len)?;
        let mut maps = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let at = key.0 as usize;
        if maps.len() <= at {
            maps.resize_with(at + 1, || None);
        }
        // The first announcement stands: an address once located stays good.
        maps[at].get_or_insert(mapping);
        Ok(())
    }

    /// Copies the bytes of `chunk` into registered memory, one `memcpy` per run; the first run that lies in no mapping or
    /// region instead. The caller is inside the lease's word and the read's gate, and has checked that the peer exposes
    /// the remote runs.
    pub(super) fn copy(&self, chunk: &Chunk, regions: &View<'_>) -> Result<(), Run> {
        let maps = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let from = |run: &Run| maps.get(run.region.0 as usize)?.as_ref()?.locate(run);
        let (mut remotes, mut locals) = (chunk.remote.iter().copied(), chunk.local.iter().copied());
        let (mut remote, mut local) = (remotes.next(), locals.next());
        while let (Some(source), Some(target)) = (remote, local) {
            let len = source.len.min(target.len);
            let (Some(from), Some(to)) = (from(&source), regions.locate(&target)) else {
                return Err(source);
            };
            // SAFETY: obligation 1 — both runs lie in mappings that live, `len` is at most either's; obligation 4 — the
            // read owns its local run, and the peer writes no exposed byte before its fence has seen this copy leave
            // (or, past the fence's deadline, this chunk is thrown away). No reference to either side exists.
            unsafe { libc::memcpy(to.as_ptr().cast(), from.as_ptr().cast(), len as usize) };
            remote = rest(source, len).or_else(|| remotes.next());
            local = rest(target, len).or_else(|| locals.next());
        }
        Ok(())
    }
}

fn rest(run: Run, done: u64) -> Option<Run> {
    (done < run.len).then(|| Run {
        offset: run.offset + done,
        len: run.len - done,
        ..run
    })
}

/// The checksum of registered memory. The caller is inside the gate of the lease or the read.
pub(super) fn checksum(regions: &View<'_>, runs: &[Run]) -> Result<u32, Run> {
    runs.iter().try_fold(0, |sum, run| {
        let address = regions.locate(run).ok_or(*run)?;
        // SAFETY: obligations 1 and 4 — the bytes lie in a living region, and nobody writes them while the caller is
        // inside the gate.
        let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr(), run.len as usize) };
        Ok(crc32c::crc32c_append(sum, bytes))
    })
}

#[cfg(feature = "fault")]
/// Flips a bit of byte `at` of what `runs` hold. The caller is inside the read's gate.
pub(super) fn flip(regions: &View<'_>, runs: &[Run], mut at: u64) {
    for run in runs {
        if at < run.len {
            if let Some(address) = regions.locate(run) {
                // SAFETY: obligations 1 and 4 — inside a local run of a living region, which the read owns.
                unsafe { *address.as_ptr().add(at as usize) ^= 1 };
            }
            return;
        }
        at -= run.len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::{HostRegion, Region, Regions};

    fn run(region: u32, offset: u64, len: u64) -> Run {
        Run {
            region: RegionKey(region),
            offset,
            len,
        }
    }

    #[test]
    fn bytes_go_from_a_mapping_to_registered_memory_run_by_run() {
        let source = HostRegion::shared(8192, Pages::Default).unwrap();
        source.write(0, b"0123456789");
        let region = Region::from(source.clone());
        let file = region.file().unwrap();
        let (maps, regions, target) = (Maps::default(), Regions::default(), HostRegion::new(16));
        maps.add(RegionKey(3), &file.file, file.offset, 8192).unwrap();
        regions.add(target.clone().into()).unwrap();
        let chunk = Chunk {
            remote: vec![run(3, 7, 3), run(3, 0, 3)],
            local: vec![run(0, 10, 2), run(0, 0, 4)],
            len: 6,
        };
        assert_eq!(maps.copy(&chunk, &regions.view()), Ok(()));
        assert_eq!(
            (target.read(10, 2), target.read(0, 4)),
            (b"78".to_vec(), b"9012".to_vec())
        );
        let outside = Chunk {
            remote: vec![run(3, 8190, 3)],
            local: vec![run(0, 0, 3)],
            len: 3,
        };
        assert_eq!(maps.copy(&outside, &regions.view()), Err(run(3, 8190, 3)));
    }

    /// No SIGBUS: what a peer maps cannot be taken from under it, and what could be is not mapped.
    #[test]
    fn a_shared_file_cannot_shrink_and_one_that_can_is_refused() {
        let region = Region::from(HostRegion::shared(8192, Pages::Default).unwrap());
        let file = fs::File::from(region.file().unwrap().file.try_clone().unwrap());
        assert!(file.set_len(0).is_err());
        let open = create(8192, 0).unwrap();
        let refused = Maps::default().add(RegionKey(0), &open, 0, 8192).unwrap_err();
        assert!(
            matches!(refused, MoverError::NotShareable { what: "seals", .. }),
            "{refused:?}"
        );
    }

    #[test]
    fn what_peers_are_given_cannot_be_written() {
        let region = Region::from(HostRegion::shared(8192, Pages::Default).unwrap());
        let file = region.file().unwrap();
        assert!(MmapRaw::map_raw(&*file.file).is_err(), "XFER-1: the importer reads");
    }

    #[test]
    fn a_file_that_is_no_memfd_or_too_short_is_no_shared_memory() {
        let region = || Region::from(HostRegion::new(8192));
        let plain = fs::File::open("/proc/self/exe").unwrap().into();
        let refused = region().backed_by(plain, 0).unwrap_err();
        assert!(
            matches!(
                refused,
                MoverError::NotShareable {
                    what: "seals (errno)",
                    ..
                }
            ),
            "{refused:?}"
        );
        let refused = region().backed_by(create(8192, 0).unwrap(), 4096).unwrap_err();
        assert_eq!(
            refused,
            MoverError::NotShareable {
                what: "size",
                got: 8192,
                expected: 12_288
            }
        );
        assert!(!region().is_shareable());
        assert!(region().backed_by(create(8192, 0).unwrap(), 0).unwrap().is_shareable());
    }
}
