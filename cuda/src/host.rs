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

use crate::{
    layout::{Buffer, Device, KvLayout, LayoutError, Shape},
    shared::{SharedMemory, SharedMemoryError},
};

/// A zeroed, page-aligned pool of `slots` token slots, and the [`KvLayout`] that describes it.
///
/// Its bytes are read and written one by one as atomics: a mover may move them through the kernel at the same time.
#[derive(Clone)]
pub struct HostArena {
    memory: Memory,
    layout: KvLayout,
}

#[derive(Clone)]
enum Memory {
    /// Of this process alone.
    Own(Arc<MmapMut>),
    Shared(Arc<SharedMemory>),
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
    /// The system gave no memory that others can map.
    #[error(transparent)]
    Shared(#[from] SharedMemoryError),
}

impl HostArena {
    /// A pool of `slots` slots per buffer.
    ///
    /// # Errors
    /// [`ArenaError`].
    pub fn new(shape: Shape, slots: u32) -> Result<Self, ArenaError> {
        let bytes = size(shape, slots);
        let map = usize::try_from(bytes)
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))
            .and_then(MmapMut::map_anon)
            .map_err(|source| ArenaError::Map { bytes, source })?;
        let memory = Arc::new(map);
        let buffers = buffers(shape, slots, memory.as_ptr() as u64);
        let layout = KvLayout::checked(shape, Device::Host, buffers, Some(memory.clone()))?;
        let memory = Memory::Own(memory);
        Ok(Self { memory, layout })
    }

    /// The same in memory that other processes of the host can map: every buffer has its [`KvLayout::backing`].
    ///
    /// # Errors
    /// [`ArenaError`].
    pub fn shared(shape: Shape, slots: u32) -> Result<Self, ArenaError> {
        let memory = Arc::new(SharedMemory::new(size(shape, slots))?);
        let buffers = buffers(shape, slots, memory.address() as u64);
        let layout = KvLayout::checked(shape, Device::Host, buffers, Some(memory.clone()))?.within(&memory)?;
        let memory = Memory::Shared(memory);
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

/// Bytes of all buffers, at least one.
fn size(shape: Shape, slots: u32) -> u64 {
    let buffer = u64::from(shape.row()) * u64::from(slots);
    buffer.saturating_mul(u64::from(shape.layers) * 2).max(1)
}

/// One after the other from `base` on.
fn buffers(shape: Shape, slots: u32, base: u64) -> Vec<Buffer> {
    let row = shape.row();
    let buffer = u64::from(row) * u64::from(slots);
    (0..u64::from(shape.layers) * 2)
        .map(|i| Buffer {
            base: base + i * buffer,
            row,
            slots,
        })
        .collect()
}

impl Memory {
    fn cells(&self, offset: usize, len: usize) -> &[AtomicU8] {
        let (address, all) = match self {
            Memory::Own(map) => (map.as_ptr(), map.len()),
            Memory::Shared(memory) => (memory.address().cast_const(), memory.len()),
        };
        assert!(offset + len <= all);
        // SAFETY: obligation 1 — in bounds of a mapping that `self` keeps; no `&mut` to it is ever made, so atomic cells
        // are the only way in besides the mover, which goes through the kernel or raw copies (obligation 4 keeps both
        // from one slot).
        unsafe { std::slice::from_raw_parts(address.add(offset).cast::<AtomicU8>(), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Dtype;

    const SHAPE: Shape = Shape {
        dtype: Dtype::Float32,
        layers: 3,
        heads: 2,
        head_dim: 4,
        page_tokens: 1,
        tp: (0, 1),
    };

    #[test]
    fn a_token_is_read_back_and_its_neighbours_stay() {
        for arena in [
            HostArena::new(SHAPE, 10).unwrap(),
            HostArena::shared(SHAPE, 10).unwrap(),
        ] {
            let bytes: Vec<u8> = (0..arena.layout().token_bytes()).map(|i| i as u8 + 1).collect();
            arena.write_token(4, &bytes);
            assert_eq!(arena.read_token(4), bytes);
            assert!(arena.read_token(3).iter().chain(&arena.read_token(5)).all(|&b| b == 0));
        }
    }

    #[test]
    fn a_shared_arena_lies_in_its_files_where_the_layout_says() {
        use std::{fs::File, os::unix::fs::FileExt};

        assert!(HostArena::new(SHAPE, 10).unwrap().layout().backing(0).is_none());
        let arena = HostArena::shared(SHAPE, 10).unwrap();
        let row = SHAPE.row() as usize;
        let bytes: Vec<u8> = (0..arena.layout().token_bytes()).map(|i| i as u8 + 1).collect();
        arena.write_token(4, &bytes);
        for (index, own) in bytes.chunks(row).enumerate() {
            let backing = arena.layout().backing(index).unwrap();
            let mut found = vec![0; row];
            let at = backing.offset + 4 * row as u64;
            File::from(backing.file.try_clone().unwrap())
                .read_exact_at(&mut found, at)
                .unwrap();
            assert_eq!(found, own, "buffer {index}");
        }
    }
}
