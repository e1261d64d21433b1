//! The threads that copy: each takes a lane of some read, copies one chunk, and lets the next lane have its turn.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Instant,
};

#[cfg(feature = "fault")]
use super::fault::{Flaw, Flaws};
use super::{
    driver::{Command, Inbox},
    importer::Remote,
    memory,
    read::{Granted, Read, Taken},
    word::Shut,
};
use crate::{error::MoverError, region::Regions};

/// Lanes that have something to copy.
#[derive(Default)]
pub(super) struct Pool {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    lanes: VecDeque<(Arc<Read>, usize)>,
    closed: bool,
}

impl Pool {
    pub(super) fn push(&self, read: Arc<Read>, lane: usize) {
        self.lock().lanes.push_back((read, lane));
        self.wake.notify_one();
    }

    /// Ends the threads.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.wake.notify_all();
    }

    /// Waits for a lane; `None` at the end.
    fn pop(&self) -> Option<(Arc<Read>, usize)> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            match state.lanes.pop_front() {
                Some(lane) => return Some(lane),
                None => state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Puts a lane behind those that wait and takes the first of them; the same one if none waits.
    fn turn(&self, lane: (Arc<Read>, usize)) -> Option<(Arc<Read>, usize)> {
        let mut state = self.lock();
        if state.closed {
            return None;
        }
        match state.lanes.pop_front() {
            Some(next) => {
                state.lanes.push_back(lane);
                Some(next)
            }
            None => Some(lane),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One thread.
pub(super) struct Copier {
    pub(super) pool: Arc<Pool>,
    pub(super) regions: Arc<Regions>,
    pub(super) inbox: Arc<Inbox>,
    #[cfg(feature = "fault")]
    pub(super) flaws: Arc<Flaws>,
}

impl Copier {
    pub(super) fn run(self) {
        let mut next = self.pool.pop();
        while let Some((read, lane)) = next {
            next = match self.step(&read, lane) {
                true => self.pool.turn((read, lane)),
                false => self.pool.pop(),
            };
        }
    }

    /// Copies one chunk; whether the lane goes on.
    fn step(&self, read: &Arc<Read>, lane: usize) -> bool {
        let (granted, remote, call) = match read.take(lane) {
            Taken::Work(granted, remote, call) => (granted, remote, call),
            Taken::Idle => return false,
        };
        if call {
            // A thread that has ended has told the owner already.
            let _ = self.inbox.send(Command::More(read.what.id));
        }
        #[cfg(feature = "fault")]
        let flip = match self.flaws.before(&granted.piece, &remote) {
            Flaw::None => None,
            Flaw::Flip(at) => Some(at),
            Flaw::Stall => {
                read.put_back(granted);
                return !read.gate(lane).is_shut();
            }
            Flaw::End(got) => {
                let expected = granted.piece.chunk.len;
                read.finish(Err(MoverError::Truncated {
                    peer: read.what.peer.to_string(),
                    got,
                    expected,
                }));
                return false;
            }
        };
        let copied = read.gate(lane).pass(|| {
            self.copy(read, &granted, &remote)?;
            #[cfg(feature = "fault")]
            if let Some(at) = flip {
                memory::flip(&self.regions.view(), &granted.piece.chunk.local, at);
            }
            self.check(read, &granted)
        });
        match copied {
            // Who shut the gate tells the owner.
            None => false,
            Some(Ok(())) => match read.landed(granted.piece.chunk.len) {
                None => true,
                Some(stats) => {
                    drop(remote);
                    read.finish(Ok(stats));
                    false
                }
            },
            Some(Err(error)) => {
                drop(remote);
                read.finish(Err(error));
                false
            }
        }
    }

    fn copy(&self, read: &Read, granted: &Granted, remote: &Remote) -> Result<(), MoverError> {
        let peer = || read.what.peer.to_string();
        if Instant::now() >= granted.until {
            return Err(MoverError::Expired { peer: peer() });
        }
        let bad = |what| MoverError::BadFrame {
            peer: peer(),
            what,
            got: 0,
            expected: 1,
        };
        let page = remote.page.get().ok_or_else(|| bad("words"))?;
        let regions = self.regions.view();
        match page.pass(granted.slot, || remote.maps.copy(&granted.piece.chunk, &regions)) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(bad("file of a region")),
            Err(Shut::Revoked) => Err(MoverError::Revoked { peer: peer() }),
            Err(Shut::Closed) => Err(MoverError::PeerGone { peer: peer(), errno: 0 }),
        }
    }

    /// Compares what landed with what the exporter has (XFER-8): a wrong mapping shows here, and a wrong byte.
    fn check(&self, read: &Read, granted: &Granted) -> Result<(), MoverError> {
        let Some(expected) = granted.sum else { return Ok(()) };
        match memory::checksum(&self.regions.view(), &granted.piece.chunk.local) {
            Ok(got) if got == expected => Ok(()),
            Ok(got) => Err(MoverError::Checksum {
                peer: read.what.peer.to_string(),
                got,
                expected,
            }),
            Err(run) => Err(MoverError::LocalRange { run }),
        }
    }
}
