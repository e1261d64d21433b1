//! Service side: pulling a session in (XFER-1..4). The engine's part is in `poll`.

use std::{sync::Arc, time::Duration};

use crate::{
    admission::{Charge, Reservation, decide},
    id::{ImportId, ReservationId, SessionId},
    mutation::off,
    session::{Key, SessionState, history},
    time::Now,
    transfer::{Import, ImportPhase, Purpose, import::Offer},
    wire::{
        admit::{ImportRequest, Mode, Source},
        reason::{Reason, Refusal},
    },
};

use super::{Dropped, Effect, Have, ImportDone, LeaseGrant, LeaseKind, Timer, Token, Worker, change::stale_text};

impl Worker {
    /// Starts an import; [`ImportRequest`] says which of its four kinds.
    pub fn import(&mut self, session: &SessionId, request: &ImportRequest, now: Now) -> Result<ImportId, Refusal> {
        if request.incarnation == self.incarnation {
            return Err(self.refusal(Reason::ImportFromSelf, "the peer is this process"));
        }
        match (request.reservation, request.source) {
            (Some(id), Source::Prefill) => self.import_for_turn(session, request, Purpose::Seed(id), now),
            (Some(id), Source::Replica) => self.import_for_turn(session, request, Purpose::Reseed(id), now),
            (Some(_), Source::Owner) => {
                Err(self.refusal(Reason::BadRequest, "reservation: a move has a charge of its own"))
            }
            (None, Source::Owner) => self.import_for_move(session, request, now),
            (None, Source::Replica) => self.import_replica(session, request, now),
            (None, Source::Prefill) => Err(self.refusal(Reason::BadRequest, "reservation is missing")),
        }
    }

    fn import_for_turn(
        &mut self,
        session: &SessionId,
        request: &ImportRequest,
        purpose: Purpose,
        now: Now,
    ) -> Result<ImportId, Refusal> {
        let Some(key) = self.sessions.find(session) else {
            return Err(self.refusal(Reason::UnknownSession, format!("session {session}")));
        };
        let reservation = purpose.reservation();
        let mode = reservation
            .and_then(|id| self.reservations.get(id))
            .filter(|r| r.session == key && r.key.is_some())
            .map(|r| r.mode);
        match self.sessions[key].state {
            SessionState::Admitted(id) if Some(id) == reservation && mode.is_some() => {}
            SessionState::Importing(_, id) if Some(id) == reservation && mode.is_some() => {
                return Err(self.refusal(Reason::ImportRunning, format!("reservation {id}")));
            }
            _ => {
                let id = reservation.unwrap_or_default();
                return Err(self.refusal(Reason::UnknownReservation, format!("reservation {id} is not live")));
            }
        }
        if mode == Some(Mode::Direct) {
            return Err(self.refusal(Reason::BadRequest, "reservation: a direct grant imports nothing"));
        }
        if let Err(code) = self.speaks(key, Some(request.placement)) {
            return Err(self.refusal(code, format!("session {session}")));
        }
        self.own(key, Some(request.placement));
        Ok(self.begin_import(key, request, purpose, now))
    }

    /// MIG-1: the peer stays the owner, and the number pending, until it hands over. The move has a charge of its own.
    fn import_for_move(&mut self, id: &SessionId, request: &ImportRequest, now: Now) -> Result<ImportId, Refusal> {
        if self.draining {
            return Err(self.refusal(Reason::Draining, "this worker takes no sessions"));
        }
        let found = self.sessions.find(id);
        if let Some(session) = found.map(|k| &self.sessions[k]) {
            let withdrawn = session.floor.is_some_and(|f| request.placement.n <= f.n) && !off!(WithdrawnForGood);
            let held = session.placement.filter(|held| request.placement.n <= held.n);
            if let Some(held) = held.or(session.floor.filter(|_| withdrawn)) {
                let got = request.placement;
                return Err(self.refusal(Reason::StaleEpoch, stale_text(held, got)));
            }
            match session.state {
                SessionState::Idle | SessionState::Syncing(_) => {}
                SessionState::Importing(..) => {
                    return Err(self.refusal(Reason::ImportRunning, format!("session {id}")));
                }
                SessionState::Admitted(_) | SessionState::Waiting(_) | SessionState::Running(_) => {
                    return Err(self.refusal(Reason::SessionBusy, format!("session {id} has a turn here")));
                }
            }
        }
        let key = self.sessions.find_or_insert(id, now);
        self.give_way(key, now);
        let charge = Charge::default();
        self.ledger.open(charge);
        let reservation = self.reservations.insert(Reservation {
            session: key,
            key: None,
            mode: Mode::Reseed,
            growth: 0,
            charge,
            deadline: None,
            turn: None,
        });
        Ok(self.begin_import(key, request, Purpose::Move(reservation), now))
    }

    /// The peer is asked for a lease.
    pub(super) fn begin_import(&mut self, key: Key, request: &ImportRequest, purpose: Purpose, now: Now) -> ImportId {
        let id = ImportId(self.next_import);
        self.next_import += 1;
        let deadline = now + Duration::from_millis(u64::from(request.deadline_ms));
        self.timers.insert((deadline, Timer::Import(id)));
        let (peer, incarnation, placement) = (request.peer.clone(), request.incarnation, request.placement);
        let phase = ImportPhase::Leasing;
        let import = Import {
            session: key,
            purpose,
            peer,
            incarnation,
            placement,
            have: None,
            pulled_before: 0,
            deadline,
            phase,
        };
        self.imports.insert(id, import);
        self.sessions[key].state = match purpose.reservation() {
            Some(reservation) => SessionState::Importing(id, reservation),
            None => SessionState::Syncing(id),
        };
        self.refresh(key);
        self.renew_charge(purpose, now);
        self.counters.imports += 1;
        self.open_lease(id, true);
        id
    }

    /// Asks the peer for a lease; `short`: what this worker holds need not be repeated.
    pub(super) fn open_lease(&mut self, id: ImportId, short: bool) {
        let Some(import) = self.imports.get_mut(&id) else {
            return;
        };
        let session = &mut self.sessions[import.session];
        let doomed = session.doomed;
        // A prefill's prompt has no digest yet; and its copy here is the one before that turn.
        let short = short && import.purpose.lease() != LeaseKind::Follow;
        import.have = session
            .copy
            .as_mut()
            .filter(|c| short && !doomed && !c.is_empty())
            .map(|c| {
                let tokens = c.len();
                let digest = c.digest(tokens);
                Have { tokens, digest }
            });
        import.phase = ImportPhase::Leasing;
        self.effects.push_back(Effect::OpenLease {
            import: id,
            session: session.id.clone(),
            peer: import.peer.clone(),
            incarnation: import.incarnation,
            placement: import.placement,
            kind: import.purpose.lease(),
            have: import.have,
        });
    }

    /// The peer has granted a lease. The next poll asks the engine for pages. More tokens than were charged must fit, or
    /// the import is over (ADM-14).
    pub fn lease_granted(&mut self, id: ImportId, grant: LeaseGrant, now: Now) {
        let Some(import) = self.imports.get(&id) else {
            return;
        };
        if !matches!(import.phase, ImportPhase::Leasing) {
            return;
        }
        let (key, purpose, had) = (import.session, import.purpose, import.have);
        let Some(tokens) = self.whole_range(key, had, &grant) else {
            if had.is_some() {
                // The copy changed meanwhile (the engine took it): ask for all ids.
                self.effects.push_back(Effect::EndLease { import: id });
                self.open_lease(id, false);
            } else {
                let why = Refusal::new(
                    Reason::TransferFailed,
                    "the peer left out tokens that this worker lacks",
                );
                self.drop_import(id, why, now);
            }
            return;
        };
        let LeaseGrant {
            identity, share, epoch, ..
        } = grant;
        let offer = Offer {
            epoch,
            identity,
            tokens,
            share,
        };
        if offer.is_empty() {
            self.drop_import(id, Refusal::new(Reason::NotResident, "the peer offers no token"), now);
            return;
        }
        if matches!(purpose, Purpose::Move(_))
            && let Some(held) = self.sessions[key].placement.filter(|held| epoch.placement.n < held.n)
        {
            // The peer has not heard of it, but the session was placed after it: it is no owner to take over from.
            let why = Refusal::new(Reason::StaleEpoch, stale_text(held, epoch.placement));
            self.drop_import(id, why, now);
            return;
        }
        if matches!(purpose, Purpose::Reseed(_))
            && let Some(resident) = self.holds_all_of(key, &offer)
        {
            self.nothing_to_import(id, resident, now);
            return;
        }
        if let Some(reservation) = purpose.reservation()
            && let Err(why) = self.charge_offer(key, &offer, reservation)
        {
            self.drop_import(id, why, now);
            return;
        }
        if let Some(import) = self.imports.get_mut(&id) {
            import.phase = ImportPhase::Granted(offer);
        }
        self.ready.push_back(id);
        self.renew_charge(purpose, now);
        self.effects.push_back(Effect::Wake);
    }

    /// Tokens of this worker's own copy, if it is what is offered or goes on from there.
    fn holds_all_of(&self, key: Key, offer: &Offer) -> Option<u32> {
        let session = &self.sessions[key];
        let copy = session
            .copy
            .as_ref()
            .filter(|c| !session.doomed && c.identity == offer.identity)?;
        (history::common_prefix(&copy.tokens, &offer.tokens) == offer.len()).then_some(copy.len())
    }

    /// The import is over before a page was asked for.
    fn nothing_to_import(&mut self, id: ImportId, resident: u32, now: Now) {
        let Some(import) = self.imports.remove(&id) else { return };
        self.timers.remove(&(import.deadline, Timer::Import(id)));
        self.effects.push_back(Effect::EndLease { import: id });
        self.counters.imported(import.purpose, 0);
        self.renew_charge(import.purpose, now);
        self.import_over(import.session, id, import.purpose, now);
        let outcome = Ok(ImportDone { resident, pulled: 0 });
        self.effects.push_back(Effect::ImportDone { import: id, outcome });
        self.wake_for_wishes();
    }

    /// All token ids of a grant: what it did not repeat is this worker's own, if that is still what it said it had.
    fn whole_range(&mut self, key: Key, had: Option<Have>, grant: &LeaseGrant) -> Option<Arc<[Token]>> {
        if grant.after == 0 {
            return Some(grant.tokens.clone());
        }
        let had = had.filter(|h| h.tokens == grant.after)?;
        let copy = self.sessions[key].copy.as_mut().filter(|c| c.len() >= had.tokens)?;
        if copy.identity != grant.identity || copy.digest(had.tokens) != had.digest {
            return None;
        }
        let kept = &copy.tokens[..had.tokens as usize];
        Some(kept.iter().chain(grant.tokens.iter()).copied().collect())
    }

    /// `pulled` tokens have arrived: a sign of life.
    pub fn pull_progress(&mut self, id: ImportId, pulled: u32, now: Now) {
        let Some(import) = self.imports.get_mut(&id) else {
            return;
        };
        let purpose = import.purpose;
        if let ImportPhase::Pulling(landing) = &mut import.phase {
            let pulled = pulled.min(landing.total());
            if pulled > landing.pulled {
                landing.pulled = pulled;
                self.renew_charge(purpose, now);
            }
        }
    }

    /// Every byte is here: ask the exporter whether the lease was valid throughout.
    pub fn pulled(&mut self, id: ImportId, now: Now) {
        let Some(import) = self.imports.get_mut(&id) else {
            return;
        };
        let purpose = import.purpose;
        match std::mem::replace(&mut import.phase, ImportPhase::Leasing) {
            ImportPhase::Pulling(mut landing) => {
                landing.pulled = landing.total();
                import.phase = ImportPhase::Confirming(landing);
                self.renew_charge(purpose, now);
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
        let purpose = import.purpose;
        match std::mem::replace(&mut import.phase, ImportPhase::Leasing) {
            ImportPhase::Confirming(landing) => {
                import.phase = ImportPhase::Confirmed(landing);
                self.ready.push_back(id);
                self.renew_charge(purpose, now);
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
        let code = why.code;
        self.counters.refused(code);
        self.effects.push_back(Effect::ImportDone {
            import: id,
            outcome: Err(why),
        });
        let session = import.session;
        match import.phase {
            // Of a move the complete copy stays, as a replica.
            ImportPhase::Leasing | ImportPhase::Granted(_) | ImportPhase::HandingOver(_) => {}
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
        self.set_landed(import.purpose.reservation(), 0);
        self.import_over(session, id, import.purpose, now);
        if let Purpose::Sync(wish) = import.purpose {
            self.sync_failed(session, wish, code, now);
        }
        self.wake_for_wishes();
        true
    }

    /// The session goes back to its grant, if that lives, or to idle; a move's own charge ends.
    pub(super) fn import_over(&mut self, key: Key, id: ImportId, purpose: Purpose, now: Now) {
        if let Purpose::Move(reservation) = purpose {
            self.end_reservation(reservation);
        }
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        match session.state {
            SessionState::Importing(current, reservation) if current == id => {
                let live = self.reservations.get(reservation).is_some();
                session.state = if live {
                    SessionState::Admitted(reservation)
                } else {
                    SessionState::Idle
                };
                self.renew_reservation(reservation, now);
            }
            SessionState::Syncing(current) if current == id => session.state = SessionState::Idle,
            _ => return,
        }
        self.refresh(key);
        if !matches!(purpose, Purpose::Seed(_) | Purpose::Reseed(_)) {
            // Not now: the caller may be about to use the session.
            self.unknown.push(key);
        }
    }

    /// A sign of life for the grant that an import serves.
    pub(super) fn renew_charge(&mut self, purpose: Purpose, now: Now) {
        if let Some(reservation) = purpose.reservation() {
            self.renew_reservation(reservation, now);
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
