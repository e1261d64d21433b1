//! Every refusal and error code, once. A refusal is an answer, not a fault (style 10).

use serde::{Deserialize, Serialize};

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $status:literal;)*) => {
        /// Why a worker refused. The text is what travels; the number is the HTTP status a client sees when nothing
        /// else could be done.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum Reason { $($(#[$doc])* #[serde(rename = $text)] $name,)* }
        impl Reason {
            /// All of them, in order.
            pub const ALL: &'static [Reason] = &[$(Reason::$name),*];
            /// The text that travels.
            pub const fn as_str(self) -> &'static str { match self { $(Reason::$name => $text),* } }
            /// The HTTP status when this reaches a client.
            pub const fn status(self) -> u16 { match self { $(Reason::$name => $status),* } }
            /// The reason with that text.
            pub fn parse(text: &str) -> Option<Reason> { match text { $($text => Some(Reason::$name),)* _ => None } }
        }
    };
}

reasons! {
    /// ADM-2: resident, but the append is above τ_append.
    RealLargeAppend = "real-large-append", 503;
    /// ADM-3: resident, small append, no room.
    NoDCapacity = "no-d-capacity", 503;
    /// ADM-5: not resident and no room.
    SessionNotResidentNoCapacity = "session-not-resident-no-capacity", 503;
    /// ADM-8: another request of the session is admitted or runs.
    SessionBusy = "session-busy", 409;
    /// ADM-12.
    Draining = "draining", 503;
    /// ADM-6: would not fit into an empty worker.
    TooLarge = "too-large", 413;
    /// ADM-10: the request was released before it was admitted.
    Released = "released", 409;
    /// SES-4: the message names an older placement or rewind.
    StaleEpoch = "stale-epoch", 409;
    /// SES-4, F16: the message is for an earlier process at this address.
    StaleIncarnation = "stale-incarnation", 409;
    /// MIG-1: the session was handed over; the answer says where to.
    Moved = "moved", 409;
    /// MIG-1, SES-4: this worker does not own the session.
    NotOwner = "not-owner", 409;
    /// SYNC-3: this worker keeps no replicas.
    SyncOff = "sync-off", 409;
    /// The session is not known here.
    UnknownSession = "unknown-session", 404;
    /// The reservation is not live.
    UnknownReservation = "unknown-reservation", 404;
    /// The session holds no committed KV here.
    NotResident = "not-resident", 409;
    /// An import of the session runs already.
    ImportRunning = "import-running", 409;
    /// A worker cannot import from itself.
    ImportFromSelf = "import-from-self", 400;
    /// The peer cannot be reached within the deadline.
    PeerUnreachable = "peer-unreachable", 502;
    /// XFER-6: the peer runs another protocol version.
    ProtocolMismatch = "protocol-mismatch", 502;
    /// XFER-6, SES-5: the peer serves another model.
    ModelMismatch = "model-mismatch", 502;
    /// XFER-6: dtype, layers, heads or TP shape differ (F21).
    LayoutMismatch = "layout-mismatch", 502;
    /// XFER-9: no mover that both workers have.
    NoCommonMover = "no-common-mover", 502;
    /// SES-5: adapter, salt or extra key differ.
    IdentityMismatch = "identity-mismatch", 409;
    /// XFER-10: credentials missing or wrong.
    Unauthenticated = "unauthenticated", 401;
    /// XFER-2: the lease was revoked.
    LeaseRevoked = "lease-revoked", 409;
    /// XFER-2: the lease is over, or never was.
    LeaseUnknown = "lease-unknown", 404;
    /// XFER-7.
    DeadlineExceeded = "deadline-exceeded", 504;
    /// XFER-8: a byte differs.
    ChecksumMismatch = "checksum-mismatch", 502;
    /// The mover failed.
    TransferFailed = "transfer-failed", 502;
    /// The range asked for is not readable.
    RangeNotReadable = "range-not-readable", 409;
    /// The client went away, or the engine was flushed.
    Cancelled = "cancelled", 409;
    /// The body is no JSON, lacks a field, or a field is out of range.
    BadRequest = "bad-request", 400;
    /// A fault of our own.
    Internal = "internal", 500;
}

impl Reason {
    /// DISP-6: whether a router counts this refusal against the worker.
    pub const fn counts_as_reject(self) -> bool {
        !matches!(
            self,
            Reason::RealLargeAppend
                | Reason::SessionBusy
                | Reason::Draining
                | Reason::TooLarge
                | Reason::BadRequest
                | Reason::Moved
        )
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A refusal with the sentence that explains it: the field, the limit, what was held and what was got.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Refusal {
    /// The reason.
    pub code: Reason,
    /// One sentence with the facts.
    pub message: String,
}

impl Refusal {
    /// A refusal.
    pub fn new(code: Reason, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }
}

/// The body of every error answer: `{"error":{"code","message"}}` (engines §5).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// What went wrong.
    pub error: Refusal,
}
