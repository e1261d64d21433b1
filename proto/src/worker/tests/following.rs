//! Replicas that follow their owners (SYNC-1..4), one story each.

use super::{
    engine::name,
    field::{more, placed, tokens},
    peers::Peers,
};
use crate::{
    mutation::{Check, without},
    wire::{
        admit::{Mode, ReleaseRequest, Source},
        info::Standing,
        reason::Reason,
    },
    worker::*,
};

/// The last token of an answer has no KV yet.
fn committed(history: &[Token]) -> u32 {
    history.len() as u32 - 1
}

/// P = 0, D = 1: a first turn on D whose backup is P.
fn seeded(page: u32) -> (Peers, Vec<Token>) {
    let mut peers = Peers::new(3, page);
    let history = peers.turn(1, 0, &tokens(1, 50), 1, Some(0));
    peers.settle();
    (peers, history)
}

#[test]
fn a_backup_follows_and_pulls_only_what_is_new() {
    for page in [1, 4, 16] {
        let (mut peers, mut history) = seeded(page);
        assert_eq!(peers.view(0, 0).committed, committed(&history));
        for turn in 0..4 {
            let before = peers.at[0].w.counters().imported_by[2];
            let old = committed(&history);
            history = peers.turn(1, 0, &more(&history, 2 + turn, 10), 1, None);
            peers.settle();
            let (replica, owner) = (peers.view(0, 0), peers.view(1, 0));
            assert_eq!(
                (replica.committed, replica.epoch),
                (owner.committed, owner.epoch),
                "page {page}"
            );
            assert_eq!((replica.standing, owner.standing), (Standing::Replica, Standing::Owner));
            let pulled = peers.at[0].w.counters().imported_by[2] - before;
            assert_eq!(
                pulled,
                u64::from(owner.committed - old / page * page),
                "only the delta, from a page edge"
            );
        }
        assert_eq!(peers.at[0].w.sync_lag(), (0, 0));
    }
}

/// SYNC-1 with OWN-7: the replica is cut to the common prefix, whether or not the news in between arrived.
#[test]
fn a_lost_announcement_across_a_rewind_leaves_a_true_replica() {
    let (mut peers, history) = seeded(4);
    peers.turn(1, 0, &more(&history, 2, 10), 1, None);
    peers.at[1].said.clear(); // lost
    let other = [&history[..30], &tokens(9, 30)].concat();
    let history = peers.turn(1, 0, &other, 1, None);
    peers.settle();
    let (replica, owner) = (peers.view(0, 0), peers.view(1, 0));
    assert_eq!(replica.committed, committed(&history));
    assert_eq!((replica.epoch, replica.epoch.unwrap().rewind), (owner.epoch, 1));
}

/// SYNC-1: digests keep token ids off the wire, and only where the histories agree.
#[test]
fn a_peer_that_has_a_prefix_is_not_told_it_again() {
    let (mut peers, history) = seeded(4);
    peers.turn(1, 0, &more(&history, 2, 10), 1, None);
    let said = std::mem::take(&mut peers.at[1].said);
    said.into_iter().for_each(|s| peers.carry(1, s));
    let Some(Effect::OpenLease {
        placement, have, kind, ..
    }) = peers.at[0].said.first().cloned()
    else {
        panic!("the backup asks for a lease");
    };
    let mut have = have.unwrap();
    let request = |have| LeaseRequest {
        session: name(0),
        placement,
        incarnation: super::peers::peer(1).incarnation,
        kind,
        have: Some(have),
    };
    let mut after = |have| {
        let now = peers.at[1].now;
        let Ok(LeaseAnswer::Granted(grant)) = peers.at[1].w.lease(&request(have), now) else {
            panic!("granted");
        };
        peers.at[1].w.end_lease(grant.lease, now);
        peers.at[1].effects();
        (grant.after, grant.after as usize + grant.tokens.len())
    };
    let whole = history.len() + 12;
    assert_eq!(after(have), (committed(&history), whole));
    have.digest.0[3] ^= 1;
    assert_eq!(after(have), (0, whole), "another history");
    assert_eq!(without(Check::HaveDigest, || after(have)), (committed(&history), whole));
    peers.settle();
}

/// SYNC-2: the new D takes what the backup has, and computes the rest.
#[test]
fn a_reseed_takes_the_replica_and_the_append_is_what_is_left() {
    let (mut peers, history) = seeded(4);
    let release = ReleaseRequest {
        drop_kv: true,
        ..ReleaseRequest::default()
    };
    let now = peers.at[1].now;
    peers.at[1].w.release(&name(0), &release, now);
    peers.at[1].poll();
    let prompt = more(&history, 2, 10);
    let answer = peers.admit(2, 0, prompt.len(), 2, Some(0));
    assert_eq!(answer.mode, Some(Mode::Reseed));
    peers.import(2, 0, 0, Source::Replica, 2, answer.reservation).unwrap();
    peers.settle();
    assert_eq!(peers.view(2, 0).committed, committed(&history));
    let mut arrival = super::engine::Engine::arrival(0, super::engine::identity(0), prompt.clone(), 10);
    (arrival.reservation, arrival.placement) = (answer.reservation, placed(2));
    let turn = peers.at[2].arrive(0, arrival, prompt.clone()).unwrap();
    assert_eq!(peers.at[2].w.counters().restored_tokens, 0);
    let grown = peers.at[2].finish(turn, 3);
    assert_eq!(peers.at[2].w.counters().restored_tokens, u64::from(committed(&history)));
    let history = grown;
    peers.settle();
    assert_eq!(
        peers.view(0, 0).committed,
        committed(&history),
        "the backup follows the new owner"
    );
    assert_eq!(peers.view(0, 0).epoch, peers.view(2, 0).epoch);
}

/// SES-4: a worker that was passed over learns it from the first message it sees.
#[test]
fn an_owner_that_was_passed_over_learns_it_from_its_announcement() {
    let (mut peers, history) = seeded(4);
    let prompt = more(&history, 2, 10);
    let turn = peers.begin(1, 0, &prompt, 1, None).unwrap();
    peers.at[1].start(turn, 1000); // and here it freezes
    let answer = peers.admit(2, 0, prompt.len(), 2, Some(0));
    peers.import(2, 0, 0, Source::Replica, 2, answer.reservation).unwrap();
    peers.settle();
    assert_eq!(peers.owners(0), [1, 2], "it does not know yet; the numbers differ");
    peers.at[1].adopt(turn);
    peers.at[1].finish_running(turn);
    peers.settle();
    assert_eq!(peers.standing(1, 0), Standing::Replica);
    assert_eq!(peers.owners(0), [2]);
    assert_eq!(peers.admit(1, 0, 90, 1, None).reason, Some(Reason::StaleEpoch));
}

/// SES-4, ADM-10: a grant under the lost number is not charged until it lapses.
#[test]
fn a_grant_under_a_lost_number_is_over() {
    let (mut peers, history) = seeded(4);
    let history = peers.turn(1, 0, &more(&history, 2, 10), 1, None);
    peers.turn(2, 0, &more(&history, 3, 10), 2, Some(0));
    let said = std::mem::take(&mut peers.at[2].said);
    said.into_iter().for_each(|s| peers.carry(2, s)); // the backup hears of the new owner first
    assert!(peers.admit(1, 0, history.len() + 10, 1, None).can_admit);
    assert!(peers.at[1].w.load(None).used > 0);
    peers.settle();
    assert_eq!(peers.standing(1, 0), Standing::Replica);
    assert_eq!(peers.at[1].w.load(None).used, 0);
}

/// SES-4: a granted higher placement ends a running turn; the copy is a replica.
#[test]
fn a_granted_higher_placement_aborts_the_turn_of_the_old_owner() {
    let (mut peers, history) = seeded(4);
    let prompt = more(&history, 2, 10);
    let turn = peers.begin(1, 0, &prompt, 1, None).unwrap();
    peers.at[1].start(turn, 1000);
    let answer = peers.admit(2, 0, prompt.len(), 2, None);
    peers.import(2, 0, 1, Source::Replica, 2, answer.reservation).unwrap();
    peers.settle();
    assert!(peers.at[1].runs.is_empty(), "aborted");
    assert_eq!(peers.view(1, 0).committed, committed(&history));
    assert_eq!(peers.view(2, 0).committed, committed(&history));
    assert_eq!(peers.owners(0), [2]);
}

/// SYNC-3.
#[test]
fn a_pull_gives_way_to_a_turn_and_to_imports_that_serve() {
    let (mut peers, history) = seeded(4);
    let history = peers.turn(1, 0, &more(&history, 2, 10), 1, None);
    let said = std::mem::take(&mut peers.at[1].said);
    said.into_iter().for_each(|s| peers.carry(1, s));
    assert_eq!(peers.view(0, 0).state, "importing");
    assert_eq!(peers.at[0].w.sync_lag(), (1, 13));
    // The backup is asked to prefill the next turn: its own pull goes.
    let mut arrival = super::engine::Engine::arrival(0, super::engine::identity(0), more(&history, 3, 10), 0);
    arrival.placement = placed(2);
    let turn = peers.at[0].arrive(0, arrival, more(&history, 3, 10)).unwrap();
    assert_eq!(peers.at[0].w.counts().2, 0);
    peers.at[0].said.clear();
    peers.at[0].finish(turn, 0);
    peers.settle();
    assert_eq!(peers.standing(0, 0), Standing::Replica);
    // While a move comes in, no replica is pulled.
    let other = peers.turn(1, 5, &tokens(5, 40), 5, Some(0));
    peers.turn(2, 6, &tokens(6, 40), 6, None);
    peers.import(0, 6, 2, Source::Owner, 7, None).unwrap();
    let said = std::mem::take(&mut peers.at[1].said);
    said.into_iter().for_each(|s| peers.carry(1, s));
    assert_eq!(peers.at[0].w.counters().syncs, 2, "the two of before");
    peers.settle();
    assert_eq!(peers.view(0, 5).committed, committed(&other), "afterwards it is");
}

/// DISP-3, SYNC-2: a refresh under the granted number is not the prefill that a seed follows.
#[test]
fn a_seed_waits_for_the_prefill_behind_a_refresh() {
    let (mut peers, history) = seeded(4);
    let history = peers.turn(1, 0, &more(&history, 2, 10), 1, None);
    peers.at[1].said.clear(); // the backup is behind
    let prompt = more(&history, 3, 30);
    peers.admit(1, 0, prompt.len(), 2, None);
    peers.import(0, 0, 1, Source::Replica, 2, None).unwrap();
    peers.settle();
    let follow = LeaseRequest {
        session: name(0),
        placement: placed(2).unwrap(),
        incarnation: super::peers::peer(0).incarnation,
        kind: LeaseKind::Follow,
        have: None,
    };
    let now = peers.at[0].now;
    assert_eq!(peers.at[0].w.lease(&follow, now), Ok(LeaseAnswer::Wait));
    let mut arrival = super::engine::Engine::arrival(0, super::engine::identity(0), prompt.clone(), 0);
    arrival.placement = placed(2);
    peers.at[0].arrive(0, arrival, prompt.clone()).unwrap();
    let Ok(LeaseAnswer::Granted(grant)) = peers.at[0].w.lease(&follow, now) else {
        panic!("granted");
    };
    assert_eq!(grant.tokens[..], prompt[..]);
}

/// SYNC-3: also when nothing but the news was known of it.
#[test]
fn a_turn_of_a_session_known_by_news_only_is_served() {
    let mut peers = Peers::new(2, 4);
    peers.turn(1, 0, &tokens(1, 50), 1, Some(0));
    let said = std::mem::take(&mut peers.at[1].said);
    said.into_iter().for_each(|s| peers.carry(1, s));
    assert_eq!(peers.view(0, 0).state, "importing");
    let mut arrival = super::engine::Engine::arrival(0, super::engine::identity(0), tokens(1, 50), 0);
    arrival.placement = placed(2);
    let turn = peers.at[0].arrive(0, arrival, tokens(1, 50)).unwrap();
    peers.at[0].finish(turn, 0);
    peers.at[0].said.clear();
    peers.settle();
    assert_eq!(
        (peers.standing(0, 0), peers.view(0, 0).committed),
        (Standing::Replica, 50)
    );
}

/// SYNC-3, SES-3: what a pull has landed is the engine's again when nothing else is.
#[test]
fn a_pull_is_given_up_for_room() {
    let (mut peers, _) = seeded(4);
    peers.turn(1, 5, &tokens(5, 200), 5, Some(0));
    let said = std::mem::take(&mut peers.at[1].said);
    said.into_iter().for_each(|s| peers.carry(1, s));
    let said = std::mem::take(&mut peers.at[0].said);
    said.into_iter().for_each(|s| peers.carry(0, s));
    peers.at[0].poll();
    assert_eq!(peers.at[0].w.transfers(peers.at[0].now).imports[0].phase, "pulling");
    let e = &mut peers.at[0];
    let pages = e.free.len() as u32 + 30;
    let enough = e.make_room(pages);
    assert!(!enough, "all but what lands was evicted");
    e.effects();
    e.poll();
    assert!(e.make_room(pages), "and now that too");
    assert_eq!(e.w.counts().2, 0);
    e.check();
}

#[test]
fn news_is_refused_by_who_keeps_none_and_by_who_knows_better() {
    let mut configs = [super::engine::config(1024, 4), super::engine::config(1024, 4)];
    configs[0].sync = false;
    let mut peers = Peers::of(configs);
    peers.turn(1, 0, &tokens(1, 50), 1, Some(0));
    peers.settle();
    assert_eq!(peers.at[0].w.counters().refusals(Reason::SyncOff), 1);
    assert_eq!(peers.at[0].w.counts().0, 0, "nothing is remembered of it");
    assert_eq!(peers.view(1, 0).backup, None, "and it is not asked again");

    let story = || {
        let (mut peers, history) = seeded(4);
        peers.turn(2, 0, &more(&history, 2, 10), 3, Some(0));
        peers.settle();
        peers.turn(1, 0, &more(&history, 3, 5), 1, Some(0));
        peers.settle();
        (peers.standing(1, 0), peers.view(0, 0).epoch.unwrap().placement.n)
    };
    assert_eq!(
        story(),
        (Standing::Replica, 3),
        "SES-4: who speaks under an old number learns it"
    );
    assert_eq!(without(Check::AnnounceEpoch, story).0, Standing::Owner);
}

/// XFER-7: a pull that fails is tried again, a bounded number of times.
#[test]
fn a_failed_pull_is_tried_again_later_and_not_for_ever() {
    let (mut peers, history) = seeded(4);
    peers.turn(1, 0, &more(&history, 2, 10), 1, None);
    let said = std::mem::take(&mut peers.at[1].said);
    said.into_iter().for_each(|s| peers.carry(1, s));
    for attempt in 1..=3 {
        let Some(Effect::OpenLease { import, .. }) = peers.at[0].said.pop() else {
            panic!("attempt {attempt}");
        };
        let now = peers.at[0].now;
        let why = crate::wire::reason::Refusal::new(Reason::PeerUnreachable, "gone");
        peers.at[0].w.import_failed(import, why, now);
        peers.at[0].effects();
        peers.at[0].said.clear();
        peers.wait_ms(600);
    }
    assert!(peers.at[0].said.is_empty());
    assert_eq!(peers.at[0].w.sync_lag(), (0, 0));
    assert_eq!(peers.at[0].w.counters().syncs_dropped, 1);
    assert_eq!(peers.view(0, 0).committed, committed(&history), "what it had stays");
}
