//! Links: delay, loss, duplication, reordering (by jitter) and one-way partition, per direction.

use super::{clock::Time, rng::Rng};

/// How one direction behaves.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// The least delay in microseconds.
    pub delay: Time,
    /// What may come on top; more than the gap between two messages reorders them.
    pub jitter: Time,
    /// Messages lost, in thousandths.
    pub loss: u64,
    /// Messages delivered twice, in thousandths.
    pub duplicate: u64,
    /// Nothing passes until then.
    pub cut_until: Time,
}

impl Link {
    /// When a message sent at `now` arrives: not at all, once or twice.
    pub fn arrivals(&self, now: Time, once: bool, rng: &mut Rng) -> Vec<Time> {
        let mut at = || now + self.delay + rng.below(self.jitter + 1);
        let first = at();
        let second = at();
        if now < self.cut_until || rng.chance(self.loss) {
            return Vec::new();
        }
        if rng.chance(self.duplicate) && !once {
            return vec![first, second];
        }
        vec![first]
    }

    /// A link that only delays.
    pub fn heal(&mut self) {
        (self.loss, self.duplicate, self.cut_until) = (0, 0, 0);
    }
}
