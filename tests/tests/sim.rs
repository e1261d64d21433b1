//! The bounded batch of the simulation (kv-movement §6), and the replay of one seed:
//! `KVC_SIM_SEED=… cargo test -p kvc-tests --test sim replay -- --nocapture`.

use std::time::{Duration, Instant};

use kvc_tests::sim::{Limits, Report, run, run_aloud, run_logged};

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
    let (report, took) = batch(1_000_000, worlds(), &Limits::default());
    let past = report.past;
    let corners = [
        ("crashes", report.crashes),
        ("imports", past.imports),
        ("evictions", past.evictions),
        ("revocations", past.revocations),
        ("rewinds", past.rewinds),
        ("retracts", past.retracts),
        ("aborts", past.aborts),
        ("direct", report.modes[0]),
        ("seed", report.modes[1]),
        ("reseed", report.modes[2]),
        ("fallback", report.modes[3]),
        ("announcements", past.announced),
        ("replicas that followed", past.synced),
        ("reseeds from a replica", past.reseeded),
        ("sessions that moved", past.moved),
        ("targets one turn behind", past.behind),
        ("hand-overs of busy sessions", past.busy),
        ("moves withdrawn", past.withdrawn),
        ("workers drained", report.drained),
        // Rare: a hundred times are as good as one.
        ("late hand-over answers", past.late * 100),
        ("turns superseded", past.superseded * 100),
    ];
    for (corner, times) in corners {
        assert!(
            times * 20 >= report.worlds.min(2_000),
            "{corner}: only {times} in {} worlds",
            report.worlds
        );
    }
    tell("faults", (report, took));
}

#[test]
fn a_seed_is_one_world() {
    // Nothing depends on the order of a hash map, on an address or on real time.
    for seed in 0..40 {
        let limits = Limits {
            faults: seed % 4 != 0,
            ..Limits::default()
        };
        let (first, second) = (run_logged(seed, &limits).0, run_logged(seed, &limits).0);
        let differs = first.iter().zip(&second).position(|(a, b)| a != b);
        assert_eq!(
            differs,
            None,
            "world {seed}: {:?}",
            differs.map(|i| (&first[i], &second[i]))
        );
        assert_eq!(first.len(), second.len(), "world {seed}");
    }
}

#[test]
fn worlds_that_once_broke_a_rule_keep_it() {
    // As long as the meaning of a seed does not change: a placement used on two workers (MIG-3), a move without a
    // counted reject (INV-3); a backup that ignored its owner, or pulled without end (SYNC-1), a prefill without its
    // promised room (SES-3), a turn on a forgotten session.
    for (seed, faults) in [
        (0, false),
        (33, true),
        (62, true),
        (142, true),
        (459, true),
        (542, true),
        (2_099, true),
        (20_146, true),
        (20_160, true),
        (1_002_217, true),
        (123, false),
        (1_000_002, true),
        (50_013_729, true),
        (60_015_999, true),
        (70_075_757, true),
    ] {
        let limits = Limits {
            faults,
            ..Limits::default()
        };
        let end = run(seed, &limits);
        assert!(end.is_ok(), "world {seed} (faults: {faults}): {end:?}");
    }
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
    let end = run_aloud(seed, &limits);
    println!("{end:?}");
    assert!(end.is_ok(), "world {seed} breaks a rule");
}
