//! `cargo bench -p kvc-proto --bench memory`: bytes on the heap per held token and per session, counted by the
//! allocator of this program.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use kvc_proto::{
    id::{Incarnation, PrefixHandle, SessionId},
    time::Now,
    worker::{Arrival, CapacityRule, Identity, Matched, Prompt, Snapshot, Worker, WorkerConfig},
};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to `System` unchanged; the counter owns nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps `System.alloc`'s obligations, which are this function's own.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `ptr` came from `System.alloc` with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Heap bytes of a worker with `sessions` idle sessions of `tokens` each, grown over ten turns.
fn held(sessions: u32, tokens: u32, append: bool) -> usize {
    let before = LIVE.load(Ordering::Relaxed);
    let config = WorkerConfig {
        capacity: 64 << 20,
        page_tokens: 1,
        rho_permille: 950,
        max_uncached_tokens: 8192,
        rule: CapacityRule::Growth,
        clip: 4096,
        reservation: Duration::from_secs(30),
        evict_idle: true,
        session_cap: 64 << 20,
        lease: Duration::from_secs(10),
        lease_max: Duration::from_secs(600),
        sync: true,
        sync_imports: 2,
        sync_deadline: Duration::from_secs(60),
        handover_deadline: Duration::from_secs(2),
        handover_hold: Duration::from_millis(20),
        remembered: 100_000,
    };
    let mut w = Worker::new(config, Incarnation(1));
    for n in 0..sessions {
        let session = SessionId::new(&format!("0f9c-agent-session-{n:06}")).expect("a valid id");
        for turn in 1..=10 {
            let len = tokens * turn / 10;
            let had = w.history_len(&session);
            let row: Vec<i32> = (0..len as i32).collect();
            let prompt = match append && had > 0 {
                true => Prompt::Append {
                    after: had,
                    tokens: (had..len).collect(),
                },
                false => Prompt::Full((0..len).collect()),
            };
            let (session, identity) = (session.clone(), Identity::default());
            let arrival = Arrival {
                session,
                identity,
                prompt,
                max_new: 1,
                reservation: None,
                placement: None,
                origin: None,
            };
            let id = w.arrive(arrival, Now(1)).expect("idle");
            match w.match_turn(id, len - 1) {
                Matched::Session { tokens, .. } => {
                    w.claim(id, tokens);
                    w.begin(id, Now(1));
                }
                Matched::Tree => {
                    w.begin(id, Now(1));
                    w.progress(id, len, &row, Now(1));
                    w.adopt(id, w.share_len(id), PrefixHandle(u64::from(n) + 1), &row, Now(1));
                }
            }
            w.commit(id, len, &[], &row, Now(1));
            while w.poll_effect().is_some() {}
            w.poll(
                &Snapshot {
                    free: 32 << 20,
                    ..Snapshot::default()
                },
                Now(1),
            );
        }
    }
    let bytes = LIVE.load(Ordering::Relaxed) - before;
    assert_eq!(w.counters().commits, u64::from(sessions) * 10);
    bytes
}

fn main() {
    for append in [false, true] {
        let (few, many) = (held(1000, 1000, append), held(1000, 11_000, append));
        let token = (many - few) as f64 / (1000.0 * 10_000.0);
        let session = few as f64 / 1000.0 - 1000.0 * token;
        let how = if append { "appends" } else { "full history" };
        println!("{how}: {token:.2} bytes per held token, {session:.0} bytes per session beside (targets 12 and 1024)");
    }
}
