//! Service side: admission (ADM-1..12, 14) and release. Every answer is O(log sessions) and looks at one session.

use crate::{
    admission::{Charge, Question, Reservation, Verdict, decide},
    id::{ReservationId, SessionId},
    mutation::off,
    session::{Key, SessionState},
    time::Now,
    wire::{
        admit::{AdmitAnswer, AdmitRequest, ReleaseAnswer, ReleaseRequest, ReleasedKv, Via},
        reason::{Reason, Refusal},
    },
};

use super::{Effect, Timer, Worker};

impl Worker {
    /// May this turn run here? The answer waits for nothing (ADM-11). A grant is idempotent by its request key; a
    /// refusal changes nothing and is not remembered (ADM-10).
    pub fn admit(&mut self, request: &AdmitRequest, now: Now) -> AdmitAnswer {
        let fine = request.input_tokens > 0 && request.append_tokens <= request.input_tokens;
        let found = self.sessions.find(&request.session_id);
        let verdict = if fine {
            self.grant(request, found, now)
        } else {
            Err(Reason::BadRequest)
        };
        let (granted, reason) = match verdict {
            Ok(id) => (self.reservations.get(id).map(|r| (id, r)), None),
            Err(reason) => {
                self.counters.refused(reason);
                (None, Some(reason))
            }
        };
        let key = granted.map(|(_, r)| r.session).or(found);
        let session = key.and_then(|k| self.sessions.get(k));
        let deadline_ms = granted.map(|(_, r)| {
            let left = r.deadline.map_or(self.config.reservation, |d| d.since(now));
            u32::try_from(left.as_millis()).unwrap_or(u32::MAX)
        });
        AdmitAnswer {
            can_admit: granted.is_some(),
            mode: granted.map(|(_, r)| r.mode),
            reason,
            reservation: granted.map(|(id, _)| id),
            deadline_ms,
            resident_tokens: session.map_or(0, |s| s.resident()),
            epoch: session.and_then(|s| s.epoch()),
            moved: session
                .filter(|_| reason == Some(Reason::Moved))
                .and_then(|s| s.moved()),
            incarnation: self.incarnation,
            load: self.load(Some(request.key.router)),
        }
    }

    /// The client went away, or the session is no longer wanted. The request stays over: an admit that arrives later is
    /// refused `released` (ADM-10).
    pub fn release(&mut self, session: &SessionId, request: &ReleaseRequest, now: Now) -> ReleaseAnswer {
        let key = self.sessions.find(session);
        let held = key.and_then(|k| match self.sessions[k].state {
            SessionState::Admitted(id) | SessionState::Importing(_, id) => Some(id),
            SessionState::Idle | SessionState::Waiting(_) | SessionState::Running(_) | SessionState::Syncing(_) => None,
        });
        let asked = match request.request {
            Some(asked) => {
                let id = self.reservations.of_request(&asked);
                self.reservations.bury(asked);
                held.filter(|h| id == Some(*h))
            }
            None => held,
        };
        let released = asked.is_some_and(|id| self.reservations.get(id).is_some());
        if let Some(id) = asked {
            self.give_up(id, Reason::Cancelled, now);
        }
        if let (Some(k), Some(placed)) = (key, request.placed)
            && self
                .sessions
                .get(k)
                .is_some_and(|s| s.placement.is_none_or(|held| held.n < placed.n))
        {
            self.supersede(k, placed, now);
        }
        let kv = match key {
            Some(k) if request.drop_kv && self.sessions.get(k).is_some() => {
                if self.close(session, now) {
                    ReleasedKv::Deferred
                } else {
                    ReleasedKv::Dropped
                }
            }
            Some(_) if request.drop_kv => ReleasedKv::Dropped,
            _ => ReleasedKv::Kept,
        };
        ReleaseAnswer { released, kv }
    }

    /// Ends a grant whose turn has not arrived: its import is over, the session idle and uncharged.
    pub(super) fn give_up(&mut self, id: ReservationId, why: Reason, now: Now) {
        let Some(key) = self.reservations.get(id).map(|r| r.session) else {
            return;
        };
        if let Some(SessionState::Importing(import, _)) = self.sessions.get(key).map(|s| s.state) {
            self.drop_import(import, Refusal::new(why, "the reservation is over"), now);
        }
        self.end_reservation(id);
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        if session.state == SessionState::Admitted(id) {
            session.state = SessionState::Idle;
            self.effects.push_back(Effect::Arrived {
                session: session.id.clone(),
            });
        }
        self.refresh(key);
    }

    fn grant(&mut self, request: &AdmitRequest, found: Option<Key>, now: Now) -> Result<ReservationId, Reason> {
        if request.incarnation.is_some_and(|i| i != self.incarnation) && !off!(StaleIncarnation) {
            return Err(Reason::StaleIncarnation);
        }
        self.reservations.seen(request.key.router, request.key.request);
        if let Some(id) = self.reservations.of_request(&request.key) {
            let same = self.reservations.get(id).is_some_and(|r| Some(r.session) == found);
            return if same { Ok(id) } else { Err(Reason::BadRequest) };
        }
        if self.reservations.is_over(&request.key) {
            return Err(Reason::Released);
        }
        if let Some(key) = found {
            self.speaks(key, request.placement)?;
            if self.sessions[key].is_idle() && self.sessions[key].yields.is_some_and(|until| now < until) {
                return Err(Reason::SessionBusy);
            }
        }
        let superseded = self.superseded(found, request)?;
        // ADM-8 before ADM-12: a turn that runs here ends here, it is not placed elsewhere meanwhile.
        if self.draining {
            return Err(Reason::Draining);
        }
        let growth = request.max_new_tokens.unwrap_or(self.config.clip).min(self.config.clip);
        let session = found.map(|k| &self.sessions[k]);
        let resident = session.map(|s| s.resident()).filter(|n| *n > 0);
        let question = Question {
            resident,
            unreclaimed: session.map_or(0, |s| s.marks.reclaimable),
            input: request.input_tokens,
            append: request.append_tokens,
            growth,
            first: request.turn == 0,
            via_prefill: request.via == Some(Via::Prefill),
        };
        // A lost answer's grant goes whether or not the new probe is granted: its router has given it up.
        if let Some(id) = superseded {
            self.give_up(id, Reason::Cancelled, now);
        }
        let question = Question {
            unreclaimed: found
                .and_then(|k| self.sessions.get(k))
                .map_or(0, |s| s.marks.reclaimable),
            ..question
        };
        let verdict = decide(question, &self.ledger, &self.config)?;
        let session = match found.filter(|k| self.sessions.get(*k).is_some()) {
            Some(key) => key,
            None => self.sessions.find_or_insert(&request.session_id, now),
        };
        Ok(self.reserve(request, session, verdict, growth, now))
    }

    fn reserve(
        &mut self,
        request: &AdmitRequest,
        session: Key,
        verdict: Verdict,
        growth: u32,
        now: Now,
    ) -> ReservationId {
        let Verdict { mode, need } = verdict;
        let charge = Charge {
            reserved: need,
            ..Charge::default()
        };
        self.ledger.open(charge);
        let deadline = now + self.config.reservation;
        let id = self.reservations.insert(Reservation {
            session,
            key: Some(request.key),
            mode,
            growth,
            charge,
            deadline: Some(deadline),
            turn: None,
        });
        self.timers.insert((deadline, Timer::Reservation(id)));
        self.give_way(session, now);
        self.touch(session, now);
        self.own(session, request.placement);
        let record = &mut self.sessions[session];
        record.state = SessionState::Admitted(id);
        record.backup = request.backup.clone().or(record.backup.take());
        self.refresh(session);
        self.counters.admitted(mode);
        id
    }

    /// ADM-8: one turn at a time. A later attempt of the same request takes the place of an earlier one whose answer
    /// the router has not seen.
    fn superseded(&self, found: Option<Key>, request: &AdmitRequest) -> Result<Option<ReservationId>, Reason> {
        let Some(key) = found else { return Ok(None) };
        match self.sessions[key].state {
            SessionState::Idle | SessionState::Syncing(_) => Ok(None),
            SessionState::Waiting(_) | SessionState::Running(_) => Err(Reason::SessionBusy),
            SessionState::Admitted(id) | SessionState::Importing(_, id) => {
                let earlier = self.reservations.get(id).and_then(|r| r.key).is_some_and(|k| {
                    k.router == request.key.router
                        && k.request == request.key.request
                        && k.attempt < request.key.attempt
                });
                if earlier {
                    Ok(Some(id))
                } else {
                    Err(Reason::SessionBusy)
                }
            }
        }
    }
}
