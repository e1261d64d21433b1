//! Fuzz targets: what must hold for any bytes that a client, a peer or a settings file brings (T9, F19). `tests/corpus.rs`
//! replays the kept inputs, `fuzz/` hands libFuzzer's.

/// A body of the HTTP listener.
pub fn body(input: &[u8]) {
    crate::listener::body::fuzz(input);
}

/// A message of the control plane.
pub fn peer(input: &[u8]) {
    crate::peer::fuzz(input);
}

/// A settings file.
pub fn settings(input: &[u8]) {
    crate::config::fuzz(&String::from_utf8_lossy(input));
}
