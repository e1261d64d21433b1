//! INV-2, INV-3, THM-2 and SYNC-2 over random histories with moves, against workers in their naive form.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::{
    Dispatch, Effect, Event, ExecutionMode, Handover, Health, MemoryStore, Move, MoveEffect, MoveEvent, MoveOutcome,
    Outcome, Resident, Router, RouterConfig, Turn, WorkerIndex,
    score::BLOCK_TOKENS,
    testing::{admits, info, refuses, view},
};
use crate::{
    id::{Epoch, Placement, RouterId, SessionId, StoreId},
    time::Now,
    wire::{
        admit::{AdmitAnswer, AdmitRequest, ImportAnswer, Mode, MovedTo, Via},
        info::{Role, Standing},
        reason::Reason,
    },
};

const TAU: u32 = 3;
const TAU_APPEND: u32 = 300;
const SESSIONS: usize = 3;

/// A worker: what it holds, whether it has room.
#[derive(Clone, Debug, Default)]
struct Naive {
    held: HashMap<usize, u32>,
    /// MIG-1: sessions handed over.
    moved: HashMap<usize, MovedTo>,
    full: bool,
    largest: u32,
}

impl Naive {
    /// ADM-1..6, one request at a time.
    fn admit(&mut self, w: WorkerIndex, session: usize, q: &AdmitRequest) -> AdmitAnswer {
        if let Some(moved) = self.moved.get(&session) {
            if q.placement.is_none_or(|p| p.n <= moved.placement.n) {
                let mut answer = refuses(w, Reason::Moved, self.held.get(&session).copied().unwrap_or(0));
                answer.moved = Some(moved.clone());
                return answer;
            }
            self.moved.remove(&session);
        }
        let mut answer = self.judge(w, session, q);
        answer.epoch = q.placement.map(|placement| Epoch { placement, rewind: 0 });
        answer
    }

    fn judge(&self, w: WorkerIndex, session: usize, q: &AdmitRequest) -> AdmitAnswer {
        let resident = self.held.get(&session).copied().unwrap_or(0).min(q.input_tokens);
        let append = q.append_tokens.max(q.input_tokens - resident);
        if q.input_tokens > self.largest {
            return refuses(w, Reason::TooLarge, resident);
        }
        match (resident > 0, append > TAU_APPEND, self.full) {
            (true, true, _) if q.via != Some(Via::Prefill) => refuses(w, Reason::RealLargeAppend, resident),
            (true, _, true) => refuses(w, Reason::NoDCapacity, resident),
            (true, false, false) if q.via.is_none() => admits(w, Mode::Direct, resident),
            (false, _, true) => refuses(w, Reason::SessionNotResidentNoCapacity, 0),
            _ if q.turn == 0 => admits(w, Mode::Seed, 0),
            _ => admits(w, Mode::Reseed, resident),
        }
    }
}

struct World {
    router: Router<MemoryStore>,
    workers: Vec<Naive>,
    /// History length of each session.
    length: [u32; SESSIONS],
    /// Who gave a session a cause to leave since it last served it.
    refused: HashSet<(usize, WorkerIndex)>,
}

struct Ran {
    mode: Option<ExecutionMode>,
    worker: Option<WorkerIndex>,
    outcome: Outcome,
    counted: u32,
    probed: Vec<(WorkerIndex, Option<Reason>)>,
    /// What a holder said that it has, and what was computed then.
    reseeded: Option<(u32, u32)>,
}

/// A refusal after which a session may leave: pressure, or a worker that cannot hold it at all (its answer also cuts the
/// router's estimate, so the next turn may ask another worker first).
fn is_cause(reason: Reason) -> bool {
    reason.counts_as_reject() || matches!(reason, Reason::TooLarge | Reason::Moved)
}

fn name(session: usize) -> SessionId {
    SessionId::new(&format!("s{session}")).expect("plain")
}

fn imported(tokens: u32) -> ImportAnswer {
    ImportAnswer {
        resident_tokens: tokens,
        pulled_tokens: tokens,
        bytes: 0,
        micros: 0,
    }
}

impl World {
    /// The decode workers, and a prefill worker after them if there is one.
    fn new(workers: usize, prefill: bool) -> World {
        let config = RouterConfig {
            ask_unknown: false,
            ..RouterConfig::default()
        };
        let naive = Naive {
            largest: u32::MAX,
            ..Naive::default()
        };
        let mut roles = vec![Role::Decode; workers];
        roles.extend(prefill.then_some(Role::Prefill));
        World {
            router: Router::new(config, RouterId(1), MemoryStore::new(StoreId(1)), view(&roles)),
            workers: vec![naive; roles.len()],
            length: [0; SESSIONS],
            refused: HashSet::new(),
        }
    }

    /// One turn from start to end.
    fn turn(&mut self, session: usize, input: u32) -> Ran {
        let turn = Turn {
            session: Some(name(session)),
            input_tokens: input,
            max_new_tokens: Some(8),
            estimated: false,
        };
        let mut d = Dispatch::start(&mut self.router, turn, Now(0));
        let (mut counted, mut probed, mut reseeded) = (0, vec![], None);
        while let Some(effect) = d.poll_effect() {
            let event = match effect {
                Effect::Probe { worker, request } => {
                    let answer = self.workers[usize::from(worker.0)].admit(worker, session, &request);
                    probed.push((worker, answer.reason));
                    if answer.reason.is_some_and(Reason::counts_as_reject) {
                        counted += 1;
                    }
                    if answer.reason.is_some_and(is_cause) {
                        self.refused.insert((session, worker));
                    }
                    Event::Answer(Box::new(answer))
                }
                Effect::Locate { workers, .. } => {
                    let found: Vec<Resident> = workers.iter().map(|w| self.resident(*w, session)).collect();
                    reseeded = found
                        .iter()
                        .map(|r| r.tokens)
                        .max()
                        .map(|most| (most.min(input), input));
                    Event::Located(found)
                }
                Effect::HandOver(h) => {
                    let computed = self.hand_over(&h, session, input);
                    reseeded = reseeded.map(|(most, _)| (most, computed));
                    Event::Imported
                }
                Effect::Run { worker, tag } => {
                    reseeded = reseeded
                        .map(|(most, computed)| (most, computed.min(input - self.tokens(worker, session).min(input))));
                    if tag.is_some() {
                        self.workers[usize::from(worker.0)].held.insert(session, input + 8);
                        self.refused.remove(&(session, worker));
                    }
                    d.handle(&mut self.router, Event::FirstByte, Now(0)).expect("runs");
                    Event::Completed { output_tokens: 8 }
                }
                Effect::Refuse(_) | Effect::Placed { .. } => continue,
                other => panic!("not in this world: {other:?}"),
            };
            d.handle(&mut self.router, event, Now(0)).expect("expected");
        }
        self.length[session] = input + 8;
        Ran {
            mode: d.trace().mode,
            worker: d.trace().worker,
            outcome: d.outcome().expect("every request ends"),
            counted,
            probed,
            reseeded,
        }
    }

    fn tokens(&self, w: WorkerIndex, session: usize) -> u32 {
        self.workers[usize::from(w.0)].held.get(&session).copied().unwrap_or(0)
    }

    fn resident(&self, worker: WorkerIndex, session: usize) -> Resident {
        let placement = Placement {
            n: 1,
            store: StoreId(1),
        };
        let tokens = self.tokens(worker, session);
        Resident {
            worker,
            tokens,
            epoch: (tokens > 0).then_some(Epoch { placement, rewind: 0 }),
            standing: Standing::Replica,
            moved: None,
        }
    }

    /// Carries an import out; returns what is computed.
    fn hand_over(&mut self, h: &Handover, session: usize, input: u32) -> u32 {
        let of = |peer| self.router.view.process(peer).expect("a worker of this world");
        let decode = usize::from(h.decode.0);
        let Some(prefill) = &h.prefill else {
            let held = self.tokens(of(h.import.incarnation), session).min(input);
            self.workers[decode].held.insert(session, held);
            return input - held;
        };
        let fresh = prefill
            .refresh
            .as_ref()
            .map_or(0, |r| self.tokens(of(r.incarnation), session));
        let had = self.tokens(prefill.worker, session).max(fresh).min(input);
        for w in [usize::from(prefill.worker.0), decode] {
            self.workers[w].held.insert(session, input);
        }
        input - had
    }

    /// MIG-1; `heard`: the router gets the target's answer.
    fn move_to(&mut self, session: usize, target: WorkerIndex, heard: bool) {
        let Some(source) = self.pin(session).filter(|w| self.up(*w)) else {
            return;
        };
        let record = self.router.sessions.peek(&name(session)).expect("pinned");
        let from = usize::from(source.0);
        let epoch = record.placement.map(|placement| Epoch { placement, rewind: 0 });
        let found = Resident {
            epoch,
            standing: Standing::Owner,
            ..self.resident(source, session)
        };
        if self.workers[from].moved.contains_key(&session) {
            return;
        }
        let Ok(mut mv) = Move::start(&mut self.router, name(session), &[found], target, Now(0)) else {
            return;
        };
        while let Some(effect) = mv.poll_effect() {
            let event = match effect {
                MoveEffect::Import { worker, request, .. } => {
                    let to = self.router.view.worker(worker).as_peer().expect("up");
                    let placement = request.placement;
                    self.workers[from].moved.insert(session, MovedTo { to, placement });
                    self.workers[usize::from(worker.0)].held.insert(session, found.tokens);
                    self.workers[usize::from(worker.0)].moved.remove(&session);
                    self.refused.remove(&(session, worker));
                    match heard {
                        true => MoveEvent::Moved(imported(found.tokens)),
                        false => MoveEvent::Unreachable,
                    }
                }
                MoveEffect::Withdraw { .. } => MoveEvent::Unreachable,
                MoveEffect::Wait { .. } => {
                    mv.handle_timeout();
                    continue;
                }
            };
            mv.handle(&mut self.router, event, Now(0)).expect("expected");
        }
        let moved = matches!(mv.outcome(), Some(MoveOutcome::Moved { .. }));
        assert_eq!(moved, heard);
        assert_eq!(self.pin(session), Some(if heard { target } else { source }));
    }

    fn pin(&self, session: usize) -> Option<WorkerIndex> {
        let pin = self.router.sessions.peek(&name(session))?.pin?;
        (self.router.view.at(pin.worker) == pin).then_some(pin.worker)
    }

    fn up(&self, w: WorkerIndex) -> bool {
        self.router.view.worker(w).health() == Health::Up
    }

    /// The premises of THM-2 but for the pin, read from router and worker.
    fn must_be_direct(&self, session: usize, d: WorkerIndex, input: u32) -> bool {
        let Some(record) = self.router.sessions.peek(&name(session)) else {
            return false;
        };
        let overlap = |w| record.resident(self.router.view.at(w)).min(input) / BLOCK_TOKENS;
        let worker = &self.workers[usize::from(d.0)];
        let resident = worker.held.get(&session).copied().unwrap_or(0).min(input);
        let believed = record.resident(self.router.view.at(d));
        self.up(d)
            && resident > 0
            && input.saturating_sub(resident.min(believed)) <= TAU_APPEND
            && !worker.full
            && !worker.moved.contains_key(&session)
            && input <= worker.largest
            && record.rejects(self.router.view.at(d)) < TAU
            && self.router.view.decoders().all(|w| overlap(w) <= overlap(d))
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// A turn whose history keeps this many percent and adds these tokens.
    Turn(usize, u32, u32),
    Full(usize, bool),
    Largest(usize, u32),
    Evict(usize, usize),
    Down(usize),
    Back(usize),
    Restart(usize),
    /// To a worker; whether the router hears of its end.
    Move(usize, usize, bool),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let w = 0usize..4;
    let op = prop_oneof![
        8 => (0..SESSIONS, prop_oneof![4 => Just(100u32), 1 => 10u32..100], 1u32..500).prop_map(|(s, k, n)| Op::Turn(s, k, n)),
        3 => (w.clone(), any::<bool>()).prop_map(|(w, f)| Op::Full(w, f)),
        1 => (w.clone(), prop_oneof![Just(u32::MAX), 200u32..2000]).prop_map(|(w, n)| Op::Largest(w, n)),
        2 => (w.clone(), 0..SESSIONS).prop_map(|(w, s)| Op::Evict(w, s)),
        1 => w.clone().prop_map(Op::Down),
        2 => w.clone().prop_map(Op::Back),
        1 => w.clone().prop_map(Op::Restart),
        2 => (0..SESSIONS, w, any::<bool>()).prop_map(|(s, w, heard)| Op::Move(s, w, heard)),
    ];
    prop::collection::vec(op, 1..60)
}

impl World {
    /// Everything but turns.
    fn befall(&mut self, op: &Op, incarnation: u64) {
        let n = self.workers.len();
        let w = |i: usize| WorkerIndex((i % n) as u16);
        match *op {
            Op::Turn(..) => {}
            Op::Full(i, full) => self.workers[i % n].full = full,
            Op::Largest(i, tokens) => self.workers[i % n].largest = tokens,
            Op::Evict(i, s) => {
                self.workers[i % n].held.remove(&s);
            }
            Op::Move(s, i, heard) => self.move_to(s, w(i), heard),
            Op::Down(i) => self.router.view.lost(w(i)),
            Op::Back(i) => {
                let known = self.router.view.worker(w(i)).incarnation().expect("seen");
                self.router.view.seen(w(i), &info(known.0));
            }
            Op::Restart(i) => {
                self.workers[i % n].held.clear();
                self.workers[i % n].moved.clear();
                self.refused.retain(|(_, at)| *at != w(i));
                self.router.view.seen(w(i), &info(incarnation));
            }
        }
    }

    fn input(&self, session: usize, keep: u32, append: u32) -> u32 {
        self.length[session] * keep / 100 + append
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// INV-3 [reading, docs/adr/0021]: a session leaves the worker it is pinned to only after a counted reject there
    /// since its last success there, or when that worker is down or draining, or cannot hold it at all; and while there
    /// was none of these, the pinned worker is the first to be asked.
    /// THM-2: resident, small append, capacity, not blacklisted, pinned, nobody's estimate above: direct.
    /// SYNC-2: what a worker that was asked holds is not computed again.
    #[test]
    fn moves_have_a_cause_and_theorem_2_holds(workers in 1usize..5, prefill: bool, ops in ops()) {
        let mut world = World::new(workers, prefill);
        for (step, op) in ops.iter().enumerate() {
            world.befall(op, 1000 + step as u64);
            let Op::Turn(session, keep, append) = *op else { continue };
            let input = world.input(session, keep, append);
            let pin = world.pin(session);
            let direct = pin.filter(|&d| world.must_be_direct(session, d, input));
            let cause = pin.is_none_or(|d| !world.up(d) || world.refused.contains(&(session, d)));
            let ran = world.turn(session, input);

            if let (Some(d), false) = (pin, cause) {
                prop_assert_eq!(ran.probed[0].0, d, "INV-3: the pinned worker is asked first");
                let moved = ran.outcome == Outcome::Completed && ran.mode != Some(ExecutionMode::Fallback) && ran.worker != Some(d);
                let reason = ran.probed.iter().filter(|(w, _)| *w == d).filter_map(|(_, r)| *r).next_back();
                prop_assert!(!moved || reason.is_some_and(is_cause), "INV-3");
            }
            if let Some(d) = direct {
                prop_assert_eq!((ran.mode, ran.worker), (Some(ExecutionMode::Direct), Some(d)), "THM-2");
            }
            prop_assert!(ran.probed.len() <= 3 * workers, "DISP-6 asks again, and so does MIG-1");
            if let Some((held, computed)) = ran.reseeded {
                prop_assert!(computed <= input - held, "SYNC-2: {} held, {} of {} computed", held, computed, input);
            }
            for w in world.router.view.all() {
                prop_assert_eq!(world.router.view.worker(w).inflight(), 0);
            }
        }
    }

    /// INV-2 [reading, docs/adr/0021, 0060]: from any state a session can get into, while some workers keep having room
    /// and the others keep having none, it is served within |D|·τ counted probes; from a state in which some worker has
    /// been rejected τ times or more already, all others catch up with it first (ROUTE-2).
    #[test]
    fn a_session_is_served_within_workers_times_threshold_probes(
        workers in 1usize..5, prefill: bool, ops in ops(), room in 1u32..16,
    ) {
        let mut world = World::new(workers, prefill);
        for (step, op) in ops.iter().enumerate() {
            world.befall(op, 1000 + step as u64);
            if let Op::Turn(session, keep, append) = *op {
                let input = world.input(session, keep, append);
                world.turn(session, input);
            }
        }
        let room = if room & ((1 << workers) - 1) == 0 { 1 } else { room };
        for i in 0..workers {
            world.befall(&Op::Back(i), 0);
            world.workers[i].full = room & (1 << i) == 0;
            world.workers[i].largest = u32::MAX;
        }
        let record = world.router.sessions.peek(&name(0));
        let rejects = |w| record.map_or(0, |r| r.rejects(world.router.view.at(w)));
        let highest = world.router.view.all().map(rejects).max().unwrap_or(0);
        let bound = workers as u32 * TAU.max(highest + 1);
        let mut counted = 0;
        loop {
            let input = world.input(0, 100, 10);
            let ran = world.turn(0, input);
            counted += ran.counted;
            prop_assert_eq!(ran.outcome, Outcome::Completed, "nobody waits for ever");
            if ran.mode != Some(ExecutionMode::Fallback) {
                break;
            }
            prop_assert!(counted <= bound, "INV-2: {} counted probes", counted);
        }
        prop_assert!(counted <= bound, "INV-2: {} counted probes", counted);
    }
}
