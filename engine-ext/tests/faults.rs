//! T7: peers that die, lie, or say nothing. Every import ends with a typed error, and every page comes back.

mod support;

use std::{net::TcpListener, time::Duration};

use kvc_engine_ext::harness::{Client, Start, TestEngine, TestTurn, true_kv};
use kvc_proto::{
    id::{Incarnation, ReservationId},
    worker::Token,
};
use kvc_rdma::fault::{Fault, Proxy};
use support::*;

/// P has prefilled 64 of 180 tokens, D has pulled them and waits for more.
fn mid_pull(p: &mut TestEngine, d: &mut TestEngine) -> (TestTurn, Vec<Token>, Answer, ReservationId) {
    let prompt = tokens(7, 180);
    d.step();
    p.step();
    let reservation = admit(d, &question("s", 0, 180, 180, 1, 1), "seed");
    let mut turn = p.arrive("s", &prompt, 0, None, Some(placement(1))).unwrap();
    p.prefill(&mut turn, 64);
    let answer = import(d, "s", &order(reservation, 1, p, 20_000));
    until("the first chunk is pulled", || {
        d.step();
        pulled(d) >= 64
    });
    (turn, prompt, answer, reservation)
}

#[test]
fn an_exporter_that_dies_mid_pull_costs_only_the_import() {
    // XFER-7, F12.
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    let (_turn, prompt, answer, reservation) = mid_pull(&mut p, &mut d);
    drop(p);
    let answer = answered(&mut d, answer);
    assert!(
        ["peer-unreachable", "transfer-failed"].contains(&code(&answer)),
        "{answer:?}"
    );
    assert_eq!(imports(&d), 0);
    // The request is still answered: the same reservation, everything computed here.
    let reused = compare(&mut d, "s", &prompt, reservation, 1);
    assert_eq!(reused, 0);
    assert!(d.drain(), "pages leaked");
}

#[test]
fn an_importer_that_dies_mid_pull_holds_nothing_beyond_its_lease() {
    // XFER-7, F12: its control connection breaks and is never made again, so that nobody ends the lease.
    let (mut p, mut d) = (engine(&[("lease_ms", "400")], 16), engine(&[], 16));
    let control = Proxy::start(p.engine().peer_listen()).unwrap();
    let prompt = tokens(7, 180);
    d.step();
    let reservation = admit(&d, &question("s", 0, 180, 180, 1, 1), "seed");
    let mut turn = p.arrive("s", &prompt, 0, None, Some(placement(1))).unwrap();
    p.prefill(&mut turn, 64);
    let order = order_from(
        reservation,
        1,
        control.endpoint().parse().unwrap(),
        p.engine().incarnation(),
        20_000,
    );
    let answer = import(&d, "s", &order);
    until("the first chunk is pulled", || {
        d.step();
        pulled(&d) >= 64
    });
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(leases(&p), 1, "renewed beyond its first life");
    drop(control);
    assert!(answered(&mut d, answer).0 >= 400);
    assert!(d.drain(), "pages leaked");
    until("the lease has expired", || leases(&p) == 0);
    let expired = client(&p).get("/metrics").unwrap().1;
    assert!(
        expired.as_str().unwrap().contains("kvc_leases_expired_total 1"),
        "{expired}"
    );
    p.finish(turn, &[]);
    p.step();
    assert!(p.drain(), "pages leaked");
}

#[test]
fn a_client_that_goes_away_mid_pull_cancels_the_import() {
    // F14.
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    let prompt = tokens(7, 180);
    d.step();
    let reservation = admit(&d, &question("s", 0, 180, 180, 1, 1), "seed");
    let mut turn = p.arrive("s", &prompt, 0, None, Some(placement(1))).unwrap();
    p.prefill(&mut turn, 64);
    let order = serde_json::to_vec(&order(reservation, 1, &p, 20_000)).unwrap();
    let mut stream = std::net::TcpStream::connect(d.engine().listen()).unwrap();
    let head = format!(
        "POST /kvc/v1/sessions/s/import HTTP/1.1\r\nhost: k\r\ncontent-length: {}\r\n\r\n",
        order.len()
    );
    std::io::Write::write_all(&mut stream, &[head.as_bytes(), &order].concat()).unwrap();
    until("the first chunk is pulled", || {
        d.step();
        pulled(&d) >= 64
    });
    drop(stream);
    until("the import is gone", || {
        d.step();
        imports(&d) == 0
    });
    // F13: the peer is told at once, not after the lease's life.
    until("the peer's lease is over", || leases(&p) == 0);
    p.abort(turn);
    assert!(p.drain() && d.drain(), "pages leaked");
}

#[test]
fn an_abort_at_the_exporter_revokes() {
    // XFER-2, XFER-4, F11.
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    let (turn, prompt, answer, reservation) = mid_pull(&mut p, &mut d);
    p.abort(turn);
    p.step();
    let answer = answered(&mut d, answer);
    assert!(
        ["lease-revoked", "lease-unknown"].contains(&code(&answer)),
        "{answer:?}"
    );
    assert_eq!(leases(&p), 0);
    assert_eq!(
        compare(&mut d, "s", &prompt, reservation, 1),
        0,
        "nothing of a dropped import is visible"
    );
    assert!(p.drain() && d.drain(), "pages leaked");
}

#[test]
fn an_importer_without_room_releases_the_lease_at_once() {
    // F13.
    let mut p = engine(&[], 16);
    let mut small = Start::new(config(&[]), 16);
    small.pages = 16;
    let mut d = TestEngine::start(small).unwrap();
    d.step();
    let reservation = admit(&d, &question("s", 0, 100, 100, 1, 1), "seed");
    // The estimate was wrong: the prompt does not fit at all.
    let prompt = tokens(8, 400);
    let turn = p.arrive("s", &prompt, 0, None, Some(placement(1))).unwrap();
    p.finish(turn, &[]);
    let answer = import(&d, "s", &order(reservation, 1, &p, 20_000));
    let answer = answered(&mut d, answer);
    assert!(answer.0 >= 400, "{answer:?}");
    until("the peer's lease is over", || leases(&p) == 0);
    assert!(p.drain() && d.drain(), "pages leaked");
}

#[test]
fn a_stream_with_faults_is_a_typed_error_and_never_an_answer() {
    // XFER-8, F11, T7: truncated, silent, dying and lying data streams.
    for (fault, codes) in [
        (
            Fault::Truncate { after: 3000 },
            &["peer-unreachable", "transfer-failed"][..],
        ),
        (Fault::Die { after: 3000 }, &["peer-unreachable", "transfer-failed"]),
        (Fault::Corrupt { at: 3000 }, &["checksum-mismatch", "transfer-failed"]),
        (Fault::Stall { after: 3000 }, &["deadline-exceeded"]),
    ] {
        let behind = Behind::new();
        let mut start = Start::new(config(&[]), 16);
        start.movers = vec![behind.clone()];
        let (mut p, mut d) = (TestEngine::start(start).unwrap(), engine(&[], 16));
        let prompt = tokens(7, 180);
        d.step();
        let reservation = admit(&d, &question("s", 0, 180, 180, 1, 1), "seed");
        let turn = p.arrive("s", &prompt, 0, None, Some(placement(1))).unwrap();
        p.finish(turn, &[]);
        behind.proxy.inject(Some(fault));
        let deadline = if matches!(fault, Fault::Stall { .. }) {
            700
        } else {
            20_000
        };
        let answer = import(&d, "s", &order(reservation, 1, &p, deadline));
        let answer = answered(&mut d, answer);
        assert!(codes.contains(&code(&answer)), "{fault:?}: {answer:?}");
        until("the import is gone", || {
            d.step();
            imports(&d) == 0
        });
        assert_eq!(compare(&mut d, "s", &prompt, reservation, 1), 0, "{fault:?}");
        until("the peer's lease is over", || leases(&p) == 0);
        assert!(p.drain() && d.drain(), "pages leaked after {fault:?}");
    }
}

#[test]
fn late_bytes_never_land_in_pages_given_to_another() {
    // F11, XFER-1, XFER-2: the read is on its way when its import is cancelled, and its pages get another session's KV.
    let behind = Behind::new();
    let mut start = Start::new(config(&[]), 16);
    start.movers = vec![behind.clone()];
    let (mut p, mut d) = (TestEngine::start(start).unwrap(), engine(&[], 16));
    let prompt = tokens(7, 180);
    let turn = p.arrive("s", &prompt, 0, None, Some(placement(1))).unwrap();
    p.finish(turn, &[]);
    behind.proxy.inject(Some(Fault::Delay {
        pause: Duration::from_millis(80),
    }));
    d.step();
    let reservation = admit(&d, &question("s", 0, 180, 180, 1, 1), "seed");
    let answer = import(&d, "s", &order(reservation, 1, &p, 20_000));
    until("the pull runs", || {
        d.step();
        transfers(&d)["imports"][0]["phase"] == "pulling"
    });
    std::thread::sleep(Duration::from_millis(20));
    // The turn arrives before its import is over: the import is dropped, its pages come back with the next poll.
    let mut turn = d
        .arrive("s", &prompt, 1, Some(reservation), Some(placement(1)))
        .unwrap();
    assert_eq!(code(&answered(&mut d, answer)), "cancelled");
    assert_eq!(d.free_pages(), 256, "the landing pages are free");
    let other = tokens(9, 180);
    let mut another = d.arrive("another", &other, 1, None, None).unwrap();
    d.prefill(&mut another, 180);
    let right = true_kv(&other, d.arena().layout().token_bytes());
    assert!(d.bytes(&another) == right);
    std::thread::sleep(Duration::from_millis(400));
    assert!(d.bytes(&another) == right, "bytes of a cancelled read landed");
    d.finish(another, &[1]);
    d.prefill(&mut turn, 180);
    d.finish(turn, &[1]);
    assert!(p.drain() && d.drain());
}

#[test]
fn a_lease_revoked_after_the_last_byte_was_sent_is_not_committed() {
    // XFER-3, OWN-7: every byte arrives, and yet the exporter has rewritten the session meanwhile.
    let behind = Behind::new();
    let mut start = Start::new(config(&[]), 16);
    start.movers = vec![behind.clone()];
    let (mut p, mut d) = (TestEngine::start(start).unwrap(), engine(&[], 16));
    let prompt = tokens(7, 64);
    let turn = p.arrive("s", &prompt, 0, None, Some(placement(1))).unwrap();
    p.finish(turn, &[]);
    p.step();
    behind.proxy.inject(Some(Fault::Delay {
        pause: Duration::from_millis(200),
    }));
    d.step();
    let reservation = admit(&d, &question("s", 0, 64, 64, 1, 1), "seed");
    let answer = import(&d, "s", &order(reservation, 1, &p, 20_000));
    until("the pull runs", || {
        d.step();
        transfers(&d)["imports"][0]["phase"] == "pulling"
    });
    // The bytes have left the exporter and are on their way.
    std::thread::sleep(Duration::from_millis(100));
    p.run("s", &tokens(8, 64), &[1]).unwrap();
    let answer = answered(&mut d, answer);
    assert!(
        ["lease-revoked", "lease-unknown"].contains(&code(&answer)),
        "{answer:?}"
    );
    assert!(
        answer.1["error"]["message"].as_str().unwrap().contains("peer "),
        "refused by the peer itself: {answer:?}"
    );
    assert_eq!(compare(&mut d, "s", &prompt, reservation, 1), 0);
    assert!(p.drain() && d.drain());
}

#[test]
fn a_broken_control_connection_is_made_again() {
    // F15: one transient error never turns a healthy pair away for good.
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    let control = Proxy::start(p.engine().peer_listen()).unwrap();
    for n in 1..=3 {
        let session = format!("s{n}");
        let prompt = tokens(n, 64);
        d.step();
        let turn = p.arrive(&session, &prompt, 0, None, Some(placement(n.into()))).unwrap();
        p.finish(turn, &[]);
        let reservation = admit(&d, &question(&session, 0, 64, 64, n.into(), n.into()), "seed");
        let address = control.endpoint().parse().unwrap();
        let order = order_from(reservation, n.into(), address, p.engine().incarnation(), 20_000);
        let answer = import(&d, &session, &order);
        let (status, body) = answered(&mut d, answer);
        assert_eq!(status, 200, "{body}");
        compare(&mut d, &session, &prompt, reservation, n.into());
        control.cut();
    }
    assert!(p.drain() && d.drain());
}

#[test]
fn an_older_placement_is_refused() {
    // SES-4: the router that asks does not know that the session has moved on.
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    d.step();
    let prompt = tokens(7, 64);
    let turn = p.arrive("s", &prompt, 0, None, Some(placement(5))).unwrap();
    p.finish(turn, &[]);
    p.step();
    let reservation = admit(&d, &question("s", 0, 64, 64, 3, 1), "seed");
    let answer = import(&d, "s", &order(reservation, 3, &p, 5000));
    let answer = answered(&mut d, answer);
    assert_eq!((answer.0, code(&answer)), (409, "stale-epoch"), "{answer:?}");
    assert!(p.drain() && d.drain());
}

#[test]
fn another_process_at_the_address_is_refused() {
    // SES-4, F16.
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    d.step();
    let turn = p.arrive("s", &tokens(7, 64), 0, None, Some(placement(1))).unwrap();
    p.finish(turn, &[]);
    let reservation = admit(&d, &question("s", 0, 64, 64, 1, 1), "seed");
    let former = order_from(reservation, 1, p.engine().peer_listen(), Incarnation(0xdead), 5000);
    let answer = import(&d, "s", &former);
    let answer = answered(&mut d, answer);
    assert_eq!((answer.0, code(&answer)), (409, "stale-incarnation"), "{answer:?}");
    // The same reservation can be served by the process that is really there.
    let answer = import(&d, "s", &order(reservation, 1, &p, 20_000));
    assert_eq!(answered(&mut d, answer).0, 200);
    assert!(p.drain() && d.drain());
}

#[test]
fn a_turn_that_never_arrives_is_given_up_at_the_deadline() {
    // XFER-7.
    let (p, mut d) = (engine(&[], 16), engine(&[], 16));
    d.step();
    let reservation = admit(&d, &question("s", 0, 64, 64, 1, 1), "seed");
    let answer = import(&d, "s", &order(reservation, 1, &p, 400));
    let answer = answered(&mut d, answer);
    assert_eq!((answer.0, code(&answer)), (504, "deadline-exceeded"), "{answer:?}");
    until("the import is gone", || {
        d.step();
        imports(&d) == 0
    });
    assert!(d.drain());
}

#[test]
fn a_silent_peer_is_given_up_at_the_deadline() {
    // F12: it accepts the connection and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut d = engine(&[], 16);
    d.step();
    let reservation = admit(&d, &question("s", 0, 64, 64, 1, 1), "seed");
    let order = order_from(reservation, 1, silent.local_addr().unwrap(), Incarnation(1), 400);
    let answer = import(&d, "s", &order);
    let answer = answered(&mut d, answer);
    assert_eq!((answer.0, code(&answer)), (504, "deadline-exceeded"), "{answer:?}");
    assert!(d.drain());
}

#[test]
fn a_peer_that_is_not_there_is_unreachable() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut d = engine(&[], 16);
    d.step();
    let reservation = admit(&d, &question("s", 0, 64, 64, 1, 1), "seed");
    let answer = import(&d, "s", &order_from(reservation, 1, address, Incarnation(1), 5000));
    let answer = answered(&mut d, answer);
    assert_eq!((answer.0, code(&answer)), (502, "peer-unreachable"), "{answer:?}");
    assert!(d.drain());
}

#[test]
fn a_flush_ends_imports_and_leases() {
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    let (turn, _, answer, _) = mid_pull(&mut p, &mut d);
    d.flush();
    let answer = answered(&mut d, answer);
    assert_eq!(code(&answer), "cancelled", "{answer:?}");
    until("the peer's lease is over", || leases(&p) == 0);
    p.abort(turn);
    assert!(p.drain() && d.drain());
}

#[test]
fn a_stopped_module_touches_no_memory_and_answers_nobody() {
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    let (turn, _, answer, _) = mid_pull(&mut p, &mut d);
    d.engine().shutdown(Duration::from_secs(2));
    assert!(answer.join().unwrap().is_err() || Client::connect(d.engine().listen()).is_err());
    p.abort(turn);
    p.engine().shutdown(Duration::from_secs(2));
    p.engine().shutdown(Duration::from_secs(2));
    assert!(p.drain(), "the machine still answers its engine");
}
