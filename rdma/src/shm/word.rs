//! The words that two processes share: one per lease and connection, in a page of the exporter's that the importer maps.
//! It says whether the lease is open and how many threads of the importer are inside a copy: the fence of XFER-2.
//!
//! A word is `generation (32 bits) | REVOKED | CLOSED | threads inside (30 bits)`. The importer adds one before a copy and
//! takes it away after; the exporter sets the flags and waits for zero. A slot is used again under the next generation,
//! so that a copy that still belongs to the lease before never passes.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use memmap2::MmapRaw;

use super::memory::{add_seals, create};
use crate::error::MoverError;

const REVOKED: u64 = 1 << 31;
const CLOSED: u64 = 1 << 30;
const INSIDE: u64 = CLOSED - 1;
const WORD: usize = size_of::<AtomicU64>();

/// A lease's word on one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) index: u32,
    pub(super) generation: u32,
}

/// Why a copy may not be made, or what it brought may not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shut {
    /// The lease was fenced.
    Revoked,
    /// The exporter is gone.
    Closed,
}

/// The words of one connection.
#[derive(Debug)]
pub(super) struct Page {
    map: MmapRaw,
    slots: u32,
}

impl Page {
    /// The exporter's: fresh, with a descriptor for the peer. Sealed, so that the peer cannot take it from under us.
    pub(super) fn create(slots: u32) -> Result<(Self, Arc<OwnedFd>), MoverError> {
        let system = |call| move |e| MoverError::system(call, &e);
        let file = create((slots as usize * WORD) as u64, 0).map_err(system("memfd_create"))?;
        add_seals(&file, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL).map_err(system("fcntl"))?;
        Ok((Self::open(&file, slots)?, Arc::new(file)))
    }

    /// The importer's: what the exporter sent, which has to hold that many words and stay so.
    pub(super) fn open(file: &OwnedFd, slots: u32) -> Result<Self, MoverError> {
        add_seals(file, libc::F_SEAL_SHRINK).map_err(|e| MoverError::system("fcntl", &e))?;
        let map = MmapRaw::map_raw(file).map_err(|e| MoverError::system("mmap", &e))?;
        if map.len() < slots as usize * WORD {
            return Err(MoverError::NotShareable {
                what: "size",
                got: map.len() as u64,
                expected: u64::from(slots) * WORD as u64,
            });
        }
        Ok(Page { map, slots })
    }

    pub(super) fn slots(&self) -> u32 {
        self.slots
    }

    /// Opens slot `index` for another lease.
    pub(super) fn open_slot(&self, index: u32) -> Option<Slot> {
        let word = self.word(index)?;
        let next = |word: u64| Some((word >> 32).wrapping_add(1) << 32 | word & INSIDE);
        let was = word
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, next)
            .unwrap_or_else(|word| word);
        let generation = ((was >> 32) as u32).wrapping_add(1);
        Some(Slot { index, generation })
    }

    /// Nobody comes in from here on; `closed` says that the exporter ends.
    pub(super) fn revoke(&self, slot: Slot, closed: bool) {
        if let Some(word) = self.word(slot.index) {
            word.fetch_or(if closed { REVOKED | CLOSED } else { REVOKED }, Ordering::SeqCst);
        }
    }

    /// Whether no copy is being made.
    pub(super) fn is_empty(&self, slot: Slot) -> bool {
        self.word(slot.index)
            .is_none_or(|word| word.load(Ordering::SeqCst) & INSIDE == 0)
    }

    /// Runs `work`, which copies exposed bytes and must not block, unless the lease is over; says so as well if it ended
    /// meanwhile, since past its deadline the exporter waits no longer and the bytes may be anybody's.
    pub(super) fn pass<T>(&self, slot: Slot, work: impl FnOnce() -> T) -> Result<T, Shut> {
        let word = self.word(slot.index).ok_or(Shut::Revoked)?;
        let inside = Inside(word);
        state(word.fetch_add(1, Ordering::SeqCst), slot)?;
        let result = work();
        state(inside.leave(), slot)?;
        Ok(result)
    }

    fn word(&self, index: u32) -> Option<&AtomicU64> {
        if index >= self.slots {
            return None;
        }
        // SAFETY: inside a shared mapping that `self` keeps, aligned as a page is; both processes touch it as atomics alone.
        Some(unsafe { &*self.map.as_ptr().cast::<AtomicU64>().add(index as usize) })
    }
}

/// Takes its one away again, whatever happens in between.
struct Inside<'a>(&'a AtomicU64);

impl Inside<'_> {
    fn leave(self) -> u64 {
        let word = self.0.fetch_sub(1, Ordering::SeqCst);
        std::mem::forget(self);
        word
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn state(word: u64, slot: Slot) -> Result<(), Shut> {
    match word {
        word if (word >> 32) as u32 != slot.generation => Err(Shut::Revoked),
        word if word & CLOSED != 0 => Err(Shut::Closed),
        word if word & REVOKED != 0 => Err(Shut::Revoked),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both() -> (Page, Page) {
        let (exporter, file) = Page::create(4).unwrap();
        let importer = Page::open(&file, 4).unwrap();
        (exporter, importer)
    }

    #[test]
    fn a_revoked_word_lets_nobody_in() {
        let (exporter, importer) = both();
        let slot = exporter.open_slot(2).unwrap();
        assert_eq!(importer.pass(slot, || 7), Ok(7));
        exporter.revoke(slot, false);
        assert_eq!(importer.pass(slot, || 7), Err(Shut::Revoked));
        assert!(exporter.is_empty(slot));
    }

    #[test]
    fn a_copy_is_seen_while_it_lasts_and_is_void_if_the_lease_ended_meanwhile() {
        let (exporter, importer) = both();
        let slot = exporter.open_slot(0).unwrap();
        let passed = importer.pass(slot, || {
            assert!(!exporter.is_empty(slot));
            exporter.revoke(slot, false);
            assert!(!exporter.is_empty(slot), "XFER-2: the fence waits");
        });
        assert_eq!(passed, Err(Shut::Revoked));
        assert!(exporter.is_empty(slot));
    }

    #[test]
    fn a_slot_used_again_is_closed_to_the_lease_before() {
        let (exporter, importer) = both();
        let before = exporter.open_slot(1).unwrap();
        exporter.revoke(before, false);
        let after = exporter.open_slot(1).unwrap();
        assert_eq!(importer.pass(before, || ()), Err(Shut::Revoked));
        assert_eq!(importer.pass(after, || ()), Ok(()));
    }

    #[test]
    fn the_end_of_the_exporter_is_told_apart() {
        let (exporter, importer) = both();
        let slot = exporter.open_slot(3).unwrap();
        exporter.revoke(slot, true);
        assert_eq!(importer.pass(slot, || ()), Err(Shut::Closed));
    }

    #[test]
    fn a_slot_that_is_none_opens_nothing() {
        let (exporter, importer) = both();
        assert_eq!(exporter.open_slot(4), None);
        let slot = Slot {
            index: 4,
            generation: 1,
        };
        assert_eq!(importer.pass(slot, || ()), Err(Shut::Revoked));
    }
}
