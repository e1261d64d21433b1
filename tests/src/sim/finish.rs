//! The end of a world: every byte is looked at, everything is closed, and nothing may be left.

use kvc_proto::worker::{LeaseAnswer, LeaseRequest};

use super::{kv, oracle::Oracle, world::World};

impl World {
    /// Every byte that any worker would show a peer (kv-movement §6).
    pub(super) fn look_at_everything(&mut self) {
        for host in &mut self.hosts {
            let now = host.clock.at(self.now);
            let Some(p) = &mut host.process else { continue };
            for session in p.sessions() {
                let Some(placement) = p.w.session(&session, now).and_then(|v| v.epoch).map(|e| e.placement) else {
                    continue;
                };
                let request = LeaseRequest {
                    session: session.clone(),
                    placement,
                    incarnation: p.incarnation(),
                };
                let Ok(LeaseAnswer::Granted(grant)) = p.w.lease(&request, now) else {
                    continue;
                };
                let slots = p.w.lease_view(grant.lease, 0).map(|v| v.slots).unwrap_or_default();
                let truth = kv::truth(&grant.identity, &grant.tokens);
                let wrong = slots.iter().zip(&truth).position(|(s, v)| p.pool.read(*s) != *v);
                let complete = slots.len() == truth.len();
                p.watch.check(wrong.is_none() && complete, Oracle::TrueKv, || {
                    format!(
                        "{session} holds {} of {} tokens, wrong at {wrong:?}",
                        slots.len(),
                        truth.len()
                    )
                });
                p.w.end_lease(grant.lease, now);
                while p.w.poll_effect().is_some() {}
            }
        }
    }

    pub(super) fn close_everything(&mut self) {
        for node in 0..self.hosts.len() {
            let now = self.hosts[node].clock.at(self.now);
            if let Some(process) = &mut self.hosts[node].process {
                for session in process.sessions() {
                    process.close_session(&session, now);
                }
            }
            self.process_out(node);
        }
    }

    pub(super) fn check_nothing_left(&mut self) {
        for (_, router) in &mut self.routers {
            router.check_quiet();
        }
        for host in &mut self.hosts {
            if let Some(process) = &mut host.process {
                process.check_nothing_left();
            }
        }
    }
}
