//! Hands libFuzzer's bytes to `kvc_engine_ext::fuzz::settings`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| kvc_engine_ext::fuzz::settings(input));
