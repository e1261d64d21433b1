//! One session goes to another worker while it lives (MIG-1, MIG-2). Driven by the front: for the operator's
//! `POST /v1/sessions/{id}/move`, and for every session of a worker that drains (MIG-4).
//!
//! A move takes the next placement number for its target and asks it to import from the owner. The owner's one answer to
//! the target decides; a client's turns go on at the owner meanwhile. An import that is refused, or whose answer is lost,
//! leaves the question open: then the target is asked (`withdraw`), and what it says is for good. Until then the number
//! stands in the session's record as pending, and every [`super::Dispatch`] minds it.

mod api;

use std::collections::VecDeque;

use super::{
    Router,
    resident::{Resident, higher},
    session::{Pending, Record, SessionStore},
    view::{At, WorkerIndex},
};
use crate::{
    id::{Placement, SessionId},
    time::Now,
    wire::{
        admit::{ImportRequest, Source, WithdrawAnswer, WithdrawRequest},
        info::Role,
        reason::Reason,
    },
};

pub use api::*;

/// One move of one session to one target.
#[derive(Debug)]
pub struct Move {
    session: SessionId,
    source: At,
    pending: Pending,
    state: State,
    /// The last question was asked after the wait.
    last: bool,
    effects: VecDeque<MoveEffect>,
    arbitrations: u32,
    outcome: Option<MoveOutcome>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The target prepares, or has the session.
    Importing,
    /// It is asked what became of it.
    Asking {
        why: Reason,
    },
    /// It did not answer, and is waited out.
    WaitingOut {
        why: Reason,
    },
    Ended,
}

impl Move {
    /// Begins to move a session to `target`. `found` is what workers have just said of it; its owner is among them, or
    /// there is nothing to move.
    pub fn start<S: SessionStore>(
        router: &mut Router<S>,
        session: SessionId,
        found: &[Resident],
        target: WorkerIndex,
        now: Now,
    ) -> Result<Move, CannotMove> {
        let worker = router.view.worker(target);
        if worker.role() == Role::Prefill {
            return Err(CannotMove::TakesNoTurns);
        }
        let owner = owner(found)?;
        Move::from(router, session, owner, owner.highest(), target, now)
    }

    /// The same, away from a worker whose word is that it owns the session; what is taken lies above `heard`.
    pub fn from<S: SessionStore>(
        router: &mut Router<S>,
        session: SessionId,
        owner: Resident,
        heard: Option<Placement>,
        target: WorkerIndex,
        now: Now,
    ) -> Result<Move, CannotMove> {
        if owner.worker == target {
            return Err(CannotMove::ToItself);
        }
        let worker = router.view.worker(target);
        let incarnation = worker.incarnation().filter(|_| worker.takes_turns());
        let incarnation = incarnation.ok_or(CannotMove::Target(worker.health()))?;
        let peer = router
            .view
            .worker(owner.worker)
            .as_peer()
            .ok_or(CannotMove::SourceUnknown)?;
        let record = router.sessions.peek(&session);
        if record.is_some_and(|r| r.placing) {
            return Err(CannotMove::Placing);
        }
        let owned = owner.epoch.map(|e| e.placement);
        // Lost to somebody who is gone, its copy may be the last one: it is moved, under a number above.
        if let Some(known) = record.and_then(|r| r.left(owner.worker, owned, &router.view)) {
            return Err(CannotMove::Superseded { known });
        }
        if record.is_some_and(|r| r.pending.is_some()) || !router.sessions.begin_move(&session) {
            return Err(CannotMove::Running);
        }
        let above = higher(
            router.sessions.peek(&session).and_then(Record::above),
            higher(owned, heard),
        );
        let placement = router.store.take(&session, above);
        let source = router.view.at(owner.worker);
        let pending = Pending {
            target: router.view.at(target),
            incarnation,
            placement,
            since: now,
            lost: None,
        };
        if let Some(record) = router.sessions.record_mut(&session) {
            record.turns = record.turns.max(1);
            if let Some(owned) = owned {
                record.lives_at(source, owned, owner.tokens);
            }
            record.was_offered(placement);
            record.pending = Some(pending);
        }
        router.view.assign(target);
        let request = ImportRequest {
            reservation: None,
            placement,
            source: Source::Owner,
            peer: peer.peer,
            incarnation: peer.incarnation,
            deadline_ms: router.config.import_deadline_ms(),
        };
        Ok(Move {
            effects: VecDeque::from([MoveEffect::Import {
                worker: target,
                session: session.clone(),
                request: Box::new(request),
            }]),
            session,
            source,
            pending,
            state: State::Importing,
            last: false,
            arbitrations: 0,
            outcome: None,
        })
    }

    /// What to do next; none while an event is awaited, or when it is over.
    pub fn poll_effect(&mut self) -> Option<MoveEffect> {
        self.effects.pop_front()
    }

    /// How it ended, once it has.
    pub fn outcome(&self) -> Option<MoveOutcome> {
        self.outcome
    }

    /// Whose session.
    pub fn session(&self) -> &SessionId {
        &self.session
    }

    /// Who owned it when the move began.
    pub fn source(&self) -> WorkerIndex {
        self.source.worker
    }

    /// Who is to own it.
    pub fn target(&self) -> WorkerIndex {
        self.pending.target.worker
    }

    /// The number it is to own it under.
    pub fn placement(&self) -> Placement {
        self.pending.placement
    }

    /// How often the target was asked what became of it (MIG-2).
    pub fn arbitrations(&self) -> u32 {
        self.arbitrations
    }

    /// Something came of an effect.
    pub fn handle<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        event: MoveEvent,
        now: Now,
    ) -> Result<(), MoveOutOfTurn> {
        match (self.state, event) {
            (State::Importing, MoveEvent::Moved(import)) => self.end(
                router,
                MoveOutcome::Moved {
                    placement: self.pending.placement,
                    import: Some(import),
                },
            ),
            (State::Importing, MoveEvent::Refused(why)) => self.ask(why),
            (State::Importing, MoveEvent::Unreachable) => {
                self.lost(router, now);
                self.ask(Reason::PeerUnreachable);
            }
            (State::Asking { .. }, MoveEvent::Withdrawn(WithdrawAnswer::Owner { epoch })) => self.end(
                router,
                MoveOutcome::Moved {
                    placement: epoch.placement,
                    import: None,
                },
            ),
            (State::Asking { why }, MoveEvent::Withdrawn(WithdrawAnswer::Withdrawn)) => {
                self.end(router, MoveOutcome::Stayed(why));
            }
            // The process that was asked to take it over is gone.
            (State::Asking { why }, MoveEvent::WithdrawRefused(Reason::StaleIncarnation)) => {
                self.end(router, MoveOutcome::Stayed(why));
            }
            (State::Asking { why }, MoveEvent::WithdrawRefused(_) | MoveEvent::Unreachable) => {
                let until = self.lost(router, now) + router.config.handover_wait;
                if self.last {
                    self.end(router, MoveOutcome::Unknown(why));
                } else {
                    self.state = State::WaitingOut { why };
                    self.effects.push_back(MoveEffect::Wait { until: until.max(now) });
                }
            }
            (state, event) => {
                return Err(MoveOutOfTurn {
                    event,
                    state: state.name(),
                });
            }
        }
        Ok(())
    }

    /// The wait of a [`MoveEffect::Wait`] is over: the target is asked once more.
    pub fn handle_timeout(&mut self) {
        if let State::WaitingOut { why } = self.state {
            self.last = true;
            self.ask(why);
        }
    }

    /// Nobody carries the move out any more. Its number stays pending; a later dispatch asks the target.
    pub fn abandon<S: SessionStore>(&mut self, router: &mut Router<S>, now: Now) {
        if self.state != State::Ended {
            self.lost(router, now);
            self.effects.clear();
            self.state = State::Ended;
            self.outcome = Some(MoveOutcome::Unknown(Reason::Cancelled));
            router.sessions.end_move(&self.session);
        }
    }

    fn ask(&mut self, why: Reason) {
        self.arbitrations += 1;
        self.state = State::Asking { why };
        self.effects.push_back(MoveEffect::Withdraw {
            worker: self.pending.target.worker,
            session: self.session.clone(),
            request: WithdrawRequest {
                placement: self.pending.placement,
                incarnation: self.pending.incarnation,
            },
        });
    }

    /// When the target was last heard of, at the latest.
    fn lost<S: SessionStore>(&mut self, router: &mut Router<S>, now: Now) -> Now {
        let lost = *self.pending.lost.get_or_insert(now);
        let record = router.sessions.record_mut(&self.session);
        let pending = record.and_then(|r| r.pending.as_mut());
        if let Some(pending) = pending.filter(|p| p.placement == self.pending.placement) {
            pending.lost.get_or_insert(lost);
        }
        lost
    }

    fn end<S: SessionStore>(&mut self, router: &mut Router<S>, outcome: MoveOutcome) {
        if let Some(record) = router.sessions.record_mut(&self.session) {
            record.settle(self.pending.placement);
            if let MoveOutcome::Moved { placement, import } = outcome {
                let believed = record.resident(self.source).max(1);
                let tokens = import.map_or(believed, |i| i.resident_tokens);
                record.lives_at(self.pending.target, placement, tokens);
            }
        }
        self.state = State::Ended;
        self.outcome = Some(outcome);
        router.sessions.end_move(&self.session);
    }
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Importing => "importing",
            State::Asking { .. } => "asking",
            State::WaitingOut { .. } => "waiting out",
            State::Ended => "ended",
        }
    }
}

/// MIG-1: only the owner hands over.
fn owner(found: &[Resident]) -> Result<Resident, CannotMove> {
    if !found.iter().any(Resident::is_known) {
        return Err(CannotMove::UnknownSession);
    }
    match Resident::owner(found) {
        Some(owner) if owner.tokens > 0 => Ok(*owner),
        Some(_) => Err(CannotMove::NotResident),
        None => Err(CannotMove::NotOwned),
    }
}

#[cfg(test)]
mod explore;
#[cfg(test)]
mod naive;
#[cfg(test)]
mod tests;
