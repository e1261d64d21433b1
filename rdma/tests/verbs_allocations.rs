//! No allocation per work request after warm-up: a read of many runs allocates no more than one of few. Run in a guest
//! with software RoCE (scripts/rdma/test.sh), alone in its process because it counts.

mod verbs_guest;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

use kvc_rdma::{Copy, HostRegion, LeaseToken, Mover, ReadOptions, Run, VerbsMover};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: hands every call on as it is; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(address, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const PAGE: u64 = 4096;

#[test]
fn work_requests_allocate_nothing_after_warm_up() {
    if !verbs_guest::is_there() {
        return;
    }
    let mut config = verbs_guest::config(false);
    config.chunk = 4 << 20;
    let (exporter, importer) = (
        VerbsMover::start(config.clone()).unwrap(),
        VerbsMover::start(config).unwrap(),
    );
    let len = 512 * PAGE;
    let remote = exporter.register(HostRegion::new(len as usize).into()).unwrap();
    let local = importer.register(HostRegion::new(len as usize).into()).unwrap();
    let token = LeaseToken::random().unwrap();
    exporter.expose(token, Duration::from_secs(60)).unwrap();
    exporter
        .extend(
            &token,
            &[Run {
                region: remote,
                offset: 0,
                len,
            }],
        )
        .unwrap();
    // Pages in reverse, so that each is a run and a work request.
    let read = |pages: u64| {
        let copies: Vec<Copy> = (0..pages)
            .rev()
            .map(|page| {
                let run = |region| Run {
                    region,
                    offset: page * PAGE,
                    len: PAGE,
                };
                Copy {
                    remote: run(remote),
                    local: run(local),
                }
            })
            .collect();
        let (tx, done) = mpsc::channel();
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        let done_once = Box::new(move |result| tx.send(result).unwrap());
        importer.read(&exporter.endpoint(), token, copies, ReadOptions::default(), done_once);
        done.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
        ALLOCATIONS.load(Ordering::Relaxed) - before
    };
    for _ in 0..3 {
        read(512);
    }
    let (few, many) = (
        (0..5).map(|_| read(32)).min().unwrap(),
        (0..5).map(|_| read(512)).min().unwrap(),
    );
    eprintln!("{few} allocations with 32 runs, {many} with 512");
    // The lists of runs grow by doubling; anything per work request would be hundreds.
    assert!(many < few + 48, "{few} allocations with 32 runs, {many} with 512");
}
