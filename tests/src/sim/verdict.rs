//! What must hold of a dispatch when it is over: INV-2, INV-3, DISP-7, one answer. Called by [`super::router`].

use kvc_proto::{
    routing::{ExecutionMode, Health, Outcome, WorkerIndex, score::BLOCK_TOKENS},
    wire::reason::Reason,
};

use super::{
    client::{Answer, told},
    oracle::Oracle,
    router::{Live, Node, Out},
};

impl Node {
    pub(super) fn before(&mut self, live: &mut Live) {
        (live.pin, live.excused) = (None, false);
        let Some(session) = &live.request.session else { return };
        let Some(record) = self.router.sessions().peek(session) else {
            return;
        };
        let view = &self.router.view;
        let Some(pin) = record.pin.filter(|p| view.at(p.worker) == *p) else {
            return;
        };
        let input = live.request.believed.0;
        let blocks = |w: WorkerIndex| record.resident(view.at(w)).min(input) / BLOCK_TOKENS;
        let outranked = view
            .decoders()
            .any(|w| w != pin.worker && blocks(w) > blocks(pin.worker));
        live.pin = Some(pin);
        live.excused = outranked
            || self.moves.moves(session)
            || record.pending.is_some()
            || view.worker(pin.worker).health() != Health::Up
            || self.troubled.contains(&(session.clone(), pin.worker.0));
    }

    pub(super) fn note(&mut self, number: u64, worker: WorkerIndex, reason: Option<Reason>) {
        let Some(live) = self.live.get_mut(&number) else { return };
        live.asked.push((worker, reason));
        live.excused |= reason == Some(Reason::Moved);
        if let (Some(session), Some(reason)) = (&live.request.session, reason)
            && (reason.counts_as_reject() || reason == Reason::TooLarge)
        {
            self.troubled.insert((session.clone(), worker.0));
        }
    }

    /// A worker is no candidate any more: whoever was pinned to it may leave.
    pub(super) fn lost(&mut self, worker: WorkerIndex) {
        for live in self.live.values_mut() {
            live.excused |= live.pin.is_some_and(|p| p.worker == worker);
        }
    }

    pub(super) fn over(&mut self, number: u64, outcome: Outcome) {
        let Some(live) = self.live.remove(&number) else { return };
        let Some(dispatch) = &live.dispatch else { return };
        let trace = dispatch.trace();
        let (mode, worker) = (trace.mode, trace.worker);
        self.log(|| {
            let request = &live.request;
            format!(
                "request {} of client {}: {outcome:?} {mode:?} {:?}",
                request.number, request.client, trace.chain
            )
        });
        let served = outcome == Outcome::Completed;
        if let Some(at) = mode.and_then(|m| ExecutionMode::ALL.iter().position(|x| *x == m)) {
            self.modes[at] += u64::from(served);
        }
        let counted = live
            .asked
            .iter()
            .filter(|(_, r)| r.is_some_and(Reason::counts_as_reject))
            .count();
        let workers = self.router.view.len();
        let busy = live
            .asked
            .iter()
            .filter(|(_, r)| *r == Some(Reason::SessionBusy))
            .count();
        self.watch.check(
            counted <= 2 * workers && live.asked.len() - busy <= 4 * workers,
            Oracle::Inv2,
            || format!("{} questions, {counted} rejects: {:?}", live.asked.len(), live.asked),
        );
        self.check_pin(&live, mode, worker, served);
        if let (true, Some(session), Some(worker)) = (served, &live.request.session, worker) {
            if mode == Some(ExecutionMode::Direct) {
                self.troubled.retain(|(s, _)| s != session);
                let view = &self.router.view;
                let left = self
                    .router
                    .sessions()
                    .peek(session)
                    .map_or(0, |r| view.all().map(|w| r.rejects(view.at(w))).sum::<u32>());
                self.watch.check(left == 0, Oracle::RejectsCleared, || {
                    format!("{left} rejects of {session} outlive a completed direct turn")
                });
            } else if mode != Some(ExecutionMode::Fallback) {
                self.troubled.remove(&(session.clone(), worker.0));
            }
        }
        let answer = match live.output {
            Some(tokens) if served => Answer::Tokens(tokens),
            _ => told(outcome),
        };
        if outcome != Outcome::Gone {
            self.out
                .push(Out::Answer(live.request.client, live.request.number, answer));
        }
    }

    pub(super) fn check_pin(
        &mut self,
        live: &Live,
        mode: Option<ExecutionMode>,
        worker: Option<WorkerIndex>,
        served: bool,
    ) {
        let Some(pin) = live
            .pin
            .filter(|p| !live.excused && self.router.view.at(p.worker) == *p)
        else {
            return;
        };
        if let Some((first, _)) = live.asked.first() {
            self.watch.check(*first == pin.worker, Oracle::Inv3, || {
                format!("pinned to {pin:?}, asked {first:?} first: {:?}", live.asked)
            });
        }
        let moved = served && mode != Some(ExecutionMode::Fallback) && worker != Some(pin.worker);
        let last = live
            .asked
            .iter()
            .filter(|(w, _)| *w == pin.worker)
            .filter_map(|(_, r)| *r)
            .next_back();
        let cause = last.is_some_and(|r| r.counts_as_reject() || matches!(r, Reason::TooLarge | Reason::Draining));
        self.watch.check(!moved || cause, Oracle::Inv3, || {
            format!("left {pin:?} for {worker:?} without a reject there: {:?}", live.asked)
        });
    }
}
