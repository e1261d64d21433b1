//! `GET /kvc/v1/info`, `/kvc/v1/sessions` and `/kvc/v1/transfers` (engines §5).

use serde::{Deserialize, Serialize};

use crate::id::{Epoch, ImportId, Incarnation, LeaseId, SessionId};

use super::admit::{LoadReport, MovedTo, PeerRef};

/// What a worker is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefills for others.
    Prefill,
    /// Decodes and holds sessions.
    Decode,
    /// Either.
    #[default]
    Both,
}

/// `GET /kvc/v1/info`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerInfo {
    /// This process.
    pub incarnation: Incarnation,
    /// What it is for.
    pub role: Role,
    /// The module's version.
    pub version: String,
    /// Engine name and version, `sglang 0.5.10.post1`.
    pub engine: String,
    /// The model as the engine names it.
    pub model: String,
    /// `host:port` of the module's HTTP listener.
    pub listen: String,
    /// `host:port` of the peer control plane.
    pub peer: String,
    /// Tokens per page.
    pub page_tokens: u32,
    /// K_d in tokens.
    pub capacity: u64,
    /// τ_append in tokens.
    pub max_uncached_tokens: u32,
    /// Fingerprint of the KV layout (XFER-6).
    pub layout: String,
    /// The movers that peers may read its KV with, best first (XFER-9).
    #[serde(default)]
    pub movers: Vec<String>,
    /// Whether it refuses new work (ADM-12).
    pub draining: bool,
    /// How busy it is.
    pub load: LoadReport,
}

/// What a worker is to a session (SES-4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// Runs its turns.
    #[default]
    Owner,
    /// Keeps a copy for whoever runs them: a prefill worker's copy, a backup, a copy that lost its placement.
    Replica,
    /// Has handed it over and keeps the copy as a replica.
    Moved,
}

/// One session as `GET /kvc/v1/sessions[/{id}]` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionView {
    /// Its name.
    pub session_id: SessionId,
    /// `importing`, `idle`, `admitted`, `running`, `evicting`, `evicted`, `moved` (kv-movement §2).
    pub state: String,
    /// What this worker is to the session.
    pub standing: Standing,
    /// With standing `moved`: where it lives now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved: Option<MovedTo>,
    /// SYNC-1: who keeps its replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<PeerRef>,
    /// Committed tokens held here.
    pub committed: u32,
    /// Tokens that a peer may read now.
    pub readable: u32,
    /// Tokens of it that lie in the engine's shared prefix tree.
    pub shared: u32,
    /// Its epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<Epoch>,
    /// Live leases on it.
    pub leases: u32,
    /// Milliseconds since its last use.
    pub idle_ms: u64,
}

/// `GET /kvc/v1/sessions`: a page of at most the asked number, in id order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionList {
    /// The sessions.
    pub sessions: Vec<SessionView>,
    /// Sessions known in all.
    pub total: u64,
}

/// `GET /kvc/v1/transfers`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferList {
    /// Running pulls into this worker.
    pub imports: Vec<ImportView>,
    /// Live leases on this worker's KV.
    pub leases: Vec<LeaseView>,
    /// Sessions whose announced turns are not pulled yet (SYNC-1).
    pub sync_pending: u64,
    /// Their missing tokens: the lag.
    pub sync_lag_tokens: u64,
}

/// One running import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportView {
    /// Its number.
    pub import: ImportId,
    /// The session.
    pub session_id: SessionId,
    /// The peer it pulls from.
    pub peer: String,
    /// `seed` (a peer computes), `reseed` (a peer has it), `sync`, `move`.
    pub kind: String,
    /// `leasing`, `landing`, `pulling`, `confirming`, `committing`, `handing-over`.
    pub phase: String,
    /// Tokens that have arrived.
    pub pulled_tokens: u32,
    /// Tokens to arrive.
    pub total_tokens: u32,
}

/// One live lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseView {
    /// Its number.
    pub lease: LeaseId,
    /// The session.
    pub session_id: SessionId,
    /// First leased token.
    pub from: u32,
    /// One past the last token readable under it.
    pub readable: u32,
    /// Milliseconds until it ends without renewal.
    pub expires_ms: u64,
}
