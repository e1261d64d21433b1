//! One end: its memory and its movers. `serve` and `run` each have one; the other end's is known by what it offers.

use std::{
    fs,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use kvc_rdma::{HostRegion, LeaseToken, Mover, RegionKey, Run, ShmConfig, ShmMover, TcpConfig, TcpMover, shm};
use serde::{Deserialize, Serialize};

use crate::{measure::parse_token, report::complain};

/// How long a lease of this tool lives at most.
const LEASE: Duration = Duration::from_secs(3600);

/// A mover that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// RDMA.
    Verbs,
    /// Shared memory of one host.
    Shm,
    /// TCP range requests.
    Tcp,
}

impl Kind {
    /// The best first (XFER-9).
    pub const ALL: [Kind; 3] = [Kind::Verbs, Kind::Shm, Kind::Tcp];

    /// Whether this build has it.
    pub fn is_built(self) -> bool {
        !matches!(self, Kind::Verbs) || cfg!(feature = "verbs")
    }

    /// As in the table.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Verbs => "verbs",
            Kind::Shm => "shm",
            Kind::Tcp => "tcp",
        }
    }
}

/// The memory of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Memory {
    /// Of this process alone; `shm` cannot export it.
    Heap,
    /// In a memfd, with the system's pages for shared memory.
    Memfd,
    /// In a memfd, with large pages where `shmem_enabled` lets advice have them.
    Thp,
    /// In a memfd, with reserved pages of 2 MiB (`vm.nr_hugepages`).
    Huge,
}

impl Memory {
    /// `len` bytes whose pages are there already, as an engine's pool's are.
    pub fn allocate(self, len: u64) -> Result<Arc<HostRegion>> {
        let free = available(&fs::read_to_string("/proc/meminfo").unwrap_or_default());
        if let Some(free) = free.filter(|free| *free < len) {
            bail!(
                "{} MiB are wanted and {} MiB free: give a smaller --pool",
                len >> 20,
                free >> 20
            );
        }
        let len = usize::try_from(len)?;
        let region = match self {
            Memory::Heap => HostRegion::new(len),
            Memory::Memfd => HostRegion::shared(len, shm::Pages::Default)?,
            Memory::Thp => HostRegion::shared(len, shm::Pages::Transparent)?,
            Memory::Huge => HostRegion::shared(len, shm::Pages::Huge)
                .context("2 MiB pages are reserved with `sysctl vm.nr_hugepages=N`")?,
        };
        let page = [0xa5; 4096];
        (0..region.len() / page.len()).for_each(|at| region.write(at * page.len(), &page));
        Ok(region)
    }
}

/// Bytes that can be had without swapping.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// How a mover is set up, as far as this tool lets one choose.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Says nothing about movers that do not start.
    pub quiet: bool,
    /// RDMA devices, by name; the best one without.
    pub devices: Vec<String>,
    /// Where tcp and the side channel of verbs listen, and whose route's device verbs prefers.
    pub ip: IpAddr,
    /// What peers are told instead.
    pub advertise: Option<IpAddr>,
    /// Streams of tcp, threads of shm.
    pub streams: usize,
    /// Bytes of one request; the mover's default without.
    pub chunk: Option<u64>,
    /// Bytes asked for and not received, on one stream of tcp, or under one lease of verbs.
    pub window: Option<u64>,
    /// Queue pairs of verbs for one lease over each device.
    pub pairs: Option<u8>,
}

/// The device that verbs took first.
#[derive(Clone, Debug)]
pub struct Rail {
    /// Its name.
    pub device: String,
    /// Its port.
    pub port: u8,
    /// The address's place in the port's table.
    pub gid_index: u8,
    /// Queue pairs to one peer over each device.
    pub pairs: u8,
}

/// One end.
pub struct Side {
    /// Its pool, region 0 of every mover.
    pub pool: Arc<HostRegion>,
    /// Of verbs, if it runs.
    pub rail: Option<Rail>,
    movers: Vec<(Kind, Box<dyn Mover>)>,
    memory: Memory,
    token: LeaseToken,
    staged: Mutex<Staged>,
}

/// A region stays registered as long as its mover, so what was staged is used again.
#[derive(Default)]
struct Staged {
    free: Vec<Staging>,
    /// Bytes of all, free or not.
    bytes: u64,
}

/// Memory that runs are gathered into, registered with every mover under one key.
#[derive(Clone)]
pub struct Staging {
    /// Its name.
    pub key: RegionKey,
    /// Its bytes.
    pub region: Arc<HostRegion>,
}

/// What the other end may use.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Offer {
    /// Movers and where they are reached.
    pub movers: Vec<(Kind, String)>,
    /// The lease, 64 hexadecimal digits.
    pub token: String,
    /// Bytes of the pool, region 0.
    pub pool: u64,
}

impl Offer {
    /// Refuses what no end offers: it comes from the other one, before or after it has shown a key.
    pub fn check(&self) -> Result<()> {
        let endpoints = self.movers.len() <= 8 && self.movers.iter().all(|(_, at)| at.len() <= 256);
        ensure!(
            endpoints && (1..=1 << 44).contains(&self.pool),
            "an offer that no kvc-perf makes: is it one of this version?"
        );
        parse_token(&self.token).map(drop)
    }
}

impl Side {
    /// With memory and the movers asked for; without a list, all that start here, and a line about each that does not.
    pub fn start(kinds: &[Kind], memory: Memory, pool: u64, setup: &Setup) -> Result<Self> {
        let pool = memory
            .allocate(pool)
            .with_context(|| format!("a pool of {} MiB", pool >> 20))?;
        let (mut movers, mut rail) = (Vec::new(), None);
        for kind in Kind::ALL {
            if !kinds.contains(&kind) && (!kinds.is_empty() || !kind.is_built()) {
                continue;
            }
            let started = start(kind, setup).and_then(|(mover, on)| {
                mover.register(pool.clone().into())?;
                Ok((mover, on))
            });
            match started.with_context(|| format!("{} does not start", kind.name())) {
                Ok((mover, on)) => {
                    movers.push((kind, mover));
                    rail = rail.or(on);
                }
                Err(_) if kinds.is_empty() && setup.quiet => {}
                Err(error) if kinds.is_empty() => complain(&format!("goes without: {error:#}")),
                Err(error) => return Err(error),
            }
        }
        let token = LeaseToken::random()?;
        let side = Side {
            pool,
            rail,
            movers,
            memory,
            token,
            staged: Mutex::default(),
        };
        side.exporting().try_for_each(|(_, mover)| side.expose(mover))?;
        Ok(side)
    }

    /// What the other end is told.
    pub fn offer(&self) -> Offer {
        Offer {
            movers: self.exporting().map(|(kind, mover)| (kind, mover.endpoint())).collect(),
            token: self.token.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect(),
            pool: self.pool.len() as u64,
        }
    }

    /// The movers that both ends have and that reach from one to the other, the best first.
    pub fn shared(&self, offer: &Offer) -> Vec<Kind> {
        let reaches = |kind: Kind, endpoint: &str| kind != Kind::Shm || shm::is_here(endpoint);
        let there = |kind: &Kind| {
            offer
                .movers
                .iter()
                .any(|(their, at)| their == kind && reaches(*kind, at))
        };
        let both = |kind: &Kind| self.mover(*kind).is_some() && there(kind);
        Kind::ALL.into_iter().filter(both).collect()
    }

    /// Memory to gather into, readable under the lease until the next fence; to be given back.
    pub fn stage(&self, bytes: u64) -> Result<Staging> {
        let mut staged = self.staged.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = staged.free.iter().position(|each| each.region.len() as u64 >= bytes);
        let staging = match fitting {
            Some(at) => staged.free.swap_remove(at),
            None => {
                let most = 2 * self.pool.len() as u64;
                ensure!(
                    bytes <= most - staged.bytes,
                    "{} MiB are staged, of at most twice the pool: give a smaller --depth or a larger --pool",
                    staged.bytes >> 20
                );
                let region = Memory::Memfd.allocate(bytes)?;
                // Nothing else is registered meanwhile, so that every mover gives it the same name.
                let keys = self
                    .movers
                    .iter()
                    .map(|(_, mover)| mover.register(region.clone().into()));
                let keys = keys.collect::<Result<Vec<_>, _>>()?;
                let key = *keys.first().context("no mover")?;
                ensure!(
                    keys.iter().all(|each| *each == key),
                    "movers name one region differently"
                );
                staged.bytes += bytes;
                Staging { key, region }
            }
        };
        let whole = Run {
            region: staging.key,
            offset: 0,
            len: bytes,
        };
        for (_, mover) in self.exporting() {
            mover.extend(&self.token, &[whole])?;
        }
        Ok(staging)
    }

    /// Gives staging memory back.
    pub fn unstage(&self, staging: Staging) {
        let mut staged = self.staged.lock().unwrap_or_else(PoisonError::into_inner);
        staged.free.push(staging);
    }

    /// Fences the lease under load and opens it again; how long the fence took. What was staged has to be staged anew.
    pub fn fence(&self, kind: Kind) -> Result<Duration> {
        let mover = self.mover(kind).context("no such mover")?;
        let begun = Instant::now();
        mover.fence(&self.token);
        let took = begun.elapsed();
        self.expose(mover)?;
        Ok(took)
    }

    /// The mover of that kind.
    pub fn mover(&self, kind: Kind) -> Option<&dyn Mover> {
        let found = self.movers.iter().find(|(each, _)| *each == kind);
        found.map(|(_, mover)| mover.as_ref())
    }

    /// The movers that can export this memory.
    fn exporting(&self) -> impl Iterator<Item = (Kind, &dyn Mover)> {
        let can = |kind: Kind| kind != Kind::Shm || self.memory != Memory::Heap;
        let movers = self.movers.iter().map(|(kind, mover)| (*kind, mover.as_ref()));
        movers.filter(move |(kind, _)| can(*kind))
    }

    fn expose(&self, mover: &dyn Mover) -> Result<()> {
        mover.expose(self.token, LEASE)?;
        let whole = Run {
            region: RegionKey(0),
            offset: 0,
            len: self.pool.len() as u64,
        };
        Ok(mover.extend(&self.token, &[whole])?)
    }
}

/// A mover, and the device it is on.
type Started = (Box<dyn Mover>, Option<Rail>);

fn start(kind: Kind, setup: &Setup) -> Result<Started> {
    let mover: Box<dyn Mover> = match kind {
        Kind::Verbs => return verbs(setup),
        Kind::Tcp => {
            let default = TcpConfig::default();
            Box::new(TcpMover::start(TcpConfig {
                bind: (setup.ip, 0).into(),
                advertise: setup.advertise.map(|ip| (ip, 0).into()),
                streams: setup.streams,
                chunk: setup.chunk.unwrap_or(default.chunk),
                window: setup.window.unwrap_or(default.window),
                ..default
            })?)
        }
        Kind::Shm => {
            let default = ShmConfig::default();
            Box::new(ShmMover::start(ShmConfig {
                threads: setup.streams,
                chunk: setup.chunk.unwrap_or(default.chunk),
                ..default
            })?)
        }
    };
    Ok((mover, None))
}

#[cfg(feature = "verbs")]
fn verbs(setup: &Setup) -> Result<Started> {
    use kvc_rdma::{VerbsConfig, VerbsMover, verbs::Wish};
    let default = VerbsConfig::default();
    let pairs = setup.pairs.unwrap_or(default.pairs);
    let mover = VerbsMover::start(VerbsConfig {
        bind: (setup.ip, 0).into(),
        advertise: setup.advertise.map(|ip| (ip, 0).into()),
        wish: Wish {
            devices: setup.devices.clone(),
            source: Some(setup.advertise.unwrap_or(setup.ip)),
            ..Wish::default()
        },
        chunk: setup.chunk.unwrap_or(default.chunk),
        window: setup.window.unwrap_or(default.window),
        pairs,
        ..default
    })?;
    let rail = mover.devices().into_iter().next().map(|(choice, _)| Rail {
        device: choice.device,
        port: choice.port,
        gid_index: choice.gid_index,
        pairs,
    });
    Ok((Box::new(mover), rail))
}

#[cfg(not(feature = "verbs"))]
fn verbs(setup: &Setup) -> Result<Started> {
    let named = if setup.devices.is_empty() && setup.pairs.is_none() {
        ""
    } else {
        ", --ib-device and --pairs mean nothing"
    };
    bail!("this build has no verbs{named}: build it with --features verbs")
}
