//! What must hold around the test engine after every step, and at the end.

use super::*;

impl Engine {
    pub fn check(&self) {
        let running: u32 = self
            .runs
            .iter()
            .map(|r| match r.running {
                true => block::ceil(r.row.len() as u32, self.page) - r.protected,
                false => block::ceil(r.claimed, self.page).saturating_sub(r.protected),
            })
            .sum();
        let sum = self.free.len() as u32 * self.page
            + self.tree_tokens(true)
            + self.tree_tokens(false)
            + self.w.evictable()
            + self.w.held()
            + running;
        assert_eq!(
            sum,
            self.capacity,
            "free {} tree {}+{} evictable {} held {} running {running}",
            self.free.len() as u32 * self.page,
            self.tree_tokens(true),
            self.tree_tokens(false),
            self.w.evictable(),
            self.w.held()
        );
        for (lease, reader) in &self.readers {
            for (slot, value) in &reader.seen {
                assert_eq!(
                    self.kv[*slot as usize], *value,
                    "slot {slot} changed under {lease:?} (OWN-5)"
                );
            }
        }
        for (page, state) in self.w.page_states() {
            assert!(!self.free.contains(&page), "page {page} is free and {state:?} (OWN-4)");
            assert!(
                !self.tree.values().any(|n| n.page == page),
                "page {page} is the tree's and {state:?} (OWN-4)"
            );
        }
        for session in self.w.sessions.after(None) {
            let Some(copy) = &session.copy else { continue };
            let slots = copy.table.slots(0, copy.readable);
            assert_eq!(slots.len() as u32, copy.readable);
            for (at, (slot, value)) in slots.iter().zip(kv(&copy.identity, &copy.tokens)).enumerate() {
                assert_eq!(
                    self.kv[*slot as usize], value,
                    "byte {at} of session {} (OWN-5)",
                    session.id
                );
            }
        }
        self.w.check_sums();
    }

    /// Everything over, everything closed: nothing is left anywhere.
    pub fn quiesce(&mut self) {
        for lease in self.readers.keys().copied().collect::<Vec<_>>() {
            self.w.end_lease(lease, self.now);
            self.effects();
        }
        while let Some(run) = self.runs.first() {
            let id = run.id;
            if run.running {
                self.roll_back(id, Rollback::Abort)
            } else {
                self.cancel(id)
            }
            self.check();
        }
        for import in self.pulls.iter().map(|p| p.import).collect::<Vec<_>>() {
            self.w
                .cancel_import(import, Refusal::new(Reason::Cancelled, "over"), self.now);
            self.effects();
        }
        let names: Vec<_> = self
            .w
            .sessions(None, 1000, self.now)
            .sessions
            .into_iter()
            .map(|s| s.session_id)
            .collect();
        for name in names {
            assert!(!self.w.close(&name, self.now), "SES-2: nothing runs");
            self.effects();
        }
        for _ in 0..3 {
            self.poll();
            self.check();
        }
        assert_eq!((self.w.evictable(), self.w.held()), (0, 0));
        assert_eq!(
            self.w.load(None).used,
            u64::from(self.tree_tokens(true)),
            "nothing is charged"
        );
        assert_eq!(self.w.sessions(None, 10, self.now).sessions, vec![]);
        assert_eq!(self.handles.len(), 0, "every handle comes back");
        assert!(self.make_room(self.capacity / self.page), "every page comes back");
    }
}
