//! Request bodies: read with a limit and a deadline, then parsed and checked; what is wrong is named and nothing changes
//! (ADM-10).

use std::{net::SocketAddr, time::Duration};

use axum::body::Body;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use kvc_proto::wire::{
    admit::{AdmitRequest, DrainRequest, ImportRequest},
    reason::{Reason, Refusal},
};
use serde::de::DeserializeOwned;

/// From the head to the body's last byte.
const READ: Duration = Duration::from_secs(5);

/// The longest a drain is waited for, in milliseconds.
const DRAIN_MAX_MS: u32 = 3_600_000;

/// The largest count of tokens a request may name.
const TOKENS_MAX: u32 = 1 << 30;

/// A JSON body of at most `limit` bytes.
pub(super) async fn json<T: DeserializeOwned>(body: Body, limit: usize) -> Result<T, Refusal> {
    let read = tokio::time::timeout(READ, Limited::new(body, limit).collect()).await;
    let bytes = match read {
        Err(_) => return Err(bad(format!("the body did not arrive within {} s", READ.as_secs()))),
        Ok(Err(e)) if e.is::<LengthLimitError>() => return Err(bad(format!("the body is larger than {limit} bytes"))),
        Ok(Err(e)) => return Err(bad(format!("the body did not arrive: {e}"))),
        Ok(Ok(collected)) => collected.to_bytes(),
    };
    parsed(&bytes)
}

/// The body's own shape.
pub(super) fn parsed<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Refusal> {
    serde_json::from_slice(bytes).map_err(|e| bad(format!("body: {e}")))
}

/// Ranges and lengths that add up (ADM-10).
pub(super) fn checked(question: &AdmitRequest) -> Result<(), Refusal> {
    let q = question;
    if q.input_tokens == 0 || q.input_tokens > TOKENS_MAX {
        return Err(bad(format!(
            "input_tokens is {}, allowed is 1 to {TOKENS_MAX}",
            q.input_tokens
        )));
    }
    if q.append_tokens > q.input_tokens {
        return Err(bad(format!(
            "append_tokens is {}, at most input_tokens ({}) is allowed",
            q.append_tokens, q.input_tokens
        )));
    }
    if let Some(max_new) = q.max_new_tokens.filter(|n| *n > TOKENS_MAX) {
        return Err(bad(format!(
            "max_new_tokens is {max_new}, at most {TOKENS_MAX} is allowed"
        )));
    }
    if let Some(backup) = q.backup.as_ref().filter(|b| b.peer.parse::<SocketAddr>().is_err()) {
        return Err(bad(format!(
            "backup.peer is {:?}, expected ip:port",
            clipped(&backup.peer)
        )));
    }
    Ok(())
}

/// A peer is named by address, so that no name service decides whom a worker calls.
pub(super) fn checked_import(request: &ImportRequest) -> Result<(), Refusal> {
    if request.peer.parse::<SocketAddr>().is_err() {
        return Err(bad(format!("peer is {:?}, expected ip:port", clipped(&request.peer))));
    }
    if request.deadline_ms == 0 {
        return Err(bad("deadline_ms is 0, expected 1 or more".into()));
    }
    Ok(())
}

fn clipped(text: &str) -> String {
    text.chars().take(64).collect()
}

pub(super) fn bad(message: String) -> Refusal {
    Refusal::new(Reason::BadRequest, message)
}

/// A drain is waited for on a connection; longer than this it is asked for again.
pub(super) fn checked_drain(request: &DrainRequest) -> Result<(), Refusal> {
    if request.deadline_ms > DRAIN_MAX_MS {
        return Err(bad(format!(
            "deadline_ms is {}, at most {DRAIN_MAX_MS} is allowed",
            request.deadline_ms
        )));
    }
    Ok(())
}

/// Fuzz target: whatever comes is refused with a sentence, or is a question that survives being written again.
#[cfg(feature = "harness")]
pub(crate) fn fuzz(input: &[u8]) {
    use kvc_proto::wire::admit::{ReleaseRequest, WithdrawRequest};
    if let Ok(question) = parsed::<AdmitRequest>(input)
        && checked(&question).is_ok()
    {
        let again = serde_json::to_vec(&question).unwrap_or_default();
        assert_eq!(parsed::<AdmitRequest>(&again).ok(), Some(question));
    }
    if let Ok(order) = parsed::<ImportRequest>(input) {
        let _ = checked_import(&order);
    }
    if let Ok(order) = parsed::<WithdrawRequest>(input) {
        let again = serde_json::to_vec(&order).unwrap_or_default();
        assert_eq!(parsed::<WithdrawRequest>(&again).ok(), Some(order));
    }
    if let Ok(order) = parsed::<DrainRequest>(input) {
        let _ = checked_drain(&order);
    }
    let _ = parsed::<ReleaseRequest>(input);
}
