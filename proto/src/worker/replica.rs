//! Service side: replicas follow their owners (SYNC-1..4). An owner announces what it has committed; the backup queues
//! the news per session and pulls at its own pace, behind everything that serves a turn.

use std::time::Duration;

use crate::{
    id::{Epoch, ImportId, SessionId},
    mutation::off,
    session::{Hold, Key, SessionState, Standing, Wish},
    time::Now,
    transfer::Purpose,
    wire::{
        admit::{ImportRequest, PeerRef, Source},
        reason::{Reason, Refusal},
    },
};

use super::{Announcement, Effect, Timer, Worker, change::stale_text};

/// Pulls of one announcement that may fail; the next commit announces again.
const TRIES: u32 = 3;
/// Pause before the next try.
const PAUSE: Duration = Duration::from_millis(500);

impl Worker {
    /// SYNC-1: an owner has committed. The news is taken in, and pulled when it is its turn; what an owner of an older
    /// placement says is refused, which is how that owner learns that it is none (SES-4).
    pub fn announced(&mut self, from: PeerRef, news: &Announcement, now: Now) -> Result<(), Refusal> {
        if !self.config.sync {
            return Err(self.refusal(Reason::SyncOff, "this worker keeps no replicas"));
        }
        if self.draining {
            return Err(self.refusal(Reason::Draining, "this worker takes no sessions"));
        }
        if from.incarnation == self.incarnation {
            return Err(self.refusal(Reason::ImportFromSelf, "the owner is this process"));
        }
        let got = news.epoch.placement;
        if let Some(session) = self.sessions.by_id(&news.session)
            && let Some(held) = session.placement
        {
            let older = got.n < held.n || (got.n == held.n && (got.store != held.store || session.is_owner()));
            if older && !off!(AnnounceEpoch) {
                return Err(self.refusal(Reason::StaleEpoch, stale_text(held, got)));
            }
            if held == got && news.epoch.rewind < session.rewind {
                return Ok(()); // overtaken on its way
            }
        }
        let key = self.sessions.find_or_insert(&news.session, now);
        if self.sessions[key].placement != Some(got) {
            self.give_way(key, now); // a pull from an earlier owner
            self.supersede(key, got, now);
        }
        self.counters.announcements += 1;
        self.touch(key, now);
        self.unwish(key);
        let session = &mut self.sessions[key];
        session.rewind = news.epoch.rewind;
        let same = session.copy.as_mut().is_some_and(|copy| {
            let complete = copy.len() == news.committed && copy.identity == news.identity;
            complete && copy.hold != Hold::Lent && copy.digest(news.committed) == news.digest
        });
        if !same || session.doomed {
            let seq = session.seq;
            session.wish = Some(Box::new(Wish {
                from,
                epoch: news.epoch,
                committed: news.committed,
                seq,
                failed: 0,
                after: None,
            }));
            self.wishes.insert((seq, key));
        }
        self.refresh(key);
        while self.wishes.len() > self.config.remembered
            && let Some((_, oldest)) = self.wishes.first().copied()
        {
            self.counters.syncs_dropped += 1;
            self.unwish(oldest);
            self.refresh(oldest);
        }
        self.pump(now);
        Ok(())
    }

    /// The backup has refused what this worker announced as an owner.
    pub fn announce_refused(&mut self, session: &SessionId, epoch: Epoch, why: Reason, now: Now) {
        let Some(key) = self.sessions.find(session) else { return };
        let record = &mut self.sessions[key];
        if record.placement != Some(epoch.placement) || !record.is_owner() {
            return;
        }
        record.backup = None;
        if why != Reason::StaleEpoch {
            return;
        }
        record.standing = Standing::Replica;
        self.counters.lost += 1;
        self.end_use(key, now);
        self.refresh(key);
    }

    /// Sessions announced and not pulled, and their missing tokens (the lag).
    pub fn sync_lag(&self) -> (u64, u64) {
        let missing = |(_, key): &(u64, Key)| {
            let session = &self.sessions[*key];
            let held = session.copy.as_ref().map_or(0, |c| c.len());
            let wish = session.wish.as_ref()?;
            Some(u64::from(wish.committed.saturating_sub(held)))
        };
        (self.wishes.len() as u64, self.wishes.iter().filter_map(missing).sum())
    }

    /// Tells the backup what this turn has left (SYNC-1).
    pub(super) fn announce(&mut self, key: Key) {
        let Some(session) = self.sessions.get_mut(key).filter(|s| s.is_owner()) else {
            return;
        };
        let (Some(epoch), Some(to), Some(copy)) = (session.epoch(), session.backup.clone(), &mut session.copy) else {
            return;
        };
        if !self.config.sync || to.incarnation == self.incarnation || copy.is_empty() {
            return;
        }
        let committed = copy.len();
        let announcement = Announcement {
            session: session.id.clone(),
            epoch,
            committed,
            digest: copy.digest(committed),
            identity: copy.identity.clone(),
        };
        self.counters.announced += 1;
        self.effects.push_back(Effect::Announce { to, announcement });
    }

    /// A replica is wanted now, by a router (SYNC-2); otherwise as if it had been announced.
    pub(super) fn import_replica(
        &mut self,
        id: &SessionId,
        request: &ImportRequest,
        now: Now,
    ) -> Result<ImportId, Refusal> {
        if self.draining {
            return Err(self.refusal(Reason::Draining, "this worker takes no sessions"));
        }
        let found = self.sessions.find(id);
        self.check_placement(found, Some(request.placement))?;
        if let Some(session) = found.map(|k| &self.sessions[k]) {
            if session.is_owner() && session.placement == Some(request.placement) {
                return Err(self.refusal(Reason::StaleEpoch, format!("this worker owns session {id}")));
            }
            match session.state {
                SessionState::Idle => {}
                SessionState::Syncing(_) | SessionState::Importing(..) => {
                    return Err(self.refusal(Reason::ImportRunning, format!("session {id}")));
                }
                SessionState::Admitted(_) | SessionState::Waiting(_) | SessionState::Running(_) => {
                    return Err(self.refusal(Reason::SessionBusy, format!("session {id} has a turn here")));
                }
            }
        }
        let key = self.sessions.find_or_insert(id, now);
        self.touch(key, now);
        Ok(self.begin_import(key, request, Purpose::Sync(0), now))
    }

    /// Starts replica pulls: the most recently active sessions first, a bounded number, none while a seed, a reseed or a
    /// move comes in (SYNC-3).
    pub(super) fn pump(&mut self, now: Now) {
        if self.wishes.is_empty() || self.draining {
            return;
        }
        let serving = self.imports.values().any(|i| !matches!(i.purpose, Purpose::Sync(_)));
        if serving {
            return;
        }
        while self.imports.len() < self.config.sync_imports {
            let ready = |(_, key): &&(u64, Key)| {
                let session = &self.sessions[*key];
                let due = |w: &Wish| w.after.is_none_or(|at| at <= now);
                session.state == SessionState::Idle && session.wish.as_deref().is_some_and(due)
            };
            let Some(key) = self.wishes.iter().rev().find(ready).map(|(_, key)| *key) else {
                return;
            };
            let Some(wish) = self.sessions[key].wish.as_deref() else {
                return;
            };
            let request = ImportRequest {
                reservation: None,
                placement: wish.epoch.placement,
                source: Source::Replica,
                peer: wish.from.peer.clone(),
                incarnation: wish.from.incarnation,
                deadline_ms: u32::try_from(self.config.sync_deadline.as_millis()).unwrap_or(u32::MAX),
            };
            self.counters.syncs += 1;
            let number = wish.seq;
            self.begin_import(key, &request, Purpose::Sync(number), now);
        }
    }

    /// Something that replica pulls gave way to is over: the next poll looks at them.
    pub(super) fn wake_for_wishes(&mut self) {
        if !self.wishes.is_empty() {
            self.effects.push_back(Effect::Wake);
        }
    }

    /// Whatever wants the session goes before its replica's pull (SYNC-3).
    pub(super) fn give_way(&mut self, key: Key, now: Now) {
        if let Some(SessionState::Syncing(import)) = self.sessions.get(key).map(|s| s.state) {
            let why = Refusal::new(Reason::Cancelled, "the session is in use");
            self.drop_import(import, why, now);
        }
    }

    /// The engine needs the room (SYNC-3).
    pub(super) fn give_up_syncs(&mut self, now: Now) {
        let mut syncs: Vec<_> = self
            .imports
            .iter()
            .filter(|(_, i)| matches!(i.purpose, Purpose::Sync(_)))
            .map(|(id, _)| *id)
            .collect();
        syncs.sort_unstable();
        for id in syncs {
            let why = Refusal::new(Reason::NoDCapacity, "the engine needs the room");
            self.drop_import(id, why, now);
        }
    }

    /// The pages just committed are those of an owner at this epoch.
    pub(super) fn follows(&mut self, key: Key, epoch: Epoch) {
        let session = &mut self.sessions[key];
        if session.placement.is_some_and(|held| held.n > epoch.placement.n) {
            return;
        }
        if session.placement != Some(epoch.placement) || session.standing == Standing::Owner {
            session.standing = Standing::Replica;
            session.backup = None;
        }
        // Within a placement what was announced meanwhile may be later.
        let known = session.rewind.max(epoch.rewind);
        let same = session.placement == Some(epoch.placement);
        session.rewind = if same { known } else { epoch.rewind };
        session.placement = Some(epoch.placement);
    }

    /// A replica's pull has committed: what was announced when it began is done with, whatever the owner held by then.
    pub(super) fn synced(&mut self, key: Key, number: u64, now: Now) {
        let wish = self.sessions.get(key).and_then(|s| s.wish.as_deref());
        if wish.is_some_and(|w| w.seq == number) {
            self.unwish(key);
            self.refresh(key);
        }
        self.pump(now);
    }

    /// A replica's pull has failed: tried again a few times, later, unless its source is no longer one.
    pub(super) fn sync_failed(&mut self, key: Key, number: u64, why: Reason, now: Now) {
        self.counters.syncs_failed += 1;
        let gave_way = why == Reason::Cancelled;
        let passing = matches!(
            why,
            Reason::PeerUnreachable
                | Reason::DeadlineExceeded
                | Reason::LeaseRevoked
                | Reason::LeaseUnknown
                | Reason::TransferFailed
                | Reason::ChecksumMismatch
        );
        let wish = self.sessions.get_mut(key).and_then(|s| s.wish.as_deref_mut());
        let Some(wish) = wish.filter(|w| w.seq == number) else {
            return;
        };
        if gave_way {
            return;
        }
        wish.failed += 1;
        if passing && wish.failed < TRIES {
            let at = now + PAUSE;
            wish.after = Some(at);
            self.timers.insert((at, Timer::Sync));
        } else {
            self.counters.syncs_dropped += 1;
            self.unwish(key);
            self.refresh(key);
        }
    }

    /// Nothing of this session is to be pulled any more.
    pub(super) fn unwish(&mut self, key: Key) {
        if let Some(wish) = self.sessions.get_mut(key).and_then(|s| s.wish.take()) {
            self.wishes.remove(&(wish.seq, key));
        }
    }
}
