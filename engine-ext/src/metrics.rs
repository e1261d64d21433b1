//! Every metric's name, once, and the page that `GET /metrics` shows. Totals are the machine's own counters, copied under
//! its lock at a scrape; times are observed where they pass.

use std::{fmt, time::Duration};

use kvc_proto::{
    wire::{
        admit::{LoadReport, Mode},
        reason::Reason,
    },
    worker::{Counters, HandoverAnswer, LeaseKind},
};
use kvc_rdma::MoverKind;
use prometheus_client::{
    collector::Collector,
    encoding::{
        DescriptorEncoder, EncodeMetric,
        text::{encode_eof, encode_registry},
    },
    metrics::{
        MetricType,
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::ConstGauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};

/// All names begin with it.
const PREFIX: &str = "kvc";

/// What is observed as it passes.
pub(crate) struct Metrics {
    registry: Registry,
    admission: Histogram,
    lock_wait: Histogram,
    import_seconds: Histogram,
    import_bytes: Histogram,
    import_failures: Family<Labels, Counter>,
    moved_bytes: Family<Labels, Counter>,
    announcements: Family<Labels, Counter>,
    handovers: Family<Labels, Counter>,
    handover_seconds: Histogram,
    mover_bytes: Family<Labels, Counter>,
    mover_fallbacks: Family<Labels, Counter>,
}

type Labels = Vec<(&'static str, &'static str)>;

/// What became of an announcement (SYNC-1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Announced {
    /// The backup has it.
    Sent,
    /// The backup refuses.
    Refused,
    /// The backup does not answer.
    Failed,
    /// Too many waited.
    Dropped,
}

/// The machine at one moment.
#[derive(Debug)]
pub(crate) struct Scrape {
    pub(crate) counters: Counters,
    pub(crate) load: LoadReport,
    pub(crate) held: u32,
    pub(crate) evictable: u32,
    pub(crate) sessions: u64,
    pub(crate) imports: usize,
    pub(crate) leases: usize,
    /// Sessions whose announced turns are not pulled yet, and their missing tokens (SYNC-1).
    pub(crate) sync_lag: (u64, u64),
    pub(crate) draining: bool,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        let admission = Histogram::new(exponential_buckets(1e-6, 2.0, 16));
        let lock_wait = Histogram::new(exponential_buckets(1e-6, 4.0, 10));
        let import_seconds = Histogram::new(exponential_buckets(1e-3, 2.0, 18));
        let import_bytes = Histogram::new(exponential_buckets(4096.0, 4.0, 14));
        let import_failures = Family::default();
        let (moved_bytes, announcements, handovers) = (Family::default(), Family::default(), Family::default());
        let handover_seconds = Histogram::new(exponential_buckets(2.5e-4, 2.0, 14));
        let (mover_bytes, mover_fallbacks) = (Family::default(), Family::default());
        registry.register_with_unit(
            "admission",
            "Time from a question's last byte to its answer",
            Unit::Seconds,
            admission.clone(),
        );
        registry.register_with_unit(
            "lock_wait",
            "Contended waits for the worker's lock",
            Unit::Seconds,
            lock_wait.clone(),
        );
        registry.register_with_unit(
            "import",
            "Imports from request to outcome",
            Unit::Seconds,
            import_seconds.clone(),
        );
        registry.register_with_unit(
            "import",
            "KV bytes moved by an import",
            Unit::Bytes,
            import_bytes.clone(),
        );
        registry.register(
            "import_failures",
            "Imports that did not commit, by reason",
            import_failures.clone(),
        );
        registry.register_with_unit(
            "moved",
            "KV that came from peers, by what it was for, committed or not",
            Unit::Bytes,
            moved_bytes.clone(),
        );
        registry.register(
            "announcements",
            "Committed turns told to backups, by outcome",
            announcements.clone(),
        );
        registry.register(
            "handovers",
            "Questions for ownership asked of peers, by answer",
            handovers.clone(),
        );
        registry.register_with_unit(
            "handover",
            "From a question for ownership to its answer",
            Unit::Seconds,
            handover_seconds.clone(),
        );
        registry.register_with_unit(
            "mover",
            "KV that came from peers, by the mover that brought it",
            Unit::Bytes,
            mover_bytes.clone(),
        );
        registry.register(
            "mover_fallbacks",
            "Times that a mover failed with a peer and another one took over",
            mover_fallbacks.clone(),
        );
        Self {
            registry,
            admission,
            lock_wait,
            import_seconds,
            import_bytes,
            import_failures,
            moved_bytes,
            announcements,
            handovers,
            handover_seconds,
            mover_bytes,
            mover_fallbacks,
        }
    }

    pub(crate) fn admission_took(&self, took: Duration) {
        self.admission.observe(took.as_secs_f64());
    }

    pub(crate) fn lock_waited(&self, waited: Duration) {
        self.lock_wait.observe(waited.as_secs_f64());
    }

    pub(crate) fn import_done(&self, kind: LeaseKind, failure: Option<Reason>, bytes: u64, took: Duration) {
        self.import_seconds.observe(took.as_secs_f64());
        self.import_bytes.observe(bytes as f64);
        self.moved_bytes
            .get_or_create(&vec![("kind", kind_name(kind))])
            .inc_by(bytes);
        if let Some(reason) = failure {
            self.import_failures
                .get_or_create(&vec![("reason", reason.as_str())])
                .inc();
        }
    }

    pub(crate) fn moved_over(&self, mover: MoverKind, bytes: u64) {
        self.mover_bytes
            .get_or_create(&vec![("mover", mover.as_str())])
            .inc_by(bytes);
    }

    pub(crate) fn fell_back(&self, from: MoverKind, to: MoverKind) {
        self.mover_fallbacks
            .get_or_create(&vec![("from", from.as_str()), ("to", to.as_str())])
            .inc();
    }

    pub(crate) fn announced(&self, outcome: Announced, count: u64) {
        let outcome = match outcome {
            Announced::Sent => "sent",
            Announced::Refused => "refused",
            Announced::Failed => "failed",
            Announced::Dropped => "dropped",
        };
        self.announcements
            .get_or_create(&vec![("outcome", outcome)])
            .inc_by(count);
    }

    pub(crate) fn handover_answered(&self, answer: Result<&HandoverAnswer, Reason>, took: Duration) {
        self.handover_seconds.observe(took.as_secs_f64());
        let answer = match answer {
            Ok(HandoverAnswer::Granted) => "granted",
            Ok(HandoverAnswer::Behind) => "behind",
            Ok(HandoverAnswer::Busy) => "busy",
            Err(Reason::PeerUnreachable | Reason::DeadlineExceeded) => "lost",
            Err(_) => "refused",
        };
        self.handovers.get_or_create(&vec![("answer", answer)]).inc();
    }

    /// The page, in OpenMetrics text.
    pub(crate) fn page(&self, scrape: Scrape) -> Result<String, fmt::Error> {
        let mut text = String::with_capacity(8192);
        let mut moment = Registry::with_prefix(PREFIX);
        moment.register_collector(Box::new(scrape));
        encode_registry(&mut text, &self.registry)?;
        encode_registry(&mut text, &moment)?;
        encode_eof(&mut text)?;
        Ok(text)
    }
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let c = &self.counters;
        let modes = [("direct", Mode::Direct), ("seed", Mode::Seed), ("reseed", Mode::Reseed)];
        labelled(
            &mut encoder,
            "admissions",
            "Grants of admission",
            "mode",
            modes.into_iter().map(|(name, mode)| (name, c.admissions(mode))),
        )?;
        labelled(
            &mut encoder,
            "refusals",
            "Refused admissions, turns, leases and imports",
            "reason",
            Reason::ALL.iter().map(|reason| (reason.as_str(), c.refusals(*reason))),
        )?;
        let kinds = ["seed", "reseed", "sync", "move"];
        labelled(
            &mut encoder,
            "imports_by",
            "Imports that committed, by what they were for; each round of a move counts",
            "kind",
            kinds.into_iter().zip(c.committed_by),
        )?;
        labelled(
            &mut encoder,
            "imported_tokens_by",
            "Tokens pulled by committed imports, by what they were for",
            "kind",
            kinds.into_iter().zip(c.imported_by),
        )?;
        let totals: &[(&str, &str, u64)] = &[
            ("turns", "Turns that reached the scheduler", c.turns),
            (
                "turns_afresh",
                "Turns that arrived without a live reservation",
                c.afresh,
            ),
            (
                "estimates_wrong",
                "Turns whose need differed from what was reserved",
                c.estimates_wrong,
            ),
            ("commits", "Turns that ended with a result", c.commits),
            ("prompt_tokens", "Prompt tokens of begun turns", c.prompt_tokens),
            (
                "restored_tokens",
                "Prompt tokens restored from the session",
                c.restored_tokens,
            ),
            ("rewinds", "Histories that were cut", c.rewinds),
            (
                "retracts",
                "Turns that the engine took its memory back from",
                c.retracts,
            ),
            ("aborts", "Begun turns without a result", c.aborts),
            ("cancels", "Turns that left the queue before they began", c.cancels),
            ("evictions", "Idle sessions that gave up their KV", c.evictions),
            ("evicted_tokens", "Tokens freed by evictions", c.evicted_tokens),
            ("unwedged", "Waiting turns whose own copy was dropped", c.unwedged),
            ("over_cap", "Copies cut to the session cap", c.over_cap),
            ("reservations_lapsed", "Reservations without a sign of life", c.lapses),
            ("imports", "Imports asked for", c.imports),
            ("imports_committed", "Imports that committed", c.imports_committed),
            (
                "imported_tokens",
                "Tokens pulled by committed imports",
                c.imported_tokens,
            ),
            ("syncs", "Pulls of replicas begun", c.syncs),
            ("syncs_failed", "Pulls of replicas that failed", c.syncs_failed),
            ("syncs_dropped", "Announcements given up", c.syncs_dropped),
            (
                "announcements_taken",
                "Announcements of owners taken in",
                c.announcements,
            ),
            ("handed_over", "Sessions handed over to a target", c.handed_over),
            ("taken_over", "Sessions taken over from an owner", c.taken_over),
            (
                "handovers_behind",
                "Targets told that they are behind",
                c.handovers_behind,
            ),
            (
                "handovers_busy",
                "Targets told that the session is busy",
                c.handovers_busy,
            ),
            (
                "handover_answers_too_old",
                "Hand-over answers discarded for their age",
                c.answers_too_old,
            ),
            ("withdrawn", "Moves withdrawn for a router", c.withdrawn),
            (
                "superseded_turns",
                "Turns aborted because their session was granted elsewhere",
                c.superseded_turns,
            ),
            ("lost", "Sessions found to be owned elsewhere", c.lost),
            ("leases", "Leases granted to peers", c.leases),
            ("leases_revoked", "Leases ended by force", c.revocations),
            ("leases_expired", "Leases that nobody renewed", c.leases_expired),
            ("flushes", "Flushes of the engine", c.flushes),
        ];
        for (name, help, value) in totals {
            let counter = ConstCounter::new(*value);
            counter.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)?;
        }
        let gauges: &[(&str, &str, u64)] = &[
            ("used_tokens", "The ledger's used tokens", self.load.used),
            ("capacity_tokens", "Tokens of the engine's pool", self.load.capacity),
            (
                "held_tokens",
                "Landing, retired and quarantined pages in tokens",
                self.held.into(),
            ),
            (
                "evictable_tokens",
                "Tokens that idle sessions would give up",
                self.evictable.into(),
            ),
            (
                "running_requests",
                "Running requests of the engine",
                self.load.running.into(),
            ),
            (
                "waiting_requests",
                "Waiting requests of the engine",
                self.load.waiting.into(),
            ),
            (
                "pending_prefill_tokens",
                "Prompt tokens that wait",
                self.load.pending_prefill_tokens,
            ),
            ("sessions", "Sessions known", self.sessions),
            ("imports_running", "Running imports", self.imports as u64),
            ("leases_live", "Live leases", self.leases as u64),
            (
                "sync_pending",
                "Sessions whose announced turns are not pulled yet",
                self.sync_lag.0,
            ),
            (
                "sync_lag_tokens",
                "Tokens announced and not pulled yet",
                self.sync_lag.1,
            ),
            ("draining", "1 while the worker refuses new turns", self.draining.into()),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(i64::try_from(*value).unwrap_or(i64::MAX));
            gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        Ok(())
    }
}

/// As `/kvc/v1/transfers` writes it.
fn kind_name(kind: LeaseKind) -> &'static str {
    match kind {
        LeaseKind::Follow => "seed",
        LeaseKind::Replica => "reseed",
        LeaseKind::Sync => "sync",
        LeaseKind::Prepare => "move",
    }
}

fn labelled(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &str,
    values: impl Iterator<Item = (&'static str, u64)>,
) -> Result<(), fmt::Error> {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (value, count) in values {
        let labels = [(label, value)];
        ConstCounter::new(count).encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_every_mode_and_reason() {
        let metrics = Metrics::new();
        metrics.admission_took(Duration::from_micros(30));
        metrics.import_done(
            LeaseKind::Sync,
            Some(Reason::LeaseRevoked),
            4096,
            Duration::from_millis(3),
        );
        metrics.announced(Announced::Failed, 2);
        metrics.handover_answered(Err(Reason::PeerUnreachable), Duration::from_millis(3));
        metrics.moved_over(MoverKind::Shm, 8192);
        metrics.fell_back(MoverKind::Shm, MoverKind::Tcp);
        let page = metrics
            .page(Scrape {
                counters: Counters::default(),
                load: LoadReport::default(),
                held: 3,
                evictable: 5,
                sessions: 1,
                imports: 0,
                leases: 0,
                sync_lag: (2, 700),
                draining: true,
            })
            .unwrap();
        for part in [
            "kvc_admissions_total{mode=\"direct\"} 0",
            "kvc_refusals_total{reason=\"session-busy\"} 0",
            "kvc_leases_revoked_total 0",
            "kvc_held_tokens 3",
            "kvc_moved_bytes_total{kind=\"sync\"} 4096",
            "kvc_announcements_total{outcome=\"failed\"} 2",
            "kvc_handovers_total{answer=\"lost\"} 1",
            "kvc_handover_seconds_count 1",
            "kvc_mover_bytes_total{mover=\"shm\"} 8192",
            "kvc_mover_fallbacks_total{from=\"shm\",to=\"tcp\"} 1",
            "kvc_imports_by_total{kind=\"move\"} 0",
            "kvc_sync_pending 2",
            "kvc_sync_lag_tokens 700",
            "kvc_draining 1",
            "kvc_admission_seconds_count 1",
            "kvc_import_failures_total{reason=\"lease-revoked\"} 1",
            "# EOF",
        ] {
            assert!(page.contains(part), "{part} not in\n{page}");
        }
    }
}
