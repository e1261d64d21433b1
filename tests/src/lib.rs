//! Tests that need more than one crate. [`sim`] is the deterministic simulation of routers, workers and links
//! (kv-movement §6); `tests/sim.rs` runs its bounded batch, `examples/soak.rs` a long one.

pub mod sim;
