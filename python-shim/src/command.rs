//! What the engine's thread does for the machine in one loop iteration.

use kvc_proto::worker::Command;
use pyo3::{IntoPyObjectExt, prelude::*, types::PyList};

use crate::frees::{self, Frees};

/// Free pages.
#[pyclass(frozen, get_all, module = "kvc._native")]
pub(crate) struct Free {
    frees: Py<Frees>,
}

/// Make room for an import: match, lock, allocate, then `Engine.landed` or `Engine.land_failed`.
#[pyclass(frozen, get_all, module = "kvc._native")]
pub(crate) struct Land {
    import_id: u64,
    tokens: Py<PyList>,
    held: usize,
    identity: String,
}

/// End this turn's request with a typed error: its session was granted elsewhere under a later placement (SES-4).
#[pyclass(frozen, get_all, module = "kvc._native")]
pub(crate) struct Abort {
    turn_id: u64,
}

/// The import is confirmed: share, unlock, then `Engine.import_committed`.
#[pyclass(frozen, get_all, module = "kvc._native")]
pub(crate) struct Commit {
    import_id: u64,
    share: usize,
}

/// The import is dead: unlock and free.
#[pyclass(frozen, get_all, module = "kvc._native")]
pub(crate) struct Drop {
    locked: u64,
    frees: Py<Frees>,
}

/// A command as its Python object.
pub(crate) fn object(py: Python<'_>, command: Command) -> PyResult<Py<PyAny>> {
    match command {
        Command::Free(frees) => Free {
            frees: Py::new(py, frees::always(py, frees))?,
        }
        .into_py_any(py),
        Command::Land {
            import,
            tokens,
            held,
            identity,
        } => Land {
            import_id: import.0,
            tokens: PyList::new(py, tokens.iter())?.unbind(),
            held: held as usize,
            identity: identity.0.to_string(),
        }
        .into_py_any(py),
        Command::Abort { turn } => Abort { turn_id: turn.0 }.into_py_any(py),
        Command::Commit { import, share } => Commit {
            import_id: import.0,
            share: share as usize,
        }
        .into_py_any(py),
        Command::Drop { frees, locked } => Drop {
            locked: locked.0,
            frees: Py::new(py, frees::always(py, frees))?,
        }
        .into_py_any(py),
    }
}
