//! What the machine gives back, as the adapter hands it to the engine's allocator.

use kvc_proto::worker;
use pyo3::{prelude::*, types::PyByteArray};

/// Pages and prefix handles to give up.
#[pyclass(frozen, module = "kvc._native")]
pub(crate) struct Frees {
    /// One slot of each page, as int64 in native byte order: `torch.frombuffer` reads it without a copy.
    #[pyo3(get)]
    slots: Py<PyByteArray>,
    /// Handles nobody needs any more.
    #[pyo3(get)]
    prefixes: Vec<u64>,
}

/// `None` if nothing is given back.
pub(crate) fn frees(py: Python<'_>, frees: worker::Frees) -> Option<Frees> {
    (!frees.slots.is_empty() || !frees.prefixes.is_empty()).then(|| always(py, frees))
}

/// Also if nothing is given back.
pub(crate) fn always(py: Python<'_>, frees: worker::Frees) -> Frees {
    let bytes: Vec<u8> = frees
        .slots
        .iter()
        .flat_map(|&slot| i64::from(slot).to_ne_bytes())
        .collect();
    Frees {
        slots: PyByteArray::new(py, &bytes).unbind(),
        prefixes: frees.prefixes.iter().map(|handle| handle.0).collect(),
    }
}
