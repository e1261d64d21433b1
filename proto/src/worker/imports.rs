//! Service side: pulling a session in (XFER-1..4). The engine's part is in `poll`.

use std::{sync::Arc, time::Duration};

use crate::{
    admission::{Charge, decide},
    id::{ImportId, ReservationId, SessionId},
    session::{Key, SessionState},
    time::Now,
    transfer::{Import, ImportPhase, import::Offer},
    wire::{
        admit::{ImportRequest, Mode},
        reason::{Reason, Refusal},
    },
};

use super::{Dropped, Effect, Identity, Timer, Token, Worker, mutation::off};

impl Worker {
    /// Starts an import under a live seed or reseed grant.
    pub fn import(&mut self, session: &SessionId, request: &ImportRequest, now: Now) -> Result<ImportId, Refusal> {
        if request.incarnation == self.incarnation {
            return Err(self.refusal(Reason::ImportFromSelf, "the peer is this process"));
        }
        let Some(key) = self.sessions.find(session) else {
            return Err(self.refusal(Reason::UnknownSession, format!("session {session}")));
        };
        let mode = self
            .reservations
            .get(request.reservation)
            .filter(|r| r.session == key)
            .map(|r| r.mode);
        match self.sessions[key].state {
            SessionState::Admitted(id) if id == request.reservation && mode.is_some() => {}
            SessionState::Importing(_, id) if id == request.reservation && mode.is_some() => {
                return Err(self.refusal(Reason::ImportRunning, format!("reservation {id}")));
            }
            _ => {
                let message = format!("reservation {} is not live", request.reservation);
                return Err(self.refusal(Reason::UnknownReservation, message));
            }
        }
        if mode == Some(Mode::Direct) {
            return Err(self.refusal(Reason::BadRequest, "reservation: a direct grant imports nothing"));
        }
        self.check_placement(Some(key), Some(request.placement))?;
        let id = ImportId(self.next_import);
        self.next_import += 1;
        let deadline = now + Duration::from_millis(u64::from(request.deadline_ms));
        self.timers.insert((deadline, Timer::Import(id)));
        let (peer, incarnation, placement) = (request.peer.clone(), request.incarnation, request.placement);
        let phase = ImportPhase::Leasing;
        let reservation = request.reservation;
        let import = Import {
            session: key,
            reservation,
            peer,
            incarnation,
            placement,
            deadline,
            phase,
        };
        self.imports.insert(id, import);
        let record = &mut self.sessions[key];
        record.state = SessionState::Importing(id, reservation);
        record.placement = Some(placement);
        self.refresh(key);
        self.renew_reservation(reservation, now);
        self.counters.imports += 1;
        let (session, peer) = (session.clone(), request.peer.clone());
        self.effects.push_back(Effect::OpenLease {
            import: id,
            session,
            peer,
            incarnation,
            placement,
        });
        Ok(id)
    }

    /// The peer has granted a lease on `tokens`. The next poll asks the engine for pages. More tokens than were charged
    /// must fit, or the import is over (ADM-14).
    pub fn lease_granted(&mut self, id: ImportId, identity: Identity, tokens: Arc<[Token]>, share: u32, now: Now) {
        let Some(import) = self.imports.get_mut(&id) else {
            return;
        };
        if !matches!(import.phase, ImportPhase::Leasing) {
            return;
        }
        let offer = Offer {
            identity,
            tokens,
            share,
        };
        let (key, reservation) = (import.session, import.reservation);
        if offer.is_empty() {
            self.drop_import(id, Refusal::new(Reason::NotResident, "the peer offers no token"), now);
            return;
        }
        if let Err(why) = self.charge_offer(key, &offer, reservation) {
            self.drop_import(id, why, now);
            return;
        }
        if let Some(import) = self.imports.get_mut(&id) {
            import.phase = ImportPhase::Granted(offer);
        }
        self.ready.push_back(id);
        self.renew_reservation(reservation, now);
        self.effects.push_back(Effect::Wake);
    }

    /// `pulled` tokens have arrived: a sign of life.
    pub fn pull_progress(&mut self, id: ImportId, pulled: u32, now: Now) {
        let Some(import) = self.imports.get_mut(&id) else {
            return;
        };
        let reservation = import.reservation;
        if let ImportPhase::Pulling(landing) = &mut import.phase {
            let pulled = pulled.min(landing.total());
            if pulled > landing.pulled {
                landing.pulled = pulled;
                self.renew_reservation(reservation, now);
            }
        }
    }

    /// Every byte is here: ask the exporter whether the lease was valid throughout.
    pub fn pulled(&mut self, id: ImportId, now: Now) {
        let Some(import) = self.imports.get_mut(&id) else {
            return;
        };
        let reservation = import.reservation;
        match std::mem::replace(&mut import.phase, ImportPhase::Leasing) {
            ImportPhase::Pulling(mut landing) => {
                landing.pulled = landing.total();
                import.phase = ImportPhase::Confirming(landing);
                self.renew_reservation(reservation, now);
                self.effects.push_back(Effect::Confirm { import: id });
            }
            other => import.phase = other,
        }
    }

    /// It was (XFER-3). The next poll commits; the exporter's pages are no longer needed.
    pub fn confirmed(&mut self, id: ImportId, now: Now) {
        let Some(import) = self.imports.get_mut(&id) else {
            return;
        };
        let reservation = import.reservation;
        match std::mem::replace(&mut import.phase, ImportPhase::Leasing) {
            ImportPhase::Confirming(landing) => {
                import.phase = ImportPhase::Confirmed(landing);
                self.ready.push_back(id);
                self.renew_reservation(reservation, now);
                self.effects.push_back(Effect::EndLease { import: id });
                self.effects.push_back(Effect::Wake);
            }
            other => import.phase = other,
        }
    }

    /// The transfer engine has given up. The fence is emitted all the same.
    pub fn import_failed(&mut self, id: ImportId, why: Refusal, now: Now) {
        self.drop_import(id, why, now);
    }

    /// Nobody waits for it any more. One that the engine is committing is committed.
    pub fn cancel_import(&mut self, id: ImportId, why: Refusal, now: Now) {
        self.drop_import(id, why, now);
    }

    /// Ends an import before its commit: fence, end the lease, answer; its pages go back by the next poll, after the
    /// fence. False if it is unknown or the engine is committing it.
    pub(super) fn drop_import(&mut self, id: ImportId, why: Refusal, now: Now) -> bool {
        if self
            .imports
            .get(&id)
            .is_none_or(|i| matches!(i.phase, ImportPhase::Committing(_)))
        {
            return false;
        }
        let Some(import) = self.imports.remove(&id) else {
            return false;
        };
        self.timers.remove(&(import.deadline, Timer::Import(id)));
        if !off!(FenceImport) {
            self.effects.push_back(Effect::FenceImport { import: id });
        }
        self.effects.push_back(Effect::EndLease { import: id });
        self.counters.refused(why.code);
        self.effects.push_back(Effect::ImportDone {
            import: id,
            outcome: Err(why),
        });
        let session = import.session;
        match import.phase {
            ImportPhase::Leasing | ImportPhase::Granted(_) => {}
            // `landed` will find the import gone and give everything back.
            ImportPhase::Landing { .. } => self.dropped.push(Dropped { session, landing: None }),
            ImportPhase::Pulling(mut l)
            | ImportPhase::Confirming(mut l)
            | ImportPhase::Confirmed(mut l)
            | ImportPhase::Committing(mut l) => {
                let mut slots = Vec::new();
                l.pages.cut(0, &mut slots);
                self.dropped.push(Dropped {
                    session,
                    landing: Some((slots, l.locked)),
                });
                self.effects.push_back(Effect::Wake);
            }
        }
        self.set_landed(Some(import.reservation), 0);
        self.import_over(session, id, now);
        true
    }

    /// The session goes back to its grant, if that lives, or to idle.
    pub(super) fn import_over(&mut self, key: Key, id: ImportId, now: Now) {
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        if let SessionState::Importing(current, reservation) = session.state
            && current == id
        {
            let live = self.reservations.get(reservation).is_some();
            session.state = if live {
                SessionState::Admitted(reservation)
            } else {
                SessionState::Idle
            };
            self.renew_reservation(reservation, now);
            self.refresh(key);
        }
    }

    /// The offer's exact size takes the place of the estimate in the charge.
    fn charge_offer(&mut self, key: Key, offer: &Offer, id: ReservationId) -> Result<(), Refusal> {
        let held = self.kept_below(key, offer);
        let limit = self.ledger.limit();
        let Some(reservation) = self.reservations.get_mut(id) else {
            return Ok(());
        };
        let need = decide::need(&self.config, offer.len(), offer.len() - held, reservation.growth);
        if need > reservation.charge.reserved {
            let more = u64::from(need - reservation.charge.reserved);
            let used = self.ledger.used();
            if used + more > limit {
                let reason = if u64::from(need) > limit {
                    Reason::TooLarge
                } else {
                    Reason::NoDCapacity
                };
                let message = format!("needs {need} tokens, {used} of {limit} are used");
                return Err(Refusal::new(reason, message));
            }
            self.counters.estimates_wrong += 1;
            let new = Charge {
                reserved: need,
                ..reservation.charge
            };
            self.ledger.change(&mut reservation.charge, new);
        }
        Ok(())
    }
}
