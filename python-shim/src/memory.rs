//! The only place where an address from Python becomes memory.

use pyo3::{exceptions::PyValueError, prelude::*};

/// A contiguous tensor in host memory: address of its first element, number of elements.
pub(crate) type Tensor = (usize, usize);

/// Reads a tensor of `T` for the length of one call. torch gives address 0 for an empty tensor.
///
/// # Errors
/// `ValueError` for an address that no tensor of `T` can have.
pub(crate) fn read<T, R>(tensor: Tensor, call: impl FnOnce(&[T]) -> R) -> PyResult<R> {
    if tensor.1 == 0 {
        return Ok(call(&[]));
    }
    check::<T>(tensor)?;
    // SAFETY: the caller in `kvc.sglang` passes `data_ptr()` and `len()` of a contiguous host tensor of this type and holds
    // the tensor until the call returns; nobody writes it meanwhile (the scheduler thread is in this call).
    Ok(call(unsafe {
        std::slice::from_raw_parts(tensor.0 as *const T, tensor.1)
    }))
}

/// As [`read`], to be written.
pub(crate) fn write<T, R>(tensor: Tensor, call: impl FnOnce(&mut [T]) -> R) -> PyResult<R> {
    if tensor.1 == 0 {
        return Ok(call(&mut []));
    }
    check::<T>(tensor)?;
    // SAFETY: as in `read`; the tensor was made by the caller for this call, so nobody else refers to its memory.
    Ok(call(unsafe {
        std::slice::from_raw_parts_mut(tensor.0 as *mut T, tensor.1)
    }))
}

fn check<T>((address, len): Tensor) -> PyResult<()> {
    let fits = len
        .checked_mul(size_of::<T>())
        .is_some_and(|bytes| bytes <= isize::MAX as usize);
    if address == 0 || address % align_of::<T>() != 0 || !fits {
        return Err(PyValueError::new_err(format!(
            "no tensor of {len} elements lies at {address:#x}"
        )));
    }
    Ok(())
}
