//! What peers may read: tokens, the runs exposed under each, and the fence (XFER-2). Every mover's exporter asks here.

use std::{
    collections::{BTreeMap, HashMap, hash_map::RandomState},
    hash::BuildHasher,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use subtle::ConstantTimeEq;

use crate::{
    error::MoverError,
    gate::Gate,
    mover::LeaseToken,
    region::{RegionKey, Regions, Run},
};

/// Why nothing may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    Unknown,
    Expired,
    Revoked,
}

/// As the reader of a lease at `peer` sees it.
pub(crate) fn denied(why: Denied, peer: &str) -> MoverError {
    let peer = peer.to_string();
    match why {
        Denied::Unknown => MoverError::UnknownToken { peer },
        Denied::Expired => MoverError::Expired { peer },
        Denied::Revoked => MoverError::Revoked { peer },
    }
}

/// The leases of one mover. Tokens are filed under a keyed hash and compared in constant time, so that how long a
/// look-up takes says nothing about the tokens that exist (XFER-10).
#[derive(Debug)]
pub(crate) struct Leases {
    key: RandomState,
    table: Mutex<HashMap<u64, Vec<Arc<Lease>>>>,
    limit: usize,
}

impl Leases {
    pub(crate) fn new(limit: usize) -> Self {
        Leases {
            key: RandomState::new(),
            table: Mutex::default(),
            limit,
        }
    }

    pub(crate) fn expose(&self, token: LeaseToken, now: Instant, max_age: Duration) -> Result<(), MoverError> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if table.values().map(Vec::len).sum::<usize>() >= self.limit {
            return Err(MoverError::TooMany {
                what: "leases",
                limit: self.limit as u64,
            });
        }
        let filed = table.entry(self.key.hash_one(token.0)).or_default();
        if filed.iter().any(|lease| lease.is(&token)) {
            return Err(MoverError::TokenInUse);
        }
        // A maximum age beyond the clock's range is no bound worth having: a year stands for it.
        let ends = now
            .checked_add(max_age)
            .unwrap_or_else(|| now + Duration::from_secs(365 * 24 * 3600));
        filed.push(Arc::new(Lease {
            token,
            ends,
            gate: Gate::default(),
            exposed: Mutex::default(),
        }));
        Ok(())
    }

    /// Makes more of the regions readable; `here` is this mover's endpoint.
    pub(crate) fn extend(
        &self,
        token: &LeaseToken,
        runs: &[Run],
        regions: &Regions,
        here: &str,
    ) -> Result<(), MoverError> {
        regions.check(runs)?;
        let lease = self.find(token, Instant::now()).map_err(|why| denied(why, here))?;
        lease.extend(runs);
        Ok(())
    }

    pub(crate) fn find(&self, token: &LeaseToken, now: Instant) -> Result<Arc<Lease>, Denied> {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let filed = table.get(&self.key.hash_one(token.0)).ok_or(Denied::Unknown)?;
        let lease = filed.iter().find(|lease| lease.is(token)).ok_or(Denied::Unknown)?;
        lease.alive(now)?;
        Ok(lease.clone())
    }

    pub(crate) fn count(&self) -> usize {
        self.table
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .map(Vec::len)
            .sum()
    }

    /// When it returns nothing is read under the token any more.
    pub(crate) fn fence(&self, token: &LeaseToken) {
        if let Some(lease) = self.remove(token) {
            lease.gate.shut();
        }
    }

    /// As [`Leases::fence`] for every token.
    pub(crate) fn fence_all(&self) {
        let table = std::mem::take(&mut *self.table.lock().unwrap_or_else(PoisonError::into_inner));
        table.into_values().flatten().for_each(|lease| lease.gate.shut());
    }

    fn remove(&self, token: &LeaseToken) -> Option<Arc<Lease>> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let hash = self.key.hash_one(token.0);
        let filed = table.get_mut(&hash)?;
        let at = filed.iter().position(|lease| lease.is(token))?;
        let lease = filed.swap_remove(at);
        if filed.is_empty() {
            table.remove(&hash);
        }
        Some(lease)
    }
}

/// One lease.
#[derive(Debug)]
pub(crate) struct Lease {
    token: LeaseToken,
    ends: Instant,
    gate: Gate,
    exposed: Mutex<Exposed>,
}

impl Lease {
    pub(crate) fn extend(&self, runs: &[Run]) {
        let mut exposed = self.exposed.lock().unwrap_or_else(PoisonError::into_inner);
        runs.iter().for_each(|run| exposed.add(run));
    }

    /// The first run that is not wholly exposed. What is exposed once stays so until the fence, so this is asked once
    /// per request, and [`Lease::pass`] alone for every write.
    pub(crate) fn uncovered<'a>(&self, runs: &'a [Run]) -> Option<&'a Run> {
        let exposed = self.exposed.lock().unwrap_or_else(PoisonError::into_inner);
        runs.iter().find(|run| !exposed.covers(run))
    }

    /// Runs `work`, which reads exposed memory and must not block, unless the lease is over.
    pub(crate) fn pass<T>(&self, now: Instant, work: impl FnOnce() -> T) -> Result<T, Denied> {
        self.alive(now)?;
        self.gate.pass(work).ok_or(Denied::Revoked)
    }

    /// How long it lives yet.
    pub(crate) fn left(&self, now: Instant) -> Duration {
        self.ends.saturating_duration_since(now)
    }

    fn alive(&self, now: Instant) -> Result<(), Denied> {
        if self.gate.is_shut() {
            return Err(Denied::Revoked);
        }
        if now >= self.ends { Err(Denied::Expired) } else { Ok(()) }
    }

    fn is(&self, token: &LeaseToken) -> bool {
        self.token.0.ct_eq(&token.0).into()
    }
}

/// Merged runs: (region, first byte) → one past the last.
#[derive(Debug, Default)]
struct Exposed(BTreeMap<(RegionKey, u64), u64>);

impl Exposed {
    /// The caller has checked that the run lies in a region, so its end is a number.
    fn add(&mut self, run: &Run) {
        let (mut start, mut end) = (run.offset, run.offset.saturating_add(run.len));
        if start == end {
            return;
        }
        if let Some((&(region, first), &last)) = self.0.range(..=(run.region, start)).next_back()
            && region == run.region
            && last >= start
        {
            (start, end) = (first, end.max(last));
        }
        while let Some((&key, &last)) = self.0.range((run.region, start)..=(run.region, end)).next() {
            self.0.remove(&key);
            end = end.max(last);
        }
        self.0.insert((run.region, start), end);
    }

    fn covers(&self, run: &Run) -> bool {
        let Some(end) = run.end() else { return false };
        if run.len == 0 {
            return true;
        }
        match self.0.range(..=(run.region, run.offset)).next_back() {
            Some((&(region, _), &last)) => region == run.region && last >= end,
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn run(region: u32, offset: u64, len: u64) -> Run {
        Run {
            region: RegionKey(region),
            offset,
            len,
        }
    }

    fn token(byte: u8) -> LeaseToken {
        LeaseToken([byte; 32])
    }

    #[test]
    fn a_lease_lives_from_expose_to_fence() {
        let (leases, now) = (Leases::new(8), Instant::now());
        assert_eq!(leases.find(&token(1), now).unwrap_err(), Denied::Unknown);
        leases.expose(token(1), now, Duration::from_secs(1)).unwrap();
        assert_eq!(
            leases.expose(token(1), now, Duration::from_secs(1)),
            Err(MoverError::TokenInUse)
        );
        let lease = leases.find(&token(1), now).unwrap();
        assert_eq!(lease.pass(now, || 7), Ok(7));
        leases.fence(&token(1));
        assert_eq!(lease.pass(now, || 7), Err(Denied::Revoked));
        assert_eq!(leases.find(&token(1), now).unwrap_err(), Denied::Unknown);
    }

    #[test]
    fn a_lease_ends_at_its_maximum_age() {
        let (leases, now) = (Leases::new(8), Instant::now());
        leases.expose(token(1), now, Duration::from_secs(1)).unwrap();
        let lease = leases.find(&token(1), now).unwrap();
        let later = now + Duration::from_secs(1);
        assert_eq!(leases.find(&token(1), later).unwrap_err(), Denied::Expired);
        assert_eq!(lease.pass(later, || ()), Err(Denied::Expired));
    }

    #[test]
    fn the_table_is_bounded_and_fencing_makes_room() {
        let (leases, now) = (Leases::new(2), Instant::now());
        leases.expose(token(1), now, Duration::from_secs(1)).unwrap();
        leases.expose(token(2), now, Duration::from_secs(1)).unwrap();
        assert_eq!(
            leases.expose(token(3), now, Duration::from_secs(1)),
            Err(MoverError::TooMany {
                what: "leases",
                limit: 2
            })
        );
        leases.fence(&token(1));
        leases.expose(token(3), now, Duration::from_secs(1)).unwrap();
    }

    proptest! {
        /// Against the naive model, a set of bytes: nothing outside exposed runs is readable, all inside is.
        #[test]
        fn exposed_runs_are_the_union_of_what_was_added(
            added in prop::collection::vec((0u32..2, 0u64..64, 0u64..12), 0..24),
            asked in prop::collection::vec((0u32..2, 0u64..80, 0u64..12), 1..24),
        ) {
            let (mut exposed, mut model) = (Exposed::default(), HashSet::new());
            for (region, offset, len) in added {
                exposed.add(&run(region, offset, len));
                model.extend((offset..offset + len).map(|byte| (region, byte)));
            }
            for (region, offset, len) in asked {
                let readable = (offset..offset + len).all(|byte| model.contains(&(region, byte)));
                prop_assert_eq!(exposed.covers(&run(region, offset, len)), readable);
            }
        }
    }
}
