//! Moves the sessions of draining workers away (MIG-4): pages through what such a worker owns and moves it to the workers
//! with the most room, a few at a time, again and again while it drains. One task per router, started by [`crate::serve`].

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use kvc_proto::{
    id::{Placement, SessionId},
    routing::{
        CannotMove, Health, Move, MoveOutcome, WorkerIndex,
        leave::{Leave, leave},
        target,
    },
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

/// So many times more moves of sessions whose turn runs: they mostly wait.
const BUSY_MOVES: usize = 4;

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
    let mut refused = Refused::new();
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

/// Targets that a session was refused by, until all were.
type Refused = HashMap<SessionId, Vec<WorkerIndex>>;

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

async fn pass(lane: &Arc<Lane>, w: WorkerIndex, refused: &mut Refused) -> Result<Pass, AskError> {
    let mut pass = Passing {
        lane,
        w,
        refused,
        done: Pass::default(),
        promised: HashMap::new(),
        running: JoinSet::new(),
    };
    let bound = lane.app.config.drain_moves;
    // A busy session is handed over when its turn ends; meanwhile its move must not hold others up.
    let mut busy = Vec::new();
    let mut after = None;
    loop {
        let page = worker::sessions(lane, w, after.as_ref()).await?.sessions;
        let Some(last) = page.last() else { break };
        after = Some(last.session_id.clone());
        for view in page.into_iter().filter(is_owned) {
            pass.done.found += 1;
            if is_busy(&view) {
                busy.push(view);
            } else {
                pass.begin(&view, bound).await;
            }
        }
    }
    for view in &busy {
        pass.begin(view, bound.saturating_mul(BUSY_MOVES)).await;
    }
    while !pass.running.is_empty() {
        pass.ended().await;
    }
    let done = pass.done;
    refused.retain(|_, targets| !targets.is_empty());
    Ok(done)
}

/// A pass under way.
struct Passing<'a> {
    lane: &'a Arc<Lane>,
    w: WorkerIndex,
    refused: &'a mut Refused,
    done: Pass,
    /// Tokens on their way to each worker, which its load report need not show yet.
    promised: HashMap<WorkerIndex, u64>,
    running: JoinSet<Tried>,
}

impl Passing<'_> {
    /// Begins to move one session, as soon as fewer than `bound` moves run.
    async fn begin(&mut self, view: &SessionView, bound: usize) {
        while self.running.len() >= bound {
            self.ended().await;
        }
        let lane = self.lane;
        let workers: Vec<WorkerIndex> = lane.app.router().view.answering().collect();
        let found = worker::held(lane, &view.session_id, &workers, lane.app.config.timeouts.admit).await;
        let (owner, heard) = match leave(&found, self.w) {
            Leave::Move { owner, heard } => (owner, heard),
            Leave::Tell(placement) => return self.tell(view, placement),
            Leave::Nothing => return,
        };
        let Some(target) = self.target(&view.session_id) else {
            return;
        };
        let now = lane.app.now();
        let started = Move::from(
            &mut lane.app.router(),
            view.session_id.clone(),
            owner,
            heard,
            target,
            now,
        );
        match moves::noted(lane, &view.session_id, target, started) {
            Err(CannotMove::Superseded { known }) => self.tell(view, known),
            // A later pass comes.
            Err(_) => {}
            Ok(mv) => {
                let (session, tokens) = (view.session_id.clone(), u64::from(view.committed));
                *self.promised.entry(target).or_default() += tokens;
                let lane = lane.clone();
                self.running.spawn(async move {
                    let outcome = moves::carry(&lane, mv).await;
                    Tried {
                        session,
                        target,
                        tokens,
                        outcome,
                    }
                });
            }
        }
    }

    /// SES-4: it lives elsewhere since, and this worker has not heard of it.
    fn tell(&mut self, view: &SessionView, placement: Placement) {
        worker::placed(self.lane, self.w, view.session_id.clone(), placement);
        self.done.moved += 1;
    }

    /// By capacity, not who has refused it; after all have, each may be asked again in the next pass.
    fn target(&mut self, session: &SessionId) -> Option<WorkerIndex> {
        let router = self.lane.app.router();
        if router.view.worker(self.w).health() != Health::Draining {
            return None;
        }
        let failed = self.refused.entry(session.clone()).or_default();
        let on_its_way = |w: WorkerIndex| self.promised.get(&w).copied().unwrap_or(0);
        let target = target::most_free(&router.view, self.w, failed, on_its_way);
        if target.is_none() {
            failed.clear();
        }
        target
    }

    /// Waits for one move.
    async fn ended(&mut self) {
        match self.running.join_next().await {
            Some(Ok(tried)) => match tried.outcome {
                // What has arrived stays promised for this pass: the target's next load report may be older.
                MoveOutcome::Moved { .. } => self.done.moved += 1,
                MoveOutcome::Stayed(_) | MoveOutcome::Unknown(_) => {
                    let promise = self.promised.entry(tried.target).or_default();
                    *promise = promise.saturating_sub(tried.tokens);
                    self.refused.entry(tried.session).or_default().push(tried.target);
                }
            },
            Some(Err(error)) => tracing::error!(%error, "a move was not carried out"),
            None => {}
        }
    }
}

/// A session that is to be handed over: placed by a router, owned here, with KV.
fn is_owned(view: &SessionView) -> bool {
    view.standing == Standing::Owner && view.committed > 0 && view.epoch.is_some()
}

/// A turn is admitted or runs.
fn is_busy(view: &SessionView) -> bool {
    matches!(view.state.as_str(), "admitted" | "running")
}
