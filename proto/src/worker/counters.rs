//! What the worker counts. `engine-ext` reads it for its metrics; nothing here decides anything.

use crate::{
    transfer::Purpose,
    wire::{admit::Mode, reason::Reason},
};

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
    /// Committed turns told to a backup (SYNC-1).
    pub announced: u64,
    /// Announcements taken in from owners.
    pub announcements: u64,
    /// Replica pulls begun.
    pub syncs: u64,
    /// Replica pulls that failed.
    pub syncs_failed: u64,
    /// Announcements given up: newer ones took their place in the bounded queue, or their pull failed too often.
    pub syncs_dropped: u64,
    /// Imports that committed, by purpose: seed, reseed, sync, move (the rounds of a move each).
    pub committed_by: [u64; 4],
    /// Tokens these pulled.
    pub imported_by: [u64; 4],
    /// Hand-overs granted (MIG-1).
    pub handed_over: u64,
    /// Hand-overs answered `behind`.
    pub handovers_behind: u64,
    /// Hand-overs answered `busy`.
    pub handovers_busy: u64,
    /// Sessions taken over from another owner.
    pub taken_over: u64,
    /// Hand-over answers that came too late and were discarded (MIG-2).
    pub answers_too_old: u64,
    /// Moves withdrawn for a router (MIG-2).
    pub withdrawn: u64,
    /// Turns aborted because their session was granted elsewhere (SES-4).
    pub superseded_turns: u64,
    /// Sessions of which this worker learned that it no longer owns them.
    pub lost: u64,
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

    pub(super) fn imported(&mut self, purpose: Purpose, tokens: u32) {
        self.imports_committed += 1;
        self.imported_tokens += u64::from(tokens);
        let at = match purpose {
            Purpose::Seed(_) => 0,
            Purpose::Reseed(_) => 1,
            Purpose::Sync(_) => 2,
            Purpose::Move(_) => 3,
        };
        self.committed_by[at] += 1;
        self.imported_by[at] += u64::from(tokens);
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
            announced: 0,
            announcements: 0,
            syncs: 0,
            syncs_failed: 0,
            syncs_dropped: 0,
            committed_by: [0; 4],
            imported_by: [0; 4],
            handed_over: 0,
            handovers_behind: 0,
            handovers_busy: 0,
            taken_over: 0,
            answers_too_old: 0,
            withdrawn: 0,
            superseded_turns: 0,
            lost: 0,
        }
    }
}
