//! The values that go in and out of a [`Dispatch`](super::Dispatch).

use super::super::{resident::Resident, view::WorkerIndex};
use crate::{
    id::{Placement, RequestKey, SessionId},
    time::Now,
    wire::{
        admit::{AdmitAnswer, AdmitRequest, ImportRequest, Mode, Source, WithdrawAnswer, WithdrawRequest},
        reason::Reason,
        turn::TurnTag,
    },
};

/// A client's request as the router sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Whose; a request without a session takes the fallback path (DISP-5).
    pub session: Option<SessionId>,
    /// Tokens of the whole prompt, 1 or more.
    pub input_tokens: u32,
    /// The client's generation limit, if it sent one.
    pub max_new_tokens: Option<u32>,
    /// `input_tokens` is an estimate from text (ADM-14).
    pub estimated: bool,
}

/// How a request ran (DISP-9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExecutionMode {
    /// On resident KV.
    Direct,
    /// First turn of a session.
    Seed,
    /// The KV was not there, or the append was large.
    Reseed,
    /// No session kept.
    Fallback,
}

impl ExecutionMode {
    /// All, in order.
    pub const ALL: [ExecutionMode; 4] = [Self::Direct, Self::Seed, Self::Reseed, Self::Fallback];

    /// As headers and metrics write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Seed => "seed",
            Self::Reseed => "reseed",
            Self::Fallback => "fallback",
        }
    }
}

impl From<Mode> for ExecutionMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Direct => Self::Direct,
            Mode::Seed => Self::Seed,
            Mode::Reseed => Self::Reseed,
        }
    }
}

/// What the front does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// `GET /kvc/v1/sessions/{id}` at each: what they hold of a session this router does not know (ROUTE-9) →
    /// [`Event::Residents`].
    Ask {
        /// The session.
        session: SessionId,
        /// At whom, at once.
        workers: Vec<WorkerIndex>,
    },
    /// `POST /admit_direct_append` → [`Event::Answer`] or [`Event::Unreachable`].
    Probe {
        /// At whom.
        worker: WorkerIndex,
        /// The body.
        request: Box<AdmitRequest>,
    },
    /// `GET /kvc/v1/sessions/{id}` at each: those believed to hold KV of a session that is reseeded (SYNC-2) →
    /// [`Event::Located`].
    Locate {
        /// The session.
        session: SessionId,
        /// At whom, at once.
        workers: Vec<WorkerIndex>,
    },
    /// `POST /kvc/v1/sessions/{id}/withdraw`: the target of a move is asked before another placement is made (MIG-2) →
    /// [`Event::Withdrawn`], [`Event::WithdrawRefused`] or [`Event::Unreachable`].
    Withdraw {
        /// The pending target.
        worker: WorkerIndex,
        /// The session.
        session: SessionId,
        /// The body.
        request: WithdrawRequest,
    },
    /// DISP-3, SYNC-2: the KV goes to the decode worker → [`Event::Imported`], [`Event::ImportFailed`] or, with a
    /// prefill, [`Event::PrefillFailed`]. After the last the import is abandoned by closing its connection.
    HandOver(Box<Handover>),
    /// Send the client's body to the worker's engine → [`Event::TurnRefused`], [`Event::Passed`],
    /// [`Event::Failed`], or [`Event::FirstByte`] and then [`Event::Completed`] or [`Event::Failed`].
    Run {
        /// On whom.
        worker: WorkerIndex,
        /// The turn header; none keeps no session.
        tag: Option<TurnTag>,
    },
    /// Call [`Dispatch::handle_timeout`](super::Dispatch::handle_timeout) at `until`.
    Wait {
        /// When.
        until: Now,
    },
    /// `POST /kvc/v1/sessions/{id}/release`; nobody waits for the answer.
    Release {
        /// At whom.
        worker: WorkerIndex,
        /// The session.
        session: SessionId,
        /// The grant.
        request: RequestKey,
    },
    /// `POST /kvc/v1/sessions/{id}/release` with `placed`: the session was granted elsewhere, and this worker, which thinks
    /// that it owns it, will not hear of it otherwise (SES-4); nobody waits for the answer.
    Placed {
        /// At whom.
        worker: WorkerIndex,
        /// The session.
        session: SessionId,
        /// The number it was granted under.
        placement: Placement,
    },
    /// The client's answer; the dispatch is over.
    Refuse(Refused),
}

/// A seed or reseed: where the KV comes from and who imports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handover {
    /// The session.
    pub session: SessionId,
    /// Imports the KV.
    pub decode: WorkerIndex,
    /// The body of its import.
    pub import: ImportRequest,
    /// Who computes the prompt meanwhile (DISP-3); none: the import's peer has committed all that is imported (SYNC-2).
    pub prefill: Option<Prefill>,
}

/// The prefill side of a seed or reseed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefill {
    /// Computes the prompt.
    pub worker: WorkerIndex,
    /// The turn header of its request.
    pub tag: TurnTag,
    /// SYNC-2, SYNC-4: the body of an import that this worker makes first, so that it computes only what no reachable
    /// worker holds. Its failure is no error.
    pub refresh: Option<ImportRequest>,
}

/// An error answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// HTTP status.
    pub status: u16,
    /// Why.
    pub reason: Reason,
}

/// What came of an effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// What workers hold of the session; workers that did not answer are missing.
    Residents(Vec<Resident>),
    /// The worker's answer to a probe.
    Answer(Box<AdmitAnswer>),
    /// What those asked hold; workers that did not answer are missing.
    Located(Vec<Resident>),
    /// The pending target's word.
    Withdrawn(WithdrawAnswer),
    /// The pending target refused to answer, typed.
    WithdrawRefused(Reason),
    /// The probe, or the pending target, gave no answer.
    Unreachable,
    /// The import has committed.
    Imported,
    /// The import failed: the next source, or the decode worker computes the prompt itself.
    ImportFailed(Reason),
    /// The prefill worker failed before the import was done.
    PrefillFailed,
    /// The worker refused the turn, typed, before any work (ADM-14).
    TurnRefused(Reason),
    /// The engine answered with an error of the client's own making, which the client gets as it is.
    Passed,
    /// The first byte of the answer goes to the client: no other path from here on (DISP-8).
    FirstByte,
    /// The answer is complete.
    Completed {
        /// Generated tokens, as far as the front could tell.
        output_tokens: u32,
    },
    /// The execution failed: connection, deadline, or an engine error.
    Failed(Reason),
    /// The client went away.
    ClientGone,
}

/// How a dispatch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The client got the whole answer.
    Completed,
    /// The client got the engine's own error.
    Passed,
    /// The client got an error of the router.
    Refused(Refused),
    /// It broke after the first byte: the client got a typed error event.
    Broken(Reason),
    /// The client went away.
    Gone,
}

/// What is recorded of a request (DISP-9).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// This router's number for the request.
    pub request: u64,
    /// How it ran, the last attempt.
    pub mode: Option<ExecutionMode>,
    /// Where it ran, the last attempt.
    pub worker: Option<WorkerIndex>,
    /// Every refusal and failure on the way, in order.
    pub chain: Vec<Reason>,
    /// Admission questions asked.
    pub probes: u32,
    /// What the peer was from which the KV came, when an import served the turn.
    pub source: Option<Source>,
    /// Pending targets asked (MIG-2).
    pub arbitrations: u32,
    /// When it began.
    pub started: Now,
    /// When the last execution began.
    pub admitted: Option<Now>,
    /// When the first byte went out.
    pub first_byte: Option<Now>,
    /// When it was over.
    pub ended: Option<Now>,
}

/// An event that the dispatch's state does not expect: a fault of the caller. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unexpected {event:?} while {state}")]
pub struct OutOfTurn {
    /// The event.
    pub event: Event,
    /// The state.
    pub state: &'static str,
}
