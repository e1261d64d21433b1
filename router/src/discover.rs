//! Keeps an eye on the workers: where their modules listen, whether they answer, which process answers (ROUTE-6, F16).
//! One task per worker, started by [`crate::serve`].

use std::{net::IpAddr, sync::Arc};

use kvc_proto::{
    routing::{Health, WorkerIndex},
    wire::info::{Role, WorkerInfo},
};

use crate::{
    app::{App, Lane},
    worker::{self, AskError},
};

/// Polls in a row that must fail before a worker counts as down: one lost poll is no reason to move sessions (F15).
const MISSES_MAX: u32 = 2;

/// Watches one worker for ever.
pub async fn watch(lane: Arc<Lane>, w: WorkerIndex) {
    let app = &lane.app;
    let configured = app.config.workers[usize::from(w.0)].listen.is_some();
    let mut misses = 0;
    let mut ticks = tokio::time::interval(app.config.timeouts.poll);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let pool = if configured { lane.module(w) } else { lane.engine(w) };
        match worker::info(pool, app.config.timeouts.admit).await {
            Ok(info) => {
                misses = 0;
                seen(app, w, &info, configured);
            }
            Err(error) => {
                misses += 1;
                missed(app, w, misses, &error);
            }
        }
    }
}

fn seen(app: &App, w: WorkerIndex, info: &WorkerInfo, configured: bool) {
    if !configured {
        app.module(w).set(&reachable(&info.listen, &app.engine(w)));
    }
    let mut info = info.clone();
    info.peer = reachable(&info.peer, &app.engine(w));
    let (before, after, restarted, role) = {
        let mut router = app.router();
        let worker = router.view.worker(w);
        let (before, process) = (worker.health(), worker.incarnation());
        router.view.seen(w, &info);
        let worker = router.view.worker(w);
        (
            before,
            worker.health(),
            process.is_some_and(|p| p != info.incarnation),
            worker.role(),
        )
    };
    let name = app.engine(w);
    if before != after {
        tracing::info!(worker = %name, health = after.as_str(), incarnation = %info.incarnation, "worker changed");
        if info.role != role && info.role != Role::Both {
            tracing::warn!(worker = %name, configured = ?role, worker_says = ?info.role, "roles differ");
        }
    }
    if restarted {
        tracing::info!(worker = %name, incarnation = %info.incarnation, "worker restarted");
    }
}

fn missed(app: &App, w: WorkerIndex, misses: u32, error: &AskError) {
    let health = app.router().view.worker(w).health();
    if misses >= MISSES_MAX && health != Health::Down {
        app.router().view.lost(w);
        tracing::warn!(worker = %app.engine(w), %error, "worker down");
    }
}

/// An address announced as "any" is reached at the engine's host.
fn reachable(announced: &str, engine: &str) -> String {
    let unspecified = announced.rsplit_once(':').filter(|(host, _)| {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified())
    });
    match (unspecified, engine.rsplit_once(':')) {
        (Some((_, port)), Some((host, _))) => format!("{host}:{port}"),
        _ => announced.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unspecified_address_is_reached_at_the_engines_host() {
        assert_eq!(reachable("0.0.0.0:7", "10.0.0.1:8"), "10.0.0.1:7");
        assert_eq!(reachable("[::]:7", "h:8"), "h:7");
        assert_eq!(reachable("10.0.0.2:7", "10.0.0.1:8"), "10.0.0.2:7");
    }
}
