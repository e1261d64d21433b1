//! One story per rule of admission (ADM-*): what is granted, charged and given back.

use std::time::Duration;

use super::{
    engine::{Engine, config, identity, name},
    field::{ask, import_of, key, more, placed, tokens},
    rules::{lease, routed, seeded},
};
use crate::{
    id::*,
    wire::{
        admit::{AdmitRequest, Mode, ReleaseRequest, ReleasedKv, Via},
        reason::Reason,
    },
    worker::*,
};

/// ADM-1..6: the modes and the reasons.
#[test]
fn modes_and_reasons_follow_residence_append_and_room() {
    let mut e = Engine::new(config(1000, 1));
    let question = |turn, input, append| AdmitRequest {
        turn,
        append_tokens: append,
        ..ask(0, input, u64::from(input))
    };
    assert_eq!(e.w.admit(&question(0, 200, 200), e.now).mode, Some(Mode::Seed), "ADM-4");
    e.w.release(&name(0), &ReleaseRequest::default(), e.now);
    assert_eq!(e.w.admit(&question(3, 201, 9), e.now).mode, Some(Mode::Reseed), "ADM-4");
    e.w.release(&name(0), &ReleaseRequest::default(), e.now);
    let history = e.turn(0, &tokens(1, 300), 10);
    e.poll();
    let held = history.len() as u32 - 1;
    let answer = e.w.admit(&question(1, held + 50, 1), e.now);
    assert_eq!(
        (answer.mode, answer.resident_tokens),
        (Some(Mode::Direct), held),
        "ADM-1"
    );
    e.w.release(&name(0), &ReleaseRequest::default(), e.now);
    let large = question(1, held + 251, 1);
    assert_eq!(
        e.w.admit(&large, e.now).reason,
        Some(Reason::RealLargeAppend),
        "ADM-2, the worker counts for itself"
    );
    let via = AdmitRequest {
        via: Some(Via::Prefill),
        ..large.clone()
    };
    assert_eq!(e.w.admit(&via, e.now).mode, Some(Mode::Reseed), "DISP-6");
    e.w.release(&name(0), &ReleaseRequest::default(), e.now);
    // Another request takes the room.
    assert!(e.w.admit(&ask(1, 880, 90), e.now).can_admit);
    assert_eq!(
        e.w.admit(&question(1, held + 52, 1), e.now).reason,
        Some(Reason::NoDCapacity),
        "ADM-3"
    );
    assert_eq!(
        e.w.admit(&ask(2, 500, 91), e.now).reason,
        Some(Reason::SessionNotResidentNoCapacity),
        "ADM-5"
    );
    assert_eq!(
        e.w.admit(&ask(3, 945, 92), e.now).reason,
        Some(Reason::TooLarge),
        "ADM-6: not even in an empty worker"
    );
    let bad = AdmitRequest {
        append_tokens: 7,
        ..ask(3, 6, 93)
    };
    assert_eq!(e.w.admit(&bad, e.now).reason, Some(Reason::BadRequest));
    e.w.set_draining(true);
    assert_eq!(
        e.w.admit(&ask(3, 6, 94), e.now).reason,
        Some(Reason::Draining),
        "ADM-12"
    );
}

/// ADM-6: `paper` charges the input as printed, a resident prefix included.
#[test]
fn the_printed_rule_charges_the_resident_prefix_again() {
    let mut charged = Vec::new();
    for rule in [CapacityRule::Growth, CapacityRule::Paper] {
        let mut e = Engine::new(WorkerConfig {
            rule,
            ..config(1000, 1)
        });
        e.turn(0, &tokens(1, 300), 10);
        e.poll();
        let question = AdmitRequest {
            append_tokens: 20,
            ..ask(0, 320, 1)
        };
        let before = e.w.load(None).used;
        charged.push(e.w.admit(&question, e.now).load.used - before);
    }
    // Own pages that stop being evictable: 9; then append 20, the resident one's last token and growth 10, or the input.
    assert_eq!(charged, vec![9 + 20 + 10, 9 + 320]);
}

/// ADM-7, ADM-9: idle sessions count as room, leased and admitted ones do not; off, none does.
#[test]
fn idle_sessions_are_room_until_they_are_used() {
    for evict_idle in [true, false] {
        let mut e = Engine::new(WorkerConfig {
            evict_idle,
            ..config(1000, 1)
        });
        let mut arrival = Engine::arrival(0, identity(0), tokens(1, 50), 0);
        arrival.placement = placed(1);
        let id = e.arrive(0, arrival, tokens(1, 50)).unwrap();
        e.finish(id, 0);
        let history = e.turn(0, &more(&tokens(1, 50), 2, 100), 1);
        e.poll();
        assert_eq!(history.len(), 151);
        assert_eq!(e.w.load(None).used, if evict_idle { 0 } else { 100 });
        lease(&mut e, 0, 1).unwrap();
        assert_eq!(e.w.load(None).used, 100, "leased");
        e.quiesce();
    }
}

/// ADM-8: one turn of a session at a time, whoever asks.
#[test]
fn a_granted_session_is_busy_for_every_other_request() {
    let mut e = Engine::new(config(1000, 1));
    assert!(e.w.admit(&ask(0, 100, 1), e.now).can_admit);
    assert_eq!(e.w.admit(&ask(0, 100, 2), e.now).reason, Some(Reason::SessionBusy));
    assert_eq!(
        e.say(0, &tokens(1, 100), 5).unwrap_err().code,
        Reason::SessionBusy,
        "a direct client too"
    );
    let later = AdmitRequest {
        key: RequestKey { attempt: 1, ..key(1) },
        ..ask(0, 100, 1)
    };
    let second = e.w.admit(&later, e.now);
    assert!(
        second.can_admit,
        "the same request's next probe takes its own grant's place"
    );
    assert_eq!(
        e.w.admit(&ask(0, 100, 1), e.now).reason,
        Some(Reason::Released),
        "the first probe is over"
    );
    assert_eq!(second.load.used, 110, "charged once");
}

/// ADM-10: the same id gets the same grant; a release before the admit leaves a tombstone.
#[test]
fn grants_are_idempotent_and_releases_overtake() {
    let mut e = Engine::new(config(1000, 1));
    let first = e.w.admit(&ask(0, 100, 1), e.now);
    e.now = e.now + Duration::from_secs(10);
    let again = e.w.admit(&ask(0, 100, 1), e.now);
    assert_eq!((again.reservation, again.load.used), (first.reservation, 110));
    assert_eq!((first.deadline_ms, again.deadline_ms), (Some(30_000), Some(20_000)));
    let released = e.w.release(
        &name(1),
        &ReleaseRequest {
            request: Some(key(9)),
            drop_kv: false,
            placed: None,
        },
        e.now,
    );
    assert_eq!((released.released, released.kv), (false, ReleasedKv::Kept));
    assert_eq!(e.w.admit(&ask(1, 100, 9), e.now).reason, Some(Reason::Released));
    assert_eq!(e.w.load(Some(RouterId(1))).highest_request, 9, "EAR-7");
}

/// ADM-10: a reservation lapses without a sign of life; its turn is then admitted afresh.
#[test]
fn a_lapsed_reservation_leaves_the_session_idle_and_its_turn_is_admitted_afresh() {
    let mut e = Engine::new(config(1000, 1));
    let grant = e.w.admit(&ask(0, 100, 1), e.now).reservation;
    e.now = e.w.poll_timeout().unwrap();
    e.w.handle_timeout(e.now);
    assert_eq!((e.w.load(None).used, e.w.counters().lapses), (0, 1));
    let id = routed(&mut e, 0, &tokens(1, 100), 10, grant).unwrap();
    assert_eq!(e.w.load(None).used, 110);
    e.finish(id, 5);
    assert_eq!(e.w.counters().afresh, 1);
    e.quiesce();
}

/// ADM-10: signs of life of an import renew the reservation.
#[test]
fn an_import_keeps_its_reservation_alive() {
    let mut e = Engine::new(config(1000, 1));
    let grant = e.w.admit(&ask(0, 100, 1), e.now).reservation.unwrap();
    let wait = Duration::from_secs(25);
    e.now = e.now + wait;
    let request = crate::wire::admit::ImportRequest {
        deadline_ms: 200_000,
        ..import_of(grant, 1)
    };
    let import = e.w.import(&name(0), &request, e.now).unwrap();
    e.now = e.now + wait;
    e.w.handle_timeout(e.now);
    e.offer(import, 0, identity(0), tokens(1, 100), 0);
    e.poll();
    for pulled in [1, 2] {
        e.now = e.now + wait;
        e.w.handle_timeout(e.now);
        e.w.pull_progress(import, pulled, e.now);
    }
    assert_eq!(e.w.counters().lapses, 0);
    e.now = e.now + Duration::from_secs(31);
    e.w.handle_timeout(e.now);
    e.effects();
    assert_eq!(e.w.counters().lapses, 1);
    assert!(matches!(&e.done[..], [(_, Err(why))] if why.code == Reason::DeadlineExceeded));
    e.poll();
    assert_eq!(e.w.load(None).used, 0);
    e.quiesce();
}

/// ADM-14: the worker is the authority when the tokens are there: it grows or shrinks the charge, or refuses.
#[test]
fn an_estimate_is_corrected_on_arrival() {
    let mut e = Engine::new(config(1000, 1));
    let estimate = AdmitRequest {
        estimated: true,
        ..ask(0, 300, 1)
    };
    let grant = e.w.admit(&estimate, e.now).reservation;
    let id = routed(&mut e, 0, &tokens(1, 200), 10, grant).unwrap();
    assert_eq!((e.w.load(None).used, e.w.counters().estimates_wrong), (210, 1));
    e.finish(id, 5);
    // Too much is refused, typed, before any work; the session is idle and uncharged.
    assert!(e.w.admit(&ask(1, 400, 2), e.now).can_admit);
    let grant = e.w.admit(&ask(2, 100, 3), e.now).reservation;
    let refused = routed(&mut e, 2, &tokens(3, 800), 10, grant);
    assert_eq!(refused, Err(Reason::SessionNotResidentNoCapacity));
    assert_eq!(e.w.session(&name(2), e.now).unwrap().state, "evicted");
    // A client without a router is never refused for size, nor is a prefill-only turn.
    e.say(3, &tokens(4, 900), 10).unwrap();
    routed(&mut e, 4, &tokens(5, 900), 0, None).unwrap();
    assert_eq!(
        routed(&mut e, 5, &tokens(6, 200), 10, None),
        Err(Reason::SessionNotResidentNoCapacity)
    );
    e.quiesce();
}

/// ADM-7, contract: a seed is charged input and growth until its turn has finished.
#[test]
pub(super) fn a_seed_is_charged_from_grant_to_finish() {
    let mut e = Engine::new(config(1000, 1));
    let history = tokens(1, 200);
    let grant = seeded(&mut e, 0, &history, 1);
    assert_eq!(e.w.history_len(&name(0)), 200);
    assert_eq!(e.w.session(&name(0), e.now).unwrap().state, "admitted");
    assert_eq!(e.w.load(None).used, 210);
    let id = routed(&mut e, 0, &more(&history, 2, 3), 10, Some(grant)).unwrap();
    assert!(matches!(
        e.matched(id),
        Matched::Session {
            tokens: 200,
            shared: 50,
            ..
        }
    ));
    assert!(e.start(id, 1000));
    e.poll();
    assert!((213..=223).contains(&e.w.load(None).used), "{}", e.w.load(None).used);
    e.commit(id);
    e.poll();
    assert_eq!(e.w.load(None).used, 0);
    e.quiesce();
}

/// OWN-2, contract: what the engine sees does not change on a service thread.
#[test]
fn service_calls_leave_the_engines_numbers_alone() {
    let mut e = Engine::new(config(1000, 1));
    let id = routed(&mut e, 0, &tokens(1, 100), 50, None).unwrap();
    e.finish(id, 50);
    let numbers = (e.w.evictable(), e.w.held());
    let steps: [fn(&mut Engine); 3] = [
        |e| assert!(e.w.admit(&ask(0, 160, 1), e.now).can_admit),
        |e| assert!(lease(e, 0, 1).is_ok()),
        |e| {
            let request = ReleaseRequest {
                request: None,
                drop_kv: true,
                placed: None,
            };
            assert_eq!(e.w.release(&name(0), &request, e.now).kv, ReleasedKv::Dropped);
        },
    ];
    for step in steps {
        step(&mut e);
        e.effects();
        assert_eq!((e.w.evictable(), e.w.held()), numbers);
    }
    e.poll();
    assert_eq!(e.w.evictable(), 0, "the poll frees what was released");
    e.quiesce();
}
