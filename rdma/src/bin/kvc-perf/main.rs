//! `kvc-perf`: how fast this machine, or two of them, move KV: what a new node runs first.
//!
//! `serve` on one end, `run` or `compare` on the other; `devices` says what RDMA finds; `bench` makes the figures of
//! docs/bench.md.

mod bench;
mod case;
mod compare;
mod control;
mod cpu;
mod devices;
mod ends;
mod interrupt;
mod iperf;
mod layout;
mod measure;
mod perftest;
mod process;
mod progress;
mod report;
mod run;
mod serve;
mod side;
mod what;

use std::process::ExitCode;

use clap::{Parser, Subcommand, error::ErrorKind};

const EXAMPLES: &str = "\
A new node:
  kvc-perf devices                            what is there, what would be taken, what is missing
  kvc-perf serve --bind 10.0.0.1:4790         on the other machine; it prints a line for this one
  kvc-perf compare 10.0.0.1:4790 --key KEY    every mover beside what the network and the memory give
  kvc-perf run 10.0.0.1:4790 --key KEY        one mover in detail: sizes, layouts, depth, both ways, many peers
One machine alone: kvc-perf compare --spawn 1

Exit status: 0; 1 for what failed while it ran; 2 for options; 128 and the signal's number when interrupted.
docs/rdma.md says how to read the figures.";

/// Measures how KV moves between two workers: GB/s, runs/s, latencies and processor time, by every mover of kvc.
#[derive(Parser)]
#[command(name = "kvc-perf", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Serve(serve::Serve),
    Run(run::Run),
    Compare(compare::Compare),
    Devices(devices::Devices),
    Bench(bench::Run),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    let result = match cli.verb {
        Verb::Serve(serve) => serve.run(),
        Verb::Run(run) => run.run(),
        Verb::Compare(compare) => compare.run(),
        Verb::Devices(devices) => devices.run(),
        Verb::Bench(bench) => bench.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            interrupt::give_way();
            report::complain(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// One line that names what is wrong and what would be right; help as it is.
fn refuse(error: &clap::Error) -> ExitCode {
    let help = matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    );
    if help {
        // A closed pipe is nobody's fault.
        let _ = error.print();
        return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
    }
    let text = error.render().to_string();
    let lines = text
        .lines()
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    let words: Vec<&str> = lines.flat_map(str::split_whitespace).collect();
    let line = words.join(" ");
    report::complain(&format!("{} (see --help)", line.trim_start_matches("error: ")));
    ExitCode::from(2)
}
