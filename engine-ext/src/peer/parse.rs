//! What a peer's question means: each field is checked before the machine sees any of it, and a bad one is refused by
//! name. Used by the server; its counterpart for answers is in `client`.

use std::net::SocketAddr;

use kvc_proto::{
    id::{Epoch, Incarnation, Placement, SessionId, StoreId},
    session::Digest,
    wire::{
        admit::PeerRef,
        reason::{Reason, Refusal},
    },
    worker::{Announcement, Handover, Have, Identity, LeaseKind, LeaseRequest},
};
use kvc_rdma::MoverKind;

use super::wire;

/// Bytes of an identity: adapter, salt and extra key as one text (SES-5).
const IDENTITY_MAX: usize = 8 << 10;
/// Tokens of one session that a message may speak of.
const TOKENS_MAX: u32 = 1 << 30;

/// A question for a lease at this process.
pub(super) fn lease(asked: &wire::LeaseRequest, incarnation: Incarnation) -> Result<LeaseRequest, Refusal> {
    let kind = match wire::LeaseKind::try_from(asked.kind) {
        Ok(wire::LeaseKind::Follow) => LeaseKind::Follow,
        Ok(wire::LeaseKind::Replica) => LeaseKind::Replica,
        Ok(wire::LeaseKind::Sync) => LeaseKind::Sync,
        Ok(wire::LeaseKind::Prepare) => LeaseKind::Prepare,
        Err(_) => return Err(bad(format!("kind is {}, allowed is 0 to 3", asked.kind))),
    };
    let have = match (asked.have_tokens, asked.have_digest.as_slice()) {
        (0, []) => None,
        (0, given) => {
            return Err(bad(format!(
                "have_digest has {} bytes without have_tokens",
                given.len()
            )));
        }
        (given, bytes) => Some(Have {
            tokens: tokens("have_tokens", given)?,
            digest: digest("have_digest", bytes)?,
        }),
    };
    Ok(LeaseRequest {
        session: session(&asked.session)?,
        placement: placement(asked.placement, asked.store),
        incarnation,
        kind,
        have,
    })
}

/// An announcement, and who makes it: `holder` is the process of the connection.
pub(super) fn announcement(
    asked: &wire::AnnounceRequest,
    holder: Incarnation,
) -> Result<(PeerRef, Announcement), Refusal> {
    if asked.identity.len() > IDENTITY_MAX {
        return Err(bad(format!(
            "identity has {} bytes, at most {IDENTITY_MAX} are allowed",
            asked.identity.len()
        )));
    }
    let announcement = Announcement {
        session: session(&asked.session)?,
        epoch: Epoch {
            placement: placement(asked.placement, asked.store),
            rewind: asked.rewind,
        },
        committed: tokens("committed", asked.committed)?,
        digest: digest("digest", &asked.digest)?,
        identity: Identity(asked.identity.as_str().into()),
    };
    Ok((peer("from", &asked.from, holder)?, announcement))
}

/// A question for ownership, and who asks it: `holder` is the process of the connection.
pub(super) fn handover(asked: &wire::HandoverRequest, holder: Incarnation) -> Result<(PeerRef, Handover), Refusal> {
    let handover = Handover {
        session: session(&asked.session)?,
        incarnation: Incarnation(asked.incarnation),
        pending: placement(asked.pending, asked.pending_store),
        epoch: Epoch {
            placement: placement(asked.placement, asked.store),
            rewind: asked.rewind,
        },
        committed: tokens("committed", asked.committed)?,
        digest: digest("digest", &asked.digest)?,
    };
    Ok((peer("to", &asked.to, holder)?, handover))
}

/// A refusal that says what either side has. `theirs` is cut: it is a peer's text.
pub(super) fn no_common_mover<'t>(
    ours: impl Iterator<Item = MoverKind>,
    theirs: impl Iterator<Item = &'t str>,
) -> Refusal {
    let ours: Vec<&str> = ours.map(MoverKind::as_str).collect();
    let theirs: Vec<String> = theirs.take(8).map(|name| name.chars().take(16).collect()).collect();
    Refusal::new(
        Reason::NoCommonMover,
        format!(
            "this worker moves KV over [{}], the peer over [{}]: compare movers, force_rdma and ib_device of both",
            ours.join(", "),
            theirs.join(", ")
        ),
    )
}

fn session(text: &str) -> Result<SessionId, Refusal> {
    SessionId::new(text).map_err(|e| bad(e.to_string()))
}

fn placement(n: u64, store: u64) -> Placement {
    Placement {
        n,
        store: StoreId(store),
    }
}

fn tokens(field: &str, got: u32) -> Result<u32, Refusal> {
    if got == 0 || got > TOKENS_MAX {
        return Err(bad(format!("{field} is {got}, allowed is 1 to {TOKENS_MAX}")));
    }
    Ok(got)
}

fn digest(field: &str, bytes: &[u8]) -> Result<Digest, Refusal> {
    match bytes.try_into() {
        Ok(bytes) => Ok(Digest(bytes)),
        Err(_) => Err(bad(format!("{field} has {} bytes, expected 16", bytes.len()))),
    }
}

/// An address and no name, so that no name service decides whom a worker calls.
fn peer(field: &str, text: &str, incarnation: Incarnation) -> Result<PeerRef, Refusal> {
    match text.parse::<SocketAddr>() {
        Ok(address) if address.port() > 0 => Ok(PeerRef {
            peer: address.to_string(),
            incarnation,
        }),
        _ => {
            let shown: String = text.chars().take(64).collect();
            Err(bad(format!("{field} is {shown:?}, expected ip:port")))
        }
    }
}

fn bad(why: String) -> Refusal {
    Refusal::new(Reason::BadRequest, why)
}
