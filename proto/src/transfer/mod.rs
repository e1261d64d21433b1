//! Moving KV, seen from one worker: `lease` what peers may read here, `import` what is being pulled in,
//! `route` over which of several ways (kv-movement §3).
//!
//! All are small state machines as data; [`Worker`](crate::worker::Worker) drives them and the transfer engine carries
//! their effects out.

pub mod import;
pub mod lease;
pub mod route;

pub use import::{Import, ImportPhase, Purpose};
pub use lease::{Lease, Leases};
pub use route::Route;
