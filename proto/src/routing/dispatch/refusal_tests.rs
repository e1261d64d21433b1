//! Dispatches that meet refusals and failures: full, draining, dead, restarted workers, and numbers that may be taken.

use super::{tests::*, *};
use crate::{
    id::{Epoch, Incarnation, StoreId},
    routing::{
        RouterConfig,
        testing::{D0, D1, admits, refuses},
        view::Health,
    },
    wire::{admit::Mode, info::Standing},
};

#[test]
fn probes_used_up_is_the_fallback_without_a_session() {
    // DISP-4, DISP-5: ε = max(1, |D| − 1)
    let mut r = decoders(3);
    let mut d = start(&mut r, 1000);
    let (a, _) = probe(&mut d);
    say(
        &mut d,
        &mut r,
        answer(refuses(a, Reason::SessionNotResidentNoCapacity, 0)),
    );
    let (b, _) = probe(&mut d);
    say(
        &mut d,
        &mut r,
        answer(refuses(b, Reason::SessionNotResidentNoCapacity, 0)),
    );
    let (_, tag) = run(&mut d);
    assert_eq!(tag, None);
    complete(&mut d, &mut r);
    assert_eq!(d.trace().mode, Some(ExecutionMode::Fallback));
    assert_eq!(d.trace().probes, 2);
    assert_eq!(
        (rejects(&r, a), rejects(&r, b)),
        (1, 1),
        "a fallback is no success of the session"
    );
    assert_eq!(r.sessions.peek(&s()).and_then(|r| r.pin), None);
}

#[test]
fn one_worker_is_still_probed_once() {
    // ε [reading]
    let mut r = decoders(1);
    seed(&mut r, 100);
}

#[test]
fn too_large_everywhere_is_413_and_too_large_somewhere_is_not() {
    // ADM-6, DISP-6: it uses up no probe.
    let mut r = decoders(2);
    let mut d = start(&mut r, 1000);
    let (a, _) = probe(&mut d);
    say(&mut d, &mut r, answer(refuses(a, Reason::TooLarge, 0)));
    let (b, _) = probe(&mut d);
    say(&mut d, &mut r, answer(refuses(b, Reason::TooLarge, 0)));
    assert_eq!(
        d.poll_effect(),
        Some(Effect::Refuse(Refused {
            status: 413,
            reason: Reason::TooLarge
        }))
    );
    assert_eq!((rejects(&r, a), rejects(&r, b)), (0, 0));

    let mut d = start(&mut r, 1000);
    let (a, _) = probe(&mut d);
    say(&mut d, &mut r, answer(refuses(a, Reason::TooLarge, 0)));
    let (b, _) = probe(&mut d);
    say(&mut d, &mut r, answer(admits(b, Mode::Seed, 0)));
    assert_eq!(run(&mut d).0, b);
}

#[test]
fn a_draining_worker_is_passed_over_and_remembered() {
    // ADM-12, ROUTE-6, DISP-6
    let mut r = decoders(2);
    let mut d = start(&mut r, 1000);
    let (a, _) = probe(&mut d);
    say(&mut d, &mut r, answer(refuses(a, Reason::Draining, 0)));
    let (b, _) = probe(&mut d);
    assert_ne!(a, b);
    assert_eq!(r.view.worker(a).health(), Health::Draining);
    assert_eq!(rejects(&r, a), 0);
}

#[test]
fn the_printed_rule_counts_every_refusal() {
    // DISP-6, flag count_all_rejects
    let config = RouterConfig {
        ask_unknown: false,
        count_all_rejects: true,
        ..RouterConfig::default()
    };
    let mut r = router_of(&[Role::Decode; 2], config);
    let mut d = start(&mut r, 1000);
    let (a, _) = probe(&mut d);
    say(&mut d, &mut r, answer(refuses(a, Reason::RealLargeAppend, 0)));
    assert_eq!(rejects(&r, a), 1);
}

#[test]
fn a_dead_worker_before_the_first_byte_sends_the_request_elsewhere() {
    // DISP-8
    let mut r = decoders(2);
    let w = seed(&mut r, 1000);
    let mut d = start(&mut r, 1100);
    let (_, request) = probe(&mut d);
    say(&mut d, &mut r, answer(admits(w, Mode::Direct, 1010)));
    run(&mut d);
    say(&mut d, &mut r, Event::Failed(Reason::PeerUnreachable));
    assert_eq!(
        d.poll_effect(),
        Some(Effect::Release {
            worker: w,
            session: s(),
            request: request.key
        })
    );
    let (other, again) = probe(&mut d);
    assert_ne!(other, w);
    assert!(again.placement.expect("taken").n > request.placement.expect("held").n);
    say(&mut d, &mut r, answer(admits(other, Mode::Reseed, 0)));
    let locate = Effect::Locate {
        session: s(),
        workers: vec![w],
    };
    assert_eq!(
        d.poll_effect(),
        Some(locate),
        "it may live and hold the session (SYNC-2)"
    );
    say(&mut d, &mut r, Event::Located(vec![]));
    assert_eq!(run(&mut d).0, other);
    complete(&mut d, &mut r);
    assert_eq!(inflight(&r), [0, 0]);
    assert_eq!(rejects(&r, w), 0, "the worker's health is charged, not the session");
}

#[test]
fn an_unreachable_worker_is_down_and_costs_no_probe() {
    // ROUTE-6, DISP-8
    let mut r = decoders(2);
    let mut d = start(&mut r, 1000);
    let (a, _) = probe(&mut d);
    say(&mut d, &mut r, Event::Unreachable);
    assert_eq!(r.view.worker(a).health(), Health::Down);
    assert!(
        matches!(d.poll_effect(), Some(Effect::Release { worker, .. }) if worker == a),
        "it may have granted"
    );
    let (b, _) = probe(&mut d);
    assert_ne!(a, b);
    say(&mut d, &mut r, Event::Unreachable);
    d.poll_effect();
    assert!(matches!(
        d.poll_effect(),
        Some(Effect::Refuse(Refused { status: 502, .. }))
    ));
}

#[test]
fn a_number_that_may_have_been_granted_is_not_offered_again() {
    // MIG-3: the answer was lost, not the question; both workers would hold the session under it.
    let mut r = decoders(2);
    let mut d = start(&mut r, 1000);
    let (_, first) = probe(&mut d);
    say(&mut d, &mut r, Event::Unreachable);
    d.poll_effect();
    let (_, second) = probe(&mut d);
    assert!(second.placement.map(|p| p.n) > first.placement.map(|p| p.n));
}

#[test]
fn a_turn_on_another_copy_than_the_holders_takes_a_number() {
    // MIG-3: an older copy elsewhere is no reason to run there under the holder's number.
    let mut r = decoders(3);
    let a = seed(&mut r, 1000);
    let b = if a == D0 { D1 } else { D0 };
    let at = r.view.at(b);
    r.sessions.record_mut(&s()).expect("seeded").holds(at, 990);
    let mut d = start(&mut r, 1100);
    let (w, held) = probe(&mut d);
    assert_eq!(w, a);
    say(&mut d, &mut r, answer(refuses(a, Reason::NoDCapacity, 1010)));
    let (w, asked) = probe(&mut d);
    assert_eq!(w, b);
    assert!(asked.placement.map(|p| p.n) > held.placement.map(|p| p.n));
    say(&mut d, &mut r, answer(admits(b, Mode::Direct, 990)));
    let (_, tag) = run(&mut d);
    assert_eq!(tag.and_then(|t| t.placement), asked.placement);
    complete(&mut d, &mut r);
    assert_eq!(r.sessions.peek(&s()).and_then(|r| r.placement), asked.placement);
}

#[test]
fn an_unplaced_copy_is_used_under_a_new_number() {
    // MIG-3, ROUTE-9: a client without router left more tokens at D1 than the placement's holder D0 has.
    let mut r = router_of(&[Role::Decode; 3], RouterConfig::default());
    let mut d = start(&mut r, 1000);
    d.poll_effect();
    let placement = Placement {
        n: 40,
        store: StoreId(2),
    };
    let epoch = Some(Epoch { placement, rewind: 0 });
    let held = |worker, tokens, epoch| Resident {
        worker,
        tokens,
        epoch,
        standing: Standing::Owner,
        moved: None,
    };
    let found = vec![held(D0, 500, epoch), held(D1, 900, None)];
    say(&mut d, &mut r, Event::Residents(found));
    let (w, request) = probe(&mut d);
    assert_eq!((w, request.placement.map(|p| p.n)), (D1, Some(41)));
}

#[test]
fn executions_are_bounded() {
    // DISP-8: nobody is retried for ever.
    let mut r = decoders(9);
    let mut d = Dispatch::start(
        &mut r,
        Turn {
            session: None,
            ..turn(5)
        },
        T,
    );
    let mut tried = Vec::new();
    while let Some(Effect::Run { worker, tag: None }) = d.poll_effect() {
        assert!(!tried.contains(&worker));
        tried.push(worker);
        say(&mut d, &mut r, Event::Failed(Reason::DeadlineExceeded));
    }
    assert_eq!(tried.len(), 3);
    assert_eq!(
        d.outcome(),
        Some(Outcome::Refused(Refused {
            status: 504,
            reason: Reason::DeadlineExceeded
        }))
    );
    assert_eq!(inflight(&r), [0; 9]);
}

#[test]
fn a_stale_placement_is_retaken_above_the_held_one_once() {
    // SES-4
    let mut r = decoders(2);
    let mut d = start(&mut r, 1000);
    let (w, _) = probe(&mut d);
    let held = Epoch {
        placement: Placement {
            n: 500,
            store: StoreId(99),
        },
        rewind: 0,
    };
    let stale = || {
        let mut a = refuses(w, Reason::StaleEpoch, 0);
        a.epoch = Some(held);
        answer(a)
    };
    say(&mut d, &mut r, stale());
    let (again, request) = probe(&mut d);
    assert_eq!((again, request.placement.map(|p| p.n)), (w, Some(501)));
    say(&mut d, &mut r, stale());
    assert_ne!(probe(&mut d).0, w);
    assert_eq!(rejects(&r, w), 0);
}

#[test]
fn a_restarted_worker_is_asked_again_and_what_it_held_is_forgotten() {
    // F16, ROUTE-6
    let mut r = decoders(2);
    let w = seed(&mut r, 1000);
    let mut d = start(&mut r, 1100);
    probe(&mut d);
    let mut a = refuses(w, Reason::StaleIncarnation, 0);
    a.incarnation = Incarnation(4242);
    say(&mut d, &mut r, answer(a));
    let (again, request) = probe(&mut d);
    assert_eq!((again, request.incarnation), (w, Some(Incarnation(4242))));
    assert_eq!(request.append_tokens, 1100);
}
