//! The test engine's loop, and what it does for imports and readers.

use super::*;

impl Engine {
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            free: self.free.len() as u32 * self.page,
            tree_evictable: self.tree_tokens(false),
            running: self.runs.iter().filter(|r| r.running).count() as u32,
            waiting: self.runs.iter().filter(|r| !r.running).count() as u32,
            pending_prefill_tokens: 0,
            reserved: self.reserved,
            allocated: self
                .runs
                .iter()
                .filter(|r| r.running)
                .map(|r| {
                    (
                        r.id,
                        block::ceil(r.row.len() as u32, self.page) - block::floor(r.restored, self.page),
                    )
                })
                .collect(),
        }
    }

    pub fn poll(&mut self) {
        let snapshot = self.snapshot();
        let commands = self.w.poll(&snapshot, self.now);
        self.effects();
        self.polled = commands.clone();
        for command in commands {
            match command {
                Command::Free(frees) => self.take_back(frees),
                Command::Drop { frees, locked } => {
                    if locked != PrefixHandle::ROOT {
                        let node = self.handles.remove(&locked).unwrap();
                        self.path(&node, -1);
                    }
                    self.pulls
                        .retain(|p| p.locked != Some(locked) || locked == PrefixHandle::ROOT);
                    self.take_back(frees);
                }
                Command::Land {
                    import,
                    tokens,
                    held,
                    identity,
                } => self.land(import, &tokens, held, &identity),
                Command::Commit { import, share } => self.commit_import(import, share),
                Command::Abort { turn } => match self.runs.iter().find(|r| r.id == turn).map(|r| r.running) {
                    Some(true) => self.roll_back(turn, Rollback::Abort),
                    Some(false) => self.cancel(turn),
                    None => {}
                },
            }
        }
    }

    pub fn land(&mut self, import: ImportId, tokens: &[Token], held: u32, identity: &Identity) {
        let have = self.tree_match(identity, tokens, tokens.len());
        let prefix = tokens[..have as usize].to_vec();
        let locked = self.handle(identity, &prefix);
        let node = (identity.clone(), prefix);
        self.path(&node, 1);
        let from = have.max(held);
        match self.alloc(block::pages(
            tokens.len() as u32 - from.min(tokens.len() as u32),
            self.page,
        )) {
            Some(pages) => {
                let slots: Vec<i64> = pages
                    .iter()
                    .flat_map(|p| p * self.page..(p + 1) * self.page)
                    .map(i64::from)
                    .collect();
                let head = self.tree_slots(identity, tokens, have);
                if let Some(pull) = self.pulls.iter_mut().find(|p| p.import == import) {
                    pull.locked = Some(locked);
                }
                if std::mem::take(&mut self.kill_landing) {
                    self.w
                        .cancel_import(import, Refusal::new(Reason::Cancelled, "test"), self.now);
                    self.effects();
                }
                let frees = self.w.landed(import, have, locked, &head, &slots, self.now);
                self.effects();
                if frees.prefixes.contains(&locked) && locked != PrefixHandle::ROOT {
                    self.path(&node, -1);
                }
                self.take_back(frees);
            }
            None => {
                self.path(&node, -1);
                self.handles.remove(&locked);
                self.w.land_failed(import, self.now);
                self.effects();
            }
        }
    }

    pub(super) fn commit_import(&mut self, import: ImportId, share: u32) {
        let pull = self.pulls.iter().find(|p| p.import == import).unwrap();
        assert!(
            pull.written || pull.flight.is_none(),
            "nothing is visible before every byte is there"
        );
        let (identity, tokens, locked) = (pull.identity.clone(), pull.tokens.clone(), pull.locked.unwrap());
        if share > 0 {
            let slots = self.import_slots(import);
            let prefix = &tokens[..share as usize];
            let handle = self.tree_insert(&identity, prefix, &slots);
            let head = self.tree_slots(&identity, prefix, share);
            if locked != PrefixHandle::ROOT {
                let node = self.handles[&locked].clone();
                self.path(&node, -1);
            }
            self.pulls
                .iter_mut()
                .filter(|p| p.import == import)
                .for_each(|p| p.flight = None);
            let frees = self.w.import_shared(import, share, handle, &head, self.now);
            self.effects();
            self.take_back(frees);
        } else if locked != PrefixHandle::ROOT {
            let node = self.handles[&locked].clone();
            self.path(&node, -1);
        }
        self.pulls
            .iter_mut()
            .filter(|p| p.import == import)
            .for_each(|p| p.locked = None);
        self.w.import_committed(import, self.now);
        self.effects();
    }

    /// Slots of an import's whole range: the tree's head, then the landing pages.
    pub(super) fn import_slots(&self, import: ImportId) -> Vec<i64> {
        let pull = self.pulls.iter().find(|p| p.import == import).unwrap();
        let from = pull.flight.as_ref().map_or(pull.tokens.len() as u32, |f| f.from);
        let mut slots = self.tree_slots(&pull.identity, &pull.tokens, from);
        slots.extend(pull.flight.iter().flat_map(|f| f.slots.iter().map(|s| i64::from(*s))));
        slots
    }

    /// The peer's bytes arrive.
    pub fn pull_all(&mut self, import: ImportId) {
        let Some(pull) = self.pulls.iter_mut().find(|p| p.import == import) else {
            return;
        };
        let truth = kv(&pull.identity, &pull.tokens);
        pull.written = true;
        if let Some(flight) = &pull.flight {
            let (from, slots) = (flight.from as usize, flight.slots.clone());
            for (slot, value) in slots.iter().zip(&truth[from..]) {
                self.write(*slot, *value);
            }
        }
        self.w.pulled(import, self.now);
        self.effects();
    }

    pub fn confirmed(&mut self, import: ImportId) {
        self.w.confirmed(import, self.now);
        self.effects();
    }

    pub fn offer(&mut self, import: ImportId, session: u8, identity: Identity, tokens: Vec<Token>, share: u32) {
        let tokens: Arc<[Token]> = tokens.into();
        let grant = LeaseGrant {
            lease: LeaseId(0),
            epoch: Epoch {
                placement: Placement {
                    n: 1,
                    store: StoreId(1),
                },
                rewind: 0,
            },
            identity,
            after: 0,
            readable: tokens.len() as u32,
            tokens,
            share,
            lives: self.w.config().lease,
        };
        let all = grant.tokens.clone();
        self.granted(import, session, grant, all);
    }

    /// A peer has granted a lease on `tokens`, of which `grant` may leave out what this worker has.
    pub fn granted(&mut self, import: ImportId, session: u8, grant: LeaseGrant, tokens: Arc<[Token]>) {
        self.pulls.retain(|p| p.import != import);
        self.pulls.push(Pull {
            import,
            session,
            identity: grant.identity.clone(),
            tokens,
            flight: None,
            written: false,
            confirming: false,
            locked: None,
        });
        self.w.lease_granted(import, grant, self.now);
        self.effects();
    }

    pub fn look(&mut self, lease: LeaseId) {
        let reader = self.readers.get_mut(&lease).unwrap();
        let from = reader.seen.len() as u32;
        let view = self.w.lease_view(lease, from).unwrap();
        let truth = kv(&reader.identity, &reader.tokens);
        reader
            .seen
            .extend(view.slots.iter().zip(&truth[from as usize..]).map(|(s, v)| (*s, *v)));
        assert_eq!(view.complete, reader.seen.len() == reader.tokens.len());
    }

    pub fn flush(&mut self) {
        let waiting: Vec<_> = self.runs.iter().map(|r| r.id).collect();
        for id in waiting {
            let at = self.at(id);
            if self.runs[at].running {
                self.roll_back(id, Rollback::Abort);
            } else if self.runs[at].node.is_some() || self.runs[at].claimed > 0 {
                self.unlock(id);
            }
        }
        self.w.flush(self.now);
        self.effects();
        assert!(self.readers.is_empty(), "leases are fenced");
        self.pulls.clear();
        self.tree.clear();
        self.handles.clear();
        self.free = (1..=self.capacity / self.page).collect();
        self.kv.fill(0xdead);
    }
}
