//! Carries out one dispatch: what [`Dispatch`] wants done, done over HTTP; what came of it, told back. No policy here.

use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::Incoming,
    header::{self, HeaderName, HeaderValue},
};
use kvc_proto::{
    id::SessionId,
    routing::{Dispatch, Effect, Event, Outcome, Refused, WorkerIndex},
    wire::{
        admit::Source,
        reason::Reason,
        turn::{TURN_HEADER, TurnTag},
    },
};
use tokio::time::timeout;

use crate::{
    answer::Problem,
    app::Lane,
    body::{self, Answer, Collected, Whole},
    handover, metrics,
    refusal::{self, Opening},
    relay::Relay,
    request::{ClientRequest, hop_by_hop},
    upstream::{Exchange, UpstreamError},
    worker::{self, AskError},
};

const KVC_SESSION: HeaderName = HeaderName::from_static("x-kvc-session");
const KVC_WORKER: HeaderName = HeaderName::from_static("x-kvc-worker");
const KVC_MODE: HeaderName = HeaderName::from_static("x-kvc-mode");
const KVC_SOURCE: HeaderName = HeaderName::from_static("x-kvc-source");
const KVC_REASON: HeaderName = HeaderName::from_static("x-kvc-reason");

/// An answer up to this size is held back until it is complete: until then another path is open (DISP-8).
const WHOLE_MAX: usize = 1 << 20;
/// So much of a stream is looked at for its first event.
pub(crate) const FIRST_EVENT_MAX: usize = 64 << 10;

/// Serves one request to its one answer. Dropping the future means that the client went away.
pub async fn drive(lane: &Arc<Lane>, request: ClientRequest) -> Response<Answer> {
    let mut live = Live::start(lane, &request);
    // The engine's own last error, for a client whom nobody could serve.
    let mut last: Option<Response<Answer>> = None;
    loop {
        match live.next() {
            Some(Effect::Ask { session, workers }) => {
                let found = worker::held(lane, &session, &workers, lane.app.config.timeouts.admit).await;
                live.event(Event::Residents(found));
            }
            Some(Effect::Locate { session, workers }) => {
                let found = worker::held(lane, &session, &workers, lane.app.config.timeouts.locate).await;
                live.event(Event::Located(found));
            }
            Some(Effect::Withdraw {
                worker,
                session,
                request,
            }) => {
                let told = match worker::withdraw(lane, worker, &session, &request).await {
                    Ok(answer) => Event::Withdrawn(answer),
                    Err(AskError::Refused(reason)) => Event::WithdrawRefused(reason),
                    Err(_) => Event::Unreachable,
                };
                live.event(told);
            }
            Some(Effect::Probe { worker, request }) => {
                let answer = worker::admit(lane, worker, &request).await;
                live.event(answer);
            }
            Some(Effect::HandOver(handover)) => {
                let came = handover::hand_over(lane, &request, &handover).await;
                live.event(came);
            }
            Some(Effect::Run { worker, tag }) => match run(lane, &request, worker, tag.as_ref()).await {
                Ran::Refused(reason) => live.event(Event::TurnRefused(reason)),
                Ran::Failed(reason, answer) => {
                    last = answer;
                    live.event(Event::Failed(reason));
                }
                Ran::Passed(answer) => {
                    live.event(Event::Passed);
                    return live.signed(answer);
                }
                Ran::Whole(answer, output_tokens) => {
                    live.event(Event::FirstByte);
                    live.event(Event::Completed { output_tokens });
                    return live.signed(answer);
                }
                Ran::Stream(stream) => {
                    live.event(Event::FirstByte);
                    let Stream {
                        head,
                        first,
                        upstream,
                        exchange,
                        events,
                    } = *stream;
                    let signed = live.signed(Response::new(()));
                    let relay = Relay::new(live, first, upstream, exchange, events);
                    let mut answer = head.map(|()| Answer::Relay(Box::new(relay)));
                    answer.headers_mut().extend(signed.into_parts().0.headers);
                    return answer;
                }
            },
            Some(Effect::Wait { until }) => {
                tokio::time::sleep(lane.app.until(until)).await;
                live.timeout();
            }
            // Carried out by `next`.
            Some(Effect::Release { .. } | Effect::Placed { .. }) => {}
            Some(Effect::Refuse(refused)) => {
                let answer = last.take().unwrap_or_else(|| explain(refused, &live).into_response());
                return live.signed(answer);
            }
            None => {
                tracing::error!(
                    request = live.dispatch.trace().request,
                    "the dispatch waits for nothing"
                );
                return Problem::of(Reason::Internal, "the router lost track of the request").into_response();
            }
        }
    }
}

/// A dispatch in the hands of the front. Dropped before its end, the client went away.
pub struct Live {
    lane: Arc<Lane>,
    dispatch: Dispatch,
    session: Option<SessionId>,
}

impl Live {
    fn start(lane: &Arc<Lane>, request: &ClientRequest) -> Live {
        let now = lane.app.now();
        let dispatch = Dispatch::start(&mut lane.app.router(), request.turn.clone(), now);
        Live {
            dispatch,
            session: request.turn.session.clone(),
            lane: lane.clone(),
        }
    }

    /// How long a next token may take.
    pub fn patience(&self) -> Duration {
        self.lane.app.config.timeouts.next_token
    }

    /// Tells the dispatch what has happened, and carries out what needs no answer.
    pub fn event(&mut self, event: Event) {
        let ended_before = self.dispatch.outcome().is_some();
        let now = self.lane.app.now();
        let told = self.dispatch.handle(&mut self.lane.app.router(), event, now);
        if let Err(fault) = told {
            tracing::error!(request = self.dispatch.trace().request, %fault, "dispatch out of step");
        }
        match self.dispatch.outcome() {
            Some(outcome) if !ended_before => self.ended(outcome),
            _ => {}
        }
    }

    fn timeout(&mut self) {
        let now = self.lane.app.now();
        self.dispatch.handle_timeout(&mut self.lane.app.router(), now);
        if let Some(outcome) = self.dispatch.outcome() {
            self.ended(outcome);
        }
    }

    /// The next effect that waits for an answer; releases are sent on the way.
    fn next(&mut self) -> Option<Effect> {
        loop {
            match self.dispatch.poll_effect()? {
                Effect::Release {
                    worker,
                    session,
                    request,
                } => worker::release(&self.lane, worker, session, request),
                Effect::Placed {
                    worker,
                    session,
                    placement,
                } => worker::placed(&self.lane, worker, session, placement),
                effect => return Some(effect),
            }
        }
    }

    fn ended(&mut self, outcome: Outcome) {
        let trace = self.dispatch.trace();
        self.lane.app.metrics.ended(trace, outcome);
        tracing::debug!(
            request = trace.request,
            session = self.session.as_ref().map(SessionId::as_str),
            mode = trace.mode.map(|m| m.as_str()),
            source = trace.source.map(source_name),
            worker = trace.worker.map(|w| w.0),
            outcome = metrics::outcome_name(outcome),
            probes = trace.probes,
            reasons = ?trace.chain,
            micros = trace.ended.map(|t| t.since(trace.started).as_micros() as u64),
            "request"
        );
        if !matches!(outcome, Outcome::Refused(_)) {
            // Releases of an ended dispatch; a refusal's effect is for the caller.
            while let Some(effect) = self.next() {
                debug_assert!(false, "{effect:?} after the end");
            }
        }
    }

    /// Adds the headers that tell session, worker, mode, source of the KV and reasons (engines §6).
    fn signed<B>(&self, mut response: Response<B>) -> Response<B> {
        let trace = self.dispatch.trace();
        let headers = response.headers_mut();
        if let Some(session) = &self.session
            && let Ok(value) = HeaderValue::from_bytes(session.as_str().as_bytes())
        {
            headers.insert(KVC_SESSION, value);
        }
        if let Some(worker) = trace.worker {
            headers.insert(KVC_WORKER, self.lane.app.host(worker));
        }
        if let Some(mode) = trace.mode {
            headers.insert(KVC_MODE, HeaderValue::from_static(mode.as_str()));
        }
        if let Some(source) = trace.source {
            headers.insert(KVC_SOURCE, HeaderValue::from_static(source_name(source)));
        }
        if !trace.chain.is_empty() {
            let chain: Vec<&str> = trace.chain.iter().map(|r| r.as_str()).collect();
            if let Ok(value) = HeaderValue::from_str(&chain.join(",")) {
                headers.insert(KVC_REASON, value);
            }
        }
        response
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        if self.dispatch.outcome().is_none() {
            self.event(Event::ClientGone);
        }
    }
}

/// As headers, logs and metrics write what served an import.
pub fn source_name(source: Source) -> &'static str {
    match source {
        Source::Prefill => "prefill",
        Source::Replica => "replica",
        Source::Owner => "owner",
    }
}

fn explain(refused: Refused, live: &Live) -> Problem {
    let trace = live.dispatch.trace();
    let text = match refused.reason {
        Reason::SessionBusy => {
            let waited = live.lane.app.config.routing.busy_wait.as_millis();
            format!("another turn of the session has been running for the {waited} ms that this one waited")
        }
        Reason::TooLarge => "prompt and generation limit fit on no worker".to_owned(),
        _ if trace.chain.is_empty() => "no worker that takes turns is up".to_owned(),
        _ => {
            let chain: Vec<&str> = trace.chain.iter().map(|r| r.as_str()).collect();
            format!("no worker could serve the request: {}", chain.join(", "))
        }
    };
    Problem::new(refused.status, refused.reason, text)
}

/// What an execution came to.
enum Ran {
    Refused(Reason),
    Failed(Reason, Option<Response<Answer>>),
    Passed(Response<Answer>),
    Whole(Response<Answer>, u32),
    Stream(Box<Stream>),
}

struct Stream {
    head: Response<()>,
    first: Bytes,
    upstream: Incoming,
    exchange: Exchange,
    events: bool,
}

async fn run(lane: &Arc<Lane>, request: &ClientRequest, worker: WorkerIndex, tag: Option<&TurnTag>) -> Ran {
    let within = lane.app.config.timeouts.first_token;
    match timeout(within, begin(lane, request, worker, tag)).await {
        Ok(Ok(ran)) => ran,
        Ok(Err(error)) => {
            tracing::info!(worker = worker.0, %error, "execution failed");
            Ran::Failed(error.reason(), None)
        }
        Err(_) => {
            tracing::info!(
                worker = worker.0,
                ms = within.as_millis() as u64,
                "no first token in time"
            );
            Ran::Failed(Reason::DeadlineExceeded, None)
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Upstream(#[from] UpstreamError),
    #[error("the answer broke off: {0}")]
    Broken(#[from] hyper::Error),
    #[error("the stream ended before its first event")]
    Empty,
}

impl RunError {
    fn reason(&self) -> Reason {
        match self {
            RunError::Upstream(UpstreamError::Deadline { .. }) => Reason::DeadlineExceeded,
            RunError::Upstream(_) | RunError::Broken(_) | RunError::Empty => Reason::PeerUnreachable,
        }
    }
}

/// Sends the request and waits for the first byte that matters.
async fn begin(
    lane: &Arc<Lane>,
    request: &ClientRequest,
    worker: WorkerIndex,
    tag: Option<&TurnTag>,
) -> Result<Ran, RunError> {
    let within = lane.app.config.timeouts.first_token;
    let pool = lane.engine(worker);
    let (response, exchange) = pool.send(|| engine_request(lane, request, worker, tag), within).await?;
    let (mut parts, mut upstream) = response.into_parts();
    let status = parts.status;
    let connection_headers: Vec<HeaderName> = parts.headers.keys().filter(|n| hop_by_hop(n)).cloned().collect();
    for name in connection_headers {
        parts.headers.remove(name);
    }
    let mut head = Response::new(());
    *head.status_mut() = status;
    *head.headers_mut() = parts.headers;
    if status.is_success() && is_event_stream(head.headers()) {
        let first = first_event(&mut upstream).await?;
        return Ok(match refusal::opening(&first) {
            Opening::Refused(Reason::BadRequest) | Opening::Fine => Ran::Stream(Box::new(Stream {
                head,
                first,
                upstream,
                exchange,
                events: true,
            })),
            Opening::Refused(reason) => Ran::Refused(reason),
        });
    }
    match body::collect(&mut upstream, WHOLE_MAX).await? {
        Collected::All(bytes) => {
            exchange.done();
            Ok(judged(head, bytes))
        }
        Collected::More(first) if status.is_success() => Ok(Ran::Stream(Box::new(Stream {
            head,
            first,
            upstream,
            exchange,
            events: false,
        }))),
        // An error of more than a megabyte: nothing of ours, and not worth keeping.
        Collected::More(_) => Ok(Ran::Failed(Reason::Internal, None)),
    }
}

/// A complete answer: the client's, a refusal, an engine's fault.
fn judged(head: Response<()>, bytes: Bytes) -> Ran {
    let status = head.status();
    if status.is_success() {
        let tokens = refusal::completion_tokens(&bytes);
        return Ran::Whole(head.map(|()| Answer::Whole(Whole::new(bytes))), tokens);
    }
    match refusal::typed(&bytes) {
        Some(reason) if reason != Reason::BadRequest => Ran::Refused(reason),
        _ => {
            let answer = head.map(|()| Answer::Whole(Whole::new(bytes)));
            match status {
                s if s.is_client_error() => Ran::Passed(answer),
                StatusCode::GATEWAY_TIMEOUT => Ran::Failed(Reason::DeadlineExceeded, Some(answer)),
                _ => Ran::Failed(Reason::Internal, Some(answer)),
            }
        }
    }
}

async fn first_event(upstream: &mut Incoming) -> Result<Bytes, RunError> {
    let mut first = match body::next(upstream).await {
        None => return Err(RunError::Empty),
        Some(data) => data?,
    };
    while memchr::memmem::find(&first, b"\n\n").is_none() && first.len() < FIRST_EVENT_MAX {
        let Some(more) = body::next(upstream).await.transpose()? else {
            break;
        };
        let mut joined = BytesMut::with_capacity(first.len() + more.len());
        joined.extend_from_slice(&first);
        joined.extend_from_slice(&more);
        first = joined.freeze();
    }
    Ok(first)
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
    content_type.is_some_and(|t| t.starts_with("text/event-stream"))
}

pub(crate) fn engine_request(
    lane: &Lane,
    request: &ClientRequest,
    worker: WorkerIndex,
    tag: Option<&TurnTag>,
) -> Request<Whole> {
    let mut out = Request::new(Whole::new(request.body.clone()));
    *out.method_mut() = Method::POST;
    *out.uri_mut() = request.path.clone().into();
    *out.headers_mut() = request.headers.clone();
    out.headers_mut().insert(header::HOST, lane.app.host(worker));
    if let Some(value) = tag.and_then(|t| HeaderValue::try_from(t.to_string()).ok()) {
        out.headers_mut().insert(HeaderName::from_static(TURN_HEADER), value);
    }
    out
}
