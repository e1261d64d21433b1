//! The states of a page (OWN-4), and the pages that wait outside their table for the last reader.

use crate::{id::LeaseId, worker::api::Slot};

/// What a page of the pool is doing. The worker does not store it: it follows from the tables, leases, imports and the
/// quarantine; [`Worker::page_states`](crate::worker::Worker::page_states) derives it for checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageState {
    /// An idle session's own page.
    Held,
    /// A running or claimed turn's page.
    Lent,
    /// A page under a lease: a peer may read it at any moment.
    Reading,
    /// A running import writes into it.
    Landing,
    /// It has left its table and waits for the last lease that covers it, or for the next poll.
    Quarantined,
}

/// Pages that have left their table while leases cover them (retired duplicates of `adopt`), and pages that nothing
/// covers any more and that go back at the next poll.
#[derive(Clone, Debug, Default)]
pub struct Quarantine {
    retired: Vec<(Slot, Vec<LeaseId>)>,
    loose: Vec<Slot>,
}

impl Quarantine {
    /// Keeps the page at `slot` until every lease in `leases` is over.
    pub fn retire(&mut self, slot: Slot, leases: Vec<LeaseId>) {
        if leases.is_empty() {
            self.loose.push(slot);
        } else {
            self.retired.push((slot, leases));
        }
    }

    /// Nothing can be read under this lease any more (it has been fenced, or the reader ended it).
    pub fn lease_over(&mut self, lease: LeaseId) {
        let loose = &mut self.loose;
        self.retired.retain_mut(|(slot, leases)| {
            leases.retain(|l| *l != lease);
            if leases.is_empty() {
                loose.push(*slot);
            }
            !leases.is_empty()
        });
    }

    /// Pages that nothing covers any more, to be freed now.
    pub fn take_loose(&mut self) -> Vec<Slot> {
        std::mem::take(&mut self.loose)
    }

    /// The engine has cleared its pool: nothing is left to free.
    pub fn clear(&mut self) {
        self.retired.clear();
        self.loose.clear();
    }

    /// Pages in it.
    pub fn pages(&self) -> u32 {
        u32::try_from(self.retired.len() + self.loose.len()).unwrap_or(u32::MAX)
    }

    /// First slot of each page in it.
    pub fn slots(&self) -> impl Iterator<Item = Slot> {
        self.retired
            .iter()
            .map(|(slot, _)| *slot)
            .chain(self.loose.iter().copied())
    }
}
