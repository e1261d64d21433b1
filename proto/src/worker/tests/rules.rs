//! One story per rule, where no field report tells it.

use std::time::Duration;

use super::{
    engine::{Engine, Reader, config, identity, name},
    field::{ask, import_of, more, placed, tokens},
};
use crate::{
    id::*,
    wire::{
        admit::{AdmitRequest, ReleaseRequest, Via},
        reason::Reason,
    },
    worker::*,
};

pub(super) fn lease(e: &mut Engine, session: u8, n: u64) -> Result<LeaseId, Reason> {
    let request = LeaseRequest {
        session: name(session),
        placement: placed(n).unwrap(),
        incarnation: Incarnation(7),
        kind: LeaseKind::Follow,
        have: None,
    };
    match e.w.lease(&request, e.now).map_err(|r| r.code)? {
        LeaseAnswer::Granted(grant) => {
            let reader = Reader {
                tokens: grant.tokens,
                identity: grant.identity,
                seen: Vec::new(),
            };
            e.readers.insert(grant.lease, reader);
            e.effects();
            Ok(grant.lease)
        }
        LeaseAnswer::Wait => Err(Reason::NotResident),
    }
}

pub(super) fn routed(
    e: &mut Engine,
    session: u8,
    prompt: &[Token],
    max_new: u32,
    grant: Option<ReservationId>,
) -> Result<TurnId, Reason> {
    let mut arrival = Engine::arrival(session, identity(0), prompt.to_vec(), max_new);
    (arrival.reservation, arrival.placement) = (grant, placed(1));
    e.arrive(session, arrival, prompt.to_vec()).map_err(|r| r.code)
}

/// A seed by import, up to its commit.
pub(super) fn seeded(e: &mut Engine, session: u8, history: &[Token], request: u64) -> ReservationId {
    let question = AdmitRequest {
        via: Some(Via::Prefill),
        ..ask(session, history.len() as u32, request)
    };
    let grant = e.w.admit(&question, e.now).reservation.unwrap();
    let import = e.w.import(&name(session), &import_of(grant, 1), e.now).unwrap();
    e.offer(import, session, identity(0), history.to_vec(), 50);
    e.poll();
    e.pull_all(import);
    e.confirmed(import);
    e.poll();
    e.check();
    grant
}

/// OWN-4: every page the module owns is in one state.
#[test]
fn page_states_follow_the_turn() {
    use crate::block::PageState::*;
    let mut e = Engine::new(config(640, 16));
    let count = |e: &Engine, state| e.w.page_states().values().filter(|s| **s == state).count();
    let mut arrival = Engine::arrival(0, identity(0), tokens(1, 64), 0);
    arrival.placement = placed(1);
    let id = e.arrive(0, arrival, tokens(1, 64)).unwrap();
    e.finish(id, 0);
    let history = e.turn(0, &more(&tokens(1, 64), 2, 64), 1);
    assert_eq!(count(&e, Held), 4);
    lease(&mut e, 0, 1).unwrap();
    assert_eq!(count(&e, Reading), 4);
    let id = e.say(0, &more(&history[..100], 3, 10), 1).unwrap();
    assert!(e.start(id, 1000));
    assert_eq!(
        (count(&e, Lent), count(&e, Reading)),
        (3, 0),
        "OWN-7: the lease past the cut is revoked"
    );
    let grant = e.w.admit(&ask(1, 64, 9), e.now).reservation.unwrap();
    let import = e.w.import(&name(1), &import_of(grant, 1), e.now).unwrap();
    e.offer(import, 1, identity(0), tokens(7, 64), 0);
    e.poll();
    assert_eq!(count(&e, Landing), 4);
    e.quiesce();
}

/// OWN-5: inside a page only if no lease covers a slot at or past the cut; else the match is rounded down.
#[test]
fn a_lease_past_the_cut_rounds_the_match_to_a_page() {
    let mut e = Engine::new(config(640, 16));
    let mut arrival = Engine::arrival(0, identity(0), tokens(1, 100), 0);
    arrival.placement = placed(1);
    let id = e.arrive(0, arrival, tokens(1, 100)).unwrap();
    e.finish(id, 0);
    let longer = e.turn(0, &more(&tokens(1, 100), 2, 30), 1);
    let held = lease(&mut e, 0, 1).unwrap();
    e.look(held);
    // At the cut: the lease ends where the append begins, the page may be appended to while it is read.
    let id = e.say(0, &more(&longer[..130], 3, 10), 1).unwrap();
    assert!(matches!(e.matched(id), Matched::Session { tokens: 130, .. }));
    e.cancel(id);
    // Past the cut.
    let id = e.say(0, &more(&longer[..120], 4, 10), 1).unwrap();
    assert!(matches!(e.matched(id), Matched::Session { tokens: 112, .. }));
    e.finish(id, 1);
    e.check();
    assert!(e.w.confirm(held, e.now).is_err());
    e.quiesce();
}

/// OWN-5, XFER-4: committed slots are read while the next turn runs, and that lease still confirms.
#[test]
fn an_append_does_not_disturb_a_reader_of_what_was_committed() {
    let mut e = Engine::new(config(640, 16));
    let mut arrival = Engine::arrival(0, identity(0), tokens(1, 100), 0);
    arrival.placement = placed(1);
    let id = e.arrive(0, arrival, tokens(1, 100)).unwrap();
    e.finish(id, 0);
    let held = lease(&mut e, 0, 1).unwrap();
    let id = e.say(0, &more(&tokens(1, 100), 2, 30), 5).unwrap();
    // Page 96..112 is the session's own and no lease covers token 100: the append starts inside it.
    assert!(matches!(e.matched(id), Matched::Session { tokens: 100, .. }));
    assert!(e.start(id, 20));
    e.look(held);
    e.finish_running(id);
    assert!(e.w.confirm(held, e.now).is_ok());
    e.check();
    e.quiesce();
}

/// OWN-7, SES-4: below the cut nothing is invalid: a lease on [0, n) lives on; the rewind number grows.
#[test]
fn a_rewind_spares_what_lies_below_it() {
    let mut e = Engine::new(config(640, 1));
    let mut arrival = Engine::arrival(0, identity(0), tokens(1, 60), 1);
    arrival.placement = placed(1);
    let id = e.arrive(0, arrival, tokens(1, 60)).unwrap();
    e.finish(id, 0);
    let short = lease(&mut e, 0, 1).unwrap();
    let history = e.turn(0, &more(&tokens(1, 60), 2, 40), 1);
    let long = lease(&mut e, 0, 1).unwrap();
    assert_eq!(e.w.session(&name(0), e.now).unwrap().epoch.unwrap().rewind, 0);
    e.turn(0, &more(&history[..70], 3, 10), 1);
    assert_eq!(e.w.session(&name(0), e.now).unwrap().epoch.unwrap().rewind, 1);
    assert!(e.w.confirm(short, e.now).is_ok());
    assert_eq!(e.w.confirm(long, e.now).unwrap_err().code, Reason::LeaseRevoked);
    e.quiesce();
}

/// SES-3: leases on idle sessions are revoked, and at last a waiting turn's own copy is dropped, until a turn can run.
#[test]
fn nothing_that_idles_can_stop_a_running_turn() {
    let mut e = Engine::new(config(640, 16));
    let mut arrival = Engine::arrival(0, identity(0), tokens(1, 200), 0);
    arrival.placement = placed(1);
    let id = e.arrive(0, arrival, tokens(1, 200)).unwrap();
    e.finish(id, 0);
    let history = e.turn(0, &more(&tokens(1, 200), 2, 100), 1);
    let held = lease(&mut e, 0, 1).unwrap();
    let waiting = e.say(0, &more(&history, 3, 300), 5).unwrap();
    assert!(e.make_room(640 / 16), "the leased copy of a waiting turn can be had");
    assert!(e.fenced.contains(&held));
    assert_eq!(e.matched(waiting), Matched::Tree);
    let history = e.finish(waiting, 1);
    let waiting = e.say(0, &more(&history, 4, 5), 5).unwrap();
    let frees = e.w.unwedge(waiting, e.now);
    e.take_back(frees);
    assert_eq!((e.w.evictable(), e.matched(waiting)), (0, Matched::Tree));
    e.finish(waiting, 1);
    e.quiesce();
}

/// SES-3: what one session holds after a turn is cut to the cap.
#[test]
fn a_session_keeps_no_more_than_its_cap() {
    let mut e = Engine::new(WorkerConfig {
        session_cap: 100,
        ..config(640, 16)
    });
    let history = e.turn(0, &tokens(1, 50), 1);
    let history = e.turn(0, &more(&history, 2, 90), 10);
    e.check();
    assert_eq!((e.w.history_len(&name(0)), e.w.counters().over_cap), (96, 1));
    e.turn(0, &more(&history, 3, 10), 1);
    e.quiesce();
}

/// SES-4: messages of an older placement, or of the same number from another store, are stale.
#[test]
fn an_older_placement_is_stale_everywhere() {
    let mut e = Engine::new(config(640, 1));
    let mut arrival = Engine::arrival(0, identity(0), tokens(1, 60), 0);
    arrival.placement = placed(5);
    let id = e.arrive(0, arrival.clone(), tokens(1, 60)).unwrap();
    e.finish(id, 0);
    let conflict = Some(Placement {
        n: 5,
        store: StoreId(2),
    });
    for wrong in [placed(4), conflict] {
        let question = AdmitRequest {
            placement: wrong,
            ..ask(0, 70, wrong.unwrap().n)
        };
        assert_eq!(e.w.admit(&question, e.now).reason, Some(Reason::StaleEpoch));
        arrival.placement = wrong;
        assert_eq!(
            e.arrive(0, arrival.clone(), tokens(1, 60)).unwrap_err().code,
            Reason::StaleEpoch
        );
        let request = LeaseRequest {
            session: name(0),
            placement: wrong.unwrap(),
            incarnation: Incarnation(7),
            kind: LeaseKind::Follow,
            have: None,
        };
        assert_eq!(e.w.lease(&request, e.now).unwrap_err().code, Reason::StaleEpoch);
    }
    assert_eq!(
        lease(&mut e, 0, 6),
        Err(Reason::NotResident),
        "a newer one waits for its turn"
    );
    // A refusal does not take the placement over, a grant does.
    let newer = AdmitRequest {
        placement: placed(6),
        ..ask(0, 5000, 20)
    };
    assert_eq!(e.w.admit(&newer, e.now).reason, Some(Reason::TooLarge));
    assert!(lease(&mut e, 0, 5).is_ok());
    let newer = AdmitRequest {
        placement: placed(6),
        ..ask(0, 70, 21)
    };
    assert_eq!(e.w.admit(&newer, e.now).epoch.unwrap().placement, placed(6).unwrap());
    e.quiesce();
}

/// SES-4, DISP-3: P holds a replica; a prefill-only turn under a new placement appends to it and its lease follows.
#[test]
fn a_prefill_worker_serves_a_reseed_under_its_new_placement() {
    let mut e = Engine::new(config(640, 16));
    let mut arrival = Engine::arrival(0, identity(0), tokens(1, 60), 0);
    arrival.placement = placed(5);
    let id = e.arrive(0, arrival.clone(), tokens(1, 60)).unwrap();
    e.finish(id, 0);
    let prompt = more(&tokens(1, 60), 2, 100);
    (arrival.placement, arrival.prompt) = (placed(6), Prompt::Full(prompt.clone()));
    let id = e.arrive(0, arrival, prompt.clone()).unwrap();
    let held = lease(&mut e, 0, 6).unwrap();
    assert_eq!(e.readers[&held].tokens.len(), 160, "all prompt tokens, readable or not");
    assert_eq!(e.w.lease_view(held, 0).unwrap().slots.len(), 0);
    assert!(e.start(id, 0));
    e.look(held);
    assert_eq!(e.readers[&held].seen.len(), 60, "what was restored is readable at once");
    e.finish_running(id);
    e.look(held);
    assert!(e.w.confirm(held, e.now).is_ok());
    e.check();
    e.quiesce();
}

/// SES-5: another adapter or salt shares nothing.
#[test]
fn another_identity_ends_the_common_prefix() {
    let mut e = Engine::new(config(640, 1));
    let history = e.turn(0, &tokens(1, 60), 5);
    let arrival = Engine::arrival(0, identity(1), history.clone(), 5);
    let id = e.arrive(0, arrival, history).unwrap();
    assert_eq!(e.matched(id), Matched::Tree);
    e.finish(id, 1);
    e.check();
    e.quiesce();
}

/// SES-6, OWN-7: the rewritten prompt has not begun, so the old copy is still there; its first prompt is not the new one's.
#[test]
fn a_lease_on_a_shorter_history_shares_no_more_than_that() {
    let mut e = Engine::new(config(640, 16));
    e.turn(0, &tokens(1, 96), 5);
    let prompt = tokens(2, 40);
    let mut arrival = Engine::arrival(0, identity(0), prompt.clone(), 5);
    arrival.placement = placed(1);
    let id = e.arrive(0, arrival, prompt).unwrap();
    let request = LeaseRequest {
        session: name(0),
        placement: placed(1).unwrap(),
        incarnation: Incarnation(7),
        kind: LeaseKind::Follow,
        have: None,
    };
    let Ok(LeaseAnswer::Granted(grant)) = e.w.lease(&request, e.now) else {
        panic!("no lease")
    };
    e.effects();
    assert_eq!((grant.tokens.len(), grant.share), (40, 40));
    e.w.end_lease(grant.lease, e.now);
    e.finish(id, 1);
    e.check();
    e.quiesce();
}

/// SES-6: an import pulls only what neither the tree nor an older copy has, and shares the first prompt.
#[test]
fn an_import_pulls_only_the_rest() {
    let mut e = Engine::new(config(640, 16));
    let system = tokens(1, 64);
    e.turn(0, &system, 1);
    let first = more(&system, 2, 60);
    seeded(&mut e, 1, &first, 1);
    let done = |e: &Engine| e.done.last().unwrap().1.clone().unwrap();
    assert_eq!(
        done(&e),
        ImportDone {
            resident: 124,
            pulled: 60
        },
        "the tree had 64"
    );
    assert_eq!(e.w.session(&name(1), e.now).unwrap().shared, 64);
    e.w.release(&name(1), &ReleaseRequest::default(), e.now);
    // The older copy diverges at token 100: cut there (to a page edge), then extended; never spliced (XFER-3).
    let second = more(&first[..100], 3, 80);
    seeded(&mut e, 1, &second, 2);
    assert_eq!(
        done(&e),
        ImportDone {
            resident: 180,
            pulled: 180 - 96
        }
    );
    let id = e.say(1, &more(&second, 4, 5), 5).map_err(|r| r.code);
    assert_eq!(id, Err(Reason::SessionBusy), "admitted to its grant");
    e.w.release(&name(1), &ReleaseRequest::default(), e.now);
    e.turn(1, &more(&second, 4, 5), 5);
    e.check();
    e.quiesce();
}

/// SES-3: while the engine has promised the room to a prefill that runs, an import takes none of it: no landing pages, and
/// the older copy that it will extend stays evictable.
#[test]
fn an_import_waits_while_the_room_is_promised_to_what_runs() {
    let mut e = Engine::new(config(640, 16));
    let history = e.turn(0, &tokens(1, 100), 5);
    e.poll();
    let question = AdmitRequest {
        via: Some(Via::Prefill),
        ..ask(0, 300, 1)
    };
    let grant = e.w.admit(&question, e.now).reservation.unwrap();
    let import = e.w.import(&name(0), &import_of(grant, 1), e.now).unwrap();
    e.offer(
        import,
        0,
        identity(0),
        more(&history, 2, 300 - history.len() as u32),
        50,
    );
    let before = (e.w.evictable(), e.w.held());
    e.reserved = 400;
    e.poll();
    assert_eq!(e.polled, vec![]);
    assert_eq!((e.w.evictable(), e.w.held()), before);
    e.reserved = 300;
    e.poll();
    assert!(matches!(e.polled[..], [.., Command::Land { .. }]), "640 - 300 hold it");
    e.pull_all(import);
    e.confirmed(import);
    e.poll();
    e.check();
    e.w.release(&name(0), &ReleaseRequest::default(), e.now);
    e.quiesce();
}

/// XFER-3: nothing is visible before the confirmation, and a refused one drops everything.
#[test]
fn an_unconfirmed_import_is_dropped() {
    let mut e = Engine::new(config(640, 16));
    let grant = e.w.admit(&ask(0, 100, 1), e.now).reservation.unwrap();
    let import = e.w.import(&name(0), &import_of(grant, 1), e.now).unwrap();
    assert_eq!(
        e.w.import(&name(0), &import_of(grant, 1), e.now).unwrap_err().code,
        Reason::ImportRunning
    );
    e.offer(import, 0, identity(0), tokens(1, 100), 32);
    e.poll();
    e.pull_all(import);
    assert_eq!(e.w.history_len(&name(0)), 0);
    e.w.import_failed(
        import,
        crate::wire::reason::Refusal::new(Reason::LeaseRevoked, "test"),
        e.now,
    );
    e.effects();
    e.poll();
    assert_eq!((e.w.history_len(&name(0)), e.w.held()), (0, 0));
    // The grant lives on: the turn may come and be prefilled here.
    let id = routed(&mut e, 0, &tokens(1, 100), 10, Some(grant)).unwrap();
    e.finish(id, 5);
    e.quiesce();
}

/// XFER-4: the lease of a turn that leaves before it begins is revoked too.
#[test]
fn a_cancelled_turn_revokes_the_lease_that_follows_it() {
    let mut e = Engine::new(config(640, 1));
    let mut arrival = Engine::arrival(0, identity(0), tokens(1, 60), 0);
    arrival.placement = placed(5);
    let id = e.arrive(0, arrival, tokens(1, 60)).unwrap();
    let held = lease(&mut e, 0, 5).unwrap();
    assert_eq!(e.w.confirm(held, e.now).unwrap_err().code, Reason::RangeNotReadable);
    e.cancel(id);
    assert_eq!(e.w.confirm(held, e.now).unwrap_err().code, Reason::LeaseRevoked);
    e.quiesce();
}

/// XFER-2, XFER-7: a lease ends without renewal, and in any case after its longest life; then it does not confirm.
#[test]
fn a_silent_reader_loses_its_lease() {
    let mut e = Engine::new(config(640, 1));
    let mut arrival = Engine::arrival(0, identity(0), tokens(1, 60), 0);
    arrival.placement = placed(5);
    let id = e.arrive(0, arrival, tokens(1, 60)).unwrap();
    e.finish(id, 0);
    let held = lease(&mut e, 0, 5).unwrap();
    for _ in 0..14 {
        e.now = e.now + Duration::from_secs(4);
        e.w.handle_timeout(e.now);
        e.w.renew(held, e.now).unwrap();
    }
    e.now = e.now + Duration::from_secs(4);
    // The timer has not been served yet: the deadline holds all the same.
    assert_eq!(
        e.w.confirm(held, e.now).unwrap_err().code,
        Reason::LeaseRevoked,
        "60 s are its longest life"
    );
    let held = lease(&mut e, 0, 5).unwrap();
    e.now = e.w.poll_timeout().unwrap();
    e.w.handle_timeout(e.now);
    e.effects();
    assert!(e.fenced.contains(&held));
    assert_eq!(e.w.lease_view(held, 0).unwrap_err().code, Reason::LeaseRevoked);
    assert_eq!(e.w.lease_view(LeaseId(1), 0).unwrap_err().code, Reason::LeaseUnknown);
    e.quiesce();
}

/// Flush (engines §1): everything is forgotten but the names; it never fails.
#[test]
fn a_flush_fences_everything_and_succeeds() {
    let mut e = Engine::new(config(640, 16));
    let mut arrival = Engine::arrival(0, identity(0), tokens(1, 60), 0);
    arrival.placement = placed(1);
    let id = e.arrive(0, arrival, tokens(1, 60)).unwrap();
    e.finish(id, 0);
    let held = lease(&mut e, 0, 1).unwrap();
    let grant = e.w.admit(&ask(1, 100, 1), e.now).reservation.unwrap();
    let import = e.w.import(&name(1), &import_of(grant, 1), e.now).unwrap();
    e.offer(import, 1, identity(0), tokens(2, 100), 32);
    e.poll();
    let waiting = e.say(0, &more(&tokens(1, 60), 3, 10), 5).unwrap();
    e.flush();
    e.check();
    assert_eq!((e.w.evictable(), e.w.held()), (0, 0));
    assert!(e.fenced.contains(&held) && e.done.len() == 1);
    assert_eq!(e.matched(waiting), Matched::Tree);
    e.finish(waiting, 2);
    assert_eq!(e.w.sessions(None, 10, e.now).total, 2);
    e.quiesce();
}

/// SES-1: remembered names are bounded; the oldest go first.
#[test]
fn only_so_many_names_are_remembered() {
    let mut e = Engine::new(WorkerConfig {
        remembered: 3,
        ..config(640, 1)
    });
    for session in 0..10 {
        e.turn(session, &tokens(u32::from(session), 50), 1);
    }
    assert!(e.make_room(640));
    let list = e.w.sessions(None, 100, e.now);
    let names: Vec<_> = list.sessions.iter().map(|s| s.session_id.to_string()).collect();
    assert_eq!(names, ["s7", "s8", "s9"]);
    e.quiesce();
}

/// Checks that no random life needs: their own story misses them.
#[test]
fn the_stories_miss_the_other_checks_when_they_are_off() {
    use crate::mutation::{Check, without};
    let stories: [(Check, fn()); 3] = [
        (
            Check::ChargeUntilFinish,
            super::grants::a_seed_is_charged_from_grant_to_finish,
        ),
        (Check::StalePlacement, an_older_placement_is_stale_everywhere),
        (
            Check::StaleIncarnation,
            super::field::numbers_of_an_earlier_process_mean_nothing,
        ),
    ];
    for (check, story) in stories {
        let fails = std::panic::catch_unwind(|| without(check, story)).is_err();
        assert!(fails, "nothing notices that {check:?} is off");
    }
}
