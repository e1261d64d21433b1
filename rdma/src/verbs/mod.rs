//! The mover over RDMA verbs: one-sided READs between registered memory, RoCEv2 or InfiniBand.
//!
//! Each lease has a side channel of its own, a TCP connection on which its token authenticates, and queue pairs of its
//! own, over every device that both sides have: the exporter's fence destroys them. One thread exports (`exporter`), one
//! imports (`importer`); docs/adr/0080 and 0081 say why so.

mod channel;
mod choose;
mod config;
mod device;
mod door;
mod error;
mod exporter;
mod importer;
mod job;
mod library;
mod line;
mod memory;
mod nic;
mod queue_pair;
mod rail;
mod read;
#[cfg(test)]
mod tests;
mod wire;
mod work;

use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::BorrowedFd,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use mio::Waker;

pub use choose::{Choice, Near, Wish, choose};
pub use config::VerbsConfig;
pub use error::{NoDmabuf, VerbsError};
pub use memory::{Landing, Memory, View};
pub use nic::{Gid, GidKind, Link, Nic, Port, Tree};
pub use work::{Batch, PIECES, PeerKey, PeerKeys, Scratch};

use device::{Device, Registration};
use door::Shared;
use exporter::Exporter;
use importer::Importer;
use rail::Rail;
use read::{Command, Home, Inbox, Over, Read, Running, Ticket, call_off};

use crate::{
    error::MoverError,
    lease::Leases,
    mover::{Copy, Done, LeaseToken, Mover, MoverKind, ReadHandle, ReadOptions, spawn},
    plan::{self, Chunk, ChunkLimits},
    region::{Region, RegionKey, Regions, Run},
    tcp::{self, wire::MAX_RUNS},
};

/// What a machine offers, for `kvc-perf devices` and for a start that says what it found.
#[derive(Clone, Debug)]
pub struct Survey {
    /// The devices as sysfs has them.
    pub nics: Vec<Nic>,
    /// The names that libibverbs can open, or why it cannot.
    pub verbs: Result<Vec<String>, VerbsError>,
}

/// Looks what there is; needs neither a device nor the library.
pub fn survey() -> Survey {
    Survey {
        nics: Tree::read(Path::new("/sys")).nics(),
        verbs: Device::names(),
    }
}

/// The address that packets to `peer` leave with, for [`Wish::source`]: the device of the route. Sends nothing.
///
/// # Errors
/// As the system says: there is no route.
pub fn source_towards(peer: SocketAddr) -> io::Result<IpAddr> {
    let any = if peer.is_ipv4() {
        IpAddr::from([0; 4])
    } else {
        IpAddr::from([0; 16])
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(peer)?;
    Ok(socket.local_addr()?.ip())
}

/// Moves bytes with RDMA READs. Not to be dropped inside `done`.
pub struct VerbsMover {
    shared: Arc<Shared>,
    config: VerbsConfig,
    endpoint: SocketAddr,
    inbox: Arc<Inbox>,
    home: Arc<Home>,
    exporter_waker: Waker,
    next_read: AtomicU64,
    threads: Vec<JoinHandle<()>>,
    #[cfg(feature = "fault")]
    flips: Arc<std::sync::Mutex<Option<crate::fault::Fault>>>,
}

impl VerbsMover {
    /// Opens the devices, listens and starts both threads.
    ///
    /// # Errors
    /// [`MoverError::BadConfig`], [`MoverError::NoAdvertise`], [`MoverError::System`] when it cannot listen,
    /// [`MoverError::Verbs`] when RDMA cannot be used: the first three of [`VerbsError`], and what
    /// [`choose`] says.
    pub fn start(config: VerbsConfig) -> Result<Self, MoverError> {
        config.check()?;
        // Before the tree, so that what is missing at the bottom is what is told.
        Device::names()?;
        let choices = choose(&Tree::read(Path::new("/sys")), &config.wish)?;
        let rails = choices
            .into_iter()
            .map(|choice| Rail::open(choice, &config))
            .collect::<Result<Vec<_>, VerbsError>>()?;
        let system = |call| move |e: io::Error| MoverError::system(call, &e);
        let (listener, endpoint) = tcp::listen(config.bind, config.advertise)?;
        let domains = rails.iter().map(|rail| rail.domain.clone()).collect();
        let memory = Arc::new(Memory::new(domains, Arc::new(Regions::default())));
        let shared = Shared::new(Leases::new(config.leases), memory.clone(), rails.clone());
        let (exporter, exporter_waker) =
            Exporter::new(shared.clone(), config.clone(), listener).map_err(system("epoll"))?;
        let (poll, waker) = importer::listen(&rails).map_err(system("epoll"))?;
        let inbox = Inbox::new(waker);
        let mut mover = VerbsMover {
            shared,
            config: config.clone(),
            endpoint,
            inbox: inbox.clone(),
            home: Arc::default(),
            exporter_waker,
            next_read: AtomicU64::new(1),
            threads: Vec::with_capacity(2),
            #[cfg(feature = "fault")]
            flips: Arc::default(),
        };
        mover.threads.push(spawn("kvc-verbs-export", move || exporter.run())?);
        #[cfg(feature = "fault")]
        let flips = mover.flips.clone();
        let home = mover.home.clone();
        let import = spawn("kvc-verbs-import", move || {
            home.enter();
            // What the importer posts names this memory: the thread's own hold on it outlives the importer.
            #[cfg_attr(not(feature = "fault"), expect(unused_mut))]
            let mut importer = Importer::new(&memory, &rails, config, poll, inbox);
            #[cfg(feature = "fault")]
            {
                importer.fault = flips;
            }
            importer.run();
        });
        mover.threads.push(import?);
        Ok(mover)
    }

    /// Side channels that peers hold to the exporter now.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Leases that are exposed now, expired ones that were not fenced included.
    pub fn leases(&self) -> usize {
        self.shared.leases.count()
    }

    /// The devices in use, in the order of the wish, and whether each is up.
    pub fn devices(&self) -> Vec<(Choice, bool)> {
        self.shared
            .rails
            .iter()
            .map(|rail| (rail.choice.clone(), !rail.is_down()))
            .collect()
    }

    /// Whether every device takes a dma-buf of `len` bytes behind `fd`, as a GPU's driver exports them (F20): registers it
    /// for a moment. Who holds GPU memory asks once, and otherwise stages through host memory.
    ///
    /// # Errors
    /// [`VerbsError::NoDmabuf`] of the first that does not.
    pub fn try_dmabuf(&self, fd: BorrowedFd<'_>, len: u64) -> Result<(), VerbsError> {
        let try_one = |rail: &Arc<Rail>| {
            let registered = Registration::dmabuf(&rail.domain, fd, 0, len, 0);
            registered.map(drop).map_err(|why| VerbsError::NoDmabuf {
                device: rail.choice.device.clone(),
                why,
            })
        };
        self.shared.rails.iter().try_for_each(try_one)
    }

    /// A hand on what goes wrong with reads from this mover, and with bytes that land in it.
    #[cfg(feature = "fault")]
    pub fn faults(&self) -> Faults {
        Faults {
            shared: Arc::downgrade(&self.shared),
            flips: self.flips.clone(),
        }
    }

    fn plan(&self, peer: &str, copies: &[Copy], checksum: bool) -> Result<(SocketAddr, Vec<Chunk>), MoverError> {
        let address = peer.parse().map_err(|_| MoverError::BadPeer { peer: peer.into() })?;
        plan::check(copies, self.shared.memory.regions())?;
        let beyond = |view: View<'_>| view.beyond(copies.iter().map(|copy| &copy.local)).copied();
        if let Some(run) = checksum.then(|| beyond(self.shared.memory.view())).flatten() {
            return Err(MoverError::NotHost { len: run.len });
        }
        Ok((
            address,
            plan::chunks(
                copies,
                &ChunkLimits {
                    bytes: self.config.chunk,
                    runs: MAX_RUNS,
                },
            ),
        ))
    }

    fn wake_exporter(&self) {
        if let Err(e) = self.exporter_waker.wake() {
            tracing::error!(error = %e, "exporter was not woken");
        }
    }
}

/// Sets the faults of one mover, while it lives.
#[cfg(feature = "fault")]
#[derive(Clone)]
pub struct Faults {
    shared: std::sync::Weak<Shared>,
    flips: Arc<std::sync::Mutex<Option<crate::fault::Fault>>>,
}

#[cfg(feature = "fault")]
impl Faults {
    /// From now on what peers ask of the mover has this fault, and what lands in it a flipped bit if it is that one;
    /// `None` heals it.
    pub fn inject(&self, fault: Option<crate::fault::Fault>) {
        use std::sync::PoisonError;
        *self.flips.lock().unwrap_or_else(PoisonError::into_inner) = fault;
        if let Some(shared) = self.shared.upgrade() {
            *shared.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
        }
    }

    /// Whether the mover hears nothing of what its n-th device completes, as of a device that is gone.
    pub fn deafen(&self, device: usize, deaf: bool) {
        if let Some(shared) = self.shared.upgrade() {
            shared.rails[device].deafen(deaf);
        }
    }
}

impl Mover for VerbsMover {
    fn kind(&self) -> MoverKind {
        MoverKind::Verbs
    }

    fn endpoint(&self) -> String {
        self.endpoint.to_string()
    }

    fn register(&self, region: Region) -> Result<RegionKey, MoverError> {
        self.shared.memory.register(region)
    }

    fn expose(&self, token: LeaseToken, max_age: Duration) -> Result<(), MoverError> {
        self.shared.leases.expose(token, Instant::now(), max_age)
    }

    fn extend(&self, token: &LeaseToken, runs: &[Run]) -> Result<(), MoverError> {
        let Shared { leases, memory, .. } = &*self.shared;
        leases.extend(token, runs, memory.regions(), &self.endpoint())
    }

    fn fence(&self, token: &LeaseToken) {
        self.shared.fence(token);
        self.wake_exporter();
    }

    fn read(&self, peer: &str, token: LeaseToken, copies: Vec<Copy>, options: ReadOptions, done: Done) -> ReadHandle {
        let begun = Instant::now();
        let id = self.next_read.fetch_add(1, Ordering::Relaxed);
        let over = Arc::new(Over::default());
        let ticket = Ticket(over.clone());
        let plan = self.plan(peer, &copies, options.checksum);
        let read = Read {
            id,
            peer: peer.into(),
            plan,
            token,
            options,
            ticket,
            begun,
            done,
        };
        self.inbox.send(Command::Read(read)).into_iter().for_each(call_off);
        ReadHandle(Arc::new(Running {
            id,
            over,
            inbox: self.inbox.clone(),
            home: self.home.clone(),
        }))
    }
}

impl Drop for VerbsMover {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.wake_exporter();
        self.inbox.close().into_iter().for_each(call_off);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a verbs mover thread panicked");
            }
        }
    }
}
