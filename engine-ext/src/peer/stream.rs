//! A peer's connection with deadlines (XFER-7): one that says nothing, or stops half way through a greeting, is closed and
//! its slot given to another.

use std::{
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    sync::OwnedSemaphorePermit,
    time::{Instant, Sleep},
};
use tonic::{
    Extensions,
    transport::server::{Connected, TlsConnectInfo},
};

/// From the connection to its first [`GREETING`] bytes.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);
/// Between two reads afterwards; pings every [`PING`] keep a live peer below it.
const SILENCE: Duration = Duration::from_secs(60);
/// HTTP/2 pings.
pub(super) const PING: Duration = Duration::from_secs(15);
/// The HTTP/2 preface and an empty settings frame; a TLS hello is longer.
const GREETING: usize = 33;

/// See the module.
pub(super) struct PeerStream {
    inner: TcpStream,
    number: u64,
    seen: usize,
    silence: Pin<Box<Sleep>>,
    _slot: OwnedSemaphorePermit,
}

/// Which connection a request came over: a bearer token is good on its own connection only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Connection(pub(super) u64);

/// The connection of a request.
pub(super) fn connection(extensions: &Extensions) -> Option<Connection> {
    let plain = extensions.get::<Connection>().copied();
    plain.or_else(|| {
        extensions
            .get::<TlsConnectInfo<Connection>>()
            .map(|info| *info.get_ref())
    })
}

impl PeerStream {
    pub(super) fn new(inner: TcpStream, number: u64, slot: OwnedSemaphorePermit) -> Self {
        Self {
            inner,
            number,
            seen: 0,
            silence: Box::pin(tokio::time::sleep(HANDSHAKE)),
            _slot: slot,
        }
    }
}

impl Connected for PeerStream {
    type ConnectInfo = Connection;
    fn connect_info(&self) -> Connection {
        Connection(self.number)
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        match Pin::new(&mut self.inner).poll_read(cx, buf) {
            Poll::Ready(Ok(())) => {
                self.seen = self.seen.saturating_add(buf.filled().len() - before);
                if self.seen >= GREETING {
                    let next = Instant::now() + SILENCE;
                    self.silence.as_mut().reset(next);
                }
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(e)) => Poll::Ready(Err(e)),
            Poll::Pending => match self.silence.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
                Poll::Pending => Poll::Pending,
            },
        }
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }
}
