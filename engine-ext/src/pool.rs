//! [`Pool`]: the engine's KV buffers as the mover knows them. The one place where `cuda` and `rdma` meet.

use std::ptr::NonNull;

use kvc_cuda::{Device, KvLayout, Plan};
use kvc_proto::{
    wire::reason::{Reason, Refusal},
    worker::Slot,
};
use kvc_rdma::{Copy, Mover, MoverError, Region, RegionKey, Run};

/// Registered buffers, in layout order.
pub(crate) struct Pool {
    layout: KvLayout,
    keys: Vec<RegionKey>,
    rows: Vec<u32>,
}

/// A peer's buffers, in layout order, as its handshake announced them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerPool {
    pub(crate) keys: Vec<RegionKey>,
    pub(crate) slots: u32,
}

impl Pool {
    /// Registers every buffer. Buffers on a device are left alone: no mover here can read them.
    pub(crate) fn register(layout: KvLayout, mover: &dyn Mover) -> Result<Self, MoverError> {
        let mut keys = Vec::new();
        if layout.device() == Device::Host {
            for buffer in layout.buffers() {
                keys.push(mover.register(region(buffer.base, buffer.len()))?);
            }
        }
        let rows = layout.buffers().iter().map(|b| b.row).collect();
        Ok(Self { layout, keys, rows })
    }

    pub(crate) fn layout(&self) -> &KvLayout {
        &self.layout
    }

    pub(crate) fn keys(&self) -> &[RegionKey] {
        &self.keys
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

    /// The bytes of these slots in every buffer: what a lease exposes.
    pub(crate) fn runs(&self, slots: &[Slot]) -> Vec<Run> {
        // Both sides the same: only the peer's half of the plan is of interest.
        let plan = Plan::new(slots, slots).unwrap_or_default();
        plan.copies(&self.rows)
            .map(|c| Run {
                region: self.keys[c.buffer],
                offset: c.src,
                len: c.len,
            })
            .collect()
    }

    /// What to fetch so that the token in `src[i]` at the peer comes to `dst[i]` here. `None` if the lengths differ or the
    /// peer has other buffers.
    pub(crate) fn copies(&self, peer: &PeerPool, src: &[Slot], dst: &[Slot]) -> Option<Vec<Copy>> {
        if peer.keys.len() != self.keys.len() {
            return None;
        }
        let plan = Plan::new(src, dst)?;
        let run = |region, offset, len| Run { region, offset, len };
        Some(
            plan.copies(&self.rows)
                .map(|c| Copy {
                    remote: run(peer.keys[c.buffer], c.src, c.len),
                    local: run(self.keys[c.buffer], c.dst, c.len),
                })
                .collect(),
        )
    }
}

#[allow(unsafe_code)]
fn region(base: u64, len: u64) -> Region {
    let address = NonNull::new(base as *mut u8).unwrap_or(NonNull::dangling());
    // SAFETY: obligations 1 and 4 were promised to `KvLayout::from_raw` for as long as the layout lives and longer than
    // every mover; `KvLayout` refuses null.
    unsafe { Region::from_raw(address, len) }
}
