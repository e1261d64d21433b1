//! MIG-1..3: a session moves between workers with one owner at every instant, also when answers get lost or peers die.

mod support;

use std::time::Duration;

use kvc_engine_ext::harness::{Start, TestEngine};
use kvc_proto::{
    id::{Incarnation, ReservationId},
    wire::admit::{ADMIT_PATH, ImportRequest},
    worker::Token,
};
use kvc_rdma::fault::{Fault, Proxy};
use serde_json::{Value, json};
use support::*;

/// A turn of a session that this worker owns under placement 1; gives the history with what is committed of the answer.
fn own(worker: &mut TestEngine, session: &str, seed: u32, n: usize) -> Vec<Token> {
    worker.step();
    let mut history = tokens(seed, n);
    let reservation = admit(worker, &question(session, 0, n, n, 1, seed.into()), "seed");
    let turn = worker
        .arrive(session, &history, 4, Some(reservation), Some(placement(1)))
        .unwrap();
    worker.finish(turn, &[1, 2, 3]);
    worker.step();
    history.extend([1, 2]);
    history
}

/// The next turn at its owner reuses all but the last page, byte for byte.
fn goes_on(worker: &mut TestEngine, session: &str, history: &[Token], placed: u64, request: u64) {
    worker.step();
    let mut prompt = history.to_vec();
    prompt.extend([5, 6, 7]);
    let asked = question(session, 1, prompt.len(), 3, placed, request);
    let reservation = admit(worker, &asked, "direct");
    let reused = compare(worker, session, &prompt, reservation, placed) as usize;
    assert!(reused + 16 > history.len(), "{reused} of {}", history.len());
}

/// How many of these workers own the session (MIG-3).
fn owners(workers: &[&TestEngine], session: &str) -> usize {
    let owns = |w: &&&TestEngine| {
        let view = view(w, session);
        view["standing"] == "owner" && view["epoch"].is_object()
    };
    workers.iter().filter(owns).count()
}

fn phase(worker: &TestEngine) -> String {
    transfers(worker)["imports"][0]["phase"]
        .as_str()
        .unwrap_or_default()
        .into()
}

/// A source whose answers can be stalled, a target that has the whole copy and asks again and again, for the source has
/// granted a turn. Releasing `key(2)` lets the source hand over.
struct Asking {
    source: TestEngine,
    target: TestEngine,
    control: Proxy,
    answer: Answer,
    history: Vec<Token>,
}

impl Asking {
    fn start(deadline_ms: u32) -> Self {
        let (mut source, mut target) = (engine(&[], 16), engine(&[("handover_deadline_ms", "300")], 16));
        let history = own(&mut source, "s", 1, 100);
        admit(&source, &question("s", 1, 110, 8, 1, 2), "direct");
        let control = Proxy::start(source.engine().peer_listen()).unwrap();
        let order = ImportRequest {
            peer: control.endpoint(),
            ..move_order(2, &source, deadline_ms)
        };
        let answer = import(&target, "s", &order);
        until("the target asks", || {
            target.step();
            phase(&target) == "handing-over"
        });
        Self {
            source,
            target,
            control,
            answer,
            history,
        }
    }

    /// From here on the source hands over.
    fn release(&self) {
        let released = client(&self.source)
            .post("/kvc/v1/sessions/s/release", &json!({"request": key(2)}))
            .unwrap();
        assert_eq!(released.1["released"], true);
    }

    fn granted(&self) {
        until("the source has handed over", || {
            view(&self.source, "s")["standing"] == "moved"
        });
    }
}

fn withdraw(worker: &TestEngine, session: &str, placed: u64) -> (u16, Value) {
    let request = json!({"placement": placement(placed), "incarnation": worker.engine().incarnation()});
    client(worker)
        .post(&format!("/kvc/v1/sessions/{session}/withdraw"), &request)
        .unwrap()
}

#[test]
fn an_idle_session_moves_and_goes_on() {
    // MIG-1, MIG-3.
    for (from, to) in [(16, 16), (16, 1), (1, 16)] {
        let (mut source, mut target) = (engine(&[], from), engine(&[], to));
        let history = own(&mut source, "s", 1, 150);
        let answer = import(&target, "s", &move_order(2, &source, 20_000));
        let (status, body) = answered(&mut target, answer);
        assert_eq!((status, &body["resident_tokens"]), (200, &json!(152)), "{body}");
        assert_eq!(body["pulled_tokens"], 152);
        let seen = view(&source, "s");
        assert_eq!(
            (&seen["standing"], &seen["state"]),
            (&json!("moved"), &json!("moved")),
            "{seen}"
        );
        assert_eq!(owners(&[&source, &target], "s"), 1);
        // The source says where to, and serves no turn of it.
        let refused = client(&source)
            .post(ADMIT_PATH, &question("s", 1, 160, 8, 1, 3))
            .unwrap()
            .1;
        assert_eq!(refused["reason"], "moved", "{refused}");
        let mut whereto = serde_json::to_value(peer(&target)).unwrap();
        whereto["placement"] = serde_json::to_value(placement(2)).unwrap();
        assert_eq!(refused["moved"], whereto);
        assert_eq!(seen["moved"], whereto);
        let mut late = history.clone();
        late.push(9);
        let why = source.arrive("s", &late, 4, None, Some(placement(1))).err().unwrap();
        assert_eq!(why.code.as_str(), "moved");
        assert_eq!(withdraw(&target, "s", 2).1["answer"], "owner");
        goes_on(&mut target, "s", &history, 2, 4);
        assert_eq!(metric(&source, "kvc_handed_over_total"), 1.0);
        assert_eq!(metric(&target, "kvc_taken_over_total"), 1.0);
        assert!(metric(&target, "kvc_handover_seconds_count") >= 1.0);
        until("the lease is over", || leases(&source) == 0);
        assert!(source.drain() && target.drain(), "pages leaked");
    }
}

#[test]
fn a_session_moves_while_a_turn_runs() {
    // MIG-1: the committed part is pulled while the turn runs, what it adds in another round.
    let (mut source, mut target) = (engine(&[], 16), engine(&[], 16));
    let mut history = own(&mut source, "s", 1, 100);
    history.extend(tokens(2, 60));
    let mut turn = source.arrive("s", &history, 4, None, Some(placement(1))).unwrap();
    source.prefill(&mut turn, 130);
    let answer = import(&target, "s", &move_order(2, &source, 20_000));
    until("the committed part is here", || {
        target.step();
        phase(&target) == "handing-over"
    });
    assert_eq!(owners(&[&source, &target], "s"), 1);
    assert_eq!(view(&source, "s")["standing"], "owner");
    source.finish(turn, &[1, 2, 3]);
    source.step();
    history.extend([1, 2]);
    // SES-3, MIG-1: until the rest is there the next turn is held back.
    until("the target is told that it is behind", || {
        metric(&source, "kvc_handovers_behind_total") > 0.0
    });
    let (status, body) = answered(&mut target, answer);
    assert_eq!((status, &body["resident_tokens"]), (200, &json!(164)), "{body}");
    let pulled = body["pulled_tokens"].as_u64().unwrap();
    assert!(
        (164..164 + 16).contains(&pulled),
        "only the rest was pulled again: {pulled}"
    );
    assert_eq!(metric(&target, "kvc_imports_by_total{kind=\"move\"}"), 2.0);
    assert_eq!(owners(&[&source, &target], "s"), 1);
    goes_on(&mut target, "s", &history, 2, 4);
    assert!(source.drain() && target.drain());
}

#[test]
fn a_slow_thread_ends_no_question_that_came_after_it() {
    // MIG-1: the pull's thread ends the lease, the engine's commits and asks, and the engine's is the faster one.
    let (mut source, mut target) = (engine(&[], 16), engine(&[], 16));
    let history = own(&mut source, "s", 1, 100);
    target.engine().lag(Duration::from_millis(30));
    let answer = import(&target, "s", &move_order(2, &source, 20_000));
    let (status, body) = answered(&mut target, answer);
    assert_eq!(status, 200, "{body}");
    target.engine().lag(Duration::ZERO);
    goes_on(&mut target, "s", &history, 2, 4);
    assert!(source.drain() && target.drain());
}

#[test]
fn a_target_one_step_behind_holds_the_next_turn_back() {
    // MIG-1: for a bounded time.
    let (mut source, mut target) = (engine(&[("handover_hold_ms", "500")], 16), engine(&[], 16));
    let mut history = own(&mut source, "s", 1, 100);
    history.extend(tokens(2, 10));
    let turn = source.arrive("s", &history, 4, None, Some(placement(1))).unwrap();
    let answer = import(&target, "s", &move_order(2, &source, 20_000));
    until("the target asks", || {
        target.step();
        phase(&target) == "handing-over"
    });
    source.finish(turn, &[1, 2, 3]);
    source.step();
    until("the target is behind", || {
        metric(&source, "kvc_handovers_behind_total") > 0.0
    });
    let ask = |request| {
        client(&source)
            .post(ADMIT_PATH, &question("s", 2, 120, 5, 1, request))
            .unwrap()
            .1
    };
    assert_eq!(ask(3)["reason"], "session-busy");
    until("the hold is over", || ask(4)["can_admit"] == true);
    client(&source)
        .post("/kvc/v1/sessions/s/release", &json!({"request": key(4)}))
        .unwrap();
    assert_eq!(answered(&mut target, answer).0, 200);
    assert_eq!(owners(&[&source, &target], "s"), 1);
    assert!(source.drain() && target.drain());
}

#[test]
fn a_lost_answer_is_asked_for_again() {
    // MIG-2: the same question gets the same answer.
    let mut move_ = Asking::start(20_000);
    move_.control.inject(Some(Fault::Stall { after: 0 }));
    move_.release();
    move_.granted();
    // The decision is made and its answer lost: nobody runs turns, nobody owns it twice.
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(owners(&[&move_.source, &move_.target], "s"), 0);
    assert_eq!(phase(&move_.target), "handing-over");
    move_.control.inject(None);
    let (status, body) = answered(&mut move_.target, move_.answer);
    assert_eq!(status, 200, "{body}");
    assert_eq!(owners(&[&move_.source, &move_.target], "s"), 1);
    assert!(metric(&move_.target, "kvc_handovers_total{answer=\"lost\"}") >= 1.0);
    goes_on(&mut move_.target, "s", &move_.history, 2, 9);
    assert!(move_.source.drain() && move_.target.drain());
}

#[test]
fn an_answer_that_comes_too_late_does_not_count() {
    // MIG-2: every answer is older than the hand-over deadline when it comes; the router gives up and withdraws.
    let mut move_ = Asking::start(20_000);
    move_.control.inject(Some(Fault::Delay {
        pause: Duration::from_millis(450),
    }));
    move_.release();
    move_.granted();
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(owners(&[&move_.source, &move_.target], "s"), 0);
    assert_eq!(withdraw(&move_.target, "s", 2).1, json!({"answer": "withdrawn"}));
    let answer = answered(&mut move_.target, move_.answer);
    assert_eq!(code(&answer), "cancelled", "{answer:?}");
    move_.control.inject(None);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(owners(&[&move_.source, &move_.target], "s"), 0, "withdrawn for good");
    assert_eq!(withdraw(&move_.target, "s", 2).1, json!({"answer": "withdrawn"}));
    let again = import(&move_.target, "s", &move_order(2, &move_.source, 5000));
    assert_eq!(code(&answered(&mut move_.target, again)), "stale-epoch");
    // Under a new number the source's copy serves: nothing is computed again.
    goes_on(&mut move_.source, "s", &move_.history, 3, 9);
    assert_eq!(owners(&[&move_.source, &move_.target], "s"), 1);
    assert!(move_.source.drain() && move_.target.drain());
}

#[test]
fn a_source_that_dies_with_its_answer_leaves_nobody_in_doubt() {
    // MIG-2: the target is asked first, and what it says holds.
    let mut move_ = Asking::start(2500);
    move_.control.inject(Some(Fault::Stall { after: 0 }));
    move_.release();
    move_.granted();
    drop(move_.source);
    let answer = answered(&mut move_.target, move_.answer);
    assert!(
        ["deadline-exceeded", "peer-unreachable"].contains(&code(&answer)),
        "{answer:?}"
    );
    until("the import is gone", || {
        move_.target.step();
        imports(&move_.target) == 0
    });
    assert_eq!(withdraw(&move_.target, "s", 2).1, json!({"answer": "withdrawn"}));
    assert_eq!(owners(&[&move_.target], "s"), 0);
    // Its copy is complete and serves under a new number.
    goes_on(&mut move_.target, "s", &move_.history, 3, 9);
    assert_eq!(owners(&[&move_.target], "s"), 1);
    assert!(move_.target.drain());
}

#[test]
fn a_source_that_dies_while_the_target_prepares_costs_only_the_move() {
    // MIG-2, XFER-7.
    let behind = Behind::new();
    let mut start = Start::new(config(&[]), 16);
    start.movers = vec![behind.clone()];
    let (mut source, mut target) = (TestEngine::start(start).unwrap(), engine(&[], 16));
    own(&mut source, "s", 1, 180);
    behind.proxy.inject(Some(Fault::Stall { after: 3000 }));
    let answer = import(&target, "s", &move_order(2, &source, 20_000));
    until("bytes are on their way", || {
        target.step();
        phase(&target) == "pulling"
    });
    behind.proxy.cut();
    drop(source);
    let answer = answered(&mut target, answer);
    assert!(
        ["peer-unreachable", "transfer-failed", "lease-revoked"].contains(&code(&answer)),
        "{answer:?}"
    );
    target.step();
    assert_eq!((view(&target, "s"), imports(&target)), (Value::Null, 0));
    assert_eq!(target.free_pages(), 256);
    assert!(target.drain());
}

#[test]
fn two_workers_move_sessions_to_each_other_at_once() {
    // Each waits for the other's lease and lands at the same time.
    let small = || {
        let mut start = Start::new(config(&[]), 16);
        start.pages = 40;
        TestEngine::start(start).unwrap()
    };
    let (mut a, mut b) = (small(), small());
    let of_a = own(&mut a, "a", 1, 250);
    let of_b = own(&mut b, "b", 2, 250);
    let to_b = import(&b, "a", &move_order(2, &a, 20_000));
    let to_a = import(&a, "b", &move_order(2, &b, 20_000));
    until("both are answered", || {
        a.step();
        b.step();
        to_a.is_finished() && to_b.is_finished()
    });
    for answer in [to_a, to_b] {
        let (status, body) = answer.join().unwrap().unwrap();
        assert_eq!((status, &body["resident_tokens"]), (200, &json!(252)), "{body}");
    }
    assert_eq!((owners(&[&a, &b], "a"), owners(&[&a, &b], "b")), (1, 1));
    goes_on(&mut b, "a", &of_a, 2, 5);
    goes_on(&mut a, "b", &of_b, 2, 6);
    assert!(a.drain() && b.drain());
}

#[test]
fn two_workers_that_import_the_same_session_from_each_other_leave_one_owner() {
    // MIG-3.
    let (mut a, mut b) = (engine(&[], 16), engine(&[], 16));
    let history = own(&mut a, "s", 1, 100);
    let to_b = import(&b, "s", &move_order(2, &a, 3000));
    let to_a = import(&a, "s", &move_order(3, &b, 3000));
    until("both are answered", || {
        a.step();
        b.step();
        to_a.is_finished() && to_b.is_finished()
    });
    let codes = [to_a, to_b].map(|answer| answer.join().unwrap().unwrap().0);
    assert_eq!(owners(&[&a, &b], "s"), 1, "{codes:?}");
    let owner = if view(&a, "s")["standing"] == "owner" {
        &mut a
    } else {
        &mut b
    };
    let placed = view(owner, "s")["epoch"]["placement"]["n"].as_u64().unwrap();
    goes_on(owner, "s", &history, placed, 7);
    assert!(a.drain() && b.drain());
}

#[test]
fn a_bad_order_is_refused_typed_and_changes_nothing_on_either_side() {
    // MIG-1, SES-4, XFER-7; the table of docs/spec.
    let (mut source, mut target) = (engine(&[], 16), engine(&[], 16));
    let history = own(&mut source, "s", 1, 100);
    // A prefill for others owns nothing.
    let turn = source.arrive("r", &tokens(9, 40), 0, None, Some(placement(1))).unwrap();
    source.finish(turn, &[]);
    source.step();
    target.step();
    let nobody = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let good = move_order(2, &source, 3000);
    let table = [
        ("unknown-session", "nobody", good.clone()),
        ("import-from-self", "s", move_order(2, &target, 3000)),
        ("stale-epoch", "s", move_order(1, &source, 3000)),
        ("stale-epoch", "s", move_order(0, &source, 3000)),
        ("not-owner", "r", good.clone()),
        (
            "peer-unreachable",
            "s",
            ImportRequest {
                peer: nobody.to_string(),
                ..good.clone()
            },
        ),
        (
            "stale-incarnation",
            "s",
            ImportRequest {
                incarnation: Incarnation(77),
                ..good.clone()
            },
        ),
        (
            "bad-request",
            "s",
            ImportRequest {
                reservation: Some(ReservationId(1)),
                ..good.clone()
            },
        ),
        ("unknown-session", "nobody", replica_order(1, &source, 3000)),
        ("stale-epoch", "s", replica_order(0, &source, 3000)),
    ];
    let before = (state(&source), state(&target));
    for (expected, session, order) in table {
        let answer = import(&target, session, &order);
        let answer = answered(&mut target, answer);
        assert_eq!(code(&answer), expected, "{session} {order:?}: {answer:?}");
        target.step();
        source.step();
        until("no lease is left", || leases(&source) == 0);
        assert_eq!((state(&source), state(&target)), before, "{session} {order:?}");
    }
    goes_on(&mut source, "s", &history, 1, 91);
    assert!(source.drain() && target.drain());
}

#[test]
fn a_target_without_room_or_with_an_import_refuses_and_the_source_stays_owner() {
    let (mut source, mut full) = (engine(&[], 16), {
        let mut start = Start::new(config(&[]), 16);
        start.pages = 8;
        TestEngine::start(start).unwrap()
    });
    let history = own(&mut source, "s", 1, 200);
    full.step();
    let before = (state(&source), state(&full));
    let answer = import(&full, "s", &move_order(2, &source, 5000));
    let answer = answered(&mut full, answer);
    assert!(["too-large", "no-d-capacity"].contains(&code(&answer)), "{answer:?}");
    full.step();
    until("no lease is left", || leases(&source) == 0);
    assert_eq!((state(&source), state(&full)), before);
    // One that imports already.
    let mut target = engine(&[], 16);
    let first = import(&target, "s", &move_order(2, &source, 20_000));
    until("it imports", || imports(&target) == 1);
    until("its lease is here", || phase(&target) == "landing");
    let before = state(&target);
    let second = import(&target, "s", &move_order(3, &source, 5000))
        .join()
        .unwrap()
        .unwrap();
    assert_eq!(code(&second), "import-running");
    assert_eq!(state(&target), before);
    // One that is to be emptied.
    let drain = client(&full).post("/kvc/v1/drain", &json!({})).unwrap();
    assert_eq!(drain.0, 200);
    let answer = import(&full, "s", &move_order(4, &source, 5000))
        .join()
        .unwrap()
        .unwrap();
    assert_eq!(code(&answer), "draining");
    assert_eq!(answered(&mut target, first).0, 200);
    goes_on(&mut target, "s", &history, 2, 9);
    assert!(source.drain() && target.drain() && full.drain());
}

#[test]
fn a_router_that_goes_away_ends_its_move() {
    // F14: before the hand-over the source stays the owner.
    let (mut source, mut target) = (engine(&[], 16), engine(&[], 16));
    let history = own(&mut source, "s", 1, 100);
    admit(&source, &question("s", 1, 110, 8, 1, 2), "direct");
    let order = serde_json::to_vec(&move_order(2, &source, 20_000)).unwrap();
    let mut stream = std::net::TcpStream::connect(target.engine().listen()).unwrap();
    let head = format!(
        "POST /kvc/v1/sessions/s/import HTTP/1.1\r\nhost: k\r\ncontent-length: {}\r\n\r\n",
        order.len()
    );
    std::io::Write::write_all(&mut stream, &[head.as_bytes(), &order].concat()).unwrap();
    until("the target asks", || {
        target.step();
        phase(&target) == "handing-over"
    });
    drop(stream);
    until("the import is gone", || {
        target.step();
        imports(&target) == 0
    });
    // Its last question may still wait at the source, for 100 ms, and would be granted by the release.
    let mut busy = -1.0;
    until("no question waits at the source", || {
        let before = std::mem::replace(&mut busy, metric(&source, "kvc_handovers_busy_total"));
        std::thread::sleep(Duration::from_millis(300));
        before == metric(&source, "kvc_handovers_busy_total")
    });
    let released = client(&source)
        .post("/kvc/v1/sessions/s/release", &json!({"request": key(2)}))
        .unwrap();
    assert_eq!(released.1["released"], true);
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!(view(&source, "s")["standing"], "owner");
    assert_eq!(view(&target, "s")["standing"], "replica");
    goes_on(&mut source, "s", &history, 1, 9);
    assert!(source.drain() && target.drain());
}
