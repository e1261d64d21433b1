//! The regions of one mover, registered with each of its devices. The exporter takes peers' keys from here, the importer
//! the places where bytes land.

use std::{
    collections::HashSet,
    marker::PhantomData,
    sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard},
};

use super::{
    device::{Domain, Registration},
    error::{NoDmabuf, VerbsError},
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
    /// Which devices were said to reach GPU memory in the second best way, and why.
    told: Mutex<HashSet<(String, NoDmabuf)>>,
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
            told: Mutex::default(),
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
                let register = |domain: &Arc<Domain>| {
                    if region.is_host() {
                        // SAFETY: obligation 1 — the entry holds the region for longer than its registrations.
                        return unsafe { Registration::host(domain, address, region.len()) };
                    }
                    // SAFETY: obligation 1 — as above.
                    let made = unsafe { Registration::gpu(domain, address, region.len(), region.dmabuf()) };
                    let (registered, why) = made?;
                    if let Some(why) = why.filter(|why| self.is_news(&domain.device.name, *why)) {
                        let device = &domain.device.name;
                        tracing::warn!(device, %why, "GPU memory is registered by its address, not as a dma-buf");
                    }
                    Ok(registered)
                };
                self.domains
                    .iter()
                    .map(register)
                    .collect::<Result<Vec<_>, VerbsError>>()?
            }
            _ => Vec::new(),
        };
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let key = self.regions.add_any(region.clone())?;
        entries.push(Entry { registrations, region });
        Ok(key)
    }

    /// Once for each device and cause.
    fn is_news(&self, device: &str, why: NoDmabuf) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.insert((device.into(), why))
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

    /// The bytes of `local`, for a checksum; `None` for those of a GPU.
    ///
    /// # Safety
    /// Obligation 4: nobody writes them while the slice is in use.
    pub(super) unsafe fn bytes(&self, local: &Run) -> Option<&[u8]> {
        let region = &self.entry(local.region)?.region;
        let address = region.locate(local).filter(|_| region.is_host())?;
        // SAFETY: obligations 1 and 4 — inside a region that lives, and the caller's promise.
        Some(unsafe { std::slice::from_raw_parts(address.as_ptr(), usize::try_from(local.len).ok()?) })
    }

    /// Flips a bit.
    ///
    /// # Safety
    /// Obligation 4: nobody else touches the byte meanwhile.
    #[cfg(feature = "fault")]
    pub(super) unsafe fn flip(&self, at: &Run) {
        let entry = self.entry(at.region).filter(|entry| entry.region.is_host());
        if let Some(address) = entry.and_then(|entry| entry.region.locate(at)) {
            // SAFETY: obligations 1 and 4 — inside a region that lives, and the caller's promise.
            unsafe { *address.as_ptr() ^= 1 };
        }
    }

    /// The first of the runs whose bytes the processor cannot read.
    pub(super) fn beyond<'r>(&self, runs: impl IntoIterator<Item = &'r Run>) -> Option<&'r Run> {
        let beyond = |run: &&Run| self.entry(run.region).is_some_and(|entry| !entry.region.is_host());
        runs.into_iter().find(beyond)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_and_a_cause_are_told_once() {
        let memory = Memory::new(Vec::new(), Arc::default());
        let refused = NoDmabuf::Refused { errno: 95 };
        let news = [
            ("a", refused),
            ("a", refused),
            ("b", refused),
            ("a", NoDmabuf::NotExported),
        ];
        let told = news.map(|(device, why)| memory.is_news(device, why));
        assert_eq!(told, [true, false, true, true]);
    }
}
