//! Routers, workers and links in virtual time, driving the same machines as production: [`kvc_proto::worker::Worker`]
//! and [`kvc_proto::routing`] (kv-movement §6).
//!
//! A [`world::World`] is made from one seed and is a pure function of it. What stands around the machines is simple and
//! naive: an engine ([`engine`]) whose KV is a hash of the whole token prefix, a process ([`process`]) that does what
//! `engine-ext` and the Python shim do, a router ([`router`]) that does what `router/src/drive.rs` does. New work (sync,
//! migration) comes in as further effects of the machines and further [`message`]s.

pub mod announce;
pub mod client;
pub mod clock;
pub mod drive;
pub mod engine;
pub mod export;
pub mod fault;
pub mod finish;
pub mod handover;
pub mod import;
pub mod inspect;
pub mod kv;
pub mod landing;
pub mod ledger;
pub mod link;
pub mod message;
pub mod moves;
pub mod operator;
pub mod oracle;
pub mod owners;
pub mod past;
pub mod plan;
pub mod play;
pub mod pool;
pub mod process;
pub mod replay;
pub mod rng;
pub mod room;
pub mod router;
pub mod stage;
pub mod store;
pub mod tree;
pub mod turn;
pub mod verdict;
pub mod world;

pub use oracle::{Oracle, Violation};
pub use plan::{Limits, Plan};
pub use replay::{Report, run, run_aloud, run_logged};
