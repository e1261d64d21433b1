//! Engine side: once per loop iteration. Frees first, then lands and commits; the ledger is up to date throughout, so
//! what `admit` sees next is what was done here (ADM-7).

use crate::{
    block::{self, Table},
    id::{ImportId, PrefixHandle},
    mutation::off,
    session::{Chain, Copy, Digest, Hold, Key, Session, evict::Class, history},
    time::Now,
    transfer::{
        ImportPhase, Purpose,
        import::{Landing, Offer},
    },
    wire::reason::{Reason, Refusal},
};

use super::{Command, Effect, Frees, Handover, ImportDone, Load, Snapshot, Timer, Worker};

impl Worker {
    /// Takes the engine's numbers in and hands out what its thread has to do now.
    pub fn poll(&mut self, snapshot: &Snapshot, now: Now) -> Vec<Command> {
        self.publish(snapshot);
        for key in std::mem::take(&mut self.unknown) {
            let unknown = |s: &Session| s.is_bare() && s.placement.is_none() && s.floor.is_none();
            if self.sessions.get(key).is_some_and(unknown) {
                self.forget(key);
            }
        }
        self.pump(now);
        let mut frees = Frees::default();
        let mut commands: Vec<_> = std::mem::take(&mut self.aborts)
            .into_iter()
            .map(|turn| Command::Abort { turn })
            .collect();
        for dropped in std::mem::take(&mut self.dropped) {
            if let Some(copy) = self.sessions.get_mut(dropped.session).and_then(|s| s.copy.as_mut())
                && copy.hold == Hold::Landing
                && !self
                    .imports
                    .values()
                    .any(|i| i.session == dropped.session && i.phase.pins())
            {
                copy.hold = Hold::Free;
            }
            self.refresh(dropped.session);
            if let Some((slots, locked)) = dropped.landing {
                let tokens = u32::try_from(slots.len()).unwrap_or(u32::MAX) * self.config.page_tokens;
                self.landing -= tokens;
                self.ledger.freed(tokens);
                commands.push(Command::Drop {
                    frees: Frees {
                        slots,
                        prefixes: Vec::new(),
                    },
                    locked,
                });
            }
        }
        let doomed: Vec<_> = self.order.of_class(Class::Doomed).collect();
        for key in doomed {
            self.drop_copy(key, &mut frees);
            self.forget_closed(key);
        }
        self.free_quarantine(&mut frees);
        frees.prefixes.append(&mut self.forgotten);
        let mut room = self.room(snapshot, &frees, &commands);
        for id in std::mem::take(&mut self.ready) {
            // It takes at most its whole length of what the engine can have: landing pages, the older copy that it pins,
            // the tree's part that `Land` locks.
            if let Some(ImportPhase::Granted(offer)) = self.imports.get(&id).map(|i| &i.phase) {
                let whole = block::ceil(offer.len(), self.config.page_tokens);
                if snapshot.reserved > 0 && whole.saturating_add(snapshot.reserved) > room {
                    // XFER-7: its deadline bounds the wait.
                    self.ready.push_back(id);
                    continue;
                }
                room = room.saturating_sub(whole);
            }
            commands.extend(self.move_on(id, &mut frees));
        }
        // Cuts made for a landing may have revoked leases; their pages need not wait for another loop.
        self.free_quarantine(&mut frees);
        if frees != Frees::default() {
            commands.insert(0, Command::Free(frees));
        }
        commands
    }

    /// The engine has locked what its tree holds of the import (`have` tokens under `prefix`, slots `head`) and
    /// allocated `slots` for the rest. If the import died meanwhile everything comes straight back: `prefix` among the
    /// handles, still locked.
    pub fn landed(
        &mut self,
        import: ImportId,
        have: u32,
        prefix: PrefixHandle,
        head: &[i64],
        slots: &[i64],
        now: Now,
    ) -> Frees {
        let page = self.config.page_tokens;
        let mut frees = Frees::default();
        let mut pages = Table::of_slots(slots, page);
        if off!(GiveBack) && !self.imports.contains_key(&import) {
            return frees;
        }
        let Some(found) = self.imports.get_mut(&import) else {
            return give_back(pages, prefix);
        };
        let (key, purpose) = (found.session, found.purpose);
        let (offer, held) = match std::mem::replace(&mut found.phase, ImportPhase::Leasing) {
            ImportPhase::Landing { offer, held } => (offer, held),
            other => {
                found.phase = other;
                return give_back(pages, prefix);
            }
        };
        let have = block::floor(have.min(offer.len()), page);
        let (tree, from) = (held == 0 || have > held, have.max(held));
        if from + pages.len() * page < offer.len() || (tree && (head.len() as u32) < have) {
            found.phase = ImportPhase::Landing { offer, held };
            let why = Refusal::new(Reason::Internal, "the engine allocated too few slots");
            self.drop_import(import, why, now);
            return give_back(pages, prefix);
        }
        pages.cut(block::pages(offer.len() - from, page), &mut frees.slots);
        if tree {
            self.drop_copy(key, &mut frees);
        }
        let head = Table::of_slots(if tree { &head[..have as usize] } else { &[] }, page);
        let allocated = pages.len() * page;
        self.landing += allocated;
        let locked = if tree { have } else { 0 };
        self.ledger.landed(allocated + locked);
        self.set_landed(purpose.reservation(), allocated + locked);
        let landed = pages.slots(0, offer.len() - from);
        let landing = Landing {
            offer,
            from,
            tree,
            locked: prefix,
            head,
            pages,
            pulled: 0,
        };
        let Some(found) = self.imports.get_mut(&import) else {
            return frees;
        };
        found.phase = ImportPhase::Pulling(landing);
        self.renew_charge(purpose, now);
        if landed.is_empty() {
            self.pulled(import, now);
        } else {
            self.effects.push_back(Effect::Pull {
                import,
                from,
                slots: landed.into(),
            });
        }
        frees
    }

    /// The engine has no room for the import, or cannot allocate.
    pub fn land_failed(&mut self, import: ImportId, now: Now) {
        if matches!(
            self.imports.get(&import).map(|i| &i.phase),
            Some(ImportPhase::Landing { .. })
        ) {
            self.drop_import(
                import,
                Refusal::new(Reason::NoDCapacity, "the engine has no room to land the import"),
                now,
            );
        }
    }

    /// The engine's tree now holds the import's first `shared` tokens under `prefix`, in the slots `new_head`. Landing
    /// pages that it did not need come back, and the handle that `Land` locked.
    pub fn import_shared(
        &mut self,
        import: ImportId,
        shared: u32,
        prefix: PrefixHandle,
        new_head: &[i64],
        _now: Now,
    ) -> Frees {
        let page = self.config.page_tokens;
        let mut frees = Frees::default();
        let Some(ImportPhase::Committing(landing)) = self.imports.get_mut(&import).map(|i| &mut i.phase) else {
            return frees;
        };
        let count = shared / page;
        if !landing.tree || count < landing.head.len() || new_head.len() < (count * page) as usize {
            return frees;
        }
        let mut tree = Table::of_slots(&new_head[..(count * page) as usize], page);
        let mine = landing.head.len();
        let moved = (count - mine).min(landing.pages.len());
        for (old, new) in landing.pages.pages().iter().zip(&tree.pages()[mine as usize..]) {
            if old != new {
                frees.slots.push(old * page);
            }
        }
        let rest = landing.pages.split_off(moved);
        std::mem::swap(&mut landing.head, &mut tree);
        landing.pages = rest;
        let old = std::mem::replace(&mut landing.locked, prefix);
        if old != PrefixHandle::ROOT && old != prefix {
            frees.prefixes.push(old);
        }
        self.landing -= moved * page;
        // They are the tree's now and nobody locks them; what it did not need is free.
        self.ledger.freed(moved * page);
        frees
    }

    /// The import is the session's KV from here on; the session waits for its turn (ADM-10), or for the hand-over that
    /// makes it this worker's (MIG-1).
    pub fn import_committed(&mut self, import: ImportId, now: Now) {
        let Some(mut found) = self.imports.remove(&import) else {
            return;
        };
        let ImportPhase::Committing(landing) = found.phase else {
            self.imports.insert(import, found);
            return;
        };
        let page = self.config.page_tokens;
        let key = found.session;
        self.landing -= landing.pages.len() * page;
        let (resident, pulled) = (landing.offer.len(), landing.total());
        let (polls, before) = (self.polls, self.sessions[key].copy.as_ref().map_or(0, |c| c.own(page)));
        let session = &mut self.sessions[key];
        let copy = match session.copy.take().filter(|_| !landing.tree) {
            Some(mut copy) => {
                copy.table.append(&landing.pages);
                if landing.locked != PrefixHandle::ROOT {
                    self.forgotten.push(landing.locked);
                }
                copy
            }
            None => {
                let shared = landing.head.len() * page;
                let mut table = landing.head;
                table.append(&landing.pages);
                let (identity, prefix) = (landing.offer.identity, landing.locked);
                Copy {
                    identity,
                    tokens: Vec::new(),
                    chain: Chain::default(),
                    table,
                    shared,
                    prefix,
                    readable: 0,
                    hold: Hold::Free,
                }
            }
        };
        let own = copy.own(page);
        let tokens = landing.offer.tokens.to_vec();
        let mut copy = Copy {
            tokens,
            readable: resident,
            hold: Hold::Free,
            ..copy
        };
        // What the older copy held is the same; nothing is known of what lies behind it.
        copy.chain.cut(landing.from);
        session.copy = Some(copy);
        session.changed = polls;
        self.set_landed(found.purpose.reservation(), own.saturating_sub(before));
        self.counters.imported(found.purpose, pulled);
        let epoch = landing.offer.epoch;
        let pulled = found.pulled_before.saturating_add(pulled);
        match found.purpose {
            Purpose::Seed(_) | Purpose::Reseed(_) => self.touch(key, now),
            Purpose::Sync(_) => self.follows(key, epoch),
            Purpose::Move(_) => {
                self.follows(key, epoch);
                found.pulled_before = pulled;
                let digest = self.sessions[key].copy.as_mut().map(|c| c.digest(resident));
                found.phase = ImportPhase::HandingOver(Box::new(Handover {
                    session: self.sessions[key].id.clone(),
                    incarnation: found.incarnation,
                    pending: found.placement,
                    epoch,
                    committed: resident,
                    digest: digest.unwrap_or(Digest([0; 16])),
                }));
                self.imports.insert(import, found);
                self.touch(key, now);
                self.refresh(key);
                self.ask_handover(import);
                return;
            }
        }
        self.timers.remove(&(found.deadline, Timer::Import(import)));
        self.import_over(key, import, found.purpose, now);
        let outcome = Ok(ImportDone { resident, pulled });
        self.effects.push_back(Effect::ImportDone { import, outcome });
        if let Purpose::Sync(wish) = found.purpose {
            self.synced(key, wish, now);
        }
        self.wake_for_wishes();
    }

    /// Of an offer, the tokens that the session's own copy already holds and that stay: common prefix, whole pages.
    pub(super) fn kept_below(&self, key: Key, offer: &Offer) -> u32 {
        let session = &self.sessions[key];
        let copy = session
            .copy
            .as_ref()
            .filter(|c| !session.doomed && c.identity == offer.identity);
        copy.map_or(0, |c| {
            let common = if off!(CutBeforeExtend) {
                c.len().min(offer.len())
            } else {
                history::common_prefix(&c.tokens, &offer.tokens)
            };
            c.usable(block::floor(common, self.config.page_tokens))
        })
    }

    fn publish(&mut self, snapshot: &Snapshot) {
        self.polls += 1;
        self.ledger.snapshot(snapshot.free, snapshot.tree_evictable);
        self.load = Load {
            running: snapshot.running,
            waiting: snapshot.waiting,
            pending_prefill_tokens: snapshot.pending_prefill_tokens,
        };
        for (turn, allocated) in &snapshot.allocated {
            let reservation = self.turns.get(turn).map(|t| t.reservation);
            if let Some(reservation) = reservation.and_then(|id| self.reservations.get_mut(id))
                && reservation.charge.reserved > 0
            {
                let mut new = reservation.charge;
                new.running = *allocated;
                self.ledger.change(&mut reservation.charge, new);
            }
        }
        for key in std::mem::take(&mut self.fresh) {
            self.refresh(key);
        }
    }

    /// Tokens that the engine could have once it has carried out what this poll frees.
    fn room(&self, snapshot: &Snapshot, frees: &Frees, commands: &[Command]) -> u32 {
        let dropped = commands.iter().map(|c| match c {
            Command::Drop { frees, .. } => frees.slots.len(),
            Command::Free(_) | Command::Land { .. } | Command::Commit { .. } | Command::Abort { .. } => 0,
        });
        let pages = u32::try_from(frees.slots.len() + dropped.sum::<usize>()).unwrap_or(u32::MAX);
        let freed = pages.saturating_mul(self.config.page_tokens);
        snapshot.free + snapshot.tree_evictable + self.evictable + freed
    }

    fn free_quarantine(&mut self, frees: &mut Frees) {
        let loose = self.quarantine.take_loose();
        self.ledger
            .freed(u32::try_from(loose.len()).unwrap_or(u32::MAX) * self.config.page_tokens);
        frees.slots.extend(loose);
    }

    fn move_on(&mut self, id: ImportId, frees: &mut Frees) -> Option<Command> {
        let import = self.imports.get_mut(&id)?;
        let key = import.session;
        match std::mem::replace(&mut import.phase, ImportPhase::Leasing) {
            ImportPhase::Granted(offer) => {
                let held = self.kept_below(key, &offer);
                if held == 0 {
                    self.drop_copy(key, frees);
                } else {
                    // Never splice two histories: the older copy is cut before it is extended (XFER-3).
                    self.cut_copy(key, held, None, frees);
                    if let Some(copy) = &mut self.sessions[key].copy {
                        copy.hold = Hold::Landing;
                    }
                    self.refresh(key);
                }
                let (tokens, identity) = (offer.tokens.clone(), offer.identity.clone());
                self.imports.get_mut(&id)?.phase = ImportPhase::Landing { offer, held };
                Some(Command::Land {
                    import: id,
                    tokens,
                    held,
                    identity,
                })
            }
            ImportPhase::Confirmed(landing) => {
                let share = block::floor(landing.offer.share.min(landing.offer.len()), self.config.page_tokens);
                let share = if landing.tree && share > landing.from { share } else { 0 };
                import.phase = ImportPhase::Committing(landing);
                Some(Command::Commit { import: id, share })
            }
            other => {
                import.phase = other;
                None
            }
        }
    }
}

fn give_back(mut pages: Table, prefix: PrefixHandle) -> Frees {
    let mut frees = Frees::default();
    pages.cut(0, &mut frees.slots);
    frees.prefixes.extend((prefix != PrefixHandle::ROOT).then_some(prefix));
    frees
}
