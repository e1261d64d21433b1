//! The `kvc` module inside an engine's worker process: worker state behind one short lock, admission listener, peer
//! control plane, transfer engine, metrics and settings. The adapter (`python-shim`) makes one [`Engine`] per process
//! and calls [`Engine::scheduler`] from the engine's scheduler thread.
//!
//! Decisions are `kvc-proto`'s, bytes are `kvc-rdma`'s, buffers are `kvc-cuda`'s; threads, sockets and files are here.
#![deny(unsafe_code)]

pub mod config;
mod effect;
mod facts;
#[cfg(feature = "harness")]
pub mod fuzz;
#[cfg(feature = "harness")]
pub mod harness;
mod listener;
mod metrics;
mod movers;
mod peer;
mod pool;
mod state;
mod timer;
mod transfer;
mod wake;

pub use config::{Config, ConfigError};
pub use facts::EngineFacts;
pub use movers::preflight;
pub use state::{Engine, StartError};
