//! What must hold of one process after each of its events: the sums, the owners of pages, who owns which session; and
//! what must be left of it at the end: nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use kvc_proto::{
    id::SessionId,
    time::Now,
    wire::info::Standing,
    worker::{LeaseAnswer, LeaseKind, LeaseRequest},
};

use super::{
    engine::Request,
    kv,
    message::Held,
    oracle::Oracle,
    process::{Out, Process},
};

impl Process {
    /// MIG-4: nothing is left to hand over and nothing runs.
    pub fn drained(&self) -> bool {
        self.w.drain_state().drained && self.requests.is_empty() && self.inbox.is_empty()
    }

    /// Nothing waits, runs, lands or is read here.
    pub fn quiet(&self) -> bool {
        self.requests.is_empty() && self.inbox.is_empty() && self.imports.is_empty() && self.batch.is_none()
    }

    /// At the end of the world, every session closed and every deadline past: nothing is left.
    pub fn check_nothing_left(&mut self) {
        let used = self.w.load(None).used;
        let counts = self.w.counts();
        let engine = (self.w.evictable(), self.w.held(), self.tree.protected());
        let tables = (self.handles.len(), self.landings.len(), self.exports_left());
        let fine = self.quiet() && used == 0 && counts == (0, 0, 0) && engine == (0, 0, 0) && tables == (0, 0, 0);
        self.watch.check(fine, Oracle::Leak, || {
            format!(
                "used {used}, (sessions, leases, imports) {counts:?}, (evictable, held, locked) {engine:?}, \
                 (handles, landings, exports) {tables:?}, requests {}",
                self.requests.len()
            )
        });
        let pages = self.pool.free_pages() + self.tree.evictable();
        self.watch.check(pages == self.pool.pages, Oracle::Leak, || {
            format!("{pages} of {} pages are free", self.pool.pages)
        });
    }

    /// Sessions known, by name.
    pub fn sessions(&self) -> Vec<SessionId> {
        let list = self.w.sessions(None, usize::MAX, self.now);
        list.sessions.into_iter().map(|s| s.session_id).collect()
    }

    /// What must hold after every event of this process.
    pub(super) fn check(&mut self) {
        let page = self.pool.page;
        let rows = |r: &Request| r.row_pages(page) * page - r.protected;
        let running: u32 = self.requests.values().filter(|r| r.begun).map(rows).sum();
        let free = self.pool.free_pages() * page;
        let (evictable, held) = (self.w.evictable(), self.w.held());
        let tree = (self.tree.evictable() + self.tree.protected()) * page;
        let capacity = self.pool.pages * page;
        self.watch.check(
            free + tree + evictable + held + running == capacity,
            Oracle::Sum,
            || {
                format!(
                    "{capacity} = free {free} + tree {tree} + evictable {evictable} + held {held} + running {running}"
                )
            },
        );
        if std::mem::take(&mut self.stirred) {
            self.check_owners();
        }
        self.check_standings();
    }

    fn check_owners(&mut self) {
        let page = self.pool.page;
        let mut owner: BTreeMap<u32, &str> = BTreeMap::new();
        let mut rows: BTreeSet<u32> = BTreeSet::new();
        let watch = &mut self.watch;
        let mut own = |number: u32, who: &'static str| {
            let before = owner.insert(number, who);
            watch.check(before.is_none() && !self.pool.is_free(number), Oracle::OneOwner, || {
                format!("page {number} is {who} and {}", before.unwrap_or("free"))
            });
        };
        for (number, _) in self.tree.pages() {
            own(number, "the tree's");
        }
        for request in self.requests.values().filter(|r| r.begun) {
            let skip = (request.protected / page) as usize;
            for slot in request.row.iter().step_by(page as usize).skip(skip) {
                rows.insert(*slot as u32 / page);
                own(*slot as u32 / page, "a row's");
            }
        }
        for (number, state) in self.w.page_states() {
            use kvc_proto::block::PageState;
            // A running turn's row names its session's pages: they are one owner.
            let lent = matches!(state, PageState::Lent | PageState::Reading) && rows.contains(&number);
            if !lent {
                own(number, "the module's");
            }
        }
    }

    /// What this process holds of a session: its length and the KV of its last token, which stands for its whole prefix.
    pub fn held(&mut self, session: &SessionId) -> Held {
        let placement = self.w.session(session, self.now)?.epoch?.placement;
        let request = LeaseRequest {
            session: session.clone(),
            placement,
            incarnation: self.incarnation(),
            kind: LeaseKind::Sync,
            have: None,
        };
        let Ok(LeaseAnswer::Granted(grant)) = self.w.lease(&request, self.now) else {
            return None;
        };
        self.w.end_lease(grant.lease, self.now);
        // Nobody was told of this lease: its end is nobody's news.
        while self.w.poll_effect().is_some() {}
        let truth = kv::truth(&grant.identity, &grant.tokens);
        Some((truth.len() as u32, *truth.last()?))
    }

    /// What a caller could see of one session, numbers that only grow left aside.
    pub fn sketch(&mut self, session: &SessionId, now: Now, text: &mut String) {
        if let Some(view) = self.w.session(session, now) {
            let epoch = view.epoch.map(|e| (e.placement.n, e.rewind));
            let moved = view.moved.map(|m| m.placement.n);
            let _ = write!(
                text,
                "{} {:?} {moved:?} {} {} {} {epoch:?} {}",
                view.state,
                view.standing,
                view.committed,
                view.readable,
                view.leases,
                view.backup.is_some()
            );
        }
        let held = self.held(session).map(|(_, kv)| kv);
        let imports = self.w.transfers(now).imports;
        let imports: Vec<_> = imports
            .into_iter()
            .map(|i| (i.kind, i.phase, i.pulled_tokens))
            .collect();
        let asked: Vec<_> = self
            .imports
            .values()
            .map(|t| {
                (
                    t.order.placement.n,
                    t.question.map(|q| now.since(q.asked).as_micros() / 5_000),
                )
            })
            .collect();
        let waiting = self.exports.waiting();
        let sync = self.w.sync_lag();
        let turns: Vec<_> = self
            .requests
            .values()
            .map(|r| (r.begun, r.written, r.aborted))
            .collect();
        let gone = &self.books.withdrawn;
        let _ = write!(
            text,
            " {held:?} {imports:?} {asked:?} {waiting} {sync:?} {turns:?} {gone:?}"
        );
        self.outbox.sketch(session, text);
    }

    /// Who owns what, told to the world when it may have changed.
    pub(super) fn check_standings(&mut self) {
        if !std::mem::take(&mut self.dirty) {
            return;
        }
        let list = self.w.sessions(None, usize::MAX, self.now).sessions;
        let owned: BTreeMap<SessionId, u64> = list
            .into_iter()
            .filter(|s| s.standing == Standing::Owner)
            .filter_map(|s| Some((s.session_id, s.epoch?.placement.n)))
            .collect();
        for (session, n) in &owned {
            let gone = self.books.withdrawn.contains(&(session.clone(), *n));
            self.watch.check(!gone, Oracle::Withdrawn, || {
                format!("{session} is owned under {n}, which was withdrawn for good")
            });
        }
        if owned != self.owned {
            self.owned = owned.clone();
            self.push(Out::Owns(owned));
        }
    }
}
