//! One accepted side channel: a hello with a lease's token, then questions in and grants out, in order. The exporter drives
//! it.

use std::{
    collections::HashSet,
    io::{self, ErrorKind, Read, Write},
    sync::Arc,
    time::Instant,
};

use mio::net::TcpStream;

use super::{
    config::VerbsConfig,
    door::{Door, Shared},
    error::VerbsError,
    rail::Rail,
    wire::{self, End, Grant, Hello, RegionKeys},
};
use crate::{
    lease::{Denied, Lease},
    region::RegionKey,
    tcp::{
        refusal::{self, status},
        wire::{Head, MAX_REQUEST, Request, Status, decode_request, encode_head},
    },
};

/// Answers that wait on one channel; above it no more questions are taken from it (back-pressure).
const MAX_OUT: usize = 256 << 10;
/// Receives of one channel before the others have their turn.
const TURN: usize = 8;

#[derive(Debug)]
pub(super) struct Channel {
    pub(super) socket: TcpStream,
    pub(super) readable: bool,
    pub(super) writable: bool,
    id: u64,
    input: Vec<u8>,
    out: Vec<u8>,
    out_sent: usize,
    state: State,
    /// When it was accepted, when the last message was whole, or when one began: what its peer is waited for from.
    since: Instant,
    /// Payload bytes granted.
    #[cfg(feature = "fault")]
    granted: u64,
}

#[derive(Debug)]
enum State {
    /// No token was shown.
    Greeting,
    Open(Open),
    /// What is due is still sent, nothing more is read.
    Ended,
}

#[derive(Debug)]
struct Open {
    lease: Arc<Lease>,
    door: Arc<Door>,
    /// The rail of each path that was welcomed.
    paths: Vec<usize>,
    /// Regions whose keys it has.
    told: HashSet<RegionKey>,
}

impl Channel {
    pub(super) fn new(socket: TcpStream, id: u64, now: Instant) -> Self {
        Channel {
            socket,
            readable: true,
            writable: true,
            id,
            input: Vec::new(),
            out: Vec::new(),
            out_sent: 0,
            state: State::Greeting,
            since: now,
            #[cfg(feature = "fault")]
            granted: 0,
        }
    }

    /// Tells the peer that there is no room for it.
    pub(super) fn turn_away(mut socket: TcpStream, limit: usize) {
        let mut head = Vec::new();
        encode_head(
            &mut head,
            &Head {
                status: Status::Busy,
                id: 0,
                len: 0,
                fact: limit as u64,
            },
        );
        // A fresh socket takes 32 bytes; if it does not, the peer sees the connection end, which says as much.
        let _ = socket.write(&head);
    }

    /// Whether its socket has something for it.
    pub(super) fn is_ready(&self) -> bool {
        (self.readable && !self.is_held_back()) || (self.writable && self.out_sent < self.out.len())
    }

    /// Takes what came, answers it, and looks whether the lease lives; `false` when the channel is to be closed. What is
    /// more than a turn is left for the next.
    pub(super) fn drive(&mut self, shared: &Shared, config: &VerbsConfig, now: Instant) -> bool {
        if self.watch(now) == Err(Lost) || self.is_overdue(config, now) {
            return false;
        }
        for _ in 0..TURN {
            let Ok(read) = self.read(now) else { return false };
            if self.take(shared, config, now) == Err(Lost) || self.write().is_err() {
                return false;
            }
            if !read {
                break;
            }
        }
        let all_sent = self.out_sent == self.out.len();
        !(matches!(self.state, State::Ended) && all_sent)
    }

    /// The lease's end, by fence or by age, is the channel's.
    fn watch(&mut self, now: Instant) -> Result<(), Lost> {
        let State::Open(open) = &self.state else { return Ok(()) };
        let denied = match open.door.is_shut() {
            true => Some(Denied::Revoked),
            false => open.lease.pass(now, || ()).err(),
        };
        if let Some(denied) = denied {
            open.door.shut();
            let notice = Head {
                status: status(denied),
                id: 0,
                len: 0,
                fact: 0,
            };
            self.end(notice, now);
        }
        Ok(())
    }

    fn end(&mut self, head: Head, now: Instant) {
        encode_head(&mut self.out, &head);
        self.state = State::Ended;
        self.since = now;
    }

    /// Nobody is waited for longer than this (F12), however often it sends a byte.
    fn is_overdue(&self, config: &VerbsConfig, now: Instant) -> bool {
        let limit = match (&self.state, self.input.is_empty()) {
            (State::Greeting, _) | (State::Open(_), false) => config.request,
            (State::Open(_), true) => config.idle,
            (State::Ended, _) => config.stall,
        };
        now.saturating_duration_since(self.since) >= limit
    }

    /// Whether nothing is to be read from it now.
    fn is_held_back(&self) -> bool {
        matches!(self.state, State::Ended) || self.out.len() >= MAX_OUT || self.input.len() >= MAX_REQUEST
    }

    /// Whether bytes came; the stream's end is an error here, for whatever is due has no reader any more.
    fn read(&mut self, now: Instant) -> io::Result<bool> {
        if !self.readable || self.is_held_back() {
            return Ok(false);
        }
        let mut buffer = [0; 16 << 10];
        match self.socket.read(&mut buffer) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                if self.input.is_empty() && matches!(self.state, State::Open(_)) {
                    self.since = now;
                }
                self.input.extend_from_slice(&buffer[..count]);
                Ok(true)
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(false)
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => Ok(true),
            Err(e) => Err(e),
        }
    }

    fn write(&mut self) -> io::Result<()> {
        while self.writable && self.out_sent < self.out.len() {
            match self.socket.write(&self.out[self.out_sent..]) {
                Ok(count) => self.out_sent += count,
                Err(e) if e.kind() == ErrorKind::WouldBlock => self.writable = false,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        if self.out_sent == self.out.len() {
            self.out.clear();
            self.out_sent = 0;
        }
        Ok(())
    }

    fn take(&mut self, shared: &Shared, config: &VerbsConfig, now: Instant) -> Result<(), Lost> {
        let mut used = 0;
        while self.out.len() < MAX_OUT {
            let input = &self.input[used..];
            let taken = match &self.state {
                State::Ended => break,
                State::Greeting => wire::decode_hello(input).map(|hello| {
                    let (hello, bytes) = hello?;
                    self.greet(&hello, shared, config, now);
                    Some(bytes)
                }),
                State::Open(_) => match decode_request(input) {
                    Ok(Some((request, bytes))) => {
                        if !self.answer(&request, shared, now)? {
                            break;
                        }
                        Ok(Some(bytes))
                    }
                    Ok(None) => Ok(None),
                    Err(error) => Err(error),
                },
            };
            match taken {
                Ok(Some(bytes)) => (used, self.since) = (used + bytes, now),
                Ok(None) => break,
                Err(error) => self.end(refusal::answer(&error), now),
            }
        }
        self.input.drain(..used);
        Ok(())
    }

    /// Connects queue pairs for a peer whose token is good.
    fn greet(&mut self, hello: &Hello, shared: &Shared, config: &VerbsConfig, now: Instant) {
        let refuse = |denied| Head {
            status: status(denied),
            id: 0,
            len: 0,
            fact: 0,
        };
        let lease = match shared.leases.find(&hello.token, now) {
            Ok(lease) => lease,
            Err(denied) => return self.end(refuse(denied), now),
        };
        let door = shared.door(self.id, hello.token);
        let (begun, mut ends, mut paths) = (Instant::now(), Vec::new(), Vec::new());
        for (at, there) in hello.ends.iter().enumerate() {
            // One rail for each of the peer's, in turn; a path that cannot be made is not offered.
            let rails = shared.rails.len();
            let partner = (0..rails).map(|skip| (at + skip) % rails);
            let mut partner =
                partner.filter(|rail| !shared.rails[*rail].is_down() && shared.rails[*rail].choice.link == there.link);
            let Some(rail) = partner.next() else { continue };
            match admit(&door, &lease, &shared.rails[rail], there, config, now) {
                Ok(Some(end)) => {
                    ends.push(end);
                    paths.push(rail);
                }
                Ok(None) => {
                    let denied = shared.leases.find(&hello.token, now).err();
                    return self.end(refuse(denied.unwrap_or(Denied::Revoked)), now);
                }
                Err(error) => tracing::warn!(%error, "a path was not offered"),
            }
        }
        let elapsed = begun.elapsed();
        tracing::debug!(paths = paths.len(), ?elapsed, "queue pairs made and connected");
        let mut body = Vec::new();
        wire::encode_ends(&mut body, &ends);
        encode_head(
            &mut self.out,
            &Head {
                status: Status::Ok,
                id: 0,
                len: body.len() as u64,
                fact: 0,
            },
        );
        self.out.append(&mut body);
        self.state = State::Open(Open {
            lease,
            door,
            paths,
            told: HashSet::new(),
        });
    }

    /// Whether the runs may be read, and with which keys; `false` leaves the question for later.
    fn answer(&mut self, request: &Request, shared: &Shared, now: Instant) -> Result<bool, Lost> {
        #[cfg(feature = "fault")]
        match self.flaw(request, shared) {
            Flaw::None => {}
            Flaw::Later => {
                // It is the exporter that is late, not its peer.
                self.since = now;
                return Ok(false);
            }
            Flaw::Lost => return Err(Lost),
        }
        let State::Open(open) = &mut self.state else {
            return Ok(true);
        };
        let refuse = |status, fact| Head {
            status,
            id: request.id,
            len: 0,
            fact,
        };
        // The channel speaks for the token it began with, whatever a question names.
        let lease = match shared.leases.find(open.door.token(), now) {
            Ok(lease) => lease,
            Err(denied) => {
                let denied = if denied == Denied::Unknown {
                    Denied::Revoked
                } else {
                    denied
                };
                open.door.shut();
                self.end(refuse(status(denied), 0), now);
                return Ok(true);
            }
        };
        let view = shared.memory.view();
        // No checksum can be had of a GPU's bytes: asked for one, they are not exposed.
        let beyond = request.checksum.then(|| view.beyond(&request.runs)).flatten();
        if let Some(run) = lease.uncovered(&request.runs).or(beyond) {
            let index = request.runs.iter().position(|each| each == run).unwrap_or(0);
            encode_head(&mut self.out, &refuse(Status::RangeRefused, index as u64));
            return Ok(true);
        }
        let crc = match request.checksum {
            false => Ok(0),
            true => lease.pass(now, || {
                request.runs.iter().fold(0, |crc, run| {
                    // SAFETY: obligation 4 — inside the lease's gate, so the exposed bytes are not written.
                    let bytes = unsafe { view.bytes(run) };
                    bytes.map_or(crc, |bytes| crc32c::crc32c_append(crc, bytes))
                })
            }),
        };
        let crc = match crc {
            Ok(crc) => crc,
            Err(denied) => {
                self.end(refuse(status(denied), 0), now);
                return Ok(true);
            }
        };
        let mut grant = Grant {
            crc,
            regions: Vec::new(),
        };
        for region in request.runs.iter().filter(|run| run.len > 0).map(|run| run.region) {
            if !open.told.contains(&region)
                && let Some((len, keys)) = view.keys(region)
            {
                open.told.insert(region);
                let by_rail: Vec<_> = keys.collect();
                let keys = open
                    .paths
                    .iter()
                    .filter_map(|rail| by_rail.get(*rail).copied())
                    .collect();
                grant.regions.push(RegionKeys { region, len, keys });
            }
        }
        let mut body = Vec::new();
        wire::encode_grant(&mut body, &grant);
        encode_head(
            &mut self.out,
            &Head {
                status: Status::Ok,
                id: request.id,
                len: body.len() as u64,
                fact: 0,
            },
        );
        self.out.append(&mut body);
        Ok(true)
    }

    /// What the injected fault makes of a question: its bytes come whole or not at all.
    #[cfg(feature = "fault")]
    fn flaw(&mut self, request: &Request, shared: &Shared) -> Flaw {
        use crate::fault::Effect;
        let Some(fault) = *shared.fault.lock().unwrap_or_else(std::sync::PoisonError::into_inner) else {
            return Flaw::None;
        };
        std::thread::sleep(fault.pause());
        let len = request.runs.iter().map(|run| run.len).sum::<u64>();
        let whole = |sent, len| fault.effect(sent, usize::try_from(len).unwrap_or(usize::MAX));
        let effect = match whole(self.granted, len) {
            Effect::Pass(some) if (some as u64) < len => whole(self.granted + some as u64, len - some as u64),
            effect => effect,
        };
        match effect {
            Effect::Pass(_) | Effect::Flip(..) => {
                self.granted += len;
                Flaw::None
            }
            Effect::Stall => Flaw::Later,
            Effect::Die => Flaw::Lost,
            Effect::End => {
                let mut head = Vec::new();
                encode_head(
                    &mut head,
                    &Head {
                        status: Status::Ok,
                        id: request.id,
                        len: 8,
                        fact: 0,
                    },
                );
                self.out.extend_from_slice(&head[..head.len() / 2]);
                let _ = self.write();
                Flaw::Lost
            }
        }
    }
}

#[cfg(feature = "fault")]
enum Flaw {
    None,
    Later,
    Lost,
}

/// The channel is of no more use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lost;

/// Makes the queue pairs of one path, ready for the peer's READs; `None` when the lease is over.
fn admit(
    door: &Door,
    lease: &Lease,
    rail: &Rail,
    there: &End,
    config: &VerbsConfig,
    now: Instant,
) -> Result<Option<End>, VerbsError> {
    let mut pairs = Vec::with_capacity(there.pairs.len());
    for path in (0..there.pairs.len()).filter_map(|at| rail.path(there, at, false)) {
        let made = door.admit(lease, now, || {
            let pair = rail.answering()?;
            pair.connect(&rail.choice, &path, &config.tuning())?;
            pairs.push((pair.number(), 0));
            Ok(pair)
        })?;
        if !made {
            return Ok(None);
        }
    }
    Ok(Some(rail.end(there.path, false, pairs)))
}
