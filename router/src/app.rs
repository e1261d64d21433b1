//! What the whole router shares ([`App`]), and what each serving thread has of its own ([`Lane`]): its connections.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use hyper::header::HeaderValue;
use kvc_proto::{
    id::{RouterId, StoreId},
    routing::{MemoryStore, Router, WorkerIndex, view::View},
    time::Now,
};

use crate::{
    config::{Config, WorkerConfig},
    metrics::Metrics,
    upstream::{Address, Pool},
};

/// Shared by all threads.
pub struct App {
    /// The configuration.
    pub config: Config,
    /// Metrics.
    pub metrics: Metrics,
    router: Mutex<Router<MemoryStore>>,
    workers: Vec<Names>,
    origin: Instant,
}

/// Where a worker is.
struct Names {
    engine: Arc<Address>,
    module: Arc<Address>,
    /// The engine's address as `Host` and as `x-kvc-worker`.
    host: HeaderValue,
}

/// One serving thread's connections.
pub struct Lane {
    /// The rest.
    pub app: Arc<App>,
    engines: Vec<Arc<Pool>>,
    modules: Vec<Arc<Pool>>,
}

/// The system's random source failed.
#[derive(Debug, thiserror::Error)]
#[error("no random numbers: {0}")]
pub struct NoRandom(getrandom::Error);

impl App {
    /// A router that has not yet heard of its workers.
    pub fn new(config: Config) -> Result<Arc<App>, NoRandom> {
        let view = View::new(config.workers.iter().map(|w| w.role));
        let id = RouterId(getrandom::u64().map_err(NoRandom)?);
        let store = MemoryStore::new(StoreId(getrandom::u64().map_err(NoRandom)?));
        Ok(Arc::new(App {
            metrics: Metrics::new(&config.workers),
            router: Mutex::new(Router::new(config.routing.clone(), id, store, view)),
            workers: config.workers.iter().map(Names::of).collect(),
            origin: Instant::now(),
            config,
        }))
    }

    /// The routing state; held for microseconds, never across a wait.
    pub fn router(&self) -> MutexGuard<'_, Router<MemoryStore>> {
        self.router.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The machines' time.
    pub fn now(&self) -> Now {
        Now(u64::try_from(self.origin.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    /// How long until that reading.
    pub fn until(&self, then: Now) -> Duration {
        then.since(self.now())
    }

    /// `host:port` of a worker's engine.
    pub fn engine(&self, w: WorkerIndex) -> Arc<str> {
        self.names(w).engine.text()
    }

    /// The worker that an operator names: by its engine's URL or address, or by its listener's.
    pub fn named(&self, name: &str) -> Option<WorkerIndex> {
        let name = name.strip_prefix("http://").unwrap_or(name).trim_end_matches('/');
        let is = |n: &Names| *n.engine.text() == *name || *n.module.text() == *name;
        let at = self.workers.iter().position(is).filter(|_| !name.is_empty())?;
        Some(WorkerIndex(u16::try_from(at).ok()?))
    }

    /// [`App::engine`], as a header.
    pub fn host(&self, w: WorkerIndex) -> HeaderValue {
        self.names(w).host.clone()
    }

    /// Where a worker's module listens; its text is empty while that is not known.
    pub fn module(&self, w: WorkerIndex) -> &Arc<Address> {
        &self.names(w).module
    }

    fn names(&self, w: WorkerIndex) -> &Names {
        &self.workers[usize::from(w.0)]
    }
}

impl Names {
    fn of(config: &WorkerConfig) -> Names {
        Names {
            engine: Address::new(&config.engine),
            module: Address::new(config.listen.as_deref().unwrap_or_default()),
            // An address that the configuration has checked is visible ASCII.
            host: HeaderValue::from_str(&config.engine).unwrap_or_else(|_| HeaderValue::from_static("worker")),
        }
    }
}

impl Lane {
    /// The connections of one thread.
    pub fn new(app: Arc<App>) -> Arc<Lane> {
        let pool =
            |address: &Arc<Address>| Pool::new(address.clone(), app.config.pool_size, app.config.timeouts.connect);
        Arc::new(Lane {
            engines: app.workers.iter().map(|n| pool(&n.engine)).collect(),
            modules: app.workers.iter().map(|n| pool(&n.module)).collect(),
            app,
        })
    }

    /// To a worker's engine.
    pub fn engine(&self, w: WorkerIndex) -> &Arc<Pool> {
        &self.engines[usize::from(w.0)]
    }

    /// To a worker's module.
    pub fn module(&self, w: WorkerIndex) -> &Arc<Pool> {
        &self.modules[usize::from(w.0)]
    }
}
