//! The router's life: listen, serve on each thread with a runtime of its own, stop gracefully. Called by `main` and by
//! tests.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Builder,
    sync::{OwnedSemaphorePermit, Semaphore, watch},
};

use crate::{
    app::{App, Lane, NoRandom},
    config::Config,
    discover, drain, front,
};

/// Why the router does not start or run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address is taken or not ours.
    #[error("cannot listen on {address}: {error}; free the port or give another --listen")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// A thread or its runtime could not be made.
    #[error("cannot start a serving thread: {0}")]
    Thread(io::Error),
    /// See there.
    #[error(transparent)]
    NoRandom(#[from] NoRandom),
}

/// A router that serves.
pub struct Running {
    address: SocketAddr,
    app: Arc<App>,
    stop: watch::Sender<bool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

/// Starts to serve.
pub fn start(config: Config) -> Result<Running, ServeError> {
    let address = config.listen;
    let listen = |error| ServeError::Listen { address, error };
    let socket = std::net::TcpListener::bind(address).map_err(listen)?;
    socket.set_nonblocking(true).map_err(listen)?;
    let address = socket.local_addr().map_err(listen)?;
    let app = App::new(config)?;
    let (stop, stopping) = watch::channel(false);
    let places = Arc::new(Semaphore::new(app.config.max_connections));
    let mut threads = Vec::new();
    for index in 0..app.config.threads {
        let socket = socket.try_clone().map_err(listen)?;
        let (app, stopping, places) = (app.clone(), stopping.clone(), places.clone());
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(ServeError::Thread)?;
        let thread = std::thread::Builder::new().name(format!("kvc-router-{index}"));
        let body = move || {
            let deadline = app.config.timeouts.drain;
            runtime.block_on(lane(app, index, socket, stopping, places));
            // Requests past the drain's deadline end here, with their connections.
            runtime.shutdown_timeout(deadline.min(Duration::from_secs(1)));
        };
        threads.push(thread.spawn(body).map_err(ServeError::Thread)?);
    }
    tracing::info!(%address, threads = threads.len(), workers = app.config.workers.len(), "serving");
    Ok(Running {
        address,
        app,
        stop,
        threads,
    })
}

impl Running {
    /// Where clients connect; the port is the real one.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The router's state.
    pub fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// Takes no new connections, lets running requests end within the drain deadline, returns when all is over.
    pub fn stop(self) {
        // Without receivers the threads are over already.
        let _ = self.stop.send(true);
        for thread in self.threads {
            if thread.join().is_err() {
                tracing::error!("a serving thread panicked");
            }
        }
    }
}

async fn lane(
    app: Arc<App>,
    index: usize,
    socket: std::net::TcpListener,
    mut stopping: watch::Receiver<bool>,
    places: Arc<Semaphore>,
) {
    let lane = Lane::new(app.clone());
    let socket = match TcpListener::from_std(socket) {
        Ok(socket) => socket,
        Err(error) => {
            tracing::error!(%error, "a serving thread cannot use the listening socket");
            return;
        }
    };
    if index == 0 {
        let workers: Vec<_> = app.router().view.all().collect();
        for w in workers {
            tokio::spawn(discover::watch(lane.clone(), w));
        }
        tokio::spawn(drain::watch(lane.clone()));
    }
    loop {
        let accepted = tokio::select! {
            accepted = accept(&socket, &places) => accepted,
            () = stopped(&mut stopping) => break,
        };
        match accepted {
            Ok((stream, place)) => {
                tokio::spawn(connection(lane.clone(), stream, stopping.clone(), place));
            }
            Err(error) => {
                // Out of descriptors, most often: existing connections go on, and room comes back.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
    drop(socket);
    let all = u32::try_from(app.config.max_connections).unwrap_or(u32::MAX);
    let drained = tokio::time::timeout(app.config.timeouts.drain, places.acquire_many(all)).await;
    if drained.is_err() {
        tracing::warn!("requests were still running at the drain deadline");
    }
}

async fn accept(socket: &TcpListener, places: &Arc<Semaphore>) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let place = places.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = socket.accept().await?;
    // Tokens must not wait for acknowledgements.
    stream.set_nodelay(true)?;
    Ok((stream, place))
}

/// Returns when the router is to stop, or is gone.
async fn stopped(stopping: &mut watch::Receiver<bool>) {
    let _ = stopping.wait_for(|stop| *stop).await;
}

async fn connection(
    lane: Arc<Lane>,
    stream: TcpStream,
    mut stopping: watch::Receiver<bool>,
    place: OwnedSemaphorePermit,
) {
    let head = lane.app.config.timeouts.client_head;
    let service = service_fn(move |request| front::serve(lane.clone(), request));
    let mut serving = std::pin::pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(head)
            .serve_connection(TokioIo::new(stream), service)
    );
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = stopped(&mut stopping) => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a client's connection ended");
    }
    drop(place);
}
