//! `cargo bench -p kvc-proto --bench worker`: admission with many sessions, longest common prefix, and a turn's
//! bookkeeping on the scheduler's thread with few and with many sessions.

use std::{hint::black_box, time::Duration};

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use kvc_proto::{
    id::{Incarnation, PrefixHandle, RequestKey, RouterId, SessionId, TurnId},
    session::history::common_prefix,
    time::Now,
    wire::admit::{AdmitRequest, ReleaseRequest},
    worker::{Arrival, CapacityRule, Identity, Matched, Prompt, Snapshot, Token, Worker, WorkerConfig},
};

const CAPACITY: u32 = 64 << 20;

fn worker() -> Worker {
    let config = WorkerConfig {
        capacity: CAPACITY,
        page_tokens: 1,
        rho_permille: 950,
        max_uncached_tokens: 8192,
        rule: CapacityRule::Growth,
        clip: 4096,
        reservation: Duration::from_secs(30),
        evict_idle: true,
        session_cap: CAPACITY,
        lease: Duration::from_secs(10),
        lease_max: Duration::from_secs(600),
        sync: true,
        sync_imports: 2,
        sync_deadline: Duration::from_secs(60),
        handover_deadline: Duration::from_secs(2),
        handover_hold: Duration::from_millis(20),
        remembered: 100_000,
    };
    Worker::new(config, Incarnation(1))
}

fn name(n: usize) -> SessionId {
    SessionId::new(&format!("0f9c-agent-session-{n:06}")).expect("a valid id")
}

fn arrival(session: &SessionId, prompt: Prompt) -> Arrival {
    let identity = Identity::default();
    Arrival {
        session: session.clone(),
        identity,
        prompt,
        max_new: 64,
        reservation: None,
        placement: None,
        origin: None,
    }
}

/// The engine's part of a turn without an engine: match, claim, begin, write, commit. The row is the caller's.
fn turn(w: &mut Worker, id: TurnId, len: u32, row: &[i32], now: Now) {
    let matched = w.match_turn(id, len - 1);
    match matched {
        Matched::Session { tokens, .. } => {
            w.claim(id, tokens);
            black_box(w.begin(id, now));
            w.progress(id, len, row, now);
        }
        Matched::Tree => {
            black_box(w.begin(id, now));
            w.progress(id, len, row, now);
            let shared = w.share_len(id);
            black_box(w.adopt(id, shared, PrefixHandle(1), row, now));
        }
    }
    black_box(w.commit(id, len, &[7], row, now));
    while w.poll_effect().is_some() {}
}

/// A worker with `sessions` idle sessions of `len` tokens each, and what the first one said.
fn filled(sessions: usize, len: u32) -> (Worker, Vec<Token>, Vec<i32>) {
    let mut w = worker();
    let history: Vec<Token> = (0..len).collect();
    for n in 0..sessions {
        // Twice: the first prompt is the tree's, what follows is the session's own.
        for part in [len / 2, len] {
            let row: Vec<i32> = (0..part as i32).map(|i| n as i32 * len as i32 + i).collect();
            let id = w.arrive(
                arrival(&name(n), Prompt::Full(history[..part as usize].to_vec())),
                Now(n as u64),
            );
            turn(&mut w, id.expect("idle"), part, &row, Now(n as u64));
        }
    }
    let free = CAPACITY - sessions as u32 * len;
    w.poll(
        &Snapshot {
            free,
            tree_evictable: sessions as u32 * len / 2,
            ..Snapshot::default()
        },
        Now(1),
    );
    (w, history, (0..2 * len as i32).collect())
}

/// The median of `n` single calls, times `n`: on a shared machine a mean tells how often the bench was descheduled.
fn median_of(n: u64, mut call: impl FnMut(u64) -> Duration) -> Duration {
    let mut spent: Vec<Duration> = (0..n).map(&mut call).collect();
    spent.sort_unstable();
    spent[spent.len() / 2] * u32::try_from(n).unwrap_or(u32::MAX)
}

fn admission(c: &mut Criterion) {
    let (mut w, _, _) = filled(10_000, 100);
    let names: Vec<_> = (0..10_000).map(name).collect();
    let mut request = 0u64;
    let mut question = |session: &SessionId| {
        request += 1;
        AdmitRequest {
            session_id: session.clone(),
            turn: 3,
            input_tokens: 120,
            append_tokens: 20,
            max_new_tokens: None,
            estimated: false,
            via: None,
            placement: None,
            incarnation: Some(Incarnation(1)),
            backup: None,
            key: RequestKey {
                router: RouterId(1),
                request,
                attempt: 0,
            },
        }
    };
    for (what, granted) in [("granted", true), ("refused busy", false)] {
        if !granted {
            for session in &names {
                w.admit(&question(session), Now(1));
            }
        }
        c.bench_function(&format!("admit, {what}; 10,000 sessions"), |b| {
            b.iter_custom(|n| {
                median_of(n, |i| {
                    let session = &names[(i as usize * 7_919) % names.len()];
                    let question = question(session);
                    let start = std::time::Instant::now();
                    let answer = black_box(w.admit(&question, Now(1)));
                    let spent = start.elapsed();
                    assert_eq!(answer.can_admit, granted);
                    if granted {
                        let request = Some(question.key);
                        w.release(
                            session,
                            &ReleaseRequest {
                                request,
                                drop_kv: false,
                                placed: None,
                            },
                            Now(1),
                        );
                    }
                    spent
                })
            })
        });
    }
}

fn prefix(c: &mut Criterion) {
    let a: Vec<Token> = (0..100_000).collect();
    let b = a.clone();
    c.bench_function("longest common prefix of 100,000 tokens", |bench| {
        bench.iter(|| common_prefix(black_box(&a), black_box(&b)))
    });
}

fn bookkeeping(c: &mut Criterion) {
    for sessions in [10, 10_000] {
        let (mut w, history, _) = filled(sessions, 200);
        let names: Vec<_> = (0..sessions).map(name).collect();
        let mut at = 0;
        c.bench_function(
            &format!("a turn, 200 tokens resident and 20 new; {sessions} sessions"),
            |b| {
                b.iter_custom(|n| {
                    median_of(n, |i| {
                        at = (at + 7) % sessions;
                        let prompt = [&history[..180], &[i as u32; 20]].concat();
                        let row: Vec<i32> = (0..200).map(|t| at as i32 * 200 + t).collect();
                        let arrival = arrival(&names[at], Prompt::Full(prompt));
                        let start = std::time::Instant::now();
                        let id = w.arrive(arrival, Now(2)).expect("idle");
                        turn(&mut w, id, 200, &row, Now(2));
                        let free = CAPACITY / 2;
                        w.poll(
                            &Snapshot {
                                free,
                                ..Snapshot::default()
                            },
                            Now(2),
                        );
                        start.elapsed()
                    })
                })
            },
        );
    }
    // The case: 30k tokens of context, full history sent, 100 new.
    let (mut w, history, row) = filled(10, 30_000);
    let session = name(0);
    let mut mark = 0u32;
    c.bench_function("a turn, 30,000 tokens resident, full history, 100 new", |b| {
        b.iter_batched(
            || {
                mark += 1;
                let prompt = [&history[..29_900], &[mark; 100]].concat();
                arrival(&session, Prompt::Full(prompt))
            },
            |arrival| {
                let id = w.arrive(arrival, Now(2)).expect("idle");
                turn(&mut w, id, 30_000, &row, Now(2));
            },
            BatchSize::LargeInput,
        )
    });
    let mut out = vec![0i64; 30_000];
    c.bench_function("slots of 30,000 tokens", |b| {
        let prompt = Prompt::Full(history.clone());
        let id = w.arrive(arrival(&name(1), prompt), Now(3)).expect("idle");
        b.iter(|| w.slots_into(id, black_box(&mut out)));
        w.cancel(id, Now(3));
    });
}

fn streaming(c: &mut Criterion) {
    c.bench_function("a streaming turn, append of 100 to 30,000 and more tokens", |b| {
        b.iter_custom(|n| {
            let (mut w, _, _) = filled(10, 30_000);
            let session = name(0);
            let mut held = w.history_len(&session);
            let row: Vec<i32> = (0..4_000_000).collect();
            let mut spent = Duration::ZERO;
            for i in 0..n {
                if held > 60_000 {
                    (w, _, _) = filled(10, 30_000);
                    held = w.history_len(&session);
                }
                let append = arrival(
                    &session,
                    Prompt::Append {
                        after: held,
                        tokens: vec![i as u32; 100],
                    },
                );
                let start = std::time::Instant::now();
                let id = w.arrive(append, Now(2)).expect("idle");
                turn(&mut w, id, held + 100, &row[..held as usize + 100], Now(2));
                spent += start.elapsed();
                held += 100;
            }
            spent
        })
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(30).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    targets = admission, prefix, bookkeeping, streaming
}
criterion_main!(benches);
