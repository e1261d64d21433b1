//! What becomes of a session's copy on a worker that drains (MIG-4). Called by the router's drainer with what every worker
//! that answers has just said of the session.

use super::{resident::Resident, resident::higher, view::WorkerIndex};
use crate::{id::Placement, wire::info::Standing};

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// The worker owns the session, as far as anybody that matters knows: it is handed over, under a number above `heard`.
    Move {
        /// Its own word.
        owner: Resident,
        /// The highest placement that any worker has heard of.
        heard: Option<Placement>,
    },
    /// It lost the session without hearing of it (SES-4), and somebody else holds as much or owns it with KV: it is told under
    /// which number.
    Tell(Placement),
    /// There is nothing to hand over.
    Nothing,
}

/// Decides for the copy on `worker`.
pub fn leave(found: &[Resident], worker: WorkerIndex) -> Leave {
    let own = found.iter().find(|r| r.worker == worker);
    let Some(own) = own.filter(|r| r.standing == Standing::Owner && r.tokens > 0) else {
        return Leave::Nothing;
    };
    let held = own.epoch.map(|e| e.placement);
    let is_later = |r: &&Resident| r.highest().is_some_and(|p| held.is_none_or(|held| held.n < p.n));
    let covers = |r: &Resident| r.tokens > 0 && (r.standing == Standing::Owner || r.tokens >= own.tokens);
    let heard = found.iter().fold(None, |p, r| higher(p, r.highest()));
    let covered = found.iter().filter(|r| r.worker != worker).filter(is_later).any(covers);
    match heard.filter(|_| covered) {
        Some(placement) => Leave::Tell(placement),
        // The last copy there is goes on, whoever has heard of a later owner that is gone.
        None => Leave::Move { owner: *own, heard },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        id::{Epoch, StoreId},
        routing::testing::{D0, D1},
    };

    fn held(worker: WorkerIndex, standing: Standing, tokens: u32, n: u64) -> Resident {
        let placement = Placement { n, store: StoreId(1) };
        Resident {
            worker,
            tokens,
            epoch: Some(Epoch { placement, rewind: 0 }),
            standing,
            moved: None,
        }
    }

    #[test]
    fn an_owner_hands_over_and_who_lost_the_session_is_told() {
        // MIG-4, SES-4
        let own = held(D0, Standing::Owner, 100, 5);
        let number = |n| Placement { n, store: StoreId(1) };
        let moved = |n| Leave::Move {
            owner: own,
            heard: Some(number(n)),
        };
        assert_eq!(leave(&[own], D0), moved(5));
        assert_eq!(
            leave(&[own, held(D1, Standing::Replica, 100, 5)], D0),
            moved(5),
            "its backup"
        );
        assert_eq!(
            leave(&[own, held(D1, Standing::Owner, 10, 7)], D0),
            Leave::Tell(number(7)),
            "it lives there"
        );
        assert_eq!(
            leave(&[own, held(D1, Standing::Replica, 100, 7)], D0),
            Leave::Tell(number(7))
        );
        assert_eq!(
            leave(&[own, held(D1, Standing::Replica, 90, 7)], D0),
            moved(7),
            "the last ten tokens are here"
        );
        assert_eq!(
            leave(&[own, held(D1, Standing::Owner, 0, 7)], D0),
            moved(7),
            "an owner without KV"
        );
        for nothing in [held(D0, Standing::Owner, 0, 5), held(D0, Standing::Moved, 9, 5)] {
            assert_eq!(leave(&[nothing], D0), Leave::Nothing);
        }
        assert_eq!(leave(&[], D0), Leave::Nothing);
    }
}
