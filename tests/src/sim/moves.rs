//! A router's moves: those an operator asks for, and those that empty a draining worker (MIG-1, MIG-4). Next to the
//! machine's own record stands a naive one: which targets may have been handed a session to, and are not asked yet.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use kvc_proto::{
    id::{Incarnation, Placement, SessionId},
    routing::{Move, MoveEffect, MoveEvent, MoveOutcome, Resident, WorkerIndex, target},
    time::Now,
    wire::{
        admit::WithdrawAnswer,
        info::{SessionList, Standing},
        reason::Reason,
    },
};

use super::{
    message::{Ask, Reply},
    oracle::Oracle,
    router::{ADMIT, Call, Node, Out, Tick},
};

/// Moves of a drain at the same time.
const FEW: usize = 2;

/// See the module.
#[derive(Debug, Default)]
pub struct Moves {
    running: BTreeMap<u64, Moving>,
    drains: BTreeMap<WorkerIndex, Drain>,
    open: BTreeMap<SessionId, Open>,
    /// How moves ended: moved, stayed, unknown, not begun.
    pub ends: [u64; 4],
}

#[derive(Debug)]
struct Moving {
    session: SessionId,
    /// None: the answer is a draining worker's list.
    to: Option<WorkerIndex>,
    drains: Option<WorkerIndex>,
    found: Vec<Resident>,
    machine: Option<Move>,
}

#[derive(Debug, Default)]
struct Drain {
    listing: bool,
    left: VecDeque<SessionId>,
}

/// A target that may own the session.
#[derive(Debug)]
struct Open {
    target: WorkerIndex,
    incarnation: Incarnation,
    placement: Placement,
    lost: Option<Now>,
}

impl Moves {
    /// Whether a call's number is a move's.
    pub fn runs(&self, number: u64) -> bool {
        self.running.contains_key(&number)
    }

    /// Moves under way.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Whether this router moves the session now.
    pub fn moves(&self, session: &SessionId) -> bool {
        self.open.contains_key(session) || self.running.values().any(|m| m.session == *session && m.to.is_some())
    }

    /// The target has said its word, for good.
    pub fn settled(&mut self, session: &SessionId, answer: &Result<WithdrawAnswer, Reason>) {
        if matches!(answer, Ok(_) | Err(Reason::StaleIncarnation)) {
            self.open.remove(session);
        }
    }

    /// The target does not answer.
    pub fn lost(&mut self, session: &SessionId, now: Now) {
        if let Some(open) = self.open.get_mut(session) {
            open.lost.get_or_insert(now);
        }
    }

    /// Some worker knows a placement as granted: a move under a lower or equal number is decided.
    pub fn heard_of(&mut self, session: &SessionId, placement: Placement) {
        if self.open.get(session).is_some_and(|o| o.placement.n <= placement.n) {
            self.open.remove(session);
        }
    }
}

impl Node {
    /// `POST /v1/sessions/{id}/move`.
    pub fn operator_move(&mut self, session: SessionId, to: WorkerIndex, now: Now) {
        self.now = now;
        self.begin(session, to, None);
    }

    fn begin(&mut self, session: SessionId, to: WorkerIndex, drains: Option<WorkerIndex>) {
        self.next += 1;
        let number = self.next;
        let moving = Moving {
            session: session.clone(),
            to: Some(to),
            drains,
            found: Vec::new(),
            machine: None,
        };
        self.moves.running.insert(number, moving);
        let workers: Vec<_> = self.router.view.answering().collect();
        for worker in workers {
            let ask = Ask::Session(session.clone());
            self.call(number, Call::Session(worker), worker, ask, ADMIT);
        }
        self.located(number);
    }

    /// MIG-4: the worker's sessions go where there is room, a few at a time.
    pub(super) fn drain_worker(&mut self, worker: WorkerIndex) {
        let drain = self.moves.drains.entry(worker).or_default();
        if drain.listing || !drain.left.is_empty() {
            return;
        }
        drain.listing = true;
        self.list(worker, None);
    }

    fn list(&mut self, worker: WorkerIndex, after: Option<SessionId>) {
        self.next += 1;
        let number = self.next;
        let moving = Moving {
            session: SessionId::new("list").unwrap_or_else(|e| unreachable!("{e}")),
            to: None,
            drains: Some(worker),
            found: Vec::new(),
            machine: None,
        };
        self.moves.running.insert(number, moving);
        self.call(number, Call::List, worker, Ask::Sessions(after), ADMIT);
    }

    fn listed(&mut self, worker: WorkerIndex, list: &SessionList) {
        let owned = |s: &&kvc_proto::wire::info::SessionView| {
            s.standing == Standing::Owner && s.committed > 0 && s.epoch.is_some()
        };
        let sessions: Vec<_> = list
            .sessions
            .iter()
            .filter(owned)
            .map(|s| s.session_id.clone())
            .collect();
        let drain = self.moves.drains.entry(worker).or_default();
        drain.left.extend(sessions);
        match list.sessions.last() {
            Some(last) => self.list(worker, Some(last.session_id.clone())),
            None => drain.listing = false,
        }
        self.pump(worker);
    }

    fn pump(&mut self, worker: WorkerIndex) {
        loop {
            let mine = |m: &&Moving| m.drains == Some(worker) && m.to.is_some();
            let promised: Vec<_> = self.moves.running.values().filter(mine).filter_map(|m| m.to).collect();
            if promised.len() >= FEW {
                return;
            }
            let most = target::most_free(&self.router.view, worker, &[], |w| {
                promised.iter().filter(|p| **p == w).count() as u64 * 50
            });
            let drain = self.moves.drains.entry(worker).or_default();
            let Some(session) = drain.left.pop_front() else { return };
            match most {
                Some(to) => self.begin(session, to, Some(worker)),
                None => {
                    drain.left.clear();
                    return;
                }
            }
        }
    }

    /// All have said what they hold, or are not heard.
    fn located(&mut self, number: u64) {
        if self.calls.values().any(|(n, _)| *n == number) {
            return;
        }
        let Some(moving) = self.moves.running.get_mut(&number) else {
            return;
        };
        let (session, Some(to)) = (moving.session.clone(), moving.to) else {
            return;
        };
        let mut found = std::mem::take(&mut moving.found);
        found.sort_by_key(|r| r.worker);
        match Move::start(&mut self.router, session.clone(), &found, to, self.now) {
            Ok(machine) => {
                moving.machine = Some(machine);
                self.excuse(&session);
                self.carry_on(number);
            }
            Err(why) => {
                self.log(|| format!("no move of {session} to {}: {why}", to.0));
                self.moves.ends[3] += 1;
                self.end_move(number);
            }
        }
    }

    fn carry_on(&mut self, number: u64) {
        loop {
            let Some(moving) = self.moves.running.get_mut(&number) else {
                return;
            };
            let Some(machine) = &mut moving.machine else { return };
            let outcome = machine.outcome();
            let Some(effect) = machine.poll_effect() else {
                if let Some(outcome) = outcome {
                    self.moved(number, outcome);
                }
                return;
            };
            self.log(|| format!("move {number}: {effect:?}"));
            match effect {
                MoveEffect::Import {
                    worker,
                    session,
                    request,
                } => {
                    if let Some(incarnation) = self.router.view.worker(worker).incarnation() {
                        let open = Open {
                            target: worker,
                            incarnation,
                            placement: request.placement,
                            lost: None,
                        };
                        self.moves.open.insert(session.clone(), open);
                    }
                    let within = self.within() + ADMIT;
                    self.call(number, Call::Import, worker, Ask::Import(session, *request), within);
                }
                MoveEffect::Withdraw {
                    worker,
                    session,
                    request,
                } => self.call(number, Call::Withdraw, worker, Ask::Withdraw(session, request), ADMIT),
                MoveEffect::Wait { until } => self.out.push(Out::Until(until, Tick::Wake(number))),
            }
        }
    }

    pub(super) fn move_timeout(&mut self, number: u64) {
        if let Some(machine) = self.moves.running.get_mut(&number).and_then(|m| m.machine.as_mut()) {
            machine.handle_timeout();
        }
        self.carry_on(number);
    }

    pub(super) fn move_replied(&mut self, number: u64, kind: Call, reply: Reply) {
        let Some(moving) = self.moves.running.get_mut(&number) else {
            return;
        };
        let session = moving.session.clone();
        match (kind, reply) {
            (Call::Session(worker), Reply::Session(view)) => {
                let found = view.map_or(Resident::nothing(worker), |v| Resident::of(worker, &v));
                moving.found.push(found);
                self.located(number);
            }
            (Call::List, Reply::Sessions(list)) => {
                let drains = moving.drains;
                self.moves.running.remove(&number);
                if let Some(worker) = drains {
                    self.listed(worker, &list);
                }
            }
            (Call::Import, Reply::Imported(Ok(answer))) => {
                self.moves.open.remove(&session);
                self.move_tell(number, MoveEvent::Moved(answer));
            }
            (Call::Import, Reply::Imported(Err(why))) => self.move_tell(number, MoveEvent::Refused(why)),
            (Call::Withdraw, Reply::Withdrawn(answer)) => {
                self.moves.settled(&session, &answer);
                let event = match answer {
                    Ok(answer) => MoveEvent::Withdrawn(answer),
                    Err(why) => MoveEvent::WithdrawRefused(why),
                };
                self.move_tell(number, event);
            }
            (kind, reply) => self
                .watch
                .fire(Oracle::Driver, format!("{reply:?} in answer to a move's {kind:?}")),
        }
    }

    /// A move's call has broken or was not answered.
    pub(super) fn move_lost(&mut self, number: u64, kind: Call) {
        let Some(moving) = self.moves.running.get(&number) else {
            return;
        };
        let session = moving.session.clone();
        match kind {
            Call::Session(_) => self.located(number),
            Call::List => {
                let drains = moving.drains;
                self.moves.running.remove(&number);
                if let Some(drain) = drains.and_then(|w| self.moves.drains.get_mut(&w)) {
                    drain.listing = false;
                }
            }
            _ => {
                self.moves.lost(&session, self.now);
                self.move_tell(number, MoveEvent::Unreachable);
            }
        }
    }

    fn move_tell(&mut self, number: u64, event: MoveEvent) {
        let Some(machine) = self.moves.running.get_mut(&number).and_then(|m| m.machine.as_mut()) else {
            return;
        };
        if let Err(fault) = machine.handle(&mut self.router, event, self.now) {
            self.watch.fire(Oracle::Driver, fault.to_string());
        }
        self.carry_on(number);
    }

    fn moved(&mut self, number: u64, outcome: MoveOutcome) {
        let session = self.moves.running.get(&number).map(|m| m.session.clone());
        if let Some(session) = session {
            self.log(|| format!("the move of {session} ends: {outcome:?}"));
            self.excuse(&session);
        }
        let at = match outcome {
            MoveOutcome::Moved { .. } => 0,
            MoveOutcome::Stayed(_) => 1,
            MoveOutcome::Unknown(_) => 2,
        };
        self.moves.ends[at] += 1;
        self.end_move(number);
    }

    fn end_move(&mut self, number: u64) {
        let drains = self.moves.running.remove(&number).and_then(|m| m.drains);
        if let Some(worker) = drains {
            self.pump(worker);
        }
    }

    /// INV-3: whoever was pinned may follow a session that moves.
    fn excuse(&mut self, session: &SessionId) {
        for live in self.live.values_mut() {
            live.excused |= live.request.session.as_ref() == Some(session);
        }
    }

    /// MIG-2: before another placement is made the pending target was asked, or waited out.
    pub(super) fn check_pending(&mut self, session: &SessionId, placement: Placement) {
        let Some(open) = self.moves.open.get(session) else {
            return;
        };
        if placement.n <= open.placement.n
            || self.router.view.worker(open.target).incarnation() != Some(open.incarnation)
        {
            return;
        }
        // A little less than the router's own wait: its clock is the same.
        let wait = self.handover_deadline;
        let over = open
            .lost
            .is_some_and(|lost| self.now.since(lost) + Duration::from_millis(1) >= wait);
        let facts = format!(
            "{session} is placed under {} while {} may own it under {}",
            placement.n, open.target.0, open.placement.n
        );
        self.watch.check(over, Oracle::PendingFirst, || facts);
    }
}
