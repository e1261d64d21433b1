//! One session: its name, its epoch, the KV it holds here and who uses it (kv-movement §2).

use crate::{
    block::{self, Table},
    id::{Epoch, ImportId, LeaseId, Placement, PrefixHandle, ReservationId, SessionId, TurnId},
    time::Now,
    wire::{
        admit::{MovedTo, PeerRef},
        info,
    },
    worker::api::{Identity, Token},
};

use super::{Chain, Digest, evict::Rank};

/// Everything known about a session. Identity outlives KV (SES-1): `copy` comes and goes.
#[derive(Clone, Debug)]
pub struct Session {
    /// Its name.
    pub id: SessionId,
    /// Where it lives, if a router said so (SES-4).
    pub placement: Option<Placement>,
    /// Under which placement its last turn arrived here: a copy that only came with that number is not what a seed waits
    /// for (DISP-3).
    pub arrived: Option<Placement>,
    /// How often its history was cut under that placement (OWN-7); of a replica: the owner's number.
    pub rewind: u32,
    /// What this worker is to it.
    pub standing: Standing,
    /// A number up to which this worker will never own it (MIG-2).
    pub floor: Option<Placement>,
    /// Who keeps its replica (SYNC-1).
    pub backup: Option<PeerRef>,
    /// What its owner has announced and this worker has not pulled (SYNC-1).
    pub wish: Option<Box<Wish>>,
    /// MIG-1: the next admit is held back until then, for a target that is one delta behind.
    pub yields: Option<Now>,
    /// Its KV here.
    pub copy: Option<Copy>,
    /// Who uses it.
    pub state: SessionState,
    /// Live leases on it.
    pub leases: Vec<LeaseId>,
    /// Its KV is no longer wanted: freed at the next poll, or at the end of the turn that uses it (SES-2).
    pub doomed: bool,
    /// After an eviction: how much of it the tree shared (trap list: or the whole history goes into the tree).
    pub boundary: Option<u32>,
    /// Last use.
    pub used: Now,
    /// Order of last use.
    pub seq: u64,
    /// The poll after which its own pages last changed: until the next one the ledger's snapshot does not know them.
    pub changed: u64,
    /// What it adds to the worker's sums now.
    pub marks: Marks,
}

/// Who uses a session. Transitions are the worker's; each takes the states it accepts and refuses the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionState {
    /// Nobody. With a copy it is `idle` (or `evicting`, when doomed); without one `evicted`.
    Idle,
    /// Granted to a request that has not arrived (ADM-8).
    Admitted(ReservationId),
    /// A peer's KV is on its way, under a grant or for a move.
    Importing(ImportId, ReservationId),
    /// Nobody, and a replica's pull runs: it gives way to everything (SYNC-3).
    Syncing(ImportId),
    /// A turn waits in the engine's queue.
    Waiting(TurnId),
    /// A turn has begun.
    Running(TurnId),
}

/// What a worker is to a session (SES-4).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Runs its turns.
    Owner,
    /// Keeps a copy for whoever runs them.
    Replica,
    /// Has handed it over, under the session's placement.
    Moved(PeerRef),
}

/// An announcement that waits to be pulled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Who has it.
    pub from: PeerRef,
    /// The owner's epoch.
    pub epoch: Epoch,
    /// Committed tokens there.
    pub committed: u32,
    /// Its place in the order: the most recently active first.
    pub seq: u64,
    /// Pulls that have failed.
    pub failed: u32,
    /// Not before.
    pub after: Option<Now>,
}

/// A session's KV in this worker.
#[derive(Clone, Debug)]
pub struct Copy {
    /// SES-5.
    pub identity: Identity,
    /// Token ids: the committed history; while a turn runs, its whole prompt.
    pub tokens: Vec<Token>,
    /// The digest of what is committed of them.
    pub chain: Chain,
    /// Pages of tokens `[0, readable)`.
    pub table: Table,
    /// The first `shared` tokens (page aligned) lie in the engine's tree (SES-6). Exact committed length and this
    /// protected one are two numbers (OWN-6, F7).
    pub shared: u32,
    /// The tree's handle for them.
    pub prefix: PrefixHandle,
    /// Tokens whose KV is complete (OWN-6).
    pub readable: u32,
    /// What keeps its own pages from being evicted.
    pub hold: Hold,
}

/// What keeps a copy's own pages from the engine's `evict`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// Nothing.
    Free,
    /// A waiting turn's match of this many tokens is locked; the tail is not.
    Claimed(u32),
    /// A turn runs on it: the engine counts its pages as the turn's.
    Lent,
    /// An import extends it.
    Landing,
}

/// A session's part of the worker's sums, remembered so that a change is a subtraction and an addition: no sum is ever
/// recomputed over all sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Tokens counted in `evictable`.
    pub evictable: u32,
    /// Tokens counted in `held`.
    pub held: u32,
    /// Tokens the ledger counts as reclaimable (ADM-7, ADM-9).
    pub reclaimable: u32,
    /// Its place in the order of victims.
    pub rank: Option<Rank>,
}

impl Session {
    /// A session seen for the first time.
    pub fn new(id: SessionId, now: Now) -> Session {
        Session {
            id,
            placement: None,
            arrived: None,
            rewind: 0,
            standing: Standing::Owner,
            floor: None,
            backup: None,
            wish: None,
            yields: None,
            copy: None,
            state: SessionState::Idle,
            leases: Vec::new(),
            doomed: false,
            boundary: None,
            used: now,
            seq: 0,
            changed: 0,
            marks: Marks::default(),
        }
    }

    /// Tokens of committed KV that the next turn may use.
    pub fn resident(&self) -> u32 {
        match &self.copy {
            Some(copy) if !self.doomed && copy.hold != Hold::Lent => copy.len(),
            _ => 0,
        }
    }

    /// Its epoch, once a router has placed it.
    pub fn epoch(&self) -> Option<Epoch> {
        self.placement.map(|placement| Epoch {
            placement,
            rewind: self.rewind,
        })
    }

    /// The turn that waits or runs.
    pub fn turn(&self) -> Option<TurnId> {
        match self.state {
            SessionState::Waiting(turn) | SessionState::Running(turn) => Some(turn),
            SessionState::Idle | SessionState::Admitted(_) | SessionState::Importing(..) | SessionState::Syncing(_) => {
                None
            }
        }
    }

    /// Nobody uses it.
    pub fn is_idle(&self) -> bool {
        matches!(self.state, SessionState::Idle | SessionState::Syncing(_))
    }

    /// This worker runs its turns.
    pub fn is_owner(&self) -> bool {
        self.standing == Standing::Owner
    }

    /// Where it was handed over to.
    pub fn moved(&self) -> Option<MovedTo> {
        match (&self.standing, self.placement) {
            (Standing::Moved(to), Some(placement)) => Some(MovedTo {
                to: to.clone(),
                placement,
            }),
            _ => None,
        }
    }

    /// Nothing is left worth a record, once its KV is gone.
    pub fn is_bare(&self) -> bool {
        self.copy.is_none() && self.state == SessionState::Idle && self.leases.is_empty() && self.wish.is_none()
    }

    /// The state's name (kv-movement §2).
    pub fn state_name(&self) -> &'static str {
        match self.state {
            SessionState::Importing(..) | SessionState::Syncing(_) => "importing",
            SessionState::Idle if matches!(self.standing, Standing::Moved(_)) => "moved",
            SessionState::Idle if self.copy.is_none() => "evicted",
            SessionState::Idle if self.doomed => "evicting",
            SessionState::Idle => "idle",
            SessionState::Admitted(_) | SessionState::Waiting(_) => "admitted",
            SessionState::Running(_) => "running",
        }
    }
}

impl Standing {
    /// As it travels.
    pub fn view(&self) -> info::Standing {
        match self {
            Standing::Owner => info::Standing::Owner,
            Standing::Replica => info::Standing::Replica,
            Standing::Moved(_) => info::Standing::Moved,
        }
    }
}

impl Copy {
    /// The digest of its first `n` tokens.
    pub fn digest(&mut self, n: u32) -> Digest {
        self.chain.digest(&self.identity, &self.tokens, n)
    }

    /// Takes tokens back, to the first `n`.
    pub fn truncate(&mut self, n: u32) {
        self.tokens.truncate(n as usize);
        self.chain.cut(n);
    }

    /// Length of `tokens`.
    pub fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }

    /// No token at all.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Tokens in pages that are the session's own: all but the shared ones, page-rounded.
    pub fn own(&self, page_tokens: u32) -> u32 {
        (self.table.len() * page_tokens).saturating_sub(self.shared)
    }

    /// Own tokens up to a length, page-rounded.
    pub fn own_below(&self, tokens: u32, page_tokens: u32) -> u32 {
        block::ceil(tokens, page_tokens)
            .saturating_sub(self.shared)
            .min(self.own(page_tokens))
    }

    /// How many of a prompt's first `common` tokens it can serve: nothing below the shared part (the engine's tree
    /// serves that itself), everything from there on.
    pub fn usable(&self, common: u32) -> u32 {
        let n = common.min(self.len());
        if n < self.shared { 0 } else { n }
    }
}
