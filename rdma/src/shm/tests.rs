//! Stories of one exporter and raw connections to it, what a peer can do that is no importer of ours; and the importer's
//! fence by itself, since a read is too quick to be met in the middle by chance.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    Running, ShmConfig, ShmMover,
    driver::Driver,
    endpoint::Endpoint,
    read::{Read, What},
    socket::Socket,
    wire::{self, Ask, Reply, Status},
    word::{Page, Shut, Slot},
};
use crate::{
    HostRegion, LeaseToken, Mover, ReadOptions, RegionKey, Run,
    mover::{Cancel, ReadHandle},
    shm::Pages,
};

const LONG: Duration = Duration::from_secs(20);

fn start(config: ShmConfig) -> (ShmMover, Endpoint) {
    let mover = ShmMover::start(config).unwrap();
    let endpoint = Endpoint::parse(&mover.endpoint()).unwrap();
    (mover, endpoint)
}

/// The next frame and the descriptor that came with it; `None` at the end.
fn hear(socket: &Socket) -> Option<(Reply, Option<OwnedFd>)> {
    let (mut buffer, begun) = (vec![0; wire::MAX_FRAME], Instant::now());
    loop {
        assert!(begun.elapsed() < LONG, "nothing came");
        match socket.receive(&mut buffer) {
            Ok(received) if received.len == 0 => return None,
            Ok(received) => {
                let reply = wire::decode_reply(&buffer[..received.len]).unwrap();
                return Some((reply, received.file));
            }
            Err(_) if socket.is_gone(None) => return None,
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn status(reply: Option<(Reply, Option<OwnedFd>)>) -> Status {
    match reply {
        Some((Reply::Answer(answer), None)) => answer.status,
        other => panic!("{other:?}"),
    }
}

/// A token for the first 100 bytes of region 0, which is made.
fn exposed(mover: &ShmMover) -> LeaseToken {
    let region = HostRegion::shared(8192, Pages::Default).unwrap();
    let run = Run {
        region: mover.register(region.into()).unwrap(),
        offset: 0,
        len: 100,
    };
    let token = LeaseToken::random().unwrap();
    mover.expose(token, LONG).unwrap();
    mover.extend(&token, &[run]).unwrap();
    token
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
    let token = exposed(&mover);
    let socket = Socket::connect(&endpoint.name).unwrap();
    socket.send(&ask(LeaseToken::random().unwrap(), 100), None).unwrap();
    assert_eq!(status(hear(&socket)), Status::UnknownToken);
    socket.send(&ask(token, 101), None).unwrap();
    assert_eq!(status(hear(&socket)), Status::RangeRefused);
    socket.send(&ask(token, 100), None).unwrap();
    assert!(matches!(hear(&socket), Some((Reply::Page { .. }, Some(_)))));
    assert!(matches!(
        hear(&socket),
        Some((Reply::Region { len: 8192, .. }, Some(_)))
    ));
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

/// XFER-2, F11: the importer's fence returns after the copies in hand, of every lane, and nobody begins another.
#[test]
fn a_cancel_waits_for_the_copy_in_hand() {
    let (_poll, inbox) = Driver::inbox().unwrap();
    let what = What {
        id: 1,
        peer: "".into(),
        token: LeaseToken::random().unwrap(),
        options: ReadOptions::default(),
    };
    let read = Arc::new(Read::new(what, 2, vec![], Box::new(|_| {}), Arc::default()));
    let (inside, entered) = mpsc::channel();
    let copied = Arc::new(AtomicBool::new(false));
    let copier = thread::spawn({
        let (read, copied) = (read.clone(), copied.clone());
        move || {
            read.gate(1).pass(|| {
                inside.send(()).unwrap();
                thread::sleep(Duration::from_millis(5));
                copied.store(true, Ordering::SeqCst);
            })
        }
    });
    entered.recv().unwrap();
    let running: Arc<dyn Cancel> = Arc::new(Running {
        read: read.clone(),
        inbox,
    });
    ReadHandle(running).cancel();
    assert!(copied.load(Ordering::SeqCst), "cancel did not wait");
    assert!((0..2).all(|lane| read.gate(lane).pass(|| ()).is_none()));
    copier.join().unwrap();
}

/// Obligation 1: a mover that is gone is read no more, by whoever was inside a copy when it went.
#[test]
fn the_end_of_an_exporter_waits_for_the_copies_of_its_importers() {
    let (mover, endpoint) = start(ShmConfig {
        fence: LONG,
        ..ShmConfig::default()
    });
    let token = exposed(&mover);
    let socket = Socket::connect(&endpoint.name).unwrap();
    socket.send(&ask(token, 100), None).unwrap();
    let Some((Reply::Page { slots }, Some(file))) = hear(&socket) else {
        panic!("no words came");
    };
    assert!(matches!(hear(&socket), Some((Reply::Region { .. }, Some(_)))));
    let Some((Reply::Answer(answer), None)) = hear(&socket) else {
        panic!("no answer came");
    };
    let (page, slot) = (
        Page::open(&file, slots).unwrap(),
        Slot {
            index: answer.slot,
            generation: answer.generation,
        },
    );
    let (inside, entered) = mpsc::channel();
    let copied = Arc::new(AtomicBool::new(false));
    let importer = thread::spawn({
        let copied = copied.clone();
        move || {
            page.pass(slot, || {
                inside.send(()).unwrap();
                thread::sleep(Duration::from_millis(20));
                copied.store(true, Ordering::SeqCst);
            })
        }
    });
    entered.recv().unwrap();
    drop(mover);
    assert!(copied.load(Ordering::SeqCst), "the mover ended under a copy");
    assert_eq!(importer.join().unwrap(), Err(Shut::Closed));
}
