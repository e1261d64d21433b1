//! Moves bytes between registered regions of two processes and knows no session (architecture).
//!
//! `engine-ext` registers the engine's KV memory with a [`Mover`], exposes runs of it to a peer under a lease token
//! and pulls a peer's runs into pages it owns (XFER-1). Movers: [`shm`] between workers of one host, [`tcp`], and
//! `loopback` inside one process for tests (feature `fault`).

mod bounds;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod error;
#[cfg(feature = "fault")]
pub mod fault;
#[cfg(feature = "conformance")]
pub mod fuzz;
mod gate;
mod inbox;
mod lease;
#[cfg(feature = "fault")]
pub mod loopback;
pub mod mover;
mod plan;
pub mod region;
pub mod shm;
pub mod tcp;
#[cfg(feature = "verbs")]
pub mod verbs;

pub use error::MoverError;
#[cfg(feature = "fault")]
pub use loopback::Loopback;
pub use mover::{Copy, Done, LeaseToken, Mover, MoverKind, ReadHandle, ReadOptions, ReadStats};
pub use region::{Dmabuf, HostRegion, Region, RegionKey, Run};
pub use shm::{ShmConfig, ShmMover};
pub use tcp::{TcpConfig, TcpMover};
#[cfg(feature = "verbs")]
pub use verbs::{VerbsConfig, VerbsMover};
