//! Algorithm 3, told step by step.

use super::*;
use crate::{
    id::{Epoch, Incarnation, StoreId},
    routing::{
        MemoryStore, RouterConfig,
        testing::{D0, D1, D2, admits, info, refuses, view},
    },
    wire::{
        admit::{AdmitAnswer, AdmitRequest, Mode},
        info::Standing,
    },
};

pub(super) type TestRouter = Router<MemoryStore>;

pub(super) const T: Now = Now(0);

pub(super) fn router_of(roles: &[Role], config: RouterConfig) -> TestRouter {
    Router::new(config, RouterId(7), MemoryStore::new(StoreId(1)), view(roles))
}

/// Two or more decode workers, no prefill worker; sessions are not asked for.
pub(super) fn decoders(n: usize) -> TestRouter {
    let config = RouterConfig {
        ask_unknown: false,
        ..RouterConfig::default()
    };
    router_of(&vec![Role::Decode; n], config)
}

pub(super) fn s() -> SessionId {
    SessionId::new("s").expect("plain")
}

pub(super) fn turn(input_tokens: u32) -> Turn {
    Turn {
        session: Some(s()),
        input_tokens,
        max_new_tokens: Some(16),
        estimated: false,
    }
}

pub(super) fn start(router: &mut TestRouter, input: u32) -> Dispatch {
    Dispatch::start(router, turn(input), T)
}

pub(super) fn say(d: &mut Dispatch, router: &mut TestRouter, event: Event) {
    d.handle(router, event, T).expect("the event is expected");
}

pub(super) fn probe(d: &mut Dispatch) -> (WorkerIndex, AdmitRequest) {
    match d.poll_effect() {
        Some(Effect::Probe { worker, request }) => (worker, *request),
        other => panic!("expected a probe, got {other:?}"),
    }
}

pub(super) fn run(d: &mut Dispatch) -> (WorkerIndex, Option<crate::wire::turn::TurnTag>) {
    loop {
        match d.poll_effect() {
            Some(Effect::Placed { .. }) => {}
            Some(Effect::Run { worker, tag }) => return (worker, tag),
            other => panic!("expected a run, got {other:?}"),
        }
    }
}

pub(super) fn answer(a: AdmitAnswer) -> Event {
    Event::Answer(Box::new(a))
}

pub(super) fn complete(d: &mut Dispatch, router: &mut TestRouter) {
    say(d, router, Event::FirstByte);
    say(d, router, Event::Completed { output_tokens: 10 });
    assert_eq!(d.outcome(), Some(Outcome::Completed));
}

/// One whole seed at whichever worker is chosen.
pub(super) fn seed(router: &mut TestRouter, input: u32) -> WorkerIndex {
    let mut d = start(router, input);
    let (w, request) = probe(&mut d);
    assert_eq!(request.turn, 0);
    say(&mut d, router, answer(admits(w, Mode::Seed, 0)));
    let (ran, _) = run(&mut d);
    assert_eq!(ran, w);
    complete(&mut d, router);
    w
}

pub(super) fn inflight(router: &TestRouter) -> Vec<u32> {
    router.view.all().map(|w| router.view.worker(w).inflight()).collect()
}

pub(super) fn rejects(router: &TestRouter, w: WorkerIndex) -> u32 {
    router.sessions.peek(&s()).map_or(0, |r| r.rejects(router.view.at(w)))
}

#[test]
fn a_second_turn_runs_direct_where_the_first_ran() {
    // DISP-1, DISP-2, THM-2
    let mut r = decoders(3);
    let w = seed(&mut r, 1000);
    let mut d = start(&mut r, 1100);
    let (asked, request) = probe(&mut d);
    assert_eq!(asked, w);
    assert_eq!(
        (request.turn, request.input_tokens, request.append_tokens),
        (1, 1100, 90)
    );
    say(&mut d, &mut r, answer(admits(w, Mode::Direct, 1010)));
    assert_eq!(inflight(&r)[usize::from(w.0)], 1);
    let (ran, tag) = run(&mut d);
    let tag = tag.expect("a session turn is tagged");
    assert_eq!(
        (ran, tag.reservation, tag.origin),
        (w, Some(ReservationId(9)), Some((RouterId(7), 2)))
    );
    assert_eq!(tag.placement, request.placement);
    complete(&mut d, &mut r);
    assert_eq!(inflight(&r), [0, 0, 0]);
    assert_eq!(d.trace().mode, Some(ExecutionMode::Direct));
}

#[test]
fn nothing_is_reset_before_completion() {
    // DISP-1 [reading], DISP-8
    let mut r = decoders(2);
    seed(&mut r, 1000);
    let mut d = start(&mut r, 1100);
    let (w, _) = probe(&mut d);
    say(&mut d, &mut r, answer(refuses(w, Reason::NoDCapacity, 1010)));
    run(&mut d); // ε = 1: fallback
    complete(&mut d, &mut r);
    assert_eq!(rejects(&r, w), 1);

    let mut d = start(&mut r, 1100);
    probe(&mut d);
    say(&mut d, &mut r, answer(admits(w, Mode::Direct, 1010)));
    run(&mut d);
    assert_eq!(rejects(&r, w), 1, "admission resets nothing");
    say(&mut d, &mut r, Event::FirstByte);
    say(&mut d, &mut r, Event::Failed(Reason::PeerUnreachable));
    assert_eq!(d.outcome(), Some(Outcome::Broken(Reason::PeerUnreachable)));
    assert_eq!(rejects(&r, w), 1, "a failed execution is not a success");

    let mut d = start(&mut r, 1100);
    probe(&mut d);
    say(&mut d, &mut r, answer(admits(w, Mode::Direct, 1010)));
    run(&mut d);
    complete(&mut d, &mut r);
    assert_eq!(rejects(&r, w), 0);
}

#[test]
fn a_direct_turn_clears_the_rejects_of_all_workers() {
    // DISP-7
    for reset_on_success in [true, false] {
        let config = RouterConfig {
            ask_unknown: false,
            reset_on_success,
            ..RouterConfig::default()
        };
        let mut r = router_of(&[Role::Decode; 3], config);
        let mut d = start(&mut r, 1000);
        let (first, _) = probe(&mut d);
        say(
            &mut d,
            &mut r,
            answer(refuses(first, Reason::SessionNotResidentNoCapacity, 0)),
        );
        let (second, _) = probe(&mut d);
        assert_ne!(first, second, "an asked worker is not asked again (ROUTE-1)");
        say(&mut d, &mut r, answer(admits(second, Mode::Seed, 0)));
        run(&mut d);
        complete(&mut d, &mut r);
        assert_eq!(rejects(&r, first), 1, "a seed clears its own worker only");
        let mut d = start(&mut r, 1100);
        probe(&mut d);
        say(&mut d, &mut r, answer(admits(second, Mode::Direct, 1010)));
        run(&mut d);
        complete(&mut d, &mut r);
        assert_eq!(rejects(&r, first), u32::from(!reset_on_success));
    }
}

#[test]
fn a_seed_prefills_on_p_while_d_imports() {
    // DISP-3
    let config = RouterConfig {
        ask_unknown: false,
        ..RouterConfig::default()
    };
    let mut r = router_of(&[Role::Prefill, Role::Decode, Role::Decode], config);
    let mut d = start(&mut r, 1000);
    let (w, request) = probe(&mut d);
    assert_eq!(w, D1, "a prefill worker takes no turns");
    say(&mut d, &mut r, answer(admits(w, Mode::Seed, 0)));
    let Some(Effect::HandOver(h)) = d.poll_effect() else {
        panic!("expected a hand over")
    };
    let prefill = h.prefill.expect("somebody prefills");
    assert_eq!((prefill.worker, h.decode, prefill.refresh), (D0, D1, None));
    assert!(prefill.tag.prefill_only && prefill.tag.reservation.is_none());
    assert_eq!(prefill.tag.placement, request.placement);
    assert_eq!(Some(h.import.placement), request.placement);
    assert_eq!(
        (h.import.reservation, h.import.incarnation),
        (Some(ReservationId(9)), Incarnation(1))
    );
    assert_eq!(inflight(&r), [1, 1, 0]);
    say(&mut d, &mut r, Event::Imported);
    assert_eq!(inflight(&r), [0, 1, 0]);
    let (_, tag) = run(&mut d);
    assert_eq!(tag.and_then(|t| t.placement), request.placement);
    complete(&mut d, &mut r);
    assert_eq!(inflight(&r), [0, 0, 0]);
    assert_eq!(
        r.sessions.peek(&s()).and_then(|r| r.replica).map(|at| at.worker),
        Some(D0)
    );
}

#[test]
fn a_failed_import_or_prefill_leaves_the_prompt_to_d() {
    // XFER-7: recompute is always possible.
    for event in [Event::ImportFailed(Reason::LeaseRevoked), Event::PrefillFailed] {
        let config = RouterConfig {
            ask_unknown: false,
            sync: false,
            ..RouterConfig::default()
        };
        let mut r = router_of(&[Role::Prefill, Role::Decode], config);
        let mut d = start(&mut r, 1000);
        probe(&mut d);
        say(&mut d, &mut r, answer(admits(D1, Mode::Seed, 0)));
        d.poll_effect();
        say(&mut d, &mut r, event);
        let (w, tag) = run(&mut d);
        assert_eq!((w, tag.and_then(|t| t.reservation)), (D1, Some(ReservationId(9))));
        assert_eq!(inflight(&r), [0, 1]);
        complete(&mut d, &mut r);
        assert_eq!(d.trace().chain.len(), 1);
        assert_eq!(r.sessions.peek(&s()).and_then(|r| r.replica), None);
    }
}

#[test]
fn a_resident_session_found_evicted_gets_a_fresh_placement() {
    // SES-4: every seed and reseed takes a number before its import; ADM-4
    let config = RouterConfig {
        ask_unknown: false,
        ..RouterConfig::default()
    };
    let mut r = router_of(&[Role::Prefill, Role::Decode], config);
    let mut d = start(&mut r, 1000);
    let (_, first) = probe(&mut d);
    say(&mut d, &mut r, answer(admits(D1, Mode::Seed, 0)));
    d.poll_effect();
    say(&mut d, &mut r, Event::Imported);
    run(&mut d);
    complete(&mut d, &mut r);

    let mut d = start(&mut r, 1100);
    let (_, second) = probe(&mut d);
    assert_eq!(
        second.placement, first.placement,
        "a direct turn names the placement held"
    );
    say(&mut d, &mut r, answer(admits(D1, Mode::Reseed, 0)));
    assert!(matches!(d.poll_effect(), Some(Effect::Locate { .. })));
    say(&mut d, &mut r, Event::Located(vec![Resident::nothing(D0)]));
    let Some(Effect::HandOver(h)) = d.poll_effect() else {
        panic!("expected a hand over")
    };
    assert!(h.import.placement.n > first.placement.expect("sent").n);
    assert_eq!(h.prefill.map(|p| p.worker), Some(D0));
}

#[test]
fn a_large_append_is_asked_again_via_prefill_and_not_counted() {
    // DISP-6, ADM-2
    let mut r = decoders(2);
    let w = seed(&mut r, 1000);
    let mut d = start(&mut r, 50_000);
    let (asked, first) = probe(&mut d);
    assert_eq!((asked, first.via), (w, None));
    say(&mut d, &mut r, answer(refuses(w, Reason::RealLargeAppend, 1010)));
    let (asked, again) = probe(&mut d);
    assert_eq!((asked, again.via), (w, Some(Via::Prefill)));
    assert!(again.key.attempt > first.key.attempt && again.key.request == first.key.request);
    assert_ne!(again.placement, first.placement, "a reseed takes a number (SES-4)");
    say(&mut d, &mut r, answer(admits(w, Mode::Reseed, 1010)));
    run(&mut d);
    assert_eq!(rejects(&r, w), 0);
    complete(&mut d, &mut r);
}

#[test]
fn a_turn_refused_on_arrival_for_its_size_is_asked_via_prefill_only_once() {
    // ADM-14: the estimate was wrong; the worker is the authority.
    let mut r = decoders(1);
    seed(&mut r, 1000);
    let mut d = start(&mut r, 1100);
    probe(&mut d);
    say(&mut d, &mut r, answer(admits(D0, Mode::Direct, 1010)));
    run(&mut d);
    say(&mut d, &mut r, Event::TurnRefused(Reason::RealLargeAppend));
    assert_eq!(inflight(&r), [0]);
    let (_, again) = probe(&mut d);
    assert_eq!(again.via, Some(Via::Prefill));
    say(&mut d, &mut r, answer(admits(D0, Mode::Reseed, 1010)));
    run(&mut d);
    say(&mut d, &mut r, Event::TurnRefused(Reason::RealLargeAppend));
    let (_, tag) = run(&mut d);
    assert_eq!(tag, None, "fallback");
}

#[test]
fn a_busy_session_waits_and_then_gets_409_and_is_seeded_nowhere_else() {
    // ADM-8, F2
    let mut r = decoders(3);
    let w = seed(&mut r, 1000);
    let mut d = start(&mut r, 1100);
    let mut now = T;
    let mut asked = 0;
    loop {
        match d.poll_effect() {
            Some(Effect::Probe { worker, .. }) => {
                assert_eq!(worker, w);
                asked += 1;
                let busy = answer(refuses(w, Reason::SessionBusy, 1010));
                d.handle(&mut r, busy, now).expect("expected");
            }
            Some(Effect::Wait { until }) => {
                assert!(until > now);
                now = until;
                d.handle_timeout(&mut r, now);
            }
            Some(Effect::Refuse(refused)) => {
                assert_eq!((refused.status, refused.reason), (409, Reason::SessionBusy));
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(now.since(T), r.config.busy_wait);
    assert!(asked > 5);
    assert_eq!(rejects(&r, w), 0, "DISP-6");
    assert_eq!(
        d.trace().chain,
        [Reason::SessionBusy],
        "one entry, however long it took"
    );
}

#[test]
fn a_large_append_that_meets_a_busy_session_on_arrival_stays_with_its_worker() {
    // INV-3, DISP-6, ADM-8: another router's turn came first.
    let mut r = decoders(2);
    let w = seed(&mut r, 1000);
    let mut d = start(&mut r, 20_000);
    probe(&mut d);
    say(&mut d, &mut r, answer(refuses(w, Reason::RealLargeAppend, 1010)));
    probe(&mut d);
    say(&mut d, &mut r, answer(admits(w, Mode::Reseed, 1010)));
    run(&mut d);
    say(&mut d, &mut r, Event::TurnRefused(Reason::SessionBusy));
    let Some(Effect::Wait { until }) = d.poll_effect() else {
        panic!("it waits");
    };
    d.handle_timeout(&mut r, until);
    let (again, request) = probe(&mut d);
    assert_eq!((again, request.via), (w, Some(Via::Prefill)));
}

#[test]
fn a_busy_session_that_becomes_idle_is_served() {
    // ADM-8
    let mut r = decoders(2);
    let w = seed(&mut r, 1000);
    let mut d = start(&mut r, 1100);
    probe(&mut d);
    say(&mut d, &mut r, answer(refuses(w, Reason::SessionBusy, 1010)));
    let Some(Effect::Wait { until }) = d.poll_effect() else {
        panic!("expected a pause")
    };
    d.handle_timeout(&mut r, until);
    let (asked, _) = probe(&mut d);
    say(&mut d, &mut r, answer(admits(asked, Mode::Direct, 1010)));
    run(&mut d);
    complete(&mut d, &mut r);
}

#[test]
fn two_dispatches_of_one_session_do_not_overlap_in_one_router() {
    // ADM-8: without this two first turns would be seeded on two workers.
    let mut r = decoders(2);
    let mut first = start(&mut r, 1000);
    let mut second = start(&mut r, 1000);
    let Some(Effect::Wait { until }) = second.poll_effect() else {
        panic!("expected a wait")
    };
    second.handle_timeout(&mut r, until);
    assert!(matches!(second.poll_effect(), Some(Effect::Wait { .. })));
    let (w, _) = probe(&mut first);
    say(&mut first, &mut r, answer(admits(w, Mode::Seed, 0)));
    run(&mut first);
    complete(&mut first, &mut r);
    second.handle_timeout(&mut r, until + Duration::from_millis(10));
    assert_eq!(probe(&mut second).0, w);
    assert_eq!(r.sessions.busy(), 1);
    say(&mut second, &mut r, Event::ClientGone);
    assert_eq!(r.sessions.busy(), 0);
}

#[test]
fn a_queued_dispatch_that_gives_up_leaves_the_session_to_its_owner() {
    let mut r = decoders(2);
    let _first = start(&mut r, 1000);
    let mut second = start(&mut r, 1000);
    second.handle_timeout(&mut r, T + Duration::from_secs(5));
    second.poll_effect();
    assert!(matches!(
        second.poll_effect(),
        Some(Effect::Refuse(Refused { status: 409, .. }))
    ));
    let mut third = start(&mut r, 1000);
    say(&mut third, &mut r, Event::ClientGone);
    assert_eq!(r.sessions.busy(), 1);
}

#[test]
fn an_unknown_session_is_asked_for_before_it_is_seeded() {
    // ROUTE-9
    let mut r = router_of(&[Role::Decode; 3], RouterConfig::default());
    let mut d = start(&mut r, 1000);
    let ask = Effect::Ask {
        session: s(),
        workers: vec![D0, D1, D2],
    };
    assert_eq!(d.poll_effect(), Some(ask));
    let placement = Placement {
        n: 40,
        store: StoreId(2),
    };
    let epoch = Some(Epoch { placement, rewind: 1 });
    let found = Resident {
        worker: D2,
        tokens: 900,
        epoch,
        standing: Standing::Owner,
        moved: None,
    };
    say(&mut d, &mut r, Event::Residents(vec![found]));
    let (w, request) = probe(&mut d);
    assert_eq!((w, request.turn, request.placement), (D2, 1, Some(placement)));
    assert_eq!(request.append_tokens, 100);
    say(&mut d, &mut r, Event::ClientGone);

    let mut d = Dispatch::start(
        &mut r,
        Turn {
            session: SessionId::new("new").ok(),
            ..turn(10)
        },
        T,
    );
    d.poll_effect();
    say(&mut d, &mut r, Event::Residents(vec![]));
    assert_eq!(probe(&mut d).1.turn, 0);
}

#[test]
fn a_client_that_goes_away_leaves_nothing_behind() {
    // F14, ADM-10: a release at once, the count down once.
    let mut r = decoders(2);
    let mut d = start(&mut r, 1000);
    let (w, request) = probe(&mut d);
    say(&mut d, &mut r, Event::ClientGone);
    let release = Effect::Release {
        worker: w,
        session: s(),
        request: request.key,
    };
    assert_eq!(
        d.poll_effect(),
        Some(release),
        "the answer may still come: a tombstone is wanted"
    );
    assert_eq!(d.poll_effect(), None);
    say(&mut d, &mut r, Event::ClientGone);
    assert_eq!(d.poll_effect(), None);
    assert_eq!((r.sessions.busy(), inflight(&r)), (0, vec![0, 0]));
    assert!(d.handle(&mut r, answer(admits(w, Mode::Seed, 0)), T).is_err());
}

#[test]
fn an_engines_own_error_is_passed_on_and_its_grant_released() {
    let mut r = decoders(2);
    let mut d = start(&mut r, 1000);
    let (w, _) = probe(&mut d);
    say(&mut d, &mut r, answer(admits(w, Mode::Seed, 0)));
    run(&mut d);
    say(&mut d, &mut r, Event::Passed);
    assert!(matches!(d.poll_effect(), Some(Effect::Release { .. })));
    assert_eq!(d.outcome(), Some(Outcome::Passed));
    assert_eq!(r.sessions.peek(&s()).and_then(|r| r.pin), None);
}

#[test]
fn without_the_question_a_direct_turn_goes_at_once_and_is_admitted_on_arrival() {
    // ADM-10, ADM-14
    let config = RouterConfig {
        ask_unknown: false,
        admit_direct: false,
        max_uncached_tokens: 200,
        ..RouterConfig::default()
    };
    let mut r = router_of(&[Role::Decode; 3], config);
    let w = seed(&mut r, 1000);
    let mut d = start(&mut r, 1100);
    let (ran, tag) = run(&mut d);
    assert_eq!((ran, tag.and_then(|t| t.reservation)), (w, None));
    say(&mut d, &mut r, Event::TurnRefused(Reason::NoDCapacity));
    assert_eq!(rejects(&r, w), 1);
    assert_ne!(probe(&mut d).0, w);
    say(&mut d, &mut r, Event::ClientGone);
    let mut d = start(&mut r, 5000);
    probe(&mut d); // a large append is asked for
}

#[test]
fn an_event_out_of_turn_changes_nothing() {
    let mut r = decoders(2);
    let mut d = start(&mut r, 1000);
    let (w, _) = probe(&mut d);
    let wrong = d.handle(&mut r, Event::Imported, T);
    assert_eq!(wrong.map_err(|e| e.state), Err("probing"));
    say(&mut d, &mut r, answer(admits(w, Mode::Seed, 0)));
    run(&mut d);
}

#[test]
fn no_worker_is_an_answer_at_once() {
    let mut r = decoders(1);
    r.view.lost(D0);
    let mut d = start(&mut r, 1000);
    assert!(matches!(
        d.poll_effect(),
        Some(Effect::Refuse(Refused { status: 502, .. }))
    ));
    r.view.seen(D0, &info(1));
    seed(&mut r, 10);
}
