//! One stream to a peer: requests out, answers in, straight into the reads' memory. The importer drives it.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind, Read, Write},
    net::SocketAddr,
    sync::Arc,
    time::Instant,
};

use mio::net::TcpStream;

use super::{
    config::TcpConfig,
    connection::QUANTUM,
    memory::Gather,
    refusal,
    wire::{self, HEAD, Head, Status, TAIL, Tail, WireError},
};
use crate::{
    error::{MoverError, Wait, errno},
    gate::Gate,
    mover::LeaseToken,
    region::Run,
};

/// Requests without an answer on one stream at most; fewer than the exporter takes before it holds back.
const MAX_ASKED: usize = 32;
/// Bytes moved for one stream before the others have their turn.
const TURN: usize = 2 << 20;

/// What happened to a read's chunk.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Its bytes have landed.
    Landed { read: u64, bytes: u64 },
    /// It will not come.
    Failed { read: u64, error: MoverError },
}

/// One request that was sent or is about to be.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) read: u64,
    pub(super) remote: Vec<Run>,
    pub(super) len: u64,
    pub(super) landing: Gather,
    pub(super) gate: Arc<Gate>,
    pub(super) crc: Option<u32>,
}

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) socket: TcpStream,
    pub(super) address: SocketAddr,
    /// Its place among the streams to the peer.
    pub(super) slot: usize,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// Whether it waits for a turn already.
    pub(super) queued: bool,
    peer: Arc<str>,
    connected: bool,
    out: Vec<u8>,
    out_sent: usize,
    asked: VecDeque<Asked>,
    /// Number of the request at the front of `asked`; they go up by one.
    front_id: u64,
    /// Payload bytes of `asked` that have not come.
    inflight: u64,
    part: Part,
    /// A tail and the head behind it, as far as they have come.
    control: [u8; TAIL + HEAD],
    have: usize,
    /// When bytes last went either way, or a request was asked of an idle stream.
    moved: Instant,
}

/// Which part of an answer comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Head,
    Body,
    Tail,
}

impl Stream {
    pub(super) fn new(socket: TcpStream, peer: Arc<str>, address: SocketAddr, slot: usize, now: Instant) -> Self {
        Stream {
            socket,
            address,
            slot,
            readable: false,
            writable: false,
            queued: false,
            peer,
            connected: false,
            out: Vec::new(),
            out_sent: 0,
            asked: VecDeque::new(),
            front_id: 1,
            inflight: 0,
            part: Part::Head,
            control: [0; TAIL + HEAD],
            have: 0,
            moved: now,
        }
    }

    /// Whether it may be asked for `len` more bytes.
    pub(super) fn has_room(&self, len: u64, config: &TcpConfig) -> bool {
        self.asked.is_empty() || (self.asked.len() < MAX_ASKED && self.inflight + len <= config.window)
    }

    /// Payload bytes that it waits for.
    pub(super) fn load(&self) -> u64 {
        self.inflight
    }

    pub(super) fn ask(&mut self, token: &LeaseToken, asked: Asked, now: Instant) {
        if self.asked.is_empty() {
            self.moved = now;
        }
        let id = self.front_id + self.asked.len() as u64;
        wire::encode_request(&mut self.out, id, token, asked.crc.is_some(), &asked.remote);
        self.inflight += asked.len;
        self.asked.push_back(asked);
    }

    /// Whether everything it waits for belongs to reads that are over.
    pub(super) fn is_pointless(&self) -> bool {
        !self.asked.is_empty() && self.asked.iter().all(|asked| asked.gate.is_shut())
    }

    /// Whether it waited for its peer longer than it may; an idle one is simply closed.
    pub(super) fn overdue(&self, config: &TcpConfig, now: Instant) -> Option<MoverError> {
        let (wait, limit) = match (self.connected, self.asked.is_empty()) {
            (false, _) => (Wait::Connect, config.connect),
            (true, false) => (Wait::Idle, config.stall),
            (true, true) => (Wait::Idle, config.idle / 2),
        };
        let over = now.saturating_duration_since(self.moved) >= limit;
        over.then(|| MoverError::Timeout {
            peer: self.peer.to_string(),
            wait,
            limit,
        })
    }

    /// The reads that wait on it.
    pub(super) fn abandon(&mut self) -> impl Iterator<Item = u64> + use<'_> {
        self.asked.drain(..).map(|asked| asked.read)
    }

    /// Sends requests and takes answers until the socket blocks (`false`) or its turn is over (`true`).
    ///
    /// # Errors
    /// The stream is of no more use.
    pub(super) fn drive(
        &mut self,
        scratch: &mut [u8],
        now: Instant,
        out: &mut Vec<Outcome>,
    ) -> Result<bool, MoverError> {
        if !self.connect()? {
            return Ok(false);
        }
        let mut moved = 0;
        loop {
            let count = self.send()? + self.receive(scratch, out)?;
            if count == 0 {
                return Ok(false);
            }
            self.moved = now;
            moved += count;
            if moved >= TURN {
                return Ok(true);
            }
        }
    }

    /// Whether the connection stands.
    fn connect(&mut self) -> Result<bool, MoverError> {
        if self.connected || !self.writable {
            return Ok(self.connected);
        }
        let failed = |e: io::Error| MoverError::Connect {
            peer: self.peer.to_string(),
            errno: errno(&e),
        };
        if let Some(e) = self.socket.take_error().map_err(failed)? {
            return Err(failed(e));
        }
        match self.socket.peer_addr() {
            Ok(_) => self.connected = true,
            Err(e) if e.kind() == ErrorKind::NotConnected => {}
            Err(e) => return Err(failed(e)),
        }
        Ok(self.connected)
    }

    fn send(&mut self) -> Result<usize, MoverError> {
        if !self.writable || self.out_sent == self.out.len() {
            return Ok(0);
        }
        match self.socket.write(&self.out[self.out_sent..]) {
            Ok(count) => {
                self.out_sent += count;
                if self.out_sent == self.out.len() {
                    self.out.clear();
                    self.out_sent = 0;
                }
                Ok(count)
            }
            Err(e) => self.blocked(&e, false),
        }
    }

    /// One receive of what comes next.
    fn receive(&mut self, scratch: &mut [u8], out: &mut Vec<Outcome>) -> Result<usize, MoverError> {
        if !self.readable {
            return Ok(0);
        }
        let result = match (self.part, self.asked.front_mut()) {
            (Part::Body, Some(asked)) => {
                let Asked { landing, crc, gate, .. } = asked;
                let socket = &mut self.socket;
                let landed = gate.pass(|| landing.receive(socket, QUANTUM, &mut self.control, crc));
                landed.unwrap_or_else(|| {
                    let room = scratch.len().min(landing.left());
                    let count = socket.read(&mut scratch[..room])?;
                    landing.skip(count);
                    Ok((count, 0))
                })
            }
            (Part::Tail, _) => self.socket.read(&mut self.control[self.have..]).map(|count| (0, count)),
            (Part::Head | Part::Body, _) => self
                .socket
                .read(&mut self.control[self.have..HEAD])
                .map(|count| (0, count)),
        };
        match result {
            Ok((0, 0)) => Err(self.ended()),
            Ok((body, control)) => {
                self.inflight = self.inflight.saturating_sub(body as u64);
                self.have += control;
                self.take(out)?;
                Ok(body + control)
            }
            Err(e) => self.blocked(&e, true),
        }
    }

    /// Takes the control parts that are whole.
    fn take(&mut self, out: &mut Vec<Outcome>) -> Result<(), MoverError> {
        if self.part == Part::Body && self.asked.front().is_none_or(|asked| asked.landing.left() == 0) {
            self.part = Part::Tail;
        }
        if self.part == Part::Tail
            && let Some((tail, rest)) = self.control[..self.have].split_first_chunk::<TAIL>()
        {
            let (tail, rest) = (*tail, rest.len());
            self.control.copy_within(TAIL..TAIL + rest, 0);
            self.have = rest;
            self.part = Part::Head;
            self.take_tail(&tail, out)?;
        }
        if self.part == Part::Head
            && let Some(head) = self.control[..self.have].first_chunk::<HEAD>()
        {
            let head = *head;
            self.have = 0;
            self.take_head(&head, out)?;
        }
        Ok(())
    }

    fn take_head(&mut self, bytes: &[u8; HEAD], out: &mut Vec<Outcome>) -> Result<(), MoverError> {
        let head = wire::decode_head(bytes).map_err(|e| self.broken(e))?;
        let fatal = match head.status {
            Status::Ok | Status::UnknownToken | Status::Expired | Status::Revoked | Status::RangeRefused => false,
            Status::TooLarge | Status::BadFrame | Status::BadVersion | Status::Busy => true,
        };
        let front = self.asked.front();
        if fatal {
            return Err(self.refused(&head, front));
        }
        let Some(asked) = front.filter(|_| head.id == self.front_id) else {
            return Err(self.bad("id", head.id, self.front_id));
        };
        if head.status != Status::Ok {
            let (read, error) = (asked.read, self.refused(&head, front));
            if matches!(error, MoverError::BadFrame { .. }) {
                return Err(error);
            }
            out.push(Outcome::Failed { read, error });
            self.pop();
        } else if head.len != asked.len {
            return Err(self.bad("len", head.len, asked.len));
        } else {
            self.part = Part::Body;
        }
        Ok(())
    }

    fn take_tail(&mut self, bytes: &[u8; TAIL], out: &mut Vec<Outcome>) -> Result<(), MoverError> {
        let Tail { status, crc, id } = wire::decode_tail(bytes).map_err(|e| self.broken(e))?;
        let Some(asked) = self.asked.front().filter(|_| id == self.front_id) else {
            return Err(self.bad("tail id", id, self.front_id));
        };
        let read = asked.read;
        let outcome = match (status, asked.crc) {
            (Status::Ok, Some(got)) if got != crc && !asked.gate.is_shut() => {
                let error = MoverError::Checksum {
                    peer: self.peer.to_string(),
                    got,
                    expected: crc,
                };
                Outcome::Failed { read, error }
            }
            (Status::Ok, _) => Outcome::Landed { read, bytes: asked.len },
            _ => {
                let error = self.refused(
                    &Head {
                        status,
                        id,
                        len: 0,
                        fact: 0,
                    },
                    Some(asked),
                );
                Outcome::Failed { read, error }
            }
        };
        out.push(outcome);
        self.pop();
        Ok(())
    }

    fn pop(&mut self) {
        if let Some(asked) = self.asked.pop_front() {
            self.inflight = self.inflight.saturating_sub(asked.landing.left() as u64);
            self.front_id += 1;
        }
    }

    fn refused(&self, head: &Head, asked: Option<&Asked>) -> MoverError {
        refusal::told(&self.peer, head, asked.map_or(&[], |asked| &asked.remote))
    }

    fn broken(&self, error: WireError) -> MoverError {
        refusal::broken(&self.peer, error)
    }

    fn bad(&self, what: &'static str, got: u64, expected: u64) -> MoverError {
        refusal::bad(&self.peer, what, got, expected)
    }

    /// The peer's end: between frames it is gone, inside one the frame is truncated.
    fn ended(&self) -> MoverError {
        let peer = self.peer.to_string();
        let (got, expected) = match (self.part, self.asked.front()) {
            (Part::Head, _) => (self.have as u64, HEAD as u64),
            (Part::Body, Some(asked)) => (asked.len - asked.landing.left() as u64, asked.len),
            (Part::Body | Part::Tail, _) => (self.have as u64, TAIL as u64),
        };
        match (self.part, got) {
            (Part::Head, 0) => MoverError::PeerGone { peer, errno: 0 },
            _ => MoverError::Truncated { peer, got, expected },
        }
    }

    fn blocked(&mut self, error: &io::Error, reading: bool) -> Result<usize, MoverError> {
        match error.kind() {
            ErrorKind::WouldBlock => {
                *(if reading {
                    &mut self.readable
                } else {
                    &mut self.writable
                }) = false;
                Ok(0)
            }
            // Tried again on the next turn of the loop; one byte stands for progress.
            ErrorKind::Interrupted => Ok(1),
            _ => Err(MoverError::PeerGone {
                peer: self.peer.to_string(),
                errno: errno(error),
            }),
        }
    }
}
