//! Engine side: room. What the engine may take, who gives it up, and the two ways a session loses everything.

use crate::{
    id::{PrefixHandle, SessionId, TurnId},
    session::{Hold, Phase, SessionState, evict::Class},
    time::Now,
    wire::reason::{Reason, Refusal},
};

use super::{Effect, Frees, Timer, Victim, Worker};

impl Worker {
    /// Own tokens of copies that nobody runs on, unclaimed tails included: all of it can be had from
    /// [`Worker::victim`].
    pub fn evictable(&self) -> u32 {
        self.evictable
    }

    /// Tokens in pages that are neither free, nor evictable, nor a running turn's: landing, retired, quarantined, and
    /// the older copy that an import extends.
    pub fn held(&self) -> u32 {
        self.pinned + self.landing + self.quarantine.pages() * self.config.page_tokens
    }

    /// Prefixes to guard while the engine's tree evicts: those of copies that nothing locks.
    pub fn idle_prefixes(&self) -> impl Iterator<Item = PrefixHandle> {
        let copies = self
            .order
            .resident()
            .filter_map(|(_, key)| self.sessions.get(key)?.copy.as_ref());
        // A dead import's older copy is pinned until the next poll.
        let importing = self
            .imports
            .values()
            .map(|i| i.session)
            .chain(self.dropped.iter().map(|d| d.session));
        let pinned = importing.filter_map(|key| self.sessions.get(key)?.copy.as_ref());
        copies
            .filter(|c| c.hold == Hold::Free)
            .chain(pinned.filter(|c| c.hold == Hold::Landing))
            .map(|c| c.prefix)
            .filter(|p| *p != PrefixHandle::ROOT)
    }

    /// The next copy to give up: closed ones, idle ones by last use, leased ones (SES-3: the lease is revoked and fenced
    /// first), those whose turn waits, unclaimed tails. `None` when nothing is left; `evictable` is 0 then, and what
    /// replicas' pulls have landed comes back with the next poll (SYNC-3).
    pub fn victim(&mut self, now: Now) -> Option<Victim> {
        let Some((class, key)) = self.order.first() else {
            self.give_up_syncs(now);
            return None;
        };
        let mut frees = Frees::default();
        let session = &self.sessions[key];
        let (name, before) = (session.id.clone(), session.marks.evictable);
        let claimed = session.copy.as_ref().and_then(|c| match c.hold {
            Hold::Claimed(n) => Some(n),
            Hold::Free | Hold::Lent | Hold::Landing => None,
        });
        match claimed {
            Some(n) => {
                let turn = session.turn();
                if let Some(t) = turn.and_then(|id| self.turns.get_mut(&id)) {
                    t.keep_prompt(self.sessions[key].copy.as_ref());
                }
                self.cut_copy(key, n, turn, &mut frees);
            }
            None => {
                self.counters.evictions += 1;
                self.drop_copy(key, &mut frees);
            }
        }
        self.counters.evicted_tokens += u64::from(before);
        if class == Class::Doomed {
            self.forget_closed(key);
        }
        Some(Victim {
            session: name,
            tokens: before,
            frees,
        })
    }

    /// SES-3, last resort: nothing runs and this waiting turn does not fit: its own copy goes.
    pub fn unwedge(&mut self, turn: TurnId, _now: Now) -> Frees {
        let mut frees = Frees::default();
        let Some(t) = self.turns.get(&turn) else { return frees };
        let key = t.session;
        let free = self.sessions[key].copy.as_ref().is_some_and(|c| c.hold == Hold::Free);
        if t.phase == Phase::Waiting && free {
            self.counters.unwedged += 1;
            self.drop_copy(key, &mut frees);
        }
        frees
    }

    /// The engine has cleared its pool and its tree: all KV and every handle is forgotten, names stay (SES-1). Leases
    /// are revoked and fenced, imports fenced and over. Never refused.
    pub fn flush(&mut self, now: Now) {
        self.counters.flushes += 1;
        let leases: Vec<_> = self.leases.iter().map(|(id, _)| id).collect();
        for id in leases {
            self.revoke(id);
        }
        self.abandon_imports(now);
        self.dropped.clear();
        self.forgotten.clear();
        self.quarantine.clear();
        self.landing = 0;
        for key in self.sessions.keys() {
            self.landed_is_gone(key);
            let session = &mut self.sessions[key];
            let turn = session.turn();
            let running = matches!(session.state, SessionState::Running(_));
            let copy = session.copy.take();
            if let Some(copy) = copy.as_ref().filter(|_| !running) {
                self.ledger.freed(session.marks.reclaimable);
                session.boundary = Some(copy.shared);
            }
            let closed = std::mem::take(&mut session.doomed);
            if let Some(t) = turn.and_then(|id| self.turns.get_mut(&id)).filter(|_| !running) {
                session.doomed = closed;
                t.keep_prompt(copy.as_ref());
                (t.common, t.claims) = (0, 0);
            } else if let Some(id) = turn {
                // A running turn's pages are gone with the pool: whatever the engine still says about it is ignored.
                session.state = SessionState::Idle;
                if let Some(t) = self.turns.remove(&id) {
                    self.end_reservation(t.reservation);
                }
            }
            self.refresh(key);
            if closed {
                self.forget_bare(key);
            }
        }
    }

    /// The session is over. True when a turn still needs it: it is freed when that ends (SES-2); else by the next poll.
    pub fn close(&mut self, session: &SessionId, now: Now) -> bool {
        let Some(key) = self.sessions.find(session) else {
            return false;
        };
        match self.sessions[key].state {
            SessionState::Waiting(_) | SessionState::Running(_) => {
                self.sessions[key].doomed = true;
                self.refresh(key);
                return true;
            }
            SessionState::Admitted(id) | SessionState::Importing(_, id) => self.give_up(id, Reason::Cancelled, now),
            SessionState::Syncing(_) => self.give_way(key, now),
            SessionState::Idle => {}
        }
        self.unwish(key);
        let Some(session) = self.sessions.get_mut(key) else {
            return false;
        };
        let committing = matches!(session.state, SessionState::Importing(..) | SessionState::Syncing(_));
        session.doomed = session.copy.is_some() || committing;
        if session.doomed {
            self.effects.push_back(Effect::Wake);
        }
        self.refresh(key);
        self.forget_bare(key);
        false
    }

    fn forget_bare(&mut self, key: crate::session::Key) {
        if self.sessions.get(key).is_some_and(|s| s.is_bare()) {
            self.forget(key);
        }
    }

    fn abandon_imports(&mut self, now: Now) {
        let mut ids: Vec<_> = self.imports.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            let why = Refusal::new(Reason::Cancelled, "the engine was flushed");
            if !self.drop_import(id, why.clone(), now)
                && let Some(import) = self.imports.remove(&id)
            {
                self.timers.remove(&(import.deadline, Timer::Import(id)));
                self.effects.push_back(Effect::ImportDone {
                    import: id,
                    outcome: Err(why),
                });
                self.import_over(import.session, id, import.purpose, now);
            }
        }
        self.ready.clear();
    }
}
