//! What the worker counts. `engine-ext` reads it for its metrics; nothing here decides anything.

use crate::wire::{admit::Mode, reason::Reason};

/// Totals since start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counters {
    admissions: [u64; 3],
    refusals: [u64; Reason::ALL.len()],
    /// Turns that reached the scheduler.
    pub turns: u64,
    /// Turns that arrived without a live reservation and were admitted afresh (ADM-10).
    pub afresh: u64,
    /// Arrived turns whose need differed from what was reserved (ADM-14).
    pub estimates_wrong: u64,
    /// Turns that ended with a result.
    pub commits: u64,
    /// Prompt tokens of begun turns.
    pub prompt_tokens: u64,
    /// Of these, tokens restored from the session.
    pub restored_tokens: u64,
    /// Histories that were cut (OWN-7).
    pub rewinds: u64,
    /// Turns the engine took its memory back from.
    pub retracts: u64,
    /// Begun turns that ended without a result.
    pub aborts: u64,
    /// Turns that left the queue before they began.
    pub cancels: u64,
    /// Idle sessions that gave their KV up to the engine.
    pub evictions: u64,
    /// Tokens freed that way.
    pub evicted_tokens: u64,
    /// SES-3, last resort: a waiting turn's own copy was dropped.
    pub unwedged: u64,
    /// SES-3: copies cut because the session is over its cap.
    pub over_cap: u64,
    /// Reservations that lapsed (ADM-10).
    pub lapses: u64,
    /// Imports asked for.
    pub imports: u64,
    /// Imports that committed.
    pub imports_committed: u64,
    /// Tokens pulled by committed imports.
    pub imported_tokens: u64,
    /// Leases granted.
    pub leases: u64,
    /// Leases ended by force: a rewind, an abort, an eviction, a flush (XFER-2).
    pub revocations: u64,
    /// Leases that ended without renewal.
    pub leases_expired: u64,
    /// Engine flushes.
    pub flushes: u64,
}

impl Counters {
    /// Grants of this mode.
    pub fn admissions(&self, mode: Mode) -> u64 {
        self.admissions[mode as usize]
    }

    /// Refusals with this reason: admissions, arrivals, leases and imports together.
    pub fn refusals(&self, reason: Reason) -> u64 {
        self.refusals[reason as usize]
    }

    pub(super) fn admitted(&mut self, mode: Mode) {
        self.admissions[mode as usize] += 1;
    }

    pub(super) fn refused(&mut self, reason: Reason) {
        self.refusals[reason as usize] += 1;
    }
}

impl Default for Counters {
    fn default() -> Self {
        Counters {
            admissions: [0; 3],
            refusals: [0; Reason::ALL.len()],
            turns: 0,
            afresh: 0,
            estimates_wrong: 0,
            commits: 0,
            prompt_tokens: 0,
            restored_tokens: 0,
            rewinds: 0,
            retracts: 0,
            aborts: 0,
            cancels: 0,
            evictions: 0,
            evicted_tokens: 0,
            unwedged: 0,
            over_cap: 0,
            lapses: 0,
            imports: 0,
            imports_committed: 0,
            imported_tokens: 0,
            leases: 0,
            revocations: 0,
            leases_expired: 0,
            flushes: 0,
        }
    }
}
