//! A dispatch and the moves of its session, told step by step (MIG-1, MIG-2).

use super::{tests::*, *};
use crate::{
    id::{Epoch, Incarnation, StoreId},
    routing::{
        Move, MoveEffect, MoveEvent, MoveOutcome, RouterConfig,
        testing::{D0, D1, D2, admits, info, refuses},
        view::Health,
    },
    wire::{
        admit::{ImportAnswer, Mode, MovedTo, PeerRef, WithdrawAnswer},
        info::Standing,
    },
};

fn placement(n: u64) -> Placement {
    Placement { n, store: StoreId(1) }
}

fn epoch(n: u64) -> Epoch {
    Epoch {
        placement: placement(n),
        rewind: 0,
    }
}

fn peer(w: WorkerIndex) -> PeerRef {
    PeerRef {
        peer: "127.0.0.1:2".into(),
        incarnation: Incarnation(u64::from(w.0) + 1),
    }
}

/// Three decode workers; D0 runs the session under placement 1.
fn seeded() -> TestRouter {
    let mut r = decoders(3);
    assert_eq!(seed(&mut r, 1000), D0);
    r
}

/// A move of it to D1, under placement 2, whose import is out.
fn moving(r: &mut TestRouter) -> Move {
    let owner = Resident {
        worker: D0,
        tokens: 1010,
        epoch: Some(epoch(1)),
        standing: Standing::Owner,
        moved: None,
    };
    let mut mv = Move::start(r, s(), &[owner], D1, T).expect("nothing is in the way");
    assert!(matches!(mv.poll_effect(), Some(MoveEffect::Import { worker: D1, .. })));
    assert_eq!(mv.placement(), placement(2));
    mv
}

fn moved(w: WorkerIndex, to: WorkerIndex, n: u64) -> Event {
    let mut a = refuses(w, Reason::Moved, 1010);
    a.moved = Some(MovedTo {
        to: peer(to),
        placement: placement(n),
    });
    answer(a)
}

fn withdraw(d: &mut Dispatch) -> (WorkerIndex, Placement) {
    match d.poll_effect() {
        Some(Effect::Withdraw { worker, request, .. }) => (worker, request.placement),
        other => panic!("expected the target to be asked, got {other:?}"),
    }
}

#[test]
fn a_moved_session_is_followed_to_its_new_owner() {
    // MIG-1
    let mut r = seeded();
    let mut d = start(&mut r, 1100);
    assert_eq!(probe(&mut d).0, D0);
    say(&mut d, &mut r, moved(D0, D2, 5));
    let (w, request) = probe(&mut d);
    assert_eq!(
        (w, request.placement),
        (D2, Some(placement(5))),
        "under the number that was handed over"
    );
    say(&mut d, &mut r, answer(admits(D2, Mode::Direct, 1010)));
    let (_, tag) = run(&mut d);
    assert_eq!(tag.and_then(|t| t.placement), Some(placement(5)));
    complete(&mut d, &mut r);
    assert_eq!(rejects(&r, D0), 0, "DISP-6: it says nothing about pressure");
    let mut d = start(&mut r, 1200);
    assert_eq!(probe(&mut d).0, D2);
}

#[test]
fn a_turn_refused_on_arrival_as_moved_asks_where_to() {
    // MIG-1, ADM-14: the engine's refusal does not say.
    let mut r = seeded();
    let mut d = start(&mut r, 1100);
    probe(&mut d);
    say(&mut d, &mut r, answer(admits(D0, Mode::Direct, 1010)));
    run(&mut d);
    say(&mut d, &mut r, Event::TurnRefused(Reason::Moved));
    let (w, request) = probe(&mut d);
    assert_eq!((w, request.placement), (D0, Some(placement(1))));
    say(&mut d, &mut r, moved(D0, D1, 5));
    assert_eq!(probe(&mut d).0, D1);
}

#[test]
fn a_session_moved_to_a_dead_process_goes_on_from_the_sources_copy() {
    // MIG-2: `moved.to` is down, or another process answers at its address.
    for dead in ["down", "restarted"] {
        let mut r = seeded();
        match dead {
            "down" => r.view.lost(D2),
            _ => r.view.seen(D2, &info(77)),
        }
        let mut d = start(&mut r, 1100);
        probe(&mut d);
        say(&mut d, &mut r, moved(D0, D2, 5));
        let (w, request) = probe(&mut d);
        assert_eq!(w, D0, "its copy is the replica");
        assert_eq!(
            request.placement,
            Some(placement(6)),
            "above the number that was handed over"
        );
        say(&mut d, &mut r, answer(admits(D0, Mode::Direct, 1010)));
        run(&mut d);
        complete(&mut d, &mut r);
        let record = r.sessions.peek(&s()).expect("known");
        assert_eq!(
            (record.pin.map(|p| p.worker), record.placement),
            (Some(D0), Some(placement(6)))
        );
    }
}

#[test]
fn a_target_that_says_it_is_no_owner_sends_the_turn_back_to_the_sources_copy() {
    // MIG-2: the source granted, the target had given up.
    let mut r = seeded();
    let mut d = start(&mut r, 1100);
    probe(&mut d);
    say(&mut d, &mut r, moved(D0, D1, 5));
    assert_eq!(probe(&mut d).0, D1);
    let mut stale = refuses(D1, Reason::StaleEpoch, 0);
    stale.epoch = Some(epoch(5));
    say(&mut d, &mut r, answer(stale));
    let (w, request) = probe(&mut d);
    assert_eq!((w, request.placement), (D0, Some(placement(6))));
}

#[test]
fn workers_that_point_at_each_other_are_believed_once() {
    // MIG-1: bounded
    let mut r = seeded();
    let mut d = start(&mut r, 1100);
    probe(&mut d);
    say(&mut d, &mut r, moved(D0, D1, 5));
    assert_eq!(probe(&mut d).0, D1);
    say(&mut d, &mut r, moved(D1, D0, 6));
    assert_eq!(probe(&mut d).0, D0);
    say(&mut d, &mut r, moved(D0, D1, 7));
    assert_eq!(probe(&mut d).0, D2);
}

#[test]
fn turns_go_on_at_the_source_while_a_move_is_out() {
    // MIG-1: the source stays owner.
    let mut r = seeded();
    let mut mv = moving(&mut r);
    let mut d = start(&mut r, 1100);
    let (w, request) = probe(&mut d);
    assert_eq!((w, request.placement), (D0, Some(placement(1))));
    say(&mut d, &mut r, answer(admits(D0, Mode::Direct, 1010)));
    run(&mut d);
    complete(&mut d, &mut r);
    let import = ImportAnswer {
        resident_tokens: 1110,
        pulled_tokens: 1110,
        bytes: 0,
        micros: 0,
    };
    mv.handle(&mut r, MoveEvent::Moved(import), T).expect("expected");
    assert!(matches!(mv.outcome(), Some(MoveOutcome::Moved { .. })));
    let mut d = start(&mut r, 1200);
    let (w, request) = probe(&mut d);
    assert_eq!(
        (w, request.placement, request.append_tokens),
        (D1, Some(placement(2)), 90)
    );
}

#[test]
fn a_completion_that_comes_after_the_hand_over_does_not_take_the_session_back() {
    // MIG-1, MIG-3: the turn ended at D0, D0 handed over, and only then the router heard of the end.
    let mut r = seeded();
    let mut mv = moving(&mut r);
    let mut d = start(&mut r, 1100);
    probe(&mut d);
    say(&mut d, &mut r, answer(admits(D0, Mode::Direct, 1010)));
    run(&mut d);
    say(&mut d, &mut r, Event::FirstByte);
    let owner = MoveEvent::Withdrawn(WithdrawAnswer::Owner { epoch: epoch(2) });
    mv.handle(&mut r, MoveEvent::Unreachable, T).expect("expected");
    mv.handle(&mut r, owner, T).expect("expected");
    say(&mut d, &mut r, Event::Completed { output_tokens: 10 });
    let record = r.sessions.peek(&s()).expect("known");
    assert_eq!(
        (record.pin.map(|p| p.worker), record.placement),
        (Some(D1), Some(placement(2)))
    );
    let mut d = start(&mut r, 1200);
    assert_eq!(probe(&mut d).1.append_tokens, 90);
}

#[test]
fn the_pending_target_is_asked_before_another_placement() {
    // MIG-2: D0 drains; its session may already be D1's.
    let mut r = seeded();
    let mut mv = moving(&mut r);
    r.view.draining(D0);
    let mut d = start(&mut r, 1100);
    assert_eq!(withdraw(&mut d), (D1, placement(2)));
    say(&mut d, &mut r, Event::Withdrawn(WithdrawAnswer::Withdrawn));
    let (w, request) = probe(&mut d);
    assert_ne!(w, D0);
    assert_eq!(
        request.placement,
        Some(placement(3)),
        "above the number that was withdrawn"
    );
    mv.handle(&mut r, MoveEvent::Refused(Reason::Cancelled), T)
        .expect("expected");
    mv.poll_effect();
    let told = MoveEvent::Withdrawn(WithdrawAnswer::Withdrawn);
    mv.handle(&mut r, told, T).expect("expected");
    assert_eq!(mv.outcome(), Some(MoveOutcome::Stayed(Reason::Cancelled)));
    assert_eq!(d.trace().arbitrations, 1);
}

#[test]
fn a_pending_target_that_owns_the_session_gets_the_turn() {
    // MIG-2
    let mut r = seeded();
    let _mv = moving(&mut r);
    r.view.lost(D0);
    let mut d = start(&mut r, 1100);
    withdraw(&mut d);
    say(
        &mut d,
        &mut r,
        Event::Withdrawn(WithdrawAnswer::Owner { epoch: epoch(2) }),
    );
    let (w, request) = probe(&mut d);
    assert_eq!((w, request.placement), (D1, Some(placement(2))));
    say(&mut d, &mut r, answer(admits(D1, Mode::Direct, 1010)));
    assert_eq!(run(&mut d).0, D1);
}

#[test]
fn a_silent_target_is_waited_out() {
    // MIG-2: the hand-over deadline, from the moment its answer was lost.
    let mut r = seeded();
    let _mv = moving(&mut r);
    r.view.lost(D0);
    let mut d = start(&mut r, 1100);
    withdraw(&mut d);
    say(&mut d, &mut r, Event::Unreachable);
    assert_eq!(r.view.worker(D1).health(), Health::Down);
    let Some(Effect::Wait { until }) = d.poll_effect() else {
        panic!("it is waited out")
    };
    assert_eq!(until, T + RouterConfig::default().handover_wait);
    d.handle_timeout(&mut r, until);
    let (_, request) = probe(&mut d);
    assert_eq!(request.placement, Some(placement(3)));
    assert_eq!(r.sessions.peek(&s()).and_then(|r| r.pending), None);
}

#[test]
fn a_restarted_target_needs_no_waiting() {
    // MIG-2, F16: the process that was asked to take it over is gone.
    let mut r = seeded();
    let _mv = moving(&mut r);
    r.view.lost(D0);
    let mut d = start(&mut r, 1100);
    withdraw(&mut d);
    say(&mut d, &mut r, Event::WithdrawRefused(Reason::StaleIncarnation));
    probe(&mut d);
    say(&mut d, &mut r, Event::ClientGone);

    let mut r = seeded();
    let _mv = moving(&mut r);
    r.view.lost(D0);
    r.view.seen(D1, &info(77));
    let mut d = start(&mut r, 1100);
    probe(&mut d);
}

#[test]
fn a_grant_that_would_place_the_session_waits_for_the_targets_word() {
    // MIG-2: the source has evicted the session, or is another process now, and grants a reseed.
    let mut r = seeded();
    let _mv = moving(&mut r);
    let mut d = start(&mut r, 1100);
    assert_eq!(probe(&mut d).0, D0);
    say(&mut d, &mut r, answer(admits(D0, Mode::Reseed, 0)));
    assert_eq!(withdraw(&mut d), (D1, placement(2)));
    say(
        &mut d,
        &mut r,
        Event::Withdrawn(WithdrawAnswer::Owner { epoch: epoch(2) }),
    );
    assert!(
        matches!(d.poll_effect(), Some(Effect::Release { worker: D0, .. })),
        "the grant is given back"
    );
    assert_eq!(probe(&mut d).0, D1);
    assert_eq!(inflight(&r), [0, 0, 0]);
    say(&mut d, &mut r, Event::ClientGone);
    assert_eq!(r.sessions.busy(), 0);
}

#[test]
fn an_owner_that_has_withdrawn_a_later_number_goes_on_above_it() {
    // MIG-2, SES-4: it refuses the number it owns; nobody else has the session.
    let mut r = router_of(&[Role::Decode; 3], RouterConfig::default());
    r.sessions.open(&s());
    let at = r.view.at(D0);
    r.sessions
        .record_mut(&s())
        .expect("opened")
        .lives_at(at, placement(4), 1010);
    r.sessions.close(&s());
    let mut d = start(&mut r, 1100);
    assert_eq!(probe(&mut d).1.placement, Some(placement(4)));
    let mut stale = refuses(D0, Reason::StaleEpoch, 1010);
    stale.epoch = Some(epoch(4));
    say(&mut d, &mut r, answer(stale));
    let (w, request) = probe(&mut d);
    assert_eq!((w, request.placement), (D0, Some(placement(5))));
}

#[test]
fn a_fallback_that_meets_a_busy_session_waits() {
    // ADM-8: the body names the session, so that the engine takes it for a turn.
    let mut r = decoders(1);
    let mut d = start(&mut r, 1000);
    probe(&mut d);
    say(
        &mut d,
        &mut r,
        answer(refuses(D0, Reason::SessionNotResidentNoCapacity, 0)),
    );
    assert_eq!(run(&mut d).1, None);
    say(&mut d, &mut r, Event::TurnRefused(Reason::SessionBusy));
    let Some(Effect::Wait { until }) = d.poll_effect() else {
        panic!("it waits")
    };
    d.handle_timeout(&mut r, until);
    assert_eq!(run(&mut d), (D0, None));
    complete(&mut d, &mut r);
    assert_eq!(inflight(&r), [0]);
}

#[test]
fn an_owner_that_lost_its_placement_is_not_asked_for_it_again() {
    // SES-4, ROUTE-9: whoever owns the session now is found by asking.
    let config = RouterConfig::default();
    let mut r = router_of(&[Role::Decode; 3], config);
    let mut d = start(&mut r, 1000);
    d.poll_effect();
    say(&mut d, &mut r, Event::Residents(vec![]));
    probe(&mut d);
    say(&mut d, &mut r, answer(admits(D0, Mode::Seed, 0)));
    run(&mut d);
    complete(&mut d, &mut r);

    let mut d = start(&mut r, 1100);
    assert_eq!(probe(&mut d).0, D0);
    let mut stale = refuses(D0, Reason::StaleEpoch, 1010);
    stale.epoch = Some(epoch(9));
    say(&mut d, &mut r, answer(stale));
    assert!(matches!(d.poll_effect(), Some(Effect::Ask { .. })));
    let resident = |worker, standing| Resident {
        worker,
        tokens: 1010,
        epoch: Some(epoch(9)),
        standing,
        moved: None,
    };
    let found = vec![resident(D0, Standing::Replica), resident(D2, Standing::Owner)];
    say(&mut d, &mut r, Event::Residents(found));
    let (w, request) = probe(&mut d);
    assert_eq!((w, request.placement), (D2, Some(placement(9))));
}
