//! Turns that go well: modes, headers, bytes, streams.

use kvc_proto::wire::info::Role;
use tokio::io::AsyncWriteExt;

use super::{
    World, client,
    stub::{Generation, Import},
};
use kvc_proto::wire::reason::Reason;

const BODY: &str =
    r#"{"input_ids": [1, 2,3], "sampling_params":{"max_new_tokens": 4},  "unknown":{"x":[null,1e3]}, "z":"\u00e9"}"#;

#[tokio::test]
async fn a_session_is_seeded_through_p_and_then_runs_direct() {
    // DISP-1, DISP-2, DISP-3, DISP-9; engines §6
    let world = World::start(&[Role::Prefill, Role::Decode, Role::Decode], &[]).await;
    let [p, d, other] = [&world.workers[0], &world.workers[1], &world.workers[2]];
    let first = client::post(world.address(), "/generate", Some("s 1"), BODY).await;
    assert_eq!((first.status, first.header("x-kvc-mode")), (200, "seed"), "{first:?}");
    assert_eq!(first.header("x-kvc-source"), "prefill");
    assert_eq!(first.header("x-kvc-session"), "s 1");
    assert_eq!(first.header("x-kvc-worker"), d.address.to_string());

    let prefill = &p.seen("/generate")[0];
    let tag = prefill.tag().expect("tagged");
    assert!(tag.prefill_only && tag.placement.is_some() && tag.reservation.is_none());
    let import: kvc_proto::wire::admit::ImportRequest =
        serde_json::from_slice(&d.seen("/kvc/v1/sessions/s%201/import")[0].body).expect("an import");
    assert_eq!(Some(import.placement), tag.placement);
    let ran = &d.seen("/generate")[0];
    let tag = ran.tag().expect("tagged");
    assert_eq!((tag.session.as_str(), tag.reservation), ("s 1", import.reservation));
    assert_eq!(tag.placement, Some(import.placement));
    for seen in [prefill, ran] {
        assert_eq!(seen.body, BODY.as_bytes(), "byte for byte");
        assert_eq!(
            seen.headers["host"],
            if std::ptr::eq(seen, ran) { d.address } else { p.address }.to_string()
        );
    }

    let second = client::post(world.address(), "/generate", Some("s 1"), BODY).await;
    assert_eq!((second.status, second.header("x-kvc-mode")), (200, "direct"));
    assert_eq!(second.header("x-kvc-source"), "");
    assert_eq!(second.header("x-kvc-worker"), d.address.to_string());
    assert_eq!(p.seen("/generate").len(), 1);
    assert!(other.seen("/generate").is_empty());
    world.is_quiet().await;
}

#[tokio::test]
async fn a_stream_passes_through_byte_for_byte() {
    let world = World::start(&[Role::Decode], &[]).await;
    let events: Vec<String> = (0..20)
        .map(|i| format!("data: {{\"text\":\"{i} \u{e4}\"}}\n\n"))
        .collect();
    // Events cut anywhere by the network come out whole.
    let pieces = vec![
        events[0].clone(),
        events[1][..7].into(),
        events[1][7..].to_owned() + &events[2],
    ];
    let pieces = [pieces, events[3..].to_vec(), vec!["data: [DONE]\n\n".into()]].concat();
    world.workers[0].behave().generation = Generation::Events(pieces);
    for path in ["/generate", "/v1/chat/completions", "/v1/completions"] {
        let body = r#"{"messages":[{"role":"user","content":"hi"}],"stream":true}"#;
        let reply = client::post(world.address(), path, Some("s"), body).await;
        assert_eq!(reply.header("content-type"), "text/event-stream; charset=utf-8");
        assert_eq!(reply.text(), events.concat() + "data: [DONE]\n\n");
        assert_eq!(world.workers[0].seen(path)[0].body, body.as_bytes());
    }
    world.is_quiet().await;
}

#[tokio::test]
async fn a_request_without_a_session_is_not_tagged() {
    // DISP-5
    let world = World::start(&[Role::Prefill, Role::Decode, Role::Decode], &[]).await;
    for _ in 0..4 {
        let reply = client::post(
            world.address(),
            "/v1/completions",
            None,
            r#"{"prompt":"x","max_tokens":1}"#,
        )
        .await;
        assert_eq!(
            (reply.status, reply.header("x-kvc-mode"), reply.header("x-kvc-session")),
            (200, "fallback", "")
        );
    }
    for d in &world.workers[1..] {
        let seen = d.seen("/v1/completions");
        assert_eq!(seen.len(), 2, "in turn");
        assert!(seen.iter().all(|s| s.tag().is_none()));
        assert!(d.seen("/admit_direct_append").is_empty());
    }
    assert!(world.workers[0].seen("/v1/completions").is_empty());
}

#[tokio::test]
async fn session_ids_come_from_headers_before_the_body() {
    // engines §6
    let world = World::start(&[Role::Decode], &["--session-header", "X-Conversation-Id"]).await;
    let body = br#"{"session_id":"b1","session_params":{"id":"b2"},"input_ids":[1]}"#;
    let both = [("X-Conversation-Id", "c"), ("X-Session-Id", "h")];
    for (headers, expected) in [(&both[..], "h"), (&both[..1], "c"), (&[][..], "b1")] {
        let reply = client::call(world.address(), "POST", "/generate", headers, body).await;
        assert_eq!(reply.header("x-kvc-session"), expected);
    }
    let reply = client::post(
        world.address(),
        "/generate",
        None,
        r#"{"session_params":{"id":"b2"},"text":"x"}"#,
    )
    .await;
    assert_eq!(reply.header("x-kvc-session"), "b2");
}

#[tokio::test]
async fn admission_questions_carry_counts_and_mark_estimates() {
    // ADM-10, ADM-14
    let world = World::start(&[Role::Decode], &[]).await;
    let asked = |i: usize| -> kvc_proto::wire::admit::AdmitRequest {
        serde_json::from_slice(&world.workers[0].seen("/admit_direct_append")[i].body).expect("a question")
    };
    client::post(world.address(), "/generate", Some("s"), BODY).await;
    let first = asked(0);
    assert_eq!(
        (
            first.turn,
            first.input_tokens,
            first.append_tokens,
            first.max_new_tokens
        ),
        (0, 3, 3, Some(4))
    );
    assert!(!first.estimated && first.incarnation.is_some() && first.placement.is_some());
    // Three tokens of prompt and five generated are held now.
    client::post(
        world.address(),
        "/generate",
        Some("s"),
        r#"{"input_ids":[1,2,3,4,5,6,7,8,9,10]}"#,
    )
    .await;
    let second = asked(1);
    assert_eq!((second.turn, second.input_tokens, second.append_tokens), (1, 10, 2));
    client::post(
        world.address(),
        "/v1/chat/completions",
        Some("t"),
        r#"{"messages":[{"role":"user"}],"max_tokens":7}"#,
    )
    .await;
    assert!(asked(2).estimated);
    assert_eq!(asked(2).max_new_tokens, Some(7));
}

#[tokio::test]
async fn a_large_append_goes_through_p_to_the_same_worker() {
    // DISP-6
    let world = World::start(&[Role::Prefill, Role::Decode], &[]).await;
    let d = &world.workers[1];
    client::post(world.address(), "/generate", Some("s"), BODY).await;
    {
        let mut behaviour = d.behave();
        behaviour.refusals.push_back(Reason::RealLargeAppend);
    }
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("x-kvc-reason"), "real-large-append");
    let asked = d.seen("/admit_direct_append");
    let last: serde_json::Value = serde_json::from_slice(&asked[2].body).expect("JSON");
    assert_eq!(last["via"], "prefill");
}

#[tokio::test]
async fn without_the_question_a_known_session_costs_one_exchange() {
    let world = World::start(&[Role::Decode], &["--admit-direct", "false"]).await;
    for _ in 0..3 {
        assert_eq!(
            client::post(world.address(), "/generate", Some("s"), BODY).await.status,
            200
        );
    }
    let d = &world.workers[0];
    assert_eq!(
        (d.seen("/admit_direct_append").len(), d.seen("/generate").len()),
        (1, 3)
    );
}

#[tokio::test]
async fn pipelined_requests_on_one_connection_are_answered_in_order() {
    let world = World::start(&[Role::Decode], &[]).await;
    let mut stream = client::connect(world.address()).await;
    let mut bytes = Vec::new();
    for i in 0..5 {
        let id = format!("s{i}");
        bytes.extend(client::request(
            "POST",
            "/generate",
            &[("X-Session-Id", &id)],
            BODY.as_bytes(),
        ));
    }
    bytes.extend(client::request("GET", "/healthz", &[], b""));
    stream.write_all(&bytes).await.expect("sends");
    let mut buffer = Vec::new();
    for i in 0..5 {
        let reply = client::read_reply(&mut stream, &mut buffer).await.expect("an answer");
        assert_eq!(
            (reply.status, reply.header("x-kvc-session")),
            (200, format!("s{i}").as_str())
        );
    }
    let health = client::read_reply(&mut stream, &mut buffer).await.expect("an answer");
    assert!(health.text().contains("\"ok\""));
}

#[tokio::test]
async fn a_failed_import_or_prefill_is_computed_at_d() {
    // XFER-7
    let world = World::start(&[Role::Prefill, Role::Decode], &[]).await;
    let [p, d] = [&world.workers[0], &world.workers[1]];
    d.behave().import = Import::Fails(Reason::LeaseRevoked);
    let reply = client::post(world.address(), "/generate", Some("a"), BODY).await;
    assert_eq!((reply.status, reply.header("x-kvc-reason")), (200, "lease-revoked"));

    d.behave().import = Import::Stalls;
    p.behave().prefill = Generation::Status(500, "{}".into());
    let reply = client::post(world.address(), "/generate", Some("b"), BODY).await;
    assert_eq!(
        (reply.status, reply.header("x-kvc-mode"), reply.header("x-kvc-reason")),
        (200, "seed", "peer-unreachable")
    );
    super::eventually("the import was abandoned", || {
        d.hung_up().iter().any(|p| p.ends_with("/b/import"))
    })
    .await;
    world.is_quiet().await;
}

#[tokio::test]
async fn the_router_shows_its_state() {
    let world = World::start(&[Role::Prefill, Role::Decode], &[]).await;
    client::post(world.address(), "/generate", Some("s"), BODY).await;
    let get = |path: &'static str| client::call(world.address(), "GET", path, &[], b"");
    let models = get("/v1/models").await;
    assert_eq!((models.status, models.text()), (200, r#"{"object":"list","data":[]}"#));
    let metrics = get("/metrics").await;
    for line in [
        r#"kvc_router_requests_total{mode="seed",outcome="completed"} 1"#,
        "kvc_router_sessions 1",
        "kvc_router_imported_bytes_total 10",
    ] {
        assert!(metrics.text().contains(line), "{line}\n{}", metrics.text());
    }
    let workers: serde_json::Value = serde_json::from_slice(&get("/v1/workers").await.body).expect("JSON");
    assert_eq!(
        (&workers[0]["role"], &workers[1]["health"]),
        (&"prefill".into(), &"up".into())
    );
    let state: serde_json::Value = serde_json::from_slice(&get("/v1/router/state").await.body).expect("JSON");
    assert_eq!((&state["sessions"], &state["pinned"][1]), (&1.into(), &1.into()));
}

#[tokio::test]
async fn a_restarted_worker_is_noticed_and_its_sessions_reseeded() {
    // ROUTE-6, F16
    let world = World::start(&[Role::Decode], &[]).await;
    client::post(world.address(), "/generate", Some("s"), BODY).await;
    world.workers[0].become_incarnation(77);
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!((reply.status, reply.header("x-kvc-mode")), (200, "reseed"));
}
