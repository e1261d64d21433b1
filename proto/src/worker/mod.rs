//! The worker's state machine: sessions, admission, leases and imports of one engine process.
//!
//! Two callers. The *engine's scheduler thread* (through the shim) calls the methods of [`engine`-side] sections; the
//! module's own threads (listener, peer server, transfer engine) call the rest. `engine-ext` holds the machine behind
//! one short lock, drains [`Effect`]s after every call and carries them out **before** it returns to the caller; that is
//! what makes revoke → fence → free hold (XFER-2): pages in [`Frees`] reach the engine only after the fences.
//!
//! What the engine can see (`evictable`, `held`) changes only in engine-side calls (OWN-2): its memory checks read the
//! two numbers one after the other.

pub mod api;

pub use api::*;
