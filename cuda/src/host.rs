//! [`HostArena`]: a KV pool in ordinary memory, laid out like an engine's. Tests and benches run two of them against
//! each other; the CPU engine's own pool has the same layout.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use memmap2::MmapMut;

use crate::layout::{Buffer, Device, KvLayout, LayoutError, Shape};

/// A zeroed, page-aligned pool of `slots` token slots, and the [`KvLayout`] that describes it.
///
/// Its bytes are read and written one by one as atomics: a mover may move them through the kernel at the same time.
#[derive(Clone)]
pub struct HostArena {
    memory: Arc<Memory>,
    layout: KvLayout,
}

struct Memory {
    map: MmapMut,
}

/// Why there is no arena.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The shape does not fit.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The system gave no memory.
    #[error("cannot map {bytes} bytes")]
    Map {
        /// Asked for.
        bytes: u64,
        /// The system's error.
        source: io::Error,
    },
}

impl HostArena {
    /// A pool of `slots` slots per buffer.
    ///
    /// # Errors
    /// [`ArenaError`].
    pub fn new(shape: Shape, slots: u32) -> Result<Self, ArenaError> {
        let buffer = u64::from(shape.row()) * u64::from(slots);
        let count = u64::from(shape.layers) * 2;
        let bytes = buffer.saturating_mul(count).max(1);
        let map = usize::try_from(bytes)
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))
            .and_then(MmapMut::map_anon)
            .map_err(|source| ArenaError::Map { bytes, source })?;
        let base = map.as_ptr() as u64;
        let memory = Arc::new(Memory { map });
        let buffers = (0..count)
            .map(|i| Buffer {
                base: base + i * buffer,
                row: shape.row(),
                slots,
            })
            .collect();
        let layout = KvLayout::checked(shape, Device::Host, buffers, Some(memory.clone()))?;
        Ok(Self { memory, layout })
    }

    /// Where everything lies. The memory lives as long as the layout.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// The bytes of a slot in every buffer, one after the other: [`KvLayout::token_bytes`] of them.
    ///
    /// # Panics
    /// If there is no such slot: the caller is a test.
    pub fn read_token(&self, slot: u32) -> Vec<u8> {
        self.rows(slot)
            .flat_map(|row| row.iter().map(|b| b.load(Ordering::Relaxed)))
            .collect()
    }

    /// Writes what [`HostArena::read_token`] reads; missing bytes stay, surplus ones are ignored.
    ///
    /// # Panics
    /// If there is no such slot: the caller is a test.
    pub fn write_token(&self, slot: u32, bytes: &[u8]) {
        let cells = self.rows(slot).flatten();
        for (cell, &byte) in cells.zip(bytes) {
            cell.store(byte, Ordering::Relaxed);
        }
    }

    fn rows(&self, slot: u32) -> impl Iterator<Item = &[AtomicU8]> {
        assert!(slot < self.layout.slots(), "slot {slot} of {}", self.layout.slots());
        let row = self.layout.shape().row() as usize;
        let buffer = row * self.layout.slots() as usize;
        (0..self.layout.buffers().len()).map(move |i| self.memory.cells(i * buffer + slot as usize * row, row))
    }
}

impl Memory {
    fn cells(&self, offset: usize, len: usize) -> &[AtomicU8] {
        assert!(offset + len <= self.map.len());
        // SAFETY: obligation 1 — in bounds of a mapping that `self` keeps; no `&mut` to it is ever made, so atomic cells
        // are the only way in besides the mover, which goes through the kernel or raw copies (obligation 4 keeps both
        // from one slot).
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(offset).cast::<AtomicU8>(), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Dtype;

    #[test]
    fn a_token_is_read_back_and_its_neighbours_stay() {
        let shape = Shape {
            dtype: Dtype::Float32,
            layers: 3,
            heads: 2,
            head_dim: 4,
            page_tokens: 1,
            tp: (0, 1),
        };
        let arena = HostArena::new(shape, 10).unwrap();
        let bytes: Vec<u8> = (0..arena.layout().token_bytes()).map(|i| i as u8 + 1).collect();
        arena.write_token(4, &bytes);
        assert_eq!(arena.read_token(4), bytes);
        assert!(arena.read_token(3).iter().chain(&arena.read_token(5)).all(|&b| b == 0));
    }
}
