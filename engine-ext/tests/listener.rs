//! T9: bad input on every endpoint gets 4xx with code and message, and changes nothing; ADM-11: answers never wait for the
//! engine's loop.

mod support;

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use kvc_engine_ext::harness::TestEngine;
use kvc_proto::wire::admit::ADMIT_PATH;
use serde_json::{Value, json};
use support::*;

fn good() -> Value {
    json!({"session_id": "s", "turn": 0, "input_tokens": 100, "append_tokens": 100, "max_new_tokens": 8,
           "router": "00000000000000aa", "request": 1, "attempt": 0})
}

fn with(field: &str, value: Value) -> Value {
    let mut body = good();
    body[field] = value;
    body
}

#[test]
fn bad_admission_questions_are_named_and_change_nothing() {
    // ADM-10.
    let mut engine = engine(&[], 16);
    engine.step();
    let before = state(&engine);
    let long = "x".repeat(257);
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"".to_vec(), "body"),
        (b"{".to_vec(), "body"),
        (b"[]".to_vec(), "body"),
        (b"\xff\xfe".to_vec(), "body"),
        (b"{}".to_vec(), "session_id"),
        (with("session_id", json!("")).to_string().into(), "session_id"),
        (with("session_id", json!(long)).to_string().into(), "session_id"),
        (with("session_id", json!("a\u{1}")).to_string().into(), "session_id"),
        (with("session_id", json!(7)).to_string().into(), "body"),
        (with("input_tokens", json!(0)).to_string().into(), "input_tokens"),
        (with("input_tokens", json!(-1)).to_string().into(), "body"),
        (with("input_tokens", json!(1.5)).to_string().into(), "body"),
        (with("input_tokens", json!(u64::MAX)).to_string().into(), "body"),
        (with("input_tokens", json!(u32::MAX)).to_string().into(), "input_tokens"),
        (with("append_tokens", json!(101)).to_string().into(), "append_tokens"),
        (
            with("max_new_tokens", json!(u32::MAX)).to_string().into(),
            "max_new_tokens",
        ),
        (with("via", json!("decode")).to_string().into(), "body"),
        (with("router", json!("xyz")).to_string().into(), "body"),
        (with("placement", json!({"n": 1})).to_string().into(), "store"),
        (with("incarnation", json!("1")).to_string().into(), "body"),
        (
            with("backup", json!({"peer": "127.0.0.1:1"})).to_string().into(),
            "incarnation",
        ),
        (
            with(
                "backup",
                json!({"peer": "localhost:1", "incarnation": "0000000000000001"}),
            )
            .to_string()
            .into(),
            "backup.peer",
        ),
        (vec![b' '; 20_000], "larger than"),
        (format!("{}{}", "[".repeat(5000), "]".repeat(5000)).into_bytes(), "body"),
    ];
    let mut asked = client(&engine);
    for (body, part) in cases {
        let mut one = client(&engine);
        let (status, answer) = one.send("POST", ADMIT_PATH, &body).unwrap();
        let shown = String::from_utf8_lossy(&body[..body.len().min(80)]).into_owned();
        assert_eq!(status, 400, "{shown}: {answer}");
        assert_eq!(answer["error"]["code"], "bad-request", "{shown}");
        assert!(
            answer["error"]["message"].as_str().unwrap().contains(part),
            "{shown}: {answer}"
        );
    }
    assert_eq!(state(&engine), before);
    assert_eq!(asked.post(ADMIT_PATH, &good()).unwrap().1["mode"], "seed");
}

#[test]
fn bad_requests_elsewhere_are_named_and_change_nothing() {
    let mut engine = engine(&[], 16);
    engine.step();
    let before = state(&engine);
    let import = json!({"reservation": 1, "placement": {"n": 1, "store": "0000000000000001"}, "peer": "127.0.0.1:1",
                        "incarnation": "0000000000000001", "deadline_ms": 1000});
    let but = |field: &str, value: Value| {
        let mut body = import.clone();
        body[field] = value;
        body.to_string().into_bytes()
    };
    let cases: Vec<(&str, &str, Vec<u8>, u16, &str)> = vec![
        ("POST", "/kvc/v1/sessions/s/import", b"{}".to_vec(), 400, "placement"),
        (
            "POST",
            "/kvc/v1/sessions/s/import",
            but("source", json!("neighbour")),
            400,
            "neighbour",
        ),
        (
            "POST",
            "/kvc/v1/sessions/s/import",
            but("source", json!("owner")),
            400,
            "reservation",
        ),
        (
            "POST",
            "/kvc/v1/sessions/s/import",
            but("reservation", Value::Null),
            400,
            "reservation",
        ),
        ("POST", "/kvc/v1/sessions/s/withdraw", b"{}".to_vec(), 400, "placement"),
        (
            "POST",
            "/kvc/v1/sessions/s/withdraw",
            br#"{"placement": {"n": 1, "store": "0000000000000001"}, "incarnation": "0000000000000001"}"#.to_vec(),
            409,
            "held",
        ),
        (
            "POST",
            "/kvc/v1/drain",
            br#"{"deadline_ms": 3600001}"#.to_vec(),
            400,
            "deadline_ms",
        ),
        (
            "POST",
            "/kvc/v1/drain",
            br#"{"draining": "yes"}"#.to_vec(),
            400,
            "boolean",
        ),
        ("GET", "/kvc/v1/drain", Vec::new(), 405, "method"),
        (
            "POST",
            "/kvc/v1/sessions/s/import",
            but("peer", json!("nowhere")),
            400,
            "peer",
        ),
        (
            "POST",
            "/kvc/v1/sessions/s/import",
            but("peer", json!("http://127.0.0.1:1/x")),
            400,
            "peer",
        ),
        (
            "POST",
            "/kvc/v1/sessions/s/import",
            but("peer", json!("localhost:99999")),
            400,
            "peer",
        ),
        (
            "POST",
            "/kvc/v1/sessions/s/import",
            but("deadline_ms", json!(0)),
            400,
            "deadline_ms",
        ),
        (
            "POST",
            "/kvc/v1/sessions/s/import",
            but("reservation", json!(4711)),
            404,
            "session s",
        ),
        (
            "POST",
            "/kvc/v1/sessions/%01/import",
            but("deadline_ms", json!(5)),
            400,
            "session_id",
        ),
        ("POST", "/kvc/v1/sessions/s/release", b"nonsense".to_vec(), 400, "body"),
        (
            "POST",
            "/kvc/v1/sessions/s/release",
            br#"{"drop_kv": 3}"#.to_vec(),
            400,
            "body",
        ),
        ("GET", "/kvc/v1/sessions/unknown", Vec::new(), 404, "unknown"),
        ("GET", "/kvc/v1/sessions?limit=0", Vec::new(), 400, "limit"),
        ("GET", "/kvc/v1/sessions?limit=many", Vec::new(), 400, "limit"),
        ("GET", "/kvc/v1/sessions?after=%zz", Vec::new(), 400, "after"),
        ("GET", "/kvc/v1/sessions?before=s", Vec::new(), 400, "before"),
        ("GET", "/nothing", Vec::new(), 404, "path"),
        ("GET", ADMIT_PATH, Vec::new(), 405, "method"),
        ("DELETE", "/kvc/v1/sessions/s", Vec::new(), 405, "method"),
        ("POST", "/kvc/v1/info", b"{}".to_vec(), 405, "method"),
    ];
    for (method, path, body, expected, part) in cases {
        let (status, answer) = client(&engine).send(method, path, &body).unwrap();
        assert_eq!(status, expected, "{method} {path}: {answer}");
        assert!(answer["error"]["code"].is_string(), "{method} {path}: {answer}");
        assert!(
            answer["error"]["message"].as_str().unwrap().contains(part),
            "{method} {path}: {answer}"
        );
    }
    assert_eq!(state(&engine), before);
}

#[test]
fn a_worker_shows_what_it_is_and_holds() {
    let mut engine = engine(&[("role", "decode")], 16);
    for session in ["a", "b/c", "d e"] {
        engine.run(session, &tokens(1, 40), &[1, 2]).unwrap();
    }
    let mut client = client(&engine);
    let info = client.get("/kvc/v1/info").unwrap().1;
    assert_eq!(
        (&info["role"], &info["page_tokens"], &info["capacity"]),
        (&json!("decode"), &json!(16), &json!(4096))
    );
    assert_eq!(info["incarnation"], engine.engine().incarnation().to_string());
    let first = client.get("/kvc/v1/sessions?limit=2").unwrap().1;
    assert_eq!(first["total"], 3);
    assert_eq!(first["sessions"][1]["session_id"], "b/c");
    let rest = client.get("/kvc/v1/sessions?limit=2&after=b%2Fc").unwrap().1;
    assert_eq!(rest["sessions"][0]["session_id"], "d e");
    let one = client.get("/kvc/v1/sessions/b%2Fc").unwrap().1;
    assert_eq!((&one["state"], &one["committed"]), (&json!("idle"), &json!(41)));
    assert_eq!(client.get("/healthz").unwrap(), (200, json!("ok\n")));
    let page = client.get("/metrics").unwrap().1;
    assert!(page.as_str().unwrap().contains("kvc_sessions 3"), "{page}");
}

#[test]
fn a_release_ends_the_grant_and_leaves_a_tombstone() {
    // ADM-10.
    let mut engine = engine(&[], 16);
    engine.step();
    let asked = question("s", 0, 100, 100, 1, 1);
    admit(&engine, &asked, "seed");
    let mut client = client(&engine);
    let busy = client.post(ADMIT_PATH, &question("s", 0, 100, 100, 1, 2)).unwrap().1;
    assert_eq!(busy["reason"], "session-busy");
    let release = json!({"request": key(1)});
    assert_eq!(
        client.post("/kvc/v1/sessions/s/release", &release).unwrap().1["released"],
        true
    );
    assert_eq!(client.post(ADMIT_PATH, &asked).unwrap().1["reason"], "released");
    admit(&engine, &question("s", 0, 100, 100, 1, 3), "seed");
}

#[test]
fn a_reservation_lapses_without_anybody_asking() {
    // ADM-10: by the module's own timer.
    let mut engine = engine(&[("reservation_ms", "150")], 16);
    engine.step();
    admit(&engine, &question("s", 0, 100, 100, 1, 1), "seed");
    let used = |engine: &TestEngine| {
        client(engine).get("/kvc/v1/info").unwrap().1["load"]["used"]
            .as_u64()
            .unwrap()
    };
    assert!(used(&engine) >= 100);
    until("the reservation has lapsed", || used(&engine) == 0);
}

#[test]
fn an_answer_does_not_wait_for_the_engines_loop() {
    // ADM-11: the loop stands still in this test; only its last snapshot is used.
    let mut engine = engine(&[], 16);
    engine.step();
    let mut client = client(&engine);
    for n in 0..50 {
        let answer = client
            .post(ADMIT_PATH, &question(&format!("s{n}"), 0, 16, 16, 1, n))
            .unwrap()
            .1;
        assert_eq!(answer["can_admit"], true, "{answer}");
    }
}

#[test]
fn slow_and_broken_clients_hold_up_nobody() {
    // T7: slow loris on the HTTP port.
    let mut engine = engine(&[], 16);
    engine.step();
    let mut half = TcpStream::connect(engine.engine().listen()).unwrap();
    half.write_all(b"POST /admit_direct_append HTTP/1.1\r\nhost: k\r\ncontent-length: 100\r\n\r\n{")
        .unwrap();
    let mut head = TcpStream::connect(engine.engine().listen()).unwrap();
    head.write_all(b"GET /kvc/v1/info HTTP/1.1\r\nx: ").unwrap();
    admit(&engine, &question("s", 0, 100, 100, 1, 1), "seed");
    // The half body is answered 400 when its time is over.
    half.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let began = Instant::now();
    let mut answer = [0; 12];
    half.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 400");
    assert!(began.elapsed() < Duration::from_secs(15));
}
