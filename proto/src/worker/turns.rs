//! Engine side: a turn in the engine's queue, its run and its end.

use crate::{
    admission::{Charge, decide},
    block,
    id::{PrefixHandle, TurnId},
    mutation::off,
    session::{Chain, Copy, Hold, Key, Phase, SessionState, Started, TurnPrompt},
    time::Now,
};

use super::{Effect, Frees, Matched, Rollback, Token, Worker};

impl Worker {
    /// What the engine should match. No effect at all: it asks again, reorders and drops requests without telling.
    /// Below the shared part the engine's tree answers itself; inside a page only if no lease covers a slot at or past
    /// the cut (OWN-5).
    pub fn match_turn(&self, turn: TurnId, limit: u32) -> Matched {
        let Some(turn) = self.turns.get(&turn) else {
            return Matched::Tree;
        };
        let Some(copy) = &self.sessions[turn.session].copy else {
            return Matched::Tree;
        };
        let mut n = turn.common.min(limit);
        if n % self.config.page_tokens != 0 && self.leased_past(turn.session, n, turn.id) {
            n = block::floor(n, self.config.page_tokens);
        }
        match copy.usable(n) {
            0 => Matched::Tree,
            tokens => Matched::Session {
                tokens,
                shared: copy.shared,
                prefix: copy.prefix,
            },
        }
    }

    /// The slots of the session's first `out.len()` tokens.
    pub fn slots_into(&self, turn: TurnId, out: &mut [i64]) {
        let copy = self
            .turns
            .get(&turn)
            .and_then(|t| self.sessions[t.session].copy.as_ref());
        if let Some(copy) = copy {
            copy.table.slots_into(out);
        }
    }

    /// The engine has locked the turn's match of `tokens`: they leave `evictable`, the tail behind them does not. Nests.
    pub fn claim(&mut self, turn: TurnId, tokens: u32) {
        let Some(turn) = self.turns.get_mut(&turn) else { return };
        turn.claims += 1;
        let key = turn.session;
        if let (Phase::Waiting, Some(copy)) = (turn.phase, &mut self.sessions[key].copy) {
            let already = match copy.hold {
                Hold::Claimed(n) => n,
                Hold::Free | Hold::Lent | Hold::Landing => 0,
            };
            copy.hold = Hold::Claimed(tokens.min(copy.len()).max(already));
            self.refresh(key);
        }
    }

    /// The engine has unlocked it once.
    pub fn unclaim(&mut self, turn: TurnId) {
        let Some(turn) = self.turns.get_mut(&turn) else { return };
        turn.claims = turn.claims.saturating_sub(1);
        let key = turn.session;
        if turn.claims == 0
            && turn.phase == Phase::Waiting
            && let Some(copy) = &mut self.sessions[key].copy
        {
            copy.hold = Hold::Free;
            self.refresh(key);
        }
    }

    /// The engine is about to allocate: what the turn does not use of the old copy is freed now (OWN-7). Once per run;
    /// further chunks ask again and change nothing (F6).
    pub fn begin(&mut self, turn: TurnId, now: Now) -> Frees {
        let mut frees = Frees::default();
        let Some(t) = self.turns.get(&turn) else { return frees };
        if t.phase != Phase::Waiting {
            return frees;
        }
        let key = t.session;
        let claimed = match self.sessions[key].copy.as_ref().map(|c| c.hold) {
            Some(Hold::Claimed(n)) => Some(n),
            _ => None,
        };
        let started = match claimed {
            Some(n) => {
                self.start_from_copy(key, turn, n, &mut frees);
                Started::Session { restored: n }
            }
            None => {
                self.start_from_tree(key, turn, &mut frees);
                Started::Tree { adopted: false }
            }
        };
        self.charge_again(turn, claimed.unwrap_or(0));
        if off!(ChargeUntilFinish) {
            self.uncharge(turn);
        }
        if let Some(t) = self.turns.get_mut(&turn) {
            t.phase = Phase::Running(started);
            self.counters.prompt_tokens += u64::from(t.len);
            self.counters.restored_tokens += u64::from(claimed.unwrap_or(0));
        }
        self.touch(key, now);
        self.sessions[key].state = SessionState::Running(turn);
        self.refresh(key);
        if claimed.is_some() {
            self.followers_grow(key, turn);
        }
        frees
    }

    /// The KV of the first `readable` prompt tokens is written. Idempotent, never backwards; a larger count than the
    /// prompt is cut to it.
    pub fn progress(&mut self, turn: TurnId, readable: u32, row: &[i32], _now: Now) {
        let Some(t) = self.turns.get(&turn) else { return };
        let (key, len) = (t.session, t.len);
        let Some(copy) = self.sessions[key].copy.as_mut().filter(|_| t.phase != Phase::Waiting) else {
            return;
        };
        let readable = readable.min(len);
        if readable <= copy.readable {
            return;
        }
        copy.table.extend_from_row(readable, row);
        copy.readable = readable.min(copy.table.len() * self.config.page_tokens);
        self.followers_grow(key, turn);
    }

    /// The first `shared` tokens lie in the engine's tree now, under `prefix`, and `row` names the tree's slots. Pages
    /// it replaced come back; a page that a lease covers is kept until the lease is over.
    pub fn adopt(&mut self, turn: TurnId, shared: u32, prefix: PrefixHandle, row: &[i32], _now: Now) -> Frees {
        let mut frees = Frees::default();
        let page = self.config.page_tokens;
        let Some(t) = self.turns.get_mut(&turn) else {
            return frees;
        };
        let Phase::Running(Started::Tree { adopted }) = &mut t.phase else {
            return frees;
        };
        *adopted = true;
        let key = t.session;
        let leases = self.sessions[key].leases.clone();
        let Some(copy) = &mut self.sessions[key].copy else {
            return frees;
        };
        let readable = copy.readable;
        let count = shared / page;
        let (all, quarantine) = (&self.leases, &mut self.quarantine);
        copy.table.replace_from_row(count, row, |index, old| {
            let covers = |id: &&_| all.get(**id).is_ok_and(|l| l.end.min(readable) > index * page);
            let covering: Vec<_> = leases.iter().filter(covers).copied().collect();
            if covering.is_empty() || off!(RetireUnderLease) {
                frees.slots.push(old * page);
            } else {
                quarantine.retire(old * page, covering);
            }
        });
        copy.table.extend_from_row(count * page, row);
        copy.shared = count * page;
        let old = std::mem::replace(&mut copy.prefix, prefix);
        if old != PrefixHandle::ROOT && old != prefix {
            frees.prefixes.push(old);
        }
        self.refresh(key);
        frees
    }

    /// How many tokens of the prompt the engine's tree should share: all of a first prompt, what was shared before
    /// the eviction of a known one, nothing of an append (SES-6). Page aligned.
    pub fn share_len(&self, turn: TurnId) -> u32 {
        let Some(turn) = self.turns.get(&turn) else { return 0 };
        if let Phase::Running(Started::Session { .. }) = turn.phase {
            return 0;
        }
        let whole = block::floor(turn.len, self.config.page_tokens);
        self.sessions[turn.session].boundary.map_or(whole, |b| b.min(whole))
    }

    /// The turn has its result: history = prompt ++ output, cut to `committed` (OWN-6); the session is idle.
    pub fn commit(&mut self, turn: TurnId, committed: u32, output: &[Token], row: &[i32], now: Now) -> Frees {
        let mut frees = Frees::default();
        let Some(t) = self.turns.get(&turn) else { return frees };
        let (key, phase) = (t.session, t.phase);
        if matches!(phase, Phase::Waiting | Phase::Running(Started::Tree { adopted: false })) {
            // Not adopted: which pages are the tree's is not known, so none is kept or freed here.
            return self.rollback(turn, 0, &[], Rollback::Abort, now);
        }
        let page = self.config.page_tokens;
        let polls = self.polls;
        let session = &mut self.sessions[key];
        let Some(copy) = &mut session.copy else { return frees };
        let new = output.len().min((committed as usize).saturating_sub(copy.tokens.len()));
        block::table::reserve_tight(&mut copy.tokens, new);
        copy.tokens.extend_from_slice(&output[..new]);
        copy.table.extend_from_row(committed.min(copy.len()), row);
        let committed = committed.min(copy.len()).min(copy.table.len() * page);
        copy.truncate(committed);
        copy.tokens.shrink_to(copy.tokens.len() + copy.tokens.len() / 8 + 16);
        copy.table.cut(block::pages(committed, page), &mut frees.slots);
        copy.readable = committed;
        copy.hold = Hold::Free;
        session.changed = polls;
        self.counters.commits += 1;
        self.revoke_past(key, committed, None);
        for id in self.sessions[key].leases.clone() {
            if let Some(lease) = self.leases.get_mut(id) {
                lease.follows = None;
            }
            self.effects.push_back(Effect::LeaseGrown { lease: id });
        }
        self.end_turn(key, turn, now);
        self.keep_below_cap(key, &mut frees);
        self.close_if_doomed(key, &mut frees);
        self.announce(key);
        frees
    }

    /// A begun turn has ended without result: the session is back at what was restored (F4, F8, F9). `end` tokens of
    /// `row` are allocated. Leases that follow the turn are revoked (XFER-4).
    pub fn rollback(&mut self, turn: TurnId, end: u32, row: &[i32], how: Rollback, now: Now) -> Frees {
        let mut frees = Frees::default();
        let Some(t) = self.turns.get(&turn) else { return frees };
        let (key, phase) = (t.session, t.phase);
        self.revoke_followers(key, turn);
        let prompt = match how {
            Rollback::Retract if phase != Phase::Waiting => self.sessions[key].copy.as_ref().map(|c| c.tokens.clone()),
            _ => None,
        };
        match phase {
            Phase::Waiting => {}
            Phase::Running(Started::Session { restored }) => self.restore(key, restored, end, row, &mut frees),
            Phase::Running(Started::Tree { adopted }) => self.unstart(key, adopted, end, row, &mut frees),
        }
        match how {
            Rollback::Abort => {
                self.counters.aborts += 1;
                self.end_turn(key, turn, now);
                self.close_if_doomed(key, &mut frees);
            }
            Rollback::Retract => {
                self.counters.retracts += 1;
                self.requeue(key, turn, prompt);
            }
        }
        frees
    }

    /// The request left the queue before it began, or its object died. Unknown and ended turns are ignored.
    pub fn cancel(&mut self, turn: TurnId, now: Now) {
        let Some(t) = self.turns.get(&turn) else { return };
        let (key, phase) = (t.session, t.phase);
        self.counters.cancels += 1;
        self.revoke_followers(key, turn);
        let mut frees = Frees::default();
        match phase {
            Phase::Waiting => {}
            // The engine has not told what became of the row: nothing of it is freed here.
            Phase::Running(Started::Session { restored }) => {
                self.restore(key, restored, 0, &[], &mut frees);
                frees.slots.clear();
            }
            Phase::Running(Started::Tree { .. }) => self.unstart(key, false, 0, &[], &mut frees),
        }
        self.forgotten.append(&mut frees.prefixes);
        self.end_turn(key, turn, now);
        if self.sessions.get(key).is_some_and(|s| s.doomed && s.copy.is_none()) {
            self.forget_closed(key);
        }
    }

    /// A retracted turn was uncharged (ADM-7); it is charged again when it runs again. The engine decides that, so it
    /// is counted and not refused.
    fn charge_again(&mut self, turn: TurnId, restored: u32) {
        let Some(t) = self.turns.get(&turn) else { return };
        let need = decide::need(&self.config, t.len, t.len.saturating_sub(restored), t.growth);
        if let Some(reservation) = self.reservations.get_mut(t.reservation)
            && reservation.charge.reserved == 0
        {
            self.ledger.change(
                &mut reservation.charge,
                Charge {
                    reserved: need,
                    ..Charge::default()
                },
            );
        }
    }

    fn start_from_copy(&mut self, key: Key, turn: TurnId, n: u32, frees: &mut Frees) {
        let Some(t) = self.turns.get_mut(&turn) else { return };
        // An append to the whole copy stays an append: nothing that is proportional to the history happens here.
        if !matches!(t.prompt, TurnPrompt::Append { after, .. } if after == n) {
            t.keep_prompt(self.sessions[key].copy.as_ref());
        }
        let prompt = std::mem::replace(&mut t.prompt, TurnPrompt::InCopy);
        if !off!(Rewind) {
            self.cut_copy(key, n, Some(turn), frees);
        }
        let Some(copy) = &mut self.sessions[key].copy else {
            return;
        };
        match prompt {
            TurnPrompt::Full(tokens) => copy.tokens = tokens,
            TurnPrompt::Append { tokens, .. } => {
                block::table::reserve_tight(&mut copy.tokens, tokens.len());
                copy.tokens.extend_from_slice(&tokens);
            }
            TurnPrompt::InCopy => {}
        }
        copy.hold = Hold::Lent;
    }

    fn start_from_tree(&mut self, key: Key, turn: TurnId, frees: &mut Frees) {
        let Some(t) = self.turns.get_mut(&turn) else { return };
        t.keep_prompt(self.sessions[key].copy.as_ref());
        let identity = t.identity.clone();
        let TurnPrompt::Full(tokens) = std::mem::replace(&mut t.prompt, TurnPrompt::InCopy) else {
            return;
        };
        if self.sessions[key].copy.is_some() {
            // The history diverges inside the shared part: a rewind to what the engine's tree still has (OWN-7).
            self.rewound(key);
            self.drop_copy(key, frees);
        }
        self.sessions[key].copy = Some(Copy {
            identity,
            tokens,
            chain: Chain::default(),
            table: block::Table::new(self.config.page_tokens),
            shared: 0,
            prefix: PrefixHandle::ROOT,
            readable: 0,
            hold: Hold::Lent,
        });
    }

    /// Back to the first `restored` tokens.
    fn restore(&mut self, key: Key, restored: u32, end: u32, row: &[i32], frees: &mut Frees) {
        self.revoke_past(key, restored, None);
        let polls = self.polls;
        let session = &mut self.sessions[key];
        let Some(copy) = &mut session.copy else { return };
        copy.table.extend_from_row(end, row);
        copy.table
            .cut(block::pages(restored, self.config.page_tokens), &mut frees.slots);
        if !off!(Restore) {
            copy.truncate(restored);
        }
        copy.readable = restored;
        copy.hold = Hold::Free;
        session.changed = polls;
        self.refresh(key);
    }

    /// Back to nothing. What the tree holds is the tree's; before `adopt` that could be any of it.
    fn unstart(&mut self, key: Key, adopted: bool, end: u32, row: &[i32], frees: &mut Frees) {
        self.revoke_past(key, 0, None);
        let session = &mut self.sessions[key];
        let Some(mut copy) = session.copy.take() else { return };
        if adopted {
            copy.table.extend_from_row(end, row);
            copy.table.cut(copy.shared / self.config.page_tokens, &mut frees.slots);
            session.boundary = Some(copy.shared);
        }
        if copy.prefix != PrefixHandle::ROOT {
            frees.prefixes.push(copy.prefix);
        }
        self.refresh(key);
    }

    fn end_turn(&mut self, key: Key, turn: TurnId, now: Now) {
        if let Some(t) = self.turns.remove(&turn) {
            self.end_reservation(t.reservation);
        }
        let session = &mut self.sessions[key];
        session.state = SessionState::Idle;
        if let Some(copy) = session.copy.as_mut().filter(|c| matches!(c.hold, Hold::Claimed(_))) {
            copy.hold = Hold::Free;
        }
        self.effects.push_back(Effect::Arrived {
            session: session.id.clone(),
        });
        self.touch(key, now);
        self.refresh(key);
        self.wake_for_wishes();
    }

    /// Waiting again, uncharged until it runs (ADM-7).
    fn requeue(&mut self, key: Key, turn: TurnId, prompt: Option<Vec<Token>>) {
        let common = self.sessions[key].copy.as_ref().map_or(0, Copy::len);
        let Some(t) = self.turns.get_mut(&turn) else { return };
        if let Some(mut tokens) = prompt {
            tokens.truncate(t.len as usize);
            t.prompt = TurnPrompt::Full(tokens);
            t.common = common;
        }
        t.claims = 0;
        t.phase = Phase::Waiting;
        self.uncharge(turn);
        let session = &mut self.sessions[key];
        session.state = SessionState::Waiting(turn);
        if let Some(copy) = session.copy.as_mut().filter(|c| matches!(c.hold, Hold::Claimed(_))) {
            copy.hold = Hold::Free;
        }
        self.refresh(key);
    }

    fn uncharge(&mut self, turn: TurnId) {
        let reservation = self.turns.get(&turn).map(|t| t.reservation);
        if let Some(reservation) = reservation.and_then(|id| self.reservations.get_mut(id)) {
            self.ledger.change(&mut reservation.charge, Charge::default());
        }
    }

    /// SES-3: what one session holds is cut to the cap, to a page edge, never into its shared part.
    fn keep_below_cap(&mut self, key: Key, frees: &mut Frees) {
        let cap = block::floor(self.config.session_cap, self.config.page_tokens);
        let Some(copy) = self.sessions.get(key).and_then(|s| s.copy.as_ref()) else {
            return;
        };
        if copy.len() > self.config.session_cap && copy.len() > cap.max(copy.shared) {
            let keep = cap.max(copy.shared);
            self.counters.over_cap += 1;
            self.cut_copy(key, keep, None, frees);
        }
    }

    /// SES-2: a close that waited for the turn.
    fn close_if_doomed(&mut self, key: Key, frees: &mut Frees) {
        if self.sessions.get(key).is_some_and(|s| s.doomed) {
            self.drop_copy(key, frees);
            self.forget_closed(key);
        }
    }

    fn followers_grow(&mut self, key: Key, turn: TurnId) {
        for id in &self.sessions[key].leases {
            if self.leases.get(*id).is_ok_and(|l| l.follows == Some(turn)) {
                self.effects.push_back(Effect::LeaseGrown { lease: *id });
            }
        }
    }
}
