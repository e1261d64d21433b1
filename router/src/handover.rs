//! Brings a seed's or reseed's KV to its decode worker (DISP-3, SYNC-2), as [`crate::drive`] is told to.

use std::sync::Arc;

use bytes::BytesMut;
use kvc_proto::{
    routing::{Event, Handover, WorkerIndex},
    wire::turn::TurnTag,
};
use tokio::time::timeout;

use crate::{
    app::Lane,
    body,
    drive::{FIRST_EVENT_MAX, engine_request},
    refusal,
    request::ClientRequest,
    worker,
};

/// Carries out one hand-over: prefill and import side by side, or the import alone.
pub async fn hand_over(lane: &Arc<Lane>, request: &ClientRequest, handover: &Handover) -> Event {
    let session = &handover.session;
    let import = async {
        match worker::import(lane, handover.decode, session, &handover.import).await {
            Ok(_) => Event::Imported,
            Err(error) => Event::ImportFailed(error.reason()),
        }
    };
    let Some(side) = &handover.prefill else {
        return import.await;
    };
    if let Some(refresh) = &side.refresh {
        // SYNC-2: what it cannot get it computes; `import` has logged why.
        let _ = worker::import(lane, side.worker, session, refresh).await;
    }
    let within = lane.app.config.routing.import_deadline;
    let prefill = prefill(lane.clone(), request.clone(), side.worker, side.tag.clone());
    let mut prefill = Prefilling(Some(tokio::spawn(timeout(within, prefill))));
    tokio::pin!(import);
    let failed = tokio::select! {
        event = &mut import => {
            // What the prefill still has to say is of use to nobody, but it must end by itself: its KV is the replica.
            if event == Event::Imported {
                prefill.leave();
            }
            return event;
        }
        done = prefill.done() => done,
    };
    match failed {
        Ok(()) => import.await,
        Err(reason) => {
            tracing::info!(%session, worker = side.worker.0, %reason, "prefill failed");
            Event::PrefillFailed
        }
    }
}

type Prefilled = Result<Result<(), String>, tokio::time::error::Elapsed>;

/// A prefill request under way. Dropped, its connection is closed, which aborts it at the engine.
struct Prefilling(Option<tokio::task::JoinHandle<Prefilled>>);

impl Prefilling {
    async fn done(&mut self) -> Result<(), String> {
        let Some(task) = &mut self.0 else { return Ok(()) };
        let ended = task.await;
        self.0 = None;
        match ended {
            Ok(Ok(done)) => done,
            Ok(Err(_)) => Err("deadline exceeded".to_owned()),
            Err(e) => Err(e.to_string()),
        }
    }

    fn leave(&mut self) {
        self.0 = None;
    }
}

impl Drop for Prefilling {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
        }
    }
}

/// The prefill side: the same body, a tag that says "generate nothing", an answer nobody reads.
async fn prefill(lane: Arc<Lane>, request: ClientRequest, worker: WorkerIndex, tag: TurnTag) -> Result<(), String> {
    let within = lane.app.config.timeouts.first_token;
    let sent = lane
        .engine(worker)
        .send(|| engine_request(&lane, &request, worker, Some(&tag)), within)
        .await;
    let (response, exchange) = sent.map_err(|e| e.to_string())?;
    let status = response.status();
    let mut upstream = response.into_body();
    let mut opening = BytesMut::new();
    while let Some(data) = body::next(&mut upstream).await {
        let data = data.map_err(|e| e.to_string())?;
        let room = FIRST_EVENT_MAX.saturating_sub(opening.len());
        opening.extend_from_slice(&data[..data.len().min(room)]);
    }
    exchange.done();
    match refusal::typed(&opening) {
        _ if !status.is_success() => Err(format!("status {status}")),
        Some(reason) => Err(reason.as_str().to_owned()),
        None => Ok(()),
    }
}
