//! Pages and tree nodes between the engine and the machine: allocate, evict on demand, take back (`cache.py`).

use kvc_proto::{id::PrefixHandle, worker::Frees};

use super::{oracle::Oracle, process::Process, tree::Path};

impl Process {
    /// Pages for the engine or a landing; idle sessions give theirs up.
    pub(super) fn alloc(&mut self, pages: u32) -> Option<Vec<u32>> {
        if self.pool.free_pages() < pages {
            self.evict(pages);
        }
        self.pool.take(pages)
    }

    /// The engine's `evict`: its own tree first, guarding what idle sessions share, then victims.
    fn evict(&mut self, pages: u32) {
        let handles: Vec<_> = self.w.idle_prefixes().collect();
        let mut guarded: Vec<(PrefixHandle, Path)> = handles.into_iter().map(|h| (h, self.path_of(h))).collect();
        for (handle, path) in &guarded {
            if !self.tree.lock(path) {
                self.watch
                    .fire(Oracle::OneOwner, format!("the prefix of {handle} has left the tree"));
            }
        }
        loop {
            self.tree.evict(pages, &mut self.pool, &mut self.watch);
            if self.pool.free_pages() >= pages {
                break;
            }
            let Some(victim) = self.ask(|w, now| w.victim(now)) else {
                let left = self.w.evictable();
                self.watch.check(left == 0, Oracle::Room, || {
                    format!("{left} evictable tokens cannot be had")
                });
                break;
            };
            self.log(|| format!("evicts {} {} tokens", victim.session, victim.tokens));
            self.unsynced.insert(victim.session.clone());
            for handle in &victim.frees.prefixes {
                if let Some(at) = guarded.iter().position(|(h, _)| h == handle) {
                    let (_, path) = guarded.remove(at);
                    self.tree.unlock(&path);
                }
            }
            self.take_back(victim.frees);
        }
        for (_, path) in guarded {
            self.tree.unlock(&path);
        }
    }

    /// What the machine gives up.
    pub(super) fn take_back(&mut self, frees: Frees) {
        let page = self.pool.page;
        for slot in frees.slots {
            self.watch.check(slot % page == 0, Oracle::OneOwner, || {
                format!("slot {slot} is given back, no first slot of a page")
            });
            self.stirred = true;
            self.pool.give(slot / page, &mut self.watch);
        }
        for handle in frees.prefixes {
            let known = self.handles.remove(&handle).is_some();
            self.watch
                .check(known, Oracle::OneOwner, || format!("handle {handle} comes back twice"));
        }
    }

    /// A row that the machine owns nothing of.
    pub(super) fn give_row(&mut self, row: &[i32]) {
        let page = self.pool.page;
        for slot in row.iter().step_by(page as usize) {
            self.pool.give(*slot as u32 / page, &mut self.watch);
        }
    }

    pub(super) fn path_of(&mut self, handle: PrefixHandle) -> Path {
        if handle == PrefixHandle::ROOT {
            return Path::new();
        }
        match self.handles.get(&handle) {
            Some(path) => path.clone(),
            None => {
                self.watch.fire(Oracle::OneOwner, format!("handle {handle} is unknown"));
                Path::new()
            }
        }
    }

    pub(super) fn handle(&mut self, path: Path) -> PrefixHandle {
        if path.is_empty() {
            return PrefixHandle::ROOT;
        }
        let handle = PrefixHandle(self.next_handle);
        self.next_handle += 1;
        self.handles.insert(handle, path);
        handle
    }
}
