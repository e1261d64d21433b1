//! Service side: looking. Nothing here changes anything.

use std::collections::BTreeMap;

use crate::{
    block::{self, PageState},
    id::{RouterId, SessionId},
    session::{Hold, Phase, Session, Started},
    time::Now,
    wire::{
        admit::LoadReport,
        info::{ImportView, LeaseView, SessionList, SessionView, TransferList},
    },
};

use super::Worker;

impl Worker {
    /// How busy the worker is (ADM-10); with the highest request number seen from `router`.
    pub fn load(&self, router: Option<RouterId>) -> LoadReport {
        LoadReport {
            used: self.ledger.used(),
            capacity: self.ledger.capacity(),
            running: self.load.running,
            waiting: self.load.waiting,
            pending_prefill_tokens: self.load.pending_prefill_tokens,
            highest_request: router.map_or(0, |r| self.reservations.highest(r)),
        }
    }

    /// Whether new work is refused (ADM-12).
    pub fn draining(&self) -> bool {
        self.draining
    }

    /// Sessions known, live leases and running imports.
    pub fn counts(&self) -> (usize, usize, usize) {
        (self.sessions.len(), self.leases.len(), self.imports.len())
    }

    /// Tokens of history held for the session; 0 if it has no KV here.
    pub fn history_len(&self, session: &SessionId) -> u32 {
        self.sessions.by_id(session).map_or(0, Session::resident)
    }

    /// One session.
    pub fn session(&self, session: &SessionId, now: Now) -> Option<SessionView> {
        self.sessions.by_id(session).map(|s| self.view(s, now))
    }

    /// At most `limit` sessions after `after`, in the order of their names.
    pub fn sessions(&self, after: Option<&SessionId>, limit: usize, now: Now) -> SessionList {
        let sessions = self
            .sessions
            .after(after)
            .take(limit)
            .map(|s| self.view(s, now))
            .collect();
        SessionList {
            sessions,
            total: self.sessions.len() as u64,
        }
    }

    /// Running imports and live leases.
    pub fn transfers(&self, now: Now) -> TransferList {
        let mut imports: Vec<_> = self
            .imports
            .iter()
            .map(|(id, import)| ImportView {
                import: *id,
                session_id: self.sessions[import.session].id.clone(),
                peer: import.peer.clone(),
                kind: import.purpose.name().into(),
                phase: import.phase.name().into(),
                pulled_tokens: import.phase.landing().map_or(0, |l| l.pulled),
                total_tokens: match (import.phase.landing(), import.phase.offer()) {
                    (Some(landing), _) => landing.total(),
                    (None, offer) => offer.map_or(0, |o| o.len()),
                },
            })
            .collect();
        imports.sort_unstable_by_key(|i| i.import);
        let leases = self.leases.iter().map(|(lease, held)| LeaseView {
            lease,
            session_id: self.sessions[held.session].id.clone(),
            from: 0,
            readable: self.readable_under(held),
            expires_ms: u64::try_from(held.expires.since(now).as_millis()).unwrap_or(u64::MAX),
        });
        let (sync_pending, sync_lag_tokens) = self.sync_lag();
        TransferList {
            imports,
            leases: leases.collect(),
            sync_pending,
            sync_lag_tokens,
        }
    }

    /// What each page that the module owns is doing, by page number (OWN-4). Proportional to the pool; for checks.
    /// Pages that a running turn has and the module does not know yet are not in it.
    pub fn page_states(&self) -> BTreeMap<u32, PageState> {
        let page = self.config.page_tokens;
        let mut states = BTreeMap::new();
        for session in self.sessions.after(None) {
            let Some(copy) = &session.copy else { continue };
            let turn = session.turn().and_then(|id| self.turns.get(&id));
            if turn.is_some_and(|t| t.phase == Phase::Running(Started::Tree { adopted: false })) {
                continue;
            }
            let claimed = match copy.hold {
                Hold::Claimed(n) => block::pages(n, page),
                Hold::Free | Hold::Lent | Hold::Landing => 0,
            };
            for (index, number) in (0u32..).zip(copy.table.pages()).skip((copy.shared / page) as usize) {
                let read = |l: &crate::transfer::Lease| self.readable_under(l) > index * page;
                let state = match copy.hold {
                    _ if session.leases.iter().any(|id| self.leases.get(*id).is_ok_and(read)) => PageState::Reading,
                    Hold::Lent => PageState::Lent,
                    Hold::Landing => PageState::Landing,
                    Hold::Claimed(_) if index < claimed => PageState::Lent,
                    Hold::Claimed(_) | Hold::Free => PageState::Held,
                };
                states.insert(*number, state);
            }
        }
        for landing in self.imports.values().filter_map(|i| i.phase.landing()) {
            states.extend(landing.pages.pages().iter().map(|p| (*p, PageState::Landing)));
        }
        let dropped = self
            .dropped
            .iter()
            .filter_map(|d| d.landing.as_ref())
            .flat_map(|(slots, _)| slots.iter().copied());
        states.extend(
            self.quarantine
                .slots()
                .chain(dropped)
                .map(|s| (s / page, PageState::Quarantined)),
        );
        states
    }

    /// Every incremental sum against its naive recomputation (ADM-7).
    #[cfg(test)]
    pub(super) fn check_sums(&self) {
        let page = self.config.page_tokens;
        let (mut evictable, mut pinned, mut reclaimable) = (0, 0, 0u64);
        for key in self.sessions.keys() {
            let session = &self.sessions[key];
            reclaimable += u64::from(session.marks.reclaimable);
            let Some(copy) = &session.copy else { continue };
            let own = copy.table.len() * page - copy.shared.min(copy.table.len() * page);
            match copy.hold {
                Hold::Free => evictable += own,
                Hold::Claimed(n) => evictable += own - (block::ceil(n, page).saturating_sub(copy.shared)).min(own),
                Hold::Landing => pinned += own,
                Hold::Lent => {}
            }
            let idle = session.is_idle() && session.leases.is_empty();
            let counts = self.config.evict_idle && idle && copy.hold == Hold::Free && session.changed < self.polls;
            assert_eq!(
                session.marks.reclaimable,
                if counts { own } else { 0 },
                "{}",
                session.id
            );
            assert_eq!(
                session.marks.rank,
                crate::session::evict::rank(session, session.marks.evictable > 0)
            );
        }
        let landing: u32 = self
            .imports
            .values()
            .filter_map(|i| i.phase.landing())
            .map(|l| l.pages.len() * page)
            .sum();
        let dropped: usize = self
            .dropped
            .iter()
            .filter_map(|d| d.landing.as_ref())
            .map(|(s, _)| s.len())
            .sum();
        assert_eq!((evictable, pinned), (self.evictable, self.pinned));
        assert_eq!(landing + dropped as u32 * page, self.landing);
        let outstanding: u64 = self.reservations.iter().map(|(_, r)| r.charge.outstanding()).sum();
        let (_, r, o) = self.ledger.sums();
        assert_eq!((reclaimable, outstanding), (r, o));
        for (_, reservation) in self.reservations.iter() {
            assert!(
                self.sessions
                    .get(reservation.session)
                    .is_some_and(|s| s.state != crate::session::SessionState::Idle)
            );
        }
    }

    fn view(&self, session: &Session, now: Now) -> SessionView {
        let copy = session.copy.as_ref();
        let running = copy.is_some_and(|c| c.hold == Hold::Lent);
        let restored = session
            .turn()
            .and_then(|id| self.turns.get(&id))
            .map_or(0, |t| match t.phase {
                Phase::Running(Started::Session { restored }) => restored,
                Phase::Running(Started::Tree { .. }) | Phase::Waiting => 0,
            });
        SessionView {
            session_id: session.id.clone(),
            state: session.state_name().into(),
            standing: session.standing.view(),
            moved: session.moved(),
            backup: session.backup.clone(),
            committed: copy.map_or(0, |c| if running { restored } else { c.len() }),
            readable: copy.map_or(0, |c| c.readable),
            shared: copy.map_or(0, |c| c.shared),
            epoch: session.epoch(),
            leases: u32::try_from(session.leases.len()).unwrap_or(u32::MAX),
            idle_ms: u64::try_from(now.since(session.used).as_millis()).unwrap_or(u64::MAX),
        }
    }
}
