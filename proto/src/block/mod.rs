//! Which pages hold which tokens, and what state each page is in (OWN-1, OWN-4).
//!
//! `table` is one session's pages in token order; `state` names the states of a page and keeps pages that have left
//! their table while a peer may still read them.

pub mod state;
pub mod table;
#[cfg(test)]
mod tests;

pub use state::{PageState, Quarantine};
pub use table::Table;

/// Pages needed for `tokens`.
pub fn pages(tokens: u32, page_tokens: u32) -> u32 {
    tokens.div_ceil(page_tokens)
}

/// `tokens` rounded up to whole pages.
pub fn ceil(tokens: u32, page_tokens: u32) -> u32 {
    tokens.checked_next_multiple_of(page_tokens).unwrap_or(u32::MAX)
}

/// `tokens` rounded down to whole pages.
pub fn floor(tokens: u32, page_tokens: u32) -> u32 {
    tokens - tokens % page_tokens
}
