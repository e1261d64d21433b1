//! The router over real sockets: stub workers that answer, refuse, stall and die as told, and clients that behave or not.

mod client;
mod faults;
mod input;
mod moves;
mod reseeds;
mod stub;
mod turns;

use std::time::Duration;

use clap::Parser as _;
use kvc_proto::{routing::Health, wire::info::Role};
use kvc_router::{
    config::{Config, Options},
    serve::{self, Running},
};
use stub::Stub;

/// A router and its workers.
struct World {
    router: Option<Running>,
    workers: Vec<Stub>,
}

impl World {
    /// Starts stubs of these roles and a router in front, and waits until it has heard of all of them.
    async fn start(roles: &[Role], flags: &[&str]) -> World {
        let mut workers = Vec::new();
        for (i, role) in roles.iter().enumerate() {
            workers.push(Stub::start(*role, i as u64 + 1).await);
        }
        let mut args: Vec<String> = [
            "kvc-router",
            "--listen",
            "127.0.0.1:0",
            "--threads",
            "1",
            "--poll-interval-ms",
            "50",
        ]
        .map(str::to_owned)
        .into();
        for w in &workers {
            let role = match w.role {
                Role::Prefill => "prefill",
                Role::Decode => "decode",
                Role::Both => "both",
            };
            args.extend(["--worker".to_owned(), format!("role={role},url=http://{}", w.address)]);
        }
        args.extend(flags.iter().map(|s| s.to_string()));
        let config = Config::load(Options::try_parse_from(args).expect("flags")).expect("valid");
        let router = serve::start(config).expect("starts");
        let world = World {
            router: Some(router),
            workers,
        };
        let all_up = |w: &World| {
            let router = w.router().app().router();
            router.view.all().all(|i| router.view.worker(i).health() == Health::Up)
        };
        eventually("all workers are up", || all_up(&world)).await;
        world
    }

    fn router(&self) -> &Running {
        self.router.as_ref().expect("it runs")
    }

    fn address(&self) -> std::net::SocketAddr {
        self.router().address()
    }

    fn inflight(&self) -> u32 {
        let router = self.router().app().router();
        router.view.all().map(|w| router.view.worker(w).inflight()).sum()
    }

    /// Nothing is charged, nothing is busy.
    async fn is_quiet(&self) {
        eventually("nothing is in flight", || self.inflight() == 0).await;
        eventually("no session is busy", || {
            self.router().app().router().sessions().busy() == 0
        })
        .await;
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // The serving threads are left to the process's end: a test must not wait for a drain.
        if let Some(running) = self.router.take() {
            std::thread::spawn(move || running.stop());
        }
    }
}

/// Waits, up to ten seconds, for something that happens on another thread.
async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..2_000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never: {what}");
}
