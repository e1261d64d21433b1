//! A small HTTP/1 client: kept connections to one address, bounded; a connection whose exchange did not end cleanly is
//! closed, and the worker sees that its client has gone. One [`Pool`] per address and serving thread.

use std::{
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use hyper::{
    Request, Response,
    body::Incoming,
    client::conn::http1::{self, SendRequest},
};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, time::timeout};

use crate::body::Whole;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// No connection.
    #[error("cannot connect to {address}: {error}")]
    Connect {
        /// Where.
        address: Arc<str>,
        /// Why.
        error: std::io::Error,
    },
    /// No answer in time.
    #[error("{address} did not answer within {} ms", after.as_millis())]
    Deadline {
        /// Who.
        address: Arc<str>,
        /// How long it had.
        after: Duration,
    },
    /// The connection broke.
    #[error("the connection to {address} broke: {error}")]
    Broken {
        /// To whom.
        address: Arc<str>,
        /// How.
        error: hyper::Error,
    },
}

/// `host:port`, which may change while the router runs. Shared by the pools of all threads.
pub struct Address {
    text: RwLock<Arc<str>>,
    version: AtomicU64,
}

impl Address {
    /// An address; empty while it is not known.
    pub fn new(text: &str) -> Arc<Address> {
        Arc::new(Address {
            text: RwLock::new(text.into()),
            version: AtomicU64::new(0),
        })
    }

    /// Where it is now.
    pub fn text(&self) -> Arc<str> {
        self.text.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The worker is elsewhere now: kept connections to the old address are not used again.
    pub fn set(&self, text: &str) {
        let mut held = self.text.write().unwrap_or_else(PoisonError::into_inner);
        if **held != *text {
            *held = text.into();
            self.version.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Kept connections to one address.
pub struct Pool {
    address: Arc<Address>,
    idle: Mutex<Vec<Kept>>,
    bound: usize,
    connect: Duration,
}

struct Kept {
    sender: SendRequest<Whole>,
    /// Of the address it goes to.
    version: u64,
}

/// An answer's connection. [`Exchange::done`] gives it back; dropped, it is closed.
pub struct Exchange {
    kept: Kept,
    pool: Arc<Pool>,
}

impl Pool {
    /// Connections to `address`, at most `bound` idle ones are kept.
    pub fn new(address: Arc<Address>, bound: usize, connect: Duration) -> Arc<Pool> {
        Arc::new(Pool {
            address,
            idle: Mutex::new(Vec::new()),
            bound,
            connect,
        })
    }

    /// Where it connects to.
    pub fn address(&self) -> Arc<str> {
        self.address.text()
    }

    /// Sends a request and waits for the head of the answer, at most `within`. `request` is asked for again if a kept
    /// connection turns out to have been closed by the worker before it answered.
    pub async fn send(
        self: &Arc<Pool>,
        request: impl Fn() -> Request<Whole>,
        within: Duration,
    ) -> Result<(Response<Incoming>, Exchange), UpstreamError> {
        match timeout(within, self.exchange(request)).await {
            Ok(answer) => answer,
            Err(_) => Err(UpstreamError::Deadline {
                address: self.address(),
                after: within,
            }),
        }
    }

    async fn exchange(
        self: &Arc<Pool>,
        request: impl Fn() -> Request<Whole>,
    ) -> Result<(Response<Incoming>, Exchange), UpstreamError> {
        while let Some(mut kept) = self.kept() {
            if kept.sender.ready().await.is_err() {
                continue;
            }
            match kept.sender.send_request(request()).await {
                Ok(response) => return Ok((response, self.lend(kept))),
                // Closed while idle: nothing of an answer was seen.
                Err(e) if e.is_canceled() || e.is_closed() || e.is_incomplete_message() => {}
                Err(error) => return Err(self.broken(error)),
            }
        }
        let mut kept = self.connect().await?;
        match kept.sender.send_request(request()).await {
            Ok(response) => Ok((response, self.lend(kept))),
            Err(error) => Err(self.broken(error)),
        }
    }

    async fn connect(&self) -> Result<Kept, UpstreamError> {
        let version = self.address.version.load(Ordering::Relaxed);
        let address = self.address();
        let stream = match timeout(self.connect, TcpStream::connect(&*address)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Err(UpstreamError::Connect { address, error }),
            Err(_) => {
                return Err(UpstreamError::Deadline {
                    address,
                    after: self.connect,
                });
            }
        };
        // Small requests must not wait for acknowledgements; without it they only get slower.
        let _ = stream.set_nodelay(true);
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| UpstreamError::Broken { address, error })?;
        tokio::spawn(async move {
            // Its errors reach whoever waits for an answer.
            let _ = connection.await;
        });
        Ok(Kept { sender, version })
    }

    fn kept(&self) -> Option<Kept> {
        let version = self.address.version.load(Ordering::Relaxed);
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(kept) = idle.pop() {
            if !kept.sender.is_closed() && kept.version == version {
                return Some(kept);
            }
        }
        None
    }

    fn lend(self: &Arc<Pool>, kept: Kept) -> Exchange {
        Exchange {
            kept,
            pool: self.clone(),
        }
    }

    fn broken(&self, error: hyper::Error) -> UpstreamError {
        UpstreamError::Broken {
            address: self.address(),
            error,
        }
    }
}

impl Exchange {
    /// The answer's body was read to its end: the connection can serve the next request.
    pub fn done(self) {
        let mut idle = self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.kept.sender.is_closed() && idle.len() < self.pool.bound {
            idle.push(self.kept);
        }
    }
}
