//! [`Route`]: which mover reads from one peer process, and which next when that one fails (XFER-9). Kept with the greeted
//! peer; no IO, no clock.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use kvc_rdma::{MoverKind, RegionKey};

/// How long a mover that failed is not tried again with this peer.
pub(crate) const AVOIDED: Duration = Duration::from_secs(30);

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
pub(crate) struct Route {
    offers: Vec<Offer>,
    /// When the offer failed last.
    failed: Mutex<Vec<Option<Instant>>>,
}

impl Route {
    /// Those of the peer's offers that our movers, best first, can use. `None` without any.
    pub(crate) fn new(ours: impl Iterator<Item = MoverKind>, theirs: Vec<Offer>) -> Option<Self> {
        let usable = |kind| {
            let of_kind = theirs.iter().find(|offer| offer.kind == kind);
            // Memory is shared within a host; the text says whether this is the one.
            of_kind.filter(|offer| kind != MoverKind::Shm || kvc_rdma::shm::is_here(&offer.endpoint))
        };
        let offers: Vec<Offer> = ours.filter_map(usable).cloned().collect();
        let failed = Mutex::new(vec![None; offers.len()]);
        (!offers.is_empty()).then_some(Self { offers, failed })
    }

    /// The kinds that may be used, best first.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = MoverKind> {
        self.offers.iter().map(|offer| offer.kind)
    }

    /// The best offer from the `least`-th on that has not failed of late; the last one is never avoided.
    pub(crate) fn best(&self, least: usize, now: Instant) -> Option<(usize, &Offer)> {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        let last = self.offers.len() - 1;
        let fit = |at: &usize| *at == last || failed[*at].is_none_or(|when| now.duration_since(when) >= AVOIDED);
        (least..=last).find(fit).map(|at| (at, &self.offers[at]))
    }

    /// The `at`-th offer failed: avoided from now on. Gives what is used instead, and whether that is news.
    pub(crate) fn failed(&self, at: usize, now: Instant) -> Option<(usize, bool)> {
        let news = {
            let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
            let before = failed[at].replace(now);
            before.is_none_or(|when| now.duration_since(when) >= AVOIDED)
        };
        self.best(at + 1, now).map(|(next, _)| (next, news))
    }

    /// The `at`-th offer, as given by [`Route::best`] or [`Route::failed`].
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

    fn route(theirs: &[MoverKind]) -> Option<Route> {
        Route::new(ALL.into_iter(), theirs.iter().copied().map(offer).collect())
    }

    #[test]
    fn the_best_that_both_have_is_used() {
        // XFER-9: whatever order the peer offers them in.
        let route = route(&[MoverKind::Tcp, MoverKind::Verbs]).unwrap();
        assert_eq!(route.kinds().collect::<Vec<_>>(), [MoverKind::Verbs, MoverKind::Tcp]);
        assert_eq!(route.best(0, Instant::now()).unwrap().1.kind, MoverKind::Verbs);
    }

    #[test]
    fn nothing_in_common_is_no_route() {
        assert!(Route::new([MoverKind::Verbs].into_iter(), vec![offer(MoverKind::Tcp)]).is_none());
        assert!(route(&[]).is_none());
    }

    #[test]
    fn shared_memory_is_for_peers_of_this_host() {
        // The endpoint is not one of ours.
        assert!(route(&[MoverKind::Shm]).is_none());
    }

    #[test]
    fn what_failed_is_avoided_for_a_while() {
        let route = route(&[MoverKind::Verbs, MoverKind::Tcp]).unwrap();
        let now = Instant::now();
        assert_eq!(route.failed(0, now), Some((1, true)));
        assert_eq!(
            route.failed(0, now),
            Some((1, false)),
            "a second read of the same failure is no news"
        );
        assert_eq!(route.best(0, now).unwrap().0, 1);
        assert_eq!(route.best(0, now + AVOIDED).unwrap().0, 0);
    }

    #[test]
    fn the_last_is_never_avoided() {
        let route = route(&[MoverKind::Tcp]).unwrap();
        let now = Instant::now();
        assert_eq!(route.failed(0, now), None);
        assert_eq!(route.best(0, now).unwrap().0, 0);
    }
}
