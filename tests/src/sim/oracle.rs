//! What must hold after every step, by name (kv-movement §6): a mutation that is caught names the oracle that fired.

use std::fmt;

/// A rule that the simulation watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Oracle {
    /// OWN-4: no page with two owners, none freed twice.
    OneOwner,
    /// XFER-2: no page is freed while a lease makes it readable or a read of it is running.
    FreedUnderRead,
    /// XFER-1, XFER-2: no landing page is freed while a read into it is running.
    FreedUnderLanding,
    /// OWN-5: no committed position whose KV is not its tokens' true KV.
    TrueKv,
    /// OWN-5: a readable slot does not change until its lease is over.
    ReadableChanged,
    /// The engine's memory check: capacity = free + evictable + tree + held + running.
    Sum,
    /// ADM-7: the ledger covers what running turns were promised.
    Ledger,
    /// INV-1: no admission makes the ledger exceed ρ·K_d.
    Inv1,
    /// INV-2: a dispatch asks a bounded number of workers.
    Inv2,
    /// INV-3: a session leaves its worker only after a counted reject there.
    Inv3,
    /// DISP-7: a completed direct turn clears the session's rejects everywhere.
    RejectsCleared,
    /// ADM-8: one turn of a session at a time.
    OneTurn,
    /// SES-4, F16: a message meant for an earlier process changes nothing.
    Incarnation,
    /// SES-4: a worker does not go back to an older placement.
    Placement,
    /// MIG-3: no two workers own the same placement.
    OneHolder,
    /// SES-4, MIG-3: no placement has two owners at the same time.
    OneOwnerOfPlacement,
    /// MIG-1: a source decides once: one owner comes after a placement.
    OneDecision,
    /// MIG-1: what is handed over is what the source has committed.
    WholeHandover,
    /// MIG-2: what was withdrawn is never owned.
    Withdrawn,
    /// MIG-2: a target owns only what it was granted within the hand-over deadline.
    LateOwner,
    /// MIG-2: a pending target is asked, or waited out, before another placement is made.
    PendingFirst,
    /// SES-4: a worker that knows a later placement delivers nothing under the old one.
    Superseded,
    /// SYNC-1: when everything is quiet a replica is its owner's copy, unless its pull was refused.
    Lag,
    /// XFER-3: a lease that was revoked is not confirmed.
    Confirm,
    /// MIG-3, DISP-8: at most one answer per request.
    OneAnswer,
    /// The answer is the one a plain engine gives.
    TrueAnswer,
    /// MIG-4: without faults no request fails because a session moves or a worker drains.
    Served,
    /// Every request is answered within a bound.
    Answered,
    /// SES-3: room that was promised can be had; a waiting turn is not stuck.
    Room,
    /// Nothing is left when everything is over.
    Leak,
    /// The dispatch and its driver agree about what comes next.
    Driver,
    /// A machine panicked.
    Panic,
}

impl fmt::Display for Oracle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// An oracle has fired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which.
    pub oracle: Oracle,
    /// The facts.
    pub facts: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.oracle, self.facts)
    }
}

/// Collects violations of one node; the world looks after every step.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    first: Option<Violation>,
}

impl Watch {
    /// Notes a violation unless `holds`.
    pub fn check(&mut self, holds: bool, oracle: Oracle, facts: impl FnOnce() -> String) {
        if !holds && self.first.is_none() {
            self.first = Some(Violation { oracle, facts: facts() });
        }
    }

    /// Notes a violation.
    pub fn fire(&mut self, oracle: Oracle, facts: impl Into<String>) {
        self.check(false, oracle, || facts.into());
    }

    /// The first one.
    pub fn take(&mut self) -> Option<Violation> {
        self.first.take()
    }
}
