//! What goes wrong around the verbs mover: peers that are killed, links and devices that go, memory that cannot be
//! registered, queues that are small. Run in a guest with software RoCE (scripts/rdma/test.sh), on two devices.

mod verbs_guest;

use std::{
    env,
    io::{BufRead, BufReader, Read},
    os::fd::AsFd,
    process::{Child, ChildStdout, Command, Stdio},
    ptr::NonNull,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use kvc_rdma::{
    Copy, HostRegion, LeaseToken, Mover, MoverError, ReadHandle, ReadOptions, ReadStats, Region, RegionKey, Run,
    VerbsConfig, VerbsMover,
    shm::Pages,
    verbs::{VerbsError, survey},
};
use verbs_guest::{config, is_there};

const LONG: Duration = Duration::from_secs(60);
const LEN: usize = 16 << 20;
/// Set for the process that is killed.
const CHILD: &str = "KVC_RDMA_CHILD";

type Outcome = Result<ReadStats, MoverError>;

/// An exporter with a lease on all of its region, and an importer.
struct Scene {
    exporter: VerbsMover,
    importer: VerbsMover,
    token: LeaseToken,
    copy: Copy,
    target: Arc<HostRegion>,
}

impl Scene {
    /// Every device of the one talks to the same of the other.
    fn new(len: usize, change: impl Fn(&mut VerbsConfig)) -> Self {
        let start = || {
            let mut config = config(false);
            change(&mut config);
            VerbsMover::start(config).unwrap()
        };
        let (exporter, importer) = (start(), start());
        let (token, region) = expose(&exporter, len);
        let target = HostRegion::new(len);
        let local = importer.register(target.clone().into()).unwrap();
        let run = |region| Run {
            region,
            offset: 0,
            len: len as u64,
        };
        Scene {
            copy: Copy {
                remote: run(region),
                local: run(local),
            },
            exporter,
            importer,
            token,
            target,
        }
    }

    fn begin(&self) -> (ReadHandle, mpsc::Receiver<Outcome>) {
        begin(&self.importer, &self.exporter.endpoint(), self.token, vec![self.copy])
    }

    fn is_whole(&self) -> bool {
        self.target.read(0, LEN.min(self.target.len())) == pattern(self.target.len())
    }
}

fn expose(exporter: &VerbsMover, len: usize) -> (LeaseToken, RegionKey) {
    let region = exporter.register(HostRegion::from_bytes(&pattern(len)).into()).unwrap();
    let token = LeaseToken::random().unwrap();
    exporter.expose(token, LONG).unwrap();
    exporter
        .extend(
            &token,
            &[Run {
                region,
                offset: 0,
                len: len as u64,
            }],
        )
        .unwrap();
    (token, region)
}

fn begin(
    importer: &VerbsMover,
    peer: &str,
    token: LeaseToken,
    copies: Vec<Copy>,
) -> (ReadHandle, mpsc::Receiver<Outcome>) {
    let (tx, done) = mpsc::channel();
    let options = ReadOptions {
        deadline: LONG,
        ..ReadOptions::default()
    };
    (
        importer.read(
            peer,
            token,
            copies,
            options,
            Box::new(move |result| tx.send(result).unwrap()),
        ),
        done,
    )
}

fn wait(done: &mpsc::Receiver<Outcome>) -> Outcome {
    done.recv_timeout(LONG).expect("done is called")
}

fn wait_for_landing(target: &HostRegion, done: &mpsc::Receiver<Outcome>) {
    let begun = Instant::now();
    while target.read(0, 1) == [0] {
        assert!(begun.elapsed() < LONG && done.try_recv().is_err(), "nothing landed");
        thread::yield_now();
    }
}

/// Never zero, and no two neighbouring pages alike.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| 1 + (at ^ at >> 12) as u8 % 250).collect()
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}: {status}");
}

/// An interface that is down, until this is dropped.
struct Down(&'static str);

impl Down {
    fn take(interface: &'static str) -> Self {
        run("/opt/bin/ip", &["link", "set", interface, "down"]);
        Down(interface)
    }
}

impl Drop for Down {
    fn drop(&mut self) {
        run("/opt/bin/ip", &["link", "set", self.0, "up"]);
    }
}

fn devices() -> Vec<String> {
    survey().verbs.unwrap_or_default()
}

/// After a `done` with an error nothing lands any more (XFER-2).
fn nothing_lands(target: &HostRegion) {
    target.write(0, &vec![0x77; target.len()]);
    thread::sleep(Duration::from_millis(300));
    assert!(
        target.read(0, target.len()).iter().all(|byte| *byte == 0x77),
        "a byte landed after done"
    );
}

/// T7: the exporter's process is killed in the middle; another peer of the same importer does not notice.
#[test]
fn a_peer_killed_in_the_middle_is_an_error_and_others_go_on() {
    if !is_there() {
        return;
    }
    let scene = Scene::new(LEN, |_| {});
    let mut child = Victim::start("an_exporter_that_waits_to_be_killed");
    let target = HostRegion::new(LEN);
    let local = scene.importer.register(target.clone().into()).unwrap();
    let remote = Run {
        region: child.region,
        ..scene.copy.remote
    };
    let copies = vec![Copy {
        remote,
        local: Run {
            region: local,
            ..remote
        },
    }];
    let (_, doomed) = begin(&scene.importer, &child.endpoint, child.token, copies.clone());
    let (_, other) = scene.begin();
    wait_for_landing(&target, &doomed);
    child.process.kill().unwrap();
    child.process.wait().unwrap();
    let result = wait(&doomed);
    assert!(
        matches!(result, Err(MoverError::PeerGone { .. } | MoverError::Truncated { .. })),
        "{result:?}"
    );
    nothing_lands(&target);
    wait(&other).unwrap();
    assert!(scene.is_whole());
    let (_, again) = begin(&scene.importer, &child.endpoint, child.token, copies);
    let result = wait(&again);
    assert!(
        matches!(result, Err(MoverError::Connect { .. } | MoverError::PeerGone { .. })),
        "{result:?}"
    );
}

/// Not a test by itself: the process that the one above kills.
#[test]
fn an_exporter_that_waits_to_be_killed() {
    if env::var_os(CHILD).is_none() {
        return;
    }
    let exporter = VerbsMover::start(config(false)).unwrap();
    let (token, region) = expose(&exporter, LEN);
    let token: String = token.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("\nready {} {token} {}", exporter.endpoint(), region.0);
    // Ends with its parent at the latest.
    let _ = std::io::stdin().read(&mut [0]);
}

struct Victim {
    process: Child,
    _out: BufReader<ChildStdout>,
    endpoint: String,
    token: LeaseToken,
    region: RegionKey,
}

impl Victim {
    fn start(test: &str) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["--exact", test, "--nocapture"])
            .env(CHILD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut out = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        while !line.starts_with("ready ") {
            line.clear();
            assert!(out.read_line(&mut line).unwrap() > 0, "the child ended");
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let byte = |at: usize| u8::from_str_radix(&words[2][2 * at..2 * at + 2], 16).unwrap();
        Victim {
            process,
            _out: out,
            endpoint: words[1].into(),
            token: LeaseToken::from_bytes(std::array::from_fn(byte)),
            region: RegionKey(words[3].parse().unwrap()),
        }
    }
}

/// A link that goes down takes its reads with it, typed and in bounded time, and serves again once it is back.
#[test]
fn a_link_that_goes_down_in_the_middle_is_an_error_until_it_is_back() {
    if !is_there() {
        return;
    }
    let scene = Scene::new(LEN, |config| config.wish.devices.truncate(1));
    let (_, done) = scene.begin();
    wait_for_landing(&scene.target, &done);
    let down = Down::take("d0");
    let result = wait(&done);
    let is_told = matches!(
        result,
        Err(MoverError::Verbs(
            VerbsError::DeviceDown { .. } | VerbsError::Work { .. }
        ))
    );
    assert!(is_told, "{result:?}");
    nothing_lands(&scene.target);
    let (_, done) = scene.begin();
    let refused = wait(&done);
    assert!(
        matches!(refused, Err(MoverError::Verbs(VerbsError::DeviceDown { .. }))),
        "{refused:?}"
    );
    drop(down);
    let begun = Instant::now();
    loop {
        let (_, done) = scene.begin();
        if wait(&done).is_ok() {
            break;
        }
        assert!(begun.elapsed() < LONG, "the link is back and nothing is read");
        thread::sleep(Duration::from_millis(50));
    }
    assert!(scene.is_whole());
}

/// Several devices: stripes over both, loses one in the middle and goes on.
#[test]
fn one_of_two_devices_is_lost_and_the_read_goes_on() {
    if !is_there() || devices().len() < 2 {
        return;
    }
    let scene = Scene::new(LEN, |_| {});
    let (_, done) = scene.begin();
    wait_for_landing(&scene.target, &done);
    let down = Down::take("d1");
    assert_eq!(wait(&done).unwrap().bytes, LEN as u64);
    assert!(scene.is_whole());
    let up = |mover: &VerbsMover| mover.devices().into_iter().map(|(_, up)| up).collect::<Vec<_>>();
    assert_eq!(up(&scene.importer), [true, false]);
    scene.target.write(0, &vec![0; LEN]);
    assert_eq!(
        wait(&scene.begin().1).unwrap().bytes,
        LEN as u64,
        "on the one that is left"
    );
    assert!(scene.is_whole());
    drop(down);
    let begun = Instant::now();
    while up(&scene.importer) != [true, true] {
        assert!(begun.elapsed() < LONG, "the port that is back is not used");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Both devices carry a read, by bytes in flight.
#[test]
fn two_devices_share_a_read() {
    if !is_there() || devices().len() < 2 {
        return;
    }
    let packets = |device: &str| {
        let path = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts");
        std::fs::read_to_string(path).unwrap().trim().parse::<u64>().unwrap()
    };
    let scene = Scene::new(LEN, |_| {});
    let before = ["rxe0", "rxe1"].map(packets);
    wait(&scene.begin().1).unwrap();
    assert!(scene.is_whole());
    let after = ["rxe0", "rxe1"].map(packets);
    let [one, other] = [0, 1].map(|at| after[at] - before[at]);
    assert!(one.min(other) * 3 > one.max(other), "{one} and {other} packets");
}

/// `rdma link delete` in the middle of a read: it ends or goes on, and nothing hangs.
#[test]
fn a_removed_device_is_survived() {
    if !is_there() || devices().len() < 2 {
        return;
    }
    let scene = Scene::new(LEN, |_| {});
    let (_, done) = scene.begin();
    wait_for_landing(&scene.target, &done);
    let mut delete = Command::new("/bin/rdma")
        .args(["link", "delete", "rxe1"])
        .spawn()
        .unwrap();
    let result = wait(&done);
    if let Err(error) = &result {
        nothing_lands(&scene.target);
        eprintln!("the read ended: {error}");
    }
    scene.target.write(0, &vec![0; LEN]);
    let again = wait(&scene.begin().1);
    drop(scene);
    // The kernel keeps a device until its last user lets go.
    let begun = Instant::now();
    let deleted = loop {
        match delete.try_wait().unwrap() {
            Some(status) => break status,
            None => assert!(begun.elapsed() < LONG, "the device cannot be removed"),
        }
        thread::sleep(Duration::from_millis(20));
    };
    assert!(deleted.success());
    eprintln!("while the device went: {result:?}; after: {again:?}");
    run("/bin/rdma", &["link", "add", "rxe1", "type", "rxe", "netdev", "d1"]);
    let scene = Scene::new(LEN, |_| {});
    wait(&scene.begin().1).unwrap();
    assert!(scene.is_whole());
}

/// XFER-5: a completion queue smaller than the work of a read never overruns, also when all of that work fails at once
/// and each request has a completion of its own. One that overran would leave the read waiting for `stall`.
#[test]
fn a_small_completion_queue_is_never_overrun() {
    if !is_there() {
        return;
    }
    let scene = Scene::new(4 << 20, |config| {
        (config.entries, config.depth, config.batch) = (8, 64, 64);
        config.stall = Duration::from_secs(30);
    });
    let page = 4 << 10;
    // Pages in reverse: as many work requests.
    let pages = (0..1024u64).map(|page| 1023 - page);
    let copies = pages.map(|at| Copy {
        remote: Run {
            offset: at * page,
            len: page,
            ..scene.copy.remote
        },
        local: Run {
            offset: at * page,
            len: page,
            ..scene.copy.local
        },
    });
    let copies: Vec<Copy> = copies.collect();
    let last = scene.target.len() - 1;
    for round in 0..6 {
        scene.target.write(0, &vec![0; scene.target.len()]);
        let (_, done) = begin(&scene.importer, &scene.exporter.endpoint(), scene.token, copies.clone());
        if round % 2 == 0 {
            let begun = Instant::now();
            while scene.target.read(last, 1) == [0] && begun.elapsed() < LONG {
                thread::yield_now();
            }
            scene.exporter.fence(&scene.token);
            let (begun, result) = (Instant::now(), wait(&done));
            assert!(
                begun.elapsed() < Duration::from_secs(10),
                "the work did not drain: {result:?}"
            );
            scene.exporter.expose(scene.token, LONG).unwrap();
            scene.exporter.extend(&scene.token, &[scene.copy.remote]).unwrap();
        } else {
            wait(&done).unwrap();
            assert!(scene.is_whole());
        }
    }
}

/// Host memory in a memfd, as the shm mover shares it, is exported and landed in like any other.
#[test]
fn a_pool_in_a_memfd_is_read_and_landed_in() {
    if !is_there() {
        return;
    }
    let len = 1 << 20;
    let (exporter, importer) = (
        VerbsMover::start(config(false)).unwrap(),
        VerbsMover::start(config(false)).unwrap(),
    );
    let [source, target] = [(); 2].map(|()| HostRegion::shared(len, Pages::Default).unwrap());
    source.write(0, &pattern(len));
    let remote = exporter.register(source.into()).unwrap();
    let local = importer.register(target.clone().into()).unwrap();
    let run = |region| Run {
        region,
        offset: 0,
        len: len as u64,
    };
    let token = LeaseToken::random().unwrap();
    exporter.expose(token, LONG).unwrap();
    exporter.extend(&token, &[run(remote)]).unwrap();
    let copies = vec![Copy {
        remote: run(remote),
        local: run(local),
    }];
    wait(&begin(&importer, &exporter.endpoint(), token, copies).1).unwrap();
    assert!(target.read(0, len) == pattern(len));
}

/// F20: memory that is not there, and more of it than may be locked, are told apart.
#[test]
fn memory_that_cannot_be_registered_is_told_with_its_remedy() {
    if !is_there() {
        return;
    }
    // Capabilities and limits of this thread alone: the kernel asks for them where a device is opened.
    let refusals = thread::spawn(|| {
        let mover = VerbsMover::start(config(false)).unwrap();
        // SAFETY: nothing is mapped there, which is the point: the kernel refuses and nobody reads or writes it.
        let nowhere = unsafe { Region::from_raw(NonNull::new(4096 as *mut u8).unwrap(), 1 << 20) };
        let unmapped = mover.register(nowhere).unwrap_err();
        drop(mover);
        let limit = libc::rlimit {
            rlim_cur: 64 << 10,
            rlim_max: libc::RLIM_INFINITY,
        };
        let mut before = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: numbers in and out; the system call changes this thread alone.
        unsafe {
            libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut before);
            libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit);
            libc::syscall(libc::SYS_setresuid, 1000, 1000, 1000);
        }
        let mover = VerbsMover::start(config(false)).unwrap();
        let locked = mover.register(HostRegion::new(8 << 20).into()).unwrap_err();
        (unmapped, locked, before)
    });
    let (unmapped, locked, before) = refusals.join().unwrap();
    // SAFETY: numbers in.
    unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &before) };
    assert!(
        matches!(
            &unmapped,
            MoverError::Verbs(VerbsError::Registration {
                errno: libc::EFAULT,
                ..
            })
        ),
        "{unmapped}"
    );
    let told = MoverError::Verbs(VerbsError::LockedMemory {
        bytes: 8 << 20,
        limit: 64 << 10,
    });
    assert_eq!(locked, told);
    assert!(locked.to_string().contains("ulimit -l unlimited"));
}

/// The GPU path's first refusal: software RoCE takes no dma-buf, and says so.
#[test]
fn a_dmabuf_is_refused_by_software_roce() {
    if !is_there() {
        return;
    }
    let mover = VerbsMover::start(config(false)).unwrap();
    let file = std::fs::File::open("/dev/zero").unwrap();
    let refused = mover.try_dmabuf(file.as_fd(), 1 << 20).unwrap_err();
    assert!(
        matches!(
            refused,
            VerbsError::NoDmabuf {
                errno: libc::EOPNOTSUPP,
                ..
            }
        ),
        "{refused}"
    );
    assert!(refused.to_string().contains("nvidia-peermem"));
}

/// Nothing half-connected stays: a start that is refused leaves no listener and no device open.
#[test]
fn a_device_that_is_not_there_is_refused_by_name() {
    if !is_there() {
        return;
    }
    let mut config = config(false);
    config.wish.devices = vec!["mlx5_9".into()];
    let refused = VerbsMover::start(config).map(|_| ()).unwrap_err();
    assert!(
        matches!(&refused, MoverError::Verbs(VerbsError::UnknownDevice { .. })),
        "{refused}"
    );
    assert!(refused.to_string().contains("mlx5_9: there are rxe0"), "{refused}");
}
