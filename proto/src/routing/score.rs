//! The four integers a worker is ranked by (ROUTE-3). Called by [`crate::policy::kvc`].

use super::{
    session::Record,
    view::{View, WorkerIndex},
};

/// Tokens per hash block (`BLOCK_TOKEN_BUDGET`).
pub const BLOCK_TOKENS: u32 = 24;

/// ⟨overlap + α·sticky, sticky, −inflight, −assigned⟩, compared in this order; the larger is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Score(u32, bool, i64, i64);

/// Ranks worker `d`. The overlap comes from the session's own record: what `d` held after the last turn, in whole
/// blocks, at most the prompt (ROUTE-3 [reading]).
pub fn of(view: &View, record: Option<&Record>, d: WorkerIndex, input_tokens: u32, alpha: u32) -> Score {
    let at = view.at(d);
    let overlap = record.map_or(0, |r| r.resident(at)).min(input_tokens) / BLOCK_TOKENS;
    let sticky = record.is_some_and(|r| r.pin == Some(at));
    let worker = view.worker(d);
    Score(
        overlap.saturating_add(if sticky { alpha } else { 0 }),
        sticky,
        -i64::from(worker.inflight()),
        -i64::try_from(worker.assigned()).unwrap_or(i64::MAX),
    )
}
