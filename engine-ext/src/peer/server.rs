//! Answers peers: handshake, leases, and what is readable under them. No KV byte and no lease before both sides have
//! proved who they are and that their KV means the same (XFER-6, XFER-10).

use std::{
    collections::HashMap,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use kvc_proto::{
    id::{Incarnation, LeaseId},
    wire::reason::{Reason, Refusal},
    worker::HandoverAnswer,
};
use kvc_rdma::MoverKind;
use tokio::{
    net::TcpListener,
    sync::{Semaphore, mpsc},
    time::Instant,
};
use tonic::{
    Request, Response, Status,
    codegen::tokio_stream::Stream,
    transport::{Server, ServerTlsConfig},
};

use crate::{
    StartError,
    state::Shared,
    transfer::{Exports, handover},
};

use super::{
    BEARER, PROTOCOL,
    auth::{self, Nonce, Side, Transcript},
    parse,
    status::{chain, refuse},
    stream::{Connection, HANDSHAKE, PING, PeerStream, connection},
    wire::{self, peer_server},
};

/// Connections at once.
const CONNECTIONS: usize = 256;
/// Calls at once on one connection.
const CALLS: usize = 64;
/// Bytes of one message from a peer: all of them are small.
const MESSAGE_MAX: usize = 64 << 10;
/// The longest a peer may wait for a turn or for news.
const WAIT_MAX: Duration = Duration::from_secs(120);
/// The longest any call may take.
const CALL_MAX: Duration = Duration::from_secs(130);

/// Serves until the runtime ends.
pub(crate) fn serve(
    shared: Arc<Shared>,
    listener: TcpListener,
    tls: Option<ServerTlsConfig>,
) -> Result<impl Future<Output = ()> + Send + 'static, StartError> {
    let service = peer_server::PeerServer::new(PeerService {
        shared,
        known: Arc::default(),
    })
    .max_decoding_message_size(MESSAGE_MAX);
    let mut server = Server::builder()
        .timeout(CALL_MAX)
        .concurrency_limit_per_connection(CALLS)
        .max_concurrent_streams(CALLS as u32)
        .http2_keepalive_interval(Some(PING))
        .http2_keepalive_timeout(Some(PING))
        .http2_max_header_list_size(16 << 10);
    if let Some(tls) = tls {
        server = server
            .tls_config(tls)
            .map_err(|e| StartError::Tls { fault: chain(&e) })?;
    }
    let router = server.add_service(service);
    Ok(async move {
        let (accepted, incoming) = mpsc::channel(16);
        let accepting = accept(listener, accepted);
        let serving = router.serve_with_incoming(Incoming(incoming));
        tokio::select! {
            () = accepting => {}
            ended = serving => {
                if let Err(e) = ended {
                    tracing::error!(error = chain(&e), "peer server ended");
                }
            }
        }
    })
}

async fn accept(listener: TcpListener, accepted: mpsc::Sender<std::io::Result<PeerStream>>) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    for number in 0.. {
        // At the limit the backlog waits: a silent connection gives its slot back after the handshake's deadline.
        let Ok(slot) = slots.clone().acquire_owned().await else {
            return;
        };
        let stream = loop {
            match listener.accept().await {
                Ok((stream, _)) => break stream,
                Err(error) => {
                    tracing::warn!(%error, "peer connection not accepted");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        };
        let _ = stream.set_nodelay(true);
        if accepted.send(Ok(PeerStream::new(stream, number, slot))).await.is_err() {
            return;
        }
    }
}

struct Incoming(mpsc::Receiver<std::io::Result<PeerStream>>);

impl Stream for Incoming {
    type Item = std::io::Result<PeerStream>;
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx)
    }
}

struct PeerService {
    shared: Arc<Shared>,
    known: Arc<Mutex<Known>>,
}

/// Who is in the middle of a handshake, and who has passed one; bounded by the connections at once.
#[derive(Default)]
struct Known {
    challenged: HashMap<Connection, (Transcript, Instant)>,
    greeted: HashMap<Connection, (Nonce, Incarnation)>,
}

/// Entries of closed connections are dropped when there are more than this.
const KNOWN_MAX: usize = 4 * CONNECTIONS;

impl PeerService {
    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The peer process that a request comes from.
    fn holder<T>(&self, request: &Request<T>) -> Result<Incarnation, Status> {
        let over = origin(request)?;
        let bearer = request.metadata().get_bin(BEARER).and_then(|b| b.to_bytes().ok());
        match (self.known().greeted.get(&over), bearer) {
            (Some((token, incarnation)), Some(bearer)) if same(token, &bearer) => Ok(*incarnation),
            _ => Err(unauthenticated(
                "no valid bearer token of this connection; say hello first",
            )),
        }
    }

    /// Those of ours that a peer may read with (XFER-9); names that we do not know are of a newer peer.
    fn movers(&self, named: &[String]) -> Result<Arc<[MoverKind]>, Refusal> {
        let served = || self.shared.pool.served().map(|path| path.mover.kind());
        let both: Arc<[MoverKind]> = served()
            .filter(|kind| named.iter().any(|n| n == kind.as_str()))
            .collect();
        if both.is_empty() {
            return Err(parse::no_common_mover(served(), named.iter().map(String::as_str)));
        }
        Ok(both)
    }

    fn check(&self, hello: &wire::HelloRequest) -> Result<(), Refusal> {
        let want = Incarnation(hello.want_incarnation);
        if want != self.shared.incarnation {
            return Err(Refusal::new(
                Reason::StaleIncarnation,
                format!("meant is process {want}, this one is {}", self.shared.incarnation),
            ));
        }
        if hello.model != self.shared.facts.model {
            return Err(Refusal::new(
                Reason::ModelMismatch,
                format!(
                    "this worker serves {:?}, the peer {:?}",
                    self.shared.facts.model, hello.model
                ),
            ));
        }
        self.shared.pool.movable()?;
        let layout = self.shared.pool.layout().fingerprint();
        if hello.layout != layout {
            return Err(Refusal::new(
                Reason::LayoutMismatch,
                format!("this worker's KV is {layout}, the peer's {}", hello.layout),
            ));
        }
        Ok(())
    }
}

#[tonic::async_trait]
impl peer_server::Peer for PeerService {
    async fn challenge(
        &self,
        request: Request<wire::ChallengeRequest>,
    ) -> Result<Response<wire::ChallengeReply>, Status> {
        let over = origin(&request)?;
        let asked = request.into_inner();
        if asked.protocol != PROTOCOL {
            return Err(refuse(&Refusal::new(
                Reason::ProtocolMismatch,
                format!("this worker speaks protocol {PROTOCOL}, the peer {}", asked.protocol),
            )));
        }
        let client = Nonce::try_from(asked.nonce.as_slice())
            .map_err(|_| bad(format!("nonce has {} bytes, expected 32", asked.nonce.len())))?;
        let server = auth::random().ok_or_else(internal)?;
        let said = Transcript {
            protocol: PROTOCOL,
            client,
            server,
            incarnation: self.shared.incarnation,
        };
        let mut known = self.known();
        known.challenged.retain(|_, (_, at)| at.elapsed() < HANDSHAKE);
        if known.challenged.len() >= KNOWN_MAX {
            return Err(Status::resource_exhausted("too many handshakes at once"));
        }
        known.challenged.insert(over, (said, Instant::now()));
        Ok(Response::new(wire::ChallengeReply {
            protocol: PROTOCOL,
            nonce: server.to_vec(),
            proof: said.prove(Side::Server, self.shared.config.secret.as_ref()),
            incarnation: self.shared.incarnation.0,
        }))
    }

    async fn hello(&self, request: Request<wire::HelloRequest>) -> Result<Response<wire::HelloReply>, Status> {
        let over = origin(&request)?;
        let hello = request.into_inner();
        // A challenge is good for one answer, right or wrong.
        let challenge = self.known().challenged.remove(&over);
        let Some((said, at)) = challenge else {
            return Err(unauthenticated("hello without challenge"));
        };
        if at.elapsed() >= HANDSHAKE || !said.verify(Side::Client, self.shared.config.secret.as_ref(), &hello.proof) {
            return Err(unauthenticated(
                "the peer does not prove the shared secret of this worker",
            ));
        }
        self.check(&hello).map_err(|refusal| refuse(&refusal))?;
        let token = auth::random().ok_or_else(internal)?;
        let mut known = self.known();
        if known.greeted.len() >= KNOWN_MAX {
            // Connection numbers grow: the smallest half belongs to connections long closed.
            let mut numbers: Vec<_> = known.greeted.keys().map(|c| c.0).collect();
            numbers.sort_unstable();
            let oldest = numbers[numbers.len() / 2];
            known.greeted.retain(|c, _| c.0 >= oldest);
        }
        known.greeted.insert(over, (token, Incarnation(hello.incarnation)));
        let pool = &self.shared.pool;
        let offers = pool.served().map(|path| wire::Offer {
            mover: path.mover.kind().as_str().into(),
            endpoint: path.mover.endpoint(),
            keys: path.keys.iter().map(|key| key.0).collect(),
        });
        Ok(Response::new(wire::HelloReply {
            token: token.to_vec(),
            offers: offers.collect(),
            slots: pool.layout().slots(),
            rows: pool.layout().buffers().iter().map(|buffer| buffer.row).collect(),
        }))
    }

    async fn lease(&self, request: Request<wire::LeaseRequest>) -> Result<Response<wire::LeaseReply>, Status> {
        let holder = self.holder(&request)?;
        let asked = request.into_inner();
        let lease = parse::lease(&asked, self.shared.incarnation).map_err(|e| refuse(&e))?;
        let movers = self.movers(&asked.movers).map_err(|e| refuse(&e))?;
        let granted = Exports::grant(&self.shared, &lease, holder, &movers, wait(asked.wait_ms))
            .await
            .map_err(|e| refuse(&e))?;
        let grant = granted.grant;
        tracing::debug!(lease = %grant.lease, session = %lease.session, peer = %holder, "lease granted");
        Ok(Response::new(wire::LeaseReply {
            lease: grant.lease.0,
            token: granted.token.as_bytes().to_vec(),
            placement: grant.epoch.placement.n,
            store: grant.epoch.placement.store.0,
            rewind: grant.epoch.rewind,
            identity: grant.identity.0.to_string(),
            tokens: grant.tokens.to_vec(),
            readable: grant.readable,
            share: grant.share,
            lives_ms: u32::try_from(grant.lives.as_millis()).unwrap_or(u32::MAX),
            after: grant.after,
        }))
    }

    async fn watch(&self, request: Request<wire::WatchRequest>) -> Result<Response<wire::WatchReply>, Status> {
        let holder = self.holder(&request)?;
        let asked = request.into_inner();
        let view = Exports::watch(
            &self.shared,
            LeaseId(asked.lease),
            holder,
            asked.from,
            wait(asked.wait_ms),
        )
        .await
        .map_err(|e| refuse(&e))?;
        let mut runs: Vec<wire::SlotRun> = Vec::new();
        for &slot in &view.slots {
            match runs.last_mut() {
                Some(run) if run.slot.checked_add(run.len) == Some(slot) => run.len += 1,
                _ => runs.push(wire::SlotRun { slot, len: 1 }),
            }
        }
        Ok(Response::new(wire::WatchReply {
            from: view.from,
            runs,
            complete: view.complete,
        }))
    }

    async fn renew(&self, request: Request<wire::LeaseName>) -> Result<Response<wire::Done>, Status> {
        let lease = self.named(request)?;
        self.shared
            .call(|worker, now| worker.renew(lease, now))
            .map_err(|e| refuse(&e))?;
        Ok(Response::new(wire::Done {}))
    }

    async fn confirm(&self, request: Request<wire::LeaseName>) -> Result<Response<wire::Done>, Status> {
        let lease = self.named(request)?;
        self.shared
            .call(|worker, now| worker.confirm(lease, now))
            .map_err(|e| refuse(&e))?;
        Ok(Response::new(wire::Done {}))
    }

    async fn end(&self, request: Request<wire::LeaseName>) -> Result<Response<wire::Done>, Status> {
        let lease = self.named(request)?;
        self.shared.call(|worker, now| worker.end_lease(lease, now));
        Ok(Response::new(wire::Done {}))
    }

    async fn announce(&self, request: Request<wire::AnnounceRequest>) -> Result<Response<wire::Done>, Status> {
        let holder = self.holder(&request)?;
        let (from, announcement) = parse::announcement(&request.into_inner(), holder).map_err(|e| refuse(&e))?;
        self.shared
            .call(|worker, now| worker.announced(from, &announcement, now))
            .map_err(|e| refuse(&e))?;
        Ok(Response::new(wire::Done {}))
    }

    async fn handover(&self, request: Request<wire::HandoverRequest>) -> Result<Response<wire::HandoverReply>, Status> {
        let holder = self.holder(&request)?;
        let (to, asked) = parse::handover(&request.into_inner(), holder).map_err(|e| refuse(&e))?;
        let answer = handover::answer(&self.shared, &asked, &to)
            .await
            .map_err(|e| refuse(&e))?;
        let answer = match answer {
            HandoverAnswer::Granted => wire::HandoverAnswer::Granted,
            HandoverAnswer::Behind => wire::HandoverAnswer::Behind,
            HandoverAnswer::Busy => wire::HandoverAnswer::Busy,
        };
        Ok(Response::new(wire::HandoverReply { answer: answer.into() }))
    }
}

impl PeerService {
    fn named(&self, request: Request<wire::LeaseName>) -> Result<LeaseId, Status> {
        let holder = self.holder(&request)?;
        let lease = LeaseId(request.into_inner().lease);
        self.shared.exports.check(lease, holder).map_err(|e| refuse(&e))?;
        Ok(lease)
    }
}

fn origin<T>(request: &Request<T>) -> Result<Connection, Status> {
    connection(request.extensions()).ok_or_else(internal)
}

fn wait(ms: u32) -> Duration {
    Duration::from_millis(ms.into()).min(WAIT_MAX)
}

/// Compares without telling by its time where the first difference is.
fn same(token: &Nonce, given: &[u8]) -> bool {
    given.len() == token.len() && token.iter().zip(given).fold(0, |d, (a, b)| d | (a ^ b)) == 0
}

fn unauthenticated(why: &str) -> Status {
    refuse(&Refusal::new(Reason::Unauthenticated, why))
}

fn bad(why: String) -> Status {
    refuse(&Refusal::new(Reason::BadRequest, why))
}

fn internal() -> Status {
    refuse(&Refusal::new(Reason::Internal, "no random bytes or connection number"))
}
