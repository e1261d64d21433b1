//! What an operator does to a world: moves sessions at moments that suit nobody, drains workers and restarts them.

use kvc_proto::{routing::WorkerIndex, wire::info::Role};

use super::{
    client::Answer,
    clock::Time,
    message::NodeId,
    oracle::Oracle,
    process::Process,
    world::{Event, Host, World},
};

/// How often it looks whether a worker is drained, and how long it waits.
const LOOK: Time = 25_000;
const PATIENCE: Time = 600_000;
/// A worker that takes turns again is known to every router by then.
const HEARD: Time = 700_000;

impl World {
    pub(super) fn next_operation(&mut self) {
        for (gap, drain) in [(self.plan.move_gap, false), (self.plan.drain_gap, true)] {
            self.appoint(gap, drain);
        }
    }

    fn appoint(&mut self, gap: Time, drain: bool) {
        if gap > 0 {
            let at = self.now + 1 + self.rng.below(2 * gap);
            if at < self.plan.operated_until {
                self.at(at, if drain { Event::Drain } else { Event::Move });
            }
        }
    }

    /// `POST /v1/sessions/{id}/move` at some router: some session, some worker, mostly sensible.
    pub(super) fn operator_moves(&mut self) {
        self.appoint(self.plan.move_gap, false);
        let known: Vec<_> = self.owners.all().into_keys().collect();
        let Some(session) = known.get(self.rng.below(known.len() as u64) as usize).cloned() else {
            return;
        };
        let to = WorkerIndex(self.rng.below(self.hosts.len() as u64) as u16);
        let router = self.rng.below(self.routers.len() as u64) as usize;
        self.note(|| format!("the operator wants {session} on worker {}", to.0));
        let now = self.routers[router].0.at(self.now);
        self.routers[router].1.operator_move(session, to, now);
        self.router_out(router);
    }

    /// `POST /kvc/v1/drain`, and a restart when nothing is left, or when patience is.
    pub(super) fn operator_drains(&mut self) {
        self.appoint(self.plan.drain_gap, true);
        let node = self.rng.below(self.hosts.len() as u64) as NodeId;
        let lives = self.hosts[node].lives;
        let Some(process) = &mut self.hosts[node].process else {
            return;
        };
        if process.w.draining() {
            return;
        }
        process.w.set_draining(true);
        let owned = self.owners.of(node);
        self.note(|| format!("worker {node} drains: it owns {owned} sessions"));
        self.look_for_light();
        self.at(self.now + LOOK, Event::Drained(node, lives, self.now + PATIENCE));
    }

    pub(super) fn operator_looks(&mut self, node: NodeId, lives: u64, until: Time) {
        let host = &self.hosts[node];
        let frozen = host.frozen_until > self.now;
        let Some(process) = host.process.as_ref().filter(|p| host.lives == lives && p.w.draining()) else {
            return;
        };
        if process.drained() && !frozen {
            self.note(|| format!("worker {node} is drained and restarts"));
            self.drained += 1;
            self.crash(node);
        } else if self.now < until {
            self.at(self.now + LOOK, Event::Drained(node, lives, until));
        } else if self.plan.fault_gap > 0 && self.rng.chance(500) {
            self.note(|| format!("worker {node} is not drained and restarts all the same"));
            self.crash(node);
        } else {
            self.note(|| format!("worker {node} is not drained and goes on"));
            if let Some(process) = &mut self.hosts[node].process {
                process.w.set_draining(false);
            }
            self.hosts[node].since = self.now;
        }
    }

    /// Whether any worker takes turns now, and every router has heard of it.
    pub(super) fn look_for_light(&mut self) {
        let takes = |p: &Process| p.role != Role::Prefill && !p.w.draining();
        let known = |since: Time| since == 0 || self.now > since + HEARD;
        let up = |h: &Host| known(h.since) && h.process.as_ref().is_some_and(takes);
        self.dark |= !self.hosts.iter().any(up);
    }

    /// MIG-4: in a world without faults a request is refused for want of room, or because its session is busy, and for
    /// nothing that an operator does.
    pub(super) fn check_served(&mut self, client: usize, answer: &Answer) {
        let faults = self.plan.fault_gap > 0 || self.dark;
        if faults || !self.clients[client].is_routed() {
            return;
        }
        let Answer::Error(why) = answer else { return };
        let fine = [
            "session-busy",
            "too-large",
            "Broken(Internal)",
            "internal",
            "no-d-capacity",
        ];
        let also = "session-not-resident-no-capacity";
        // Two clients of one session, at two routers, may take it from each other.
        let shared = self.plan.sessions < self.plan.clients && self.plan.routers > 1 && why == "Broken(StaleEpoch)";
        self.watch.check(
            fine.contains(&why.as_str()) || why == also || shared,
            Oracle::Served,
            || format!("client {client} gets {why} in a world without faults"),
        );
    }
}
