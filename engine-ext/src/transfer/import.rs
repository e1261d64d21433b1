//! One import's task: lease → land → pull → confirm (XFER-1..3), and for a move as many rounds of that as it takes until the
//! owner hands over (MIG-1). The machine steers it by steps; every failure is told to the machine, and each lease at the
//! peer is ended in every case (F13).

use std::{sync::Arc, time::Duration};

use kvc_proto::{
    id::{ImportId, Incarnation, Placement, SessionId},
    wire::reason::{Reason, Refusal},
    worker::{Handover, Have, LeaseGrant, LeaseKind},
};
use kvc_rdma::MoverError;
use tokio::{sync::mpsc::UnboundedReceiver, time::Instant};

use crate::{
    peer::{Lease, Peer},
    state::Shared,
};

use super::{
    handover,
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
    pub(crate) kind: LeaseKind,
    pub(crate) have: Option<Have>,
}

/// The task. It ends when the machine has forgotten the import.
pub(super) struct Task {
    pub(super) shared: Arc<Shared>,
    pub(super) import: ImportId,
    pub(super) steps: UnboundedReceiver<Step>,
    pub(super) deadline: Instant,
    /// SYNC-3: nobody waits for it.
    pub(super) gives_way: bool,
}

/// A lease at a peer.
pub(super) struct Held {
    pub(super) peer: Arc<Peer>,
    pub(super) lease: Lease,
    /// One past the range's last token.
    pub(super) end: u32,
    /// SYNC-3.
    pub(super) gives_way: bool,
    lives: Duration,
}

impl Task {
    pub(super) async fn run(mut self) {
        let mut next = self.steps.recv().await;
        while let Some(step) = next {
            next = match step {
                Step::Open(order, control) => self.under_lease(&order, &control).await,
                Step::AskHandover { peer, request } => self.ask(&peer, &request).await,
                // Of a lease that is over.
                Step::Pull { .. } | Step::Confirm | Step::End => self.steps.recv().await,
            };
        }
    }

    /// From a lease to its end; gives the first step that is not about it.
    async fn under_lease(&mut self, order: &Order, control: &Arc<Control>) -> Option<Step> {
        let opened = tokio::select! {
            opened = open(&self.shared, order, self.deadline) => opened,
            step = interruption(&mut self.steps) => return step,
        };
        let (mut held, grant) = match opened {
            Ok(opened) => opened,
            Err(why) => {
                self.fail(control, why);
                return self.steps.recv().await;
            }
        };
        held.gives_way = self.gives_way;
        tracing::debug!(import = %self.import, session = %order.session, peer = order.peer, tokens = held.end, "lease held");
        let import = self.import;
        self.shared.call(|worker, now| worker.lease_granted(import, grant, now));
        let renewal = renew(&held.peer, held.lease, held.lives);
        let outcome = tokio::select! {
            outcome = self.serve(control, &held) => outcome,
            why = renewal => Err(why),
        };
        // Before the peer hears that it is over, nothing reads under it any more.
        control.fence();
        let failure = outcome.as_ref().err().cloned();
        if let Some(why) = failure {
            self.fail(control, why);
        }
        // Nobody waits for it, least of all the hand-over that follows.
        tokio::spawn(async move { held.peer.end(held.lease).await });
        match outcome {
            Ok(next) => next,
            Err(_) => self.steps.recv().await,
        }
    }

    async fn serve(&mut self, control: &Arc<Control>, held: &Held) -> Result<Option<Step>, Refusal> {
        let (import, deadline) = (self.import, self.deadline);
        let mut pulled = false;
        loop {
            match self.steps.recv().await {
                Some(Step::Pull { from, slots }) => {
                    tokio::select! {
                        arrived = pull::run(&self.shared, import, control, held, from, &slots, deadline) => arrived?,
                        step = interruption(&mut self.steps) => return Ok(step),
                    }
                    pulled = true;
                    self.shared.call(|worker, now| worker.pulled(import, now));
                }
                Some(Step::Confirm) => {
                    if !pulled {
                        tokio::select! {
                            readable = pull::wait_readable(held, deadline) => readable?,
                            step = interruption(&mut self.steps) => return Ok(step),
                        }
                    }
                    // XFER-3: only the exporter knows that the lease was valid throughout.
                    held.peer.confirm(held.lease, deadline).await?;
                    self.shared.call(|worker, now| worker.confirmed(import, now));
                }
                other => return Ok(other),
            }
        }
    }

    async fn ask(&mut self, peer: &str, request: &Handover) -> Option<Step> {
        let import = self.import;
        tokio::select! {
            (asked, answer) = handover::ask(&self.shared, peer, request, self.deadline) => {
                tracing::debug!(%import, session = %request.session, from = peer, ?answer, "hand-over asked for");
                self.shared.call(|worker, now| worker.handover_answered(import, asked, answer, now));
                self.steps.recv().await
            }
            step = interruption(&mut self.steps) => step,
        }
    }

    fn fail(&self, control: &Control, why: Refusal) {
        // The machine is told when nothing writes into the pages any more.
        control.fence();
        tracing::debug!(import = %self.import, reason = %why.code, message = why.message, "import failed");
        self.shared
            .call(|worker, now| worker.import_failed(self.import, why, now));
    }
}

async fn open(shared: &Arc<Shared>, order: &Order, deadline: Instant) -> Result<(Held, LeaseGrant), Refusal> {
    let mut fresh = false;
    loop {
        let peer = shared
            .peers
            .connect(shared, &order.peer, order.incarnation, deadline)
            .await?;
        match peer.lease(order, deadline).await {
            Ok(granted) => {
                let grant = granted.grant;
                let held = Held {
                    peer,
                    lease: Lease {
                        id: grant.lease,
                        token: granted.token,
                    },
                    end: pull::position(grant.after, grant.tokens.len())?,
                    gives_way: false,
                    lives: grant.lives,
                };
                return Ok((held, grant));
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

/// Renews while the import works (XFER-2); returns only when that fails. An answer may take as long as the lease still
/// lives.
async fn renew(peer: &Peer, lease: Lease, lives: Duration) -> Refusal {
    // A peer that grants a life of next to nothing must not make us ask all the time.
    let third = (lives / 3).max(Duration::from_millis(20));
    let mut ends = Instant::now() + lives;
    loop {
        tokio::time::sleep_until(ends - lives + third).await;
        let asked = Instant::now();
        match peer.renew(lease, ends.saturating_duration_since(asked)).await {
            Ok(()) => ends = asked + lives,
            Err(why) => return why,
        }
    }
}

/// The step that ends what is under way: the lease's end, another lease, or the import's end. Others cannot come
/// meanwhile.
async fn interruption(steps: &mut UnboundedReceiver<Step>) -> Option<Step> {
    loop {
        match steps.recv().await {
            Some(Step::Pull { .. } | Step::Confirm | Step::AskHandover { .. }) => {}
            step => return step,
        }
    }
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
