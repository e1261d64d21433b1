//! The exporter's fence: the queue pairs through which one peer reads under one lease, and what every side channel shares.
//! [`super::VerbsMover`] fences from its caller's thread, the exporter's thread opens and serves.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

use super::{error::VerbsError, memory::Memory, queue_pair::QueuePair, rail::Rail};
use crate::{
    lease::{Lease, Leases},
    mover::LeaseToken,
};

/// What the exporter's thread shares with the mover.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) leases: Leases,
    pub(super) memory: Arc<Memory>,
    pub(super) rails: Vec<Arc<Rail>>,
    pub(super) stop: AtomicBool,
    pub(super) connections: AtomicUsize,
    doors: Mutex<HashMap<u64, Arc<Door>>>,
    #[cfg(feature = "fault")]
    pub(super) fault: Mutex<Option<crate::fault::Fault>>,
}

/// A peer's way to the memory of one lease.
#[derive(Debug)]
pub(super) struct Door {
    token: LeaseToken,
    pairs: Mutex<Vec<QueuePair>>,
    shut: AtomicBool,
}

impl Shared {
    pub(super) fn new(leases: Leases, memory: Arc<Memory>, rails: Vec<Arc<Rail>>) -> Arc<Self> {
        Arc::new(Shared {
            leases,
            memory,
            rails,
            stop: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            doors: Mutex::default(),
            #[cfg(feature = "fault")]
            fault: Mutex::default(),
        })
    }

    /// A door without a way through it yet. From here on a fence of the token finds it.
    pub(super) fn door(&self, connection: u64, token: LeaseToken) -> Arc<Door> {
        let door = Arc::new(Door {
            token,
            pairs: Mutex::default(),
            shut: AtomicBool::new(false),
        });
        self.doors
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(connection, door.clone());
        door
    }

    /// The side channel is closed.
    pub(super) fn forget(&self, connection: u64) {
        let door = self
            .doors
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&connection);
        if let Some(door) = door {
            door.shut();
        }
    }

    /// When it returns no device reads anything under the token any more (XFER-2). Doors that are being opened find the
    /// lease's gate shut.
    pub(super) fn fence(&self, token: &LeaseToken) {
        self.leases.fence(token);
        let doors = self.doors.lock().unwrap_or_else(PoisonError::into_inner);
        let under = doors
            .values()
            .filter(|door| bool::from(subtle::ConstantTimeEq::ct_eq(&door.token.0[..], &token.0[..])));
        let under: Vec<Arc<Door>> = under.cloned().collect();
        drop(doors);
        under.iter().for_each(|door| door.shut());
    }
}

impl Door {
    /// Takes a queue pair that `connect` makes and connects, if the lease lives. `false`: it does not, and nothing was
    /// made. A fence that comes meanwhile waits for the pair and destroys it: at no time does one answer that the fence
    /// does not find.
    pub(super) fn admit(
        &self,
        lease: &Lease,
        now: Instant,
        connect: impl FnOnce() -> Result<QueuePair, VerbsError>,
    ) -> Result<bool, VerbsError> {
        let mut pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_shut() || lease.pass(now, || ()).is_err() {
            return Ok(false);
        }
        pairs.push(connect()?);
        Ok(true)
    }

    /// Destroys the queue pairs: a device that had begun to answer is done when this returns. The lock is held until
    /// then, so that whoever shuts at the same time waits as well; each pair takes two calls to the driver.
    pub(super) fn shut(&self) {
        self.shut.store(true, Ordering::SeqCst);
        let mut pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        pairs.iter().for_each(QueuePair::fail);
        pairs.clear();
    }

    /// Whether no queue pair stands in it.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.pairs.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    pub(super) fn is_shut(&self) -> bool {
        self.shut.load(Ordering::SeqCst)
    }

    pub(super) fn token(&self) -> &LeaseToken {
        &self.token
    }
}
