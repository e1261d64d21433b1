//! The worker's state machine: sessions, admission, leases and imports of one engine process.
//!
//! Two callers. The *engine's scheduler thread* (through the shim) calls `arrive`, `turns`, `room` and `poll`; the
//! module's own threads (listener, peer server, transfer engine) call `grants`, `imports`, `leases`, `replica`, `handover`
//! and `views`.
//! `engine-ext` holds the machine behind one short lock, drains [`Effect`]s after every call and carries them out
//! **before** it returns to the caller; that is what makes revoke → fence → free hold (XFER-2): pages in [`Frees`] reach
//! the engine only after the fences.
//!
//! What the engine can see (`evictable`, `held`) changes only in engine-side calls (OWN-2): its memory checks read the
//! two numbers one after the other.

pub mod api;
mod arrive;
mod change;
pub mod counters;
mod grants;
mod handover;
mod imports;
mod leases;
mod poll;
mod replica;
mod room;
#[cfg(test)]
mod tests;
mod turns;
mod views;

pub use api::*;
pub use counters::Counters;

use std::collections::{BTreeSet, HashMap, VecDeque};

use crate::{
    admission::{Ledger, Reservations},
    block::Quarantine,
    id::{ImportId, Incarnation, LeaseId, PrefixHandle, ReservationId, TurnId},
    session::{Key, Sessions, Turn, evict::EvictOrder},
    time::Now,
    transfer::{Import, Leases},
    wire::reason::{Reason, Refusal},
};

/// One engine process's sessions. See the module; the engine-side calls are in the order of a turn's life.
#[derive(Clone, Debug)]
pub struct Worker {
    config: WorkerConfig,
    incarnation: Incarnation,
    draining: bool,
    /// Sessions handed over since the drain began.
    drained: u64,

    sessions: Sessions,
    turns: HashMap<TurnId, Turn>,
    order: EvictOrder,
    ledger: Ledger,
    reservations: Reservations,
    leases: Leases,
    imports: HashMap<ImportId, Import>,
    /// Sessions with an announcement to be pulled, the most recently active last (SYNC-1).
    wishes: BTreeSet<(u64, Key)>,
    /// Sessions that the next poll forgets if nothing is known of them: a move or a sync of theirs came to nothing.
    unknown: Vec<Key>,
    /// Turns that lost their placement: the next poll has the engine end them (SES-4).
    aborts: Vec<TurnId>,

    /// Own tokens the engine may take from copies; the sum of the sessions' marks.
    evictable: u32,
    /// Own tokens of copies that an import extends; the sum of the sessions' marks.
    pinned: u32,
    /// Tokens of landing pages, those of dead imports included until the engine has them back.
    landing: u32,
    quarantine: Quarantine,
    /// Handles that nobody needs any more; they go with the next poll.
    forgotten: Vec<PrefixHandle>,
    dropped: Vec<Dropped>,
    /// Imports that the next poll moves on.
    ready: VecDeque<ImportId>,
    /// Sessions whose pages the ledger's snapshot does not know yet.
    fresh: BTreeSet<Key>,

    /// Polls so far.
    polls: u64,
    /// Uses so far: the order of last use.
    uses: u64,
    next_turn: u64,
    next_import: u64,
    load: Load,
    timers: BTreeSet<(Now, Timer)>,
    effects: VecDeque<Effect>,
    counters: Counters,
}

/// An import that died after its pages were allocated, or while the engine was allocating them.
#[derive(Clone, Debug)]
struct Dropped {
    /// Its session: the older copy is free again.
    session: Key,
    /// Its pages and the node locked for it, if the engine has answered.
    landing: Option<(Vec<Slot>, PrefixHandle)>,
}

/// The engine's numbers at the last poll.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    running: u32,
    waiting: u32,
    pending_prefill_tokens: u64,
}

/// What a point in time is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Reservation(ReservationId),
    Import(ImportId),
    Lease(LeaseId),
    /// A move asks for the hand-over again.
    Handover(ImportId),
    /// A failed sync is tried again.
    Sync,
}

impl Worker {
    /// A worker that holds nothing.
    pub fn new(config: WorkerConfig, incarnation: Incarnation) -> Worker {
        // Numbers of an earlier process at this address must not be those of this one (F16); below 2^53 they stay
        // exact in every JSON reader.
        let first = (incarnation.0 & ((1 << 29) - 1)) << 23 | 1;
        let ledger = Ledger::new(config.capacity, config.rho_permille);
        Worker {
            config,
            incarnation,
            draining: false,
            drained: 0,
            sessions: Sessions::default(),
            turns: HashMap::new(),
            order: EvictOrder::default(),
            ledger,
            reservations: Reservations::new(first),
            leases: Leases::new(first),
            imports: HashMap::new(),
            wishes: BTreeSet::new(),
            unknown: Vec::new(),
            aborts: Vec::new(),
            evictable: 0,
            pinned: 0,
            landing: 0,
            quarantine: Quarantine::default(),
            forgotten: Vec::new(),
            dropped: Vec::new(),
            ready: VecDeque::new(),
            fresh: BTreeSet::new(),
            polls: 1,
            uses: 0,
            next_turn: 1,
            next_import: 1,
            load: Load::default(),
            timers: BTreeSet::new(),
            effects: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    /// Work for the module's threads, oldest first.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// When [`Worker::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Now> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Ends what has lasted too long: reservations (ADM-10), leases (XFER-2), imports (XFER-7).
    pub fn handle_timeout(&mut self, now: Now) {
        while let Some(&(at, timer)) = self.timers.first()
            && at <= now
        {
            self.timers.remove(&(at, timer));
            match timer {
                Timer::Reservation(id) => {
                    self.counters.lapses += 1;
                    self.give_up(id, Reason::DeadlineExceeded, now);
                }
                Timer::Import(id) => {
                    let why = Refusal::new(Reason::DeadlineExceeded, "the import's deadline has passed");
                    self.drop_import(id, why, now);
                }
                Timer::Lease(id) => {
                    self.counters.leases_expired += 1;
                    self.revoke(id);
                }
                Timer::Handover(id) => self.ask_handover(id),
                Timer::Sync => self.pump(now),
            }
        }
    }

    /// What it counts.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Its numbers.
    pub fn config(&self) -> &WorkerConfig {
        &self.config
    }

    /// This process.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// ADM-12, MIG-4.
    pub fn set_draining(&mut self, draining: bool) {
        if draining && !self.draining {
            self.drained = 0;
        }
        self.draining = draining;
    }

    /// A refusal, counted.
    fn refusal(&mut self, code: Reason, message: impl Into<String>) -> Refusal {
        self.counters.refused(code);
        Refusal::new(code, message)
    }
}
