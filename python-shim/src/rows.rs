//! The engine's table of request rows in host memory: which slot holds which token of a running request.

use pyo3::{exceptions::PyValueError, prelude::*};

/// A contiguous int32 tensor of two dimensions in host memory, one row per request, that is kept as long as this object. Rows
/// are read where they lie: a turn needs a few new slots of a row that is as long as its context.
#[pyclass(frozen, module = "kvc._native")]
pub(crate) struct Rows {
    address: usize,
    rows: usize,
    columns: usize,
    _tensor: Py<PyAny>,
}

#[pymethods]
impl Rows {
    /// `ValueError` for any other tensor.
    #[new]
    fn new(tensor: Bound<'_, PyAny>) -> PyResult<Self> {
        let (device, dtype) = (tensor.getattr("device")?.getattr("type")?, tensor.getattr("dtype")?);
        let shape: Vec<usize> = tensor.getattr("shape")?.extract()?;
        let contiguous: bool = tensor.call_method0("is_contiguous")?.extract()?;
        let (device, dtype) = (device.str()?, dtype.str()?);
        let (device, dtype) = (device.to_cow()?, dtype.to_cow()?);
        let (&[rows, columns], "cpu", "torch.int32", true) = (shape.as_slice(), &*device, &*dtype, contiguous) else {
            return Err(PyValueError::new_err(format!(
                "rows must be a contiguous torch.int32 tensor of two dimensions on cpu, got {dtype} {shape:?} on {device}, \
                 contiguous: {contiguous}"
            )));
        };
        let address: usize = tensor.call_method0("data_ptr")?.extract()?;
        if !address.is_multiple_of(align_of::<i32>()) || (address == 0 && rows * columns > 0) {
            return Err(PyValueError::new_err(format!("no int32 tensor lies at {address:#x}")));
        }
        Ok(Self {
            address,
            rows,
            columns,
            _tensor: tensor.unbind(),
        })
    }
}

impl Rows {
    /// Reads the first `len` slots of a row for the length of one call.
    ///
    /// # Errors
    /// `ValueError` if the table has no such row or the row is shorter.
    pub(crate) fn read<R>(&self, row: usize, len: usize, call: impl FnOnce(&[i32]) -> R) -> PyResult<R> {
        if row >= self.rows || len > self.columns {
            return Err(PyValueError::new_err(format!(
                "{len} slots of row {row} are not in a table of {} rows and {} columns",
                self.rows, self.columns
            )));
        }
        if len == 0 {
            return Ok(call(&[]));
        }
        let first = self.address + row * self.columns * size_of::<i32>();
        // SAFETY: `new` has seen a contiguous host tensor of `rows × columns` int32 at `address`, which `_tensor` keeps, and the
        // check above keeps the slice inside it; nobody writes it meanwhile (the scheduler thread, its only writer, is in
        // this call).
        Ok(call(unsafe { std::slice::from_raw_parts(first as *const i32, len) }))
    }
}
