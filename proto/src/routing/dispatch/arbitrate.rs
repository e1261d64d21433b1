//! A dispatch and the moves of its session: the pending target is asked before another placement is made (MIG-2), `moved`
//! answers are followed (MIG-1), and outdated numbers are replaced (SES-4).

use super::{Dispatch, Effect, Facts, Reseed, State};
use crate::{
    id::{Epoch, Placement},
    mutation::off,
    routing::{
        Router,
        resident::higher,
        session::{Pending, SessionStore},
        view::{At, Health, WorkerIndex},
    },
    time::Now,
    wire::{
        admit::{Via, WithdrawAnswer, WithdrawRequest},
        reason::Reason,
    },
};

/// What a dispatch was about to do under a number of its own.
#[derive(Debug)]
pub(super) enum Then {
    /// Ask a worker.
    Probe {
        /// Whom.
        worker: WorkerIndex,
        /// How.
        via: Option<Via>,
    },
    /// Use a grant.
    Grant(Box<Reseed>),
}

impl Dispatch {
    /// MIG-2: a move is out and nothing is known of its end. The process of its target may be gone: then it is settled.
    pub(super) fn needs_target_first<S: SessionStore>(&mut self, router: &mut Router<S>) -> bool {
        let record = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s));
        let Some((record, pending)) = record.and_then(|r| r.pending.map(|p| (r, p))) else {
            return false;
        };
        if !router.view.is_present(pending.target) {
            record.settle(pending.placement);
            self.taken = None;
            return false;
        }
        !off!(PendingAskedFirst)
    }

    /// Asks the pending target first. No other move begins meanwhile.
    pub(super) fn ask_target<S: SessionStore>(&mut self, router: &mut Router<S>, then: Then, now: Now) {
        let session = self.turn.session.clone();
        let pending = session.as_ref().and_then(|s| router.sessions.peek(s)?.pending);
        let (Some(session), Some(pending)) = (session, pending) else {
            self.go_on(router, then, now);
            return;
        };
        self.placing(router, true);
        self.trace.arbitrations += 1;
        self.state = State::Arbitrating { then, pending };
        self.effects.push_back(Effect::Withdraw {
            worker: pending.target.worker,
            session,
            request: WithdrawRequest {
                placement: pending.placement,
                incarnation: pending.incarnation,
            },
        });
    }

    /// The target's word, for good.
    pub(super) fn withdrawn<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        then: Then,
        pending: &Pending,
        answer: WithdrawAnswer,
        now: Now,
    ) {
        let WithdrawAnswer::Owner { epoch } = answer else {
            self.settled(router, then, pending, now);
            return;
        };
        if let Some(record) = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s)) {
            let tokens = record.pin.map_or(0, |at| record.resident(at)).max(1);
            record.settle(pending.placement);
            record.lives_at(pending.target, epoch.placement, tokens);
        }
        self.taken = None;
        self.give_up(router, then);
        self.probe_owner(router, pending.target, now);
    }

    /// Another process answers at the target's address: the one that was asked to take the session over is gone.
    pub(super) fn withdraw_refused<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        then: Then,
        pending: Pending,
        reason: Reason,
        now: Now,
    ) {
        if reason == Reason::StaleIncarnation {
            self.settled(router, then, &pending, now);
        } else {
            self.trace.chain.push(reason);
            self.wait_out(router, then, pending, now);
        }
    }

    /// MIG-2: the target does not answer.
    pub(super) fn wait_out<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        then: Then,
        mut pending: Pending,
        now: Now,
    ) {
        let wait = router.config.handover_wait;
        let record = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s));
        let held = record.and_then(|r| r.pending.as_mut());
        let lost = match held.filter(|p| p.placement == pending.placement) {
            Some(held) => *held.lost.get_or_insert(now),
            // The move itself is over: its end is known.
            None => return self.settled(router, then, &pending, now),
        };
        pending.lost = Some(lost);
        let until = lost + wait;
        if until > now {
            self.state = State::WaitingOut { then, pending };
            self.effects.push_back(Effect::Wait { until });
        } else {
            self.settled(router, then, &pending, now);
        }
    }

    /// Nobody will ever own the session under the pending number, or the hand-over deadline has passed since its target was
    /// last heard of. What is taken now lies above it.
    pub(super) fn settled<S: SessionStore>(&mut self, router: &mut Router<S>, then: Then, pending: &Pending, now: Now) {
        if let Some(record) = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s)) {
            record.settle(pending.placement);
        }
        self.taken = self.taken.filter(|t| t.n > pending.placement.n);
        let record = self.turn.session.as_ref().and_then(|s| router.sessions.peek(s));
        let arrived = record.is_some_and(|r| r.pin == Some(pending.target) && r.placement == Some(pending.placement));
        if arrived && router.view.worker(pending.target.worker).takes_turns() {
            // The move's own answer came first.
            self.give_up(router, then);
            self.probe_owner(router, pending.target, now);
        } else {
            self.go_on(router, then, now);
        }
    }

    fn go_on<S: SessionStore>(&mut self, router: &mut Router<S>, then: Then, now: Now) {
        match then {
            Then::Probe { worker, via } => self.probe(router, worker, via, now),
            Then::Grant(reseed) => self.reseed(router, reseed, now),
        }
    }

    /// What was held back is not done: a worker that was to be asked was not, a grant is given back.
    pub(super) fn give_up<S: SessionStore>(&mut self, router: &mut Router<S>, then: Then) {
        match then {
            Then::Probe { worker, .. } => self.tried.retain(|w| *w != worker),
            Then::Grant(reseed) => self.drop_run(router, reseed.run),
        }
    }

    /// MIG-1: the worker has handed the session over.
    pub(super) fn follow<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        worker: WorkerIndex,
        via: Option<Via>,
        facts: Facts,
        now: Now,
    ) {
        let Some(moved) = facts.moved.filter(|_| !self.redirected.contains(&worker)) else {
            self.next(router, now);
            return;
        };
        self.redirected.push(worker);
        self.taken = None;
        let to = router.view.process(moved.to.incarnation).filter(|to| *to != worker);
        let to = to
            .filter(|&to| router.view.worker(to).answers())
            .map(|to| router.view.at(to));
        let record = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s));
        let Some(record) = record else {
            return self.next(router, now);
        };
        match to {
            Some(at) => record.lives_at(at, moved.placement, facts.tokens.max(1)),
            None => {
                record.placement = higher(record.placement, Some(moved.placement));
                record.pin = None;
                if let Some(pending) = record.pending.filter(|p| p.placement.n <= moved.placement.n) {
                    record.settle(pending.placement);
                }
            }
        }
        let owner = record.pin;
        match owner.filter(|at| at.worker != worker && router.view.worker(at.worker).takes_turns()) {
            Some(at) => {
                self.sent_by = Some(worker);
                self.probe_owner(router, at, now);
            }
            // MIG-2: its copy serves as replica under a new placement.
            None => self.probe(router, worker, via, now),
        }
    }

    /// SES-4: the worker knows a later placement than ours, or has promised not to go on under ours; what is taken next lies
    /// above. If it was thought to own the session and lost it to a later placement, whoever owns it is asked for.
    pub(super) fn outdated<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        worker: WorkerIndex,
        via: Option<Via>,
        epoch: Option<Epoch>,
        now: Now,
    ) {
        self.taken = None;
        let at = router.view.at(worker);
        let heard: Option<Placement> = epoch.map(|e| e.placement);
        let (mut was_owner, mut later) = (false, false);
        if let Some(record) = self.turn.session.as_ref().and_then(|s| router.sessions.record_mut(s)) {
            was_owner = record.pin == Some(at);
            later = heard.is_some_and(|h| record.placement.is_none_or(|ours| ours.n < h.n));
            if was_owner || heard.is_some_and(|h| record.placement.is_none_or(|ours| ours.n <= h.n)) {
                record.pin = None;
            }
            record.placement = higher(record.placement, heard);
        }
        if let Some(from) = self.sent_by.take().filter(|_| was_owner) {
            // MIG-2: it says that it is no owner; who sent us here keeps a copy.
            self.corrected.push(worker);
            self.probe(router, from, None, now);
        } else if was_owner && later && self.ask(router) {
            self.tried.retain(|w| *w != worker);
        } else {
            self.corrected.push(worker);
            self.probe(router, worker, via, now);
        }
    }

    fn probe_owner<S: SessionStore>(&mut self, router: &mut Router<S>, at: At, now: Now) {
        debug_assert_ne!(router.view.worker(at.worker).health(), Health::Unknown);
        if !self.tried.contains(&at.worker) {
            self.tried.push(at.worker);
        }
        router.view.assign(at.worker);
        self.probe(router, at.worker, None, now);
    }
}
