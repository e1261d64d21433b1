//! What goes wrong around the verbs mover: peers that are killed, links and devices that go, memory that cannot be
//! registered, queues that are small. Run in a guest with software RoCE (scripts/rdma/test.sh), on two devices.

mod verbs_guest;
mod verbs_scene;

use std::{
    env,
    io::{BufRead, BufReader, Read},
    net::TcpListener,
    os::fd::{AsFd, FromRawFd, OwnedFd},
    process::{Child, ChildStdout, Command, Stdio},
    ptr::NonNull,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use kvc_rdma::{
    Copy, Dmabuf, HostRegion, LeaseToken, Mover, MoverError, ReadOptions, Region, RegionKey, Run, VerbsMover,
    shm::Pages,
    verbs::{NoDmabuf, VerbsError},
};
use verbs_guest::{config, is_there};
use verbs_scene::{
    Down, LEN, LONG, Scene, Unaddressed, begin, devices, expose, held, nothing_lands, pattern, run, wait,
    wait_for_landing,
};

/// Set for the process that is killed.
const CHILD: &str = "KVC_RDMA_CHILD";

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

/// F20, the chain for GPU memory as far as a machine without a GPU has it. Software RoCE takes no dma-buf; then the
/// device's address is tried, which nothing answers for here, so the verdict is to stage, with both causes. Where something
/// answers for it (host memory stands for the GPU's), it is read and landed in, and only a checksum of it cannot be had.
#[test]
fn gpu_memory_is_tried_as_a_dmabuf_and_by_its_address_and_else_staged() {
    if !is_there() {
        return;
    }
    let len = 1 << 20;
    let (source, (memory, file)) = (HostRegion::from_bytes(&pattern(len)), memfd(len));
    let mover = VerbsMover::start(config(false)).unwrap();
    let refused = mover.try_dmabuf(file.as_fd(), len as u64).unwrap_err();
    let why = NoDmabuf::Refused {
        errno: libc::EOPNOTSUPP,
    };
    assert!(
        matches!(&refused, VerbsError::NoDmabuf { why: got, .. } if *got == why),
        "{refused}"
    );
    assert!(refused.to_string().contains("nvidia-peermem"));
    let exported = || {
        Some(Dmabuf {
            file: file.clone(),
            offset: 0,
        })
    };
    let nowhere = NonNull::new(4096 as *mut u8).unwrap();
    for (dmabuf, expected) in [(exported(), why), (None, NoDmabuf::NotExported)] {
        // SAFETY: nothing is mapped there, which is the point: the kernel refuses and nobody reads or writes it.
        let gpu = unsafe { Region::of_gpu(nowhere, len as u64, dmabuf) };
        let refused = mover.register(gpu).unwrap_err();
        let is_both = matches!(&refused, MoverError::Verbs(VerbsError::Stage { dmabuf, peer: libc::EFAULT, .. })
            if *dmabuf == expected);
        assert!(is_both, "{refused}");
        assert!(
            refused
                .to_string()
                .contains("stage these 1048576 bytes through host memory")
        );
    }
    let exporter = VerbsMover::start(config(false)).unwrap();
    // SAFETY: obligation 1 — both were made before the movers and live longer.
    let [remote, local] = [(&exporter, source.address()), (&mover, memory.address())].map(|(mover, address)| unsafe {
        let address = NonNull::new(address as *mut u8).unwrap();
        mover.register(Region::of_gpu(address, len as u64, exported())).unwrap()
    });
    let whole = |region| Run {
        region,
        offset: 0,
        len: len as u64,
    };
    let token = LeaseToken::random().unwrap();
    exporter.expose(token, LONG).unwrap();
    exporter.extend(&token, &[whole(remote)]).unwrap();
    let copies = vec![Copy {
        remote: whole(remote),
        local: whole(local),
    }];
    wait(&begin(&mover, &exporter.endpoint(), token, copies.clone()).1).unwrap();
    assert!(memory.read(0, len) == pattern(len));
    let checked = |copies| {
        let (tx, done) = mpsc::channel();
        let options = ReadOptions {
            checksum: true,
            ..ReadOptions::default()
        };
        let done_once = Box::new(move |result| tx.send(result).unwrap());
        mover.read(&exporter.endpoint(), token, copies, options, done_once);
        wait(&done)
    };
    assert_eq!(checked(copies), Err(MoverError::NotHost { len: len as u64 }), "XFER-8");
    let on_host = mover.register(HostRegion::new(len).into()).unwrap();
    let landing_on_host = vec![Copy {
        remote: whole(remote),
        local: whole(on_host),
    }];
    let refused = checked(landing_on_host);
    assert!(matches!(refused, Err(MoverError::RangeRefused { .. })), "{refused:?}");
}

/// Memory in a file, and the file.
fn memfd(len: usize) -> (Arc<HostRegion>, Arc<OwnedFd>) {
    let memory = HostRegion::new(len);
    // SAFETY: a name and numbers; the descriptor that comes back is owned by nobody else.
    let file = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"gpu".as_ptr(), 0)) };
    std::fs::File::from(file.try_clone().unwrap())
        .set_len(len as u64)
        .unwrap();
    (memory, Arc::new(file))
}

/// Nothing stays of a start that is refused, and the line says what to do.
#[test]
fn a_start_that_is_refused_leaves_nothing() {
    if !is_there() {
        return;
    }
    let before = held();
    let refused = |device: &str| {
        let mut config = config(false);
        config.wish.devices = vec![device.into()];
        let line = VerbsMover::start(config).map(|_| ()).unwrap_err().to_string();
        assert!(!line.contains('\n') && held() == before, "{line}: {}", held());
        line
    };
    let unknown = refused("mlx5_9");
    assert!(unknown.contains("mlx5_9: there are rxe0"), "{unknown}");
    let without = Unaddressed::take("d0", "10.77.0.1/24");
    let unnamed = refused("rxe0");
    assert!(
        unnamed.contains("no RoCEv2 GID with an IPv4 address: give its network interface one"),
        "{unnamed}"
    );
    drop(without);
    let down = Down::take("d0");
    let dark = refused("rxe0");
    assert!(dark.contains("port 1 of rxe0 is DOWN: bring its link up"), "{dark}");
    drop(down);
    let begun = Instant::now();
    while let Err(error) = VerbsMover::start(config(false)) {
        assert!(begun.elapsed() < LONG, "all is as before: {error}");
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(held(), before);
}

/// A device that goes while a peer is being greeted over it is left out, and the read begins again over the other.
#[test]
fn a_device_that_goes_during_the_greeting_is_left_out() {
    if !is_there() || devices().len() < 2 {
        return;
    }
    let importer = VerbsMover::start(config(false)).unwrap();
    let local = importer.register(HostRegion::new(LEN).into()).unwrap();
    let slow = TcpListener::bind("127.0.0.1:0").unwrap();
    slow.set_nonblocking(true).unwrap();
    let whole = |region| Run {
        region,
        offset: 0,
        len: LEN as u64,
    };
    let copies = vec![Copy {
        remote: whole(RegionKey(0)),
        local: whole(local),
    }];
    let peer = slow.local_addr().unwrap().to_string();
    let (reading, done) = begin(&importer, &peer, LeaseToken::random().unwrap(), copies);
    let ends = || {
        let begun = Instant::now();
        let mut socket = loop {
            match slow.accept() {
                Ok((socket, _)) => break socket,
                Err(e) => assert!(begun.elapsed() < LONG, "nobody dials: {e}"),
            }
            thread::sleep(Duration::from_millis(5));
        };
        socket.set_nonblocking(false).unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        let mut hello = [0; 8];
        socket.read_exact(&mut hello).unwrap();
        (hello[6], socket)
    };
    let (both, first) = ends();
    let down = Down::take("d1");
    let (one, second) = ends();
    assert_eq!((both, one), (2, 1), "devices in the hello");
    thread::sleep(Duration::from_millis(50));
    assert!(done.try_recv().is_err(), "it waits for its peer");
    reading.cancel();
    assert_eq!(wait(&done), Err(MoverError::Cancelled));
    drop((first, second, down));
}

/// A device that is lost and tells nothing any more, not even that its work was flushed: its queue pairs are destroyed,
/// and the read goes on over the other.
#[test]
fn a_device_that_tells_nothing_any_more_is_not_waited_for() {
    if !is_there() || devices().len() < 2 {
        return;
    }
    let scene = Scene::new(LEN, |config| config.stall = LONG);
    let (_, done) = scene.begin();
    wait_for_landing(&scene.target, &done);
    scene.importer.faults().deafen(1, true);
    let (down, begun) = (Down::take("d1"), Instant::now());
    assert_eq!(wait(&done).unwrap().bytes, LEN as u64);
    assert!(begun.elapsed() < Duration::from_secs(20), "it was waited for");
    assert!(scene.is_whole());
    drop(down);
}
