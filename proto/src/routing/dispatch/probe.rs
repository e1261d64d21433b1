//! Which worker is asked, and what its answer means (DISP-1, DISP-4, DISP-6, SES-4).

use super::{Dispatch, Effect, ExecutionMode, Grant, Reseed, Run, State, Then};
use crate::{
    id::{Epoch, Placement},
    routing::{
        Router,
        reject::{Meaning, meaning},
        resident::{Resident, higher},
        session::{Record, SessionStore},
        view::{At, WorkerIndex},
    },
    time::Now,
    wire::{
        admit::{AdmitAnswer, AdmitRequest, Mode, MovedTo, Via},
        info::Standing,
        reason::Reason,
    },
};

/// What a refusal tells besides its reason.
#[derive(Debug, Default)]
pub(super) struct Facts {
    pub(super) epoch: Option<Epoch>,
    pub(super) moved: Option<MovedTo>,
    /// Tokens that the worker holds or, by the router's estimate, held.
    pub(super) tokens: u32,
}

impl Dispatch {
    /// The next probe, or what is left when there is none.
    pub(super) fn next<S: SessionStore>(&mut self, router: &mut Router<S>, now: Now) {
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
                prefilled: None,
                backup: None,
                source: None,
                owners: Vec::new(),
            };
            self.tried.push(worker);
            self.run(router, run, now);
            return;
        }
        self.tried.push(worker);
        self.probe(router, worker, None, now);
    }

    pub(super) fn probe<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        worker: WorkerIndex,
        via: Option<Via>,
        now: Now,
    ) {
        let Some(session) = self.turn.session.clone() else {
            return;
        };
        let record = router.sessions.peek(&session);
        let resident = record.map_or(0, |r| r.resident(router.view.at(worker)));
        let held = record.and_then(|r| r.placement);
        // Whoever else holds the session holds it under an older number: a turn there is a move (MIG-3).
        let holder = record.is_some_and(|r| r.pin == Some(router.view.at(worker)));
        let direct = resident > 0 && via.is_none() && held.is_some() && holder;
        if !direct && self.needs_target_first(router) {
            self.ask_target(router, Then::Probe { worker, via }, now);
            return;
        }
        let record = router.sessions.peek(&session);
        // SES-4: a seed or reseed takes a number before its import. One that was refused is used for the next probe.
        let above = record.and_then(Record::above);
        let sent = match direct {
            true => held,
            false => Some(*self.taken.get_or_insert_with(|| router.store.take(&session, above))),
        };
        let replica = record.and_then(|r| r.replica);
        let backup = Some(()).filter(|()| router.config.sync);
        let backup = backup.and_then(|()| router.view.backup(replica, worker));
        self.attempt += 1;
        self.trace.probes += 1;
        self.trace.source = None;
        let request = AdmitRequest {
            turn: record.map_or(0, |r| r.turns),
            input_tokens: self.turn.input_tokens,
            append_tokens: self.turn.input_tokens.saturating_sub(resident),
            max_new_tokens: self.turn.max_new_tokens,
            estimated: self.turn.estimated,
            via,
            placement: sent,
            incarnation: router.view.worker(worker).incarnation(),
            backup: backup.and_then(|p| router.view.worker(p).as_peer()),
            key: self.key(),
            session_id: session,
        };
        self.placing(router, !direct);
        self.state = State::Probing {
            worker,
            via,
            sent,
            backup: backup.map(|p| router.view.at(p)),
        };
        self.effects.push_back(Effect::Probe {
            worker,
            request: Box::new(request),
        });
    }

    pub(super) fn answered<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        (worker, via, sent, backup): (WorkerIndex, Option<Via>, Option<Placement>, Option<At>),
        answer: AdmitAnswer,
        now: Now,
    ) {
        router.view.incarnation_is(worker, answer.incarnation);
        router.view.load_is(worker, answer.load);
        let believed = self.cut(router, worker, answer.resident_tokens);
        let mode = answer.mode.filter(|_| answer.can_admit);
        let Some(mode) = mode else {
            let facts = Facts {
                epoch: answer.epoch,
                moved: answer.moved,
                tokens: believed.max(answer.resident_tokens),
            };
            self.refused(
                router,
                worker,
                via,
                answer.reason.unwrap_or(Reason::Internal),
                facts,
                now,
            );
            return;
        };
        let run = Run {
            worker,
            ticket: router.view.enter(worker),
            mode: mode.into(),
            grant: Some(Grant {
                reservation: answer.reservation,
                key: self.key(),
            }),
            placement: answer.epoch.map(|e| e.placement).or(sent),
            prefilled: None,
            backup,
            source: None,
            owners: Vec::new(),
        };
        match mode {
            Mode::Direct => {
                // A granted number is never offered to another worker.
                self.taken = self.taken.take().filter(|taken| Some(*taken) != sent);
                self.offered(router, run.placement);
                self.run(router, run, now);
            }
            Mode::Seed | Mode::Reseed => {
                // The grant is under the number that was asked with (DISP-6).
                let placement = higher(answer.epoch.map(|e| e.placement), sent);
                let rewind = answer
                    .epoch
                    .filter(|e| Some(e.placement) == placement)
                    .map_or(0, |e| e.rewind);
                let own = Resident {
                    worker,
                    tokens: answer.resident_tokens,
                    epoch: placement.map(|placement| Epoch { placement, rewind }),
                    standing: Standing::Owner,
                    moved: None,
                };
                self.reseed(router, Box::new(Reseed::new(run, sent, own)), now);
            }
        }
    }

    /// DISP-4, DISP-6.
    pub(super) fn refused<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        worker: WorkerIndex,
        via: Option<Via>,
        reason: Reason,
        facts: Facts,
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
                self.probe(router, worker, Some(Via::Prefill), now);
            }
            Meaning::Moved => self.follow(router, worker, via, facts, now),
            Meaning::Outdated if first_correction => self.outdated(router, worker, via, facts.epoch, now),
            Meaning::Restarted if first_correction => {
                self.corrected.push(worker);
                self.probe(router, worker, via, now);
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

    pub(super) fn turn_refused<S: SessionStore>(&mut self, router: &mut Router<S>, run: Run, reason: Reason, now: Now) {
        router.view.leave(run.ticket);
        if run.mode == ExecutionMode::Fallback && meaning(reason) == Meaning::Busy {
            // ADM-8: a body that names the session is its turn, tagged or not.
            if self.trace.chain.last() != Some(&reason) {
                self.trace.chain.push(reason);
            }
            self.wait(router, State::Resting, now);
        } else if run.mode == ExecutionMode::Fallback {
            self.trace.chain.push(reason);
            self.failed.push(run.worker);
            self.after_failure(router, reason, now);
        } else {
            // What was asked via prefill is asked so again: else its size would drive it away without a counted reject (INV-3).
            let via = self.via_prefill.contains(&run.worker).then_some(Via::Prefill);
            let unexplained = matches!(meaning(reason), Meaning::Moved | Meaning::Outdated);
            if unexplained && !self.asked_why.contains(&run.worker) {
                // The engine's refusal says neither where the session went nor what is held: the question does.
                self.asked_why.push(run.worker);
                self.trace.chain.push(reason);
                self.only_too_large = false;
                self.probe(router, run.worker, via, now);
                return;
            }
            self.refused(router, run.worker, via, reason, Facts::default(), now);
        }
    }

    pub(super) fn unreachable<S: SessionStore>(&mut self, router: &mut Router<S>, worker: WorkerIndex, now: Now) {
        router.view.lost(worker);
        self.trace.chain.push(Reason::PeerUnreachable);
        self.only_too_large = false;
        // It may have granted before the answer was lost, and the number with it.
        let taken = self.taken.take();
        self.offered(router, taken);
        self.release_at(worker, self.key());
        self.next(router, now);
    }
}
