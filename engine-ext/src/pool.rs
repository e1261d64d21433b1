//! [`Pool`]: the engine's KV buffers as each mover knows them. The one place where `cuda` and `rdma` meet.

use std::{os::fd::AsFd, ptr::NonNull, sync::Arc};

use kvc_cuda::{Device, KvLayout, Plan};
use kvc_proto::{
    wire::reason::{Reason, Refusal},
    worker::Slot,
};
use kvc_rdma::{Copy, Mover, MoverError, MoverKind, Region, RegionKey, Run};

use crate::{
    Config, StartError,
    movers::{self, Movers},
};

/// Registered buffers.
pub(crate) struct Pool {
    layout: KvLayout,
    rows: Vec<u32>,
    paths: Vec<Path>,
}

/// A mover that knows our buffers.
pub(crate) struct Path {
    pub(crate) mover: Arc<dyn Mover>,
    /// Its names for them, in layout order.
    pub(crate) keys: Vec<RegionKey>,
    /// Whether peers can read them with it; any mover can land in them.
    pub(crate) serves: bool,
}

impl Pool {
    /// Registers every buffer with every mover. Buffers on a device are left alone: no mover here can read them.
    ///
    /// # Errors
    /// [`StartError::Mover`] for a mover that has to take them and does not.
    pub(crate) fn register(layout: KvLayout, movers: Movers, config: &Config) -> Result<Self, StartError> {
        let mut paths = Vec::new();
        for mover in movers.into_iter() {
            match path(&layout, mover.clone()) {
                Ok(path) => paths.push(path),
                // Memory that the NIC does not take, or may not lock.
                Err(error) if mover.kind() == MoverKind::Verbs => movers::without_rdma(config, error)?,
                // Too few descriptors, say.
                Err(error) if mover.kind() == MoverKind::Shm => movers::without_shm(&error),
                Err(source) => {
                    let field = "data_listen";
                    return Err(StartError::Mover { field, source });
                }
            }
        }
        let rows = layout.buffers().iter().map(|b| b.row).collect();
        Ok(Self { layout, rows, paths })
    }

    pub(crate) fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Ways for KV in and out, best first.
    pub(crate) fn paths(&self) -> &[Path] {
        &self.paths
    }

    /// That of one mover.
    pub(crate) fn path(&self, kind: MoverKind) -> Option<&Path> {
        self.paths.iter().find(|path| path.mover.kind() == kind)
    }

    /// Those that peers can read with.
    pub(crate) fn served(&self) -> impl Iterator<Item = &Path> {
        let movable = self.layout.device() == Device::Host;
        self.paths.iter().filter(move |path| path.serves && movable)
    }

    /// Refuses to import to or export from memory that no mover reaches; sessions work all the same.
    pub(crate) fn movable(&self) -> Result<(), Refusal> {
        match self.layout.device() {
            Device::Host => Ok(()),
            Device::Cuda(ordinal) => Err(Refusal::new(
                Reason::LayoutMismatch,
                format!("this worker's KV is on cuda:{ordinal}, which cannot be moved yet"),
            )),
        }
    }

    /// The bytes of these slots in every buffer: what a lease exposes to each mover.
    pub(crate) fn runs(&self, slots: &[Slot]) -> Exposed<'_> {
        Exposed {
            pool: self,
            // Both sides the same: only the peer's half of the plan is of interest.
            plan: Plan::new(slots, slots).unwrap_or_default(),
            made: None,
        }
    }

    /// What to fetch over `path` so that the token in `src[i]` at the peer, who names its buffers `theirs`, comes to
    /// `dst[i]` here. `None` if the lengths differ or the peer has other buffers.
    pub(crate) fn copies(&self, path: &Path, theirs: &[RegionKey], src: &[Slot], dst: &[Slot]) -> Option<Vec<Copy>> {
        if theirs.len() != path.keys.len() {
            return None;
        }
        let plan = Plan::new(src, dst)?;
        let run = |region, offset, len| Run { region, offset, len };
        Some(
            plan.copies(&self.rows)
                .map(|c| Copy {
                    remote: run(theirs[c.buffer], c.src, c.len),
                    local: run(path.keys[c.buffer], c.dst, c.len),
                })
                .collect(),
        )
    }
}

/// Runs of the same bytes under the names of one mover after another.
pub(crate) struct Exposed<'p> {
    pool: &'p Pool,
    plan: Plan,
    made: Option<(&'p [RegionKey], Vec<Run>)>,
}

impl<'p> Exposed<'p> {
    /// As `path` names them. Movers that were given the same buffers in the same order mostly name them the same.
    pub(crate) fn over(&mut self, path: &'p Path) -> &[Run] {
        let made = self.made.take().filter(|(keys, _)| *keys == path.keys.as_slice());
        let made = made.unwrap_or_else(|| {
            let named = self.plan.copies(&self.pool.rows).map(|c| Run {
                region: path.keys[c.buffer],
                offset: c.src,
                len: c.len,
            });
            (&path.keys, named.collect())
        });
        &self.made.insert(made).1
    }
}

fn path(layout: &KvLayout, mover: Arc<dyn Mover>) -> Result<Path, MoverError> {
    let mut keys = Vec::new();
    let mut shareable = true;
    if layout.device() == Device::Host {
        for (index, buffer) in layout.buffers().iter().enumerate() {
            let mut region = region(buffer.base, buffer.len());
            // Each file that a mover is given is a descriptor; no other mover has a use for it.
            if let Some(backing) = layout.backing(index).filter(|_| mover.kind() == MoverKind::Shm) {
                let file = backing.file.as_fd().try_clone_to_owned();
                let file = file.map_err(|e| MoverError::System {
                    call: "fcntl",
                    errno: e.raw_os_error().unwrap_or(0),
                })?;
                region = region.backed_by(file, backing.offset)?;
            }
            shareable &= region.is_shareable();
            keys.push(mover.register(region)?);
        }
    }
    // XFER-9: peers map what they read through shared memory.
    let serves = mover.kind() != MoverKind::Shm || shareable;
    Ok(Path { mover, keys, serves })
}

#[allow(unsafe_code)]
fn region(base: u64, len: u64) -> Region {
    let address = NonNull::new(base as *mut u8).unwrap_or(NonNull::dangling());
    // SAFETY: obligations 1 and 4 were promised to `KvLayout::from_raw` for as long as the layout lives and longer than
    // every mover; `KvLayout` refuses null.
    unsafe { Region::from_raw(address, len) }
}
