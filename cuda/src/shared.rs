//! [`SharedMemory`]: zeroed memory in a memfd. The engine's pool on CPU and [`crate::HostArena`] lie in one when other
//! processes of the host are to map them (the `shm` mover).

use std::{
    fs, io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::Arc,
};

use memmap2::{Advice, MmapRaw};

use crate::layout::{Backing, Buffer};

/// Zeroed, page-aligned memory in a memfd of this process: closed on exec, neither shrinkable nor growable by anybody
/// it is passed to. Pages come into being when they are first touched.
#[derive(Debug)]
pub struct SharedMemory {
    map: MmapRaw,
    file: Arc<OwnedFd>,
}

/// Why there is no shared memory.
#[derive(Debug, thiserror::Error)]
#[error("{call} for {bytes} bytes: {source}")]
pub struct SharedMemoryError {
    /// The system call.
    pub call: &'static str,
    /// Asked for.
    pub bytes: u64,
    /// The system's error.
    pub source: io::Error,
}

impl SharedMemory {
    /// `bytes` zero bytes, at least one.
    ///
    /// # Errors
    /// [`SharedMemoryError`] with the call that failed. A process that has not set `SIGXFSZ` aside, as Python does, dies of a
    /// file size limit (`ulimit -f`) below `bytes`.
    pub fn new(bytes: u64) -> Result<Self, SharedMemoryError> {
        let failed = |call| move |source| SharedMemoryError { call, bytes, source };
        // SAFETY: the name is a C string; the call makes a descriptor or fails.
        let fd = unsafe { libc::memfd_create(c"kvc-kv".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if fd < 0 {
            return Err(failed("memfd_create")(io::Error::last_os_error()));
        }
        // SAFETY: fresh from the system, so nobody else owns it.
        let file = fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.set_len(bytes.max(1)).map_err(failed("ftruncate"))?;
        let map = MmapRaw::map_raw(&file).map_err(failed("mmap"))?;
        // Who maps a file that can shrink dies of SIGBUS when it does.
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
        // SAFETY: a living descriptor; the call touches no memory.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
            return Err(failed("fcntl(F_ADD_SEALS)")(io::Error::last_os_error()));
        }
        // Large pages where the system's `shmem_enabled` lets advice have them: a copy takes less time (docs/bench.md).
        // Elsewhere it is refused, which changes nothing.
        let _ = map.advise(Advice::HugePage);
        let file = Arc::new(file.into());
        Ok(Self { map, file })
    }

    /// Its first byte. It stays mapped as long as `self` lives.
    pub fn address(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Never true.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where `buffer` lies in the file, if all of it does.
    pub fn backing(&self, buffer: &Buffer) -> Option<Backing> {
        let offset = buffer.base.checked_sub(self.address() as u64)?;
        let inside = offset.checked_add(buffer.len())? <= self.len() as u64;
        inside.then(|| Backing {
            file: self.file.clone(),
            offset,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(memory: &SharedMemory) -> fs::File {
        memory.file.try_clone().unwrap().into()
    }

    #[test]
    fn the_file_holds_what_is_written_and_no_page_before() {
        use std::os::unix::fs::{FileExt, MetadataExt};

        let memory = SharedMemory::new(64 << 20).unwrap();
        assert_eq!(file(&memory).metadata().unwrap().blocks(), 0);
        // SAFETY: inside the mapping, and nobody else looks.
        unsafe { memory.address().add(5 << 20).write(7) };
        let mut byte = [0];
        file(&memory).read_exact_at(&mut byte, 5 << 20).unwrap();
        assert_eq!(byte, [7]);
        // 512-byte blocks: one page, large at most.
        assert!((8..=4096).contains(&file(&memory).metadata().unwrap().blocks()));
    }

    #[test]
    fn nobody_can_take_it_away_or_inherit_it() {
        let memory = SharedMemory::new(10_000).unwrap();
        assert!(file(&memory).set_len(0).is_err(), "a peer's copy would end in SIGBUS");
        assert!(file(&memory).set_len(1 << 20).is_err());
        // SAFETY: a living descriptor.
        let flags = unsafe { libc::fcntl(memory.file.as_raw_fd(), libc::F_GETFD) };
        assert_eq!(
            flags,
            libc::FD_CLOEXEC,
            "a child of the engine would keep the pool alive"
        );
    }

    #[test]
    fn only_buffers_inside_have_a_place_in_the_file() {
        let memory = SharedMemory::new(1000).unwrap();
        let base = memory.address() as u64;
        let offset = |base, slots| {
            let buffer = Buffer { base, row: 10, slots };
            memory.backing(&buffer).map(|backing| backing.offset)
        };
        assert_eq!(offset(base, 100), Some(0));
        assert_eq!(offset(base + 990, 1), Some(990));
        assert_eq!(offset(base + 991, 1), None);
        assert_eq!(offset(base - 1, 1), None);
        assert_eq!(offset(u64::MAX, 1), None);
    }

    #[test]
    fn more_than_an_address_space_is_refused_by_call() {
        let refused = SharedMemory::new(u64::MAX).unwrap_err();
        assert_eq!((refused.call, refused.bytes), ("ftruncate", u64::MAX));
    }
}
