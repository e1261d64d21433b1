//! What keys and queue pairs hold against, on a device: run in the guest (scripts/rdma/test.sh), skipped elsewhere.

use std::{
    env, thread,
    time::{Duration, Instant},
};

use super::{
    device::{Completion, Event},
    line::{Heard, Line, State},
    memory::Key,
    rail::packet_number,
    read::Over,
    work::SendQueue,
    *,
};
use crate::region::HostRegion;

mod peers;

const LEN: usize = 64 << 10;
/// Nothing in the guest takes this long.
const LONG: Duration = Duration::from_secs(60);
/// IB_WC_REM_INV_REQ_ERR, IB_WC_REM_ACCESS_ERR and IB_WC_RETRY_EXC_ERR.
const REQUEST: u32 = 9;
const ACCESS: u32 = 10;
const RETRIES: u32 = 12;

/// Whether there is a device; in the guest there must be.
fn is_there() -> bool {
    let found = Device::names();
    let there = found.as_ref().is_ok_and(|names| !names.is_empty());
    assert!(
        there || env::var_os("KVC_RDMA_GUEST").is_none(),
        "the guest has no RDMA device: {found:?}"
    );
    if !there {
        eprintln!("skipped: no RDMA device here; scripts/rdma/test.sh runs it in a guest");
    }
    there
}

/// Four retries of 17 ms, so that a lost packet is soon told.
fn config() -> VerbsConfig {
    VerbsConfig {
        timeout: 12,
        retries: 4,
        pairs: 1,
        ..VerbsConfig::default()
    }
}

/// The first device.
fn rail(config: &VerbsConfig) -> Arc<Rail> {
    let names = Device::names().unwrap();
    let wish = Wish {
        devices: names[..1].to_vec(),
        ..Wish::default()
    };
    let choice = choose(&Tree::read(Path::new("/sys")), &wish).unwrap().remove(0);
    Rail::open(choice, config).unwrap()
}

/// One device with memory on it: `0` is read, `1` is where bytes land.
struct Bench {
    rail: Arc<Rail>,
    memory: Memory,
    target: Arc<HostRegion>,
}

impl Bench {
    fn new() -> Self {
        Self::on(rail(&config()))
    }

    fn on(rail: Arc<Rail>) -> Self {
        let memory = Memory::new(vec![rail.domain.clone()], Arc::default());
        let target = HostRegion::new(LEN);
        memory.register(HostRegion::from_bytes(&[7; LEN]).into()).unwrap();
        memory.register(target.clone().into()).unwrap();
        Bench { rail, memory, target }
    }

    fn source_key(&self) -> Key {
        self.memory.view().keys(RegionKey(0)).unwrap().1.next().unwrap()
    }

    /// A queue and the pair that answers it, which is connected at once or by the caller.
    fn pair(
        &self,
        connect: bool,
    ) -> (
        SendQueue<'_>,
        queue_pair::QueuePair,
        impl Fn(&queue_pair::QueuePair) + '_,
    ) {
        let (asking, answering) = (self.rail.asking().unwrap(), self.rail.answering().unwrap());
        let psn = packet_number();
        let ends = [(asking.number(), psn), (answering.number(), 0)].map(|pair| self.rail.end(0, true, vec![pair]));
        let [here, there] = ends;
        let path = self.rail.path(&there, 0, true).unwrap();
        asking.connect(&self.rail.choice, &path, &config().tuning()).unwrap();
        asking.start(psn, &path, &config().tuning()).unwrap();
        let ready = move |answering: &queue_pair::QueuePair| {
            let path = self.rail.path(&here, 0, false).unwrap();
            answering.connect(&self.rail.choice, &path, &config().tuning()).unwrap();
        };
        if connect {
            ready(&answering);
        }
        (SendQueue::new(asking, 16), answering, ready)
    }

    /// Reads `len` bytes at `offset` with that key; the failure's status, if it fails.
    fn read<'m>(&'m self, queue: &mut SendQueue<'m>, key: Key, offset: u64, len: u64) -> Option<u32> {
        let mut keys = PeerKeys::default();
        keys.learn(RegionKey(0), u64::MAX, vec![key]);
        self.post(queue, 9, &keys, offset, len);
        self.finish(queue, 9)
    }

    fn post<'m>(&'m self, queue: &mut SendQueue<'m>, number: u32, keys: &PeerKeys, offset: u64, len: u64) {
        let mut scratch = Scratch::new(1);
        let mut batch = scratch.batch();
        let landing = self
            .memory
            .view()
            .landing(
                0,
                &Run {
                    region: RegionKey(1),
                    offset: 0,
                    len,
                },
            )
            .unwrap();
        let key = keys
            .key(
                0,
                &Run {
                    region: RegionKey(0),
                    offset,
                    len,
                },
            )
            .unwrap();
        assert!(batch.push(key, &[landing]));
        queue.post(number, 0, batch).unwrap();
    }

    /// Waits until nothing of the queue is outstanding.
    fn finish(&self, queue: &mut SendQueue<'_>, number: u32) -> Option<u32> {
        let (begun, mut finished) = (Instant::now(), Vec::new());
        while queue.outstanding() > 0 {
            assert!(begun.elapsed() < LONG, "work is not told complete");
            let mut completions: Vec<Completion> = Vec::new();
            self.rail.completions.poll(&mut completions).unwrap();
            for completion in completions.iter().filter(|each| (each.id >> 32) as u32 == number) {
                queue.complete(completion, &mut finished);
            }
        }
        queue.failed().map(|(status, _)| status)
    }

    fn landed(&self) -> bool {
        self.target.read(0, 1) == [7]
    }
}

/// A queue pair that asks answers nobody, whatever key it is shown: who is read from reads nothing in return (XFER-1).
#[test]
fn a_peer_that_is_read_from_reads_nothing() {
    if !is_there() {
        return;
    }
    let bench = Bench::new();
    let [ours, theirs] = [(); 2].map(|()| bench.rail.asking().unwrap());
    let ends = [&ours, &theirs].map(|pair| bench.rail.end(0, true, vec![(pair.number(), 7)]));
    for (pair, there) in [(&ours, &ends[1]), (&theirs, &ends[0])] {
        let path = bench.rail.path(there, 0, true).unwrap();
        pair.connect(&bench.rail.choice, &path, &config().tuning()).unwrap();
        pair.start(7, &path, &config().tuning()).unwrap();
    }
    let mut queue = SendQueue::new(theirs, 16);
    let refused = bench.read(&mut queue, bench.source_key(), 0, 100);
    assert!(matches!(refused, Some(REQUEST | ACCESS)), "{refused:?}");
    assert!(!bench.landed());
}

/// Obligation 3: a key that was never given opens nothing, and other pairs of the device do not notice.
#[test]
fn a_wrong_key_reads_nothing() {
    if !is_there() {
        return;
    }
    let bench = Bench::new();
    let (mut queue, _answering, _) = bench.pair(true);
    let good = bench.source_key();
    let wrong = Key {
        key: good.key ^ 0x5a00,
        ..good
    };
    assert_eq!(bench.read(&mut queue, wrong, 0, 100), Some(ACCESS));
    assert!(!bench.landed());
    assert_eq!(queue.room(), 0, "a failed queue takes nothing more");
    let (mut other, _answering, _) = bench.pair(true);
    assert_eq!(bench.read(&mut other, good, 0, 100), None);
    assert!(bench.landed());
}

/// The device itself refuses what lies past the region, also where the first byte is inside.
#[test]
fn a_range_past_the_region_reads_nothing() {
    if !is_there() {
        return;
    }
    let bench = Bench::new();
    for (offset, len) in [(LEN as u64 - 1, 2), (LEN as u64, 1), (1 << 40, 1)] {
        let (mut queue, _answering, _) = bench.pair(true);
        assert_eq!(
            bench.read(&mut queue, bench.source_key(), offset, len),
            Some(ACCESS),
            "{len} at {offset}"
        );
        assert!(!bench.landed());
    }
}

/// A peer that is late to answer is asked again; one that never does ends the work in bounded time (XFER-7).
#[test]
fn a_peer_that_is_not_ready_is_asked_again_and_not_for_ever() {
    if !is_there() {
        return;
    }
    let bench = Bench::new();
    let mut keys = PeerKeys::default();
    keys.learn(RegionKey(0), LEN as u64, vec![bench.source_key()]);
    let (mut queue, answering, ready) = bench.pair(false);
    bench.post(&mut queue, 9, &keys, 0, 100);
    thread::sleep(Duration::from_millis(10));
    ready(&answering);
    assert_eq!(bench.finish(&mut queue, 9), None);
    assert!(bench.landed());
    let (mut queue, _answering, _) = bench.pair(false);
    bench.post(&mut queue, 9, &keys, 0, 100);
    assert_eq!(bench.finish(&mut queue, 9), Some(RETRIES));
}

/// XFER-2, the fence itself: the key of a fenced lease reads nothing through that lease's queue pairs, while another
/// lease of the same peer goes on.
#[test]
fn an_old_key_reads_nothing_behind_the_fence() {
    if !is_there() {
        return;
    }
    let bench = Bench::new();
    let exporter = VerbsMover::start(config()).unwrap();
    let region = exporter.register(HostRegion::from_bytes(&[7; LEN]).into()).unwrap();
    let run = Run {
        region,
        offset: 0,
        len: LEN as u64,
    };
    let rails = [bench.rail.clone()];
    let mut lines = [(); 2].map(|()| {
        let token = LeaseToken::random().unwrap();
        exporter.expose(token, LONG).unwrap();
        exporter.extend(&token, &[run]).unwrap();
        (token, granted(&rails, &exporter.endpoint(), token, &run))
    });
    let mut read = |at: usize, number: u32| {
        bench.target.write(0, &[0; LEN]);
        let Line { paths, keys, .. } = &mut lines[at].1;
        let (_, queue) = &mut paths[0].queues[0];
        bench.post(queue, number, keys, 0, 1000);
        (bench.finish(queue, number), bench.landed())
    };
    assert_eq!((read(0, 1), read(1, 2)), ((None, true), (None, true)));
    exporter.fence(&lines[0].0);
    let mut read = |at: usize, number: u32| {
        bench.target.write(0, &[0; LEN]);
        let Line { paths, keys, .. } = &mut lines[at].1;
        let (_, queue) = &mut paths[0].queues[0];
        bench.post(queue, number, keys, 0, 1000);
        (bench.finish(queue, number), bench.landed())
    };
    assert_eq!(read(0, 1), (Some(RETRIES), false), "the old key of the fenced lease");
    assert_eq!(read(1, 2), (None, true), "the other lease");
}

/// XFER-5: a completion queue that is given more than it holds is dead, and its device says so; nothing is read over it
/// any more, and its reads say why. Posting past the count that keeps it from happening is what this test is for.
#[test]
fn a_completion_queue_that_overran_is_told_and_not_used() {
    if !is_there() {
        return;
    }
    let small = VerbsConfig { entries: 1, ..config() };
    let bench = Bench::on(rail(&small));
    let mut keys = PeerKeys::default();
    keys.learn(RegionKey(0), LEN as u64, vec![bench.source_key()]);
    let (mut queue, _answering, _) = bench.pair(true);
    for _ in 0..8 {
        bench.post(&mut queue, 9, &keys, 0, 100);
    }
    let begun = Instant::now();
    while bench.rail.domain.device.event() != Some(Event::Overrun) {
        assert!(begun.elapsed() < LONG, "the overrun was not told");
        thread::sleep(Duration::from_millis(1));
    }
    let mover = VerbsMover::start(config()).unwrap();
    let local = mover.register(HostRegion::new(LEN).into()).unwrap();
    assert!(mover.shared.rails[0].lose());
    assert!(!mover.devices()[0].1);
    let run = |region| Run {
        region,
        offset: 0,
        len: LEN as u64,
    };
    let copies = vec![Copy {
        remote: run(RegionKey(0)),
        local: run(local),
    }];
    let refused = peers::read(&mover, &mover.endpoint(), copies)
        .1
        .recv_timeout(LONG)
        .unwrap();
    assert!(
        matches!(&refused, Err(MoverError::Verbs(VerbsError::DeviceLost { .. }))),
        "{refused:?}"
    );
}

/// What is asked for is cut to what the device takes.
#[test]
fn queues_are_no_deeper_than_the_device_allows() {
    if !is_there() {
        return;
    }
    let deep = VerbsConfig {
        depth: u32::MAX,
        ..config()
    };
    let rail = rail(&deep);
    assert_eq!(rail.depth, rail.domain.device.limits.requests);
    assert!(rail.pieces <= rail.domain.device.limits.pieces as usize);
}

/// XFER-2: a queue pair that is being connected when its lease is fenced is found by the fence, which waits for it. One
/// that would be made after it is not.
#[test]
fn a_fence_finds_the_queue_pair_that_is_being_connected() {
    if !is_there() {
        return;
    }
    let (bench, now, token) = (Bench::new(), Instant::now(), LeaseToken::random().unwrap());
    let shared = Shared::new(Leases::new(8), Arc::new(bench.memory), vec![bench.rail.clone()]);
    shared.leases.expose(token, now, LONG).unwrap();
    let lease = shared.leases.find(&token, now).unwrap();
    let door = shared.door(1, token);
    let fenced = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let made = door.admit(&lease, now, || {
        let (shared, fenced) = (shared.clone(), fenced.clone());
        let (begin, begun) = std::sync::mpsc::channel();
        thread::spawn(move || {
            begin.send(()).unwrap();
            shared.fence(&token);
            fenced.store(true, Ordering::SeqCst);
        });
        begun.recv().unwrap();
        thread::sleep(Duration::from_millis(100));
        bench.rail.answering()
    });
    assert_eq!(
        (made, fenced.load(Ordering::SeqCst)),
        (Ok(true), false),
        "the fence came back too early"
    );
    while !fenced.load(Ordering::SeqCst) {
        assert!(now.elapsed() < LONG, "the fence hangs");
        thread::yield_now();
    }
    assert!(door.is_empty(), "a queue pair stands behind the fence");
    assert_eq!(door.admit(&lease, now, || unreachable!("the lease is over")), Ok(false));
    // Also by a door that the fence came too early to see.
    let late = shared.door(2, token);
    assert_eq!(late.admit(&lease, now, || unreachable!("the lease is over")), Ok(false));
}

/// Whatever ends the importer's thread, a read is told, once, and nothing of it lands any more.
#[test]
fn an_importer_that_ends_tells_its_reads() {
    if !is_there() {
        return;
    }
    let bench = Bench::new();
    let rails = [bench.rail.clone()];
    let (poll, waker) = importer::listen(&rails).unwrap();
    let inbox = Inbox::new(waker);
    let mut importer = Importer::new(&bench.memory, &rails, config(), poll, inbox.clone());
    let (tx, done) = std::sync::mpsc::channel();
    let read = |id| {
        let over = Arc::new(Over::default());
        let run = |region| Run {
            region: RegionKey(region),
            offset: 0,
            len: LEN as u64,
        };
        let copy = Copy {
            remote: run(0),
            local: run(1),
        };
        let limits = ChunkLimits { bytes: 4096, runs: 1 };
        let tx = tx.clone();
        Read {
            id,
            peer: "127.0.0.1:9".into(),
            plan: Ok(("127.0.0.1:9".parse().unwrap(), plan::chunks(&[copy], &limits))),
            token: LeaseToken::random().unwrap(),
            options: ReadOptions::default(),
            ticket: Ticket(over),
            begun: Instant::now(),
            done: Box::new(move |result| tx.send((id, result)).unwrap()),
        }
    };
    importer.begin(read(1), Instant::now());
    assert!(inbox.send(Command::Read(read(2))).is_none());
    drop(importer);
    let told: Vec<_> = done.try_iter().collect();
    assert_eq!(told, [(1, Err(MoverError::Closed)), (2, Err(MoverError::Closed))]);
    assert!(inbox.send(Command::Read(read(3))).is_some(), "nobody would read it");
}

/// A line over which `run` may be read.
fn granted<'m>(rails: &[Arc<Rail>], peer: &str, token: LeaseToken, run: &Run) -> Line<'m> {
    let mut line = welcomed(rails, &config(), peer, token).unwrap();
    line.ask(0, &[*run], run.len, false, Instant::now());
    for heard in hear(&mut line, rails, &config()).unwrap() {
        if let Heard::Granted(_, grant) = heard {
            let Line { keys, .. } = &mut line;
            grant
                .regions
                .into_iter()
                .for_each(|each| keys.learn(each.region, each.len, each.keys));
        }
    }
    assert!(line.keys.covers(run), "nothing was granted");
    line
}

/// A line whose queue pairs are connected.
fn welcomed<'m>(
    rails: &[Arc<Rail>],
    config: &VerbsConfig,
    peer: &str,
    token: LeaseToken,
) -> Result<Line<'m>, MoverError> {
    let (now, address) = (Instant::now(), peer.parse().unwrap());
    let mut line = Line::dial(rails, config, &peer.into(), address, token, now)?;
    hear(&mut line, rails, config)?;
    assert!(matches!(line.state, State::Open));
    Ok(line)
}

/// What the peer says next.
fn hear(line: &mut Line<'_>, rails: &[Arc<Rail>], config: &VerbsConfig) -> Result<Vec<Heard>, MoverError> {
    let (begun, mut heard) = (Instant::now(), Vec::new());
    while heard.is_empty() {
        assert!(begun.elapsed() < LONG, "the peer says nothing");
        (line.readable, line.writable) = (true, true);
        line.drive(&mut heard, rails, config, Instant::now())?;
        thread::sleep(Duration::from_millis(1));
    }
    Ok(heard)
}
