//! Algorithm 3: one client request from the first routing decision to its one answer (DISP-1..9). Driven by the HTTP
//! front.
//!
//! Every effect but [`Effect::Release`] and [`Effect::Refuse`] is answered by exactly one of the events it names; a
//! client that goes away may be reported at any time. Whatever happens, the dispatch ends in one [`Outcome`], its
//! tickets are handed back once, and its session is closed once.

mod api;
mod execution;

use std::{collections::VecDeque, time::Duration};

use super::{
    Router,
    reject::{Meaning, meaning},
    session::{Record, SessionStore},
    view::{Ticket, WorkerIndex},
};
use crate::{
    id::{Epoch, Placement, RequestKey, ReservationId, RouterId, SessionId},
    time::Now,
    wire::{
        admit::{AdmitAnswer, AdmitRequest, Mode, Via},
        reason::Reason,
    },
};

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
    Asking,
    Probing {
        worker: WorkerIndex,
        via: Option<Via>,
        sent: Option<Placement>,
    },
    Importing {
        run: Run,
        from: Ticket,
        prefill: WorkerIndex,
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
    replica: Option<WorkerIndex>,
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
        match self.state {
            State::Queued => {
                if let Some(session) = self.turn.session.clone() {
                    self.enqueue(router, session, now);
                }
            }
            State::Pausing { worker, via } => self.probe(router, worker, via),
            _ => {}
        }
    }

    /// Something came of an effect.
    pub fn handle<S: SessionStore>(&mut self, router: &mut Router<S>, event: Event, now: Now) -> Result<(), OutOfTurn> {
        let state = std::mem::replace(&mut self.state, State::Ended);
        match (state, event) {
            (State::Ended, Event::ClientGone) => {}
            (state, Event::ClientGone) => self.gone(router, state, now),
            (State::Asking, Event::Residents(residents)) => self.learned(router, &residents, now),
            (State::Probing { worker, via, sent }, Event::Answer(answer)) => {
                self.answered(router, worker, via, sent, *answer, now);
            }
            (State::Probing { worker, .. }, Event::Unreachable) => self.unreachable(router, worker, now),
            (State::Importing { mut run, from, prefill }, Event::Imported) => {
                router.view.leave(from);
                router.view.succeeded(prefill);
                run.replica = Some(prefill);
                self.run(run, now);
            }
            (State::Importing { run, from, .. }, Event::ImportFailed(reason)) => {
                // XFER-7: recompute is always possible, and the grant covers it.
                router.view.leave(from);
                self.trace.chain.push(reason);
                self.run(run, now);
            }
            (State::Importing { run, from, prefill }, Event::PrefillFailed) => {
                router.view.leave(from);
                router.view.failed(prefill);
                self.trace.chain.push(Reason::PeerUnreachable);
                self.run(run, now);
            }
            (State::Running { run, first_byte: false }, Event::TurnRefused(reason)) => {
                self.turn_refused(router, run, reason, now);
            }
            (State::Running { run, first_byte: false }, Event::Passed) => {
                // The engine may have refused the body before its scheduler saw the grant.
                self.release(&run);
                router.view.leave(run.ticket);
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
                router.view.failed(run.worker);
                self.release(&run);
                router.view.leave(run.ticket);
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
        let known = router.sessions.peek(&session).is_some_and(|r| *r != Record::default());
        if !known && router.config.ask_unknown && router.view.decoders().next().is_some() {
            self.state = State::Asking;
            self.effects.push_back(Effect::Ask(session));
        } else {
            self.next(router, now);
        }
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
        if let Some(record) = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s)) {
            for r in residents {
                record.turns = 1;
                record.holds(router.view.at(r.worker), r.tokens);
                let epoch = r.epoch.map(|e| e.placement);
                if epoch.is_some_and(|p| record.placement.is_none_or(|held| held.n < p.n)) {
                    record.placement = epoch;
                }
            }
            let most = residents.iter().filter(|r| r.tokens > 0).max_by_key(|r| r.tokens);
            let placement = record.placement;
            // Only the placement's holder goes on under it.
            let holder = most.filter(|r| placement.is_some() && r.epoch.map(|e| e.placement) == placement);
            record.pin = holder.map(|r| router.view.at(r.worker));
        }
        self.next(router, now);
    }

    /// The next probe, or what is left when there is none.
    fn next<S: SessionStore>(&mut self, router: &mut Router<S>, now: Now) {
        let record = self.turn.session.as_ref().and_then(|s| router.sessions.peek(s));
        let input = self.turn.input_tokens;
        let choice = router.config.policy.choose(&router.view, record, &self.tried, input);
        let Some(worker) = choice.filter(|_| self.probes_left > 0) else {
            let refused_everywhere = self.only_too_large && !self.trace.chain.is_empty();
            if choice.is_none() && refused_everywhere {
                self.refuse(router, Reason::TooLarge, now);
            } else {
                self.fallback(router, now);
            }
            return;
        };
        router.view.assign(worker);
        let at = router.view.at(worker);
        let resident = record.map_or(0, |r| r.resident(at));
        let pinned = record.is_some_and(|r| r.pin == Some(at));
        let small = input.saturating_sub(resident) <= router.config.max_uncached_tokens;
        if !router.config.admit_direct && pinned && resident > 0 && small && self.tried.is_empty() {
            let placement = record.and_then(|r| r.placement);
            let run = Run {
                worker,
                ticket: router.view.enter(worker),
                mode: ExecutionMode::Direct,
                grant: None,
                placement,
                replica: None,
            };
            self.tried.push(worker);
            self.run(run, now);
            return;
        }
        self.tried.push(worker);
        self.probe(router, worker, None);
    }

    fn probe<S: SessionStore>(&mut self, router: &mut Router<S>, worker: WorkerIndex, via: Option<Via>) {
        let Some(session) = self.turn.session.clone() else {
            return;
        };
        let record = router.sessions.peek(&session);
        let resident = record.map_or(0, |r| r.resident(router.view.at(worker)));
        let held = record.and_then(|r| r.placement);
        // Whoever else holds the session holds it under an older number: a turn there is a move (MIG-3).
        let holder = record.is_some_and(|r| r.pin == Some(router.view.at(worker)));
        let direct = resident > 0 && via.is_none() && held.is_some() && holder;
        // SES-4: a seed or reseed takes a number before its import. One that was refused is used for the next probe.
        let sent = match direct {
            true => held,
            false => Some(*self.taken.get_or_insert_with(|| router.store.take(&session, held))),
        };
        self.attempt += 1;
        self.trace.probes += 1;
        let request = AdmitRequest {
            turn: record.map_or(0, |r| r.turns),
            input_tokens: self.turn.input_tokens,
            append_tokens: self.turn.input_tokens.saturating_sub(resident),
            max_new_tokens: self.turn.max_new_tokens,
            estimated: self.turn.estimated,
            via,
            placement: sent,
            incarnation: router.view.worker(worker).incarnation(),
            backup: None,
            key: self.key(),
            session_id: session,
        };
        self.state = State::Probing { worker, via, sent };
        self.effects.push_back(Effect::Probe {
            worker,
            request: Box::new(request),
        });
    }

    fn answered<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        worker: WorkerIndex,
        via: Option<Via>,
        sent: Option<Placement>,
        answer: AdmitAnswer,
        now: Now,
    ) {
        router.view.incarnation_is(worker, answer.incarnation);
        router.view.load_is(worker, answer.load);
        self.cut(router, worker, answer.resident_tokens);
        let mode = answer.mode.filter(|_| answer.can_admit);
        let Some(mode) = mode else {
            let reason = answer.reason.unwrap_or(Reason::Internal);
            self.refused(router, worker, via, reason, answer.epoch, now);
            return;
        };
        let grant = Grant {
            reservation: answer.reservation,
            key: self.key(),
        };
        let placement = match mode {
            Mode::Direct => {
                // A granted number is never offered to another worker.
                self.taken = self.taken.take().filter(|taken| Some(*taken) != sent);
                answer.epoch.map(|e| e.placement).or(sent)
            }
            Mode::Seed | Mode::Reseed => self.granted_number(router, sent, answer.epoch),
        };
        let run = Run {
            worker,
            ticket: router.view.enter(worker),
            mode: mode.into(),
            grant: Some(grant),
            placement,
            replica: None,
        };
        match mode {
            Mode::Direct => self.run(run, now),
            Mode::Seed | Mode::Reseed => self.hand_over(router, run, now),
        }
    }

    /// DISP-4, DISP-6.
    fn refused<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        worker: WorkerIndex,
        via: Option<Via>,
        reason: Reason,
        epoch: Option<Epoch>,
        now: Now,
    ) {
        let means = meaning(reason);
        if means != Meaning::Busy || self.trace.chain.last() != Some(&reason) {
            self.trace.chain.push(reason);
        }
        self.only_too_large &= means == Meaning::TooLarge;
        let first_correction = !self.corrected.contains(&worker);
        if router.config.count_all_rejects || means == Meaning::Pressure {
            self.count(router, worker);
        }
        match means {
            Meaning::Busy => self.wait(router, State::Pausing { worker, via }, now),
            Meaning::LargeAppend if !self.via_prefill.contains(&worker) => {
                self.via_prefill.push(worker);
                self.probe(router, worker, Some(Via::Prefill));
            }
            Meaning::Outdated if first_correction => {
                self.corrected.push(worker);
                self.outdated(router, worker, epoch);
                self.probe(router, worker, via);
            }
            Meaning::Restarted if first_correction => {
                self.corrected.push(worker);
                self.probe(router, worker, via);
            }
            Meaning::Draining => {
                router.view.draining(worker);
                self.next(router, now);
            }
            Meaning::Pressure => {
                self.probes_left = self.probes_left.saturating_sub(1);
                self.next(router, now);
            }
            Meaning::TooLarge | Meaning::LargeAppend | Meaning::Outdated | Meaning::Restarted | Meaning::Elsewhere => {
                self.next(router, now)
            }
        }
    }

    /// The worker holds a later placement than ours: what we take next lies above it.
    fn outdated<S: SessionStore>(&mut self, router: &mut Router<S>, worker: WorkerIndex, epoch: Option<Epoch>) {
        self.taken = None;
        let Some(record) = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s)) else {
            return;
        };
        let held = epoch.map(|e| e.placement);
        if let Some(held) = held.filter(|h| record.placement.is_none_or(|ours| ours.n <= h.n)) {
            record.placement = Some(held);
            // The number is this worker's: whoever was thought to hold the session is not its holder (MIG-3).
            record.pin = record.pin.filter(|pin| pin.worker == worker);
        }
    }

    fn turn_refused<S: SessionStore>(&mut self, router: &mut Router<S>, run: Run, reason: Reason, now: Now) {
        router.view.leave(run.ticket);
        if run.mode == ExecutionMode::Fallback {
            self.trace.chain.push(reason);
            self.failed.push(run.worker);
            self.after_failure(router, reason, now);
        } else {
            // What was asked via prefill is asked so again: else its size would drive it away without a counted reject (INV-3).
            let via = self.via_prefill.contains(&run.worker).then_some(Via::Prefill);
            self.refused(router, run.worker, via, reason, None, now);
        }
    }

    fn unreachable<S: SessionStore>(&mut self, router: &mut Router<S>, worker: WorkerIndex, now: Now) {
        router.view.lost(worker);
        self.trace.chain.push(Reason::PeerUnreachable);
        self.only_too_large = false;
        // It may have granted before the answer was lost, and the number with it.
        self.taken = None;
        self.release_at(worker, self.key());
        self.next(router, now);
    }

    /// The client went away: nothing stays charged for it (F14).
    fn gone<S: SessionStore>(&mut self, router: &mut Router<S>, state: State, now: Now) {
        self.effects.clear();
        match state {
            State::Probing { worker, .. } => self.release_at(worker, self.key()),
            State::Importing { run, from, .. } => {
                self.release(&run);
                router.view.leave(from);
                router.view.leave(run.ticket);
            }
            State::Running { run, .. } => {
                self.release(&run);
                router.view.leave(run.ticket);
            }
            State::Queued | State::Pausing { .. } | State::Asking | State::Ended => {}
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

    fn cut<S: SessionStore>(&mut self, router: &mut Router<S>, worker: WorkerIndex, tokens: u32) {
        let at = router.view.at(worker);
        if let Some(record) = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s)) {
            record.cut(at, tokens);
        }
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
            State::Asking => "asking",
            State::Probing { .. } => "probing",
            State::Importing { .. } => "importing",
            State::Running { first_byte: false, .. } => "running",
            State::Running { first_byte: true, .. } => "streaming",
            State::Ended => "ended",
        }
    }
}

#[cfg(test)]
mod tests;
