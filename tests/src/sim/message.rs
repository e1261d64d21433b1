//! What travels between the nodes. A call is answered by replies that carry its number; nothing else connects two nodes.

use std::sync::Arc;

use kvc_proto::{
    id::{Incarnation, LeaseId, Placement, SessionId},
    wire::{
        admit::{
            AdmitAnswer, AdmitRequest, ImportAnswer, ImportRequest, ReleaseRequest, WithdrawAnswer, WithdrawRequest,
        },
        info::{SessionList, SessionView, WorkerInfo},
        reason::{Reason, Refusal},
        turn::TurnTag,
    },
    worker::{Announcement, Handover, HandoverAnswer, Have, Identity, LeaseGrant, LeaseKind, LeaseView, Slot, Token},
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
    /// `GET /kvc/v1/sessions`: those after a name.
    Sessions(Option<SessionId>),
    /// `POST /admit_direct_append`
    Admit(Box<AdmitRequest>),
    /// `POST /kvc/v1/sessions/{id}/import`
    Import(SessionId, ImportRequest),
    /// `POST /kvc/v1/sessions/{id}/withdraw`
    Withdraw(SessionId, WithdrawRequest),
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
    /// The asking process's control address.
    pub peer: NodeId,
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
    Lease(SessionId, Placement, LeaseKind, Option<Have>),
    /// What is readable from a token on; waits for news.
    Watch(LeaseId, u32),
    /// A sign of life.
    Renew(LeaseId),
    /// XFER-3.
    Confirm(LeaseId),
    /// The reader is done.
    End(LeaseId),
    /// SYNC-1.
    Announce(Announcement),
    /// MIG-1; waits while the session is busy. The second part is the simulation's own: what the asker really holds.
    Handover(Handover, Held),
    /// Data plane: the bytes of these slots.
    Read(LeaseId, Arc<[Slot]>),
}

/// A copy told by its length and the KV of its last token, which stands for the whole prefix.
pub type Held = Option<(u32, Kv)>;

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
    Imported(Result<ImportAnswer, Reason>),
    /// To [`Ask::Sessions`].
    Sessions(Box<SessionList>),
    /// To [`Ask::Withdraw`].
    Withdrawn(Result<WithdrawAnswer, Reason>),
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
    /// To renew, confirm, end, announce.
    Fine,
    /// To [`PeerWhat::Handover`].
    HandedOver(HandoverAnswer),
    /// To [`PeerWhat::Read`].
    Bytes(Vec<Kv>),
    /// A peer's refusal.
    No(Refusal),
}
