//! `POST /admit_direct_append`, `POST /kvc/v1/sessions/{id}/import` and `…/release` (engines §5, ADM-10).

use serde::{Deserialize, Serialize};

use crate::id::{Epoch, Incarnation, Placement, RequestKey, ReservationId, SessionId};

use super::reason::Reason;

/// The path of the admission question.
pub const ADMIT_PATH: &str = "/admit_direct_append";

/// May this turn run here, on the KV that is here? Token counts are tokens, not blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdmitRequest {
    /// Whose turn it is.
    pub session_id: SessionId,
    /// Turn number as the router counts, 0 for the first (ADM-4).
    pub turn: u32,
    /// Tokens of the whole prompt, 1 or more.
    pub input_tokens: u32,
    /// Tokens the router believes are new; at most `input_tokens`. The worker uses the larger of this and
    /// `input_tokens` − resident.
    pub append_tokens: u32,
    /// The client's generation limit; absent: the clip of ADM-6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_new_tokens: Option<u32>,
    /// The counts are estimates from text (ADM-14).
    #[serde(default)]
    pub estimated: bool,
    /// DISP-6: the append is prefilled elsewhere and imported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<Via>,
    /// The placement the router holds or, for a seed or reseed, the one it has just taken (SES-4).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// The worker process the router means (F16).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<Incarnation>,
    /// SYNC-1: the worker that keeps the session's replica from this turn on; absent: the one named last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<PeerRef>,
    /// Makes the grant idempotent.
    #[serde(flatten)]
    pub key: RequestKey,
}

/// One process of a worker, as its peers reach it: from its `/kvc/v1/info`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PeerRef {
    /// Its peer control address, `host:port`.
    pub peer: String,
    /// The process.
    pub incarnation: Incarnation,
}

/// Where a session that was handed over lives (MIG-1).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedTo {
    /// The new owner.
    #[serde(flatten)]
    pub to: PeerRef,
    /// The placement it owns.
    pub placement: Placement,
}

/// How the append gets here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Via {
    /// A prefill worker computes it and this worker imports it.
    Prefill,
}

/// How an admitted turn will run (ADM-1, ADM-4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Append to the resident KV.
    Direct,
    /// First turn: prefill elsewhere, import, decode here.
    Seed,
    /// The KV is not here (any more), or the append is large: prefill elsewhere, import, decode here.
    Reseed,
}

/// The worker's answer. HTTP 200 also for a refusal: `can_admit` tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdmitAnswer {
    /// Whether the turn may run here.
    pub can_admit: bool,
    /// How, if admitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// Why not, if refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    /// Names the grant in the turn, the import and the release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reservation: Option<ReservationId>,
    /// Milliseconds until the reservation lapses without a sign of life.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u32>,
    /// Tokens of the session held here.
    pub resident_tokens: u32,
    /// The session's epoch here, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<Epoch>,
    /// With the reason `moved`: where the session lives now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved: Option<MovedTo>,
    /// This process.
    pub incarnation: Incarnation,
    /// How busy the worker is.
    pub load: LoadReport,
}

/// How busy a worker is, in tokens and requests (ADM-10, EAR-7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadReport {
    /// The ledger's used tokens (ADM-7).
    pub used: u64,
    /// K_d.
    pub capacity: u64,
    /// Running requests.
    pub running: u32,
    /// Waiting requests.
    pub waiting: u32,
    /// Prompt tokens waiting to be prefilled.
    pub pending_prefill_tokens: u64,
    /// The highest request number of the asking router that this worker has seen.
    pub highest_request: u64,
}

/// `POST /kvc/v1/sessions/{id}/import`: pull the session's KV from a peer. Answered when the import has committed.
///
/// | reservation | source | what it is |
/// |---|---|---|
/// | given | `prefill` | a seed or reseed whose prompt the peer computes now (DISP-3) |
/// | given | `replica` | a reseed from what the peer has committed (SYNC-2); `placement` is granted by it |
/// | absent | `owner` | a move: the peer stays owner until it hands over (MIG-1); `placement` is pending until then |
/// | absent | `replica` | this worker becomes or follows as replica now (SYNC-1); `placement` is the peer's own |
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportRequest {
    /// The seed or reseed grant this import serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reservation: Option<ReservationId>,
    /// See the table.
    pub placement: Placement,
    /// What the peer is to this session.
    #[serde(default)]
    pub source: Source,
    /// The peer's control address, `host:port`, from its `/kvc/v1/info`.
    pub peer: String,
    /// The peer process.
    pub incarnation: Incarnation,
    /// Give up after this many milliseconds.
    pub deadline_ms: u32,
}

/// What the peer of an import is to the session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// It computes the prompt for this import; waited for.
    #[default]
    Prefill,
    /// It holds committed KV.
    Replica,
    /// It owns the session and is to hand it over.
    Owner,
}

/// What an import did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportAnswer {
    /// Tokens of the session resident here now.
    pub resident_tokens: u32,
    /// Tokens whose KV moved; the rest was here already (SES-6).
    pub pulled_tokens: u32,
    /// KV bytes moved.
    pub bytes: u64,
    /// Microseconds from request to commit.
    pub micros: u64,
}

/// `POST /kvc/v1/sessions/{id}/withdraw`: the router could not learn what became of a move (MIG-2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WithdrawRequest {
    /// The pending number that was offered to this worker.
    pub placement: Placement,
    /// This process, as the router knows it.
    pub incarnation: Incarnation,
}

/// What the pending target says; either answer is for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum WithdrawAnswer {
    /// The hand-over was granted: it owns the session.
    Owner {
        /// The epoch it owns.
        epoch: Epoch,
    },
    /// It does not own the session under that number and never will.
    Withdrawn,
}

/// `POST /kvc/v1/drain`: refuse new turns, keep what runs, and wait until the routers have moved every session away
/// (MIG-4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainRequest {
    /// Answer after this many milliseconds at the latest. 0 answers at once.
    #[serde(default)]
    pub deadline_ms: u32,
    /// False ends draining: the worker takes turns again.
    #[serde(default = "yes")]
    pub draining: bool,
}

fn yes() -> bool {
    true
}

/// How far a drain is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainAnswer {
    /// Nothing is left to hand over and nothing runs.
    pub drained: bool,
    /// Sessions this worker still owns with KV.
    pub owned: u64,
    /// Turns that wait or run.
    pub turns: u64,
    /// Running imports and live leases.
    pub transfers: u64,
    /// Sessions handed over since the drain began.
    pub moved: u64,
}

/// `POST /kvc/v1/sessions/{id}/release`: the client went away (`request` given), or the session is no longer wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseRequest {
    /// Release only this request's reservation; leaves a tombstone (ADM-10).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<RequestKey>,
    /// Drop the session's KV too.
    #[serde(default)]
    pub drop_kv: bool,
    /// SES-4: the session was granted to another worker under this number: the copy here is a replica at most. An older
    /// number changes nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placed: Option<Placement>,
}

/// What a release did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseAnswer {
    /// A reservation was ended.
    pub released: bool,
    /// KV will be dropped: at once when idle, at the end of the running turn otherwise (SES-2).
    pub kv: ReleasedKv,
}

/// What happens to the KV of a released session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReleasedKv {
    /// It stays.
    Kept,
    /// It is freed at the next turn of the engine's loop.
    Dropped,
    /// A turn runs on it; it is freed when the turn ends.
    Deferred,
}
