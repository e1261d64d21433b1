//! `bench`: the figures of docs/ends.md, two processes of this machine. tcp beside iperf3, shm beside memcpy between
//! mappings of the same kinds, in rounds that alternate so that a noisy machine hits both. `make bench` calls it.

use std::{fs, thread, time::Duration};

use anyhow::{Context, Result, ensure};
use clap::Args;
use kvc_rdma::HostRegion;

use crate::{
    case::{Access, Case, Shape},
    control::{Peer, Reply, Request},
    ends::Ends,
    iperf,
    measure::{Load, Reader, Target, measure_memcpy},
    report::{self, Progress, Row, median},
    side::{Kind, Memory},
    what::What,
};

/// MiB of memory on either side.
const POOL: u64 = 256;
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

/// The table of docs/ends.md: 1 MiB runs and 256 scattered 64 KiB runs, by tcp and by shm.
#[derive(Args)]
pub struct Run {
    /// Which movers
    #[arg(long, value_delimiter = ',', default_value = "tcp,shm")]
    only: Vec<Kind>,
    /// Rounds; medians are printed
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=1000))]
    rounds: u64,
    /// Seconds of one measurement
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Reads at once
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=1024))]
    depth: u64,
    /// One JSON document instead of the table
    #[arg(long)]
    json: bool,
}

impl Run {
    /// Measures and prints.
    pub fn run(self) -> Result<()> {
        ensure!(
            self.seconds.is_finite() && self.seconds > 0.0 && self.seconds <= 3600.0,
            "--seconds is {}: give more than 0 and at most 3600",
            self.seconds
        );
        let mut rows = Vec::new();
        if self.only.contains(&Kind::Tcp) {
            rows.extend(self.tcp()?);
        }
        if self.only.contains(&Kind::Shm) {
            rows.extend(self.shm()?);
        }
        report::show(&rows, self.json)
    }

    fn tcp(&self) -> Result<Vec<Row>> {
        let iperf3 = iperf::is_installed();
        let mut progress = Progress::new(STREAMS.len() * CASES.len() * self.rounds as usize);
        let mut rows = Vec::new();
        for streams in STREAMS {
            for case in CASES {
                let mut pair = Pairs::default();
                for _ in 0..self.rounds {
                    progress.step(&format!("tcp, {}, {streams} streams", case.name()));
                    let ends = Ends::start(self.what(Kind::Tcp, Memory::Heap, Memory::Heap, streams))?;
                    let ours = ends.measure(Kind::Tcp, &case)?;
                    pair.fences.extend(fences(&ends, Kind::Tcp, &case)?);
                    let theirs = if iperf3 { ends.iperf3(&case) } else { None };
                    pair.add(ours, theirs);
                }
                rows.extend(pair.rows());
            }
        }
        Ok(rows)
    }

    fn shm(&self) -> Result<Vec<Row>> {
        let kinds = [
            (Memory::Memfd, Memory::Heap),
            (Memory::Memfd, Memory::Memfd),
            (Memory::Thp, Memory::Thp),
            (Memory::Huge, Memory::Huge),
        ];
        let mut progress = Progress::new(kinds.len() * 2 * (CASES.len() + 1) * self.rounds as usize);
        let mut rows = Vec::new();
        for (source, target) in kinds {
            let name = format!("{source:?} to {target:?}").to_lowercase();
            let memory = match source.allocate(POOL << 20) {
                Ok(memory) => memory,
                Err(error) => {
                    eprintln!("shm from {name}: not measured: {error:#}");
                    continue;
                }
            };
            if source == Memory::Thp && large(&memory)? == 0 {
                let enabled = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
                let enabled = enabled.unwrap_or_default();
                eprintln!(
                    "shm from {name}: not measured: no large page was given, shmem_enabled is {}",
                    enabled.trim()
                );
                continue;
            }
            for streams in [1, 2] {
                for case in CASES.into_iter().chain([SMALL]) {
                    let mut pair = Pairs::default();
                    for _ in 0..self.rounds {
                        progress.step(&format!("shm, {}, {streams} threads, {name}", case.name()));
                        let ends = Ends::start(self.what(Kind::Shm, target, source, streams))?;
                        let load = Load {
                            depth: 1,
                            streams: 1,
                            ..ends.load
                        };
                        let plain = measure_memcpy(&case, &memory, &ends.side.pool, self.seconds);
                        let ours = ends.measure(Kind::Shm, &case)?;
                        pair.fences.extend(fences(&ends, Kind::Shm, &case)?);
                        pair.add(ours, Some(Row::new("memcpy", &case, &load, 0, plain)));
                    }
                    rows.extend(pair.rows().map(|row| Row {
                        case: format!("{}, {name}", row.case),
                        ..row
                    }));
                }
            }
        }
        Ok(rows)
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
struct Pairs {
    ours: Vec<Row>,
    theirs: Vec<Row>,
    ratios: Vec<f64>,
    cpu_ratios: Vec<f64>,
    fences: Vec<f64>,
}

impl Pairs {
    fn add(&mut self, ours: Row, theirs: Option<Row>) {
        if let Some(theirs) = theirs {
            self.ratios.push(ours.gb_s / theirs.gb_s);
            let all = ours
                .cpu_s_per_gb
                .zip(ours.peer_cpu_s_per_gb)
                .map(|(here, there)| here + there);
            let cpu = theirs.cpu_s_per_gb.zip(all).map(|(theirs, ours)| theirs / ours);
            self.cpu_ratios.extend(cpu.filter(|ratio| ratio.is_finite()));
            self.theirs.push(theirs);
        }
        self.ours.push(ours);
    }

    fn rows(mut self) -> impl Iterator<Item = Row> {
        let worst = self.fences.iter().copied().fold(0.0, f64::max);
        let fence_us = median(&mut self.fences).map(|median| [median, worst]);
        let ratio = median(&mut self.ratios);
        let cpu_ratio = median(&mut self.cpu_ratios);
        let ours = Row::median(self.ours).map(|row| Row {
            ratio,
            cpu_ratio,
            fence_us,
            ..row
        });
        ours.into_iter().chain(Row::median(self.theirs))
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
    let from = crate::case::Pool {
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
