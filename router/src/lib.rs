//! The router: OpenAI and SGLang endpoints in front of `kvc` workers. Policy is in `kvc_proto::routing`; this crate is
//! HTTP at the edge and nothing else.
//!
//! A request's way: [`serve`] (a client's connection) → [`front`] (path, body) → [`request`] with [`scan`] (the few
//! fields routing needs) → [`drive`] (carries out one `Dispatch`) → [`worker`] and [`upstream`] (the workers) →
//! [`relay`] (the answer). Beside them [`discover`] watches the workers, and [`drain`] moves sessions away from those that
//! drain, by the same [`moves`] that serve an operator.

pub mod answer;
pub mod app;
pub mod body;
pub mod config;
pub mod discover;
pub mod drain;
pub mod drive;
pub mod front;
pub mod handover;
pub mod metrics;
pub mod moves;
mod refusal;
pub mod relay;
pub mod request;
pub mod scan;
pub mod serve;
pub mod state;
pub mod upstream;
pub mod worker;
