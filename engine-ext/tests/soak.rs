//! Many sessions in both directions at once, with aborts, evictions and flushes in between, on fixed seeds: no byte
//! of a reused position is ever wrong, and at the end every page is free (kv-movement §6, in small).

mod support;

use kvc_engine_ext::harness::{Start, TestEngine, true_kv};
use kvc_proto::{id::ReservationId, wire::admit::ADMIT_PATH, worker::Token};
use support::*;

/// A plain generator: runs are reproducible.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

fn small(page_tokens: u32) -> TestEngine {
    // About four sessions fit: evictions happen all the time.
    let mut start = Start::new(
        config(&[("lease_ms", "500"), ("max_uncached_tokens", "40")]),
        page_tokens,
    );
    start.pages = 1024 / page_tokens;
    TestEngine::start(start).unwrap()
}

#[test]
fn no_byte_is_wrong_and_no_page_leaks() {
    for (seed, pages) in [(0x5eed, (1, 16)), (0xfeed, (16, 16)), (0xbead, (16, 4))] {
        println!("seed {seed:#x}");
        run(Dice(seed), pages);
    }
}

fn run(mut dice: Dice, (p_page, d_page): (u32, u32)) {
    let mut workers = [small(p_page), small(d_page)];
    let mut histories: Vec<Vec<Token>> = (0..6).map(|s| tokens(s % 2, 64)).collect();
    let (mut placed, mut asked) = (0, 0);
    let (mut seeds, mut direct, mut refused, mut failed) = (0, 0, 0, 0);
    for _ in 0..150 {
        let which = dice.roll(6) as usize;
        let session = format!("s{which}");
        if dice.roll(4) == 0 {
            // A rewrite: the history is cut somewhere.
            let keep = 1 + dice.roll(histories[which].len() as u64) as usize;
            histories[which].truncate(keep);
        }
        let append = 1 + dice.roll(90) as usize;
        let salt = dice.roll(1000) as u32;
        histories[which].extend((0..append as u32).map(|i| 7_000_000 + salt * 1000 + i));
        histories[which].truncate(300);
        let prompt = histories[which].clone();
        placed += 1;
        asked += 1;
        let into = dice.roll(2) as usize;
        workers.iter_mut().for_each(TestEngine::step);
        let mut ask = question(&session, placed as u32, prompt.len(), append, placed, asked);
        ask.via = Some(kvc_proto::wire::admit::Via::Prefill);
        let granted = client(&workers[into]).post(ADMIT_PATH, &ask).unwrap().1;
        let Some(reservation) = granted["reservation"].as_u64().map(ReservationId) else {
            refused += 1;
            continue;
        };
        if granted["mode"] == "direct" {
            direct += 1;
            answer(
                &mut workers[into],
                &session,
                &prompt,
                Some(reservation),
                placed,
                &mut dice,
            );
            continue;
        }
        let [first, second] = &mut workers;
        let (d, p) = if into == 0 { (first, second) } else { (second, first) };
        let mut turn = match p.arrive(&session, &prompt, 0, None, Some(placement(placed))) {
            Ok(turn) => turn,
            Err(why) => panic!("the prefill side refuses: {why}"),
        };
        let answered = import(d, &session, &order(reservation, placed, p, 3000));
        let fate = dice.roll(8);
        let half = prompt.len() / 2;
        p.prefill(&mut turn, half.max(1));
        for _ in 0..dice.roll(5) {
            d.step();
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        match fate {
            0 => p.abort(turn),
            1 => {
                p.finish(turn, &[]);
                d.flush();
            }
            _ => p.finish(turn, &[]),
        }
        p.step();
        let (status, body) = support::answered(d, answered);
        if fate > 1 {
            assert_eq!(status, 200, "{body}");
            seeds += 1;
        } else {
            failed += 1;
        }
        answer(d, &session, &prompt, Some(reservation), placed, &mut dice);
    }
    println!("{seeds} imports committed, {failed} did not, {direct} direct turns, {refused} refused");
    assert!(seeds > 20 && failed > 5);
    for worker in &mut workers {
        until("all leases are over", || leases(worker) == 0);
        assert!(worker.drain(), "pages leaked");
    }
}

/// The turn itself; every reused byte is compared.
fn answer(
    engine: &mut TestEngine,
    session: &str,
    prompt: &[Token],
    reservation: Option<ReservationId>,
    placed: u64,
    dice: &mut Dice,
) {
    let mut turn = engine
        .arrive(session, prompt, 4, reservation, Some(placement(placed)))
        .unwrap();
    engine.begin(&mut turn);
    let right = true_kv(prompt, engine.arena().layout().token_bytes());
    for (at, held) in engine.bytes(&turn).iter().enumerate() {
        assert!(
            *held == right[at],
            "{session}: position {at} of {} holds other KV",
            prompt.len()
        );
    }
    if dice.roll(5) == 0 {
        engine.prefill(&mut turn, prompt.len() - 1);
        engine.abort(turn);
    } else {
        engine.finish(turn, &[11, 12, 13]);
    }
    engine.step();
}
