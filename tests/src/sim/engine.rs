//! The engine's scheduler loop and its requests: receive, poll, then one forward of a prefill chunk or of one decode
//! step. Around the machine's calls it does what `python-shim` does in `hooks.py` and `cache.py`.

use kvc_proto::{
    id::{Placement, SessionId, TurnId},
    wire::reason::Reason,
    worker::{Arrival, Matched, Prompt, Snapshot, Token},
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
#[derive(Clone, Debug)]
pub struct Request {
    pub(super) call: CallId,
    pub(super) turn: Option<TurnId>,
    pub(super) session: Option<SessionId>,
    /// The placement it runs under, unless it only prefills.
    pub(super) placement: Option<Placement>,
    pub(super) prompt: Vec<Token>,
    pub(super) output: Vec<Token>,
    /// True KV of prompt and output.
    pub(super) truth: Vec<Kv>,
    pub(super) max_new: u32,
    pub(super) stream: bool,
    pub(super) told: bool,
    pub(super) aborted: bool,
    /// By the machine: its session was granted elsewhere (SES-4).
    pub(super) superseded: bool,
    /// Slots from token 0 on; empty until it runs.
    pub(super) row: Vec<i32>,
    /// Locked nodes of the tree.
    pub(super) path: Path,
    /// Tokens in tree pages at the head of the row, while it is locked or runs.
    pub(super) protected: u32,
    /// The match is the session's own.
    pub(super) own: bool,
    pub(super) adopted: bool,
    pub(super) begun: bool,
    /// Tokens of the row whose KV was there when it began.
    pub(super) matched: u32,
    pub(super) written: u32,
    /// ADM-7: what the ledger must have promised it, in tokens.
    pub(super) promised: u32,
}

impl Request {
    pub(super) fn row_pages(&self, page: u32) -> u32 {
        (self.row.len() as u32).div_ceil(page)
    }

    pub(super) fn len(&self) -> u32 {
        self.truth.len() as u32
    }

    pub(super) fn say(&mut self, token: Token) {
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
        self.close_placements();
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
        let placement = ask.tag.as_ref().filter(|t| !t.prefill_only).and_then(|t| t.placement);
        if let Some(tag) = ask.tag.clone() {
            let before = self.w.session(&tag.session, self.now);
            let growth = max_new.min(self.w.config().clip);
            let prompt = self.prompt_of(&tag.session, &ask);
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
            self.dirty = true;
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
                    // A turn of its own, or a prefill that may come late: until the next announcement this copy is
                    // nobody's replica.
                    self.unsynced.insert(tag.session.clone());
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
            placement,
            truth: kv::truth(&ask.identity, &ask.prompt),
            prompt: ask.prompt.to_vec(),
            output: Vec::new(),
            max_new,
            stream: ask.stream,
            told: false,
            aborted: false,
            superseded: false,
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

    /// A streaming session appends to what its last turn left here; everybody else sends everything.
    fn prompt_of(&mut self, session: &SessionId, ask: &TurnAsk) -> Prompt {
        let held = self.w.history_len(session) as usize;
        let appends = self.histories.get(session).is_some_and(|history| {
            let truth = kv::truth(&ask.identity, &ask.prompt);
            history.len() == held && truth.len() > held && truth[..held] == history[..]
        });
        if appends && self.rng.chance(300) {
            return Prompt::Append {
                after: held as u32,
                tokens: ask.prompt[held..].to_vec(),
            };
        }
        Prompt::Full(ask.prompt.to_vec())
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
            let Some(request) = self.requests.remove(&id) else {
                continue;
            };
            if let Some(turn) = request.turn {
                self.ask(|w, now| w.cancel(turn, now));
            }
            if request.superseded {
                self.reply(request.call, Reply::Failed(Reason::StaleEpoch));
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
                let (free, tree) = (self.pool.free_pages(), self.tree.evictable());
                let (evictable, held) = (self.w.evictable(), self.w.held());
                let need = upto - self.requests[&id].written;
                let facts = format!(
                    "a prefill's next {need} tokens were promised: {free} pages are free, {tree} in the tree, \
                     {evictable} tokens of sessions, {held} held"
                );
                self.watch.fire(Oracle::Room, facts);
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
}
