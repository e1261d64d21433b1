//! T9: the kept inputs of every fuzz target, whole, cut anywhere, and with any one bit flipped.

use std::{fs, path::Path};

use kvc_engine_ext::fuzz;

fn replay(target: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target);
    let mut inputs = 0;
    for entry in fs::read_dir(&folder).unwrap() {
        let input = fs::read(entry.unwrap().path()).unwrap();
        run(&input);
        for end in 0..input.len() {
            run(&input[..end]);
        }
        for bit in 0..input.len() * 8 {
            let mut flipped = input.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            run(&flipped);
        }
        inputs += 1;
    }
    assert!(inputs >= 3, "{inputs} inputs of {target}");
}

#[test]
fn bodies_are_taken_or_refused() {
    replay("body", fuzz::body);
}

#[test]
fn peer_messages_are_taken_or_refused() {
    replay("peer", fuzz::peer);
}

#[test]
fn settings_are_taken_or_refused_with_one_line() {
    replay("settings", fuzz::settings);
}
