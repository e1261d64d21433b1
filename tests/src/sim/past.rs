//! What the processes of a world have done, ended ones included: the corners that a batch must have been in.

use super::process::Process;

/// What processes have done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Past {
    /// Turns committed.
    pub commits: u64,
    /// Imports committed.
    pub imports: u64,
    /// Sessions evicted.
    pub evictions: u64,
    /// Leases revoked.
    pub revocations: u64,
    /// Histories cut.
    pub rewinds: u64,
    /// Runs retracted.
    pub retracts: u64,
    /// Runs aborted.
    pub aborts: u64,
    /// Requests that no room could be found for.
    pub starved: u64,
    /// Announcements sent.
    pub announced: u64,
    /// Pulls of a backup that have committed, and that were given up.
    pub synced: u64,
    /// See there.
    pub unsynced: u64,
    /// Reseeds from a replica that have committed.
    pub reseeded: u64,
    /// Sessions handed over: the target knows that it owns them.
    pub moved: u64,
    /// Hand-overs answered `behind`, `busy`, and too late.
    pub behind: u64,
    /// See there.
    pub busy: u64,
    /// See there.
    pub late: u64,
    /// Pending targets that were asked and have withdrawn.
    pub withdrawn: u64,
    /// Turns that lost their placement while they waited or ran.
    pub superseded: u64,
}

impl Past {
    /// Adds a process's.
    pub(super) fn add(&mut self, process: &Process) {
        let counters = process.w.counters();
        self.commits += counters.commits;
        self.imports += counters.imports_committed;
        self.evictions += counters.evictions;
        self.revocations += counters.revocations;
        self.rewinds += counters.rewinds;
        self.retracts += process.deeds.retracts;
        self.aborts += process.deeds.aborts;
        self.starved += process.deeds.starved;
        self.announced += counters.announced;
        self.synced += counters.committed_by[2];
        self.unsynced += counters.syncs_failed;
        self.reseeded += counters.committed_by[1];
        self.moved += counters.taken_over;
        self.behind += counters.handovers_behind;
        self.busy += counters.handovers_busy;
        self.late += counters.answers_too_old;
        self.withdrawn += counters.withdrawn;
        self.superseded += counters.superseded_turns;
    }

    /// Adds another world's.
    pub fn join(&mut self, other: &Past) {
        self.commits += other.commits;
        self.imports += other.imports;
        self.evictions += other.evictions;
        self.revocations += other.revocations;
        self.rewinds += other.rewinds;
        self.retracts += other.retracts;
        self.aborts += other.aborts;
        self.starved += other.starved;
        self.announced += other.announced;
        self.synced += other.synced;
        self.unsynced += other.unsynced;
        self.reseeded += other.reseeded;
        self.moved += other.moved;
        self.behind += other.behind;
        self.busy += other.busy;
        self.late += other.late;
        self.withdrawn += other.withdrawn;
        self.superseded += other.superseded;
    }
}
