//! The end of a world: every byte is looked at, everything is closed, and nothing may be left.

use kvc_proto::{
    wire::info::Standing,
    worker::{LeaseAnswer, LeaseKind, LeaseRequest},
};

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
                    kind: LeaseKind::Sync,
                    have: None,
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

    /// SYNC-1: what an owner has told its backup is there, unless the pull was refused, or the copy given up since.
    pub(super) fn look_at_replicas(&mut self) {
        for node in 0..self.hosts.len() {
            let Some(owner) = self.hosts[node].process.as_mut() else {
                continue;
            };
            let list = owner.w.sessions(None, usize::MAX, owner.now).sessions;
            let owned = list.into_iter().filter(|s| s.standing == Standing::Owner);
            let told: Vec<_> = owned
                .filter_map(|s| Some((owner.outbox.told.get(&s.session_id)?.clone(), s)))
                .filter(|(told, s)| told.taken && s.backup.as_ref() == Some(&told.to))
                .filter(|(told, s)| s.epoch.is_some_and(|e| e.placement == told.placement))
                .collect();
            for (told, session) in told {
                let name = session.session_id;
                let mine = self.hosts[node].process.as_mut().and_then(|p| p.held(&name));
                if told.held.is_none() || mine != told.held {
                    // Cut since, and nothing was committed: the backup holds more than it needs.
                    continue;
                }
                let at = told.to.peer.parse().unwrap_or(node);
                let Some(backup) = self.hosts[at]
                    .process
                    .as_mut()
                    .filter(|p| p.incarnation() == told.to.incarnation)
                else {
                    continue;
                };
                let view = backup.w.session(&name, backup.now);
                // It knows a later placement: the owner learns so with its next announcement.
                let later = view
                    .as_ref()
                    .is_some_and(|v| v.epoch.map(|e| e.placement) != session.epoch.map(|e| e.placement));
                let excused = later || backup.unsynced.contains(&name);
                let kept = backup.held(&name);
                self.watch.check(excused || kept == mine, Oracle::Lag, || {
                    format!("{name}: its owner {node} holds {mine:?}, its backup {at} {kept:?}: {view:?}")
                });
            }
        }
        for host in &mut self.hosts {
            let Some(process) = &mut host.process else { continue };
            let (waiting, tokens) = process.w.sync_lag();
            process.watch.check(waiting == 0, Oracle::Lag, || {
                format!("{waiting} announcements of {tokens} tokens wait for ever")
            });
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
