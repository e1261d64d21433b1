//! `run` and `compare`: measure reads from one or more `serve`s.

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::{
    ends::Ends,
    iperf,
    measure::{Load, measure_memcpy},
    report::{self, Progress, Row},
    side::Kind,
    what::What,
};

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

impl Run {
    /// Measures and prints.
    pub fn run(self) -> Result<()> {
        ensure!(
            self.mover.is_none_or(Kind::is_built),
            "this build has no verbs: build it with --features verbs"
        );
        let ends = Ends::start(self.what)?;
        let shared = ends.shared()?;
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
        let mut progress = Progress::new(ends.cases.len() * ends.rounds);
        let mut rows = Vec::new();
        for case in &ends.cases {
            let rounds = (0..ends.rounds).map(|_| {
                progress.step(&format!("{} {} {:?}", kind.name(), case.name(), case.access));
                ends.measure(kind, case)
            });
            let rounds = rounds.collect::<Result<Vec<_>>>()?;
            rows.extend(Row::median(rounds));
        }
        drop(progress);
        report::show(&rows, ends.json)
    }
}

impl Compare {
    /// Measures and prints.
    pub fn run(self) -> Result<()> {
        let ends = Ends::start(self.what)?;
        let shared = ends.shared()?;
        ensure!(
            !shared.is_empty(),
            "no mover is shared: start `serve` with --movers tcp"
        );
        let (source, iperf3) = (
            ends.memory.allocate(ends.side.pool.len() as u64)?,
            iperf::is_installed(),
        );
        let per_case = shared.len() + 1 + usize::from(iperf3);
        let mut progress = Progress::new(ends.cases.len() * ends.rounds * per_case);
        let mut rows = Vec::new();
        for case in &ends.cases {
            let mut rounds: Vec<Vec<Row>> = vec![Vec::new(); per_case];
            for _ in 0..ends.rounds {
                progress.step(&format!("memcpy {} {:?}", case.name(), case.access));
                let measured = measure_memcpy(case, &source, &ends.side.pool, ends.load.seconds);
                let plain = Load {
                    depth: 1,
                    streams: 1,
                    checksum: false,
                    ..ends.load
                };
                rounds[0].push(Row::new("memcpy", case, &plain, 0, measured));
                for (at, kind) in shared.iter().enumerate() {
                    progress.step(&format!("{} {} {:?}", kind.name(), case.name(), case.access));
                    rounds[1 + at].push(ends.measure(*kind, case)?);
                }
                if iperf3 {
                    progress.step("iperf3");
                    rounds[per_case - 1].extend(ends.iperf3(case));
                }
            }
            rows.extend(rounds.into_iter().filter_map(Row::median));
        }
        drop(progress);
        report::show(&rows, ends.json)
    }
}

fn names(kinds: &[Kind]) -> String {
    match kinds {
        [] => "none".into(),
        kinds => kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", "),
    }
}
