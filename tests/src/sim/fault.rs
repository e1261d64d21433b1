//! What befalls a world: crashes, freezes, cuts, slow links, flushes, drains, closes, router restarts; and the healing.

use kvc_proto::id::RouterId;

use super::{
    client::Answer,
    clock::Time,
    message::{Message, NodeId},
    router,
    world::{Event, Wish, World},
};

/// A fault that strikes at a step of a move, a sync or a reseed between two workers.
#[derive(Clone, Copy, Debug)]
pub enum Aim {
    /// A worker ends by force.
    Crash(NodeId),
    /// One direction carries nothing for this long.
    Cut(NodeId, NodeId, Time),
    /// One direction takes this much longer, for good.
    Slow(NodeId, NodeId, Time),
    /// A worker does nothing for this long.
    Freeze(NodeId, Time),
    /// Its engine does nothing for this long; its threads answer.
    Stall(NodeId, Time),
    /// Its clock leaps ahead.
    Leap(NodeId, Time),
}

impl World {
    /// A step of a move between two workers is taken: a good moment.
    pub(super) fn milestone(&mut self, what: &'static str, node: NodeId, peer: NodeId) {
        if self.now >= self.plan.faults_until || !self.rng.chance(self.plan.aim) {
            return;
        }
        let (a, b) = if self.rng.chance(500) {
            (node, peer)
        } else {
            (peer, node)
        };
        // Before, while and after the step's message travels.
        let travels = self.plan.link.delay + self.plan.link.jitter;
        let after = self.rng.pick(&[0, 0, travels / 2, travels, 2 * travels + 5_000]);
        let long = if self.rng.chance(300) { 1_200_000 } else { 150_000 };
        let time = self.rng.range(2_000, long);
        // A hand-over is decided by one answer: it is the one to be late.
        let kind = if what == "asked" && self.rng.chance(300) {
            11
        } else {
            self.rng.below(12)
        };
        let aim = match kind {
            0..=2 => Aim::Crash(a),
            3..=5 => Aim::Cut(a, b, time),
            6..=7 => Aim::Freeze(a, time),
            8 => Aim::Stall(a, time),
            9 => Aim::Leap(a, time),
            // Answers come, but late: up to twice the hand-over deadline.
            _ => {
                let deadline = self.plan.workers[node].handover_deadline.as_micros() as u64;
                let slow = self.rng.range(1_000, 2 * deadline);
                Aim::Slow(peer, node, slow)
            }
        };
        self.note(|| format!("at \"{what}\" of {node} and {peer}: {aim:?} in {after} us"));
        self.at(self.now + after, Event::Aimed(aim));
        if matches!(aim, Aim::Cut(..)) && self.rng.chance(250) {
            // The answer is lost, and then its sender.
            let later = after + self.rng.below(30_000);
            self.at(self.now + later, Event::Aimed(Aim::Crash(a)));
        }
    }

    pub(super) fn aimed(&mut self, aim: Aim) {
        if self.now >= self.plan.faults_until {
            return;
        }
        match aim {
            Aim::Crash(node) => self.crash(node),
            Aim::Cut(a, b, time) => {
                let until = self.now + time;
                self.note(|| format!("{a} → {b} is cut until {:.3} ms", until as f64 / 1000.0));
                self.links[a][b].cut_until = until;
            }
            Aim::Slow(a, b, time) => {
                self.note(|| format!("{a} → {b} slows down by {time} us"));
                self.links[a][b].delay += time;
            }
            Aim::Freeze(node, time) => {
                let thaw = self.now + time;
                self.note(|| format!("worker {node} freezes until {:.3} ms", thaw as f64 / 1000.0));
                self.hosts[node].frozen_until = thaw;
            }
            Aim::Stall(node, time) => {
                let until = self.hosts[node].clock.at(self.now + time);
                self.note(|| format!("the engine of worker {node} stalls for {time} us"));
                if let Some(process) = &mut self.hosts[node].process {
                    process.stalled_until = until;
                }
            }
            Aim::Leap(node, time) => {
                self.note(|| format!("the clock of worker {node} leaps by {time} us"));
                self.hosts[node].clock.leap(time);
                // Its timers are due earlier now.
                self.process_out(node);
            }
        }
    }

    pub(super) fn next_fault(&mut self) {
        let at = self.now + 1 + self.rng.below(2 * self.plan.fault_gap);
        if at < self.plan.faults_until {
            self.at(at, Event::Fault);
        }
    }

    pub(super) fn fault(&mut self) {
        self.next_fault();
        let node = self.rng.below(self.hosts.len() as u64) as NodeId;
        let peer = self.rng.below(self.links.len() as u64) as NodeId;
        match self.rng.below(18) {
            10 => self.flush(node),
            11 => self.drain(node),
            16 => {
                let time = self.rng.range(10_000, 900_000);
                self.aimed(Aim::Leap(node, time));
            }
            17 => {
                let time = self.rng.range(10_000, 400_000);
                self.aimed(Aim::Stall(node, time));
            }
            12..=13 => self.close_one(node),
            14 => self.restart_router(),
            0..=2 => self.crash(node),
            3..=4 => {
                let thaw = self.now + self.rng.range(5_000, 700_000);
                self.note(|| format!("worker {node} freezes until {:.3} ms", thaw as f64 / 1000.0));
                self.hosts[node].frozen_until = thaw;
            }
            5..=7 => {
                let (a, b) = if self.rng.chance(500) {
                    (node, peer)
                } else {
                    (peer, node)
                };
                // Now and then longer than any lease or hand-over lasts.
                let most = if self.rng.chance(200) { 1_500_000 } else { 300_000 };
                let until = self.now + self.rng.range(5_000, most);
                self.note(|| format!("{a} → {b} is cut until {:.3} ms", until as f64 / 1000.0));
                self.links[a][b].cut_until = until;
                if self.rng.chance(300) {
                    self.links[b][a].cut_until = until;
                }
            }
            _ => {
                let slow = self.rng.range(1_000, 60_000);
                self.note(|| format!("{node} → {peer} slows down by {slow} us"));
                self.links[node][peer].delay += slow;
                self.links[peer][node].delay += slow;
            }
        }
    }

    /// The engine's `/flush_cache`: refused while it has work.
    pub(super) fn flush(&mut self, node: NodeId) {
        let now = self.hosts[node].clock.at(self.now);
        if let Some(process) = &mut self.hosts[node].process
            && process.flush(now)
        {
            self.note(|| format!("worker {node} is flushed"));
        }
        self.process_out(node);
    }

    pub(super) fn drain(&mut self, node: NodeId) {
        let on = self.rng.chance(500);
        if let Some(process) = &mut self.hosts[node].process {
            process.w.set_draining(on);
        }
        self.note(|| format!("worker {node} draining: {on}"));
    }

    /// Somebody closes a session, whatever it is doing (SES-2).
    pub(super) fn close_one(&mut self, node: NodeId) {
        let now = self.hosts[node].clock.at(self.now);
        let pick = self.rng.draw();
        if let Some(process) = &mut self.hosts[node].process {
            let sessions = process.sessions();
            if let Some(session) = sessions.get((pick % (sessions.len() as u64).max(1)) as usize) {
                process.close_session(session, now);
                let session = session.clone();
                self.note(|| format!("worker {node} is told to close {session}"));
            }
        }
        self.process_out(node);
    }

    /// A router dies: its connections close, its clients get an error, what it knew is gone; the session store stays.
    pub(super) fn restart_router(&mut self) {
        let router = self.rng.below(self.routers.len() as u64) as usize;
        let node = self.hosts.len() + router;
        self.routers_started += 1;
        let name = RouterId(self.routers_started);
        self.note(|| format!("router {node} restarts as {name}"));
        let (_, old) = &mut self.routers[router];
        let router::Broken { calls, requests } = old.crash(name, self.log.is_some());
        for (worker, call) in calls {
            self.send(node, worker, Message::Close(call));
        }
        for (client, number) in requests {
            let answer = Answer::Error("the router has gone".to_owned());
            if self.clients[client].answered(number, &answer, &self.plan, &mut self.watch) {
                let at = self.now + self.clients[client].thinks(&self.plan);
                self.at(at, Event::Client(client, Wish::Ask));
            }
        }
        self.router_out(router);
    }

    pub(super) fn heal(&mut self) {
        self.note(|| "everything heals".to_owned());
        for (a, row) in self.links.iter_mut().enumerate() {
            for (b, link) in row.iter_mut().enumerate() {
                link.heal();
                link.delay = self.plan.link.delay + u64::from(a == b);
            }
        }
        for host in &mut self.hosts {
            host.frozen_until = host.frozen_until.min(self.now + 1);
            if let Some(process) = &mut host.process {
                process.w.set_draining(false);
                process.stalled_until = kvc_proto::time::Now(0);
            }
        }
    }
}
