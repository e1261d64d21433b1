//! Both ends of a hand-over's question (MIG-1). The source answers by one step of its machine; the target notes when it
//! asked, so that its machine can tell an answer that came too late (MIG-2).

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvc_proto::{
    time::Now,
    wire::{
        admit::PeerRef,
        reason::{Reason, Refusal},
    },
    worker::{Handover, HandoverAnswer},
};

use crate::state::Shared;

/// How long the source waits for the session to become idle before it says busy.
const PATIENCE: Duration = Duration::from_millis(100);

/// The source's answer to the worker `to`.
pub(crate) async fn answer(shared: &Arc<Shared>, asked: &Handover, to: &PeerRef) -> Result<HandoverAnswer, Refusal> {
    let until = tokio::time::Instant::now() + PATIENCE;
    loop {
        let changed = shared.exports.listen();
        tokio::pin!(changed);
        // Registered before the machine is asked: a turn's end in between is not missed.
        changed.as_mut().enable();
        let answer = shared.call(|worker, now| worker.handover(asked, to.clone(), now))?;
        if answer == HandoverAnswer::Granted {
            tracing::info!(session = %asked.session, to = to.peer, placement = asked.pending.n, "session handed over");
        }
        if answer != HandoverAnswer::Busy || tokio::time::Instant::now() >= until {
            return Ok(answer);
        }
        // At the end it is asked once more.
        let _ = tokio::time::timeout_at(until, changed).await;
    }
}

/// Asks the owner at `address`; with the answer goes the moment before the question was sent.
pub(super) async fn ask(
    shared: &Arc<Shared>,
    address: &str,
    request: &Handover,
    deadline: tokio::time::Instant,
) -> (Now, Result<HandoverAnswer, Refusal>) {
    let began = Instant::now();
    let mut fresh = false;
    let (asked, answer) = loop {
        // A later answer would not count, so nobody waits for it.
        let limit = || deadline.min(tokio::time::Instant::now() + shared.config.handover_deadline);
        let connected = shared
            .peers
            .connect(shared, address, request.incarnation, limit())
            .await;
        let asked = shared.now();
        let peer = match connected {
            Ok(peer) => peer,
            Err(why) => break (asked, Err(why)),
        };
        let answer = peer.handover(shared.peer_listen, request, limit()).await;
        let Err(why) = &answer else {
            break (asked, answer);
        };
        // A kept connection may have broken long ago: once more at once. The same question gets the same answer.
        if fresh || !matches!(why.code, Reason::PeerUnreachable | Reason::Unauthenticated) {
            break (asked, answer);
        }
        shared.peers.forget(address, &peer);
        fresh = true;
    };
    shared
        .metrics
        .handover_answered(answer.as_ref().map_err(|why| why.code), began.elapsed());
    (asked, answer)
}
