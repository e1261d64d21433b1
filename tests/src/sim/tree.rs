//! The engine's own prefix tree, one node per page. A node's key is the true KV of its last position: that is a hash of
//! the identity and the whole prefix.

use std::collections::BTreeMap;

use super::{kv::Kv, pool::Pool};

/// The keys of a prefix's nodes, root first.
pub type Path = Vec<Kv>;

#[derive(Clone, Debug)]
struct Node {
    page: u32,
    parent: Option<Kv>,
    children: u32,
    locks: u32,
    used: u64,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Tree {
    page: u32,
    nodes: BTreeMap<Kv, Node>,
    locked: u32,
    uses: u64,
}

impl Tree {
    /// An empty tree.
    pub fn new(page: u32) -> Tree {
        Tree {
            page,
            nodes: BTreeMap::new(),
            locked: 0,
            uses: 0,
        }
    }

    /// The longest resident prefix of a sequence, given by its true KV, of at most `limit` tokens.
    pub fn find(&mut self, truth: &[Kv], limit: usize) -> Path {
        let page = self.page as usize;
        self.uses += 1;
        let uses = self.uses;
        let keys = truth[..limit.min(truth.len())].chunks_exact(page).map(|c| c[page - 1]);
        let path: Path = keys.take_while(|k| self.nodes.contains_key(k)).collect();
        for key in &path {
            if let Some(node) = self.nodes.get_mut(key) {
                node.used = uses;
            }
        }
        path
    }

    /// The slots of a path's tokens.
    pub fn slots(&self, path: &[Kv]) -> Vec<u32> {
        let page = self.page;
        path.iter()
            .flat_map(|k| {
                let first = self.nodes[k].page * page;
                first..first + page
            })
            .collect()
    }

    /// Takes whole pages in; where the tree has the prefix already its own pages stay. The path.
    pub fn insert(&mut self, truth: &[Kv], slots: &[u32]) -> Path {
        let page = self.page as usize;
        self.uses += 1;
        let mut path = Path::new();
        for (chunk, first) in truth.chunks_exact(page).zip(slots.iter().step_by(page)) {
            let (key, parent) = (chunk[page - 1], path.last().copied());
            if !self.nodes.contains_key(&key) {
                if let Some(parent) = parent.and_then(|p| self.nodes.get_mut(&p)) {
                    parent.children += 1;
                }
                let node = Node {
                    page: first / self.page,
                    parent,
                    children: 0,
                    locks: 0,
                    used: self.uses,
                };
                self.nodes.insert(key, node);
            }
            path.push(key);
        }
        path
    }

    /// Locks a path; true if all of it was there.
    pub fn lock(&mut self, path: &[Kv]) -> bool {
        path.iter().all(|k| match self.nodes.get_mut(k) {
            Some(node) => {
                node.locks += 1;
                self.locked += u32::from(node.locks == 1);
                true
            }
            None => false,
        })
    }

    /// Unlocks a path; true if all of it was locked.
    pub fn unlock(&mut self, path: &[Kv]) -> bool {
        path.iter().all(|k| match self.nodes.get_mut(k) {
            Some(node) if node.locks > 0 => {
                node.locks -= 1;
                self.locked -= u32::from(node.locks == 0);
                true
            }
            _ => false,
        })
    }

    /// Gives up unlocked leaves, least recently used first, until the pool has `pages` free.
    pub fn evict(&mut self, pages: u32, pool: &mut Pool, watch: &mut super::oracle::Watch) {
        while pool.free_pages() < pages {
            let leaves = self.nodes.iter().filter(|(_, n)| n.locks == 0 && n.children == 0);
            let Some(key) = leaves.min_by_key(|(_, n)| n.used).map(|(k, _)| *k) else {
                return;
            };
            if let Some(node) = self.nodes.remove(&key) {
                if let Some(parent) = node.parent.and_then(|p| self.nodes.get_mut(&p)) {
                    parent.children -= 1;
                }
                pool.give(node.page, watch);
            }
        }
    }

    /// Pages that nothing locks.
    pub fn evictable(&self) -> u32 {
        self.nodes.len() as u32 - self.locked
    }

    /// Pages that something locks.
    pub fn protected(&self) -> u32 {
        self.locked
    }

    /// Its pages.
    pub fn pages(&self) -> impl Iterator<Item = (u32, Kv)> {
        self.nodes.iter().map(|(k, n)| (n.page, *k))
    }
}
