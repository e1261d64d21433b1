//! The mover between processes of one host: the exporter's pool lies in a memfd, the importer maps it and copies.
//!
//! The exporter answers requests over a Unix socket (one control thread, `driver`): it looks whether the lease covers the
//! runs, passes the files of their regions once per connection, and names the lease's word in a page both sides map
//! (`word`). The importer's threads (`pool`) copy chunk by chunk, each inside the word and the read's gate, so that a
//! fence on either side waits for one chunk. A dead process copies nothing, and its hang-up says so.

mod config;
mod driver;
mod endpoint;
mod exporter;
#[cfg(feature = "fault")]
pub mod fault;
mod grants;
mod importer;
mod memory;
mod pool;
mod read;
mod socket;
#[cfg(test)]
mod tests;
mod wire;
mod word;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

pub use config::ShmConfig;
use driver::{Command, Driver, Inbox};
use endpoint::Endpoint;
pub use endpoint::is_here;
use exporter::{Exporter, Shared};
use grants::Grants;
use importer::Importer;
pub use memory::Pages;
pub(crate) use memory::{Backing, SharedFile};
use pool::{Copier, Pool};
use read::Read;
use socket::Socket;

use crate::{
    error::MoverError,
    lease::Leases,
    mover::{Cancel, Copy, Done, LeaseToken, Mover, MoverKind, ReadHandle, ReadOptions, spawn},
    plan::{self, Chunk, ChunkLimits},
    region::{Region, RegionKey, Regions, Run},
};

/// Runs of one chunk on either side.
const CHUNK_RUNS: usize = 512;

/// Moves bytes between processes of one host. Regions that are exported have to lie in a memfd
/// ([`Region::backed_by`]); where bytes land may be any memory. Not to be dropped inside `done`.
pub struct ShmMover {
    shared: Arc<Shared>,
    config: ShmConfig,
    endpoint: Endpoint,
    inbox: Arc<Inbox>,
    pool: Arc<Pool>,
    reads: Arc<AtomicUsize>,
    next_read: AtomicU64,
    #[cfg(feature = "fault")]
    flaws: Arc<fault::Flaws>,
    driver: Option<JoinHandle<()>>,
    copiers: Vec<JoinHandle<()>>,
}

impl ShmMover {
    /// Listens and starts its threads.
    ///
    /// # Errors
    /// [`MoverError::BadConfig`], [`MoverError::System`].
    pub fn start(config: ShmConfig) -> Result<Self, MoverError> {
        config.check()?;
        let system = |call| move |e: std::io::Error| MoverError::system(call, &e);
        let endpoint = Endpoint::fresh()?;
        let listener = Socket::listen(&endpoint.name).map_err(system("listen"))?;
        let regions = Arc::new(Regions::default());
        let shared = Arc::new(Shared {
            regions,
            leases: Leases::new(config.leases),
            grants: Grants::default(),
        });
        let (poll, inbox) = Driver::inbox().map_err(system("epoll"))?;
        let pool = Arc::new(Pool::default());
        #[cfg(feature = "fault")]
        let flaws = Arc::new(fault::Flaws::default());
        let exporter = Exporter::new(shared.clone(), config.clone());
        let importer = Importer::new(
            pool.clone(),
            #[cfg(feature = "fault")]
            flaws.clone(),
        );
        let driver = Driver::new(poll, inbox.clone(), listener, exporter, importer).map_err(system("epoll"))?;
        let mut mover = ShmMover {
            shared,
            config,
            endpoint,
            inbox,
            pool,
            reads: Arc::new(AtomicUsize::new(0)),
            next_read: AtomicU64::new(1),
            #[cfg(feature = "fault")]
            flaws,
            driver: None,
            copiers: Vec::new(),
        };
        mover.driver = Some(spawn("kvc-shm", move || driver.run())?);
        for _ in 0..mover.config.threads {
            let copier = Copier {
                pool: mover.pool.clone(),
                regions: mover.shared.regions.clone(),
                inbox: mover.inbox.clone(),
                #[cfg(feature = "fault")]
                flaws: mover.flaws.clone(),
            };
            mover.copiers.push(spawn("kvc-shm-copy", move || copier.run())?);
        }
        Ok(mover)
    }

    /// Fences that did not see an importer leave its copy in time; that chunk was void.
    pub fn late_fences(&self) -> u64 {
        self.shared.grants.late()
    }

    /// Leases that are exposed now, expired ones that were not fenced included.
    pub fn leases(&self) -> usize {
        self.shared.leases.count()
    }

    /// A hand on what goes wrong with what this mover reads.
    #[cfg(feature = "fault")]
    pub fn faults(&self) -> fault::Faults {
        fault::Faults(Arc::downgrade(&self.flaws))
    }

    fn plan(&self, peer: &str, copies: &[Copy]) -> Result<(Endpoint, Vec<Chunk>), MoverError> {
        let endpoint = Endpoint::parse(peer)?;
        plan::check(copies, &self.shared.regions)?;
        if self.reads.load(Ordering::Relaxed) >= self.config.reads {
            return Err(MoverError::TooMany {
                what: "reads",
                limit: self.config.reads as u64,
            });
        }
        let limits = ChunkLimits {
            bytes: self.config.chunk,
            runs: CHUNK_RUNS,
        };
        Ok((endpoint, plan::chunks(copies, &limits)))
    }
}

impl Mover for ShmMover {
    fn kind(&self) -> MoverKind {
        MoverKind::Shm
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

    /// As every mover's, and [`MoverError::NotShared`] for a run of memory that peers cannot map.
    fn extend(&self, token: &LeaseToken, runs: &[Run]) -> Result<(), MoverError> {
        self.shared.regions.check(runs)?;
        {
            let regions = self.shared.regions.view();
            let private = |run: &&Run| !regions.region(run.region).is_some_and(Region::is_shareable);
            if let Some(run) = runs.iter().find(private) {
                return Err(MoverError::NotShared { run: *run });
            }
        }
        let Shared { leases, regions, .. } = &*self.shared;
        leases.extend(token, runs, regions, &self.endpoint())
    }

    fn fence(&self, token: &LeaseToken) {
        // First the door to new grants, then those there are (XFER-2).
        self.shared.leases.fence(token);
        self.shared.grants.revoke(token, self.config.fence);
    }

    fn read(&self, peer: &str, token: LeaseToken, copies: Vec<Copy>, options: ReadOptions, done: Done) -> ReadHandle {
        let id = self.next_read.fetch_add(1, Ordering::Relaxed);
        let lanes = options.streams.clamp(1, self.config.threads);
        let (to, chunks) = match self.plan(peer, &copies) {
            Ok((to, chunks)) => (Ok(to), chunks),
            Err(error) => (Err(error), Vec::new()),
        };
        let what = read::What {
            id,
            peer: peer.into(),
            token,
            options,
        };
        let read = Arc::new(Read::new(what, lanes, chunks, done, self.reads.clone()));
        let command = Command::Read(read.clone(), to);
        self.inbox.send(command).into_iter().for_each(driver::call_off);
        ReadHandle(Arc::new(Running {
            read,
            inbox: self.inbox.clone(),
        }))
    }
}

impl Drop for ShmMover {
    fn drop(&mut self) {
        // Nobody answers any more, then nobody reads any more: importers hear of the end and of nothing else.
        self.inbox.close().into_iter().for_each(driver::call_off);
        let driver = self.driver.take();
        self.pool.close();
        for thread in driver.into_iter().chain(self.copiers.drain(..)) {
            if thread.join().is_err() {
                tracing::error!("a shm mover thread panicked");
            }
        }
        self.shared.leases.fence_all();
        self.shared.grants.close(self.config.fence);
    }
}

/// A read as its owner holds it.
struct Running {
    read: Arc<Read>,
    inbox: Arc<Inbox>,
}

impl Cancel for Running {
    fn cancel(&self) {
        self.read.shut();
        // A thread that has ended has told the owner already.
        let _ = self.inbox.send(Command::Cancelled(self.read.what.id));
    }
}
