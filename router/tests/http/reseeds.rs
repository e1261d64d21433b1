//! Where a reseeded turn's KV comes from, and who is told to keep a replica (SYNC-1, SYNC-2).

use kvc_proto::wire::{
    admit::{AdmitRequest, ImportRequest, Source},
    info::{Role, Standing},
    reason::Reason,
};

use super::{
    World, client,
    stub::{Import, Stub, placement},
};

const BODY: &str = r#"{"input_ids":[1,2,3,4,5,6,7,8,9,10,11,12]}"#;

fn asked(worker: &Stub) -> Vec<AdmitRequest> {
    let seen = worker.seen("/admit_direct_append");
    let read = |s: &super::stub::Seen| serde_json::from_slice(&s.body).expect("a question");
    seen.iter().map(read).collect()
}

fn imports(worker: &Stub) -> Vec<ImportRequest> {
    let seen = worker.seen("/import");
    let read = |s: &super::stub::Seen| serde_json::from_slice(&s.body).expect("an import");
    seen.iter().map(read).collect()
}

async fn metrics(world: &World) -> String {
    let reply = client::call(world.address(), "GET", "/metrics", &[], b"").await;
    reply.text().to_owned()
}

/// One prefill and two decode workers; `s` was seeded on the first decode worker, which has evicted it since.
async fn evicted(flags: &[&str]) -> World {
    let world = World::start(&[Role::Prefill, Role::Decode, Role::Decode], flags).await;
    let first = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!(first.header("x-kvc-worker"), world.workers[1].address.to_string());
    world.workers[1].behave().held.clear();
    world
}

#[tokio::test]
async fn every_question_names_the_backup_unless_it_is_switched_off() {
    // SYNC-1, SYNC-3
    for (flags, named) in [(&[][..], true), (&["--sync=false"][..], false)] {
        let world = World::start(&[Role::Prefill, Role::Decode], flags).await;
        for _ in 0..2 {
            client::post(world.address(), "/generate", Some("s"), BODY).await;
        }
        let [p, d] = [&world.workers[0], &world.workers[1]];
        let expected = Some(p.peer()).filter(|_| named);
        assert!(asked(d).iter().all(|q| q.backup == expected), "{:?}", asked(d));
        let state = client::call(world.address(), "GET", "/v1/router/state", &[], b"").await;
        let state: serde_json::Value = serde_json::from_slice(&state.body).expect("JSON");
        assert_eq!(state["sync"], named);
    }
}

#[tokio::test]
async fn an_evicted_session_comes_back_from_its_replica() {
    // SYNC-2: the prefill worker computes nothing.
    let world = evicted(&[]).await;
    let [p, d] = [&world.workers[0], &world.workers[1]];
    p.shows("s", Standing::Replica, 10, placement(1));
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!((reply.status, reply.header("x-kvc-mode")), (200, "reseed"), "{reply:?}");
    assert_eq!(reply.header("x-kvc-source"), "replica");
    assert_eq!(p.seen("/generate").len(), 1, "the seed's");
    let import = &imports(d)[1];
    assert_eq!(
        (import.source, import.incarnation),
        (Source::Replica, p.peer().incarnation)
    );
    assert!(import.reservation.is_some());
    let text = metrics(&world).await;
    assert!(
        text.contains(r#"kvc_router_reseeds_total{source="replica"} 1"#),
        "{text}"
    );
    world.is_quiet().await;
}

#[tokio::test]
async fn a_session_that_is_refused_takes_its_kv_along() {
    // SYNC-2, MIG: the old owner still holds it.
    let world = World::start(
        &[Role::Prefill, Role::Decode, Role::Decode],
        &["--kvcache-migration-reject-threshold", "1"],
    )
    .await;
    let [p, d1, d2] = [&world.workers[0], &world.workers[1], &world.workers[2]];
    client::post(world.address(), "/generate", Some("s"), BODY).await;
    d1.behave().refusals.push_back(Reason::NoDCapacity);
    let fallback = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!(fallback.header("x-kvc-mode"), "fallback");
    d1.shows("s", Standing::Owner, 12, placement(1));
    p.shows("s", Standing::Replica, 7, placement(1));
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!(
        (reply.header("x-kvc-mode"), reply.header("x-kvc-source")),
        ("reseed", "replica")
    );
    assert_eq!(reply.header("x-kvc-worker"), d2.address.to_string());
    assert_eq!(
        imports(d2)[0].incarnation,
        d1.peer().incarnation,
        "it holds more than the replica"
    );
    world.is_quiet().await;
}

#[tokio::test]
async fn an_old_owner_whose_kv_was_not_taken_is_told() {
    // SES-4
    let world = World::start(
        &[Role::Prefill, Role::Decode, Role::Decode],
        &["--kvcache-migration-reject-threshold", "1"],
    )
    .await;
    let [p, d1] = [&world.workers[0], &world.workers[1]];
    client::post(world.address(), "/generate", Some("s"), BODY).await;
    d1.behave().refusals.push_back(Reason::NoDCapacity);
    client::post(world.address(), "/generate", Some("s"), BODY).await;
    d1.shows("s", Standing::Owner, 5, placement(1));
    p.shows("s", Standing::Replica, 7, placement(1));
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!(reply.header("x-kvc-source"), "replica", "{reply:?}");
    super::eventually("it is told", || {
        let releases = d1.seen("/s/release");
        releases
            .iter()
            .any(|s| String::from_utf8_lossy(&s.body).contains("placed"))
    })
    .await;
    world.is_quiet().await;
}

#[tokio::test]
async fn a_replica_that_cannot_be_read_is_computed_again() {
    // XFER-7, SYNC-2
    let world = evicted(&[]).await;
    let [p, d] = [&world.workers[0], &world.workers[1]];
    p.shows("s", Standing::Replica, 10, placement(1));
    d.behave().imports.push_back(Import::Fails(Reason::LeaseRevoked));
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!(
        (reply.status, reply.header("x-kvc-source")),
        (200, "prefill"),
        "{reply:?}"
    );
    assert_eq!(reply.header("x-kvc-reason"), "lease-revoked");
    let sources: Vec<Source> = imports(d).iter().map(|i| i.source).collect();
    assert_eq!(sources, [Source::Prefill, Source::Replica, Source::Prefill]);
    world.is_quiet().await;
}

#[tokio::test]
async fn a_prefill_worker_that_is_behind_follows_the_holder_before_it_computes() {
    // SYNC-2, SYNC-4: more is new than the decode worker computes itself.
    let world = evicted(&[]).await;
    let [p, d1, d2] = [&world.workers[0], &world.workers[1], &world.workers[2]];
    let ids: Vec<String> = (0..9_000).map(|i| i.to_string()).collect();
    let long = format!(r#"{{"input_ids":[{}]}}"#, ids.join(","));
    p.shows("s", Standing::Replica, 7, placement(1));
    d2.shows("s", Standing::Owner, 12, placement(1));
    d2.behave().held.clear();
    // The router has heard of D2 by a move.
    let moved = kvc_proto::wire::admit::MovedTo {
        to: d2.peer(),
        placement: placement(40),
    };
    d1.behave().moved.insert("s".into(), moved);
    d2.behave().refusals.push_back(Reason::SessionNotResidentNoCapacity);
    client::post(world.address(), "/generate", Some("s"), BODY).await;
    d1.behave().moved.clear();
    p.behave().import = Import::Fails(Reason::PeerUnreachable);
    d2.behave().draining = true;
    super::eventually("D2 is seen to drain", || {
        world.router().app().router().view.decoders().count() == 1
    })
    .await;
    let reply = client::post(world.address(), "/generate", Some("s"), &long).await;
    assert_eq!(
        (reply.status, reply.header("x-kvc-source")),
        (200, "prefill"),
        "{reply:?}"
    );
    let refresh = &imports(p)[0];
    assert_eq!(
        (
            refresh.reservation,
            refresh.source,
            refresh.placement,
            refresh.incarnation
        ),
        (None, Source::Replica, placement(1), d2.peer().incarnation)
    );
    assert_eq!(reply.header("x-kvc-reason"), "", "a refresh that fails is no error");
    world.is_quiet().await;
}

#[tokio::test]
async fn a_silent_holder_is_not_waited_for() {
    // SYNC-2, XFER-7: the question has a short deadline.
    let world = evicted(&["--locate-timeout-ms", "100"]).await;
    let p = &world.workers[0];
    p.behave().stalls_sessions = true;
    let began = std::time::Instant::now();
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!(
        (reply.status, reply.header("x-kvc-source")),
        (200, "prefill"),
        "{reply:?}"
    );
    assert!(began.elapsed().as_millis() < 1_500);
}
