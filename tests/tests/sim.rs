//! The bounded batch of the simulation (kv-movement §6), and the replay of one seed:
//! `KVC_SIM_SEED=… cargo test -p kvc-tests --test sim replay -- --nocapture`.

use std::time::{Duration, Instant};

use kvc_tests::sim::{Limits, Report, run, run_logged};

/// Worlds of a batch; `KVC_SIM_WORLDS` asks for another number.
const WORLDS: u64 = 2_000;

fn worlds() -> u64 {
    std::env::var("KVC_SIM_WORLDS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(WORLDS)
}

fn batch(first: u64, count: u64, limits: &Limits) -> (Report, Duration) {
    let (began, mut all) = (Instant::now(), Report::default());
    for seed in first..first + count {
        match run(seed, limits) {
            Ok(report) => all.join(&report),
            Err(violation) => panic!(
                "world {seed} (faults: {}): {violation}\nreplay: KVC_SIM_SEED={seed} KVC_SIM_FAULTS={} \
                 cargo test -p kvc-tests --test sim replay -- --nocapture",
                limits.faults,
                u8::from(limits.faults),
            ),
        }
    }
    (all, began.elapsed())
}

fn tell(what: &str, (report, took): (Report, Duration)) {
    let seconds = took.as_secs_f64();
    println!(
        "{what}: {} worlds in {seconds:.1} s ({:.0} worlds/s, {:.0} steps/s): {report:?}",
        report.worlds,
        report.worlds as f64 / seconds,
        report.steps as f64 / seconds,
    );
}

#[test]
fn worlds_without_faults_keep_every_rule() {
    // OWN-1..7, XFER-1..4, INV-1..3, SES-1..6
    let limits = Limits {
        faults: false,
        ..Limits::default()
    };
    tell("no faults", batch(0, worlds() / 4, &limits));
}

#[test]
fn worlds_with_faults_keep_every_rule() {
    // F12..F16: loss, duplication, reordering, partition, crash, restart, freeze, expiry races, clients that leave.
    tell("faults", batch(1_000_000, worlds(), &Limits::default()));
}

#[test]
fn replay() {
    let Some(seed) = std::env::var("KVC_SIM_SEED").ok().and_then(|s| s.parse().ok()) else {
        return;
    };
    let faults = std::env::var("KVC_SIM_FAULTS").is_ok_and(|f| f != "0");
    let limits = Limits {
        faults,
        ..Limits::default()
    };
    let (log, end) = run_logged(seed, &limits);
    log.iter().for_each(|line| println!("{line}"));
    println!("{end:?}");
    assert!(end.is_ok(), "world {seed} breaks a rule");
}
