//! The control plane between workers: [`serve`] answers peers, [`Peers`] asks them. Generated messages are in `wire`.

mod auth;
mod client;
mod parse;
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
const PROTOCOL: u32 = 3;
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
    use kvc_proto::{id::Incarnation, session::Digest, worker::Have};
    use prost::Message;
    const POOL: u32 = 1000;
    if let Ok(reply) = wire::WatchReply::decode(input)
        && let Some(slots) = client::expanded(&reply, POOL)
    {
        assert!(slots.len() <= POOL as usize && slots.iter().all(|slot| *slot < POOL));
    }
    const HELD: u32 = 3;
    let have = Have {
        tokens: HELD,
        digest: Digest([7; 16]),
    };
    if let Ok(reply) = wire::LeaseReply::decode(input) {
        for have in [None, Some(have)] {
            let Some(granted) = client::granted(reply.clone(), have) else {
                continue;
            };
            let grant = granted.grant;
            let end = grant.after as usize + grant.tokens.len();
            assert!(grant.readable as usize <= end && grant.share as usize <= end);
            assert!(grant.after == 0 || have.is_some() && grant.after == HELD);
        }
    }
    if let Ok(reply) = wire::HandoverReply::decode(input) {
        let _ = client::decided(&reply);
    }
    let own = Incarnation(1);
    if let Ok(asked) = wire::LeaseRequest::decode(input)
        && let Ok(lease) = parse::lease(&asked, own)
    {
        assert!(lease.have.is_none_or(|have| have.tokens > 0));
    }
    if let Ok(asked) = wire::AnnounceRequest::decode(input)
        && let Ok((from, announcement)) = parse::announcement(&asked, own)
    {
        assert!(announcement.committed > 0 && from.peer.parse::<std::net::SocketAddr>().is_ok());
    }
    if let Ok(asked) = wire::HandoverRequest::decode(input)
        && let Ok((to, handover)) = parse::handover(&asked, own)
    {
        assert!(handover.committed > 0 && to.peer.parse::<std::net::SocketAddr>().is_ok());
    }
    let _ = wire::ChallengeRequest::decode(input);
    let _ = wire::ChallengeReply::decode(input);
    let _ = wire::HelloRequest::decode(input);
    let _ = wire::HelloReply::decode(input);
    let _ = wire::WatchRequest::decode(input);
    let _ = wire::LeaseName::decode(input);
}
