//! A simple engine for the tests: it owns the free list, a prefix tree and the KV of every slot, and does around the
//! worker's calls what the shim does. KV is a hash of the whole token prefix, so a slot that ends up at the wrong
//! position, in the wrong session or rewritten under a reader is seen, whatever the tokens are (kv-movement §6).

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

    // ---- a turn's way

    pub fn arrival(session: u8, identity: Identity, prompt: Vec<Token>, max_new: u32) -> Arrival {
        Arrival {
            session: name(session),
            identity,
            prompt: Prompt::Full(prompt),
            max_new,
            reservation: None,
            placement: None,
            origin: None,
        }
    }

    pub fn arrive(&mut self, session: u8, arrival: Arrival, prompt: Vec<Token>) -> Result<TurnId, Refusal> {
        let identity = arrival.identity.clone();
        let id = self.w.arrive(arrival, self.now);
        self.effects();
        let id = id?;
        self.runs.push(Run {
            id,
            session,
            identity,
            prompt,
            output: Vec::new(),
            row: Vec::new(),
            protected: 0,
            node: None,
            restored: 0,
            from_session: false,
            adopted: false,
            claimed: 0,
            written: 0,
            running: false,
        });
        Ok(id)
    }

    pub fn say(&mut self, session: u8, prompt: &[Token], max_new: u32) -> Result<TurnId, Refusal> {
        self.arrive(
            session,
            Self::arrival(session, identity(0), prompt.to_vec(), max_new),
            prompt.to_vec(),
        )
    }

    pub fn run(&mut self, id: TurnId) -> &mut Run {
        self.runs.iter_mut().find(|r| r.id == id).unwrap()
    }

    fn at(&self, id: TurnId) -> usize {
        self.runs.iter().position(|r| r.id == id).unwrap()
    }

    /// What the engine would match, with the bytes behind it checked.
    pub fn matched(&self, id: TurnId) -> Matched {
        let run = &self.runs[self.at(id)];
        let limit = (run.prompt.len() + run.output.len()).saturating_sub(1) as u32;
        let matched = self.w.match_turn(id, limit);
        if let Matched::Session { tokens, shared, prefix } = matched {
            assert!(tokens >= shared && tokens <= limit && tokens > 0);
            let mut slots = vec![-1; tokens as usize];
            self.w.slots_into(id, &mut slots);
            let truth = kv(&run.identity, &run.prompt);
            for (at, slot) in slots.iter().enumerate() {
                assert_eq!(
                    self.kv[*slot as usize], truth[at],
                    "byte {at} of {:?} is another position's",
                    run.id
                );
            }
            if shared > 0 {
                assert_eq!(
                    self.handles[&prefix],
                    (run.identity.clone(), run.prompt[..shared as usize].to_vec())
                );
            }
        }
        matched
    }

    /// `inc_lock_ref`.
    pub fn lock(&mut self, id: TurnId) {
        let matched = self.matched(id);
        let at = self.at(id);
        if let Matched::Session { tokens, shared, prefix } = matched {
            self.w.claim(id, tokens);
            let node = (shared > 0).then(|| self.handles[&prefix].clone());
            if let Some(node) = &node {
                self.path(node, 1);
            }
            let run = &mut self.runs[at];
            (run.claimed, run.protected, run.node, run.from_session, run.restored) =
                (tokens, shared, node, true, tokens);
        } else {
            let (identity, prompt) = (self.runs[at].identity.clone(), self.runs[at].prompt.clone());
            let m = self.tree_match(&identity, &prompt, prompt.len().saturating_sub(1));
            let node = (identity, prompt[..m as usize].to_vec());
            self.path(&node, 1);
            let run = &mut self.runs[at];
            (run.claimed, run.protected, run.node, run.from_session, run.restored) = (0, m, Some(node), false, m);
        }
    }

    /// `dec_lock_ref` of a request that does not fit.
    pub fn unlock(&mut self, id: TurnId) {
        let at = self.at(id);
        if let Some(node) = self.runs[at].node.take() {
            self.path(&node, -1);
        }
        if self.runs[at].from_session {
            self.w.unclaim(id);
        }
        let run = &mut self.runs[at];
        (run.claimed, run.protected, run.from_session) = (0, 0, false);
    }

    /// Match, lock, begin, allocate and write the first `chunk` tokens. False: no room, unlocked again.
    pub fn start(&mut self, id: TurnId, chunk: u32) -> bool {
        self.lock(id);
        let at = self.at(id);
        let mut head = vec![0i64; self.runs[at].restored as usize];
        if self.runs[at].from_session {
            self.w.slots_into(id, &mut head);
        } else {
            let run = &self.runs[at];
            head = self.tree_slots(&run.identity, &run.prompt, run.protected);
        }
        let total = (self.runs[at].prompt.len() + self.runs[at].output.len()) as u32;
        let chunk = chunk.min(total - head.len() as u32);
        let want = self.pages_for(head.len() as u32, chunk);
        if (self.free.len() as u32 + self.tree_tokens(false) / self.page + self.w.evictable() / self.page) < want {
            self.unlock(id);
            return false;
        }
        let frees = self.w.begin(id, self.now);
        self.effects();
        self.take_back(frees);
        let run = &mut self.runs[at];
        run.running = true;
        run.row = head.iter().map(|s| *s as i32).collect();
        run.written = run.row.len() as u32;
        assert!(self.extend(id, chunk), "what the budget promised can be had (ADM-9)");
        true
    }

    fn pages_for(&self, have: u32, more: u32) -> u32 {
        block::pages(have + more, self.page) - block::pages(have, self.page)
    }

    /// Allocates for `more` tokens and writes their KV. False: no room.
    pub fn extend(&mut self, id: TurnId, more: u32) -> bool {
        let at = self.at(id);
        let have = self.runs[at].row.len() as u32;
        let total = (self.runs[at].prompt.len() + self.runs[at].output.len()) as u32;
        let more = more.min(total - have);
        let Some(pages) = self.alloc(self.pages_for(have, more)) else {
            return false;
        };
        let mut pages = pages.into_iter();
        for pos in have..have + more {
            let slot = if pos % self.page == 0 {
                pages.next().unwrap() * self.page
            } else {
                *self.runs[at].row.last().unwrap() as u32 + 1
            };
            self.runs[at].row.push(slot as i32);
        }
        let run = &self.runs[at];
        let truth = kv(&run.identity, &[run.prompt.clone(), run.output.clone()].concat());
        for (pos, value) in truth
            .iter()
            .enumerate()
            .take((have + more) as usize)
            .skip(have as usize)
        {
            let slot = self.runs[at].row[pos] as u32;
            self.write(slot, *value);
        }
        let run = &mut self.runs[at];
        run.written = have + more;
        let (readable, row) = (run.written, run.row.clone());
        self.w.begin(id, self.now);
        self.w.progress(id, readable, &row, self.now);
        self.effects();
        true
    }

    pub fn prefilled(&self, id: TurnId) -> bool {
        let run = &self.runs[self.at(id)];
        run.running && run.written as usize >= run.prompt.len()
    }

    /// The end of a prefill: a tree turn's first prompt goes into the tree.
    pub fn adopt(&mut self, id: TurnId) {
        let at = self.at(id);
        if self.runs[at].from_session || self.runs[at].adopted {
            return;
        }
        let shared = block::floor(self.w.share_len(id).max(self.runs[at].protected), self.page);
        let (identity, prompt) = (self.runs[at].identity.clone(), self.runs[at].prompt.clone());
        let prefix = prompt[..shared as usize].to_vec();
        let own: Vec<i64> = self.runs[at].row.iter().map(|s| i64::from(*s)).collect();
        let handle = self.tree_insert(&identity, &prefix, &own);
        let node = (identity.clone(), prefix.clone());
        self.path(&node, 1);
        if let Some(old) = self.runs[at].node.replace(node) {
            self.path(&old, -1);
        }
        let tree = self.tree_slots(&identity, &prefix, shared);
        for (slot, new) in self.runs[at].row.iter_mut().zip(tree) {
            *slot = new as i32;
        }
        let run = &mut self.runs[at];
        (run.adopted, run.protected) = (true, shared);
        let row = run.row.clone();
        let frees = self.w.adopt(id, shared, handle, &row, self.now);
        self.effects();
        self.take_back(frees);
    }

    /// A decode step: one more token sampled, the one before gets its KV.
    pub fn decode(&mut self, id: TurnId, token: Token) -> bool {
        self.run(id).output.push(token);
        let at = self.at(id);
        let pending = (self.runs[at].prompt.len() + self.runs[at].output.len() - self.runs[at].row.len()) as u32;
        pending <= 1 || self.extend(id, pending - 1)
    }

    pub fn commit(&mut self, id: TurnId) {
        self.adopt(id);
        let at = self.at(id);
        let mut run = self.runs.remove(at);
        let frees = self.w.commit(id, run.written, &run.output, &run.row, self.now);
        self.effects();
        self.take_back(frees);
        if let Some(node) = run.node.take() {
            self.path(&node, -1);
        }
    }

    pub fn roll_back(&mut self, id: TurnId, how: Rollback) {
        let at = self.at(id);
        let end = self.runs[at].row.len() as u32;
        self.runs[at].running = false;
        let row = std::mem::take(&mut self.runs[at].row);
        let (m, node) = (self.runs[at].protected, self.runs[at].node.take());
        let frees = self.w.rollback(id, end, &row, how, self.now);
        self.effects();
        if !self.runs[at].from_session && !self.runs[at].adopted {
            assert!(frees.slots.is_empty(), "before adopt the row is the engine's");
            let mut pages: Vec<_> = row[m as usize..].iter().map(|s| *s as u32 / self.page).collect();
            pages.dedup();
            pages.into_iter().for_each(|p| self.give(p));
        }
        if let Some(node) = node {
            self.path(&node, -1);
        }
        self.take_back(frees);
        if how == Rollback::Abort {
            self.runs.remove(at);
        } else {
            let run = &mut self.runs[at];
            (run.claimed, run.protected, run.from_session, run.adopted, run.written) = (0, 0, false, false, 0);
        }
    }

    pub fn cancel(&mut self, id: TurnId) {
        let at = self.at(id);
        assert!(!self.runs[at].running);
        if self.runs[at].claimed > 0 || self.runs[at].node.is_some() {
            self.unlock(id);
        }
        self.runs.remove(at);
        self.w.cancel(id, self.now);
        self.effects();
    }

    /// A whole turn, prefill in one chunk and `new` tokens; the history after it.
    pub fn turn(&mut self, session: u8, prompt: &[Token], new: u32) -> Vec<Token> {
        let id = self.say(session, prompt, new).unwrap();
        self.finish(id, new)
    }

    pub fn finish(&mut self, id: TurnId, new: u32) -> Vec<Token> {
        assert!(self.start(id, u32::MAX / 2), "room");
        self.decode_and_commit(id, new)
    }

    /// The rest of a turn that has begun.
    pub fn finish_running(&mut self, id: TurnId) {
        assert!(self.extend(id, u32::MAX / 2));
        self.decode_and_commit(id, 1);
    }

    fn decode_and_commit(&mut self, id: TurnId, new: u32) -> Vec<Token> {
        self.adopt(id);
        for i in 0..new {
            assert!(self.decode(id, 1000 + i));
        }
        let run = self.run(id);
        let history = [run.prompt.clone(), run.output.clone()].concat();
        self.commit(id);
        history
    }

    // ---- the loop

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

    fn commit_import(&mut self, import: ImportId, share: u32) {
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
    fn import_slots(&self, import: ImportId) -> Vec<i64> {
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

    // ---- what must hold after every step

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
