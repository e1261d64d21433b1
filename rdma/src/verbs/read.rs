//! A read between its owner and the importer's thread: commands, and the fence that its owner waits at.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use mio::Waker;

use crate::{
    error::MoverError,
    mover::{Cancel, Done, LeaseToken, ReadOptions, ReadStats},
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

/// Hands commands to the thread.
pub(super) struct Inbox {
    /// `None` once the thread has ended.
    commands: Mutex<Option<VecDeque<Command>>>,
    waker: Waker,
    /// The importer's thread, once it runs.
    thread: Mutex<Option<ThreadId>>,
}

impl Inbox {
    pub(super) fn new(waker: Waker) -> Arc<Self> {
        Arc::new(Inbox {
            commands: Mutex::new(Some(VecDeque::new())),
            waker,
            thread: Mutex::default(),
        })
    }

    /// Called by the thread itself.
    pub(super) fn begin(&self) {
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current().id());
    }

    /// Gives the command back when nobody would read it.
    pub(super) fn send(&self, command: Command) -> Option<Command> {
        {
            let mut commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
            match commands.as_mut() {
                Some(queue) => queue.push_back(command),
                None => return Some(command),
            }
        }
        self.wake();
        None
    }

    /// Ends the thread; what it still has is called off. Returns commands it did not see.
    pub(super) fn close(&self) -> VecDeque<Command> {
        let left = self.commands.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.wake();
        left.unwrap_or_default()
    }

    /// `None` once it is closed.
    pub(super) fn take(&self) -> Option<VecDeque<Command>> {
        self.commands
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_mut()
            .map(std::mem::take)
    }

    fn wake(&self) {
        if let Err(e) = self.waker.wake() {
            tracing::error!(error = %e, "importer was not woken");
        }
    }

    fn is_here(&self) -> bool {
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) == Some(thread::current().id())
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
}

impl Cancel for Running {
    /// The importer's fence: waits until no work request of the read is outstanding. That is a few milliseconds; where
    /// work does not end, `GRACE`, `FLUSH` and two ticks of the importer's, and then as long as the driver takes to destroy
    /// the queue pairs. Called inside another read's `done` it does not wait: this read's own `done` is the fence.
    fn cancel(&self) {
        let Over(over, wake) = &*self.over;
        let is_over = || *over.lock().unwrap_or_else(PoisonError::into_inner);
        if is_over() || self.inbox.send(Command::Cancelled(self.id)).is_some() && is_over() || self.inbox.is_here() {
            return;
        }
        let mut over = over.lock().unwrap_or_else(PoisonError::into_inner);
        while !*over {
            over = wake.wait_timeout(over, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// A panic in an owner's `done` must not take every other read with it.
pub(super) fn call(done: Done, result: Result<ReadStats, MoverError>) {
    if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
        tracing::error!("a read's done panicked");
    }
}

/// Answers a command that the thread will not see any more.
pub(super) fn call_off(command: Command) {
    if let Command::Read(Read { ticket, done, .. }) = command {
        drop(ticket);
        call(done, Err(MoverError::Closed));
    }
}
