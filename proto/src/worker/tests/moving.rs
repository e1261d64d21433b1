//! Sessions that change their owner (MIG-1, MIG-2, MIG-4), one story each.

use std::time::Duration;

use super::{
    engine::{config, name},
    field::{more, placed, tokens},
    peers::{Peers, peer},
};
use crate::{
    id::*,
    mutation::{Check, without},
    wire::{
        admit::{MovedTo, Source, WithdrawAnswer},
        info::Standing,
        reason::{Reason, Refusal},
    },
    worker::*,
};

fn owned(page: u32) -> (Peers, Vec<Token>) {
    let mut peers = Peers::new(3, page);
    let history = peers.turn(0, 0, &tokens(1, 50), 1, None);
    (peers, history)
}

/// The question that a prepared target asks, once its copy is there.
fn question(peers: &mut Peers, target: usize) -> (ImportId, Handover) {
    for _ in 0..20 {
        if let Some(at) = peers.at[target]
            .said
            .iter()
            .position(|s| matches!(s, Effect::AskHandover { .. }))
        {
            let Effect::AskHandover { import, request, .. } = peers.at[target].said.remove(at) else {
                unreachable!()
            };
            return (import, request);
        }
        step(peers, target);
    }
    panic!("never asked");
}

/// One round of everything but the hand-over question.
fn step(peers: &mut Peers, target: usize) {
    for said in std::mem::take(&mut peers.at[target].said) {
        match said {
            Effect::AskHandover { .. } => peers.at[target].said.push(said),
            other => peers.carry(target, other),
        }
    }
    peers.pull_and_confirm(target);
}

#[test]
fn a_move_between_turns_takes_the_session_and_everything_it_has() {
    for page in [1, 4, 16] {
        let (mut peers, history) = owned(page);
        let import = peers.import(1, 0, 0, Source::Owner, 2, None).unwrap();
        peers.settle();
        assert_eq!(peers.owners(0), [1]);
        let to = peers.view(0, 0);
        assert_eq!(to.standing, Standing::Moved);
        assert_eq!(
            to.moved,
            Some(MovedTo {
                to: peer(1),
                placement: placed(2).unwrap()
            })
        );
        let resident = history.len() as u32 - 1;
        assert_eq!(
            peers.at[1].done,
            [(
                import,
                Ok(ImportDone {
                    resident,
                    pulled: resident
                })
            )]
        );
        // The old owner says where to; the new one goes on directly.
        let refused = peers.admit(0, 0, 60, 1, None);
        assert_eq!((refused.reason, refused.moved), (Some(Reason::Moved), to.moved.clone()));
        let before = peers.at[1].w.counters().restored_tokens;
        peers.turn(1, 0, &more(&history, 2, 10), 2, None);
        assert_eq!(peers.at[1].w.counters().restored_tokens - before, u64::from(resident));
        peers.settle();
        peers.at.iter_mut().for_each(|e| e.quiesce());
    }
}

/// MIG-1: turns go on at the source; delta rounds follow them.
#[test]
fn a_turn_that_runs_is_finished_at_the_source_and_followed() {
    let (mut peers, history) = owned(4);
    let turn = peers.begin(0, 0, &more(&history, 2, 10), 1, None).unwrap();
    peers.at[0].start(turn, 1000);
    peers.import(1, 0, 0, Source::Owner, 2, None).unwrap();
    peers.settle();
    assert_eq!(peers.owners(0), [0], "busy");
    assert!(peers.at[0].w.counters().handovers_busy > 0);
    peers.at[0].adopt(turn);
    let history = {
        peers.at[0].finish_running(turn);
        more(&history, 2, 10)
    };
    for _ in 0..5 {
        peers.wait_ms(15);
        peers.settle();
    }
    assert_eq!(peers.owners(0), [1]);
    assert!(peers.view(1, 0).committed >= history.len() as u32);
    assert!(peers.at[0].w.counters().handovers_behind > 0, "one delta round");
}

/// MIG-1: only equal, only idle; each half seen to matter.
#[test]
fn only_an_equal_copy_of_an_idle_session_is_handed_over() {
    let story = |off: Option<Check>| {
        let (mut peers, history) = owned(4);
        peers.import(1, 0, 0, Source::Owner, 2, None).unwrap();
        let (_, request) = question(&mut peers, 1);
        peers.turn(0, 0, &more(&history, 2, 10), 1, None);
        let ask = |peers: &mut Peers| peers.handover(0, 1, &request).unwrap();
        let behind = match off {
            Some(check) => without(check, || ask(&mut peers)),
            None => ask(&mut peers),
        };
        let turn = peers.begin(0, 0, &more(&history, 3, 10), 1, None);
        if off.is_some() {
            return (behind, None);
        }
        assert_eq!(turn, Err(Reason::SessionBusy), "held back for the target");
        peers.wait_ms(25);
        peers.begin(0, 0, &more(&history, 3, 10), 1, None).unwrap();
        (behind, Some(ask(&mut peers)))
    };
    assert_eq!(story(None), (HandoverAnswer::Behind, Some(HandoverAnswer::Busy)));
    assert_eq!(
        story(Some(Check::HandoverEqual)).0,
        HandoverAnswer::Granted,
        "the check is what refuses"
    );
}

/// MIG-2: the answer was lost; the same question gets it again.
#[test]
fn a_lost_answer_is_asked_for_again() {
    let (mut peers, _) = owned(4);
    peers.import(1, 0, 0, Source::Owner, 2, None).unwrap();
    let (import, request) = question(&mut peers, 1);
    assert_eq!(peers.handover(0, 1, &request).unwrap(), HandoverAnswer::Granted);
    let asked = peers.at[1].now;
    peers.answered(1, import, asked, Err(Refusal::new(Reason::PeerUnreachable, "lost")));
    assert_eq!(peers.owners(0), [] as [usize; 0], "decided, and not known yet");
    assert_eq!(
        peers.handover(0, 2, &request).unwrap_err().code,
        Reason::Moved,
        "nobody else gets it"
    );
    peers.wait_ms(15);
    peers.settle();
    assert_eq!(peers.owners(0), [1]);
}

/// MIG-2: an answer from before the hand-over deadline counts for nothing.
#[test]
fn an_answer_that_is_too_old_is_discarded() {
    let story = || {
        let (mut peers, _) = owned(4);
        peers.import(1, 0, 0, Source::Owner, 2, None).unwrap();
        let (import, request) = question(&mut peers, 1);
        let asked = peers.at[1].now;
        let answer = peers.handover(0, 1, &request);
        peers.at[1].now = peers.at[1].now + Duration::from_millis(2_500);
        peers.answered(1, import, asked, answer);
        let owners = peers.owners(0);
        peers.settle();
        (owners, peers.owners(0))
    };
    assert_eq!(story(), (vec![], vec![1]), "discarded, asked again");
    assert_eq!(without(Check::HandoverAge, story).0, [1]);
}

/// MIG-2: withdrawing is for good, whatever the source says later.
#[test]
fn a_withdrawn_target_never_owns_the_number() {
    let story = || {
        let (mut peers, _) = owned(4);
        peers.import(1, 0, 0, Source::Owner, 2, None).unwrap();
        let (import, request) = question(&mut peers, 1);
        let asked = peers.at[1].now;
        let answer = peers.handover(0, 1, &request);
        assert_eq!(peers.withdraw(1, 0, 2), WithdrawAnswer::Withdrawn);
        peers.answered(1, import, asked, answer);
        let again = peers.import(1, 0, 0, Source::Owner, 2, None);
        (peers.owners(0).contains(&1), again.map(|_| ()).map_err(|r| r.code))
    };
    assert_eq!(story(), (false, Err(Reason::StaleEpoch)));
    assert!(without(Check::WithdrawnForGood, story).0);
    // The source was left without the session: a number above both is served from its copy.
    let (mut peers, history) = owned(4);
    peers.import(1, 0, 0, Source::Owner, 2, None).unwrap();
    let (_, request) = question(&mut peers, 1);
    peers.handover(0, 1, &request).unwrap();
    peers.withdraw(1, 0, 2);
    assert_eq!(peers.withdraw(1, 0, 2), WithdrawAnswer::Withdrawn, "again");
    let before = peers.at[0].w.counters().restored_tokens;
    peers.turn(0, 0, &more(&history, 2, 10), 3, None);
    assert_eq!(peers.owners(0), [0]);
    assert_eq!(
        peers.at[0].w.counters().restored_tokens - before,
        history.len() as u64 - 1
    );
}

/// MIG-2: a floor keeps off later numbers, not the one that is owned.
#[test]
fn a_withdrawn_move_leaves_the_owner_what_it_owns() {
    let (mut peers, history) = owned(4);
    peers.withdraw(0, 0, 9);
    let history = peers.turn(0, 0, &more(&history, 2, 10), 1, None);
    assert_eq!(
        peers.admit(0, 0, history.len(), 8, None).reason,
        Some(Reason::StaleEpoch)
    );
}

/// SES-4: who still thinks that it owns the session is no owner to take it over from.
#[test]
fn a_session_is_not_moved_back_from_an_owner_that_was_passed_over() {
    let (mut peers, history) = owned(4);
    let newer = peers.turn(1, 0, &more(&history, 2, 30), 5, None);
    let import = peers.import(1, 0, 0, Source::Owner, 9, None).unwrap();
    peers.settle();
    let (done, outcome) = peers.at[1].done.pop().unwrap();
    assert_eq!((done, outcome.unwrap_err().code), (import, Reason::StaleEpoch));
    assert_eq!(peers.view(1, 0).committed, newer.len() as u32 - 1);
    assert_eq!(peers.at[1].done.len(), 0);
    // Told so, it is a replica.
    let told = crate::wire::admit::ReleaseRequest {
        placed: placed(5),
        ..Default::default()
    };
    let now = peers.at[0].now;
    peers.at[0].w.release(&name(0), &told, now);
    assert_eq!(peers.standing(0, 0), Standing::Replica);
}

/// SYNC-2: a reseed from a shorter copy does not cut what is here.
#[test]
fn a_reseed_keeps_the_longer_copy_that_is_here() {
    let (mut peers, history) = owned(4);
    let newer = peers.turn(1, 0, &more(&history, 2, 30), 5, None);
    let prompt = more(&newer, 3, 300);
    let answer = peers.admit(1, 0, prompt.len(), 6, None);
    assert_eq!(answer.reason, Some(Reason::RealLargeAppend));
    let mut question = peers.question(0, prompt.len(), 6, None);
    question.via = Some(crate::wire::admit::Via::Prefill);
    let now = peers.at[1].now;
    let answer = peers.at[1].w.admit(&question, now);
    let import = peers.import(1, 0, 0, Source::Replica, 6, answer.reservation).unwrap();
    peers.settle();
    let resident = newer.len() as u32 - 1;
    assert_eq!(
        peers.at[1].done.pop(),
        Some((import, Ok(ImportDone { resident, pulled: 0 })))
    );
    assert_eq!(peers.view(1, 0).committed, resident);
    peers.at.iter_mut().for_each(|e| e.quiesce());
}

#[test]
fn an_owner_says_so_when_asked_to_withdraw() {
    let (mut peers, _) = owned(4);
    peers.import(1, 0, 0, Source::Owner, 2, None).unwrap();
    peers.settle();
    let epoch = peers.view(1, 0).epoch.unwrap();
    assert_eq!(peers.withdraw(1, 0, 2), WithdrawAnswer::Owner { epoch });
    assert_eq!(peers.owners(0), [1]);
}

/// Bad input: typed, and nothing has changed on either side.
#[test]
fn refused_moves_change_nothing() {
    let (mut peers, history) = owned(4);
    peers.turn(1, 7, &tokens(7, 20), 9, None);
    let seen = |peers: &Peers| {
        let all = |i: usize| {
            let e = &peers.at[i];
            (
                e.w.sessions(None, 100, e.now),
                e.w.load(None).used,
                e.w.counts(),
                e.free.len(),
                e.w.held(),
            )
        };
        [all(0), all(1), all(2)]
    };
    let refused = |peers: &mut Peers, at: usize, session: u8, from: usize, n: u64, why: Reason| {
        let before = seen(peers);
        match peers.import(at, session, from, Source::Owner, n, None) {
            Err(refusal) => assert_eq!(refusal.code, why),
            Ok(import) => {
                peers.settle();
                let (done, outcome) = peers.at[at].done.pop().unwrap();
                assert_eq!((done, outcome.unwrap_err().code), (import, why));
            }
        }
        assert_eq!(format!("{before:?}"), format!("{:?}", seen(peers)), "{why}");
    };
    refused(&mut peers, 1, 3, 0, 2, Reason::UnknownSession);
    refused(&mut peers, 0, 0, 0, 2, Reason::ImportFromSelf);
    refused(&mut peers, 1, 0, 0, 1, Reason::StaleEpoch);
    refused(&mut peers, 1, 7, 0, 4, Reason::StaleEpoch);
    refused(&mut peers, 2, 7, 0, 12, Reason::UnknownSession);
    // Without room: the source has more than the target could ever hold.
    let mut peers = Peers::of([config(1024, 4), config(40, 4), config(1024, 4)]);
    peers.turn(0, 0, &history, 1, None);
    refused(&mut peers, 1, 0, 0, 2, Reason::TooLarge);
    // While another import runs.
    peers.import(2, 0, 0, Source::Owner, 2, None).unwrap();
    let before = seen(&peers);
    let twice = peers.import(2, 0, 0, Source::Owner, 3, None);
    assert_eq!(twice.unwrap_err().code, Reason::ImportRunning);
    assert_eq!(format!("{before:?}"), format!("{:?}", seen(&peers)));
}

/// MIG-3: two targets at once; one gets it.
#[test]
fn of_two_targets_one_becomes_the_owner() {
    let (mut peers, _) = owned(4);
    peers.import(1, 0, 0, Source::Owner, 2, None).unwrap();
    peers.import(2, 0, 0, Source::Owner, 3, None).unwrap();
    peers.settle();
    assert_eq!(peers.owners(0).len(), 1);
    peers.at.iter_mut().for_each(|e| e.quiesce());
}

/// MIG-4.
#[test]
fn a_draining_worker_is_empty_when_its_sessions_are_gone() {
    let mut peers = Peers::new(2, 4);
    for session in 0..3 {
        peers.turn(
            0,
            session,
            &tokens(u32::from(session), 30),
            1 + u64::from(session),
            None,
        );
    }
    peers.at[0].w.set_draining(true);
    assert_eq!(peers.at[0].w.drain_state().owned, 3);
    assert_eq!(peers.admit(0, 0, 40, 1, None).reason, Some(Reason::Draining));
    peers.at[0].w.set_draining(false);
    let turn = peers.begin(0, 2, &tokens(2, 40), 3, None).unwrap();
    peers.at[0].w.set_draining(true);
    assert_eq!(
        peers.admit(0, 2, 60, 3, None).reason,
        Some(Reason::SessionBusy),
        "ADM-8: it ends here"
    );
    peers.at[0].finish(turn, 3);
    peers.at[0].poll();
    for session in 0..3 {
        peers
            .import(1, session, 0, Source::Owner, 10 + u64::from(session), None)
            .unwrap();
        peers.settle();
    }
    let state = peers.at[0].w.drain_state();
    assert_eq!((state.drained, state.owned, state.moved), (true, 0, 3));
    assert_eq!(
        peers.import(0, 0, 1, Source::Owner, 20, None).unwrap_err().code,
        Reason::Draining
    );
    assert!(peers.at[1].w.session(&name(0), peers.at[1].now).is_some());
}

/// XFER-7: a move that gets no answer ends at its deadline, and leaves a replica.
#[test]
fn a_move_without_an_answer_ends_at_its_deadline() {
    let (mut peers, history) = owned(4);
    let import = peers.import(1, 0, 0, Source::Owner, 2, None).unwrap();
    question(&mut peers, 1);
    peers.wait_ms(10_001);
    let (done, outcome) = peers.at[1].done.pop().unwrap();
    assert_eq!((done, outcome.unwrap_err().code), (import, Reason::DeadlineExceeded));
    peers.settle();
    assert_eq!(peers.standing(1, 0), Standing::Replica);
    assert_eq!(peers.view(1, 0).committed, history.len() as u32 - 1);
    assert_eq!(peers.owners(0), [0]);
    peers.at.iter_mut().for_each(|e| e.quiesce());
}
