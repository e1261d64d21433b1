//! Each node's own monotonic clock: an offset and a drift against the world's time.

use kvc_proto::time::Now;

use super::rng::Rng;

/// The world's time in microseconds.
pub type Time = u64;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    offset: u64,
    /// Parts per million that this clock runs fast or slow.
    drift: i64,
}

impl Clock {
    /// A clock somewhere, at most `drift` parts per million off.
    pub fn new(rng: &mut Rng, drift: u64) -> Clock {
        Clock {
            offset: rng.below(1 << 40),
            drift: rng.range(0, 2 * drift) as i64 - drift as i64,
        }
    }

    /// What it shows at `t`.
    pub fn at(&self, t: Time) -> Now {
        Now(self.offset + self.scale(t))
    }

    /// The first moment at which it shows `now` or later.
    pub fn when(&self, now: Now) -> Time {
        let span = now.0.saturating_sub(self.offset);
        let mut t = (span as i128 * 1_000_000 / (1_000_000 + self.drift) as i128) as Time;
        while self.scale(t) < span {
            t += 1;
        }
        t
    }

    /// It leaps ahead: the machine slept, and its clock did not.
    pub fn leap(&mut self, by: Time) {
        self.offset += by;
    }

    fn scale(&self, t: Time) -> u64 {
        (t as i128 * (1_000_000 + self.drift) as i128 / 1_000_000) as u64
    }
}
