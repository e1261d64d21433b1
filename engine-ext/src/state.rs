//! [`Engine`]: everything the module is, in one process: the machine behind its lock, listeners, peers, transfers.
//! Made by the adapter; [`Engine::scheduler`] is its only way to the machine.

use std::{
    io,
    net::SocketAddr,
    os::fd::RawFd,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use crossbeam::atomic::AtomicCell;
use kvc_proto::{
    id::Incarnation,
    time::Now,
    wire::{admit::LoadReport, info::WorkerInfo},
    worker::{Command, Snapshot, Worker},
};
use kvc_rdma::{Mover, MoverError, MoverKind};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::{
    EngineFacts,
    config::Config,
    effect::{self, Fences},
    listener,
    metrics::Metrics,
    movers::Movers,
    peer::{self, Peers},
    pool::Pool,
    timer::{self, Timer},
    transfer::{Announcer, Exports, Imports, Pace, Serving},
    wake::Wake,
};

/// What the threads of the module's runtime are called.
const THREADS: &str = "kvc-peer";

/// The module of one engine process.
///
/// Dropping it is [`Engine::shutdown`] with one second.
pub struct Engine {
    shared: Arc<Shared>,
    running: Mutex<Option<Running>>,
}

/// What stopped the module from starting.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address cannot be listened on.
    #[error("{field} {address}: {source}: free it or set {field} to another address")]
    Bind {
        /// Which setting.
        field: &'static str,
        /// Its value.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// A mover that has to be there cannot start, or cannot take the engine's memory.
    #[error("{field}: {source}")]
    Mover {
        /// The setting that asks for it.
        field: &'static str,
        /// What is wrong.
        source: MoverError,
    },
    /// RDMA is asked for.
    #[error("{field}: this build has no RDMA: build it with the feature verbs")]
    NoRdmaBuild {
        /// The setting that asks for it.
        field: &'static str,
    },
    /// RDMA is asked for, and the KV is where it cannot be read from yet.
    #[error("{field}: the engine's KV is on a GPU, which no mover reads yet: leave {field} unset")]
    DeviceMemory {
        /// The setting that asks for it.
        field: &'static str,
    },
    /// The certificates cannot be used.
    #[error("tls.cert, tls.key, tls.ca: {fault}: give matching PEM files")]
    Tls {
        /// What is wrong.
        fault: String,
    },
    /// The engine's pool cannot be served.
    #[error("the engine's pool has {field} {got}, expected {limit}")]
    Facts {
        /// Which number.
        field: &'static str,
        /// As given.
        got: u64,
        /// What is allowed.
        limit: String,
    },
    /// The system gave no thread, descriptor or random bytes.
    #[error("{call}: {source}")]
    System {
        /// What was asked for.
        call: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

struct Running {
    listener: listener::Thread,
    runtime: Runtime,
}

impl Engine {
    /// Starts threads, listeners and movers, and registers the engine's pool with those.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running.
    pub fn start(config: Config, facts: EngineFacts) -> Result<Self, StartError> {
        let movers = Movers::start(&config, facts.layout.device())?;
        Self::with_movers(config, facts, movers)
    }

    /// [`Engine::start`] with these movers, best first.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn start_with(config: Config, facts: EngineFacts, movers: Vec<Arc<dyn Mover>>) -> Result<Self, StartError> {
        Self::with_movers(config, facts, Movers::of(movers))
    }

    fn with_movers(config: Config, facts: EngineFacts, movers: Movers) -> Result<Self, StartError> {
        check(&facts)?;
        let system = |call| move |source| StartError::System { call, source };
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name(THREADS)
            .enable_all()
            .build()
            .map_err(system("threads"))?;
        let listen = bind("listen", config.listen)?;
        let peer_listen = bind("peer_listen", config.peer_listen)?;
        let pool = Pool::register(facts.layout.clone(), movers, &config)?;
        let page_tokens = facts.layout.shape().page_tokens;
        let incarnation = Incarnation(random().map_err(system("random bytes"))?);
        let serving = Arc::new(Serving::default());
        let shared = Arc::new(Shared {
            worker: Mutex::new(Worker::new(config.worker(facts.capacity, page_tokens), incarnation)),
            origin: Instant::now(),
            incarnation,
            listen: config.reachable(listen.1),
            peer_listen: config.reachable(peer_listen.1),
            load: AtomicCell::new(LoadReport {
                capacity: facts.capacity.into(),
                ..LoadReport::default()
            }),
            metrics: Metrics::new(),
            wake: Wake::new().map_err(system("wake descriptor"))?,
            fences: Fences::default(),
            timer: Timer::new(),
            exports: Exports::new(serving.clone()),
            imports: Imports::new(serving.clone()),
            announcer: Announcer::default(),
            serving,
            pace: Pace::default(),
            peers: Peers::new(&config)?,
            runtime: runtime.handle().clone(),
            pool,
            facts,
            config,
            #[cfg(feature = "harness")]
            lag: AtomicCell::new(Duration::ZERO),
        });
        let tls = peer::server_tls(&shared.config)?;
        runtime.spawn(timer::run(shared.clone()));
        {
            let _entered = runtime.enter();
            let incoming = tokio::net::TcpListener::from_std(peer_listen.0).map_err(system("peer_listen"))?;
            runtime.spawn(peer::serve(shared.clone(), incoming, tls)?);
        }
        let listener = listener::Thread::start(shared.clone(), listen.0).map_err(system("listener thread"))?;
        tracing::info!(
            listen = %shared.listen,
            peer = %shared.peer_listen,
            data = ?shared.pool.paths().iter().map(|path| path.mover.endpoint()).collect::<Vec<_>>(),
            incarnation = %incarnation,
            "module started"
        );
        Ok(Self {
            shared,
            running: Mutex::new(Some(Running { listener, runtime })),
        })
    }

    /// One call of the engine's scheduler thread into the machine. When it returns, every fence the call caused is over:
    /// the pages in its answer may be freed (XFER-2, ADR 0001).
    pub fn scheduler<R>(&self, call: impl FnOnce(&mut Worker, Now) -> R) -> R {
        self.shared.call(call)
    }

    /// Once per iteration of the engine's loop: hands the engine's numbers in, gets what the engine's thread has to do,
    /// and publishes the load.
    pub fn poll(&self, snapshot: &Snapshot) -> Vec<Command> {
        let (commands, load) = self.shared.call(|worker, now| {
            let commands = worker.poll(snapshot, now);
            (commands, worker.load(None))
        });
        self.shared.load.store(load);
        commands
    }

    /// The load as of the last [`Engine::poll`]; takes no lock.
    pub fn load(&self) -> LoadReport {
        self.shared.load.load()
    }

    /// Becomes readable when the engine's loop has work; valid as long as the engine lives. The loop calls
    /// [`Engine::clear_wake`] when it has woken, before it polls.
    pub fn wake_fd(&self) -> RawFd {
        self.shared.wake.fd()
    }

    /// Makes [`Engine::wake_fd`] unreadable until the next wake.
    pub fn clear_wake(&self) {
        self.shared.wake.clear();
    }

    /// Whether [`Engine::wake_fd`] is readable.
    #[cfg(feature = "harness")]
    pub(crate) fn woken(&self) -> bool {
        self.shared.wake.is_set()
    }

    /// From now on the module's own threads are this late between a step of the machine and its effects.
    #[cfg(feature = "harness")]
    pub fn lag(&self, lag: Duration) {
        self.shared.lag.store(lag);
    }

    /// Random id of this process.
    pub fn incarnation(&self) -> Incarnation {
        self.shared.incarnation
    }

    /// Where the HTTP listener is reached.
    pub fn listen(&self) -> SocketAddr {
        self.shared.listen
    }

    /// Where the peer control plane is reached.
    pub fn peer_listen(&self) -> SocketAddr {
        self.shared.peer_listen
    }

    /// Where the mover of that kind is reached; `None` if there is none.
    pub fn endpoint(&self, kind: MoverKind) -> Option<String> {
        self.shared.pool.path(kind).map(|path| path.mover.endpoint())
    }

    /// How many bytes per second all pulls into this worker take at most, from now on; 0: no limit, as at start.
    pub fn limit_pulls(&self, bytes_per_s: u64) {
        self.shared.pace.limit(bytes_per_s);
    }

    /// What `GET /kvc/v1/info` answers.
    pub fn info(&self) -> WorkerInfo {
        self.shared.info()
    }

    /// Stops listening, cancels imports, fences leases and ends the threads, all within `deadline` if they can. When it
    /// returns nothing reads or writes the engine's pool any more; a later call does nothing.
    pub fn shutdown(&self, deadline: Duration) {
        let until = Instant::now() + deadline;
        let Some(running) = self.running.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        running.listener.stop(deadline / 2);
        self.shared.imports.fence_all();
        running
            .runtime
            .shutdown_timeout(until.saturating_duration_since(Instant::now()));
        // Once more: a task may have started a read while the runtime was ending.
        self.shared.imports.fence_all();
        self.shared.exports.fence_all(&self.shared.pool);
        tracing::info!("module stopped");
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shutdown(Duration::from_secs(1));
    }
}

/// What all threads of the module share.
pub(crate) struct Shared {
    worker: Mutex<Worker>,
    origin: Instant,
    pub(crate) incarnation: Incarnation,
    pub(crate) listen: SocketAddr,
    pub(crate) peer_listen: SocketAddr,
    pub(crate) load: AtomicCell<LoadReport>,
    pub(crate) metrics: Metrics,
    pub(crate) wake: Wake,
    pub(crate) fences: Fences,
    pub(crate) timer: Timer,
    pub(crate) exports: Exports,
    pub(crate) imports: Imports,
    pub(crate) announcer: Announcer,
    pub(crate) serving: Arc<Serving>,
    pub(crate) pace: Pace,
    pub(crate) peers: Peers,
    pub(crate) runtime: Handle,
    // Its movers are dropped before `facts`, whose layout keeps the memory.
    pub(crate) pool: Pool,
    pub(crate) facts: EngineFacts,
    pub(crate) config: Config,
    #[cfg(feature = "harness")]
    lag: AtomicCell<Duration>,
}

impl Shared {
    /// The module's monotonic clock.
    pub(crate) fn now(&self) -> Now {
        Now(u64::try_from(self.origin.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    /// Asks the machine, then carries out its effects; every call from any thread goes this way.
    pub(crate) fn call<R>(self: &Arc<Self>, ask: impl FnOnce(&mut Worker, Now) -> R) -> R {
        let (answer, effects) = {
            let mut worker = match self.worker.try_lock() {
                Ok(worker) => worker,
                Err(_) => self.wait_for_lock(),
            };
            let answer = ask(&mut worker, self.now());
            let effects = effect::drain(self, &mut worker);
            self.timer.arm(worker.poll_timeout());
            (answer, effects)
        };
        #[cfg(feature = "harness")]
        self.lag();
        effect::carry_out(self, effects);
        answer
    }

    /// Holds a thread of the module back where another one may overtake it.
    #[cfg(feature = "harness")]
    fn lag(&self) {
        let lag = self.lag.load();
        if !lag.is_zero()
            && std::thread::current()
                .name()
                .is_some_and(|name| name.starts_with(THREADS))
        {
            std::thread::sleep(lag);
        }
    }

    /// What `GET /kvc/v1/info` answers.
    pub(crate) fn info(self: &Arc<Self>) -> WorkerInfo {
        let (load, draining) = self.call(|worker, _| (worker.load(None), worker.draining()));
        WorkerInfo {
            incarnation: self.incarnation,
            role: self.config.role,
            version: env!("CARGO_PKG_VERSION").into(),
            engine: self.facts.engine.clone(),
            model: self.facts.model.clone(),
            listen: self.listen.to_string(),
            peer: self.peer_listen.to_string(),
            page_tokens: self.facts.layout.shape().page_tokens,
            capacity: self.facts.capacity.into(),
            max_uncached_tokens: self.config.max_uncached_tokens,
            layout: self.facts.layout.fingerprint(),
            movers: self
                .pool
                .served()
                .map(|path| path.mover.kind().as_str().into())
                .collect(),
            draining,
            load,
        }
    }

    #[cold]
    fn wait_for_lock(&self) -> std::sync::MutexGuard<'_, Worker> {
        let began = Instant::now();
        // A panic inside the machine is a fault of ours that its caller sees; the others go on with the state as it is.
        let worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        self.metrics.lock_waited(began.elapsed());
        worker
    }
}

fn bind(field: &'static str, address: SocketAddr) -> Result<(std::net::TcpListener, SocketAddr), StartError> {
    let bound = || {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    bound().map_err(|source| StartError::Bind { field, address, source })
}

fn check(facts: &EngineFacts) -> Result<(), StartError> {
    let shape = facts.layout.shape();
    let field = |field, got: u64, limit: String| Err(StartError::Facts { field, got, limit });
    if facts.capacity == 0 || facts.capacity > facts.layout.slots() {
        return field(
            "capacity",
            facts.capacity.into(),
            format!("1 to {} slots", facts.layout.slots()),
        );
    }
    if !facts.capacity.is_multiple_of(shape.page_tokens) {
        return field(
            "capacity",
            facts.capacity.into(),
            format!("whole pages of {}", shape.page_tokens),
        );
    }
    if shape.tp.1 != 1 {
        // ADM-13 is not built: ranks would decide differently.
        return field("tp size", shape.tp.1.into(), "1".into());
    }
    Ok(())
}

fn random() -> io::Result<u64> {
    getrandom::u64().map_err(|e| io::Error::other(e.to_string()))
}
