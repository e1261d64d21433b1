//! What is refused, as it travels in an answer's head and as the owner of a read is told. Both ends of tcp and of the
//! side channels of verbs, which speak in the same frames, call it.

use super::wire::{Head, Status, VERSION, WireError};
use crate::{error::MoverError, lease::Denied, region::Run};

/// The status of a lease under which nothing may be read.
pub(crate) fn status(denied: Denied) -> Status {
    match denied {
        Denied::Unknown => Status::UnknownToken,
        Denied::Expired => Status::Expired,
        Denied::Revoked => Status::Revoked,
    }
}

/// The answer to what is no frame.
pub(crate) fn answer(error: &WireError) -> Head {
    let (status, fact) = match *error {
        WireError::Magic { expected, .. } => (Status::BadFrame, expected.into()),
        WireError::Version { expected, .. } => (Status::BadVersion, expected.into()),
        WireError::TooLarge { limit, .. } => (Status::TooLarge, limit),
        WireError::Field { expected, .. } => (Status::BadFrame, expected),
    };
    Head {
        status,
        id: 0,
        len: 0,
        fact,
    }
}

/// What a peer's refusal of a request for `runs` means; with `Ok` it has no meaning.
pub(crate) fn told(peer: &str, head: &Head, runs: &[Run]) -> MoverError {
    let run = || runs.get(usize::try_from(head.fact).ok()?).copied();
    let owner = || peer.to_string();
    match head.status {
        Status::UnknownToken => MoverError::UnknownToken { peer: owner() },
        Status::Expired => MoverError::Expired { peer: owner() },
        Status::Revoked => MoverError::Revoked { peer: owner() },
        Status::Busy => MoverError::PeerBusy { peer: owner() },
        Status::BadVersion => MoverError::BadVersion {
            peer: owner(),
            got: u16::try_from(head.fact).unwrap_or(u16::MAX),
            expected: VERSION,
        },
        Status::RangeRefused => match run() {
            Some(run) => MoverError::RangeRefused { peer: owner(), run },
            None => bad(peer, "refused run", head.fact, 0),
        },
        Status::TooLarge => MoverError::TooLarge {
            what: "request",
            got: runs.iter().map(|run| run.len).sum(),
            limit: head.fact,
        },
        Status::BadFrame => bad(peer, "request", 0, head.fact),
        Status::Ok => bad(peer, "answer", head.id, 0),
    }
}

/// What bytes of a peer that are no frame mean.
pub(crate) fn broken(peer: &str, error: WireError) -> MoverError {
    let owner = peer.to_string();
    match error {
        WireError::Magic { got, expected } => MoverError::BadMagic {
            peer: owner,
            got,
            expected,
        },
        WireError::Version { got, expected } => MoverError::BadVersion {
            peer: owner,
            got,
            expected,
        },
        WireError::TooLarge { what, got, limit } => MoverError::TooLarge { what, got, limit },
        WireError::Field { what, got, expected } => bad(peer, what, got, expected),
    }
}

/// A field that breaks the protocol.
pub(crate) fn bad(peer: &str, what: &'static str, got: u64, expected: u64) -> MoverError {
    MoverError::BadFrame {
        peer: peer.into(),
        what,
        got,
        expected,
    }
}
