//! [`Thread`]: accepts and serves. One thread and no work stealing: an admission is a few microseconds, and a busy machine
//! gains nothing from a second thread that contends for the machine's lock.

use std::{
    io,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use tokio::{
    net::TcpListener,
    sync::{Notify, Semaphore},
};

use crate::state::Shared;

use super::{connection, routes};

/// Connections at once; the backlog holds more.
const CONNECTIONS: usize = 4096;

/// The running listener.
pub(crate) struct Thread {
    stop: Arc<Notify>,
    ended: mpsc::Receiver<()>,
}

impl Thread {
    /// Serves `listener` until stopped.
    pub(crate) fn start(shared: Arc<Shared>, listener: std::net::TcpListener) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let stop = Arc::new(Notify::new());
        let (ends, ended) = mpsc::channel();
        let listener = {
            let _entered = runtime.enter();
            TcpListener::from_std(listener)?
        };
        let stopped = stop.clone();
        thread::Builder::new().name("kvc-http".into()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = accept(shared, listener) => {}
                    () = stopped.notified() => {}
                }
            });
            // Connections are dropped with the runtime; imports they waited for are cancelled by that.
            drop(runtime);
            let _ = ends.send(());
        })?;
        Ok(Self { stop, ended })
    }

    /// Stops accepting and closes every connection; waits for the thread at most `deadline`.
    pub(crate) fn stop(self, deadline: Duration) {
        self.stop.notify_one();
        let _ = self.ended.recv_timeout(deadline);
    }
}

async fn accept(shared: Arc<Shared>, listener: TcpListener) {
    let router = routes::router(shared.clone());
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                // An answer is one small segment: it must not wait for an acknowledgement.
                let _ = stream.set_nodelay(true);
                let served = connection::serve(shared.clone(), router.clone(), stream);
                tokio::spawn(async move {
                    served.await;
                    drop(slot);
                });
            }
            Err(error) => {
                // Out of descriptors: let others finish.
                tracing::warn!(%error, "connection not accepted");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}
