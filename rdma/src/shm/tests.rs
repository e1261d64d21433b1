//! Stories of one exporter and raw connections to it: what a peer can do that is no importer of ours.

use std::time::{Duration, Instant};

use super::{
    ShmConfig, ShmMover,
    endpoint::Endpoint,
    socket::Socket,
    wire::{self, Ask, Reply, Status},
};
use crate::{HostRegion, LeaseToken, Mover, RegionKey, Run, shm::Pages};

const LONG: Duration = Duration::from_secs(20);

fn start(config: ShmConfig) -> (ShmMover, Endpoint) {
    let mover = ShmMover::start(config).unwrap();
    let endpoint = Endpoint::parse(&mover.endpoint()).unwrap();
    (mover, endpoint)
}

/// The next frame and whether a descriptor came with it; `None` at the end.
fn hear(socket: &Socket) -> Option<(Reply, bool)> {
    let (mut buffer, begun) = (vec![0; wire::MAX_FRAME], Instant::now());
    loop {
        assert!(begun.elapsed() < LONG, "nothing came");
        match socket.receive(&mut buffer) {
            Ok(received) if received.len == 0 => return None,
            Ok(received) => {
                let reply = wire::decode_reply(&buffer[..received.len]).unwrap();
                return Some((reply, received.file.is_some()));
            }
            Err(_) if socket.is_gone(None) => return None,
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn status(reply: Option<(Reply, bool)>) -> Status {
    match reply {
        Some((Reply::Answer(answer), false)) => answer.status,
        other => panic!("{other:?}"),
    }
}

fn ask(token: LeaseToken, len: u64) -> Vec<u8> {
    let run = Run {
        region: RegionKey(0),
        offset: 0,
        len,
    };
    wire::encode_ask(&Ask {
        id: 1,
        token,
        runs: vec![run],
        chunks: vec![],
    })
}

/// XFER-10: no words and no file before a valid token, nor for runs that are not exposed.
#[test]
fn files_are_given_to_who_shows_a_token_and_asks_for_what_it_covers() {
    let (mover, endpoint) = start(ShmConfig::default());
    let region = HostRegion::shared(8192, Pages::Default).unwrap();
    mover.register(region.into()).unwrap();
    let token = LeaseToken::random().unwrap();
    mover.expose(token, LONG).unwrap();
    let exposed = Run {
        region: RegionKey(0),
        offset: 0,
        len: 100,
    };
    mover.extend(&token, &[exposed]).unwrap();
    let socket = Socket::connect(&endpoint.name).unwrap();
    socket.send(&ask(LeaseToken::random().unwrap(), 100), None).unwrap();
    assert_eq!(status(hear(&socket)), Status::UnknownToken);
    socket.send(&ask(token, 101), None).unwrap();
    assert_eq!(status(hear(&socket)), Status::RangeRefused);
    socket.send(&ask(token, 100), None).unwrap();
    assert!(matches!(hear(&socket), Some((Reply::Page { .. }, true))));
    assert!(matches!(hear(&socket), Some((Reply::Region { len: 8192, .. }, true))));
    assert_eq!(status(hear(&socket)), Status::Ok);
    socket.send(&ask(token, 50), None).unwrap();
    assert_eq!(status(hear(&socket)), Status::Ok, "what it has is not sent again");
}

/// F12: a connection that shows nothing does not stay.
#[test]
fn a_connection_without_a_token_is_closed_in_time() {
    let (_mover, endpoint) = start(ShmConfig {
        request: Duration::from_millis(50),
        ..ShmConfig::default()
    });
    let socket = Socket::connect(&endpoint.name).unwrap();
    assert!(hear(&socket).is_none());
}

#[test]
fn what_is_no_frame_is_answered_once_and_closed() {
    let (_mover, endpoint) = start(ShmConfig::default());
    let socket = Socket::connect(&endpoint.name).unwrap();
    socket.send(b"GET / HTTP/1.1", None).unwrap();
    assert_eq!(status(hear(&socket)), Status::BadFrame);
    assert!(hear(&socket).is_none());
}

#[test]
fn one_connection_too_many_is_told_so() {
    let (_mover, endpoint) = start(ShmConfig {
        connections: 1,
        ..ShmConfig::default()
    });
    let first = Socket::connect(&endpoint.name).unwrap();
    first.send(&ask(LeaseToken::random().unwrap(), 1), None).unwrap();
    assert_eq!(status(hear(&first)), Status::UnknownToken);
    let second = Socket::connect(&endpoint.name).unwrap();
    assert_eq!(status(hear(&second)), Status::Busy);
    assert!(hear(&second).is_none());
}
