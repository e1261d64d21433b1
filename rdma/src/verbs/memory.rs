//! The regions of one mover, registered with each of its devices. The exporter takes peers' keys from here, the importer
//! the places where bytes land.

use std::{
    marker::PhantomData,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard},
};

use super::{
    device::{Domain, Registration},
    error::VerbsError,
};
use crate::{
    error::MoverError,
    region::{Region, RegionKey, Regions, Run},
};

/// Registered memory. It stays registered until this is dropped, which waits for nothing: whatever names it borrows it.
///
/// A region cannot be dropped while work names it:
///
/// ```
/// use kvc_rdma::{Run, verbs::{Batch, Landing, Memory, PeerKeys, Scratch}};
/// fn right(memory: Memory, keys: &PeerKeys, scratch: &mut Scratch, remote: &Run, local: &Run) -> usize {
///     let mut batch = scratch.batch();
///     let landing = memory.view().landing(0, local);
///     batch.push(keys.key(0, remote).unwrap(), &[landing.unwrap()]);
///     let posted = batch.len();
///     drop(memory);
///     posted
/// }
/// ```
/// ```compile_fail,E0505
/// use kvc_rdma::{Run, verbs::{Batch, Landing, Memory, PeerKeys, Scratch}};
/// fn wrong(memory: Memory, keys: &PeerKeys, scratch: &mut Scratch, remote: &Run, local: &Run) -> usize {
///     let mut batch = scratch.batch();
///     let landing = memory.view().landing(0, local);
///     batch.push(keys.key(0, remote).unwrap(), &[landing.unwrap()]);
///     drop(memory);
///     batch.len()
/// }
/// ```
#[derive(Debug)]
pub struct Memory {
    /// One registration of every region in each.
    domains: Vec<Arc<Domain>>,
    regions: Arc<Regions>,
    entries: RwLock<Vec<Entry>>,
}

/// Registrations go before the memory they name.
#[derive(Debug)]
struct Entry {
    /// By device; none for a region without bytes.
    registrations: Vec<Registration>,
    region: Region,
}

/// The regions as they are now.
pub struct View<'m>(RwLockReadGuard<'m, Vec<Entry>>, PhantomData<&'m Memory>);

/// A piece of registered memory where bytes land, for one device.
#[derive(Clone, Copy, Debug)]
pub struct Landing<'m> {
    pub(super) address: u64,
    pub(super) len: u32,
    pub(super) key: u32,
    memory: PhantomData<&'m Memory>,
}

/// What a peer needs to read a region through one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) address: u64,
    pub(super) key: u32,
}

impl Memory {
    pub(super) fn new(domains: Vec<Arc<Domain>>, regions: Arc<Regions>) -> Self {
        Memory {
            domains,
            regions,
            entries: RwLock::default(),
        }
    }

    pub(super) fn register(&self, region: Region) -> Result<RegionKey, MoverError> {
        let first = Run {
            region: RegionKey(0),
            offset: 0,
            len: region.len(),
        };
        let registrations = match region.locate(&first) {
            Some(address) if !region.is_empty() => {
                let register = |domain| {
                    // SAFETY: obligation 1 — the entry holds the region for longer than its registrations.
                    unsafe { Registration::host(domain, address, region.len()) }
                };
                self.domains
                    .iter()
                    .map(register)
                    .collect::<Result<Vec<_>, VerbsError>>()?
            }
            _ => Vec::new(),
        };
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let key = self.regions.add(region.clone())?;
        entries.push(Entry { registrations, region });
        Ok(key)
    }

    pub(super) fn regions(&self) -> &Regions {
        &self.regions
    }

    /// For many look-ups in a row; nothing is registered while it lives.
    pub fn view(&self) -> View<'_> {
        View(self.entries.read().unwrap_or_else(PoisonError::into_inner), PhantomData)
    }
}

impl<'m> View<'m> {
    /// Where the bytes of `local` are for device `device`; `None` outside of every region, or above 4 GiB.
    pub fn landing(&self, device: usize, local: &Run) -> Option<Landing<'m>> {
        let entry = self.entry(local.region)?;
        let address = entry.region.locate(local)?;
        Some(Landing {
            address: address.as_ptr() as u64,
            len: u32::try_from(local.len).ok()?,
            key: entry.registrations.get(device)?.local_key(),
            memory: PhantomData,
        })
    }

    /// The bytes of `local`, for a checksum.
    ///
    /// # Safety
    /// Obligation 4: nobody writes them while the slice is in use.
    pub(super) unsafe fn bytes(&self, local: &Run) -> Option<&[u8]> {
        let address = self.entry(local.region)?.region.locate(local)?;
        // SAFETY: obligations 1 and 4 — inside a region that lives, and the caller's promise.
        Some(unsafe { std::slice::from_raw_parts(address.as_ptr(), usize::try_from(local.len).ok()?) })
    }

    /// Flips a bit.
    ///
    /// # Safety
    /// Obligation 4: nobody else touches the byte meanwhile.
    #[cfg(feature = "fault")]
    pub(super) unsafe fn flip(&self, at: &Run) {
        if let Some(address) = self.entry(at.region).and_then(|entry| entry.region.locate(at)) {
            // SAFETY: obligations 1 and 4 — inside a region that lives, and the caller's promise.
            unsafe { *address.as_ptr() ^= 1 };
        }
    }

    /// The region's length and its keys by device.
    pub(super) fn keys(&self, region: RegionKey) -> Option<(u64, impl Iterator<Item = Key>)> {
        let entry = self.entry(region)?;
        let whole = Run {
            region,
            offset: 0,
            len: 0,
        };
        let address = entry.region.locate(&whole)?.as_ptr() as u64;
        let keys = entry.registrations.iter().map(move |each| Key {
            address,
            key: each.remote_key(),
        });
        Some((entry.region.len(), keys))
    }

    fn entry(&self, region: RegionKey) -> Option<&Entry> {
        self.0.get(usize::try_from(region.0).ok()?)
    }
}
