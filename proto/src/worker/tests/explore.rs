//! Small machines, every sequence: admission and leases explored exhaustively to a stated depth (kv-movement §6). A
//! sequence is replayed from the start; states that look the same to every caller are explored once.

use std::{collections::HashSet, time::Duration};

use super::{
    engine::{Engine, config, identity, name},
    field::{ask, import_of, key, more, placed, tokens},
    rules::lease,
};
use crate::{
    wire::{
        admit::{AdmitRequest, ReleaseRequest, Via},
        reason::{Reason, Refusal},
    },
    worker::*,
};

/// What every caller can see, numbers that only grow left aside.
fn fingerprint(e: &Engine) -> String {
    let session = e.w.session(&name(0), e.now).map(|s| {
        (
            s.state,
            s.committed,
            s.readable,
            s.shared,
            s.leases,
            s.epoch.map(|p| p.placement.n),
        )
    });
    let other = e.w.session(&name(1), e.now).map(|s| s.state);
    let transfers = e.w.transfers(e.now);
    let imports: Vec<_> = transfers
        .imports
        .iter()
        .map(|i| (i.phase.clone(), i.pulled_tokens))
        .collect();
    let leases: Vec<_> = transfers.leases.iter().map(|l| (l.readable, l.expires_ms)).collect();
    let seen: Vec<_> = e.readers.values().map(|r| r.seen.len()).collect();
    let runs: Vec<_> = e
        .runs
        .iter()
        .map(|r| (r.running, r.written, r.claimed, r.adopted))
        .collect();
    let timeout = e.w.poll_timeout().map(|at| at.since(e.now));
    let grants: Vec<_> = (1..4)
        .map(|n| {
            (
                e.w.reservations.of_request(&key(n)).is_some(),
                e.w.reservations.is_over(&key(n)),
            )
        })
        .collect();
    format!(
        "{session:?}{other:?}{imports:?}{leases:?}{seen:?}{runs:?}{timeout:?}{grants:?}{:?}{:?}{}",
        e.w.load(None).used,
        (e.w.evictable(), e.w.held(), e.free.len()),
        e.pulls.len(),
    )
}

/// Explores `ops` to `depth` from `start`; returns states seen and sequences run.
fn explore<O: Copy + std::fmt::Debug>(
    depth: usize,
    ops: &[O],
    start: impl Fn() -> Engine,
    step: impl Fn(&mut Engine, O),
) -> (usize, usize) {
    let replay = |path: &[O]| {
        let mut e = start();
        let told = Told(format!("{path:?}"));
        for op in path {
            step(&mut e, *op);
            e.check();
        }
        drop(told);
        e
    };
    let mut seen = HashSet::from([fingerprint(&start())]);
    let (mut level, mut runs) = (vec![Vec::new()], 0);
    for _ in 0..depth {
        let mut next = Vec::new();
        for path in level {
            for op in ops {
                let longer: Vec<O> = [&path[..], &[*op]].concat();
                runs += 1;
                let mut e = replay(&longer);
                if seen.insert(fingerprint(&e)) {
                    next.push(longer);
                }
                e.quiesce();
            }
        }
        level = next;
    }
    (seen.len(), runs)
}

/// Tells the sequence that broke something.
struct Told(String);

impl Drop for Told {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("{}", self.0);
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Admission {
    Ask(u64),
    Large(u64),
    Release(u64),
    Arrive,
    Start,
    Commit,
    Retract,
    Abort,
    Import,
    Offer,
    Poll,
    Pulled,
    Confirmed,
    Fail,
    Lapse,
    Close,
    Other,
}

/// ADM-1..10, SES-2, XFER-3, INV-1: two requests of one session, an import, a turn, a lapse, a close and a stranger.
/// Depth 9 over 18 steps.
#[test]
fn admission_explored_to_depth_9() {
    use Admission::*;
    let ops = [
        Ask(1),
        Ask(2),
        Large(1),
        Release(1),
        Arrive,
        Start,
        Commit,
        Retract,
        Abort,
        Import,
        Offer,
        Poll,
        Pulled,
        Confirmed,
        Fail,
        Lapse,
        Close,
        Other,
    ];
    let start = || {
        Engine::new(WorkerConfig {
            max_uncached_tokens: 8,
            ..config(64, 4)
        })
    };
    let prompt = tokens(1, 22);
    let ask = |n| AdmitRequest {
        max_new_tokens: Some(4),
        ..ask(0, 22, n)
    };
    let limit = 60;
    let step = |e: &mut Engine, op| {
        let first = e.runs.first().map(|r| (r.id, r.running));
        let import = e.w.transfers(e.now).imports.first().map(|i| i.import);
        match op {
            Ask(n) | Large(n) => {
                let via = matches!(op, Large(_)).then_some(Via::Prefill);
                let known = e.w.reservations.of_request(&key(n)).is_some();
                let answer = e.w.admit(&AdmitRequest { via, ..ask(n) }, e.now);
                assert!(known || !answer.can_admit || answer.load.used <= limit, "INV-1");
            }
            Release(n) => drop(e.w.release(
                &name(0),
                &ReleaseRequest {
                    request: Some(key(n)),
                    drop_kv: false,
                    placed: None,
                },
                e.now,
            )),
            Arrive => {
                let mut arrival = Engine::arrival(0, identity(0), prompt.clone(), 4);
                let grant = [1, 2].iter().find_map(|n| e.w.reservations.of_request(&key(*n)));
                (arrival.reservation, arrival.placement) = (grant, placed(1));
                let refused = e.arrive(0, arrival, prompt.clone()).err().map(|r| r.code);
                assert_eq!(refused == Some(Reason::SessionBusy), first.is_some(), "ADM-8");
            }
            Start => {
                if let Some((id, false)) = first {
                    e.start(id, 12);
                }
            }
            Commit => {
                if let Some((id, true)) = first
                    && e.extend(id, 100)
                {
                    e.commit(id);
                }
            }
            Retract | Abort => {
                if let Some((id, true)) = first {
                    e.roll_back(
                        id,
                        if matches!(op, Retract) {
                            Rollback::Retract
                        } else {
                            Rollback::Abort
                        },
                    );
                }
            }
            Import => {
                if let Some(grant) = e.w.reservations.of_request(&key(1)) {
                    let _ = e.w.import(&name(0), &import_of(grant, 1), e.now);
                }
            }
            Offer => {
                if let Some(import) = import.filter(|i| !e.pulls.iter().any(|p| p.import == *i)) {
                    e.offer(import, 0, identity(0), prompt.clone(), 10);
                }
            }
            Poll => e.poll(),
            Pulled => {
                if let Some(import) = import.filter(|i| e.pulls.iter().any(|p| p.import == *i && p.flight.is_some())) {
                    e.pull_all(import);
                }
            }
            Confirmed => {
                if let Some(import) = import {
                    e.confirmed(import);
                }
            }
            Fail => {
                if let Some(import) = import {
                    e.w.import_failed(import, Refusal::new(Reason::TransferFailed, "test"), e.now);
                }
            }
            Lapse => {
                if let Some(at) = e.w.poll_timeout() {
                    e.now = at;
                    e.w.handle_timeout(at);
                }
            }
            Close => drop(e.w.close(&name(0), e.now)),
            Other => {
                let known = e.w.reservations.of_request(&key(3)).is_some();
                let question = AdmitRequest {
                    session_id: name(1),
                    ..ask(3)
                };
                let answer = e.w.admit(&question, e.now);
                assert!(known || !answer.can_admit || answer.load.used <= limit, "INV-1");
            }
        }
        e.effects();
    };
    let (states, runs) = explore(9, &ops, start, step);
    println!("{states} states, {runs} sequences");
    assert!(states > 500, "{states} states");
}

#[derive(Clone, Copy, Debug)]
enum Leasing {
    Arrive,
    Start,
    Grow,
    Commit,
    Abort,
    Next,
    Rewind,
    Lease,
    Look,
    Renew,
    End,
    Wait,
    Evict,
    Close,
    Poll,
}

/// XFER-2..4, OWN-5, OWN-7: one session, its turns, appends and rewinds, up to two readers. Depth 8 over 15 steps.
#[test]
fn leases_explored_to_depth_8() {
    use Leasing::*;
    let ops = [
        Arrive, Start, Grow, Commit, Abort, Next, Rewind, Lease, Look, Renew, End, Wait, Evict, Close, Poll,
    ];
    let start = || Engine::new(config(64, 4));
    let base = tokens(1, 10);
    let step = |e: &mut Engine, op| {
        let first = e.runs.first().map(|r| (r.id, r.running));
        let reader = e.readers.keys().next().copied();
        let say = |e: &mut Engine, prompt: Vec<Token>| {
            if first.is_none() {
                let mut arrival = Engine::arrival(0, identity(0), prompt.clone(), 0);
                arrival.placement = placed(1);
                e.arrive(0, arrival, prompt).unwrap();
            }
        };
        match op {
            Arrive => say(e, base.clone()),
            Next => say(e, more(&base, 2, 7)),
            Rewind => say(e, more(&base[..6], 3, 9)),
            Start => {
                if let Some((id, false)) = first {
                    e.start(id, 5);
                }
            }
            Grow => {
                if let Some((id, true)) = first {
                    e.extend(id, 3);
                }
            }
            Commit => {
                if let Some((id, true)) = first
                    && e.extend(id, 100)
                {
                    e.commit(id);
                }
            }
            Abort => match first {
                Some((id, true)) => e.roll_back(id, Rollback::Abort),
                Some((id, false)) => e.cancel(id),
                None => {}
            },
            Lease => {
                if e.readers.len() < 2 {
                    let _ = lease(e, 0, 1);
                }
            }
            Look => {
                if let Some(id) = reader {
                    e.look(id);
                    let whole = e.readers[&id].seen.len() == e.readers[&id].tokens.len();
                    assert_eq!(e.w.confirm(id, e.now).is_ok(), whole, "XFER-3");
                }
            }
            Renew => {
                if let Some(id) = reader {
                    e.w.renew(id, e.now).unwrap();
                }
            }
            End => {
                if let Some(id) = reader {
                    e.w.end_lease(id, e.now);
                }
            }
            Wait => {
                e.now = e.now + Duration::from_secs(3);
                e.w.handle_timeout(e.now);
            }
            Evict => drop(e.make_room(16)),
            Close => drop(e.w.close(&name(0), e.now)),
            Poll => e.poll(),
        }
        e.effects();
        for fenced in std::mem::take(&mut e.fenced) {
            assert!(
                e.w.confirm(fenced, e.now).is_err(),
                "revoked before it was fenced (XFER-2)"
            );
        }
    };
    let (states, runs) = explore(8, &ops, start, step);
    println!("{states} states, {runs} sequences");
    assert!(states > 500, "{states} states");
}
