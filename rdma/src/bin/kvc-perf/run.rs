//! `run`: one mover between here and one or more `serve`s.

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::{
    case::Case,
    ends::Ends,
    interrupt::{self, Role},
    progress::Progress,
    report::{self, Row},
    side::Kind,
    what::What,
};

const EXAMPLES: &str = "\
Examples:
  kvc-perf run 10.0.0.1:4790 --key KEY                           the line that `kvc-perf serve` printed
  kvc-perf run 10.0.0.1:4790 --key KEY --mover verbs --sizes 4k,64k,1m --depth 16
  kvc-perf run 10.0.0.1:4790 --key KEY --access contiguous,scattered,gathered \\
    --layout sglang:layers=48,heads=4,dim=128,dtype=bf16,page=1
  kvc-perf run 10.0.0.1:4790 10.0.0.2:4790 --key KEY --bidirectional --json
  kvc-perf run --spawn 1 --mover shm                             this machine alone";

/// Moves bytes between here and one or more `kvc-perf serve`s by one mover, and prints how fast.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Run {
    /// How; the best that both ends have if not given
    #[arg(long)]
    mover: Option<Kind>,
    #[command(flatten)]
    what: What,
}

impl Run {
    /// Measures and prints.
    pub fn run(self) -> Result<()> {
        interrupt::watch(Role::Client)?;
        ensure!(
            self.mover.is_none_or(Kind::is_built),
            "this build has no verbs: build it with --features verbs"
        );
        let ends = Ends::start(self.what, self.mover)?;
        let shared = ends.shared();
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
                progress.step(&step(kind.name(), case));
                ends.measure(kind, case).context(kind.name())
            });
            let rounds = rounds.collect::<Result<Vec<_>>>()?;
            rows.extend(Row::median(rounds));
        }
        drop(progress);
        report::show(&rows, ends.json)
    }
}

/// For the progress line.
pub fn step(by: &str, case: &Case) -> String {
    format!("{by}, {}, {:?}", case.name(), case.access).to_lowercase()
}

fn names(kinds: &[Kind]) -> String {
    match kinds {
        [] => "none".into(),
        kinds => kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", "),
    }
}
