//! Calls [`Worker::handle_timeout`](kvc_proto::worker::Worker) when it is due: reservations and leases end by it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use kvc_proto::time::Now;
use tokio::sync::Notify;

use crate::state::Shared;

/// When the machine wants to be called next.
#[derive(Debug)]
pub(crate) struct Timer {
    due: AtomicU64,
    earlier: Notify,
}

const NEVER: u64 = u64::MAX;

impl Timer {
    pub(crate) fn new() -> Self {
        Self {
            due: AtomicU64::new(NEVER),
            earlier: Notify::new(),
        }
    }

    /// Told after every call into the machine.
    pub(crate) fn arm(&self, due: Option<Now>) {
        let due = due.map_or(NEVER, |now| now.0);
        // A later date needs no wake-up: the task finds at the old one that nothing is due, and sleeps on.
        if due < self.due.swap(due, Ordering::AcqRel) {
            self.earlier.notify_one();
        }
    }
}

/// Runs until its runtime ends.
pub(crate) async fn run(shared: Arc<Shared>) {
    loop {
        let due = shared.timer.due.load(Ordering::Acquire);
        let now = shared.now().0;
        if due <= now {
            shared.call(|worker, now| worker.handle_timeout(now));
            // A machine that names a past date again would otherwise be called in a tight loop.
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        }
        let sleep = tokio::time::sleep(Duration::from_micros((due - now).min(3_600_000_000)));
        tokio::select! {
            () = sleep => {}
            () = shared.timer.earlier.notified() => {}
        }
    }
}
