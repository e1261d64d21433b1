//! The values that go in and out of a [`Move`](super::Move).

use super::super::view::{Health, WorkerIndex};
use crate::{
    id::{Placement, SessionId},
    time::Now,
    wire::{
        admit::{ImportAnswer, ImportRequest, WithdrawAnswer, WithdrawRequest},
        reason::Reason,
    },
};

/// What the front does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MoveEffect {
    /// `POST /kvc/v1/sessions/{id}/import` at the target → [`MoveEvent::Moved`], [`MoveEvent::Refused`] or
    /// [`MoveEvent::Unreachable`].
    Import {
        /// The target.
        worker: WorkerIndex,
        /// The session.
        session: SessionId,
        /// The body.
        request: Box<ImportRequest>,
    },
    /// `POST /kvc/v1/sessions/{id}/withdraw` at the target → [`MoveEvent::Withdrawn`], [`MoveEvent::WithdrawRefused`] or
    /// [`MoveEvent::Unreachable`].
    Withdraw {
        /// The target.
        worker: WorkerIndex,
        /// The session.
        session: SessionId,
        /// The body.
        request: WithdrawRequest,
    },
    /// Call [`Move::handle_timeout`](super::Move::handle_timeout) at `until`.
    Wait {
        /// When.
        until: Now,
    },
}

/// What came of an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveEvent {
    /// The target owns the session.
    Moved(ImportAnswer),
    /// The target refused or gave up, typed.
    Refused(Reason),
    /// No answer: the connection broke, or the deadline passed.
    Unreachable,
    /// The target's word.
    Withdrawn(WithdrawAnswer),
    /// The target refused to answer, typed.
    WithdrawRefused(Reason),
}

/// How a move ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveOutcome {
    /// The target owns the session.
    Moved {
        /// Under this number.
        placement: Placement,
        /// What its import did, unless that answer was lost.
        import: Option<ImportAnswer>,
    },
    /// The source still owns it, and the target never will under that number.
    Stayed(Reason),
    /// The target could not be reached and was waited out (MIG-2). If it does own the session, the source says so to the
    /// next turn.
    Unknown(Reason),
}

impl MoveOutcome {
    /// As metrics and logs write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            MoveOutcome::Moved { .. } => "moved",
            MoveOutcome::Stayed(_) => "stayed",
            MoveOutcome::Unknown(_) => "unknown",
        }
    }
}

/// Why a move does not begin; nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CannotMove {
    /// No worker knows the session.
    #[error("no worker knows the session")]
    UnknownSession,
    /// Workers keep copies, nobody owns it.
    #[error("no worker that answers owns the session")]
    NotOwned,
    /// Its owner holds no committed KV: the next turn is reseeded anyhow.
    #[error("its owner holds no committed KV of the session")]
    NotResident,
    /// Who calls itself the owner has lost the session to another worker, which answers.
    #[error("whoever calls itself its owner lost it to placement {}", known.n)]
    Superseded {
        /// The placement known.
        known: Placement,
    },
    /// The target owns it.
    #[error("the target owns the session already")]
    ToItself,
    /// The target is a prefill worker.
    #[error("the target takes no turns")]
    TakesNoTurns,
    /// The target takes no work.
    #[error("the target is {}", .0.as_str())]
    Target(Health),
    /// The owner's peer address is not known yet.
    #[error("the owner's peer address is not known yet")]
    SourceUnknown,
    /// A turn of the session is being placed.
    #[error("a turn of the session is being placed")]
    Placing,
    /// Another move of the session is out.
    #[error("another move of the session is out")]
    Running,
}

impl CannotMove {
    /// As it travels.
    pub const fn reason(self) -> Reason {
        match self {
            CannotMove::UnknownSession => Reason::UnknownSession,
            CannotMove::NotOwned | CannotMove::Superseded { .. } => Reason::NotOwner,
            CannotMove::NotResident => Reason::NotResident,
            CannotMove::ToItself => Reason::ImportFromSelf,
            CannotMove::TakesNoTurns => Reason::BadRequest,
            CannotMove::Target(Health::Draining) => Reason::Draining,
            CannotMove::Target(_) | CannotMove::SourceUnknown => Reason::PeerUnreachable,
            CannotMove::Placing => Reason::SessionBusy,
            CannotMove::Running => Reason::ImportRunning,
        }
    }
}

/// An event that the move's state does not expect: a fault of the caller. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unexpected {event:?} while {state}")]
pub struct MoveOutOfTurn {
    /// The event.
    pub event: MoveEvent,
    /// The state.
    pub state: &'static str,
}
