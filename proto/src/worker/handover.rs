//! Service side: a session changes its owner (MIG-1, MIG-2), and a worker is emptied (MIG-4). The source's answer is the
//! single decision point: before it the source owns the session, after it the target.

use std::time::Duration;

use crate::{
    id::{ImportId, SessionId},
    mutation::off,
    session::{Copy, SessionState, Standing},
    time::Now,
    transfer::{ImportPhase, Purpose},
    wire::{
        admit::{DrainAnswer, PeerRef, WithdrawAnswer, WithdrawRequest},
        reason::{Reason, Refusal},
    },
};

use super::{
    Effect, Handover, HandoverAnswer, ImportDone, Timer, Worker,
    change::{is_stale, stale_text},
};

/// Before a hand-over is asked for again.
const PAUSE: Duration = Duration::from_millis(10);

impl Worker {
    /// A target asks to own the session. Granted only if its copy is this one's, to the last token, and nobody uses the
    /// session; the same target gets the same answer again. Refused by who is no owner.
    pub fn handover(&mut self, asked: &Handover, to: PeerRef, now: Now) -> Result<HandoverAnswer, Refusal> {
        if asked.incarnation != self.incarnation && !off!(StaleIncarnation) {
            let message = format!("held {}, got {}", self.incarnation, asked.incarnation);
            return Err(self.refusal(Reason::StaleIncarnation, message));
        }
        let name = &asked.session;
        let Some(key) = self.sessions.find(name) else {
            return Err(self.refusal(Reason::UnknownSession, format!("session {name}")));
        };
        match &self.sessions[key].standing {
            Standing::Moved(already) if *already == to && self.sessions[key].placement == Some(asked.pending) => {
                return Ok(HandoverAnswer::Granted);
            }
            Standing::Moved(_) if !off!(MovedRefuses) => {
                return Err(self.refusal(Reason::Moved, format!("session {name} was handed over")));
            }
            Standing::Replica => return Err(self.refusal(Reason::NotOwner, format!("session {name}"))),
            Standing::Moved(_) | Standing::Owner => {}
        }
        let session = &mut self.sessions[key];
        if let Some(held) = session.placement
            && (is_stale(held, asked.pending) || held.n == asked.pending.n)
        {
            return Err(self.refusal(Reason::StaleEpoch, stale_text(held, asked.pending)));
        }
        if !session.is_idle() && !off!(HandoverIdle) {
            self.counters.handovers_busy += 1;
            return Ok(HandoverAnswer::Busy);
        }
        let epoch = session.epoch();
        let Some(copy) = session.copy.as_mut().filter(|_| !session.doomed) else {
            return Err(self.refusal(Reason::NotResident, format!("session {name} holds no KV here")));
        };
        let equal =
            epoch == Some(asked.epoch) && copy.len() == asked.committed && copy.digest(asked.committed) == asked.digest;
        if !equal && !off!(HandoverEqual) {
            session.yields = Some(now + self.config.handover_hold);
            self.counters.handovers_behind += 1;
            return Ok(HandoverAnswer::Behind);
        }
        session.standing = Standing::Moved(to);
        session.placement = Some(asked.pending);
        session.rewind = 0;
        session.backup = None;
        session.yields = None;
        self.counters.handed_over += 1;
        self.drained += 1;
        self.refresh(key);
        Ok(HandoverAnswer::Granted)
    }

    /// The owner's answer to [`Effect::AskHandover`], or why there is none. `asked` is when the question went out: an
    /// answer older than the hand-over deadline counts as lost, for a router may have placed the session elsewhere.
    pub fn handover_answered(&mut self, id: ImportId, asked: Now, answer: Result<HandoverAnswer, Refusal>, now: Now) {
        let Some(import) = self.imports.get(&id) else { return };
        let ImportPhase::HandingOver(_) = import.phase else {
            return;
        };
        match answer {
            Ok(HandoverAnswer::Granted) if now.since(asked) <= self.config.handover_deadline || off!(HandoverAge) => {
                self.take_ownership(id, now);
            }
            Ok(HandoverAnswer::Granted) => {
                self.counters.answers_too_old += 1;
                self.ask_handover(id);
            }
            Ok(HandoverAnswer::Behind) => self.open_lease(id, true),
            Ok(HandoverAnswer::Busy) => drop(self.timers.insert((now + PAUSE, Timer::Handover(id)))),
            // It may have been granted: only the owner's own word ends the question, or the import's deadline.
            Err(why) if matches!(why.code, Reason::PeerUnreachable | Reason::DeadlineExceeded) => {
                self.timers.insert((now + PAUSE, Timer::Handover(id)));
            }
            Err(why) => drop(self.drop_import(id, why, now)),
        }
    }

    /// MIG-2: what became of a move of which its router has heard nothing. Either answer is for good.
    pub fn withdraw(
        &mut self,
        session: &SessionId,
        request: &WithdrawRequest,
        now: Now,
    ) -> Result<WithdrawAnswer, Refusal> {
        if request.incarnation != self.incarnation && !off!(StaleIncarnation) {
            let message = format!("held {}, got {}", self.incarnation, request.incarnation);
            return Err(self.refusal(Reason::StaleIncarnation, message));
        }
        let key = self.sessions.find_or_insert(session, now);
        let record = &self.sessions[key];
        if record.is_owner()
            && record.placement == Some(request.placement)
            && let Some(epoch) = record.epoch()
        {
            return Ok(WithdrawAnswer::Owner { epoch });
        }
        self.counters.withdrawn += 1;
        let record = &mut self.sessions[key];
        if record.floor.is_none_or(|floor| floor.n < request.placement.n) {
            record.floor = Some(request.placement);
        }
        if let SessionState::Importing(import, _) = record.state
            && !off!(WithdrawnForGood)
            && self
                .imports
                .get(&import)
                .is_some_and(|i| matches!(i.purpose, Purpose::Move(_)) && i.placement.n <= request.placement.n)
        {
            let why = Refusal::new(Reason::Cancelled, "the router has withdrawn the move");
            self.drop_import(import, why, now);
        }
        self.refresh(key);
        Ok(WithdrawAnswer::Withdrawn)
    }

    /// How far the drain is: sessions placed by a router and still owned here, with KV (MIG-4). Proportional to the
    /// sessions.
    pub fn drain_state(&self) -> DrainAnswer {
        let owned = self
            .sessions
            .after(None)
            .filter(|s| s.is_owner() && s.placement.is_some() && s.copy.is_some() && !s.doomed)
            .count() as u64;
        let turns = self.turns.len() as u64;
        let transfers = (self.imports.len() + self.leases.len()) as u64;
        DrainAnswer {
            drained: owned + turns + transfers == 0,
            owned,
            turns,
            transfers,
            moved: self.drained,
        }
    }

    /// The copy is complete: may this worker own the session?
    pub(super) fn ask_handover(&mut self, id: ImportId) {
        let Some(import) = self.imports.get(&id) else { return };
        if let ImportPhase::HandingOver(request) = &import.phase {
            self.effects.push_back(Effect::AskHandover {
                import: id,
                peer: import.peer.clone(),
                request: (**request).clone(),
            });
        }
    }

    /// From here on the session is this worker's. Nobody can have extended its copy since the question went out; if the
    /// engine took it, the old owner's serves as the replica.
    fn take_ownership(&mut self, id: ImportId, now: Now) {
        let Some(import) = self.imports.remove(&id) else { return };
        self.timers.remove(&(import.deadline, Timer::Import(id)));
        let key = import.session;
        let session = &mut self.sessions[key];
        session.standing = Standing::Owner;
        session.placement = Some(import.placement);
        session.rewind = 0;
        let resident = session.copy.as_ref().map_or(0, Copy::len);
        self.unwish(key);
        self.counters.taken_over += 1;
        self.touch(key, now);
        self.import_over(key, id, import.purpose, now);
        let pulled = import.pulled_before;
        self.effects.push_back(Effect::ImportDone {
            import: id,
            outcome: Ok(ImportDone { resident, pulled }),
        });
        self.wake_for_wishes();
    }
}
