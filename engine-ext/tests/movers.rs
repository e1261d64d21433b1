//! Which mover brings KV from one worker to another, and what happens when it fails (XFER-9).

mod support;

use std::{sync::Arc, time::Duration};

use kvc_cuda::Device;
use kvc_engine_ext::harness::{Start, TestEngine};
use kvc_rdma::{Mover, MoverKind, fault::Fault};
use serde_json::Value;
use support::*;

/// A worker whose pool lies in a memfd, on whatever machine: RDMA is left out.
fn shared(settings: &[(&str, &str)]) -> TestEngine {
    let settings = [&[("movers", "shm,tcp")], settings].concat();
    let mut start = Start::new(config(&settings), 16);
    start.shared = true;
    TestEngine::start(start).unwrap()
}

/// A worker with these movers.
fn with(movers: Vec<Arc<dyn Mover>>) -> TestEngine {
    let mut start = Start::new(config(&[]), 16);
    start.heads = 64;
    start.movers = movers;
    TestEngine::start(start).unwrap()
}

/// Two workers with a way between them that passes for verbs and can be broken, and tcp beside it.
fn two_ways() -> (TestEngine, TestEngine, Arc<Behind>) {
    let best = Behind::named(MoverKind::Verbs);
    let p = with(vec![best.clone(), Behind::new()]);
    let d = with(vec![Behind::named(MoverKind::Verbs), Behind::new()]);
    (p, d, best)
}

/// Seeds session `n` of `len` tokens at `p` and imports it into `d`: the answer, and whether its KV is right.
fn seed(p: &mut TestEngine, d: &mut TestEngine, n: u32, len: usize) -> (u16, Value) {
    let (session, prompt, placed) = (format!("s{n}"), tokens(n, len), u64::from(n));
    d.step();
    let reservation = admit(d, &question(&session, 0, len, len, placed, placed), "seed");
    let turn = p.arrive(&session, &prompt, 0, None, Some(placement(placed))).unwrap();
    p.finish(turn, &[]);
    p.step();
    let answer = import(d, &session, &order(reservation, placed, p, 20_000));
    let answer = answered(d, answer);
    let reused = compare(d, &session, &prompt, reservation, placed);
    assert_eq!(reused > 0, answer.0 == 200, "{answer:?}");
    answer
}

fn bytes(d: &TestEngine, mover: &str) -> f64 {
    metric(d, &format!("kvc_mover_bytes_total{{mover=\"{mover}\"}}"))
}

fn fallbacks(d: &TestEngine) -> f64 {
    metric(d, "kvc_mover_fallbacks_total{from=\"verbs\",to=\"tcp\"}")
}

#[test]
fn workers_of_one_host_share_memory() {
    let (mut p, mut d) = (shared(&[]), shared(&[]));
    assert_eq!(p.engine().info().movers, ["shm", "tcp"]);
    let (status, body) = seed(&mut p, &mut d, 1, 180);
    assert_eq!(status, 200, "{body}");
    assert_eq!(bytes(&d, "shm"), 180.0 * d.arena().layout().token_bytes() as f64);
    assert_eq!(bytes(&d, "tcp"), 0.0);
    assert!(p.drain() && d.drain());
}

#[test]
fn memory_of_one_process_alone_is_read_over_tcp() {
    // Where bytes land does not matter: the importer's pool is shared, the exporter's is not.
    let (mut p, mut d) = (engine(&[("movers", "shm,tcp")], 16), shared(&[]));
    assert_eq!(p.engine().info().movers, ["tcp"]);
    assert_eq!(seed(&mut p, &mut d, 1, 180).0, 200);
    assert_eq!((bytes(&d, "shm"), bytes(&d, "tcp") > 0.0), (0.0, true));
    assert!(p.drain() && d.drain());
}

#[test]
fn a_mover_that_either_side_leaves_out_is_not_used() {
    for (theirs, ours) in [("shm,tcp", "tcp"), ("tcp", "tcp,shm")] {
        let (mut p, mut d) = (shared(&[("movers", theirs)]), shared(&[("movers", ours)]));
        assert_eq!(seed(&mut p, &mut d, 1, 180).0, 200);
        assert_eq!((bytes(&d, "shm"), bytes(&d, "tcp") > 0.0), (0.0, true));
        assert!(p.drain() && d.drain());
    }
}

#[test]
fn workers_without_a_common_mover_say_so_and_lose_nothing() {
    let (mut p, mut d) = (shared(&[("movers", "shm")]), shared(&[("movers", "tcp")]));
    let answer = seed(&mut p, &mut d, 1, 180);
    assert_eq!(code(&answer), "no-common-mover");
    let message = answer.1["error"]["message"].as_str().unwrap();
    for part in ["[tcp]", "[shm]", "force_rdma"] {
        assert!(message.contains(part), "{message} lacks {part}");
    }
    assert_eq!((leases(&p), imports(&d)), (0, 0));
    assert!(p.drain() && d.drain());
}

#[test]
fn a_mover_that_breaks_in_the_middle_is_replaced_under_the_same_lease() {
    for fault in [
        Fault::Die { after: 700_000 },
        Fault::Truncate { after: 700_000 },
        Fault::Die { after: 0 },
    ] {
        let (mut p, mut d, best) = two_ways();
        best.proxy.inject(Some(fault));
        let (status, body) = seed(&mut p, &mut d, 1, 3000);
        assert_eq!(status, 200, "{fault:?}: {body}");
        let whole = 3000.0 * d.arena().layout().token_bytes() as f64;
        assert_eq!(bytes(&d, "verbs") + bytes(&d, "tcp"), whole, "{fault:?}");
        assert!(bytes(&d, "tcp") > 0.0);
        assert_eq!(fallbacks(&d), 1.0, "several reads failed, one way did: {fault:?}");
        assert_eq!(metric(&p, "kvc_leases_total"), 1.0);
        // It is not tried again for a while, though it has healed.
        best.proxy.inject(None);
        let before = bytes(&d, "verbs");
        assert_eq!(seed(&mut p, &mut d, 2, 500).0, 200);
        assert_eq!((bytes(&d, "verbs"), fallbacks(&d)), (before, 1.0));
        until("the leases are over", || leases(&p) == 0);
        assert!(p.drain() && d.drain());
    }
}

#[test]
fn what_the_bytes_or_the_clock_are_to_blame_for_does_not_fall_back() {
    // XFER-8, XFER-7: a wrong byte is an error, not a reason to look elsewhere; after the deadline nobody waits.
    for (fault, reason) in [
        (Fault::Corrupt { at: 3000 }, "checksum-mismatch"),
        (Fault::Stall { after: 3000 }, "deadline-exceeded"),
    ] {
        let (mut p, mut d, best) = two_ways();
        best.proxy.inject(Some(fault));
        let prompt = tokens(1, 180);
        d.step();
        let reservation = admit(&d, &question("s", 0, 180, 180, 1, 1), "seed");
        let turn = p.arrive("s", &prompt, 0, None, Some(placement(1))).unwrap();
        p.finish(turn, &[]);
        p.step();
        let answer = import(&d, "s", &order(reservation, 1, &p, 900));
        assert_eq!(code(&answered(&mut d, answer)), reason);
        assert_eq!((fallbacks(&d), bytes(&d, "tcp")), (0.0, 0.0), "{fault:?}");
        assert_eq!(compare(&mut d, "s", &prompt, reservation, 1), 0);
        assert!(p.drain() && d.drain());
    }
}

#[test]
fn a_revoked_lease_ends_over_every_mover() {
    // XFER-2: the exporter rewrites the session while its KV is read over the second mover; revoked is no reason to read on.
    let (mut p, mut d, best) = two_ways();
    let prompt = tokens(1, 3000);
    d.step();
    let reservation = admit(&d, &question("s", 0, 3000, 3000, 1, 1), "seed");
    let turn = p.arrive("s", &prompt, 0, None, Some(placement(1))).unwrap();
    p.finish(turn, &[]);
    p.step();
    best.proxy.inject(Some(Fault::Delay {
        pause: Duration::from_millis(60),
    }));
    let answer = import(&d, "s", &order(reservation, 1, &p, 20_000));
    until("the pull runs", || {
        d.step();
        pulled(&d) > 0 || transfers(&d)["imports"][0]["phase"] == "pulling"
    });
    p.run("s", &tokens(8, 64), &[1]).unwrap();
    let answer = answered(&mut d, answer);
    assert!(
        ["lease-revoked", "lease-unknown"].contains(&code(&answer)),
        "{answer:?}"
    );
    assert_eq!(fallbacks(&d), 0.0);
    assert_eq!(compare(&mut d, "s", &prompt, reservation, 1), 0);
    assert!(p.drain() && d.drain());
}

#[test]
fn rdma_that_is_asked_for_has_to_be_there() {
    // XFER-9, on a machine without a device: one line that names the setting and what to do.
    if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some()) {
        return;
    }
    for (field, value) in [("force_rdma", "true"), ("ib_device", "mlx5_0")] {
        let settings = config(&[(field, value)]);
        let early = kvc_engine_ext::preflight(&settings, Device::Host)
            .unwrap_err()
            .to_string();
        let error = TestEngine::start(Start::new(settings, 16));
        let error = error.err().expect("an error").to_string();
        assert_eq!(error, early);
        let gpu = kvc_engine_ext::preflight(&config(&[(field, value)]), Device::Cuda(0)).unwrap_err();
        assert!(gpu.to_string().contains("GPU"), "{gpu}");
        assert!(error.starts_with(field) && !error.contains('\n'), "{error}");
        assert!(
            ["install", "load", "check", "build it"]
                .iter()
                .any(|fix| error.contains(fix)),
            "no remedy: {error}"
        );
    }
    assert!(
        kvc_engine_ext::preflight(&config(&[]), Device::Cuda(0)).is_ok(),
        "nothing is demanded"
    );
    assert_eq!(engine(&[("movers", "verbs,tcp")], 16).engine().info().movers, ["tcp"]);
}
