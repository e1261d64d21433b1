//! Two processes over shm: what the conformance suite, in one process, cannot show. The other process is this test binary
//! again, told by its environment what to be (`peer`).

use std::{
    env,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdout, Command, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use kvc_rdma::{
    Copy, HostRegion, LeaseToken, Mover, MoverError, ReadHandle, ReadOptions, ReadStats, Region, RegionKey, Run,
    ShmConfig, ShmMover, shm,
};

const LEN: usize = 8 << 20;
const LONG: Duration = Duration::from_secs(20);
const BEFORE: u8 = 0x11;
const AFTER: u8 = 0xee;

/// The other process: nothing when the suite runs it as a test.
#[test]
fn peer() {
    match env::var("KVC_SHM_PEER").as_deref() {
        Ok("exporter") => export(),
        Ok("importer") => import(),
        _ => {}
    }
}

/// Exposes a region under a token and says where; ends with its input.
fn export() {
    let mover = ShmMover::start(ShmConfig::default()).unwrap();
    let (token, _, _) = exposed(&mover, BEFORE);
    say(&format!("{} {}", mover.endpoint(), hex(&token)));
    std::io::stdin().lines().for_each(drop);
}

/// Reads the same bytes again and again and says so once, until it is killed.
fn import() {
    let (endpoint, token) = (
        env::var("KVC_SHM_ENDPOINT").unwrap(),
        env::var("KVC_SHM_TOKEN").unwrap(),
    );
    let mover = ShmMover::start(ShmConfig::default()).unwrap();
    let local = mover.register(HostRegion::new(LEN).into()).unwrap();
    let read = || begin(&mover, &endpoint, unhex(&token), local, ReadOptions::default()).1;
    read().recv_timeout(LONG).unwrap().unwrap();
    say("reading");
    while read().recv_timeout(LONG).is_ok() {}
}

/// A process of the tests, killed with them.
struct Peer {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Peer {
    fn start(role: &str, environment: &[(&str, String)]) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "peer", "--nocapture"])
            .env("KVC_SHM_PEER", role)
            .envs(environment.iter().cloned())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Peer { child, output }
    }

    fn exporter() -> (Self, String, LeaseToken) {
        let mut peer = Peer::start("exporter", &[]);
        let line = peer.hear();
        let (endpoint, token) = line.split_once(' ').unwrap();
        (peer, endpoint.into(), unhex(token))
    }

    fn importer(endpoint: &str, token: &LeaseToken) -> Self {
        let environment = [("KVC_SHM_ENDPOINT", endpoint.into()), ("KVC_SHM_TOKEN", hex(token))];
        let mut peer = Peer::start("importer", &environment);
        assert_eq!(peer.hear(), "reading");
        peer
    }

    /// What it says next; the test harness's own lines are none of it.
    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the peer ended");
            if let Some((_, said)) = line.trim().split_once("peer says: ") {
                return said.into();
            }
        }
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(sent.unwrap().success());
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(what: &str) {
    println!("peer says: {what}");
    std::io::stdout().flush().unwrap();
}

fn hex(token: &LeaseToken) -> String {
    token.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> LeaseToken {
    let byte = |at: usize| u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).unwrap();
    LeaseToken::from_bytes(std::array::from_fn(byte))
}

fn whole(region: RegionKey) -> Run {
    Run {
        region,
        offset: 0,
        len: LEN as u64,
    }
}

fn exposed(mover: &ShmMover, byte: u8) -> (LeaseToken, RegionKey, Arc<HostRegion>) {
    let source = HostRegion::shared(LEN, shm::Pages::Default).unwrap();
    source.write(0, &vec![byte; LEN]);
    let region = mover.register(source.clone().into()).unwrap();
    let token = LeaseToken::random().unwrap();
    mover.expose(token, LONG * 6).unwrap();
    mover.extend(&token, &[whole(region)]).unwrap();
    (token, region, source)
}

type Results = mpsc::Receiver<Result<ReadStats, MoverError>>;

fn begin(
    mover: &ShmMover,
    peer: &str,
    token: LeaseToken,
    local: RegionKey,
    options: ReadOptions,
) -> (ReadHandle, Results) {
    let (tx, done) = mpsc::channel();
    let copies = vec![Copy {
        remote: whole(RegionKey(0)),
        local: whole(local),
    }];
    let handle = mover.read(
        peer,
        token,
        copies,
        options,
        Box::new(move |result| drop(tx.send(result))),
    );
    (handle, done)
}

/// An importer with a target, and its reads from a peer until one fails.
fn read_until_it_fails(mover: &ShmMover, peer: &str, token: LeaseToken, local: RegionKey) -> MoverError {
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < LONG, "reads go on without a peer");
        let (_, done) = begin(mover, peer, token, local, ReadOptions::default());
        if let Err(error) = done.recv_timeout(LONG).unwrap() {
            return error;
        }
    }
}

fn is_gone(error: &MoverError) -> bool {
    matches!(error, MoverError::PeerGone { .. } | MoverError::Connect { .. })
}

#[test]
fn bytes_arrive_from_another_process_with_their_checksum() {
    let (_peer, endpoint, token) = Peer::exporter();
    let (mover, target) = (ShmMover::start(ShmConfig::default()).unwrap(), HostRegion::new(LEN));
    let local = mover.register(target.clone().into()).unwrap();
    let options = ReadOptions {
        checksum: true,
        ..ReadOptions::default()
    };
    let stats = begin(&mover, &endpoint, token, local, options)
        .1
        .recv_timeout(LONG)
        .unwrap();
    assert_eq!(stats.unwrap().bytes, LEN as u64);
    assert!(target.read(0, LEN) == vec![BEFORE; LEN]);
}

/// XFER-7: the exporter is killed while its memory is being read: a typed error, no fault, and nothing is held against it.
#[test]
fn an_exporter_that_is_killed_is_a_typed_error() {
    let (peer, endpoint, token) = Peer::exporter();
    let mover = ShmMover::start(ShmConfig::default()).unwrap();
    let local = mover.register(HostRegion::new(LEN).into()).unwrap();
    begin(&mover, &endpoint, token, local, ReadOptions::default())
        .1
        .recv_timeout(LONG)
        .unwrap()
        .unwrap();
    let killer = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        drop(peer);
    });
    let error = read_until_it_fails(&mover, &endpoint, token, local);
    assert!(is_gone(&error), "{error}");
    killer.join().unwrap();
    let again = read_until_it_fails(&mover, &endpoint, token, local);
    assert!(is_gone(&again), "{again}");
    let (_peer, endpoint, token) = Peer::exporter();
    let (_, done) = begin(&mover, &endpoint, token, local, ReadOptions::default());
    done.recv_timeout(LONG).unwrap().unwrap();
}

/// XFER-2, XFER-7: importers are killed wherever they are, inside a copy as well; no fence waits for them.
#[test]
fn an_importer_that_is_killed_holds_no_fence() {
    let fence = Duration::from_secs(10);
    let mover = ShmMover::start(ShmConfig {
        fence,
        ..ShmConfig::default()
    })
    .unwrap();
    for _ in 0..3 {
        let (token, _, _source) = exposed_first(&mover);
        let importer = Peer::importer(&mover.endpoint(), &token);
        importer.signal("-KILL");
        let begun = Instant::now();
        mover.fence(&token);
        assert!(begun.elapsed() < fence / 2, "the fence waited for the dead");
    }
    assert_eq!(mover.late_fences(), 0);
}

/// XFER-2: an importer that is stopped, perhaps inside a copy, holds a fence for its deadline at most; no read of another
/// importer is touched.
#[test]
fn an_importer_that_is_stopped_holds_a_fence_for_its_deadline_at_most() {
    let fence = Duration::from_millis(200);
    let mover = ShmMover::start(ShmConfig {
        fence,
        ..ShmConfig::default()
    })
    .unwrap();
    let (token, _, source) = exposed_first(&mover);
    let importer = Peer::importer(&mover.endpoint(), &token);
    importer.signal("-STOP");
    let begun = Instant::now();
    mover.fence(&token);
    assert!(begun.elapsed() < fence + LONG / 2);
    source.write(0, &vec![AFTER; LEN]);
    importer.signal("-CONT");
    let (token, other) = (
        LeaseToken::random().unwrap(),
        ShmMover::start(ShmConfig::default()).unwrap(),
    );
    mover.expose(token, LONG).unwrap();
    mover.extend(&token, &[whole(RegionKey(0))]).unwrap();
    let target = HostRegion::new(LEN);
    let local = other.register(target.clone().into()).unwrap();
    let (_, done) = begin(&other, &mover.endpoint(), token, local, ReadOptions::default());
    done.recv_timeout(LONG).unwrap().unwrap();
    assert!(target.read(0, LEN) == vec![AFTER; LEN]);
}

/// The first region of a mover, since the importing process names region 0.
fn exposed_first(mover: &ShmMover) -> (LeaseToken, RegionKey, Arc<HostRegion>) {
    let (token, region, source) = exposed(mover, BEFORE);
    if region != RegionKey(0) {
        mover.extend(&token, &[whole(RegionKey(0))]).unwrap();
    }
    (token, region, source)
}

/// XFER-9: what cannot be shared is refused by name, so that another mover is chosen.
#[test]
fn memory_of_one_process_alone_is_not_exported() {
    let mover = ShmMover::start(ShmConfig::default()).unwrap();
    let region = mover.register(HostRegion::new(LEN).into()).unwrap();
    let token = LeaseToken::random().unwrap();
    mover.expose(token, LONG).unwrap();
    let run = whole(region);
    assert_eq!(mover.extend(&token, &[run]), Err(MoverError::NotShared { run }));
    assert!(!Region::from(HostRegion::new(1)).is_shareable());
    assert!(Region::from(HostRegion::shared(1, shm::Pages::Default).unwrap()).is_shareable());
}

#[test]
fn a_peer_elsewhere_is_told_from_one_that_is_gone() {
    let mover = ShmMover::start(ShmConfig::default()).unwrap();
    let local = mover.register(HostRegion::new(LEN).into()).unwrap();
    let token = LeaseToken::random().unwrap();
    let read = |peer: &str| {
        let (_, done) = begin(&mover, peer, token, local, ReadOptions::default());
        done.recv_timeout(LONG).unwrap().unwrap_err()
    };
    assert!(matches!(read("shm:0:0:kvc-1"), MoverError::OtherHost { .. }));
    assert!(matches!(read("127.0.0.1:1"), MoverError::BadPeer { .. }));
    let mut nobody = mover.endpoint();
    nobody.push('0');
    assert!(shm::is_here(&nobody) && matches!(read(&nobody), MoverError::Connect { .. }));
}

#[test]
fn leases_beyond_the_limit_and_configurations_that_cannot_work_are_refused() {
    let config = ShmConfig {
        leases: 1,
        ..ShmConfig::default()
    };
    let mover = ShmMover::start(config).unwrap();
    let open = || mover.expose(LeaseToken::random().unwrap(), LONG);
    open().unwrap();
    assert_eq!(
        open(),
        Err(MoverError::TooMany {
            what: "leases",
            limit: 1
        })
    );
    assert_eq!(mover.leases(), 1);
    let refused = ShmMover::start(ShmConfig {
        chunk: 1,
        ..ShmConfig::default()
    });
    assert!(matches!(
        refused.err(),
        Some(MoverError::BadConfig { field: "chunk", .. })
    ));
}

/// Chunks beyond one request, and more of them than are ever asked for ahead.
#[test]
fn a_read_of_many_requests_arrives_in_order() {
    let config = || ShmConfig {
        chunk: 4 << 10,
        ..ShmConfig::default()
    };
    let exporter = ShmMover::start(config()).unwrap();
    let importer = ShmMover::start(config()).unwrap();
    let len = 40 << 20;
    let source = HostRegion::shared(len, shm::Pages::Default).unwrap();
    let mark = |at: usize| [(at % 251) as u8, (at / 251 % 241) as u8];
    let pages = len / 4096;
    (0..pages).for_each(|at| source.write(at * 4096, &mark(at)));
    let remote = exporter.register(source.into()).unwrap();
    let target = HostRegion::new(len);
    let local = importer.register(target.clone().into()).unwrap();
    let token = LeaseToken::random().unwrap();
    let run = |region, at: usize| Run {
        region,
        offset: at as u64 * 4096,
        len: 4096,
    };
    exporter.expose(token, LONG).unwrap();
    let all = Run {
        region: remote,
        offset: 0,
        len: len as u64,
    };
    exporter.extend(&token, &[all]).unwrap();
    // Each page to the place that mirrors its own.
    let copies = (0..pages).map(|at| Copy {
        remote: run(remote, at),
        local: run(local, pages - 1 - at),
    });
    let (tx, done) = mpsc::channel();
    let options = ReadOptions {
        checksum: true,
        ..ReadOptions::default()
    };
    let done_once = Box::new(move |result| drop(tx.send(result)));
    importer.read(&exporter.endpoint(), token, copies.collect(), options, done_once);
    let stats = done.recv_timeout(LONG).unwrap().unwrap();
    assert_eq!((stats.bytes, stats.chunks), (len as u64, pages as u64));
    for at in 0..pages {
        assert_eq!(target.read((pages - 1 - at) * 4096, 2), mark(at), "page {at}");
    }
}
