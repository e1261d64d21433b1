//! Which importers may copy under which lease, and the fence over all of them. The exporter's thread grants; `fence` and
//! the end of the mover revoke and wait.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    socket::Socket,
    word::{Page, Slot},
};
use crate::{error::MoverError, mover::LeaseToken};

/// Looks at the word before the fence sleeps: about what the rest of a chunk takes.
const SPINS: u32 = 4000;
/// Between two looks after that.
const NAP: Duration = Duration::from_micros(50);

/// One importer's connection as the fence sees it.
#[derive(Debug)]
pub(super) struct Link {
    page: Page,
    socket: Arc<Socket>,
    process: Option<OwnedFd>,
    slots: Mutex<Slots>,
    /// It did not leave a copy in time: nothing is granted to it, and no fence waits for it again.
    condemned: AtomicBool,
}

#[derive(Debug, Default)]
struct Slots {
    /// How many were ever used.
    used: u32,
    free: Vec<u32>,
}

impl Link {
    /// With words for that many leases; also the file to send to the peer.
    pub(super) fn new(socket: Arc<Socket>, slots: u32) -> Result<(Self, Arc<OwnedFd>), MoverError> {
        let (page, file) = Page::create(slots)?;
        let link = Link {
            page,
            process: socket.peer_process(),
            socket,
            slots: Mutex::default(),
            condemned: AtomicBool::new(false),
        };
        Ok((link, file))
    }

    pub(super) fn slots(&self) -> u32 {
        self.page.slots()
    }

    fn take(&self) -> Option<Slot> {
        if self.condemned.load(Ordering::SeqCst) {
            return None;
        }
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let index = match slots.free.pop() {
            Some(index) => index,
            None => {
                let index = slots.used;
                slots.used = index.checked_add(1).filter(|used| *used <= self.page.slots())?;
                index
            }
        };
        self.page.open_slot(index)
    }

    /// Waits until nobody is inside the revoked slot: its copy left, its process is dead or hung up (a dead process copies
    /// nothing, a living one leaves before it hangs up), or the time is over. `false` in the last case.
    fn settle(&self, slot: Slot, until: Instant) -> bool {
        for _ in 0..SPINS {
            if self.page.is_empty(slot) {
                self.slots
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .free
                    .push(slot.index);
                return true;
            }
            std::hint::spin_loop();
        }
        while !self.page.is_empty(slot) {
            if self.condemned.load(Ordering::SeqCst) || self.socket.is_gone(self.process.as_ref()) {
                return true;
            }
            if Instant::now() >= until {
                self.condemned.store(true, Ordering::SeqCst);
                self.socket.shut();
                return false;
            }
            thread::sleep(NAP);
        }
        self.slots
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .free
            .push(slot.index);
        true
    }
}

/// All grants of one exporter.
#[derive(Debug, Default)]
pub(super) struct Grants {
    table: Mutex<HashMap<[u8; 32], Vec<Grant>>>,
    late: AtomicU64,
}

#[derive(Debug)]
struct Grant {
    link: Arc<Link>,
    slot: Slot,
}

impl Grants {
    /// The slot of the lease on that connection; `None` if it has no more. To be called inside the lease's gate, so that
    /// its fence finds what was granted.
    pub(super) fn grant(&self, token: &LeaseToken, link: &Arc<Link>) -> Option<Slot> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let grants = table.entry(token.0).or_default();
        if let Some(grant) = grants.iter().find(|grant| Arc::ptr_eq(&grant.link, link)) {
            return Some(grant.slot);
        }
        let slot = link.take()?;
        grants.push(Grant {
            link: link.clone(),
            slot,
        });
        Some(slot)
    }

    /// The fence (XFER-2), behind the lease's gate: when it returns nobody copies under the token, or who still does has
    /// run out of `limit` and will throw its chunk away.
    pub(super) fn revoke(&self, token: &LeaseToken, limit: Duration) {
        let grants = self
            .table
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&token.0);
        self.end(&grants.unwrap_or_default(), false, limit);
    }

    /// As [`Grants::revoke`] for every token, with word to the importers that the exporter ends.
    pub(super) fn close(&self, limit: Duration) {
        let table = std::mem::take(&mut *self.table.lock().unwrap_or_else(PoisonError::into_inner));
        let grants: Vec<Grant> = table.into_values().flatten().collect();
        self.end(&grants, true, limit);
    }

    /// The connection is gone, and its grants with it.
    pub(super) fn forget(&self, link: &Arc<Link>) {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        table.retain(|_, grants| {
            grants.retain(|grant| !Arc::ptr_eq(&grant.link, link));
            !grants.is_empty()
        });
    }

    /// Fences that ran out of time so far.
    pub(super) fn late(&self) -> u64 {
        self.late.load(Ordering::Relaxed)
    }

    fn end(&self, grants: &[Grant], closed: bool, limit: Duration) {
        grants
            .iter()
            .for_each(|grant| grant.link.page.revoke(grant.slot, closed));
        let until = Instant::now() + limit;
        for Grant { link, slot } in grants {
            if !link.settle(*slot, until) {
                self.late.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(
                    ?limit,
                    "a fence ran out of time: the importer is alive and inside a copy, its connection ends"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    /// An exporter's link and what its importer holds.
    fn link() -> (Arc<Link>, Page, Socket) {
        let (ours, theirs) = Socket::pair().unwrap();
        let (link, file) = Link::new(Arc::new(ours), 2).unwrap();
        let page = Page::open(&file, 2).unwrap();
        (Arc::new(link), page, theirs)
    }

    fn token(byte: u8) -> LeaseToken {
        LeaseToken([byte; 32])
    }

    #[test]
    fn a_lease_has_one_slot_per_connection_until_it_is_revoked() {
        let (grants, (link, page, _socket)) = (Grants::default(), link());
        let slot = grants.grant(&token(1), &link).unwrap();
        assert_eq!(grants.grant(&token(1), &link), Some(slot));
        let other = grants.grant(&token(2), &link).unwrap();
        assert_eq!(grants.grant(&token(3), &link), None, "two slots in all");
        grants.revoke(&token(1), LONG);
        assert!(page.pass(slot, || ()).is_err());
        assert_eq!(page.pass(other, || ()), Ok(()), "the other lease goes on");
        let again = grants.grant(&token(3), &link).unwrap();
        assert_eq!(again.index, slot.index);
        assert_eq!(page.pass(again, || ()), Ok(()));
    }

    /// XFER-2: the fence returns after the copy, not before.
    #[test]
    fn a_fence_waits_for_the_copy_in_hand() {
        let (grants, (link, page, _socket)) = (Grants::default(), link());
        let slot = grants.grant(&token(1), &link).unwrap();
        let (inside, entered) = std::sync::mpsc::channel();
        let copied = Arc::new(AtomicBool::new(false));
        let importer = thread::spawn({
            let copied = copied.clone();
            move || {
                page.pass(slot, || {
                    inside.send(()).unwrap();
                    thread::sleep(Duration::from_millis(5));
                    copied.store(true, Ordering::SeqCst);
                })
            }
        });
        entered.recv().unwrap();
        grants.revoke(&token(1), LONG);
        assert!(copied.load(Ordering::SeqCst), "the fence did not wait");
        assert!(importer.join().unwrap().is_err(), "what was copied meanwhile is void");
        assert_eq!(grants.late(), 0);
    }

    /// XFER-7: a dead importer's copy holds nothing.
    #[test]
    fn an_importer_that_hung_up_is_not_waited_for() {
        let (grants, (link, page, socket)) = (Grants::default(), link());
        let slot = grants.grant(&token(1), &link).unwrap();
        drop(socket);
        let _ = page.pass(slot, || {
            let begun = Instant::now();
            grants.revoke(&token(1), LONG);
            assert!(begun.elapsed() < LONG / 2);
        });
        assert_eq!(grants.late(), 0);
    }

    /// XFER-7: nor does a living one that is stuck, and it is believed no more.
    #[test]
    fn an_importer_that_is_stuck_is_given_up_at_the_deadline() {
        let (grants, (link, page, socket)) = (Grants::default(), link());
        let slot = grants.grant(&token(1), &link).unwrap();
        let limit = Duration::from_millis(20);
        let copied = page.pass(slot, || {
            let begun = Instant::now();
            grants.revoke(&token(1), limit);
            assert!(begun.elapsed() >= limit);
        });
        assert!(copied.is_err(), "bytes that may be anybody's are void");
        assert_eq!(grants.late(), 1);
        assert_eq!(grants.grant(&token(2), &link), None);
        assert!(socket.is_gone(None), "its connection ends");
    }

    #[test]
    fn a_connection_that_is_gone_leaves_no_grant() {
        let (grants, (link, _page, _socket)) = (Grants::default(), link());
        grants.grant(&token(1), &link).unwrap();
        grants.forget(&link);
        assert!(grants.table.lock().unwrap().is_empty());
    }
}
