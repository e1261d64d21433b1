//! The values that go in and out of the [`Worker`](super) machine.

use std::{sync::Arc, time::Duration};

use crate::{
    id::{Epoch, ImportId, Incarnation, LeaseId, Placement, PrefixHandle, ReservationId, RouterId, SessionId, TurnId},
    session::Digest,
    wire::{
        admit::{ImportAnswer, PeerRef},
        reason::Refusal,
    },
};

/// A token id.
pub type Token = u32;
/// An engine slot: where one token's KV lies in every layer's buffer. Page `p` holds slots
/// `p * page_tokens .. (p + 1) * page_tokens`.
pub type Slot = u32;

/// Numbers fixed at start (algorithms §7). A value that exists is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerConfig {
    /// K_d: the engine's KV pool in tokens.
    pub capacity: u32,
    /// Tokens per page.
    pub page_tokens: u32,
    /// ρ in thousandths of K_d.
    pub rho_permille: u32,
    /// τ_append in tokens.
    pub max_uncached_tokens: u32,
    /// ADM-6.
    pub rule: CapacityRule,
    /// ADM-6: what an absent or larger max_new counts as, in tokens.
    pub clip: u32,
    /// ADM-10: how long a reservation lives without a sign of life.
    pub reservation: Duration,
    /// ADM-9.
    pub evict_idle: bool,
    /// SES-3: most tokens one session may hold after a turn.
    pub session_cap: u32,
    /// XFER-2: how long a lease lives without renewal.
    pub lease: Duration,
    /// XFER-2: how long a lease lives at most.
    pub lease_max: Duration,
    /// SYNC-3: keep replicas for others, and announce to those that keep ours.
    pub sync: bool,
    /// SYNC-1: replicas pulled at the same time; the rest wait.
    pub sync_imports: usize,
    /// XFER-7: a replica's pull is given up after this long.
    pub sync_deadline: Duration,
    /// MIG-2: a hand-over answer older than this counts as lost.
    pub handover_deadline: Duration,
    /// MIG-1: how long the source holds the next admit back for a target that is one delta behind.
    pub handover_hold: Duration,
    /// SES-1: sessions remembered after eviction (history-free records); the oldest go first.
    pub remembered: usize,
}

/// ADM-6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CapacityRule {
    /// used + need ≤ ρ·K_d.
    Growth,
    /// used + input_len ≤ ρ·K_d, as printed.
    Paper,
}

/// What KV depends on besides the token ids (SES-5): adapter, extra key / cache salt. Compared as one text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Identity(pub Arc<str>);

/// A request that carries a session id has reached the engine's scheduler.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// Whose turn it is.
    pub session: SessionId,
    /// SES-5.
    pub identity: Identity,
    /// The prompt.
    pub prompt: Prompt,
    /// The engine's generation limit; 0 for prefill only.
    pub max_new: u32,
    /// From the turn header: the grant.
    pub reservation: Option<ReservationId>,
    /// From the turn header.
    pub placement: Option<Placement>,
    /// From the turn header.
    pub origin: Option<(RouterId, u64)>,
}

/// A prompt's tokens, converted from the engine's list once per request.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// The whole history.
    Full(Vec<Token>),
    /// A streaming session's append: the prompt is the first `after` tokens of the session's history, then these. Only when `Worker::history_len` says `after`.
    Append {
        /// Tokens of history before the append.
        after: u32,
        /// The new ones.
        tokens: Vec<Token>,
    },
}

/// What the engine should match for a turn. Asking changes nothing (the engine asks again, reorders and drops).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Matched {
    /// Nothing usable is resident: the engine matches its own prefix tree.
    Tree,
    /// The first `tokens` of the prompt are resident.
    Session {
        /// Restored length.
        tokens: u32,
        /// Of these, how many lie in the engine's tree under `prefix` (page aligned).
        shared: u32,
        /// The engine's node for the shared part.
        prefix: PrefixHandle,
    },
}

/// What the engine must give up now: one slot of each page to free, and prefix handles nobody needs any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frees {
    /// The first slot of each page to free.
    pub slots: Vec<Slot>,
    /// Handles to forget (they are not locked).
    pub prefixes: Vec<PrefixHandle>,
}

/// Why a begun turn ends without a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rollback {
    /// The client or a limit ended it; the turn is over.
    Abort,
    /// The engine took its memory back and will run it again; the turn lives on.
    Retract,
}

/// The engine's numbers at one loop iteration, in tokens and requests (ADM-7).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The allocator's free tokens.
    pub free: u32,
    /// The engine's own evictable tokens, without the sessions'.
    pub tree_evictable: u32,
    /// Running requests.
    pub running: u32,
    /// Waiting requests.
    pub waiting: u32,
    /// Prompt tokens waiting.
    pub pending_prefill_tokens: u64,
    /// Tokens that the engine has promised to what runs and has not allocated: the later chunks of a prefill, which it does
    /// not check again, and the growth it expects. An import waits while it would take of them.
    pub reserved: u32,
    /// Tokens allocated so far by each running session turn beyond what was restored.
    pub allocated: Vec<(TurnId, u32)>,
}

/// What the engine's thread does for the machine in this loop iteration (OWN-2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Free pages: evicted, released or dropped.
    Free(Frees),
    /// Match `tokens` in the engine's tree (`have` tokens), lock that node, make room, allocate whole pages for
    /// `[max(have, held), tokens.len())`; then call `landed` or `land_failed`.
    Land {
        /// Which import.
        import: ImportId,
        /// The session's whole token range to be imported.
        tokens: Arc<[Token]>,
        /// Of these, how many the session already holds here (page aligned): they need no slots (XFER-3, SES-6).
        held: u32,
        /// SES-5, as the engine's extra key needs it.
        identity: Identity,
    },
    /// SES-4: the session was granted elsewhere under a higher placement: end this turn without result, as for a client
    /// that went away.
    Abort {
        /// Which turn; unknown ones are ignored.
        turn: TurnId,
    },
    /// The import has been confirmed: share its first `share` tokens in the engine's tree (page aligned), unlock what
    /// `Land` locked, then call `import_committed`.
    Commit {
        /// Which import.
        import: ImportId,
        /// Tokens to share with other sessions (SES-6).
        share: u32,
    },
    /// Unlock what `Land` locked and free its slots; the machine has forgotten the import.
    Drop {
        /// The landing slots.
        frees: Frees,
        /// The node `Land` locked.
        locked: PrefixHandle,
    },
}

/// An idle session that gives its KV up inside the engine's own `evict`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Victim {
    /// Who.
    pub session: SessionId,
    /// Tokens that come free at once.
    pub tokens: u32,
    /// Its pages and its prefix handle.
    pub frees: Frees,
}

/// Work for the module's own threads and movers. `Fence*` are carried out before the call that caused them returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Ask the peer for a lease on the session from token 0; a lease this import held before has been ended.
    OpenLease {
        /// The import it is for.
        import: ImportId,
        /// The session.
        session: SessionId,
        /// The peer's control address.
        peer: String,
        /// The peer process meant.
        incarnation: Incarnation,
        /// The placement meant.
        placement: Placement,
        /// What it is for.
        kind: LeaseKind,
        /// What this worker holds of the session: the grant need not repeat these tokens.
        have: Option<Have>,
    },
    /// MIG-1: ask the owner to hand over; answered by [`Worker::handover_answered`](super::Worker::handover_answered).
    AskHandover {
        /// The import.
        import: ImportId,
        /// The owner's control address.
        peer: String,
        /// All but who asks, which the transfer engine knows.
        request: Handover,
    },
    /// SYNC-1: tell the backup. A refusal `stale-epoch` goes to
    /// [`Worker::announce_refused`](super::Worker::announce_refused); a later announcement of the session replaces one
    /// that has not gone out.
    Announce {
        /// The backup.
        to: PeerRef,
        /// What was committed.
        announcement: Announcement,
    },
    /// Pull tokens `[from, from + slots.len())` into these slots as they become readable.
    Pull {
        /// The import.
        import: ImportId,
        /// First token to pull.
        from: u32,
        /// Where each token's KV goes.
        slots: Arc<[Slot]>,
    },
    /// Ask the exporter whether the lease was valid throughout (XFER-3).
    Confirm {
        /// The import.
        import: ImportId,
    },
    /// End the lease at the exporter; errors do not matter any more (F13).
    EndLease {
        /// The import.
        import: ImportId,
    },
    /// Stop reading into the landing pages of this import; when it returns nothing writes there any more.
    FenceImport {
        /// The import.
        import: ImportId,
    },
    /// When it returns nothing can be read under this lease any more (XFER-2).
    FenceLease {
        /// The lease.
        lease: LeaseId,
    },
    /// More became readable under this lease, or the turn it follows has ended.
    LeaseGrown {
        /// The lease.
        lease: LeaseId,
    },
    /// A session that peers may be waiting for has arrived, or its turn has ended.
    Arrived {
        /// The session.
        session: SessionId,
    },
    /// The import is over; answer who asked for it.
    ImportDone {
        /// The import.
        import: ImportId,
        /// What it did, or why not.
        outcome: Result<ImportDone, Refusal>,
    },
    /// The engine's loop has work: wake it if it sleeps.
    Wake,
}

/// A committed import in tokens; the transfer engine adds bytes and time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImportDone {
    /// Tokens resident now.
    pub resident: u32,
    /// Tokens pulled.
    pub pulled: u32,
}

impl ImportDone {
    /// As it travels.
    pub fn answer(self, bytes: u64, took: Duration) -> ImportAnswer {
        ImportAnswer {
            resident_tokens: self.resident,
            pulled_tokens: self.pulled,
            bytes,
            micros: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
        }
    }
}

/// A peer asks for a lease (XFER-2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRequest {
    /// The session.
    pub session: SessionId,
    /// The placement meant; what it means depends on the kind.
    pub placement: Placement,
    /// This process, as the peer knows it.
    pub incarnation: Incarnation,
    /// What it is for.
    pub kind: LeaseKind,
    /// What the peer holds already.
    pub have: Option<Have>,
}

/// What a lease is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LeaseKind {
    /// A seed or reseed follows this worker's prefill under the same placement; waits for its turn (DISP-3).
    #[default]
    Follow,
    /// A reseed elsewhere, *granted* under this placement, takes what is committed here: whoever owned the session under
    /// a lower one keeps its copy as a replica (SES-4). Waits for a running turn that this ends.
    Replica,
    /// A backup follows the owner under the owner's placement, or a replica of that placement (SYNC-1). Changes nothing;
    /// a running turn's committed part is granted (OWN-5).
    Sync,
    /// The target of a move prepares under a *pending* placement (MIG-1). Only the owner grants; changes nothing.
    Prepare,
}

/// A prefix that the importer holds: ids are not repeated if the exporter's first `tokens` have the same digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Have {
    /// Its length, 1 or more.
    pub tokens: u32,
    /// Over identity and token ids.
    pub digest: Digest,
}

/// A target asks the owner of a session to hand it over (MIG-1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handover {
    /// The session.
    pub session: SessionId,
    /// The owner's process, as the target knows it.
    pub incarnation: Incarnation,
    /// The number that the target owns once this is granted.
    pub pending: Placement,
    /// The owner's epoch under which the target's copy was read.
    pub epoch: Epoch,
    /// Tokens of the target's copy.
    pub committed: u32,
    /// Digest of all of them.
    pub digest: Digest,
}

/// The owner's answer to a [`Handover`]: the single decision point of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandoverAnswer {
    /// The asker owns the session from here on; the same question gets the same answer again (MIG-2).
    Granted,
    /// The asker's copy is not the owner's: pull the rest and ask again.
    Behind,
    /// A turn is admitted or runs: ask again after [`Effect::Arrived`], or a little later.
    Busy,
}

/// An owner tells its backup what it has committed (SYNC-1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// The session.
    pub session: SessionId,
    /// The owner's epoch.
    pub epoch: Epoch,
    /// Committed tokens.
    pub committed: u32,
    /// Over identity and token ids of all of them.
    pub digest: Digest,
    /// SES-5.
    pub identity: Identity,
}

/// The answer to a [`LeaseRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAnswer {
    /// Granted.
    Granted(LeaseGrant),
    /// The turn has not arrived yet: ask again after [`Effect::Arrived`], or give up at the deadline.
    Wait,
}

/// A granted lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseGrant {
    /// Its number.
    pub lease: LeaseId,
    /// The session's epoch at grant.
    pub epoch: Epoch,
    /// SES-5.
    pub identity: Identity,
    /// Tokens of the range that the asker holds ([`Have`]) and that are not repeated.
    pub after: u32,
    /// Every further token of the range, also those whose KV is not readable yet.
    pub tokens: Arc<[Token]>,
    /// Tokens readable now.
    pub readable: u32,
    /// Tokens of the session's first prompt, to be shared by the importer too (SES-6).
    pub share: u32,
    /// Ends after this long without renewal.
    pub lives: Duration,
}

/// What became readable under a lease since the last look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseView {
    /// First token of `slots`.
    pub from: u32,
    /// Slots of tokens `[from, from + slots.len())`.
    pub slots: Vec<Slot>,
    /// The whole range is readable: nothing more will come.
    pub complete: bool,
}
