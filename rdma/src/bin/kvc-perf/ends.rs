//! Both ends of a measurement, ready: this process, and the `serve`s it reads from. `run`, `compare` and `bench` use it.

use std::{
    io::{BufRead, BufReader, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use kvc_rdma::RegionKey;

use crate::{
    case::{Case, Pool},
    control::{Peer, Reply, Request},
    cpu, iperf,
    measure::{Load, Measured, Target, is_gathered},
    perftest::{self, Job, Tool},
    process::Process,
    report::Row,
    serve::{FAILED, STARTED, random_key},
    side::{Kind, Memory, Offer, Setup, Side},
    what::{Op, What},
};

/// Of perftest for one round.
const ATTEMPTS: u32 = 3;

/// Both ends, ready.
pub struct Ends {
    /// Here.
    pub side: Side,
    /// There.
    pub links: Vec<Link>,
    /// They end when this does.
    _servers: Vec<Server>,
    /// What is measured.
    pub cases: Vec<Case>,
    /// How each measurement is made.
    pub load: Load,
    /// How often.
    pub rounds: usize,
    /// Which way the bytes go.
    pub op: Op,
    bidirectional: bool,
    /// The kind of memory that peers started here have.
    pub memory: Memory,
    /// What the peers want to be shown.
    pub key: String,
    /// Whether JSON is printed.
    pub json: bool,
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

impl Ends {
    /// Starts what is to be started and connects; here `only` that mover, if one is given.
    pub fn start(what: What, only: Option<Kind>) -> Result<Self> {
        let (pool, streams) = (what.pool << 20, what.streams as usize);
        let cases = what.cases();
        let read_from = what.bidirectional || what.op == Op::Write;
        ensure!(
            !(read_from && cases.iter().any(is_gathered)),
            "--bidirectional and --op write measure contiguous and scattered reads: take gathered out of --access"
        );
        ensure!(
            what.spawn.is_some() || !what.peers.is_empty(),
            "read from whom? Give the line that `kvc-perf serve` printed, or --spawn 1 for this machine alone"
        );
        ensure!(
            what.spawn.is_some() || !what.key.is_empty(),
            "--key is missing: give it as `kvc-perf serve` printed it"
        );
        let load = Load {
            seconds: what.seconds,
            depth: what.depth as usize,
            streams,
            checksum: what.checksum,
        };
        let share = (pool / what.spawn.unwrap_or(what.peers.len() as u64)) >> 20 << 20;
        for case in &cases {
            case.check(share, "each peer's share of the")?;
            load.check(case)?;
        }
        let key = match what.spawn {
            Some(_) => random_key()?,
            None => what.key.clone(),
        };
        let servers = (0..what.spawn.unwrap_or(0))
            .map(|_| Server::start(&what, &key))
            .collect::<Result<Vec<_>>>()?;
        let peers: Vec<String> = match servers.is_empty() {
            true => what.peers,
            false => servers.iter().map(|server| server.at.clone()).collect(),
        };
        // Before memory is made ready, which takes a while: whether they are there and can hold what is read.
        let offers = peers.iter().map(|at| {
            let offer = Peer::connect(at, &key, None)?.offer;
            cases.iter().try_for_each(|case| case.check(offer.pool, "the peer's"))?;
            Ok(offer)
        });
        let offers = offers.collect::<Result<Vec<_>>>()?;
        let route = || peers.first().and_then(|at| source_towards(at));
        let setup = Setup {
            quiet: false,
            devices: what.ib_device,
            ip: what.bind.or_else(route).unwrap_or(Ipv4Addr::LOCALHOST.into()),
            advertise: None,
            streams,
            chunk: what.chunk,
            window: what.window,
            pairs: what.pairs,
        };
        // Read from as well, so in memory that can be.
        let memory = match what.memory {
            Memory::Heap if read_from => Memory::Memfd,
            memory => memory,
        };
        let side = Side::start(&only.map_or(what.movers, |kind| vec![kind]), memory, pool, &setup)?;
        let links = peers
            .into_iter()
            .zip(offers)
            .enumerate()
            .map(|(number, (at, offer))| Link {
                at,
                offer,
                landing: Pool {
                    region: RegionKey(0),
                    base: share * number as u64,
                    len: share,
                },
            });
        Ok(Ends {
            side,
            links: links.collect(),
            _servers: servers,
            cases,
            load,
            rounds: what.rounds as usize,
            op: what.op,
            bidirectional: what.bidirectional,
            memory: what.peer_memory,
            key,
            json: what.json,
        })
    }

    /// Movers that reach every peer.
    pub fn shared(&self) -> Vec<Kind> {
        let mut kinds = Kind::ALL.to_vec();
        for link in &self.links {
            let with = self.side.shared(&link.offer);
            kinds.retain(|kind| with.contains(kind));
        }
        kinds
    }

    /// One round of all peers together.
    pub fn measure(&self, kind: Kind, case: &Case) -> Result<Row> {
        let (reads, pulls) = match self.op {
            Op::Read => (true, self.bidirectional),
            Op::Write => (false, true),
        };
        let results: Vec<Result<Measured>> = thread::scope(|scope| {
            let pulls = self.links.iter().filter(|_| pulls);
            let pulls: Vec<_> = pulls.map(|link| scope.spawn(|| self.pull(kind, case, link))).collect();
            let reads = self.links.iter().filter(|_| reads);
            let reads: Vec<_> = reads.map(|link| scope.spawn(|| self.read(kind, case, link))).collect();
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
        let rail = self.side.rail.as_ref().filter(|_| kind == Kind::Verbs);
        Ok(Row {
            op: self.op,
            bidirectional: self.bidirectional,
            streams: rail.map_or(row.streams, |rail| rail.pairs.into()),
            device: rail.map(|rail| format!("{}:{}", rail.device, rail.port)),
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
        let before = cpu::seconds();
        match peer.ask(&Request::Pull(kind, *case, self.load))? {
            // With reads at the same time, each end's time is counted by them.
            Reply::Pulled(measured) => Ok(Measured {
                cpu: if self.bidirectional {
                    0.0
                } else {
                    cpu::seconds() - before
                },
                peer_cpu: if self.bidirectional { 0.0 } else { measured.cpu },
                ..measured
            }),
            other => bail!("unexpected answer {other:?}"),
        }
    }

    /// perftest's rate to the first peer, on the devices that verbs took; about as long as a measurement at `rate` bytes per
    /// second.
    pub fn perftest(&self, tool: Tool, case: &Case, rate: f64) -> Result<Row> {
        let mut attempt = 1;
        loop {
            match self.perftest_once(tool, case, rate) {
                // On a busy machine it gives up when its clock does not come out evenly.
                Err(_) if attempt < ATTEMPTS => attempt += 1,
                result => return result,
            }
        }
    }

    fn perftest_once(&self, tool: Tool, case: &Case, rate: f64) -> Result<Row> {
        let link = self.links.first().context("no peer")?;
        let rail = self.side.rail.as_ref().context("no RDMA device is in use here")?;
        let job = Job::lasting(tool, case.run(), rail.pairs.into(), self.load.seconds, rate);
        let mut peer = Peer::connect(&link.at, &self.key, None)?;
        let mut at = peer.address();
        match peer.ask(&Request::Perftest(job))? {
            Reply::Port(port) => at.set_port(port),
            other => bail!("unexpected answer {other:?}"),
        }
        let limit = Duration::from_secs_f64(self.load.seconds * 20.0 + 30.0);
        let measured = perftest::measure(&job, rail, at, limit)?;
        Ok(Row::of_perftest(tool.name(), case, &job, measured))
    }

    /// iperf3's rate to the first peer.
    pub fn iperf3(&self, case: &Case) -> Result<Row> {
        let link = self.links.first().context("no peer")?;
        let mut peer = Peer::connect(&link.at, &self.key, None)?;
        let mut at = peer.address();
        match peer.ask(&Request::Iperf)? {
            Reply::Port(port) => at.set_port(port),
            other => bail!("unexpected answer {other:?}"),
        }
        let rate = iperf::rate(at, self.load.streams, self.load.seconds)?;
        Ok(Row::of_iperf3(case, self.load.streams, rate))
    }

    /// Whether every peer still answers; the first that does not says why.
    pub fn check_peers(&self) -> Result<()> {
        let answers = |link: &Link| Peer::connect(&link.at, &self.key, None).map(drop);
        self.links.iter().try_for_each(answers)
    }
}

/// The address that packets to a peer leave with; nothing is sent.
fn source_towards(peer: &str) -> Option<IpAddr> {
    let peer = peer.to_socket_addrs().ok()?.next()?;
    let any: SocketAddr = match peer {
        SocketAddr::V4(_) => ([0; 4], 0).into(),
        SocketAddr::V6(_) => ([0; 16], 0).into(),
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(peer).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// A `serve` process of this machine; it ends with this.
pub struct Server {
    _process: Process,
    /// Where it listens.
    pub at: String,
}

impl Server {
    /// As `what` has it.
    fn start(what: &What, key: &str) -> Result<Self> {
        let movers: Vec<&str> = what.movers.iter().map(|kind| kind.name()).collect();
        let pairs = what.pairs.map(|pairs| pairs.to_string());
        let lists = [
            ("--movers", movers.join(",")),
            ("--ib-device", what.ib_device.join(",")),
            ("--pairs", pairs.unwrap_or_default()),
        ];
        let given = lists.iter().filter(|(_, list)| !list.is_empty());
        let memory = clap::ValueEnum::to_possible_value(&what.peer_memory).context("a memory without a name")?;
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["serve", "--bind", "127.0.0.1:0", "--with-parent"])
            .args(["--pool", &what.pool.to_string(), "--streams", &what.streams.to_string()])
            .args(["--memory", memory.get_name()])
            .args(given.flat_map(|(option, list)| [*option, list.as_str()]))
            .stdin(Stdio::piped());
        let process = Process::start(&mut command).context("start `serve`")?;
        let (input, output) = {
            let mut child = process.child();
            (child.stdin.take(), child.stdout.take())
        };
        let mut input = input.context("input of `serve`")?;
        writeln!(input, "{key}").context("`serve` ended before it began")?;
        // It ends when this is closed.
        process.child().stdin = Some(input);
        let mut line = String::new();
        BufReader::new(output.context("output of `serve`")?).read_line(&mut line)?;
        if let Some(why) = line.strip_prefix(FAILED) {
            bail!("{}", why.trim_end());
        }
        let at = line
            .strip_prefix(STARTED)
            .and_then(|rest| rest.split(' ').next())
            .context("`serve` ended before it began")?
            .into();
        Ok(Server { _process: process, at })
    }
}
