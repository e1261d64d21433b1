//! What went wrong for others (field-reports.md), one story each.

use super::engine::{Engine, config, identity, name};
use crate::{
    id::*,
    wire::{
        admit::{AdmitRequest, ImportRequest, Mode, ReleaseRequest, Source},
        reason::{Reason, Refusal},
    },
    worker::*,
};

pub(super) fn tokens(seed: u32, n: u32) -> Vec<Token> {
    (0..n).map(|i| seed * 1000 + i).collect()
}

pub(super) fn more(history: &[Token], seed: u32, n: u32) -> Vec<Token> {
    [history, &tokens(seed, n)].concat()
}

pub(super) fn key(request: u64) -> RequestKey {
    RequestKey {
        router: RouterId(1),
        request,
        attempt: 0,
    }
}

pub(super) fn placed(n: u64) -> Option<Placement> {
    Some(Placement { n, store: StoreId(1) })
}

pub(super) fn ask(session: u8, input: u32, request: u64) -> AdmitRequest {
    AdmitRequest {
        session_id: name(session),
        turn: 0,
        input_tokens: input,
        append_tokens: input,
        max_new_tokens: Some(10),
        estimated: false,
        via: None,
        placement: placed(1),
        incarnation: None,
        backup: None,
        key: key(request),
    }
}

pub(super) fn import_of(reservation: ReservationId, n: u64) -> ImportRequest {
    ImportRequest {
        reservation: Some(reservation),
        placement: placed(n).unwrap(),
        source: Source::Prefill,
        peer: "127.0.0.1:9".into(),
        incarnation: Incarnation(8),
        deadline_ms: 10_000,
    }
}

/// F1: sessions fill the pool; the next one is served all the same, by evicting the idle (SES-3, ADM-9).
#[test]
fn sessions_that_fill_the_pool_do_not_stop_it() {
    for page in [4, 16] {
        let mut e = Engine::new(config(640, page));
        for round in 0..2 {
            for session in 0..12 {
                e.turn(session, &tokens(u32::from(session), 100 + round), 5);
                e.check();
                e.poll();
            }
        }
        assert!(e.w.counters().evictions >= 12);
        e.quiesce();
    }
}

/// F2: a second request while the first runs gets `session-busy`; close while running ends with the turn (SES-2).
#[test]
fn a_second_turn_is_busy_and_close_waits_for_the_first() {
    let mut e = Engine::new(config(640, 1));
    let id = e.say(0, &tokens(1, 50), 5).unwrap();
    assert!(e.start(id, 20));
    assert_eq!(e.say(0, &tokens(1, 60), 5).unwrap_err().code, Reason::SessionBusy);
    assert_eq!(e.w.admit(&ask(0, 60, 1), e.now).reason, Some(Reason::SessionBusy));
    assert!(e.w.close(&name(0), e.now), "deferred, and the caller is told");
    assert!(e.w.close(&name(0), e.now), "again the same");
    e.extend(id, 100);
    e.commit(id);
    e.check();
    assert_eq!(
        (e.w.evictable(), e.w.session(&name(0), e.now)),
        (0, None),
        "freed at the turn's end"
    );
    e.quiesce();
}

/// F3: an evicted session is still known; its next turn recomputes and nobody is told off (SES-1).
#[test]
fn cold_sessions_make_room_and_come_back() {
    let mut e = Engine::new(config(320, 1));
    let history = e.turn(0, &tokens(1, 100), 5);
    assert!(e.make_room(320));
    let view = e.w.session(&name(0), e.now).unwrap();
    assert_eq!((&*view.state, view.committed), ("evicted", 0));
    let id = e.say(0, &more(&history, 2, 10), 5).unwrap();
    assert_eq!(e.matched(id), Matched::Tree);
    assert!(e.start(id, 1000));
    assert_eq!(
        e.w.share_len(id),
        100,
        "what was shared is shared again, not the whole history"
    );
    e.adopt(id);
    e.commit(id);
    e.quiesce();
}

/// F4: an over-long turn is aborted before its forward pass: the slot is as it was.
#[test]
fn a_turn_aborted_before_it_begins_leaves_the_session_alone() {
    let mut e = Engine::new(config(640, 16));
    let history = e.turn(0, &tokens(1, 50), 5);
    let before = (e.w.evictable(), e.w.session(&name(0), e.now));
    let id = e.say(0, &more(&history[..20], 2, 9), 5).unwrap();
    e.lock(id);
    e.unlock(id);
    e.cancel(id);
    e.w.cancel(id, e.now);
    e.check();
    assert_eq!((e.w.evictable(), e.w.session(&name(0), e.now)), before);
    // Begun, but not a token computed: back to what was restored, nothing below it touched.
    let id = e.say(0, &more(&history, 2, 9), 5).unwrap();
    assert!(e.start(id, 0));
    e.roll_back(id, Rollback::Abort);
    e.check();
    assert_eq!(e.w.history_len(&name(0)), 54);
    e.quiesce();
}

/// F5: however short the engine's limit, the match is made on the full history and nothing leaks.
#[test]
fn a_shorter_limit_shortens_the_match_and_leaks_nothing() {
    let mut e = Engine::new(config(640, 1));
    let history = e.turn(0, &tokens(1, 50), 5);
    let id = e.say(0, &more(&history, 2, 9), 5).unwrap();
    assert_eq!(e.w.match_turn(id, 0), Matched::Tree);
    assert!(matches!(
        e.w.match_turn(id, 52),
        Matched::Session {
            tokens: 52,
            shared: 50,
            ..
        }
    ));
    assert!(matches!(
        e.w.match_turn(id, u32::MAX),
        Matched::Session { tokens: 54, .. }
    ));
    e.finish(id, 3);
    e.quiesce();
}

/// F6: a prefill that is refused for budget and tried again claims once, restores once, begins once.
#[test]
fn restoring_is_idempotent() {
    let mut e = Engine::new(config(640, 16));
    let history = e.turn(0, &tokens(1, 60), 5);
    let all = e.w.evictable();
    let id = e.say(0, &more(&history[..50], 2, 60), 5).unwrap();
    for _ in 0..3 {
        e.lock(id);
        e.w.claim(id, 50);
        e.check();
        e.w.unclaim(id);
        e.unlock(id);
        assert_eq!(e.w.evictable(), all);
    }
    assert!(e.start(id, 30));
    assert_eq!(e.w.begin(id, e.now), Frees::default(), "a further chunk frees nothing");
    e.finish_running(id);
    e.quiesce();
}

/// F7: page size above 1 and a committed length that is not page aligned: exact committed, aligned protected.
#[test]
fn committed_is_exact_and_protected_is_aligned() {
    let mut e = Engine::new(config(640, 16));
    let history = e.turn(0, &tokens(1, 50), 5);
    let view = e.w.session(&name(0), e.now).unwrap();
    assert_eq!((view.committed, view.shared), (54, 48));
    let id = e.say(0, &more(&history, 2, 5), 5).unwrap();
    assert!(
        matches!(
            e.matched(id),
            Matched::Session {
                tokens: 54,
                shared: 48,
                ..
            }
        ),
        "restored in the middle of a page"
    );
    e.finish(id, 4);
    e.check();
    e.quiesce();
}

/// F8: a retract gives back exactly what the turn allocated, the unaligned tail too.
#[test]
fn a_retract_leaves_no_token_behind() {
    for page in [1, 16] {
        let mut e = Engine::new(config(640, page));
        let history = e.turn(0, &tokens(1, 50), 5);
        e.poll();
        let (free, evictable) = (e.free.len(), e.w.evictable());
        let id = e.say(0, &more(&history, 2, 40), 9).unwrap();
        assert!(e.start(id, 1000));
        assert!(e.decode(id, 1) && e.decode(id, 2));
        e.roll_back(id, Rollback::Retract);
        e.check();
        assert_eq!((e.free.len(), e.w.evictable()), (free, evictable));
        let history = e.finish(id, 2);
        assert_eq!(history.len(), 55 + 40 + 4, "it runs again, with what it had said");
        e.quiesce();
    }
}

/// F9: only success moves the checkpoint.
#[test]
fn a_retract_does_not_move_the_checkpoint() {
    let mut e = Engine::new(config(640, 1));
    let history = e.turn(0, &tokens(1, 50), 5);
    for how in [Rollback::Retract, Rollback::Abort] {
        let id = e.say(0, &more(&history, 2, 40), 9).unwrap();
        assert!(e.start(id, 1000));
        e.decode(id, 1);
        e.roll_back(id, how);
        assert_eq!(e.w.session(&name(0), e.now).unwrap().committed, 54);
        if how == Rollback::Retract {
            e.cancel(id);
        }
    }
    assert_eq!(e.w.history_len(&name(0)), 54);
    e.quiesce();
}

/// F11: the exporter's turn aborts while a peer pulls: the lease does not confirm, and it is fenced before a page goes.
#[test]
fn an_abort_under_a_reader_fences_it_first() {
    let mut e = Engine::new(config(640, 16));
    let mut arrival = Engine::arrival(0, identity(0), tokens(1, 90), 0);
    arrival.placement = placed(4);
    let id = e.arrive(0, arrival, tokens(1, 90)).unwrap();
    let lease = super::rules::lease(&mut e, 0, 4).unwrap();
    assert!(e.start(id, 40));
    e.look(lease);
    assert_eq!(e.readers[&lease].seen.len(), 40, "XFER-4: read while it prefills");
    e.roll_back(id, Rollback::Abort);
    assert_eq!(e.fenced, vec![lease]);
    assert_eq!(e.w.confirm(lease, e.now).unwrap_err().code, Reason::LeaseRevoked);
    e.check();
    e.quiesce();
}

/// F13: a reader that refuses ends its lease at once; nothing waits for a timer.
#[test]
fn an_ended_lease_keeps_nothing() {
    let mut e = Engine::new(config(640, 1));
    let mut arrival = Engine::arrival(0, identity(0), tokens(1, 90), 0);
    arrival.placement = placed(4);
    let id = e.arrive(0, arrival, tokens(1, 90)).unwrap();
    e.finish(id, 0);
    e.poll();
    let used = e.w.load(None).used;
    let lease = super::rules::lease(&mut e, 0, 4).unwrap();
    assert_eq!(
        e.w.load(None).used,
        used + u64::from(e.w.evictable()),
        "leased pages are used (ADM-7)"
    );
    e.w.end_lease(lease, e.now);
    e.effects();
    assert_eq!(e.w.load(None).used, used);
    assert_eq!(e.w.poll_timeout(), None);
    e.quiesce();
}

/// F14: the client disconnects in every phase of an import: fenced, given back, the session idle and uncharged.
#[test]
fn a_client_may_leave_in_any_phase_of_an_import() {
    for phase in 0..6 {
        let mut e = Engine::new(config(640, 16));
        let grant = e.w.admit(&ask(0, 100, 1), e.now).reservation.unwrap();
        let import = e.w.import(&name(0), &import_of(grant, 1), e.now).unwrap();
        if phase > 0 {
            e.offer(import, 0, identity(0), tokens(1, 100), 32);
        }
        e.kill_landing = phase == 2;
        if phase > 1 {
            e.poll();
        }
        if phase > 3 {
            e.pull_all(import);
        }
        if phase > 4 {
            e.confirmed(import);
        }
        let answer = e.w.release(
            &name(0),
            &ReleaseRequest {
                request: Some(key(1)),
                drop_kv: false,
                placed: None,
            },
            e.now,
        );
        e.effects();
        assert!(answer.released, "phase {phase}");
        e.check();
        assert!(
            matches!(
                e.done[..],
                [(
                    _,
                    Err(Refusal {
                        code: Reason::Cancelled,
                        ..
                    })
                )]
            ),
            "phase {phase}: {:?}",
            e.done
        );
        e.poll();
        assert_eq!((e.w.held(), e.w.load(None).used), (0, 0), "phase {phase}");
        assert_eq!(
            e.w.admit(&ask(0, 100, 1), e.now).reason,
            Some(Reason::Released),
            "ADM-10: a tombstone"
        );
        e.quiesce();
    }
}

/// F16: after a restart on the same address nothing of the old process is taken for the new one's.
#[test]
pub(super) fn numbers_of_an_earlier_process_mean_nothing() {
    let mut old = Worker::new(config(640, 1), Incarnation(1));
    let mut new = Engine::new(config(640, 1));
    let grant = old.admit(&ask(0, 100, 1), new.now).reservation.unwrap();
    assert_eq!(
        new.w.import(&name(0), &import_of(grant, 1), new.now).unwrap_err().code,
        Reason::UnknownSession
    );
    let other = new.w.admit(&ask(0, 100, 2), new.now).reservation.unwrap();
    assert_ne!(grant, other);
    let mut arrival = Engine::arrival(0, identity(0), tokens(1, 100), 5);
    arrival.reservation = Some(grant);
    assert_eq!(
        new.arrive(0, arrival, tokens(1, 100)).unwrap_err().code,
        Reason::SessionBusy
    );
    let mut late = ask(1, 100, 3);
    late.incarnation = Some(Incarnation(1));
    assert_eq!(new.w.admit(&late, new.now).reason, Some(Reason::StaleIncarnation));
    let request = LeaseRequest {
        session: name(0),
        placement: placed(1).unwrap(),
        incarnation: Incarnation(1),
        kind: LeaseKind::Follow,
        have: None,
    };
    assert_eq!(
        new.w.lease(&request, new.now).unwrap_err().code,
        Reason::StaleIncarnation
    );
}

/// F17: the client re-tokenises the last answer: the common prefix is kept, the divergence is counted (OWN-7).
#[test]
fn a_rewritten_answer_costs_only_what_follows_it() {
    let mut e = Engine::new(config(640, 1));
    let mut history = e.turn(0, &tokens(1, 50), 10);
    for turn in 2..6 {
        let at = history.len() - 4;
        history[at] = 7_000_000 + turn;
        let prompt = more(&history, turn, 20);
        let id = e.say(0, &prompt, 10).unwrap();
        assert!(matches!(e.matched(id), Matched::Session { tokens, .. } if tokens as usize == at));
        history = e.finish(id, 10);
        e.check();
    }
    assert_eq!(e.w.counters().rewinds, 4);
    assert_eq!(
        e.w.counters().restored_tokens,
        e.w.counters().prompt_tokens - 50 - 4 * 24
    );
    e.quiesce();
}

/// F15: a failed import leaves nothing behind that refuses the next one.
#[test]
fn a_failed_import_does_not_poison_the_next() {
    let mut e = Engine::new(config(640, 16));
    for n in 1..4 {
        let grant = e.w.admit(
            &AdmitRequest {
                placement: placed(n),
                ..ask(0, 100, n)
            },
            e.now,
        );
        assert_eq!(grant.mode, Some(Mode::Seed));
        let import =
            e.w.import(&name(0), &import_of(grant.reservation.unwrap(), n), e.now)
                .unwrap();
        e.offer(import, 0, identity(0), tokens(1, 100), 32);
        e.poll();
        if n < 3 {
            e.w.import_failed(import, Refusal::new(Reason::PeerUnreachable, "test"), e.now);
            e.effects();
            e.w.release(
                &name(0),
                &ReleaseRequest {
                    request: Some(key(n)),
                    drop_kv: false,
                    placed: None,
                },
                e.now,
            );
            e.poll();
            assert_eq!(e.w.held(), 0);
        } else {
            e.pull_all(import);
            e.confirmed(import);
            e.poll();
            assert_eq!(e.w.history_len(&name(0)), 100);
        }
        e.check();
    }
    e.quiesce();
}
