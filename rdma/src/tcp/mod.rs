//! The mover over TCP: range requests, answered straight out of registered memory and landed straight in it.
//!
//! One thread serves (`exporter`), one reads (`importer`), both by readiness and without a runtime. A peer's streams are
//! kept open between reads; each request names its lease by token.

mod config;
mod connection;
mod exporter;
mod importer;
mod memory;
pub(crate) mod refusal;
mod stream;
pub mod wire;

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use mio::{Waker, net::TcpListener};

pub use config::TcpConfig;
use exporter::{Exporter, Shared};
use importer::{Command, Importer, Inbox, Read};

use crate::{
    error::MoverError,
    gate::Gate,
    lease::Leases,
    mover::{Cancel, Copy, Done, LeaseToken, Mover, MoverKind, ReadHandle, ReadOptions, spawn},
    plan::{self, ChunkLimits},
    region::{Region, RegionKey, Regions, Run},
};

/// A read of less than this per stream is not cut further.
const LEAST_CHUNK: u64 = 64 << 10;

/// Moves bytes over TCP. Authentication is the lease token's part (XFER-10): whoever grants leases has authenticated the
/// peer. Not to be dropped inside `done`.
pub struct TcpMover {
    shared: Arc<Shared>,
    config: TcpConfig,
    endpoint: SocketAddr,
    inbox: Arc<Inbox>,
    exporter_waker: Waker,
    next_read: AtomicU64,
    threads: Vec<JoinHandle<()>>,
}

impl TcpMover {
    /// Listens and starts both threads.
    ///
    /// # Errors
    /// [`MoverError::BadConfig`], [`MoverError::NoAdvertise`], [`MoverError::System`] when it cannot listen.
    pub fn start(config: TcpConfig) -> Result<Self, MoverError> {
        config.check()?;
        let system = |call| move |e: io::Error| MoverError::system(call, &e);
        let (listener, endpoint) = listen(config.bind, config.advertise)?;
        let regions = Arc::new(Regions::default());
        let shared = Arc::new(Shared {
            leases: Leases::new(config.leases),
            regions: regions.clone(),
            connections: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        });
        let (exporter, exporter_waker) =
            Exporter::new(shared.clone(), config.clone(), listener).map_err(system("epoll"))?;
        let (importer, inbox) = Importer::new(regions, config.clone()).map_err(system("epoll"))?;
        let next_read = AtomicU64::new(1);
        let mut mover = TcpMover {
            shared,
            config,
            endpoint,
            inbox,
            exporter_waker,
            next_read,
            threads: Vec::with_capacity(2),
        };
        mover.threads.push(spawn("kvc-tcp-export", move || exporter.run())?);
        mover.threads.push(spawn("kvc-tcp-import", move || importer.run())?);
        Ok(mover)
    }

    /// Connections that peers hold to the exporter now.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Leases that are exposed now, expired ones that were not fenced included.
    pub fn leases(&self) -> usize {
        self.shared.leases.count()
    }

    fn plan(&self, peer: &str, copies: &[Copy], streams: usize) -> Result<Planned, MoverError> {
        let address = peer.parse().map_err(|_| MoverError::BadPeer { peer: peer.into() })?;
        let total = plan::check(copies, &self.shared.regions)?;
        let share = total.div_ceil(streams.clamp(1, self.config.streams) as u64);
        let bytes = share.clamp(LEAST_CHUNK.min(self.config.chunk), self.config.chunk);
        Ok((
            address,
            plan::chunks(
                copies,
                &ChunkLimits {
                    bytes,
                    runs: wire::MAX_RUNS,
                },
            )
            .into(),
        ))
    }
}

type Planned = (SocketAddr, std::collections::VecDeque<plan::Chunk>);

impl Mover for TcpMover {
    fn kind(&self) -> MoverKind {
        MoverKind::Tcp
    }

    fn endpoint(&self) -> String {
        self.endpoint.to_string()
    }

    fn register(&self, region: Region) -> Result<RegionKey, MoverError> {
        self.shared.regions.add(region)
    }

    fn expose(&self, token: LeaseToken, max_age: Duration) -> Result<(), MoverError> {
        self.shared.leases.expose(token, Instant::now(), max_age)
    }

    fn extend(&self, token: &LeaseToken, runs: &[Run]) -> Result<(), MoverError> {
        let Shared { leases, regions, .. } = &*self.shared;
        leases.extend(token, runs, regions, &self.endpoint())
    }

    fn fence(&self, token: &LeaseToken) {
        self.shared.leases.fence(token);
    }

    fn read(&self, peer: &str, token: LeaseToken, copies: Vec<Copy>, options: ReadOptions, done: Done) -> ReadHandle {
        let begun = Instant::now();
        let id = self.next_read.fetch_add(1, Ordering::Relaxed);
        let gate = Arc::new(Gate::default());
        let plan = self.plan(peer, &copies, options.streams);
        let read = Read {
            id,
            peer: peer.into(),
            plan,
            token,
            options,
            gate: gate.clone(),
            begun,
            done,
        };
        self.inbox
            .send(Command::Read(read))
            .into_iter()
            .for_each(importer::call_off);
        ReadHandle(Arc::new(Running {
            id,
            gate,
            inbox: self.inbox.clone(),
        }))
    }
}

impl Drop for TcpMover {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Err(e) = self.exporter_waker.wake() {
            tracing::error!(error = %e, "exporter was not woken");
        }
        self.inbox.close().into_iter().for_each(importer::call_off);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a tcp mover thread panicked");
            }
        }
    }
}

/// Listens, and says what peers are told to dial.
pub(crate) fn listen(bind: SocketAddr, advertise: Option<SocketAddr>) -> Result<(TcpListener, SocketAddr), MoverError> {
    let system = |call| move |e: io::Error| MoverError::system(call, &e);
    let listener = TcpListener::bind(bind).map_err(system("bind"))?;
    let local = listener.local_addr().map_err(system("getsockname"))?;
    let mut endpoint = advertise.unwrap_or(local);
    if endpoint.port() == 0 {
        endpoint.set_port(local.port());
    }
    Ok((listener, endpoint))
}

/// A read as its owner holds it.
struct Running {
    id: u64,
    gate: Arc<Gate>,
    inbox: Arc<Inbox>,
}

impl Cancel for Running {
    fn cancel(&self) {
        self.gate.shut();
        // A thread that has ended has told the owner already.
        let _ = self.inbox.send(Command::Cancelled(self.id));
    }
}
