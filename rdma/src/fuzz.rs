//! Fuzz targets: what must hold for any bytes that a peer sends (T9, F19). `tests/corpus.rs` replays the kept inputs,
//! proptest feeds random ones, and `rdma/fuzz` hands them to cargo-fuzz.

use crate::tcp::wire::{self, HEAD, TAIL};

/// The exporter's decoder: total, canonical (what is taken encodes to the bytes it was), and patient (no shorter input is
/// taken for a request, nor refused otherwise than the whole).
///
/// # Panics
/// If one of these does not hold.
pub fn request(input: &[u8]) {
    match wire::decode_request(input) {
        Ok(None) => assert!(
            input.len() < wire::MAX_REQUEST,
            "a request of any length would be waited for"
        ),
        Ok(Some((request, used))) => {
            assert!(used <= input.len() && used <= wire::MAX_REQUEST);
            let mut again = Vec::new();
            wire::encode_request(&mut again, request.id, &request.token, request.checksum, &request.runs);
            assert_eq!(again, input[..used], "one request, two encodings");
            assert!(request.runs.iter().all(|run| run.end().is_some()));
            for cut in [0, used / 2, used - 1] {
                assert!(
                    matches!(wire::decode_request(&input[..cut]), Ok(None)),
                    "{cut} of {used} bytes were enough"
                );
            }
        }
        Err(error) => {
            let more = [input, &[0; 32]].concat();
            assert_eq!(
                wire::decode_request(&more).err(),
                Some(error),
                "a refusal depends on what comes later"
            );
        }
    }
}

/// The importer's decoders: total and canonical.
///
/// # Panics
/// If one of these does not hold.
pub fn answer(input: &[u8]) {
    if let Some(bytes) = input.first_chunk::<HEAD>()
        && let Ok(head) = wire::decode_head(bytes)
    {
        let mut again = Vec::new();
        wire::encode_head(&mut again, &head);
        assert_eq!(again, bytes, "one head, two encodings");
        assert!(head.len <= wire::MAX_BODY);
    }
    if let Some(bytes) = input.first_chunk::<TAIL>()
        && let Ok(tail) = wire::decode_tail(bytes)
    {
        let mut again = Vec::new();
        wire::encode_tail(&mut again, &tail);
        assert_eq!(again, bytes, "one tail, two encodings");
    }
}
