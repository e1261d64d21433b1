//! Engine side: a turn reaches the scheduler. It takes its grant over, or is admitted afresh (ADM-10, ADM-14).

use crate::{
    admission::{Charge, Reservation, decide},
    id::{ReservationId, TurnId},
    mutation::off,
    session::{Copy, Hold, Key, Phase, SessionState, Turn, TurnPrompt, history},
    time::Now,
    wire::{
        admit::Mode,
        reason::{Reason, Refusal},
    },
};

use super::{Arrival, Effect, Frees, Prompt, Timer, Worker};

impl Worker {
    /// A session's turn has reached the scheduler. Under its grant it takes the charge over; without one it is admitted
    /// afresh (ADM-10). Its tokens are here now, so the charge becomes exact (ADM-14): a routed turn that then does not
    /// fit is refused and the session is idle again. A client without a router, and a prefill-only turn, are never
    /// refused for size: the engine queues them as it always does.
    pub fn arrive(&mut self, arrival: Arrival, now: Now) -> Result<TurnId, Refusal> {
        if let Some((router, request)) = arrival.origin {
            self.reservations.seen(router, request);
        }
        let found = self.sessions.find(&arrival.session);
        let prefill_only = arrival.max_new == 0;
        if let Some(key) = found {
            self.speaks_for(key, arrival.placement, prefill_only)?;
        }
        let granted = self.take_over(found, &arrival)?;
        if self.draining && granted.is_none() && arrival.placement.is_some() && !prefill_only {
            return Err(self.refusal(Reason::Draining, "this worker takes no new turns"));
        }
        let (common, len) = self.common_prefix(found, &arrival)?;
        let growth = arrival.max_new.min(self.config.clip);
        let need = decide::need(&self.config, len, len - common, growth);
        // What a running import has landed goes when the turn takes over.
        let importing = found.is_some_and(|k| matches!(self.sessions[k].state, SessionState::Importing(..)));
        let landed = match granted.and_then(|id| self.reservations.get(id)) {
            Some(r) if !importing => r.charge.landed,
            _ => 0,
        };
        let charge = Charge {
            reserved: need.saturating_add(landed),
            landed,
            running: 0,
        };
        self.check_fit(found, granted, charge, common, &arrival, now)?;

        let key = self.sessions.find_or_insert(&arrival.session, now);
        self.give_way(key, now);
        self.release_copy_for_turn(key, now);
        let id = TurnId(self.next_turn);
        self.next_turn += 1;
        let reservation = self.charge_turn(key, granted, charge, growth, id);
        let prompt = match arrival.prompt {
            Prompt::Full(tokens) => TurnPrompt::Full(tokens),
            Prompt::Append { after, tokens } => TurnPrompt::Append { after, tokens },
        };
        let identity = arrival.identity;
        let phase = Phase::Waiting;
        self.turns.insert(
            id,
            Turn {
                id,
                session: key,
                identity,
                prompt,
                len,
                common,
                claims: 0,
                growth,
                reservation,
                phase,
            },
        );
        self.touch(key, now);
        let session = &mut self.sessions[key];
        session.state = SessionState::Waiting(id);
        session.arrived = arrival.placement.or(session.arrived);
        if prefill_only {
            self.keep_for(key, arrival.placement);
        } else {
            self.own(key, arrival.placement);
        }
        self.refresh(key);
        self.counters.turns += 1;
        self.effects.push_back(Effect::Arrived {
            session: arrival.session,
        });
        Ok(id)
    }

    /// The grant an arrival runs under: the one it names, or the one its request got.
    fn take_over(&mut self, found: Option<Key>, arrival: &Arrival) -> Result<Option<ReservationId>, Refusal> {
        let Some(key) = found else { return Ok(None) };
        let busy = match self.sessions[key].state {
            _ if off!(Busy) => return Ok(None),
            SessionState::Idle | SessionState::Syncing(_) => return Ok(None),
            SessionState::Admitted(id) | SessionState::Importing(_, id) => {
                let key = self.reservations.get(id).and_then(|r| r.key);
                let same = key.is_some_and(|k| arrival.origin == Some((k.router, k.request)));
                if arrival.reservation == Some(id) || same {
                    return Ok(Some(id));
                }
                "admitted to"
            }
            SessionState::Waiting(_) => "waiting with",
            SessionState::Running(_) => "running",
        };
        Err(self.refusal(
            Reason::SessionBusy,
            format!("session {} is {busy} another request", arrival.session),
        ))
    }

    /// Tokens the prompt can use of the session's copy, and the prompt's length.
    fn common_prefix(&mut self, found: Option<Key>, arrival: &Arrival) -> Result<(u32, u32), Refusal> {
        let copy = found.and_then(|k| {
            let session = &self.sessions[k];
            session
                .copy
                .as_ref()
                .filter(|c| !session.doomed && (c.identity == arrival.identity || off!(Identity)))
        });
        let (common, len) = match &arrival.prompt {
            Prompt::Full(tokens) => (
                copy.map_or(0, |c| history::common_prefix(&c.tokens, tokens)),
                tokens.len(),
            ),
            Prompt::Append { after, tokens } => {
                let held = copy.map_or(0, Copy::len);
                if *after != held {
                    let message = format!("append after {after} tokens, the session holds {held}");
                    return Err(self.refusal(Reason::BadRequest, message));
                }
                (held, (held as usize).saturating_add(tokens.len()))
            }
        };
        let common = copy.map_or(0, |c| c.usable(common));
        Ok((common, u32::try_from(len).unwrap_or(u32::MAX)))
    }

    /// ADM-14 and ADM-10: a routed turn must fit.
    fn check_fit(
        &mut self,
        found: Option<Key>,
        granted: Option<ReservationId>,
        charge: Charge,
        common: u32,
        arrival: &Arrival,
        now: Now,
    ) -> Result<(), Refusal> {
        let before = granted.and_then(|id| self.reservations.get(id)).map(|r| r.charge);
        if before.is_some_and(|b| b.reserved != charge.reserved) {
            self.counters.estimates_wrong += 1;
        }
        let routed = arrival.reservation.is_some() || arrival.placement.is_some();
        let old = before.map_or(0, Charge::outstanding);
        let unreclaimed = found.map_or(0, |k| self.sessions[k].marks.reclaimable);
        let used = self.ledger.used_with(unreclaimed, charge.outstanding()) - old;
        let grows = before.is_none() || charge.outstanding() > old;
        if !routed || arrival.max_new == 0 || !grows || used <= self.ledger.limit() {
            return Ok(());
        }
        let reason = match common {
            _ if u64::from(charge.reserved) > self.ledger.limit() => Reason::TooLarge,
            0 => Reason::SessionNotResidentNoCapacity,
            _ => Reason::NoDCapacity,
        };
        if let Some(id) = granted {
            self.give_up(id, reason, now);
        }
        let (used, limit) = (self.ledger.used(), self.ledger.limit());
        let message = format!("needs {} tokens, {used} of {limit} are used", charge.outstanding());
        Err(self.refusal(reason, message))
    }

    /// An arrived turn ends what an import still does for it, and never uses a copy that was closed before it.
    fn release_copy_for_turn(&mut self, key: Key, now: Now) {
        if let SessionState::Importing(import, _) = self.sessions[key].state {
            self.drop_import(import, Refusal::new(Reason::Cancelled, "the turn has arrived"), now);
        }
        if let Some(copy) = &mut self.sessions[key].copy
            && copy.hold == Hold::Landing
        {
            copy.hold = Hold::Free;
        }
        if std::mem::take(&mut self.sessions[key].doomed) {
            let mut frees = Frees::default();
            self.drop_copy(key, &mut frees);
            self.forgotten.append(&mut frees.prefixes);
            for slot in frees.slots {
                self.quarantine.retire(slot, Vec::new());
            }
        }
    }

    fn charge_turn(
        &mut self,
        session: Key,
        granted: Option<ReservationId>,
        charge: Charge,
        growth: u32,
        turn: TurnId,
    ) -> ReservationId {
        match granted.and_then(|id| Some((id, self.reservations.get_mut(id)?))) {
            Some((id, reservation)) => {
                self.ledger.change(&mut reservation.charge, charge);
                reservation.growth = growth;
                reservation.turn = Some(turn);
                if let Some(deadline) = reservation.deadline.take() {
                    self.timers.remove(&(deadline, Timer::Reservation(id)));
                }
                id
            }
            None => {
                self.counters.afresh += 1;
                self.ledger.open(charge);
                let mode = Mode::Direct;
                let (key, deadline, turn) = (None, None, Some(turn));
                self.reservations.insert(Reservation {
                    session,
                    key,
                    mode,
                    growth,
                    charge,
                    deadline,
                    turn,
                })
            }
        }
    }
}
