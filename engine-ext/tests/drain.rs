//! MIG-4: a worker is emptied while it finishes what runs.

mod support;

use std::{thread, time::Duration};

use kvc_engine_ext::harness::TestEngine;
use kvc_proto::{wire::admit::ADMIT_PATH, worker::Token};
use serde_json::{Value, json};
use support::*;

fn own(worker: &mut TestEngine, session: &str, n: u32) -> Vec<Token> {
    worker.step();
    let mut history = tokens(n, 80);
    let reservation = admit(worker, &question(session, 0, 80, 80, 1, n.into()), "seed");
    let turn = worker
        .arrive(session, &history, 4, Some(reservation), Some(placement(1)))
        .unwrap();
    worker.finish(turn, &[1, 2, 3]);
    worker.step();
    history.extend([1, 2]);
    history
}

fn drain(worker: &TestEngine, body: Value) -> Answer {
    let mut client = client(worker);
    thread::spawn(move || client.post("/kvc/v1/drain", &body))
}

fn said(answer: Answer) -> Value {
    let (status, body) = answer.join().unwrap().unwrap();
    assert_eq!(status, 200, "{body}");
    body
}

#[test]
fn an_empty_worker_is_drained_at_once_and_takes_turns_again_when_told() {
    // ADM-12.
    let mut worker = engine(&[], 16);
    worker.step();
    let answer = said(drain(&worker, json!({"deadline_ms": 20_000})));
    assert_eq!(
        answer,
        json!({"drained": true, "owned": 0, "turns": 0, "transfers": 0, "moved": 0})
    );
    assert_eq!(client(&worker).get("/kvc/v1/info").unwrap().1["draining"], true);
    assert_eq!(metric(&worker, "kvc_draining"), 1.0);
    let ask = |request| {
        client(&worker)
            .post(ADMIT_PATH, &question("s", 0, 40, 40, 1, request))
            .unwrap()
            .1
    };
    assert_eq!(ask(1)["reason"], "draining");
    said(drain(&worker, json!({"draining": false})));
    assert_eq!(client(&worker).get("/kvc/v1/info").unwrap().1["draining"], false);
    assert_eq!(ask(2)["mode"], "seed");
}

#[test]
fn a_drain_ends_when_every_session_has_moved_and_every_turn_is_over() {
    let (mut full, mut target) = (engine(&[], 16), engine(&[], 16));
    let histories: Vec<_> = (1..=3).map(|n| own(&mut full, &format!("s{n}"), n)).collect();
    let mut prompt = histories[2].clone();
    prompt.extend(tokens(7, 20));
    let turn = full.arrive("s3", &prompt, 4, None, Some(placement(1))).unwrap();
    let waiting = drain(&full, json!({"deadline_ms": 20_000}));
    until("it drains", || full.engine().info().draining);
    // A resident session's next turn is refused here too; it goes where the session goes.
    let refused = client(&full)
        .post(ADMIT_PATH, &question("s1", 1, 90, 8, 1, 50))
        .unwrap()
        .1;
    assert_eq!(refused["reason"], "draining", "{refused}");
    for n in 1..=2 {
        let answer = import(&target, &format!("s{n}"), &move_order(2, &full, 20_000));
        assert_eq!(answered(&mut target, answer).0, 200);
    }
    thread::sleep(Duration::from_millis(250));
    assert!(!waiting.is_finished(), "a turn runs and a session is left");
    let last = import(&target, "s3", &move_order(2, &full, 20_000));
    for _ in 0..20 {
        target.step();
        thread::sleep(Duration::from_millis(1));
    }
    full.finish(turn, &[1, 2, 3]);
    full.step();
    assert_eq!(answered(&mut target, last).0, 200);
    let answer = said(waiting);
    assert_eq!(
        answer,
        json!({"drained": true, "owned": 0, "turns": 0, "transfers": 0, "moved": 3})
    );
    for n in 1..=3 {
        assert_eq!(view(&target, &format!("s{n}"))["standing"], "owner");
    }
    assert!(full.drain() && target.drain());
}

#[test]
fn a_drain_says_at_its_deadline_what_is_left() {
    // XFER-7.
    let mut worker = engine(&[], 16);
    own(&mut worker, "s", 1);
    let answer = said(drain(&worker, json!({"deadline_ms": 150})));
    assert_eq!(
        answer,
        json!({"drained": false, "owned": 1, "turns": 0, "transfers": 0, "moved": 0})
    );
    let at_once = said(drain(&worker, json!({})));
    assert_eq!((&at_once["drained"], &at_once["owned"]), (&json!(false), &json!(1)));
    assert!(worker.drain());
}

#[test]
fn ending_a_drain_ends_the_wait_for_it() {
    let mut worker = engine(&[], 16);
    own(&mut worker, "s", 1);
    let waiting = drain(&worker, json!({"deadline_ms": 20_000}));
    until("it drains", || worker.engine().info().draining);
    said(drain(&worker, json!({"draining": false})));
    assert_eq!(said(waiting)["drained"], false);
    assert!(worker.drain());
}

#[test]
fn a_turn_that_cannot_wait_is_reseeded_from_the_draining_copy() {
    // SYNC-2, MIG-4: refused here, its KV is taken along.
    let (mut full, mut target) = (engine(&[], 16), engine(&[], 16));
    let mut history = own(&mut full, "s", 1);
    said(drain(&full, json!({})));
    history.extend(tokens(3, 20));
    target.step();
    let reservation = admit(&target, &question("s", 1, history.len(), 20, 2, 3), "reseed");
    let answer = import(&target, "s", &reseed_order(reservation, 2, &full, 20_000));
    let (status, body) = answered(&mut target, answer);
    assert_eq!((status, &body["pulled_tokens"]), (200, &json!(82)), "{body}");
    assert!(compare(&mut target, "s", &history, reservation, 2) >= 80);
    until("the lease is over", || leases(&full) == 0);
    assert_eq!(said(drain(&full, json!({"deadline_ms": 5000})))["drained"], true);
    assert!(full.drain() && target.drain());
}
