//! Unix sockets that keep frames apart and carry a descriptor with one: the control path of the `shm` mover. Names are
//! in the abstract space, so a process that dies leaves nothing behind.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind},
    mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr,
    sync::Arc,
};

use super::memory::owned;

/// Connections that wait to be accepted.
const BACKLOG: libc::c_int = 128;
/// `SO_PEERPIDFD`, Linux 6.5.
const SO_PEERPIDFD: libc::c_int = 77;
/// Bytes of control data for one descriptor.
const CONTROL: usize = 64;

/// One end, non-blocking.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

/// What one receive brought.
pub(super) struct Received {
    /// Bytes; zero is the end.
    pub(super) len: usize,
    pub(super) file: Option<OwnedFd>,
}

impl Socket {
    pub(super) fn listen(name: &str) -> io::Result<Self> {
        let socket = Self::new()?;
        let (address, len) = address(name)?;
        // SAFETY: `address` holds `len` valid bytes and is borrowed for the call.
        check(unsafe { libc::bind(socket.raw(), (&raw const address).cast(), len) })?;
        // SAFETY: a living descriptor.
        check(unsafe { libc::listen(socket.raw(), BACKLOG) })?;
        Ok(socket)
    }

    /// Connects at once, or says that there is no room.
    pub(super) fn connect(name: &str) -> io::Result<Self> {
        let socket = Self::new()?;
        let (address, len) = address(name)?;
        // SAFETY: as in `listen`.
        check(unsafe { libc::connect(socket.raw(), (&raw const address).cast(), len) })?;
        Ok(socket)
    }

    pub(super) fn accept(&self) -> io::Result<Self> {
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: a null address asks for none.
        owned(unsafe { libc::accept4(self.raw(), ptr::null_mut(), ptr::null_mut(), flags) }).map(Socket)
    }

    #[cfg(test)]
    pub(super) fn pair() -> io::Result<(Self, Self)> {
        let mut pair = [0; 2];
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: `pair` has room for two descriptors.
        check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) })?;
        Ok((Socket(owned(pair[0])?), Socket(owned(pair[1])?)))
    }

    /// Sends one frame whole, with a descriptor if there is one.
    pub(super) fn send(&self, frame: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut part = libc::iovec {
            iov_base: frame.as_ptr().cast_mut().cast(),
            iov_len: frame.len(),
        };
        let mut control = Control([0; CONTROL]);
        let mut message = header(&mut part, &mut control);
        match file {
            Some(file) => put_file(&mut message, file.as_raw_fd()),
            None => message.msg_controllen = 0,
        }
        // SAFETY: the header names `frame` and `control`, both borrowed; a broken connection is an error and no signal.
        let sent = unsafe { libc::sendmsg(self.raw(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        usize::try_from(sent).map(drop).map_err(|_| io::Error::last_os_error())
    }

    /// Receives one frame.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<Received> {
        let mut part = libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        };
        let mut control = Control([0; CONTROL]);
        let mut message = header(&mut part, &mut control);
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        // SAFETY: the header names `buffer` and `control`, both borrowed for the call.
        let got = unsafe { libc::recvmsg(self.raw(), &mut message, flags) };
        let len = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        // Descriptors are taken before anything is refused, so that none is left open.
        let file = take_files(&message).pop();
        if message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
            return Err(ErrorKind::InvalidData.into());
        }
        Ok(Received { len, file })
    }

    /// The user that the other end belongs to.
    pub(super) fn peer_user(&self) -> io::Result<u32> {
        Ok(self.credentials()?.uid)
    }

    /// A descriptor that is readable once the process of the other end is dead, if the system gives one.
    pub(super) fn peer_process(&self) -> Option<OwnedFd> {
        if let Ok(fd) = self.option::<libc::c_int>(SO_PEERPIDFD) {
            return owned(fd).ok();
        }
        let pid = self.credentials().ok()?.pid;
        // SAFETY: the call takes two numbers and makes a descriptor or fails.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        owned(RawFd::try_from(fd).ok()?).ok()
    }

    /// Whether the other end is closed or its process dead; does not wait.
    pub(super) fn is_gone(&self, process: Option<&OwnedFd>) -> bool {
        let poll = |fd: RawFd, events| libc::pollfd { fd, events, revents: 0 };
        let mut fds = [
            poll(self.raw(), libc::POLLRDHUP),
            // A negative descriptor is passed over.
            poll(process.map_or(-1, AsRawFd::as_raw_fd), libc::POLLIN),
        ];
        // SAFETY: two valid entries.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, 0) };
        ready > 0
    }

    /// Ends the connection for both sides. Not while this side copies: the hang-up says that it does not.
    pub(super) fn shut(&self) {
        // SAFETY: a living descriptor. What fails here was ended already.
        unsafe { libc::shutdown(self.raw(), libc::SHUT_RDWR) };
    }

    fn new() -> io::Result<Self> {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: three numbers; the call makes a descriptor or fails.
        owned(unsafe { libc::socket(libc::AF_UNIX, kind, 0) }).map(Socket)
    }

    fn credentials(&self) -> io::Result<libc::ucred> {
        self.option(libc::SO_PEERCRED)
    }

    fn option<T: Plain>(&self, name: libc::c_int) -> io::Result<T> {
        let (mut value, mut len) = (T::ZERO, mem::size_of::<T>() as libc::socklen_t);
        // SAFETY: `value` has room for `len` bytes and any bytes are a value of a `Plain` type.
        check(unsafe { libc::getsockopt(self.raw(), libc::SOL_SOCKET, name, (&raw mut value).cast(), &mut len) })?;
        Ok(value)
    }

    pub(super) fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// The user that this process runs as.
pub(super) fn own_user() -> u32 {
    // SAFETY: takes nothing, touches nothing and never fails.
    unsafe { libc::getuid() }
}

/// Frames that the socket had no room for yet.
#[derive(Debug, Default)]
pub(super) struct Outbox(VecDeque<(Vec<u8>, Option<Arc<OwnedFd>>)>);

impl Outbox {
    pub(super) fn push(&mut self, frame: Vec<u8>, file: Option<Arc<OwnedFd>>) {
        self.0.push_back((frame, file));
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Sends what the socket takes; an error is the connection's end.
    pub(super) fn flush(&mut self, socket: &Socket) -> io::Result<()> {
        while let Some((frame, file)) = self.0.front() {
            match socket.send(frame, file.as_deref().map(AsFd::as_fd)) {
                Ok(()) => drop(self.0.pop_front()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// Numbers alone, so that the system may fill them in.
trait Plain {
    const ZERO: Self;
}

impl Plain for libc::c_int {
    const ZERO: Self = 0;
}

impl Plain for libc::ucred {
    const ZERO: Self = libc::ucred { pid: 0, uid: 0, gid: 0 };
}

/// Aligned as control headers have to be.
#[repr(align(8))]
struct Control([u8; CONTROL]);

fn header(part: &mut libc::iovec, control: &mut Control) -> libc::msghdr {
    // SAFETY: all zero is a valid empty header.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = CONTROL as _;
    message
}

fn put_file(message: &mut libc::msghdr, file: RawFd) {
    let size = mem::size_of::<RawFd>() as libc::c_uint;
    // SAFETY: the control buffer is aligned and has room for one header and one descriptor (`CONTROL`).
    unsafe {
        message.msg_controllen = libc::CMSG_SPACE(size) as _;
        let head = libc::CMSG_FIRSTHDR(message);
        (*head).cmsg_level = libc::SOL_SOCKET;
        (*head).cmsg_type = libc::SCM_RIGHTS;
        (*head).cmsg_len = libc::CMSG_LEN(size) as _;
        libc::CMSG_DATA(head).cast::<RawFd>().write_unaligned(file);
    }
}

fn take_files(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut files = Vec::new();
    // SAFETY: the system filled the control buffer in, and `message` names its length; each descriptor in it is new and
    // taken once.
    unsafe {
        let mut head = libc::CMSG_FIRSTHDR(message);
        while let Some(part) = head.as_ref() {
            if part.cmsg_level == libc::SOL_SOCKET && part.cmsg_type == libc::SCM_RIGHTS {
                let bytes = part.cmsg_len - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(head).cast::<RawFd>();
                let each = (0..bytes / mem::size_of::<RawFd>()).map(|at| data.add(at).read_unaligned());
                files.extend(each.map(|fd| OwnedFd::from_raw_fd(fd)));
            }
            head = libc::CMSG_NXTHDR(message, head);
        }
    }
    files
}

fn address(name: &str) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: all zero is a valid address of no name.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as _;
    // The first byte stays zero: the abstract space.
    let room = address
        .sun_path
        .get_mut(1..=name.len())
        .ok_or(ErrorKind::InvalidInput)?;
    room.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from as _);
    let len = mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    Ok((address, len as libc::socklen_t))
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read};

    use super::*;

    #[test]
    fn a_frame_arrives_whole_with_its_descriptor() {
        let (ours, theirs) = Socket::pair().unwrap();
        let file = File::open("/proc/self/status").unwrap();
        ours.send(b"first", Some(file.as_fd())).unwrap();
        ours.send(b"second", None).unwrap();
        let mut buffer = [0; 16];
        let first = theirs.receive(&mut buffer).unwrap();
        assert_eq!(&buffer[..first.len], b"first");
        let mut text = String::new();
        File::from(first.file.unwrap()).read_to_string(&mut text).unwrap();
        assert!(text.starts_with("Name:"));
        let second = theirs.receive(&mut buffer).unwrap();
        assert_eq!(&buffer[..second.len], b"second");
        assert!(second.file.is_none());
    }

    #[test]
    fn a_frame_that_does_not_fit_is_refused() {
        let (ours, theirs) = Socket::pair().unwrap();
        ours.send(b"too long", None).unwrap();
        let refused = theirs.receive(&mut [0; 4]).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn the_end_of_the_other_side_is_seen() {
        let (ours, theirs) = Socket::pair().unwrap();
        assert!(!ours.is_gone(None));
        drop(theirs);
        assert!(ours.is_gone(None));
    }

    #[test]
    fn the_other_side_is_known_by_user_and_process() {
        let (ours, _theirs) = Socket::pair().unwrap();
        assert_eq!(ours.peer_user().unwrap(), own_user());
        let process = ours.peer_process();
        assert!(process.is_some() && !ours.is_gone(process.as_ref()));
    }
}
