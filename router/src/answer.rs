//! Error answers of the router itself: `{"error":{"code","message"}}`, every code from `wire::reason`.

use bytes::Bytes;
use hyper::{Response, StatusCode, header};
use kvc_proto::wire::reason::{ErrorBody, Reason, Refusal};
use serde::Serialize;

use crate::body::{Answer, Whole};

/// Something a client is told instead of an answer.
#[derive(Debug)]
pub struct Problem {
    status: u16,
    body: ErrorBody,
}

impl Problem {
    /// `status` is the HTTP status.
    pub fn new(status: u16, code: Reason, message: impl Into<String>) -> Problem {
        Problem {
            status,
            body: ErrorBody {
                error: Refusal::new(code, message),
            },
        }
    }

    /// The reason's own status.
    pub fn of(code: Reason, message: impl Into<String>) -> Problem {
        Problem::new(code.status(), code, message)
    }

    /// The reason.
    pub fn code(&self) -> Reason {
        self.body.error.code
    }

    /// As an answer.
    pub fn into_response(self) -> Response<Answer> {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        json(status, &self.body)
    }

    /// As an event of a stream that has begun (DISP-8).
    pub fn into_event(self) -> Bytes {
        let json = serde_json::to_string(&self.body).unwrap_or_default();
        Bytes::from(format!("data: {json}\n\n"))
    }
}

/// A JSON answer.
pub fn json(status: StatusCode, body: &impl Serialize) -> Response<Answer> {
    let bytes = serde_json::to_vec(body).unwrap_or_default();
    with_type(status, "application/json", bytes)
}

/// An answer of that content type.
pub fn with_type(status: StatusCode, content_type: &'static str, bytes: Vec<u8>) -> Response<Answer> {
    let mut response = Response::new(Answer::Whole(Whole::new(bytes.into())));
    *response.status_mut() = status;
    let value = header::HeaderValue::from_static(content_type);
    response.headers_mut().insert(header::CONTENT_TYPE, value);
    response
}
