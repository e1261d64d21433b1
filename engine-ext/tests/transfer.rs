//! KV from one worker to another over tcp: the seed of DISP-3, pulled while the peer still prefills (XFER-4), byte by byte.

mod support;

use kvc_engine_ext::harness::true_kv;
use support::*;

#[test]
fn a_seed_is_pulled_while_the_peer_prefills() {
    // XFER-4, F11: at page sizes that differ too, since every slot is a row of its own.
    for (p_page, d_page) in [(1, 1), (16, 16), (16, 1), (1, 64)] {
        let (mut p, mut d) = (
            engine(&[("role", "prefill")], p_page),
            engine(&[("role", "decode")], d_page),
        );
        if d_page == 64 {
            d.step();
        }
        let prompt = tokens(p_page * 100 + d_page, 180);
        d.step();
        p.step();
        let reservation = admit(&d, &question("s", 0, 180, 180, 1, 1), "seed");
        let mut turn = p.arrive("s", &prompt, 0, None, Some(placement(1))).unwrap();
        p.prefill(&mut turn, 64);
        let answer = import(&d, "s", &order(reservation, 1, &p, 20_000));
        until("the first chunk is pulled", || {
            d.step();
            pulled(&d) >= 64
        });
        assert!(!answer.is_finished(), "the peer has not finished");
        p.prefill(&mut turn, 128);
        until("the second chunk is pulled", || {
            d.step();
            pulled(&d) >= 128
        });
        p.finish(turn, &[]);
        p.step();
        let (status, body) = answered(&mut d, answer);
        assert_eq!(status, 200, "{body}");
        assert_eq!(body["pulled_tokens"], 180);
        assert_eq!(body["bytes"].as_u64(), Some(180 * d.arena().layout().token_bytes()));
        let reused = compare(&mut d, "s", &prompt, reservation, 1);
        assert!(
            reused >= 179 / d_page * d_page,
            "{reused} of 180 were reused, page {d_page}"
        );
        until("the lease is over", || leases(&p) == 0);
        assert!(p.drain() && d.drain(), "pages leaked, page sizes {p_page} and {d_page}");
    }
}

#[test]
fn what_the_importer_has_is_not_pulled_again() {
    // SES-6: a second session with the same first prompt finds it in the tree.
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    let system = tokens(1, 96);
    for (n, session) in [(1, "a"), (2, "b")] {
        let mut prompt = system.clone();
        prompt.extend(tokens(n, 64));
        d.step();
        let reservation = admit(&d, &question(session, 0, 160, 160, n.into(), n.into()), "seed");
        let turn = p.arrive(session, &prompt, 0, None, Some(placement(n.into()))).unwrap();
        p.finish(turn, &[]);
        p.step();
        let answer = import(&d, session, &order(reservation, n.into(), &p, 20_000));
        let (status, body) = answered(&mut d, answer);
        assert_eq!(status, 200, "{body}");
        let expected = if session == "a" { 160 } else { 64 };
        assert_eq!(body["pulled_tokens"], expected, "{body}");
        compare(&mut d, session, &prompt, reservation, n.into());
    }
    assert!(p.drain() && d.drain());
}

#[test]
fn an_importer_ahead_of_the_prefill_waits() {
    // XFER-4, SES-6: it has the shared prefix already and asks for tokens that the peer has not begun to compute.
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    let system = tokens(1, 96);
    d.run("other", &system, &[1]).unwrap();
    let mut prompt = system;
    prompt.extend(tokens(2, 64));
    let reservation = admit(&d, &question("s", 0, 160, 160, 1, 1), "seed");
    let mut turn = p.arrive("s", &prompt, 0, None, Some(placement(1))).unwrap();
    let answer = import(&d, "s", &order(reservation, 1, &p, 20_000));
    until("the import waits for bytes", || {
        d.step();
        transfers(&d)["imports"][0]["phase"] == "pulling" || answer.is_finished()
    });
    p.prefill(&mut turn, 40);
    p.finish(turn, &[]);
    let (status, body) = answered(&mut d, answer);
    assert_eq!(
        (status, &body["pulled_tokens"]),
        (200, &serde_json::json!(64)),
        "{body}"
    );
    compare(&mut d, "s", &prompt, reservation, 1);
    assert!(p.drain() && d.drain());
}

#[test]
fn an_importer_that_lacks_nothing_commits_when_the_peer_has_it_too() {
    // XFER-3, SES-6: the whole prompt is in its own tree.
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    let prompt = tokens(1, 96);
    d.run("other", &prompt, &[1]).unwrap();
    let reservation = admit(&d, &question("s", 0, 96, 96, 1, 1), "seed");
    let mut turn = p.arrive("s", &prompt, 0, None, Some(placement(1))).unwrap();
    p.prefill(&mut turn, 40);
    let answer = import(&d, "s", &order(reservation, 1, &p, 20_000));
    until("the import waits", || {
        d.step();
        transfers(&d)["imports"][0]["phase"] == "confirming" || answer.is_finished()
    });
    p.finish(turn, &[]);
    let (status, body) = answered(&mut d, answer);
    assert_eq!((status, &body["pulled_tokens"]), (200, &serde_json::json!(0)), "{body}");
    compare(&mut d, "s", &prompt, reservation, 1);
    assert!(p.drain() && d.drain());
}

#[test]
fn a_reseed_pulls_only_what_is_missing() {
    // DISP-6, OWN-7: the importer holds a prefix of its own session already.
    let (mut p, mut d) = (engine(&[], 16), engine(&[("max_uncached_tokens", "32")], 16));
    let first = tokens(3, 64);
    d.step();
    let reservation = admit(&d, &question("s", 0, 64, 64, 1, 1), "seed");
    let turn = p.arrive("s", &first, 0, None, Some(placement(1))).unwrap();
    p.finish(turn, &[]);
    p.step();
    let answer = import(&d, "s", &order(reservation, 1, &p, 20_000));
    assert_eq!(answered(&mut d, answer).0, 200);
    compare(&mut d, "s", &first, reservation, 1);
    let mut second = first.clone();
    second.extend([1, 2, 3]);
    second.extend(tokens(4, 93));
    d.step();
    let mut large = question("s", 1, second.len(), 93, 2, 2);
    let refused = client(&d).post(kvc_proto::wire::admit::ADMIT_PATH, &large).unwrap().1;
    assert_eq!(refused["reason"], "real-large-append");
    large.via = Some(kvc_proto::wire::admit::Via::Prefill);
    large.key = key(3);
    let reservation = admit(&d, &large, "reseed");
    let turn = p.arrive("s", &second, 0, None, Some(placement(2))).unwrap();
    p.finish(turn, &[]);
    p.step();
    let answer = import(&d, "s", &order(reservation, 2, &p, 20_000));
    let (status, body) = answered(&mut d, answer);
    assert_eq!(status, 200, "{body}");
    assert!(body["pulled_tokens"].as_u64().unwrap() < 160, "{body}");
    compare(&mut d, "s", &second, reservation, 2);
    assert!(p.drain() && d.drain());
}

#[test]
fn many_sessions_are_pulled_at_once() {
    // XFER-5: reads in flight are bounded per import, imports by admission.
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    d.step();
    let mut pulls = Vec::new();
    for n in 1..=8u32 {
        let (session, prompt) = (format!("s{n}"), tokens(n, 300));
        let turn = p.arrive(&session, &prompt, 0, None, Some(placement(n.into()))).unwrap();
        p.finish(turn, &[]);
        p.step();
        let reservation = admit(&d, &question(&session, 0, 300, 300, n.into(), n.into()), "seed");
        let answer = import(&d, &session, &order(reservation, n.into(), &p, 20_000));
        pulls.push((session, prompt, reservation, n, answer));
    }
    until("all are pulled", || {
        d.step();
        pulls.iter().all(|(.., answer)| answer.is_finished())
    });
    for (session, prompt, reservation, n, answer) in pulls {
        let (status, body) = answered(&mut d, answer);
        assert_eq!(status, 200, "{session}: {body}");
        assert!(compare(&mut d, &session, &prompt, reservation, n.into()) >= 288);
    }
    assert!(p.drain() && d.drain());
}

#[test]
fn the_byte_comparison_sees_one_wrong_byte() {
    // Negative control of every comparison above.
    let mut p = engine(&[], 16);
    let prompt = tokens(9, 40);
    let mut turn = p.arrive("s", &prompt, 0, None, None).unwrap();
    p.prefill(&mut turn, 40);
    let right = true_kv(&prompt, p.arena().layout().token_bytes());
    assert_eq!(p.bytes(&turn), right);
    let slot = p.slot(&turn, 17);
    let mut bytes = p.arena().read_token(slot);
    bytes[5] ^= 1;
    p.arena().write_token(slot, &bytes);
    assert_ne!(p.bytes(&turn), right);
    p.abort(turn);
    assert!(p.drain());
}

#[test]
fn a_sleeping_loop_is_woken_for_an_import() {
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    d.step();
    let prompt = tokens(5, 32);
    let reservation = admit(&d, &question("s", 0, 32, 32, 1, 1), "seed");
    let turn = p.arrive("s", &prompt, 0, None, Some(placement(1))).unwrap();
    p.finish(turn, &[]);
    d.step();
    assert!(!d.woken());
    let answer = import(&d, "s", &order(reservation, 1, &p, 20_000));
    until("the loop is woken to land", || d.woken());
    d.step();
    until("the loop is woken to commit", || d.woken() || answer.is_finished());
    assert_eq!(answered(&mut d, answer).0, 200);
}
