//! A small engine that drives the module as the adapter does: paged allocator, prefix tree, chunked prefill, decode,
//! commit. Feature `harness`: for tests and benches of this and other crates. Its "KV" of a token is a function of all
//! tokens up to it, so a wrong byte anywhere shows.

mod client;
mod engine;
mod tree;

pub use client::Client;
pub use engine::{Start, TestEngine, TestTurn, true_kv};
