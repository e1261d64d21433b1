//! Asks peers: one kept connection per peer process, greeted once.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use kvc_proto::{
    id::{Epoch, Incarnation, LeaseId, Placement, StoreId},
    wire::reason::{Reason, Refusal},
    worker::{Announcement, Handover, HandoverAnswer, Have, Identity, LeaseGrant, LeaseKind, LeaseView, Slot},
};
use kvc_rdma::{LeaseToken, MoverKind, RegionKey};
use tokio::time::{Instant, timeout_at};
use tonic::{
    Request, Response, Status,
    metadata::{BinaryMetadataValue, MetadataValue},
    transport::{Channel, ClientTlsConfig, Endpoint},
};

use crate::{
    Config, StartError,
    state::Shared,
    transfer::{
        Granted,
        import::Order,
        ways::{Offer, Ways},
    },
};

use super::{
    BEARER, PROTOCOL,
    auth::{self, Nonce, Side, Transcript},
    parse::no_common_mover,
    status::{refusal, unreachable},
    stream::PING,
    tls,
    wire::{self, peer_client::PeerClient},
};

/// For a connection to stand.
const CONNECT: Duration = Duration::from_secs(3);
/// For an answer that needs no waiting at the peer.
const CALL: Duration = Duration::from_secs(5);
/// For a lease's end, which nobody waits for.
const END: Duration = Duration::from_secs(2);
/// Bytes of one answer: a grant names every token, a view every slot.
const MESSAGE_MAX: usize = 64 << 20;
/// Kept connections.
const KEPT: usize = 256;

/// The peers this worker has greeted.
pub(crate) struct Peers {
    kept: Mutex<HashMap<(String, Incarnation), Arc<Peer>>>,
    tls: Option<ClientTlsConfig>,
}

/// A lease at a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lease {
    pub(crate) id: LeaseId,
    pub(crate) token: LeaseToken,
}

/// A greeted peer process.
pub(crate) struct Peer {
    client: PeerClient<Channel>,
    bearer: BinaryMetadataValue,
    address: String,
    /// How its KV is read.
    pub(crate) ways: Ways,
    /// Token slots of its buffers.
    pub(crate) slots: u32,
}

impl Peers {
    pub(crate) fn new(config: &Config) -> Result<Self, StartError> {
        Ok(Self {
            kept: Mutex::default(),
            tls: tls::client_tls(config),
        })
    }

    /// The kept connection to this process, or a new one after a handshake.
    pub(crate) async fn connect(
        &self,
        shared: &Shared,
        address: &str,
        incarnation: Incarnation,
        deadline: Instant,
    ) -> Result<Arc<Peer>, Refusal> {
        let key = (address.to_owned(), incarnation);
        if let Some(peer) = self.lock().get(&key) {
            return Ok(peer.clone());
        }
        let greeted = timeout_at(
            deadline.min(Instant::now() + CALL),
            self.greet(shared, address, incarnation),
        )
        .await;
        let peer = Arc::new(greeted.map_err(|_| late(address, "handshake"))??);
        let mut kept = self.lock();
        if kept.len() >= KEPT {
            kept.clear();
        }
        kept.insert(key, peer.clone());
        Ok(peer)
    }

    /// The connection has shown to be of no use.
    pub(crate) fn forget(&self, address: &str, peer: &Arc<Peer>) {
        self.lock()
            .retain(|(kept, _), p| kept != address || !Arc::ptr_eq(p, peer));
    }

    async fn greet(&self, shared: &Shared, address: &str, incarnation: Incarnation) -> Result<Peer, Refusal> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let mut endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
            .map_err(|e| Refusal::new(Reason::BadRequest, format!("peer {address:?} is no host:port: {e}")))?
            .connect_timeout(CONNECT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(PING)
            .keep_alive_while_idle(true);
        if let Some(tls) = &self.tls {
            endpoint = endpoint.tls_config(tls.clone()).map_err(|e| unreachable(address, &e))?;
        }
        let channel = endpoint.connect().await.map_err(|e| unreachable(address, &e))?;
        let mut client = PeerClient::new(channel).max_decoding_message_size(MESSAGE_MAX);
        let said = challenge(shared, &mut client, address)
            .await
            .map_err(|why| self.distrusted(why))?;
        let hello = wire::HelloRequest {
            proof: said.prove(Side::Client, shared.config.secret.as_ref()),
            incarnation: shared.incarnation.0,
            want_incarnation: incarnation.0,
            model: shared.facts.model.clone(),
            layout: shared.pool.layout().fingerprint(),
            version: env!("CARGO_PKG_VERSION").into(),
        };
        let reply = client
            .hello(hello)
            .await
            .map_err(|s| refusal(address, &s))?
            .into_inner();
        Ok(Peer {
            client,
            bearer: MetadataValue::from_bytes(&reply.token),
            address: address.to_owned(),
            ways: announced(shared, address, &reply)?,
            slots: reply.slots,
        })
    }

    /// TLS 1.3 lets the client finish its handshake before the server has looked at its certificate: a refusal then is an
    /// alert, or only a broken connection if the alert is overtaken by a reset.
    fn distrusted(&self, why: Refusal) -> Refusal {
        if self.tls.is_none() || why.code != Reason::PeerUnreachable {
            return why;
        }
        let message = format!(
            "{}: closed at the first message: does the peer trust our certificate?",
            why.message
        );
        Refusal::new(Reason::Unauthenticated, message)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<(String, Incarnation), Arc<Peer>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Peer {
    /// Where its control plane is.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Waits, until the import's deadline, for the turn to arrive there.
    pub(crate) async fn lease(&self, order: &Order, deadline: Instant) -> Result<Granted, Refusal> {
        let wait = deadline.saturating_duration_since(Instant::now());
        let kind = match order.kind {
            LeaseKind::Follow => wire::LeaseKind::Follow,
            LeaseKind::Replica => wire::LeaseKind::Replica,
            LeaseKind::Sync => wire::LeaseKind::Sync,
            LeaseKind::Prepare => wire::LeaseKind::Prepare,
        };
        let request = wire::LeaseRequest {
            session: order.session.to_string(),
            placement: order.placement.n,
            store: order.placement.store.0,
            wait_ms: millis(wait),
            kind: kind.into(),
            have_tokens: order.have.map_or(0, |have| have.tokens),
            have_digest: order.have.map_or_else(Vec::new, |have| have.digest.0.to_vec()),
            movers: self.ways.kinds().map(|kind| kind.as_str().into()).collect(),
        };
        let mut client = self.client.clone();
        let reply = self
            .within(deadline, "lease", client.lease(self.signed(request)))
            .await?;
        granted(reply, order.have).ok_or_else(|| self.broke("lease"))
    }

    /// SYNC-1: tells a backup what `from` has committed.
    pub(crate) async fn announce(
        &self,
        from: SocketAddr,
        announcement: &Announcement,
        until: Instant,
    ) -> Result<(), Refusal> {
        let request = wire::AnnounceRequest {
            session: announcement.session.to_string(),
            placement: announcement.epoch.placement.n,
            store: announcement.epoch.placement.store.0,
            rewind: announcement.epoch.rewind,
            committed: announcement.committed,
            digest: announcement.digest.0.to_vec(),
            identity: announcement.identity.0.to_string(),
            from: from.to_string(),
        };
        let mut client = self.client.clone();
        self.within(until, "announce", client.announce(self.signed(request)))
            .await
            .map(|_| ())
    }

    /// MIG-1: asks the owner to hand over to the worker at `to`.
    pub(crate) async fn handover(
        &self,
        to: SocketAddr,
        asked: &Handover,
        until: Instant,
    ) -> Result<HandoverAnswer, Refusal> {
        let request = wire::HandoverRequest {
            session: asked.session.to_string(),
            incarnation: asked.incarnation.0,
            pending: asked.pending.n,
            pending_store: asked.pending.store.0,
            placement: asked.epoch.placement.n,
            store: asked.epoch.placement.store.0,
            rewind: asked.epoch.rewind,
            committed: asked.committed,
            digest: asked.digest.0.to_vec(),
            to: to.to_string(),
        };
        let mut client = self.client.clone();
        let reply = self
            .within(until, "handover", client.handover(self.signed(request)))
            .await?;
        decided(&reply).ok_or_else(|| self.broke("handover"))
    }

    /// What became readable past `from`; waits at most `wait` for it.
    pub(crate) async fn watch(
        &self,
        lease: Lease,
        from: u32,
        wait: Duration,
        deadline: Instant,
    ) -> Result<LeaseView, Refusal> {
        let wait = wait.min(deadline.saturating_duration_since(Instant::now()));
        let request = wire::WatchRequest {
            lease: lease.id.0,
            from,
            wait_ms: millis(wait),
        };
        let mut client = self.client.clone();
        let until = deadline.min(Instant::now() + wait + CALL);
        let reply = self.within(until, "watch", client.watch(self.signed(request))).await?;
        let slots = expanded(&reply, self.slots).ok_or_else(|| self.broke("slot run"))?;
        Ok(LeaseView {
            from: reply.from,
            slots,
            complete: reply.complete,
        })
    }

    pub(crate) async fn renew(&self, lease: Lease, within: Duration) -> Result<(), Refusal> {
        let mut client = self.client.clone();
        let name = wire::LeaseName { lease: lease.id.0 };
        self.within(Instant::now() + within, "renew", client.renew(self.signed(name)))
            .await
            .map(|_| ())
    }

    /// Whether the lease was valid throughout (XFER-3).
    pub(crate) async fn confirm(&self, lease: Lease, deadline: Instant) -> Result<(), Refusal> {
        let mut client = self.client.clone();
        let name = wire::LeaseName { lease: lease.id.0 };
        let until = deadline.min(Instant::now() + CALL);
        self.within(until, "confirm", client.confirm(self.signed(name)))
            .await
            .map(|_| ())
    }

    /// Nobody waits for the outcome: a lost message costs the lease's remaining life.
    pub(crate) async fn end(&self, lease: Lease) {
        let mut client = self.client.clone();
        let name = wire::LeaseName { lease: lease.id.0 };
        if let Err(why) = self
            .within(Instant::now() + END, "end", client.end(self.signed(name)))
            .await
        {
            tracing::debug!(lease = %lease.id, reason = %why.code, "lease not ended at the peer");
        }
    }

    async fn within<T>(
        &self,
        until: Instant,
        verb: &str,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Refusal> {
        match timeout_at(until, call).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(refusal(&self.address, &status)),
            Err(_) => Err(late(&self.address, verb)),
        }
    }

    fn signed<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.metadata_mut().insert_bin(BEARER, self.bearer.clone());
        request
    }

    fn broke(&self, what: &str) -> Refusal {
        Refusal::new(
            Reason::ProtocolMismatch,
            format!("peer {}: {what} is malformed", self.address),
        )
    }
}

/// The server proves first: no word about ourselves goes to a stranger.
async fn challenge(shared: &Shared, client: &mut PeerClient<Channel>, address: &str) -> Result<Transcript, Refusal> {
    let own = auth::random().ok_or_else(|| Refusal::new(Reason::Internal, "no random bytes"))?;
    let request = wire::ChallengeRequest {
        protocol: PROTOCOL,
        nonce: own.to_vec(),
    };
    let reply = client
        .challenge(request)
        .await
        .map_err(|s| refusal(address, &s))?
        .into_inner();
    if reply.protocol != PROTOCOL {
        return Err(Refusal::new(
            Reason::ProtocolMismatch,
            format!(
                "peer {address} speaks protocol {}, this worker {PROTOCOL}",
                reply.protocol
            ),
        ));
    }
    let said = Nonce::try_from(reply.nonce.as_slice()).map(|server| Transcript {
        protocol: PROTOCOL,
        client: own,
        server,
        incarnation: Incarnation(reply.incarnation),
    });
    match said {
        Ok(said) if said.verify(Side::Server, shared.config.secret.as_ref(), &reply.proof) => Ok(said),
        _ => Err(Refusal::new(
            Reason::Unauthenticated,
            format!("peer {address} does not prove the shared secret of this worker"),
        )),
    }
}

/// A grant whose numbers add up: no token is skipped that the importer does not have.
pub(super) fn granted(reply: wire::LeaseReply, have: Option<Have>) -> Option<Granted> {
    let token: [u8; 32] = reply.token.as_slice().try_into().ok()?;
    let end = u32::try_from(reply.tokens.len()).ok()?.checked_add(reply.after)?;
    let skips = reply.after == 0 || have.is_some_and(|have| have.tokens == reply.after);
    if reply.lives_ms == 0 || !skips || reply.share > end || reply.readable > end {
        return None;
    }
    let placement = Placement {
        n: reply.placement,
        store: StoreId(reply.store),
    };
    Some(Granted {
        grant: LeaseGrant {
            lease: LeaseId(reply.lease),
            epoch: Epoch {
                placement,
                rewind: reply.rewind,
            },
            identity: Identity(reply.identity.into()),
            after: reply.after,
            tokens: reply.tokens.into(),
            readable: reply.readable,
            share: reply.share,
            lives: Duration::from_millis(reply.lives_ms.into()),
        },
        token: LeaseToken::from_bytes(token),
    })
}

/// A decision, and nothing else: an empty message is none.
pub(super) fn decided(reply: &wire::HandoverReply) -> Option<HandoverAnswer> {
    match wire::HandoverAnswer::try_from(reply.answer) {
        Ok(wire::HandoverAnswer::Granted) => Some(HandoverAnswer::Granted),
        Ok(wire::HandoverAnswer::Behind) => Some(HandoverAnswer::Behind),
        Ok(wire::HandoverAnswer::Busy) => Some(HandoverAnswer::Busy),
        Ok(wire::HandoverAnswer::None) | Err(_) => None,
    }
}

/// The slots of a view, unless a run leaves the peer's pool of `pool` slots or all together are more than it has: no
/// session is longer, and an answer of a few bytes cannot make us allocate.
pub(super) fn expanded(reply: &wire::WatchReply, pool: u32) -> Option<Vec<Slot>> {
    let mut slots = Vec::new();
    for run in &reply.runs {
        let end = run.slot.checked_add(run.len).filter(|end| *end <= pool)?;
        if slots.len() + run.len as usize > pool as usize {
            return None;
        }
        slots.extend(run.slot..end);
    }
    Some(slots)
}

fn announced(shared: &Shared, address: &str, reply: &wire::HelloReply) -> Result<Ways, Refusal> {
    let own = shared.pool.layout().buffers();
    let known = [MoverKind::Verbs, MoverKind::Shm, MoverKind::Tcp, MoverKind::Loopback];
    // Names that we do not know are of a newer peer.
    let offers = reply.offers.iter().filter_map(|offer| {
        let kind = known.into_iter().find(|kind| kind.as_str() == offer.mover)?;
        Some(Offer {
            kind,
            endpoint: offer.endpoint.clone(),
            keys: offer.keys.iter().map(|key| RegionKey(*key)).collect(),
        })
    });
    let offers: Vec<Offer> = offers.collect();
    let same_rows = reply.rows.iter().eq(own.iter().map(|buffer| &buffer.row));
    if reply.slots == 0 || !same_rows || offers.iter().any(|offer| offer.keys.len() != own.len()) {
        return Err(Refusal::new(
            Reason::LayoutMismatch,
            format!(
                "peer {address} announced {} buffers of {} slots that do not match our {} buffers",
                reply.rows.len(),
                reply.slots,
                own.len()
            ),
        ));
    }
    let ours = || shared.pool.paths().iter().map(|path| path.mover.kind());
    Ways::new(ours(), &offers).ok_or_else(|| {
        let theirs = reply.offers.iter().map(|offer| offer.mover.as_str());
        let why = no_common_mover(ours(), theirs);
        Refusal::new(why.code, format!("peer {address}: {}", why.message))
    })
}

fn late(address: &str, verb: &str) -> Refusal {
    Refusal::new(
        Reason::DeadlineExceeded,
        format!("peer {address}: no answer to {verb} in time"),
    )
}

fn millis(wait: Duration) -> u32 {
    u32::try_from(wait.as_millis()).unwrap_or(u32::MAX)
}
