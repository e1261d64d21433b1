//! Commands for a mover's thread. Callers of tcp, shm and verbs send them, the thread takes them between two polls.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use mio::Waker;

/// Hands commands to one thread, which sleeps in the poll that the waker belongs to.
pub(crate) struct Inbox<C> {
    /// `None` once nobody takes them any more.
    commands: Mutex<Option<VecDeque<C>>>,
    waker: Waker,
}

impl<C> Inbox<C> {
    pub(crate) fn new(waker: Waker) -> Arc<Self> {
        Arc::new(Inbox {
            commands: Mutex::new(Some(VecDeque::new())),
            waker,
        })
    }

    /// Gives the command back when nobody would take it.
    pub(crate) fn send(&self, command: C) -> Option<C> {
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

    /// Ends the thread. Returns the commands that it did not see.
    pub(crate) fn close(&self) -> VecDeque<C> {
        let left = self.commands.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.wake();
        left.unwrap_or_default()
    }

    /// What was sent since; `None` once it is closed.
    pub(crate) fn take(&self) -> Option<VecDeque<C>> {
        let mut commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        commands.as_mut().map(std::mem::take)
    }

    fn wake(&self) {
        if let Err(e) = self.waker.wake() {
            tracing::error!(error = %e, "a mover's thread was not woken");
        }
    }
}
