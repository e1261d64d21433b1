//! Sessions that wander between three workers: turns, moves while turns run, replicas that follow, reseeds from them,
//! evictions, flushes and slow links, on fixed seeds. No byte of a reused position is ever wrong, never do two workers own a
//! session, and at the end every page is free (kv-movement §6, on real threads and sockets).

mod support;

use std::{sync::Arc, time::Duration};

use kvc_engine_ext::harness::{Start, TestEngine, true_kv};
use kvc_proto::{id::ReservationId, wire::admit::ADMIT_PATH, worker::Token};
use kvc_rdma::fault::Fault;
use serde_json::{Value, json};
use support::*;

/// A plain generator: runs are reproducible but for the threads.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % sides as u64) as usize
    }
}

/// As a router sees it.
struct Session {
    name: String,
    history: Vec<Token>,
    owner: usize,
    placed: u64,
    turns: u32,
}

#[derive(Debug, Default)]
struct Tally {
    direct: u32,
    from_replica: u32,
    afresh: u32,
    refused: u32,
    moved: u32,
    stayed: u32,
}

struct World {
    workers: Vec<TestEngine>,
    links: Vec<Arc<Behind>>,
    sessions: Vec<Session>,
    dice: Dice,
    asked: u64,
    tally: Tally,
}

impl World {
    fn new(seed: u64, pages: [u32; 3]) -> Self {
        let links: Vec<_> = pages.iter().map(|_| Behind::new()).collect();
        let worker = |(page_tokens, link): (&u32, &Arc<Behind>)| {
            // About four sessions fit: replicas are evicted all the time.
            let mut start = Start::new(
                config(&[("lease_ms", "500"), ("handover_deadline_ms", "500")]),
                *page_tokens,
            );
            start.pages = 1024 / page_tokens;
            start.movers = vec![link.clone()];
            TestEngine::start(start).unwrap()
        };
        let sessions = (0..5).map(|n| Session {
            name: format!("s{n}"),
            history: tokens(n % 2, 48),
            owner: n as usize % 3,
            placed: 1,
            turns: 0,
        });
        Self {
            workers: pages.iter().zip(&links).map(worker).collect(),
            links,
            sessions: sessions.collect(),
            dice: Dice(seed),
            asked: 0,
            tally: Tally::default(),
        }
    }

    fn step(&mut self) {
        self.workers.iter_mut().for_each(TestEngine::step);
    }

    fn answered(&mut self, answer: Answer) -> (u16, Value) {
        until("the import is answered", || {
            self.workers.iter_mut().for_each(TestEngine::step);
            answer.is_finished()
        });
        answer.join().unwrap().unwrap()
    }

    fn committed(&self, worker: usize, session: usize) -> u64 {
        view(&self.workers[worker], &self.sessions[session].name)["committed"]
            .as_u64()
            .unwrap_or(0)
    }

    /// The next prompt: sometimes the history is rewritten first.
    fn prompt(&mut self, which: usize) -> (Vec<Token>, usize) {
        let history = &mut self.sessions[which].history;
        if self.dice.roll(5) == 0 {
            let keep = 1 + self.dice.roll(history.len());
            history.truncate(keep);
        }
        history.truncate(220);
        let append = 1 + self.dice.roll(60);
        let salt = self.dice.roll(1000) as u32;
        let mut prompt = history.clone();
        prompt.extend((0..append as u32).map(|i| 7_000_000 + salt * 1000 + i));
        (prompt, append)
    }

    /// Admitted at the owner; reseeded from who holds most if the owner has nothing.
    fn admit(&mut self, which: usize, prompt: &[Token], append: usize) -> Option<ReservationId> {
        self.step();
        let owner = self.sessions[which].owner;
        let resident = self.committed(owner, which) > 0;
        if !resident {
            self.sessions[which].placed += 1;
        }
        let session = &mut self.sessions[which];
        self.asked += 1;
        let mut ask = question(
            &session.name,
            session.turns,
            prompt.len(),
            append,
            session.placed,
            self.asked,
        );
        session.turns += 1;
        ask.backup = Some(peer(&self.workers[(owner + 1) % 3]));
        let granted = client(&self.workers[owner]).post(ADMIT_PATH, &ask).unwrap().1;
        let Some(reservation) = granted["reservation"].as_u64().map(ReservationId) else {
            assert_eq!(granted["can_admit"], false, "{granted}");
            self.tally.refused += 1;
            return None;
        };
        if granted["mode"] == "direct" {
            self.tally.direct += 1;
            return Some(reservation);
        }
        let holder = (0..3)
            .filter(|w| *w != owner)
            .max_by_key(|w| self.committed(*w, which))?;
        if self.committed(holder, which) == 0 {
            self.tally.afresh += 1;
            return Some(reservation);
        }
        let order = reseed_order(reservation, self.sessions[which].placed, &self.workers[holder], 3000);
        let answer = import(&self.workers[owner], &self.sessions[which].name, &order);
        let (status, _) = self.answered(answer);
        match status {
            200 => self.tally.from_replica += 1,
            _ => self.tally.afresh += 1,
        }
        Some(reservation)
    }

    fn turn(&mut self, which: usize, moves: bool) {
        let (prompt, append) = self.prompt(which);
        let Some(reservation) = self.admit(which, &prompt, append) else {
            return;
        };
        let (name, owner, placed) = {
            let session = &self.sessions[which];
            (session.name.clone(), session.owner, session.placed)
        };
        let worker = &mut self.workers[owner];
        let Ok(mut turn) = worker.arrive(&name, &prompt, 4, Some(reservation), Some(placement(placed))) else {
            self.tally.refused += 1;
            return;
        };
        worker.begin(&mut turn);
        let right = true_kv(&prompt, worker.arena().layout().token_bytes());
        for (at, held) in worker.bytes(&turn).iter().enumerate() {
            assert!(
                *held == right[at],
                "{name}: position {at} of {} holds other KV",
                prompt.len()
            );
        }
        let half = (prompt.len() / 2).max(turn.reused as usize);
        worker.prefill(&mut turn, half);
        let moving = moves.then(|| self.order(which));
        for _ in 0..self.dice.roll(8) {
            self.step();
            std::thread::sleep(Duration::from_millis(1));
        }
        let worker = &mut self.workers[owner];
        assert!(!worker.is_aborted(&turn), "nobody else was given the session");
        if self.dice.roll(6) == 0 {
            worker.abort(turn);
        } else {
            worker.finish(turn, &[11, 12, 13]);
            self.sessions[which].history = [&prompt[..], &[11, 12]].concat();
        }
        self.step();
        if let Some((target, answer)) = moving {
            self.settle(which, target, answer);
        }
    }

    /// A move to another worker under the next number.
    fn order(&mut self, which: usize) -> (usize, Answer) {
        let session = &self.sessions[which];
        let target = (session.owner + 1 + self.dice.roll(2)) % 3;
        let order = move_order(session.placed + 1, &self.workers[session.owner], 3000);
        (target, import(&self.workers[target], &session.name, &order))
    }

    /// What became of it, as a router finds out (MIG-2).
    fn settle(&mut self, which: usize, target: usize, answer: Answer) {
        let (status, body) = self.answered(answer);
        let pending = self.sessions[which].placed + 1;
        let name = self.sessions[which].name.clone();
        let request =
            json!({"placement": placement(pending), "incarnation": self.workers[target].engine().incarnation()});
        let path = format!("/kvc/v1/sessions/{name}/withdraw");
        let said = client(&self.workers[target]).post(&path, &request).unwrap().1;
        assert_eq!(said["answer"] == "owner", status == 200, "{said} {body}");
        self.sessions[which].placed = pending;
        if status == 200 {
            self.sessions[which].owner = target;
            self.tally.moved += 1;
        } else {
            // The number is spent; the old owner's copy serves under the next.
            self.sessions[which].placed += 1;
            self.tally.stayed += 1;
        }
        let owners = self.workers.iter().filter(|w| {
            let view = view(w, &name);
            view["standing"] == "owner" && view["epoch"]["placement"]["n"].as_u64() >= Some(pending)
        });
        assert!(owners.count() <= 1, "{name} has two owners");
    }

    fn event(&mut self) {
        let which = self.dice.roll(5);
        match self.dice.roll(12) {
            0..=5 => self.turn(which, false),
            6..=8 => self.turn(which, true),
            9 => {
                let (target, answer) = self.order(which);
                self.settle(which, target, answer);
            }
            10 => {
                let slow = self.dice.roll(3);
                let pause = Duration::from_millis(1 + self.dice.roll(4) as u64);
                for (n, link) in self.links.iter().enumerate() {
                    link.proxy.inject((n == slow).then_some(Fault::Delay { pause }));
                }
            }
            _ if self.dice.roll(3) == 0 => {
                let one = self.dice.roll(3);
                self.workers[one].flush();
            }
            _ => self.step(),
        }
    }
}

#[test]
fn sessions_wander_and_no_byte_is_wrong() {
    let mut from_replica = 0;
    // More of them with `KVC_WANDER=60`; one seed takes about three seconds.
    let more = std::env::var("KVC_WANDER").map_or(0, |n| n.parse().unwrap());
    let more = (1..=more).map(|n: u64| (n * 7919, [[16, 16, 16], [1, 16, 4], [4, 4, 1]][n as usize % 3]));
    for (seed, pages) in [(0x5eed, [16, 16, 16]), (0xfeed, [16, 1, 4])].into_iter().chain(more) {
        println!("seed {seed:#x}");
        let mut world = World::new(seed, pages);
        for _ in 0..160 {
            world.event();
        }
        println!("{:?}", world.tally);
        let t = &world.tally;
        assert!(t.moved > 10 && t.direct > 30, "{t:?}");
        from_replica += t.from_replica;
        for link in &world.links {
            link.proxy.inject(None);
        }
        until("nothing moves any more", || {
            world.workers.iter_mut().for_each(TestEngine::step);
            world.workers.iter().all(|w| leases(w) + imports(w) == 0)
        });
        for worker in &mut world.workers {
            assert!(worker.drain(), "pages leaked");
        }
    }
    assert!(from_replica > 3, "{from_replica} reseeds found a replica");
}
