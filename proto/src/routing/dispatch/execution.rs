//! The second half of a dispatch: hand over, run, fall back, and what comes of it (DISP-1..3, DISP-5, DISP-7, DISP-8).

use super::{Dispatch, Effect, ExecutionMode, Handover, Outcome, Run, State};
use crate::{
    id::{Epoch, Placement},
    routing::{Router, session::SessionStore},
    time::Now,
    wire::{admit::{ImportRequest, Source}, reason::Reason, turn::TurnTag},
};

impl Dispatch {
    /// The number a granted seed or reseed runs under: the one just taken, or a fresh one if the worker was thought to
    /// hold the session (SES-4). A granted number is never offered to another worker.
    pub(super) fn granted_number<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        sent: Option<Placement>,
        epoch: Option<Epoch>,
    ) -> Option<Placement> {
        let taken = self.taken.take();
        if taken.is_some() && taken == sent {
            return taken;
        }
        let above = [sent, epoch.map(|e| e.placement)]
            .into_iter()
            .flatten()
            .max_by_key(|p| p.n);
        let session = self.turn.session.as_ref()?;
        Some(router.store.take(session, above))
    }

    /// DISP-3.
    pub(super) fn hand_over<S: SessionStore>(&mut self, router: &mut Router<S>, run: Run, now: Now) {
        let replica = self
            .turn
            .session
            .as_ref()
            .and_then(|s| router.sessions.peek(s)?.replica);
        let prefill = router.view.next_prefill(replica);
        let incarnation = prefill.and_then(|p| router.view.worker(p).incarnation());
        let reservation = run.grant.and_then(|g| g.reservation);
        let (Some(session), Some(placement), Some(reservation), Some(prefill), Some(incarnation)) = (
            self.turn.session.clone(),
            run.placement,
            reservation,
            prefill,
            incarnation,
        ) else {
            // No prefill worker answers: the decode worker computes the prompt itself.
            self.run(run, now);
            return;
        };
        self.trace.mode = Some(run.mode);
        self.trace.worker = Some(run.worker);
        let handover = Handover {
            prefill,
            prefill_tag: TurnTag {
                session,
                reservation: None,
                placement: Some(placement),
                origin: Some((self.router, self.trace.request)),
                prefill_only: true,
            },
            decode: run.worker,
            import: ImportRequest {
                reservation: Some(reservation),
                placement,
                source: Source::Prefill,
                peer: router.view.worker(prefill).peer().to_owned(),
                incarnation,
                deadline_ms: u32::try_from(router.config.import_deadline.as_millis()).unwrap_or(u32::MAX),
            },
        };
        router.view.assign(prefill);
        let from = router.view.enter(prefill);
        self.state = State::Importing { run, from, prefill };
        self.effects.push_back(Effect::PrefillAndImport(Box::new(handover)));
    }

    pub(super) fn run(&mut self, run: Run, now: Now) {
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

    /// DISP-5: no session kept, the next worker in turn; the engine's own queue orders it (docs/adr/0020).
    pub(super) fn fallback<S: SessionStore>(&mut self, router: &mut Router<S>, now: Now) {
        let Some(worker) = router.view.next_decode(&self.failed) else {
            let reason = self.trace.chain.last().copied();
            self.refuse(router, reason.unwrap_or(Reason::PeerUnreachable), now);
            return;
        };
        router.view.assign(worker);
        let run = Run {
            worker,
            ticket: router.view.enter(worker),
            mode: ExecutionMode::Fallback,
            grant: None,
            placement: None,
            replica: None,
        };
        self.run(run, now);
    }

    /// DISP-8: the worker's health is charged; the request goes another way.
    pub(super) fn failed_early<S: SessionStore>(&mut self, router: &mut Router<S>, run: Run, reason: Reason, now: Now) {
        router.view.failed(run.worker);
        self.release(&run);
        router.view.leave(run.ticket);
        self.trace.chain.push(reason);
        self.only_too_large = false;
        self.failed.push(run.worker);
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
        let replica = run.replica.map(|p| router.view.at(p));
        let reset_all = run.mode == ExecutionMode::Direct && router.config.reset_on_success;
        let record = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s));
        if let Some(record) = record.filter(|_| run.mode != ExecutionMode::Fallback) {
            record.turns = record.turns.saturating_add(1);
            record.pin = Some(at);
            record.placement = run.placement.or(record.placement);
            record.replica = replica.or(record.replica);
            record.grew(at, self.turn.input_tokens.saturating_add(output_tokens));
            record.clear_rejects(at);
            if reset_all {
                record.clear_all_rejects();
            }
        }
        self.end(router, Outcome::Completed, now);
    }
}
