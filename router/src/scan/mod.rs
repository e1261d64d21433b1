//! Finds the few top-level fields the router needs in a request body, without building the document. Called once per
//! request by [`crate::request`]; the body itself goes on byte for byte.
//!
//! The whole body is checked to be one JSON object (strings byte-wise, numbers by grammar), so that what the engine gets
//! parses. Long strings and long arrays of plain numbers go at the speed of `memchr`: 30k token ids take tens of
//! microseconds.

mod json;

use std::borrow::Cow;

pub use json::BadJson;
use json::{Array, Json};

/// What the router needs of a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields<'a> {
    /// `session_id`.
    pub session_id: Option<Cow<'a, str>>,
    /// `session_params.id`.
    pub session_params_id: Option<Cow<'a, str>>,
    /// `sampling_params.max_new_tokens`.
    pub max_new_tokens: Option<u32>,
    /// `max_completion_tokens`.
    pub max_completion_tokens: Option<u32>,
    /// `max_tokens`.
    pub max_tokens: Option<u32>,
    /// The prompt's size, from `input_ids`, `prompt`, `text` or `messages`.
    pub prompt: Option<PromptSize>,
}

/// How long a prompt is. Of a batch the first item counts: only it can hold the session (engines §2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptSize {
    /// So many token ids.
    Tokens(u32),
    /// So many bytes of text.
    Bytes(usize),
}

/// Scans a body.
pub fn scan(body: &[u8]) -> Result<Fields<'_>, BadJson> {
    if let Err(e) = std::str::from_utf8(body) {
        return Err(BadJson::at(e.valid_up_to(), "UTF-8"));
    }
    let mut json = Json::new(body);
    let mut fields = Fields::default();
    json.object("a JSON object", |json, key| {
        match key {
            "session_id" => fields.session_id = json.nullable_string("session_id: a string")?,
            "session_params" if json.peek() == Some(b'{') => {
                json.object("an object", |json, key| match key {
                    "id" => {
                        fields.session_params_id = json.nullable_string("session_params.id: a string")?;
                        Ok(())
                    }
                    _ => json.skip(),
                })?;
            }
            "sampling_params" if json.peek() == Some(b'{') => {
                json.object("an object", |json, key| {
                    match key {
                        "max_new_tokens" => fields.max_new_tokens = json.count()?,
                        _ => json.skip()?,
                    }
                    Ok(())
                })?;
            }
            "max_completion_tokens" => fields.max_completion_tokens = json.count()?,
            "max_tokens" => fields.max_tokens = json.count()?,
            "input_ids" | "prompt" | "text" | "messages" => {
                let size = prompt_size(json, key == "messages")?;
                // Token ids are exact: they win over a text beside them.
                if !matches!(fields.prompt, Some(PromptSize::Tokens(_))) || matches!(size, Some(PromptSize::Tokens(_)))
                {
                    fields.prompt = size.or(fields.prompt);
                }
            }
            _ => json.skip()?,
        }
        Ok(())
    })?;
    json.end()?;
    Ok(fields)
}

fn prompt_size(json: &mut Json<'_>, messages: bool) -> Result<Option<PromptSize>, BadJson> {
    let from = json.position();
    match json.peek() {
        Some(b'[') if !messages => Ok(match json.array()? {
            Array::Numbers { count } => Some(PromptSize::Tokens(count)),
            Array::Text { bytes } => Some(PromptSize::Bytes(bytes)),
            Array::Other => None,
        }),
        Some(b'[' | b'"') => {
            json.skip()?;
            Ok(Some(PromptSize::Bytes(json.position() - from)))
        }
        _ => {
            json.skip()?;
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_fields_are_found_wherever_they_stand() {
        let body = br#" {"a":[{"session_id":"no"}], "stream" : true,"session_params":{"x":[1],"id":"p"},
            "session_id":"s\u00e4\n", "sampling_params":{"temperature":0.0,"max_new_tokens":7,"n":2}, "max_tokens":9,
            "max_completion_tokens": 11, "input_ids":[1, 22,333]} "#;
        let fields = scan(body).expect("it is JSON");
        assert_eq!(fields.session_id.as_deref(), Some("sä\n"));
        assert_eq!(fields.session_params_id.as_deref(), Some("p"));
        assert_eq!(
            (fields.max_new_tokens, fields.max_tokens, fields.max_completion_tokens),
            (Some(7), Some(9), Some(11))
        );
        assert_eq!(fields.prompt, Some(PromptSize::Tokens(3)));
    }

    #[test]
    fn an_escaped_key_is_the_same_key_and_the_last_one_wins() {
        // As the engine's JSON reader sees it.
        let fields = scan(br#"{"session_id":"a","sess\u0069on_id":"b"}"#).expect("it is JSON");
        assert_eq!(fields.session_id.as_deref(), Some("b"));
    }

    #[test]
    fn prompts_are_measured() {
        let size = |text: &str| scan(text.as_bytes()).expect("it is JSON").prompt;
        assert_eq!(size(r#"{"input_ids":[]}"#), Some(PromptSize::Tokens(0)));
        assert_eq!(size(r#"{"input_ids":[ 5 , 6 ]}"#), Some(PromptSize::Tokens(2)));
        assert_eq!(size(r#"{"input_ids":[[5,6,7],[8]]}"#), Some(PromptSize::Tokens(3)));
        assert_eq!(size(r#"{"prompt":"abcd"}"#), Some(PromptSize::Bytes(6)));
        assert_eq!(size(r#"{"prompt":["abcdef","x"]}"#), Some(PromptSize::Bytes(8)));
        assert_eq!(size(r#"{"prompt":[1,2]}"#), Some(PromptSize::Tokens(2)));
        assert_eq!(size(r#"{"messages":[{"role":"user"}]}"#), Some(PromptSize::Bytes(17)));
        assert_eq!(
            size(r#"{"input_ids":[1],"text":"long text"}"#),
            Some(PromptSize::Tokens(1))
        );
        assert_eq!(size(r#"{"text":null}"#), None);
    }

    #[test]
    fn bad_bodies_are_refused_with_the_place() {
        for (body, at) in [
            ("", 0),
            ("[]", 0),
            ("nonsense", 0),
            (r#"{"a":1"#, 6),
            (r#"{"a":1,}"#, 7),
            (r#"{"a" 1}"#, 5),
            (r#"{"a":01}"#, 6),
            (r#"{"a":1}x"#, 7),
            (r#"{"a":"\x"}"#, 7),
            (r#"{"a":tru}"#, 5),
            (r#"{"input_ids":[1,,2]}"#, 16),
            (r#"{"input_ids":[1,02]}"#, 17),
            (r#"{"input_ids":[1 2]}"#, 16),
            (r#"{"session_id":7}"#, 14),
            ("{\"a\":\"\n\"}", 6),
        ] {
            assert_eq!(scan(body.as_bytes()).map_err(|e| e.at), Err(at), "{body}");
        }
        assert_eq!(scan(b"{\"a\":\"\xff\"}").map_err(|e| e.at), Err(6));
        let deep = format!("{{\"a\":{}1{}}}", "[".repeat(1000), "]".repeat(1000));
        assert!(scan(deep.as_bytes()).is_err(), "depth is bounded");
    }

    /// The fuzz target's corpus (router/fuzz), so that what it once found stays found.
    #[test]
    fn the_corpus_is_read_or_refused_as_its_names_say() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/scan");
        let mut files = 0;
        for entry in std::fs::read_dir(folder).expect("the corpus") {
            let path = entry.expect("an entry").path();
            let body = std::fs::read(&path).expect("a file");
            let good = path
                .file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("good"));
            assert_eq!(scan(&body).is_ok(), good, "{path:?}");
            files += 1;
        }
        assert!(files >= 12);
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>()
                .prop_filter("finite", |f| f.is_finite())
                .prop_map(Value::from),
            "\\PC{0,12}|[\\x00-\\x20\"\\\\]{0,6}".prop_map(Value::from),
            prop::collection::vec(0u32..200_000, 0..40).prop_map(Value::from),
        ];
        let key = prop_oneof![
            2 => prop::sample::select(vec!["max_tokens", "n", "sampling_params", "session_params", "input_ids", "prompt", "messages"]).prop_map(str::to_owned),
            1 => "\\PC{0,5}",
        ];
        leaf.prop_recursive(4, 40, 6, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::btree_map(key.clone(), inner, 0..6).prop_map(|m| json!(m)),
            ]
        })
    }

    fn object() -> impl Strategy<Value = Value> {
        prop::collection::btree_map("[a-z_]{1,8}|input_ids|max_tokens", values(), 0..6).prop_map(|m| json!(m))
    }

    /// The plain way, to compare with.
    fn model(value: &Value) -> (Option<u32>, Option<u32>) {
        let count = |v: &Value| match v.as_array() {
            Some(a) if a.iter().all(Value::is_number) => u32::try_from(a.len()).ok(),
            _ => None,
        };
        let limit = value["max_tokens"].as_u64().and_then(|n| u32::try_from(n).ok());
        (limit, value.get("input_ids").and_then(count))
    }

    proptest! {
        #[test]
        fn every_document_is_read_as_serde_reads_it(value in object(), pretty: bool) {
            let text = match pretty {
                true => serde_json::to_string_pretty(&value),
                false => serde_json::to_string(&value),
            }.expect("a value is written");
            let fields = scan(text.as_bytes());
            prop_assert!(fields.is_ok(), "{} {:?}", text, fields);
            let fields = fields.expect("checked");
            let (limit, tokens) = model(&value);
            prop_assert_eq!(fields.max_tokens, limit);
            if let (Some(tokens), None, None, None) = (tokens, value.get("prompt"), value.get("text"), value.get("messages")) {
                prop_assert_eq!(fields.prompt, Some(PromptSize::Tokens(tokens)));
            }
        }

        #[test]
        fn damaged_documents_are_refused_when_serde_refuses_them(value in object(), at: prop::sample::Index, byte in prop::sample::select(b"{}[]\",:\\x01eE.+- \n".to_vec())) {
            let mut text = serde_json::to_string(&value).expect("a value is written").into_bytes();
            let at = at.index(text.len());
            text[at] = byte;
            prop_assume!(std::str::from_utf8(&text).is_ok());
            let theirs = serde_json::from_slice::<serde::de::IgnoredAny>(&text).is_ok();
            let ours = scan(&text);
            let top_is_object = text.iter().find(|b| !b" \n\t\r".contains(b)) == Some(&b'{');
            match ours {
                Ok(_) => prop_assert!(theirs && top_is_object, "{}", String::from_utf8_lossy(&text)),
                // A session_id of another type is refused although it is JSON.
                Err(e) => prop_assert!(!theirs || !top_is_object || e.expected.contains("session"), "{} {e:?}", String::from_utf8_lossy(&text)),
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = scan(&bytes);
        }

        #[test]
        fn number_arrays_are_counted_in_the_fast_and_the_slow_way(text in "\\[[0-9, \n.e-]{0,30}\\]") {
            let body = format!("{{\"input_ids\":{text}}}");
            let theirs = serde_json::from_str::<Value>(&body).ok().map(|v| v["input_ids"].as_array().map_or(0, Vec::len));
            let ours = scan(body.as_bytes()).ok().map(|f| match f.prompt {
                Some(PromptSize::Tokens(n)) => n as usize,
                other => panic!("{other:?}"),
            });
            // A number too large for a double is refused by serde's documents only.
            if theirs.is_some() || !body.contains('e') {
                prop_assert_eq!(ours, theirs, "{}", body);
            }
        }
    }
}
