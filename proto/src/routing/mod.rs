//! The router's decisions (algorithms §1, §2, §4; kv-movement §4, §5): its state Σ, one [`Dispatch`] per client request,
//! and one [`Move`] per session that goes to another worker while it lives.
//!
//! The HTTP front (`kvc-router`) holds one [`Router`] behind a short lock and drives each dispatch: it carries out what
//! [`Dispatch::poll_effect`] hands out and reports what came of it with [`Dispatch::handle`]. Moves are driven alike.

mod dispatch;
#[cfg(test)]
mod explore;
#[cfg(test)]
mod invariants;
pub mod leave;
mod moving;
pub mod reject;
pub mod resident;
pub mod score;
pub mod session;
pub mod target;
#[cfg(test)]
pub(crate) mod testing;
pub mod view;

use std::time::Duration;

pub use dispatch::{
    Dispatch, Effect, Event, ExecutionMode, Handover, OutOfTurn, Outcome, Prefill, Refused, Trace, Turn,
};
pub use moving::{CannotMove, Move, MoveEffect, MoveEvent, MoveOutOfTurn, MoveOutcome};
pub use resident::Resident;
pub use session::{MemoryStore, SessionStore};
pub use view::{Health, WorkerIndex};

use crate::{id::RouterId, policy::kvc::Kvc};
use session::Sessions;
use view::View;

/// The numbers of routing and dispatch (algorithms §7). A value that exists is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouterConfig {
    /// Algorithm 1.
    pub policy: Kvc,
    /// DISP-6: count every refusal, as printed in the paper.
    pub count_all_rejects: bool,
    /// DISP-7: a completed direct turn clears the session's rejects on every worker.
    pub reset_on_success: bool,
    /// Ask before a direct turn too (ADM-10). Off: a turn whose session the pinned worker is believed to hold, with
    /// at most `max_uncached_tokens` new tokens, goes there at once and is admitted on arrival.
    pub admit_direct: bool,
    /// τ_append in tokens, for `admit_direct` off only: the worker's own limit decides.
    pub max_uncached_tokens: u32,
    /// ROUTE-9: ask the workers about a session this router does not know.
    pub ask_unknown: bool,
    /// ROUTE-8: sessions remembered.
    pub max_sessions: usize,
    /// ADM-8: how long a turn waits for another of its session before the client gets 409.
    pub busy_wait: Duration,
    /// Executions that may fail before the client gets an error (DISP-8).
    pub max_executions: u32,
    /// How long an import may take before the decode worker computes the prompt itself (XFER-7).
    pub import_deadline: Duration,
    /// SYNC-1: name a backup in every admission question.
    pub sync: bool,
    /// MIG-2: how long the target of a move that does not answer is waited out, from the moment its answer was lost: the
    /// workers' hand-over deadline and a margin.
    pub handover_wait: Duration,
}

impl Default for RouterConfig {
    fn default() -> Self {
        RouterConfig {
            policy: Kvc {
                alpha: 1,
                reject_threshold: 3,
            },
            count_all_rejects: false,
            reset_on_success: true,
            admit_direct: true,
            max_uncached_tokens: 8192,
            ask_unknown: true,
            max_sessions: 100_000,
            busy_wait: Duration::from_secs(1),
            max_executions: 3,
            import_deadline: Duration::from_secs(60),
            sync: true,
            // The workers' default deadline is 2 s.
            handover_wait: Duration::from_secs(3),
        }
    }
}

impl RouterConfig {
    fn import_deadline_ms(&self) -> u32 {
        u32::try_from(self.import_deadline.as_millis()).unwrap_or(u32::MAX)
    }
}

/// Σ, the router's state.
#[derive(Clone, Debug)]
pub struct Router<S> {
    config: RouterConfig,
    id: RouterId,
    store: S,
    /// The workers. The router's pollers report here what they see.
    pub view: View,
    sessions: Sessions,
    requests: u64,
}

impl<S: SessionStore> Router<S> {
    /// A router of that (random) name.
    pub fn new(config: RouterConfig, id: RouterId, store: S, view: View) -> Router<S> {
        Router {
            sessions: Sessions::new(config.max_sessions),
            config,
            id,
            store,
            view,
            requests: 0,
        }
    }

    /// Its numbers.
    pub fn config(&self) -> &RouterConfig {
        &self.config
    }

    /// Its name.
    pub fn id(&self) -> RouterId {
        self.id
    }

    /// What it remembers of sessions.
    pub fn sessions(&self) -> &Sessions {
        &self.sessions
    }

    /// Client requests dispatched so far.
    pub fn requests(&self) -> u64 {
        self.requests
    }
}
