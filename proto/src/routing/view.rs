//! What the router knows of its workers: role, health, incarnation, inflight, assigned (algorithms §1, ROUTE-6).
//! Written by the router's pollers and by [`super::Dispatch`].

use std::sync::Arc;

use crate::{
    id::Incarnation,
    wire::{
        admit::{LoadReport, PeerRef},
        info::{Role, WorkerInfo},
    },
};

/// A worker's place in the router's configuration; never changes while the router runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerIndex(pub u16);

/// One process of a worker: what a session left there is forgotten when the process is replaced (ROUTE-6, F16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// Which worker.
    pub worker: WorkerIndex,
    /// Which of its processes, counted by the router.
    pub generation: u32,
}

/// Whether a worker can take work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// Not heard of since the router started.
    #[default]
    Unknown,
    /// It answers.
    Up,
    /// It answers and refuses new work (ADM-12).
    Draining,
    /// It does not answer.
    Down,
}

impl Health {
    /// As `/v1/workers` and the metrics write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Health::Unknown => "unknown",
            Health::Up => "up",
            Health::Draining => "draining",
            Health::Down => "down",
        }
    }
}

/// One worker.
#[derive(Clone, Debug)]
pub struct Worker {
    role: Role,
    health: Health,
    incarnation: Option<Incarnation>,
    generation: u32,
    peer: Arc<str>,
    inflight: u32,
    assigned: u64,
    failures: u32,
    load: LoadReport,
    max_uncached_tokens: u32,
}

/// One request counted in a worker's `inflight`. It cannot be copied and [`View::leave`] takes it: the count goes down
/// exactly once per request (algorithms §1).
#[derive(Debug)]
#[must_use = "the worker's inflight count stays up until the ticket is handed back"]
pub struct Ticket(WorkerIndex);

/// All workers.
#[derive(Clone, Debug)]
pub struct View {
    workers: Vec<Worker>,
    next_prefill: usize,
    next_decode: usize,
}

/// Failed executions in a row after which a worker counts as down until it answers a poll again (DISP-8, F15).
const FAILURES_MAX: u32 = 3;

impl View {
    /// The configured workers; none is a candidate before [`View::seen`].
    pub fn new(roles: impl IntoIterator<Item = Role>) -> View {
        let worker = |role| Worker {
            role,
            health: Health::Unknown,
            incarnation: None,
            generation: 0,
            peer: "".into(),
            inflight: 0,
            assigned: 0,
            failures: 0,
            load: LoadReport::default(),
            max_uncached_tokens: 0,
        };
        View {
            workers: roles.into_iter().map(worker).collect(),
            next_prefill: 0,
            next_decode: 0,
        }
    }

    /// How many workers are configured.
    pub fn len(&self) -> usize {
        self.workers.len()
    }

    /// No worker is configured.
    pub fn is_empty(&self) -> bool {
        self.workers.is_empty()
    }

    /// One worker.
    ///
    /// # Panics
    /// If `w` was not given out by this view.
    pub fn worker(&self, w: WorkerIndex) -> &Worker {
        &self.workers[usize::from(w.0)]
    }

    /// The worker's present process.
    pub fn at(&self, w: WorkerIndex) -> At {
        At {
            worker: w,
            generation: self.worker(w).generation,
        }
    }

    /// Every worker.
    pub fn all(&self) -> impl Iterator<Item = WorkerIndex> {
        // The configuration holds at most 65,535 workers.
        (0..self.workers.len()).map(|i| WorkerIndex(i as u16))
    }

    /// Those that can take turns now (ROUTE-6), in index order.
    pub fn decoders(&self) -> impl Iterator<Item = WorkerIndex> {
        self.all().filter(|&w| self.worker(w).takes_turns())
    }

    /// Those that answer, also while they drain: they may hold sessions (MIG-4).
    pub fn answering(&self) -> impl Iterator<Item = WorkerIndex> {
        self.all().filter(|&w| self.worker(w).answers())
    }

    /// The worker whose present process is that one.
    pub fn process(&self, incarnation: Incarnation) -> Option<WorkerIndex> {
        self.all().find(|&w| self.worker(w).incarnation == Some(incarnation))
    }

    /// |D|: workers that take turns, whatever their health.
    pub fn decoders_configured(&self) -> usize {
        self.workers.iter().filter(|w| w.role != Role::Prefill).count()
    }

    /// A worker has answered a poll. Another incarnation than known: everything sessions left there is forgotten.
    pub fn seen(&mut self, w: WorkerIndex, info: &WorkerInfo) {
        self.incarnation_is(w, info.incarnation);
        let worker = self.worker_mut(w);
        worker.health = if info.draining { Health::Draining } else { Health::Up };
        worker.failures = 0;
        worker.load = info.load;
        worker.max_uncached_tokens = info.max_uncached_tokens;
        if *worker.peer != *info.peer {
            worker.peer = info.peer.as_str().into();
        }
    }

    /// A worker's answer names its process.
    pub fn incarnation_is(&mut self, w: WorkerIndex, incarnation: Incarnation) {
        let worker = self.worker_mut(w);
        if worker.incarnation.is_some_and(|held| held != incarnation) {
            worker.generation = worker.generation.wrapping_add(1);
        }
        worker.incarnation = Some(incarnation);
    }

    /// The worker's last load report.
    pub fn load_is(&mut self, w: WorkerIndex, load: LoadReport) {
        self.worker_mut(w).load = load;
    }

    /// It cannot be reached: no candidate until it is seen again.
    pub fn lost(&mut self, w: WorkerIndex) {
        self.worker_mut(w).health = Health::Down;
    }

    /// It said that it is draining (ADM-12).
    pub fn draining(&mut self, w: WorkerIndex) {
        let worker = self.worker_mut(w);
        if worker.health == Health::Up {
            worker.health = Health::Draining;
        }
    }

    /// An execution on it failed: its health is charged, not the session (DISP-8).
    pub fn failed(&mut self, w: WorkerIndex) {
        let worker = self.worker_mut(w);
        worker.failures += 1;
        if worker.failures >= FAILURES_MAX {
            worker.health = Health::Down;
        }
    }

    /// An execution on it went well (F15).
    pub fn succeeded(&mut self, w: WorkerIndex) {
        self.worker_mut(w).failures = 0;
    }

    /// A routing decision fell on it.
    pub fn assign(&mut self, w: WorkerIndex) {
        self.worker_mut(w).assigned += 1;
    }

    /// A request goes there.
    pub fn enter(&mut self, w: WorkerIndex) -> Ticket {
        self.worker_mut(w).inflight += 1;
        Ticket(w)
    }

    /// The request is over: done, failed or cancelled.
    pub fn leave(&mut self, ticket: Ticket) {
        let worker = self.worker_mut(ticket.0);
        debug_assert!(worker.inflight > 0);
        worker.inflight = worker.inflight.saturating_sub(1);
    }

    /// DISP-3: the replica's holder if it can prefill now, else the next prefill worker in turn; none if there is no
    /// prefill worker that answers. `both` workers prefill their own turns: moving their KV would win nothing.
    pub fn next_prefill(&mut self, replica: Option<At>) -> Option<WorkerIndex> {
        if let Some(at) = replica.filter(|&at| self.is_present(at) && self.worker(at.worker).prefills()) {
            return Some(at.worker);
        }
        let chosen = self.in_turn(self.next_prefill, Worker::prefills)?;
        self.next_prefill = usize::from(chosen.0) + 1;
        Some(chosen)
    }

    /// SYNC-1: who keeps the replica of a session that runs on `owner`: its holder if that process can prefill now, else
    /// the worker that [`View::next_prefill`] would give, whose turn it stays.
    pub fn backup(&self, replica: Option<At>, owner: WorkerIndex) -> Option<WorkerIndex> {
        let can = |w: &Worker| w.prefills() && w.incarnation.is_some();
        let kept = replica.filter(|&at| self.is_present(at) && can(self.worker(at.worker)));
        let chosen = kept
            .map(|at| at.worker)
            .or_else(|| self.in_turn(self.next_prefill, can))?;
        (chosen != owner).then_some(chosen)
    }

    /// The process is the worker's present one.
    pub fn is_present(&self, at: At) -> bool {
        self.at(at.worker) == at
    }

    /// DISP-5: the next worker in turn for a request that keeps no session, not one of `except`.
    pub fn next_decode(&mut self, except: &[WorkerIndex]) -> Option<WorkerIndex> {
        let excluded = |i: usize| except.iter().any(|w| usize::from(w.0) == i);
        let n = self.workers.len();
        let chosen = (0..n)
            .map(|k| (self.next_decode + k) % n)
            .find(|&i| self.workers[i].takes_turns() && !excluded(i))?;
        self.next_decode = chosen + 1;
        Some(WorkerIndex(chosen as u16))
    }

    fn in_turn(&self, from: usize, can: impl Fn(&Worker) -> bool) -> Option<WorkerIndex> {
        let n = self.workers.len();
        let found = (0..n).map(|k| (from + k) % n).find(|&i| can(&self.workers[i]))?;
        Some(WorkerIndex(found as u16))
    }

    fn worker_mut(&mut self, w: WorkerIndex) -> &mut Worker {
        &mut self.workers[usize::from(w.0)]
    }
}

impl Worker {
    /// What it is for.
    pub fn role(&self) -> Role {
        self.role
    }
    /// Whether it can take work.
    pub fn health(&self) -> Health {
        self.health
    }
    /// Its process, once it has answered.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.incarnation
    }
    /// `host:port` of its peer control plane, empty before it has answered.
    pub fn peer(&self) -> &str {
        &self.peer
    }
    /// Requests dispatched there and not finished.
    pub fn inflight(&self) -> u32 {
        self.inflight
    }
    /// Routing decisions for it so far.
    pub fn assigned(&self) -> u64 {
        self.assigned
    }
    /// Its last load report.
    pub fn load(&self) -> &LoadReport {
        &self.load
    }
    /// Its τ_append in tokens, 0 before it has answered.
    pub fn max_uncached_tokens(&self) -> u32 {
        self.max_uncached_tokens
    }
    /// Its present process as its peers reach it, once it has answered.
    pub fn as_peer(&self) -> Option<PeerRef> {
        let incarnation = self.incarnation.filter(|_| !self.peer.is_empty())?;
        Some(PeerRef {
            peer: self.peer.to_string(),
            incarnation,
        })
    }
    /// It answers, whether it takes work or not.
    pub fn answers(&self) -> bool {
        matches!(self.health, Health::Up | Health::Draining)
    }
    /// It can take turns.
    pub fn takes_turns(&self) -> bool {
        self.health == Health::Up && self.role != Role::Prefill
    }
    fn prefills(&self) -> bool {
        self.role == Role::Prefill && self.health == Health::Up && !self.peer.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::testing::{D0, D1, D2, View3, info};

    #[test]
    fn three_failures_in_a_row_take_a_worker_out_and_a_poll_brings_it_back() {
        // DISP-8, F15
        let mut v = View3::new().view;
        v.failed(D0);
        v.failed(D0);
        v.succeeded(D0);
        v.failed(D0);
        v.failed(D0);
        assert_eq!(v.worker(D0).health(), Health::Up);
        v.failed(D0);
        assert_eq!(v.worker(D0).health(), Health::Down);
        v.seen(D0, &info(1));
        assert_eq!(v.worker(D0).health(), Health::Up);
    }

    #[test]
    fn requests_without_a_session_go_round() {
        // DISP-5
        let mut v = View3::new().view;
        let picks: Vec<_> = (0..4).filter_map(|_| v.next_decode(&[])).collect();
        assert_eq!(picks, [D0, D1, D2, D0]);
        v.lost(D1);
        assert_eq!(v.next_decode(&[]), Some(D2));
        assert_eq!(v.next_decode(&[D0, D2]), None);
    }

    #[test]
    fn the_replica_holder_prefills_first_and_others_in_turn() {
        // DISP-3
        let mut v = View::new([Role::Prefill, Role::Prefill, Role::Decode]);
        let [p0, p1] = [WorkerIndex(0), WorkerIndex(1)];
        for w in [p0, p1, WorkerIndex(2)] {
            v.seen(w, &info(u64::from(w.0) + 1));
        }
        assert_eq!(v.next_prefill(None), Some(p0));
        assert_eq!(v.next_prefill(None), Some(p1));
        assert_eq!(v.next_prefill(None), Some(p0));
        let replica = v.at(p0);
        assert_eq!(v.next_prefill(Some(replica)), Some(p0));
        v.seen(p0, &info(77));
        assert_eq!(v.next_prefill(Some(replica)), Some(p1), "another process holds nothing");
        v.lost(p0);
        v.lost(p1);
        assert_eq!(v.next_prefill(Some(replica)), None);
    }

    #[test]
    fn a_backup_is_the_replicas_holder_or_who_is_next_and_never_the_owner() {
        // SYNC-1
        let mut v = View::new([Role::Prefill, Role::Prefill, Role::Decode]);
        let [p0, p1, d] = [WorkerIndex(0), WorkerIndex(1), WorkerIndex(2)];
        assert_eq!(v.backup(None, d), None, "none has answered");
        for w in [p0, p1, d] {
            v.seen(w, &info(u64::from(w.0) + 1));
        }
        assert_eq!(
            [v.backup(None, d), v.backup(None, d)],
            [Some(p0); 2],
            "asking takes no turn"
        );
        let replica = v.at(p1);
        assert_eq!(v.backup(Some(replica), d), Some(p1));
        assert_eq!(v.backup(Some(replica), p1), None);
        v.seen(p1, &info(77));
        assert_eq!(v.backup(Some(replica), d), Some(p0), "another process holds nothing");
        v.lost(p0);
        v.lost(p1);
        assert_eq!(v.backup(Some(replica), d), None);
    }
}
