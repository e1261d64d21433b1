//! How long a ready turn waits while its session changes hands, against the size of the context (MIG-1). Two workers in one
//! process, tcp over loopback; the session goes back and forth.
//!
//! `cargo run --release -p kvc-engine-ext --example handover_bench`

use std::{
    thread,
    time::{Duration, Instant},
};

use kvc_engine_ext::{
    Config,
    harness::{Client, Start, TestEngine},
};
use kvc_proto::{
    id::{Placement, StoreId},
    wire::admit::{ImportRequest, Source},
    worker::Token,
};
use serde_json::Value;

const SIZES: [u32; 4] = [1 << 10, 4 << 10, 16 << 10, 32 << 10];
const MOVES: u64 = 60;
/// New tokens of a turn.
const APPEND: u32 = 64;

fn main() {
    println!("| context, tokens | target prepared: p50 | p99 | one turn behind: p50 | p99 |");
    println!("|---:|---:|---:|---:|---:|");
    for size in SIZES {
        let prepared = figures(size, false);
        let behind = figures(size, true);
        println!(
            "| {size} | {} | {} | {} | {} |",
            prepared.0, prepared.1, behind.0, behind.1
        );
    }
}

/// p50 and p99 of the gap, as text.
fn figures(size: u32, behind: bool) -> (String, String) {
    let worker = || {
        let mut start = Start::new(Config::defaults().expect("defaults"), 16);
        start.pages = (size + MOVES as u32 * (APPEND + 4)) / 16 * 2 + 64;
        TestEngine::start(start).expect("a worker")
    };
    let mut workers = [worker(), worker()];
    let mut history: Vec<Token> = (0..size).map(|i| i * 7 % 5000).collect();
    let turn = workers[0]
        .arrive("s", &history, 4, None, Some(placement(1)))
        .expect("a turn");
    workers[0].finish(turn, &[1, 2]);
    history.push(1);
    workers.iter_mut().for_each(TestEngine::step);
    let mut gaps: Vec<Duration> = (0..MOVES)
        .map(|n| {
            let [a, b] = &mut workers;
            let (owner, target) = if n % 2 == 0 { (a, b) } else { (b, a) };
            if behind {
                let append = history.len() as u32..history.len() as u32 + APPEND;
                history.extend(append);
                let mut turn = owner
                    .arrive("s", &history, 4, None, Some(placement(n + 1)))
                    .expect("a turn");
                owner.prefill(&mut turn, history.len());
                let moved = order(owner, target, n + 2);
                let began = Instant::now();
                owner.finish(turn, &[1, 2]);
                history.push(1);
                gap(target, moved, began)
            } else {
                // A turn that ends without result leaves the target's copy complete.
                let prompt: Vec<Token> = history.iter().copied().chain([7; 8]).collect();
                let turn = owner
                    .arrive("s", &prompt, 4, None, Some(placement(n + 1)))
                    .expect("a turn");
                let moved = order(owner, target, n + 2);
                let began = Instant::now();
                owner.abort(turn);
                gap(target, moved, began)
            }
        })
        .collect();
    gaps.sort_unstable();
    let at = |share: usize| format!("{:.2} ms", gaps[(gaps.len() - 1) * share / 100].as_secs_f64() * 1e3);
    (at(50), at(99))
}

type Moved = thread::JoinHandle<(Instant, u16, Value)>;

/// Orders the move and waits until the target asks for the hand-over.
fn order(owner: &TestEngine, target: &mut TestEngine, pending: u64) -> Moved {
    let order = ImportRequest {
        reservation: None,
        placement: placement(pending),
        source: Source::Owner,
        peer: owner.engine().peer_listen().to_string(),
        incarnation: owner.engine().incarnation(),
        deadline_ms: 20_000,
    };
    let mut client = Client::connect(target.engine().listen()).expect("a connection");
    let moved = thread::spawn(move || {
        let (status, body) = client.post("/kvc/v1/sessions/s/import", &order).expect("an answer");
        (Instant::now(), status, body)
    });
    let mut looking = Client::connect(target.engine().listen()).expect("a connection");
    loop {
        target.step();
        let transfers = looking.get("/kvc/v1/transfers").expect("transfers").1;
        if transfers["imports"][0]["phase"] == "handing-over" {
            return moved;
        }
        assert!(!moved.is_finished(), "{:?}", moved.join());
    }
}

/// From the turn's end until the router hears that the target owns the session; the target's loop turns like an idle engine's.
fn gap(target: &mut TestEngine, moved: Moved, began: Instant) -> Duration {
    while !moved.is_finished() {
        target.step();
        thread::sleep(Duration::from_micros(200));
    }
    let (ended, status, body) = moved.join().expect("no panic");
    assert_eq!(status, 200, "{body}");
    ended.saturating_duration_since(began)
}

fn placement(n: u64) -> Placement {
    Placement { n, store: StoreId(1) }
}
