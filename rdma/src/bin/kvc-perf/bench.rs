//! `bench`: the figures of docs/bench.md, two processes of this machine. tcp beside iperf3, shm beside memcpy between
//! mappings of the same kinds, verbs beside `ib_read_bw`, in rounds that alternate so that a noisy machine hits both.
//! `scripts/bench.sh` calls it, and `scripts/rdma/bench.sh` in a guest.

use std::{fs, thread, time::Duration};

use anyhow::{Context, Result};
use clap::Args;
use kvc_rdma::HostRegion;

use crate::{
    case::{Access, Case, Pool, Shape, parse_seconds},
    control::{Peer, Reply, Request},
    ends::Ends,
    interrupt::{self, Role},
    iperf,
    measure::{Load, Reader, Target, measure_memcpy},
    perftest::Tool,
    progress::Progress,
    report::{Row, complain, median, print, rate, ratios, say},
    side::{Kind, Memory},
    what::What,
};

/// MiB of memory on either side.
const POOL: u64 = 256;
/// Of verbs: MiB of memory on either side, one read, and reads at once. perftest uses one buffer of a run again and again, and
/// to an emulated processor memory costs more the more of it is touched: the first of 1 MiB is the like of it.
const VERBS: [(u64, Case, u64); 5] = [
    (16, case(64 << 10, 256), 2),
    (2, case(1 << 20, 1), 16),
    (16, case(1 << 20, 16), 2),
    (64, case(64 << 10, 256), 2),
    (64, case(1 << 20, 16), 2),
];
/// Fences under load per round.
const FENCES: usize = 20;

const CASES: [Case; 2] = [case(1 << 20, 64), case(64 << 10, 256)];
/// Beside them for shm, where a run costs a call and no frame.
const SMALL: Case = case(4 << 10, 4096);
const STREAMS: [u64; 3] = [1, 2, 4];

const fn case(len: u64, count: u64) -> Case {
    Case {
        shape: Shape::Runs { len, count },
        access: Access::Scattered,
    }
}

const EXAMPLES: &str = "\
Examples:
  kvc-perf bench --only tcp
  kvc-perf bench --only shm --seconds 0.5
  kvc-perf bench --only verbs --seconds 2      beside ib_read_bw, one queue pair with 16 READs on the wire each";

/// The tables of docs/bench.md: scattered runs of 1 MiB and 64 KiB by one mover beside a plain tool, in alternating rounds.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Run {
    /// Which movers
    #[arg(long, value_delimiter = ',', default_value = "tcp,shm")]
    only: Vec<Kind>,
    /// Rounds; medians are printed
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=1000))]
    rounds: u64,
    /// Seconds of one measurement
    #[arg(long, default_value_t = 1.0, value_parser = parse_seconds)]
    seconds: f64,
    /// Reads at once
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=64))]
    depth: u64,
    /// One JSON document instead of the table
    #[arg(long)]
    json: bool,
}

impl Run {
    /// Measures and prints.
    pub fn run(self) -> Result<()> {
        interrupt::watch(Role::Client)?;
        let mut pairs = Vec::new();
        for kind in Kind::ALL.into_iter().filter(|kind| self.only.contains(kind)) {
            pairs.extend(match kind {
                Kind::Verbs => self.verbs()?,
                Kind::Shm => self.shm()?,
                Kind::Tcp => self.tcp()?,
            });
        }
        if self.json {
            let rows: Vec<&Row> = pairs
                .iter()
                .flat_map(|pair| [Some(&pair.ours), pair.theirs.as_ref()])
                .flatten()
                .collect();
            say(&serde_json::to_string_pretty(&rows)?);
            return Ok(());
        }
        let table = std::iter::once(Pair::HEAD.map(String::from).to_vec()).chain(pairs.iter().map(Pair::cells));
        print(&table.collect::<Vec<_>>());
        Ok(())
    }

    fn verbs(&self) -> Result<Vec<Pair>> {
        let mut progress = Progress::new(VERBS.len() * self.rounds as usize);
        let mut pairs = Vec::new();
        for (pool, case, depth) in VERBS {
            let mut rounds = Rounds::default();
            for _ in 0..self.rounds {
                progress.step(&format!("verbs, {}", case.name()));
                // Equal on both sides: one queue pair, which has 16 READs on the wire.
                let ends = Ends::start(
                    What {
                        pool,
                        depth,
                        sizes: vec![case.run()],
                        runs: Some(case.count()),
                        pairs: Some(1),
                        ..self.what(Kind::Verbs, Memory::Memfd, Memory::Memfd, 1)
                    },
                    None,
                )?;
                let ours = ends.measure(Kind::Verbs, &case)?;
                let theirs = ends.perftest(Tool::Read, &case, ours.gb_s * 1e9)?;
                rounds.add(ours, Some(theirs));
            }
            pairs.extend(rounds.pair(&format!("{pool} MiB")));
        }
        Ok(pairs)
    }

    fn tcp(&self) -> Result<Vec<Pair>> {
        let iperf3 = iperf::is_installed();
        let mut progress = Progress::new(STREAMS.len() * CASES.len() * self.rounds as usize);
        let mut pairs = Vec::new();
        for streams in STREAMS {
            for case in CASES {
                let mut rounds = Rounds::default();
                for _ in 0..self.rounds {
                    progress.step(&format!("tcp, {}, {streams} streams", case.name()));
                    let ends = Ends::start(self.what(Kind::Tcp, Memory::Heap, Memory::Heap, streams), None)?;
                    let ours = ends.measure(Kind::Tcp, &case)?;
                    rounds.fences.extend(fences(&ends, Kind::Tcp, &case)?);
                    rounds.add(ours, iperf3.then(|| ends.iperf3(&case)).transpose()?);
                }
                pairs.extend(rounds.pair("heap to heap"));
            }
        }
        Ok(pairs)
    }

    fn shm(&self) -> Result<Vec<Pair>> {
        let kinds = [
            (Memory::Memfd, Memory::Heap),
            (Memory::Memfd, Memory::Memfd),
            (Memory::Thp, Memory::Thp),
            (Memory::Huge, Memory::Huge),
        ];
        let mut progress = Progress::new(kinds.len() * 2 * (CASES.len() + 1) * self.rounds as usize);
        let mut pairs = Vec::new();
        for (source, target) in kinds {
            let name = format!("{source:?} to {target:?}").to_lowercase();
            let memory = match source.allocate(POOL << 20) {
                Ok(memory) => memory,
                Err(error) => {
                    complain(&format!("shm from {name}: not measured: {error:#}"));
                    continue;
                }
            };
            if source == Memory::Thp && large(&memory)? == 0 {
                let enabled = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
                let enabled = enabled.unwrap_or_default();
                complain(&format!(
                    "shm from {name}: not measured: no large page was given, shmem_enabled is {}",
                    enabled.trim()
                ));
                continue;
            }
            for streams in [1, 2] {
                for case in CASES.into_iter().chain([SMALL]) {
                    let mut rounds = Rounds::default();
                    for _ in 0..self.rounds {
                        progress.step(&format!("shm, {}, {streams} threads, {name}", case.name()));
                        let ends = Ends::start(self.what(Kind::Shm, target, source, streams), None)?;
                        let load = Load {
                            depth: 1,
                            streams: 1,
                            ..ends.load
                        };
                        let plain = measure_memcpy(&case, &memory, &ends.side.pool, self.seconds);
                        let ours = ends.measure(Kind::Shm, &case)?;
                        rounds.fences.extend(fences(&ends, Kind::Shm, &case)?);
                        rounds.add(ours, Some(Row::new("memcpy", &case, &load, 0, plain)));
                    }
                    pairs.extend(rounds.pair(&name));
                }
            }
        }
        Ok(pairs)
    }

    fn what(&self, kind: Kind, memory: Memory, peer_memory: Memory, streams: u64) -> What {
        What {
            movers: vec![kind],
            seconds: self.seconds,
            depth: self.depth,
            streams,
            pool: POOL,
            memory,
            peer_memory,
            spawn: Some(1),
            ..What::default()
        }
    }
}

/// Ours beside theirs, round by round.
#[derive(Default)]
struct Rounds {
    ours: Vec<Row>,
    theirs: Vec<Row>,
    fences: Vec<f64>,
}

/// The medians.
struct Pair {
    ours: Row,
    theirs: Option<Row>,
    /// `memfd to heap`.
    memory: String,
}

impl Rounds {
    fn add(&mut self, ours: Row, theirs: Option<Row>) {
        self.ours.push(ours);
        self.theirs.extend(theirs);
    }

    fn pair(mut self, memory: &str) -> Option<Pair> {
        let worst = self.fences.iter().copied().fold(0.0, f64::max);
        let fence_us = median(&mut self.fences).map(|median| [median, worst]);
        let (ratio, cpu_ratio) = ratios(&self.ours, &self.theirs);
        let ours = Row {
            ratio,
            cpu_ratio,
            fence_us,
            ..Row::median(self.ours)?
        };
        Some(Pair {
            ours,
            theirs: Row::median(self.theirs),
            memory: memory.into(),
        })
    }
}

impl Pair {
    const HEAD: [&str; 11] = [
        "by",
        "one read",
        "memory",
        "streams",
        "GB/s",
        "beside it",
        "ratio",
        "CPU s/GB, both ends",
        "beside it",
        "CPU ratio",
        "fence µs (median, worst)",
    ];

    fn cells(&self) -> Vec<String> {
        let Pair { ours, theirs, memory } = self;
        let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.2}"));
        let cpu = |row: &Row| Some(row.cpu_s_per_gb? + row.peer_cpu_s_per_gb?);
        let beside = theirs.as_ref().map(|row| format!("{} {}", row.by, rate(row.gb_s)));
        vec![
            ours.by.clone(),
            ours.case.clone(),
            memory.clone(),
            ours.streams.to_string(),
            rate(ours.gb_s),
            beside.unwrap_or("-".into()),
            number(ours.ratio),
            number(cpu(ours)),
            number(theirs.as_ref().and_then(cpu)),
            number(ours.cpu_ratio),
            ours.fence_us
                .map_or("-".into(), |[median, worst]| format!("{median:.0}, {worst:.0}")),
        ]
    }
}

/// Fences the lease again and again in the middle of reads; microseconds.
fn fences(ends: &Ends, kind: Kind, case: &Case) -> Result<Vec<f64>> {
    let link = ends.links.first().context("no peer")?;
    let mut peer = Peer::connect(&link.at, &ends.key, None)?;
    let mover = ends.side.mover(kind).context("no such mover")?;
    let target = Target {
        kind,
        offer: &link.offer,
        landing: link.landing,
    };
    let reader = Reader::new(mover, &target, &ends.load)?;
    let from = Pool {
        len: link.offer.pool,
        ..link.landing
    };
    let mut took = Vec::new();
    for number in 0..FENCES {
        (0..ends.load.depth).for_each(|at| reader.read(case.copies((number + at) as u64, from, link.landing)));
        thread::sleep(Duration::from_millis(2));
        match peer.ask(&Request::Fence(kind))? {
            Reply::Fenced(nanos) => took.push(nanos as f64 / 1e3),
            other => anyhow::bail!("unexpected answer {other:?}"),
        }
        // Most of them were revoked, which is what was asked for.
        (0..ends.load.depth).try_for_each(|_| reader.try_wait().map(drop))?;
    }
    Ok(took)
}

/// Bytes of a region that lie in large pages.
fn large(region: &HostRegion) -> Result<u64> {
    let maps = fs::read_to_string("/proc/self/smaps")?;
    let start = format!("{:x}-", region.address());
    let of = maps.lines().skip_while(|line| !line.starts_with(&start)).skip(1);
    let fields = of.take_while(|line| line.split(' ').next().is_some_and(|name| name.ends_with(':')));
    let large = fields.filter(|line| line.starts_with("ShmemPmdMapped:") || line.starts_with("AnonHugePages:"));
    let kib = |line: &str| line.split_whitespace().nth(1)?.parse::<u64>().ok();
    Ok(large.filter_map(kib).sum::<u64>() << 10)
}
