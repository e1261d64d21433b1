//! All other routes: information, sessions, imports and their withdrawal, releases, drain, metrics.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{Path, RawQuery, State},
    response::IntoResponse,
    routing::{get, post},
};
use hyper::{Response, StatusCode, header};
use kvc_proto::{
    id::{ImportId, SessionId},
    wire::{
        admit::{ADMIT_PATH, DrainRequest, ImportRequest, ReleaseRequest, WithdrawRequest},
        reason::{Reason, Refusal},
    },
};
use tokio::time::Instant;

use crate::{metrics::Scrape, state::Shared};

use super::{answer, body};

/// Bytes of an import's or release's body.
const BODY_MAX: usize = 16 << 10;
/// Between two looks at how far a drain is. Each counts the sessions under the machine's lock, so it pauses so many times
/// as long as it took.
const DRAIN_LOOK: Duration = Duration::from_millis(100);
const DRAIN_SHARE: u32 = 50;
/// Sessions on one page when nobody says how many, and at most.
const PAGE: usize = 100;
const PAGE_MAX: usize = 1000;

pub(super) fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/metrics", get(metrics))
        .route("/kvc/v1/info", get(info))
        .route("/kvc/v1/sessions", get(sessions))
        .route("/kvc/v1/sessions/{id}", get(session))
        .route("/kvc/v1/sessions/{id}/import", post(import))
        .route("/kvc/v1/sessions/{id}/withdraw", post(withdraw))
        .route("/kvc/v1/sessions/{id}/release", post(release))
        .route("/kvc/v1/drain", post(drain))
        .route("/kvc/v1/transfers", get(transfers))
        // POST is answered before routing; this names the method to others.
        .route(ADMIT_PATH, post(no_route))
        .method_not_allowed_fallback(wrong_method)
        .fallback(no_route)
        .with_state(shared)
}

type Answer = Result<Response<Body>, Refused>;

/// A refusal on its way to the client.
struct Refused(Refusal);

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        Self(refusal)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response<Body> {
        answer::refusal(&self.0)
    }
}

async fn healthz() -> &'static str {
    "ok\n"
}

async fn info(State(shared): State<Arc<Shared>>) -> Response<Body> {
    answer::json(&shared.info())
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Answer {
    // Formatting takes longer than an admission: not on the listener's thread.
    let page = shared.runtime.clone().spawn(async move {
        let scrape = shared.call(|worker, _| {
            let (sessions, leases, imports) = worker.counts();
            Scrape {
                counters: worker.counters().clone(),
                load: worker.load(None),
                held: worker.held(),
                evictable: worker.evictable(),
                sessions: sessions as u64,
                imports,
                leases,
                sync_lag: worker.sync_lag(),
                draining: worker.draining(),
            }
        });
        shared.metrics.page(scrape)
    });
    let Ok(Ok(page)) = page.await else {
        return Err(Refusal::new(Reason::Internal, "the metrics cannot be shown").into());
    };
    let mut response = Response::new(Body::from(page));
    let text = header::HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, text);
    Ok(response)
}

async fn sessions(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> Answer {
    let (mut after, mut limit) = (None, PAGE);
    for pair in query
        .as_deref()
        .unwrap_or_default()
        .split('&')
        .filter(|pair| !pair.is_empty())
    {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        match name {
            "after" => after = Some(decoded(value)?),
            "limit" => {
                limit = value
                    .parse()
                    .ok()
                    .filter(|n| (1..=PAGE_MAX).contains(n))
                    .ok_or_else(|| limit_of(value))?
            }
            other => {
                let other: String = other.chars().take(64).collect();
                return Err(body::bad(format!("{other:?} is no parameter: after and limit are")).into());
            }
        }
    }
    Ok(answer::json(
        &shared.call(|worker, now| worker.sessions(after.as_ref(), limit, now)),
    ))
}

async fn session(State(shared): State<Arc<Shared>>, Path(id): Path<String>) -> Answer {
    let id = named(&id)?;
    match shared.call(|worker, now| worker.session(&id, now)) {
        Some(view) => Ok(answer::json(&view)),
        None => Err(Refusal::new(Reason::UnknownSession, format!("session {id} is not known here")).into()),
    }
}

async fn transfers(State(shared): State<Arc<Shared>>) -> Response<Body> {
    answer::json(&shared.call(|worker, now| worker.transfers(now)))
}

async fn release(State(shared): State<Arc<Shared>>, Path(id): Path<String>, body: Body) -> Answer {
    let id = named(&id)?;
    let request: ReleaseRequest = body::json(body, BODY_MAX).await?;
    Ok(answer::json(
        &shared.call(|worker, now| worker.release(&id, &request, now)),
    ))
}

/// Answers when the import is over. A client that goes away meanwhile cancels it (F14).
async fn import(State(shared): State<Arc<Shared>>, Path(id): Path<String>, body: Body) -> Answer {
    let id = named(&id)?;
    let request: ImportRequest = body::json(body, BODY_MAX).await?;
    body::checked_import(&request)?;
    shared.pool.movable()?;
    let limit = Duration::from_millis(request.deadline_ms.into()).min(shared.config.import_deadline);
    let deadline = Instant::now() + limit;
    let begun = shared.call(|worker, now| {
        let import = worker.import(&id, &request, now)?;
        // In the same step: no effect of this import can come before its entry.
        Ok::<_, Refusal>((import, shared.imports.request(&shared, import, deadline)))
    });
    let (import, answer) = begun?;
    let mut guard = CancelOnDrop(Some((shared.clone(), import)));
    let outcome = match tokio::time::timeout_at(deadline, answer).await {
        Ok(Ok(outcome)) => {
            guard.0 = None;
            outcome
        }
        Ok(Err(_)) => Err(Refusal::new(Reason::Cancelled, "the module is shutting down")),
        Err(_) => {
            let why = Refusal::new(
                Reason::DeadlineExceeded,
                format!("the import was not over within {} ms", limit.as_millis()),
            );
            guard.cancel(why.clone());
            Err(why)
        }
    };
    Ok(answer::json(&outcome?))
}

/// MIG-2: what became of a move; either answer is for good.
async fn withdraw(State(shared): State<Arc<Shared>>, Path(id): Path<String>, body: Body) -> Answer {
    let id = named(&id)?;
    let request: WithdrawRequest = body::json(body, BODY_MAX).await?;
    let answer = shared.call(|worker, now| worker.withdraw(&id, &request, now))?;
    tracing::info!(session = %id, placement = request.placement.n, ?answer, "move withdrawn or owned");
    Ok(answer::json(&answer))
}

/// MIG-4: answers when nothing is left here, when somebody ends the drain, or at the deadline.
async fn drain(State(shared): State<Arc<Shared>>, body: Body) -> Answer {
    let request: DrainRequest = body::json(body, BODY_MAX).await?;
    body::checked_drain(&request)?;
    let until = Instant::now() + Duration::from_millis(request.deadline_ms.into());
    shared.call(|worker, _| worker.set_draining(request.draining));
    tracing::info!(
        draining = request.draining,
        deadline_ms = request.deadline_ms,
        "drain asked for"
    );
    loop {
        let began = Instant::now();
        let (answer, draining) = shared.call(|worker, _| (worker.drain_state(), worker.draining()));
        if answer.drained || !draining || Instant::now() >= until {
            return Ok(answer::json(&answer));
        }
        let pause = DRAIN_LOOK.max(began.elapsed() * DRAIN_SHARE);
        tokio::time::sleep_until(until.min(Instant::now() + pause)).await;
    }
}

/// Cancels its import unless disarmed: hyper drops the handler when the client closes the connection.
struct CancelOnDrop(Option<(Arc<Shared>, ImportId)>);

impl CancelOnDrop {
    fn cancel(&mut self, why: Refusal) {
        if let Some((shared, import)) = self.0.take() {
            shared.call(|worker, now| worker.cancel_import(import, why, now));
        }
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.cancel(Refusal::new(Reason::Cancelled, "the client went away"));
    }
}

async fn no_route() -> Response<Body> {
    let why = Refusal::new(Reason::BadRequest, "there is no such path here");
    answer::with_status(StatusCode::NOT_FOUND, &why)
}

async fn wrong_method() -> Response<Body> {
    let why = Refusal::new(Reason::BadRequest, "the path does not take this method");
    answer::with_status(StatusCode::METHOD_NOT_ALLOWED, &why)
}

fn named(id: &str) -> Result<SessionId, Refusal> {
    SessionId::new(id).map_err(|e| body::bad(e.to_string()))
}

/// A query value: percent encoding and `+` undone.
fn decoded(value: &str) -> Result<SessionId, Refusal> {
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digit = |b: Option<u8>| b.and_then(|b| char::from(b).to_digit(16));
                match (digit(rest.next()), digit(rest.next())) {
                    (Some(high), Some(low)) => (high * 16 + low) as u8,
                    _ => return Err(body::bad("after is not percent-encoded".into())),
                }
            }
            other => other,
        });
    }
    let text = String::from_utf8(bytes).map_err(|_| body::bad("after is no UTF-8".into()))?;
    named(&text)
}

fn limit_of(value: &str) -> Refusal {
    let value: String = value.chars().take(64).collect();
    body::bad(format!("limit is {value:?}, allowed is 1 to {PAGE_MAX}"))
}
