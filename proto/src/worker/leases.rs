//! Service side: what peers may read here (XFER-2).

use std::sync::Arc;

use crate::{
    id::{LeaseId, Placement, TurnId},
    session::{Key, Phase, SessionState},
    time::Now,
    transfer::Lease,
    wire::reason::{Reason, Refusal},
};

use super::{
    Effect, Identity, LeaseAnswer, LeaseGrant, LeaseRequest, LeaseView, Timer, Token, Worker, change::is_stale,
    mutation::off,
};

/// What a lease would cover.
struct Range {
    tokens: Arc<[Token]>,
    identity: Identity,
    readable: u32,
    share: u32,
    follows: Option<TurnId>,
}

impl Worker {
    /// A peer asks to read a session from token 0, under the placement its router has taken. The placement is not here
    /// yet: `Wait`, for its turn may still be on its way (DISP-3). A running or waiting turn is followed: the grant
    /// carries the whole prompt, the view grows with its prefill (XFER-4).
    pub fn lease(&mut self, request: &LeaseRequest, now: Now) -> Result<LeaseAnswer, Refusal> {
        if request.incarnation != self.incarnation && !off!(StaleIncarnation) {
            let message = format!("held {}, got {}", self.incarnation, request.incarnation);
            return Err(self.refusal(Reason::StaleIncarnation, message));
        }
        let Some(key) = self.sessions.find(&request.session) else {
            return Ok(LeaseAnswer::Wait);
        };
        self.check_placement(Some(key), Some(request.placement))?;
        let here = |held: &Placement| !is_stale(request.placement, *held);
        let Some(placement) = self.sessions[key].placement.filter(here) else {
            return Ok(LeaseAnswer::Wait);
        };
        let Some(range) = self.readable_range(key) else {
            let message = format!("session {} holds no committed KV here", request.session);
            return Err(self.refusal(Reason::NotResident, message));
        };
        let dies = now + self.config.lease_max;
        let expires = (now + self.config.lease).min(dies);
        let end = u32::try_from(range.tokens.len()).unwrap_or(u32::MAX);
        let lease = self.leases.insert(Lease {
            session: key,
            end,
            follows: range.follows,
            expires,
            dies,
        });
        self.timers.insert((expires, Timer::Lease(lease)));
        let session = &mut self.sessions[key];
        session.leases.push(lease);
        let epoch = crate::id::Epoch {
            placement,
            rewind: session.rewind,
        };
        self.refresh(key);
        self.counters.leases += 1;
        Ok(LeaseAnswer::Granted(LeaseGrant {
            lease,
            epoch,
            identity: range.identity,
            tokens: range.tokens,
            readable: range.readable.min(end),
            share: range.share,
            lives: self.config.lease,
        }))
    }

    /// Slots of tokens from `from` that are readable by now; none while a prefill has not come that far.
    pub fn lease_view(&self, lease: LeaseId, from: u32) -> Result<LeaseView, Refusal> {
        let held = self.leases.get(lease).map_err(|code| gone(code, lease))?;
        if from > held.end {
            let message = format!("the lease covers {} tokens, got {from}", held.end);
            return Err(Refusal::new(Reason::RangeNotReadable, message));
        }
        let readable = self.readable_under(held);
        let copy = self.sessions[held.session].copy.as_ref();
        let slots = copy.map_or_else(Vec::new, |c| c.table.slots(from, readable));
        Ok(LeaseView {
            from,
            slots,
            complete: readable >= held.end,
        })
    }

    /// A sign of life from the reader.
    pub fn renew(&mut self, lease: LeaseId, now: Now) -> Result<(), Refusal> {
        self.expire(lease, now);
        let (before, after) = self
            .leases
            .renew(lease, self.config.lease, now)
            .map_err(|code| gone(code, lease))?;
        self.timers.remove(&(before, Timer::Lease(lease)));
        self.timers.insert((after, Timer::Lease(lease)));
        Ok(())
    }

    /// XFER-3: whether everything read under this lease was valid: it is live still and its whole range was readable.
    pub fn confirm(&mut self, lease: LeaseId, now: Now) -> Result<(), Refusal> {
        self.expire(lease, now);
        if off!(ConfirmFailsWhenRevoked) {
            return Ok(());
        }
        let held = self.leases.get(lease).map_err(|code| gone(code, lease))?;
        let readable = self.readable_under(held);
        if readable < held.end {
            let message = format!("{readable} of {} tokens are readable", held.end);
            return Err(Refusal::new(Reason::RangeNotReadable, message));
        }
        Ok(())
    }

    /// The reader is done, also when it refuses (F13). Fenced all the same: its pages may be given away from now on.
    pub fn end_lease(&mut self, lease: LeaseId, _now: Now) {
        if let Some(held) = self.leases.end(lease) {
            self.effects.push_back(Effect::FenceLease { lease });
            self.lease_is_over(lease, held.session, held.expires);
        }
    }

    /// Tokens of a lease's range whose KV is complete.
    pub(super) fn readable_under(&self, lease: &Lease) -> u32 {
        let session = &self.sessions[lease.session];
        // While the turn it follows waits, the copy is still the one before that turn.
        let begun = lease
            .follows
            .is_none_or(|t| self.turns.get(&t).is_some_and(|t| t.phase != Phase::Waiting));
        session
            .copy
            .as_ref()
            .filter(|_| begun)
            .map_or(0, |c| c.readable.min(lease.end))
    }

    /// A lease past its deadline is over, whether or not the timer has been served.
    fn expire(&mut self, lease: LeaseId, now: Now) {
        if self.leases.get(lease).is_ok_and(|l| l.expires <= now) {
            self.counters.leases_expired += 1;
            self.revoke(lease);
        }
    }

    fn readable_range(&self, key: Key) -> Option<Range> {
        let session = &self.sessions[key];
        let copy = session.copy.as_ref();
        let turn = session.turn().and_then(|id| self.turns.get(&id));
        match (session.state, turn, copy) {
            (SessionState::Waiting(_), Some(turn), _) => Some(Range {
                tokens: turn.tokens(copy).into(),
                identity: turn.identity.clone(),
                readable: 0,
                share: self.share_of(key, turn.id),
                follows: Some(turn.id),
            }),
            (SessionState::Running(_), Some(turn), Some(copy)) => Some(Range {
                tokens: copy.tokens.as_slice().into(),
                identity: copy.identity.clone(),
                readable: copy.readable,
                share: self.share_of(key, turn.id),
                follows: Some(turn.id),
            }),
            (SessionState::Idle | SessionState::Admitted(_), _, Some(copy)) if !session.doomed => Some(Range {
                tokens: copy.tokens.as_slice().into(),
                identity: copy.identity.clone(),
                readable: copy.readable,
                share: copy.shared,
                follows: None,
            }),
            _ => None,
        }
        .filter(|r| !r.tokens.is_empty())
    }

    /// The session's first prompt, for the importer to share too (SES-6).
    fn share_of(&self, key: Key, turn: TurnId) -> u32 {
        let shared = self.sessions[key].copy.as_ref().map_or(0, |c| c.shared);
        if shared > 0 { shared } else { self.share_len(turn) }
    }
}

fn gone(code: Reason, lease: LeaseId) -> Refusal {
    Refusal::new(code, format!("lease {lease}"))
}
