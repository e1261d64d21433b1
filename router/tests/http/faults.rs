//! What goes wrong: dead, silent and refusing workers, clients that leave, sessions that are busy.

use std::time::Duration;

use kvc_proto::wire::{info::Role, reason::Reason};
use tokio::io::AsyncWriteExt;

use super::{
    World, client, eventually,
    stub::{Generation, Import, Stub},
};

const BODY: &str = r#"{"input_ids":[1,2,3],"stream":true}"#;

/// The worker that an answer names.
fn holder<'w>(world: &'w World, reply: &client::Reply) -> &'w Stub {
    let named = world
        .workers
        .iter()
        .find(|w| w.address.to_string() == reply.header("x-kvc-worker"));
    named.expect("the answer names a worker")
}

fn event(i: u32) -> String {
    format!("data: {{\"text\":\"{i}\"}}\n\n")
}

#[tokio::test]
async fn a_dead_worker_before_the_first_byte_is_replaced() {
    // DISP-8
    let world = World::start(&[Role::Decode, Role::Decode], &[]).await;
    let generations = [
        Generation::Close,
        Generation::BreakAfter(vec![]),
        Generation::BreakAfter(vec!["data: {\"te".into()]),
    ];
    for (i, generation) in generations.into_iter().enumerate() {
        let session = format!("s{i}");
        let first = client::post(world.address(), "/generate", Some(&session), BODY).await;
        let holder = holder(&world, &first);
        // A kept connection that closes without an answer was stale, as far as one can tell: it is tried once more.
        let times = if matches!(generation, Generation::Close) { 2 } else { 1 };
        holder.behave().next.extend(std::iter::repeat_n(generation, times));
        let reply = client::post(world.address(), "/generate", Some(&session), BODY).await;
        assert_eq!(
            (reply.status, reply.header("x-kvc-reason")),
            (200, "peer-unreachable"),
            "{reply:?}"
        );
        assert_ne!(reply.header("x-kvc-worker"), holder.address.to_string());
        eventually("the failed grant is released", || {
            !holder.seen(&format!("/{session}/release")).is_empty()
        })
        .await;
    }
    world.is_quiet().await;
}

#[tokio::test]
async fn a_worker_that_is_gone_is_left_and_the_session_goes_on_elsewhere() {
    // ROUTE-6, DISP-8
    let world = World::start(&[Role::Decode, Role::Decode], &[]).await;
    let first = client::post(world.address(), "/generate", Some("s"), BODY).await;
    let holder = holder(&world, &first);
    holder.die();
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_ne!(reply.header("x-kvc-worker"), holder.address.to_string());
    let other = world.workers.iter().find(|w| w.address != holder.address).expect("two");
    other.die();
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!((reply.status, reply.code().as_str()), (502, "peer-unreachable"));
    eventually("both are known to be down", || {
        world.router().app().router().view.decoders().count() == 0
    })
    .await;
    let health = client::call(world.address(), "GET", "/healthz", &[], b"").await;
    assert_eq!(health.status, 503);
    let models = client::call(world.address(), "GET", "/v1/models", &[], b"").await;
    assert_eq!((models.status, models.code().as_str()), (503, "peer-unreachable"));
    world.is_quiet().await;
}

#[tokio::test]
async fn a_stream_that_breaks_ends_in_a_typed_event_and_the_next_turn_works() {
    // DISP-8
    let world = World::start(&[Role::Decode], &[]).await;
    let d = &world.workers[0];
    // The half event is not passed on: an error can follow whole events only.
    d.behave().next.push_back(Generation::BreakAfter(vec![
        event(1),
        event(2),
        "data: {\"text\":\"thr".into(),
    ]));
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    let (events, error) = reply.text().split_at(event(1).len() * 2);
    assert_eq!((reply.status, events), (200, (event(1) + &event(2)).as_str()));
    let error: serde_json::Value =
        serde_json::from_str(error.strip_prefix("data: ").expect("an event").trim_end()).expect("JSON");
    assert_eq!(error["error"]["code"], "peer-unreachable");
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!(reply.status, 200);
    world.is_quiet().await;
}

#[tokio::test]
async fn a_silent_worker_is_given_up() {
    // DISP-8: every wait has a deadline.
    let flags = ["--first-token-timeout-ms", "300", "--next-token-timeout-ms", "200"];
    let world = World::start(&[Role::Decode], &flags).await;
    let d = &world.workers[0];
    d.behave().next.push_back(Generation::Stall);
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!((reply.status, reply.code().as_str()), (504, "deadline-exceeded"));
    eventually("the engine sees its client leave", || {
        d.hung_up().contains(&"/generate".to_owned())
    })
    .await;
    d.behave().next.push_back(Generation::StallAfter(vec![event(1)]));
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert!(
        reply.text().starts_with(&event(1)) && reply.text().contains("deadline-exceeded"),
        "{}",
        reply.text()
    );
    world.is_quiet().await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_turn_and_releases_its_grant() {
    // F14, ADM-10: queued or prefilling, decoding, importing.
    let world = World::start(&[Role::Prefill, Role::Decode], &[]).await;
    let [p, d] = [&world.workers[0], &world.workers[1]];
    let mut releases = 0;
    for (name, generation, import) in [
        ("queued", Generation::Stall, Import::Commits),
        ("decoding", Generation::StallAfter(vec![event(1)]), Import::Commits),
        ("importing", Generation::Stall, Import::Stalls),
    ] {
        d.behave().generation = generation;
        d.behave().import = import;
        p.behave().prefill = if name == "importing" {
            Generation::Stall
        } else {
            Generation::Json("{}".into())
        };
        let (hung_up, prefill_hung_up) = (d.hung_up().len(), p.hung_up().len());
        let mut stream = client::connect(world.address()).await;
        let bytes = client::request("POST", "/generate", &[("X-Session-Id", name)], BODY.as_bytes());
        stream.write_all(&bytes).await.expect("sends");
        if name == "decoding" {
            client::more(&mut stream, &mut Vec::new())
                .await
                .expect("the first token");
        } else {
            let path = if name == "importing" {
                "/importing/import"
            } else {
                "/generate"
            };
            let before = d.seen(path).len();
            eventually("the worker has it", || {
                d.seen(path).len() > before || world.inflight() > 0 && !d.seen(path).is_empty()
            })
            .await;
        }
        drop(stream);
        eventually("the worker sees its client leave", || d.hung_up().len() > hung_up).await;
        if name == "importing" {
            eventually("the prefill is aborted", || p.hung_up().len() > prefill_hung_up).await;
        }
        releases += 1;
        eventually("the grant is released", || d.seen("/release").len() == releases).await;
        let released: serde_json::Value = serde_json::from_slice(&d.seen("/release")[releases - 1].body).expect("JSON");
        assert!(released["request"]["request"].is_u64(), "{released}");
        world.is_quiet().await;
    }
}

#[tokio::test]
async fn a_busy_session_waits_and_gets_409() {
    // ADM-8, F2
    let world = World::start(&[Role::Decode, Role::Decode], &["--busy-wait-ms", "700"]).await;
    for w in &world.workers {
        w.behave().next.push_back(Generation::StallAfter(vec![event(1)]));
    }
    let mut first = client::connect(world.address()).await;
    let bytes = client::request("POST", "/generate", &[("X-Session-Id", "s")], BODY.as_bytes());
    first.write_all(&bytes).await.expect("sends");
    client::more(&mut first, &mut Vec::new())
        .await
        .expect("the first token");
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!((reply.status, reply.code().as_str()), (409, "session-busy"));
    drop(first);
    world.workers.iter().for_each(|w| w.behave().next.clear());
    // Freed within the wait: served.
    let reply = client::post(world.address(), "/generate", Some("s"), r#"{"input_ids":[1]}"#).await;
    assert_eq!(reply.status, 200);

    // Busy at the worker, by another router or a direct client.
    let holder = holder(&world, &reply);
    holder.behave().refusals.extend([Reason::SessionBusy; 3]);
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!((reply.status, reply.header("x-kvc-reason")), (200, "session-busy"));
    holder.behave().refusals.extend([Reason::SessionBusy; 1000]);
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!((reply.status, reply.code().as_str()), (409, "session-busy"));
    world.is_quiet().await;
}

#[tokio::test]
async fn a_turn_that_no_worker_can_hold_gets_413() {
    // ADM-6
    let world = World::start(&[Role::Decode, Role::Decode], &[]).await;
    for w in &world.workers {
        w.behave().refusals.push_back(Reason::TooLarge);
    }
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!((reply.status, reply.code().as_str()), (413, "too-large"));
    assert!(world.workers.iter().all(|w| w.seen("/generate").is_empty()));
}

#[tokio::test]
async fn a_turn_refused_on_arrival_goes_on_as_a_refusal() {
    // ADM-14, in the engine's own forms, streaming and not
    let world = World::start(&[Role::Decode, Role::Decode], &[]).await;
    let first = client::post(world.address(), "/generate", Some("s"), BODY).await;
    let holder = holder(&world, &first);
    let abort = r#"{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"no-d-capacity: 7 of 5","status_code":503}}}"#;
    for generation in [
        Generation::Status(
            503,
            r#"{"object":"error","message":"no-d-capacity: 7 of 5","code":503}"#.into(),
        ),
        Generation::Events(vec![format!("data: {abort}\n\n"), "data: [DONE]\n\n".into()]),
    ] {
        holder.behave().next.push_back(generation);
        let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
        assert_eq!(
            (reply.status, reply.header("x-kvc-reason")),
            (200, "no-d-capacity"),
            "{reply:?}"
        );
        assert_eq!(
            reply.header("x-kvc-mode"),
            "fallback",
            "ε = 1: the only probe is used up"
        );
    }
    world.is_quiet().await;
}

#[tokio::test]
async fn an_engines_own_error_reaches_the_client_unchanged() {
    let world = World::start(&[Role::Decode], &[]).await;
    let own = r#"{"object":"error","message":"max_new_tokens must be positive","code":400}"#;
    world.workers[0]
        .behave()
        .next
        .push_back(Generation::Status(400, own.into()));
    let reply = client::post(world.address(), "/generate", Some("s"), BODY).await;
    assert_eq!((reply.status, reply.text()), (400, own));
    eventually("its grant is released", || world.workers[0].seen("/release").len() == 1).await;
    world.workers[0]
        .behave()
        .next
        .push_back(Generation::Status(500, "boom".into()));
    let reply = client::post(world.address(), "/generate", None, BODY).await;
    assert_eq!(
        (reply.status, reply.text()),
        (500, "boom"),
        "the last word of the only worker"
    );
    world.is_quiet().await;
}

#[tokio::test]
async fn running_requests_end_before_the_router_stops() {
    let mut world = World::start(&[Role::Decode], &["--drain-timeout-ms", "5000"]).await;
    world.workers[0].behave().generation = Generation::Events((0..100).map(event).collect());
    let address = world.address();
    let running = tokio::spawn(async move { client::post(address, "/generate", Some("s"), BODY).await });
    eventually("it runs", || world.inflight() == 1).await;
    let router = world.router.take().expect("it runs");
    let stopped = tokio::task::spawn_blocking(move || router.stop());
    let reply = running.await.expect("an answer");
    assert_eq!(reply.text(), (0..100).map(event).collect::<String>());
    tokio::time::timeout(Duration::from_secs(5), stopped)
        .await
        .expect("it stops")
        .expect("without a panic");
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}
