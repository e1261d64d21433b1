//! The engine's allocator: the only owner of the free list (OWN-1), and the KV of every slot. It knows which pages
//! readers may look at, so that a page freed too early is seen at once.

use std::collections::{BTreeMap, BTreeSet};

use kvc_proto::{
    id::{ImportId, LeaseId},
    worker::Slot,
};

use super::{
    kv::Kv,
    oracle::{Oracle, Watch},
};

/// What a free page holds.
const DEAD: Kv = 0xdead;

/// See the module.
#[derive(Clone, Debug)]
pub struct Pool {
    /// Tokens per page.
    pub page: u32,
    /// Pages that can be handed out; page 0 is padding.
    pub pages: u32,
    free: Vec<u32>,
    is_free: Vec<bool>,
    kv: Vec<Kv>,
    /// Slots that peers may read, by lease.
    exposed: BTreeMap<LeaseId, BTreeMap<Slot, Kv>>,
    /// Slots that a running import's reads write to.
    landing: BTreeMap<ImportId, BTreeSet<Slot>>,
}

impl Pool {
    /// All free.
    pub fn new(capacity: u32, page: u32) -> Pool {
        let pages = capacity / page;
        Pool {
            page,
            pages,
            free: (1..=pages).rev().collect(),
            is_free: (0..=pages).map(|p| p > 0).collect(),
            kv: vec![DEAD; ((pages + 1) * page) as usize],
            exposed: BTreeMap::new(),
            landing: BTreeMap::new(),
        }
    }

    /// The engine clears everything.
    pub fn reset(&mut self) {
        self.free = (1..=self.pages).rev().collect();
        self.is_free = (0..=self.pages).map(|p| p > 0).collect();
        self.kv.fill(DEAD);
    }

    /// Free pages.
    pub fn free_pages(&self) -> u32 {
        self.free.len() as u32
    }

    /// Whether a page is free.
    pub fn is_free(&self, page: u32) -> bool {
        self.is_free.get(page as usize).copied().unwrap_or(false)
    }

    /// Takes pages, the last freed first.
    pub fn take(&mut self, pages: u32) -> Option<Vec<u32>> {
        if self.free_pages() < pages {
            return None;
        }
        let taken = self.free.split_off(self.free.len() - pages as usize);
        taken.iter().for_each(|p| self.is_free[*p as usize] = false);
        Some(taken)
    }

    /// Gives a page back.
    pub fn give(&mut self, page: u32, watch: &mut Watch) {
        if page == 0 || page > self.pages || self.is_free(page) {
            watch.fire(Oracle::OneOwner, format!("page {page} freed twice or unknown"));
            return;
        }
        let slots = page * self.page..(page + 1) * self.page;
        for (lease, exposed) in &self.exposed {
            let free = exposed.range(slots.clone()).next().is_none();
            watch.check(free, Oracle::FreedUnderRead, || {
                format!("page {page} freed while lease {lease} makes it readable")
            });
        }
        for (import, landing) in &self.landing {
            let free = landing.range(slots.clone()).next().is_none();
            watch.check(free, Oracle::FreedUnderLanding, || {
                format!("page {page} freed while import {import} writes into it")
            });
        }
        for slot in slots {
            self.kv[slot as usize] = DEAD;
        }
        self.is_free[page as usize] = true;
        self.free.push(page);
    }

    /// A kernel or a landing read writes one position.
    pub fn write(&mut self, slot: Slot, value: Kv, watch: &mut Watch) {
        let page = slot / self.page;
        watch.check(!self.is_free(page), Oracle::OneOwner, || {
            format!("free page {page} is written")
        });
        for (lease, exposed) in &self.exposed {
            watch.check(
                exposed.get(&slot).is_none_or(|v| *v == value),
                Oracle::ReadableChanged,
                || format!("slot {slot} rewritten under lease {lease}"),
            );
        }
        self.kv[slot as usize] = value;
    }

    /// One position.
    pub fn read(&self, slot: Slot) -> Kv {
        self.kv[slot as usize]
    }

    /// A lease makes slots readable.
    pub fn expose(&mut self, lease: LeaseId, slots: &[Slot], watch: &mut Watch) {
        for slot in slots {
            let page = slot / self.page;
            watch.check(!self.is_free(page), Oracle::FreedUnderRead, || {
                format!("lease {lease} exposes free page {page}")
            });
            let value = self.read(*slot);
            self.exposed.entry(lease).or_default().insert(*slot, value);
        }
    }

    /// Whether a lease exposes a slot.
    pub fn is_exposed(&self, lease: LeaseId, slot: Slot) -> bool {
        self.exposed.get(&lease).is_some_and(|e| e.contains_key(&slot))
    }

    /// Nothing can be read under the lease any more.
    pub fn conceal(&mut self, lease: LeaseId) {
        self.exposed.remove(&lease);
    }

    /// Leases that expose something.
    pub fn exposing(&self) -> usize {
        self.exposed.len()
    }

    /// An import reads into slots.
    pub fn land(&mut self, import: ImportId, slots: &[Slot]) {
        self.landing.entry(import).or_default().extend(slots);
    }

    /// Nothing of the import writes any more.
    pub fn landed(&mut self, import: ImportId) {
        self.landing.remove(&import);
    }
}
