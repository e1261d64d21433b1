//! The engine's KV pool, as registered once per process.

use kvc_cuda::{Buffer, Device, Dtype, KvLayout, Shape};
use pyo3::prelude::*;

use crate::{error::configuration, shared::SharedMemory};

/// Where the KV of every token slot lies.
#[pyclass(frozen, module = "kvc._native")]
pub(crate) struct Layout(pub(crate) KvLayout);

#[pymethods]
impl Layout {
    /// `buffers`: (address, bytes per token slot, token slots) of the K buffers in layer order, then the V buffers. They must
    /// stay mapped as long as the process serves. `shared`: the memory that all of them lie in, if peers are to map it.
    #[new]
    #[pyo3(signature = (*, dtype, device, layers, kv_heads, head_dim, page_tokens, buffers, shared=None))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        dtype: &str,
        device: &str,
        layers: u32,
        kv_heads: u32,
        head_dim: u32,
        page_tokens: u32,
        buffers: Vec<(u64, u32, u32)>,
        shared: Option<&SharedMemory>,
    ) -> PyResult<Self> {
        let shape = Shape {
            dtype: Dtype::parse(dtype)
                .ok_or_else(|| configuration(py, format!("the KV pool's dtype {dtype} is not supported")))?,
            layers,
            heads: kv_heads,
            head_dim,
            page_tokens,
            tp: (0, 1),
        };
        let device = self::device(py, device)?;
        let buffers = buffers
            .into_iter()
            .map(|(base, row, slots)| Buffer { base, row, slots })
            .collect();
        // SAFETY: obligation 1: the engine keeps its pool until the process ends (its memory saver, which would unmap it, is
        // refused at start); obligation 4: the machine frees leased slots and gives landing slots out only after the fence.
        let layout = unsafe { KvLayout::from_raw(shape, device, buffers) };
        layout
            .and_then(|layout| match shared {
                Some(memory) => layout.within(&memory.0),
                None => Ok(layout),
            })
            .map(Self)
            .map_err(|error| configuration(py, format!("the KV pool is not supported: {error}")))
    }

    /// What peers compare (XFER-6).
    #[getter]
    fn fingerprint(&self) -> String {
        self.0.fingerprint()
    }
}

/// The device that torch calls `name`.
pub(crate) fn device(py: Python<'_>, name: &str) -> PyResult<Device> {
    let device = match name.split_once(':') {
        None if name == "cpu" => Some(Device::Host),
        None if name == "cuda" => Some(Device::Cuda(0)),
        Some(("cuda", ordinal)) => ordinal.parse().ok().map(Device::Cuda),
        _ => None,
    };
    device.ok_or_else(|| configuration(py, format!("the KV pool's device {name} is not supported: cpu or cuda")))
}
