//! Refusals as Python exceptions. Their classes are Python's own (`kvc.errors`): the stable ABI of 3.11 cannot
//! extend exception types.

use kvc_proto::wire::reason::{Reason, Refusal};
use pyo3::{prelude::*, sync::PyOnceLock, types::PyType};

static REFUSED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static CONFIGURATION: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// `kvc.errors.Refused`.
pub(crate) fn refused(py: Python<'_>, refusal: &Refusal) -> PyErr {
    raise(
        py,
        &REFUSED,
        "Refused",
        (refusal.code.as_str(), refusal.message.clone()),
    )
}

/// `kvc.errors.Refused` with `bad-request`.
pub(crate) fn bad_request(py: Python<'_>, message: impl Into<String>) -> PyErr {
    refused(py, &Refusal::new(Reason::BadRequest, message))
}

/// `kvc.errors.ConfigurationError`: one line that says how to fix it.
pub(crate) fn configuration(py: Python<'_>, message: impl std::fmt::Display) -> PyErr {
    raise(py, &CONFIGURATION, "ConfigurationError", (message.to_string(),))
}

/// The HTTP status of a reason code; `ValueError` if there is no such code.
#[pyfunction]
pub(crate) fn status_of(code: &str) -> PyResult<u16> {
    Reason::parse(code)
        .map(Reason::status)
        .ok_or_else(|| pyo3::exceptions::PyValueError::new_err(format!("no reason code: {code:?}")))
}

fn raise<A>(py: Python<'_>, cell: &PyOnceLock<Py<PyType>>, name: &str, args: A) -> PyErr
where
    A: pyo3::PyErrArguments + Send + Sync + 'static,
{
    match cell.import(py, "kvc.errors", name) {
        Ok(class) => PyErr::from_type(class.clone(), args),
        Err(error) => error,
    }
}
