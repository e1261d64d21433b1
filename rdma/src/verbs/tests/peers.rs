//! Peers that do not keep to the protocol, or stop in the middle of it; and what stays of them, which is nothing.

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process,
    sync::mpsc,
};

use super::*;
use crate::{
    mover::ReadStats,
    tcp::wire::{HEAD, Head, Status, decode_head, decode_request, encode_head, encode_request},
};

type Outcome = Result<ReadStats, MoverError>;

pub(super) fn read(mover: &VerbsMover, peer: &str, copies: Vec<Copy>) -> (ReadHandle, mpsc::Receiver<Outcome>) {
    let (tx, done) = mpsc::channel();
    let done_once = Box::new(move |result| tx.send(result).unwrap());
    let token = LeaseToken::from_bytes([5; 32]);
    (mover.read(peer, token, copies, ReadOptions::default(), done_once), done)
}

fn whole(region: RegionKey) -> Run {
    Run {
        region,
        offset: 0,
        len: LEN as u64,
    }
}

/// An importer with the region that it reads into.
fn importer(config: VerbsConfig) -> (VerbsMover, Arc<HostRegion>, impl Fn(RegionKey) -> Vec<Copy>) {
    let importer = VerbsMover::start(config).unwrap();
    let target = HostRegion::new(LEN);
    let local = importer.register(target.clone().into()).unwrap();
    let copies = move |remote| {
        vec![Copy {
            remote: whole(remote),
            local: whole(local),
        }]
    };
    (importer, target, copies)
}

/// An exporter with a lease on its region.
fn exporter(config: VerbsConfig) -> (VerbsMover, LeaseToken) {
    let exporter = VerbsMover::start(config).unwrap();
    let region = exporter.register(HostRegion::new(LEN).into()).unwrap();
    let token = LeaseToken::random().unwrap();
    exporter.expose(token, LONG).unwrap();
    exporter.extend(&token, &[whole(region)]).unwrap();
    (exporter, token)
}

/// Queue pairs as the kernel counts them, without its own.
fn queue_pairs() -> usize {
    let shown = process::Command::new("rdma").args(["resource", "show", "qp"]).output();
    let shown = String::from_utf8(shown.unwrap().stdout).unwrap();
    shown.lines().filter(|line| line.contains("type RC")).count()
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LONG, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Welcomes whoever comes with the ends that `welcome` makes of his, and grants this key whatever is asked.
fn a_peer_that_grants(
    region: RegionKey,
    len: u64,
    key: Key,
    welcome: impl Fn(Vec<wire::End>) -> Vec<wire::End> + Send + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for socket in listener.incoming() {
            grant(socket.unwrap(), region, len, key, &welcome);
        }
    });
    address
}

/// Ends when the importer has had enough.
fn grant(
    mut socket: TcpStream,
    region: RegionKey,
    len: u64,
    key: Key,
    welcome: &dyn Fn(Vec<wire::End>) -> Vec<wire::End>,
) {
    let (mut input, mut buffer, mut greeted) = (Vec::new(), [0; 4096], None);
    while let Ok(count @ 1..) = socket.read(&mut buffer) {
        input.extend_from_slice(&buffer[..count]);
        let mut out = Vec::new();
        if greeted.is_none()
            && let Some((hello, used)) = wire::decode_hello(&input).unwrap()
        {
            input.drain(..used);
            let (ends, mut body) = (welcome(hello.ends), Vec::new());
            wire::encode_ends(&mut body, &ends);
            say(&mut out, 0, &body);
            greeted = Some(ends.len());
        }
        while let Some((request, used)) = greeted.and_then(|_| decode_request(&input).unwrap()) {
            input.drain(..used);
            let keys = vec![key; greeted.unwrap_or(0)];
            let grant = wire::Grant {
                crc: 0,
                regions: vec![wire::RegionKeys { region, len, keys }],
            };
            let mut body = Vec::new();
            wire::encode_grant(&mut body, &grant);
            say(&mut out, request.id, &body);
        }
        if socket.write_all(&out).is_err() {
            return;
        }
    }
}

fn say(out: &mut Vec<u8>, id: u64, body: &[u8]) {
    let (status, len) = (Status::Ok, body.len() as u64);
    encode_head(
        out,
        &Head {
            status,
            id,
            len,
            fact: 0,
        },
    );
    out.extend_from_slice(body);
}

/// XFER-10: a peer that offers keys for what nobody asked for, or too short ones, is refused before anything is posted.
#[test]
fn keys_that_cover_nothing_asked_for_are_refused() {
    if !is_there() {
        return;
    }
    let before = queue_pairs();
    let (importer, target, copies) = importer(config());
    for (offered, len) in [(RegionKey(99), LEN as u64), (RegionKey(5), LEN as u64 - 1)] {
        let peer = a_peer_that_grants(offered, len, Key { address: 0, key: 1 }, |ends| ends);
        let refused = read(&importer, &peer, copies(RegionKey(5)))
            .1
            .recv_timeout(LONG)
            .unwrap();
        let stray = matches!(&refused, Err(MoverError::Verbs(VerbsError::StrayKey { region, .. }))
            if [offered.0, 5].contains(region));
        assert!(stray, "{refused:?}");
        assert!(target.read(0, LEN) == [0; LEN], "a byte landed");
    }
    until("a half-connected queue pair stays", || queue_pairs() == before);
}

/// A peer that never answers READs of the importer's queue pairs, and what it was shown of them.
fn a_peer_that_is_deaf(bench: &Bench) -> (String, mpsc::Receiver<wire::End>, queue_pair::QueuePair) {
    let answering = bench.rail.answering().unwrap();
    let here = bench.rail.end(0, false, vec![(answering.number(), 0)]);
    let (tell, told) = mpsc::channel();
    let welcome = move |ends: Vec<wire::End>| {
        tell.send(ends[0].clone()).unwrap();
        vec![here.clone()]
    };
    let peer = a_peer_that_grants(RegionKey(0), LEN as u64, bench.source_key(), welcome);
    (peer, told, answering)
}

fn patient() -> VerbsConfig {
    VerbsConfig {
        timeout: 15,
        retries: 7,
        stall: LONG,
        ..config()
    }
}

/// XFER-2, F11: `cancel` returns when nothing of the read can land any more. Its work is with the device, which asks a
/// peer that does not answer yet again and again; the peer answers after the cancel. So it is, and soon, with a device
/// that tells nothing any more: then destroying the queue pair is the fence, and nobody waits for `stall`.
#[test]
fn work_that_waits_for_its_peer_lands_nothing_after_cancel() {
    if !is_there() {
        return;
    }
    for deaf in [false, true] {
        let bench = Bench::new();
        let (importer, target, copies) = importer(patient());
        let (peer, told, answering) = a_peer_that_is_deaf(&bench);
        let (reading, done) = read(&importer, &peer, copies(RegionKey(0)));
        let there = told.recv_timeout(LONG).unwrap();
        // Granted and posted by now.
        thread::sleep(Duration::from_millis(100));
        importer.faults().deafen(0, deaf);
        let begun = Instant::now();
        reading.cancel();
        assert!(
            begun.elapsed() < Duration::from_secs(2),
            "cancel took {:?}",
            begun.elapsed()
        );
        assert_eq!(done.recv_timeout(LONG).unwrap(), Err(MoverError::Cancelled));
        let path = bench.rail.path(&there, 0, false).unwrap();
        answering
            .connect(&bench.rail.choice, &path, &config().tuning())
            .unwrap();
        thread::sleep(Duration::from_millis(400));
        assert!(target.read(0, LEN) == [0; LEN], "a byte landed after cancel");
    }
}

/// Reads of one lease share its queue pairs; those of a cancelled one are failed, and the others begin anew as often as
/// that happens. No read is told that it was cancelled because another was.
#[test]
fn a_cancelled_read_takes_no_other_with_it() {
    if !is_there() {
        return;
    }
    let bench = Bench::new();
    let (importer, _target, copies) = importer(patient());
    let (peer, told, _answering) = a_peer_that_is_deaf(&bench);
    let reads = [(); 3].map(|()| read(&importer, &peer, copies(RegionKey(0))));
    for (at, (reading, done)) in reads.iter().enumerate() {
        told.recv_timeout(LONG).expect("they begin on one line, and then anew");
        thread::sleep(Duration::from_millis(50));
        reading.cancel();
        assert_eq!(done.recv_timeout(LONG).unwrap(), Err(MoverError::Cancelled));
        let others = reads[at + 1..].iter().filter_map(|(_, done)| done.try_recv().ok());
        assert_eq!(others.collect::<Vec<_>>(), [], "after the {at}th");
    }
}

/// Several devices: one on which no queue pair can be made, or whose peer cannot be reached, is left out.
#[test]
fn a_path_that_cannot_be_made_leaves_the_others() {
    if !is_there() {
        return;
    }
    let mut broken = rail(&config());
    Arc::get_mut(&mut broken).unwrap().choice.port = 9;
    let (address, now) = ("127.0.0.1:9".parse().unwrap(), Instant::now());
    let token = LeaseToken::random().unwrap();
    let dial = |rails: &[Arc<Rail>]| Line::dial(rails, &config(), &"peer".into(), address, token, now);
    let line = dial(&[rail(&config()), broken.clone()]).unwrap();
    let State::Dialing(made) = &line.state else {
        panic!("nothing was said yet")
    };
    assert_eq!((made.len(), line.greets_with(0), line.greets_with(1)), (1, true, false));
    let refused = dial(&[broken]).map(|_| ()).unwrap_err();
    assert!(
        matches!(refused, MoverError::Verbs(VerbsError::Call { .. })),
        "{refused}"
    );

    let peer = a_peer_that_grants(RegionKey(0), LEN as u64, Key { address: 0, key: 1 }, |ends| ends);
    let mut rails = [(); 2].map(|()| rail(&config()));
    Arc::get_mut(&mut rails[1]).unwrap().choice.gid_index = 200;
    let line = super::welcomed(&rails, &config(), &peer, token).unwrap();
    let dead: Vec<bool> = line.paths.iter().map(|path| path.is_dead()).collect();
    assert_eq!(dead, [false, true], "keys are by path, so it keeps its place");
    drop(line);
    let refused = super::welcomed(&rails[1..], &config(), &peer, token).map(|_| ());
    assert!(
        matches!(refused, Err(MoverError::Verbs(VerbsError::Call { .. }))),
        "{refused:?}"
    );
}

/// A read is spread over as many queue pairs of each path as it may use, another read over others.
#[test]
fn a_read_uses_as_many_queue_pairs_as_it_may() {
    if !is_there() {
        return;
    }
    let bench = Bench::new();
    let wide = VerbsConfig { pairs: 4, ..config() };
    let peer = a_peer_that_grants(RegionKey(0), LEN as u64, bench.source_key(), |ends| ends);
    let rails = [bench.rail.clone()];
    let token = LeaseToken::random().unwrap();
    let used = |id: u64, streams: usize| {
        let mut line = super::welcomed(&rails, &wide, &peer, token).unwrap();
        line.keys.learn(RegionKey(0), LEN as u64, vec![bench.source_key()]);
        let mut places = Vec::new();
        for number in 0..8 {
            let (path, place, room) = line.roomiest(id, streams, |_| 100).unwrap();
            assert!(room > 0 && room <= 100);
            let Line { paths, keys, .. } = &mut line;
            bench.post(&mut paths[path].queues[place].1, number, keys, 0, 100);
            places.push(place);
        }
        places.sort_unstable();
        places.dedup();
        places
    };
    assert_eq!(used(0, 1), [0]);
    assert_eq!(used(6, 1), [2]);
    assert_eq!(used(3, 2), [0, 3]);
    assert_eq!(used(1, 64), [0, 1, 2, 3]);
    let line = super::welcomed(&rails, &wide, &peer, token).unwrap();
    assert_eq!(
        line.roomiest(0, 4, |_| 0),
        None,
        "XFER-5: a full completion queue takes nothing"
    );
}

/// The lease's end reaches a peer that had asked for nothing for longer than answers may take: as that, not as a
/// connection that broke.
#[test]
fn a_quiet_peer_is_told_that_its_lease_was_revoked() {
    if !is_there() {
        return;
    }
    let short = VerbsConfig {
        stall: Duration::from_millis(100),
        ..config()
    };
    let (exporter, token) = exporter(short);
    let mut socket = TcpStream::connect(exporter.endpoint()).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket.write_all(&hello(token, Vec::new())).unwrap();
    let mut head = [0; HEAD];
    socket.read_exact(&mut head).unwrap();
    assert_eq!(decode_head(&head).unwrap().status, Status::Ok);
    thread::sleep(Duration::from_millis(300));
    exporter.fence(&token);
    socket
        .read_exact(&mut head)
        .expect("the notice, before the channel ends");
    assert_eq!(decode_head(&head).unwrap().status, Status::Revoked);
    until("the channel stays", || exporter.connections() == 0);
}

fn hello(token: LeaseToken, ends: Vec<wire::End>) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::encode_hello(&mut bytes, &wire::Hello { token, ends });
    bytes
}

/// F12: who sends a byte now and then is waited for no longer than who sends none, with a token and without.
#[test]
fn a_peer_that_dribbles_is_let_go() {
    if !is_there() {
        return;
    }
    let short = VerbsConfig {
        request: Duration::from_millis(300),
        ..config()
    };
    let (exporter, token) = exporter(short);
    let mut request = Vec::new();
    encode_request(&mut request, 1, &token, false, &[whole(RegionKey(0)); 8]);
    for (whole, dribbled) in [
        (Vec::new(), hello(token, Vec::new())),
        (hello(token, Vec::new()), request),
    ] {
        let mut socket = TcpStream::connect(exporter.endpoint()).unwrap();
        socket.write_all(&whole).unwrap();
        let begun = Instant::now();
        let mut let_go = false;
        for byte in &dribbled {
            thread::sleep(Duration::from_millis(40));
            let_go |= begun.elapsed() > Duration::from_millis(200) && exporter.connections() == 0;
            if let_go || socket.write_all(&[*byte]).is_err() {
                break;
            }
        }
        assert!(let_go, "it was waited for {:?}", begun.elapsed());
    }
}

/// Nothing half-connected stays of a handshake that fails, on either side, whoever breaks it off.
#[test]
fn nothing_stays_of_a_failed_handshake() {
    if !is_there() {
        return;
    }
    let before = queue_pairs();
    let bench = Bench::new();
    let (exporter, token) = exporter(config());
    let (importer, _target, copies) = importer(config());
    // A token that opens nothing.
    let unknown = read(&importer, &exporter.endpoint(), copies(RegionKey(0))).1;
    let unknown = unknown.recv_timeout(LONG).unwrap();
    assert!(matches!(unknown, Err(MoverError::UnknownToken { .. })), "{unknown:?}");
    let here = |link| wire::End {
        link,
        ..bench.rail.end(0, true, vec![(77, 7)])
    };
    // One that goes after its hello, one that goes in the middle of it, one that is no peer at all.
    let good = hello(token, vec![here(Link::Ethernet)]);
    for bytes in [&good[..], &good[..50], b"GET / HTTP/1.1\r\n\r\n"] {
        let mut socket = TcpStream::connect(exporter.endpoint()).unwrap();
        socket.write_all(bytes).unwrap();
        if bytes.len() == good.len() {
            socket.read_exact(&mut [0; HEAD]).unwrap();
            assert!(queue_pairs() > before, "its queue pairs stood");
        }
    }
    // One whose devices are of the other link type: no path, and the other way round a refusal.
    let mut socket = TcpStream::connect(exporter.endpoint()).unwrap();
    socket.write_all(&hello(token, vec![here(Link::InfiniBand)])).unwrap();
    let mut head = [0; HEAD];
    socket.read_exact(&mut head).unwrap();
    assert_eq!(decode_head(&head).unwrap().len, 0, "no end answers");
    drop(socket);
    let key = Key { address: 0, key: 1 };
    for (welcome, expected) in [
        (
            None,
            "no usable device of our link type (Ethernet): name matching devices with --ib-device",
        ),
        (Some(here(Link::InfiniBand)), "link is 0, expected 1"),
    ] {
        let welcome = move |_| welcome.iter().cloned().collect();
        let peer = a_peer_that_grants(RegionKey(0), LEN as u64, key, welcome);
        let refused = read(&importer, &peer, copies(RegionKey(0)))
            .1
            .recv_timeout(LONG)
            .unwrap();
        let line = refused.unwrap_err().to_string();
        assert!(line.contains(expected) && !line.contains('\n'), "{line}");
    }
    // One that accepts and says nothing, until its reader has had enough.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = silent.local_addr().unwrap().to_string();
    let (reading, done) = read(&importer, &peer, copies(RegionKey(0)));
    let (mut socket, _) = silent.accept().unwrap();
    reading.cancel();
    assert_eq!(done.recv_timeout(LONG).unwrap(), Err(MoverError::Cancelled));
    socket.set_read_timeout(Some(LONG)).unwrap();
    until("the channel to a silent peer stays", || {
        matches!(socket.read(&mut [0; 4096]), Ok(0))
    });
    until("a side channel stays", || exporter.connections() == 0);
    until("a queue pair stays", || queue_pairs() == before);
    exporter.fence(&token);
    assert_eq!(exporter.leases(), 0);
}
