//! What every call shares: changing a session and keeping the sums true, revoking, dropping. Each step is O(log
//! sessions) plus the pages it frees.

use crate::{
    block,
    id::{LeaseId, Placement, PrefixHandle, ReservationId, TurnId},
    mutation::off,
    session::{Hold, Key, SessionState, Standing, evict, state::Marks},
    time::Now,
    wire::reason::{Reason, Refusal},
};

use super::{Effect, Frees, Timer, Worker};

impl Worker {
    /// Recomputes one session's part of the sums and its place in the order, and forgets what is not worth a record.
    /// The key may be dead afterwards.
    pub(super) fn refresh(&mut self, key: Key) {
        let page = self.config.page_tokens;
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        let mut marks = Marks::default();
        if let Some(copy) = &session.copy {
            let own = copy.own(page);
            match copy.hold {
                Hold::Free => marks.evictable = own,
                Hold::Claimed(_) if off!(Claim) => marks.evictable = own,
                Hold::Claimed(n) => marks.evictable = own - copy.own_below(n, page),
                Hold::Lent => {}
                Hold::Landing => marks.held = own,
            }
            let idle = copy.hold == Hold::Free && session.is_idle() && session.leases.is_empty();
            if self.config.evict_idle && idle {
                // Pages that changed since the snapshot are not in the ledger's base: they cannot be taken off it.
                if session.changed < self.polls {
                    marks.reclaimable = own;
                } else {
                    self.fresh.insert(key);
                }
            }
        }
        marks.rank = evict::rank(session, marks.evictable > 0);
        let old = std::mem::replace(&mut session.marks, marks);
        self.evictable = self.evictable + marks.evictable - old.evictable;
        self.pinned = self.pinned + marks.held - old.held;
        self.ledger.reclaim(old.reclaimable, marks.reclaimable);
        self.order.moved(key, old.rank, marks.rank);
        while let Some(oldest) = self.order.oldest_absent(self.config.remembered) {
            self.forget(oldest);
        }
    }

    /// Forgets a bare record.
    pub(super) fn forget(&mut self, key: Key) {
        self.unwish(key);
        if let Some(session) = self.sessions.get(key) {
            self.order.moved(key, session.marks.rank, None);
            self.sessions.remove(key);
        }
    }

    /// After a close: the copy is gone, and with it the record unless somebody uses the session again.
    pub(super) fn forget_closed(&mut self, key: Key) {
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        session.doomed = false;
        if session.is_bare() {
            self.forget(key);
        }
    }

    /// A session is used: it goes to the end of the order.
    pub(super) fn touch(&mut self, key: Key, now: Now) {
        self.uses += 1;
        let uses = self.uses;
        if let Some(session) = self.sessions.get_mut(key) {
            session.used = now;
            // The rank in the order carries the old number until `refresh`.
            session.seq = uses;
        }
    }

    /// Revoke, then fence (XFER-2). What the lease kept from being freed goes back with the next poll.
    pub(super) fn revoke(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.revoke(id) else { return };
        self.counters.revocations += 1;
        if !off!(FenceLease) {
            self.effects.push_back(Effect::FenceLease { lease: id });
        }
        self.lease_is_over(id, lease.session, lease.expires);
    }

    /// Takes a lease that is no longer live off its session, the timers and the quarantine.
    pub(super) fn lease_is_over(&mut self, id: LeaseId, key: Key, expires: Now) {
        self.timers.remove(&(expires, Timer::Lease(id)));
        self.quarantine.lease_over(id);
        if let Some(session) = self.sessions.get_mut(key) {
            session.leases.retain(|l| *l != id);
        }
        self.refresh(key);
    }

    /// OWN-7: revokes the session's leases that reach past `n`, but not those that follow `spare`.
    pub(super) fn revoke_past(&mut self, key: Key, n: u32, spare: Option<TurnId>) {
        for id in self.sessions[key].leases.clone() {
            let past = !off!(RevokePastCut)
                && self
                    .leases
                    .get(id)
                    .is_ok_and(|l| l.end > n && (spare.is_none() || l.follows != spare));
            if past {
                self.revoke(id);
            }
        }
    }

    /// XFER-4: the turn they follow ends without result.
    pub(super) fn revoke_followers(&mut self, key: Key, turn: TurnId) {
        for id in self.sessions[key].leases.clone() {
            if self.leases.get(id).is_ok_and(|l| l.follows == Some(turn)) {
                self.revoke(id);
            }
        }
    }

    /// Whether a lease covers a slot at or past `n`, those that follow `spare` left aside (OWN-5).
    pub(super) fn leased_past(&self, key: Key, n: u32, spare: TurnId) -> bool {
        let past = |id: &LeaseId| {
            self.leases
                .get(*id)
                .is_ok_and(|l| l.end > n && l.follows != Some(spare))
        };
        self.sessions[key].leases.iter().any(past)
    }

    /// Gives a whole copy up. Leases on it are revoked first; a waiting turn keeps its prompt and starts from the tree.
    pub(super) fn drop_copy(&mut self, key: Key, frees: &mut Frees) {
        let waiting = self.sessions[key].turn();
        if !off!(LeaseOnEviction) {
            self.revoke_past(key, 0, waiting);
        }
        let session = &mut self.sessions[key];
        let Some(mut copy) = session.copy.take() else { return };
        if let Some(turn) = waiting.and_then(|id| self.turns.get_mut(&id)) {
            turn.keep_prompt(Some(&copy));
            turn.common = 0;
        }
        self.ledger.freed(session.marks.reclaimable);
        session.boundary = Some(copy.shared);
        let kept = copy.shared / self.config.page_tokens;
        copy.table.cut(kept, &mut frees.slots);
        if copy.prefix != PrefixHandle::ROOT {
            frees.prefixes.push(copy.prefix);
        }
        self.landed_is_gone(key);
        self.refresh(key);
    }

    /// Cuts a copy to its first `n` tokens (not below its shared part): leases past it are revoked first, the rewind
    /// number grows (OWN-7).
    pub(super) fn cut_copy(&mut self, key: Key, n: u32, spare: Option<TurnId>, frees: &mut Frees) {
        self.revoke_past(key, n, spare);
        let page = self.config.page_tokens;
        let session = &mut self.sessions[key];
        let Some(copy) = &mut session.copy else { return };
        let rewound = n < copy.len();
        copy.truncate(n);
        copy.table.cut(block::pages(n, page), &mut frees.slots);
        copy.readable = copy.readable.min(n);
        // Part of what was reclaimable is free now: base must not count it on.
        let own = copy.own(page);
        self.ledger.freed(session.marks.reclaimable.saturating_sub(own));
        if rewound {
            self.rewound(key);
        }
        self.refresh(key);
    }

    /// The history was cut. Only the holder raises the number; a replica's is its owner's (SES-4).
    pub(super) fn rewound(&mut self, key: Key) {
        self.counters.rewinds += 1;
        let session = &mut self.sessions[key];
        if session.is_owner() {
            session.rewind += 1;
        }
    }

    /// What an import had landed for the session's grant is no longer there: the grant is charged for it again.
    pub(super) fn landed_is_gone(&mut self, key: Key) {
        let id = match self.sessions[key].state {
            SessionState::Admitted(id) | SessionState::Importing(_, id) => Some(id),
            SessionState::Waiting(turn) | SessionState::Running(turn) => self.turns.get(&turn).map(|t| t.reservation),
            SessionState::Idle | SessionState::Syncing(_) => None,
        };
        self.set_landed(id, 0);
    }

    /// Notes what an import has landed for a grant.
    pub(super) fn set_landed(&mut self, id: Option<ReservationId>, landed: u32) {
        if let Some(reservation) = id.and_then(|id| self.reservations.get_mut(id)) {
            let mut new = reservation.charge;
            new.landed = landed;
            self.ledger.change(&mut reservation.charge, new);
        }
    }

    /// Ends a grant: uncharged, its request over.
    pub(super) fn end_reservation(&mut self, id: ReservationId) {
        if let Some(reservation) = self.reservations.remove(id) {
            self.ledger.close(reservation.charge);
            if let Some(deadline) = reservation.deadline {
                self.timers.remove(&(deadline, Timer::Reservation(id)));
            }
        }
    }

    /// A sign of life (ADM-10): the grant lives on from now.
    pub(super) fn renew_reservation(&mut self, id: ReservationId, now: Now) {
        if let Some(reservation) = self.reservations.get_mut(id)
            && let Some(deadline) = &mut reservation.deadline
        {
            self.timers.remove(&(*deadline, Timer::Reservation(id)));
            *deadline = now + self.config.reservation;
            self.timers.insert((*deadline, Timer::Reservation(id)));
        }
    }

    /// SES-4: whether a router's message under this placement may speak for a session. An older number is stale; the
    /// same number from another store is a conflict that the router resolves above both; under a number that another
    /// worker owns nothing runs here.
    pub(super) fn speaks(&self, key: Key, got: Option<Placement>) -> Result<(), Reason> {
        let session = &self.sessions[key];
        let below = |held: Placement, got: Placement| match session.standing {
            Standing::Owner => is_stale(held, got),
            Standing::Replica => is_stale(held, got) || (held == got && !off!(ReplicaRefuses)),
            Standing::Moved(_) => got.n <= held.n && !off!(MovedRefuses),
        };
        // A withdrawn number is never owned later; what is owned already is not touched by it.
        let owned = session.is_owner() && session.placement == got;
        let withdrawn = !owned && session.floor.zip(got).is_some_and(|(floor, got)| got.n <= floor.n);
        let refused = match (session.placement, got) {
            (Some(held), Some(got)) => below(held, got),
            // A client without a router: what was handed over is elsewhere, a mere copy is not claimed by anybody here.
            (_, None) => matches!(session.standing, Standing::Moved(_)) && !off!(MovedRefuses),
            (None, Some(_)) => false,
        };
        match session.standing {
            _ if !refused && (!withdrawn || off!(WithdrawnForGood)) => Ok(()),
            Standing::Moved(_) => Err(Reason::Moved),
            Standing::Owner | Standing::Replica => Err(Reason::StaleEpoch),
        }
    }

    /// The same for a turn; one that only prefills serves whoever owns the number.
    pub(super) fn speaks_for(&mut self, key: Key, got: Option<Placement>, prefill_only: bool) -> Result<(), Refusal> {
        if prefill_only {
            return self.check_placement(Some(key), got);
        }
        self.speaks(key, got).map_err(|code| {
            let session = &self.sessions[key];
            let message = match (code, session.moved(), session.placement, got) {
                (Reason::Moved, Some(moved), ..) => format!("session {} lives at {} now", session.id, moved.to.peer),
                (_, _, Some(held), Some(got)) => stale_text(held, got),
                _ => format!("session {}", session.id),
            };
            self.refusal(code, message)
        })
    }

    /// SES-4: an older placement is stale, whatever this worker is to the session.
    pub(super) fn check_placement(&mut self, key: Option<Key>, got: Option<Placement>) -> Result<(), Refusal> {
        let held = key.and_then(|k| self.sessions[k].placement);
        match (held, got) {
            (Some(held), Some(got)) if is_stale(held, got) => {
                Err(self.refusal(Reason::StaleEpoch, stale_text(held, got)))
            }
            _ => Ok(()),
        }
    }

    /// A grant or a turn under this placement: the worker owns the session from here on.
    pub(super) fn own(&mut self, key: Key, placement: Option<Placement>) {
        let Some(placement) = placement else { return };
        let session = &mut self.sessions[key];
        if session.placement != Some(placement) {
            session.placement = Some(placement);
            session.rewind = 0;
        }
        session.standing = Standing::Owner;
        session.yields = None;
        self.unwish(key);
    }

    /// The copy here serves whoever owns that placement. A number already held changes nothing.
    pub(super) fn keep_for(&mut self, key: Key, placement: Option<Placement>) {
        let Some(placement) = placement else { return };
        let session = &mut self.sessions[key];
        if session.placement == Some(placement) {
            return;
        }
        session.placement = Some(placement);
        session.rewind = 0;
        session.standing = Standing::Replica;
        session.backup = None;
        // What an earlier owner announced is not this one's history.
        self.unwish(key);
    }

    /// SES-4: the session was granted elsewhere under a higher placement: a grant is over, a turn is aborted, the copy
    /// stays as a replica.
    pub(super) fn supersede(&mut self, key: Key, placement: Placement, now: Now) {
        self.end_use(key, now);
        if self.sessions.get(key).is_some() {
            self.keep_for(key, Some(placement));
            self.refresh(key);
        }
    }

    /// SES-4: this worker does not own the session any more: its grant is over, its turn is aborted.
    pub(super) fn end_use(&mut self, key: Key, now: Now) {
        match self.sessions[key].state {
            SessionState::Admitted(id) | SessionState::Importing(_, id) => {
                self.give_up(id, Reason::StaleEpoch, now);
            }
            SessionState::Waiting(turn) | SessionState::Running(turn) => {
                self.counters.superseded_turns += 1;
                self.aborts.push(turn);
                self.effects.push_back(Effect::Wake);
            }
            SessionState::Idle | SessionState::Syncing(_) => {}
        }
    }
}

/// The sentence of a `stale-epoch`.
pub(super) fn stale_text(held: Placement, got: Placement) -> String {
    format!("held {}.{}, got {}.{}", held.n, held.store, got.n, got.store)
}

/// Whether `got` does not speak for a session placed by `held`.
pub(super) fn is_stale(held: Placement, got: Placement) -> bool {
    (got.n < held.n || (got.n == held.n && got.store != held.store)) && !off!(StalePlacement)
}
