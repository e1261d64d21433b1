//! One HTTP connection with its deadlines. The admission question is answered here, before any routing: it is the one
//! path whose microseconds count.

use std::{sync::Arc, time::Duration};

use axum::{Router, body::Body};
use hyper::{Method, Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use kvc_proto::wire::admit::{ADMIT_PATH, AdmitRequest};
use tokio::net::TcpStream;
use tower::ServiceExt;

use crate::state::Shared;

use super::{answer, body};

/// From a connection, or the last answer, to the next request's last header byte: also how long an idle keep-alive
/// connection lives.
const HEADERS: Duration = Duration::from_secs(60);
/// Bytes of a request's head.
const HEAD_MAX: usize = 32 << 10;
/// The longest admission question, in bytes: a session id of 256 bytes and a dozen numbers.
const ADMIT_MAX: usize = 16 << 10;

/// Serves until either side closes.
pub(super) async fn serve(shared: Arc<Shared>, router: Router, stream: TcpStream) {
    let service = service_fn(move |request: Request<Incoming>| {
        let (shared, router) = (shared.clone(), router.clone());
        async move {
            if request.uri().path() == ADMIT_PATH && request.method() == Method::POST {
                return Ok(admit(&shared, request).await);
            }
            router.oneshot(request.map(Body::new)).await
        }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS)
        .max_buf_size(HEAD_MAX)
        .pipeline_flush(true)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = served.await {
        tracing::debug!(%error, "connection ended");
    }
}

async fn admit(shared: &Arc<Shared>, request: Request<Incoming>) -> Response<Body> {
    let question = match body::json::<AdmitRequest>(Body::new(request.into_body()), ADMIT_MAX).await {
        Ok(question) => question,
        Err(refusal) => return answer::refusal(&refusal),
    };
    let began = std::time::Instant::now();
    if let Err(refusal) = body::checked(&question) {
        return answer::refusal(&refusal);
    }
    let answered = shared.call(|worker, now| worker.admit(&question, now));
    let response = answer::json(&answered);
    shared.metrics.admission_took(began.elapsed());
    response
}
