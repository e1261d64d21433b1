//! A client's request as the router sees it: endpoint, session, size (engines §6). Called by [`crate::front`].

use bytes::Bytes;
use hyper::{
    HeaderMap, Method,
    header::{self, HeaderName},
    http::uri::PathAndQuery,
};
use kvc_proto::{
    id::SessionId,
    routing::Turn,
    wire::{reason::Reason, turn::TURN_HEADER},
};

use crate::{
    answer::Problem,
    moves,
    scan::{self, Fields, PromptSize},
};

/// The first header that names a session.
pub const SESSION_HEADER: HeaderName = HeaderName::from_static("x-session-id");

/// Bytes of text that count as one token, for requests that carry text (ADM-14).
const BYTES_PER_TOKEN: usize = 4;

/// The endpoints that run on a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// SGLang's native `/generate`.
    Generate,
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    ChatCompletions,
}

impl Endpoint {
    /// The endpoint at that path.
    pub fn at(path: &str) -> Option<Endpoint> {
        match path {
            "/generate" => Some(Endpoint::Generate),
            "/v1/completions" => Some(Endpoint::Completions),
            "/v1/chat/completions" => Some(Endpoint::ChatCompletions),
            _ => None,
        }
    }
}

/// A request that was read and understood as far as the router needs it.
#[derive(Clone, Debug)]
pub struct ClientRequest {
    /// Path and query, as the client sent them.
    pub path: PathAndQuery,
    /// What goes on to the engine.
    pub headers: HeaderMap,
    /// The body, byte for byte.
    pub body: Bytes,
    /// What routing needs.
    pub turn: Turn,
}

impl ClientRequest {
    /// Reads headers and body; `extra` is a configured session header.
    pub fn read(
        endpoint: Endpoint,
        path: PathAndQuery,
        headers: &HeaderMap,
        body: Bytes,
        extra: Option<&HeaderName>,
    ) -> Result<ClientRequest, Problem> {
        let bad = |text: String| Problem::new(400, Reason::BadRequest, text);
        let fields = scan::scan(&body).map_err(|e| bad(format!("the body is not acceptable: {e}")))?;
        let turn = Turn {
            session: session(headers, extra, &fields).map_err(bad)?,
            max_new_tokens: match endpoint {
                Endpoint::Generate => fields.max_new_tokens,
                Endpoint::Completions | Endpoint::ChatCompletions => fields.max_completion_tokens.or(fields.max_tokens),
            },
            input_tokens: input_tokens(&fields, body.len()),
            estimated: !matches!(fields.prompt, Some(PromptSize::Tokens(_))),
        };
        Ok(ClientRequest {
            path,
            headers: forwarded(headers),
            turn,
            body,
        })
    }
}

/// The order of engines §6: `X-Session-Id`, the configured header, `session_id`, `session_params.id`.
fn session(headers: &HeaderMap, extra: Option<&HeaderName>, fields: &Fields<'_>) -> Result<Option<SessionId>, String> {
    for name in [Some(&SESSION_HEADER), extra].into_iter().flatten() {
        if let Some(value) = headers.get(name) {
            let text = std::str::from_utf8(value.as_bytes()).map_err(|_| format!("{name}: not UTF-8"))?;
            return SessionId::new(text).map(Some).map_err(|e| format!("{name}: {e}"));
        }
    }
    let in_body = [
        ("session_id", &fields.session_id),
        ("session_params.id", &fields.session_params_id),
    ];
    for (name, text) in in_body {
        if let Some(text) = text {
            return SessionId::new(text).map(Some).map_err(|e| format!("{name}: {e}"));
        }
    }
    Ok(None)
}

fn input_tokens(fields: &Fields<'_>, body: usize) -> u32 {
    let estimate = |bytes: usize| u32::try_from(bytes.div_ceil(BYTES_PER_TOKEN)).unwrap_or(u32::MAX);
    match fields.prompt {
        Some(PromptSize::Tokens(n)) => n.max(1),
        Some(PromptSize::Bytes(n)) => estimate(n).max(1),
        None => estimate(body).max(1),
    }
}

/// What goes on: everything but what belongs to the client's connection, and turn headers that only a router may write.
fn forwarded(headers: &HeaderMap) -> HeaderMap {
    let mut out = HeaderMap::with_capacity(headers.len() + 2);
    for (name, value) in headers {
        if !hop_by_hop(name) && *name != header::HOST && *name != header::CONTENT_LENGTH && name.as_str() != TURN_HEADER
        {
            out.append(name, value.clone());
        }
    }
    out
}

/// Headers of one connection, not of the message (RFC 9110 §7.6.1).
pub fn hop_by_hop(name: &HeaderName) -> bool {
    matches!(
        *name,
        header::CONNECTION
            | header::TRANSFER_ENCODING
            | header::TE
            | header::TRAILER
            | header::UPGRADE
            | header::PROXY_AUTHENTICATE
            | header::PROXY_AUTHORIZATION
            | header::EXPECT
    ) || matches!(name.as_str(), "keep-alive" | "proxy-connection")
}

/// The method an endpoint takes.
pub fn method_of(path: &str) -> Option<Method> {
    match path {
        "/v1/models" | "/metrics" | "/healthz" | "/v1/router/state" | "/v1/workers" => Some(Method::GET),
        _ if moves::session_in(path).is_some() => Some(Method::POST),
        _ => Endpoint::at(path).map(|_| Method::POST),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(headers: &[(&str, &str)], body: &str) -> Result<ClientRequest, Problem> {
        let headers = headers
            .iter()
            .map(|(n, v)| (n.parse::<HeaderName>().expect("name"), v.parse().expect("value")))
            .collect();
        let extra = HeaderName::from_static("x-conversation");
        let path = PathAndQuery::from_static("/generate");
        ClientRequest::read(
            Endpoint::Generate,
            path,
            &headers,
            Bytes::from(body.to_owned()),
            Some(&extra),
        )
    }

    #[test]
    fn session_ids_are_taken_in_the_documented_order() {
        // engines §6
        let all = [("x-session-id", "h1"), ("x-conversation", "h2")];
        let body = r#"{"session_id":"b1","session_params":{"id":"b2"},"input_ids":[1]}"#;
        let session = |h, b| read(h, b).expect("valid").turn.session.map(|s| s.as_str().to_owned());
        assert_eq!(session(&all, body).as_deref(), Some("h1"));
        assert_eq!(session(&all[1..], body).as_deref(), Some("h2"));
        assert_eq!(session(&[], body).as_deref(), Some("b1"));
        let null = r#"{"session_id":null,"session_params":{"id":"b2"}}"#;
        assert_eq!(session(&[], null).as_deref(), Some("b2"));
        assert_eq!(session(&[], "{}"), None);
    }

    #[test]
    fn sizes_are_counts_of_ids_and_estimates_of_text() {
        // ADM-14
        let turn = |b| read(&[], b).expect("valid").turn;
        let exact = turn(r#"{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":5}}"#);
        assert_eq!(
            (exact.input_tokens, exact.estimated, exact.max_new_tokens),
            (3, false, Some(5))
        );
        let text = turn(r#"{"text":"0123456789"}"#);
        assert_eq!((text.input_tokens, text.estimated), (3, true));
        assert_eq!(turn(r#"{"input_ids":[]}"#).input_tokens, 1);
    }

    #[test]
    fn a_client_cannot_write_turn_headers() {
        let request = read(
            &[("x-kvc-turn", "s=other"), ("connection", "close"), ("x-trace", "7")],
            "{}",
        )
        .expect("valid");
        let names: Vec<_> = request.headers.keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["x-trace"]);
    }
}
