//! Bad and slow input on every endpoint: 4xx with code and message, and nothing has changed.

use std::time::Duration;

use kvc_proto::wire::info::Role;
use tokio::io::AsyncWriteExt;

use super::{World, client};

const ENDPOINTS: [&str; 3] = ["/generate", "/v1/completions", "/v1/chat/completions"];

#[tokio::test]
async fn bad_bodies_and_ids_are_refused_with_the_place() {
    let world = World::start(&[Role::Decode], &["--max-body-bytes", "1000"]).await;
    let long = "x".repeat(257);
    let large = format!(r#"{{"text":"{}"}}"#, "x".repeat(2000));
    for path in ENDPOINTS {
        for (session, body, status, code, says) in [
            (None, "", 400, "bad-request", "byte 0"),
            (None, "{", 400, "bad-request", "byte 1"),
            (None, r#"{"a":1,}"#, 400, "bad-request", "byte 7"),
            (None, "[1]", 400, "bad-request", "a JSON object"),
            (None, r#"{"session_id":5}"#, 400, "bad-request", "session_id"),
            (None, r#"{"session_id":""}"#, 400, "bad-request", "session_id is empty"),
            (
                None,
                r#"{"session_params":{"id":[]}}"#,
                400,
                "bad-request",
                "session_params.id",
            ),
            (Some(long.as_str()), "{}", 400, "bad-request", "at most 256"),
            (Some(""), "{}", 400, "bad-request", "empty"),
            (None, large.as_str(), 413, "too-large", "1000"),
        ] {
            let reply = client::post(world.address(), path, session, body).await;
            assert_eq!((reply.status, reply.code().as_str()), (status, code), "{path} {body}");
            assert!(reply.text().contains(says), "{path} {body}: {}", reply.text());
        }
        let reply = client::call(world.address(), "GET", path, &[], b"").await;
        assert_eq!(
            (reply.status, reply.code().as_str(), reply.header("allow")),
            (405, "bad-request", "POST")
        );
    }
    for path in ["/v1/models", "/metrics", "/healthz", "/v1/workers", "/v1/router/state"] {
        let reply = client::call(world.address(), "POST", path, &[], b"{}").await;
        assert_eq!((reply.status, reply.code().as_str()), (405, "bad-request"), "{path}");
    }
    let reply = client::call(world.address(), "GET", "/nothing", &[], b"").await;
    assert_eq!((reply.status, reply.code().as_str()), (404, "bad-request"));
    let router = world.router().app().router();
    assert_eq!(
        (router.requests(), router.sessions().len()),
        (0, 0),
        "nothing has changed"
    );
    assert!(ENDPOINTS.iter().all(|p| world.workers[0].seen(p).is_empty()));
}

#[tokio::test]
async fn what_is_no_http_is_refused() {
    let world = World::start(&[Role::Decode], &[]).await;
    let mut stream = client::connect(world.address()).await;
    stream.write_all(b"\x16\x03\x01 nonsense\r\n\r\n").await.expect("sends");
    let reply = client::read_reply(&mut stream, &mut Vec::new()).await;
    assert_eq!(reply.map(|r| r.status), Some(400));
}

#[tokio::test]
async fn a_chunked_body_over_the_limit_is_refused_too() {
    let world = World::start(&[Role::Decode], &["--max-body-bytes", "1000"]).await;
    let mut stream = client::connect(world.address()).await;
    let head = b"POST /generate HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head).await.expect("sends");
    let chunk = format!("800\r\n{}\r\n", "x".repeat(0x800));
    stream.write_all(chunk.as_bytes()).await.expect("sends");
    let reply = client::read_reply(&mut stream, &mut Vec::new())
        .await
        .expect("an answer");
    assert_eq!((reply.status, reply.code().as_str()), (413, "too-large"));
}

#[tokio::test]
async fn slow_clients_are_cut_off() {
    let flags = ["--client-head-timeout-ms", "200", "--client-body-timeout-ms", "200"];
    let world = World::start(&[Role::Decode], &flags).await;
    // A head that never ends.
    let mut slow_head = client::connect(world.address()).await;
    slow_head
        .write_all(b"POST /generate HTTP/1.1\r\nhost")
        .await
        .expect("sends");
    let _ = client::read_reply(&mut slow_head, &mut Vec::new()).await;
    let mut rest = Vec::new();
    assert!(client::more(&mut slow_head, &mut rest).await.is_none(), "closed");
    // A body that never ends.
    let mut slow_body = client::connect(world.address()).await;
    slow_body
        .write_all(b"POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: 100\r\n\r\n{")
        .await
        .expect("sends");
    let reply = client::read_reply(&mut slow_body, &mut Vec::new())
        .await
        .expect("an answer");
    assert_eq!((reply.status, reply.code().as_str()), (408, "deadline-exceeded"));
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(world.router().app().router().requests(), 0);
}

#[tokio::test]
async fn connections_are_bounded_and_the_next_one_waits() {
    let world = World::start(&[Role::Decode], &["--max-connections", "1"]).await;
    let mut first = client::connect(world.address()).await;
    let mut buffer = Vec::new();
    first
        .write_all(&client::request("GET", "/healthz", &[], b""))
        .await
        .expect("sends");
    client::read_reply(&mut first, &mut buffer).await.expect("an answer");
    let mut second = client::connect(world.address()).await;
    second
        .write_all(&client::request("GET", "/healthz", &[], b""))
        .await
        .expect("sends");
    let early = tokio::time::timeout(Duration::from_millis(100), client::more(&mut second, &mut Vec::new())).await;
    assert!(early.is_err(), "it waits");
    drop(first);
    let reply = client::read_reply(&mut second, &mut Vec::new())
        .await
        .expect("an answer");
    assert_eq!(reply.status, 200);
}
