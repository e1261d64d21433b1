//! The `X-Kvc-Turn` header, parsed.

use kvc_proto::{id::SessionId, wire::turn};
use pyo3::prelude::*;

use crate::error::bad_request;

/// Whose turn a request is, and under which grant.
#[pyclass(frozen, module = "kvc._native")]
pub(crate) struct TurnTag(pub(crate) turn::TurnTag);

#[pymethods]
impl TurnTag {
    /// Reads a header value. `Refused` with `bad-request` if it is none.
    #[staticmethod]
    fn parse(py: Python<'_>, value: &str) -> PyResult<Self> {
        turn::TurnTag::parse(value)
            .map(Self)
            .map_err(|error| bad_request(py, error.to_string()))
    }

    /// A tag with a session alone. `Refused` with `bad-request` if the id is not acceptable.
    #[staticmethod]
    fn of(py: Python<'_>, session: &str) -> PyResult<Self> {
        let session = SessionId::new(session).map_err(|error| bad_request(py, error.to_string()))?;
        Ok(Self(turn::TurnTag::of(session)))
    }

    /// The session id.
    #[getter]
    fn session(&self) -> &str {
        self.0.session.as_str()
    }

    /// Prefill only.
    #[getter]
    fn prefill(&self) -> bool {
        self.0.prefill_only
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }
}
