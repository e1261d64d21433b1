//! Where a reseed's KV comes from, told step by step (SYNC-1, SYNC-2, SYNC-4).

use super::{tests::*, *};
use crate::{
    id::{Epoch, Incarnation, StoreId},
    routing::{
        RouterConfig,
        testing::{D0, D1, D2, admits, refuses},
    },
    wire::{
        admit::{ImportRequest, Mode, PeerRef, Source},
        info::Standing,
    },
};

/// D0 prefills; D1 and D2 take turns.
fn fleet() -> TestRouter {
    let config = RouterConfig {
        ask_unknown: false,
        ..RouterConfig::default()
    };
    router_of(&[Role::Prefill, Role::Decode, Role::Decode], config)
}

fn placement(n: u64) -> Placement {
    Placement { n, store: StoreId(1) }
}

fn held(worker: WorkerIndex, tokens: u32, n: u64, standing: Standing) -> Resident {
    Resident {
        worker,
        tokens,
        epoch: Some(Epoch {
            placement: placement(n),
            rewind: 0,
        }),
        standing,
        moved: None,
    }
}

fn hand_over(d: &mut Dispatch) -> Handover {
    match d.poll_effect() {
        Some(Effect::HandOver(h)) => *h,
        other => panic!("expected a hand over, got {other:?}"),
    }
}

fn locate(d: &mut Dispatch) -> Vec<WorkerIndex> {
    match d.poll_effect() {
        Some(Effect::Locate { workers, .. }) => workers,
        other => panic!("expected a question, got {other:?}"),
    }
}

/// A session of about 1010 tokens that D1 runs under placement 1 and D0 follows.
fn seeded() -> TestRouter {
    let mut r = fleet();
    let mut d = start(&mut r, 1000);
    let (w, _) = probe(&mut d);
    assert_eq!(w, D1);
    say(&mut d, &mut r, answer(admits(D1, Mode::Seed, 0)));
    assert!(
        hand_over(&mut d).prefill.is_some(),
        "nobody holds a first turn: nobody is asked"
    );
    say(&mut d, &mut r, Event::Imported);
    run(&mut d);
    complete(&mut d, &mut r);
    r
}

/// The next turn, granted as a reseed at D2 because D1 has no room.
fn at_d2(r: &mut TestRouter, input: u32) -> Dispatch {
    r.config.policy.reject_threshold = 1;
    let at = r.view.at(D1);
    r.sessions.record_mut(&s()).expect("seeded").reject(at);
    let mut d = start(r, input);
    let (w, _) = probe(&mut d);
    assert_eq!(w, D2);
    say(&mut d, r, answer(admits(D2, Mode::Reseed, 0)));
    d
}

#[test]
fn every_question_names_who_keeps_the_replica() {
    // SYNC-1
    let mut r = fleet();
    let mut d = start(&mut r, 1000);
    let backup = PeerRef {
        peer: "127.0.0.1:2".into(),
        incarnation: Incarnation(1),
    };
    let (_, request) = probe(&mut d);
    assert_eq!(request.backup, Some(backup));
    say(&mut d, &mut r, Event::ClientGone);

    r.config.sync = false;
    let mut d = start(&mut r, 1000);
    assert_eq!(probe(&mut d).1.backup, None, "SYNC-3: switched off");
    say(&mut d, &mut r, Event::ClientGone);

    r.config.sync = true;
    r.view.lost(D0);
    let mut d = start(&mut r, 1000);
    assert_eq!(probe(&mut d).1.backup, None, "no prefill worker is up");
}

#[test]
fn a_backup_that_was_named_is_asked_when_the_session_is_reseeded() {
    // SYNC-1, SYNC-2: the prefill worker was down when the session began.
    let mut r = fleet();
    r.view.lost(D0);
    let w = seed(&mut r, 1000);
    r.view.seen(D0, &crate::routing::testing::info(1));
    let mut d = start(&mut r, 1100);
    let (_, request) = probe(&mut d);
    assert!(request.backup.is_some());
    say(&mut d, &mut r, answer(admits(w, Mode::Direct, 1010)));
    run(&mut d);
    complete(&mut d, &mut r);
    r.view.lost(w);
    let mut d = start(&mut r, 1200);
    let (other, _) = probe(&mut d);
    say(&mut d, &mut r, answer(admits(other, Mode::Reseed, 0)));
    assert_eq!(locate(&mut d), [D0]);
}

#[test]
fn a_reseed_imports_from_the_replica_and_d_computes_the_rest() {
    // SYNC-2
    let mut r = seeded();
    let mut d = at_d2(&mut r, 1100);
    assert_eq!(locate(&mut d), [D1, D0], "the pinned worker and the replica's holder");
    let found = vec![held(D0, 1010, 1, Standing::Replica), held(D1, 500, 1, Standing::Owner)];
    say(&mut d, &mut r, Event::Located(found));
    let h = hand_over(&mut d);
    assert_eq!((h.decode, h.prefill), (D2, None));
    assert_eq!(
        (h.import.source, h.import.incarnation, h.import.reservation),
        (Source::Replica, Incarnation(1), Some(ReservationId(9)))
    );
    assert_eq!(
        h.import.placement,
        placement(2),
        "under the granted number: the old owner learns of it (SES-4)"
    );
    assert_eq!(
        r.sessions.peek(&s()).map(|p| p.resident(r.view.at(D1))),
        Some(500),
        "ROUTE-8: its own word"
    );
    say(&mut d, &mut r, Event::Imported);
    let (w, tag) = run(&mut d);
    assert_eq!((w, tag.and_then(|t| t.placement)), (D2, Some(placement(2))));
    complete(&mut d, &mut r);
    assert_eq!(d.trace().source, Some(Source::Replica));
    assert_eq!(inflight(&r), [0, 0, 0]);
}

#[test]
fn the_old_owner_is_the_source_if_it_holds_more() {
    // SYNC-2, ROUTE: the reject-driven move takes the KV along.
    let mut r = seeded();
    let mut d = at_d2(&mut r, 1100);
    locate(&mut d);
    let found = vec![held(D0, 700, 1, Standing::Replica), held(D1, 1010, 1, Standing::Owner)];
    say(&mut d, &mut r, Event::Located(found));
    assert_eq!(hand_over(&mut d).import.incarnation, Incarnation(2));
    assert_eq!(rejects(&r, D2), 0);
}

#[test]
fn ownership_goes_with_the_data() {
    // SES-4: among equals the old owner is the source; else it is told.
    for (owner_holds, source, told) in [(1010, Incarnation(2), false), (1009, Incarnation(1), true)] {
        let mut r = seeded();
        let mut d = at_d2(&mut r, 1100);
        locate(&mut d);
        let found = vec![
            held(D0, 1010, 1, Standing::Replica),
            held(D1, owner_holds, 1, Standing::Owner),
        ];
        say(&mut d, &mut r, Event::Located(found));
        assert_eq!(hand_over(&mut d).import.incarnation, source);
        say(&mut d, &mut r, Event::Imported);
        let placed = Effect::Placed {
            worker: D1,
            session: s(),
            placement: placement(2),
        };
        match told {
            true => assert_eq!(d.poll_effect(), Some(placed)),
            false => assert!(matches!(d.poll_effect(), Some(Effect::Run { worker: D2, .. }))),
        }
    }
}

#[test]
fn an_old_owner_is_told_of_a_copy_that_runs_elsewhere() {
    // SES-4: an older copy at D2 is admitted as it is.
    let mut r = seeded();
    let at = r.view.at(D2);
    r.sessions.record_mut(&s()).expect("seeded").holds(at, 900);
    r.config.policy.reject_threshold = 1;
    let at = r.view.at(D1);
    r.sessions.record_mut(&s()).expect("seeded").reject(at);
    let mut d = start(&mut r, 1100);
    let (w, request) = probe(&mut d);
    assert_eq!(w, D2);
    say(&mut d, &mut r, answer(admits(D2, Mode::Direct, 900)));
    let placed = Effect::Placed {
        worker: D1,
        session: s(),
        placement: request.placement.expect("taken"),
    };
    assert_eq!(d.poll_effect(), Some(placed));
}

#[test]
fn a_holder_that_fails_gives_way_to_the_next_and_then_to_prefill() {
    // SYNC-2, XFER-7: bounded, and no reject of the decode worker.
    let mut r = seeded();
    let mut d = at_d2(&mut r, 1100);
    locate(&mut d);
    let found = vec![held(D0, 900, 1, Standing::Replica), held(D1, 1010, 1, Standing::Owner)];
    say(&mut d, &mut r, Event::Located(found));
    assert_eq!(hand_over(&mut d).import.incarnation, Incarnation(2));
    say(&mut d, &mut r, Event::ImportFailed(Reason::PeerUnreachable));
    let second = hand_over(&mut d);
    assert_eq!((second.import.incarnation, second.prefill), (Incarnation(1), None));
    say(&mut d, &mut r, Event::ImportFailed(Reason::LeaseRevoked));
    let third = hand_over(&mut d);
    let prefill = third.prefill.expect("computed at last");
    assert_eq!(
        (prefill.worker, prefill.refresh),
        (D0, None),
        "no import from who has failed"
    );
    say(&mut d, &mut r, Event::ImportFailed(Reason::LeaseRevoked));
    assert_eq!(run(&mut d).0, D2);
    complete(&mut d, &mut r);
    assert_eq!((rejects(&r, D2), d.trace().source), (0, None));
    assert_eq!(inflight(&r), [0, 0, 0]);
}

#[test]
fn a_large_rest_is_prefilled_on_top_of_the_replica() {
    // SYNC-2: more than τ_append of D2 is left.
    let mut r = seeded();
    let mut d = at_d2(&mut r, 20_000);
    locate(&mut d);
    say(
        &mut d,
        &mut r,
        Event::Located(vec![held(D0, 1010, 1, Standing::Replica)]),
    );
    let h = hand_over(&mut d);
    let prefill = h.prefill.expect("somebody prefills");
    assert_eq!((prefill.worker, prefill.refresh), (D0, None), "it holds most itself");
    assert_eq!(h.import.source, Source::Prefill);
}

#[test]
fn a_prefill_worker_that_is_behind_follows_the_holder_first() {
    // SYNC-2, SYNC-4
    let mut r = seeded();
    let mut d = at_d2(&mut r, 20_000);
    locate(&mut d);
    let found = vec![held(D0, 700, 1, Standing::Replica), held(D1, 1010, 1, Standing::Owner)];
    say(&mut d, &mut r, Event::Located(found));
    let h = hand_over(&mut d);
    let refresh = h.prefill.and_then(|p| p.refresh).expect("D0 is behind D1");
    let expected = ImportRequest {
        reservation: None,
        placement: placement(1),
        source: Source::Replica,
        peer: "127.0.0.1:2".into(),
        incarnation: Incarnation(2),
        deadline_ms: 60_000,
    };
    assert_eq!(
        refresh, expected,
        "under the holder's own placement: nothing is granted by it"
    );
    assert_eq!(h.import.placement, placement(2));
}

#[test]
fn a_large_append_refreshes_the_prefill_worker_from_the_resident_worker() {
    // DISP-6, SYNC-2
    let mut r = seeded();
    let mut d = start(&mut r, 20_000);
    probe(&mut d);
    say(&mut d, &mut r, answer(refuses(D1, Reason::RealLargeAppend, 1010)));
    let (_, again) = probe(&mut d);
    assert_eq!(again.via, Some(Via::Prefill));
    let mut granted = admits(D1, Mode::Reseed, 1010);
    granted.epoch = held(D1, 0, 1, Standing::Owner).epoch;
    say(&mut d, &mut r, answer(granted));
    assert_eq!(locate(&mut d), [D0], "D1 has said what it holds");
    say(
        &mut d,
        &mut r,
        Event::Located(vec![held(D0, 1000, 1, Standing::Replica)]),
    );
    let prefill = hand_over(&mut d).prefill.expect("somebody prefills");
    let refresh = prefill.refresh.expect("ten tokens behind");
    assert_eq!(
        (refresh.incarnation, Some(refresh.placement)),
        (Incarnation(2), again.placement),
        "D1 was admitted under the new number"
    );
}

#[test]
fn without_prefill_workers_the_holder_is_the_source_however_much_is_left() {
    // SYNC-2: nothing that a reachable worker holds is computed again.
    let mut r = decoders(2);
    let w = seed(&mut r, 1000);
    let other = if w == D0 { D1 } else { D0 };
    r.view.draining(w);
    let mut d = start(&mut r, 50_000);
    assert_eq!(probe(&mut d).0, other);
    say(&mut d, &mut r, answer(admits(other, Mode::Reseed, 0)));
    assert_eq!(locate(&mut d), [w], "MIG-4: a draining worker serves as replica");
    say(&mut d, &mut r, Event::Located(vec![held(w, 1010, 1, Standing::Owner)]));
    assert_eq!(hand_over(&mut d).prefill, None);
}

#[test]
fn a_number_that_was_outrun_is_taken_again_above() {
    // SES-4: another router has placed the session meanwhile.
    let mut r = seeded();
    let mut d = at_d2(&mut r, 1100);
    locate(&mut d);
    let found = vec![held(D1, 1010, 40, Standing::Owner)];
    say(&mut d, &mut r, Event::Located(found));
    assert_eq!(hand_over(&mut d).import.placement.n, 41);
}

#[test]
fn a_client_that_leaves_while_holders_are_asked_leaves_nothing() {
    // F14, ADM-10
    let mut r = seeded();
    let mut d = at_d2(&mut r, 1100);
    locate(&mut d);
    say(&mut d, &mut r, Event::ClientGone);
    assert!(matches!(d.poll_effect(), Some(Effect::Release { worker: D2, .. })));
    assert_eq!((d.poll_effect(), inflight(&r)), (None, vec![0, 0, 0]));
}

#[test]
fn a_restarted_router_finds_owner_and_replica() {
    // ROUTE-9, SYNC-2: prefill workers and draining workers are asked too; a lost owner's replica makes it a reseed.
    let mut r = router_of(&[Role::Prefill, Role::Decode, Role::Decode], RouterConfig::default());
    r.view.draining(D2);
    let mut d = start(&mut r, 1100);
    let ask = Effect::Ask {
        session: s(),
        workers: vec![D0, D1, D2],
    };
    assert_eq!(d.poll_effect(), Some(ask));
    let found = vec![held(D0, 1010, 7, Standing::Replica), Resident::nothing(D1)];
    say(&mut d, &mut r, Event::Residents(found));
    let (w, request) = probe(&mut d);
    assert_eq!((w, request.turn, request.placement.map(|p| p.n)), (D1, 1, Some(8)));
    say(&mut d, &mut r, answer(admits(D1, Mode::Reseed, 0)));
    assert_eq!(locate(&mut d), [D0]);
}
