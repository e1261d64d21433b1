//! `kvc._native`: the engine module as Python sees it. Private; the package `kvc` (folder `python/`) is the only caller.
//!
//! Translation only: token lists, tensor pointers and engine lengths in, lengths and slot lists out.

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
