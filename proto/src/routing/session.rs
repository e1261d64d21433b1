//! What the router remembers per session, under one global bound (ROUTE-8, F18), and where placement numbers come
//! from (SES-4). Used by [`super::Dispatch`].

use std::collections::HashMap;

use super::{
    resident::higher,
    view::{At, View, WorkerIndex},
};
use crate::{
    id::{Incarnation, Placement, SessionId, StoreId},
    time::Now,
};

/// Gives out placement numbers, each once (SES-4). The memory store is for one router; several routers share one
/// (compare-and-set) behind the same trait.
pub trait SessionStore: Send {
    /// The next number, above `above` whichever store that came from.
    fn take(&mut self, session: &SessionId, above: Option<Placement>) -> Placement;
}

/// Placement numbers of one router process. A restarted router is another store: it learns what workers hold from
/// their answers and goes above it.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    store: StoreId,
    last: u64,
}

impl MemoryStore {
    /// A store of that (random) name.
    pub fn new(store: StoreId) -> MemoryStore {
        MemoryStore { store, last: 0 }
    }
}

impl SessionStore for MemoryStore {
    fn take(&mut self, _: &SessionId, above: Option<Placement>) -> Placement {
        self.last = self.last.max(above.map_or(0, |p| p.n)).saturating_add(1);
        Placement {
            n: self.last,
            store: self.store,
        }
    }
}

/// One session as the router knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Completed turns, as far as known.
    pub turns: u32,
    /// Worker of the last success.
    pub pin: Option<At>,
    /// The placement it lives under.
    pub placement: Option<Placement>,
    /// The prefill worker that keeps its replica: the one that computed it last, or the backup named since (SYNC-1).
    pub replica: Option<At>,
    /// MIG-1: a move that is out. No other placement is made before its target was asked or waited out.
    pub pending: Option<Pending>,
    /// Where a turn was last run under a number of its own, until that is known to be where the session lives.
    pub granted: Option<(At, Placement)>,
    /// A dispatch offers a number of its own: no move may begin (MIG-3).
    pub placing: bool,
    /// The highest number that any worker may have been offered; what is taken next lies above it.
    offered: Option<Placement>,
    entries: Vec<Entry>,
}

/// A number that was offered to the target of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending {
    /// The target's process, as the router counts.
    pub target: At,
    /// The same, as it calls itself.
    pub incarnation: Incarnation,
    /// The number.
    pub placement: Placement,
    /// When the move began.
    pub since: Now,
    /// When an answer of the target was lost: what it was granted before that counts, later grants it discards within
    /// the hand-over deadline (MIG-2).
    pub lost: Option<Now>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    at: At,
    resident: u32,
    rejects: u32,
}

impl Record {
    /// Something is known of the session, from a turn or from a worker's answer.
    pub fn is_known(&self) -> bool {
        self.turns > 0 || self.pin.is_some() || self.placement.is_some() || !self.entries.is_empty()
    }

    /// Tokens of the session that this process is believed to hold.
    pub fn resident(&self, at: At) -> u32 {
        self.entry(at).map_or(0, |e| e.resident)
    }

    /// Counted rejects of this process since the last success.
    pub fn rejects(&self, at: At) -> u32 {
        self.entry(at).map_or(0, |e| e.rejects)
    }

    /// A counted reject.
    pub fn reject(&mut self, at: At) {
        let entry = self.entry_mut(at);
        entry.rejects = entry.rejects.saturating_add(1);
    }

    /// DISP-1: a turn has completed there.
    pub fn clear_rejects(&mut self, at: At) {
        if let Some(e) = self.entries.iter_mut().find(|e| e.at == at) {
            e.rejects = 0;
        }
    }

    /// DISP-7: a direct turn has completed.
    pub fn clear_all_rejects(&mut self) {
        self.entries.iter_mut().for_each(|e| e.rejects = 0);
    }

    /// ROUTE-8: the worker says what it holds; the estimate is never above.
    pub fn cut(&mut self, at: At, tokens: u32) {
        if let Some(e) = self.entries.iter_mut().find(|e| e.at == at) {
            e.resident = e.resident.min(tokens);
        }
    }

    /// The worker holds that much, as it has said itself.
    pub fn holds(&mut self, at: At, tokens: u32) {
        self.entry_mut(at).resident = tokens;
    }

    /// ROUTE-8: a turn completed there and left `tokens`. What others hold beyond that belongs to a history that was
    /// rewritten (OWN-7): without this cut a stale longer copy would draw the session away from its pin (INV-3).
    pub fn grew(&mut self, at: At, tokens: u32) {
        self.entry_mut(at).resident = tokens;
        for e in &mut self.entries {
            e.resident = e.resident.min(tokens);
        }
    }

    /// Processes believed to hold KV of the session: who runs it, who keeps its replica, then others by size. Some of
    /// them may be gone.
    pub fn holders(&self) -> Vec<At> {
        let mut others: Vec<&Entry> = self.entries.iter().filter(|e| e.resident > 0).collect();
        others.sort_by_key(|e| std::cmp::Reverse(e.resident));
        let mut holders: Vec<At> = Vec::new();
        for at in [self.pin, self.replica]
            .into_iter()
            .flatten()
            .chain(others.iter().map(|e| e.at))
        {
            if !holders.contains(&at) {
                holders.push(at);
            }
        }
        holders
    }

    /// Another process than `worker`'s has been given the session under a later number than `held`.
    pub fn left(&self, worker: WorkerIndex, held: Option<Placement>, view: &View) -> Option<Placement> {
        let places = [self.pin.zip(self.placement), self.granted];
        let later = |p: Placement| held.is_none_or(|held| held.n < p.n);
        let lives = |at: At| at.worker != worker && view.is_present(at) && view.worker(at.worker).answers();
        let found = places.into_iter().flatten().find(|(at, p)| lives(*at) && later(*p));
        found.map(|(_, p)| p)
    }

    /// SES-4: what is taken next lies above this.
    pub fn above(&self) -> Option<Placement> {
        higher(self.placement, self.offered)
    }

    /// A worker may have been granted that number, or has heard of it.
    pub fn was_offered(&mut self, placement: Placement) {
        self.offered = higher(self.offered, Some(placement));
    }

    /// The move under that number is decided, or out of reach for good (MIG-2).
    pub fn settle(&mut self, placement: Placement) {
        if self.pending.is_some_and(|p| p.placement == placement) {
            self.pending = None;
        }
        self.was_offered(placement);
    }

    /// MIG-1: `at` owns the session under `placement`, and holds about `tokens`. Older news than what is known changes
    /// nothing. Who has taken it over had room: its rejects are cleared, else it would not be asked (ROUTE-1).
    pub fn lives_at(&mut self, at: At, placement: Placement, tokens: u32) {
        if self.placement.is_none_or(|held| held.n <= placement.n) {
            if self.pin != Some(at) {
                self.clear_rejects(at);
            }
            self.placement = Some(placement);
            self.pin = Some(at);
            self.holds(at, tokens);
        }
        if self.pending.is_some_and(|p| p.placement.n <= placement.n) {
            self.pending = None;
        }
        self.was_offered(placement);
    }

    fn entry(&self, at: At) -> Option<&Entry> {
        self.entries.iter().find(|e| e.at == at)
    }

    fn entry_mut(&mut self, at: At) -> &mut Entry {
        let found = self.entries.iter().position(|e| e.at.worker == at.worker);
        let fresh = Entry {
            at,
            resident: 0,
            rejects: 0,
        };
        match found {
            Some(i) => {
                if self.entries[i].at != at {
                    self.entries[i] = fresh;
                }
                &mut self.entries[i]
            }
            None => {
                self.entries.push(fresh);
                let last = self.entries.len() - 1;
                &mut self.entries[last]
            }
        }
    }
}

/// The records: at most `bound` of idle sessions, the least recently used go first; a session with a running dispatch
/// or move stays.
#[derive(Clone, Debug)]
pub struct Sessions {
    bound: usize,
    index: HashMap<SessionId, u32>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Idle sessions, most recently used first.
    newest: u32,
    oldest: u32,
    busy: usize,
    evicted: u64,
}

#[derive(Clone, Debug)]
struct Slot {
    session: SessionId,
    record: Record,
    /// A dispatch has it.
    busy: bool,
    /// A move has it.
    moving: bool,
    newer: u32,
    older: u32,
}

const NONE: u32 = u32::MAX;

impl Sessions {
    /// A table of at most `bound` idle sessions, at least one.
    pub fn new(bound: usize) -> Sessions {
        Sessions {
            bound: bound.max(1),
            index: HashMap::new(),
            slots: Vec::new(),
            free: Vec::new(),
            newest: NONE,
            oldest: NONE,
            busy: 0,
            evicted: 0,
        }
    }

    /// Sessions remembered.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// None is remembered.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Sessions with a running dispatch.
    pub fn busy(&self) -> usize {
        self.busy
    }

    /// Records forgotten for the bound so far.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// The session's record.
    pub fn peek(&self, session: &SessionId) -> Option<&Record> {
        self.index.get(session).map(|&i| &self.slots[i as usize].record)
    }

    /// The session's record, for a dispatch that has opened it.
    pub fn record_mut(&mut self, session: &SessionId) -> Option<&mut Record> {
        let i = *self.index.get(session)?;
        Some(&mut self.slots[i as usize].record)
    }

    /// ADM-8: takes the session for one dispatch; false if another has it.
    pub fn open(&mut self, session: &SessionId) -> bool {
        let i = self.keep(session);
        let slot = &mut self.slots[i as usize];
        if std::mem::replace(&mut slot.busy, true) {
            return false;
        }
        self.busy += 1;
        self.evict();
        true
    }

    /// The dispatch that opened the session is over.
    pub fn close(&mut self, session: &SessionId) {
        let Some(&i) = self.index.get(session) else { return };
        if std::mem::replace(&mut self.slots[i as usize].busy, false) {
            self.busy -= 1;
            self.let_go(i);
        }
    }

    /// Takes the session for one move, beside a dispatch that may run; false if another move has it.
    pub fn begin_move(&mut self, session: &SessionId) -> bool {
        let i = self.keep(session);
        let slot = &mut self.slots[i as usize];
        if std::mem::replace(&mut slot.moving, true) {
            return false;
        }
        self.evict();
        true
    }

    /// The move that took the session is over.
    pub fn end_move(&mut self, session: &SessionId) {
        let Some(&i) = self.index.get(session) else { return };
        if std::mem::replace(&mut self.slots[i as usize].moving, false) {
            self.let_go(i);
        }
    }

    /// Moves that are out.
    pub fn pending(&self) -> impl Iterator<Item = (&SessionId, &Pending)> {
        let slots = self.index.values().map(|&i| &self.slots[i as usize]);
        slots.filter_map(|s| Some((&s.session, s.record.pending.as_ref()?)))
    }

    /// The session's slot, not among the idle ones.
    fn keep(&mut self, session: &SessionId) -> u32 {
        if let Some(&i) = self.index.get(session) {
            let slot = &self.slots[i as usize];
            if !slot.busy && !slot.moving {
                self.unlink(i);
            }
            return i;
        }
        let slot = Slot {
            session: session.clone(),
            record: Record::default(),
            busy: false,
            moving: false,
            newer: NONE,
            older: NONE,
        };
        let i = match self.free.pop() {
            Some(i) => {
                self.slots[i as usize] = slot;
                i
            }
            None => {
                self.slots.push(slot);
                (self.slots.len() - 1) as u32
            }
        };
        self.index.insert(session.clone(), i);
        i
    }

    fn let_go(&mut self, i: u32) {
        let slot = &self.slots[i as usize];
        if !slot.busy && !slot.moving {
            self.link(i);
        }
        self.evict();
    }

    /// Idle sessions at `at`'s worker that are pinned to that process.
    pub fn pinned(&self, view: &View) -> Vec<u64> {
        let mut counts = vec![0; view.len()];
        for &i in self.index.values() {
            if let Some(at) = self.slots[i as usize].record.pin.filter(|&at| view.is_present(at)) {
                counts[usize::from(at.worker.0)] += 1;
            }
        }
        counts
    }

    /// The bound is global: busy sessions count too, but only idle ones can go.
    fn evict(&mut self) {
        while self.index.len() > self.bound && self.oldest != NONE {
            let i = self.oldest;
            self.unlink(i);
            let slot = &mut self.slots[i as usize];
            self.index.remove(&slot.session);
            slot.record = Record::default();
            self.free.push(i);
            self.evicted += 1;
        }
    }

    fn link(&mut self, i: u32) {
        let newest = self.newest;
        let slot = &mut self.slots[i as usize];
        (slot.newer, slot.older) = (NONE, newest);
        match newest {
            NONE => self.oldest = i,
            n => self.slots[n as usize].newer = i,
        }
        self.newest = i;
    }

    fn unlink(&mut self, i: u32) {
        let (newer, older) = (self.slots[i as usize].newer, self.slots[i as usize].older);
        match newer {
            NONE => self.newest = older,
            n => self.slots[n as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            n => self.slots[n as usize].newer = newer,
        }
        let slot = &mut self.slots[i as usize];
        (slot.newer, slot.older) = (NONE, NONE);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(n: u32) -> SessionId {
        SessionId::new(&format!("s{n}")).expect("plain")
    }

    fn at(worker: u16, generation: u32) -> At {
        At {
            worker: WorkerIndex(worker),
            generation,
        }
    }

    proptest! {
        /// ROUTE-8, F18: against a list that is scanned.
        #[test]
        fn the_table_is_a_bounded_lru(bound in 1usize..5, ops in prop::collection::vec((0u32..8, any::<bool>()), 0..80)) {
            let mut table = Sessions::new(bound);
            let (mut idle, mut busy): (Vec<u32>, Vec<u32>) = (vec![], vec![]);
            for (n, open) in ops {
                if open {
                    prop_assert_eq!(table.open(&id(n)), !busy.contains(&n));
                    if !busy.contains(&n) {
                        idle.retain(|&m| m != n);
                        busy.push(n);
                    }
                } else {
                    table.close(&id(n));
                    if busy.contains(&n) {
                        busy.retain(|&m| m != n);
                        idle.push(n);
                    }
                }
                while idle.len() + busy.len() > bound && !idle.is_empty() {
                    idle.remove(0);
                }
                prop_assert_eq!(table.len(), idle.len() + busy.len());
                prop_assert_eq!(table.busy(), busy.len());
                for m in 0..8 {
                    prop_assert_eq!(table.peek(&id(m)).is_some(), idle.contains(&m) || busy.contains(&m));
                }
                prop_assert!(table.slots.len() <= bound + busy.len() + 1 || table.slots.len() <= 8);
            }
        }
    }

    #[test]
    fn diverse_sessions_do_not_grow_the_table() {
        // ROUTE-8, F18
        let mut table = Sessions::new(100);
        for n in 0..10_000 {
            assert!(table.open(&id(n)));
            table.close(&id(n));
        }
        assert_eq!((table.len(), table.evicted()), (100, 9_900));
        assert!(table.slots.len() <= 101);
    }

    #[test]
    fn estimates_grow_on_completion_and_are_cut_by_answers() {
        // ROUTE-8
        let mut r = Record::default();
        r.grew(at(0, 0), 500);
        r.cut(at(0, 0), 900);
        assert_eq!(r.resident(at(0, 0)), 500);
        r.cut(at(0, 0), 100);
        assert_eq!(r.resident(at(0, 0)), 100);
        r.holds(at(1, 0), 300);
        r.grew(at(0, 0), 200);
        assert_eq!(
            r.resident(at(1, 0)),
            200,
            "a rewritten history is nowhere longer than at its holder"
        );
        assert_eq!(r.resident(at(1, 1)), 0, "another process");
    }

    #[test]
    fn a_number_is_given_out_once_and_above_a_foreign_one() {
        // SES-4
        let mut store = MemoryStore::new(StoreId(1));
        let foreign = Placement {
            n: 40,
            store: StoreId(2),
        };
        let mut take = |above| store.take(&id(0), above).n;
        assert_eq!(
            [take(None), take(Some(foreign)), take(None), take(Some(foreign))],
            [1, 41, 42, 43]
        );
    }
}
