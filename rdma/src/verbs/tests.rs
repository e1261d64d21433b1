//! What keys and queue pairs hold against, on a device: run in the guest (scripts/rdma/test.sh), skipped elsewhere.

use std::{
    env,
    time::{Duration, Instant},
};

use super::{
    device::Completion,
    line::{Heard, Line, State},
    memory::Key,
    rail::packet_number,
    work::SendQueue,
    *,
};
use crate::region::HostRegion;

const LEN: usize = 64 << 10;
const LONG: Duration = Duration::from_secs(20);
/// IB_WC_REM_ACCESS_ERR and IB_WC_RETRY_EXC_ERR.
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

/// One device with memory on it: `0` is read, `1` is where bytes land.
struct Bench {
    rail: Arc<Rail>,
    memory: Memory,
    target: Arc<HostRegion>,
}

impl Bench {
    fn new() -> Self {
        let names = Device::names().unwrap();
        let wish = Wish {
            devices: names[..1].to_vec(),
            ..Wish::default()
        };
        let choice = choose(&Tree::read(Path::new("/sys")), &wish).unwrap().remove(0);
        let rail = Rail::open(choice, &config()).unwrap();
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
        let (asking, answering) = (self.rail.asking(16).unwrap(), self.rail.answering().unwrap());
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

/// XFER-10: a peer that offers keys for what nobody asked for, or too short ones, is refused before anything is posted.
#[test]
fn keys_that_cover_nothing_asked_for_are_refused() {
    if !is_there() {
        return;
    }
    let importer = VerbsMover::start(config()).unwrap();
    let target = HostRegion::new(LEN);
    let local = importer.register(target.clone().into()).unwrap();
    for (offered, len) in [(RegionKey(99), LEN as u64), (RegionKey(5), LEN as u64 - 1)] {
        let keys = Key { address: 0, key: 1 };
        let peer = a_peer_that_grants(offered, len, keys, |ends| ends);
        let run = |region| Run {
            region,
            offset: 0,
            len: LEN as u64,
        };
        let copies = vec![Copy {
            remote: run(RegionKey(5)),
            local: run(local),
        }];
        let (tx, done) = std::sync::mpsc::channel();
        let done_once = Box::new(move |result| tx.send(result).unwrap());
        let token = LeaseToken::random().unwrap();
        importer.read(&peer, token, copies, ReadOptions::default(), done_once);
        let refused = done.recv_timeout(LONG).unwrap();
        let stray = matches!(&refused, Err(MoverError::Verbs(VerbsError::StrayKey { region, .. }))
            if [offered.0, 5].contains(region));
        assert!(stray, "{refused:?}");
        assert!(target.read(0, LEN) == [0; LEN], "a byte landed");
    }
}

/// XFER-2, F11: `cancel` returns when nothing of the read can land any more. Its work is with the device, which asks a
/// peer that does not answer yet again and again; the peer answers after the cancel.
#[test]
fn work_that_waits_for_its_peer_lands_nothing_after_cancel() {
    if !is_there() {
        return;
    }
    let bench = Bench::new();
    let patient = VerbsConfig {
        timeout: 15,
        retries: 7,
        ..config()
    };
    let importer = VerbsMover::start(patient).unwrap();
    let target = HostRegion::new(LEN);
    let local = importer.register(target.clone().into()).unwrap();
    let answering = bench.rail.answering().unwrap();
    let here = bench.rail.end(0, false, vec![(answering.number(), 0)]);
    let (tell, told) = std::sync::mpsc::channel();
    let welcome = move |ends: Vec<wire::End>| {
        tell.send(ends[0].clone()).unwrap();
        vec![here.clone()]
    };
    let peer = a_peer_that_grants(RegionKey(0), LEN as u64, bench.source_key(), welcome);
    let run = |region| Run {
        region,
        offset: 0,
        len: LEN as u64,
    };
    let copies = vec![Copy {
        remote: run(RegionKey(0)),
        local: run(local),
    }];
    let (tx, done) = std::sync::mpsc::channel();
    let done_once = Box::new(move |result| tx.send(result).unwrap());
    let token = LeaseToken::random().unwrap();
    let read = importer.read(&peer, token, copies, ReadOptions::default(), done_once);
    let there = told.recv_timeout(LONG).unwrap();
    // Granted and posted by now.
    thread::sleep(Duration::from_millis(100));
    read.cancel();
    assert_eq!(done.recv_timeout(LONG).unwrap(), Err(MoverError::Cancelled));
    let path = bench.rail.path(&there, 0, false).unwrap();
    answering
        .connect(&bench.rail.choice, &path, &config().tuning())
        .unwrap();
    thread::sleep(Duration::from_millis(500));
    assert!(target.read(0, LEN) == [0; LEN], "a byte landed after cancel");
}

/// Welcomes whoever comes with the ends that `welcome` makes of his, and grants this key whatever is asked.
fn a_peer_that_grants(
    region: RegionKey,
    len: u64,
    key: Key,
    welcome: impl Fn(Vec<wire::End>) -> Vec<wire::End> + Send + 'static,
) -> String {
    use crate::tcp::wire::{Head, Status, decode_request, encode_head};
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let (mut input, mut buffer) = (Vec::new(), [0; 4096]);
        let say = |socket: &mut std::net::TcpStream, id, body: &[u8]| {
            let mut out = Vec::new();
            let head = Head {
                status: Status::Ok,
                id,
                len: body.len() as u64,
                fact: 0,
            };
            encode_head(&mut out, &head);
            out.extend_from_slice(body);
            socket.write_all(&out).unwrap();
        };
        let mut greeted = None;
        // Ends when the importer has had enough.
        while let Ok(count @ 1..) = socket.read(&mut buffer) {
            input.extend_from_slice(&buffer[..count]);
            if greeted.is_none()
                && let Some((hello, used)) = wire::decode_hello(&input).unwrap()
            {
                input.drain(..used);
                let mut body = Vec::new();
                let ends = welcome(hello.ends);
                wire::encode_ends(&mut body, &ends);
                say(&mut socket, 0, &body);
                greeted = Some(ends.len());
            }
            if let Some(paths) = greeted
                && let Some((request, used)) = decode_request(&input).unwrap()
            {
                input.drain(..used);
                let keys = vec![key; paths];
                let grant = wire::Grant {
                    crc: 0,
                    regions: vec![wire::RegionKeys { region, len, keys }],
                };
                let mut body = Vec::new();
                wire::encode_grant(&mut body, &grant);
                say(&mut socket, request.id, &body);
            }
        }
    });
    address
}

/// A line over which `run` may be read.
fn granted<'m>(rails: &[Arc<Rail>], peer: &str, token: LeaseToken, run: &Run) -> Line<'m> {
    let (now, address) = (Instant::now(), peer.parse().unwrap());
    let mut line = Line::dial(rails, &config(), &peer.into(), address, token, now).unwrap();
    line.ask(0, &[*run], run.len, false, now);
    loop {
        assert!(now.elapsed() < LONG, "nothing was granted");
        (line.readable, line.writable) = (true, true);
        let mut heard = Vec::new();
        line.drive(&mut heard, rails, &config(), Instant::now()).unwrap();
        for heard in heard {
            if let Heard::Granted(_, grant) = heard {
                assert!(matches!(line.state, State::Open));
                grant
                    .regions
                    .into_iter()
                    .for_each(|each| line.keys.learn(each.region, each.len, each.keys));
                return line;
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
}
