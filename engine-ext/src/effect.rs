//! Carries out what the machine asks for (ADR 0001): fences before the caller gets any page, the rest handed to the
//! transfer engine.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use kvc_proto::{
    id::{ImportId, LeaseId},
    worker::{Effect, Worker},
};

use crate::{
    state::Shared,
    transfer::{Control, import::Order},
};

/// Something that must be over before pages go back to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fence {
    Lease(LeaseId),
    Import(ImportId),
}

/// Fences that were asked for and are not over yet.
///
/// A fence may be drained by one thread while another thread's call gets the pages it protects. Each fence is announced
/// while the machine's lock is still held, and nobody returns from a call before all announced fences are over.
#[derive(Debug, Default)]
pub(crate) struct Fences {
    queue: Mutex<Vec<Fence>>,
    gate: Mutex<()>,
    open: AtomicUsize,
}

impl Fences {
    fn announce(&self, fence: Fence) {
        self.open.fetch_add(1, Ordering::AcqRel);
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).push(fence);
    }

    /// Returns when every fence announced before the call is over, carrying out what nobody else does.
    fn settle(&self, carry_out: impl Fn(Fence)) {
        if self.open.load(Ordering::Acquire) == 0 {
            return;
        }
        let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let batch = std::mem::take(&mut *self.queue.lock().unwrap_or_else(PoisonError::into_inner));
            if batch.is_empty() {
                return;
            }
            for fence in batch {
                carry_out(fence);
                self.open.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }
}

/// What is left to do once the lock has been dropped.
#[derive(Default)]
pub(crate) struct Left {
    effects: Vec<Effect>,
    /// The reads of leases that others have followed.
    earlier: Vec<Arc<Control>>,
}

/// Takes the machine's effects while its lock is held. Fences are announced, and an import's task is told its steps: on two
/// threads one step could overtake another, and an end that comes after the question that follows it would be taken for
/// the question's.
pub(crate) fn drain(shared: &Arc<Shared>, worker: &mut Worker) -> Left {
    let mut left = Left::default();
    while let Some(effect) = worker.poll_effect() {
        match effect {
            Effect::FenceLease { lease } => shared.fences.announce(Fence::Lease(lease)),
            Effect::FenceImport { import } => shared.fences.announce(Fence::Import(import)),
            Effect::OpenLease {
                import,
                session,
                peer,
                incarnation,
                placement,
                kind,
                have,
            } => {
                // The machine has started it by itself, perhaps.
                shared.imports.adopt(shared, import);
                let order = Order {
                    session,
                    peer,
                    incarnation,
                    placement,
                    kind,
                    have,
                };
                left.earlier.extend(shared.imports.open(import, order));
            }
            Effect::AskHandover { import, peer, request } => shared.imports.ask_handover(import, peer, request),
            Effect::Pull { import, from, slots } => shared.imports.pull(import, from, slots),
            Effect::Confirm { import } => shared.imports.confirm(import),
            Effect::EndLease { import } => shared.imports.end(import),
            other => left.effects.push(other),
        }
    }
    left
}

/// After the lock has been dropped, before the caller gets its answer.
pub(crate) fn carry_out(shared: &Arc<Shared>, left: Left) {
    shared.fences.settle(|fence| match fence {
        Fence::Lease(lease) => shared.exports.fence(lease, &shared.pool),
        Fence::Import(import) => shared.imports.fence(import),
    });
    left.earlier.iter().for_each(|reads| reads.fence());
    for effect in left.effects {
        match effect {
            Effect::Announce { to, announcement } => shared.announcer.put(shared, to, announcement),
            Effect::ImportDone { import, outcome } => shared.imports.done(shared, import, outcome),
            Effect::LeaseGrown { .. } | Effect::Arrived { .. } => shared.exports.changed(),
            Effect::Wake => shared.wake.set(),
            // Done in `drain`.
            Effect::FenceLease { .. }
            | Effect::FenceImport { .. }
            | Effect::OpenLease { .. }
            | Effect::AskHandover { .. }
            | Effect::Pull { .. }
            | Effect::Confirm { .. }
            | Effect::EndLease { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, Barrier, atomic::AtomicBool},
        thread,
        time::Duration,
    };

    use super::*;

    #[test]
    fn a_call_waits_for_a_fence_that_another_thread_carries_out() {
        // XFER-2: the pages of a revoked lease may be in *this* call's answer.
        let fences = Arc::new(Fences::default());
        let over = Arc::new(AtomicBool::new(false));
        let begun = Arc::new(Barrier::new(2));
        fences.announce(Fence::Lease(LeaseId(1)));
        let other = thread::spawn({
            let (fences, over, begun) = (fences.clone(), over.clone(), begun.clone());
            move || {
                fences.settle(|_| {
                    begun.wait();
                    thread::sleep(Duration::from_millis(30));
                    over.store(true, Ordering::SeqCst);
                })
            }
        });
        begun.wait();
        fences.settle(|_| unreachable!("the other thread took it"));
        assert!(over.load(Ordering::SeqCst));
        other.join().unwrap();
    }

    #[test]
    fn fences_run_in_the_order_they_were_announced() {
        let fences = Fences::default();
        let order = Mutex::new(Vec::new());
        for i in 0..3 {
            fences.announce(Fence::Import(ImportId(i)));
        }
        fences.settle(|fence| order.lock().unwrap().push(fence));
        assert_eq!(
            *order.lock().unwrap(),
            (0..3).map(|i| Fence::Import(ImportId(i))).collect::<Vec<_>>()
        );
    }
}
