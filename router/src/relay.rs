//! An answer that streams through: whole events as they come, bytes unchanged; what breaks after the first byte becomes
//! a typed error event (DISP-8). Made by [`crate::drive`], polled by the client's connection; dropped early, the turn is
//! cancelled.

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use hyper::body::{Body, Frame, Incoming};
use kvc_proto::{routing::Event, wire::reason::Reason};
use tokio::time::{Instant, Sleep};

use crate::{answer::Problem, body::BrokenOff, drive::Live, refusal, upstream::Exchange};

/// A partial event longer than this is passed on as it is.
const EVENT_MAX: usize = 1 << 20;

/// One answer on its way.
pub struct Relay {
    /// None once the answer is over.
    open: Option<Open>,
    /// What came before the relay was made.
    first: VecDeque<Bytes>,
    /// The beginning of an event whose end has not come: a typed error can follow only whole events.
    held: BytesMut,
    events: bool,
    /// A worker's typed refusal that came as an event: the turn was ended there (SES-4).
    refused: Option<Reason>,
    passed: u32,
    patience: Duration,
    idle: Pin<Box<Sleep>>,
}

struct Open {
    live: Live,
    upstream: Incoming,
    exchange: Exchange,
}

impl Relay {
    /// `first` was read from `upstream` already; `events`: it is an event stream.
    pub fn new(live: Live, first: Bytes, upstream: Incoming, exchange: Exchange, events: bool) -> Relay {
        let patience = live.patience();
        Relay {
            open: Some(Open {
                live,
                upstream,
                exchange,
            }),
            first: VecDeque::from([first]),
            held: BytesMut::new(),
            events,
            refused: None,
            passed: 0,
            patience,
            idle: Box::pin(tokio::time::sleep(patience)),
        }
    }

    /// The next piece for the client.
    pub fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        loop {
            if let Some(bytes) = self.first.pop_front() {
                if let Some(whole) = self.whole_events(bytes) {
                    return Poll::Ready(Some(Ok(Frame::data(whole))));
                }
                continue;
            }
            let Some(open) = &mut self.open else {
                return Poll::Ready(None);
            };
            match Pin::new(&mut open.upstream).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    self.idle.as_mut().reset(Instant::now() + self.patience);
                    if let Ok(data) = frame.into_data() {
                        self.first.push_back(data);
                    }
                }
                Poll::Ready(None) => {
                    self.complete();
                    if !self.held.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(self.held.split().freeze()))));
                    }
                    return Poll::Ready(None);
                }
                Poll::Ready(Some(Err(error))) => {
                    let text = format!("the worker's answer broke off: {error}");
                    return self.break_off(Problem::of(Reason::PeerUnreachable, text));
                }
                Poll::Pending => {
                    if self.idle.as_mut().poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                    let text = format!("the worker sent nothing for {} ms", self.patience.as_millis());
                    return self.break_off(Problem::of(Reason::DeadlineExceeded, text));
                }
            }
        }
    }

    /// The part of `held` and `bytes` that ends with an event's end; all of it if this is no event stream.
    fn whole_events(&mut self, bytes: Bytes) -> Option<Bytes> {
        if !self.events {
            return Some(bytes).filter(|b| !b.is_empty());
        }
        self.passed = self.passed.saturating_add(ends(&bytes));
        if self.held.is_empty() && bytes.ends_with(b"\n\n") {
            self.refused = self.refused.or_else(|| refusal::among(&bytes));
            return Some(bytes);
        }
        self.held.extend_from_slice(&bytes);
        let end = memchr::memmem::rfind(&self.held, b"\n\n").map(|i| i + 2);
        match end {
            Some(end) => {
                let whole = self.held.split_to(end).freeze();
                self.refused = self.refused.or_else(|| refusal::among(&whole));
                Some(whole)
            }
            None if self.held.len() > EVENT_MAX => Some(self.held.split().freeze()),
            None => None,
        }
    }

    fn complete(&mut self) {
        if let Some(mut open) = self.open.take() {
            open.exchange.done();
            open.live.event(match self.refused {
                // The client has the event; a turn that was ended is no success (DISP-8).
                Some(reason) => Event::Failed(reason),
                // An event is about a token; the closing ones do not matter for an estimate (ROUTE-8).
                None => Event::Completed {
                    output_tokens: self.passed,
                },
            });
        }
    }

    fn break_off(&mut self, problem: Problem) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        if let Some(mut open) = self.open.take() {
            open.live.event(Event::Failed(problem.code()));
        }
        self.held.clear();
        match self.events {
            true => Poll::Ready(Some(Ok(Frame::data(problem.into_event())))),
            false => Poll::Ready(Some(Err(BrokenOff))),
        }
    }
}

fn ends(bytes: &[u8]) -> u32 {
    u32::try_from(memchr::memmem::find_iter(bytes, b"\n\n").count()).unwrap_or(u32::MAX)
}
