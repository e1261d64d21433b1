//! A few processes and what travels between them, with every delivery by hand: for worlds that are a script
//! (`tests/traps.rs`) and for those of which every order is tried (`tests/handover.rs`).
//!
//! Time stands still unless it is told to pass: engines, movers and local calls take none. The caller plays the router
//! and the clients; what it asks is heard at once.

use std::{collections::BTreeMap, fmt::Write as _};

use kvc_proto::{
    id::{Incarnation, SessionId},
    time::Now,
    wire::info::{Role, SessionView},
    worker::WorkerConfig,
};

use super::{
    clock::Time,
    message::{Ask, CallId, Message, NodeId, PeerWhat, Reply},
    oracle::{Violation, Watch},
    owners::Owners,
    process::{Out, Process, Speed, Tick},
    rng::Rng,
};

/// Ticks that may follow one call before the engines must be at rest.
const BUSY: u32 = 20_000;

/// A message between two workers.
#[derive(Clone, Debug)]
pub struct Wire {
    /// Its sender.
    pub from: NodeId,
    /// Where it goes.
    pub to: NodeId,
    /// What it says.
    pub message: Message,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Stage {
    now: Now,
    configs: Vec<(Role, WorkerConfig)>,
    /// The processes; none while one is down.
    pub nodes: Vec<Option<Process>>,
    lives: Vec<u64>,
    /// Messages on their way between workers, in the order they were sent.
    pub wires: Vec<Wire>,
    ticks: BTreeMap<(Now, u64), (NodeId, u64, Tick)>,
    sequence: u64,
    calls: CallId,
    replies: BTreeMap<CallId, Vec<Reply>>,
    owners: Owners,
    watch: Watch,
    /// What happened.
    pub log: Option<Vec<String>>,
}

impl Stage {
    /// Workers of these roles and numbers.
    pub fn new(configs: Vec<(Role, WorkerConfig)>, logging: bool) -> Stage {
        let mut stage = Stage {
            now: Now(1_000_000),
            nodes: configs.iter().map(|_| None).collect(),
            lives: vec![0; configs.len()],
            configs,
            wires: Vec::new(),
            ticks: BTreeMap::new(),
            sequence: 0,
            calls: 1,
            replies: BTreeMap::new(),
            owners: Owners::default(),
            watch: Watch::default(),
            log: logging.then(Vec::new),
        };
        for node in 0..stage.nodes.len() {
            stage.start(node);
        }
        stage
    }

    /// Starts a process where none is.
    pub fn start(&mut self, node: NodeId) {
        if self.nodes[node].is_some() {
            return;
        }
        self.lives[node] += 1;
        let incarnation = Incarnation(node as u64 * 1000 + self.lives[node]);
        let (role, config) = self.configs[node].clone();
        let speed = Speed {
            forward: 1,
            token: 0,
            chunk: 4096,
            running: 8,
            trust: 0,
            retract: 0,
            leave: 0,
            read: 1,
            read_tokens: 4096,
            vocabulary: 16,
        };
        self.say(|| format!("worker {node} starts as {incarnation}"));
        let rng = Rng::new(node as u64);
        let process = Process::new(node, role, config, incarnation, speed, rng, self.log.is_some());
        self.nodes[node] = Some(process);
        self.out(node);
        self.rest();
    }

    /// Ends a process by force; what it has sent is still on its way.
    pub fn crash(&mut self, node: NodeId) {
        let Some(process) = self.nodes[node].take() else { return };
        self.say(|| format!("worker {node} dies"));
        self.owners.gone(node);
        for (call, caller) in process.open {
            self.send(node, caller, Message::Reset(call));
        }
        self.rest();
    }

    /// The caller asks a worker; its replies come with [`Stage::replies`].
    pub fn ask(&mut self, node: NodeId, ask: Ask) -> CallId {
        self.calls += 1;
        let call = self.calls;
        let router = self.nodes.len();
        self.say(|| format!("→ {node}: {}", brief(&ask)));
        if self.nodes[node].is_none() {
            return call;
        }
        self.receive(node, router, Message::Ask(call, ask));
        self.rest();
        call
    }

    /// The caller closes the connection of its call.
    pub fn close(&mut self, node: NodeId, call: CallId) {
        let router = self.nodes.len();
        self.receive(node, router, Message::Close(call));
        self.rest();
    }

    /// The last reply to a call.
    pub fn reply(&self, call: CallId) -> Option<&Reply> {
        self.replies.get(&call).and_then(|r| r.last())
    }

    /// Delivers the message at this place among those on their way.
    pub fn deliver(&mut self, at: usize) {
        let wire = self.wires.remove(at);
        self.say(|| format!("{} → {}: {}", wire.from, wire.to, brief(&wire.message)));
        self.arrive(wire);
    }

    /// Delivers it and leaves a copy on its way.
    pub fn duplicate(&mut self, at: usize) {
        let wire = self.wires[at].clone();
        self.say(|| format!("{} → {}, and again later: {}", wire.from, wire.to, brief(&wire.message)));
        self.arrive(wire);
    }

    /// The message is lost.
    pub fn lose(&mut self, at: usize) {
        let wire = self.wires.remove(at);
        self.say(|| format!("{} → {} is lost: {}", wire.from, wire.to, brief(&wire.message)));
    }

    /// Everything on its way arrives, and what comes of it, while `which` says so.
    pub fn deliver_all(&mut self, which: impl Fn(&Wire) -> bool) {
        for _ in 0..BUSY {
            let Some(at) = self.wires.iter().position(&which) else {
                return;
            };
            self.deliver(at);
        }
    }

    /// Time passes to the next moment at which some process waits for something; false if none does.
    pub fn pass(&mut self) -> bool {
        let timer = |p: &Option<Process>| p.as_ref().and_then(|p| p.w.poll_timeout());
        let machine = self.nodes.iter().filter_map(timer).min();
        let tick = self.ticks.iter().find(|(_, t)| self.counts(t)).map(|((at, _), _)| *at);
        let Some(next) = [machine, tick].into_iter().flatten().min() else {
            return false;
        };
        self.pass_until(next.max(self.now));
        true
    }

    /// That much time passes.
    pub fn wait(&mut self, time: Time) {
        self.pass_until(self.now + std::time::Duration::from_micros(time));
    }

    /// One process's view of a session.
    pub fn session(&self, node: NodeId, session: &SessionId) -> Option<SessionView> {
        let process = self.nodes[node].as_ref()?;
        process.w.session(session, self.now)
    }

    /// The clock that all of them share.
    pub fn now(&self) -> Now {
        self.now
    }

    /// A process that must be up.
    ///
    /// # Panics
    /// If it is down.
    pub fn process(&mut self, node: NodeId) -> &mut Process {
        match &mut self.nodes[node] {
            Some(process) => process,
            None => panic!("worker {node} is down"),
        }
    }

    /// What every caller could see of the whole stage, numbers that only grow left aside: two stages that look the same
    /// go on the same. Puts the messages on their way into an order of their own.
    pub fn sketch(&mut self, session: &SessionId) -> String {
        self.wires.sort_by_cached_key(|w| (w.from, w.to, gist(&w.message)));
        let mut text = String::new();
        for wire in &self.wires {
            let _ = write!(text, "{}>{}{};", wire.from, wire.to, gist(&wire.message));
        }
        let now = self.now;
        for (node, process) in self.nodes.iter_mut().enumerate() {
            let Some(process) = process else {
                let _ = write!(text, "|{node} down");
                continue;
            };
            let timer = process.w.poll_timeout().map(|at| at.since(now).as_micros() / 5_000);
            let _ = write!(text, "|{node}.{} {timer:?} ", self.lives[node]);
            process.sketch(session, now, &mut text);
        }
        let waits: Vec<_> = self
            .ticks
            .iter()
            .filter(|(_, t)| self.counts(t))
            .map(|((at, _), (node, _, tick))| {
                let what = std::mem::discriminant(tick);
                (*node, format!("{what:?}"), at.since(now).as_micros() / 5_000)
            })
            .collect();
        let _ = write!(text, "|{waits:?}");
        text
    }

    /// The first rule that was broken.
    ///
    /// # Errors
    /// The violation.
    pub fn judge(&mut self) -> Result<(), Violation> {
        let mut nodes = self.nodes.iter_mut().flatten();
        let found = nodes.find_map(|p| p.watch.take()).or_else(|| self.watch.take());
        found.map_or(Ok(()), Err)
    }

    /// A line for the log.
    pub fn say(&mut self, line: impl FnOnce() -> String) {
        if let Some(log) = &mut self.log {
            log.push(format!("{:>10.3} ms  {}", self.now.0 as f64 / 1000.0, line()));
        }
    }

    fn pass_until(&mut self, end: Now) {
        loop {
            let timer = |p: &Option<Process>| p.as_ref().and_then(|p| p.w.poll_timeout());
            let machine = (0..self.nodes.len())
                .filter_map(|n| Some((timer(&self.nodes[n])?, n)))
                .min()
                .filter(|(at, _)| *at <= end);
            let tick = self
                .ticks
                .first_key_value()
                .map(|((at, _), _)| *at)
                .filter(|at| *at <= end);
            match (machine, tick) {
                (Some((at, node)), tick) if tick.is_none_or(|t| at <= t) => {
                    self.now = self.now.max(at);
                    let now = self.now;
                    if let Some(process) = &mut self.nodes[node] {
                        process.timeout(now);
                    }
                    self.out(node);
                }
                (_, Some(at)) => {
                    self.now = self.now.max(at);
                    self.tick();
                }
                _ => break,
            }
            self.rest();
        }
        self.now = self.now.max(end);
    }

    /// The earliest tick happens.
    fn tick(&mut self) {
        let Some((_, (node, lives, tick))) = self.ticks.pop_first() else {
            return;
        };
        let now = self.now;
        if lives == self.lives[node]
            && let Some(process) = &mut self.nodes[node]
        {
            process.tick(tick, now);
            self.out(node);
        }
    }

    /// Engines and movers do what they have to, in no time.
    fn rest(&mut self) {
        for _ in 0..BUSY {
            // An idle engine looks again after a long time: that is not work.
            let soon = self.now + std::time::Duration::from_millis(100);
            let work = |t: &Tick| matches!(t, Tick::Step(_) | Tick::Forward | Tick::Serve(_) | Tick::Reads(_));
            let next = self
                .ticks
                .iter()
                .find(|((at, _), (.., t))| *at < soon && work(t))
                .map(|(key, _)| *key);
            let Some(key) = next else { return };
            let Some((node, lives, tick)) = self.ticks.remove(&key) else {
                return;
            };
            let now = self.now;
            if lives == self.lives[node]
                && let Some(process) = &mut self.nodes[node]
            {
                process.tick(tick, now);
                self.out(node);
            }
        }
        panic!("the engines do not come to rest");
    }

    /// A tick that is worth waiting for: not an idle engine's.
    fn counts(&self, tick: &(NodeId, u64, Tick)) -> bool {
        let (node, lives, tick) = tick;
        *lives == self.lives[*node] && !matches!(tick, Tick::Step(_))
    }

    fn arrive(&mut self, wire: Wire) {
        match (&self.nodes[wire.to], wire.message) {
            (None, Message::Ask(call, _)) => self.send(wire.to, wire.from, Message::Reset(call)),
            (None, _) => {}
            (Some(_), message) => self.receive(wire.to, wire.from, message),
        }
        self.rest();
    }

    fn receive(&mut self, node: NodeId, from: NodeId, message: Message) {
        let now = self.now;
        if let Some(process) = &mut self.nodes[node] {
            process.receive(from, message, now);
        }
        self.out(node);
    }

    fn out(&mut self, node: NodeId) {
        let Some(process) = &mut self.nodes[node] else { return };
        let life = (node, self.lives[node]);
        for out in process.drain() {
            match out {
                Out::Send(to, message) => self.send(node, to, message),
                Out::After(time, tick) => {
                    self.sequence += 1;
                    let at = self.now + std::time::Duration::from_micros(time);
                    self.ticks.insert((at, self.sequence), (node, life.1, tick));
                }
                Out::Holds(session, placement) => {
                    let (nodes, lives) = (&self.nodes, &self.lives);
                    let alive = |(n, l): (NodeId, u64)| lives[n] == l && nodes[n].is_some();
                    self.owners.commits(life, session, placement.n, alive, &mut self.watch);
                }
                Out::Owns(owned) => self.owners.owns(node, owned, &mut self.watch),
                Out::Taken(session, pending) => {
                    let deadline = self.configs[node].1.handover_deadline.as_micros() as u64;
                    let watch = &mut self.watch;
                    self.owners.takes(node, &session, pending, self.now.0, deadline, watch);
                }
                Out::Granted(session, pending) => self.owners.grants(session, pending, self.now.0),
                Out::Decided(session, owned, to, pending) => {
                    self.owners.decides(life, session, owned, to, pending, &mut self.watch);
                }
                Out::Milestone(..) => {}
                Out::Log(line) => self.say(|| format!("worker {node}: {line}")),
            }
        }
    }

    fn send(&mut self, from: NodeId, to: NodeId, message: Message) {
        if to < self.nodes.len() {
            self.wires.push(Wire { from, to, message });
        } else if let Message::Reply(call, reply) = message {
            self.say(|| format!("{from} answers: {}", brief(&reply)));
            self.replies.entry(call).or_default().push(reply);
        }
    }
}

/// A message without the numbers of calls and leases.
fn gist(message: &Message) -> String {
    match message {
        Message::Ask(_, Ask::Peer(ask)) => match &ask.what {
            PeerWhat::Lease(_, placement, kind, have) => format!("lease {} {kind:?} {have:?} {}", placement.n, ask.to),
            PeerWhat::Watch(_, from) => format!("watch {from}"),
            PeerWhat::Renew(_) => "renew".to_owned(),
            PeerWhat::Confirm(_) => "confirm".to_owned(),
            PeerWhat::End(_) => "end".to_owned(),
            PeerWhat::Read(_, slots) => format!("read {}", slots.len()),
            PeerWhat::Announce(a) => format!("announce {:?} {} {:?}", a.epoch, a.committed, a.digest),
            PeerWhat::Handover(h, _) => {
                format!(
                    "handover {} {:?} {} {:?} {}",
                    h.pending.n, h.epoch, h.committed, h.digest, h.incarnation
                )
            }
        },
        Message::Reply(_, Reply::Granted(grant)) => {
            format!("granted {:?} {} {:?}", grant.epoch, grant.after, grant.tokens)
        }
        Message::Reply(_, Reply::View(view)) => format!("view {} {} {}", view.from, view.slots.len(), view.complete),
        Message::Reply(_, reply) => format!("{reply:?}"),
        Message::Ask(..) => "ask".to_owned(),
        Message::Close(_) => "close".to_owned(),
        Message::Reset(_) => "reset".to_owned(),
    }
}

fn brief(what: &impl std::fmt::Debug) -> String {
    let text = format!("{what:?}");
    text.chars().take(220).collect()
}
