//! Hands libFuzzer's bytes to `kvc_rdma::fuzz::answer`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| kvc_rdma::fuzz::answer(input));
