//! One request's way through the engine: match and lock, begin, allocate, compute, adopt, finish or roll back
//! (`cache.py`). Called by the loop in [`super::engine`].

use kvc_proto::{
    wire::reason::Reason,
    worker::{Matched, Rollback},
};

use super::{engine::Request, kv, message::Reply, oracle::Oracle, process::Process};

impl Process {
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

    pub(super) fn unlock(&mut self, id: u64) {
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

    pub(super) fn begin(&mut self, id: u64) {
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
    pub(super) fn extend(&mut self, id: u64, upto: u32) -> bool {
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

    pub(super) fn compute(&mut self, id: u64, upto: u32) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        for at in request.written..upto {
            let (slot, value) = (request.row[at as usize] as u32, request.truth[at as usize]);
            self.pool.write(slot, value, &mut self.watch);
        }
        request.written = upto;
    }

    pub(super) fn prefilled(&mut self, id: u64, upto: u32) {
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
    pub(super) fn spoken(&mut self, id: u64) {
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
        let first = request.stream && !std::mem::replace(&mut request.told, true);
        if first || finished {
            self.check_superseded(id);
        }
        if first {
            self.reply(call, Reply::FirstToken);
        }
        if finished {
            self.running.retain(|r| *r != id);
            self.finish(id);
        }
    }

    pub(super) fn finish(&mut self, id: u64) {
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
                self.committing = request.truth[..committed as usize].last().map(|kv| (committed, *kv));
                let frees = self.ask(|w, now| w.commit(turn, committed, &request.output, &request.row, now));
                self.committing = None;
                self.dirty = true;
                self.take_back(frees);
                self.committed(&request);
            }
            None => self.keep_in_tree(&request),
        }
        self.reply(request.call, Reply::Done(request.output.into()));
    }

    pub(super) fn abort(&mut self, id: u64) {
        self.deeds.aborts += 1;
        self.roll_back(id, Rollback::Abort);
        if let Some(request) = self.requests.remove(&id)
            && request.superseded
        {
            self.reply(request.call, Reply::Failed(Reason::StaleEpoch));
        }
    }

    pub(super) fn starve(&mut self, id: u64) {
        self.deeds.starved += 1;
        self.log(|| "the last running request finds no room and is given up".to_owned());
        let (evictable, held) = (self.w.evictable(), self.w.held());
        let (free, tree) = (self.pool.free_pages(), self.tree.evictable());
        self.log(|| format!("free {free} pages, tree {tree}, evictable {evictable} tokens, held {held}"));
        self.chunked = self.chunked.filter(|c| *c != id);
        self.roll_back(id, Rollback::Abort);
        if let Some(request) = self.requests.remove(&id) {
            self.reply(request.call, Reply::Failed(Reason::Internal));
        }
    }

    pub(super) fn retract(&mut self, id: u64) {
        self.deeds.retracts += 1;
        self.roll_back(id, Rollback::Retract);
        self.waiting.push_back(id);
    }

    pub(super) fn roll_back(&mut self, id: u64, how: Rollback) {
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
    pub(super) fn adopt(&mut self, id: u64) {
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
    pub(super) fn keep_in_tree(&mut self, request: &Request) {
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
