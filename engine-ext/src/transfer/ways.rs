//! [`Ways`]: the movers that both we and one peer process have. Which of them reads, and which next when it fails, is
//! `kvc_proto`'s decision (XFER-9). Kept with the greeted peer.

use std::sync::{Mutex, PoisonError};

use kvc_proto::{time::Now, transfer::Route};

use kvc_rdma::{MoverKind, RegionKey};

/// A way to a peer's KV that both sides have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) kind: MoverKind,
    /// What our mover of that kind dials.
    pub(crate) endpoint: String,
    /// The peer's names for its buffers, in layout order.
    pub(crate) keys: Vec<RegionKey>,
}

/// The offers of one peer that we can use, best first; at least one.
#[derive(Debug)]
pub(crate) struct Ways {
    offers: Vec<Offer>,
    route: Mutex<Route>,
}

impl Ways {
    /// Those of the peer's offers that our movers, best first, can use. `None` without any.
    pub(crate) fn new(ours: impl Iterator<Item = MoverKind>, theirs: &[Offer]) -> Option<Self> {
        let usable = |kind| {
            let of_kind = theirs.iter().find(|offer| offer.kind == kind);
            // Memory is shared within a host; the text says whether this is the one.
            of_kind.filter(|offer| kind != MoverKind::Shm || kvc_rdma::shm::is_here(&offer.endpoint))
        };
        let offers: Vec<Offer> = ours.filter_map(usable).cloned().collect();
        let route = Mutex::new(Route::new(offers.len())?);
        Some(Self { offers, route })
    }

    /// The kinds that may be used, best first.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = MoverKind> {
        self.offers.iter().map(|offer| offer.kind)
    }

    /// [`Route::best`].
    pub(crate) fn best(&self, now: Now) -> usize {
        self.route.lock().unwrap_or_else(PoisonError::into_inner).best(now)
    }

    /// [`Route::failed`].
    pub(crate) fn failed(&self, at: usize, now: Now) -> Option<(usize, bool)> {
        self.route
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .failed(at, now)
    }

    /// The `at`-th offer, as given by [`Ways::best`] or [`Ways::failed`].
    pub(crate) fn offer(&self, at: usize) -> &Offer {
        &self.offers[at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [MoverKind; 3] = [MoverKind::Verbs, MoverKind::Shm, MoverKind::Tcp];

    fn offer(kind: MoverKind) -> Offer {
        Offer {
            kind,
            endpoint: "10.0.0.1:1".into(),
            keys: Vec::new(),
        }
    }

    fn ways(theirs: &[MoverKind]) -> Option<Ways> {
        let theirs: Vec<Offer> = theirs.iter().copied().map(offer).collect();
        Ways::new(ALL.into_iter(), &theirs)
    }

    #[test]
    fn the_best_that_both_have_is_used() {
        // XFER-9: whatever order the peer offers them in.
        let ways = ways(&[MoverKind::Tcp, MoverKind::Verbs]).unwrap();
        assert_eq!(ways.kinds().collect::<Vec<_>>(), [MoverKind::Verbs, MoverKind::Tcp]);
        assert_eq!(ways.offer(ways.best(Now(0))).kind, MoverKind::Verbs);
    }

    #[test]
    fn nothing_in_common_is_no_way() {
        assert!(Ways::new([MoverKind::Verbs].into_iter(), &[offer(MoverKind::Tcp)]).is_none());
        assert!(ways(&[]).is_none());
    }

    #[test]
    fn shared_memory_is_for_peers_of_this_host() {
        // The endpoint is not one of ours.
        assert!(ways(&[MoverKind::Shm]).is_none());
    }
}
