//! SYNC-1..4: a backup follows what its owner commits, pulls only what is new, and gives it back when the owner has lost it.

mod support;

use std::{sync::atomic::Ordering, time::Duration};

use kvc_engine_ext::harness::{Start, TestEngine, true_kv};
use kvc_proto::{wire::admit::ADMIT_PATH, worker::Token};
use kvc_rdma::fault::{Fault, Proxy};
use serde_json::json;
use support::*;

/// One session as its owner `d` runs it, backed up at `p`.
struct Session {
    name: &'static str,
    history: Vec<Token>,
    turns: u32,
    placed: u64,
    asked: u64,
}

impl Session {
    fn new(name: &'static str, placed: u64) -> Self {
        Self {
            name,
            history: Vec::new(),
            turns: 0,
            placed,
            asked: placed * 1000,
        }
    }

    /// A whole turn on `d`: `append` new tokens, three of output; the backup is named in the question (SYNC-1).
    fn turn(&mut self, d: &mut TestEngine, backup: Option<kvc_proto::wire::admit::PeerRef>, append: &[Token]) {
        self.history.extend(append);
        self.asked += 1;
        d.step();
        let mut question = question(
            self.name,
            self.turns,
            self.history.len(),
            append.len(),
            self.placed,
            self.asked,
        );
        question.backup = backup;
        let (status, answer) = client(d).post(ADMIT_PATH, &question).unwrap();
        assert_eq!((status, &answer["can_admit"]), (200, &json!(true)), "{answer}");
        let reservation = kvc_proto::id::ReservationId(answer["reservation"].as_u64().unwrap());
        let turn = d
            .arrive(
                self.name,
                &self.history,
                4,
                Some(reservation),
                Some(placement(self.placed)),
            )
            .unwrap();
        d.finish(turn, &[1, 2, 3]);
        d.step();
        // The last token's KV is never computed.
        self.history.extend([1, 2]);
        self.turns += 1;
    }
}

/// Until `p` has committed exactly `tokens` of the session.
fn followed(p: &mut TestEngine, session: &str, tokens: usize) {
    until("the backup has followed", || {
        p.step();
        view(p, session)["committed"] == tokens && imports(p) == 0
    });
}

/// Every byte that `p` holds of the session is the one of these tokens.
fn compare_replica(p: &mut TestEngine, session: &Session) {
    let mut prompt = session.history.clone();
    prompt.push(77);
    let mut turn = p
        .arrive(session.name, &prompt, 0, None, Some(placement(session.placed)))
        .unwrap();
    p.begin(&mut turn);
    let right = true_kv(&prompt, p.arena().layout().token_bytes());
    let held = p.bytes(&turn);
    assert!(held.len() + 16 > session.history.len(), "{} reused", held.len());
    assert!(held == right[..held.len()]);
    p.abort(turn);
    p.step();
}

#[test]
fn a_backup_follows_a_growing_session_and_pulls_only_what_is_new() {
    // SYNC-1, SYNC-4, XFER-5: also between workers of other page sizes.
    for (p_page, d_page) in [(16, 16), (1, 16), (16, 1)] {
        let (mut p, mut d) = (
            engine(&[("role", "prefill")], p_page),
            engine(&[("role", "decode")], d_page),
        );
        let mut session = Session::new("s", 1);
        for n in 0..4 {
            session.turn(&mut d, Some(peer(&p)), &tokens(n, 50));
            followed(&mut p, "s", session.history.len());
        }
        let seen = view(&p, "s");
        assert_eq!(
            (&seen["standing"], &seen["epoch"]["placement"]["n"]),
            (&json!("replica"), &json!(1))
        );
        assert_eq!(view(&d, "s")["standing"], "owner");
        assert_eq!(view(&d, "s")["backup"], serde_json::to_value(peer(&p)).unwrap());
        // Whole pages are kept, so at most one page of each earlier turn is pulled again.
        let pulled = metric(&p, "kvc_imported_tokens_by_total{kind=\"sync\"}") as usize;
        let most = session.history.len() + 3 * p_page as usize;
        assert!(
            (session.history.len()..=most).contains(&pulled),
            "{pulled} pulled of {}",
            session.history.len()
        );
        assert_eq!(metric(&p, "kvc_imports_by_total{kind=\"sync\"}"), 4.0);
        assert_eq!(metric(&d, "kvc_announcements_total{outcome=\"sent\"}"), 4.0);
        assert_eq!(
            (metric(&p, "kvc_sync_pending"), metric(&p, "kvc_sync_lag_tokens")),
            (0.0, 0.0)
        );
        let bytes = metric(&p, "kvc_moved_bytes_total{kind=\"sync\"}") as u64;
        assert_eq!(bytes, pulled as u64 * p.arena().layout().token_bytes());
        compare_replica(&mut p, &session);
        assert!(p.drain() && d.drain(), "pages leaked");
    }
}

#[test]
fn a_lost_announcement_costs_only_lag() {
    // SYNC-1: the backup cannot be reached for one commit; the next one tells everything.
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    let control = Proxy::start(p.engine().peer_listen()).unwrap();
    let mut through = peer(&p);
    through.peer = control.endpoint();
    let mut session = Session::new("s", 1);
    session.turn(&mut d, Some(through.clone()), &tokens(1, 64));
    followed(&mut p, "s", 66);
    control.inject(Some(Fault::Die { after: 0 }));
    control.cut();
    session.turn(&mut d, Some(through.clone()), &tokens(2, 64));
    until("the announcement is given up", || {
        metric(&d, "kvc_announcements_total{outcome=\"failed\"}") >= 1.0
    });
    assert_eq!(view(&p, "s")["committed"], 66);
    control.inject(None);
    session.turn(&mut d, Some(through), &tokens(3, 64));
    followed(&mut p, "s", session.history.len());
    compare_replica(&mut p, &session);
    assert!(p.drain() && d.drain());
}

#[test]
fn an_announcement_across_a_rewind_cuts_the_replica() {
    // SYNC-1, OWN-7: the history was rewritten; the backup keeps the common prefix and never splices.
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    let mut session = Session::new("s", 1);
    session.turn(&mut d, Some(peer(&p)), &tokens(1, 200));
    followed(&mut p, "s", 202);
    session.history.truncate(100);
    session.turn(&mut d, Some(peer(&p)), &tokens(2, 40));
    assert_eq!(session.history.len(), 142);
    followed(&mut p, "s", 142);
    let pulled = metric(&p, "kvc_imported_tokens_by_total{kind=\"sync\"}");
    // 96 of the common 100 are whole pages.
    assert_eq!(pulled, 202.0 + 46.0);
    assert_eq!(view(&p, "s")["epoch"], view(&d, "s")["epoch"], "also the rewind number");
    compare_replica(&mut p, &session);
    assert!(p.drain() && d.drain());
}

#[test]
fn sync_can_be_turned_off_at_either_end() {
    // SYNC-3.
    let off = [("sync", "false")];
    let (mut p, mut d) = (engine(&off, 16), engine(&[], 16));
    let mut session = Session::new("s", 1);
    session.turn(&mut d, Some(peer(&p)), &tokens(1, 64));
    until("the backup has refused", || {
        metric(&d, "kvc_announcements_total{outcome=\"refused\"}") == 1.0
    });
    p.step();
    assert_eq!((view(&p, "s"), imports(&p)), (json!(null), 0));
    assert_eq!(
        view(&d, "s")["standing"],
        "owner",
        "not keeping a replica says nothing about the owner"
    );
    let (p, mut d) = (engine(&[], 16), engine(&off, 16));
    let mut session = Session::new("s", 1);
    session.turn(&mut d, Some(peer(&p)), &tokens(1, 64));
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(metric(&p, "kvc_announcements_taken_total"), 0.0);
}

#[test]
fn a_pull_that_nobody_waits_for_gives_way() {
    // SYNC-3: while a seed is pulled from P, P's own sync waits; then it goes on.
    let (mut p, mut d, mut other) = (engine(&[], 16), engine(&[], 16), engine(&[], 16));
    let prompt = tokens(9, 180);
    other.step();
    let reservation = admit(&other, &question("served", 0, 180, 180, 7, 7), "seed");
    let mut turn = p.arrive("served", &prompt, 0, None, Some(placement(7))).unwrap();
    p.prefill(&mut turn, 64);
    let answer = import(&other, "served", &order(reservation, 7, &p, 20_000));
    until("the seed runs", || {
        other.step();
        pulled(&other) >= 64
    });
    let mut session = Session::new("s", 1);
    session.turn(&mut d, Some(peer(&p)), &tokens(1, 100));
    until("the sync has landed", || {
        p.step();
        transfers(&p)["imports"][0]["phase"] == "pulling"
    });
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!(
        transfers(&p)["imports"][0]["pulled_tokens"],
        0,
        "it gives way to the seed"
    );
    assert_eq!(transfers(&p)["imports"][0]["kind"], "sync");
    p.finish(turn, &[]);
    p.step();
    assert_eq!(answered(&mut other, answer).0, 200);
    compare(&mut other, "served", &prompt, reservation, 7);
    followed(&mut p, "s", session.history.len());
    assert!(p.drain() && d.drain() && other.drain());
}

#[test]
fn a_sync_reads_little_at_a_time() {
    // SYNC-1, SYNC-3: one read of at most 1 MiB in flight, however large the session is; a reseed is not held to it.
    let link = Behind::new();
    let worker = |movers: Vec<std::sync::Arc<dyn kvc_rdma::Mover>>| {
        let mut start = Start::new(config(&[]), 16);
        start.heads = 64;
        start.movers = movers;
        TestEngine::start(start).unwrap()
    };
    let (mut p, mut d) = (worker(vec![link.clone()]), worker(Vec::new()));
    let mut session = Session::new("s", 1);
    session.turn(&mut d, Some(peer(&p)), &tokens(1, 1200));
    followed(&mut p, "s", 1202);
    let whole = 1202 * p.arena().layout().token_bytes();
    assert!(whole > 4 << 20, "{whole} bytes would fill several reads");
    let largest = link.largest.load(Ordering::SeqCst);
    assert!(largest <= 1 << 20, "{largest} bytes in one read");
    assert_eq!(link.most.load(Ordering::SeqCst), 1);
    // The same pull, waited for.
    let mut other = Session::new("t", 2);
    other.turn(&mut d, None, &tokens(2, 1200));
    let answer = import(&p, "t", &replica_order(2, &d, 20_000));
    let (status, body) = answered(&mut p, answer);
    assert_eq!((status, &body["pulled_tokens"]), (200, &json!(1202)), "{body}");
    assert!(link.largest.load(Ordering::SeqCst) > 1 << 20);
    compare_replica(&mut p, &session);
    compare_replica(&mut p, &other);
    assert!(p.drain() && d.drain());
}

#[test]
fn a_lost_session_is_reseeded_from_its_replica() {
    // SYNC-2: nothing that P holds is computed again; the rest is the new owner's to prefill.
    let (mut p, mut d, mut next) = (engine(&[], 16), engine(&[], 16), engine(&[], 16));
    let mut session = Session::new("s", 1);
    session.turn(&mut d, Some(peer(&p)), &tokens(1, 150));
    followed(&mut p, "s", 152);
    drop(d);
    session.history.extend(tokens(2, 30));
    next.step();
    let mut ask = question("s", 1, session.history.len(), 30, 2, 2);
    ask.backup = Some(peer(&p));
    let reservation = admit(&next, &ask, "reseed");
    let answer = import(&next, "s", &reseed_order(reservation, 2, &p, 20_000));
    let (status, body) = answered(&mut next, answer);
    assert_eq!((status, &body["pulled_tokens"]), (200, &json!(152)), "{body}");
    let reused = compare(&mut next, "s", &session.history, reservation, 2);
    assert!(reused >= 144, "{reused}");
    assert_eq!(view(&next, "s")["standing"], "owner");
    // The replica follows its new owner.
    session.history.extend([1, 2]);
    session.placed = 2;
    followed(&mut p, "s", session.history.len());
    assert_eq!(view(&p, "s")["epoch"]["placement"]["n"], 2);
    compare_replica(&mut p, &session);
    assert!(p.drain() && next.drain());
}

#[test]
fn a_frozen_owner_learns_from_its_announcement_that_it_lost() {
    // SES-4, MIG-3: it slept through the session's reseed elsewhere, and goes on as if nothing had been.
    let (mut p, mut frozen, mut next) = (engine(&[], 16), engine(&[], 16), engine(&[], 16));
    let mut session = Session::new("s", 1);
    session.turn(&mut frozen, Some(peer(&p)), &tokens(1, 100));
    followed(&mut p, "s", 102);
    let mut prompt = session.history.clone();
    prompt.extend(tokens(2, 20));
    next.step();
    let reservation = admit(&next, &question("s", 1, prompt.len(), 20, 2, 2), "reseed");
    let answer = import(&next, "s", &reseed_order(reservation, 2, &p, 20_000));
    assert_eq!(answered(&mut next, answer).0, 200);
    compare(&mut next, "s", &prompt, reservation, 2);
    assert_eq!(view(&p, "s")["epoch"]["placement"]["n"], 2);
    session.turn(&mut frozen, None, &tokens(3, 20));
    until("it knows", || view(&frozen, "s")["standing"] == "replica");
    assert_eq!(metric(&frozen, "kvc_lost_total"), 1.0);
    let refused = client(&frozen)
        .post(ADMIT_PATH, &question("s", 2, 200, 20, 1, 9000))
        .unwrap()
        .1;
    assert_eq!(refused["reason"], "stale-epoch", "{refused}");
    assert_eq!(view(&p, "s")["committed"], 102, "nothing of it reached the replica");
    assert!(p.drain() && frozen.drain() && next.drain());
}

#[test]
fn a_reseed_from_an_owner_ends_its_turn() {
    // SES-4: the router gave the session to another worker; the old owner's turn is aborted and its copy serves.
    let (mut old, mut next) = (engine(&[], 16), engine(&[], 16));
    let mut session = Session::new("s", 1);
    session.turn(&mut old, None, &tokens(1, 100));
    let mut prompt = session.history.clone();
    prompt.extend(tokens(2, 40));
    let mut running = old.arrive("s", &prompt, 4, None, Some(placement(1))).unwrap();
    old.prefill(&mut running, 120);
    next.step();
    let reservation = admit(&next, &question("s", 2, prompt.len(), 40, 2, 2), "reseed");
    let answer = import(&next, "s", &reseed_order(reservation, 2, &old, 20_000));
    until("the old owner is told to abort", || {
        old.step();
        old.is_aborted(&running)
    });
    old.abort(running);
    let (status, body) = answered(&mut next, answer);
    // The turn was aborted: what it had restored is what is committed.
    assert_eq!(status, 200, "{body}");
    assert_eq!(body["pulled_tokens"], 102);
    assert!(compare(&mut next, "s", &prompt, reservation, 2) >= 96);
    assert_eq!(view(&old, "s")["standing"], "replica");
    assert_eq!(metric(&old, "kvc_superseded_turns_total"), 1.0);
    assert!(old.drain() && next.drain());
}

#[test]
fn a_backup_without_room_keeps_what_fits() {
    // SYNC-1, OWN-2: replicas are ordinary evictable sessions; the most recently active ones stay.
    let mut small = Start::new(config(&[]), 16);
    small.pages = 16;
    let (mut p, mut d) = (TestEngine::start(small).unwrap(), engine(&[], 16));
    let mut sessions: Vec<_> = (1..)
        .zip(["a", "b", "c", "d"])
        .map(|(n, name)| Session::new(name, n))
        .collect();
    for (n, session) in (1..).zip(&mut sessions) {
        session.turn(&mut d, Some(peer(&p)), &tokens(n as u32, 78));
        followed(&mut p, session.name, 80);
    }
    assert!(p.free_pages() <= 1);
    let held = |name: &str| view(&p, name)["committed"].as_u64().unwrap_or(0);
    assert_eq!((held("a"), held("d")), (0, 80));
    let last = sessions.pop().unwrap();
    compare_replica(&mut p, &last);
    assert!(p.drain() && d.drain());
}
