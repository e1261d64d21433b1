//! Memory for the engine's KV pool that other workers of the host can map.

use std::ffi::c_int;

use pyo3::{exceptions::PyOSError, ffi, prelude::*};

/// Zeroed memory in a memfd; torch makes tensors over it by the buffer protocol and keeps it alive with them.
#[pyclass(frozen, module = "kvc._native")]
pub(crate) struct SharedMemory(pub(crate) kvc_cuda::SharedMemory);

#[pymethods]
impl SharedMemory {
    /// `bytes` zero bytes, no page of them touched. `OSError` if the system has or allows no such memory.
    #[new]
    fn new(bytes: u64) -> PyResult<Self> {
        kvc_cuda::SharedMemory::new(bytes).map(Self).map_err(|error| {
            let code = error.source.raw_os_error().unwrap_or_default();
            PyOSError::new_err((code, error.to_string()))
        })
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// # Safety
    /// Called by the interpreter, with a `view` to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = &slf.get().0;
        // SAFETY: obligation 1: the view holds `slf` and with it the mapping; the bytes are never borrowed in Rust. A length of
        // a mapping fits `isize`.
        let rc = unsafe {
            let len = memory.len() as ffi::Py_ssize_t;
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), memory.address().cast(), len, 0, flags)
        };
        if rc == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
