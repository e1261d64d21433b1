//! Moves the sessions of draining workers away (MIG-4): pages through what such a worker owns and moves it to the workers
//! with the most room, a few at a time, again and again while it drains. One task per router, started by [`crate::serve`].

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use kvc_proto::{
    id::SessionId,
    routing::{CannotMove, Health, MoveOutcome, Resident, WorkerIndex, target},
    wire::info::{SessionView, Standing},
};
use tokio::task::JoinSet;

use crate::{
    app::Lane,
    moves,
    worker::{self, AskError},
};

/// How often the view is looked at for workers that have begun to drain.
const LOOK: Duration = Duration::from_millis(100);
/// Between two passes over a worker that still owns sessions: turns end, room comes free.
const PAUSE: Duration = Duration::from_millis(200);
/// The same, while moves fail or nothing is left.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Watches for draining workers for ever.
pub async fn watch(lane: Arc<Lane>) {
    let mut tasks = JoinSet::new();
    let mut under_way = HashSet::new();
    loop {
        tokio::time::sleep(LOOK).await;
        while let Some(ended) = tasks.try_join_next() {
            match ended {
                Ok(w) => drop(under_way.remove(&w)),
                Err(error) => tracing::error!(%error, "a drain was not carried out"),
            }
        }
        let draining: Vec<WorkerIndex> = {
            let router = lane.app.router();
            let view = &router.view;
            view.all()
                .filter(|&w| view.worker(w).health() == Health::Draining)
                .collect()
        };
        for w in draining {
            if under_way.insert(w) {
                let lane = lane.clone();
                tasks.spawn(async move {
                    drain(&lane, w).await;
                    w
                });
            }
        }
    }
}

/// Empties one worker, until it no longer drains.
async fn drain(lane: &Arc<Lane>, w: WorkerIndex) {
    let name = lane.app.engine(w);
    tracing::info!(worker = %name, "worker drains: its sessions are moved");
    let (mut moved, mut empty, mut pause) = (0, false, PAUSE);
    // Targets that a session was refused by, until all were.
    let mut refused: HashMap<SessionId, Vec<WorkerIndex>> = HashMap::new();
    while lane.app.router().view.worker(w).health() == Health::Draining {
        match pass(lane, w, &mut refused).await {
            Ok(done) => {
                moved += done.moved;
                lane.app.metrics.draining(w, done.left(), done.moved);
                if done.found > 0 {
                    tracing::info!(worker = %name, owned = done.found, moved = done.moved, left = done.left(), total = moved, "drain");
                }
                if done.left() == 0 && !empty {
                    tracing::info!(worker = %name, moved, "worker drained: no session is left");
                }
                empty = done.left() == 0;
                pause = if done.moved > 0 {
                    PAUSE
                } else {
                    (pause * 2).min(PAUSE_MAX)
                };
            }
            Err(error) => {
                tracing::info!(worker = %name, %error, "a draining worker does not list its sessions");
                pause = PAUSE_MAX;
            }
        }
        tokio::time::sleep(pause).await;
    }
    lane.app.metrics.draining(w, 0, 0);
    tracing::info!(worker = %name, moved, "worker no longer drains");
}

/// What one pass over a worker's sessions came to.
#[derive(Debug, Default)]
struct Pass {
    found: usize,
    moved: u64,
}

impl Pass {
    fn left(&self) -> usize {
        self.found
            .saturating_sub(usize::try_from(self.moved).unwrap_or(usize::MAX))
    }
}

/// A session that was to be moved.
struct Tried {
    session: SessionId,
    target: WorkerIndex,
    tokens: u64,
    outcome: MoveOutcome,
}

async fn pass(
    lane: &Arc<Lane>,
    w: WorkerIndex,
    refused: &mut HashMap<SessionId, Vec<WorkerIndex>>,
) -> Result<Pass, AskError> {
    let mut done = Pass::default();
    let mut promised: HashMap<WorkerIndex, u64> = HashMap::new();
    let mut running: JoinSet<Tried> = JoinSet::new();
    let mut after = None;
    'pages: loop {
        let page = worker::sessions(lane, w, after.as_ref()).await?.sessions;
        let Some(last) = page.last() else { break };
        after = Some(last.session_id.clone());
        for view in page.iter().filter(|v| is_owned(v)) {
            done.found += 1;
            while running.len() >= lane.app.config.drain_moves {
                ended(&mut running, &mut done, &mut promised, refused).await;
            }
            if lane.app.router().view.worker(w).health() != Health::Draining {
                break 'pages;
            }
            let tokens = u64::from(view.committed);
            let failed = refused.entry(view.session_id.clone()).or_default();
            let on_its_way = |w: WorkerIndex| promised.get(&w).copied().unwrap_or(0);
            let target = {
                let router = lane.app.router();
                let target = target::most_free(&router.view, w, failed, on_its_way);
                if target.is_none() {
                    failed.clear();
                }
                target
            };
            let Some(target) = target else { continue };
            match moves::start(lane, view.session_id.clone(), &[Resident::of(w, view)], target) {
                Ok(mv) => {
                    *promised.entry(target).or_default() += tokens;
                    let (lane, session) = (lane.clone(), view.session_id.clone());
                    running.spawn(async move {
                        let outcome = moves::carry(&lane, mv).await;
                        Tried {
                            session,
                            target,
                            tokens,
                            outcome,
                        }
                    });
                }
                // SES-4: it was placed elsewhere since, and this worker has not heard of it: nothing to hand over.
                Err(CannotMove::Superseded { .. }) => {
                    if worker::drop_copy(lane, w, &view.session_id).await.is_ok() {
                        done.moved += 1;
                    }
                }
                Err(_) => {}
            }
        }
    }
    while !running.is_empty() {
        ended(&mut running, &mut done, &mut promised, refused).await;
    }
    refused.retain(|_, targets| !targets.is_empty());
    Ok(done)
}

/// Waits for one move.
async fn ended(
    running: &mut JoinSet<Tried>,
    done: &mut Pass,
    promised: &mut HashMap<WorkerIndex, u64>,
    refused: &mut HashMap<SessionId, Vec<WorkerIndex>>,
) {
    match running.join_next().await {
        Some(Ok(tried)) => match tried.outcome {
            // What has arrived stays promised for this pass: the target's next load report may be older.
            MoveOutcome::Moved { .. } => done.moved += 1,
            MoveOutcome::Stayed(_) | MoveOutcome::Unknown(_) => {
                let promise = promised.entry(tried.target).or_default();
                *promise = promise.saturating_sub(tried.tokens);
                refused.entry(tried.session).or_default().push(tried.target);
            }
        },
        Some(Err(error)) => tracing::error!(%error, "a move was not carried out"),
        None => {}
    }
}

/// A session that is to be handed over: placed by a router, owned here, with KV.
fn is_owned(view: &SessionView) -> bool {
    view.standing == Standing::Owner && view.committed > 0 && view.epoch.is_some()
}
