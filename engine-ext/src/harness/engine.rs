//! [`TestEngine`]: the loop, the allocator and the turns.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use kvc_cuda::{Dtype, HostArena, Shape};
use kvc_proto::{
    id::{ImportId, Placement, PrefixHandle, ReservationId, SessionId, TurnId},
    wire::reason::Refusal,
    worker::{Arrival, Command, Frees, Identity, Matched, Prompt, Rollback, Slot, Snapshot, Token},
};
use kvc_rdma::Mover;

use crate::{Config, Engine, EngineFacts, StartError};

use super::tree::Tree;

/// How a [`TestEngine`] starts.
pub struct Start {
    /// The module's settings.
    pub config: Config,
    /// Pages of the pool.
    pub pages: u32,
    /// Tokens per page.
    pub page_tokens: u32,
    /// The model's name.
    pub model: &'static str,
    /// Heads per rank: another number is another layout.
    pub heads: u32,
    /// These movers, best first, in place of those of the settings.
    pub movers: Vec<Arc<dyn Mover>>,
    /// The pool lies in a memfd, so that `shm` can be offered.
    pub shared: bool,
}

impl Start {
    /// 256 pages of `page_tokens`, 2 layers of 2 heads, tcp.
    pub fn new(config: Config, page_tokens: u32) -> Self {
        Self {
            config,
            pages: 256,
            page_tokens,
            model: "tiny",
            heads: 2,
            movers: Vec::new(),
            shared: false,
        }
    }
}

/// An engine process in small. Its thread is the caller's: one call is one part of a scheduler iteration.
pub struct TestEngine {
    engine: Engine,
    arena: HostArena,
    page: u32,
    pages: u32,
    free: Vec<u32>,
    tree: Tree,
    landing: BTreeMap<ImportId, Landing>,
    running: BTreeMap<TurnId, u32>,
    aborted: BTreeSet<TurnId>,
}

struct Landing {
    tokens: Arc<[Token]>,
    identity: String,
    locked: PrefixHandle,
    /// Slots of the first tokens, as far as this engine knows them from token 0 on.
    known: Vec<Slot>,
}

/// A turn that has reached the scheduler.
pub struct TestTurn {
    /// The machine's name for it.
    pub id: TurnId,
    /// Tokens that were restored or found in the tree.
    pub reused: u32,
    identity: String,
    prompt: Vec<Token>,
    row: Vec<i32>,
    locked: PrefixHandle,
    tree: bool,
    begun: bool,
}

impl TestEngine {
    /// Starts the module over a fresh pool.
    ///
    /// # Errors
    /// [`StartError`].
    ///
    /// # Panics
    /// Without memory.
    pub fn start(start: Start) -> Result<Self, StartError> {
        let shape = Shape {
            dtype: Dtype::Float32,
            layers: 2,
            heads: start.heads,
            head_dim: 4,
            page_tokens: start.page_tokens,
            tp: (0, 1),
        };
        // Like SGLang's pool: one page more than is ever handed out, page 0.
        let slots = (start.pages + 1) * start.page_tokens;
        let arena = if start.shared {
            HostArena::shared(shape, slots)
        } else {
            HostArena::new(shape, slots)
        };
        let arena = arena.expect("memory");
        let facts = EngineFacts {
            layout: arena.layout().clone(),
            model: start.model.into(),
            engine: "harness".into(),
            capacity: start.pages * start.page_tokens,
        };
        let engine = if start.movers.is_empty() {
            Engine::start(start.config, facts)?
        } else {
            Engine::start_with(start.config, facts, start.movers)?
        };
        Ok(Self {
            engine,
            arena,
            page: start.page_tokens,
            pages: start.pages,
            free: (1..=start.pages).rev().collect(),
            tree: Tree::default(),
            landing: BTreeMap::new(),
            running: BTreeMap::new(),
            aborted: BTreeSet::new(),
        })
    }

    /// The module.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The pool.
    pub fn arena(&self) -> &HostArena {
        &self.arena
    }

    /// Free pages.
    pub fn free_pages(&self) -> u32 {
        self.free.len() as u32
    }

    /// One iteration of the loop without running anything: publish, then do what the machine asks for.
    pub fn step(&mut self) {
        let snapshot = Snapshot {
            free: self.free_pages() * self.page,
            tree_evictable: self.tree.evictable(self.page) * self.page,
            running: self.running.len() as u32,
            allocated: self.running.iter().map(|(turn, tokens)| (*turn, *tokens)).collect(),
            ..Snapshot::default()
        };
        self.engine.clear_wake();
        for command in self.engine.poll(&snapshot) {
            self.obey(command);
        }
    }

    /// A request reaches the scheduler.
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn arrive(
        &mut self,
        session: &str,
        prompt: &[Token],
        max_new: u32,
        reservation: Option<ReservationId>,
        placement: Option<Placement>,
    ) -> Result<TestTurn, Refusal> {
        let arrival = Arrival {
            session: SessionId::new(session).expect("a session id"),
            identity: Identity::default(),
            prompt: Prompt::Full(prompt.to_vec()),
            max_new,
            reservation,
            placement,
            origin: None,
        };
        let id = self.engine.scheduler(|w, now| w.arrive(arrival, now))?;
        Ok(TestTurn {
            id,
            reused: 0,
            identity: String::new(),
            prompt: prompt.to_vec(),
            row: Vec::new(),
            locked: PrefixHandle::ROOT,
            tree: false,
            begun: false,
        })
    }

    /// Matches, locks, and begins: the turn's row holds what is reused.
    pub fn begin(&mut self, turn: &mut TestTurn) {
        let limit = turn.prompt.len() as u32 - 1;
        match self.engine.scheduler(|w, _| w.match_turn(turn.id, limit)) {
            Matched::Session { tokens, prefix, .. } => {
                turn.tree = false;
                turn.locked = prefix;
                turn.reused = tokens;
                self.tree.lock(prefix);
                let mut slots = vec![0i64; tokens as usize];
                self.engine.scheduler(|w, _| {
                    w.claim(turn.id, tokens);
                    w.slots_into(turn.id, &mut slots);
                });
                turn.row = slots.iter().map(|s| *s as i32).collect();
            }
            Matched::Tree => {
                turn.tree = true;
                let found = self
                    .tree
                    .find(&turn.identity, &turn.prompt[..limit as usize], self.page);
                let (handle, slots) = found.unwrap_or((PrefixHandle::ROOT, Vec::new()));
                turn.locked = handle;
                turn.reused = slots.len() as u32;
                self.tree.lock(handle);
                turn.row = slots.iter().map(|s| *s as i32).collect();
            }
        }
        let frees = self.engine.scheduler(|w, now| w.begin(turn.id, now));
        self.take(frees);
        turn.begun = true;
        self.running.insert(turn.id, 0);
    }

    /// Computes the KV of the prompt up to `upto` and tells the machine; begins if that has not happened.
    ///
    /// # Panics
    /// When the pool is full.
    pub fn prefill(&mut self, turn: &mut TestTurn, upto: usize) {
        if !turn.begun {
            self.begin(turn);
        }
        let tokens = turn.prompt[..upto].to_vec();
        self.extend(turn, &tokens);
        self.engine
            .scheduler(|w, now| w.progress(turn.id, upto as u32, &turn.row, now));
    }

    /// Prefills what is left, generates `output`, commits.
    pub fn finish(&mut self, mut turn: TestTurn, output: &[Token]) {
        let prompt = turn.prompt.clone();
        self.prefill(&mut turn, prompt.len());
        if turn.tree {
            self.adopt(&mut turn);
        }
        let mut all = prompt;
        // The last token's KV is never computed.
        all.extend(&output[..output.len().saturating_sub(1)]);
        self.extend(&mut turn, &all);
        let committed = all.len() as u32;
        let frees = self
            .engine
            .scheduler(|w, now| w.commit(turn.id, committed, output, &turn.row, now));
        self.end(&turn, frees);
    }

    /// The client went away in the middle.
    pub fn abort(&mut self, turn: TestTurn) {
        if !turn.begun {
            self.engine.scheduler(|w, now| w.cancel(turn.id, now));
            return;
        }
        let end = turn.row.len() as u32;
        let frees = self
            .engine
            .scheduler(|w, now| w.rollback(turn.id, end, &turn.row, Rollback::Abort, now));
        if turn.tree {
            // Until it is adopted the row past the tree's part is the engine's own to free.
            let page = self.page;
            let own = &turn.row[turn.reused as usize..];
            self.release(own.iter().step_by(page as usize).map(|slot| *slot as u32 / page));
        }
        self.end(&turn, frees);
    }

    /// Whether the machine wants this turn to end (SES-4); the caller aborts it, as an engine's next step would.
    pub fn is_aborted(&self, turn: &TestTurn) -> bool {
        self.aborted.contains(&turn.id)
    }

    /// A whole turn.
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn run(&mut self, session: &str, prompt: &[Token], output: &[Token]) -> Result<u32, Refusal> {
        let mut turn = self.arrive(session, prompt, output.len() as u32, None, None)?;
        self.begin(&mut turn);
        let reused = turn.reused;
        self.finish(turn, output);
        self.step();
        Ok(reused)
    }

    /// The bytes that a begun turn's row holds, per position.
    pub fn bytes(&self, turn: &TestTurn) -> Vec<Vec<u8>> {
        turn.row
            .iter()
            .map(|slot| self.arena.read_token(*slot as u32))
            .collect()
    }

    /// The slot of one position of a begun turn.
    pub fn slot(&self, turn: &TestTurn, at: usize) -> Slot {
        turn.row[at] as Slot
    }

    /// Whether the loop has been woken since its last step.
    pub fn woken(&self) -> bool {
        self.engine.woken()
    }

    /// The engine's `/flush_cache`: idle, so every page is free afterwards.
    pub fn flush(&mut self) {
        self.engine.scheduler(|w, now| w.flush(now));
        self.tree = Tree::default();
        self.landing.clear();
        self.free = (1..=self.pages).rev().collect();
    }

    /// Drops every session and prefix; afterwards every page is free, or something leaked.
    ///
    /// # Panics
    /// If a prefix is still locked.
    pub fn drain(&mut self) -> bool {
        self.step();
        let sessions = self.engine.scheduler(|w, now| w.sessions(None, 10_000, now)).sessions;
        for view in sessions {
            self.engine.scheduler(|w, now| w.close(&view.session_id, now));
        }
        self.step();
        self.step();
        assert_eq!(self.tree.locks(), 0, "a prefix is still locked");
        while let Some(pages) = self.tree.evict(&[], self.page) {
            self.release(pages.into_iter());
        }
        self.free_pages() == self.pages
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Free(frees) => self.take(frees),
            Command::Drop { frees, locked } => {
                self.take(frees);
                self.tree.unlock(locked);
            }
            Command::Land {
                import,
                tokens,
                held,
                identity,
            } => self.land(import, tokens, held, identity.0.to_string()),
            Command::Commit { import, share } => self.share(import, share),
            Command::Abort { turn } => drop(self.aborted.insert(turn)),
        }
    }

    fn land(&mut self, import: ImportId, tokens: Arc<[Token]>, held: u32, identity: String) {
        let (locked, head) = self
            .tree
            .find(&identity, &tokens, self.page)
            .unwrap_or((PrefixHandle::ROOT, Vec::new()));
        self.tree.lock(locked);
        let have = head.len() as u32;
        let from = have.max(held);
        let pages = (tokens.len() as u32).saturating_sub(from).div_ceil(self.page);
        if !self.room(pages) {
            self.tree.unlock(locked);
            self.engine.scheduler(|w, now| w.land_failed(import, now));
            return;
        }
        let page = self.page;
        let taken: Vec<u32> = (0..pages).filter_map(|_| self.free.pop()).collect();
        let slots: Vec<i64> = taken
            .iter()
            .flat_map(|p| (0..page).map(move |i| i64::from(p * page + i)))
            .collect();
        let wide: Vec<i64> = head.iter().map(|s| i64::from(*s)).collect();
        let frees = self
            .engine
            .scheduler(|w, now| w.landed(import, have, locked, &wide, &slots, now));
        if frees.prefixes.contains(&locked) || frees.slots.len() as u32 == pages && pages > 0 {
            self.tree.unlock(locked);
            self.take(frees);
            return;
        }
        self.take(frees);
        let mut known = head;
        if from == have {
            known.extend(slots.iter().map(|s| *s as Slot));
        }
        let landing = Landing {
            tokens,
            identity,
            locked,
            known,
        };
        self.landing.insert(import, landing);
    }

    fn share(&mut self, import: ImportId, share: u32) {
        let landing = self.landing.remove(&import).expect("a landing of ours");
        let share = share as usize / self.page as usize * self.page as usize;
        if share > 0 && share <= landing.known.len() {
            let (handle, head) =
                self.tree
                    .insert(&landing.identity, &landing.tokens[..share], &landing.known, self.page);
            let head: Vec<i64> = head.iter().map(|s| i64::from(*s)).collect();
            let frees = self
                .engine
                .scheduler(|w, now| w.import_shared(import, share as u32, handle, &head, now));
            self.take(frees);
        }
        self.engine.scheduler(|w, now| w.import_committed(import, now));
        self.tree.unlock(landing.locked);
    }

    fn adopt(&mut self, turn: &mut TestTurn) {
        let shared = self.engine.scheduler(|w, _| w.share_len(turn.id)).max(turn.reused) / self.page * self.page;
        let n = shared as usize;
        let slots: Vec<Slot> = turn.row.iter().map(|s| *s as Slot).collect();
        let handle = if n == 0 {
            PrefixHandle::ROOT
        } else {
            let (handle, own) = self.tree.insert(&turn.identity, &turn.prompt[..n], &slots, self.page);
            for (cell, slot) in turn.row.iter_mut().zip(own) {
                *cell = slot as i32;
            }
            handle
        };
        self.tree.lock(handle);
        let frees = self
            .engine
            .scheduler(|w, now| w.adopt(turn.id, shared, handle, &turn.row, now));
        self.take(frees);
        self.tree.unlock(turn.locked);
        turn.locked = handle;
        turn.tree = false;
    }

    fn end(&mut self, turn: &TestTurn, frees: Frees) {
        self.take(frees);
        self.tree.unlock(turn.locked);
        self.running.remove(&turn.id);
    }

    /// Allocates and writes the KV of `tokens` past the row's end.
    fn extend(&mut self, turn: &mut TestTurn, tokens: &[Token]) {
        for at in turn.row.len()..tokens.len() {
            let slot = if (at as u32).is_multiple_of(self.page) {
                assert!(self.room(1), "the pool is full");
                self.free.pop().expect("a page") * self.page
            } else {
                turn.row[at - 1] as u32 + 1
            };
            turn.row.push(slot as i32);
            self.arena
                .write_token(slot, &kv_of(&tokens[..=at], self.arena.layout().token_bytes()));
        }
        if let Some(tokens) = self.running.get_mut(&turn.id) {
            *tokens = turn.row.len() as u32 - turn.reused;
        }
    }

    /// The engine's `evict`: its own tree first, then idle sessions.
    fn room(&mut self, pages: u32) -> bool {
        while self.free_pages() < pages {
            let guarded: Vec<_> = self.engine.scheduler(|w, _| w.idle_prefixes().collect());
            if let Some(freed) = self.tree.evict(&guarded, self.page) {
                self.release(freed.into_iter());
                continue;
            }
            let Some(victim) = self.engine.scheduler(|w, now| w.victim(now)) else {
                return false;
            };
            self.take(victim.frees);
        }
        true
    }

    fn take(&mut self, frees: Frees) {
        let page = self.page;
        self.release(frees.slots.into_iter().map(|slot| slot / page));
    }

    fn release(&mut self, pages: impl Iterator<Item = u32>) {
        for page in pages {
            assert!((1..=self.pages).contains(&page), "page {page} is not of this pool");
            assert!(!self.free.contains(&page), "page {page} was freed twice");
            self.free.push(page);
        }
    }
}

/// The KV of every position of `tokens`, `bytes` each.
pub fn true_kv(tokens: &[Token], bytes: u64) -> Vec<Vec<u8>> {
    (0..tokens.len()).map(|at| kv_of(&tokens[..=at], bytes)).collect()
}

/// The KV of the last of `tokens`: depends on all of them and on its position.
fn kv_of(tokens: &[Token], bytes: u64) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for token in tokens {
        state = (state ^ u64::from(*token))
            .wrapping_mul(0xff51_afd7_ed55_8ccd)
            .rotate_left(31);
    }
    (0..bytes)
        .map(|i| {
            let mut x = state.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            x ^= x >> 29;
            x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
            (x >> 56) as u8
        })
        .collect()
}
