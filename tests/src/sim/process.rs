//! One worker process: the machine, the engine around it, and what `engine-ext` does between the two and the network.
//!
//! Every call of the machine goes through [`Process::ask`]: the fences it asks for are carried out before the caller goes
//! on (ADR 0001). The process itself does no IO: it leaves [`Out`]s for the world.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvc_proto::{
    id::{ImportId, Incarnation, LeaseId, Placement, PrefixHandle, SessionId},
    time::Now,
    wire::{
        info::{Role, WorkerInfo},
        reason::{Reason, Refusal},
    },
    worker::{Effect, Worker, WorkerConfig},
};

use super::{
    announce::Outbox,
    clock::Time,
    engine::{Batch, Request},
    export::Exports,
    import::{Order, Task},
    kv::Kv,
    landing::{Landing, WaitingLand},
    ledger::Books,
    message::{Ask, CallId, Held, Message, NodeId, PeerAsk, PeerWhat, Reply, TurnAsk},
    oracle::{Oracle, Watch},
    pool::Pool,
    rng::Rng,
    tree::{Path, Tree},
};

/// What a process wants from the world.
#[derive(Clone, Debug)]
pub enum Out {
    /// To another node.
    Send(NodeId, Message),
    /// Call [`Process::tick`] after this long.
    After(Time, Tick),
    /// A turn of the session has committed here under this placement.
    Holds(SessionId, Placement),
    /// The sessions this process owns from here on, with their placements' numbers.
    Owns(BTreeMap<SessionId, u64>),
    /// The session that was owned here under the first number belongs to a worker under the second.
    Decided(SessionId, Placement, NodeId, Placement),
    /// The source has told a target so, for the first time or again.
    Granted(SessionId, Placement),
    /// A target has heard it in time, and owns the session.
    Taken(SessionId, Placement),
    /// A step of a move with a peer.
    Milestone(&'static str, NodeId),
    /// A line for the event log.
    Log(String),
}

/// A moment that a process has asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tick {
    /// The engine's loop, if this is still its latest appointment.
    Step(u64),
    /// The running batch is computed.
    Forward,
    /// A peer's call has waited long enough at this process.
    Waited(CallId),
    /// A read's bytes leave.
    Serve(CallId),
    /// This process's own call to a peer is not answered.
    Unanswered(CallId),
    /// Time to renew an import's lease, if it is still that one.
    Renew(ImportId, LeaseId),
    /// A pull that made way for others looks again.
    Reads(ImportId),
    /// Time to send an announcement again.
    Announce(SessionId),
}

/// How fast the engine is, and its limits.
#[derive(Clone, Debug)]
pub struct Speed {
    /// A forward's least time.
    pub forward: Time,
    /// On top for each prefilled token.
    pub token: Time,
    /// Prefilled tokens per forward.
    pub chunk: u32,
    /// Running requests.
    pub running: usize,
    /// Thousandths of their remaining growth that running requests are trusted to need.
    pub trust: u32,
    /// Thousandths of decode steps that retract a request for no reason.
    pub retract: u64,
    /// Thousandths of landings whose client goes away while the engine allocates.
    pub leave: u64,
    /// A read's time at the exporter.
    pub read: Time,
    /// Tokens per read.
    pub read_tokens: usize,
    /// Token ids in use.
    pub vocabulary: u32,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its node.
    pub id: NodeId,
    /// What it is for.
    pub role: Role,
    /// The machine.
    pub w: Worker,
    /// The engine's memory.
    pub pool: Pool,
    pub(super) tree: Tree,
    pub(super) speed: Speed,
    pub(super) handles: BTreeMap<PrefixHandle, Path>,
    pub(super) next_handle: u64,
    pub(super) inbox: VecDeque<(CallId, NodeId, TurnAsk)>,
    pub(super) requests: BTreeMap<u64, Request>,
    pub(super) next_request: u64,
    pub(super) waiting: VecDeque<u64>,
    pub(super) running: Vec<u64>,
    pub(super) chunked: Option<u64>,
    pub(super) batch: Option<Batch>,
    pub(super) stuck: u32,
    pub(super) appointment: u64,
    pub(super) landings: BTreeMap<ImportId, Landing>,
    pub(super) waiting_lands: Vec<WaitingLand>,
    pub(super) imports: BTreeMap<ImportId, Task>,
    pub(super) exports: Exports,
    pub(super) calls: BTreeMap<CallId, ImportId>,
    /// Calls that wait for this process, and who made them.
    pub open: BTreeMap<CallId, NodeId>,
    pub(super) next_call: CallId,
    pub(super) books: Books,
    /// Announcements that go out.
    pub outbox: Outbox,
    /// Sessions whose last pull as a backup failed, or whose copy was given up since (SYNC-1).
    pub unsynced: BTreeSet<SessionId>,
    /// What the turn that commits now leaves.
    pub(super) committing: Held,
    /// What it owns, as the world knows it.
    pub(super) owned: BTreeMap<SessionId, u64>,
    /// Who owns what may have changed.
    pub(super) dirty: bool,
    /// The engine's thread does nothing until then.
    pub(super) stalled_until: Now,
    /// True KV of what each session's last turn left: what a streaming session appends to.
    pub(super) histories: BTreeMap<SessionId, Vec<Kv>>,
    pub(super) rng: Rng,
    pub(super) now: Now,
    /// The oracles' findings.
    pub watch: Watch,
    pub(super) out: Vec<Out>,
    logging: bool,
    /// The engine did something since the last look.
    pub(super) stirred: bool,
    /// Turns committed, imports committed, retracts: what a world was made of.
    pub deeds: Deeds,
}

/// What happened in a process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Deeds {
    /// Retracted runs.
    pub retracts: u64,
    /// Aborted runs.
    pub aborts: u64,
    /// Turns given up for want of room.
    pub starved: u64,
}

impl Process {
    /// A fresh process.
    pub fn new(
        id: NodeId,
        role: Role,
        config: WorkerConfig,
        incarnation: Incarnation,
        speed: Speed,
        rng: Rng,
        logging: bool,
    ) -> Process {
        let (capacity, page) = (config.capacity, config.page_tokens);
        let mut process = Process {
            id,
            role,
            w: Worker::new(config, incarnation),
            pool: Pool::new(capacity, page),
            tree: Tree::new(page),
            speed,
            handles: BTreeMap::new(),
            next_handle: 1,
            inbox: VecDeque::new(),
            requests: BTreeMap::new(),
            next_request: 1,
            waiting: VecDeque::new(),
            running: Vec::new(),
            chunked: None,
            batch: None,
            stuck: 0,
            appointment: 0,
            landings: BTreeMap::new(),
            waiting_lands: Vec::new(),
            imports: BTreeMap::new(),
            exports: Exports::default(),
            calls: BTreeMap::new(),
            open: BTreeMap::new(),
            next_call: incarnation.0 << 24,
            books: Books::default(),
            outbox: Outbox::default(),
            unsynced: BTreeSet::new(),
            committing: None,
            owned: BTreeMap::new(),
            dirty: false,
            stalled_until: Now(0),
            histories: BTreeMap::new(),
            rng,
            now: Now(0),
            watch: Watch::default(),
            out: Vec::new(),
            logging,
            stirred: true,
            deeds: Deeds::default(),
        };
        process.poke();
        process
    }

    /// This process.
    pub fn incarnation(&self) -> Incarnation {
        self.w.incarnation()
    }

    /// A message has come in.
    pub fn receive(&mut self, from: NodeId, message: Message, now: Now) {
        self.now = now;
        match message {
            Message::Ask(call, ask) => self.asked(call, from, ask),
            Message::Close(call) => self.closed(call),
            Message::Reply(call, reply) => {
                if !self.announce_replied(call, &reply) {
                    self.import_reply(call, reply);
                }
            }
            Message::Reset(call) => self.unanswered(call),
        }
        self.settle();
    }

    /// A moment has come.
    pub fn tick(&mut self, tick: Tick, now: Now) {
        self.now = now;
        match tick {
            Tick::Step(n) if n == self.appointment && self.batch.is_none() && now < self.stalled_until => {
                let rest = self.stalled_until.since(now).as_micros() as u64;
                self.step_after(rest);
            }
            Tick::Step(n) if n == self.appointment && self.batch.is_none() => self.step(),
            Tick::Step(_) => {}
            Tick::Forward => self.forward(),
            Tick::Waited(call) => self.export_waited(call),
            Tick::Serve(call) => self.export_serve(call),
            Tick::Unanswered(call) => self.unanswered(call),
            Tick::Renew(import, lease) => self.import_renew(import, lease),
            Tick::Reads(import) => self.import_reads(import),
            Tick::Announce(session) => self.announce_send(&session),
        }
        self.settle();
    }

    /// The machine's own timer is due.
    pub fn timeout(&mut self, now: Now) {
        self.now = now;
        self.dirty = true;
        self.ask(|w, now| w.handle_timeout(now));
        self.settle();
    }

    /// What the process wants since the last time.
    pub fn drain(&mut self) -> Vec<Out> {
        std::mem::take(&mut self.out)
    }

    /// The client of the session's owner is done with it (close API of the engine).
    pub fn close_session(&mut self, session: &SessionId, now: Now) {
        self.now = now;
        self.unsynced.insert(session.clone());
        self.dirty = true;
        self.ask(|w, now| w.close(session, now));
        self.settle();
    }

    /// The engine clears its pool and its tree; false while it has work.
    pub fn flush(&mut self, now: Now) -> bool {
        if !self.requests.is_empty() || self.batch.is_some() {
            return false;
        }
        self.now = now;
        self.unsynced.extend(self.sessions());
        self.dirty = true;
        self.ask(|w, now| w.flush(now));
        self.watch.check(self.exports_left() == 0, Oracle::FreedUnderRead, || {
            "a flush leaves something readable".to_owned()
        });
        self.handles.clear();
        self.landings.clear();
        self.waiting_lands.clear();
        self.pool.reset();
        self.tree = Tree::new(self.pool.page);
        self.stirred = true;
        self.settle();
        true
    }

    /// Asks the machine; its fences are over when this returns.
    pub(super) fn ask<R>(&mut self, question: impl FnOnce(&mut Worker, Now) -> R) -> R {
        let answer = question(&mut self.w, self.now);
        let mut rest = Vec::new();
        while let Some(effect) = self.w.poll_effect() {
            match effect {
                Effect::FenceLease { lease } => self.fence_lease(lease),
                Effect::FenceImport { import } => self.fence_import(import),
                other => rest.push(other),
            }
        }
        for effect in rest {
            self.carry_out(effect);
        }
        answer
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::OpenLease {
                import,
                session,
                peer,
                incarnation,
                placement,
                kind,
                have,
            } => {
                let order = Order {
                    session,
                    peer: peer.parse().unwrap_or(self.id),
                    incarnation,
                    placement,
                    kind,
                    have,
                };
                self.import_open(import, order);
            }
            Effect::AskHandover { import, peer, request } => self.handover_ask(import, &peer, request),
            Effect::Announce { to, announcement } => self.announce(to, announcement),
            Effect::Pull { import, from, slots } => self.import_pull(import, from, slots),
            Effect::Confirm { import } => self.import_confirm(import),
            Effect::EndLease { import } => self.import_end(import),
            Effect::ImportDone { import, outcome } => self.import_done(import, outcome),
            Effect::LeaseGrown { .. } | Effect::Arrived { .. } => self.exports.news = true,
            Effect::Wake => self.poke(),
            Effect::FenceLease { .. } | Effect::FenceImport { .. } => {}
        }
    }

    fn asked(&mut self, call: CallId, from: NodeId, ask: Ask) {
        if self.open.contains_key(&call) && !matches!(ask, Ask::Peer(_)) {
            // The network has delivered it twice: the second is another call of which nobody hears.
            self.asked_again(ask);
            return;
        }
        self.open.insert(call, from);
        match ask {
            Ask::Info => {
                let info = self.info();
                self.reply(call, Reply::Info(Box::new(info)));
            }
            Ask::Session(session) => {
                let view = self.w.session(&session, self.now);
                self.reply(call, Reply::Session(view.map(Box::new)));
            }
            Ask::Sessions(after) => {
                let list = self.w.sessions(after.as_ref(), 4, self.now);
                self.reply(call, Reply::Sessions(Box::new(list)));
            }
            Ask::Withdraw(session, request) => {
                let reply = self.withdraw(&session, &request);
                self.reply(call, reply);
            }
            Ask::Admit(request) => {
                let answer = self.admit(&request);
                self.reply(call, Reply::Admit(Box::new(answer)));
            }
            Ask::Import(session, request) => match self.import(call, &session, &request) {
                Ok(_) => {}
                Err(why) => self.reply(call, Reply::Imported(Err(why.code))),
            },
            Ask::Release(session, request) => {
                self.ask(|w, now| w.release(&session, &request, now));
                self.reply(call, Reply::Released);
            }
            Ask::Turn(turn) => {
                self.inbox.push_back((call, from, *turn));
                self.poke();
            }
            Ask::Peer(peer) => self.export_asked(call, peer),
        }
    }

    /// Idempotent or refused: nothing that a second delivery does may be seen.
    fn asked_again(&mut self, ask: Ask) {
        match ask {
            Ask::Admit(request) => drop(self.admit(&request)),
            Ask::Release(session, request) => drop(self.ask(|w, now| w.release(&session, &request, now))),
            Ask::Import(session, request) => {
                let second = self.ask(|w, now| w.import(&session, &request, now));
                self.watch.check(second.is_err(), Oracle::Driver, || {
                    format!("two imports of {session} at once")
                });
            }
            Ask::Withdraw(session, request) => drop(self.withdraw(&session, &request)),
            Ask::Info | Ask::Session(_) | Ask::Sessions(_) | Ask::Turn(_) | Ask::Peer(_) => {}
        }
    }

    fn closed(&mut self, call: CallId) {
        self.open.remove(&call);
        if let Some(import) = self
            .imports
            .iter()
            .find(|(_, t)| t.call == Some(call))
            .map(|(id, _)| *id)
        {
            let why = Refusal::new(Reason::Cancelled, "the client went away");
            self.ask(|w, now| w.cancel_import(import, why, now));
        }
        self.inbox.retain(|(c, ..)| *c != call);
        if let Some(request) = self.requests.values_mut().find(|r| r.call == call) {
            request.aborted = true;
            self.poke();
        }
    }

    /// Answers a call; the second answer of a call goes nowhere.
    pub(super) fn reply(&mut self, call: CallId, reply: Reply) {
        let last = !matches!(reply, Reply::FirstToken);
        let to = if last {
            self.open.remove(&call)
        } else {
            self.open.get(&call).copied()
        };
        if let Some(to) = to {
            self.send(to, Message::Reply(call, reply));
        }
    }

    pub(super) fn send(&mut self, to: NodeId, message: Message) {
        self.out.push(Out::Send(to, message));
    }

    /// To another process's control plane.
    pub(super) fn peer_send(&mut self, node: NodeId, to: Incarnation, what: PeerWhat) -> CallId {
        self.next_call += 1;
        let (call, peer, from) = (self.next_call, self.id, self.incarnation());
        let ask = PeerAsk { peer, from, to, what };
        self.send(node, Message::Ask(call, Ask::Peer(ask)));
        call
    }

    /// A call to a peer has broken, or was not answered in time.
    fn unanswered(&mut self, call: CallId) {
        if !self.announce_reset(call) {
            self.import_reset(call);
        }
    }

    pub(super) fn push(&mut self, out: Out) {
        self.out.push(out);
    }

    pub(super) fn after(&mut self, time: Time, tick: Tick) {
        self.out.push(Out::After(time, tick));
    }

    pub(super) fn log(&mut self, line: impl FnOnce() -> String) {
        if self.logging {
            self.out.push(Out::Log(line()));
        }
    }

    /// The engine's loop has something to do now.
    pub(super) fn poke(&mut self) {
        self.step_after(0);
    }

    pub(super) fn step_after(&mut self, time: Time) {
        self.appointment += 1;
        self.after(time, Tick::Step(self.appointment));
    }

    /// After every event: who waited for news hears it; then the oracles look.
    fn settle(&mut self) {
        while std::mem::take(&mut self.exports.news) {
            self.export_news();
        }
        self.check();
    }

    fn info(&self) -> WorkerInfo {
        WorkerInfo {
            incarnation: self.incarnation(),
            role: self.role,
            version: String::new(),
            engine: String::new(),
            model: String::new(),
            listen: String::new(),
            peer: self.id.to_string(),
            page_tokens: self.w.config().page_tokens,
            capacity: self.w.config().capacity.into(),
            max_uncached_tokens: self.w.config().max_uncached_tokens,
            layout: String::new(),
            movers: vec!["tcp".into()],
            draining: self.w.draining(),
            load: self.w.load(None),
        }
    }
}

/// The names of leases that are over by force.
pub(super) type Revoked = BTreeSet<LeaseId>;
