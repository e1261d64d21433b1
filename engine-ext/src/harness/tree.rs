//! The engine's prefix tree, naive: a list of prefixes that may share pages.

use std::collections::BTreeMap;

use kvc_proto::{
    id::PrefixHandle,
    worker::{Slot, Token},
};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Tree {
    entries: BTreeMap<PrefixHandle, Entry>,
    pages: BTreeMap<u32, u32>,
    next: u64,
}

#[derive(Debug)]
struct Entry {
    identity: String,
    tokens: Vec<Token>,
    slots: Vec<Slot>,
    locks: u32,
}

impl Tree {
    /// The longest whole-page prefix of `tokens`: its handle and slots.
    pub(super) fn find(&self, identity: &str, tokens: &[Token], page: u32) -> Option<(PrefixHandle, Vec<Slot>)> {
        let best = self
            .entries
            .iter()
            .filter(|(_, e)| e.identity == identity)
            .max_by_key(|(_, e)| common(&e.tokens, tokens))?;
        let len = common(&best.1.tokens, tokens) / page as usize * page as usize;
        (len > 0).then(|| (*best.0, best.1.slots[..len].to_vec()))
    }

    /// Takes `tokens` (whole pages) in; where they are known already the known slots win. The pages of the others become
    /// the tree's.
    pub(super) fn insert(
        &mut self,
        identity: &str,
        tokens: &[Token],
        slots: &[Slot],
        page: u32,
    ) -> (PrefixHandle, Vec<Slot>) {
        let mut own = slots[..tokens.len()].to_vec();
        if let Some((_, known)) = self.find(identity, tokens, page) {
            own[..known.len()].copy_from_slice(&known);
        }
        for slot in own.iter().step_by(page as usize) {
            *self.pages.entry(slot / page).or_default() += 1;
        }
        self.next += 1;
        let handle = PrefixHandle(self.next);
        let entry = Entry {
            identity: identity.into(),
            tokens: tokens.to_vec(),
            slots: own.clone(),
            locks: 0,
        };
        self.entries.insert(handle, entry);
        (handle, own)
    }

    pub(super) fn lock(&mut self, handle: PrefixHandle) {
        if let Some(entry) = self.entries.get_mut(&handle) {
            entry.locks += 1;
        }
    }

    pub(super) fn unlock(&mut self, handle: PrefixHandle) {
        if let Some(entry) = self.entries.get_mut(&handle) {
            entry.locks = entry.locks.checked_sub(1).expect("unlocked more often than locked");
        }
    }

    /// Drops one unlocked prefix that is not among `guarded`; the pages that nobody else names come back.
    pub(super) fn evict(&mut self, guarded: &[PrefixHandle], page: u32) -> Option<Vec<u32>> {
        let handle = *self
            .entries
            .iter()
            .find(|(h, e)| e.locks == 0 && !guarded.contains(h))?
            .0;
        let entry = self.entries.remove(&handle)?;
        let mut free = Vec::new();
        for slot in entry.slots.iter().step_by(page as usize) {
            let count = self.pages.get_mut(&(slot / page)).expect("a page of the tree");
            *count -= 1;
            if *count == 0 {
                self.pages.remove(&(slot / page));
                free.push(slot / page);
            }
        }
        Some(free)
    }

    /// Pages named by unlocked prefixes only.
    pub(super) fn evictable(&self, page: u32) -> u32 {
        let mut locked = std::collections::BTreeSet::new();
        for entry in self.entries.values().filter(|e| e.locks > 0) {
            locked.extend(entry.slots.iter().map(|s| s / page));
        }
        self.pages.keys().filter(|p| !locked.contains(p)).count() as u32
    }

    /// Locks in all.
    pub(super) fn locks(&self) -> u32 {
        self.entries.values().map(|e| e.locks).sum()
    }
}

fn common(a: &[Token], b: &[Token]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
