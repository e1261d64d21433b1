//! A peer's permission to read a token range (XFER-2). Forced ends go *revoke* → *fence* → *free*: removing it here is
//! the revocation, the worker emits the fence in the same call, and the pages leave the worker only after it.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::Duration,
};

use crate::{
    id::{LeaseId, TurnId},
    session::Key,
    time::Now,
    wire::reason::Reason,
};

/// Revoked leases remembered, to tell a late reader why.
pub const REVOKED: usize = 1024;

/// A live lease on tokens `[0, end)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The session.
    pub session: Key,
    /// One past the last token.
    pub end: u32,
    /// The turn that is still computing the range; its end without result revokes the lease (XFER-4).
    pub follows: Option<TurnId>,
    /// Ends then without renewal.
    pub expires: Now,
    /// Ends then in any case.
    pub dies: Now,
}

/// All live leases.
#[derive(Clone, Debug)]
pub struct Leases {
    live: HashMap<LeaseId, Lease>,
    revoked: HashSet<LeaseId>,
    revoked_order: VecDeque<LeaseId>,
    next: u64,
}

impl Leases {
    /// None yet; numbers start at `first`.
    pub fn new(first: u64) -> Leases {
        Leases {
            live: HashMap::new(),
            revoked: HashSet::new(),
            revoked_order: VecDeque::new(),
            next: first,
        }
    }

    /// Remembers a lease.
    pub fn insert(&mut self, lease: Lease) -> LeaseId {
        let id = LeaseId(self.next);
        self.next += 1;
        self.live.insert(id, lease);
        id
    }

    /// A live lease, or why there is none.
    pub fn get(&self, id: LeaseId) -> Result<&Lease, Reason> {
        self.live.get(&id).ok_or(self.gone(id))
    }

    /// A live lease.
    pub fn get_mut(&mut self, id: LeaseId) -> Option<&mut Lease> {
        self.live.get_mut(&id)
    }

    /// A sign of life: lives `for_` longer, not past its end of days.
    pub fn renew(&mut self, id: LeaseId, for_: Duration, now: Now) -> Result<(Now, Now), Reason> {
        let gone = self.gone(id);
        let lease = self.live.get_mut(&id).ok_or(gone)?;
        let before = lease.expires;
        lease.expires = (now + for_).min(lease.dies);
        Ok((before, lease.expires))
    }

    /// The reader has ended it.
    pub fn end(&mut self, id: LeaseId) -> Option<Lease> {
        self.live.remove(&id)
    }

    /// Ends it by force: from here on `confirm` fails.
    pub fn revoke(&mut self, id: LeaseId) -> Option<Lease> {
        let lease = self.live.remove(&id)?;
        self.revoked.insert(id);
        self.revoked_order.push_back(id);
        if self.revoked_order.len() > REVOKED
            && let Some(oldest) = self.revoked_order.pop_front()
        {
            self.revoked.remove(&oldest);
        }
        Some(lease)
    }

    /// Live leases, in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (LeaseId, &Lease)> {
        let mut all: Vec<_> = self.live.iter().map(|(id, l)| (*id, l)).collect();
        all.sort_unstable_by_key(|(id, _)| *id);
        all.into_iter()
    }

    /// Live leases.
    pub fn len(&self) -> usize {
        self.live.len()
    }

    /// No live lease.
    pub fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    fn gone(&self, id: LeaseId) -> Reason {
        if self.revoked.contains(&id) {
            Reason::LeaseRevoked
        } else {
            Reason::LeaseUnknown
        }
    }
}
