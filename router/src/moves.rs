//! Moves sessions between workers while they live (MIG-1): for the operator's `POST /v1/sessions/{id}/move`, and for
//! [`crate::drain`]. What is decided is decided by [`Move`].

use std::{sync::Arc, time::Instant};

use bytes::Bytes;
use hyper::{Response, StatusCode};
use kvc_proto::{
    id::{Placement, SessionId},
    routing::{CannotMove, Move, MoveEffect, MoveEvent, MoveOutcome, WorkerIndex},
    wire::reason::Reason,
};
use serde::{Deserialize, Serialize};

use crate::{
    answer::{self, Problem},
    app::Lane,
    body::Answer,
    worker::{self, AskError},
};

/// The session in `/v1/sessions/{id}/move`, percent-encoded; none if the path is another one.
pub fn session_in(path: &str) -> Option<&str> {
    let name = path.strip_prefix("/v1/sessions/")?.strip_suffix("/move")?;
    Some(name).filter(|n| !n.contains('/'))
}

/// What an operator asks for.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MoveRequest {
    /// The target: its engine's URL, or `host:port`.
    to: String,
}

/// What was done.
#[derive(Debug, Serialize)]
struct Moved {
    from: String,
    to: String,
    placement: Placement,
    /// Tokens whose KV moved; the rest was at the target already.
    pulled_tokens: u32,
    /// Begin to end as the router saw it.
    micros: u64,
}

/// `POST /v1/sessions/{id}/move`. The move goes on if the operator's connection breaks.
pub async fn on_request(lane: &Arc<Lane>, name: &str, body: Bytes) -> Result<Response<Answer>, Problem> {
    let bad = |text: String| Problem::of(Reason::BadRequest, text);
    let name = decoded(name).ok_or_else(|| bad("the session's name is not percent-encoded UTF-8".into()))?;
    let session = SessionId::new(&name).map_err(|e| bad(e.to_string()))?;
    let request: MoveRequest =
        serde_json::from_slice(&body).map_err(|e| bad(format!("the body is no {{\"to\": \"<worker>\"}}: {e}")))?;
    let target = lane.app.named(&request.to).ok_or_else(|| {
        let to: String = request.to.chars().take(200).collect();
        Problem::new(404, Reason::BadRequest, format!("no worker {to:?} is configured"))
    })?;
    let workers: Vec<WorkerIndex> = lane.app.router().view.answering().collect();
    let found = worker::held(lane, &session, &workers, lane.app.config.timeouts.admit).await;
    let began = Instant::now();
    let now = lane.app.now();
    let started = Move::start(&mut lane.app.router(), session.clone(), &found, target, now);
    let mv = noted(lane, &session, target, started).map_err(|e| Problem::of(e.reason(), e.to_string()))?;
    let source = mv.source();
    let lane = lane.clone();
    let carried = tokio::spawn({
        let lane = lane.clone();
        async move { carry(&lane, mv).await }
    });
    let stayed = |reason, text: &str| Problem::of(reason, format!("{text}: {reason}"));
    match carried.await {
        Ok(MoveOutcome::Moved { placement, import }) => {
            let moved = Moved {
                from: lane.app.engine(source).to_string(),
                to: lane.app.engine(target).to_string(),
                placement,
                pulled_tokens: import.map_or(0, |i| i.pulled_tokens),
                micros: u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX),
            };
            Ok(answer::json(StatusCode::OK, &moved))
        }
        Ok(MoveOutcome::Stayed(reason)) => Err(stayed(reason, "the session stays where it was")),
        Ok(MoveOutcome::Unknown(reason)) => Err(stayed(reason, "the target did not say what became of the move")),
        Err(error) => Err(Problem::of(
            Reason::Internal,
            format!("the move was not carried out: {error}"),
        )),
    }
}

/// Logs and counts that a move has begun, or why not.
pub fn noted(
    lane: &Lane,
    session: &SessionId,
    target: WorkerIndex,
    started: Result<Move, CannotMove>,
) -> Result<Move, CannotMove> {
    match &started {
        Ok(mv) => tracing::debug!(%session, from = mv.source().0, to = target.0, placement = mv.placement().n, "move"),
        Err(error) => {
            lane.app.metrics.move_refused();
            tracing::debug!(%session, to = target.0, %error, "no move");
        }
    }
    started
}

/// Carries one move to its end. Dropped before, its number stays pending until a turn or another move asks the target.
pub async fn carry(lane: &Arc<Lane>, mv: Move) -> MoveOutcome {
    let began = Instant::now();
    let mut carried = Carried { lane: lane.clone(), mv };
    let outcome = carried.finish().await;
    let mv = &carried.mv;
    let took = began.elapsed();
    lane.app.metrics.moved(outcome, took);
    let import = match outcome {
        MoveOutcome::Moved { import, .. } => import,
        MoveOutcome::Stayed(_) | MoveOutcome::Unknown(_) => None,
    };
    let reason = match outcome {
        MoveOutcome::Moved { .. } => None,
        MoveOutcome::Stayed(reason) | MoveOutcome::Unknown(reason) => Some(reason.as_str()),
    };
    tracing::info!(
        session = %mv.session(),
        from = %lane.app.engine(mv.source()),
        to = %lane.app.engine(mv.target()),
        placement = mv.placement().n,
        outcome = outcome.as_str(),
        reason,
        tokens = import.map(|i| i.pulled_tokens),
        bytes = import.map(|i| i.bytes),
        micros = took.as_micros() as u64,
        "session moved or not"
    );
    outcome
}

/// A move in the hands of the front.
struct Carried {
    lane: Arc<Lane>,
    mv: Move,
}

impl Carried {
    async fn finish(&mut self) -> MoveOutcome {
        loop {
            if let Some(outcome) = self.mv.outcome() {
                return outcome;
            }
            match self.mv.poll_effect() {
                Some(MoveEffect::Import {
                    worker,
                    session,
                    request,
                }) => {
                    let event = match worker::import(&self.lane, worker, &session, &request).await {
                        Ok(answer) => MoveEvent::Moved(answer),
                        Err(AskError::Refused(reason)) => MoveEvent::Refused(reason),
                        Err(_) => MoveEvent::Unreachable,
                    };
                    self.event(event);
                }
                Some(MoveEffect::Withdraw {
                    worker,
                    session,
                    request,
                }) => {
                    let event = match worker::withdraw(&self.lane, worker, &session, &request).await {
                        Ok(answer) => MoveEvent::Withdrawn(answer),
                        Err(AskError::Refused(reason)) => MoveEvent::WithdrawRefused(reason),
                        Err(_) => MoveEvent::Unreachable,
                    };
                    self.event(event);
                }
                Some(MoveEffect::Wait { until }) => {
                    tokio::time::sleep(self.lane.app.until(until)).await;
                    self.mv.handle_timeout();
                }
                None => {
                    tracing::error!(session = %self.mv.session(), "the move waits for nothing");
                    let now = self.lane.app.now();
                    self.mv.abandon(&mut self.lane.app.router(), now);
                }
            }
        }
    }

    fn event(&mut self, event: MoveEvent) {
        let now = self.lane.app.now();
        let told = self.mv.handle(&mut self.lane.app.router(), event, now);
        if let Err(fault) = told {
            tracing::error!(session = %self.mv.session(), %fault, "move out of step");
        }
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        let now = self.lane.app.now();
        self.mv.abandon(&mut self.lane.app.router(), now);
    }
}

/// Undoes percent-encoding.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let mut digit = || char::from(rest.next()?).to_digit(16);
            let (high, low) = (digit()?, digit()?);
            bytes.push(u8::try_from(high * 16 + low).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_one_session() {
        assert_eq!(session_in("/v1/sessions/a%2Fb/move"), Some("a%2Fb"));
        for other in [
            "/v1/sessions/a/b/move",
            "/v1/sessions/a",
            "/v1/sessions/move",
            "/v1/models",
        ] {
            assert_eq!(session_in(other), None, "{other}");
        }
        assert_eq!(decoded("a%2Fb%20%C3%A4").as_deref(), Some("a/b ä"));
        for broken in ["%", "%4", "%zz", "%FF"] {
            assert_eq!(decoded(broken), None, "{broken}");
        }
    }

    proptest::proptest! {
        #[test]
        fn every_name_survives_its_encoding(name in "\\PC{1,60}") {
            let session = SessionId::new(&name).expect("no control characters");
            let path = format!("/v1/sessions/{}/move", worker::encoded(&session));
            proptest::prop_assert_eq!(session_in(&path).and_then(decoded), Some(name));
        }
    }
}
