//! ADM-1..6 as one pure function of the question, the session and the room.

use crate::{
    block,
    mutation::off,
    wire::{admit::Mode, reason::Reason},
    worker::api::{CapacityRule, WorkerConfig},
};

use super::Ledger;

/// An admission question, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// Tokens of the session held here; `None` if it is not resident.
    pub resident: Option<u32>,
    /// Of these, the session's own tokens that the ledger counts as reclaimable and that stop being so (ADM-7).
    pub unreclaimed: u32,
    /// The whole prompt.
    pub input: u32,
    /// What is new, as the asker says; never less than input − resident.
    pub append: u32,
    /// min(max_new, clip).
    pub growth: u32,
    /// The session's first turn.
    pub first: bool,
    /// DISP-6: the append is prefilled elsewhere.
    pub via_prefill: bool,
}

/// A grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// How the turn will run.
    pub mode: Mode,
    /// Tokens to charge, page-rounded.
    pub need: u32,
}

/// Answers a question. A refusal says nothing about the session's state: busy, stale and draining are checked before.
pub fn decide(q: Question, ledger: &Ledger, config: &WorkerConfig) -> Result<Verdict, Reason> {
    let append = q.append.max(q.input.saturating_sub(q.resident.unwrap_or(0)));
    let whole = need(config, q.input, q.input, q.growth);
    if u64::from(whole) > ledger.limit() {
        return Err(Reason::TooLarge);
    }
    let large = append > config.max_uncached_tokens;
    let (mode, full) = match q.resident {
        Some(_) if large && !q.via_prefill => return Err(Reason::RealLargeAppend),
        Some(_) if large => (Mode::Reseed, Reason::NoDCapacity),
        Some(_) => (Mode::Direct, Reason::NoDCapacity),
        None if q.first => (Mode::Seed, Reason::SessionNotResidentNoCapacity),
        None => (Mode::Reseed, Reason::SessionNotResidentNoCapacity),
    };
    let need = need(
        config,
        q.input,
        if q.resident.is_some() { append } else { q.input },
        q.growth,
    );
    if ledger.used_with(q.unreclaimed, u64::from(need)) > ledger.limit() && !off!(Capacity) {
        return Err(full);
    }
    Ok(Verdict { mode, need })
}

/// ADM-6: what a turn with this whole input, these new tokens and this growth is charged, page-rounded.
pub fn need(config: &WorkerConfig, input: u32, new: u32, growth: u32) -> u32 {
    let tokens = match config.rule {
        CapacityRule::Growth => new.saturating_add(growth),
        CapacityRule::Paper => input,
    };
    block::ceil(tokens, config.page_tokens)
}
