//! The last part of a dispatch: run, fall back, and what comes of it (DISP-1, DISP-2, DISP-5, DISP-7, DISP-8).

use super::{Dispatch, Effect, ExecutionMode, Outcome, Run, State};
use crate::{
    routing::{
        Router,
        session::{Record, SessionStore},
    },
    time::Now,
    wire::{reason::Reason, turn::TurnTag},
};

impl Dispatch {
    pub(super) fn run<S: SessionStore>(&mut self, router: &mut Router<S>, run: Run, now: Now) {
        self.placing(router, false);
        self.granted(router, &run);
        self.tell_owners(router, &run);
        self.trace.mode = Some(run.mode);
        self.trace.worker = Some(run.worker);
        self.trace.admitted = Some(now);
        let keeps = run.mode != ExecutionMode::Fallback;
        let tag = self.turn.session.clone().filter(|_| keeps).map(|session| TurnTag {
            session,
            reservation: run.grant.and_then(|g| g.reservation),
            placement: run.placement,
            origin: Some((self.router, self.trace.request)),
            prefill_only: false,
        });
        self.effects.push_back(Effect::Run {
            worker: run.worker,
            tag,
        });
        self.state = State::Running { run, first_byte: false };
    }

    fn granted<S: SessionStore>(&mut self, router: &mut Router<S>, run: &Run) {
        let at = router.view.at(run.worker);
        let record = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s));
        let placement = run.placement.filter(|_| run.mode != ExecutionMode::Fallback);
        if let (Some(record), Some(placement)) = (record, placement) {
            record.granted = Some((at, placement));
        }
    }

    /// SES-4: who owned the session before, and will not hear of the new number from a lease, is told. A worker that does
    /// not answer hears of it when it is asked again.
    fn tell_owners<S: SessionStore>(&mut self, router: &mut Router<S>, run: &Run) {
        let session = self
            .turn
            .session
            .clone()
            .filter(|_| run.mode != ExecutionMode::Fallback);
        let (Some(session), Some(placement)) = (session, run.placement) else {
            return;
        };
        let record = router.sessions.peek(&session);
        let older = |r: &&Record| r.placement.is_some_and(|held| held.n < placement.n);
        let pin = record.filter(older).and_then(|r| r.pin);
        let pin = pin.filter(|at| router.view.is_present(*at)).map(|at| at.worker);
        let pin = pin.filter(|w| Some(*w) != run.source && !run.owners.contains(w));
        for worker in run.owners.iter().copied().chain(pin) {
            if worker != run.worker && router.view.worker(worker).answers() {
                self.effects.push_back(Effect::Placed {
                    worker,
                    session: session.clone(),
                    placement,
                });
            }
        }
    }

    /// DISP-5: no session kept, the next worker in turn; the engine's own queue orders it (docs/adr/0020).
    pub(super) fn fallback<S: SessionStore>(&mut self, router: &mut Router<S>, now: Now) {
        let Some(worker) = router.view.next_decode(&self.failed) else {
            let reason = self.trace.chain.last().copied();
            self.refuse(router, reason.unwrap_or(Reason::PeerUnreachable), now);
            return;
        };
        router.view.assign(worker);
        self.trace.source = None;
        let run = Run {
            worker,
            ticket: router.view.enter(worker),
            mode: ExecutionMode::Fallback,
            grant: None,
            placement: None,
            prefilled: None,
            backup: None,
            source: None,
            owners: Vec::new(),
        };
        self.run(router, run, now);
    }

    /// DISP-8: the worker's health is charged; the request goes another way.
    pub(super) fn failed_early<S: SessionStore>(&mut self, router: &mut Router<S>, run: Run, reason: Reason, now: Now) {
        router.view.failed(run.worker);
        self.failed.push(run.worker);
        if let Some(record) = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s)) {
            record.granted = None;
        }
        self.drop_run(router, run);
        self.trace.chain.push(reason);
        self.only_too_large = false;
        self.after_failure(router, reason, now);
    }

    pub(super) fn after_failure<S: SessionStore>(&mut self, router: &mut Router<S>, reason: Reason, now: Now) {
        self.executions += 1;
        if self.executions >= router.config.max_executions {
            self.refuse(router, reason, now);
        } else if self.turn.session.is_some() && self.trace.mode != Some(ExecutionMode::Fallback) {
            self.next(router, now);
        } else {
            self.fallback(router, now);
        }
    }

    pub(super) fn completed<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        run: Run,
        output_tokens: u32,
        now: Now,
    ) {
        router.view.succeeded(run.worker);
        router.view.leave(run.ticket);
        let at = router.view.at(run.worker);
        let replica = run.prefilled.map(|p| router.view.at(p)).or(run.backup);
        let reset_all = run.mode == ExecutionMode::Direct && router.config.reset_on_success;
        let record = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s));
        if let Some(record) = record.filter(|_| run.mode != ExecutionMode::Fallback) {
            record.turns = record.turns.saturating_add(1);
            record.replica = replica.or(record.replica);
            let tokens = self.turn.input_tokens.saturating_add(output_tokens);
            let lived = record.placement.zip(run.placement).filter(|(held, ran)| ran.n < held.n);
            match (lived, record.pin) {
                // It was handed over between the turn's end and this moment; what ran here went along (MIG-1).
                (Some(_), Some(pin)) => {
                    record.holds(at, tokens);
                    record.holds(pin, tokens);
                }
                _ => {
                    record.pin = Some(at);
                    record.placement = run.placement.or(record.placement);
                    record.grew(at, tokens);
                }
            }
            record.granted = None;
            record.clear_rejects(at);
            if reset_all {
                record.clear_all_rejects();
            }
        }
        self.end(router, Outcome::Completed, now);
    }
}
