//! The world: nodes, links, the queue of events in virtual time, and the faults. One step is one event; after each the
//! oracles look.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use kvc_proto::{
    id::{Incarnation, RouterId, StoreId},
    routing::MemoryStore,
};

use super::{
    client::{Client, Request},
    clock::{Clock, Time},
    fault::Aim,
    link::Link,
    message::{Ask, Message, NodeId},
    oracle::{Oracle, Violation, Watch},
    owners::Owners,
    past::Past,
    plan::Plan,
    process::{self, Process},
    rng::Rng,
    router,
    store::Store,
};

/// Every request is answered within this: three executions of a router, each with its deadline, and the pauses.
const ANSWERED: Time = 20_000_000;
/// After the last answer: longer than any lease, reservation or import lives.
const QUIET: Time = 3_000_000;
/// After everything was closed: a few loop iterations.
const CLOSED: Time = 400_000;
/// For a world that does not come to its end.
const STEPS: u64 = 400_000;

/// What happens at a moment.
#[derive(Debug)]
pub(super) enum Event {
    Deliver(NodeId, NodeId, Message),
    Process(NodeId, u64, process::Tick),
    Timeout(NodeId, u64),
    Router(usize, router::Tick),
    Client(usize, Wish),
    Fault,
    Aimed(Aim),
    Restart(NodeId),
    Heal,
    /// The operator wants a session moved.
    Move,
    /// The operator begins to drain some worker.
    Drain,
    /// The operator looks whether a worker's process is drained; gives up at the second time.
    Drained(NodeId, u64, Time),
}

/// What a client does at a moment.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wish {
    Ask,
    Leave(u64),
    Bound(u64),
}

/// A worker's place: processes come and go.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) clock: Clock,
    pub(super) process: Option<Process>,
    pub(super) lives: u64,
    pub(super) frozen_until: Time,
    /// Since when it takes turns.
    pub(super) since: Time,
    pub(super) timer: Option<Time>,
}

/// See the module.
#[derive(Debug)]
pub struct World {
    /// What the seed means.
    pub plan: Plan,
    pub(super) rng: Rng,
    pub(super) now: Time,
    pub(super) sequence: u64,
    pub(super) queue: BTreeMap<(Time, u64), Event>,
    pub(super) links: Vec<Vec<Link>>,
    pub(super) hosts: Vec<Host>,
    pub(super) routers: Vec<(Clock, router::Node)>,
    pub(super) clients: Vec<Client>,
    pub(super) watch: Watch,
    pub(super) log: Option<Vec<String>>,
    /// Lines are printed as they come: a world that hangs or aborts tells what it did.
    pub live: bool,
    /// Events so far.
    pub steps: u64,
    /// Processes that have ended by force.
    pub crashes: u64,
    /// Of these, processes that were drained first.
    pub drained: u64,
    pub(super) past: Past,
    pub(super) routers_started: u64,
    pub(super) owners: Owners,
    /// At some moment no worker took turns.
    pub(super) dark: bool,
}

impl World {
    /// The world of a plan. `logging` keeps a line per event.
    pub fn new(plan: Plan, logging: bool) -> World {
        let mut rng = Rng::new(plan.seed ^ 0x5eed);
        let nodes = plan.roles.len() + plan.routers;
        let store = Store(Arc::new(Mutex::new(MemoryStore::new(StoreId(9)))));
        let host = |rng: &mut Rng| Host {
            clock: Clock::new(rng, plan.drift),
            process: None,
            lives: 0,
            frozen_until: 0,
            since: 0,
            timer: None,
        };
        let routers = (0..plan.routers).map(|i| {
            let name = RouterId(i as u64 + 1);
            let id = plan.roles.len() + i;
            let node = router::Node::new(id, name, plan.router.clone(), store.clone(), &plan.roles, logging);
            (Clock::new(&mut rng, plan.drift), node)
        });
        let routers: Vec<_> = routers.collect();
        let plan_routers = routers.len() as u64;
        let mut world = World {
            links: vec![vec![plan.link; nodes]; nodes],
            hosts: plan.roles.iter().map(|_| host(&mut rng)).collect(),
            routers,
            clients: (0..plan.clients).map(|i| Client::new(i, &plan, rng.fork())).collect(),
            plan,
            now: 0,
            sequence: 0,
            queue: BTreeMap::new(),
            watch: Watch::default(),
            log: logging.then(Vec::new),
            live: false,
            steps: 0,
            crashes: 0,
            drained: 0,
            past: Past::default(),
            routers_started: plan_routers,
            owners: Owners::default(),
            dark: false,
            rng,
        };
        for node in 0..world.hosts.len() {
            world.start(node);
        }
        for router in 0..world.routers.len() {
            world.router_out(router);
        }
        for client in 0..world.clients.len() {
            let at = 5_000 + world.rng.below(20_000);
            world.at(at, Event::Client(client, Wish::Ask));
        }
        world.next_operation();
        if world.plan.fault_gap > 0 {
            world.next_fault();
            world.at(world.plan.faults_until, Event::Heal);
        }
        world
    }

    /// Runs to the end.
    ///
    /// # Errors
    /// The first violation.
    pub fn run(&mut self) -> Result<(), Violation> {
        while self.clients.iter().any(|c| !c.done()) || self.now < self.plan.faults_until {
            self.step()?;
        }
        self.until(self.now + QUIET)?;
        self.look_at_everything();
        self.look_at_replicas();
        self.close_everything();
        self.until(self.now + CLOSED)?;
        self.check_nothing_left();
        self.judge()
    }

    /// The event log.
    pub fn log(&self) -> &[String] {
        self.log.as_deref().unwrap_or_default()
    }

    /// What happened in it.
    pub fn past(&self) -> Past {
        let mut past = self.past;
        self.hosts
            .iter()
            .filter_map(|h| h.process.as_ref())
            .for_each(|p| past.add(p));
        past
    }

    /// Answers and errors the clients got, and completed dispatches by mode.
    pub fn answers(&self) -> (u64, u64, [u64; 5]) {
        let mut modes = [0; 5];
        for (_, router) in &self.routers {
            modes.iter_mut().zip(router.modes).for_each(|(m, n)| *m += n);
        }
        let sum = |f: fn(&Client) -> u64| self.clients.iter().map(f).sum();
        (sum(|c| c.answered), sum(|c| c.errors), modes)
    }

    fn until(&mut self, end: Time) -> Result<(), Violation> {
        while self.now < end {
            self.step()?;
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), Violation> {
        let Some(((at, _), event)) = self.queue.pop_first() else {
            self.watch.fire(Oracle::Answered, "nothing happens any more");
            return self.judge();
        };
        self.now = at;
        self.steps += 1;
        if self.steps > STEPS {
            self.watch.fire(Oracle::Answered, format!("no end after {STEPS} steps"));
        }
        self.happen(event);
        self.judge()
    }

    fn judge(&mut self) -> Result<(), Violation> {
        let hosts = self.hosts.iter_mut().filter_map(|h| h.process.as_mut());
        let found = hosts
            .filter_map(|p| p.watch.take().map(|v| (p.id, v)))
            .chain(
                self.routers
                    .iter_mut()
                    .filter_map(|(_, r)| r.watch.take().map(|v| (r.id(), v))),
            )
            .next();
        let found = found
            .map(|(id, v)| Violation {
                facts: format!("node {id}: {}", v.facts),
                ..v
            })
            .or_else(|| self.watch.take());
        found.map_or(Ok(()), Err)
    }

    pub(super) fn at(&mut self, at: Time, event: Event) {
        self.sequence += 1;
        self.queue.insert((at, self.sequence), event);
    }

    pub(super) fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(log) = &mut self.log {
            let line = format!("{:>9.3} ms  {}", self.now as f64 / 1000.0, line());
            if self.live {
                println!("{line}");
            }
            log.push(line);
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Deliver(to, from, message) => self.deliver(to, from, message),
            Event::Process(node, lives, tick) => self.host(
                node,
                lives,
                |e| Event::Process(node, e, tick.clone()),
                |p, now| p.tick(tick.clone(), now),
            ),
            Event::Timeout(node, lives) => {
                if self.hosts[node].lives == lives {
                    self.hosts[node].timer = None;
                }
                let again = |e| Event::Timeout(node, e);
                self.host(node, lives, again, |p, now| {
                    if p.w.poll_timeout().is_some_and(|at| at <= now) {
                        p.timeout(now);
                    }
                });
            }
            Event::Router(router, tick) => {
                let now = self.routers[router].0.at(self.now);
                self.routers[router].1.tick(tick, now);
                self.router_out(router);
            }
            Event::Client(client, wish) => self.client(client, wish),
            Event::Fault => self.fault(),
            Event::Aimed(aim) => self.aimed(aim),
            Event::Restart(node) => self.start(node),
            Event::Heal => self.heal(),
            Event::Move => self.operator_moves(),
            Event::Drain => self.operator_drains(),
            Event::Drained(node, lives, until) => self.operator_looks(node, lives, until),
        }
    }

    // ---- workers

    fn start(&mut self, node: NodeId) {
        let host = &mut self.hosts[node];
        if host.process.is_some() {
            return;
        }
        host.lives += 1;
        (host.timer, host.frozen_until, host.since) = (None, 0, self.now);
        let incarnation = Incarnation(node as u64 * 1000 + host.lives);
        let process = Process::new(
            node,
            self.plan.roles[node],
            self.plan.workers[node].clone(),
            incarnation,
            self.plan.speeds[node].clone(),
            self.rng.fork(),
            self.log.is_some(),
        );
        host.process = Some(process);
        self.note(|| format!("worker {node} starts as {incarnation}"));
        self.process_out(node);
    }

    fn host(
        &mut self,
        node: NodeId,
        lives: u64,
        again: impl FnOnce(u64) -> Event,
        call: impl FnOnce(&mut Process, kvc_proto::time::Now),
    ) {
        let host = &mut self.hosts[node];
        if host.lives != lives || host.process.is_none() {
            return;
        }
        if host.frozen_until > self.now {
            let thaw = host.frozen_until;
            self.at(thaw, again(lives));
            return;
        }
        let now = host.clock.at(self.now);
        if let Some(process) = &mut host.process {
            call(process, now);
        }
        self.process_out(node);
    }

    pub(super) fn process_out(&mut self, node: NodeId) {
        let Some(process) = self.hosts[node].process.as_mut() else {
            return;
        };
        let outs = process.drain();
        let due = process.w.poll_timeout();
        let lives = self.hosts[node].lives;
        for out in outs {
            match out {
                process::Out::Send(to, message) => self.send(node, to, message),
                process::Out::After(time, tick) => self.at(self.now + time, Event::Process(node, lives, tick)),
                process::Out::Holds(session, placement) => {
                    let hosts = &self.hosts;
                    let alive = |(n, l): (NodeId, u64)| hosts[n].lives == l && hosts[n].process.is_some();
                    let watch = &mut self.watch;
                    self.owners.commits((node, lives), session, placement.n, alive, watch);
                }
                process::Out::Owns(owned) => self.owners.owns(node, owned, &mut self.watch),
                process::Out::Taken(session, pending) => {
                    let deadline = self.plan.workers[node].handover_deadline.as_micros() as u64;
                    let watch = &mut self.watch;
                    self.owners.takes(node, &session, pending, self.now, deadline, watch);
                }
                process::Out::Granted(session, pending) => self.owners.grants(session, pending, self.now),
                process::Out::Decided(session, owned, to, pending) => {
                    let watch = &mut self.watch;
                    self.owners.decides((node, lives), session, owned, to, pending, watch);
                }
                process::Out::Milestone(what, peer) => self.milestone(what, node, peer),
                process::Out::Log(line) => self.note(|| format!("worker {node}: {line}")),
            }
        }
        if let Some(due) = due {
            // Served late now and then: expiry races.
            let when = self.hosts[node].clock.when(due).max(self.now) + self.rng.below(2_000);
            if self.hosts[node].timer.is_none_or(|t| t > when) {
                self.hosts[node].timer = Some(when);
                self.at(when, Event::Timeout(node, lives));
            }
        }
    }

    pub(super) fn crash(&mut self, node: NodeId) {
        let Some(process) = self.hosts[node].process.take() else {
            return;
        };
        self.crashes += 1;
        self.past.add(&process);
        self.owners.gone(node);
        self.note(|| format!("worker {node} ends"));
        self.look_for_light();
        for (call, caller) in process.open.clone() {
            self.send(node, caller, Message::Reset(call));
        }
        let back = self.now + self.rng.range(1_000, 120_000);
        self.at(back, Event::Restart(node));
    }

    // ---- the network

    pub(super) fn send(&mut self, from: NodeId, to: NodeId, message: Message) {
        // A connection carries a stream once; questions that production asks again may come twice.
        let once = matches!(
            message,
            Message::Ask(_, Ask::Turn(_)) | Message::Reply(..) | Message::Reset(_)
        );
        let link = self.links[from][to];
        let arrivals = link.arrivals(self.now, once, &mut self.rng);
        if arrivals.is_empty() {
            self.note(|| format!("lost {from} → {to}: {}", brief(&message)));
        }
        for at in arrivals {
            self.at(at, Event::Deliver(to, from, message.clone()));
        }
    }

    fn deliver(&mut self, to: NodeId, from: NodeId, message: Message) {
        if let Some(router) = to.checked_sub(self.hosts.len()) {
            self.note(|| format!("{from} → {to}: {}", brief(&message)));
            let now = self.routers[router].0.at(self.now);
            self.routers[router].1.receive(message, now);
            self.router_out(router);
            return;
        }
        if self.hosts[to].frozen_until > self.now {
            self.at(self.hosts[to].frozen_until, Event::Deliver(to, from, message));
            return;
        }
        self.note(|| format!("{from} → {to}: {}", brief(&message)));
        let lives = self.hosts[to].lives;
        match (&self.hosts[to].process, message) {
            // Nobody listens.
            (None, Message::Ask(call, _)) => self.send(to, from, Message::Reset(call)),
            (None, _) => {}
            (Some(_), message) => self.host(
                to,
                lives,
                |_| unreachable!("it is not frozen"),
                |p, now| p.receive(from, message, now),
            ),
        }
    }

    // ---- routers and clients

    pub(super) fn router_out(&mut self, router: usize) {
        let node = self.hosts.len() + router;
        for out in self.routers[router].1.drain() {
            match out {
                router::Out::Send(to, message) => self.send(node, to, message),
                router::Out::After(time, tick) => self.at(self.now + time, Event::Router(router, tick)),
                router::Out::Until(until, tick) => {
                    let when = self.routers[router].0.when(until).max(self.now);
                    self.at(when, Event::Router(router, tick));
                }
                router::Out::Answer(client, number, answer) => {
                    self.note(|| format!("client {client} gets {answer:?}"));
                    self.check_served(client, &answer);
                    let plan = &self.plan;
                    if self.clients[client].answered(number, &answer, plan, &mut self.watch) {
                        let at = self.now + self.clients[client].thinks(plan);
                        self.at(at, Event::Client(client, Wish::Ask));
                    }
                }
                router::Out::Log(line) => self.note(|| format!("router {node}: {line}")),
            }
        }
    }

    fn client(&mut self, client: usize, wish: Wish) {
        match wish {
            Wish::Ask => {
                let Some(request) = self.clients[client].next(&self.plan) else {
                    return;
                };
                self.note(|| describe(&request));
                self.at(self.now + ANSWERED, Event::Client(client, Wish::Bound(request.number)));
                if let Some(after) = self.clients[client].leaves(&self.plan) {
                    self.at(self.now + after, Event::Client(client, Wish::Leave(request.number)));
                }
                let router = self.clients[client].router;
                let now = self.routers[router].0.at(self.now);
                self.routers[router].1.request(request, now);
                self.router_out(router);
            }
            Wish::Leave(number) => {
                if self.clients[client].leave(number) {
                    self.note(|| format!("client {client} goes away"));
                    let router = self.clients[client].router;
                    let now = self.routers[router].0.at(self.now);
                    self.routers[router].1.gone(client, number, now);
                    self.router_out(router);
                    let at = self.now + self.clients[client].thinks(&self.plan);
                    self.at(at, Event::Client(client, Wish::Ask));
                }
            }
            Wish::Bound(number) => {
                let waits = self.clients[client].waits() == Some(number);
                self.watch.check(!waits, Oracle::Answered, || {
                    format!(
                        "request {number} of client {client} has no answer after {} s",
                        ANSWERED / 1_000_000
                    )
                });
            }
        }
    }
}

fn describe(request: &Request) -> String {
    let name = request.session.as_ref().map_or("no session", |s| s.as_str());
    format!(
        "client {} asks: request {} of {name}, {} tokens, {} new{}",
        request.client,
        request.number,
        request.prompt.len(),
        request.max_new,
        request
            .direct
            .map_or(String::new(), |w| format!(", straight to worker {w}"))
    )
}

fn brief(message: &Message) -> String {
    let mut text = format!("{message:?}");
    if text.len() > 300 {
        let end = (0..=300).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}
