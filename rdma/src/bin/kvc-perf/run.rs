//! `run` and `compare`: measure reads from one or more `serve`s.

use std::{
    io::{BufRead, BufReader},
    net::IpAddr,
    process::{Child, Command, Stdio},
    thread,
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use kvc_rdma::{LeaseToken, RegionKey};

use crate::{
    case::{Access, Case, Pool, Shape, parse_size},
    control::{Peer, Reply, Request},
    iperf,
    layout::Layout,
    report::{self, Progress, Row},
    side::{Kind, Load, Measured, Memory, Offer, Setup, Side, Target, is_gathered, measure_memcpy},
};

/// Bytes of a read, if nothing says otherwise.
const READ: u64 = 16 << 20;

/// Reads from one or more `kvc-perf serve`s and prints what came.
#[derive(Args)]
pub struct Run {
    /// How; the best that both ends have if not given
    #[arg(long)]
    mover: Option<Kind>,
    #[command(flatten)]
    what: What,
}

/// Every mover that both ends have, memcpy, and iperf3 where installed, in rounds that alternate.
#[derive(Args)]
pub struct Compare {
    #[command(flatten)]
    what: What,
}

/// What is measured, and against whom.
#[derive(Args)]
pub struct What {
    /// HOST:PORT of each `kvc-perf serve`; several are read from at the same time
    #[arg(conflicts_with = "spawn")]
    pub peers: Vec<String>,
    /// Start this many `serve`s here instead
    #[arg(long)]
    pub spawn: Option<usize>,
    /// The key that `serve` printed
    #[arg(long, default_value = "")]
    pub key: String,
    /// Movers to look at [default: all that start]
    #[arg(long, value_delimiter = ',')]
    pub movers: Vec<Kind>,
    /// Bytes of a run, a list
    #[arg(long, value_delimiter = ',', default_value = "64k,1m", value_parser = parse_size)]
    pub sizes: Vec<u64>,
    /// Runs of one read [default: as many as 16 MiB hold]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub runs: Option<u64>,
    /// Tokens of an engine's KV instead of runs: sglang:layers=48,heads=4,dim=128,dtype=bf16,page=1
    #[arg(long, conflicts_with_all = ["sizes", "runs"])]
    pub layout: Option<Layout>,
    /// Tokens of one read, with --layout
    #[arg(long, default_value_t = 256, requires = "layout")]
    pub tokens: u64,
    /// Where the runs lie, a list
    #[arg(long, value_delimiter = ',', default_value = "scattered")]
    pub access: Vec<Access>,
    /// The peers read from here at the same time
    #[arg(long)]
    pub bidirectional: bool,
    /// Reads at once from each peer
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub depth: u64,
    /// Streams of tcp, threads of shm
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=64))]
    pub streams: u64,
    /// With a checksum per chunk
    #[arg(long)]
    pub checksum: bool,
    /// Seconds of one measurement
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
    /// Rounds; the median is printed
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub rounds: u64,
    /// MiB of memory here (and of each --spawn)
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub pool: u64,
    /// Its kind
    #[arg(long, default_value = "heap")]
    pub memory: Memory,
    /// That of each --spawn
    #[arg(long, default_value = "memfd")]
    pub peer_memory: Memory,
    /// Bytes of one request (tcp) or copy (shm) [default: the mover's]
    #[arg(long, value_parser = parse_size)]
    pub chunk: Option<u64>,
    /// Bytes asked for and not yet received on one stream of tcp [default: the mover's]
    #[arg(long, value_parser = parse_size)]
    pub window: Option<u64>,
    /// The address of this machine that peers read from, with --bidirectional
    #[arg(long, default_value = "127.0.0.1")]
    pub bind: IpAddr,
    /// RDMA devices here, a list: mlx5_0,mlx5_1:1 [default: the best one]
    #[arg(long, value_delimiter = ',')]
    pub ib_device: Vec<String>,
    /// One JSON document instead of the table
    #[arg(long)]
    pub json: bool,
}

impl Run {
    /// Measures and prints.
    pub fn run(self) -> Result<()> {
        ensure!(
            self.mover.is_none_or(Kind::is_built),
            "this build has no verbs: build it with --features verbs"
        );
        let bench = Bench::start(self.what)?;
        let shared = bench.shared()?;
        let kind = match self.mover {
            Some(kind) if shared.contains(&kind) => kind,
            Some(kind) => bail!(
                "{} does not reach from here to every peer; shared are: {}",
                kind.name(),
                names(&shared)
            ),
            None => *shared
                .first()
                .context("no mover is shared: start `serve` with --movers tcp")?,
        };
        let mut progress = Progress::new(bench.cases.len() * bench.rounds);
        let mut rows = Vec::new();
        for case in &bench.cases {
            let rounds = (0..bench.rounds).map(|_| {
                progress.step(&format!("{} {} {:?}", kind.name(), case.name(), case.access));
                bench.measure(kind, case)
            });
            let rounds = rounds.collect::<Result<Vec<_>>>()?;
            rows.extend(Row::median(rounds));
        }
        drop(progress);
        report::show(&rows, bench.json)
    }
}

impl Compare {
    /// Measures and prints.
    pub fn run(self) -> Result<()> {
        let bench = Bench::start(self.what)?;
        let shared = bench.shared()?;
        ensure!(
            !shared.is_empty(),
            "no mover is shared: start `serve` with --movers tcp"
        );
        let (source, iperf3) = (
            bench.memory.allocate(bench.side.pool.len() as u64)?,
            iperf::is_installed(),
        );
        let per_case = shared.len() + 1 + usize::from(iperf3);
        let mut progress = Progress::new(bench.cases.len() * bench.rounds * per_case);
        let mut rows = Vec::new();
        for case in &bench.cases {
            let mut rounds: Vec<Vec<Row>> = vec![Vec::new(); per_case];
            for _ in 0..bench.rounds {
                progress.step(&format!("memcpy {} {:?}", case.name(), case.access));
                let measured = measure_memcpy(case, &source, &bench.side.pool, bench.load.seconds);
                let plain = Load {
                    depth: 1,
                    streams: 1,
                    checksum: false,
                    ..bench.load
                };
                rounds[0].push(Row::new("memcpy", case, &plain, 0, measured));
                for (at, kind) in shared.iter().enumerate() {
                    progress.step(&format!("{} {} {:?}", kind.name(), case.name(), case.access));
                    rounds[1 + at].push(bench.measure(*kind, case)?);
                }
                if iperf3 {
                    progress.step("iperf3");
                    rounds[per_case - 1].extend(bench.iperf3(case));
                }
            }
            rows.extend(rounds.into_iter().filter_map(Row::median));
        }
        drop(progress);
        report::show(&rows, bench.json)
    }
}

/// Both ends, ready.
pub struct Bench {
    /// Here.
    pub side: Side,
    /// There.
    pub links: Vec<Link>,
    /// They end when this does.
    _servers: Vec<Server>,
    cases: Vec<Case>,
    /// How each measurement is made.
    pub load: Load,
    rounds: usize,
    bidirectional: bool,
    memory: Memory,
    /// What the peers want to be shown.
    pub key: String,
    json: bool,
}

/// A peer, where it is, and which part of the pool its reads land in.
pub struct Link {
    /// HOST:PORT.
    pub at: String,
    /// What may be read.
    pub offer: Offer,
    /// In the pool here.
    pub landing: Pool,
}

impl Bench {
    /// Starts what is to be started and connects.
    pub fn start(what: What) -> Result<Self> {
        ensure!(
            what.seconds.is_finite() && what.seconds > 0.0 && what.seconds <= 3600.0,
            "--seconds is {}: give more than 0 and at most 3600",
            what.seconds
        );
        let (pool, streams) = (what.pool << 20, what.streams as usize);
        let cases = what.cases()?;
        ensure!(
            !(what.bidirectional && cases.iter().any(is_gathered)),
            "--bidirectional measures contiguous and scattered reads: take gathered out of --access"
        );
        ensure!(
            what.spawn.is_some() || !what.peers.is_empty(),
            "read from whom? Give the line that `kvc-perf serve` printed, or --spawn 1 for this machine alone"
        );
        let mut key = what.key;
        if what.spawn.is_some() {
            key = LeaseToken::random()?.as_bytes()[..8]
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect();
        }
        ensure!(what.spawn != Some(0), "--spawn is 0: give at least 1");
        let servers = (0..what.spawn.unwrap_or(0))
            .map(|_| {
                Server::start(
                    what.pool,
                    what.peer_memory,
                    streams,
                    &what.movers,
                    &what.ib_device,
                    &key,
                )
            })
            .collect::<Result<Vec<_>>>()?;
        let peers: Vec<String> = match servers.is_empty() {
            true => what.peers,
            false => servers.iter().map(|server| server.at.clone()).collect(),
        };
        let setup = Setup {
            quiet: false,
            devices: what.ib_device,
            ip: what.bind,
            advertise: None,
            streams,
            chunk: what.chunk,
            window: what.window,
        };
        // Read from as well, so in memory that can be.
        let memory = match what.memory {
            Memory::Heap if what.bidirectional => Memory::Memfd,
            memory => memory,
        };
        let side = Side::start(&what.movers, memory, pool, &setup)?;
        let share = (pool / peers.len() as u64) >> 20 << 20;
        let link = |(at, peer): (usize, &String)| {
            let offer = Peer::connect(peer, &key, None)?.offer;
            let landing = Pool {
                region: RegionKey(0),
                base: share * at as u64,
                len: share,
            };
            let fits = |case: &Case| {
                case.check(offer.pool, "the peer's")?;
                case.check(share, "each peer's share of the")
            };
            cases.iter().try_for_each(fits)?;
            Ok(Link {
                at: peer.clone(),
                offer,
                landing,
            })
        };
        let links = peers.iter().enumerate().map(link).collect::<Result<Vec<_>>>()?;
        Ok(Bench {
            side,
            links,
            _servers: servers,
            cases,
            load: Load {
                seconds: what.seconds,
                depth: what.depth as usize,
                streams,
                checksum: what.checksum,
            },
            rounds: what.rounds as usize,
            bidirectional: what.bidirectional,
            memory: what.peer_memory,
            key,
            json: what.json,
        })
    }

    /// What reaches every peer.
    fn shared(&self) -> Result<Vec<Kind>> {
        let mut kinds = Kind::ALL.to_vec();
        for link in &self.links {
            let with = self.side.shared(&link.offer);
            kinds.retain(|kind| with.contains(kind));
        }
        Ok(kinds)
    }

    /// One round of all peers together.
    pub fn measure(&self, kind: Kind, case: &Case) -> Result<Row> {
        let results: Vec<Result<Measured>> = thread::scope(|scope| {
            let pulls = self.links.iter().filter(|_| self.bidirectional);
            let pulls: Vec<_> = pulls.map(|link| scope.spawn(|| self.pull(kind, case, link))).collect();
            let reads: Vec<_> = self
                .links
                .iter()
                .map(|link| scope.spawn(|| self.read(kind, case, link)))
                .collect();
            let all = reads.into_iter().chain(pulls);
            all.map(|thread| {
                thread
                    .join()
                    .map_err(|_| anyhow::anyhow!("a measuring thread panicked"))?
            })
            .collect()
        });
        let mut all = Measured::default();
        for measured in results {
            all.join(measured?);
        }
        let row = Row::new(kind.name(), case, &self.load, self.links.len(), all);
        Ok(Row {
            bidirectional: self.bidirectional,
            ..row
        })
    }

    fn read(&self, kind: Kind, case: &Case, link: &Link) -> Result<Measured> {
        let target = Target {
            kind,
            offer: &link.offer,
            landing: link.landing,
        };
        let mut peer = Peer::connect(&link.at, &self.key, None)?;
        if !is_gathered(case) {
            return self.side.measure(&target, case, &self.load, &mut || peer.cpu());
        }
        let gathers = (0..self.load.depth).map(|_| {
            let mut peer = Peer::connect(&link.at, &self.key, None)?;
            let region = match peer.ask(&Request::Stage(case.bytes()))? {
                Reply::Staged(region) => RegionKey(region),
                other => bail!("unexpected answer {other:?}"),
            };
            let gather = move |number| peer.ask(&Request::Gather(*case, number)).map(drop);
            Ok((region, gather))
        });
        let gathers = gathers.collect::<Result<Vec<_>>>()?;
        self.side
            .measure_gathered(&target, case, &self.load, gathers, &mut || peer.cpu())
    }

    /// The peer reads from here.
    fn pull(&self, kind: Kind, case: &Case, link: &Link) -> Result<Measured> {
        let mut peer = Peer::connect(&link.at, &self.key, Some(self.side.offer()))?;
        match peer.ask(&Request::Pull(kind, *case, self.load))? {
            // Its processor time is counted where it is read from.
            Reply::Pulled(measured) => Ok(Measured { cpu: 0.0, ..measured }),
            other => bail!("unexpected answer {other:?}"),
        }
    }

    /// iperf3's rate to the first peer; `None` where there is none.
    pub fn iperf3(&self, case: &Case) -> Option<Row> {
        let link = self.links.first()?;
        let mut peer = Peer::connect(&link.at, &self.key, None).ok()?;
        let mut at = peer.address();
        match peer.ask(&Request::Iperf).ok()? {
            Reply::Iperf(port) => at.set_port(port),
            _ => return None,
        }
        let rate = iperf::rate(at, self.load.streams, self.load.seconds).ok()?;
        Some(Row::of_tool("iperf3", case, self.load.streams, rate))
    }
}

impl Default for What {
    /// As without options.
    fn default() -> Self {
        What {
            peers: Vec::new(),
            spawn: None,
            key: String::new(),
            movers: Vec::new(),
            sizes: vec![64 << 10, 1 << 20],
            runs: None,
            layout: None,
            tokens: 256,
            access: vec![Access::Scattered],
            bidirectional: false,
            depth: 4,
            streams: 2,
            checksum: false,
            seconds: 1.0,
            rounds: 3,
            pool: 256,
            memory: Memory::Heap,
            peer_memory: Memory::Memfd,
            chunk: None,
            window: None,
            bind: IpAddr::from([127, 0, 0, 1]),
            ib_device: Vec::new(),
            json: false,
        }
    }
}

impl What {
    fn cases(&self) -> Result<Vec<Case>> {
        let shapes: Vec<Shape> = match self.layout {
            Some(layout) => {
                let (tokens, page) = (self.tokens, layout.page);
                ensure!(
                    tokens > 0 && tokens.is_multiple_of(page),
                    "--tokens is {tokens}: give a multiple of the page, {page}"
                );
                vec![Shape::Tokens { layout, tokens }]
            }
            None => {
                let runs = |len: u64| self.runs.unwrap_or((READ / len).clamp(1, 4096));
                let shape = |len: &u64| Shape::Runs {
                    len: *len,
                    count: runs(*len),
                };
                self.sizes.iter().map(shape).collect()
            }
        };
        let cases = shapes
            .into_iter()
            .flat_map(|shape| self.access.iter().map(move |access| Case { shape, access: *access }));
        Ok(cases.collect())
    }
}

/// A `serve` process of this machine.
pub struct Server {
    child: Child,
    /// Where it listens.
    pub at: String,
}

impl Server {
    /// With a pool of so many MiB.
    fn start(
        pool: u64,
        memory: Memory,
        streams: usize,
        movers: &[Kind],
        devices: &[String],
        key: &str,
    ) -> Result<Self> {
        let movers: Vec<&str> = movers.iter().map(|kind| kind.name()).collect();
        let lists = [("--movers", movers.join(",")), ("--ib-device", devices.join(","))];
        let given = lists.iter().filter(|(_, list)| !list.is_empty());
        let memory = clap::ValueEnum::to_possible_value(&memory).context("a memory without a name")?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["serve", "--bind", "127.0.0.1:0", "--with-parent", "--key", key])
            .args(["--pool", &pool.to_string(), "--streams", &streams.to_string()])
            .args(["--memory", memory.get_name()])
            .args(given.flat_map(|(option, list)| [*option, list.as_str()]))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start `serve`")?;
        let mut line = String::new();
        let output = child.stdout.take().context("output of `serve`")?;
        BufReader::new(output).read_line(&mut line)?;
        let at = line
            .strip_prefix("kvc-perf run ")
            .and_then(|rest| rest.split(' ').next());
        let at = at.context("`serve` did not start, it says why above")?.into();
        Ok(Server { child, at })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn names(kinds: &[Kind]) -> String {
    match kinds {
        [] => "none".into(),
        kinds => kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", "),
    }
}
