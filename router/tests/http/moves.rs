//! Sessions that move while they live: on request, away from a draining worker, and with answers that are lost (MIG-1,
//! MIG-2, MIG-4).

use kvc_proto::{
    id::Epoch,
    wire::{
        admit::{AdmitRequest, ImportRequest, MovedTo, Source, WithdrawAnswer, WithdrawRequest},
        info::{Role, Standing},
        reason::Reason,
    },
};
use serde_json::Value;

use super::{
    World, client, eventually,
    stub::{Generation, Import, Stub, Withdraw, placement},
};

const BODY: &str = r#"{"input_ids":[1,2,3]}"#;

async fn move_to(world: &World, session: &str, to: &str) -> client::Reply {
    let body = format!(r#"{{"to":"{to}"}}"#);
    let path = format!("/v1/sessions/{session}/move");
    client::call(world.address(), "POST", &path, &[], body.as_bytes()).await
}

async fn state(world: &World) -> Value {
    let reply = client::call(world.address(), "GET", "/v1/router/state", &[], b"").await;
    serde_json::from_slice(&reply.body).expect("JSON")
}

async fn counted(world: &World, line: &str) {
    let reply = client::call(world.address(), "GET", "/metrics", &[], b"").await;
    assert!(reply.text().contains(line), "{line}\n{}", reply.text());
}

fn url(worker: &Stub) -> String {
    format!("http://{}", worker.address)
}

/// Two decode workers; the first owns `s`.
async fn seeded(flags: &[&str]) -> World {
    let world = World::start(&[Role::Decode, Role::Decode], flags).await;
    let first = client::post(world.address(), "/generate", Some("s"), BODY).await;
    let [d0, d1] = [&world.workers[0], &world.workers[1]];
    assert_eq!(first.header("x-kvc-worker"), d0.address.to_string());
    let placement = d0.seen("/generate")[0].tag().and_then(|t| t.placement).expect("tagged");
    d0.shows("s", Standing::Owner, 1_000, placement);
    d1.behave().on_import = Some(d0.hands_over(d1.peer()));
    world
}

#[tokio::test]
async fn a_session_moves_on_request_and_its_next_turn_runs_there() {
    // MIG-1
    let world = seeded(&[]).await;
    let [d0, d1] = [&world.workers[0], &world.workers[1]];
    let reply = move_to(&world, "s", &url(d1)).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let done: Value = serde_json::from_slice(&reply.body).expect("JSON");
    let import: ImportRequest = serde_json::from_slice(&d1.seen("/s/import")[0].body).expect("an import");
    assert_eq!(
        (import.reservation, import.source, import.incarnation),
        (None, Source::Owner, d0.peer().incarnation)
    );
    assert_eq!(
        (&done["from"], &done["to"]),
        (&d0.address.to_string().into(), &d1.address.to_string().into())
    );
    assert_eq!(
        done["placement"],
        serde_json::to_value(import.placement).expect("writes")
    );
    assert_eq!((&done["pulled_tokens"], done["micros"].is_u64()), (&1.into(), true));

    d1.behave().held.insert("s".into(), 1_000);
    let next = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!((next.header("x-kvc-mode"), next.header("x-kvc-reason")), ("direct", ""));
    assert_eq!(next.header("x-kvc-worker"), d1.address.to_string());
    let asked: AdmitRequest = serde_json::from_slice(&d1.seen("/admit_direct_append")[0].body).expect("a question");
    assert_eq!(asked.placement, Some(import.placement));
    counted(&world, r#"kvc_router_moves_total{outcome="moved"} 1"#).await;
    world.is_quiet().await;
}

#[tokio::test]
async fn moves_that_make_no_sense_are_refused_typed() {
    let world = World::start(&[Role::Decode, Role::Decode, Role::Prefill], &[]).await;
    client::post(world.address(), "/generate", Some("s"), BODY).await;
    let [d0, d1, p] = [&world.workers[0], &world.workers[1], &world.workers[2]];
    d0.shows("s", Standing::Owner, 1_000, placement(1));
    d1.shows("copy", Standing::Replica, 10, placement(1));
    d1.shows("evicted", Standing::Owner, 0, placement(1));
    let refused = |reply: client::Reply| (reply.status, reply.code());
    for (session, to, status, code) in [
        ("s", "http://127.0.0.1:1", 404, Reason::BadRequest),
        ("s", "", 404, Reason::BadRequest),
        ("s", &url(d0), 400, Reason::ImportFromSelf),
        ("s", &url(p), 400, Reason::BadRequest),
        ("never-seen", &url(d1), 404, Reason::UnknownSession),
        ("copy", &url(d0), 409, Reason::NotOwner),
        ("evicted", &url(d0), 409, Reason::NotResident),
        ("%00", &url(d1), 400, Reason::BadRequest),
        ("%zz", &url(d1), 400, Reason::BadRequest),
    ] {
        let reply = move_to(&world, session, to).await;
        assert_eq!(refused(reply), (status, code.as_str().to_owned()), "{session} to {to}");
    }
    let bare = |body: &'static str| client::call(world.address(), "POST", "/v1/sessions/s/move", &[], body.as_bytes());
    for body in ["", "{}", r#"{"to":7}"#, r#"{"to":"x","at":"y"}"#] {
        assert_eq!(refused(bare(body).await), (400, "bad-request".to_owned()), "{body}");
    }
    let get = client::call(world.address(), "GET", "/v1/sessions/s/move", &[], b"").await;
    assert_eq!((get.status, get.header("allow")), (405, "POST"));
    d1.behave().draining = true;
    eventually("it is seen to drain", || {
        world.router().app().router().view.decoders().count() == 1
    })
    .await;
    assert_eq!(
        refused(move_to(&world, "s", &url(d1)).await),
        (503, "draining".to_owned())
    );
    assert!(
        world
            .workers
            .iter()
            .all(|w| w.seen("/s/import").len() <= 1 && w.seen("/withdraw").is_empty())
    );
    assert_eq!(state(&world).await["pending_moves"], Value::Array(vec![]));
}

#[tokio::test]
async fn a_refused_move_leaves_the_session_where_it_was() {
    // MIG-2
    let world = seeded(&[]).await;
    let [d0, d1] = [&world.workers[0], &world.workers[1]];
    d1.behave().import = Import::Fails(Reason::SessionNotResidentNoCapacity);
    let reply = move_to(&world, "s", &url(d1)).await;
    assert_eq!(
        (reply.status, reply.code().as_str()),
        (503, "session-not-resident-no-capacity")
    );
    assert_eq!(
        d1.seen("/s/withdraw").len(),
        1,
        "its word is wanted before anything else is placed"
    );
    let next = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!(next.header("x-kvc-worker"), d0.address.to_string());
    counted(&world, r#"kvc_router_moves_total{outcome="stayed"} 1"#).await;
    counted(&world, "kvc_router_arbitrations_total 1").await;
}

#[tokio::test]
async fn a_move_whose_answer_is_lost_is_asked_for() {
    // MIG-2: a kept connection that breaks is tried once more.
    let world = seeded(&[]).await;
    let [d0, d1] = [&world.workers[0], &world.workers[1]];
    let owner = WithdrawAnswer::Owner {
        epoch: Epoch {
            placement: placement(2),
            rewind: 0,
        },
    };
    {
        let mut behaviour = d1.behave();
        behaviour.import = Import::Breaks;
        behaviour.withdraw = Withdraw::Says(owner);
        behaviour.held.insert("s".into(), 1_000);
    }
    let reply = move_to(&world, "s", &d1.address.to_string()).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let next = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!(next.header("x-kvc-worker"), d1.address.to_string());
    assert!(d0.seen("/admit_direct_append").len() == 1);
}

#[tokio::test]
async fn a_turn_asks_the_pending_target_before_it_is_placed_elsewhere() {
    // MIG-2: the source dies while the target prepares.
    let world = seeded(&["--import-timeout-ms", "3000"]).await;
    let [d0, d1] = [&world.workers[0], &world.workers[1]];
    d1.behave().imports.push_back(Import::Stalls);
    let moving = tokio::spawn({
        let (address, to) = (world.address(), url(d1));
        async move {
            let body = format!(r#"{{"to":"{to}"}}"#);
            client::call(address, "POST", "/v1/sessions/s/move", &[], body.as_bytes()).await
        }
    });
    eventually("the import is out", || d1.seen("/s/import").len() == 1).await;
    let pending = &state(&world).await["pending_moves"][0];
    assert_eq!((&pending["session"], &pending["lost"]), (&"s".into(), &false.into()));
    assert_eq!(pending["to"], d1.address.to_string());
    d0.die();
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!((reply.status, reply.header("x-kvc-mode")), (200, "reseed"), "{reply:?}");
    let withdrawn: WithdrawRequest = serde_json::from_slice(&d1.seen("/s/withdraw")[0].body).expect("a question");
    let asked: AdmitRequest = serde_json::from_slice(&d1.seen("/admit_direct_append")[0].body).expect("a question");
    assert!(asked.placement.expect("taken").n > withdrawn.placement.n);
    let order: Vec<String> = d1.seen("").into_iter().map(|s| s.path).collect();
    let at = |end: &str| order.iter().position(|p| p.ends_with(end));
    assert!(at("/withdraw") < at("/admit_direct_append"), "{order:?}");
    let operator = moving.await.expect("answered");
    assert!(operator.status >= 400, "{operator:?}");
    assert_eq!(state(&world).await["pending_moves"], Value::Array(vec![]));
    world.is_quiet().await;
}

#[tokio::test]
async fn a_silent_target_is_waited_out() {
    // MIG-2
    let world = seeded(&["--import-timeout-ms", "3000", "--handover-wait-ms", "300"]).await;
    let [d0, d1] = [&world.workers[0], &world.workers[1]];
    d1.behave().import = Import::Breaks;
    d1.behave().withdraw = Withdraw::Breaks;
    let reply = move_to(&world, "s", &url(d1)).await;
    assert_eq!((reply.status, reply.code().as_str()), (502, "peer-unreachable"));
    counted(&world, r#"kvc_router_moves_total{outcome="unknown"} 1"#).await;
    let next = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!(
        next.header("x-kvc-worker"),
        d0.address.to_string(),
        "the source says where it is"
    );
}

#[tokio::test]
async fn a_session_that_another_router_moved_is_followed() {
    // MIG-1
    let world = seeded(&[]).await;
    let [d0, d1] = [&world.workers[0], &world.workers[1]];
    let moved = MovedTo {
        to: d1.peer(),
        placement: placement(7),
    };
    d0.behave().moved.insert("s".into(), moved);
    d1.behave().held.insert("s".into(), 1_000);
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!(
        (reply.header("x-kvc-mode"), reply.header("x-kvc-reason")),
        ("direct", "moved")
    );
    assert_eq!(reply.header("x-kvc-worker"), d1.address.to_string());
    let tag = d1.seen("/generate")[0].tag().expect("tagged");
    assert_eq!(tag.placement, Some(placement(7)));
}

#[tokio::test]
async fn a_draining_worker_is_emptied_a_few_sessions_at_a_time() {
    // MIG-4: by capacity, bounded, page by page, again until nothing is left; turns meanwhile run elsewhere.
    let world = World::start(
        &[Role::Decode, Role::Decode, Role::Decode, Role::Prefill],
        &["--drain-moves", "2"],
    )
    .await;
    let [d0, d1, d2, p] = [0, 1, 2, 3].map(|i| &world.workers[i]);
    for i in 0..7 {
        d0.shows(&format!("s{i}"), Standing::Owner, 100, placement(1));
    }
    // Its turn runs: its move waits and holds nobody up.
    d0.behave().views.get_mut("s0").expect("shown").state = "running".into();
    d0.shows("copy", Standing::Replica, 100, placement(1));
    d0.shows("gone", Standing::Owner, 0, placement(1));
    for target in [d1, d2] {
        target.behave().on_import = Some(d0.hands_over(target.peer()));
        target.behave().import_takes = std::time::Duration::from_millis(20);
    }
    // One target refuses at first: the session is taken to the other one, later.
    d1.behave()
        .imports
        .push_back(Import::Fails(Reason::SessionNotResidentNoCapacity));
    d0.behave().draining = true;
    let owned = || {
        let behaviour = d0.behave();
        let owner = |v: &&kvc_proto::wire::info::SessionView| v.standing == Standing::Owner && v.committed > 0;
        behaviour.views.values().filter(owner).count()
    };
    eventually("all are moved", || owned() == 0).await;
    let got = [d1.seen("/import").len(), d2.seen("/import").len()];
    assert!(
        got.iter().sum::<usize>() == 8 && got.iter().all(|n| *n >= 2),
        "by capacity: {got:?}"
    );
    assert!([d1, d2].iter().all(|d| d.most_imports() <= 2));
    let mut order = d1.seen("/import");
    order.extend(d2.seen("/import"));
    order.sort_by_key(|s| s.at);
    assert!(order[0].path != "/kvc/v1/sessions/s0/import", "idle sessions first");
    assert!(p.seen("/import").is_empty() && d1.seen("/copy/import").is_empty());
    let line = format!(r#"kvc_router_drain_sessions_moved_total{{worker="{}"}} 7"#, d0.address);
    let mut text = String::new();
    for _ in 0..200 {
        text = client::call(world.address(), "GET", "/metrics", &[], b"")
            .await
            .text()
            .to_owned();
        if text.contains(&line) {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert!(text.contains(&line), "{line}\n{text}");
    let workers = client::call(world.address(), "GET", "/v1/workers", &[], b"").await;
    let workers: Value = serde_json::from_slice(&workers.body).expect("JSON");
    assert_eq!(workers[0]["health"], "draining");
}

#[tokio::test]
async fn a_turn_of_a_draining_worker_goes_on_elsewhere_from_its_copy() {
    // MIG-4, SYNC-2
    let world = seeded(&[]).await;
    let [d0, d1] = [&world.workers[0], &world.workers[1]];
    d1.behave().import = Import::Fails(Reason::NoDCapacity);
    d0.behave().draining = true;
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!((reply.status, reply.header("x-kvc-mode")), (200, "reseed"), "{reply:?}");
    assert_eq!(reply.header("x-kvc-worker"), d1.address.to_string());
    let imports: Vec<ImportRequest> = d1
        .seen("/s/import")
        .iter()
        .map(|s| serde_json::from_slice(&s.body).expect("an import"))
        .collect();
    let reseed = imports.iter().find(|i| i.reservation.is_some()).expect("asked for");
    assert_eq!(
        (reseed.source, reseed.incarnation),
        (Source::Replica, d0.peer().incarnation)
    );
    world.is_quiet().await;
}

#[tokio::test]
async fn a_stale_owner_that_drains_is_told_and_nothing_is_moved() {
    // SES-4, MIG-4: the session was placed elsewhere and this worker has not heard of it.
    let world = seeded(&[]).await;
    let [d0, d1] = [&world.workers[0], &world.workers[1]];
    d1.behave().held.insert("s".into(), 1_000);
    let moved = MovedTo {
        to: d1.peer(),
        placement: placement(7),
    };
    d0.behave().moved.insert("s".into(), moved);
    client::post(world.address(), "/generate", Some("s"), BODY).await;
    d1.shows("s", Standing::Owner, 1_000, placement(7));
    d0.behave().draining = true;
    eventually("it is told", || {
        d0.seen("/s/release")
            .iter()
            .any(|s| String::from_utf8_lossy(&s.body).contains(r#""placed":{"n":7"#))
    })
    .await;
    assert!(d1.seen("/s/import").is_empty());
}

#[tokio::test]
async fn a_turn_that_loses_its_session_while_it_streams_is_no_success() {
    // SES-4, DISP-8: the client gets the worker's own event; the worker's health is not charged.
    let world = seeded(&[]).await;
    let d0 = &world.workers[0];
    let event = r#"{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"stale-epoch: held 7, got 1","status_code":409}}}"#;
    let events = vec![
        "data: {\"text\":\"a\"}\n\n".to_owned(),
        format!("data: {event}\n\n"),
        "data: [DONE]\n\n".into(),
    ];
    for _ in 0..4 {
        d0.behave().next.push_back(Generation::Events(events.clone()));
        let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
        assert_eq!((reply.status, reply.text()), (200, events.concat().as_str()));
    }
    counted(&world, r#"kvc_router_requests_total{mode="direct",outcome="broken"} 4"#).await;
    assert_eq!(world.router().app().router().view.decoders().count(), 2);
    world.is_quiet().await;
}
