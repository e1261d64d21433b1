//! The HTTP front: which path is what (engines §6). Called per request by [`crate::serve`].

use std::{convert::Infallible, sync::Arc};

use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    header::{self, HeaderValue},
    http::uri::PathAndQuery,
};
use kvc_proto::wire::reason::Reason;

use crate::{
    answer::{self, Problem},
    app::Lane,
    body::{self, Answer, Whole},
    drive, moves,
    request::{ClientRequest, Endpoint, hop_by_hop, method_of},
    state,
};

/// Largest body of a move.
const MOVE_MAX: usize = 4096;

/// Answers one request, always.
pub async fn serve(lane: Arc<Lane>, request: Request<Incoming>) -> Result<Response<Answer>, Infallible> {
    Ok(match route(&lane, request).await {
        Ok(response) => response,
        Err(problem) => problem.into_response(),
    })
}

async fn route(lane: &Arc<Lane>, request: Request<Incoming>) -> Result<Response<Answer>, Problem> {
    let path = request.uri().path();
    let Some(method) = method_of(path) else {
        let text = format!("no such path: {}", path.chars().take(200).collect::<String>());
        return Err(Problem::new(404, Reason::BadRequest, text));
    };
    if *request.method() != method {
        let problem = Problem::new(405, Reason::BadRequest, format!("{path} takes {method}"));
        let mut response = problem.into_response();
        let allow = if method == Method::GET { "GET" } else { "POST" };
        response
            .headers_mut()
            .insert(header::ALLOW, HeaderValue::from_static(allow));
        return Ok(response);
    }
    if let Some(session) = moves::session_in(path).map(str::to_owned) {
        let body = body::of_client(request.into_body(), MOVE_MAX, lane.app.config.timeouts.client_body).await?;
        return moves::on_request(lane, &session, body).await;
    }
    if let Some(endpoint) = Endpoint::at(path) {
        let (parts, incoming) = request.into_parts();
        let config = &lane.app.config;
        let body = body::of_client(incoming, config.max_body_bytes, config.timeouts.client_body).await?;
        let path = parts
            .uri
            .path_and_query()
            .cloned()
            .unwrap_or_else(|| PathAndQuery::from_static("/"));
        let request = ClientRequest::read(endpoint, path, &parts.headers, body, config.session_header.as_ref())?;
        return Ok(drive::drive(lane, request).await);
    }
    match path {
        "/v1/models" => models(lane, &request).await,
        "/metrics" => {
            const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            let text = lane.app.metrics.text(&lane.app.router());
            Ok(answer::with_type(StatusCode::OK, TYPE, text.into_bytes()))
        }
        "/healthz" => Ok(state::health(&lane.app)),
        "/v1/workers" => Ok(answer::json(StatusCode::OK, &state::workers(&lane.app))),
        _ => Ok(answer::json(StatusCode::OK, &state::router(&lane.app))),
    }
}

/// The models of the first worker that answers; all serve the same.
async fn models(lane: &Arc<Lane>, request: &Request<Incoming>) -> Result<Response<Answer>, Problem> {
    const ANSWER_MAX: usize = 1 << 20;
    let within = lane.app.config.timeouts.admit;
    let workers: Vec<_> = lane.app.router().view.decoders().collect();
    for worker in workers {
        let ask = || {
            let mut out = Request::new(Whole::default());
            *out.uri_mut() = PathAndQuery::from_static("/v1/models").into();
            for (name, value) in request
                .headers()
                .iter()
                .filter(|(n, _)| !hop_by_hop(n) && **n != header::CONTENT_LENGTH)
            {
                out.headers_mut().append(name, value.clone());
            }
            out.headers_mut().insert(header::HOST, lane.app.host(worker));
            out
        };
        let whole = async {
            let (response, exchange) = lane.engine(worker).send(ask, within).await.ok()?;
            let (mut parts, mut upstream) = response.into_parts();
            let body::Collected::All(bytes) = body::collect(&mut upstream, ANSWER_MAX).await.ok()? else {
                return None;
            };
            exchange.done();
            for name in [header::CONNECTION, header::TRANSFER_ENCODING] {
                parts.headers.remove(name);
            }
            Some(Response::from_parts(parts, Answer::Whole(Whole::new(bytes))))
        };
        if let Ok(Some(response)) = tokio::time::timeout(within, whole).await {
            return Ok(response);
        }
    }
    Err(Problem::new(
        503,
        Reason::PeerUnreachable,
        "no worker that takes turns answers",
    ))
}
