//! Bodies: what goes out to clients and workers, and how a client's body comes in (bounded, with a deadline).

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use hyper::body::{Body, Frame, Incoming, SizeHint};

use crate::{answer::Problem, relay::Relay};
use kvc_proto::wire::reason::Reason;

/// One piece, sent once. Cloning the bytes costs nothing: a request that is retried keeps them (DISP-8).
#[derive(Debug, Default)]
pub struct Whole(Option<Bytes>);

impl Whole {
    /// A body of these bytes.
    pub fn new(bytes: Bytes) -> Whole {
        Whole(Some(bytes).filter(|b| !b.is_empty()))
    }
}

impl Body for Whole {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.as_ref().map_or(0, |b| b.len() as u64))
    }
}

/// What a client gets.
pub enum Answer {
    /// All at once.
    Whole(Whole),
    /// As the worker sends it.
    Relay(Box<Relay>),
}

/// The worker's answer broke off where no error can be written: the client's connection is closed.
#[derive(Debug, thiserror::Error)]
#[error("the worker's answer broke off")]
pub struct BrokenOff;

impl Body for Answer {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        match self.get_mut() {
            Answer::Whole(w) => Pin::new(w).poll_frame(cx).map(|f| f.map(|r| r.map_err(|e| match e {}))),
            Answer::Relay(r) => r.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Answer::Whole(w) => w.is_end_stream(),
            Answer::Relay(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Answer::Whole(w) => w.size_hint(),
            Answer::Relay(_) => SizeHint::default(),
        }
    }
}

/// The next piece of a body; none at its end. Trailers are dropped.
pub async fn next(body: &mut Incoming) -> Option<Result<Bytes, hyper::Error>> {
    loop {
        let frame = std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await?;
        match frame.map(Frame::into_data) {
            Err(e) => return Some(Err(e)),
            Ok(Ok(data)) if !data.is_empty() => return Some(Ok(data)),
            Ok(_) => {}
        }
    }
}

/// What became of collecting a body of at most so many bytes.
pub enum Collected {
    /// All of it.
    All(Bytes),
    /// So much and there is more.
    More(Bytes),
}

/// Collects a body until it has more than `limit` bytes.
pub async fn collect(body: &mut Incoming, limit: usize) -> Result<Collected, hyper::Error> {
    let Some(first) = next(body).await.transpose()? else {
        return Ok(Collected::All(Bytes::new()));
    };
    if first.len() > limit {
        return Ok(Collected::More(first));
    }
    if body.is_end_stream() {
        return Ok(Collected::All(first));
    }
    let expected = body
        .size_hint()
        .exact()
        .map_or(0, |n| usize::try_from(n).unwrap_or(limit).min(limit));
    let mut all = BytesMut::with_capacity(first.len() + expected);
    all.extend_from_slice(&first);
    while let Some(data) = next(body).await.transpose()? {
        all.extend_from_slice(&data);
        if all.len() > limit {
            return Ok(Collected::More(all.freeze()));
        }
    }
    Ok(Collected::All(all.freeze()))
}

/// A client's body: at most `limit` bytes within `deadline`.
pub async fn of_client(mut body: Incoming, limit: usize, deadline: Duration) -> Result<Bytes, Problem> {
    let too_large = |got: u64| {
        let text = format!("the body has {got} bytes or more, at most {limit} are read");
        Problem::new(413, Reason::TooLarge, text)
    };
    let announced = body.size_hint().lower();
    if announced > limit as u64 {
        return Err(too_large(announced));
    }
    match tokio::time::timeout(deadline, collect(&mut body, limit)).await {
        Ok(Ok(Collected::All(bytes))) => Ok(bytes),
        Ok(Ok(Collected::More(bytes))) => Err(too_large(bytes.len() as u64)),
        Ok(Err(e)) => Err(Problem::new(
            400,
            Reason::BadRequest,
            format!("the body broke off: {e}"),
        )),
        Err(_) => {
            let text = format!("the body did not arrive within {} ms", deadline.as_millis());
            Err(Problem::new(408, Reason::DeadlineExceeded, text))
        }
    }
}
