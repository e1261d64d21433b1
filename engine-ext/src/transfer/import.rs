//! One import's task: lease → land → pull → confirm (XFER-1..3). The machine steers it by steps; every failure is told to
//! the machine, and the lease at the peer is ended in every case (F13).

use std::{sync::Arc, time::Duration};

use kvc_proto::{
    id::{ImportId, Incarnation, Placement, SessionId},
    wire::reason::{Reason, Refusal},
    worker::{Identity, Token},
};
use kvc_rdma::MoverError;
use tokio::{sync::mpsc::UnboundedReceiver, time::Instant};

use crate::{
    peer::{Lease, Peer},
    state::Shared,
};

use super::{
    imports::{Control, Step},
    pull,
};

/// What to import and from whom.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) session: SessionId,
    pub(crate) peer: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) placement: Placement,
}

/// The task. It ends when the machine has forgotten the import.
pub(crate) async fn run(
    shared: Arc<Shared>,
    import: ImportId,
    control: Arc<Control>,
    mut steps: UnboundedReceiver<Step>,
    deadline: Instant,
) {
    let Some(Step::Open(order)) = steps.recv().await else {
        return;
    };
    let opened = tokio::select! {
        opened = open(&shared, &order, deadline) => opened,
        () = ended(&mut steps) => return,
    };
    let held = match opened {
        Ok(held) => held,
        Err(why) => return fail(&shared, import, &control, why),
    };
    tracing::debug!(%import, session = %order.session, peer = order.peer, tokens = held.tokens.len(), "lease held");
    shared
        .call(|worker, now| worker.lease_granted(import, held.identity.clone(), held.tokens.clone(), held.share, now));
    let renewal = renew(&held.peer, held.lease, held.lives);
    let outcome = tokio::select! {
        outcome = serve(&shared, import, &control, &held, &mut steps, deadline) => outcome,
        why = renewal => Err(why),
    };
    if let Err(why) = outcome {
        fail(&shared, import, &control, why);
    }
    control.fence();
    held.peer.end(held.lease).await;
}

/// A lease at a peer.
pub(super) struct Held {
    pub(super) peer: Arc<Peer>,
    pub(super) lease: Lease,
    identity: Identity,
    pub(super) tokens: Arc<[Token]>,
    share: u32,
    lives: Duration,
}

async fn open(shared: &Shared, order: &Order, deadline: Instant) -> Result<Held, Refusal> {
    let mut fresh = false;
    loop {
        let peer = shared
            .peers
            .connect(shared, &order.peer, order.incarnation, deadline)
            .await?;
        match peer.lease(&order.session, order.placement, deadline).await {
            Ok(granted) => {
                let grant = granted.grant;
                return Ok(Held {
                    peer,
                    lease: Lease {
                        id: grant.lease,
                        token: granted.token,
                    },
                    identity: grant.identity,
                    tokens: grant.tokens,
                    share: grant.share,
                    lives: grant.lives,
                });
            }
            // A kept connection may have broken, or its bearer be forgotten: once with a new one.
            Err(why) if !fresh && matches!(why.code, Reason::PeerUnreachable | Reason::Unauthenticated) => {
                shared.peers.forget(&order.peer, &peer);
                fresh = true;
            }
            Err(why) => return Err(why),
        }
    }
}

async fn serve(
    shared: &Shared,
    import: ImportId,
    control: &Arc<Control>,
    held: &Held,
    steps: &mut UnboundedReceiver<Step>,
    deadline: Instant,
) -> Result<(), Refusal> {
    let mut pulled = false;
    loop {
        match steps.recv().await {
            Some(Step::Pull { from, slots }) => {
                tokio::select! {
                    arrived = pull::run(shared, import, control, held, from, &slots, deadline) => arrived?,
                    () = ended(steps) => return Ok(()),
                }
                pulled = true;
                shared.call(|worker, now| worker.pulled(import, now));
            }
            Some(Step::Confirm) => {
                if !pulled {
                    tokio::select! {
                        readable = pull::wait_readable(held, deadline) => readable?,
                        () = ended(steps) => return Ok(()),
                    }
                }
                // XFER-3: only the exporter knows that the lease was valid throughout.
                held.peer.confirm(held.lease, deadline).await?;
                shared.call(|worker, now| worker.confirmed(import, now));
            }
            Some(Step::Open(_)) => {}
            Some(Step::End) | None => return Ok(()),
        }
    }
}

/// Renews while the import works (XFER-2); returns only when that fails.
async fn renew(peer: &Peer, lease: Lease, lives: Duration) -> Refusal {
    // A peer that grants a life of next to nothing must not make us ask all the time.
    let third = (lives / 3).max(Duration::from_millis(20));
    loop {
        tokio::time::sleep(third).await;
        if let Err(why) = peer.renew(lease, third).await {
            return why;
        }
    }
}

/// Returns when the machine is done with the import; other steps cannot come meanwhile.
async fn ended(steps: &mut UnboundedReceiver<Step>) {
    loop {
        match steps.recv().await {
            Some(Step::End) | None => return,
            Some(_) => {}
        }
    }
}

fn fail(shared: &Shared, import: ImportId, control: &Control, why: Refusal) {
    // The machine is told when nothing writes into the pages any more.
    control.fence();
    tracing::debug!(%import, reason = %why.code, message = why.message, "import failed");
    shared.call(|worker, now| worker.import_failed(import, why, now));
}

/// A mover's error as it travels.
pub(crate) fn refused(error: &MoverError) -> Refusal {
    let code = match error {
        MoverError::Connect { .. } | MoverError::PeerGone { .. } => Reason::PeerUnreachable,
        MoverError::Timeout { .. } => Reason::DeadlineExceeded,
        MoverError::UnknownToken { .. } | MoverError::Expired { .. } | MoverError::Revoked { .. } => {
            Reason::LeaseRevoked
        }
        MoverError::RangeRefused { .. } => Reason::RangeNotReadable,
        MoverError::Checksum { .. } => Reason::ChecksumMismatch,
        MoverError::Cancelled | MoverError::Closed => Reason::Cancelled,
        _ => Reason::TransferFailed,
    };
    Refusal::new(code, error.to_string())
}
