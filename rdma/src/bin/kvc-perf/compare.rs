//! `compare`: every mover that the two ends share, and what the machine and the network give without kvc, in one go.

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use kvc_rdma::HostRegion;

use crate::{
    case::{Access, Case},
    ends::Ends,
    interrupt::{self, Role},
    iperf,
    measure::{Load, measure_memcpy},
    perftest::Tool,
    progress::{self, Progress},
    report::{self, Row, complain, ratios},
    run::step,
    side::Kind,
    what::{Op, What},
};

const EXAMPLES: &str = "\
Examples:
  kvc-perf compare 10.0.0.1:4790 --key KEY              with what `kvc-perf serve` printed there
  kvc-perf compare 10.0.0.1:4790 --key KEY --op write   the bytes go there; beside it ib_write_bw
  kvc-perf compare --spawn 1                            this machine alone

The ratio is to what ran beside it in the same rounds: verbs to ib_read_bw (ib_write_bw with --op write), shm to memcpy, tcp
to iperf3. They are left out where they are not installed on both ends, or reach only part of the peers.";

/// Every mover that both ends have, and beside them ib_read_bw, ib_write_bw, memcpy and iperf3, in rounds that alternate.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Compare {
    #[command(flatten)]
    what: What,
}

/// What is measured side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Memcpy,
    Mover(Kind),
    Perftest(Tool),
    Iperf3,
}

struct Lane {
    by: By,
    /// Of the case that is measured now.
    rounds: Vec<Row>,
    /// It failed, and is left out from then on.
    over: bool,
}

impl Compare {
    /// Measures and prints. What fails is told and left out; if it was a mover, the status says so.
    pub fn run(self) -> Result<()> {
        interrupt::watch(Role::Client)?;
        let ends = Ends::start(self.what, None)?;
        let shared = ends.shared();
        ensure!(
            !shared.is_empty(),
            "no mover is shared: start `serve` with --movers tcp"
        );
        // For memcpy, of the kind that peers started here have.
        let source = ends.memory.allocate(ends.side.pool.len() as u64)?;
        let mut lanes = lanes(&shared, &ends);
        let mut progress = Progress::new(ends.cases.len() * ends.rounds * lanes.len());
        let (mut rows, mut failed) = (Vec::new(), None);
        for case in &ends.cases {
            for _ in 0..ends.rounds {
                let mut rate = 0.0;
                for lane in lanes.iter_mut().filter(|lane| !lane.over) {
                    progress.step(&step(lane.by.name(), case));
                    match lane.by.measure(&ends, case, &source, rate) {
                        Ok(row) => {
                            rate = row.gb_s * 1e9;
                            lane.rounds.push(row);
                        }
                        Err(error) => {
                            let why = format!("{}: {error:#}", lane.by.name());
                            // Without its peer nothing else would go better.
                            ends.check_peers().context(why.clone())?;
                            progress::clear();
                            complain(&format!("left out: {why}"));
                            lane.over = true;
                            if let By::Mover(kind) = lane.by {
                                failed.get_or_insert(kind.name());
                            }
                        }
                    }
                }
            }
            rows.extend(lanes.iter().filter_map(|lane| lane.row(&lanes, ends.op)));
            lanes.iter_mut().for_each(|lane| lane.rounds.clear());
        }
        drop(progress);
        report::show(&rows, ends.json)?;
        match failed {
            Some(mover) => bail!("{mover} failed, see above: the table has the others"),
            None => Ok(()),
        }
    }
}

/// In this order, so that perftest knows from the mover before it how long a run takes.
fn lanes(shared: &[Kind], ends: &Ends) -> Vec<Lane> {
    let mut all = vec![By::Memcpy];
    for kind in shared {
        all.push(By::Mover(*kind));
        let tools: &[Tool] = match (kind, ends.op) {
            (Kind::Verbs, Op::Read) => &[Tool::Read, Tool::Write],
            (Kind::Verbs, Op::Write) => &[Tool::Write],
            _ => &[],
        };
        let there = |tool: &&Tool| tool.is_installed() && ends.links.len() == 1;
        all.extend(tools.iter().filter(there).map(|tool| By::Perftest(*tool)));
    }
    if iperf::is_installed() && ends.links.len() == 1 && shared.contains(&Kind::Tcp) {
        all.push(By::Iperf3);
    }
    let lane = |by| Lane {
        by,
        rounds: Vec::new(),
        over: false,
    };
    all.into_iter().map(lane).collect()
}

impl Lane {
    /// The median round, with its ratio to what ran beside it.
    fn row(&self, lanes: &[Lane], op: Op) -> Option<Row> {
        let row = Row::median(self.rounds.clone())?;
        let beside = match (self.by, op) {
            (By::Mover(Kind::Verbs), Op::Read) => By::Perftest(Tool::Read),
            (By::Mover(Kind::Verbs), Op::Write) => By::Perftest(Tool::Write),
            (By::Mover(Kind::Shm), _) => By::Memcpy,
            (By::Mover(Kind::Tcp), _) => By::Iperf3,
            _ => return Some(row),
        };
        let beside = lanes.iter().find(|lane| lane.by == beside);
        let (ratio, cpu_ratio) = beside.map_or((None, None), |beside| ratios(&self.rounds, &beside.rounds));
        Some(Row {
            ratio,
            cpu_ratio,
            ..row
        })
    }
}

impl By {
    fn name(self) -> &'static str {
        match self {
            By::Memcpy => "memcpy",
            By::Mover(kind) => kind.name(),
            By::Perftest(tool) => tool.name(),
            By::Iperf3 => "iperf3",
        }
    }

    /// One round. `rate`: bytes per second of the lane before.
    fn measure(self, ends: &Ends, case: &Case, source: &HostRegion, rate: f64) -> Result<Row> {
        Ok(match self {
            By::Memcpy => {
                let plain = Load {
                    depth: 1,
                    streams: 1,
                    checksum: false,
                    ..ends.load
                };
                // There is nothing to gather for a processor that reads both sides.
                let scattered = match case.access {
                    Access::Gathered => Access::Scattered,
                    access => access,
                };
                let case = Case {
                    access: scattered,
                    ..*case
                };
                let measured = measure_memcpy(&case, source, &ends.side.pool, ends.load.seconds);
                Row::new("memcpy", &case, &plain, 0, measured)
            }
            By::Mover(kind) => ends.measure(kind, case)?,
            By::Perftest(tool) => ends.perftest(tool, case, rate)?,
            By::Iperf3 => ends.iperf3(case)?,
        })
    }
}
