//! The hand-over and the sync protocol, explored exhaustively to a stated depth (kv-movement §6): one session, a few
//! workers; in every order messages arrive, are lost, come twice or too late, turns and rewinds come in, a worker dies. After
//! each step the oracles of the simulation look; every state reached must also come to a good end once nothing breaks.

use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    time::Instant,
};

use kvc_proto::{
    id::ReservationId,
    mutation::{Check, without},
    wire::{admit::WithdrawAnswer, info::Standing, reason::Reason},
};
use kvc_tests::sim::{
    Oracle, Violation,
    message::{Ask, Message, NodeId, PeerWhat, Reply},
    play::{Play, Told, small, workers},
    stage::{Stage, Wire},
};

/// One state: the stage, and what the naive router knows.
#[derive(Clone)]
struct World {
    play: Play,
    /// Where the router believes the session to live, under which number, and with which backup.
    pin: NodeId,
    number: u64,
    backup: Option<NodeId>,
    /// The next number to be taken.
    next: u64,
    /// The target that may own the session, and under which number.
    pending: Option<(NodeId, u64)>,
    grant: Option<ReservationId>,
    crashed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    /// The nth message of those that are worth a choice arrives, is lost, or arrives and comes again.
    Deliver(usize),
    Lose(usize),
    Twice(usize),
    /// All other messages arrive, and what comes of them.
    Pull,
    /// They are lost.
    Break,
    /// Time passes to the next deadline of anybody.
    Pass,
    /// Longer than the hand-over deadline passes.
    Late,
    /// The router admits a turn; or the turn that it has admitted runs.
    Turn,
    /// The client takes back half of what was said, and a turn runs.
    Rewind,
    /// A turn under the owner's number comes to another worker.
    Astray,
    /// The pending target is asked; when it withdraws the session is placed anew, on its copy.
    Arbitrate,
    /// The router moves the session to the third worker.
    Move,
    /// The worker that owned it first dies, once.
    Crash,
    /// The engine of the backup takes the replica's room.
    Evict,
    /// The session is reseeded on another worker from the replica.
    Reseed,
}

impl World {
    /// Messages of which every fate is tried.
    fn choices(&self, worth: fn(&Wire) -> bool) -> Vec<usize> {
        (0..self.play.stage.wires.len())
            .filter(|i| worth(&self.play.stage.wires[*i]))
            .collect()
    }

    /// False: it cannot happen here.
    fn step(&mut self, op: Op, worth: fn(&Wire) -> bool) -> bool {
        let choices = self.choices(worth);
        match op {
            Op::Deliver(n) | Op::Lose(n) | Op::Twice(n) => {
                let Some(&at) = choices.get(n) else { return false };
                match op {
                    Op::Deliver(_) => self.play.stage.deliver(at),
                    Op::Lose(_) => self.play.stage.lose(at),
                    _ if self.play.stage.wires.len() > 4 => return false,
                    _ => self.play.stage.duplicate(at),
                }
            }
            Op::Pull => {
                if choices.len() == self.play.stage.wires.len() {
                    return false;
                }
                self.play.stage.deliver_all(|w| !worth(w));
            }
            Op::Break => {
                let before = self.play.stage.wires.len();
                self.play.stage.wires.retain(worth);
                return self.play.stage.wires.len() < before;
            }
            Op::Pass => return self.play.stage.pass(),
            Op::Late => self.play.stage.wait(55_000),
            Op::Turn => self.turn(),
            Op::Rewind => {
                if self.grant.is_some() || self.play.history.len() < 12 {
                    return false;
                }
                self.play.take_back(self.play.history.len() / 2);
                self.play.say([3, 3]);
                self.turn();
                self.turn();
            }
            Op::Astray => {
                let other = (self.pin + 1) % 2;
                let replica = |s: (Standing, u64, u32)| s.0 == Standing::Replica && s.1 == self.number;
                if !self.play.standing(other).is_some_and(replica) {
                    return false;
                }
                let _ = self.play.turn(other, self.number, 2, None);
            }
            Op::Arbitrate => return self.arbitrate(),
            Op::Move => {
                if self.pending.is_some() || self.pin == 2 || self.play.stage.nodes[self.pin].is_none() {
                    return false;
                }
                self.begin_move(2);
            }
            Op::Crash => {
                if std::mem::replace(&mut self.crashed, true) {
                    return false;
                }
                self.play.stage.crash(0);
            }
            Op::Evict => {
                let Some(backup) = self.backup.filter(|b| self.play.stage.nodes[*b].is_some()) else {
                    return false;
                };
                let (name, now) = (self.play.session.clone(), self.play.stage.now());
                self.play.stage.process(backup).close_session(&name, now);
                self.play.stage.wait(0);
            }
            Op::Reseed => {
                let Some(backup) = self.backup else { return false };
                let to = 2;
                if self.pin == to || self.grant.is_some() {
                    return false;
                }
                let number = self.take();
                self.play.say([4]);
                if let Told::Tokens(_) = self.play.reseed(to, number, backup, 2) {
                    (self.pin, self.number) = (to, number);
                }
            }
        }
        true
    }

    fn take(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn begin_move(&mut self, to: NodeId) {
        let number = self.take();
        let from = self.pin;
        self.play.prepare(from, to, number);
        self.pending = Some((to, number));
    }

    /// As a router: the grant, then the turn; `moved` is followed.
    fn turn(&mut self) {
        if self.play.stage.nodes[self.pin].is_none() {
            self.grant = None;
            return;
        }
        if let Some(grant) = self.grant.take() {
            self.play.run(self.pin, self.number, Some(grant), 2);
            return;
        }
        self.play.say([5]);
        let Some(answer) = self.play.admit(self.pin, self.number, 2, self.backup) else {
            return;
        };
        self.grant = answer.reservation;
        if let (Some(Reason::Moved), Some(moved)) = (answer.reason, answer.moved) {
            let to: NodeId = moved.to.peer.parse().expect("a node");
            (self.pin, self.number) = (to, moved.placement.n);
            self.pending = None;
            if self.play.stage.nodes[to].is_some() {
                let again = self.play.admit(to, self.number, 2, self.backup);
                self.grant = again.and_then(|a| a.reservation);
            }
        }
    }

    fn arbitrate(&mut self) -> bool {
        let Some((target, number)) = self.pending else {
            return false;
        };
        let Some(answer) = self.play.withdraw(target, number) else {
            return false;
        };
        self.pending = None;
        match answer {
            WithdrawAnswer::Owner { epoch } => (self.pin, self.number) = (target, epoch.placement.n),
            WithdrawAnswer::Withdrawn => {
                let fresh = self.take();
                self.play.say([6]);
                self.grant = None;
                if let Told::Tokens(_) = self.play.turn(target, fresh, 2, None) {
                    (self.pin, self.number) = (target, fresh);
                }
            }
        }
        true
    }

    fn sketch(&mut self) -> u64 {
        let name = self.play.session.clone();
        let mut hasher = DefaultHasher::new();
        self.play.stage.sketch(&name).hash(&mut hasher);
        (self.pin, self.number, self.next, self.pending, self.crashed).hash(&mut hasher);
        (self.grant.is_some(), &self.play.history).hash(&mut hasher);
        hasher.finish()
    }

    /// Nothing breaks any more: everything arrives, every deadline passes.
    fn quiet(&mut self) {
        for time in [1_000; 6].into_iter().chain([20_000; 6]).chain([450_000; 10]) {
            self.play.stage.deliver_all(|_| true);
            self.play.stage.wait(time);
        }
        self.play.stage.deliver_all(|_| true);
    }
}

/// What an exploration has seen.
#[derive(Clone, Copy, Debug)]
struct Seen {
    states: usize,
    steps: usize,
}

/// Every sequence of `ops` up to a depth; states that look the same are gone on from once.
fn explore(
    start: &World,
    depth: usize,
    ops: &[Op],
    worth: fn(&Wire) -> bool,
    end: fn(&mut World) -> Result<(), String>,
) -> Result<Seen, (Violation, Vec<Op>)> {
    let mut first = start.clone();
    let mut seen = HashSet::from([first.sketch()]);
    let mut level = vec![(first, Vec::new())];
    let mut steps = 0;
    for _ in 0..depth {
        let mut next = Vec::new();
        for (world, path) in level {
            for op in ops {
                let mut world = world.clone();
                if !world.step(*op, worth) {
                    continue;
                }
                steps += 1;
                let path = || [&path[..], &[*op]].concat();
                world.play.check().map_err(|v| (v, path()))?;
                if seen.insert(world.sketch()) {
                    let mut last = world.clone();
                    last.quiet();
                    last.play.check().map_err(|v| (v, path()))?;
                    if let Err(facts) = end(&mut last) {
                        let oracle = Oracle::Answered;
                        return Err((Violation { oracle, facts }, path()));
                    }
                    last.play.check().map_err(|v| (v, path()))?;
                    next.push((world, path()));
                }
            }
        }
        level = next;
    }
    let states = seen.len();
    Ok(Seen { states, steps })
}

/// Steps in a row: 3 s of one core for either exploration. Each further step costs five times as much
/// (`KVC_EXPLORE_DEPTH`); 7 has been run.
fn depth() -> usize {
    let asked = std::env::var("KVC_EXPLORE_DEPTH").ok();
    asked.and_then(|d| d.parse().ok()).unwrap_or(6)
}

/// As [`explore`]; a broken rule is told with its sequence and the log of it.
fn must_hold(
    start: &World,
    depth: usize,
    ops: &[Op],
    worth: fn(&Wire) -> bool,
    end: fn(&mut World) -> Result<(), String>,
) {
    let began = Instant::now();
    match explore(start, depth, ops, worth, end) {
        Ok(Seen { states, steps }) => {
            let seconds = began.elapsed().as_secs_f64();
            println!("depth {depth}: {states} states by {steps} steps in {seconds:.1} s");
        }
        Err((violation, path)) => {
            let mut world = start.clone();
            world.play.stage.log = Some(Vec::new());
            for op in &path {
                world.play.stage.say(|| format!("---- {op:?}"));
                world.step(*op, worth);
                world.sketch();
            }
            world.play.stage.say(|| "---- and then nothing breaks".to_owned());
            world.quiet();
            let _ = end(&mut world);
            world
                .play
                .stage
                .log
                .iter()
                .flatten()
                .for_each(|line| println!("{line}"));
            panic!("{violation} after {path:?}");
        }
    }
}

// ---- the hand-over

/// Questions and answers about the hand-over; the pulls of a move are one step.
fn decides(wire: &Wire) -> bool {
    match &wire.message {
        Message::Ask(_, Ask::Peer(ask)) => matches!(ask.what, PeerWhat::Handover(..)),
        Message::Reply(_, Reply::HandedOver(_)) => true,
        Message::Reply(_, Reply::No(why)) => matches!(why.code, Reason::Moved | Reason::NotOwner),
        _ => false,
    }
}

/// A session of worker 0, and worker 1 has everything and asks for it.
fn asked() -> World {
    let stage = Stage::new(workers(3, 0, &small(96)), false);
    let mut play = Play::new(stage, "s");
    play.say(1..=8);
    assert_eq!(play.turn(0, 1, 2, None), Told::Tokens(2));
    let mut world = World {
        play,
        pin: 0,
        number: 1,
        backup: None,
        next: 1,
        pending: None,
        grant: None,
        crashed: false,
    };
    world.begin_move(1);
    world.play.stage.deliver_all(|w| !decides(w));
    assert_eq!(world.choices(decides).len(), 1, "the question is on its way");
    world
}

/// MIG-3: the session can go on, at one worker.
fn goes_on(world: &mut World) -> Result<(), String> {
    for node in 0..3 {
        if let Some(process) = &world.play.stage.nodes[node] {
            let (_, leases, imports) = process.w.counts();
            if leases + imports > 0 {
                return Err(format!("worker {node} keeps {leases} leases, {imports} imports"));
            }
        }
    }
    let grant = world.grant.take();
    if world.play.stage.nodes[world.pin].is_none() {
        world.arbitrate();
    }
    if world.play.stage.nodes[world.pin].is_none() {
        // Its copy is gone with it.
        let fresh = world.take();
        (world.pin, world.number) = (1, fresh);
    }
    let (pin, number) = (world.pin, world.number);
    let mut told = match grant {
        Some(grant) => world.play.run(pin, number, Some(grant), 2),
        None => Told::Silence,
    };
    if !matches!(told, Told::Tokens(_)) {
        world.play.say([7]);
        told = world.play.turn(pin, number, 2, None);
    }
    let mut at = pin;
    if let Told::NotAdmitted(Reason::Moved) = told {
        let view = world.play.stage.session(pin, &world.play.session);
        let moved = view.and_then(|v| v.moved).ok_or("moved, but not where to")?;
        at = moved.to.peer.parse().map_err(|_| "no such peer")?;
        if world.play.stage.nodes[at].is_some() {
            told = world.play.turn(at, moved.placement.n, 2, None);
        }
    }
    if !matches!(told, Told::Tokens(_)) {
        // MIG-2: the named owner is none: a number above, on the copy that is there.
        let fresh = world.take();
        at = if world.play.stage.nodes[pin].is_some() { pin } else { 1 };
        told = world.play.turn(at, fresh, 2, None);
    }
    match told {
        Told::Tokens(_) if world.play.owners().contains(&at) => Ok(()),
        told => Err(format!(
            "the next turn at {at} ends with {told:?}, owners {:?}",
            world.play.owners()
        )),
    }
}

const MOVING: [Op; 16] = [
    Op::Deliver(0),
    Op::Deliver(1),
    Op::Lose(0),
    Op::Lose(1),
    Op::Twice(0),
    Op::Pull,
    Op::Break,
    Op::Pass,
    Op::Late,
    Op::Turn,
    Op::Rewind,
    Op::Astray,
    Op::Arbitrate,
    Op::Move,
    Op::Crash,
    Op::Deliver(2),
];

#[test]
fn a_hand_over_explored() {
    // MIG-1..3, SES-4
    must_hold(&asked(), depth(), &MOVING, decides, goes_on);
}

// ---- the sync

/// Announcements and their answers; the pulls are one step.
fn announces(wire: &Wire) -> bool {
    matches!(&wire.message, Message::Ask(_, Ask::Peer(ask)) if matches!(ask.what, PeerWhat::Announce(_)))
}

/// A session of worker 0, whose backup is worker 1; worker 2 is there to take it.
fn announced() -> World {
    let stage = Stage::new(workers(3, 0, &small(96)), false);
    let mut play = Play::new(stage, "s");
    play.say(1..=8);
    assert_eq!(play.turn(0, 1, 2, Some(1)), Told::Tokens(2));
    World {
        play,
        pin: 0,
        number: 1,
        backup: Some(1),
        next: 1,
        pending: None,
        grant: None,
        crashed: false,
    }
}

/// SYNC-1: one more turn of the owner, and the replica is its copy.
fn follows(world: &mut World) -> Result<(), String> {
    if world.play.stage.nodes[world.pin].is_none() {
        return Ok(());
    }
    let (pin, number) = (world.pin, world.number);
    world.play.say([7]);
    let mut told = match world.grant.take() {
        Some(grant) => world.play.run(pin, number, Some(grant), 2),
        None => world.play.turn(pin, number, 2, Some(1)),
    };
    if told == Told::NotAdmitted(Reason::StaleEpoch) {
        // It has lost the number: somebody takes one above all.
        let fresh = world.take();
        told = world.play.turn(pin, fresh, 2, Some(1));
    }
    if !matches!(told, Told::Tokens(_)) {
        return Err(format!("the owner's next turn ends with {told:?}"));
    }
    world.play.say([7]);
    let n = world.play.standing(pin).map_or(0, |s| s.1);
    world.play.turn(pin, n, 2, Some(1));
    world.quiet();
    let name = world.play.session.clone();
    let held: Vec<_> = [pin, 1]
        .iter()
        .map(|n| world.play.stage.process(*n).held(&name))
        .collect();
    let standing = world.play.standing(1).map(|s| s.0);
    if held[0].is_none() || held[0] != held[1] || standing != Some(Standing::Replica) {
        return Err(format!(
            "the owner {pin} holds {:?}, its {standing:?} {:?}",
            held[0], held[1]
        ));
    }
    Ok(())
}

const FOLLOWING: [Op; 14] = [
    Op::Deliver(0),
    Op::Deliver(1),
    Op::Lose(0),
    Op::Lose(1),
    Op::Twice(0),
    Op::Pull,
    Op::Break,
    Op::Pass,
    Op::Turn,
    Op::Rewind,
    Op::Astray,
    Op::Evict,
    Op::Reseed,
    Op::Crash,
];

#[test]
fn a_sync_explored() {
    // SYNC-1, SYNC-2, SES-4, XFER-3
    must_hold(&announced(), depth(), &FOLLOWING, announces, follows);
}

// ---- the exploration can fail

#[test]
fn an_exploration_finds_each_rule_switched_off() {
    // kv-movement §6: each with its oracle; the same exploration with the rule on is sound.
    let cases: [(Check, bool, &[Oracle]); 7] = [
        (Check::HandoverEqual, true, &[Oracle::WholeHandover]),
        (Check::HandoverAge, true, &[Oracle::LateOwner]),
        (Check::MovedRefuses, true, &[Oracle::Placement, Oracle::OneDecision]),
        (Check::WithdrawnForGood, true, &[Oracle::Withdrawn]),
        (
            Check::ReplicaRefuses,
            false,
            &[Oracle::OneOwnerOfPlacement, Oracle::OneHolder],
        ),
        (Check::AnnounceEpoch, false, &[Oracle::Placement]),
        (Check::HaveDigest, false, &[Oracle::TrueKv]),
    ];
    for (check, moves, oracles) in cases {
        let run = || match moves {
            true => explore(&asked(), 4, &MOVING, decides, |_| Ok(())),
            false => explore(&announced(), 4, &FOLLOWING, announces, |_| Ok(())),
        };
        assert!(run().is_ok(), "{check:?}: sound without the mutation");
        let Err((violation, path)) = without(check, run) else {
            panic!("{check:?} is not noticed");
        };
        assert!(
            oracles.contains(&violation.oracle),
            "{check:?}: {violation} after {path:?}"
        );
        println!("{check:?}: {violation} after {path:?}");
    }
}
