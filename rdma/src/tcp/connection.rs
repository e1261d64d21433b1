//! One accepted connection: requests in, answers out in order, straight from exposed memory. The exporter drives it.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind, IoSlice, Read, Write},
    sync::Arc,
    time::Instant,
};

use mio::net::TcpStream;

use super::{
    config::TcpConfig,
    memory::Gather,
    refusal::{self, status},
    wire::{self, Head, Request, Status, Tail},
};
use crate::{
    lease::{Lease, Leases},
    region::Regions,
};

/// Payload bytes of one write: what a fence waits for at most, about 50 µs of copying.
pub(super) const QUANTUM: usize = 256 << 10;
/// Answers that wait on one connection; above it nothing more is read from it (back-pressure).
const MAX_ANSWERS: usize = 64;
/// Bytes moved for one connection before the others have their turn.
const TURN: usize = 2 << 20;

/// Stands for memory whose lease ended inside a body.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// What a connection wants after it was driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Nothing until its socket says so.
    Wait,
    /// Another turn.
    Turn,
    /// To be closed.
    Close,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: TcpStream,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// Whether it waits for a turn already.
    pub(super) queued: bool,
    input: Vec<u8>,
    answers: VecDeque<Answer>,
    /// Heads and tails on their way out, sent up to `control_sent`.
    control: Vec<u8>,
    control_sent: usize,
    /// It broke the protocol: what is due is still sent, nothing more is read.
    refused: bool,
    opened: Instant,
    /// It has shown a token that is exposed here.
    proven: bool,
    /// When the request that is not whole began.
    request_since: Option<Instant>,
    /// When bytes last went either way, or answers began to be due.
    moved: Instant,
}

#[derive(Debug)]
enum Answer {
    Refusal(Head),
    Body(Body),
}

#[derive(Debug)]
struct Body {
    id: u64,
    lease: Arc<Lease>,
    gather: Gather,
    crc: Option<u32>,
    begun: bool,
    ended: Status,
}

impl Connection {
    pub(super) fn new(socket: TcpStream, now: Instant) -> Self {
        Connection {
            socket,
            readable: true,
            writable: true,
            queued: false,
            input: Vec::new(),
            answers: VecDeque::new(),
            control: Vec::new(),
            control_sent: 0,
            refused: false,
            opened: now,
            proven: false,
            request_since: None,
            moved: now,
        }
    }

    /// Tells the peer that there is no room for it and gives it up.
    pub(super) fn turn_away(mut self, limit: usize) {
        let mut head = Vec::new();
        wire::encode_head(
            &mut head,
            &Head {
                status: Status::Busy,
                id: 0,
                len: 0,
                fact: limit as u64,
            },
        );
        // A fresh socket takes 32 bytes; if it does not, the peer sees the connection end, which says as much.
        let _ = self.socket.write(&head);
    }

    /// Reads requests and writes answers until the socket blocks or its turn is over.
    pub(super) fn drive(&mut self, leases: &Leases, regions: &Regions, scratch: &mut [u8], now: Instant) -> Next {
        let mut moved = 0;
        loop {
            let read = match self.read(scratch) {
                Ok(read) => read,
                Err(_) => return Next::Close,
            };
            if read > 0 {
                self.moved = now;
                self.take_requests(leases, regions, now);
            }
            let wrote = match self.write(now) {
                Ok(wrote) => wrote,
                Err(_) => return Next::Close,
            };
            if wrote > 0 {
                self.moved = now;
                if !self.is_due() {
                    self.request_since = self.request_since.map(|_| now);
                    // Requests that were held back for answers may be whole already.
                    self.take_requests(leases, regions, now);
                }
            }
            if self.refused && !self.is_due() {
                return Next::Close;
            }
            moved += read + wrote;
            if read + wrote == 0 {
                return Next::Wait;
            }
            if moved >= TURN {
                return Next::Turn;
            }
        }
    }

    /// Whether it waited for its peer longer than it may (F12, slow loris).
    pub(super) fn is_overdue(&self, config: &TcpConfig, now: Instant) -> bool {
        let over = |since: Instant, limit| now.saturating_duration_since(since) >= limit;
        if self.is_due() {
            return over(self.moved, config.stall);
        }
        self.request_since.is_some_and(|since| over(since, config.request))
            || (!self.proven && over(self.opened, config.request))
            || over(self.moved, config.idle)
    }

    fn is_due(&self) -> bool {
        !self.answers.is_empty() || self.control_sent < self.control.len()
    }

    /// The bytes that came; the stream's end is an error here, for whatever is due has no reader any more.
    fn read(&mut self, scratch: &mut [u8]) -> io::Result<usize> {
        let held_back = self.refused || self.answers.len() >= MAX_ANSWERS || self.input.len() >= wire::MAX_REQUEST;
        if !self.readable || held_back {
            return Ok(0);
        }
        match self.socket.read(scratch) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.input.extend_from_slice(&scratch[..count]);
                Ok(count)
            }
            Err(e) => blocked(e, &mut self.readable),
        }
    }

    fn take_requests(&mut self, leases: &Leases, regions: &Regions, now: Instant) {
        let mut used = 0;
        while !self.refused && self.answers.len() < MAX_ANSWERS {
            match wire::decode_request(&self.input[used..]) {
                Ok(Some((request, bytes))) => {
                    used += bytes;
                    self.request_since = None;
                    let answer = self.answer(leases, regions, &request, now);
                    self.answers.push_back(answer);
                }
                Ok(None) => break,
                Err(error) => {
                    self.refused = true;
                    self.answers.push_back(Answer::Refusal(refusal::answer(&error)));
                }
            }
        }
        self.input.drain(..used);
        match self.input.is_empty() || self.refused {
            true => self.request_since = None,
            false => self.request_since = self.request_since.or(Some(now)),
        }
    }

    fn answer(&mut self, leases: &Leases, regions: &Regions, request: &Request, now: Instant) -> Answer {
        let refuse = |status, fact| {
            Answer::Refusal(Head {
                status,
                id: request.id,
                len: 0,
                fact,
            })
        };
        let lease = match leases.find(&request.token, now) {
            Ok(lease) => lease,
            Err(denied) => return refuse(status(denied), 0),
        };
        self.proven = true;
        let refuse_run = |run| {
            let index = request.runs.iter().position(|each| each == run).unwrap_or(0);
            refuse(Status::RangeRefused, index as u64)
        };
        if let Some(run) = lease.uncovered(&request.runs) {
            return refuse_run(run);
        }
        match Gather::locate(regions, &request.runs) {
            Ok(gather) => {
                let crc = request.checksum.then_some(0);
                Answer::Body(Body {
                    id: request.id,
                    lease,
                    gather,
                    crc,
                    begun: false,
                    ended: Status::Ok,
                })
            }
            Err(run) => refuse_run(&run),
        }
    }

    /// One write of what is due; the bytes that went.
    fn write(&mut self, now: Instant) -> io::Result<usize> {
        if !self.writable {
            return Ok(0);
        }
        self.stage();
        let Some(Answer::Body(body)) = self.answers.front_mut() else {
            if self.control_sent == self.control.len() {
                return Ok(0);
            }
            return match self.socket.write(&self.control[self.control_sent..]) {
                Ok(count) => {
                    self.sent_control(count);
                    Ok(count)
                }
                Err(e) => blocked(e, &mut self.writable),
            };
        };
        match body.write(&mut self.socket, &self.control[self.control_sent..], now) {
            Ok((control, count)) => {
                if body.gather.left() == 0 {
                    let tail = Tail {
                        status: body.ended,
                        crc: body.crc.unwrap_or(0),
                        id: body.id,
                    };
                    wire::encode_tail(&mut self.control, &tail);
                    self.answers.pop_front();
                }
                self.sent_control(control);
                // A body of no bytes behind a control part sent before still ends here: that is progress too.
                Ok((control + count).max(1))
            }
            Err(e) => blocked(e, &mut self.writable),
        }
    }

    /// Puts the heads that are next into the control part: those of refusals, and of one body.
    fn stage(&mut self) {
        while let Some(answer) = self.answers.front_mut() {
            match answer {
                Answer::Refusal(head) => {
                    wire::encode_head(&mut self.control, head);
                    self.answers.pop_front();
                }
                Answer::Body(body) if body.begun => return,
                Answer::Body(body) => {
                    body.begun = true;
                    let len = body.gather.left() as u64;
                    wire::encode_head(
                        &mut self.control,
                        &Head {
                            status: Status::Ok,
                            id: body.id,
                            len,
                            fact: 0,
                        },
                    );
                    return;
                }
            }
        }
    }

    fn sent_control(&mut self, count: usize) {
        self.control_sent += count;
        if self.control_sent == self.control.len() {
            self.control.clear();
            self.control_sent = 0;
        }
    }
}

impl Body {
    /// Writes `control`, then the next bytes: out of memory while the lease lives, zeros after.
    fn write(&mut self, socket: &mut TcpStream, control: &[u8], now: Instant) -> io::Result<(usize, usize)> {
        if self.ended == Status::Ok {
            let (gather, crc) = (&mut self.gather, &mut self.crc);
            if gather.left() == 0 {
                return Ok((socket.write(control)?, 0));
            }
            match self.lease.pass(now, || gather.send(socket, control, QUANTUM, crc)) {
                Ok(sent) => return sent,
                Err(denied) => self.ended = status(denied),
            }
        }
        let zeros = &ZEROS[..ZEROS.len().min(self.gather.left())];
        let sent = socket.write_vectored(&[IoSlice::new(control), IoSlice::new(zeros)])?;
        let (front, body) = (sent.min(control.len()), sent.saturating_sub(control.len()));
        self.gather.skip(body);
        Ok((front, body))
    }
}

/// No bytes now is no fault: the flag is cleared until the socket says otherwise.
fn blocked(error: io::Error, flag: &mut bool) -> io::Result<usize> {
    match error.kind() {
        ErrorKind::WouldBlock => {
            *flag = false;
            Ok(0)
        }
        // Tried again on the next turn of the loop: nothing was cleared, one byte stands for progress.
        ErrorKind::Interrupted => Ok(1),
        _ => Err(error),
    }
}
