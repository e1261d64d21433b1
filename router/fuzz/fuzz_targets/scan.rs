//! Any bytes are read or refused, and what is read is JSON for serde_json too.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if kvc_router::scan::scan(bytes).is_ok() {
        assert!(serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok());
    }
});
