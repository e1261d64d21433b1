//! A running pull of a session's KV into this worker: leasing → granted → landing → pulling → confirming → confirmed →
//! committing (XFER-1..3). Nothing of it is visible before the commit; an end before that gives every page back.

use std::sync::Arc;

use crate::{
    block::Table,
    id::{Epoch, Incarnation, Placement, PrefixHandle, ReservationId},
    session::Key,
    time::Now,
    worker::api::{Handover, Have, Identity, LeaseKind, Token},
};

/// One import.
#[derive(Clone, Debug)]
pub struct Import {
    /// The session.
    pub session: Key,
    /// What it is for.
    pub purpose: Purpose,
    /// The peer's control address.
    pub peer: String,
    /// The peer process.
    pub incarnation: Incarnation,
    /// The placement it names to the peer; see [`LeaseKind`].
    pub placement: Placement,
    /// What the peer was told that this worker holds.
    pub have: Option<Have>,
    /// Tokens pulled by earlier rounds of a move.
    pub pulled_before: u32,
    /// Given up then.
    pub deadline: Now,
    /// How far it is.
    pub phase: ImportPhase,
}

/// What an import is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A granted turn's seed or reseed, from a peer that computes the prompt.
    Seed(ReservationId),
    /// A granted turn's reseed, from what a peer has committed (SYNC-2).
    Reseed(ReservationId),
    /// A replica follows (SYNC-1): the announcement of this number, or a router's wish.
    Sync(u64),
    /// A move, charged to a reservation of its own (MIG-1).
    Move(ReservationId),
}

/// What the exporter granted.
#[derive(Clone, Debug)]
pub struct Offer {
    /// The exporter's epoch.
    pub epoch: Epoch,
    /// SES-5.
    pub identity: Identity,
    /// All tokens of the range, from token 0.
    pub tokens: Arc<[Token]>,
    /// The session's first prompt: to be shared here too (SES-6).
    pub share: u32,
}

/// Where the pulled tokens go.
#[derive(Clone, Debug)]
pub struct Landing {
    /// What is pulled.
    pub offer: Offer,
    /// First token to pull; page aligned. What lies below is the session's older copy or the engine's tree.
    pub from: u32,
    /// Below `from` lies the tree (else the session's own copy).
    pub tree: bool,
    /// The node that the engine has locked for it.
    pub locked: PrefixHandle,
    /// Pages of the tree part, if `tree`.
    pub head: Table,
    /// Pages that are written.
    pub pages: Table,
    /// Tokens that have arrived.
    pub pulled: u32,
}

/// How far an import is.
#[derive(Clone, Debug)]
pub enum ImportPhase {
    /// The peer has been asked for a lease.
    Leasing,
    /// The lease is here; the next poll asks the engine for pages.
    Granted(Offer),
    /// The engine has been asked for pages.
    Landing {
        /// What is to land.
        offer: Offer,
        /// Tokens of the older copy that stay (page aligned).
        held: u32,
    },
    /// The mover reads.
    Pulling(Landing),
    /// Everything is here; the peer is asked whether the lease was valid throughout (XFER-3).
    Confirming(Landing),
    /// It was; the next poll commits.
    Confirmed(Landing),
    /// The engine has been told to commit. From here on the import cannot fail.
    Committing(Landing),
    /// A move: the copy is complete; the owner is asked to hand over (MIG-1). The question is kept, for it may have been
    /// granted and the answer lost: asked again it is the same.
    HandingOver(Box<Handover>),
}

impl Purpose {
    /// The charge it runs under.
    pub fn reservation(self) -> Option<ReservationId> {
        match self {
            Purpose::Seed(id) | Purpose::Reseed(id) | Purpose::Move(id) => Some(id),
            Purpose::Sync(_) => None,
        }
    }

    /// What the peer is asked for.
    pub fn lease(self) -> LeaseKind {
        match self {
            Purpose::Seed(_) => LeaseKind::Follow,
            Purpose::Reseed(_) => LeaseKind::Replica,
            Purpose::Sync(_) => LeaseKind::Sync,
            Purpose::Move(_) => LeaseKind::Prepare,
        }
    }

    /// As `/kvc/v1/transfers` and the metrics write it.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Seed(_) => "seed",
            Purpose::Reseed(_) => "reseed",
            Purpose::Sync(_) => "sync",
            Purpose::Move(_) => "move",
        }
    }
}

impl ImportPhase {
    /// The phase's name.
    pub fn name(&self) -> &'static str {
        match self {
            ImportPhase::Leasing => "leasing",
            ImportPhase::Granted(_) | ImportPhase::Landing { .. } => "landing",
            ImportPhase::Pulling(_) => "pulling",
            ImportPhase::Confirming(_) => "confirming",
            ImportPhase::Confirmed(_) | ImportPhase::Committing(_) => "committing",
            ImportPhase::HandingOver(_) => "handing-over",
        }
    }

    /// Whether the session's older copy is held for it.
    pub fn pins(&self) -> bool {
        !matches!(
            self,
            ImportPhase::Leasing | ImportPhase::Granted(_) | ImportPhase::HandingOver(_)
        )
    }

    /// The landing pages, once they are allocated.
    pub fn landing(&self) -> Option<&Landing> {
        match self {
            ImportPhase::Pulling(l)
            | ImportPhase::Confirming(l)
            | ImportPhase::Confirmed(l)
            | ImportPhase::Committing(l) => Some(l),
            ImportPhase::Leasing
            | ImportPhase::Granted(_)
            | ImportPhase::Landing { .. }
            | ImportPhase::HandingOver(_) => None,
        }
    }

    /// What the exporter granted, once it has.
    pub fn offer(&self) -> Option<&Offer> {
        match self {
            ImportPhase::Leasing | ImportPhase::HandingOver(_) => None,
            ImportPhase::Granted(offer) | ImportPhase::Landing { offer, .. } => Some(offer),
            other => other.landing().map(|l| &l.offer),
        }
    }
}

impl Offer {
    /// Tokens of the range.
    pub fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }

    /// Nothing is offered.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

impl Landing {
    /// Tokens to pull in all.
    pub fn total(&self) -> u32 {
        self.offer.len().saturating_sub(self.from)
    }
}
