//! One session, its owner D0, moves to D1 and then to D2, and turns meanwhile: every order of steps, with answers lost
//! before or after the worker acted, a source that dies, and targets that are cut off from the router, to a stated depth.
//! The workers are naive: who owns what under which number, and nothing else.
//!
//! Oracles: no number is ever owned by two workers (MIG-3), and no new number is used before the target of a move that is
//! out was asked, or waited out (MIG-2).

use std::collections::HashSet;

use super::{
    naive::{Fleet, Node, STORE, index, placement},
    *,
};
use crate::{
    id::RouterId,
    mutation::{Check, without},
    routing::{
        Dispatch, Effect, Event, MemoryStore, RouterConfig, Turn,
        testing::{D0, D1, D2, info, view},
    },
    wire::{admit::ImportAnswer, info::Standing},
};

/// Steps along one course. States that were seen before are not left a second time, whatever led there.
const DEPTH: usize = 11;
/// Client turns.
const TURNS: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// A client's turn begins.
    Turn,
    /// A move begins: to D1, a later one to D2.
    Move,
    /// D0 is gone for good.
    Die,
    /// The owner grants the hand-over that a live import asks for.
    Decide(WorkerIndex),
    /// The target hears of it.
    Learn(WorkerIndex),
    /// The open effect of the dispatch, or of the move, comes out that way.
    Dispatch(Way),
    Mover(Way),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// As the worker has it.
    Well,
    /// The question does not arrive.
    LostBefore,
    /// The answer does not arrive.
    LostAfter,
    /// It fails, typed.
    Fails,
}

struct World {
    router: Router<MemoryStore>,
    now: Now,
    fleet: Fleet,
    dispatch: Option<Dispatch>,
    dispatch_open: Option<Effect>,
    mover: Option<Move>,
    mover_open: Option<MoveEffect>,
    turns: u32,
    moves: u32,
    /// Numbers that effects have named.
    named: HashSet<u64>,
    /// The number of a move whose end the router has not heard, and when an answer was lost.
    open: Option<(u64, Option<Now>)>,
    found: Option<&'static str>,
}

fn s() -> SessionId {
    SessionId::new("s").expect("plain")
}

impl World {
    /// D0 owns the session under number 1.
    fn new() -> World {
        let config = RouterConfig {
            max_executions: 2,
            ..RouterConfig::default()
        };
        let mut router = Router::new(config, RouterId(1), MemoryStore::new(STORE), view(&[Role::Decode; 3]));
        router.store.take(&s(), None);
        router.sessions.open(&s());
        let at = router.view.at(D0);
        if let Some(record) = router.sessions.record_mut(&s()) {
            record.turns = 1;
            record.lives_at(at, placement(1), 90);
        }
        router.sessions.close(&s());
        World {
            router,
            now: Now(0),
            fleet: Fleet::new(),
            dispatch: None,
            dispatch_open: None,
            mover: None,
            mover_open: None,
            turns: TURNS,
            moves: 2,
            named: HashSet::from([1]),
            open: None,
            found: None,
        }
    }

    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.dispatch.is_none() && self.turns > 0 {
            steps.push(Step::Turn);
        }
        if self.mover.is_none() && self.moves > 0 {
            steps.push(Step::Move);
        }
        if !self.fleet.nodes[0].dead {
            steps.push(Step::Die);
        }
        for w in [D1, D2] {
            match self.fleet.nodes[index(w)].import {
                Some((n, false)) if self.fleet.clone().grants(n).is_some() => steps.push(Step::Decide(w)),
                Some((_, true)) => steps.push(Step::Learn(w)),
                _ => {}
            }
        }
        if let Some(effect) = &self.dispatch_open {
            let dead = match effect {
                Effect::Probe { worker, .. } | Effect::Run { worker, .. } => self.fleet.nodes[index(*worker)].dead,
                _ => false,
            };
            let ways: &[Way] = match effect {
                _ if dead => &[Way::LostBefore],
                Effect::Probe { .. } | Effect::Withdraw { .. } => &[Way::Well, Way::LostBefore, Way::LostAfter],
                Effect::HandOver(_) | Effect::Run { .. } => &[Way::Well, Way::Fails],
                _ => &[Way::Well],
            };
            steps.extend(ways.iter().map(|w| Step::Dispatch(*w)));
        }
        if let Some(effect) = &self.mover_open {
            let ways: &[Way] = match effect {
                MoveEffect::Import { worker, request, .. } if self.fleet.owns(*worker, request.placement.n) => {
                    &[Way::Well, Way::LostAfter]
                }
                MoveEffect::Import { .. } => &[Way::Fails, Way::LostBefore, Way::LostAfter],
                MoveEffect::Withdraw { .. } => &[Way::Well, Way::LostBefore, Way::LostAfter],
                MoveEffect::Wait { .. } => &[Way::Well],
            };
            steps.extend(ways.iter().map(|w| Step::Mover(*w)));
        }
        steps
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Turn => {
                self.turns -= 1;
                let turn = Turn {
                    session: Some(s()),
                    input_tokens: 100,
                    max_new_tokens: None,
                    estimated: false,
                };
                self.dispatch = Some(Dispatch::start(&mut self.router, turn, self.now));
            }
            Step::Move => {
                self.moves -= 1;
                let target = if self.moves == 1 { D1 } else { D2 };
                let found = self.fleet.residents(&[D0, D1, D2]);
                self.mover = Move::start(&mut self.router, s(), &found, target, self.now).ok();
            }
            Step::Die => {
                self.fleet.nodes[0] = Node {
                    dead: true,
                    standing: Standing::Replica,
                    ..Node::default()
                };
            }
            Step::Decide(w) => {
                let Some((n, _)) = self.fleet.nodes[index(w)].import else {
                    return;
                };
                if let Some(owner) = self.fleet.grants(n) {
                    (owner.standing, owner.number, owner.moved) = (Standing::Moved, n, Some((w, n)));
                    self.fleet.nodes[index(w)].import = Some((n, true));
                }
            }
            Step::Learn(w) => {
                if let Some((n, true)) = self.fleet.nodes[index(w)].import.take() {
                    self.fleet.own(w, n);
                }
            }
            Step::Dispatch(way) => self.come_out(way),
            Step::Mover(way) => self.move_on(way),
        }
        self.drain();
        if self.fleet.twice {
            self.found = Some("MIG-3: two workers have owned one number");
        }
    }

    /// Carries out what waits for no answer, and looks at what does.
    fn drain(&mut self) {
        while let Some(effect) = self.dispatch.as_mut().and_then(Dispatch::poll_effect) {
            match &effect {
                Effect::Release { worker, .. } => self.fleet.nodes[index(*worker)].busy = false,
                Effect::Placed { worker, placement, .. } => self.fleet.placed(*worker, placement.n),
                Effect::Probe { request, .. } => self.names(request.placement),
                Effect::HandOver(h) => self.names(Some(h.import.placement)),
                Effect::Run { tag, .. } => self.names(tag.as_ref().and_then(|t| t.placement)),
                _ => {}
            }
            if !matches!(
                effect,
                Effect::Release { .. } | Effect::Placed { .. } | Effect::Refuse(_)
            ) {
                self.dispatch_open = Some(effect);
            }
        }
        if self.dispatch.as_ref().is_some_and(|d| d.outcome().is_some()) {
            self.dispatch = None;
        }
        while let Some(effect) = self.mover.as_mut().and_then(Move::poll_effect) {
            if let MoveEffect::Import { worker, request, .. } = &effect {
                let n = request.placement.n;
                self.names(Some(request.placement));
                self.open = Some((n, None));
                let node = &mut self.fleet.nodes[index(*worker)];
                node.import = (!node.dead && node.floor < n && node.number < n).then_some((n, false));
            }
            self.mover_open = Some(effect);
        }
        if self.mover.as_ref().is_some_and(|m| m.outcome().is_some()) {
            self.mover = None;
        }
    }

    /// MIG-2: the first time that a number is named it is a placement.
    fn names(&mut self, placement: Option<Placement>) {
        let Some(placement) = placement else { return };
        if !self.named.insert(placement.n) {
            return;
        }
        if let Some((_, lost)) = self.open {
            let waited = lost.is_some_and(|l| self.now >= l + self.router.config.handover_wait);
            if !waited {
                self.found = Some("MIG-2: a placement was made before the pending target was asked");
            }
        }
    }

    /// The router knows how that move ended.
    fn decided(&mut self, n: u64) {
        if self.open.is_some_and(|(open, _)| open <= n) {
            self.open = None;
        }
    }

    fn lost(&mut self, n: u64) {
        if let Some((open, lost)) = &mut self.open
            && *open == n
        {
            lost.get_or_insert(self.now);
        }
    }

    fn tell(&mut self, event: Event) {
        if let Some(dispatch) = &mut self.dispatch {
            dispatch
                .handle(&mut self.router, event, self.now)
                .expect("offered events are expected");
        }
    }

    fn come_out(&mut self, way: Way) {
        let Some(effect) = self.dispatch_open.take() else {
            return;
        };
        match effect {
            Effect::Ask { workers, .. } => {
                let found = self.fleet.residents(&workers);
                self.tell(Event::Residents(found));
            }
            Effect::Locate { workers, .. } => {
                let found = self.fleet.residents(&workers);
                self.tell(Event::Located(found));
            }
            Effect::Probe { worker, request } => {
                let asked = request.placement.map_or(0, |p| p.n);
                let answer = (way != Way::LostBefore).then(|| self.fleet.admit(worker, asked));
                match answer.filter(|_| way == Way::Well) {
                    Some(answer) => {
                        if let Some(moved) = &answer.moved {
                            self.decided(moved.placement.n);
                        }
                        self.tell(Event::Answer(Box::new(answer)));
                    }
                    None => {
                        self.tell(Event::Unreachable);
                        // It is back at once: other courses have it dead.
                        if !self.fleet.nodes[index(worker)].dead {
                            self.router.view.seen(worker, &info(u64::from(worker.0) + 1));
                        }
                    }
                }
            }
            Effect::Withdraw { worker, request, .. } => {
                let n = request.placement.n;
                let answer = (way != Way::LostBefore).then(|| self.fleet.withdraw(worker, n));
                match answer.filter(|_| way == Way::Well) {
                    Some(answer) => {
                        self.decided(n);
                        self.tell(Event::Withdrawn(answer));
                    }
                    None => {
                        self.lost(n);
                        self.tell(Event::Unreachable);
                        self.router.view.seen(worker, &info(u64::from(worker.0) + 1));
                    }
                }
            }
            Effect::HandOver(h) if way == Way::Well => {
                // XFER-2: a lease under a granted number; the exporter keeps a replica (SES-4).
                let from = WorkerIndex(h.import.incarnation.0 as u16 - 1);
                let node = &mut self.fleet.nodes[index(from)];
                let readable = node.copy && !node.dead && node.number < h.import.placement.n;
                if readable {
                    (node.standing, node.number, node.moved) = (Standing::Replica, h.import.placement.n, None);
                    self.fleet.own(h.decode, h.import.placement.n);
                }
                self.tell(if readable {
                    Event::Imported
                } else {
                    Event::ImportFailed(Reason::StaleEpoch)
                });
            }
            Effect::HandOver(_) => self.tell(Event::ImportFailed(Reason::LeaseRevoked)),
            Effect::Run { worker, tag } if way == Way::Well => {
                if let Some(n) = tag
                    .and_then(|t| t.placement)
                    .map(|p| p.n)
                    .filter(|n| *n >= self.fleet.nodes[index(worker)].number)
                {
                    self.fleet.own(worker, n);
                }
                self.fleet.nodes[index(worker)].busy = false;
                self.tell(Event::FirstByte);
                self.tell(Event::Completed { output_tokens: 1 });
            }
            Effect::Run { .. } => self.tell(Event::Failed(Reason::PeerUnreachable)),
            Effect::Wait { until } => {
                self.now = self.now.max(until);
                if let Some(dispatch) = &mut self.dispatch {
                    dispatch.handle_timeout(&mut self.router, self.now);
                }
            }
            Effect::Release { .. } | Effect::Placed { .. } | Effect::Refuse(_) => {}
        }
    }

    fn move_on(&mut self, way: Way) {
        let (Some(effect), Some(mover)) = (self.mover_open.take(), self.mover.as_mut()) else {
            return;
        };
        let event = match effect {
            MoveEffect::Wait { until } => {
                self.now = self.now.max(until);
                mover.handle_timeout();
                return;
            }
            MoveEffect::Import { worker, request, .. } => {
                let n = request.placement.n;
                match way {
                    Way::Well => {
                        self.decided(n);
                        MoveEvent::Moved(ImportAnswer {
                            resident_tokens: 90,
                            pulled_tokens: 90,
                            bytes: 0,
                            micros: 0,
                        })
                    }
                    Way::Fails => {
                        self.fleet.nodes[index(worker)].import = None;
                        MoveEvent::Refused(Reason::DeadlineExceeded)
                    }
                    // The worker sees its client leave.
                    Way::LostBefore => {
                        self.fleet.nodes[index(worker)].import = None;
                        self.lost(n);
                        MoveEvent::Unreachable
                    }
                    // It does not, and goes on.
                    Way::LostAfter => {
                        self.lost(n);
                        MoveEvent::Unreachable
                    }
                }
            }
            MoveEffect::Withdraw { worker, request, .. } => {
                let n = request.placement.n;
                let answer = (way != Way::LostBefore).then(|| self.fleet.withdraw(worker, n));
                match answer.filter(|_| way == Way::Well) {
                    Some(answer) => {
                        self.decided(n);
                        MoveEvent::Withdrawn(answer)
                    }
                    None => {
                        self.lost(n);
                        MoveEvent::Unreachable
                    }
                }
            }
        };
        let mover = self.mover.as_mut().expect("it is there");
        mover
            .handle(&mut self.router, event, self.now)
            .expect("offered events are expected");
    }

    /// Everything that the future depends on.
    fn state(&self) -> String {
        format!(
            "{:?}{:?}{:?}{:?}{:?}{:?}{:?}{:?}{}{}",
            self.router,
            self.now,
            self.fleet,
            self.dispatch,
            self.dispatch_open,
            self.mover,
            self.mover_open,
            self.open,
            self.turns,
            self.moves,
        )
    }
}

fn replay(path: &[Step]) -> World {
    let mut world = World::new();
    path.iter().for_each(|s| world.step(*s));
    world
}

/// Breadth first, so that what is found first is shortest. Returns states seen, courses that came to their end, and what was
/// found with the way to it.
fn explore(depth: usize) -> (usize, usize, Option<(&'static str, Vec<Step>)>) {
    let (mut seen, mut ended) = (HashSet::new(), 0);
    let mut layer = vec![Vec::new()];
    for _ in 0..depth {
        let mut next = Vec::new();
        for path in layer {
            let steps = replay(&path).steps();
            ended += usize::from(steps.is_empty());
            for step in steps {
                let mut path: Vec<Step> = path.clone();
                path.push(step);
                let world = replay(&path);
                if let Some(what) = world.found {
                    return (seen.len(), ended, Some((what, path)));
                }
                let digest = <sha2::Sha256 as sha2::Digest>::digest(world.state());
                if seen.insert(<[u8; 32]>::from(digest)) {
                    next.push(path);
                }
            }
        }
        layer = next;
    }
    (seen.len(), ended, None)
}

#[test]
fn no_number_is_owned_twice_and_the_pending_target_is_asked_first() {
    // MIG-2, MIG-3, SES-4
    let (states, ended, found) = explore(DEPTH);
    assert_eq!(found, None);
    assert!(states > 10_000, "{states}");
    println!("{states} states within {DEPTH} steps, {ended} courses ended");
}

#[test]
fn a_router_that_does_not_ask_the_pending_target_is_caught() {
    let (_, _, found) = without(Check::PendingAskedFirst, || explore(DEPTH));
    let (what, path) = found.expect("the exploration notices");
    assert!(what.starts_with("MIG-2"), "{what} by {path:?}");
}

#[test]
fn a_router_that_offers_a_granted_number_again_is_caught() {
    let (_, _, found) = without(Check::FreshNumber, || explore(DEPTH));
    let (what, path) = found.expect("the exploration notices");
    assert!(what.starts_with("MIG-3"), "{what} by {path:?}");
}
