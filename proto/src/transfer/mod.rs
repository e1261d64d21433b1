//! Moving KV, seen from one worker: `lease` what peers may read here, `import` what is being pulled in (kv-movement §3).
//!
//! Both are small state machines as data; [`Worker`](crate::worker::Worker) drives them and the transfer engine carries
//! their effects out.

pub mod import;
pub mod lease;

pub use import::{Import, ImportPhase, Purpose};
pub use lease::{Lease, Leases};
