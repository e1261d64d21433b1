//! What these tests share: settings, pairs of engines, the messages of a seed.
#![allow(dead_code, reason = "each test binary uses its part")]

mod behind;

#[allow(unused_imports, reason = "each test binary uses its part")]
pub use behind::Behind;

use std::{
    env,
    net::SocketAddr,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use kvc_engine_ext::{
    Config,
    harness::{Client, Start, TestEngine, TestTurn, true_kv},
};
use kvc_proto::{
    id::{Incarnation, Placement, RequestKey, ReservationId, RouterId, SessionId, StoreId},
    wire::admit::{ADMIT_PATH, AdmitRequest, ImportRequest, PeerRef, Source},
    worker::Token,
};
use serde_json::Value;

/// Settings over the defaults; checksums are on in tests (XFER-8).
pub fn config(settings: &[(&str, &str)]) -> Config {
    let mut all = vec![("checksum".to_owned(), "true".to_owned())];
    all.extend(settings.iter().map(|(k, v)| (k.to_string(), v.to_string())));
    Config::load(&all, []).expect("settings")
}

/// An engine with these settings. In the RDMA guest (scripts/rdma/test.sh) its KV moves over verbs and no other way.
pub fn engine(settings: &[(&str, &str)], page_tokens: u32) -> TestEngine {
    let mut settings = settings.to_vec();
    if env::var_os("KVC_RDMA_GUEST").is_some() {
        settings.push(("force_rdma", "true"));
    }
    TestEngine::start(Start::new(config(&settings), page_tokens)).expect("an engine")
}

/// `n` tokens that are different for each `seed`.
pub fn tokens(seed: u32, n: usize) -> Vec<Token> {
    (0..n as u32).map(|i| seed * 100_000 + i * 7 % 5000).collect()
}

/// Placement `n` of the only store.
pub fn placement(n: u64) -> Placement {
    Placement { n, store: StoreId(1) }
}

/// The `n`th request of the only router.
pub fn key(n: u64) -> RequestKey {
    RequestKey {
        router: RouterId(1),
        request: n,
        attempt: 0,
    }
}

/// An admission question for a session's turn.
pub fn question(session: &str, turn: u32, input: usize, append: usize, placed: u64, request: u64) -> AdmitRequest {
    AdmitRequest {
        session_id: SessionId::new(session).unwrap(),
        turn,
        input_tokens: input as u32,
        append_tokens: append as u32,
        max_new_tokens: Some(8),
        estimated: false,
        via: None,
        placement: Some(placement(placed)),
        incarnation: None,
        backup: None,
        key: key(request),
    }
}

/// Asks, expects the grant, gives the reservation.
pub fn admit(engine: &TestEngine, question: &AdmitRequest, mode: &str) -> ReservationId {
    let (status, answer) = client(engine).post(ADMIT_PATH, question).unwrap();
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["mode"], mode, "{answer}");
    ReservationId(answer["reservation"].as_u64().unwrap())
}

/// A connection to the worker's listener.
pub fn client(engine: &TestEngine) -> Client {
    Client::connect(engine.engine().listen()).unwrap()
}

/// The order to pull from `peer`.
pub fn order(reservation: ReservationId, placed: u64, peer: &TestEngine, deadline_ms: u32) -> ImportRequest {
    order_from(
        reservation,
        placed,
        peer.engine().peer_listen(),
        peer.engine().incarnation(),
        deadline_ms,
    )
}

/// [`order`] with the peer's parts.
pub fn order_from(
    reservation: ReservationId,
    placed: u64,
    peer: SocketAddr,
    incarnation: Incarnation,
    deadline_ms: u32,
) -> ImportRequest {
    ImportRequest {
        reservation: Some(reservation),
        placement: placement(placed),
        source: Source::Prefill,
        peer: peer.to_string(),
        incarnation,
        deadline_ms,
    }
}

/// The order to take the session over from its owner (MIG-1).
pub fn move_order(placed: u64, owner: &TestEngine, deadline_ms: u32) -> ImportRequest {
    ImportRequest {
        reservation: None,
        source: Source::Owner,
        ..order(ReservationId(0), placed, owner, deadline_ms)
    }
}

/// The order to reseed from what `holder` has committed (SYNC-2).
pub fn reseed_order(reservation: ReservationId, placed: u64, holder: &TestEngine, deadline_ms: u32) -> ImportRequest {
    ImportRequest {
        source: Source::Replica,
        ..order(reservation, placed, holder, deadline_ms)
    }
}

/// The order to become or follow as a replica now (SYNC-1).
pub fn replica_order(placed: u64, holder: &TestEngine, deadline_ms: u32) -> ImportRequest {
    ImportRequest {
        reservation: None,
        ..reseed_order(ReservationId(0), placed, holder, deadline_ms)
    }
}

/// The worker as others name it.
pub fn peer(engine: &TestEngine) -> PeerRef {
    PeerRef {
        peer: engine.engine().peer_listen().to_string(),
        incarnation: engine.engine().incarnation(),
    }
}

/// `GET /kvc/v1/sessions/{id}`; null if it is not known.
pub fn view(engine: &TestEngine, session: &str) -> Value {
    match client(engine).get(&format!("/kvc/v1/sessions/{session}")).unwrap() {
        (200, view) => view,
        _ => Value::Null,
    }
}

/// A metric's value: the sample with exactly this name and labels.
pub fn metric(engine: &TestEngine, sample: &str) -> f64 {
    let page = client(engine).get("/metrics").unwrap().1;
    let lines = page.as_str().unwrap().lines();
    lines
        .filter_map(|line| line.rsplit_once(' '))
        .find(|(name, _)| *name == sample)
        .map_or(0.0, |(_, value)| value.parse().unwrap())
}

/// The code of an error answer.
pub fn code(answer: &(u16, Value)) -> &str {
    answer.1["error"]["code"]
        .as_str()
        .unwrap_or_else(|| panic!("no error: {answer:?}"))
}

/// Everything a request could change: what the worker is and holds, and its ledger. Times are left out.
pub fn state(engine: &TestEngine) -> Value {
    let mut client = client(engine);
    let mut get = |path: &str| client.get(path).unwrap().1;
    let (info, mut sessions, mut transfers) = (get("/kvc/v1/info"), get("/kvc/v1/sessions"), get("/kvc/v1/transfers"));
    for view in sessions["sessions"].as_array_mut().unwrap() {
        view["idle_ms"] = Value::Null;
    }
    for lease in transfers["leases"].as_array_mut().unwrap() {
        lease["expires_ms"] = Value::Null;
    }
    serde_json::json!([info, sessions, transfers])
}

/// The import's answer, when it comes.
pub type Answer = JoinHandle<std::io::Result<(u16, Value)>>;

/// Sends the order on a connection of its own.
pub fn import(engine: &TestEngine, session: &str, order: &ImportRequest) -> Answer {
    let (mut client, path, order) = (
        client(engine),
        format!("/kvc/v1/sessions/{session}/import"),
        order.clone(),
    );
    thread::spawn(move || client.post(&path, &order))
}

/// Turns the engine's loop until the import is answered.
pub fn answered(engine: &mut TestEngine, answer: Answer) -> (u16, Value) {
    until("the import is answered", || {
        engine.step();
        answer.is_finished()
    });
    answer.join().unwrap().unwrap()
}

/// Polls a condition; each wait has a deadline.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "not within 20 s: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// `GET /kvc/v1/transfers`.
pub fn transfers(engine: &TestEngine) -> Value {
    client(engine).get("/kvc/v1/transfers").unwrap().1
}

/// Tokens that the only running import has pulled.
pub fn pulled(engine: &TestEngine) -> u64 {
    transfers(engine)["imports"][0]["pulled_tokens"].as_u64().unwrap_or(0)
}

/// Live leases that peers hold.
pub fn leases(engine: &TestEngine) -> usize {
    transfers(engine)["leases"].as_array().unwrap().len()
}

/// Running imports.
pub fn imports(engine: &TestEngine) -> usize {
    transfers(engine)["imports"].as_array().unwrap().len()
}

/// Runs the turn that the import was for and compares every reused position with the true KV (T1); gives how many.
pub fn compare(
    engine: &mut TestEngine,
    session: &str,
    prompt: &[Token],
    reservation: ReservationId,
    placed: u64,
) -> u32 {
    let mut turn = engine
        .arrive(session, prompt, 4, Some(reservation), Some(placement(placed)))
        .unwrap();
    engine.begin(&mut turn);
    let reused = turn.reused;
    compare_reused(engine, &turn, prompt);
    engine.finish(turn, &[1, 2, 3]);
    engine.step();
    reused
}

/// Compares every reused position of a turn that has begun with the true KV.
pub fn compare_reused(engine: &TestEngine, turn: &TestTurn, prompt: &[Token]) {
    let bytes = engine.arena().layout().token_bytes();
    let (held, right) = (engine.bytes(turn), true_kv(prompt, bytes));
    for (at, (held, right)) in held.iter().zip(&right).enumerate() {
        assert!(held == right, "position {at} holds other KV");
    }
    // Negative control: two swapped positions would be seen.
    if turn.reused >= 2 {
        assert_ne!(held[0], right[1]);
    }
}
