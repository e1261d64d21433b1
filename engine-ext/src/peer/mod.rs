//! The control plane between workers: [`serve`] answers peers, [`Peers`] asks them. Generated messages are in `wire`.

mod auth;
mod client;
mod server;
mod status;
mod stream;
#[cfg(test)]
mod tests;
mod tls;

pub(crate) use client::{Lease, Peer, Peers};
pub(crate) use server::serve;
pub(crate) use tls::server_tls;

/// The protocol's number; both sides must have the same (XFER-6).
const PROTOCOL: u32 = 1;
/// Metadata entry of the bearer token.
const BEARER: &str = "kvc-bearer-bin";

/// Generated from `proto/peer.proto`.
#[allow(missing_docs, clippy::all)]
mod wire {
    tonic::include_proto!("kvc.peer.v1");
}
