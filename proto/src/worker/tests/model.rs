//! Random lives: every call of both sides in any order, on the simple engine, with its invariants after every step.

mod op;

use op::{Op, SESSIONS, ops};
use proptest::{prelude::*, strategy::ValueTree};

use super::engine::{Engine, config, identity, name};
use crate::{
    id::*,
    wire::{
        admit::{AdmitRequest, ImportRequest, Mode, ReleaseRequest, Source, Via},
        info::Standing,
        reason::{Reason, Refusal},
    },
    worker::*,
};

/// A session as its client and its router see it.
#[derive(Clone, Debug, Default)]
struct Client {
    history: Vec<Token>,
    turn: u32,
    placement: u64,
    grant: Option<(ReservationId, RequestKey, Mode)>,
}

struct World {
    e: Engine,
    clients: Vec<Client>,
    requests: u64,
    /// Imports that wait for an offer.
    asked: Vec<(ImportId, u8)>,
}

fn placement(n: u64) -> Placement {
    Placement { n, store: StoreId(1) }
}

impl World {
    fn new(page: u32) -> World {
        let capacity = match page {
            1 => 220,
            64 => 12 * page,
            _ => 24 * page,
        };
        let clients = vec![Client::default(); SESSIONS as usize];
        World {
            e: Engine::new(config(capacity, page)),
            clients,
            requests: 0,
            asked: Vec::new(),
        }
    }

    /// A prompt that shares more or less with what the session said before.
    fn prompt(&self, session: u8, edit: u8, len: u8) -> Vec<Token> {
        let old = &self.clients[session as usize].history;
        let keep = match edit % 4 {
            0 => 0,
            1 => old.len() * usize::from(edit) / 256,
            _ => old.len(),
        };
        let mut prompt = old[..keep].to_vec();
        // Two common system prompts.
        let salt = u32::from(edit % 3 == 1);
        let fresh = (0..u32::from(len)).map(|i| {
            if keep == 0 && i < 20 {
                salt
            } else {
                (i * 7 + u32::from(edit)) % 5
            }
        });
        prompt.extend(fresh);
        prompt.truncate(90);
        prompt
    }

    fn pick<T: Copy>(from: impl Iterator<Item = T>, pick: u8) -> Option<T> {
        let all: Vec<T> = from.collect();
        (!all.is_empty()).then(|| all[pick as usize % all.len()])
    }

    fn waiting(&self, pick: u8) -> Option<TurnId> {
        Self::pick(self.e.runs.iter().filter(|r| !r.running).map(|r| r.id), pick)
    }

    fn running(&self, pick: u8) -> Option<TurnId> {
        Self::pick(self.e.runs.iter().filter(|r| r.running).map(|r| r.id), pick)
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::Arrive {
                session,
                edit,
                len,
                max_new,
                routed,
                salt,
            } => {
                let prompt = self.prompt(session, edit, len);
                let who = identity(u8::from(salt));
                let mut arrival = Engine::arrival(session, who, prompt.clone(), u32::from(max_new % 16));
                let client = &mut self.clients[session as usize];
                if routed && let Some((id, key, _)) = client.grant.take() {
                    arrival.reservation = Some(id);
                    arrival.max_new = arrival.max_new.max(1); // 0 is the prefill side of somebody else's grant
                    arrival.placement = Some(placement(client.placement));
                    arrival.origin = Some((key.router, key.request));
                }
                let busy = self.e.runs.iter().any(|r| r.session == session);
                match self.e.arrive(session, arrival, prompt) {
                    Ok(_) => assert!(!busy, "ADM-8"),
                    Err(refusal) => assert!(
                        busy == (refusal.code == Reason::SessionBusy) || refusal.code != Reason::Internal,
                        "{refusal}"
                    ),
                }
            }
            Op::Append { session, len } => {
                let held = self.e.w.history_len(&name(session));
                if held == 0 || self.e.runs.iter().any(|r| r.session == session) {
                    return;
                }
                // The streaming API's own record of the session is what the copy holds: that is when the shim appends.
                let record = self
                    .e
                    .w
                    .sessions
                    .by_id(&name(session))
                    .and_then(|s| s.copy.as_ref())
                    .unwrap()
                    .tokens
                    .clone();
                let tokens: Vec<Token> = (0..u32::from(len)).map(|i| 100 + i).collect();
                let prompt = [&record[..], &tokens].concat();
                let mut arrival = Engine::arrival(session, identity(0), prompt.clone(), 4);
                arrival.prompt = Prompt::Append { after: held, tokens };
                let _ = self.e.arrive(session, arrival, prompt);
            }
            Op::Start { pick, chunk } => {
                if let Some(id) = self.waiting(pick) {
                    self.e.start(id, u32::from(chunk));
                }
            }
            Op::LockUnlock { pick } => {
                if let Some(id) = self.waiting(pick) {
                    self.e.lock(id);
                    self.e.check();
                    self.e.unlock(id);
                }
            }
            Op::Chunk { pick, chunk } => {
                if let Some(id) = self.running(pick) {
                    self.e.extend(id, u32::from(chunk));
                }
            }
            Op::Decode { pick } => {
                if let Some(id) = self.running(pick).filter(|id| self.e.prefilled(*id)) {
                    self.e.adopt(id);
                    if self.e.run(id).output.len() < 12 {
                        self.e.decode(id, 50 + u32::from(pick) % 3);
                    }
                }
            }
            Op::Commit { pick } => {
                if let Some(id) = self.running(pick).filter(|id| self.e.prefilled(*id)) {
                    let run = self.e.run(id);
                    let (session, history) = (run.session, [run.prompt.clone(), run.output.clone()].concat());
                    let written = run.written;
                    self.e.commit(id);
                    let client = &mut self.clients[session as usize];
                    client.history = history;
                    client.turn += 1;
                    let held = self.e.w.history_len(&name(session));
                    assert!(held == written || held == 0, "OWN-6: {held} of {written}");
                }
            }
            Op::Abort { pick } => {
                if let Some(id) = self.running(pick) {
                    self.e.roll_back(id, Rollback::Abort);
                }
            }
            Op::Retract { pick } => {
                if let Some(id) = self.running(pick) {
                    self.e.roll_back(id, Rollback::Retract);
                }
            }
            Op::Cancel { pick } => {
                if let Some(id) = self.waiting(pick) {
                    self.e.cancel(id);
                    self.e.w.cancel(id, self.e.now);
                }
            }
            Op::Unwedge { pick } => {
                if let Some(id) = self.waiting(pick) {
                    let frees = self.e.w.unwedge(id, self.e.now);
                    self.e.effects();
                    self.e.take_back(frees);
                }
            }
            Op::Poll => self.e.poll(),
            Op::Pressure { pages } => {
                self.e.make_room(u32::from(pages));
            }
            Op::Admit {
                session,
                input,
                append,
                via,
                newer,
            } => self.admit(session, input, append, via, newer),
            Op::Release { session, drop, named } => {
                let client = &mut self.clients[session as usize];
                let request = client.grant.filter(|_| named).map(|(_, key, _)| key);
                client.grant = None;
                self.e.w.release(
                    &name(session),
                    &ReleaseRequest {
                        request,
                        drop_kv: drop,
                        placed: None,
                    },
                    self.e.now,
                );
                self.e.effects();
            }
            Op::Close { session } => {
                let busy = self.e.runs.iter().any(|r| r.session == session);
                assert_eq!(self.e.w.close(&name(session), self.e.now), busy, "SES-2");
                self.e.effects();
            }
            Op::Import { session } => {
                let client = &self.clients[session as usize];
                let Some((reservation, _, _)) = client.grant else {
                    return;
                };
                let request = ImportRequest {
                    reservation: Some(reservation),
                    source: Source::Prefill,
                    placement: placement(client.placement),
                    peer: "127.0.0.1:1".into(),
                    incarnation: Incarnation(99),
                    deadline_ms: 20_000,
                };
                if let Ok(import) = self.e.w.import(&name(session), &request, self.e.now) {
                    self.asked.push((import, session));
                }
                self.e.effects();
            }
            Op::Offer { pick, edit, len } => {
                if self.asked.is_empty() {
                    return;
                }
                let (import, session) = self.asked.remove(pick as usize % self.asked.len());
                let tokens = self.prompt(session, edit, len);
                let share = tokens.len() as u32 * u32::from(edit) / 256;
                self.e.offer(import, session, identity(0), tokens, share);
            }
            Op::Pull { pick } => {
                if let Some(import) = Self::pick(
                    self.e.pulls.iter().filter(|p| p.flight.is_some()).map(|p| p.import),
                    pick,
                ) {
                    self.e.w.pull_progress(import, 1, self.e.now);
                    self.e.pull_all(import);
                }
            }
            Op::Confirm { pick } => {
                if let Some(import) = Self::pick(self.e.pulls.iter().filter(|p| p.confirming).map(|p| p.import), pick) {
                    let session = self
                        .e
                        .pulls
                        .iter()
                        .find(|p| p.import == import)
                        .map(|p| (p.session, p.tokens.to_vec()));
                    self.e.confirmed(import);
                    if let Some((session, tokens)) = session {
                        self.clients[session as usize].history = tokens;
                    }
                }
            }
            Op::Fail { pick } => {
                if let Some(import) = Self::pick(self.e.pulls.iter().map(|p| p.import), pick) {
                    self.e
                        .w
                        .import_failed(import, Refusal::new(Reason::TransferFailed, "test"), self.e.now);
                    self.e.effects();
                }
            }
            Op::Lease { session } => self.lease(session),
            Op::Look { pick } => {
                if let Some(lease) = Self::pick(self.e.readers.keys().copied(), pick) {
                    self.e.look(lease);
                    let reader = &self.e.readers[&lease];
                    let whole = reader.seen.len() == reader.tokens.len();
                    assert_eq!(self.e.w.confirm(lease, self.e.now).is_ok(), whole, "XFER-3");
                    self.e.w.renew(lease, self.e.now).unwrap();
                }
            }
            Op::EndLease { pick } => {
                if let Some(lease) = Self::pick(self.e.readers.keys().copied(), pick) {
                    self.e.w.end_lease(lease, self.e.now);
                    self.e.effects();
                }
            }
            Op::Wait { seconds } => {
                self.e.now = self.e.now + std::time::Duration::from_secs(u64::from(seconds));
                self.e.w.handle_timeout(self.e.now);
                self.e.effects();
                assert!(self.e.w.poll_timeout().is_none_or(|at| at > self.e.now));
            }
            Op::Flush => self.e.flush(),
            // Two first prompts that are the same run side by side; a peer reads the one whose pages become duplicates.
            Op::Twins { one, two, len } => {
                let prompt = self.prompt(one, 0, len);
                let runs = [one, two].map(|session| {
                    let mut arrival = Engine::arrival(session, identity(0), prompt.clone(), 0);
                    arrival.placement = Some(placement(self.clients[session as usize].placement));
                    self.e
                        .arrive(session, arrival, prompt.clone())
                        .ok()
                        .filter(|id| self.e.start(*id, 100))
                });
                self.lease(two);
                for lease in self.e.readers.keys().copied().collect::<Vec<_>>() {
                    self.e.look(lease);
                }
                for id in runs.into_iter().flatten() {
                    self.e.adopt(id);
                }
            }
            Op::Finish { pick } => {
                for op in [Op::Poll, Op::Pull { pick }, Op::Confirm { pick }, Op::Poll] {
                    self.step(op);
                }
            }
            Op::KillLanding => self.e.kill_landing = true,
            Op::Turn {
                session,
                edit,
                len,
                out,
            } => {
                let prompt = self.prompt(session, edit, len);
                let Ok(id) = self.e.say(session, &prompt, u32::from(out)) else {
                    return;
                };
                if !self.e.start(id, 200) {
                    return;
                }
                self.e.adopt(id);
                for token in 0..u32::from(out) {
                    self.e.decode(id, 50 + token % 3);
                }
                let history = [prompt, self.e.run(id).output.clone()].concat();
                self.e.commit(id);
                let client = &mut self.clients[session as usize];
                (client.history, client.turn) = (history, client.turn + 1);
            }
            Op::Seed { session, edit, len } => {
                // What is large for a direct turn is asked for again by way of a prefill worker (DISP-6).
                if self.e.w.history_len(&name(session)) > 0 {
                    self.admit(session, 88, 80, false, false);
                }
                let input = self.prompt(session, edit, len).len() as u8;
                self.admit(session, input, input.saturating_sub(1), true, true);
                self.step(Op::Import { session });
                if self.asked.last().is_some_and(|(_, s)| *s == session) {
                    let pick = (self.asked.len() - 1) as u8;
                    self.step(Op::Offer { pick, edit, len });
                }
            }
        }
        for fenced in std::mem::take(&mut self.e.fenced) {
            assert!(
                self.e.w.confirm(fenced, self.e.now).is_err(),
                "revoked before it was fenced (XFER-2)"
            );
        }
    }

    fn admit(&mut self, session: u8, input: u8, append: u8, via: bool, newer: bool) {
        self.requests += 1;
        // A copy kept for another owner: its router has to take a number of its own (SES-4).
        let replica = self
            .e
            .w
            .session(&name(session), self.e.now)
            .is_some_and(|s| s.standing == Standing::Replica);
        let client = &mut self.clients[session as usize];
        let placed = if newer || replica {
            client.placement + 1
        } else {
            client.placement
        };
        let key = RequestKey {
            router: RouterId(3),
            request: self.requests,
            attempt: 0,
        };
        let request = AdmitRequest {
            session_id: name(session),
            turn: client.turn,
            input_tokens: u32::from(input),
            append_tokens: u32::from(append % input).max(1),
            max_new_tokens: Some(u32::from(append % 16)),
            estimated: true,
            via: via.then_some(Via::Prefill),
            placement: Some(placement(placed)),
            incarnation: Some(Incarnation(7)),
            backup: None,
            key,
        };
        let before = self.e.w.load(None).used;
        let busy = self
            .e
            .w
            .session(&name(session), self.e.now)
            .is_some_and(|s| matches!(&*s.state, "admitted" | "running" | "importing"));
        let evictable = self.e.w.evictable();
        let held = self.e.w.held();
        let answer = self.e.w.admit(&request, self.e.now);
        self.e.effects();
        let limit = u64::from(self.e.capacity) * 95 / 100;
        match answer.reservation {
            Some(id) => {
                assert!(!busy, "ADM-8");
                assert!(answer.load.used <= limit, "INV-1: {} of {limit}", answer.load.used);
                client.placement = placed;
                client.grant = Some((id, key, answer.mode.unwrap()));
                let again = self.e.w.admit(&request, self.e.now);
                assert_eq!((again.reservation, again.mode), (Some(id), answer.mode), "ADM-10");
            }
            None => {
                assert_eq!(self.e.w.load(None).used, before, "a refusal changes nothing");
                assert_eq!(busy, answer.reason == Some(Reason::SessionBusy));
            }
        }
        assert_eq!(
            (self.e.w.evictable(), self.e.w.held()),
            (evictable, held),
            "OWN-2: not on a service thread"
        );
    }

    fn lease(&mut self, session: u8) {
        let request = LeaseRequest {
            session: name(session),
            placement: placement(self.clients[session as usize].placement),
            incarnation: Incarnation(7),
            kind: LeaseKind::Follow,
            have: None,
        };
        if let Ok(LeaseAnswer::Granted(grant)) = self.e.w.lease(&request, self.e.now) {
            assert!(
                grant.share.max(grant.readable) as usize <= grant.tokens.len(),
                "{grant:?}"
            );
            let reader = super::engine::Reader {
                tokens: grant.tokens,
                identity: grant.identity,
                seen: Vec::new(),
            };
            self.e.readers.insert(grant.lease, reader);
        }
        self.e.effects();
    }
}

fn live(page: u32, ops: Vec<Op>) -> Counters {
    let mut world = World::new(page);
    for op in ops {
        world.step(op);
        world.e.check();
    }
    world.e.quiesce();
    world.e.w.counters().clone()
}

/// The same lives every time.
fn lives(n: usize) -> impl Iterator<Item = (u32, Vec<Op>)> {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let strategy = prop::collection::vec(ops(), 60..120);
    (0..n).map(move |i| {
        (
            if i % 2 == 0 { 1 } else { 16 },
            strategy.new_tree(&mut runner).unwrap().current(),
        )
    })
}

/// Without this the properties below could hold of nothing.
#[test]
fn the_lives_reach_every_corner() {
    let all: Vec<Counters> = lives(80).map(|(page, ops)| live(page, ops)).collect();
    let sum = |f: fn(&Counters) -> u64| all.iter().map(f).sum::<u64>();
    let reached = [
        ("commits", sum(|c| c.commits)),
        ("restored", sum(|c| c.restored_tokens)),
        ("rewinds", sum(|c| c.rewinds)),
        ("retracts", sum(|c| c.retracts)),
        ("aborts", sum(|c| c.aborts)),
        ("cancels", sum(|c| c.cancels)),
        ("evictions", sum(|c| c.evictions)),
        ("unwedged", sum(|c| c.unwedged)),
        ("lapses", sum(|c| c.lapses)),
        ("estimates", sum(|c| c.estimates_wrong)),
        ("direct", sum(|c| c.admissions(Mode::Direct))),
        ("seed", sum(|c| c.admissions(Mode::Seed))),
        ("reseed", sum(|c| c.admissions(Mode::Reseed))),
        ("imported", sum(|c| c.imports_committed)),
        ("pulled", sum(|c| c.imported_tokens)),
        ("leases", sum(|c| c.leases)),
        ("revoked", sum(|c| c.revocations)),
        ("expired", sum(|c| c.leases_expired)),
        ("flushes", sum(|c| c.flushes)),
        ("busy", sum(|c| c.refusals(Reason::SessionBusy))),
        ("full", sum(|c| c.refusals(Reason::NoDCapacity))),
        (
            "full, absent",
            sum(|c| c.refusals(Reason::SessionNotResidentNoCapacity)),
        ),
        ("large", sum(|c| c.refusals(Reason::RealLargeAppend))),
    ];
    println!("{reached:?}");
    for (what, n) in reached {
        assert!(n >= 5, "{what} happens {n} times");
    }
}

/// Each check, switched off, is noticed by an oracle of the lives.
#[test]
fn every_check_is_missed_when_it_is_off() {
    use crate::mutation::{Check::*, without};
    let checks = [
        RevokePastCut,
        RetireUnderLease,
        ConfirmFailsWhenRevoked,
        CutBeforeExtend,
        Identity,
        Capacity,
        Busy,
        Claim,
        Restore,
        GiveBack,
        FenceImport,
        Rewind,
        FenceLease,
        LeaseOnEviction,
    ];
    let missed = checks.map(|check| {
        let fails = |(page, ops)| std::panic::catch_unwind(|| without(check, || live(page, ops))).is_err();
        (check, lives(400).position(fails))
    });
    println!("{missed:?}");
    for (check, life) in missed {
        assert!(life.is_some(), "nothing notices that {check:?} is off");
    }
}

/// `PROPTEST_CASES=n` for a longer run.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(100)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// OWN-1, 4, 5, 6, 7; SES-2, 3, 6; XFER-2, 3, 4; ADM-7, 8, 10; INV-1.
    #[test]
    fn any_life_at_page_size_1_keeps_every_invariant(ops in prop::collection::vec(ops(), 1..120)) {
        live(1, ops);
    }

    /// The same with pages of 16: unaligned committed lengths (F7), whole-page frees.
    #[test]
    fn any_life_at_page_size_16_keeps_every_invariant(ops in prop::collection::vec(ops(), 1..120)) {
        live(16, ops);
    }

    /// And of 64.
    #[test]
    fn any_life_at_page_size_64_keeps_every_invariant(ops in prop::collection::vec(ops(), 1..120)) {
        live(64, ops);
    }
}
