//! Replays the kept inputs of the fuzz targets, and feeds them random and nearly valid ones (T9).

use std::{fs, path::Path};

use kvc_rdma::{
    LeaseToken, RegionKey, Run, fuzz,
    tcp::wire::{self, WireError, decode_request},
};
use proptest::prelude::*;

fn kept(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target);
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut kept: Vec<_> = files
        .map(|path| {
            (
                path.file_name().unwrap().to_str().unwrap().into(),
                fs::read(path).unwrap(),
            )
        })
        .collect();
    kept.sort();
    kept
}

#[test]
fn kept_requests_hold() {
    let kept = kept("request");
    assert!(kept.len() >= 20);
    kept.iter().for_each(|(_, input)| fuzz::request(input));
}

#[test]
fn kept_answers_hold() {
    let kept = kept("answer");
    assert!(kept.len() >= 14);
    kept.iter().for_each(|(_, input)| fuzz::answer(input));
}

#[test]
fn kept_requests_are_what_their_names_say() {
    for (name, input) in kept("request") {
        let decoded = decode_request(&input);
        let as_named = match name.as_str() {
            "one-run" | "no-runs" | "two-requests" | "most-runs" => matches!(decoded, Ok(Some(_))),
            "cut-in-magic" | "cut-in-head" | "cut-in-run" | "empty" => matches!(decoded, Ok(None)),
            "too-many-runs" | "all-ones-runs" | "too-large-body" => matches!(decoded, Err(WireError::TooLarge { .. })),
            "other-version" => matches!(decoded, Err(WireError::Version { .. })),
            "http" | "tls" | "zeros" => matches!(decoded, Err(WireError::Magic { .. })),
            _ => matches!(decoded, Err(WireError::Field { .. })),
        };
        assert!(as_named, "{name}: {decoded:?}");
    }
}

proptest! {
    #[test]
    fn random_bytes_hold(input in prop::collection::vec(any::<u8>(), 0..256)) {
        fuzz::request(&input);
        fuzz::answer(&input);
    }

    /// One byte off a valid request reaches the fields behind the magic, where random bytes hardly get.
    #[test]
    fn nearly_valid_requests_hold(offset: u64, len in 0u64..1 << 23, at in 0usize..84, byte: u8) {
        let mut input = Vec::new();
        let run = Run { region: RegionKey(1), offset, len };
        wire::encode_request(&mut input, 1, &LeaseToken::from_bytes([2; 32]), true, &[run]);
        input[at] = byte;
        fuzz::request(&input);
    }
}
