//! [`Announcer`]: tells backups what has been committed (SYNC-1), off the scheduler's thread. Bounded, newest wins, few
//! tries: a lost announcement costs nothing but lag, since the next commit announces again.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use kvc_proto::{
    id::SessionId,
    wire::{
        admit::PeerRef,
        reason::{Reason, Refusal},
    },
    worker::Announcement,
};
use tokio::time::Instant;

use crate::{metrics::Announced, state::Shared};

/// Sessions that wait for one backup; the oldest goes when there are more.
const WAITING: usize = 4096;
/// Backups with something waiting.
const BACKUPS: usize = 256;
/// For one announcement, all tries together.
const DEADLINE: Duration = Duration::from_secs(5);
/// For one try.
const TRY: Duration = Duration::from_secs(2);
/// Before the second and the third try.
const PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(250)];

/// What waits to be told, per backup process; each has one sender task while anything waits.
#[derive(Debug, Default)]
pub(crate) struct Announcer {
    backups: Mutex<HashMap<PeerRef, Outbox>>,
}

#[derive(Debug, Default)]
struct Outbox {
    waiting: HashMap<SessionId, Announcement>,
    order: VecDeque<SessionId>,
}

impl Announcer {
    /// Puts it in the table, in place of an older one of the session; waits for nothing.
    pub(crate) fn put(&self, shared: &Arc<Shared>, to: PeerRef, announcement: Announcement) {
        let mut backups = self.lock();
        let full = backups.len() >= BACKUPS;
        match backups.entry(to) {
            Entry::Occupied(mut outbox) => {
                if outbox.get_mut().put(announcement) {
                    shared.metrics.announced(Announced::Dropped, 1);
                }
            }
            Entry::Vacant(_) if full => shared.metrics.announced(Announced::Dropped, 1),
            Entry::Vacant(vacant) => {
                let to = vacant.key().clone();
                vacant.insert(Outbox::default()).put(announcement);
                shared.runtime.spawn(send(shared.clone(), to));
            }
        }
    }

    /// The oldest; none ends the sender, which a later [`Announcer::put`] starts anew.
    fn next(&self, to: &PeerRef) -> Option<Announcement> {
        let mut backups = self.lock();
        let next = backups.get_mut(to)?.next();
        if next.is_none() {
            backups.remove(to);
        }
        next
    }

    /// A newer one of the same session.
    fn newer(&self, to: &PeerRef, session: &SessionId) -> Option<Announcement> {
        self.lock().get_mut(to)?.take(session)
    }

    /// Gives up all that waits for a backup; says how many.
    fn clear(&self, to: &PeerRef) -> usize {
        self.lock().get_mut(to).map_or(0, |outbox| {
            outbox.order.clear();
            std::mem::take(&mut outbox.waiting).len()
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<PeerRef, Outbox>> {
        self.backups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Outbox {
    /// Whether another had to go for it.
    fn put(&mut self, announcement: Announcement) -> bool {
        let session = announcement.session.clone();
        if self.waiting.insert(session.clone(), announcement).is_some() {
            return false;
        }
        self.order.push_back(session);
        self.order.len() > WAITING && self.next().is_some()
    }

    fn next(&mut self) -> Option<Announcement> {
        let session = self.order.pop_front()?;
        self.waiting.remove(&session)
    }

    fn take(&mut self, session: &SessionId) -> Option<Announcement> {
        let announcement = self.waiting.remove(session)?;
        self.order.retain(|waiting| waiting != session);
        Some(announcement)
    }
}

/// Until nothing waits for this backup.
async fn send(shared: Arc<Shared>, to: PeerRef) {
    while let Some(mut announcement) = shared.announcer.next(&to) {
        match deliver(&shared, &to, &mut announcement).await {
            Ok(()) => shared.metrics.announced(Announced::Sent, 1),
            Err(why) if lost(why.code) => {
                // What waits behind it would only wait as long.
                let dropped = shared.announcer.clear(&to);
                tracing::debug!(backup = to.peer, reason = %why.code, message = why.message, dropped, "backup not told");
                shared.metrics.announced(Announced::Failed, 1 + dropped as u64);
            }
            Err(why) => {
                tracing::debug!(session = %announcement.session, backup = to.peer, reason = %why.code, "backup refuses");
                shared.metrics.announced(Announced::Refused, 1);
                if why.code == Reason::StaleEpoch {
                    // SES-4: somebody else owns the session under a higher placement.
                    let (session, epoch) = (announcement.session, announcement.epoch);
                    shared.call(|worker, now| worker.announce_refused(&session, epoch, why.code, now));
                }
            }
        }
    }
}

async fn deliver(shared: &Arc<Shared>, to: &PeerRef, announcement: &mut Announcement) -> Result<(), Refusal> {
    let deadline = Instant::now() + DEADLINE;
    let mut pauses = PAUSES.into_iter();
    loop {
        let until = deadline.min(Instant::now() + TRY);
        let peer = shared.peers.connect(shared, &to.peer, to.incarnation, until).await;
        let told = match &peer {
            Ok(peer) => peer.announce(shared.peer_listen, announcement, until).await,
            Err(why) => Err(why.clone()),
        };
        match (told, pauses.next()) {
            (Err(why), Some(pause)) if lost(why.code) && Instant::now() + pause < deadline => {
                if let Ok(peer) = peer {
                    shared.peers.forget(&to.peer, &peer);
                }
                tokio::time::sleep(pause).await;
                if let Some(newer) = shared.announcer.newer(to, &announcement.session) {
                    *announcement = newer;
                }
            }
            (told, _) => return told,
        }
    }
}

/// Nobody has answered, or over a connection that is no longer greeted.
fn lost(code: Reason) -> bool {
    matches!(
        code,
        Reason::PeerUnreachable | Reason::DeadlineExceeded | Reason::Unauthenticated
    )
}

#[cfg(test)]
mod tests {
    use kvc_proto::{
        id::{Epoch, Placement, StoreId},
        session::Digest,
        worker::Identity,
    };

    use super::*;

    fn announcement(session: &str, committed: u32) -> Announcement {
        let placement = Placement {
            n: 1,
            store: StoreId(1),
        };
        Announcement {
            session: SessionId::new(session).unwrap(),
            epoch: Epoch { placement, rewind: 0 },
            committed,
            digest: Digest([0; 16]),
            identity: Identity::default(),
        }
    }

    #[test]
    fn the_newest_of_a_session_wins_and_keeps_its_place() {
        // SYNC-1.
        let mut outbox = Outbox::default();
        outbox.put(announcement("a", 1));
        outbox.put(announcement("b", 2));
        outbox.put(announcement("a", 3));
        let told: Vec<_> = std::iter::from_fn(|| outbox.next()).map(|a| a.committed).collect();
        assert_eq!(told, [3, 2]);
        assert!(outbox.waiting.is_empty());
    }

    #[test]
    fn the_table_is_bounded_and_the_oldest_goes() {
        let mut outbox = Outbox::default();
        let dropped = (0..WAITING + 3)
            .filter(|n| outbox.put(announcement(&format!("s{n}"), 1)))
            .count();
        assert_eq!(
            (dropped, outbox.waiting.len(), outbox.order.len()),
            (3, WAITING, WAITING)
        );
        assert_eq!(outbox.next().unwrap().session.as_str(), "s3");
    }

    #[test]
    fn a_newer_one_replaces_what_is_being_sent() {
        let mut outbox = Outbox::default();
        outbox.put(announcement("a", 1));
        outbox.next();
        outbox.put(announcement("b", 2));
        outbox.put(announcement("a", 5));
        let session = SessionId::new("a").unwrap();
        assert_eq!(outbox.take(&session).map(|a| a.committed), Some(5));
        assert_eq!(outbox.next().map(|a| a.committed), Some(2));
        assert!(outbox.next().is_none());
    }
}
