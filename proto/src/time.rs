//! Time as the machines see it: a monotonic reading handed in by the caller, never read here.

use std::{
    ops::{Add, Sub},
    time::Duration,
};

/// Microseconds on the caller's own monotonic clock, from an arbitrary origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Now(pub u64);

impl Now {
    /// The time that has passed since `earlier`, zero if it lies in the future.
    pub fn since(self, earlier: Now) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Now {
    type Output = Now;
    fn add(self, d: Duration) -> Now {
        Now(self.0.saturating_add(u64::try_from(d.as_micros()).unwrap_or(u64::MAX)))
    }
}

impl Sub<Now> for Now {
    type Output = Duration;
    fn sub(self, earlier: Now) -> Duration {
        self.since(earlier)
    }
}
