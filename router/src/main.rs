//! `kvc-router`: reads its configuration, serves, and stops on SIGTERM or SIGINT.

use anyhow::Context as _;
use clap::Parser as _;
use kvc_router::{
    config::{Config, Options},
    serve,
};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

fn main() {
    if let Err(error) = run() {
        eprintln!("kvc-router: {error:#}");
        std::process::exit(2);
    }
}

fn run() -> anyhow::Result<()> {
    let config = Config::load(Options::parse())?;
    log_to_stderr(&config)?;
    let signals = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let running = serve::start(config)?;
    signals.block_on(async {
        let mut term = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
        let mut int = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        anyhow::Ok(())
    })?;
    tracing::info!("stopping: no new connections, running requests end");
    running.stop();
    Ok(())
}

fn log_to_stderr(config: &Config) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&config.log)
        .with_context(|| format!("--log: {:?} is no filter; give a level as info or debug", config.log))?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    if config.log_json {
        log.json().init();
    } else {
        log.init();
    }
    Ok(())
}
