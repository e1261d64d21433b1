//! Two worker processes move KV over RDMA: seed, direct, sync, reseed and move, and what happens when a process, a link or
//! verbs itself is gone (XFER-9). In the guest of scripts/rdma/test.sh; elsewhere each test is skipped.

mod support;
mod worker_process;

use std::{env, process::Command, thread, time::Duration};

use kvc_engine_ext::harness::TestEngine;
use kvc_proto::{
    id::ReservationId,
    wire::admit::{ADMIT_PATH, ImportRequest, Source},
    worker::Token,
};
use serde_json::{Value, json};
use support::*;
use worker_process::{Order, Plan, Worker, start};

/// Over verbs or not at all.
const FORCED: [(&str, &str); 1] = [("force_rdma", "true")];

fn is_guest() -> bool {
    let guest = env::var_os("KVC_RDMA_GUEST").is_some();
    if !guest {
        eprintln!("skipped: scripts/rdma/test.sh runs it in a guest with an RDMA device");
    }
    guest
}

/// This process's worker.
fn own(settings: &[(&str, &str)]) -> TestEngine {
    TestEngine::start(start(settings)).unwrap()
}

fn bytes(worker: &TestEngine, mover: &str) -> f64 {
    metric(worker, &format!("kvc_mover_bytes_total{{mover=\"{mover}\"}}"))
}

fn bytes_of(worker: &Worker, mover: &str) -> f64 {
    worker.metric(&format!("kvc_mover_bytes_total{{mover=\"{mover}\"}}"))
}

fn fallbacks(worker: &TestEngine) -> f64 {
    metric(worker, "kvc_mover_fallbacks_total{from=\"verbs\",to=\"tcp\"}")
}

fn token_bytes(worker: &TestEngine) -> f64 {
    worker.arena().layout().token_bytes() as f64
}

fn from(peer: &Worker, source: Source, reservation: Option<ReservationId>, placed: u64) -> ImportRequest {
    ImportRequest {
        reservation,
        placement: placement(placed),
        source,
        peer: peer.peer.peer.clone(),
        incarnation: peer.peer.incarnation,
        deadline_ms: 20_000,
    }
}

fn arrive(session: &str, prompt: &[Token], reservation: Option<u64>, placed: u64) -> Order {
    Order::Arrive {
        session: session.into(),
        prompt: prompt.to_vec(),
        reservation,
        placed,
    }
}

/// A seed of `len` tokens that is under way: the peer has prefilled the first half, and no more than that can be here.
struct Seed {
    session: String,
    prompt: Vec<Token>,
    placed: u64,
    reservation: ReservationId,
    answer: Answer,
}

impl Seed {
    fn start(p: &mut Worker, d: &mut TestEngine, n: u32, len: usize) -> Self {
        let (session, prompt, placed) = (format!("s{n}"), tokens(n, len), u64::from(n));
        d.step();
        let reservation = admit(d, &question(&session, 0, len, len, placed, placed), "seed");
        p.tell(&arrive(&session, &prompt, None, placed));
        p.tell(&Order::Prefill(len / 2));
        let answer = import(d, &session, &from(p, Source::Prefill, Some(reservation), placed));
        Seed {
            session,
            prompt,
            placed,
            reservation,
            answer,
        }
    }

    /// Until the first half is here.
    fn half(&self, d: &mut TestEngine) {
        let half = self.prompt.len() as u64 / 2;
        until("the first half is pulled", || {
            d.step();
            pulled(d) >= half || self.answer.is_finished()
        });
        assert!(!self.answer.is_finished(), "the peer has not finished");
    }

    /// The import's answer, and how many tokens its turn reuses; each of their bytes is right.
    fn end(self, d: &mut TestEngine) -> ((u16, Value), u32) {
        let answer = answered(d, self.answer);
        let reused = compare(d, &self.session, &self.prompt, self.reservation, self.placed);
        (answer, reused)
    }
}

/// A whole seed; the tokens of the session afterwards.
fn seed(p: &mut Worker, d: &mut TestEngine, n: u32, len: usize) -> Vec<Token> {
    let seed = Seed::start(p, d, n, len);
    p.tell(&Order::Finish(vec![]));
    let mut history = seed.prompt.clone();
    let ((status, body), reused) = seed.end(d);
    assert_eq!(
        (status, body["pulled_tokens"].as_u64()),
        (200, Some(len as u64)),
        "{body}"
    );
    assert!(reused as usize + 16 >= len, "{reused} of {len}");
    // What `compare` answers with; the last token's KV is never computed.
    history.extend([1, 2]);
    history
}

/// The next turn of a session that this worker owns: direct, byte for byte.
fn goes_on(worker: &mut TestEngine, session: &str, history: &[Token], placed: u64) {
    worker.step();
    let mut prompt = history.to_vec();
    prompt.extend([5, 6, 7]);
    let asked = question(session, 1, prompt.len(), 3, placed, 100 + placed);
    let reservation = admit(worker, &asked, "direct");
    let reused = compare(worker, session, &prompt, reservation, placed) as usize;
    assert!(reused + 16 > history.len(), "{reused} of {}", history.len());
}

/// Not a test by itself: the process that the others start.
#[test]
fn a_worker_of_its_own() {
    worker_process::run();
}

#[test]
fn a_seed_is_read_over_verbs_while_the_peer_prefills_and_the_next_turn_is_direct() {
    // XFER-4, DISP-3.
    if !is_guest() {
        return;
    }
    let (mut p, mut d) = (Worker::start(&[("role", "prefill")]), own(&[("role", "decode")]));
    assert_eq!(d.engine().info().movers, ["verbs", "tcp"]);
    let seed = Seed::start(&mut p, &mut d, 1, 180);
    seed.half(&mut d);
    p.tell(&Order::Finish(vec![]));
    let mut history = seed.prompt.clone();
    let ((status, body), reused) = seed.end(&mut d);
    assert_eq!((status, &body["pulled_tokens"]), (200, &json!(180)), "{body}");
    assert!(reused >= 176, "{reused}");
    history.extend([1, 2]);
    goes_on(&mut d, "s1", &history, 1);
    assert_eq!((bytes(&d, "verbs"), bytes(&d, "tcp")), (180.0 * token_bytes(&d), 0.0));
    assert_eq!(fallbacks(&d), 0.0);
    assert_eq!(p.tell(&Order::Drain), true, "pages leaked");
    assert!(d.drain(), "pages leaked");
}

#[test]
fn a_backup_follows_over_verbs_and_gives_the_session_back() {
    // SYNC-1, SYNC-2.
    if !is_guest() {
        return;
    }
    let (mut p, mut d) = (Worker::start(&FORCED), own(&FORCED));
    let mut history = Vec::new();
    for turn in 0..3 {
        history.extend(tokens(turn, 50));
        d.step();
        let mut asked = question("s", turn, history.len(), 50, 1, 1 + u64::from(turn));
        asked.backup = Some(p.peer.clone());
        let (status, answer) = client(&d).post(ADMIT_PATH, &asked).unwrap();
        assert_eq!((status, &answer["can_admit"]), (200, &json!(true)), "{answer}");
        let reservation = Some(ReservationId(answer["reservation"].as_u64().unwrap()));
        let turn = d.arrive("s", &history, 4, reservation, Some(placement(1))).unwrap();
        d.finish(turn, &[1, 2, 3]);
        d.step();
        history.extend([1, 2]);
        until("the backup has followed", || p.view("s")["committed"] == history.len());
    }
    assert_eq!(p.view("s")["standing"], "replica");
    history.push(77);
    let replica = Order::Compare {
        session: "s".into(),
        prompt: history.clone(),
        placed: 1,
    };
    let held = p.tell(&replica).as_u64().unwrap() as usize;
    assert!(held + 16 >= history.len(), "{held} of {}", history.len());
    assert!(bytes_of(&p, "verbs") >= 156.0 * token_bytes(&d));
    assert_eq!(bytes_of(&p, "tcp"), 0.0);
    drop(d);
    let mut next = own(&FORCED);
    next.step();
    let reservation = admit(&next, &question("s", 3, history.len(), 1, 2, 9), "reseed");
    let answer = import(&next, "s", &from(&p, Source::Replica, Some(reservation), 2));
    let (status, body) = answered(&mut next, answer);
    assert_eq!((status, &body["pulled_tokens"]), (200, &json!(156)), "{body}");
    assert!(compare(&mut next, "s", &history, reservation, 2) >= 144);
    assert_eq!(
        (bytes(&next, "verbs"), bytes(&next, "tcp")),
        (156.0 * token_bytes(&next), 0.0)
    );
    assert_eq!(p.tell(&Order::Drain), true, "pages leaked");
    assert!(next.drain(), "pages leaked");
}

#[test]
fn a_session_moves_over_verbs_and_goes_on() {
    // MIG-1, MIG-3.
    if !is_guest() {
        return;
    }
    let (mut source, mut target) = (Worker::start(&[]), own(&[]));
    let mut history = tokens(1, 150);
    let reservation = source.admit(&question("s", 0, 150, 150, 1, 1), "seed");
    source.tell(&arrive("s", &history, Some(reservation), 1));
    source.tell(&Order::Finish(vec![1, 2, 3]));
    history.extend([1, 2]);
    let answer = import(&target, "s", &from(&source, Source::Owner, None, 2));
    let (status, body) = answered(&mut target, answer);
    assert_eq!((status, &body["pulled_tokens"]), (200, &json!(152)), "{body}");
    assert_eq!(
        (&source.view("s")["standing"], &view(&target, "s")["standing"]),
        (&json!("moved"), &json!("owner"))
    );
    goes_on(&mut target, "s", &history, 2);
    assert_eq!(
        (bytes(&target, "verbs"), bytes(&target, "tcp")),
        (152.0 * token_bytes(&target), 0.0)
    );
    assert_eq!(source.tell(&Order::Drain), true, "pages leaked");
    assert!(target.drain(), "pages leaked");
}

#[test]
fn a_peer_that_is_killed_in_the_middle_of_a_read_costs_only_the_import() {
    // XFER-7, F12, F15: the reads of the stalled peer are on their way when it ends.
    if !is_guest() {
        return;
    }
    let plan = Plan {
        stall: Some(100_000),
        ..Plan::default()
    };
    let (mut doomed, mut d) = (Worker::start_as(&plan), own(&[]));
    let seed = Seed::start(&mut doomed, &mut d, 1, 500);
    until("the pull runs", || {
        d.step();
        transfers(&d)["imports"][0]["phase"] == "pulling"
    });
    thread::sleep(Duration::from_millis(200));
    assert!(pulled(&d) < 250 && !seed.answer.is_finished());
    doomed.kill();
    let (answer, reused) = seed.end(&mut d);
    assert!(
        ["peer-unreachable", "transfer-failed"].contains(&code(&answer)),
        "{answer:?}"
    );
    assert_eq!((reused, imports(&d)), (0, 0));
    let mut p = Worker::start(&[]);
    self::seed(&mut p, &mut d, 2, 180);
    assert_eq!((bytes(&d, "verbs"), bytes(&d, "tcp")), (180.0 * token_bytes(&d), 0.0));
    assert!(d.drain(), "pages leaked");
}

/// The RDMA link, down while this lives.
struct Down;

impl Down {
    fn set(to: &str) {
        let status = Command::new("/opt/bin/ip").args(["link", "set", "d0", to]).status();
        assert!(status.unwrap().success(), "ip link set d0 {to}");
    }

    fn take() -> Self {
        Self::set("down");
        Down
    }
}

impl Drop for Down {
    fn drop(&mut self) {
        Self::set("up");
    }
}

#[test]
fn a_link_that_goes_down_in_the_middle_is_replaced_by_tcp_under_the_same_lease() {
    // XFER-9.
    if !is_guest() {
        return;
    }
    let (mut p, mut d) = (Worker::start(&[]), own(&[]));
    let seed = Seed::start(&mut p, &mut d, 1, 180);
    seed.half(&mut d);
    let down = Down::take();
    p.tell(&Order::Finish(vec![]));
    let ((status, body), reused) = seed.end(&mut d);
    assert_eq!((status, &body["pulled_tokens"]), (200, &json!(180)), "{body}");
    assert!(reused >= 176, "{reused}");
    let half = 90.0 * token_bytes(&d);
    assert_eq!((bytes(&d, "verbs"), bytes(&d, "tcp"), fallbacks(&d)), (half, half, 1.0));
    assert_eq!(p.metric("kvc_leases_total"), 1.0);
    drop(down);
    assert_eq!(p.tell(&Order::Drain), true, "pages leaked");
    assert!(d.drain(), "pages leaked");
}

#[test]
fn where_rdma_is_forced_a_link_that_goes_down_fails_the_import_and_no_byte_takes_another_way() {
    if !is_guest() {
        return;
    }
    let (mut p, mut d) = (Worker::start(&[]), own(&FORCED));
    assert_eq!(d.engine().info().movers, ["verbs"]);
    let seed = Seed::start(&mut p, &mut d, 1, 180);
    seed.half(&mut d);
    let down = Down::take();
    p.tell(&Order::Finish(vec![]));
    let (answer, reused) = seed.end(&mut d);
    assert_eq!(code(&answer), "transfer-failed", "{answer:?}");
    assert_eq!((reused, bytes(&d, "tcp"), fallbacks(&d)), (0, 0.0, 0.0));
    drop(down);
    // The port is back when its device has said so.
    let healed = (2..200).find(|n| {
        let seed = Seed::start(&mut p, &mut d, *n, 64);
        p.tell(&Order::Finish(vec![]));
        let ((status, _), reused) = seed.end(&mut d);
        assert_eq!(status == 200, reused > 0);
        status == 200
    });
    assert!(healed.is_some(), "the link is back and nothing is read");
    assert_eq!(p.tell(&Order::Drain), true, "pages leaked");
    assert!(d.drain(), "pages leaked");
}

#[test]
fn where_rdma_is_forced_a_peer_without_it_is_refused() {
    if !is_guest() {
        return;
    }
    for (theirs, ours) in [([("movers", "tcp")], FORCED), (FORCED, [("movers", "tcp")])] {
        let (mut p, mut d) = (Worker::start(&theirs), own(&ours));
        let seed = Seed::start(&mut p, &mut d, 1, 64);
        p.tell(&Order::Finish(vec![]));
        let (answer, reused) = seed.end(&mut d);
        assert_eq!(code(&answer), "no-common-mover", "{answer:?}");
        assert_eq!((reused, bytes(&d, "verbs"), bytes(&d, "tcp")), (0, 0.0, 0.0));
        assert_eq!(p.tell(&Order::Drain), true, "pages leaked");
        assert!(d.drain(), "pages leaked");
    }
}

#[test]
fn a_device_that_is_not_there_is_a_start_error_that_names_those_that_are() {
    if !is_guest() {
        return;
    }
    let refused = TestEngine::start(start(&[("ib_device", "mlx5_9")]))
        .err()
        .expect("an error");
    let told = refused.to_string();
    assert!(
        told.starts_with("ib_device") && told.contains("rxe0") && !told.contains('\n'),
        "{told}"
    );
}

/// Run in guests without a device, the kernel's part, or the library: KVC_RDMA_EXPECT says which.
#[test]
fn a_worker_that_must_use_rdma_does_not_start_without_and_others_do() {
    let remedy = match env::var("KVC_RDMA_EXPECT").as_deref() {
        Ok("device") => "rdma link",
        Ok("kernel") => "load ib_uverbs",
        Ok("library") => "install rdma-core",
        _ => return,
    };
    let refused = TestEngine::start(start(&FORCED)).err().expect("an error");
    let told = refused.to_string();
    assert!(
        told.starts_with("force_rdma") && told.contains(remedy) && !told.contains('\n'),
        "{told}"
    );
    assert_eq!(own(&[]).engine().info().movers, ["tcp"]);
}
