//! What the router shows of itself: `/healthz`, `/v1/workers`, `/v1/router/state`.

use hyper::{Response, StatusCode};
use kvc_proto::{
    id::{Incarnation, Placement, RouterId, SessionId},
    routing::{Health, MemoryStore, Router, WorkerIndex, session::Pending},
    wire::{admit::LoadReport, info::Role},
};
use serde::Serialize;

use crate::{answer, app::App, body::Answer};

/// One worker.
#[derive(Debug, Serialize)]
pub struct WorkerState {
    /// `host:port` of its engine.
    pub worker: String,
    /// `host:port` of its module's listener, empty while unknown.
    pub listen: String,
    /// `host:port` of its peer control plane, empty while unknown.
    pub peer: String,
    /// What it is for.
    pub role: Role,
    /// `unknown`, `up`, `draining` or `down`.
    pub health: &'static str,
    /// Its process.
    pub incarnation: Option<Incarnation>,
    /// Requests dispatched there and not finished.
    pub inflight: u32,
    /// Routing decisions for it so far.
    pub assigned: u64,
    /// Its last load report.
    pub load: LoadReport,
}

/// A move that is out (MIG-1).
#[derive(Debug, Serialize)]
pub struct PendingMove {
    /// The session.
    pub session: SessionId,
    /// Who is to own it: `host:port` of its engine.
    pub to: String,
    /// The number it is to own it under.
    pub placement: Placement,
    /// Milliseconds since it began.
    pub age_ms: u64,
    /// An answer of the target was lost: it is asked before another placement is made (MIG-2).
    pub lost: bool,
}

/// The router.
#[derive(Debug, Serialize)]
pub struct RouterState {
    /// Its random id.
    pub router: RouterId,
    /// Requests so far.
    pub requests: u64,
    /// Sessions remembered.
    pub sessions: usize,
    /// Of these, with a request under way.
    pub sessions_busy: usize,
    /// Forgotten for the bound so far.
    pub sessions_forgotten: u64,
    /// Most sessions remembered.
    pub max_sessions: usize,
    /// τ_reject.
    pub reject_threshold: u32,
    /// Whether a direct turn is asked for first.
    pub admit_direct: bool,
    /// Whether a backup is named in every question (SYNC-1).
    pub sync: bool,
    /// Moves that are out, at most [`PENDING_MAX`].
    pub pending_moves: Vec<PendingMove>,
    /// Sessions pinned to each worker, in the order of `workers`.
    pub pinned: Vec<u64>,
    /// The workers.
    pub workers: Vec<WorkerState>,
}

/// Most pending moves shown.
const PENDING_MAX: usize = 100;

#[derive(Serialize)]
struct HealthState {
    status: &'static str,
    workers_up: usize,
}

/// 200 once a worker takes turns, 503 while none does.
pub fn health(app: &App) -> Response<Answer> {
    let workers_up = app.router().view.decoders().count();
    let (status, text) = match workers_up {
        0 => (StatusCode::SERVICE_UNAVAILABLE, "no worker takes turns"),
        _ => (StatusCode::OK, "ok"),
    };
    answer::json(
        status,
        &HealthState {
            status: text,
            workers_up,
        },
    )
}

/// All workers, in order of the configuration.
pub fn workers(app: &App) -> Vec<WorkerState> {
    let router = app.router();
    let state = |w: WorkerIndex| {
        let worker = router.view.worker(w);
        WorkerState {
            worker: app.engine(w).to_string(),
            listen: app.module(w).text().to_string(),
            peer: worker.peer().to_owned(),
            role: worker.role(),
            health: Health::as_str(worker.health()),
            incarnation: worker.incarnation(),
            inflight: worker.inflight(),
            assigned: worker.assigned(),
            load: *worker.load(),
        }
    };
    router.view.all().map(state).collect()
}

/// The router's own numbers.
pub fn router(app: &App) -> RouterState {
    let workers = workers(app);
    let router = app.router();
    RouterState {
        router: router.id(),
        requests: router.requests(),
        sessions: router.sessions().len(),
        sessions_busy: router.sessions().busy(),
        sessions_forgotten: router.sessions().evicted(),
        max_sessions: router.config().max_sessions,
        reject_threshold: router.config().policy.reject_threshold,
        admit_direct: router.config().admit_direct,
        sync: router.config().sync,
        pending_moves: pending_moves(app, &router),
        pinned: router.sessions().pinned(&router.view),
        workers,
    }
}

fn pending_moves(app: &App, router: &Router<MemoryStore>) -> Vec<PendingMove> {
    let now = app.now();
    let shown = router.sessions().pending().take(PENDING_MAX);
    let state = |(session, pending): (&SessionId, &Pending)| PendingMove {
        session: session.clone(),
        to: app.engine(pending.target.worker).to_string(),
        placement: pending.placement,
        age_ms: u64::try_from(now.since(pending.since).as_millis()).unwrap_or(u64::MAX),
        lost: pending.lost.is_some(),
    };
    shown.map(state).collect()
}
