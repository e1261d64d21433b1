//! The importer's end of a lease: its side channel, its queue pairs over every path, its keys. The importer's thread drives
//! it.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind, Read, Write},
    net::SocketAddr,
    sync::Arc,
    time::Instant,
};

use mio::net::TcpStream;

use super::{
    config::VerbsConfig,
    error::VerbsError,
    nic::Link,
    queue_pair::QueuePair,
    rail::{Rail, packet_number},
    wire::{self, End, Grant, Hello},
    work::{PeerKeys, SendQueue},
};
use crate::{
    error::{MoverError, Wait, errno},
    mover::LeaseToken,
    region::Run,
    tcp::{
        refusal,
        wire::{HEAD, Head, Status, WireError, decode_head, encode_request},
    },
};

/// Questions without an answer on one line at most.
const MAX_ASKED: usize = 64;

pub(super) struct Line<'m> {
    pub(super) socket: TcpStream,
    pub(super) readable: bool,
    pub(super) writable: bool,
    pub(super) peer: Arc<str>,
    pub(super) address: SocketAddr,
    pub(super) token: LeaseToken,
    pub(super) state: State,
    pub(super) paths: Vec<Path<'m>>,
    pub(super) keys: PeerKeys,
    /// Jobs that were asked for, in order.
    pub(super) asked: VecDeque<usize>,
    /// Jobs that were granted and are not wholly posted.
    pub(super) ready: VecDeque<usize>,
    /// Reads with something to ask, in turn.
    pub(super) queue: VecDeque<u64>,
    /// Reads that are not over.
    pub(super) reads: usize,
    /// Payload bytes asked for or on their way.
    pub(super) inflight: u64,
    /// When anything last went well.
    pub(super) moved: Instant,
    pub(super) ending: Option<Ending>,
    front_id: u64,
    out: Vec<u8>,
    out_sent: usize,
    input: Vec<u8>,
}

/// How far the side channel is.
pub(super) enum State {
    /// The connection does not stand.
    Dialing(Vec<Made>),
    /// The hello is on its way, or its answer.
    Greeting(Vec<Made>),
    Open,
}

/// Queue pairs that wait for the other end, with their first packet numbers.
pub(super) struct Made {
    rail: usize,
    pairs: Vec<(QueuePair, u32)>,
}

/// The queue pairs between one of our devices and one of the peer's.
pub(super) struct Path<'m> {
    pub(super) rail: usize,
    /// By the number that completions carry.
    pub(super) queues: Vec<(u32, SendQueue<'m>)>,
    /// Since when nothing more goes over it.
    pub(super) dead: Option<Instant>,
}

/// Why a line ends. Its reads are done once nothing of it is on its way.
pub(super) struct Ending {
    pub(super) error: MoverError,
    pub(super) cause: Cause,
}

/// What a line ends because of: says which of its reads are over with it, and which begin anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// The peer, or the lease: all are over. One that came when the line was old begins anew, once.
    Peer,
    /// A read whose work did not drain: the others begin anew.
    Read(u64),
    /// A device that it counted on: all begin anew, over those that are left.
    Device,
}

/// What the peer said.
#[derive(Debug)]
pub(super) enum Heard {
    /// The paths of [`Line::welcome`] stand.
    Welcome,
    /// The first of `asked` may be read.
    Granted(usize, Grant),
    /// It may not; the line goes on.
    Refused(usize, Head),
}

impl<'m> Line<'m> {
    /// Begins to connect, with queue pairs on every rail that is up.
    pub(super) fn dial(
        rails: &[Arc<Rail>],
        config: &VerbsConfig,
        peer: &Arc<str>,
        address: SocketAddr,
        token: LeaseToken,
        now: Instant,
    ) -> Result<Self, MoverError> {
        let (begun, mut made, mut lost) = (Instant::now(), Vec::new(), None);
        for (at, rail) in rails.iter().enumerate() {
            if rail.is_down() {
                lost = Some(rail.loss());
                continue;
            }
            let pair = |_| Ok::<_, VerbsError>((rail.asking()?, packet_number()));
            match (0..config.pairs).map(pair).collect::<Result<_, _>>() {
                Ok(pairs) => made.push(Made { rail: at, pairs }),
                Err(error) => {
                    lost = Some(error);
                }
            }
        }
        match (made.is_empty(), lost) {
            (true, lost) => return Err(lost.unwrap_or(VerbsError::NoDevice).into()),
            (false, Some(error)) => tracing::warn!(%peer, %error, "a path was not offered, the others carry on"),
            (false, None) => {}
        }
        let (pairs, elapsed) = (made.len() * usize::from(config.pairs), begun.elapsed());
        tracing::debug!(%peer, pairs, ?elapsed, "queue pairs made");
        let ends = made.iter().enumerate().map(|(path, made)| {
            let pairs = made.pairs.iter().map(|(pair, psn)| (pair.number(), *psn)).collect();
            rails[made.rail].end(path as u8, true, pairs)
        });
        let mut out = Vec::new();
        wire::encode_hello(
            &mut out,
            &Hello {
                token,
                ends: ends.collect(),
            },
        );
        let failed = |e: io::Error| MoverError::Connect {
            peer: peer.to_string(),
            errno: errno(&e),
        };
        let socket = TcpStream::connect(address).map_err(failed)?;
        socket.set_nodelay(true).map_err(failed)?;
        Ok(Line {
            socket,
            readable: false,
            writable: false,
            peer: peer.clone(),
            address,
            token,
            state: State::Dialing(made),
            paths: Vec::new(),
            keys: PeerKeys::default(),
            asked: VecDeque::new(),
            ready: VecDeque::new(),
            queue: VecDeque::new(),
            reads: 0,
            inflight: 0,
            moved: now,
            ending: None,
            front_id: 1,
            out,
            out_sent: 0,
            input: Vec::new(),
        })
    }

    /// Whether it may be asked for `len` more bytes.
    pub(super) fn has_room(&self, len: u64, config: &VerbsConfig) -> bool {
        self.ending.is_none()
            && self.asked.len() < MAX_ASKED
            && (self.inflight == 0 || self.inflight + len <= config.window)
    }

    pub(super) fn ask(&mut self, job: usize, runs: &[Run], len: u64, checksum: bool, now: Instant) {
        if self.asked.is_empty() {
            self.moved = now;
        }
        let id = self.front_id + self.asked.len() as u64;
        encode_request(&mut self.out, id, &self.token, checksum, runs);
        self.asked.push_back(job);
        self.inflight += len;
    }

    /// Whether it offers the peer a path over this rail.
    pub(super) fn greets_with(&self, rail: usize) -> bool {
        match &self.state {
            State::Dialing(made) | State::Greeting(made) => made.iter().any(|made| made.rail == rail),
            State::Open => false,
        }
    }

    /// Work requests that are not complete.
    pub(super) fn outstanding(&self) -> u32 {
        self.paths
            .iter()
            .flat_map(|path| &path.queues)
            .map(|(_, queue)| queue.outstanding())
            .sum()
    }

    /// Whether it waited for its peer longer than it may; an idle one is simply closed.
    pub(super) fn overdue(&self, config: &VerbsConfig, now: Instant) -> Option<MoverError> {
        let (wait, limit) = match (&self.state, self.asked.is_empty() && self.outstanding() == 0) {
            (State::Dialing(_) | State::Greeting(_), _) => (Wait::Connect, config.connect),
            (State::Open, false) => (Wait::Idle, config.stall),
            (State::Open, true) => (Wait::Idle, config.idle / 2),
        };
        let over = now.saturating_duration_since(self.moved) >= limit;
        over.then(|| MoverError::Timeout {
            peer: self.peer.to_string(),
            wait,
            limit,
        })
    }

    /// Of the queue pairs that read `id` may use, `streams` of each path, the one with the fewest bytes on its way and room
    /// for more: its path, its place there, and the room. `left` is what a device's completion queue still holds.
    pub(super) fn roomiest(&self, id: u64, streams: usize, left: impl Fn(usize) -> u32) -> Option<(usize, usize, u32)> {
        let living = self.paths.iter().enumerate().filter(|(_, path)| !path.is_dead());
        let queues = living.flat_map(|(at, path)| {
            let (left, pairs) = (left(path.rail), path.queues.len());
            let own = move |place: usize| (place + pairs - id as usize % pairs) % pairs < streams.max(1);
            let own = path.queues.iter().enumerate().filter(move |(place, _)| own(*place));
            own.map(move |(place, (_, queue))| (at, place, queue.room().min(left), queue.bytes()))
        });
        let roomiest = queues
            .filter(|(_, _, room, _)| *room > 0)
            .min_by_key(|(_, _, _, bytes)| *bytes);
        roomiest.map(|(at, place, room, _)| (at, place, room))
    }

    /// Stops asking and posting; what is posted completes. The exporter sees the channel end.
    pub(super) fn end(&mut self, error: MoverError, cause: Cause, now: Instant) {
        if self.ending.is_none() {
            self.ending = Some(Ending { error, cause });
            self.paths
                .iter_mut()
                .filter(|path| !path.is_dead())
                .for_each(|path| path.fail(now));
            // Fails when it never stood.
            let _ = self.socket.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Sends and receives until the socket blocks; `heard` gets what the peer said.
    pub(super) fn drive(
        &mut self,
        heard: &mut Vec<Heard>,
        rails: &[Arc<Rail>],
        config: &VerbsConfig,
        now: Instant,
    ) -> Result<(), MoverError> {
        if self.ending.is_some() || !self.connect()? {
            return Ok(());
        }
        self.send()?;
        loop {
            let read = self.receive(now)?;
            self.take(heard, rails, config)?;
            if !read {
                return Ok(());
            }
        }
    }

    /// Whether the connection stands.
    fn connect(&mut self) -> Result<bool, MoverError> {
        let State::Dialing(made) = &mut self.state else {
            return Ok(true);
        };
        if !self.writable {
            return Ok(false);
        }
        let failed = |e: io::Error| MoverError::Connect {
            peer: self.peer.to_string(),
            errno: errno(&e),
        };
        if let Some(e) = self.socket.take_error().map_err(failed)? {
            return Err(failed(e));
        }
        match self.socket.peer_addr() {
            Ok(_) => self.state = State::Greeting(std::mem::take(made)),
            Err(e) if e.kind() == ErrorKind::NotConnected => return Ok(false),
            Err(e) => return Err(failed(e)),
        }
        Ok(true)
    }

    fn send(&mut self) -> Result<(), MoverError> {
        while self.writable && self.out_sent < self.out.len() {
            match self.socket.write(&self.out[self.out_sent..]) {
                Ok(count) => self.out_sent += count,
                Err(e) if e.kind() == ErrorKind::WouldBlock => self.writable = false,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // What the peer said last is still there to be read: it tells why.
                Err(_) if self.readable => return Ok(()),
                Err(e) => return Err(self.gone(&e)),
            }
        }
        if self.out_sent == self.out.len() {
            self.out.clear();
            self.out_sent = 0;
        }
        Ok(())
    }

    fn receive(&mut self, now: Instant) -> Result<bool, MoverError> {
        if !self.readable {
            return Ok(false);
        }
        let mut buffer = [0; 16 << 10];
        match self.socket.read(&mut buffer) {
            Ok(0) if self.input.is_empty() => Err(MoverError::PeerGone {
                peer: self.peer.to_string(),
                errno: 0,
            }),
            Ok(0) => {
                let expected = self.expected();
                Err(MoverError::Truncated {
                    peer: self.peer.to_string(),
                    got: self.input.len() as u64,
                    expected,
                })
            }
            Ok(count) => {
                self.input.extend_from_slice(&buffer[..count]);
                self.moved = now;
                Ok(true)
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(false)
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => Ok(true),
            Err(e) => Err(self.gone(&e)),
        }
    }

    /// Bytes of the frame that has begun.
    fn expected(&self) -> u64 {
        let head = self.input.first_chunk::<HEAD>().and_then(|head| decode_head(head).ok());
        HEAD as u64 + head.map_or(0, |head| head.len)
    }

    fn take(&mut self, heard: &mut Vec<Heard>, rails: &[Arc<Rail>], config: &VerbsConfig) -> Result<(), MoverError> {
        let mut used = 0;
        loop {
            let input = &self.input[used..];
            let Some(head) = input.first_chunk::<HEAD>() else { break };
            let head = decode_head(head).map_err(|e| self.broken(e))?;
            let Some(body) = input.get(HEAD..HEAD + head.len as usize) else {
                break;
            };
            let bytes = HEAD + body.len();
            if let State::Greeting(_) = self.state {
                if head.status != Status::Ok {
                    return Err(self.refusal(&head, &[]));
                }
                let body = body.to_vec();
                self.welcome(&body, rails, config)?;
                heard.push(Heard::Welcome);
            } else if head.id == 0 || self.asked.is_empty() {
                return Err(self.refusal(&head, &[]));
            } else if head.id != self.front_id {
                return Err(self.bad("id", head.id, self.front_id));
            } else {
                let said = match head.status {
                    Status::Ok => Ok(wire::decode_grant(body, self.paths.len()).map_err(|e| self.broken(e))?),
                    Status::RangeRefused => Err(head),
                    _ => return Err(self.refusal(&head, &[])),
                };
                self.front_id += 1;
                if let Some(job) = self.asked.pop_front() {
                    heard.push(match said {
                        Ok(grant) => Heard::Granted(job, grant),
                        Err(head) => Heard::Refused(job, head),
                    });
                }
            }
            used += bytes;
        }
        self.input.drain(..used);
        Ok(())
    }

    /// Connects our queue pairs with the peer's.
    fn welcome(&mut self, body: &[u8], rails: &[Arc<Rail>], config: &VerbsConfig) -> Result<(), MoverError> {
        let State::Greeting(made) = std::mem::replace(&mut self.state, State::Open) else {
            return Ok(());
        };
        let mut made: Vec<Option<Made>> = made.into_iter().map(Some).collect();
        let ends = wire::decode_ends(body, config.pairs.into()).map_err(|e| self.broken(e))?;
        let (begun, mut lost) = (Instant::now(), None);
        for end in ends {
            let Some(ours) = made.get_mut(usize::from(end.path)).and_then(Option::take) else {
                return Err(self.bad("path", end.path.into(), made.len() as u64));
            };
            let rail = &rails[ours.rail];
            if end.link != rail.choice.link {
                return Err(self.bad("link", end.link as u64, rail.choice.link as u64));
            }
            let mut path = Path {
                rail: ours.rail,
                queues: Vec::with_capacity(ours.pairs.len()),
                dead: None,
            };
            match start(rail, &end, ours.pairs, config) {
                Ok(queues) => path.queues.extend(queues.into_iter().map(|queue| (0, queue))),
                // It keeps its place: keys are by path.
                Err(error) => (path.dead, lost) = (Some(begun), Some(error)),
            }
            self.paths.push(path);
        }
        let (peer, elapsed) = (&self.peer, begun.elapsed());
        match (self.paths.iter().all(|path| path.is_dead()), lost) {
            (true, Some(error)) => return Err(error.into()),
            (true, None) => {
                let (peer, link) = (
                    self.peer.to_string(),
                    rails.first().map_or(Link::Ethernet, |rail| rail.choice.link),
                );
                return Err(VerbsError::NoPath { peer, link }.into());
            }
            (false, Some(error)) => tracing::warn!(%peer, %error, "a path is not used, the others carry on"),
            (false, None) => {}
        }
        tracing::debug!(%peer, paths = self.paths.len(), ?elapsed, "queue pairs connected");
        Ok(())
    }

    /// As the owner of a read sees it; `runs` are those that were asked for.
    pub(super) fn refusal(&self, head: &Head, runs: &[Run]) -> MoverError {
        refusal::told(&self.peer, head, runs)
    }

    fn broken(&self, error: WireError) -> MoverError {
        refusal::broken(&self.peer, error)
    }

    fn bad(&self, what: &'static str, got: u64, expected: u64) -> MoverError {
        refusal::bad(&self.peer, what, got, expected)
    }

    fn gone(&self, error: &io::Error) -> MoverError {
        MoverError::PeerGone {
            peer: self.peer.to_string(),
            errno: errno(error),
        }
    }
}

impl Path<'_> {
    pub(super) fn is_dead(&self) -> bool {
        self.dead.is_some()
    }

    /// No more over it; what is posted completes.
    pub(super) fn fail(&mut self, now: Instant) {
        self.dead = Some(now);
        self.queues.iter().for_each(|(_, queue)| queue.fail());
    }
}

/// Connects the queue pairs of one path with the peer's.
fn start<'m>(
    rail: &Rail,
    end: &End,
    pairs: Vec<(QueuePair, u32)>,
    config: &VerbsConfig,
) -> Result<Vec<SendQueue<'m>>, VerbsError> {
    let ways = pairs.into_iter().enumerate();
    let ways = ways.filter_map(|(at, made)| Some((made, rail.path(end, at, true)?)));
    ways.map(|((pair, psn), path)| {
        pair.connect(&rail.choice, &path, &config.tuning())?;
        pair.start(psn, &path, &config.tuning())?;
        Ok(SendQueue::new(pair, rail.depth))
    })
    .collect()
}
