//! The worker's state machine: sessions, admission, leases and imports of one engine process.
//!
//! Two callers. The *engine's scheduler thread* (through the shim) calls the methods of [`engine`-side] sections; the
//! module's own threads (listener, peer server, transfer engine) call the rest. `engine-ext` holds the machine behind
//! one short lock, drains [`Effect`]s after every call and carries them out **before** it returns to the caller; that is
//! what makes revoke → fence → free hold (XFER-2): pages in [`Frees`] reach the engine only after the fences.
//!
//! What the engine can see (`evictable`, `held`) changes only in engine-side calls (OWN-2): its memory checks read the
//! two numbers one after the other.

pub mod api;

pub use api::*;
pub mod counters;

pub use counters::Counters;

use std::{collections::VecDeque, sync::Arc};

use crate::{
    id::{ImportId, Incarnation, LeaseId, PrefixHandle, RouterId, SessionId, TurnId},
    time::Now,
    wire::{
        admit::{AdmitAnswer, AdmitRequest, ImportRequest, LoadReport, ReleaseAnswer, ReleaseRequest, ReleasedKv},
        info::{SessionList, SessionView, TransferList},
        reason::{Reason, Refusal},
    },
};

/// See the module.
#[derive(Debug)]
pub struct Worker {
    config: WorkerConfig,
    incarnation: Incarnation,
    effects: VecDeque<Effect>,
    counters: Counters,
    draining: bool,
}

/// Signatures first: the bodies land with the next commits.
#[expect(unused_variables, reason = "signatures are published before their bodies")]
#[allow(missing_docs)]
impl Worker {
    pub fn new(config: WorkerConfig, incarnation: Incarnation) -> Worker {
        Worker {
            config,
            incarnation,
            effects: VecDeque::new(),
            counters: Counters::default(),
            draining: false,
        }
    }
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }
    pub fn poll_timeout(&self) -> Option<Now> {
        None
    }
    pub fn handle_timeout(&mut self, now: Now) {}

    // Engine side.
    pub fn arrive(&mut self, arrival: Arrival, now: Now) -> Result<TurnId, Refusal> {
        Err(Refusal::new(Reason::Draining, "not built yet"))
    }
    pub fn match_turn(&self, turn: TurnId, limit: u32) -> Matched {
        Matched::Tree
    }
    pub fn slots_into(&self, turn: TurnId, out: &mut [i64]) {}
    pub fn claim(&mut self, turn: TurnId, tokens: u32) {}
    pub fn unclaim(&mut self, turn: TurnId) {}
    pub fn begin(&mut self, turn: TurnId, now: Now) -> Frees {
        Frees::default()
    }
    pub fn progress(&mut self, turn: TurnId, readable: u32, row: &[i32], now: Now) {}
    pub fn adopt(&mut self, turn: TurnId, shared: u32, prefix: PrefixHandle, row: &[i32], now: Now) -> Frees {
        Frees::default()
    }
    pub fn share_len(&self, turn: TurnId) -> u32 {
        0
    }
    pub fn commit(&mut self, turn: TurnId, committed: u32, output: &[Token], row: &[i32], now: Now) -> Frees {
        Frees::default()
    }
    pub fn rollback(&mut self, turn: TurnId, end: u32, row: &[i32], how: Rollback, now: Now) -> Frees {
        Frees::default()
    }
    pub fn cancel(&mut self, turn: TurnId, now: Now) {}
    pub fn evictable(&self) -> u32 {
        0
    }
    pub fn held(&self) -> u32 {
        0
    }
    pub fn idle_prefixes(&self) -> impl Iterator<Item = PrefixHandle> {
        std::iter::empty()
    }
    pub fn victim(&mut self, now: Now) -> Option<Victim> {
        None
    }
    pub fn unwedge(&mut self, turn: TurnId, now: Now) -> Frees {
        Frees::default()
    }
    pub fn poll(&mut self, snapshot: &Snapshot, now: Now) -> Vec<Command> {
        Vec::new()
    }
    pub fn landed(
        &mut self,
        import: ImportId,
        have: u32,
        prefix: PrefixHandle,
        head: &[i64],
        slots: &[i64],
        now: Now,
    ) -> Frees {
        Frees::default()
    }
    pub fn land_failed(&mut self, import: ImportId, now: Now) {}
    pub fn import_shared(
        &mut self,
        import: ImportId,
        shared: u32,
        prefix: PrefixHandle,
        new_head: &[i64],
        now: Now,
    ) -> Frees {
        Frees::default()
    }
    pub fn import_committed(&mut self, import: ImportId, now: Now) {}
    pub fn flush(&mut self, now: Now) {}
    pub fn close(&mut self, session: &SessionId, now: Now) -> bool {
        false
    }
    pub fn history_len(&self, session: &SessionId) -> u32 {
        0
    }

    // Service side.
    pub fn admit(&mut self, request: &AdmitRequest, now: Now) -> AdmitAnswer {
        AdmitAnswer {
            can_admit: false,
            mode: None,
            reason: Some(Reason::Draining),
            reservation: None,
            deadline_ms: None,
            resident_tokens: 0,
            epoch: None,
            incarnation: self.incarnation,
            load: self.load(Some(request.key.router)),
        }
    }
    pub fn release(&mut self, session: &SessionId, request: &ReleaseRequest, now: Now) -> ReleaseAnswer {
        ReleaseAnswer {
            released: false,
            kv: ReleasedKv::Kept,
        }
    }
    pub fn import(&mut self, session: &SessionId, request: &ImportRequest, now: Now) -> Result<ImportId, Refusal> {
        Err(Refusal::new(Reason::UnknownReservation, "not built yet"))
    }
    pub fn lease_granted(&mut self, import: ImportId, identity: Identity, tokens: Arc<[Token]>, share: u32, now: Now) {}
    pub fn pull_progress(&mut self, import: ImportId, pulled: u32, now: Now) {}
    pub fn pulled(&mut self, import: ImportId, now: Now) {}
    pub fn confirmed(&mut self, import: ImportId, now: Now) {}
    pub fn import_failed(&mut self, import: ImportId, why: Refusal, now: Now) {}
    pub fn cancel_import(&mut self, import: ImportId, why: Refusal, now: Now) {}
    pub fn lease(&mut self, request: &LeaseRequest, now: Now) -> Result<LeaseAnswer, Refusal> {
        Err(Refusal::new(Reason::UnknownSession, "not built yet"))
    }
    pub fn lease_view(&self, lease: LeaseId, from: u32) -> Result<LeaseView, Refusal> {
        Err(Refusal::new(Reason::LeaseUnknown, "not built yet"))
    }
    pub fn renew(&mut self, lease: LeaseId, now: Now) -> Result<(), Refusal> {
        Err(Refusal::new(Reason::LeaseUnknown, "not built yet"))
    }
    pub fn confirm(&mut self, lease: LeaseId, now: Now) -> Result<(), Refusal> {
        Err(Refusal::new(Reason::LeaseUnknown, "not built yet"))
    }
    pub fn end_lease(&mut self, lease: LeaseId, now: Now) {}
    pub fn load(&self, router: Option<RouterId>) -> LoadReport {
        LoadReport::default()
    }
    pub fn session(&self, session: &SessionId, now: Now) -> Option<SessionView> {
        None
    }
    pub fn sessions(&self, after: Option<&SessionId>, limit: usize, now: Now) -> SessionList {
        SessionList {
            sessions: Vec::new(),
            total: 0,
        }
    }
    pub fn transfers(&self, now: Now) -> TransferList {
        TransferList::default()
    }
    pub fn counters(&self) -> &Counters {
        &self.counters
    }
    pub fn set_draining(&mut self, draining: bool) {
        self.draining = draining;
    }
    pub fn config(&self) -> &WorkerConfig {
        &self.config
    }
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }
}
