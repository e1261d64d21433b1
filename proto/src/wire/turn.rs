//! The header that ties an engine request to its session, reservation and placement: `X-Kvc-Turn`.
//!
//! The router adds it, so the client's body goes on byte for byte (DISP-8); the engine's HTTP server hands it to the
//! scheduler as the request's routing key. A client without a router may send it with `s=` alone.
//!
//! `s=<session, percent-encoded>[;r=<reservation>][;p=<n>.<store>][;q=<router>.<request>][;prefill]`

use std::fmt;

use crate::id::{Placement, ReservationId, RouterId, SessionId};

/// The header's name, lower case.
pub const TURN_HEADER: &str = "x-kvc-turn";
/// The longest header value that is read, in bytes.
pub const TURN_HEADER_MAX: usize = 1024;

/// What the header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnTag {
    /// Whose turn it is.
    pub session: SessionId,
    /// The grant it runs under; without one it is admitted afresh on arrival (ADM-10).
    pub reservation: Option<ReservationId>,
    /// The placement it runs under.
    pub placement: Option<Placement>,
    /// Router and its request number, for the load report (EAR-7).
    pub origin: Option<(RouterId, u64)>,
    /// Compute the prompt's KV and generate nothing: the prefill side of a seed or reseed (DISP-3).
    pub prefill_only: bool,
}

/// Why a header value is no [`TurnTag`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{TURN_HEADER}: {0}")]
pub struct TurnTagError(pub String);
