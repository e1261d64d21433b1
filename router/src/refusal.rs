//! Recognises a worker's typed refusal in an engine's answer (ADM-14), and reads what an answer says it generated. The
//! engine wraps a refusal in error forms of its own; the reason stands as `code` or at the beginning of the message.

use kvc_proto::wire::reason::Reason;
use serde::Deserialize;

/// How a stream begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// With tokens, or with something that is no refusal.
    Fine,
    /// With a refusal, before any work.
    Refused(Reason),
}

/// Looks at a stream's first event.
pub fn opening(first: &[u8]) -> Opening {
    match first.strip_prefix(b"data: ") {
        Some(json) => {
            let end = memchr::memmem::find(json, b"\n\n").unwrap_or(json.len());
            typed(&json[..end]).map_or(Opening::Fine, Opening::Refused)
        }
        None => Opening::Fine,
    }
}

/// The first refusal among whole events of a stream.
pub fn among(events: &[u8]) -> Option<Reason> {
    if !suspicious(events) {
        return None;
    }
    let mut rest = events;
    while let Some(end) = memchr::memmem::find(rest, b"\n\n") {
        if let Some(reason) = typed(&rest[..end]) {
            return Some(reason);
        }
        rest = &rest[end + 2..];
    }
    None
}

/// The reason in an error body or event, if it is one of ours.
pub fn typed(json: &[u8]) -> Option<Reason> {
    let json = json.strip_prefix(b"data: ").unwrap_or(json);
    if !suspicious(json) {
        return None;
    }
    let mut documents = serde_json::Deserializer::from_slice(json).into_iter::<Form>();
    let form = documents.next()?.ok()?;
    let finish = form.meta_info.and_then(|m| m.finish_reason);
    let aborted = finish
        .filter(|f| f.kind.as_deref() == Some("abort"))
        .and_then(|f| f.message);
    let error = form.error.unwrap_or_default();
    let code = error
        .code
        .as_ref()
        .and_then(serde_json::Value::as_str)
        .and_then(Reason::parse);
    let messages = [error.message, form.message, aborted];
    code.or_else(|| {
        messages
            .into_iter()
            .flatten()
            .find_map(|m| Reason::parse(m.split_once(": ")?.0))
    })
}

fn suspicious(json: &[u8]) -> bool {
    let words = [&b"\"error\""[..], b"\"abort\""];
    words.iter().any(|w| memchr::memmem::find(json, w).is_some())
}

/// What a complete answer says it generated; 0 if it does not.
pub fn completion_tokens(body: &[u8]) -> u32 {
    const NAME: &[u8] = b"\"completion_tokens\":";
    let Some(at) = memchr::memmem::rfind(body, NAME) else {
        return 0;
    };
    let digits = body[at + NAME.len()..].trim_ascii_start();
    let end = digits.iter().position(|b| !b.is_ascii_digit()).unwrap_or(digits.len());
    std::str::from_utf8(&digits[..end])
        .ok()
        .and_then(|t| t.parse().ok())
        .unwrap_or(0)
}

#[derive(Deserialize)]
struct Form {
    #[serde(default)]
    error: Option<ErrorForm>,
    #[serde(default)]
    message: Option<String>,
    #[serde(default)]
    meta_info: Option<MetaInfo>,
}

#[derive(Default, Deserialize)]
struct ErrorForm {
    #[serde(default)]
    code: Option<serde_json::Value>,
    #[serde(default)]
    message: Option<String>,
}

#[derive(Deserialize)]
struct MetaInfo {
    #[serde(default)]
    finish_reason: Option<FinishReason>,
}

#[derive(Deserialize)]
struct FinishReason {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    message: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_recognised_in_every_form_the_engine_gives_them() {
        // ADM-14; the forms are those of SGLang 0.5.10.post1.
        for body in [
            r#"{"error":{"code":"session-busy","message":"x"}}"#,
            r#"{"object":"error","message":"session-busy: turn 3 runs","type":"409","param":null,"code":409}"#,
            r#"{"error":{"message":"session-busy: turn 3 runs"}}"#,
            r#"{"error":{"object":"error","message":"session-busy: x","type":"CONFLICT","param":null,"code":409}}"#,
            r#"{"text":"","meta_info":{"id":"1","finish_reason":{"type":"abort","message":"session-busy: x","status_code":409}}}"#,
        ] {
            assert_eq!(typed(body.as_bytes()), Some(Reason::SessionBusy), "{body}");
            let event = format!("data: {body}\n\ndata: [DONE]\n\n");
            assert_eq!(opening(event.as_bytes()), Opening::Refused(Reason::SessionBusy));
            let later = format!("data: {{\"text\":\"a\"}}\n\n{event}");
            assert_eq!(
                (opening(later.as_bytes()), among(later.as_bytes())),
                (Opening::Fine, Some(Reason::SessionBusy))
            );
        }
    }

    #[test]
    fn other_answers_are_not_refusals() {
        for body in [
            r#"{"text":"session-busy: said the model","meta_info":{"finish_reason":null}}"#,
            r#"{"text":"\"error\"","meta_info":{"finish_reason":{"type":"stop"}}}"#,
            r#"{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"Abort before prefill"}}}"#,
            r#"{"error":{"message":"Input length exceeds the limit"}}"#,
            r#"{"error":"#,
            "",
        ] {
            assert_eq!(typed(body.as_bytes()), None, "{body}");
        }
    }

    #[test]
    fn generated_tokens_are_read_from_native_and_openai_answers() {
        assert_eq!(
            completion_tokens(br#"{"meta_info":{"prompt_tokens":5,"completion_tokens":17,"x":1}}"#),
            17
        );
        assert_eq!(completion_tokens(br#"{"usage":{"completion_tokens": 3}}"#), 3);
        assert_eq!(completion_tokens(b"{}"), 0);
    }
}
