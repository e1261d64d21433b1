//! Sessions and their turns as data: what is known about each, who uses it, in which order it may be evicted.
//!
//! `state` one session, `chain` its digest, `turn` one request of it, `history` token comparison, `evict` the order of victims, `table` all
//! sessions by name. [`Worker`](crate::worker::Worker) composes them; nothing here knows the ledger or the wire.

pub mod chain;
pub mod evict;
pub mod history;
pub mod state;
pub mod table;
pub mod turn;

pub use chain::{Chain, Digest};
pub use state::{Copy, Hold, Session, SessionState, Standing, Wish};
pub use table::{Key, Sessions};
pub use turn::{Phase, Started, Turn, TurnPrompt};
