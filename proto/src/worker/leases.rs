//! Service side: what peers may read here (XFER-2).

use std::sync::Arc;

use crate::{
    id::{LeaseId, Placement, TurnId},
    mutation::off,
    session::{Key, Phase, SessionState, Started},
    time::Now,
    transfer::Lease,
    wire::reason::{Reason, Refusal},
};

use super::{
    Effect, Have, Identity, LeaseAnswer, LeaseGrant, LeaseKind, LeaseRequest, LeaseView, Timer, Token, Worker,
    change::{is_stale, stale_text},
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
    /// A peer asks to read a session from token 0; [`LeaseKind`] says what for. `Wait`: the turn it is about is still on
    /// its way, or one that it ends still runs.
    pub fn lease(&mut self, request: &LeaseRequest, now: Now) -> Result<LeaseAnswer, Refusal> {
        if request.incarnation != self.incarnation && !off!(StaleIncarnation) {
            let message = format!("held {}, got {}", self.incarnation, request.incarnation);
            return Err(self.refusal(Reason::StaleIncarnation, message));
        }
        let name = &request.session;
        let found = self.sessions.find(name);
        let (key, range) = match (request.kind, found) {
            (LeaseKind::Follow, None) => return Ok(LeaseAnswer::Wait),
            (LeaseKind::Follow, Some(key)) => {
                self.check_placement(Some(key), Some(request.placement))?;
                // Its turn may still be on its way (DISP-3); a replica refreshed under the number is not what it leaves.
                if self.sessions[key]
                    .arrived
                    .is_none_or(|held| is_stale(request.placement, held))
                {
                    return Ok(LeaseAnswer::Wait);
                }
                (key, self.readable_range(key))
            }
            (_, None) => return Err(self.refusal(Reason::UnknownSession, format!("session {name}"))),
            (kind, Some(key)) => {
                self.check_kind(key, kind, request.placement)?;
                if kind == LeaseKind::Replica {
                    if self.sessions[key].placement != Some(request.placement) {
                        self.supersede(key, request.placement, now);
                    }
                    if self.sessions[key].turn().is_some() {
                        return Ok(LeaseAnswer::Wait);
                    }
                }
                (key, self.committed_range(key))
            }
        };
        let Some(range) = range else {
            let message = format!("session {name} holds no committed KV here");
            return Err(self.refusal(Reason::NotResident, message));
        };
        let Some(epoch) = self.sessions[key].epoch() else {
            return Err(self.refusal(Reason::NotOwner, format!("session {name} was never placed")));
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
        self.sessions[key].leases.push(lease);
        self.refresh(key);
        self.counters.leases += 1;
        let after = request.have.map_or(0, |have| self.agreed(key, &range, have));
        let tokens = match after {
            0 => range.tokens,
            _ => range.tokens[after as usize..].into(),
        };
        Ok(LeaseAnswer::Granted(LeaseGrant {
            lease,
            epoch,
            identity: range.identity,
            after,
            tokens,
            readable: range.readable.min(end),
            // Of a rewritten prompt that has not begun the old copy's part may be the longer.
            share: range.share.min(end),
            lives: self.config.lease,
        }))
    }

    /// Who may be told what is committed here, under which number (SES-4).
    fn check_kind(&mut self, key: Key, kind: LeaseKind, got: Placement) -> Result<(), Refusal> {
        self.check_placement(Some(key), Some(got))?;
        let session = &self.sessions[key];
        let (name, held, owner) = (session.id.clone(), session.placement, session.is_owner());
        let moved = session.moved().is_some();
        let stale = held.filter(|held| match kind {
            LeaseKind::Replica => *held == got && owner,
            LeaseKind::Sync => *held != got,
            LeaseKind::Prepare => held.n >= got.n,
            LeaseKind::Follow => false,
        });
        if let Some(held) = stale {
            return Err(self.refusal(Reason::StaleEpoch, stale_text(held, got)));
        }
        match kind {
            LeaseKind::Prepare if moved => Err(self.refusal(Reason::Moved, format!("session {name} was handed over"))),
            LeaseKind::Prepare if !owner => Err(self.refusal(Reason::NotOwner, format!("session {name}"))),
            _ => Ok(()),
        }
    }

    /// Tokens of what a peer holds that are the first of this range too.
    fn agreed(&mut self, key: Key, range: &Range, have: Have) -> u32 {
        let whole = u32::try_from(range.tokens.len()).unwrap_or(u32::MAX);
        let copy = self.sessions[key]
            .copy
            .as_mut()
            .filter(|c| range.follows.is_none() && c.len() >= whole);
        let same = copy
            .is_some_and(|copy| have.tokens <= whole && (copy.digest(have.tokens) == have.digest || off!(HaveDigest)));
        if same { have.tokens } else { 0 }
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
            (SessionState::Idle | SessionState::Admitted(_) | SessionState::Syncing(_), _, Some(copy))
                if !session.doomed =>
            {
                Some(Range {
                    tokens: copy.tokens.as_slice().into(),
                    identity: copy.identity.clone(),
                    readable: copy.readable,
                    share: copy.shared,
                    follows: None,
                })
            }
            _ => None,
        }
        .filter(|r| !r.tokens.is_empty())
    }

    /// What is committed, also while a turn runs on it (OWN-5).
    fn committed_range(&self, key: Key) -> Option<Range> {
        let session = &self.sessions[key];
        let copy = session.copy.as_ref().filter(|_| !session.doomed)?;
        let committed = match session.turn().and_then(|id| self.turns.get(&id)).map(|t| t.phase) {
            Some(Phase::Running(Started::Session { restored })) => restored,
            Some(Phase::Running(Started::Tree { .. })) => 0,
            Some(Phase::Waiting) | None => copy.len(),
        };
        Some(Range {
            tokens: copy.tokens[..committed.min(copy.len()) as usize].into(),
            identity: copy.identity.clone(),
            readable: committed.min(copy.readable),
            share: copy.shared,
            follows: None,
        })
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
