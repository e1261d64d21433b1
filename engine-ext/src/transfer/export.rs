//! [`Exports`]: the leases that peers hold on our KV, as the mover knows them. Driven by the peer server; fenced by
//! whoever revokes.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use kvc_proto::{
    id::{Incarnation, LeaseId},
    time::Now,
    wire::reason::{Reason, Refusal},
    worker::{LeaseAnswer, LeaseGrant, LeaseKind, LeaseRequest, LeaseView, Worker},
};
use kvc_rdma::{LeaseToken, MoverError, MoverKind};
use tokio::{
    sync::{Notify, futures::Notified},
    time::Instant,
};

use crate::{
    pool::{Path, Pool},
    state::Shared,
};

use super::{
    import::refused,
    serving::{Active, Serving},
};

/// Live leases.
#[derive(Debug, Default)]
pub(crate) struct Exports {
    leases: Mutex<HashMap<LeaseId, Export>>,
    changed: Notify,
    serving: Arc<Serving>,
}

#[derive(Debug)]
struct Export {
    token: LeaseToken,
    holder: Incarnation,
    /// The movers that know the token.
    movers: Arc<[MoverKind]>,
    /// Somebody waits for what is read under it.
    _serving: Option<Active>,
}

/// A lease and the token that names it to the mover.
pub(crate) struct Granted {
    pub(crate) grant: LeaseGrant,
    pub(crate) token: LeaseToken,
}

impl Exports {
    pub(crate) fn new(serving: Arc<Serving>) -> Self {
        Self {
            serving,
            ..Self::default()
        }
    }

    /// Waits at most `wait` for the turn to arrive, then grants (XFER-2) and exposes to those of our movers that the holder
    /// named (XFER-9).
    pub(crate) async fn grant(
        shared: &Arc<Shared>,
        request: &LeaseRequest,
        holder: Incarnation,
        movers: &Arc<[MoverKind]>,
        wait: Duration,
    ) -> Result<Granted, Refusal> {
        let until = Instant::now() + wait;
        loop {
            let changed = shared.exports.listen();
            tokio::pin!(changed);
            // Registered before the machine is asked: an arrival in between is not missed.
            changed.as_mut().enable();
            if let Some(granted) =
                shared.call(|worker, now| shared.exports.ask(shared, worker, request, holder, movers, now))?
            {
                return Ok(granted);
            }
            if tokio::time::timeout_at(until, changed).await.is_err() {
                return Err(Refusal::new(
                    Reason::DeadlineExceeded,
                    format!(
                        "session {} did not arrive within {} ms",
                        request.session,
                        wait.as_millis()
                    ),
                ));
            }
        }
    }

    /// What became readable past `from`, exposed to the mover; waits at most `wait` for something (XFER-4).
    pub(crate) async fn watch(
        shared: &Arc<Shared>,
        lease: LeaseId,
        holder: Incarnation,
        from: u32,
        wait: Duration,
    ) -> Result<LeaseView, Refusal> {
        let until = Instant::now() + wait;
        loop {
            let changed = shared.exports.listen();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let (token, movers) = shared.exports.held(lease, holder)?;
            let view = shared.call(|worker, _| worker.lease_view(lease, from))?;
            if !view.slots.is_empty() || view.complete {
                // After a revocation in between the token is dead and this is refused.
                let mut runs = shared.pool.runs(&view.slots);
                for path in named(&shared.pool, &movers) {
                    path.mover.extend(&token, runs.over(path)).map_err(|e| refused(&e))?;
                }
                return Ok(view);
            }
            if tokio::time::timeout_at(until, changed).await.is_err() {
                return Ok(view);
            }
        }
    }

    /// Refuses a lease that is not `holder`'s.
    pub(crate) fn check(&self, lease: LeaseId, holder: Incarnation) -> Result<(), Refusal> {
        self.held(lease, holder).map(|_| ())
    }

    /// Wakes who waits in [`Exports::grant`] and [`Exports::watch`], and for a session to become idle.
    pub(crate) fn changed(&self) {
        self.changed.notify_waiters();
    }

    /// When it returns nothing reads under this lease any more.
    pub(crate) fn fence(&self, lease: LeaseId, pool: &Pool) {
        let export = self
            .leases
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&lease);
        if let Some(export) = export {
            export.fence(pool);
        }
        // Its watcher learns at once that it is over.
        self.changed();
    }

    /// The module ends.
    pub(crate) fn fence_all(&self, pool: &Pool) {
        let all = std::mem::take(&mut *self.leases.lock().unwrap_or_else(PoisonError::into_inner));
        for export in all.values() {
            export.fence(pool);
        }
    }

    /// Completes at the next [`Exports::changed`].
    pub(super) fn listen(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Grant and exposure are one step under the machine's lock, so that a revocation always finds the token.
    fn ask(
        &self,
        shared: &Arc<Shared>,
        worker: &mut Worker,
        request: &LeaseRequest,
        holder: Incarnation,
        movers: &Arc<[MoverKind]>,
        now: Now,
    ) -> Result<Option<Granted>, Refusal> {
        let LeaseAnswer::Granted(grant) = worker.lease(request, now)? else {
            return Ok(None);
        };
        let exposed = LeaseToken::random()
            .and_then(|token| expose(&shared.pool, movers, token, shared.config.lease_max).map(|()| token));
        match exposed {
            Ok(token) => {
                let serving = (request.kind != LeaseKind::Sync).then(|| self.serving.begin());
                let export = Export {
                    token,
                    holder,
                    movers: movers.clone(),
                    _serving: serving,
                };
                self.leases
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .insert(grant.lease, export);
                Ok(Some(Granted { grant, token }))
            }
            Err(e) => {
                worker.end_lease(grant.lease, now);
                Err(refused(&e))
            }
        }
    }

    fn held(&self, lease: LeaseId, holder: Incarnation) -> Result<(LeaseToken, Arc<[MoverKind]>), Refusal> {
        let leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        match leases.get(&lease) {
            Some(export) if export.holder == holder => Ok((export.token, export.movers.clone())),
            // Another peer's lease looks like none.
            _ => Err(Refusal::new(
                Reason::LeaseUnknown,
                format!("lease {lease} is over or was never given to this peer"),
            )),
        }
    }
}

impl Export {
    fn fence(&self, pool: &Pool) {
        named(pool, &self.movers).for_each(|path| path.mover.fence(&self.token));
    }
}

/// All or none of them.
fn expose(pool: &Pool, movers: &[MoverKind], token: LeaseToken, max_age: Duration) -> Result<(), MoverError> {
    let exposed = named(pool, movers).try_for_each(|path| path.mover.expose(token, max_age));
    if exposed.is_err() {
        named(pool, movers).for_each(|path| path.mover.fence(&token));
    }
    exposed
}

fn named<'p>(pool: &'p Pool, movers: &[MoverKind]) -> impl Iterator<Item = &'p Path> {
    pool.served().filter(|path| movers.contains(&path.mover.kind()))
}
