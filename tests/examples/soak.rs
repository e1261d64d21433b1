//! Many worlds of the simulation: `cargo run -p kvc-tests --release --example soak -- [worlds] [first seed] [survey]`.
//! Ends at the first world that breaks a rule and says how to replay it; `survey` goes on and counts.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use kvc_tests::sim::{Limits, Report, run};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments.get(at).and_then(|a| a.parse::<u64>().ok());
    let worlds = number(0).unwrap_or(100_000);
    let first = number(1).unwrap_or(10_000_000);
    let survey = arguments.get(2).is_some_and(|a| a == "survey");
    let (began, mut told) = (Instant::now(), Instant::now());
    let mut all = Report::default();
    let mut broken: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for seed in first..first + worlds {
        let limits = Limits {
            faults: seed % 4 != 0,
            ..Limits::default()
        };
        match run(seed, &limits) {
            Ok(report) => all.join(&report),
            Err(violation) if survey => {
                let seeds = broken.entry(violation.oracle.to_string()).or_default();
                seeds.push(seed);
                if seeds.len() <= 3 {
                    println!("world {seed}: {violation}");
                }
            }
            Err(violation) => {
                println!("world {seed}: {violation}");
                let faults = u8::from(limits.faults);
                println!(
                    "replay: KVC_SIM_SEED={seed} KVC_SIM_FAULTS={faults} cargo test -p kvc-tests --test sim replay -- --nocapture"
                );
                std::process::exit(1);
            }
        }
        if told.elapsed() > Duration::from_secs(30) || seed + 1 == first + worlds {
            told = Instant::now();
            let seconds = began.elapsed().as_secs_f64();
            let (w, s) = (all.worlds as f64 / seconds, all.steps as f64 / seconds);
            println!("{seconds:.0} s, {w:.0} worlds/s, {s:.0} steps/s: {all:?}");
        }
    }
    for (oracle, seeds) in &broken {
        println!(
            "{oracle}: {} of {worlds} worlds, {:?}",
            seeds.len(),
            &seeds[..seeds.len().min(12)]
        );
    }
    if !broken.is_empty() {
        std::process::exit(1);
    }
}
