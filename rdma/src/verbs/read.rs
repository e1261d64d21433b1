//! A read between its owner and the importer's thread: commands, and the fence that its owner waits at.

use std::{
    net::SocketAddr,
    sync::{Arc, Condvar, Mutex, OnceLock, PoisonError},
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use crate::{
    error::MoverError,
    inbox,
    mover::{Cancel, Done, LeaseToken, ReadOptions, call},
    plan::Chunk,
};

/// How often a wait at the fence is looked at again; it ends by being told.
const LOOK: Duration = Duration::from_secs(1);

/// What the mover tells its importer.
pub(super) enum Command {
    Read(Read),
    Cancelled(u64),
}

/// A read, planned.
pub(super) struct Read {
    pub(super) id: u64,
    pub(super) peer: Arc<str>,
    /// Where the peer is, and what is to be asked of it; or why nothing will be.
    pub(super) plan: Result<(SocketAddr, Vec<Chunk>), MoverError>,
    pub(super) token: LeaseToken,
    pub(super) options: ReadOptions,
    pub(super) ticket: Ticket,
    pub(super) begun: Instant,
    pub(super) done: Done,
}

/// Hands commands to the importer's thread.
pub(super) type Inbox = inbox::Inbox<Command>;

/// The importer's thread, once it runs.
#[derive(Debug, Default)]
pub(super) struct Home(OnceLock<ThreadId>);

impl Home {
    /// Called by the thread itself.
    pub(super) fn enter(&self) {
        self.0.get_or_init(|| thread::current().id());
    }

    fn is_here(&self) -> bool {
        self.0.get() == Some(&thread::current().id())
    }
}

/// Whether a read is over. The importer holds the one that says so, by dropping it once nothing lands any more.
#[derive(Debug, Default)]
pub(super) struct Over(Mutex<bool>, Condvar);

#[derive(Debug)]
pub(super) struct Ticket(pub(super) Arc<Over>);

impl Drop for Ticket {
    fn drop(&mut self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.1.notify_all();
    }
}

/// A read as its owner holds it.
pub(super) struct Running {
    pub(super) id: u64,
    pub(super) over: Arc<Over>,
    pub(super) inbox: Arc<Inbox>,
    pub(super) home: Arc<Home>,
}

impl Cancel for Running {
    /// The importer's fence: waits until no work request of the read is outstanding. That is a few milliseconds; where
    /// work does not end, `GRACE`, `FLUSH` and two ticks of the importer's, and then as long as the driver takes to destroy
    /// the queue pairs. Called inside another read's `done` it does not wait: this read's own `done` is the fence.
    fn cancel(&self) {
        let Over(over, wake) = &*self.over;
        let is_over = || *over.lock().unwrap_or_else(PoisonError::into_inner);
        if is_over() || self.inbox.send(Command::Cancelled(self.id)).is_some() && is_over() || self.home.is_here() {
            return;
        }
        let mut over = over.lock().unwrap_or_else(PoisonError::into_inner);
        while !*over {
            over = wake.wait_timeout(over, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Answers a command that the thread will not see any more.
pub(super) fn call_off(command: Command) {
    if let Command::Read(Read { ticket, done, .. }) = command {
        drop(ticket);
        call(done, Err(MoverError::Closed));
    }
}
