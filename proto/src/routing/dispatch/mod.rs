//! Algorithm 3: one client request from the first routing decision to its one answer (DISP-1..9). Driven by the HTTP
//! front.
//!
//! Every effect but [`Effect::Release`], [`Effect::Placed`] and [`Effect::Refuse`] is answered by exactly one of the events it names; a
//! client that goes away may be reported at any time. Whatever happens, the dispatch ends in one [`Outcome`], its
//! tickets are handed back once, and its session is closed once.

mod api;
mod arbitrate;
mod execution;
mod probe;
mod reseed;

use std::{collections::VecDeque, time::Duration};

use super::{
    Router,
    reject::{Meaning, meaning},
    resident::{Resident, higher},
    session::{Pending, Record, SessionStore},
    view::{At, Ticket, WorkerIndex},
};
use crate::{
    id::{Placement, RequestKey, ReservationId, RouterId, SessionId},
    time::Now,
    wire::{admit::Via, info::Role, reason::Reason},
};
use arbitrate::Then;
use probe::Facts;
use reseed::{Kv, Reseed};

pub use api::*;

/// One request's way.
#[derive(Debug)]
pub struct Dispatch {
    turn: Turn,
    router: RouterId,
    state: State,
    effects: VecDeque<Effect>,
    attempt: u32,
    /// Workers asked in this dispatch (ROUTE-1).
    tried: Vec<WorkerIndex>,
    /// Workers on which an execution failed.
    failed: Vec<WorkerIndex>,
    /// Workers asked again for a placement or incarnation they know better, once each.
    corrected: Vec<WorkerIndex>,
    /// Workers asked again because a turn was refused there on arrival without the facts, once each.
    asked_why: Vec<WorkerIndex>,
    /// Workers that have said where the session went, believed once each (MIG-1).
    redirected: Vec<WorkerIndex>,
    /// The worker whose word led to the one that is asked now.
    sent_by: Option<WorkerIndex>,
    /// The workers were asked who holds the session (ROUTE-9), at most once.
    asked_all: bool,
    /// Workers asked again with the append prefilled elsewhere, once each (DISP-6).
    via_prefill: Vec<WorkerIndex>,
    /// The session was taken for this dispatch ([`super::session::Sessions::open`]) and has to be closed.
    opened: bool,
    probes_left: u32,
    executions: u32,
    /// Every refusal so far was `too-large`.
    only_too_large: bool,
    /// A placement number taken and not yet granted.
    taken: Option<Placement>,
    busy_until: Option<Now>,
    pause: Duration,
    trace: Trace,
    outcome: Option<Outcome>,
}

#[derive(Debug)]
enum State {
    /// Another dispatch of this router has the session.
    Queued,
    /// The worker is busy with another request of the session.
    Pausing {
        worker: WorkerIndex,
        via: Option<Via>,
    },
    /// The same, without a worker that keeps the session (DISP-5).
    Resting,
    Asking,
    /// The pending target of a move is asked first (MIG-2).
    Arbitrating {
        then: Then,
        pending: Pending,
    },
    /// It did not answer, and is waited out.
    WaitingOut {
        then: Then,
        pending: Pending,
    },
    Probing {
        worker: WorkerIndex,
        via: Option<Via>,
        sent: Option<Placement>,
        backup: Option<At>,
    },
    /// SYNC-2: who holds the session's KV.
    Locating {
        reseed: Box<Reseed>,
    },
    Importing {
        reseed: Box<Reseed>,
        kv: Kv,
    },
    Running {
        run: Run,
        first_byte: bool,
    },
    Ended,
}

#[derive(Debug)]
struct Run {
    worker: WorkerIndex,
    ticket: Ticket,
    mode: ExecutionMode,
    grant: Option<Grant>,
    placement: Option<Placement>,
    /// The prefill worker that computed the prompt.
    prefilled: Option<WorkerIndex>,
    /// The backup that the worker was told of (SYNC-1).
    backup: Option<At>,
    /// Who gave the KV under the number of this run.
    source: Option<WorkerIndex>,
    /// Who has said to own the session, and has not given its KV under the new number.
    owners: Vec<WorkerIndex>,
}

#[derive(Clone, Copy, Debug)]
struct Grant {
    reservation: Option<ReservationId>,
    key: RequestKey,
}

/// The first pause while a session is busy; doubled up to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_millis(2);
const PAUSE_MAX: Duration = Duration::from_millis(64);

impl Dispatch {
    /// Begins a request.
    pub fn start<S: SessionStore>(router: &mut Router<S>, turn: Turn, now: Now) -> Dispatch {
        router.requests += 1;
        let decoders = router.view.decoders_configured();
        let mut dispatch = Dispatch {
            state: State::Queued,
            effects: VecDeque::with_capacity(2),
            attempt: 0,
            tried: Vec::new(),
            failed: Vec::new(),
            corrected: Vec::new(),
            asked_why: Vec::new(),
            redirected: Vec::new(),
            sent_by: None,
            asked_all: false,
            via_prefill: Vec::new(),
            opened: false,
            // ε = max(1, |D| − 1)
            probes_left: u32::try_from(decoders.saturating_sub(1).max(1)).unwrap_or(u32::MAX),
            executions: 0,
            only_too_large: true,
            taken: None,
            busy_until: None,
            pause: PAUSE,
            trace: Trace {
                request: router.requests,
                mode: None,
                worker: None,
                chain: Vec::new(),
                probes: 0,
                source: None,
                arbitrations: 0,
                started: now,
                admitted: None,
                first_byte: None,
                ended: None,
            },
            outcome: None,
            router: router.id,
            turn,
        };
        match dispatch.turn.session.clone() {
            None => dispatch.fallback(router, now),
            Some(session) => dispatch.enqueue(router, session, now),
        }
        dispatch
    }

    /// What to do next; none while an event is awaited, or when it is over.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// What has been recorded so far.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// How it ended, once it has.
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome
    }

    /// The pause of an [`Effect::Wait`] is over.
    pub fn handle_timeout<S: SessionStore>(&mut self, router: &mut Router<S>, now: Now) {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Queued => {
                if let Some(session) = self.turn.session.clone() {
                    self.enqueue(router, session, now);
                }
            }
            State::Pausing { worker, via } => self.probe(router, worker, via, now),
            State::Resting => self.fallback(router, now),
            State::WaitingOut { then, pending } => self.settled(router, then, &pending, now),
            state => self.state = state,
        }
    }

    /// Something came of an effect.
    pub fn handle<S: SessionStore>(&mut self, router: &mut Router<S>, event: Event, now: Now) -> Result<(), OutOfTurn> {
        let state = std::mem::replace(&mut self.state, State::Ended);
        match (state, event) {
            (State::Ended, Event::ClientGone) => {}
            (state, Event::ClientGone) => self.gone(router, state, now),
            (State::Asking, Event::Residents(residents)) => self.learned(router, &residents, now),
            (
                State::Probing {
                    worker,
                    via,
                    sent,
                    backup,
                },
                Event::Answer(answer),
            ) => self.answered(router, (worker, via, sent, backup), *answer, now),
            (State::Probing { worker, .. }, Event::Unreachable) => self.unreachable(router, worker, now),
            (State::Arbitrating { then, pending }, Event::Withdrawn(answer)) => {
                self.withdrawn(router, then, &pending, answer, now);
            }
            (State::Arbitrating { then, pending }, Event::WithdrawRefused(reason)) => {
                self.withdraw_refused(router, then, pending, reason, now);
            }
            (State::Arbitrating { then, pending }, Event::Unreachable) => {
                router.view.lost(pending.target.worker);
                self.wait_out(router, then, pending, now);
            }
            (State::Locating { reseed }, Event::Located(found)) => self.located(router, reseed, &found, now),
            (State::Importing { reseed, kv }, Event::Imported) => self.imported(router, reseed, kv, now),
            (State::Importing { reseed, kv }, Event::ImportFailed(reason)) => {
                self.import_failed(router, reseed, kv, reason, now);
            }
            (
                State::Importing {
                    reseed,
                    kv: Kv::Prefilled { by, ticket },
                },
                Event::PrefillFailed,
            ) => {
                router.view.leave(ticket);
                router.view.failed(by);
                self.trace.chain.push(Reason::PeerUnreachable);
                self.run(router, reseed.run, now);
            }
            (State::Running { run, first_byte: false }, Event::TurnRefused(reason)) => {
                self.turn_refused(router, run, reason, now);
            }
            (State::Running { run, first_byte: false }, Event::Passed) => {
                // The engine may have refused the body before its scheduler saw the grant.
                self.drop_run(router, run);
                self.end(router, Outcome::Passed, now);
            }
            (State::Running { run, first_byte: false }, Event::FirstByte) => {
                self.trace.first_byte = Some(now);
                self.state = State::Running { run, first_byte: true };
            }
            (State::Running { run, first_byte: false }, Event::Failed(reason)) => {
                self.failed_early(router, run, reason, now);
            }
            (State::Running { run, first_byte: true }, Event::Failed(reason)) => {
                // A turn that lost its session to a later placement says nothing about the worker (SES-4).
                if !matches!(meaning(reason), Meaning::Outdated | Meaning::Moved) {
                    router.view.failed(run.worker);
                }
                self.drop_run(router, run);
                self.trace.chain.push(reason);
                self.end(router, Outcome::Broken(reason), now);
            }
            (State::Running { run, first_byte: true }, Event::Completed { output_tokens }) => {
                self.completed(router, run, output_tokens, now);
            }
            (state, event) => {
                let name = state.name();
                self.state = state;
                return Err(OutOfTurn { event, state: name });
            }
        }
        Ok(())
    }

    fn enqueue<S: SessionStore>(&mut self, router: &mut Router<S>, session: SessionId, now: Now) {
        if !router.sessions.open(&session) {
            self.wait(router, State::Queued, now);
            return;
        }
        self.opened = true;
        let known = router.sessions.peek(&session).is_some_and(Record::is_known);
        if known || !self.ask(router) {
            self.next(router, now);
        }
    }

    /// ROUTE-9: asks whoever answers what it holds; false if nobody is to be asked.
    fn ask<S: SessionStore>(&mut self, router: &mut Router<S>) -> bool {
        let Some(session) = self.turn.session.clone() else {
            return false;
        };
        let ask = router.config.ask_unknown && !self.asked_all && router.view.decoders().next().is_some();
        if ask {
            self.asked_all = true;
            let workers = router.view.answering().collect();
            self.state = State::Asking;
            self.effects.push_back(Effect::Ask { session, workers });
        }
        ask
    }

    /// ADM-8: a bounded wait, then 409.
    fn wait<S: SessionStore>(&mut self, router: &mut Router<S>, state: State, now: Now) {
        let deadline = *self.busy_until.get_or_insert(now + router.config.busy_wait);
        if now >= deadline {
            self.refuse(router, Reason::SessionBusy, now);
            return;
        }
        let until = (now + self.pause).min(deadline);
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        self.state = state;
        self.effects.push_back(Effect::Wait { until });
    }

    /// ROUTE-9: what the workers know of a session that this router does not.
    fn learned<S: SessionStore>(&mut self, router: &mut Router<S>, residents: &[Resident], now: Now) {
        let known = || residents.iter().filter(|r| r.is_known());
        let owner = Resident::owner(residents).filter(|r| r.tokens > 0).copied();
        let prefills = |r: &&Resident| router.view.worker(r.worker).role() == Role::Prefill;
        let replica = known().filter(prefills).filter(|r| r.tokens > 0);
        let replica = replica.max_by_key(|r| r.tokens).map(|r| router.view.at(r.worker));
        if let Some(record) = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s)) {
            for r in known() {
                record.turns = record.turns.max(1);
                if router.view.worker(r.worker).role() != Role::Prefill {
                    record.holds(router.view.at(r.worker), r.tokens);
                }
                record.placement = higher(record.placement, r.highest());
            }
            // Only the placement's owner goes on under it (MIG-3).
            let owner =
                owner.filter(|r| record.placement.is_some() && r.epoch.map(|e| e.placement) == record.placement);
            record.pin = owner.map(|r| router.view.at(r.worker));
            record.replica = replica.or(record.replica);
        }
        self.next(router, now);
    }

    /// The client went away: nothing stays charged for it (F14).
    fn gone<S: SessionStore>(&mut self, router: &mut Router<S>, state: State, now: Now) {
        self.effects.clear();
        match state {
            State::Probing { worker, .. } => self.release_at(worker, self.key()),
            State::Arbitrating { then, .. } | State::WaitingOut { then, .. } => self.give_up(router, then),
            State::Locating { reseed } => self.drop_run(router, reseed.run),
            State::Importing { reseed, kv } => {
                if let Kv::Prefilled { ticket, .. } = kv {
                    router.view.leave(ticket);
                }
                self.drop_run(router, reseed.run);
            }
            State::Running { run, .. } => self.drop_run(router, run),
            State::Queued | State::Pausing { .. } | State::Resting | State::Asking | State::Ended => {}
        }
        self.end(router, Outcome::Gone, now);
    }

    fn refuse<S: SessionStore>(&mut self, router: &mut Router<S>, reason: Reason, now: Now) {
        let refused = Refused {
            status: reason.status(),
            reason,
        };
        self.effects.push_back(Effect::Refuse(refused));
        self.end(router, Outcome::Refused(refused), now);
    }

    fn end<S: SessionStore>(&mut self, router: &mut Router<S>, outcome: Outcome, now: Now) {
        self.placing(router, false);
        if let Some(session) = self.turn.session.as_ref().filter(|_| self.opened) {
            router.sessions.close(session);
        }
        self.opened = false;
        self.trace.ended = Some(now);
        self.outcome = Some(outcome);
        self.state = State::Ended;
    }

    fn count<S: SessionStore>(&mut self, router: &mut Router<S>, worker: WorkerIndex) {
        let at = router.view.at(worker);
        if let Some(record) = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s)) {
            record.reject(at);
        }
    }

    /// ROUTE-8; returns what was believed before.
    fn cut<S: SessionStore>(&mut self, router: &mut Router<S>, worker: WorkerIndex, tokens: u32) -> u32 {
        let at = router.view.at(worker);
        let record = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s));
        record.map_or(0, |record| {
            let believed = record.resident(at);
            record.cut(at, tokens);
            believed
        })
    }

    /// A worker may hold the session under that number now.
    fn offered<S: SessionStore>(&mut self, router: &mut Router<S>, placement: Option<Placement>) {
        let record = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s));
        if let (Some(record), Some(placement)) = (record, placement) {
            record.was_offered(placement);
        }
    }

    /// MIG-3: while a number of this dispatch is on offer no move begins.
    fn placing<S: SessionStore>(&mut self, router: &mut Router<S>, placing: bool) {
        let opened = self.turn.session.as_ref().filter(|_| self.opened);
        if let Some(record) = opened.and_then(|s| router.sessions.record_mut(s)) {
            record.placing = placing;
        }
    }

    /// The grant is given back, and the worker's count goes down.
    fn drop_run<S: SessionStore>(&mut self, router: &mut Router<S>, run: Run) {
        self.release(&run);
        router.view.leave(run.ticket);
    }

    fn release(&mut self, run: &Run) {
        if let Some(grant) = run.grant {
            self.release_at(run.worker, grant.key);
        }
    }

    fn release_at(&mut self, worker: WorkerIndex, request: RequestKey) {
        if let Some(session) = self.turn.session.clone() {
            self.effects.push_back(Effect::Release {
                worker,
                session,
                request,
            });
        }
    }

    fn key(&self) -> RequestKey {
        RequestKey {
            router: self.router,
            request: self.trace.request,
            attempt: self.attempt,
        }
    }
}

impl State {
    fn name(&self) -> &'static str {
        match self {
            State::Queued => "queued",
            State::Pausing { .. } => "pausing",
            State::Resting => "resting",
            State::Asking => "asking",
            State::Arbitrating { .. } => "arbitrating",
            State::WaitingOut { .. } => "waiting out",
            State::Locating { .. } => "locating",
            State::Probing { .. } => "probing",
            State::Importing { .. } => "importing",
            State::Running { first_byte: false, .. } => "running",
            State::Running { first_byte: true, .. } => "streaming",
            State::Ended => "ended",
        }
    }
}

#[cfg(test)]
mod move_tests;
#[cfg(test)]
mod refusal_tests;
#[cfg(test)]
mod reseed_tests;
#[cfg(test)]
mod tests;
