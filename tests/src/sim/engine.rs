//! The engine's scheduler loop and its requests: receive, poll, then one forward of a prefill chunk or of one decode
//! step. Around the machine's calls it does what `python-shim` does in `hooks.py` and `cache.py`.

use kvc_proto::{
    id::{SessionId, TurnId},
    wire::reason::Reason,
    worker::{Arrival, Identity, Matched, Prompt, Rollback, Snapshot, Token},
};

use super::{
    kv::{self, Kv},
    message::{CallId, NodeId, Reply, TurnAsk},
    oracle::Oracle,
    process::{Process, Tick},
    tree::Path,
};

/// A loop iteration that had nothing to compute comes again after this long; an idle engine's after [`IDLE`].
const SPIN: u64 = 2_000;
const IDLE: u64 = 300_000;
/// As in `hooks.py`.
const STUCK: u32 = 3;

/// What a forward computes.
#[derive(Clone, Debug)]
pub enum Batch {
    /// These requests up to this token.
    Prefill(Vec<(u64, u32)>),
    /// One more token of each.
    Decode(Vec<u64>),
}

/// A request in the engine.
#[derive(Debug)]
pub struct Request {
    pub(super) call: CallId,
    pub(super) turn: Option<TurnId>,
    pub(super) session: Option<SessionId>,
    pub(super) prompt: Vec<Token>,
    pub(super) output: Vec<Token>,
    /// True KV of prompt and output.
    pub(super) truth: Vec<Kv>,
    pub(super) max_new: u32,
    stream: bool,
    told: bool,
    pub(super) aborted: bool,
    /// Slots from token 0 on; empty until it runs.
    pub(super) row: Vec<i32>,
    /// Locked nodes of the tree.
    pub(super) path: Path,
    /// Tokens in tree pages at the head of the row, while it is locked or runs.
    protected: u32,
    /// The match is the session's own.
    pub(super) own: bool,
    pub(super) adopted: bool,
    pub(super) begun: bool,
    /// Tokens of the row whose KV was there when it began.
    pub(super) matched: u32,
    written: u32,
    /// ADM-7: what the ledger must have promised it, in tokens.
    pub(super) promised: u32,
}

impl Request {
    pub(super) fn protected(&self) -> u32 {
        self.protected
    }

    pub(super) fn row_pages(&self, page: u32) -> u32 {
        (self.row.len() as u32).div_ceil(page)
    }

    fn len(&self) -> u32 {
        self.truth.len() as u32
    }

    fn say(&mut self, token: Token) {
        let before = *self.truth.last().unwrap_or(&0);
        self.output.push(token);
        self.truth.push(kv::next(before, token));
    }
}

impl Process {
    pub(super) fn step(&mut self) {
        self.stirred = true;
        while let Some((call, from, ask)) = self.inbox.pop_front() {
            self.arrive(call, from, ask);
        }
        self.sweep();
        self.unwedge();
        let snapshot = self.snapshot();
        let commands = self.ask(|w, now| w.poll(&snapshot, now));
        self.check_ledger(&snapshot, &commands);
        self.land_waiting();
        for command in commands {
            self.command(command);
        }
        match self.choose() {
            Some(batch) => {
                let tokens: u32 = match &batch {
                    Batch::Prefill(entries) => entries.iter().map(|(id, upto)| upto - self.requests[id].written).sum(),
                    Batch::Decode(ids) => ids.len() as u32,
                };
                let time = self.speed.forward + u64::from(tokens) * self.speed.token;
                self.batch = Some(batch);
                self.after(time, Tick::Forward);
            }
            None if self.waiting.is_empty() => self.step_after(IDLE),
            None => self.step_after(SPIN),
        }
    }

    fn arrive(&mut self, call: CallId, _from: NodeId, ask: TurnAsk) {
        let max_new = if ask.tag.as_ref().is_some_and(|t| t.prefill_only) {
            0
        } else {
            ask.max_new
        };
        let capacity = self.pool.pages * self.pool.page;
        if ask.prompt.len() as u32 + max_new + self.pool.page > capacity {
            self.reply(call, Reply::Failed(Reason::BadRequest));
            return;
        }
        let (mut turn, mut session, mut promised) = (None, None, 0);
        if let Some(tag) = ask.tag {
            let before = self.w.session(&tag.session, self.now);
            let growth = max_new.min(self.w.config().clip);
            let prompt = Prompt::Full(ask.prompt.to_vec());
            let arrival = Arrival {
                session: tag.session.clone(),
                identity: ask.identity.clone(),
                prompt,
                max_new,
                reservation: tag.reservation,
                placement: tag.placement,
                origin: tag.origin,
            };
            let arrived = self.ask(|w, now| w.arrive(arrival, now));
            self.log(|| format!("turn of {} {} tokens: {arrived:?}", tag.session, ask.prompt.len()));
            match arrived {
                Err(why) => {
                    self.reply(call, Reply::Refused(why.code));
                    return;
                }
                Ok(id) => {
                    let busy = self.requests.values().any(|r| r.session.as_ref() == Some(&tag.session));
                    self.watch.check(!busy, Oracle::OneTurn, || {
                        format!("a second turn of {} was accepted", tag.session)
                    });
                    self.placed(&tag.session, before.as_ref(), tag.placement);
                    let len = ask.prompt.len() as u32;
                    let common = match self.w.match_turn(id, len) {
                        Matched::Tree => 0,
                        Matched::Session { tokens, .. } => tokens,
                    };
                    promised = self.needs(len - common, growth);
                    (turn, session) = (Some(id), Some(tag.session));
                }
            }
        }
        let request = Request {
            call,
            turn,
            session,
            truth: kv::truth(&ask.identity, &ask.prompt),
            prompt: ask.prompt.to_vec(),
            output: Vec::new(),
            max_new,
            stream: ask.stream,
            told: false,
            aborted: false,
            row: Vec::new(),
            path: Path::new(),
            protected: 0,
            own: false,
            adopted: false,
            begun: false,
            matched: 0,
            written: 0,
            promised,
        };
        let id = self.next_request;
        self.next_request += 1;
        self.requests.insert(id, request);
        self.waiting.push_back(id);
    }

    /// Requests whose client has gone leave the queue.
    fn sweep(&mut self) {
        let gone: Vec<u64> = self
            .waiting
            .iter()
            .copied()
            .filter(|id| self.requests[id].aborted)
            .collect();
        for id in gone {
            self.waiting.retain(|w| *w != id);
            if let Some(turn) = self.requests.remove(&id).and_then(|r| r.turn) {
                self.ask(|w, now| w.cancel(turn, now));
            }
        }
    }

    fn unwedge(&mut self) {
        let idle =
            !self.waiting.is_empty() && self.running.is_empty() && self.chunked.is_none() && self.landings.is_empty();
        self.stuck = if idle { self.stuck + 1 } else { 0 };
        if self.stuck > STUCK
            && let Some(turn) = self.waiting.front().and_then(|id| self.requests[id].turn)
        {
            let frees = self.ask(|w, now| w.unwedge(turn, now));
            self.take_back(frees);
        }
    }

    fn snapshot(&self) -> Snapshot {
        let page = self.pool.page;
        let begun = self.requests.values().filter(|r| r.begun);
        Snapshot {
            free: self.pool.free_pages() * page,
            tree_evictable: self.tree.evictable() * page,
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            pending_prefill_tokens: self
                .waiting
                .iter()
                .map(|id| self.requests[id].prompt.len() as u64)
                .sum(),
            reserved: self.promised(),
            allocated: begun
                .filter_map(|r| Some((r.turn?, (r.row.len() as u32).saturating_sub(r.matched))))
                .collect(),
        }
    }

    fn choose(&mut self) -> Option<Batch> {
        let chunk = self.speed.chunk;
        if let Some(id) = self.chunked {
            let request = &self.requests[&id];
            let upto = (request.written + chunk).min(request.len());
            // Nobody checks later chunks: a shortage here ends the real scheduler.
            if !self.extend(id, upto) {
                self.watch.fire(
                    Oracle::Room,
                    "the room that a prefill's next chunk was promised is not there",
                );
                return None;
            }
            return Some(Batch::Prefill(vec![(id, upto)]));
        }
        let mut entries = Vec::new();
        let (mut left, mut planned) = (chunk, 0);
        while self.running.len() + entries.len() < self.speed.running && left > 0 {
            let Some(&id) = self.waiting.front() else { break };
            self.lock(id);
            let Some(pages) = self.fits(id, planned, entries.is_empty()) else {
                self.unlock(id);
                break;
            };
            planned += pages;
            self.waiting.pop_front();
            let request = &self.requests[&id];
            let upto = (request.row.len() as u32 + left).min(request.len());
            left -= upto - request.row.len() as u32;
            let more = upto < request.len();
            entries.push((id, upto));
            if more {
                break;
            }
        }
        if entries.is_empty() {
            return self.decode();
        }
        for (id, _) in &entries {
            self.begin(*id);
        }
        for (id, upto) in &entries {
            if !self.extend(*id, *upto) {
                self.watch
                    .fire(Oracle::Room, "the room that a prefill was promised is not there");
            }
        }
        Some(Batch::Prefill(entries))
    }

    /// Tokens that a request may still say.
    pub(super) fn growth(&self, id: u64) -> u32 {
        let request = &self.requests[&id];
        request.max_new.saturating_sub(request.output.len() as u32)
    }

    /// Tokens of a request that are not prefilled.
    pub(super) fn unwritten(&self, id: u64) -> u32 {
        let request = &self.requests[&id];
        request.len() - request.written
    }

    /// Pages a locked request will still take, if the engine's budget has them.
    fn fits(&self, id: u64, planned: u32, first: bool) -> Option<u32> {
        let page = self.pool.page;
        let request = &self.requests[&id];
        let need = request.len().div_ceil(page) - (request.row.len() as u32).div_ceil(page);
        let growth = |r: &Request| r.max_new.saturating_sub(r.output.len() as u32).div_ceil(page);
        let trusted: u32 = self.running.iter().map(|id| growth(&self.requests[id])).sum();
        let room = (self.pool.free_pages() + self.tree.evictable() + self.w.evictable() / page).checked_sub(planned)?;
        let alone = first && self.running.is_empty();
        let wanted = need + growth(request) + trusted * self.speed.trust / 1000 + 1;
        (wanted <= room || (alone && need < room)).then_some(need + 1)
    }

    /// `match_prefix` and `inc_lock_ref`.
    pub(super) fn lock(&mut self, id: u64) {
        let request = &self.requests[&id];
        let limit = request.len().saturating_sub(1);
        let matched = request
            .turn
            .map_or(Matched::Tree, |turn| self.w.match_turn(turn, limit));
        let truth = request.truth.clone();
        let (path, row, own) = match (matched, request.turn) {
            (Matched::Session { tokens, shared, prefix }, Some(turn)) => {
                let mut slots = vec![-1i64; tokens as usize];
                self.w.slots_into(turn, &mut slots);
                for (at, slot) in slots.iter().enumerate() {
                    let right = u32::try_from(*slot).is_ok_and(|s| self.pool.read(s) == truth[at]);
                    self.watch.check(right, Oracle::TrueKv, || {
                        format!("token {at} of {} restored tokens of {turn} is another's", slots.len())
                    });
                }
                self.watch.check(
                    tokens > 0 && shared <= tokens && tokens <= limit,
                    Oracle::TrueKv,
                    || format!("match of {tokens}, shared {shared}, limit {limit}"),
                );
                self.ask(|w, _| w.claim(turn, tokens));
                let path = self.path_of(prefix);
                (path, slots.iter().map(|s| *s as i32).collect::<Vec<_>>(), true)
            }
            _ => {
                let path = self.tree.find(&truth, limit as usize);
                let row = self.tree.slots(&path).iter().map(|s| *s as i32).collect();
                (path, row, false)
            }
        };
        if !self.tree.lock(&path) {
            self.watch
                .fire(Oracle::OneOwner, "a prefix that a session relies on has left the tree");
        }
        let protected = path.len() as u32 * self.pool.page;
        if let Some(request) = self.requests.get_mut(&id) {
            request.written = row.len() as u32;
            (request.path, request.row, request.own, request.protected) = (path, row, own, protected);
            request.matched = request.written;
        }
    }

    fn unlock(&mut self, id: u64) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        self.tree.unlock(&std::mem::take(&mut request.path));
        request.row.clear();
        (request.protected, request.written, request.matched) = (0, 0, 0);
        if let (true, Some(turn)) = (std::mem::take(&mut request.own), request.turn) {
            self.ask(|w, _| w.unclaim(turn));
        }
    }

    fn begin(&mut self, id: u64) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        request.begun = true;
        let (turn, len, matched) = (request.turn, request.prompt.len() as u32, request.matched);
        let Some(turn) = turn else { return };
        if request.promised == 0 {
            // Charged again after a retract; what it has said already counts as its prompt no more than as growth.
            let (own, growth) = (request.own, request.max_new.min(self.w.config().clip));
            let promised = self.needs(len.saturating_sub(if own { matched } else { 0 }), growth);
            if let Some(request) = self.requests.get_mut(&id) {
                request.promised = promised;
            }
        }
        let frees = self.ask(|w, now| w.begin(turn, now));
        self.take_back(frees);
    }

    /// Allocates up to token `upto`. False: no room.
    fn extend(&mut self, id: u64, upto: u32) -> bool {
        let page = self.pool.page;
        let have = self.requests[&id].row.len() as u32;
        let Some(pages) = self.alloc(upto.div_ceil(page) - have.div_ceil(page)) else {
            return false;
        };
        let mut pages = pages.into_iter();
        let Some(request) = self.requests.get_mut(&id) else {
            return false;
        };
        for at in have..upto {
            let slot = match (at % page, request.row.last()) {
                (0, _) | (_, None) => pages.next().unwrap_or(0) * page,
                (_, Some(last)) => *last as u32 + 1,
            };
            request.row.push(slot as i32);
        }
        true
    }

    fn decode(&mut self) -> Option<Batch> {
        loop {
            if self.running.is_empty() {
                return None;
            }
            let page = self.pool.page;
            let starting = |id: &&u64| (self.requests[*id].row.len() as u32).is_multiple_of(page);
            let need = self.running.iter().filter(starting).count() as u32;
            let room = self.pool.free_pages() + self.tree.evictable() + self.w.evictable() / page;
            if need <= room {
                break;
            }
            let last = self.running.pop()?;
            if self.running.is_empty() {
                self.starve(last);
                return None;
            }
            self.retract(last);
        }
        if self.running.len() > 1 && self.rng.chance(self.speed.retract) {
            let last = self.running.pop()?;
            self.retract(last);
        }
        let ids = self.running.clone();
        for id in &ids {
            let upto = self.requests[id].len();
            if !self.extend(*id, upto) {
                self.watch
                    .fire(Oracle::Room, "the room that a decode step was promised is not there");
            }
        }
        Some(Batch::Decode(ids))
    }

    pub(super) fn forward(&mut self) {
        self.stirred = true;
        match self.batch.take() {
            Some(Batch::Prefill(entries)) => {
                for (id, upto) in entries {
                    self.compute(id, upto);
                    self.prefilled(id, upto);
                }
            }
            Some(Batch::Decode(ids)) => {
                for id in ids {
                    let upto = self.requests[&id].row.len() as u32;
                    self.compute(id, upto);
                    self.spoken(id);
                }
            }
            None => {}
        }
        self.poke();
    }

    fn compute(&mut self, id: u64, upto: u32) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        for at in request.written..upto {
            let (slot, value) = (request.row[at as usize] as u32, request.truth[at as usize]);
            self.pool.write(slot, value, &mut self.watch);
        }
        request.written = upto;
    }

    fn prefilled(&mut self, id: u64, upto: u32) {
        let request = &self.requests[&id];
        self.chunked = (upto < request.len()).then_some(id);
        if request.aborted {
            self.chunked = None;
            self.abort(id);
            return;
        }
        if let Some(turn) = request.turn {
            let row = request.row.clone();
            self.ask(|w, now| w.progress(turn, upto, &row, now));
        }
        if self.chunked.is_some() {
            return;
        }
        self.adopt(id);
        self.running.push(id);
        self.spoken(id);
    }

    /// Samples the next token, or finishes.
    fn spoken(&mut self, id: u64) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        if request.aborted {
            self.running.retain(|r| *r != id);
            self.abort(id);
            return;
        }
        if (request.output.len() as u32) < request.max_new {
            let last = request.row.last().map_or(0, |s| self.pool.read(*s as u32));
            request.say(kv::sample(last, self.speed.vocabulary));
        }
        let (call, finished) = (request.call, request.output.len() as u32 >= request.max_new);
        if request.stream && !std::mem::replace(&mut request.told, true) {
            self.reply(call, Reply::FirstToken);
        }
        if finished {
            self.running.retain(|r| *r != id);
            self.finish(id);
        }
    }

    fn finish(&mut self, id: u64) {
        let Some(request) = self.requests.remove(&id) else {
            return;
        };
        let committed = request.row.len() as u32;
        for (at, slot) in request.row.iter().enumerate() {
            let right = self.pool.read(*slot as u32) == request.truth[at];
            self.watch.check(right, Oracle::TrueKv, || {
                format!("token {at} of {committed} committed is another's")
            });
        }
        self.tree.unlock(&request.path);
        match request.turn {
            Some(turn) => {
                let frees = self.ask(|w, now| w.commit(turn, committed, &request.output, &request.row, now));
                self.take_back(frees);
                self.committed(&request);
            }
            None => self.keep_in_tree(&request),
        }
        self.reply(request.call, Reply::Done(request.output.into()));
    }

    fn abort(&mut self, id: u64) {
        self.deeds.aborts += 1;
        self.roll_back(id, Rollback::Abort);
        self.requests.remove(&id);
    }

    fn starve(&mut self, id: u64) {
        self.deeds.starved += 1;
        self.chunked = self.chunked.filter(|c| *c != id);
        self.roll_back(id, Rollback::Abort);
        if let Some(request) = self.requests.remove(&id) {
            self.reply(request.call, Reply::Failed(Reason::Internal));
        }
    }

    fn retract(&mut self, id: u64) {
        self.deeds.retracts += 1;
        self.roll_back(id, Rollback::Retract);
        self.waiting.push_back(id);
    }

    fn roll_back(&mut self, id: u64, how: Rollback) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        let row = std::mem::take(&mut request.row);
        let path = std::mem::take(&mut request.path);
        let (turn, own, adopted, protected) = (request.turn, request.own, request.adopted, request.protected);
        (request.begun, request.adopted, request.own, request.protected) = (false, false, false, 0);
        (request.written, request.matched, request.promised) = (0, 0, 0);
        if let Some(turn) = turn {
            let end = row.len() as u32;
            let frees = self.ask(|w, now| w.rollback(turn, end, &row, how, now));
            self.tree.unlock(&path);
            self.take_back(frees);
        } else {
            self.tree.unlock(&path);
        }
        if turn.is_none() || (!own && !adopted) {
            self.give_row(&row[protected as usize..]);
        }
    }

    /// The first prompt goes into the tree at the end of its prefill (SES-6).
    fn adopt(&mut self, id: u64) {
        let page = self.pool.page;
        let request = &self.requests[&id];
        let Some(turn) = request.turn.filter(|_| !request.own && !request.adopted) else {
            return;
        };
        let below = request.protected;
        let shared = (self.w.share_len(turn) / page * page).max(below);
        let path = if shared > below {
            let slots: Vec<u32> = request.row[..shared as usize].iter().map(|s| *s as u32).collect();
            self.tree.insert(&request.truth[..shared as usize], &slots)
        } else {
            request.path.clone()
        };
        let slots = self.tree.slots(&path);
        self.tree.lock(&path);
        let handle = self.handle(path.clone());
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        self.tree.unlock(&std::mem::replace(&mut request.path, path));
        for (cell, slot) in request.row.iter_mut().zip(slots) {
            *cell = slot as i32;
        }
        (request.adopted, request.protected) = (true, shared);
        let row = request.row.clone();
        let frees = self.ask(|w, now| w.adopt(turn, shared, handle, &row, now));
        self.take_back(frees);
    }

    /// A request without session leaves its tokens in the engine's tree.
    fn keep_in_tree(&mut self, request: &Request) {
        let page = self.pool.page;
        let whole = request.row.len() as u32 / page * page;
        let slots: Vec<u32> = request.row.iter().map(|s| *s as u32).collect();
        let path = self
            .tree
            .insert(&request.truth[..whole as usize], &slots[..whole as usize]);
        let kept = self.tree.slots(&path);
        for at in (0..request.row.len())
            .step_by(page as usize)
            .skip((request.protected / page) as usize)
        {
            if kept.get(at) != Some(&slots[at]) {
                self.pool.give(slots[at] / page, &mut self.watch);
            }
        }
    }
}

/// Sessions' identities are few; this one is the plain engine's.
pub fn plain() -> Identity {
    Identity::default()
}
