//! Two machines: scripts/rdma/test.sh boots two guests on one wire and runs this in both. Elsewhere it is skipped.

mod verbs_guest;

use std::{
    env,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use kvc_rdma::{Copy, HostRegion, LeaseToken, Mover, MoverError, ReadOptions, RegionKey, Run, VerbsMover};
use verbs_guest::config;

const EXPORTER: &str = "10.88.0.1";
const IMPORTER: &str = "10.88.0.2";
const LEN: usize = 4 << 20;
const LONG: Duration = Duration::from_secs(60);

/// Bytes cross from one machine to the other; then the exporter's machine falls silent and the importer is told in
/// bounded time (XFER-7).
#[test]
fn bytes_cross_between_two_machines_and_a_lost_one_is_told() {
    match env::var("GUEST").as_deref() {
        Ok("1") => export(),
        Ok("2") => import(),
        _ => eprintln!("skipped: scripts/rdma/test.sh runs it in two guests"),
    }
}

fn start(address: &str) -> VerbsMover {
    assert!(verbs_guest::is_there());
    let mut config = config(false);
    config.bind = (address.parse::<std::net::IpAddr>().unwrap(), 0).into();
    (config.timeout, config.retries) = (14, 4);
    VerbsMover::start(config).unwrap()
}

fn pattern() -> Vec<u8> {
    (0..LEN).map(|at| 1 + (at ^ at >> 12) as u8 % 250).collect()
}

fn run(region: RegionKey) -> Run {
    Run {
        region,
        offset: 0,
        len: LEN as u64,
    }
}

fn export() {
    let mover = start(EXPORTER);
    let region = mover.register(HostRegion::from_bytes(&pattern()).into()).unwrap();
    let token = LeaseToken::random().unwrap();
    mover.expose(token, LONG).unwrap();
    mover.extend(&token, &[run(region)]).unwrap();
    let (mut importer, _) = TcpListener::bind((EXPORTER, 7000)).unwrap().accept().unwrap();
    importer.write_all(token.as_bytes()).unwrap();
    importer.write_all(mover.endpoint().as_bytes()).unwrap();
    importer.shutdown(std::net::Shutdown::Write).unwrap();
    // Until the importer has what it wants: then this machine is gone from one moment to the next.
    importer.read_to_end(&mut Vec::new()).unwrap();
    process::Command::new("/opt/bin/ip")
        .args(["link", "set", "eth0", "down"])
        .status()
        .unwrap();
}

fn import() {
    let mover = start(IMPORTER);
    let begun = Instant::now();
    let mut exporter = loop {
        match TcpStream::connect((EXPORTER, 7000)) {
            Ok(exporter) => break exporter,
            Err(e) => assert!(begun.elapsed() < LONG, "the exporter is not there: {e}"),
        }
        thread::sleep(Duration::from_millis(100));
    };
    let mut offer = Vec::new();
    exporter.read_to_end(&mut offer).unwrap();
    let (token, endpoint) = offer.split_first_chunk::<32>().unwrap();
    let endpoint = String::from_utf8(endpoint.to_vec()).unwrap();
    let target = HostRegion::new(LEN);
    let local = mover.register(target.clone().into()).unwrap();
    let read = |deadline| {
        let (tx, done) = mpsc::channel();
        let copies = vec![Copy {
            remote: run(RegionKey(0)),
            local: run(local),
        }];
        let options = ReadOptions {
            deadline,
            checksum: true,
            ..ReadOptions::default()
        };
        let token = LeaseToken::from_bytes(*token);
        mover.read(
            &endpoint,
            token,
            copies,
            options,
            Box::new(move |result| tx.send(result).unwrap()),
        );
        done.recv_timeout(LONG).expect("done is called")
    };
    assert_eq!(read(LONG).unwrap().bytes, LEN as u64);
    assert!(target.read(0, LEN) == pattern());
    drop(exporter);
    thread::sleep(Duration::from_secs(1));
    let lost = read(Duration::from_secs(5));
    assert!(
        matches!(
            lost,
            Err(MoverError::Timeout { .. } | MoverError::PeerGone { .. } | MoverError::Connect { .. })
        ),
        "{lost:?}"
    );
}
