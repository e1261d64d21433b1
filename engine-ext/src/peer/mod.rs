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

/// Fuzz target: bytes of a peer as every message that we take from one; what is accepted stays in bounds.
#[cfg(feature = "harness")]
pub(crate) fn fuzz(input: &[u8]) {
    use prost::Message;
    const POOL: u32 = 1000;
    if let Ok(reply) = wire::WatchReply::decode(input)
        && let Some(slots) = client::expanded(&reply, POOL)
    {
        assert!(slots.len() <= POOL as usize && slots.iter().all(|slot| *slot < POOL));
    }
    if let Ok(reply) = wire::LeaseReply::decode(input)
        && let Some(granted) = client::granted(reply)
    {
        assert!(granted.grant.readable as usize <= granted.grant.tokens.len());
    }
    let _ = wire::ChallengeRequest::decode(input);
    let _ = wire::ChallengeReply::decode(input);
    let _ = wire::HelloRequest::decode(input);
    let _ = wire::HelloReply::decode(input);
    let _ = wire::LeaseRequest::decode(input);
    let _ = wire::WatchRequest::decode(input);
    let _ = wire::LeaseName::decode(input);
}
