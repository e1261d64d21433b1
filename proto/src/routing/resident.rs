//! One worker's knowledge of a session, in its own words (ROUTE-9, SYNC-2). Made by the front, read by
//! [`super::Dispatch`] and [`super::Move`].

use super::view::WorkerIndex;
use crate::{
    id::{Epoch, Placement},
    wire::info::{SessionView, Standing},
};

/// What a worker holds of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Who.
    pub worker: WorkerIndex,
    /// Committed tokens held.
    pub tokens: u32,
    /// The session's epoch there.
    pub epoch: Option<Epoch>,
    /// What the worker is to the session.
    pub standing: Standing,
    /// With the standing `moved`: the placement under which it was handed over.
    pub moved: Option<Placement>,
}

impl Resident {
    /// As the worker shows it.
    pub fn of(worker: WorkerIndex, view: &SessionView) -> Resident {
        Resident {
            worker,
            tokens: view.committed,
            epoch: view.epoch,
            standing: view.standing,
            moved: view.moved.as_ref().map(|m| m.placement),
        }
    }

    /// The worker does not know the session.
    pub fn nothing(worker: WorkerIndex) -> Resident {
        Resident {
            worker,
            tokens: 0,
            epoch: None,
            standing: Standing::Replica,
            moved: None,
        }
    }

    /// The worker knows the session, evicted or not.
    pub fn is_known(&self) -> bool {
        self.tokens > 0 || self.epoch.is_some()
    }

    /// The highest placement this worker has heard of.
    pub fn highest(&self) -> Option<Placement> {
        higher(self.epoch.map(|e| e.placement), self.moved)
    }

    /// The owner among them: under the highest placement that any of them has heard of.
    pub fn owner(residents: &[Resident]) -> Option<&Resident> {
        let highest = residents.iter().fold(None, |p, r| higher(p, r.highest()));
        residents
            .iter()
            .filter(|r| r.is_known() && r.standing == Standing::Owner)
            .find(|r| r.epoch.map(|e| e.placement) == highest)
    }
}

/// The later of two placements.
pub(super) fn higher(a: Option<Placement>, b: Option<Placement>) -> Option<Placement> {
    match (a, b) {
        (Some(a), Some(b)) if b.n > a.n => Some(b),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        id::StoreId,
        routing::testing::{D0, D1, D2},
    };

    #[test]
    fn the_owner_is_who_owns_the_highest_placement_anyone_has_heard_of() {
        // SES-4, MIG-1
        let placement = |n| Placement { n, store: StoreId(1) };
        let held = |worker, n, standing| Resident {
            worker,
            tokens: 10,
            epoch: Some(Epoch {
                placement: placement(n),
                rewind: 0,
            }),
            standing,
            moved: None,
        };
        let old = held(D0, 3, Standing::Owner);
        let new = held(D1, 5, Standing::Owner);
        assert_eq!(Resident::owner(&[old, new]), Some(&new));
        assert_eq!(Resident::owner(&[old, held(D1, 5, Standing::Replica)]), None);
        let handed_over = Resident {
            moved: Some(placement(6)),
            ..held(D2, 4, Standing::Moved)
        };
        assert_eq!(
            Resident::owner(&[old, new, handed_over]),
            None,
            "it was handed over to somebody else"
        );
        assert_eq!(Resident::owner(&[Resident::nothing(D0)]), None);
    }
}
