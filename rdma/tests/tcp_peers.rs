//! T7 at the mover: peers that are slow, dead, strange or hostile, on raw sockets against either side of the tcp mover.

use std::{
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use kvc_rdma::{
    Copy, HostRegion, LeaseToken, Mover, MoverError, ReadOptions, ReadStats, RegionKey, Run, TcpConfig, TcpMover,
    error::Wait,
    tcp::wire::{self, HEAD, Head, Status, Tail},
};
use proptest::prelude::*;

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(80);
const LEN: usize = 4 << 20;

/// Short waits, so that a test of one does not take long.
fn hasty() -> TcpConfig {
    TcpConfig {
        request: SHORT,
        stall: SHORT,
        idle: 3 * SHORT,
        connect: SHORT,
        ..TcpConfig::default()
    }
}

/// An exporter with a lease on all of a region.
struct Exporter {
    mover: TcpMover,
    region: RegionKey,
    token: LeaseToken,
}

impl Exporter {
    fn start(config: TcpConfig) -> Self {
        let mover = TcpMover::start(config).unwrap();
        let region = mover.register(HostRegion::from_bytes(&vec![7; LEN]).into()).unwrap();
        let token = LeaseToken::random().unwrap();
        mover.expose(token, LONG).unwrap();
        mover
            .extend(
                &token,
                &[Run {
                    region,
                    offset: 0,
                    len: LEN as u64,
                }],
            )
            .unwrap();
        Exporter { mover, region, token }
    }

    fn dial(&self) -> TcpStream {
        let socket = TcpStream::connect(self.mover.endpoint()).unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        socket
    }

    fn request(&self, len: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        wire::encode_request(
            &mut bytes,
            5,
            &self.token,
            false,
            &[Run {
                region: self.region,
                offset: 0,
                len,
            }],
        );
        bytes
    }

    /// T7: nothing is kept for a peer that is gone.
    fn wait_for_connections(&self, count: usize) {
        wait_for(|| self.mover.connections() == count, "connections");
    }
}

/// An importer with somewhere to land.
struct Importer {
    mover: TcpMover,
    region: RegionKey,
    target: Arc<HostRegion>,
}

impl Importer {
    fn start(config: TcpConfig) -> Self {
        let mover = TcpMover::start(config).unwrap();
        let target = HostRegion::new(LEN);
        let region = mover.register(target.clone().into()).unwrap();
        Importer { mover, region, target }
    }

    fn begin(&self, peer: &str, token: LeaseToken, len: u64) -> mpsc::Receiver<Result<ReadStats, MoverError>> {
        let (tx, done) = mpsc::channel();
        let remote = Run {
            region: RegionKey(0),
            offset: 0,
            len,
        };
        let copies = vec![Copy {
            remote,
            local: Run {
                region: self.region,
                ..remote
            },
        }];
        let options = ReadOptions {
            deadline: LONG,
            checksum: true,
            streams: 1,
        };
        self.mover.read(
            peer,
            token,
            copies,
            options,
            Box::new(move |result| tx.send(result).unwrap()),
        );
        done
    }

    fn read(&self, peer: &str, token: LeaseToken, len: u64) -> Result<ReadStats, MoverError> {
        self.begin(peer, token, len).recv_timeout(LONG).unwrap()
    }

    /// Reads 1000 bytes from a peer that takes the request and then does as told.
    fn read_from(&self, peer: impl FnOnce(TcpStream) + Send + 'static) -> (String, Result<ReadStats, MoverError>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let peer = thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            socket.read_exact(&mut [0; wire::REQUEST_HEAD + wire::RUN]).unwrap();
            peer(socket);
        });
        let result = self.read(&endpoint, LeaseToken::from_bytes([1; 32]), 1000);
        peer.join().unwrap();
        (endpoint, result)
    }
}

fn wait_for(mut there: impl FnMut() -> bool, what: &str) {
    let begun = Instant::now();
    while !there() {
        assert!(begun.elapsed() < LONG, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

fn head(status: Status, id: u64, len: u64, fact: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::encode_head(&mut bytes, &Head { status, id, len, fact });
    bytes
}

fn answered_head(socket: &mut TcpStream) -> Head {
    let mut bytes = [0; HEAD];
    socket.read_exact(&mut bytes).unwrap();
    wire::decode_head(&bytes).unwrap()
}

/// Whether the other side closes; it may have left bytes unread, which shows as a reset.
fn is_closed(socket: &mut TcpStream) -> bool {
    match socket.read(&mut [0; 64]) {
        Ok(count) => count == 0,
        Err(e) => matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe),
    }
}

/// Holds a socket open until its peer is done with it.
fn hold(mut socket: TcpStream) {
    socket.set_read_timeout(Some(LONG)).unwrap();
    let _ = std::io::copy(&mut socket, &mut std::io::sink());
}

// The exporter's side.

#[test]
fn a_request_that_trickles_in_is_cut_off() {
    let exporter = Exporter::start(TcpConfig { idle: LONG, ..hasty() });
    let mut slow = exporter.dial();
    slow.write_all(&exporter.request(10)).unwrap();
    assert_eq!(answered_head(&mut slow).status, Status::Ok);
    slow.read_exact(&mut [0; 10 + wire::TAIL]).unwrap();
    let begun = Instant::now();
    for byte in exporter.request(10).into_iter().cycle() {
        if slow.write_all(&[byte]).is_err() {
            break;
        }
        assert!(begun.elapsed() < LONG, "a slow loris holds its connection");
        thread::sleep(Duration::from_millis(4));
    }
    exporter.wait_for_connections(0);
}

#[test]
fn a_connection_without_a_valid_token_is_cut_off_however_busy() {
    let exporter = Exporter::start(TcpConfig {
        idle: LONG,
        stall: LONG,
        ..hasty()
    });
    let mut stranger = exporter.dial();
    let mut request = Vec::new();
    wire::encode_request(&mut request, 5, &LeaseToken::from_bytes([9; 32]), false, &[]);
    let begun = Instant::now();
    while stranger.write_all(&request).is_ok() {
        let mut bytes = [0; HEAD];
        if stranger.read_exact(&mut bytes).is_err() {
            break;
        }
        assert_eq!(wire::decode_head(&bytes).unwrap().status, Status::UnknownToken);
        assert!(begun.elapsed() < LONG, "a stranger holds a connection");
        thread::sleep(Duration::from_millis(4));
    }
    exporter.wait_for_connections(0);
}

#[test]
fn a_silent_connection_is_cut_off_and_disturbs_nobody() {
    let exporter = Exporter::start(TcpConfig { idle: LONG, ..hasty() });
    let mut silent: Vec<TcpStream> = (0..50).map(|_| exporter.dial()).collect();
    let importer = Importer::start(TcpConfig::default());
    importer
        .read(&exporter.mover.endpoint(), exporter.token, LEN as u64)
        .unwrap();
    assert!(silent.iter_mut().all(is_closed));
    exporter.wait_for_connections(1);
}

#[test]
fn an_idle_connection_is_closed() {
    let exporter = Exporter::start(hasty());
    let mut idle = exporter.dial();
    idle.write_all(&exporter.request(1)).unwrap();
    idle.read_exact(&mut [0; HEAD + 1 + wire::TAIL]).unwrap();
    assert!(is_closed(&mut idle));
    exporter.wait_for_connections(0);
}

#[test]
fn bad_requests_are_refused_by_kind_and_closed() {
    let exporter = Exporter::start(TcpConfig::default());
    let good = exporter.request(10);
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    let cases = [
        (
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            Status::BadFrame,
            u64::from(wire::REQUEST_MAGIC),
        ),
        (with(4, 2), Status::BadVersion, u64::from(wire::VERSION)),
        (with(6, 0x80), Status::BadFrame, 1),
        (with(51, 0xff), Status::TooLarge, wire::MAX_BODY),
        (with(59, 0xff), Status::TooLarge, wire::MAX_RUNS as u64),
        (with(48, 11), Status::BadFrame, 10),
    ];
    for (bytes, status, fact) in cases {
        let mut socket = exporter.dial();
        socket.write_all(&bytes).unwrap();
        let refused = answered_head(&mut socket);
        assert_eq!((refused.status, refused.fact), (status, fact));
        assert!(is_closed(&mut socket));
    }
    exporter.wait_for_connections(0);
}

#[test]
fn what_was_asked_before_a_bad_request_is_still_answered() {
    let exporter = Exporter::start(TcpConfig::default());
    let mut socket = exporter.dial();
    socket
        .write_all(&[exporter.request(10), b"nonsense".to_vec()].concat())
        .unwrap();
    assert_eq!(answered_head(&mut socket).status, Status::Ok);
    socket.read_exact(&mut [0; 10 + wire::TAIL]).unwrap();
    assert_eq!(answered_head(&mut socket).status, Status::BadFrame);
    assert!(is_closed(&mut socket));
}

#[test]
fn a_reader_that_stops_reading_is_cut_off_and_holds_up_no_fence() {
    let exporter = Exporter::start(hasty());
    let mut stuck = exporter.dial();
    (0..60).for_each(|_| stuck.write_all(&exporter.request(LEN as u64)).unwrap());
    answered_head(&mut stuck);
    exporter.mover.fence(&exporter.token);
    exporter.wait_for_connections(0);
}

#[test]
fn nothing_is_kept_for_an_importer_that_dies_in_the_middle() {
    let exporter = Exporter::start(TcpConfig::default());
    for _ in 0..5 {
        let mut doomed = exporter.dial();
        doomed.write_all(&exporter.request(LEN as u64)).unwrap();
        doomed.read_exact(&mut [0; 100_000]).unwrap();
        drop(doomed);
    }
    exporter.wait_for_connections(0);
    exporter.mover.fence(&exporter.token);
    assert_eq!(exporter.mover.leases(), 0);
}

#[test]
fn connections_are_bounded_and_who_is_too_many_is_told() {
    let exporter = Exporter::start(TcpConfig {
        connections: 2,
        ..TcpConfig::default()
    });
    let held = [exporter.dial(), exporter.dial()];
    exporter.wait_for_connections(2);
    let importer = Importer::start(TcpConfig::default());
    let (peer, token) = (exporter.mover.endpoint(), exporter.token);
    let busy = importer.read(&peer, token, 10);
    // Its request may meet a socket that is closed already.
    assert!(
        matches!(busy, Err(MoverError::PeerBusy { .. } | MoverError::PeerGone { .. })),
        "{busy:?}"
    );
    let mut third = exporter.dial();
    let refused = answered_head(&mut third);
    assert_eq!((refused.status, refused.fact), (Status::Busy, 2));
    drop(held);
    exporter.wait_for_connections(0);
    importer.read(&peer, token, 10).unwrap();
}

#[test]
fn leases_are_bounded() {
    let exporter = Exporter::start(TcpConfig {
        leases: 1,
        ..TcpConfig::default()
    });
    let another = LeaseToken::random().unwrap();
    assert_eq!(
        exporter.mover.expose(another, LONG),
        Err(MoverError::TooMany {
            what: "leases",
            limit: 1
        })
    );
    exporter.mover.fence(&exporter.token);
    exporter.mover.expose(another, LONG).unwrap();
}

// The importer's side.

#[test]
fn nobody_listening_is_a_connect_error() {
    let closed = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .to_string();
    let importer = Importer::start(TcpConfig::default());
    let result = importer.read(&closed, LeaseToken::from_bytes([1; 32]), 10);
    assert!(
        matches!(&result, Err(MoverError::Connect { peer, errno }) if *peer == closed && *errno != 0),
        "{result:?}"
    );
}

#[test]
fn an_endpoint_that_is_none_is_refused() {
    let importer = Importer::start(TcpConfig::default());
    for peer in ["", "localhost", "127.0.0.1", "host.example:1", "127.0.0.1:99999"] {
        let result = importer.read(peer, LeaseToken::from_bytes([1; 32]), 10);
        assert_eq!(result, Err(MoverError::BadPeer { peer: peer.into() }));
    }
}

#[test]
fn strange_answers_are_typed() {
    let importer = Importer::start(TcpConfig::default());
    let answer = |bytes: Vec<u8>| {
        move |mut socket: TcpStream| {
            socket.write_all(&bytes).unwrap();
            hold(socket);
        }
    };
    let (peer, result) = importer.read_from(answer(b"HTTP/1.1 400 Bad Request\r\n\r\n......".to_vec()));
    let (got, expected) = (u32::from_le_bytes(*b"HTTP"), wire::ANSWER_MAGIC);
    assert_eq!(result, Err(MoverError::BadMagic { peer, got, expected }));

    let mut newer = head(Status::Ok, 1, 1000, 0);
    newer[4] = 9;
    let (peer, result) = importer.read_from(answer(newer));
    assert_eq!(
        result,
        Err(MoverError::BadVersion {
            peer,
            got: 9,
            expected: wire::VERSION
        })
    );

    let mut oversized = head(Status::Ok, 1, 0, 0);
    oversized[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
    let (_, result) = importer.read_from(answer(oversized));
    assert_eq!(
        result,
        Err(MoverError::TooLarge {
            what: "body",
            got: u64::MAX,
            limit: wire::MAX_BODY
        })
    );

    let (peer, result) = importer.read_from(answer(head(Status::Ok, 1, 1001, 0)));
    assert_eq!(
        result,
        Err(MoverError::BadFrame {
            peer,
            what: "len",
            got: 1001,
            expected: 1000
        })
    );

    let (peer, result) = importer.read_from(answer(head(Status::Ok, 2, 1000, 0)));
    assert_eq!(
        result,
        Err(MoverError::BadFrame {
            peer,
            what: "id",
            got: 2,
            expected: 1
        })
    );

    let mut status = head(Status::Ok, 1, 1000, 0);
    status[6] = 99;
    let (peer, result) = importer.read_from(answer(status));
    assert_eq!(
        result,
        Err(MoverError::BadFrame {
            peer,
            what: "status",
            got: 99,
            expected: 8
        })
    );

    let (peer, result) = importer.read_from(answer(head(Status::RangeRefused, 1, 0, 7)));
    assert_eq!(
        result,
        Err(MoverError::BadFrame {
            peer,
            what: "refused run",
            got: 7,
            expected: 0
        })
    );
    assert_eq!(
        importer.target.read(0, LEN),
        vec![0; LEN],
        "a byte landed from a peer that cannot be understood"
    );
}

#[test]
fn a_tail_of_another_answer_is_refused() {
    let importer = Importer::start(TcpConfig::default());
    let (peer, result) = importer.read_from(|mut socket| {
        let mut bytes = [head(Status::Ok, 1, 1000, 0), vec![7; 1000]].concat();
        wire::encode_tail(
            &mut bytes,
            &Tail {
                status: Status::Ok,
                crc: 0,
                id: 2,
            },
        );
        socket.write_all(&bytes).unwrap();
        hold(socket);
    });
    assert_eq!(
        result,
        Err(MoverError::BadFrame {
            peer,
            what: "tail id",
            got: 2,
            expected: 1
        })
    );
}

#[test]
fn an_end_inside_a_frame_is_truncated_and_between_frames_gone() {
    let importer = Importer::start(TcpConfig::default());
    let whole = [head(Status::Ok, 1, 1000, 0), vec![7; 1000], vec![0; wire::TAIL]].concat();
    for (cut, got, expected) in [
        (5, 5, HEAD),
        (HEAD, 0, 1000),
        (HEAD + 7, 7, 1000),
        (HEAD + 1003, 3, wire::TAIL),
    ] {
        let bytes = whole[..cut].to_vec();
        let (peer, result) = importer.read_from(move |mut socket| socket.write_all(&bytes).unwrap());
        let (got, expected) = (got as u64, expected as u64);
        assert_eq!(
            result,
            Err(MoverError::Truncated { peer, got, expected }),
            "after {cut} bytes"
        );
    }
    let (peer, result) = importer.read_from(drop);
    assert_eq!(result, Err(MoverError::PeerGone { peer, errno: 0 }));
}

#[test]
fn a_peer_that_falls_silent_runs_into_the_idle_limit() {
    let importer = Importer::start(hasty());
    for bytes in [
        vec![],
        head(Status::Ok, 1, 1000, 0),
        [head(Status::Ok, 1, 1000, 0), vec![7; 1000]].concat(),
    ] {
        let (peer, result) = importer.read_from(move |mut socket| {
            socket.write_all(&bytes).unwrap();
            hold(socket);
        });
        assert_eq!(
            result,
            Err(MoverError::Timeout {
                peer,
                wait: Wait::Idle,
                limit: SHORT
            })
        );
    }
}

#[test]
fn reads_are_bounded() {
    let importer = Importer::start(TcpConfig {
        reads: 2,
        ..TcpConfig::default()
    });
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = listener.local_addr().unwrap().to_string();
    let token = LeaseToken::from_bytes([1; 32]);
    let waiting = [importer.begin(&peer, token, 10), importer.begin(&peer, token, 10)];
    let refused = importer.read(&peer, token, 10);
    assert_eq!(
        refused,
        Err(MoverError::TooMany {
            what: "reads",
            limit: 2
        })
    );
    assert!(waiting.iter().all(|done| done.try_recv().is_err()));
}

#[test]
fn a_panic_in_one_done_ends_no_other_read() {
    let exporter = Exporter::start(TcpConfig::default());
    let importer = Importer::start(TcpConfig::default());
    let peer = exporter.mover.endpoint();
    importer.mover.read(
        &peer,
        exporter.token,
        vec![],
        ReadOptions::default(),
        Box::new(|_| panic!("in done")),
    );
    importer.read(&peer, exporter.token, 10).unwrap();
}

// Both.

#[test]
fn streams_stay_open_between_reads_and_close_when_idle() {
    let exporter = Exporter::start(TcpConfig::default());
    let importer = Importer::start(TcpConfig {
        idle: 2 * SHORT,
        ..TcpConfig::default()
    });
    let peer = exporter.mover.endpoint();
    for _ in 0..10 {
        importer.read(&peer, exporter.token, 1000).unwrap();
    }
    assert_eq!(exporter.mover.connections(), 1);
    exporter.wait_for_connections(0);
    importer.read(&peer, exporter.token, 1000).unwrap();
}

#[test]
fn a_peer_that_restarts_on_its_address_is_reached_again_and_knows_no_old_token() {
    let exporter = Exporter::start(TcpConfig::default());
    let importer = Importer::start(TcpConfig::default());
    let (peer, old) = (exporter.mover.endpoint(), exporter.token);
    importer.read(&peer, old, 1000).unwrap();
    drop(exporter);
    let gone = importer.read(&peer, old, 1000);
    let expected = matches!(gone, Err(MoverError::Connect { .. } | MoverError::PeerGone { .. }));
    assert!(expected, "{gone:?}");
    let again = Exporter::start(TcpConfig {
        bind: peer.parse().unwrap(),
        ..TcpConfig::default()
    });
    assert_eq!(
        importer.read(&peer, old, 1000),
        Err(MoverError::UnknownToken { peer: peer.clone() }),
        "F16"
    );
    importer.read(&peer, again.token, 1000).unwrap();
}

#[test]
fn the_announced_endpoint_has_the_real_port() {
    let advertise = Some(([10, 0, 0, 9], 0).into());
    let mover = TcpMover::start(TcpConfig {
        advertise,
        ..TcpConfig::default()
    })
    .unwrap();
    let endpoint = mover.endpoint();
    assert!(
        endpoint.starts_with("10.0.0.9:") && !endpoint.ends_with(":0"),
        "{endpoint}"
    );
    assert!(
        TcpMover::start(TcpConfig::default())
            .unwrap()
            .endpoint()
            .starts_with("127.0.0.1:"),
        "XFER-10"
    );
}

#[test]
fn an_address_in_use_stops_the_start() {
    let first = TcpMover::start(TcpConfig::default()).unwrap();
    let second = TcpMover::start(TcpConfig {
        bind: first.endpoint().parse().unwrap(),
        ..TcpConfig::default()
    });
    assert!(matches!(second.err(), Some(MoverError::System { call: "bind", errno }) if errno != 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// F19: whatever a peer answers, the read ends with an error of its own kind, and the next one is served.
    #[test]
    fn random_answers_end_a_read_and_nothing_else(bytes in prop::collection::vec(any::<u8>(), 0..200), valid: bool) {
        let importer = Importer::start(TcpConfig::default());
        let front = if valid { head(Status::Ok, 1, 1000, 0) } else { vec![] };
        let (_, result) = importer.read_from(move |mut socket| socket.write_all(&[front, bytes].concat()).unwrap());
        prop_assert!(result.is_err());
        let exporter = Exporter::start(TcpConfig::default());
        importer.read(&exporter.mover.endpoint(), exporter.token, 10).unwrap();
    }

    /// F19: whatever a peer asks, the exporter answers or closes, and the next one is served.
    #[test]
    fn random_requests_disturb_nobody(bytes in prop::collection::vec(any::<u8>(), 0..200), cut in 0usize..84) {
        let exporter = Exporter::start(TcpConfig::default());
        let mut socket = exporter.dial();
        socket.write_all(&[&exporter.request(10)[..cut], &bytes].concat()).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = socket.read_to_end(&mut Vec::new());
        exporter.wait_for_connections(0);
        let importer = Importer::start(TcpConfig::default());
        importer.read(&exporter.mover.endpoint(), exporter.token, 10).unwrap();
    }
}
