//! The questions the router asks a worker's module: admission, import, withdrawal, release, sessions, info (engines §5).

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use hyper::{Method, Request, header};
use kvc_proto::{
    id::{Incarnation, Placement, RequestKey, SessionId},
    routing::{Event, Resident, WorkerIndex},
    wire::{
        admit::{
            ADMIT_PATH, AdmitAnswer, AdmitRequest, ImportAnswer, ImportRequest, LoadReport, ReleaseRequest,
            WithdrawAnswer, WithdrawRequest,
        },
        info::{SessionList, SessionView, WorkerInfo},
        reason::{ErrorBody, Reason},
    },
};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    app::Lane,
    body::{self, Collected, Whole},
    upstream::{Pool, UpstreamError},
};

/// Largest answer of a module that is read.
const ANSWER_MAX: usize = 1 << 20;
/// Sessions of one page: with the longest names they stay below [`ANSWER_MAX`].
const PAGE: usize = 500;

/// Why a module's answer is none.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// It did not come.
    #[error(transparent)]
    Upstream(#[from] UpstreamError),
    /// It broke off.
    #[error("the answer broke off: {0}")]
    Broken(#[from] hyper::Error),
    /// It did not come to its end in time.
    #[error("the answer did not end within {} ms", after.as_millis())]
    Deadline {
        /// How long it had.
        after: Duration,
    },
    /// It is not what was asked for.
    #[error("unreadable answer with status {status}: {got}")]
    Unreadable {
        /// HTTP status.
        status: u16,
        /// What is wrong with it.
        got: String,
    },
    /// The worker refused, typed.
    #[error("refused: {0}")]
    Refused(Reason),
}

impl AskError {
    /// As a reason in a request's chain.
    pub fn reason(&self) -> Reason {
        match self {
            AskError::Refused(reason) => *reason,
            AskError::Deadline { .. } | AskError::Upstream(UpstreamError::Deadline { .. }) => Reason::DeadlineExceeded,
            AskError::Upstream(_) | AskError::Broken(_) => Reason::PeerUnreachable,
            AskError::Unreadable { .. } => Reason::Internal,
        }
    }
}

/// `POST /admit_direct_append` (ADM-10).
pub async fn admit(lane: &Lane, w: WorkerIndex, question: &AdmitRequest) -> Event {
    let within = lane.app.config.timeouts.admit;
    match ask::<AdmitAnswer>(lane.module(w), Method::POST, ADMIT_PATH, Some(question), within).await {
        Ok(answer) => Event::Answer(Box::new(answer)),
        Err(AskError::Refused(reason)) => {
            tracing::warn!(
                worker = w.0,
                reason = reason.as_str(),
                "the admission question was refused"
            );
            Event::Answer(Box::new(refusal(question.incarnation, reason)))
        }
        Err(error) => {
            tracing::info!(worker = w.0, %error, "no answer to an admission question");
            Event::Unreachable
        }
    }
}

/// An error body in place of an answer is a refusal too.
fn refusal(incarnation: Option<Incarnation>, reason: Reason) -> AdmitAnswer {
    AdmitAnswer {
        can_admit: false,
        mode: None,
        reason: Some(reason),
        reservation: None,
        deadline_ms: None,
        resident_tokens: 0,
        epoch: None,
        moved: None,
        incarnation: incarnation.unwrap_or(Incarnation(0)),
        load: LoadReport::default(),
    }
}

/// `POST /kvc/v1/sessions/{id}/import`, answered when it has committed. Dropping it closes the connection, which
/// cancels the import.
pub async fn import(
    lane: &Lane,
    w: WorkerIndex,
    session: &SessionId,
    question: &ImportRequest,
) -> Result<ImportAnswer, AskError> {
    let path = session_path(session, "/import");
    // The worker keeps the deadline; ours only covers a worker that does not.
    let within = Duration::from_millis(u64::from(question.deadline_ms)) + lane.app.config.timeouts.admit;
    let done = ask::<ImportAnswer>(lane.module(w), Method::POST, &path, Some(question), within).await;
    match &done {
        Ok(done) => {
            tracing::debug!(%session, worker = w.0, source = ?question.source, tokens = done.pulled_tokens, bytes = done.bytes, micros = done.micros, "imported");
            lane.app.metrics.imported(done.bytes);
        }
        Err(error) => {
            tracing::info!(%session, worker = w.0, source = ?question.source, %error, "import failed");
        }
    }
    done
}

/// `POST /kvc/v1/sessions/{id}/withdraw` (MIG-2).
pub async fn withdraw(
    lane: &Lane,
    w: WorkerIndex,
    session: &SessionId,
    question: &WithdrawRequest,
) -> Result<WithdrawAnswer, AskError> {
    let path = session_path(session, "/withdraw");
    let within = lane.app.config.timeouts.admit;
    let answer = ask::<WithdrawAnswer>(lane.module(w), Method::POST, &path, Some(question), within).await;
    lane.app.metrics.arbitrated();
    tracing::info!(%session, worker = w.0, placement = question.placement.n, ?answer, "the target of a move was asked");
    answer
}

/// `POST /kvc/v1/sessions/{id}/release` of a grant; nobody waits for it. One that is lost lapses by itself (ADM-10).
pub fn release(lane: &Arc<Lane>, w: WorkerIndex, session: SessionId, request: RequestKey) {
    let question = ReleaseRequest {
        request: Some(request),
        ..ReleaseRequest::default()
    };
    tell(lane, w, session, question);
}

/// The same, for a worker that thinks it owns the session: it was granted elsewhere under that number (SES-4). One that is
/// lost does not matter for long: the worker hears of it when it is asked or emptied.
pub fn placed(lane: &Arc<Lane>, w: WorkerIndex, session: SessionId, placement: Placement) {
    let question = ReleaseRequest {
        placed: Some(placement),
        ..ReleaseRequest::default()
    };
    tell(lane, w, session, question);
}

fn tell(lane: &Arc<Lane>, w: WorkerIndex, session: SessionId, question: ReleaseRequest) {
    let lane = lane.clone();
    tokio::spawn(async move {
        let path = session_path(&session, "/release");
        let within = lane.app.config.timeouts.admit;
        let answer = ask::<serde::de::IgnoredAny>(lane.module(w), Method::POST, &path, Some(&question), within).await;
        if let Err(error) = answer {
            tracing::debug!(%session, worker = w.0, %error, "release not confirmed");
        }
    });
}

/// `GET /kvc/v1/sessions/{id}` at each of them, at once: what they hold. Who does not answer in time is missing.
pub async fn held(lane: &Arc<Lane>, session: &SessionId, workers: &[WorkerIndex], within: Duration) -> Vec<Resident> {
    let path: Arc<str> = session_path(session, "").into();
    let mut asked = tokio::task::JoinSet::new();
    for &worker in workers {
        let (lane, path) = (lane.clone(), path.clone());
        asked.spawn(async move {
            match ask::<SessionView>(lane.module(worker), Method::GET, &path, None::<&()>, within).await {
                Ok(view) => Some(Resident::of(worker, &view)),
                Err(AskError::Refused(Reason::UnknownSession)) => Some(Resident::nothing(worker)),
                Err(error) => {
                    tracing::debug!(worker = worker.0, %error, "no answer about a session");
                    None
                }
            }
        });
    }
    let mut found: Vec<Resident> = asked.join_all().await.into_iter().flatten().collect();
    found.sort_by_key(|r| r.worker);
    found
}

/// `GET /kvc/v1/sessions`: the page after that id.
pub async fn sessions(lane: &Lane, w: WorkerIndex, after: Option<&SessionId>) -> Result<SessionList, AskError> {
    let mut path = format!("/kvc/v1/sessions?limit={PAGE}");
    if let Some(after) = after {
        path.push_str("&after=");
        path.push_str(&encoded(after));
    }
    let within = lane.app.config.timeouts.admit;
    ask(lane.module(w), Method::GET, &path, None::<&()>, within).await
}

/// `GET /kvc/v1/info`.
pub async fn info(pool: &Arc<Pool>, within: Duration) -> Result<WorkerInfo, AskError> {
    ask(pool, Method::GET, "/kvc/v1/info", None::<&()>, within).await
}

async fn ask<A: DeserializeOwned>(
    pool: &Arc<Pool>,
    method: Method,
    path: &str,
    question: Option<&impl Serialize>,
    within: Duration,
) -> Result<A, AskError> {
    let body = match question {
        None => Bytes::new(),
        Some(q) => serde_json::to_vec(q).unwrap_or_default().into(),
    };
    let host = pool.address();
    let request = || {
        let mut request = Request::new(Whole::new(body.clone()));
        *request.method_mut() = method.clone();
        // A path of ours is percent-encoded, an address checked: both parse.
        *request.uri_mut() = path.parse().unwrap_or_default();
        if let Ok(host) = header::HeaderValue::from_str(&host) {
            request.headers_mut().insert(header::HOST, host);
        }
        request.headers_mut().insert(
            header::CONTENT_TYPE,
            header::HeaderValue::from_static("application/json"),
        );
        request
    };
    let whole = async {
        let (response, exchange) = pool.send(request, within).await?;
        let status = response.status().as_u16();
        let mut body = response.into_body();
        match body::collect(&mut body, ANSWER_MAX).await? {
            Collected::All(bytes) => {
                exchange.done();
                Ok::<_, AskError>((status, bytes))
            }
            Collected::More(_) => Err(AskError::Unreadable {
                status,
                got: format!("more than {ANSWER_MAX} bytes"),
            }),
        }
    };
    let (status, bytes) = match tokio::time::timeout(within, whole).await {
        Ok(answer) => answer?,
        Err(_) => return Err(AskError::Deadline { after: within }),
    };
    if (200..300).contains(&status) {
        return serde_json::from_slice(&bytes).map_err(|e| AskError::Unreadable {
            status,
            got: e.to_string(),
        });
    }
    match serde_json::from_slice::<ErrorBody>(&bytes) {
        Ok(body) => Err(AskError::Refused(body.error.code)),
        Err(_) => Err(AskError::Unreadable {
            status,
            got: String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned(),
        }),
    }
}

fn session_path(session: &SessionId, end: &str) -> String {
    // A segment of dots alone would be taken for a relative path.
    let segment = match session.as_str() {
        dots @ ("." | "..") => dots.replace('.', "%2E"),
        _ => encoded(session),
    };
    format!("/kvc/v1/sessions/{segment}{end}")
}

/// Percent-encoded, all but RFC 3986's unreserved characters.
pub(crate) fn encoded(session: &SessionId) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(session.as_str().len());
    for &byte in session.as_str().as_bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_one_path_segment() {
        let path = |s| session_path(&SessionId::new(s).expect("valid"), "/import");
        assert_eq!(path("a/b ä"), "/kvc/v1/sessions/a%2Fb%20%C3%A4/import");
        assert_eq!(path(".."), "/kvc/v1/sessions/%2E%2E/import");
    }
}
