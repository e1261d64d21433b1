//! The router's metrics, each name written once (DISP-9). Counted by [`crate::drive`], read by `GET /metrics`.

use std::{sync::atomic::AtomicU64, time::Duration};

use kvc_proto::{
    routing::{ExecutionMode, MoveOutcome, Outcome, Router, SessionStore, Trace, WorkerIndex},
    wire::reason::Reason,
};
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::{config::WorkerConfig, drive::source_name};

/// Everything that is counted.
pub struct Metrics {
    registry: Registry,
    names: Vec<String>,
    requests: Family<Request, Counter>,
    reasons: Family<Because, Counter>,
    probes: Counter,
    imported_bytes: Counter,
    reseeds: Family<From, Counter>,
    moves: Family<Ended, Counter>,
    move_seconds: Histogram,
    arbitrations: Counter,
    drain_left: Family<OfWorker, Gauge>,
    drain_moved: Family<OfWorker, Counter>,
    first_byte: Histogram,
    duration: Histogram,
    inflight: Family<OfWorker, Gauge>,
    assigned: Family<OfWorker, Gauge<i64, std::sync::atomic::AtomicI64>>,
    up: Family<OfWorker, Gauge>,
    sessions: Gauge,
    sessions_evicted: Gauge<u64, AtomicU64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    mode: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Because {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct From {
    source: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfWorker {
    worker: String,
}

/// Seconds.
const BUCKETS: [f64; 14] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0,
];

impl Metrics {
    /// All at zero.
    pub fn new(workers: &[WorkerConfig]) -> Metrics {
        let mut registry = Registry::with_prefix("kvc_router");
        let requests = Family::default();
        registry.register("requests", "Requests by execution mode and outcome", requests.clone());
        let reasons = Family::default();
        registry.register(
            "reasons",
            "Refusals and failures on the way, by reason",
            reasons.clone(),
        );
        let probes = Counter::default();
        registry.register("probes", "Admission questions asked", probes.clone());
        let imported_bytes = Counter::default();
        registry.register(
            "imported_bytes",
            "KV bytes moved by imports this router asked for",
            imported_bytes.clone(),
        );
        let reseeds = Family::default();
        registry.register(
            "reseeds",
            "Reseeded turns by the source of their KV; none: computed where they ran",
            reseeds.clone(),
        );
        let moves = Family::default();
        registry.register(
            "moves",
            "Moves of sessions to another worker, by outcome",
            moves.clone(),
        );
        let move_seconds = Histogram::new(BUCKETS);
        registry.register(
            "move_seconds",
            "Begin to end of a move that succeeded",
            move_seconds.clone(),
        );
        let arbitrations = Counter::default();
        registry.register(
            "arbitrations",
            "Targets asked what became of a move",
            arbitrations.clone(),
        );
        let drain_left = Family::default();
        registry.register(
            "drain_sessions_left",
            "Sessions that a draining worker still owned when it was last asked",
            drain_left.clone(),
        );
        let drain_moved = Family::default();
        registry.register(
            "drain_sessions_moved",
            "Sessions moved away from a draining worker",
            drain_moved.clone(),
        );
        let first_byte = Histogram::new(BUCKETS);
        registry.register(
            "first_byte_seconds",
            "Arrival to first byte of the answer",
            first_byte.clone(),
        );
        let duration = Histogram::new(BUCKETS);
        registry.register("duration_seconds", "Arrival to end of the answer", duration.clone());
        let inflight = Family::default();
        registry.register("inflight", "Requests dispatched and not finished", inflight.clone());
        let assigned = Family::default();
        registry.register("assigned", "Routing decisions so far", assigned.clone());
        let up = Family::default();
        registry.register("worker_up", "1 if the worker takes work", up.clone());
        let sessions = Gauge::default();
        registry.register("sessions", "Sessions remembered", sessions.clone());
        let sessions_evicted = Gauge::default();
        registry.register(
            "sessions_forgotten",
            "Sessions forgotten for the bound so far",
            sessions_evicted.clone(),
        );
        Metrics {
            names: workers.iter().map(|w| w.engine.clone()).collect(),
            registry,
            requests,
            reasons,
            probes,
            imported_bytes,
            reseeds,
            moves,
            move_seconds,
            arbitrations,
            drain_left,
            drain_moved,
            first_byte,
            duration,
            inflight,
            assigned,
            up,
            sessions,
            sessions_evicted,
        }
    }

    /// A dispatch has ended.
    pub fn ended(&self, trace: &Trace, outcome: Outcome) {
        let request = Request {
            mode: trace.mode.map_or("none", |m| m.as_str()),
            outcome: outcome_name(outcome),
        };
        self.requests.get_or_create(&request).inc();
        self.probes.inc_by(u64::from(trace.probes));
        for reason in &trace.chain {
            self.reasons.get_or_create(&because(*reason)).inc();
        }
        if trace.mode == Some(ExecutionMode::Reseed) {
            let source = trace.source.map_or("none", source_name);
            self.reseeds.get_or_create(&From { source }).inc();
        }
        if let Some(first) = trace.first_byte {
            self.first_byte.observe(first.since(trace.started).as_secs_f64());
        }
        if let Some(ended) = trace.ended {
            self.duration.observe(ended.since(trace.started).as_secs_f64());
        }
    }

    /// An import has committed.
    pub fn imported(&self, bytes: u64) {
        self.imported_bytes.inc_by(bytes);
    }

    /// A move is over.
    pub fn moved(&self, outcome: MoveOutcome, took: Duration) {
        self.moves
            .get_or_create(&Ended {
                outcome: outcome.as_str(),
            })
            .inc();
        if let MoveOutcome::Moved { .. } = outcome {
            self.move_seconds.observe(took.as_secs_f64());
        }
    }

    /// A move did not begin.
    pub fn move_refused(&self) {
        self.moves.get_or_create(&Ended { outcome: "refused" }).inc();
    }

    /// The target of a move was asked what became of it (MIG-2).
    pub fn arbitrated(&self) {
        self.arbitrations.inc();
    }

    /// What a draining worker still owns, and how many sessions were moved away since the last call.
    pub fn draining(&self, w: WorkerIndex, left: usize, moved: u64) {
        let of = self.of(w);
        self.drain_left
            .get_or_create(&of)
            .set(i64::try_from(left).unwrap_or(i64::MAX));
        self.drain_moved.get_or_create(&of).inc_by(moved);
    }

    /// As Prometheus reads it.
    pub fn text<S: SessionStore>(&self, router: &Router<S>) -> String {
        for w in router.view.all() {
            let (worker, of) = (router.view.worker(w), self.of(w));
            self.inflight.get_or_create(&of).set(i64::from(worker.inflight()));
            self.assigned
                .get_or_create(&of)
                .set(i64::try_from(worker.assigned()).unwrap_or(i64::MAX));
            self.up
                .get_or_create(&of)
                .set(i64::from(worker.health() == kvc_proto::routing::Health::Up));
        }
        self.sessions
            .set(i64::try_from(router.sessions().len()).unwrap_or(i64::MAX));
        self.sessions_evicted.set(router.sessions().evicted());
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }

    fn of(&self, w: WorkerIndex) -> OfWorker {
        OfWorker {
            worker: self.names[usize::from(w.0)].clone(),
        }
    }
}

/// As metrics and logs write it.
pub fn outcome_name(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Completed => "completed",
        Outcome::Passed => "passed",
        Outcome::Refused(_) => "refused",
        Outcome::Broken(_) => "broken",
        Outcome::Gone => "gone",
    }
}

fn because(reason: Reason) -> Because {
    Because {
        reason: reason.as_str(),
    }
}
