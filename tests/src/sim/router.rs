//! One router process: the production machines, driven as `router/src/drive.rs` does it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use kvc_proto::{
    id::{Placement, RouterId, SessionId},
    routing::{
        Dispatch, Effect, Event, ExecutionMode, Health, MemoryStore, Outcome, Resident, Router, RouterConfig,
        SessionStore, Turn, WorkerIndex,
        score::BLOCK_TOKENS,
        view::{At, View},
    },
    time::Now,
    wire::{admit::ReleaseRequest, info::Role, reason::Reason, turn::TurnTag},
    worker::Token,
};

use super::{
    client::{Answer, Request, told},
    clock::Time,
    message::{Ask, CallId, Message, NodeId, Reply, TurnAsk},
    oracle::{Oracle, Watch},
};

/// Deadlines of the driver; production has longer ones of the same order.
const ADMIT: Time = 60_000;
const FIRST_TOKEN: Time = 3_000_000;
const NEXT_TOKEN: Time = 2_000_000;
const POLL: Time = 500_000;
/// As in `router/src/discover.rs`.
const MISSES: u32 = 2;

/// Placement numbers that several routers share.
#[derive(Clone, Debug)]
pub struct Store(pub Arc<Mutex<MemoryStore>>);

impl SessionStore for Store {
    fn take(&mut self, session: &SessionId, above: Option<Placement>) -> Placement {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take(session, above)
    }
}

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
    id: NodeId,
    router: Router<Store>,
    store: Store,
    next_poll: u64,
    live: BTreeMap<u64, Live>,
    calls: BTreeMap<CallId, (u64, Call)>,
    polls: BTreeMap<CallId, usize>,
    misses: Vec<u32>,
    next: u64,
    now: Now,
    /// Sessions that a worker has refused, or failed, since its last success with them.
    troubled: BTreeSet<(SessionId, u16)>,
    out: Vec<Out>,
    logging: bool,
    /// The oracles' findings.
    pub watch: Watch,
    /// Ended dispatches by mode: direct, seed, reseed, fallback; then those without.
    pub modes: [u64; 5],
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Call {
    Session(WorkerIndex),
    Admit(WorkerIndex),
    Prefill,
    Import,
    Run,
}

#[derive(Debug)]
struct Live {
    request: Request,
    dispatch: Option<Dispatch>,
    found: Vec<Resident>,
    output: Option<Arc<[Token]>>,
    started: bool,
    /// Its stream's next token is due then.
    until: Option<Now>,
    asked: Vec<(WorkerIndex, Option<Reason>)>,
    pin: Option<At>,
    excused: bool,
}

impl Node {
    /// A router that knows its workers' roles.
    pub fn new(id: NodeId, name: RouterId, config: RouterConfig, store: Store, roles: &[Role], logging: bool) -> Node {
        let mut node = Node {
            id,
            store: store.clone(),
            next_poll: 0,
            router: Router::new(config, name, store, View::new(roles.iter().copied())),
            live: BTreeMap::new(),
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
            input_tokens: live.request.prompt.len() as u32,
            max_new_tokens: Some(live.request.max_new),
            estimated: false,
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
    }

    fn replied(&mut self, call: CallId, reply: Reply) {
        if let Some(worker) = self.polls.remove(&call) {
            if let Reply::Info(info) = reply {
                self.misses[worker] = 0;
                self.router.view.seen(WorkerIndex(worker as u16), &info);
            }
            return;
        }
        let Some((number, kind)) = self.calls.get(&call).cloned() else {
            return;
        };
        if matches!(reply, Reply::FirstToken) {
            if kind == Call::Run {
                self.out.push(Out::After(NEXT_TOKEN, Tick::Deadline(call)));
                if let Some(live) = self.live.get_mut(&number) {
                    live.until = Some(self.now + std::time::Duration::from_micros(NEXT_TOKEN));
                }
                self.first_byte(number);
            }
            return;
        }
        self.calls.remove(&call);
        match (kind, reply) {
            (Call::Session(worker), Reply::Session(view)) => {
                if let (Some(live), Some(view)) = (self.live.get_mut(&number), view) {
                    live.found.push(Resident {
                        worker,
                        tokens: view.committed,
                        epoch: view.epoch,
                    });
                }
                self.asked_all(number);
            }
            (Call::Admit(worker), Reply::Admit(answer)) => {
                self.note(number, worker, answer.reason);
                self.tell(number, Event::Answer(answer));
            }
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
        let Some((number, kind)) = self.calls.get(&call).cloned() else {
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
        match kind {
            Call::Session(_) => self.asked_all(number),
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

    fn asked_all(&mut self, number: u64) {
        let open = self
            .calls
            .values()
            .any(|(n, c)| *n == number && matches!(c, Call::Session(_)));
        if !open && let Some(live) = self.live.get_mut(&number) {
            let mut found = std::mem::take(&mut live.found);
            found.sort_by_key(|r| r.worker);
            self.tell(number, Event::Residents(found));
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

    fn effect(&mut self, number: u64, request: &Request, effect: Effect) {
        self.log(|| {
            format!(
                "request {} of client {}: {}",
                request.number,
                request.client,
                brief(&effect)
            )
        });
        match effect {
            Effect::Ask(session) => {
                let workers: Vec<_> = self.router.view.decoders().collect();
                for worker in workers {
                    self.call(
                        number,
                        Call::Session(worker),
                        worker,
                        Ask::Session(session.clone()),
                        ADMIT,
                    );
                }
                if !self.calls.values().any(|(n, _)| *n == number) {
                    self.asked_all(number);
                }
            }
            Effect::Probe { worker, request } => {
                let kind = Call::Admit(worker);
                self.call(number, kind, worker, Ask::Admit(request), ADMIT);
            }
            Effect::PrefillAndImport(handover) => {
                let within = self.router.config().import_deadline.as_micros() as u64;
                let session = handover.prefill_tag.session.clone();
                let body = turn(request, Some(handover.prefill_tag));
                self.call(
                    number,
                    Call::Prefill,
                    handover.prefill,
                    Ask::Turn(Box::new(body)),
                    within,
                );
                let import = Ask::Import(session, handover.import);
                self.call(number, Call::Import, handover.decode, import, within + ADMIT);
            }
            Effect::Run { worker, tag } => {
                let body = turn(request, tag);
                self.call(number, Call::Run, worker, Ask::Turn(Box::new(body)), FIRST_TOKEN);
            }
            Effect::Wait { until } => self.out.push(Out::Until(until, Tick::Wake(number))),
            Effect::Release {
                worker,
                session,
                request,
            } => {
                self.next += 1;
                let question = ReleaseRequest {
                    request: Some(request),
                    drop_kv: false,
                };
                let ask = Message::Ask(self.next, Ask::Release(session, question));
                self.out.push(Out::Send(worker.0.into(), ask));
            }
            Effect::Refuse(_) => {}
        }
    }

    fn call(&mut self, number: u64, kind: Call, worker: WorkerIndex, ask: Ask, within: Time) {
        self.next += 1;
        // The call's number tells its worker: closing needs no table.
        let call = self.next << 8 | u64::from(worker.0);
        self.calls.insert(call, (number, kind));
        self.out.push(Out::Send(worker.0.into(), Message::Ask(call, ask)));
        self.out.push(Out::After(within, Tick::Deadline(call)));
    }

    fn worker_of(&self, call: CallId) -> Option<NodeId> {
        usize::try_from(call & 0xff).ok().filter(|w| *w < self.misses.len())
    }

    fn close_calls(&mut self, number: u64, which: impl Fn(&Call) -> bool) {
        let dead: Vec<CallId> = self
            .calls
            .iter()
            .filter(|(_, (n, c))| *n == number && which(c))
            .map(|(c, _)| *c)
            .collect();
        for call in dead {
            self.calls.remove(&call);
            if let Some(worker) = self.worker_of(call) {
                self.out.push(Out::Send(worker, Message::Close(call)));
            }
        }
    }

    // ---- what must hold of a dispatch (INV-2, INV-3, DISP-7)

    fn before(&mut self, live: &mut Live) {
        (live.pin, live.excused) = (None, false);
        let Some(session) = &live.request.session else { return };
        let Some(record) = self.router.sessions().peek(session) else {
            return;
        };
        let view = &self.router.view;
        let Some(pin) = record.pin.filter(|p| view.at(p.worker) == *p) else {
            return;
        };
        let input = live.request.prompt.len() as u32;
        let blocks = |w: WorkerIndex| record.resident(view.at(w)).min(input) / BLOCK_TOKENS;
        let outranked = view
            .decoders()
            .any(|w| w != pin.worker && blocks(w) > blocks(pin.worker));
        live.pin = Some(pin);
        live.excused = outranked
            || view.worker(pin.worker).health() != Health::Up
            || self.troubled.contains(&(session.clone(), pin.worker.0));
    }

    fn note(&mut self, number: u64, worker: WorkerIndex, reason: Option<Reason>) {
        let Some(live) = self.live.get_mut(&number) else { return };
        live.asked.push((worker, reason));
        if let (Some(session), Some(reason)) = (&live.request.session, reason)
            && (reason.counts_as_reject() || reason == Reason::TooLarge)
        {
            self.troubled.insert((session.clone(), worker.0));
        }
    }

    /// A worker is no candidate any more: whoever was pinned to it may leave.
    fn lost(&mut self, worker: WorkerIndex) {
        for live in self.live.values_mut() {
            live.excused |= live.pin.is_some_and(|p| p.worker == worker);
        }
    }

    fn over(&mut self, number: u64, outcome: Outcome) {
        let Some(live) = self.live.remove(&number) else { return };
        let Some(dispatch) = &live.dispatch else { return };
        let trace = dispatch.trace();
        let (mode, worker) = (trace.mode, trace.worker);
        self.log(|| {
            let request = &live.request;
            format!(
                "request {} of client {}: {outcome:?} {mode:?} {:?}",
                request.number, request.client, trace.chain
            )
        });
        let served = outcome == Outcome::Completed;
        if let Some(at) = mode.and_then(|m| ExecutionMode::ALL.iter().position(|x| *x == m)) {
            self.modes[at] += u64::from(served);
        }
        let counted = live
            .asked
            .iter()
            .filter(|(_, r)| r.is_some_and(Reason::counts_as_reject))
            .count();
        let workers = self.router.view.len();
        let busy = live
            .asked
            .iter()
            .filter(|(_, r)| *r == Some(Reason::SessionBusy))
            .count();
        self.watch.check(
            counted <= 2 * workers && live.asked.len() - busy <= 4 * workers,
            Oracle::Inv2,
            || format!("{} questions, {counted} rejects: {:?}", live.asked.len(), live.asked),
        );
        self.check_pin(&live, mode, worker, served);
        if let (true, Some(session), Some(worker)) = (served, &live.request.session, worker) {
            if mode == Some(ExecutionMode::Direct) {
                self.troubled.retain(|(s, _)| s != session);
                let view = &self.router.view;
                let left = self
                    .router
                    .sessions()
                    .peek(session)
                    .map_or(0, |r| view.all().map(|w| r.rejects(view.at(w))).sum::<u32>());
                self.watch.check(left == 0, Oracle::RejectsCleared, || {
                    format!("{left} rejects of {session} outlive a completed direct turn")
                });
            } else if mode != Some(ExecutionMode::Fallback) {
                self.troubled.remove(&(session.clone(), worker.0));
            }
        }
        let answer = match live.output {
            Some(tokens) if served => Answer::Tokens(tokens),
            _ => told(outcome),
        };
        if outcome != Outcome::Gone {
            self.out
                .push(Out::Answer(live.request.client, live.request.number, answer));
        }
    }

    fn check_pin(&mut self, live: &Live, mode: Option<ExecutionMode>, worker: Option<WorkerIndex>, served: bool) {
        let Some(pin) = live
            .pin
            .filter(|p| !live.excused && self.router.view.at(p.worker) == *p)
        else {
            return;
        };
        if let Some((first, _)) = live.asked.first() {
            self.watch.check(*first == pin.worker, Oracle::Inv3, || {
                format!("pinned to {pin:?}, asked {first:?} first: {:?}", live.asked)
            });
        }
        let moved = served && mode != Some(ExecutionMode::Fallback) && worker != Some(pin.worker);
        let last = live
            .asked
            .iter()
            .filter(|(w, _)| *w == pin.worker)
            .filter_map(|(_, r)| *r)
            .next_back();
        let cause = last.is_some_and(|r| r.counts_as_reject() || matches!(r, Reason::TooLarge | Reason::Draining));
        self.watch.check(!moved || cause, Oracle::Inv3, || {
            format!("left {pin:?} for {worker:?} without a reject there: {:?}", live.asked)
        });
    }

    fn log(&mut self, line: impl FnOnce() -> String) {
        if self.logging {
            self.out.push(Out::Log(line()));
        }
    }

    /// Its node.
    pub fn id(&self) -> NodeId {
        self.id
    }
}

fn turn(request: &Request, tag: Option<TurnTag>) -> TurnAsk {
    TurnAsk {
        tag,
        identity: request.identity.clone(),
        prompt: request.prompt.clone(),
        max_new: request.max_new,
        stream: request.stream,
    }
}

fn brief(effect: &Effect) -> String {
    match effect {
        Effect::Ask(_) => "asks who holds it".to_owned(),
        Effect::Probe { worker, request } => format!(
            "asks {} for {} tokens, {} new, placement {:?}",
            worker.0,
            request.input_tokens,
            request.append_tokens,
            request.placement.map(|p| p.n)
        ),
        Effect::PrefillAndImport(h) => format!("{} prefills, {} imports", h.prefill.0, h.decode.0),
        Effect::Run { worker, tag } => format!(
            "runs on {} tag {}",
            worker.0,
            tag.as_ref().map_or(String::new(), |t| t.to_string())
        ),
        other => format!("{other:?}"),
    }
}
