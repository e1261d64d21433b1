//! The machine's commands, carried out once per loop iteration: free, land, commit, drop (`cache.py`).

use std::sync::Arc;

use kvc_proto::{
    id::{ImportId, PrefixHandle},
    wire::reason::{Reason, Refusal},
    worker::{Command, Identity, Token},
};

use super::{
    kv::{self, Kv},
    oracle::Oracle,
    process::Process,
    tree::Path,
};

/// A `Land` that found no room.
pub type WaitingLand = (ImportId, Arc<[Token]>, u32, Identity, Path);

/// An import between `Land` and `Commit` or `Drop`.
#[derive(Clone, Debug)]
pub struct Landing {
    truth: Vec<Kv>,
    held: u32,
    have: u32,
    path: Path,
    handle: PrefixHandle,
    /// The slots allocated for it.
    own: Vec<u32>,
}

impl Process {
    pub(super) fn command(&mut self, command: Command) {
        match command {
            Command::Free(frees) => self.take_back(frees),
            Command::Land {
                import,
                tokens,
                held,
                identity,
            } => self.land(import, tokens, held, identity),
            Command::Commit { import, share } => self.commit_import(import, share),
            Command::Abort { turn } => {
                self.log(|| format!("{turn} is told to end: its session was granted elsewhere"));
                if let Some(request) = self.requests.values_mut().find(|r| r.turn == Some(turn)) {
                    (request.aborted, request.superseded) = (true, true);
                }
            }
            Command::Drop { frees, locked } => {
                self.forget_landing(locked, &frees.slots);
                self.take_back(frees);
            }
        }
    }

    /// Imports that found no room look again; those that died in between are forgotten.
    pub(super) fn land_waiting(&mut self) {
        for (import, tokens, held, identity, locked) in std::mem::take(&mut self.waiting_lands) {
            self.tree.unlock(&locked);
            if self.imports.contains_key(&import) {
                self.land(import, tokens, held, identity);
            }
        }
    }

    /// Tokens that a landing must leave: what running requests are trusted to take, and the rest of the prefill under way.
    pub(super) fn promised(&self) -> u32 {
        let page = self.pool.page;
        let running = self
            .running
            .iter()
            .map(|id| self.growth(*id) * self.speed.trust / 1000 + page);
        let chunked = self.chunked.map_or(0, |id| self.unwritten(id) + 2 * page);
        running.sum::<u32>() + chunked
    }

    fn land(&mut self, import: ImportId, tokens: Arc<[Token]>, held: u32, identity: Identity) {
        let page = self.pool.page;
        let truth = kv::truth(&identity, &tokens);
        let path = self.tree.find(&truth, truth.len());
        let have = path.len() as u32 * page;
        self.tree.lock(&path);
        let need = (tokens.len() as u32)
            .div_ceil(page)
            .saturating_sub(have.max(held) / page);
        let room = (self.pool.free_pages() + self.tree.evictable()) * page + self.w.evictable();
        let promised = self.promised();
        if need * page + promised > room && (promised > 0 || !self.landings.is_empty()) {
            if room < promised {
                // Its lock alone would take what a running prefill was promised.
                self.tree.unlock(&path);
                self.ask(|w, now| w.land_failed(import, now));
                return;
            }
            // Its lock stays: the prefix of the session's older copy, which is pinned, must not count as evictable.
            self.waiting_lands.push((import, tokens, held, identity, path));
            return;
        }
        let Some(pages) = self.alloc(need) else {
            self.tree.unlock(&path);
            self.ask(|w, now| w.land_failed(import, now));
            return;
        };
        let own: Vec<u32> = pages.iter().flat_map(|p| p * page..(p + 1) * page).collect();
        let handle = self.handle(path.clone());
        let head: Vec<i64> = self.tree.slots(&path).iter().map(|s| i64::from(*s)).collect();
        let slots: Vec<i64> = own.iter().map(|s| i64::from(*s)).collect();
        let landing = Landing {
            truth,
            held,
            have,
            path,
            handle,
            own,
        };
        self.landings.insert(import, landing);
        if self.rng.chance(self.speed.leave) {
            // The module's threads do not wait for the engine's.
            let why = Refusal::new(Reason::Cancelled, "the client went away");
            self.ask(|w, now| w.cancel_import(import, why, now));
        }
        let frees = self.ask(|w, now| w.landed(import, have, handle, &head, &slots, now));
        // Its answer has gone out already: it died between the command and now.
        if !self.imports.contains_key(&import)
            && let Some(landing) = self.landings.remove(&import)
        {
            self.tree.unlock(&landing.path);
        }
        self.take_back(frees);
    }

    fn commit_import(&mut self, import: ImportId, share: u32) {
        let page = self.pool.page;
        let Some(landing) = self.landings.remove(&import) else {
            self.watch
                .fire(Oracle::Driver, format!("commit of {import}, which has not landed"));
            return;
        };
        let from = landing.have.max(landing.held);
        for (slot, value) in landing.own.iter().zip(&landing.truth[from as usize..]) {
            let right = self.pool.read(*slot) == *value;
            self.watch.check(right, Oracle::TrueKv, || {
                format!("import {import} commits a wrong byte in slot {slot}")
            });
        }
        let wanted = share / page * page;
        if wanted > landing.have && landing.held <= landing.have {
            let mut slots = self.tree.slots(&landing.path);
            slots.extend(&landing.own[..(wanted - landing.have) as usize]);
            let shared = self.tree.insert(&landing.truth[..wanted as usize], &slots);
            let head: Vec<i64> = self.tree.slots(&shared).iter().map(|s| i64::from(*s)).collect();
            let handle = self.handle(shared);
            let frees = self.ask(|w, now| w.import_shared(import, wanted, handle, &head, now));
            self.tree.unlock(&landing.path);
            self.take_back(frees);
        } else {
            // Nothing new to share: the machine keeps the handle, only the lock goes.
            self.tree.unlock(&landing.path);
        }
        if let Some(task) = self.imports.get(&import) {
            self.histories.remove(&task.order.session);
        }
        self.ask(|w, now| w.import_committed(import, now));
        self.dirty = true;
        self.log(|| format!("import {import} committed {} tokens", landing.truth.len()));
    }

    fn forget_landing(&mut self, locked: PrefixHandle, slots: &[u32]) {
        let mine = |l: &Landing| match locked {
            // Several landings may share nothing: the slots tell which it was.
            PrefixHandle::ROOT => l.handle == locked && slots.first() == l.own.first(),
            _ => l.handle == locked,
        };
        let found = self.landings.iter().find(|(_, l)| mine(l)).map(|(id, _)| *id);
        if let Some(landing) = found.and_then(|id| self.landings.remove(&id)) {
            self.tree.unlock(&landing.path);
        }
        if locked != PrefixHandle::ROOT {
            self.handles.remove(&locked);
        }
    }
}
