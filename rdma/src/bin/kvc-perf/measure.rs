//! The measurement of reads from one peer, direct and gathered, and the plain version beside them. `serve`, `run`,
//! `compare` and `bench` make them on their [`Side`].

use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use kvc_rdma::{Copy, HostRegion, LeaseToken, Mover, MoverError, ReadOptions, ReadStats, RegionKey, Run};
use serde::{Deserialize, Serialize};

use crate::{
    case::{Access, Case, Pool},
    cpu,
    side::{Kind, Offer, Side, Staging},
};

/// Latencies that one measurement keeps at most.
const LATENCIES: usize = 1 << 18;

/// How a measurement is made.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Load {
    /// Seconds.
    pub seconds: f64,
    /// Reads at once.
    pub depth: usize,
    /// Streams (threads) of a read.
    pub streams: usize,
    /// With a checksum per chunk.
    pub checksum: bool,
}

impl Load {
    /// Refuses what cannot be run; it may come from the other end.
    pub fn check(&self, case: &Case) -> Result<()> {
        ensure!(
            self.seconds > 0.0 && self.seconds <= 3600.0,
            "--seconds is {}: give more than 0 and at most 3600",
            self.seconds
        );
        ensure!(
            (1..=64).contains(&self.streams),
            "--streams is {}: give 1 to 64",
            self.streams
        );
        case.check_depth(self.depth as u64)
    }
}

/// What came out.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Measured {
    /// Payload.
    pub bytes: u64,
    /// From the first call to the last byte.
    pub seconds: f64,
    /// Reads.
    pub reads: u64,
    /// Runs, those side by side counted as one.
    pub messages: u64,
    /// Microseconds of reads: each, or every second, fourth, … when there are many.
    pub latencies: Vec<f32>,
    /// Of how many reads one latency is kept.
    pub every: u64,
    /// Processor seconds of the reading process.
    pub cpu: f64,
    /// Of the process that is read from.
    pub peer_cpu: f64,
}

/// Asks the other end for its processor time so far.
pub type PeerCpu<'a> = &'a mut dyn FnMut() -> Result<f64>;

/// Where to read from.
pub struct Target<'a> {
    /// By which mover.
    pub kind: Kind,
    /// What the other end offers.
    pub offer: &'a Offer,
    /// The part of the local pool to land in.
    pub landing: Pool,
}

impl Side {
    /// Reads for the load's time, `depth` reads at once, after the whole pool to warm up.
    pub fn measure(&self, target: &Target<'_>, case: &Case, load: &Load, peer: PeerCpu<'_>) -> Result<Measured> {
        load.check(case)?;
        let mover = self.mover(target.kind).context("no such mover")?;
        let reader = Reader::new(mover, target, load)?;
        let from = Pool {
            region: RegionKey(0),
            base: 0,
            len: target.offer.pool,
        };
        reader.warm_up(from, target.landing)?;
        let round = case.round(from, target.landing);
        let mut next = round.iter().cycle().cloned();
        let mut running = 0;
        let peer_before = peer()?;
        let (before, begun, time) = (cpu::seconds(), Instant::now(), Duration::from_secs_f64(load.seconds));
        let mut measured = Measured::default();
        loop {
            while running < load.depth && begun.elapsed() < time {
                let Some(copies) = next.next() else { break };
                measured.messages += case.bytes() / case.run();
                reader.read(copies);
                running += 1;
            }
            if running == 0 {
                measured.seconds = begun.elapsed().as_secs_f64();
                measured.cpu = cpu::seconds() - before;
                measured.peer_cpu = peer()? - peer_before;
                return Ok(measured);
            }
            measured.add(reader.wait()?);
            running -= 1;
        }
    }

    /// As [`Side::measure`] with `depth` threads, each of which has its runs gathered at the other end by `gather` (a
    /// thread's number, the read's number), reads them as one, and spreads them out.
    pub fn measure_gathered<G>(
        &self,
        target: &Target<'_>,
        case: &Case,
        load: &Load,
        gathers: Vec<(RegionKey, G)>,
        peer: PeerCpu<'_>,
    ) -> Result<Measured>
    where
        G: FnMut(u64) -> Result<()> + Send,
    {
        load.check(case)?;
        let mover = self.mover(target.kind).context("no such mover")?;
        let staged = gathers.iter().map(|_| self.stage(case.bytes()));
        let staged = staged.collect::<Result<Vec<_>>>()?;
        let workers = gathers.into_iter().zip(&staged).enumerate();
        let peer_before = peer()?;
        let (before, begun, time) = (cpu::seconds(), Instant::now(), Duration::from_secs_f64(load.seconds));
        let work = |(at, ((from, mut gather), staging)): (usize, ((RegionKey, G), &Staging))| {
            let reader = Reader::new(mover, target, load)?;
            let (mut measured, mut number) = (Measured::default(), at as u64);
            let whole = |region| Run {
                region,
                offset: 0,
                len: case.bytes(),
            };
            while begun.elapsed() < time {
                let one = Instant::now();
                gather(number)?;
                reader.read(vec![Copy {
                    remote: whole(from),
                    local: whole(staging.key),
                }]);
                let stats = reader.wait()?;
                let Pool { region, base, len } = target.landing;
                let runs = case.runs(number, region, base, len, 2);
                spread(&self.pool, &staging.region, &runs);
                measured.messages += case.bytes() / case.run();
                measured.add(ReadStats {
                    elapsed: one.elapsed(),
                    ..stats
                });
                number += staged.len() as u64;
            }
            Ok(measured)
        };
        let work = &work;
        let results: Vec<Result<Measured>> = thread::scope(|scope| {
            let threads: Vec<_> = workers.map(|worker| scope.spawn(move || work(worker))).collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined
                .map(|result| result.map_err(|_| anyhow!("a measuring thread panicked"))?)
                .collect()
        });
        let mut all = Measured::default();
        for measured in results {
            all.join(measured?);
        }
        all.seconds = begun.elapsed().as_secs_f64();
        all.cpu = cpu::seconds() - before;
        all.peer_cpu = peer()? - peer_before;
        staged.into_iter().for_each(|staging| self.unstage(staging));
        Ok(all)
    }
}

impl Measured {
    fn add(&mut self, stats: ReadStats) {
        self.bytes += stats.bytes;
        if self.reads.is_multiple_of(self.every.max(1)) {
            self.latencies.push(stats.elapsed.as_secs_f32() * 1e6);
        }
        self.reads += 1;
        if self.latencies.len() >= LATENCIES {
            let mut at = 0;
            self.latencies.retain(|_| {
                at += 1;
                at % 2 == 1
            });
            self.every = self.every.max(1) * 2;
        }
    }

    /// Adds what was measured at the same time.
    pub fn join(&mut self, other: Measured) {
        // The other end's numbers may be any.
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.reads = self.reads.saturating_add(other.reads);
        self.messages = self.messages.saturating_add(other.messages);
        self.seconds = self.seconds.max(other.seconds);
        // Each has the time of all threads of this process.
        self.cpu = self.cpu.max(other.cpu);
        self.peer_cpu += other.peer_cpu;
        self.latencies.extend(other.latencies);
    }
}

/// Reads by one mover from one peer.
pub struct Reader<'a> {
    mover: &'a dyn Mover,
    peer: &'a str,
    token: LeaseToken,
    options: ReadOptions,
    done: mpsc::Sender<Result<ReadStats, MoverError>>,
    results: mpsc::Receiver<Result<ReadStats, MoverError>>,
}

impl<'a> Reader<'a> {
    /// From the target's peer.
    pub fn new(mover: &'a dyn Mover, target: &Target<'a>, load: &Load) -> Result<Self> {
        let at = target.offer.movers.iter().find(|(kind, _)| *kind == target.kind);
        let (done, results) = mpsc::channel();
        Ok(Reader {
            mover,
            peer: &at.context("the other end has no such mover")?.1,
            token: parse_token(&target.offer.token)?,
            options: ReadOptions {
                deadline: Duration::from_secs(30),
                checksum: load.checksum,
                // Of verbs: queue pairs, of which it has as many as were asked for.
                streams: match target.kind {
                    Kind::Verbs => usize::MAX,
                    Kind::Shm | Kind::Tcp => load.streams,
                },
            },
            done,
            results,
        })
    }

    /// Begins a read.
    pub fn read(&self, copies: Vec<Copy>) {
        let done = self.done.clone();
        // The receiver ends before the last read only when the measurement failed.
        let done = move |result| drop(done.send(result));
        drop(
            self.mover
                .read(self.peer, self.token, copies, self.options, Box::new(done)),
        );
    }

    /// The next read that is done.
    pub fn wait(&self) -> Result<ReadStats> {
        Ok(self.try_wait()??)
    }

    /// As [`Reader::wait`], with the read's own error apart.
    pub fn try_wait(&self) -> Result<Result<ReadStats, MoverError>> {
        Ok(self.results.recv_timeout(Duration::from_secs(60))?)
    }

    /// Reads all of a pool once, so that every page is mapped on both sides.
    fn warm_up(&self, from: Pool, to: Pool) -> Result<()> {
        let part = to.len.min(from.len).min(64 << 20);
        for offset in (0..from.len.div_ceil(part)).map(|at| at * part) {
            let len = part.min(from.len - offset);
            self.read(vec![Copy {
                remote: Run {
                    region: from.region,
                    offset: from.base + offset,
                    len,
                },
                local: Run {
                    region: to.region,
                    offset: to.base + offset % (to.len - len + 1),
                    len,
                },
            }]);
            self.wait()?;
        }
        Ok(())
    }
}

/// Copies runs of `pool` together into `staging`.
pub fn gather(pool: &HostRegion, staging: &HostRegion, runs: &[Run]) {
    let mut at = 0;
    for run in runs {
        staging.copy_from(at, pool, run.offset as usize, run.len as usize);
        at += run.len as usize;
    }
}

/// Copies `staging` out into runs of `pool`.
fn spread(pool: &HostRegion, staging: &HostRegion, runs: &[Run]) {
    let mut at = 0;
    for run in runs {
        pool.copy_from(run.offset as usize, staging, at, run.len as usize);
        at += run.len as usize;
    }
}

/// The plain version: one thread, one `memcpy` per run, between mappings of the kinds a mover would copy between.
pub fn measure_memcpy(case: &Case, source: &HostRegion, target: &HostRegion, seconds: f64) -> Measured {
    let pool = |region: &HostRegion| Pool {
        region: RegionKey(0),
        base: 0,
        len: region.len() as u64,
    };
    let (from, to) = (pool(source), pool(target));
    let round = case.round(from, to);
    let copy = |copies: &[Copy]| {
        let begun = Instant::now();
        for Copy { remote, local } in copies {
            target.copy_from(
                local.offset as usize,
                source,
                remote.offset as usize,
                local.len as usize,
            );
        }
        begun.elapsed()
    };
    // Every page once.
    round.iter().for_each(|copies| {
        copy(copies);
    });
    let mut next = round.iter().cycle();
    let (before, begun) = (cpu::seconds(), Instant::now());
    let mut measured = Measured::default();
    while begun.elapsed().as_secs_f64() < seconds {
        let Some(copies) = next.next() else { break };
        let elapsed = copy(copies);
        measured.messages += case.bytes() / case.run();
        measured.add(ReadStats {
            bytes: case.bytes(),
            elapsed,
            ..ReadStats::default()
        });
    }
    measured.seconds = begun.elapsed().as_secs_f64();
    measured.cpu = cpu::seconds() - before;
    measured
}

/// 64 hexadecimal digits.
pub fn parse_token(hex: &str) -> Result<LeaseToken> {
    let byte = |at: usize| u8::from_str_radix(hex.get(at * 2..at * 2 + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..32).map(byte).collect();
    match bytes.and_then(|bytes| bytes.try_into().ok()) {
        Some(bytes) if hex.len() == 64 => Ok(LeaseToken::from_bytes(bytes)),
        _ => bail!("a token has 64 hexadecimal digits, got {}", hex.len()),
    }
}

/// Whether a case wants its runs gathered.
pub fn is_gathered(case: &Case) -> bool {
    case.access == Access::Gathered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_reads_latencies_are_kept_evenly() {
        let mut measured = Measured::default();
        let reads = 3 * LATENCIES as u64;
        for number in 0..reads {
            measured.add(ReadStats {
                bytes: 1,
                elapsed: Duration::from_micros(number),
                ..ReadStats::default()
            });
        }
        assert_eq!((measured.reads, measured.bytes, measured.every), (reads, reads, 4));
        assert!(measured.latencies.len() < LATENCIES);
        let kept = measured.latencies.iter().map(|us| us.round() as u64);
        assert!(kept.enumerate().all(|(at, us)| us.abs_diff(at as u64 * 4) <= 1));
    }

    /// A load that came over the wire is neither slept on nor multiplied unseen.
    #[test]
    fn a_load_that_cannot_be_run_is_refused() {
        let case = Case {
            shape: crate::case::Shape::Runs { len: 4096, count: 4 },
            access: Access::Scattered,
        };
        let load = Load {
            seconds: 1.0,
            depth: 4,
            streams: 2,
            checksum: false,
        };
        assert!(load.check(&case).is_ok());
        for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY, 4000.0] {
            assert!(Load { seconds, ..load }.check(&case).is_err(), "{seconds}");
        }
        assert!(Load { depth: 0, ..load }.check(&case).is_err());
        assert!(Load { streams: 65, ..load }.check(&case).is_err());
    }
}
