//! A simple engine for the tests: it owns the free list, a prefix tree and the KV of every slot, and does around the
//! worker's calls what the shim does. KV is a hash of the whole token prefix, so a slot that ends up at the wrong
//! position, in the wrong session or rewritten under a reader is seen, whatever the tokens are (kv-movement §6).

mod check;
mod round;
mod turn;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use crate::{
    block,
    id::*,
    time::Now,
    wire::reason::{Reason, Refusal},
    worker::*,
};

pub fn config(capacity: u32, page_tokens: u32) -> WorkerConfig {
    WorkerConfig {
        capacity,
        page_tokens,
        rho_permille: 950,
        max_uncached_tokens: capacity / 4,
        rule: CapacityRule::Growth,
        clip: capacity / 8,
        reservation: Duration::from_secs(30),
        evict_idle: true,
        session_cap: capacity,
        lease: Duration::from_secs(5),
        lease_max: Duration::from_secs(60),
        sync: true,
        sync_imports: 2,
        sync_deadline: Duration::from_secs(60),
        handover_deadline: Duration::from_secs(2),
        handover_hold: Duration::from_millis(20),
        remembered: 64,
    }
}

pub fn identity(n: u8) -> Identity {
    Identity(format!("id{n}").into())
}

pub fn name(n: u8) -> SessionId {
    SessionId::new(&format!("s{n}")).unwrap()
}

/// The true KV of every position.
pub fn kv(identity: &Identity, tokens: &[Token]) -> Vec<u64> {
    let mut h = identity.0.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
    });
    tokens
        .iter()
        .map(|t| {
            h = (h ^ u64::from(*t)).wrapping_mul(0x100_0000_01b3).rotate_left(17);
            h
        })
        .collect()
}

/// A request as the engine knows it.
#[derive(Debug)]
pub struct Run {
    pub id: TurnId,
    pub session: u8,
    pub identity: Identity,
    pub prompt: Vec<Token>,
    pub output: Vec<Token>,
    /// Slots of allocated tokens; empty while it waits.
    pub row: Vec<i32>,
    /// Tokens at the head of the row that are the tree's, locked.
    pub protected: u32,
    pub node: Option<(Identity, Vec<Token>)>,
    pub restored: u32,
    pub from_session: bool,
    pub adopted: bool,
    pub claimed: u32,
    /// Tokens whose KV is written.
    pub written: u32,
    pub running: bool,
}

#[derive(Debug)]
pub struct Reader {
    pub tokens: Arc<[Token]>,
    pub identity: Identity,
    /// Slots seen through the lease, with the bytes that must stay there.
    pub seen: Vec<(Slot, u64)>,
}

#[derive(Debug)]
pub struct Flight {
    pub from: u32,
    pub slots: Arc<[Slot]>,
}

#[derive(Debug)]
pub struct Pull {
    pub import: ImportId,
    pub session: u8,
    pub identity: Identity,
    pub tokens: Arc<[Token]>,
    pub flight: Option<Flight>,
    pub written: bool,
    pub confirming: bool,
    /// The node that `Land` locked.
    pub locked: Option<PrefixHandle>,
}

#[derive(Debug, Clone)]
struct Node {
    page: u32,
    locks: u32,
}

type Prefix = (Identity, Vec<Token>);

#[derive(Debug)]
pub struct Engine {
    pub w: Worker,
    pub now: Now,
    pub page: u32,
    pub capacity: u32,
    pub free: BTreeSet<u32>,
    pub kv: Vec<u64>,
    tree: BTreeMap<(String, Vec<Token>), Node>,
    pub handles: HashMap<PrefixHandle, Prefix>,
    next_handle: u64,
    pub runs: Vec<Run>,
    pub readers: BTreeMap<LeaseId, Reader>,
    pub pulls: Vec<Pull>,
    pub fenced: Vec<LeaseId>,
    pub done: Vec<(ImportId, Result<ImportDone, Refusal>)>,
    pub polled: Vec<Command>,
    /// The next import dies between `Land` and `landed`.
    pub kill_landing: bool,
    /// What it wants of its peers, oldest first.
    pub said: Vec<Effect>,
    /// The leases of its imports: at which peer, under which number.
    pub leases: BTreeMap<ImportId, (usize, LeaseId)>,
    /// Tokens promised to what runs.
    pub reserved: u32,
}

impl Engine {
    pub fn new(config: WorkerConfig) -> Engine {
        Engine::of(config, Incarnation(7))
    }

    pub fn of(config: WorkerConfig, incarnation: Incarnation) -> Engine {
        let (page, capacity) = (config.page_tokens, config.capacity);
        let mut engine = Engine {
            w: Worker::new(config, incarnation),
            now: Now(1_000_000),
            page,
            capacity,
            // Page 0 takes the padding in the real engine and is never handed out.
            free: (1..=capacity / page).collect(),
            kv: vec![0; ((capacity / page + 1) * page) as usize],
            tree: BTreeMap::new(),
            handles: HashMap::new(),
            next_handle: 1,
            runs: Vec::new(),
            readers: BTreeMap::new(),
            pulls: Vec::new(),
            fenced: Vec::new(),
            done: Vec::new(),
            polled: Vec::new(),
            kill_landing: false,
            said: Vec::new(),
            leases: BTreeMap::new(),
            reserved: 0,
        };
        engine.poll();
        engine
    }

    // ---- the tree

    fn key(identity: &Identity, tokens: &[Token]) -> (String, Vec<Token>) {
        (identity.0.to_string(), tokens.to_vec())
    }

    fn tree_match(&self, identity: &Identity, tokens: &[Token], limit: usize) -> u32 {
        let mut n = 0;
        while n + self.page as usize <= limit.min(tokens.len())
            && self
                .tree
                .contains_key(&Self::key(identity, &tokens[..n + self.page as usize]))
        {
            n += self.page as usize;
        }
        n as u32
    }

    fn path(&mut self, prefix: &Prefix, delta: i32) {
        for n in (self.page as usize..=prefix.1.len()).step_by(self.page as usize) {
            let node = self
                .tree
                .get_mut(&Self::key(&prefix.0, &prefix.1[..n]))
                .expect("a locked or guarded prefix is in the tree");
            node.locks = node.locks.checked_add_signed(delta).expect("locks balance");
        }
    }

    fn tree_slots(&self, identity: &Identity, tokens: &[Token], n: u32) -> Vec<i64> {
        (0..n)
            .map(|t| {
                let end = block::floor(t, self.page) + self.page;
                let node = &self.tree[&Self::key(identity, &tokens[..end as usize])];
                i64::from(node.page * self.page + t % self.page)
            })
            .collect()
    }

    /// Puts the pages of `slots` under `tokens`; pages that were there stay. A new handle.
    fn tree_insert(&mut self, identity: &Identity, tokens: &[Token], slots: &[i64]) -> PrefixHandle {
        for (n, first) in (self.page as usize..=tokens.len())
            .step_by(self.page as usize)
            .zip(slots.iter().step_by(self.page as usize))
        {
            let page = *first as u32 / self.page;
            self.tree
                .entry(Self::key(identity, &tokens[..n]))
                .or_insert(Node { page, locks: 0 });
        }
        self.handle(identity, tokens)
    }

    fn handle(&mut self, identity: &Identity, tokens: &[Token]) -> PrefixHandle {
        if tokens.is_empty() {
            return PrefixHandle::ROOT;
        }
        let handle = PrefixHandle(self.next_handle);
        self.next_handle += 1;
        self.handles.insert(handle, (identity.clone(), tokens.to_vec()));
        handle
    }

    pub fn tree_tokens(&self, locked: bool) -> u32 {
        self.tree.values().filter(|n| (n.locks > 0) == locked).count() as u32 * self.page
    }

    // ---- pages

    /// The engine's `evict`: the plain tree first, guarding the idle sessions' prefixes, then victims.
    pub fn make_room(&mut self, pages: u32) -> bool {
        loop {
            let guard: Vec<_> = self.w.idle_prefixes().map(|h| self.handles[&h].clone()).collect();
            guard.iter().for_each(|p| self.path(p, 1));
            while (self.free.len() as u32) < pages {
                let leaf = self.tree.iter().find(|(k, n)| {
                    n.locks == 0
                        && !self
                            .tree
                            .keys()
                            .any(|o| o.0 == k.0 && o.1.len() > k.1.len() && o.1.starts_with(&k.1))
                });
                let Some(key) = leaf.map(|(k, _)| k.clone()) else { break };
                let node = self.tree.remove(&key).unwrap();
                self.give(node.page);
            }
            guard.iter().for_each(|p| self.path(p, -1));
            if (self.free.len() as u32) >= pages {
                return true;
            }
            match self.w.victim(self.now) {
                Some(victim) => {
                    self.effects();
                    assert!(victim.tokens <= victim.frees.slots.len() as u32 * self.page);
                    self.take_back(victim.frees);
                }
                None => {
                    assert_eq!(self.w.evictable(), 0, "SES-3: all that is evictable can be had");
                    return false;
                }
            }
        }
    }

    fn alloc(&mut self, pages: u32) -> Option<Vec<u32>> {
        self.make_room(pages)
            .then(|| (0..pages).map(|_| self.free.pop_first().unwrap()).collect())
    }

    fn give(&mut self, page: u32) {
        for slot in page * self.page..(page + 1) * self.page {
            for (lease, reader) in &self.readers {
                assert!(
                    reader.seen.iter().all(|(s, _)| *s != slot),
                    "page {page} freed under {lease:?}, which is not fenced"
                );
            }
            for pull in &self.pulls {
                let landing = pull.flight.as_ref().is_some_and(|f| f.slots.contains(&slot));
                assert!(!landing, "page {page} freed while {:?} writes into it", pull.import);
            }
            self.kv[slot as usize] = 0xdead;
        }
        assert!(self.free.insert(page), "double free of page {page}");
    }

    pub fn take_back(&mut self, frees: Frees) {
        for slot in frees.slots {
            let page = slot / self.page;
            assert_eq!(slot % self.page, 0, "one first slot per page");
            assert!(
                !self.tree.values().any(|n| n.page == page),
                "page {page} belongs to the tree"
            );
            for run in self.runs.iter().filter(|r| r.running) {
                assert!(
                    !run.row.iter().any(|s| *s as u32 / self.page == page),
                    "page {page} is in the row of {:?}",
                    run.id
                );
            }
            self.give(page);
        }
        for handle in frees.prefixes {
            assert!(self.handles.remove(&handle).is_some(), "{handle:?} comes back once");
        }
    }

    /// Carried out before the call that caused them returns.
    pub fn effects(&mut self) {
        while let Some(effect) = self.w.poll_effect() {
            match effect {
                Effect::FenceLease { lease } => {
                    self.readers.remove(&lease);
                    self.fenced.push(lease);
                }
                Effect::FenceImport { import } => {
                    if let Some(pull) = self.pulls.iter_mut().find(|p| p.import == import) {
                        pull.flight = None;
                    }
                }
                Effect::Pull { import, from, slots } => {
                    let pull = self.pulls.iter_mut().find(|p| p.import == import).unwrap();
                    pull.flight = Some(Flight { from, slots });
                }
                Effect::Confirm { import } => self
                    .pulls
                    .iter_mut()
                    .filter(|p| p.import == import)
                    .for_each(|p| p.confirming = true),
                Effect::ImportDone { import, outcome } => {
                    self.pulls
                        .retain(|p| p.import != import || (outcome.is_err() && p.locked.is_some()));
                    self.done.push((import, outcome));
                }
                Effect::LeaseGrown { .. } | Effect::Arrived { .. } | Effect::Wake => {}
                Effect::OpenLease { .. }
                | Effect::AskHandover { .. }
                | Effect::Announce { .. }
                | Effect::EndLease { .. } => self.said.push(effect),
            }
        }
    }

    fn write(&mut self, slot: Slot, value: u64) {
        let free = self.free.contains(&(slot / self.page));
        assert!(!free, "a free page is written");
        self.kv[slot as usize] = value;
    }
}
