//! The importer's side: one task per import, lease → land → pull → confirm (`engine-ext/src/transfer/import.rs`).

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kvc_proto::{
    id::{ImportId, Incarnation, LeaseId, Placement, SessionId},
    wire::{
        admit::ImportRequest,
        reason::{Reason, Refusal},
    },
    worker::{Have, ImportDone, LeaseKind, Slot},
};

use super::{
    handover::Question,
    message::{CallId, NodeId, PeerWhat, Reply},
    oracle::Oracle,
    process::{Process, Tick},
};

/// How long a peer may take to answer beyond what it waits for news.
const ANSWER: u64 = 300_000;
/// Reads in flight.
const DEPTH: usize = 3;
/// A backup's pull that makes way looks again after this long.
const WAY: u64 = 3_000;

/// What to pull, from whom, and what for.
#[derive(Clone, Debug)]
pub struct Order {
    /// The session.
    pub session: SessionId,
    /// The peer.
    pub peer: NodeId,
    /// Its process.
    pub incarnation: Incarnation,
    /// The placement meant.
    pub placement: Placement,
    /// What for.
    pub kind: LeaseKind,
    /// What is here already.
    pub have: Option<Have>,
}

/// A running import.
#[derive(Clone, Debug)]
pub struct Task {
    /// Who waits for its end.
    pub(super) call: Option<CallId>,
    pub(super) order: Order,
    lease: Option<LeaseId>,
    lives: u64,
    total: u32,
    from: u32,
    slots: Arc<[Slot]>,
    /// Tokens of `slots` that reads were started for, and that have arrived.
    known: usize,
    arrived: usize,
    /// Readable at the peer, not asked for yet.
    offered: Vec<Slot>,
    calls: BTreeMap<CallId, Step>,
    pulling: bool,
    confirming: bool,
    /// MIG-1: the question to the source.
    pub(super) question: Option<Question>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Lease,
    Watch,
    Wait,
    Read(usize, usize),
    Renew,
    Confirm,
    Handover,
}

impl Task {
    fn new(call: Option<CallId>, order: Order) -> Task {
        Task {
            call,
            order,
            lease: None,
            lives: u64::MAX,
            total: 0,
            from: 0,
            slots: Arc::from([]),
            known: 0,
            arrived: 0,
            offered: Vec::new(),
            calls: BTreeMap::new(),
            pulling: false,
            confirming: false,
            question: None,
        }
    }
}

impl Process {
    /// `POST …/import`.
    pub(super) fn import(
        &mut self,
        call: CallId,
        session: &SessionId,
        request: &ImportRequest,
    ) -> Result<ImportId, Refusal> {
        let before = self.w.session(session, self.now);
        // The task has its place before the machine's effects are carried out.
        let import = self.w.import(session, request, self.now)?;
        let order = Order {
            session: session.clone(),
            peer: request.peer.parse().unwrap_or(self.id),
            incarnation: request.incarnation,
            placement: request.placement,
            kind: LeaseKind::Follow,
            have: None,
        };
        self.imports.insert(import, Task::new(Some(call), order));
        self.dirty = true;
        self.ask(|_, _| ());
        // Without a grant nothing is placed here: a move's number is pending, a replica's is its owner's.
        if request.reservation.is_some() {
            self.histories.remove(session);
            self.placed(session, before.as_ref(), Some(request.placement));
        }
        Ok(import)
    }

    /// A lease is wanted: the first, or that of a further round. The machine itself begins those of a backup.
    pub(super) fn import_open(&mut self, import: ImportId, order: Order) {
        let call = self.imports.get(&import).and_then(|t| t.call);
        let Order {
            session,
            peer,
            placement,
            kind,
            have,
            ..
        } = order.clone();
        self.log(|| {
            let held = have.map_or(0, |h| h.tokens);
            format!(
                "import {import} of {session} opens at {peer}: {kind:?} under {}, holds {held}",
                placement.n
            )
        });
        // What an earlier round asked is of no interest any more.
        self.calls.retain(|_, i| *i != import);
        self.imports.insert(import, Task::new(call, order));
        let until = self.w.config().lease_max.as_micros() as u64;
        self.import_call(
            import,
            PeerWhat::Lease(session, placement, kind, have),
            Step::Lease,
            until,
        );
        self.milestone("opens", peer);
    }

    pub(super) fn import_pull(&mut self, import: ImportId, from: u32, slots: Arc<[Slot]>) {
        let Some(task) = self.imports.get_mut(&import) else {
            return;
        };
        (task.from, task.slots, task.pulling) = (from, slots.clone(), true);
        self.pool.land(import, &slots);
        self.import_watch(import);
    }

    pub(super) fn import_confirm(&mut self, import: ImportId) {
        let Some(task) = self.imports.get_mut(&import) else {
            return;
        };
        task.confirming = true;
        let Some(lease) = task.lease else { return };
        if task.pulling {
            self.import_call(import, PeerWhat::Confirm(lease), Step::Confirm, ANSWER);
        } else {
            // It lacks nothing, but only a range that is readable throughout is confirmed.
            let end = task.total;
            self.import_call(import, PeerWhat::Watch(lease, end), Step::Wait, ANSWER);
        }
    }

    /// The lease is given back; whether that arrives does not matter (F13).
    pub(super) fn import_end(&mut self, import: ImportId) {
        let Some(task) = self.imports.get_mut(&import) else {
            return;
        };
        if let Some(lease) = task.lease.take() {
            let (peer, to) = (task.order.peer, task.order.incarnation);
            self.peer_send(peer, to, PeerWhat::End(lease));
        }
    }

    /// XFER-2: nothing writes into the landing pages any more.
    pub(super) fn fence_import(&mut self, import: ImportId) {
        if let Some(task) = self.imports.get_mut(&import) {
            task.calls.retain(|_, step| !matches!(step, Step::Read(..)));
            task.offered.clear();
        }
        self.pool.landed(import);
    }

    pub(super) fn import_done(&mut self, import: ImportId, outcome: Result<ImportDone, Refusal>) {
        self.log(|| format!("import {import} is over: {outcome:?}"));
        self.pool.landed(import);
        if let Some(task) = self.imports.remove(&import) {
            self.calls.retain(|_, i| *i != import);
            self.dirty = true;
            if task.order.kind == LeaseKind::Sync && outcome.is_err() {
                self.unsynced.insert(task.order.session);
            }
            if let Some(call) = task.call {
                let answer = outcome
                    .map(|done| done.answer(0, Duration::ZERO))
                    .map_err(|why| why.code);
                self.reply(call, Reply::Imported(answer));
            }
        }
    }

    /// A peer has answered one of this process's calls.
    pub(super) fn import_reply(&mut self, call: CallId, reply: Reply) {
        let Some(import) = self.calls.remove(&call) else { return };
        let Some(step) = self.imports.get_mut(&import).and_then(|t| t.calls.remove(&call)) else {
            return;
        };
        match (step, reply) {
            (Step::Lease, Reply::Granted(grant)) => {
                let Some(task) = self.imports.get_mut(&import) else {
                    return;
                };
                task.lease = Some(grant.lease);
                task.total = grant.after + grant.tokens.len() as u32;
                task.lives = grant.lives.as_micros() as u64;
                let (renew, lease, peer) = (task.lives / 3, grant.lease, task.order.peer);
                self.after(renew, Tick::Renew(import, lease));
                self.ask(|w, now| w.lease_granted(import, *grant, now));
                self.milestone("leased", peer);
            }
            (Step::Watch, Reply::View(view)) => self.import_view(import, view.slots, view.complete),
            (Step::Wait, Reply::View(view)) => {
                let Some(lease) = self.imports.get(&import).and_then(|t| t.lease) else {
                    return;
                };
                let (what, next) = match view.complete {
                    true => (PeerWhat::Confirm(lease), Step::Confirm),
                    false => (PeerWhat::Watch(lease, view.from), Step::Wait),
                };
                self.import_call(import, what, next, ANSWER);
            }
            (Step::Read(at, n), Reply::Bytes(bytes)) if bytes.len() == n => self.import_bytes(import, at, &bytes),
            (Step::Renew, Reply::Fine) => {
                if let Some((lives, lease)) = self.imports.get(&import).and_then(|t| Some((t.lives, t.lease?))) {
                    self.after(lives / 3, Tick::Renew(import, lease));
                }
            }
            (Step::Confirm, Reply::Fine) => {
                self.ask(|w, now| w.confirmed(import, now));
                if let Some(peer) = self.imports.get(&import).map(|t| t.order.peer) {
                    self.milestone("confirmed", peer);
                }
            }
            (Step::Handover, Reply::HandedOver(answer)) => self.handover_answered(import, Ok(answer)),
            (Step::Handover, Reply::No(why)) => self.handover_answered(import, Err(why)),
            // It was given back before the peer heard of this.
            (Step::Renew, Reply::No(_)) if !self.leased(import) => {}
            (_, Reply::No(why)) => self.import_fail(import, why),
            (step, reply) => {
                self.watch.fire(
                    Oracle::Driver,
                    format!("{reply:?} in answer to {step:?} of import {import}"),
                );
            }
        }
    }

    /// A call to a peer has broken, or was not answered in time.
    pub(super) fn import_reset(&mut self, call: CallId) {
        let Some(import) = self.calls.remove(&call) else { return };
        let waited = self.imports.get_mut(&import).and_then(|t| t.calls.remove(&call));
        let why = Refusal::new(Reason::PeerUnreachable, "no answer");
        match waited {
            Some(Step::Handover) => self.handover_answered(import, Err(why)),
            Some(Step::Renew) if !self.leased(import) => {}
            Some(_) => self.import_fail(import, why),
            None => {}
        }
    }

    pub(super) fn import_renew(&mut self, import: ImportId, lease: LeaseId) {
        let Some(task) = self.imports.get(&import) else { return };
        if task.lease == Some(lease) {
            let within = task.lives / 3;
            self.import_call(import, PeerWhat::Renew(lease), Step::Renew, within);
        }
    }

    fn leased(&self, import: ImportId) -> bool {
        self.imports.get(&import).is_some_and(|t| t.lease.is_some())
    }

    fn import_fail(&mut self, import: ImportId, why: Refusal) {
        self.fence_import(import);
        self.ask(|w, now| w.import_failed(import, why, now));
    }

    fn import_watch(&mut self, import: ImportId) {
        let Some(task) = self.imports.get(&import) else { return };
        let at = task.from + (task.known + task.offered.len()) as u32;
        if let Some(lease) = task.lease {
            self.import_call(import, PeerWhat::Watch(lease, at), Step::Watch, ANSWER);
        }
    }

    fn import_view(&mut self, import: ImportId, slots: Vec<Slot>, complete: bool) {
        let Some(task) = self.imports.get_mut(&import) else {
            return;
        };
        let left = task.slots.len() - task.known - task.offered.len();
        task.offered.extend(slots.into_iter().take(left));
        let more = task.known + task.offered.len() < task.slots.len();
        self.import_reads(import);
        match (more, complete) {
            (true, true) => self.import_fail(import, Refusal::new(Reason::RangeNotReadable, "the range ended early")),
            (true, false) => self.import_watch(import),
            (false, _) => {}
        }
    }

    pub(super) fn import_reads(&mut self, import: ImportId) {
        loop {
            let n = self.speed.read_tokens;
            // SYNC-3: one small read at a time, and none while anything that is served moves.
            let low = self
                .imports
                .get(&import)
                .is_some_and(|t| t.order.kind == LeaseKind::Sync);
            let depth = if low { 1 } else { DEPTH };
            if low && self.serving() {
                self.after(WAY, Tick::Reads(import));
                return;
            }
            let Some(task) = self.imports.get_mut(&import) else {
                return;
            };
            let flying = task.calls.values().filter(|s| matches!(s, Step::Read(..))).count();
            let Some(lease) = task.lease.filter(|_| flying < depth && !task.offered.is_empty()) else {
                return;
            };
            let take = n.min(task.offered.len());
            let src: Vec<Slot> = task.offered.drain(..take).collect();
            let at = task.known;
            task.known += take;
            self.import_call(import, PeerWhat::Read(lease, src.into()), Step::Read(at, take), ANSWER);
        }
    }

    fn import_bytes(&mut self, import: ImportId, at: usize, bytes: &[u64]) {
        let Some(task) = self.imports.get_mut(&import) else {
            return;
        };
        let slots = task.slots.clone();
        task.arrived += bytes.len();
        let (arrived, total) = (task.arrived, task.slots.len());
        for (slot, value) in slots[at..].iter().zip(bytes) {
            self.pool.write(*slot, *value, &mut self.watch);
        }
        self.ask(|w, now| w.pull_progress(import, arrived as u32, now));
        if arrived == total {
            self.pool.landed(import);
            self.ask(|w, now| w.pulled(import, now));
        } else {
            self.import_reads(import);
        }
    }

    pub(super) fn import_call(&mut self, import: ImportId, what: PeerWhat, step: Step, within: u64) {
        let Some(task) = self.imports.get(&import) else { return };
        let (peer, to) = (task.order.peer, task.order.incarnation);
        let call = self.peer_send(peer, to, what);
        self.calls.insert(call, import);
        if let Some(task) = self.imports.get_mut(&import) {
            task.calls.insert(call, step);
        }
        self.after(within, Tick::Unanswered(call));
    }

    /// An import or a lease under way that a request waits for.
    fn serving(&self) -> bool {
        let imports = self.imports.values().any(|t| t.order.kind != LeaseKind::Sync);
        imports || self.exports.serving()
    }
}
