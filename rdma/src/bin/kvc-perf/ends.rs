//! Both ends of a measurement, ready: this process, and the `serve`s it reads from. `run`, `compare` and `bench` use it.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    thread,
};

use anyhow::{Context, Result, bail, ensure};
use kvc_rdma::{LeaseToken, RegionKey};

use crate::{
    case::{Case, Pool},
    control::{Peer, Reply, Request},
    iperf,
    measure::{Load, Measured, Target, is_gathered},
    report::Row,
    side::{Kind, Memory, Offer, Setup, Side},
    what::What,
};

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
        Ok(Ends {
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

    /// Movers that reach every peer.
    pub fn shared(&self) -> Result<Vec<Kind>> {
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
