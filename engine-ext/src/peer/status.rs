//! Refusals as gRPC statuses and back: the reason travels in metadata, so that a proxy's or library's own status is never
//! taken for a peer's answer.

use std::{error::Error, io};

use kvc_proto::wire::reason::{Reason, Refusal};
use tonic::{Code, Status};

const REASON: &str = "kvc-reason";
/// The longest peer message that is kept, in bytes.
const MESSAGE_MAX: usize = 512;

/// For the wire.
pub(super) fn refuse(refusal: &Refusal) -> Status {
    let code = match refusal.code {
        Reason::Unauthenticated => Code::Unauthenticated,
        Reason::BadRequest => Code::InvalidArgument,
        Reason::DeadlineExceeded => Code::DeadlineExceeded,
        Reason::UnknownSession | Reason::LeaseUnknown => Code::NotFound,
        Reason::Internal => Code::Internal,
        _ => Code::FailedPrecondition,
    };
    let mut status = Status::new(code, refusal.message.clone());
    if let Ok(text) = refusal.code.as_str().parse() {
        status.metadata_mut().insert(REASON, text);
    }
    status
}

/// From the wire.
pub(super) fn refusal(peer: &str, status: &Status) -> Refusal {
    let said = status
        .metadata()
        .get(REASON)
        .and_then(|text| text.to_str().ok())
        .and_then(Reason::parse);
    if let Some(reason) = said {
        return Refusal::new(reason, format!("peer {peer}: {}", clip(status.message())));
    }
    let reason = match status.code() {
        Code::Unauthenticated => Reason::Unauthenticated,
        Code::DeadlineExceeded => Reason::DeadlineExceeded,
        Code::OutOfRange | Code::Unimplemented | Code::ResourceExhausted => Reason::ProtocolMismatch,
        _ if refused_certificate(status) => Reason::Unauthenticated,
        _ => Reason::PeerUnreachable,
    };
    let cause = status.source().map(|e| format!(": {}", chain(e))).unwrap_or_default();
    Refusal::new(reason, clip(&format!("peer {peer}: {}{cause}", status.message())))
}

/// A connection that did not come about.
pub(super) fn unreachable(peer: &str, error: &(dyn Error + 'static)) -> Refusal {
    let reason = if refused_certificate(error) {
        Reason::Unauthenticated
    } else {
        Reason::PeerUnreachable
    };
    Refusal::new(reason, clip(&format!("peer {peer}: {}", chain(error))))
}

/// An error with all its causes on one line.
pub(super) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let more = cause.to_string();
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        next = cause.source();
    }
    text.replace('\n', " ")
}

/// rustls reports every failed handshake, its own or the peer's alert, as invalid data.
fn refused_certificate(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error
            .downcast_ref::<io::Error>()
            .is_some_and(|e| e.kind() == io::ErrorKind::InvalidData)
        {
            return true;
        }
        next = error.source();
    }
    false
}

fn clip(text: &str) -> String {
    let mut end = text.len().min(MESSAGE_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_survives_the_wire() {
        for reason in Reason::ALL {
            let back = refusal("p", &refuse(&Refusal::new(*reason, "why")));
            assert_eq!((back.code, back.message.as_str()), (*reason, "peer p: why"));
        }
    }

    #[test]
    fn a_status_without_reason_is_no_peer_answer() {
        assert_eq!(refusal("p", &Status::unavailable("x")).code, Reason::PeerUnreachable);
        assert_eq!(refusal("p", &Status::out_of_range("x")).code, Reason::ProtocolMismatch);
    }

    #[test]
    fn a_peers_text_is_cut() {
        let long = "é".repeat(1000);
        let back = refusal("p", &refuse(&Refusal::new(Reason::Internal, long)));
        assert!(back.message.len() <= MESSAGE_MAX + 20);
    }
}
