//! Every decision of `kvc`, and no IO: no socket, clock, thread, GPU or Python (architecture, style 1).
//!
//! Time comes in as [`time::Now`]; work goes out as values. The engine module (`engine-ext`) drives
//! [`worker::Worker`], the router drives [`routing`] and [`policy`], and simulations drive the same machines.
#![forbid(unsafe_code)]

pub mod admission;
pub mod block;
pub mod id;
#[cfg(any(test, feature = "mutation"))]
pub mod mutation;
#[cfg(not(any(test, feature = "mutation")))]
mod mutation;
pub mod policy;
pub mod routing;
pub mod session;
pub mod time;
pub mod transfer;
pub mod wire;
pub mod worker;
