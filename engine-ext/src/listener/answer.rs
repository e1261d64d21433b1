//! Answers: JSON, and errors as `{"error":{"code","message"}}`.

use axum::body::Body;
use hyper::{Response, StatusCode, header};
use kvc_proto::wire::reason::{ErrorBody, Refusal};
use serde::Serialize;

/// 200 with a JSON body.
pub(super) fn json(value: &impl Serialize) -> Response<Body> {
    with(StatusCode::OK, value)
}

/// An error answer with the reason's own status.
pub(super) fn refusal(refusal: &Refusal) -> Response<Body> {
    let status = StatusCode::from_u16(refusal.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    with_status(status, refusal)
}

/// An error answer whose HTTP status says more than the reason's: 404, 405, 408, 413.
pub(super) fn with_status(status: StatusCode, refusal: &Refusal) -> Response<Body> {
    with(status, &ErrorBody { error: refusal.clone() })
}

fn with(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    let body = serde_json::to_vec(value).unwrap_or_default();
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/json"),
    );
    response
}
