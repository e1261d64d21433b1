//! The importer's side: one task per import, lease → land → pull → confirm (`engine-ext/src/transfer/import.rs`).

use std::{collections::BTreeMap, sync::Arc};

use kvc_proto::{
    id::{ImportId, Incarnation, LeaseId, Placement, SessionId},
    wire::{
        admit::ImportRequest,
        reason::{Reason, Refusal},
    },
    worker::{ImportDone, Slot},
};

use super::{
    message::{Ask, CallId, Message, NodeId, PeerAsk, PeerWhat, Reply},
    oracle::Oracle,
    process::{Process, Tick},
};

/// How long a peer may take to answer beyond what it waits for news.
const ANSWER: u64 = 300_000;
/// Reads in flight.
const DEPTH: usize = 3;

/// A running import.
#[derive(Debug)]
pub struct Task {
    /// Who waits for its end.
    pub(super) call: Option<CallId>,
    peer: NodeId,
    incarnation: Incarnation,
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
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Lease,
    Watch,
    Wait,
    Read(usize, usize),
    Renew,
    Confirm,
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
        let import = {
            let import = self.w.import(session, request, self.now)?;
            let task = Task {
                call: Some(call),
                peer: request.peer.parse().unwrap_or(self.id),
                incarnation: request.incarnation,
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
            };
            self.imports.insert(import, task);
            import
        };
        self.histories.remove(session);
        self.ask(|_, _| ());
        self.placed(session, before.as_ref(), Some(request.placement));
        Ok(import)
    }

    pub(super) fn import_open(
        &mut self,
        import: ImportId,
        session: SessionId,
        _peer: &str,
        _incarnation: Incarnation,
        placement: Placement,
    ) {
        self.log(|| format!("import {import} of {session} opens"));
        let until = self.w.config().lease_max.as_micros() as u64;
        self.import_call(import, PeerWhat::Lease(session, placement), Step::Lease, until);
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
        let Some(task) = self.imports.get(&import) else { return };
        if let Some(lease) = task.lease {
            let (peer, to) = (task.peer, task.incarnation);
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
            if let Some(call) = task.call {
                let answer = outcome.map(|done| done.pulled).map_err(|why| why.code);
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
                task.total = grant.tokens.len() as u32;
                task.lives = grant.lives.as_micros() as u64;
                let renew = task.lives / 3;
                self.after(renew, Tick::Renew(import));
                self.ask(|w, now| w.lease_granted(import, grant.identity, grant.tokens, grant.share, now));
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
                let renew = self.imports.get(&import).map_or(0, |t| t.lives / 3);
                self.after(renew, Tick::Renew(import));
            }
            (Step::Confirm, Reply::Fine) => self.ask(|w, now| w.confirmed(import, now)),
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
        if waited.is_some() {
            self.import_fail(import, Refusal::new(Reason::PeerUnreachable, "no answer"));
        }
    }

    pub(super) fn import_renew(&mut self, import: ImportId) {
        let Some(task) = self.imports.get(&import) else { return };
        if let Some(lease) = task.lease {
            let within = task.lives / 3;
            self.import_call(import, PeerWhat::Renew(lease), Step::Renew, within);
        }
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

    fn import_reads(&mut self, import: ImportId) {
        loop {
            let n = self.speed.read_tokens;
            let Some(task) = self.imports.get_mut(&import) else {
                return;
            };
            let flying = task.calls.values().filter(|s| matches!(s, Step::Read(..))).count();
            let Some(lease) = task.lease.filter(|_| flying < DEPTH && !task.offered.is_empty()) else {
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

    fn import_call(&mut self, import: ImportId, what: PeerWhat, step: Step, within: u64) {
        let Some(task) = self.imports.get(&import) else { return };
        let (peer, to) = (task.peer, task.incarnation);
        let call = self.peer_send(peer, to, what);
        self.calls.insert(call, import);
        if let Some(task) = self.imports.get_mut(&import) {
            task.calls.insert(call, step);
        }
        self.after(within, Tick::Unanswered(call));
    }

    fn peer_send(&mut self, peer: NodeId, to: Incarnation, what: PeerWhat) -> CallId {
        self.next_call += 1;
        let (call, from) = (self.next_call, self.incarnation());
        let ask = PeerAsk { from, to, what };
        self.send(peer, Message::Ask(call, Ask::Peer(ask)));
        call
    }
}
