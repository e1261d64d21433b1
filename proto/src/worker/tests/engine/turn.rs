//! The way of a turn through the test engine: arrival, match, claim, rows, commit.

use super::*;

impl Engine {
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

    pub(super) fn at(&self, id: TurnId) -> usize {
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

    pub(super) fn pages_for(&self, have: u32, more: u32) -> u32 {
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

    pub(super) fn decode_and_commit(&mut self, id: TurnId, new: u32) -> Vec<Token> {
        self.adopt(id);
        for i in 0..new {
            assert!(self.decode(id, 1000 + i));
        }
        let run = self.run(id);
        let history = [run.prompt.clone(), run.output.clone()].concat();
        self.commit(id);
        history
    }
}
