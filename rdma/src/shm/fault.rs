//! Faults of a peer, had by the importer that reads from it: nothing of a copy goes through the exporter, so this is
//! where they can be had. Tests alone (feature `fault`).

use std::{
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use super::{importer::Remote, read::Piece};
use crate::fault::{Effect, Fault};

/// How often a lane that stalls looks again.
const PAUSE: Duration = Duration::from_millis(1);

/// Sets the fault of everything one importer reads, while it lives.
#[derive(Clone)]
pub struct Faults(pub(super) Weak<Flaws>);

impl Faults {
    /// From now on reads have this fault, counted in payload bytes of each; `None` heals them.
    pub fn inject(&self, fault: Option<Fault>) {
        if let Some(flaws) = self.0.upgrade() {
            *flaws.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
            flaws.dead.store(false, Ordering::SeqCst);
        }
    }
}

/// The fault there is.
#[derive(Default)]
pub(super) struct Flaws {
    fault: Mutex<Option<Fault>>,
    dead: AtomicBool,
}

/// What it makes of a chunk.
pub(super) enum Flaw {
    None,
    Flip(u64),
    Stall,
    End(u64),
}

impl Flaws {
    /// Whether peers refuse connections now.
    pub(super) fn are_dead(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }

    /// Called before a chunk is copied.
    pub(super) fn before(&self, piece: &Piece, remote: &Arc<Remote>) -> Flaw {
        let Some(fault) = *self.fault.lock().unwrap_or_else(PoisonError::into_inner) else {
            return Flaw::None;
        };
        thread::sleep(fault.pause());
        let len = piece.chunk.len as usize;
        match fault.effect(piece.at, len) {
            Effect::Pass(all) if all == len => Flaw::None,
            Effect::Flip(_, at) => Flaw::Flip(at as u64),
            // A chunk comes whole or not at all: what ends inside one ends before it.
            Effect::Pass(some) => match fault.effect(piece.at + some as u64, len - some) {
                Effect::Stall => stall(),
                Effect::Die => self.die(remote),
                _ => Flaw::End(some as u64),
            },
            Effect::Stall => stall(),
            Effect::Die => self.die(remote),
            Effect::End => Flaw::End(0),
        }
    }

    fn die(&self, remote: &Remote) -> Flaw {
        self.dead.store(true, Ordering::SeqCst);
        remote.socket.shut();
        stall()
    }
}

fn stall() -> Flaw {
    thread::sleep(PAUSE);
    Flaw::Stall
}
