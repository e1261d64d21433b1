//! The order in which copies are given up: O(log sessions) per change, O(1) to look at the next one.

use std::collections::BTreeMap;

use super::{Hold, Key, Session};

/// A place in the order: class first, then last use.
pub type Rank = (Class, u64);

/// Which copies go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Its KV is no longer wanted.
    Doomed,
    /// A copy kept for a session that lives elsewhere: there it can be had again.
    Spare,
    /// Idle, no lease (ADM-9).
    Idle,
    /// Idle, but a peer reads it (SES-3: revoked as last resort).
    Leased,
    /// Its next turn is admitted, waits, or waits for an import (SES-3).
    Awaited,
    /// The unclaimed tail of a claimed copy.
    Tail,
    /// No KV: a remembered name (SES-1). Never a victim; the oldest is forgotten when there are too many.
    Absent,
}

/// The order.
#[derive(Clone, Debug, Default)]
pub struct EvictOrder {
    resident: BTreeMap<Rank, Key>,
    absent: BTreeMap<u64, Key>,
}

impl EvictOrder {
    /// Moves a session from one place to another.
    pub fn moved(&mut self, key: Key, from: Option<Rank>, to: Option<Rank>) {
        if from == to {
            return;
        }
        match from {
            Some((Class::Absent, seq)) => drop(self.absent.remove(&seq)),
            Some(rank) => drop(self.resident.remove(&rank)),
            None => {}
        }
        match to {
            Some((Class::Absent, seq)) => drop(self.absent.insert(seq, key)),
            Some(rank) => drop(self.resident.insert(rank, key)),
            None => {}
        }
    }

    /// The next victim.
    pub fn first(&self) -> Option<(Class, Key)> {
        self.resident.first_key_value().map(|((class, _), key)| (*class, *key))
    }

    /// The record to forget when more than `keep` are remembered.
    pub fn oldest_absent(&self, keep: usize) -> Option<Key> {
        (self.absent.len() > keep)
            .then(|| self.absent.first_key_value().map(|(_, key)| *key))
            .flatten()
    }

    /// Every copy that could be a victim.
    pub fn resident(&self) -> impl Iterator<Item = (Class, Key)> {
        self.resident.iter().map(|((class, _), key)| (*class, *key))
    }

    /// All sessions that are merely idle, least recently used first.
    pub fn of_class(&self, class: Class) -> impl Iterator<Item = Key> {
        self.resident.range((class, 0)..=(class, u64::MAX)).map(|(_, key)| *key)
    }
}

/// Where a session belongs. `tail` says whether a claimed copy has an unclaimed tail.
pub fn rank(session: &Session, tail: bool) -> Option<Rank> {
    let Some(copy) = &session.copy else {
        return session.is_bare().then_some((Class::Absent, session.seq));
    };
    let class = match (copy.hold, session.state) {
        (Hold::Lent | Hold::Landing, _) => return None,
        (Hold::Claimed(_), _) => return tail.then_some((Class::Tail, session.seq)),
        (Hold::Free, _) if session.doomed && session.turn().is_none() => Class::Doomed,
        (Hold::Free, _) if session.is_idle() && !session.leases.is_empty() => Class::Leased,
        (Hold::Free, _) if session.is_idle() && !session.is_owner() => Class::Spare,
        (Hold::Free, _) if session.is_idle() => Class::Idle,
        (Hold::Free, _) => Class::Awaited,
    };
    Some((class, session.seq))
}
