//! One move, told step by step (MIG-1, MIG-2).

use std::time::Duration;

use super::*;
use crate::{
    id::{Epoch, Incarnation, RouterId, StoreId},
    routing::{
        Dispatch, Effect, Event, MemoryStore, Outcome, RouterConfig, Turn,
        testing::{D0, D1, D2, admits, info, view},
        view::Health,
    },
    wire::{
        admit::{ImportAnswer, Mode},
        info::Standing,
    },
};

const T: Now = Now(1_000);

fn router(roles: &[Role]) -> Router<MemoryStore> {
    let config = RouterConfig {
        ask_unknown: false,
        max_sessions: 1,
        ..RouterConfig::default()
    };
    Router::new(config, RouterId(7), MemoryStore::new(StoreId(1)), view(roles))
}

fn s() -> SessionId {
    SessionId::new("s").expect("plain")
}

fn placement(n: u64) -> Placement {
    Placement { n, store: StoreId(2) }
}

fn epoch(n: u64) -> Epoch {
    Epoch {
        placement: placement(n),
        rewind: 0,
    }
}

fn held(worker: WorkerIndex, standing: Standing, n: u64) -> Resident {
    Resident {
        worker,
        tokens: 900,
        epoch: Some(epoch(n)),
        standing,
        moved: None,
    }
}

fn start(r: &mut Router<MemoryStore>, target: WorkerIndex) -> Move {
    let found = [held(D0, Standing::Owner, 30), held(D2, Standing::Replica, 30)];
    Move::start(r, s(), &found, target, T).expect("nothing is in the way")
}

fn tell(mv: &mut Move, r: &mut Router<MemoryStore>, event: MoveEvent) {
    mv.handle(r, event, T).expect("the event is expected");
}

fn import(mv: &mut Move) -> ImportRequest {
    match mv.poll_effect() {
        Some(MoveEffect::Import { request, .. }) => *request,
        other => panic!("expected an import, got {other:?}"),
    }
}

fn asked(mv: &mut Move) -> WithdrawRequest {
    match mv.poll_effect() {
        Some(MoveEffect::Withdraw {
            worker: D1, request, ..
        }) => request,
        other => panic!("expected the target to be asked, got {other:?}"),
    }
}

const DONE: MoveEvent = MoveEvent::Moved(ImportAnswer {
    resident_tokens: 950,
    pulled_tokens: 950,
    bytes: 1,
    micros: 1,
});

#[test]
fn a_move_takes_a_number_and_asks_the_target_to_import_from_the_owner() {
    // MIG-1; the router has not heard of the session before.
    let mut r = router(&[Role::Decode; 3]);
    let mut mv = start(&mut r, D1);
    let request = import(&mut mv);
    assert_eq!(
        (request.reservation, request.source, request.incarnation),
        (None, Source::Owner, Incarnation(1))
    );
    assert_eq!(request.placement.n, 31, "above the owner's (SES-4)");
    let record = r.sessions.peek(&s()).expect("remembered");
    assert_eq!(
        (record.pin, record.placement),
        (Some(r.view.at(D0)), Some(placement(30)))
    );
    let pending: Vec<_> = r
        .sessions
        .pending()
        .map(|(s, p)| (s.clone(), p.target, p.since))
        .collect();
    assert_eq!(pending, [(s(), r.view.at(D1), T)]);

    tell(&mut mv, &mut r, DONE);
    let moved = MoveOutcome::Moved {
        placement: request.placement,
        import: Some(ImportAnswer {
            resident_tokens: 950,
            pulled_tokens: 950,
            bytes: 1,
            micros: 1,
        }),
    };
    assert_eq!(
        (mv.outcome(), mv.poll_effect(), mv.arbitrations()),
        (Some(moved), None, 0)
    );
    let record = r.sessions.peek(&s()).expect("remembered");
    assert_eq!((record.pin, record.pending), (Some(r.view.at(D1)), None));
    assert_eq!(
        (record.placement, record.resident(r.view.at(D1))),
        (Some(request.placement), 950)
    );
}

#[test]
fn a_move_that_cannot_begin_changes_nothing() {
    let mut r = router(&[Role::Decode, Role::Decode, Role::Prefill, Role::Decode]);
    let owner = held(D0, Standing::Owner, 30);
    let evicted = Resident { tokens: 0, ..owner };
    let gone = Resident {
        moved: Some(placement(31)),
        ..held(D1, Standing::Moved, 30)
    };
    let mut refused = |found: &[Resident], target| Move::start(&mut r, s(), found, target, T).map(|_| ()).unwrap_err();
    assert_eq!(refused(&[], D1), CannotMove::UnknownSession);
    assert_eq!(refused(&[Resident::nothing(D0)], D1), CannotMove::UnknownSession);
    assert_eq!(refused(&[held(D0, Standing::Replica, 30)], D1), CannotMove::NotOwned);
    assert_eq!(refused(&[owner, gone], D1), CannotMove::NotOwned);
    assert_eq!(refused(&[evicted], D1), CannotMove::NotResident);
    assert_eq!(refused(&[owner], D0), CannotMove::ToItself);
    assert_eq!(refused(&[owner], D2), CannotMove::TakesNoTurns);
    assert!(r.sessions.is_empty());
    r.view.draining(D1);
    let refused = |r: &mut Router<MemoryStore>| Move::start(r, s(), &[owner], D1, T).map(|_| ()).unwrap_err();
    assert_eq!(refused(&mut r), CannotMove::Target(Health::Draining));
    assert_eq!(CannotMove::Target(Health::Draining).reason(), Reason::Draining);
    r.view.seen(D1, &info(2));

    r.sessions.open(&s());
    let d1 = r.view.at(D1);
    let record = r.sessions.record_mut(&s()).expect("opened");
    record.lives_at(d1, placement(40), 10);
    let known = placement(40);
    let refused = Move::start(&mut r, s(), &[owner], WorkerIndex(3), T).map(|_| ());
    assert_eq!(refused, Err(CannotMove::Superseded { known }));
    assert_eq!(r.sessions.pending().count(), 0);

    // The other one is gone: this copy is the best there is.
    r.view.lost(D1);
    let mut mv = Move::start(&mut r, s(), &[owner], WorkerIndex(3), T).expect("a target");
    assert_eq!(import(&mut mv).placement.n, 41);
}

#[test]
fn a_session_that_runs_elsewhere_is_not_moved_from_who_still_calls_itself_owner() {
    // SES-4, MIG-3: the turn was reseeded from the replica; the old owner has not heard of it.
    let mut r = router(&[Role::Decode; 3]);
    let mut mv = start(&mut r, D1);
    tell(&mut mv, &mut r, MoveEvent::Refused(Reason::NotOwner));
    tell(&mut mv, &mut r, MoveEvent::Withdrawn(WithdrawAnswer::Withdrawn));
    let turn = Turn {
        session: Some(s()),
        input_tokens: 1_000,
        max_new_tokens: None,
        estimated: false,
    };
    r.view.draining(D0);
    let mut d = Dispatch::start(&mut r, turn, T);
    let Some(Effect::Probe { worker, request }) = d.poll_effect() else {
        panic!("it is placed elsewhere")
    };
    let known = request.placement.expect("taken");
    d.handle(&mut r, Event::Answer(Box::new(admits(worker, Mode::Direct, 900))), T)
        .expect("expected");
    d.handle(&mut r, Event::FirstByte, T).expect("expected");
    let again = |r: &mut Router<MemoryStore>| {
        let owner = held(D0, Standing::Owner, 30);
        Move::from(r, s(), owner, None, if worker == D1 { D2 } else { D1 }, T).map(|_| ())
    };
    assert_eq!(again(&mut r), Err(CannotMove::Superseded { known }), "while it streams");
    d.handle(&mut r, Event::Completed { output_tokens: 1 }, T)
        .expect("expected");
    assert_eq!(again(&mut r), Err(CannotMove::Superseded { known }), "and afterwards");
}

#[test]
fn one_move_of_a_session_at_a_time_and_none_while_a_turn_is_placed() {
    // MIG-3
    let mut r = router(&[Role::Decode; 3]);
    let mut mv = start(&mut r, D1);
    let second = |r: &mut Router<MemoryStore>| Move::start(r, s(), &[held(D0, Standing::Owner, 30)], D2, T);
    assert_eq!(second(&mut r).map(|_| ()), Err(CannotMove::Running));
    tell(&mut mv, &mut r, MoveEvent::Refused(Reason::NotOwner));
    tell(&mut mv, &mut r, MoveEvent::Withdrawn(WithdrawAnswer::Withdrawn));
    assert_eq!(mv.outcome(), Some(MoveOutcome::Stayed(Reason::NotOwner)));

    let turn = Turn {
        session: Some(s()),
        input_tokens: 1_000,
        max_new_tokens: None,
        estimated: false,
    };
    r.view.lost(D0);
    let mut d = Dispatch::start(&mut r, turn, T);
    let Some(Effect::Probe { worker, .. }) = d.poll_effect() else {
        panic!("it is placed elsewhere")
    };
    r.view.seen(D0, &info(1));
    assert_eq!(second(&mut r).map(|_| ()), Err(CannotMove::Placing));
    d.handle(&mut r, Event::Answer(Box::new(admits(worker, Mode::Direct, 900))), T)
        .expect("expected");
    let found = [held(worker, Standing::Owner, 32)];
    let third = Move::start(&mut r, s(), &found, if worker == D1 { D2 } else { D1 }, T).expect("it runs by now");
    assert_eq!(third.placement().n, 33);
    d.handle(&mut r, Event::FirstByte, T).expect("expected");
    d.handle(&mut r, Event::Completed { output_tokens: 1 }, T)
        .expect("expected");
    assert_eq!(d.outcome(), Some(Outcome::Completed));
}

#[test]
fn a_lost_answer_is_asked_for_and_the_targets_word_counts() {
    // MIG-2
    let owner = MoveEvent::Withdrawn(WithdrawAnswer::Owner { epoch: epoch(31) });
    let placement_31 = MoveOutcome::Moved {
        placement: placement(31),
        import: None,
    };
    for (word, outcome) in [
        (owner, placement_31),
        (
            MoveEvent::Withdrawn(WithdrawAnswer::Withdrawn),
            MoveOutcome::Stayed(Reason::PeerUnreachable),
        ),
        (
            MoveEvent::WithdrawRefused(Reason::StaleIncarnation),
            MoveOutcome::Stayed(Reason::PeerUnreachable),
        ),
    ] {
        let mut r = router(&[Role::Decode; 3]);
        let mut mv = start(&mut r, D1);
        let pending = import(&mut mv).placement;
        tell(&mut mv, &mut r, MoveEvent::Unreachable);
        assert_eq!(
            asked(&mut mv),
            WithdrawRequest {
                placement: pending,
                incarnation: Incarnation(2)
            }
        );
        tell(&mut mv, &mut r, word);
        assert_eq!(mv.outcome(), Some(outcome));
        assert_eq!(r.sessions.pending().count(), 0);
        let owner = if matches!(outcome, MoveOutcome::Moved { .. }) {
            D1
        } else {
            D0
        };
        assert_eq!(
            r.sessions.peek(&s()).and_then(|r| r.pin).map(|at| at.worker),
            Some(owner)
        );
    }
}

#[test]
fn a_silent_target_is_waited_out_and_asked_once_more() {
    // MIG-2, XFER-7
    let mut r = router(&[Role::Decode; 3]);
    let mut mv = start(&mut r, D1);
    import(&mut mv);
    tell(&mut mv, &mut r, MoveEvent::Unreachable);
    asked(&mut mv);
    let later = T + Duration::from_secs(1);
    mv.handle(&mut r, MoveEvent::Unreachable, later).expect("expected");
    let until = T + r.config.handover_wait;
    assert_eq!(
        mv.poll_effect(),
        Some(MoveEffect::Wait { until }),
        "from the moment its answer was lost"
    );
    assert_eq!(r.sessions.pending().count(), 1);
    mv.handle_timeout();
    asked(&mut mv);
    mv.handle(&mut r, MoveEvent::Unreachable, until).expect("expected");
    assert_eq!(mv.outcome(), Some(MoveOutcome::Unknown(Reason::PeerUnreachable)));
    assert_eq!(r.sessions.pending().count(), 0);
    let record = r.sessions.peek(&s()).expect("remembered");
    assert_eq!(record.pin.map(|at| at.worker), Some(D0));
    assert_eq!(
        record.above().map(|p| p.n),
        Some(31),
        "what is taken next lies above the pending number"
    );
}

#[test]
fn a_session_whose_move_is_out_is_not_forgotten() {
    // ROUTE-8: the bound is one session here; a pending number that was forgotten could not be asked for.
    let mut r = router(&[Role::Decode; 3]);
    let mut mv = start(&mut r, D1);
    import(&mut mv);
    for n in 0..5 {
        let other = SessionId::new(&format!("o{n}")).expect("plain");
        r.sessions.open(&other);
        r.sessions.close(&other);
    }
    assert_eq!(r.sessions.pending().count(), 1);
    tell(&mut mv, &mut r, DONE);
    let other = SessionId::new("o").expect("plain");
    r.sessions.open(&other);
    assert_eq!(r.sessions.peek(&s()), None, "an idle session again");
}

#[test]
fn an_abandoned_move_stays_pending_for_the_next_turn() {
    // MIG-2
    let mut r = router(&[Role::Decode; 3]);
    let mut mv = start(&mut r, D1);
    import(&mut mv);
    mv.abandon(&mut r, T);
    assert_eq!(mv.outcome(), Some(MoveOutcome::Unknown(Reason::Cancelled)));
    r.view.lost(D0);
    let turn = Turn {
        session: Some(s()),
        input_tokens: 1_000,
        max_new_tokens: None,
        estimated: false,
    };
    let mut d = Dispatch::start(&mut r, turn, T);
    assert!(matches!(d.poll_effect(), Some(Effect::Withdraw { worker: D1, .. })));
}

#[test]
fn an_event_out_of_turn_changes_nothing() {
    let mut r = router(&[Role::Decode; 3]);
    let mut mv = start(&mut r, D1);
    let wrong = mv.handle(&mut r, MoveEvent::Withdrawn(WithdrawAnswer::Withdrawn), T);
    assert_eq!(wrong.map_err(|e| e.state), Err("importing"));
    mv.handle_timeout();
    import(&mut mv);
    assert_eq!((mv.outcome(), mv.poll_effect()), (None, None));
    tell(&mut mv, &mut r, DONE);
    assert!(mv.handle(&mut r, DONE, T).is_err());
}
