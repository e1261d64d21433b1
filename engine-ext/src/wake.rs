//! [`Wake`]: a descriptor that becomes readable when the engine's loop has work, for loops that sleep while idle.

use std::{
    io::{self, ErrorKind, Read, Write},
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    sync::atomic::{AtomicBool, Ordering},
};

/// A connected pair: one end is polled by the engine, the other written to. At most one byte lies in it.
#[derive(Debug)]
pub(crate) struct Wake {
    engine: UnixStream,
    module: UnixStream,
    pending: AtomicBool,
}

impl Wake {
    pub(crate) fn new() -> io::Result<Self> {
        let (engine, module) = UnixStream::pair()?;
        engine.set_nonblocking(true)?;
        module.set_nonblocking(true)?;
        Ok(Self {
            engine,
            module,
            pending: AtomicBool::new(false),
        })
    }

    /// The engine's end.
    pub(crate) fn fd(&self) -> RawFd {
        self.engine.as_raw_fd()
    }

    /// Makes it readable.
    pub(crate) fn set(&self) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            // A full buffer means that it is readable already.
            let _ = (&self.module).write(&[1]);
        }
    }

    /// Whether it has been set since the last [`Wake::clear`].
    #[cfg(feature = "harness")]
    pub(crate) fn is_set(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Makes it unreadable; called by the engine's loop when it has woken, before it polls.
    pub(crate) fn clear(&self) {
        let mut sink = [0; 16];
        loop {
            match (&self.engine).read(&mut sink) {
                Ok(n) if n > 0 => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                _ => break,
            }
        }
        // Last: a wake in between leaves no byte, and the poll that follows sees its work.
        self.pending.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(wake: &Wake) -> bool {
        let mut byte = [0];
        matches!((&wake.engine).read(&mut byte), Ok(1))
    }

    #[test]
    fn it_is_readable_once_however_often_it_is_set() {
        let wake = Wake::new().unwrap();
        assert!(!readable(&wake));
        wake.set();
        wake.set();
        assert!(readable(&wake));
        assert!(!readable(&wake));
    }

    #[test]
    fn it_can_be_set_again_after_clearing() {
        let wake = Wake::new().unwrap();
        wake.set();
        wake.clear();
        assert!(!readable(&wake));
        wake.set();
        assert!(readable(&wake));
    }
}
