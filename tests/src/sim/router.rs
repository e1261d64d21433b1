//! One router process: the production machines, driven as `router/src/drive.rs` does it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use kvc_proto::{
    id::{RouterId, SessionId},
    routing::{
        Dispatch, Event, Handover, Resident, Router, RouterConfig, Turn, WorkerIndex,
        view::{At, View},
    },
    time::Now,
    wire::{
        info::{Role, SessionView},
        reason::Reason,
        turn::TurnTag,
    },
    worker::Token,
};

use super::{
    client::{Answer, Request},
    clock::Time,
    drive::turn,
    message::{Ask, CallId, Message, NodeId, Reply},
    moves::Moves,
    oracle::{Oracle, Watch},
    store::Store,
};

/// Deadlines of the driver; production has longer ones of the same order.
pub(super) const ADMIT: Time = 60_000;
pub(super) const FIRST_TOKEN: Time = 3_000_000;
const NEXT_TOKEN: Time = 2_000_000;
const POLL: Time = 500_000;
/// As in `router/src/discover.rs`.
const MISSES: u32 = 2;

/// What a router wants from the world.
#[derive(Debug)]
pub enum Out {
    /// To a worker.
    Send(NodeId, Message),
    /// Call [`Node::tick`] after this long.
    After(Time, Tick),
    /// Call [`Node::tick`] when this router's clock shows that.
    Until(Now, Tick),
    /// The client's answer.
    Answer(usize, u64, Answer),
    /// A line for the event log.
    Log(String),
}

/// A moment that a router has asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tick {
    /// A call is not answered.
    Deadline(CallId),
    /// The pause of a dispatch is over.
    Wake(u64),
    /// Time to ask a worker for its state; the second number is this life's.
    Poll(usize, u64),
}

/// What a router's death leaves behind.
#[derive(Debug)]
pub struct Broken {
    /// Connections to workers that close.
    pub calls: Vec<(NodeId, CallId)>,
    /// Requests of clients, who hear of it.
    pub requests: Vec<(usize, u64)>,
}

/// See the module.
#[derive(Debug)]
pub struct Node {
    pub(super) id: NodeId,
    pub(super) router: Router<Store>,
    /// The workers' hand-over deadline.
    pub(super) handover_deadline: Duration,
    store: Store,
    next_poll: u64,
    pub(super) live: BTreeMap<u64, Live>,
    pub(super) moves: Moves,
    pub(super) calls: BTreeMap<CallId, (u64, Call)>,
    polls: BTreeMap<CallId, usize>,
    misses: Vec<u32>,
    pub(super) next: u64,
    pub(super) now: Now,
    /// Sessions that a worker has refused, or failed, since its last success with them.
    pub(super) troubled: BTreeSet<(SessionId, u16)>,
    pub(super) out: Vec<Out>,
    pub(super) logging: bool,
    /// The oracles' findings.
    pub watch: Watch,
    /// Ended dispatches by mode: direct, seed, reseed, fallback; then those without.
    pub modes: [u64; 5],
}

/// What a call was made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// What a worker knows of a session.
    Session(WorkerIndex),
    Admit(WorkerIndex),
    Withdraw,
    /// The prefill worker's own import before it computes.
    Refresh,
    Prefill,
    Import,
    Run,
    /// A draining worker's sessions.
    List,
}

/// A request under way.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) request: Request,
    pub(super) dispatch: Option<Dispatch>,
    pub(super) found: Vec<Resident>,
    /// The question was [`Effect::Locate`](kvc_proto::routing::Effect::Locate).
    pub(super) locating: bool,
    /// What comes after the prefill worker's own import.
    pub(super) handover: Option<Box<Handover>>,
    pub(super) output: Option<Arc<[Token]>>,
    pub(super) started: bool,
    /// Its stream's next token is due then.
    pub(super) until: Option<Now>,
    pub(super) asked: Vec<(WorkerIndex, Option<Reason>)>,
    pub(super) pin: Option<At>,
    pub(super) excused: bool,
}

impl Node {
    /// A router that knows its workers' roles.
    pub fn new(id: NodeId, name: RouterId, config: RouterConfig, store: Store, roles: &[Role], logging: bool) -> Node {
        let mut node = Node {
            id,
            store: store.clone(),
            handover_deadline: config.handover_wait / 2,
            next_poll: 0,
            router: Router::new(config, name, store, View::new(roles.iter().copied())),
            live: BTreeMap::new(),
            moves: Moves::default(),
            calls: BTreeMap::new(),
            polls: BTreeMap::new(),
            misses: vec![0; roles.len()],
            next: (name.0 & 0xff) << 40,
            now: Now(0),
            troubled: BTreeSet::new(),
            out: Vec::new(),
            logging,
            watch: Watch::default(),
            modes: [0; 5],
        };
        for worker in 0..roles.len() {
            node.out.push(Out::After(worker as u64, Tick::Poll(worker, 0)));
        }
        node
    }

    /// Ends by force and starts again under another name, knowing nothing.
    pub fn crash(&mut self, name: RouterId, logging: bool) -> Broken {
        let calls = self
            .calls
            .keys()
            .filter_map(|c| Some((self.worker_of(*c)?, *c)))
            .collect();
        let requests = self
            .live
            .values()
            .map(|l| (l.request.client, l.request.number))
            .collect();
        let roles: Vec<Role> = self
            .router
            .view
            .all()
            .map(|w| self.router.view.worker(w).role())
            .collect();
        let (config, store) = (self.router.config().clone(), self.store.clone());
        let polls = self.next_poll;
        let modes = self.modes;
        *self = Node::new(self.id, name, config, store, &roles, logging);
        (self.modes, self.next_poll) = (modes, polls + 1);
        self.out.clear();
        for worker in 0..roles.len() {
            self.out
                .push(Out::After(worker as u64, Tick::Poll(worker, self.next_poll)));
        }
        Broken { calls, requests }
    }

    /// What it wants since the last time.
    pub fn drain(&mut self) -> Vec<Out> {
        std::mem::take(&mut self.out)
    }

    /// A client's request.
    pub fn request(&mut self, request: Request, now: Now) {
        self.now = now;
        self.next += 1;
        let number = self.next;
        let mut live = Live {
            dispatch: None,
            found: Vec::new(),
            locating: false,
            handover: None,
            output: None,
            started: false,
            until: None,
            asked: Vec::new(),
            pin: None,
            excused: false,
            request,
        };
        if let Some(worker) = live.request.direct {
            let tag = live.request.session.clone().map(TurnTag::of);
            let body = turn(&live.request, tag);
            self.live.insert(number, live);
            self.call(
                number,
                Call::Run,
                WorkerIndex(worker as u16),
                Ask::Turn(Box::new(body)),
                FIRST_TOKEN,
            );
            return;
        }
        self.before(&mut live);
        let turn = Turn {
            session: live.request.session.clone(),
            input_tokens: live.request.believed.0,
            max_new_tokens: live.request.believed.1,
            estimated: live.request.believed.0 != live.request.prompt.len() as u32,
        };
        live.dispatch = Some(Dispatch::start(&mut self.router, turn, now));
        self.live.insert(number, live);
        self.advance(number);
    }

    /// The client has gone away.
    pub fn gone(&mut self, client: usize, request: u64, now: Now) {
        self.now = now;
        let found = self
            .live
            .iter()
            .find(|(_, l)| l.request.client == client && l.request.number == request);
        if let Some(number) = found.map(|(n, _)| *n) {
            self.close_calls(number, |_| true);
            self.tell(number, Event::ClientGone);
            self.live.remove(&number);
        }
    }

    /// A message has come in.
    pub fn receive(&mut self, message: Message, now: Now) {
        self.now = now;
        match message {
            Message::Reply(call, reply) => self.replied(call, reply),
            Message::Reset(call) => self.failed(call, Reason::PeerUnreachable),
            Message::Ask(..) | Message::Close(_) => {}
        }
    }

    /// A moment has come.
    pub fn tick(&mut self, tick: Tick, now: Now) {
        self.now = now;
        match tick {
            Tick::Deadline(call) => self.failed(call, Reason::DeadlineExceeded),
            Tick::Wake(number) if self.moves.runs(number) => self.move_timeout(number),
            Tick::Wake(number) => {
                // While it was queued behind another turn of its session the pin may have moved.
                if let Some(mut live) = self.live.remove(&number) {
                    if live.asked.is_empty() {
                        self.before(&mut live);
                    }
                    self.live.insert(number, live);
                }
                if let Some(dispatch) = self.live.get_mut(&number).and_then(|l| l.dispatch.as_mut()) {
                    dispatch.handle_timeout(&mut self.router, now);
                    self.advance(number);
                }
            }
            Tick::Poll(_, life) if life != self.next_poll => {}
            Tick::Poll(worker, life) => {
                self.next += 1;
                let call = self.next;
                self.polls.insert(call, worker);
                self.out.push(Out::Send(worker, Message::Ask(call, Ask::Info)));
                self.out.push(Out::After(ADMIT, Tick::Deadline(call)));
                self.out.push(Out::After(POLL, Tick::Poll(worker, life)));
            }
        }
    }

    /// Requests under way.
    pub fn busy(&self) -> usize {
        self.live.len()
    }

    /// Nothing is left of any request.
    pub fn check_quiet(&mut self) {
        let inflight: u32 = self
            .router
            .view
            .all()
            .map(|w| self.router.view.worker(w).inflight())
            .sum();
        let busy = self.router.sessions().busy();
        let calls = self.calls.values().filter(|(_, c)| *c != Call::Prefill).count();
        self.watch.check(
            inflight == 0 && busy == 0 && self.live.is_empty() && calls == 0,
            Oracle::Leak,
            || format!("router: {inflight} in flight, {busy} sessions busy, {calls} calls"),
        );
        let moves = self.moves.running();
        self.watch
            .check(moves == 0, Oracle::Leak, || format!("router: {moves} moves under way"));
    }

    fn replied(&mut self, call: CallId, reply: Reply) {
        if let Some(worker) = self.polls.remove(&call) {
            if let Reply::Info(info) = reply {
                self.misses[worker] = 0;
                self.router.view.seen(WorkerIndex(worker as u16), &info);
                if info.draining {
                    self.drain_worker(WorkerIndex(worker as u16));
                }
            }
            return;
        }
        let Some((number, kind)) = self.calls.get(&call).copied() else {
            return;
        };
        if self.moves.runs(number) {
            self.calls.remove(&call);
            self.move_replied(number, kind, reply);
            return;
        }
        if matches!(reply, Reply::FirstToken) {
            if kind == Call::Run {
                self.out.push(Out::After(NEXT_TOKEN, Tick::Deadline(call)));
                if let Some(live) = self.live.get_mut(&number) {
                    live.until = Some(self.now + Duration::from_micros(NEXT_TOKEN));
                }
                self.first_byte(number);
            }
            return;
        }
        self.calls.remove(&call);
        match (kind, reply) {
            (Call::Session(worker), Reply::Session(view)) => {
                let found = self.resident(worker, number, view.as_deref());
                if let Some(live) = self.live.get_mut(&number) {
                    live.found.push(found);
                }
                self.asked_all(number);
            }
            (Call::Admit(worker), Reply::Admit(answer)) => {
                self.note(number, worker, answer.reason);
                if let (Some(moved), Some(live)) = (&answer.moved, self.live.get(&number))
                    && let Some(session) = &live.request.session
                {
                    self.moves.heard_of(session, moved.placement);
                }
                self.tell(number, Event::Answer(answer));
            }
            (Call::Withdraw, Reply::Withdrawn(answer)) => {
                let session = self.live.get(&number).and_then(|l| l.request.session.clone());
                if let Some(session) = session {
                    self.moves.settled(&session, &answer);
                }
                self.tell(
                    number,
                    match answer {
                        Ok(answer) => Event::Withdrawn(answer),
                        Err(why) => Event::WithdrawRefused(why),
                    },
                );
            }
            (Call::Refresh, Reply::Imported(_)) => self.refreshed(number),
            (Call::Import, Reply::Imported(Ok(_))) => {
                // What the prefill still has to say is of use to nobody, but it must end by itself.
                self.calls.retain(|_, (n, c)| *n != number || *c != Call::Prefill);
                self.tell(number, Event::Imported);
            }
            (Call::Import, Reply::Imported(Err(reason))) => {
                self.close_calls(number, |c| *c == Call::Prefill);
                self.tell(number, Event::ImportFailed(reason));
            }
            (Call::Prefill, Reply::Done(_)) => {}
            (Call::Prefill, Reply::Refused(_) | Reply::Failed(_)) => self.prefill_failed(number),
            (Call::Run, Reply::Done(output)) => {
                self.first_byte(number);
                let output_tokens = output.len() as u32;
                if let Some(live) = self.live.get_mut(&number) {
                    live.output = Some(output);
                }
                self.tell(number, Event::Completed { output_tokens });
            }
            (Call::Run, Reply::Refused(reason)) => {
                let worker = self.live.get(&number).and_then(|l| l.dispatch.as_ref()?.trace().worker);
                if let Some(worker) = worker {
                    self.note(number, worker, Some(reason));
                }
                self.tell(number, Event::TurnRefused(reason));
            }
            (Call::Run, Reply::Failed(Reason::BadRequest)) => self.tell(number, Event::Passed),
            (Call::Run, Reply::Failed(reason)) => self.run_failed(number, reason),
            (kind, reply) => self
                .watch
                .fire(Oracle::Driver, format!("{reply:?} in answer to {kind:?}")),
        }
    }

    /// A call has broken or was not answered.
    fn failed(&mut self, call: CallId, reason: Reason) {
        if let Some(worker) = self.polls.remove(&call) {
            self.misses[worker] += 1;
            if self.misses[worker] >= MISSES {
                self.lost(WorkerIndex(worker as u16));
                self.router.view.lost(WorkerIndex(worker as u16));
            }
            return;
        }
        let Some((number, kind)) = self.calls.get(&call).copied() else {
            return;
        };
        // A stream that has begun has a deadline of its own.
        let until = self.live.get(&number).and_then(|l| l.until);
        if kind == Call::Run && reason == Reason::DeadlineExceeded && until.is_some_and(|u| self.now < u) {
            return;
        }
        self.calls.remove(&call);
        if let Some(worker) = self.worker_of(call) {
            self.out.push(Out::Send(worker, Message::Close(call)));
        }
        if self.moves.runs(number) {
            self.move_lost(number, kind);
            return;
        }
        match kind {
            Call::Session(_) => self.asked_all(number),
            Call::Withdraw => {
                let session = self.live.get(&number).and_then(|l| l.request.session.clone());
                if let Some(session) = session {
                    self.moves.lost(&session, self.now);
                }
                self.tell(number, Event::Unreachable);
            }
            Call::Refresh => self.refreshed(number),
            Call::List => {}
            Call::Admit(worker) => {
                self.lost(worker);
                self.note(number, worker, Some(Reason::PeerUnreachable));
                self.tell(number, Event::Unreachable);
            }
            Call::Import => {
                self.close_calls(number, |c| *c == Call::Prefill);
                self.tell(number, Event::ImportFailed(reason));
            }
            Call::Prefill => self.prefill_failed(number),
            Call::Run => self.run_failed(number, reason),
        }
    }

    /// A worker's answer about a request's session.
    fn resident(&mut self, worker: WorkerIndex, number: u64, view: Option<&SessionView>) -> Resident {
        let Some(view) = view else {
            return Resident::nothing(worker);
        };
        let found = Resident::of(worker, view);
        if let (Some(heard), true) = (found.highest(), self.live.contains_key(&number)) {
            self.moves.heard_of(&view.session_id, heard);
        }
        found
    }

    fn prefill_failed(&mut self, number: u64) {
        self.close_calls(number, |c| *c == Call::Import);
        self.tell(number, Event::PrefillFailed);
    }

    fn run_failed(&mut self, number: u64, reason: Reason) {
        let worker = self.live.get(&number).and_then(|l| l.dispatch.as_ref()?.trace().worker);
        if let Some(worker) = worker {
            self.note(number, worker, Some(Reason::PeerUnreachable));
        }
        self.tell(number, Event::Failed(reason));
    }

    fn first_byte(&mut self, number: u64) {
        if let Some(live) = self.live.get_mut(&number)
            && !std::mem::replace(&mut live.started, true)
            && live.dispatch.is_some()
        {
            self.tell(number, Event::FirstByte);
        }
    }

    pub(super) fn asked_all(&mut self, number: u64) {
        let open = self
            .calls
            .values()
            .any(|(n, c)| *n == number && matches!(c, Call::Session(_)));
        if !open && let Some(live) = self.live.get_mut(&number) {
            let mut found = std::mem::take(&mut live.found);
            found.sort_by_key(|r| r.worker);
            let locating = live.locating;
            self.tell(
                number,
                if locating {
                    Event::Located(found)
                } else {
                    Event::Residents(found)
                },
            );
        }
    }

    fn tell(&mut self, number: u64, event: Event) {
        let Some(live) = self.live.get_mut(&number) else { return };
        let Some(dispatch) = live.dispatch.as_mut() else {
            self.direct_over(number, &event);
            return;
        };
        if let Err(fault) = dispatch.handle(&mut self.router, event, self.now) {
            self.watch.fire(Oracle::Driver, fault.to_string());
        }
        self.advance(number);
    }

    fn direct_over(&mut self, number: u64, event: &Event) {
        let Some(live) = self.live.remove(&number) else { return };
        if *event == Event::ClientGone {
            return;
        }
        let answer = match live.output {
            Some(tokens) => Answer::Tokens(tokens),
            None => Answer::Error(format!("{event:?}")),
        };
        self.modes[4] += 1;
        self.out
            .push(Out::Answer(live.request.client, live.request.number, answer));
    }

    /// Carries effects out until one waits for an answer.
    fn advance(&mut self, number: u64) {
        loop {
            let Some(live) = self.live.get_mut(&number) else { return };
            let Some(dispatch) = live.dispatch.as_mut() else { return };
            let Some(effect) = dispatch.poll_effect() else { break };
            let request = live.request.clone();
            self.effect(number, &request, effect);
        }
        let ended = self.live.get(&number).and_then(|l| l.dispatch.as_ref()?.outcome());
        if let Some(outcome) = ended {
            self.over(number, outcome);
        }
    }
}
