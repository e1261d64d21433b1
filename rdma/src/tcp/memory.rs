//! Vectored reads and writes between a socket and registered memory: the only place of the tcp mover that touches such
//! memory. No reference to it is ever formed for the kernel's copies; both ends of a stream use it behind a gate.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    ptr::NonNull,
};

use crate::region::{Regions, Run};

/// Pieces handed to the kernel at once; a run beyond goes with the next call.
const MAX_PIECES: usize = 64;

/// A list of pieces of memory, done up to some byte.
#[derive(Debug)]
pub(super) struct Gather {
    pieces: Vec<Piece>,
    /// The piece in hand.
    at: usize,
    /// Bytes of it that are done.
    within: usize,
    left: usize,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: obligation 1 — the pieces lie in regions of the mover whose thread holds this list (`Gather::locate`), and
// those live until that thread has been joined.
unsafe impl Send for Gather {}

impl Gather {
    /// The memory of `runs`, or the first run that lies in no region. The list must not outlive `regions`.
    pub(super) fn locate(regions: &Regions, runs: &[Run]) -> Result<Self, Run> {
        let piece = |run: &Run| {
            let address = regions.locate(run).ok_or(*run)?;
            Ok(Piece {
                address,
                len: usize::try_from(run.len).map_err(|_| *run)?,
            })
        };
        let pieces = runs.iter().map(piece).collect::<Result<Vec<_>, Run>>()?;
        let left = pieces.iter().map(|piece| piece.len).sum();
        Ok(Gather {
            pieces,
            at: 0,
            within: 0,
            left,
        })
    }

    /// Bytes that are not done.
    pub(super) fn left(&self) -> usize {
        self.left
    }

    /// Adds up to `limit` of the bytes that are next, and says how many.
    fn fill(&self, io: &mut Vector, limit: usize) -> usize {
        let (mut room, mut within) = (limit.min(self.left), self.within);
        for piece in &self.pieces[self.at..] {
            let len = (piece.len - within).min(room);
            if len == 0 && room == 0 || io.is_full() {
                break;
            }
            // SAFETY: obligation 1 — `within` ≤ the piece's length, and the piece lies in a living region.
            io.push(unsafe { piece.address.add(within) }, len);
            room -= len;
            within = 0;
        }
        limit.min(self.left) - room
    }

    /// Marks `count` bytes as done and calls `each` with them.
    fn advance(&mut self, mut count: usize, mut each: impl FnMut(NonNull<u8>, usize)) {
        self.left -= count;
        while let Some(piece) = self.pieces.get(self.at) {
            let len = (piece.len - self.within).min(count);
            // SAFETY: obligation 1 — as in `fill`.
            each(unsafe { piece.address.add(self.within) }, len);
            self.within += len;
            count -= len;
            if self.within < piece.len {
                break;
            }
            (self.at, self.within) = (self.at + 1, 0);
        }
    }

    /// Marks `count` bytes as done without looking at them.
    pub(super) fn skip(&mut self, count: usize) {
        self.advance(count, |_, _| {});
    }

    /// Marks `count` bytes as done and adds them to `crc`.
    fn check(&mut self, count: usize, crc: &mut Option<u32>) {
        let Some(sum) = crc else { return self.skip(count) };
        self.advance(count, |address, len| {
            // SAFETY: obligations 1 and 4 — the bytes lie in a living region, and the caller is inside the gate of the
            // lease or of the read, so nobody writes them until the slice is gone.
            let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr(), len) };
            *sum = crc32c::crc32c_append(*sum, bytes);
        });
    }

    /// Sends `front`, then up to `limit` bytes of the list, without blocking; `crc` grows by the list's bytes that went.
    /// Returns the bytes of `front` and of the list that the socket took. The caller is inside the lease's gate.
    pub(super) fn send(
        &mut self,
        socket: &impl AsRawFd,
        front: &[u8],
        limit: usize,
        crc: &mut Option<u32>,
    ) -> io::Result<(usize, usize)> {
        let mut io = Vector::new();
        io.push(NonNull::from(front).cast(), front.len());
        self.fill(&mut io, limit);
        // SAFETY: obligations 1 and 4 — `front` is borrowed, the pieces lie in living regions and the lease is open.
        let sent = unsafe { io.send(socket.as_raw_fd()) }?;
        let (front, body) = (sent.min(front.len()), sent.saturating_sub(front.len()));
        self.check(body, crc);
        Ok((front, body))
    }

    /// Receives up to `limit` bytes of the list without blocking and, if those are its last, into `behind` as well;
    /// `crc` grows by the list's bytes that came. Returns the bytes of the list and of `behind` that came; both zero
    /// is the stream's end. The caller is inside the read's gate.
    pub(super) fn receive(
        &mut self,
        socket: &impl AsRawFd,
        limit: usize,
        behind: &mut [u8],
        crc: &mut Option<u32>,
    ) -> io::Result<(usize, usize)> {
        let mut io = Vector::new();
        let body = self.fill(&mut io, limit);
        if body == self.left {
            io.push(NonNull::from(&mut *behind).cast(), behind.len());
        }
        // SAFETY: obligation 1 — `behind` is borrowed and the pieces lie in living regions; obligation 4 — the read
        // owns its local runs until it is done, and its gate is open.
        let got = unsafe { io.receive(socket.as_raw_fd()) }?;
        let (body, behind) = (got.min(body), got.saturating_sub(body));
        self.check(body, crc);
        Ok((body, behind))
    }
}

/// What one system call reads or writes.
struct Vector {
    pieces: [libc::iovec; MAX_PIECES + 2],
    len: usize,
}

impl Vector {
    fn new() -> Self {
        Vector {
            pieces: [libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            }; MAX_PIECES + 2],
            len: 0,
        }
    }

    /// One place is kept for the bytes behind a list.
    fn is_full(&self) -> bool {
        self.len > MAX_PIECES
    }

    fn push(&mut self, address: NonNull<u8>, len: usize) {
        if len > 0 {
            self.pieces[self.len] = libc::iovec {
                iov_base: address.as_ptr().cast(),
                iov_len: len,
            };
            self.len += 1;
        }
    }

    /// # Safety
    /// Every piece is readable during the call.
    unsafe fn send(&self, socket: RawFd) -> io::Result<usize> {
        let message = self.message();
        // SAFETY: the pieces are readable (caller); a broken connection is an error and no signal.
        result(unsafe { libc::sendmsg(socket, &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) })
    }

    /// # Safety
    /// Every piece is writable during the call and nobody else touches it.
    unsafe fn receive(&self, socket: RawFd) -> io::Result<usize> {
        let mut message = self.message();
        // SAFETY: the pieces are writable and ours (caller).
        result(unsafe { libc::recvmsg(socket, &mut message, libc::MSG_DONTWAIT) })
    }

    fn message(&self) -> libc::msghdr {
        // SAFETY: all zero is a valid empty header.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.pieces.as_ptr().cast_mut();
        message.msg_iovlen = self.len as _;
        message
    }
}

fn result(count: isize) -> io::Result<usize> {
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::{io::Read, os::unix::net::UnixStream, sync::Arc};

    use super::*;
    use crate::region::{HostRegion, RegionKey};

    fn regions(memory: &Arc<HostRegion>) -> Regions {
        let regions = Regions::default();
        regions.add(memory.clone().into()).unwrap();
        regions
    }

    fn run(offset: u64, len: u64) -> Run {
        Run {
            region: RegionKey(0),
            offset,
            len,
        }
    }

    #[test]
    fn scattered_runs_leave_in_order_with_their_checksum() {
        let memory = HostRegion::from_bytes(b"0123456789");
        let regions = regions(&memory);
        let mut gather = Gather::locate(&regions, &[run(7, 3), run(0, 0), run(1, 2)]).unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut crc = Some(0);
        assert_eq!(gather.send(&ours, b"head", 4, &mut crc).unwrap(), (4, 4));
        assert_eq!(gather.send(&ours, b"", 4, &mut crc).unwrap(), (0, 1));
        assert_eq!((gather.left(), crc), (0, Some(crc32c::crc32c(b"78912"))));
        drop(ours);
        let mut got = String::new();
        theirs.read_to_string(&mut got).unwrap();
        assert_eq!(got, "head78912");
    }

    #[test]
    fn bytes_behind_a_list_are_taken_only_with_its_last() {
        let memory = HostRegion::new(8);
        let regions = regions(&memory);
        let mut gather = Gather::locate(&regions, &[run(6, 2), run(0, 3)]).unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        std::io::Write::write_all(&mut theirs, b"abcdefgh").unwrap();
        let (mut behind, mut crc) = ([0; 2], Some(0));
        assert_eq!(gather.receive(&ours, 4, &mut behind, &mut crc).unwrap(), (4, 0));
        assert_eq!(gather.receive(&ours, 4, &mut behind, &mut crc).unwrap(), (1, 2));
        assert_eq!(
            (memory.read(0, 8), &behind, crc),
            (b"cde\0\0\0ab".to_vec(), b"fg", Some(crc32c::crc32c(b"abcde")))
        );
    }

    #[test]
    fn a_run_outside_is_named() {
        let memory = HostRegion::new(8);
        assert_eq!(
            Gather::locate(&regions(&memory), &[run(0, 8), run(4, 5)]).unwrap_err(),
            run(4, 5)
        );
    }

    #[test]
    fn more_pieces_than_one_call_takes_all_arrive() {
        let memory = HostRegion::from_bytes(&(0..=255).collect::<Vec<u8>>());
        let regions = regions(&memory);
        let runs: Vec<Run> = (0..200).map(|at| run(255 - at, 1)).collect();
        let mut gather = Gather::locate(&regions, &runs).unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        while gather.left() > 0 {
            gather.send(&ours, b"", 1 << 20, &mut None).unwrap();
        }
        let mut got = [0; 200];
        theirs.read_exact(&mut got).unwrap();
        assert_eq!(got.to_vec(), (0..200).map(|at| 255 - at).collect::<Vec<u8>>());
    }
}
