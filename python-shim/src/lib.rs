//! `kvc._native`: the engine module as Python sees it. Private; the package `kvc` (folder `python/`) is the only caller.
//!
//! Translation only: token lists, tensor pointers and lengths in; lengths, slot lists and commands out. A panic of the
//! module ends the module, never the engine's process.

use pyo3::prelude::*;

mod command;
mod engine;
mod error;
mod frees;
mod layout;
mod memory;
mod module;
mod rows;
mod shared;
mod tag;
mod turn;

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::{
        command::{Abort, Commit, Drop, Free, Land},
        engine::{Engine, preflight, settings},
        error::status_of,
        frees::Frees,
        layout::Layout,
        rows::Rows,
        shared::SharedMemory,
        tag::TurnTag,
        turn::Turn,
    };

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
