//! What travels between the nodes. A call is answered by replies that carry its number; nothing else connects two nodes.

use std::sync::Arc;

use kvc_proto::{
    id::{Incarnation, LeaseId, Placement, SessionId},
    wire::{
        admit::{AdmitAnswer, AdmitRequest, ImportRequest, ReleaseRequest},
        info::{SessionView, WorkerInfo},
        reason::{Reason, Refusal},
        turn::TurnTag,
    },
    worker::{Identity, LeaseGrant, LeaseView, Slot, Token},
};

use super::kv::Kv;

/// A node of the world: workers first, then routers.
pub type NodeId = usize;
/// A call's number, given out once in a world.
pub type CallId = u64;

/// A message.
#[derive(Clone, Debug)]
pub enum Message {
    /// To a worker's module or engine.
    Ask(CallId, Ask),
    /// The caller has closed the call's connection.
    Close(CallId),
    /// To the caller.
    Reply(CallId, Reply),
    /// The call's connection has broken.
    Reset(CallId),
}

/// A call to a worker.
#[derive(Clone, Debug)]
pub enum Ask {
    /// `GET /kvc/v1/info`
    Info,
    /// `GET /kvc/v1/sessions/{id}`
    Session(SessionId),
    /// `POST /admit_direct_append`
    Admit(Box<AdmitRequest>),
    /// `POST /kvc/v1/sessions/{id}/import`
    Import(SessionId, ImportRequest),
    /// `POST /kvc/v1/sessions/{id}/release`
    Release(SessionId, ReleaseRequest),
    /// A client's body at the engine.
    Turn(Box<TurnAsk>),
    /// Peer control plane.
    Peer(PeerAsk),
}

/// A request at the engine's HTTP port.
#[derive(Clone, Debug)]
pub struct TurnAsk {
    /// The turn header.
    pub tag: Option<TurnTag>,
    /// SES-5.
    pub identity: Identity,
    /// The prompt.
    pub prompt: Arc<[Token]>,
    /// The generation limit.
    pub max_new: u32,
    /// The first token is told as soon as it is there.
    pub stream: bool,
}

/// A call of a peer.
#[derive(Clone, Debug)]
pub struct PeerAsk {
    /// The asking process.
    pub from: Incarnation,
    /// The process that the connection was made to.
    pub to: Incarnation,
    /// What it asks.
    pub what: PeerWhat,
}

/// See [`PeerAsk`].
#[derive(Clone, Debug)]
pub enum PeerWhat {
    /// XFER-2; waits for the turn.
    Lease(SessionId, Placement),
    /// What is readable from a token on; waits for news.
    Watch(LeaseId, u32),
    /// A sign of life.
    Renew(LeaseId),
    /// XFER-3.
    Confirm(LeaseId),
    /// The reader is done.
    End(LeaseId),
    /// Data plane: the bytes of these slots.
    Read(LeaseId, Arc<[Slot]>),
}

/// A worker's answer.
#[derive(Clone, Debug)]
pub enum Reply {
    /// To [`Ask::Info`].
    Info(Box<WorkerInfo>),
    /// To [`Ask::Session`].
    Session(Option<Box<SessionView>>),
    /// To [`Ask::Admit`].
    Admit(Box<AdmitAnswer>),
    /// To [`Ask::Import`].
    Imported(Result<u32, Reason>),
    /// To [`Ask::Release`].
    Released,
    /// The first token is out.
    FirstToken,
    /// The whole answer.
    Done(Arc<[Token]>),
    /// The turn was refused before any work.
    Refused(Reason),
    /// The engine gave up.
    Failed(Reason),
    /// To [`PeerWhat::Lease`].
    Granted(Box<LeaseGrant>),
    /// To [`PeerWhat::Watch`].
    View(LeaseView),
    /// To renew, confirm, end.
    Fine,
    /// To [`PeerWhat::Read`].
    Bytes(Vec<Kv>),
    /// A peer's refusal.
    No(Refusal),
}
