//! [`Route`]: which of the ways to one peer is used, and which next when that one fails (XFER-9). The transfer engine keeps
//! one with each peer; what a way is, is its own matter.

use std::time::Duration;

use crate::time::Now;

/// How long a way that failed is not tried again.
pub const AVOIDED: Duration = Duration::from_secs(30);

/// The ways to one peer, best first.
#[derive(Clone, Debug)]
pub struct Route {
    /// When each failed last.
    failed: Vec<Option<Now>>,
}

impl Route {
    /// Of so many ways, none of which has failed; `None` for none.
    pub fn new(ways: usize) -> Option<Self> {
        let failed = vec![None; ways];
        (ways > 0).then_some(Self { failed })
    }

    /// The best way that has not failed of late; the last one is never avoided.
    pub fn best(&self, now: Now) -> usize {
        self.from(0, now).unwrap_or(0)
    }

    /// Way `at` failed and is avoided from now on. Gives what is used instead, if there is one behind it, and whether the
    /// failure is news.
    pub fn failed(&mut self, at: usize, now: Now) -> Option<(usize, bool)> {
        let news = !self.is_avoided(at, now);
        *self.failed.get_mut(at)? = Some(now);
        self.from(at + 1, now).map(|next| (next, news))
    }

    fn from(&self, least: usize, now: Now) -> Option<usize> {
        let last = self.failed.len() - 1;
        (least..=last).find(|at| *at == last || !self.is_avoided(*at, now))
    }

    fn is_avoided(&self, at: usize, now: Now) -> bool {
        let failed = self.failed.get(at).copied().flatten();
        failed.is_some_and(|when| now.since(when) < AVOIDED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_failed_is_avoided_for_a_while() {
        let (mut route, now) = (Route::new(3).unwrap(), Now(5));
        assert_eq!(route.best(now), 0);
        assert_eq!(route.failed(0, now), Some((1, true)));
        assert_eq!(
            route.failed(0, now),
            Some((1, false)),
            "a second read of the same failure is no news"
        );
        assert_eq!(route.best(now), 1);
        assert_eq!(route.failed(1, now), Some((2, true)));
        assert_eq!(route.best(now), 2);
        assert_eq!(route.best(now + AVOIDED), 0);
        assert_eq!(route.failed(0, now + AVOIDED), Some((1, true)));
    }

    #[test]
    fn the_last_is_never_avoided_and_nothing_comes_behind_it() {
        let (mut route, now) = (Route::new(1).unwrap(), Now(5));
        assert_eq!(route.failed(0, now), None);
        assert_eq!(route.best(now), 0);
        assert!(Route::new(0).is_none());
    }
}
