//! The importer's thread: cuts reads over the streams to each peer, lands their bytes, calls `done`. Started and joined
//! by [`super::TcpMover`].

use std::{
    collections::{HashMap, VecDeque},
    io::{self, ErrorKind},
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use mio::{Events, Interest, Poll, Token, Waker, event::Event, net::TcpStream};

use super::{
    config::TcpConfig,
    memory::Gather,
    stream::{Asked, Outcome, Stream},
};
use crate::{
    error::{MoverError, Wait},
    gate::Gate,
    inbox,
    mover::{Done, LeaseToken, ReadOptions, ReadStats, call},
    plan::Chunk,
    region::Regions,
};

const WAKER: Token = Token(0);
const FIRST: usize = 1;

/// How often waits are looked at while there are any.
const TICK: Duration = Duration::from_millis(10);
/// How often idle streams are looked at.
const IDLE_TICK: Duration = Duration::from_secs(1);

/// What the mover tells its importer.
pub(super) enum Command {
    Read(Read),
    /// The read's gate is shut: tell its owner.
    Cancelled(u64),
}

/// A read, planned, and what is left of it.
pub(super) struct Read {
    pub(super) id: u64,
    pub(super) peer: Arc<str>,
    /// Where the peer is, and what is to be asked of it; or why nothing will be.
    pub(super) plan: Result<(SocketAddr, VecDeque<Chunk>), MoverError>,
    pub(super) token: LeaseToken,
    pub(super) options: ReadOptions,
    pub(super) gate: Arc<Gate>,
    pub(super) begun: Instant,
    pub(super) done: Done,
}

/// Hands commands to the thread.
pub(super) type Inbox = inbox::Inbox<Command>;

pub(super) struct Importer {
    inbox: Arc<Inbox>,
    regions: Arc<Regions>,
    config: TcpConfig,
    poll: Poll,
    reads: HashMap<u64, Active>,
    peers: HashMap<SocketAddr, Peer>,
    streams: HashMap<Token, Stream>,
    turns: VecDeque<Token>,
    next: usize,
    scratch: Vec<u8>,
}

/// A read that has begun.
struct Active {
    address: SocketAddr,
    peer: Arc<str>,
    token: LeaseToken,
    options: ReadOptions,
    gate: Arc<Gate>,
    begun: Instant,
    waiting: VecDeque<Chunk>,
    /// The first of its streams among the peer's: the one with the least to do when the read began.
    base: usize,
    bytes: u64,
    chunks: u64,
    landed: u64,
    done: Done,
}

/// The streams to one peer and the reads that have something to ask of it, in turn.
struct Peer {
    slots: Vec<Option<Token>>,
    queue: VecDeque<u64>,
}

impl Importer {
    pub(super) fn new(regions: Arc<Regions>, config: TcpConfig) -> io::Result<(Self, Arc<Inbox>)> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let inbox = Inbox::new(waker);
        let importer = Importer {
            inbox: inbox.clone(),
            regions,
            config,
            poll,
            reads: HashMap::new(),
            peers: HashMap::new(),
            streams: HashMap::new(),
            turns: VecDeque::new(),
            next: FIRST,
            scratch: vec![0; 256 << 10],
        };
        Ok((importer, inbox))
    }

    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(256);
        let mut swept = Instant::now();
        while let Some(commands) = self.inbox.take() {
            let now = Instant::now();
            for command in commands {
                self.obey(command, now);
            }
            self.serve(now);
            let tick = if self.reads.is_empty() { IDLE_TICK } else { TICK };
            if now.saturating_duration_since(swept) >= tick {
                swept = now;
                self.sweep(now);
            }
            let timeout = match (self.turns.is_empty(), self.reads.is_empty() && self.streams.is_empty()) {
                (false, _) => Some(Duration::ZERO),
                (true, false) => Some(tick),
                (true, true) => None,
            };
            match self.poll.poll(&mut events, timeout) {
                Ok(()) => events.iter().for_each(|event| self.notice(event)),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    tracing::error!(error = %e, "importer stopped: poll failed");
                    break;
                }
            }
        }
        let left = self.inbox.close();
        for id in self.reads.keys().copied().collect::<Vec<_>>() {
            self.finish(id, Err(MoverError::Closed));
        }
        left.into_iter().for_each(call_off);
    }

    fn obey(&mut self, command: Command, now: Instant) {
        match command {
            Command::Read(read) => self.begin(read, now),
            Command::Cancelled(id) => self.give_up(id, MoverError::Cancelled),
        }
    }

    fn begin(&mut self, read: Read, now: Instant) {
        let Read {
            id,
            peer,
            plan,
            token,
            options,
            gate,
            begun,
            done,
        } = read;
        let full = self.reads.len() >= self.config.reads;
        let full = full.then_some(MoverError::TooMany {
            what: "reads",
            limit: self.config.reads as u64,
        });
        let (address, waiting) = match plan.and_then(|plan| full.map_or(Ok(plan), Err)) {
            Ok((_, chunks)) if chunks.is_empty() => {
                return call(
                    done,
                    Ok(ReadStats {
                        elapsed: begun.elapsed(),
                        ..ReadStats::default()
                    }),
                );
            }
            Ok(plan) => plan,
            Err(error) => {
                gate.shut();
                return call(done, Err(error));
            }
        };
        let slots = self.config.streams;
        let peers = self.peers.entry(address);
        let peer_streams = peers.or_insert_with(|| Peer {
            slots: vec![None; slots],
            queue: VecDeque::new(),
        });
        peer_streams.queue.push_back(id);
        let load = |slot: &Option<Token>| slot.and_then(|token| self.streams.get(&token)).map_or(0, Stream::load);
        let base = (0..slots)
            .min_by_key(|slot| load(&peer_streams.slots[*slot]))
            .unwrap_or(0);
        let (bytes, chunks) = (waiting.iter().map(|chunk| chunk.len).sum(), waiting.len() as u64);
        let active = Active {
            address,
            peer,
            token,
            options,
            gate,
            begun,
            waiting,
            base,
            bytes,
            chunks,
            landed: 0,
            done,
        };
        self.reads.insert(id, active);
        self.pump(address, now);
    }

    /// Hands waiting chunks to streams that have room, one to each in turn, so that a read is cut over all of its
    /// streams in order.
    fn pump(&mut self, address: SocketAddr, now: Instant) {
        loop {
            let mut asked = false;
            for slot in 0..self.config.streams {
                match self.ask(address, slot, now) {
                    Ok(one) => asked |= one,
                    Err((id, error)) => {
                        self.finish(id, Err(error));
                        asked = true;
                    }
                }
            }
            if !asked {
                return self.forget(address);
            }
        }
    }

    /// Asks stream `slot` for the next chunk that may use it; `false` if there is none or no room.
    fn ask(&mut self, address: SocketAddr, slot: usize, now: Instant) -> Result<bool, (u64, MoverError)> {
        let Some(peer) = self.peers.get_mut(&address) else {
            return Ok(false);
        };
        let slots = peer.slots.len();
        let reads = &mut self.reads;
        peer.queue
            .retain(|id| reads.get(id).is_some_and(|read| !read.waiting.is_empty()));
        let may_use = |id: &u64| reads.get(id).is_some_and(|read| read.may_use(slot, slots));
        let Some(at) = peer.queue.iter().position(may_use) else {
            return Ok(false);
        };
        let Some((&id, read)) = peer.queue.get(at).and_then(|id| Some((id, reads.get_mut(id)?))) else {
            return Ok(false);
        };
        let token = match peer.slots[slot] {
            Some(token) => token,
            None => {
                let token = Token(self.next);
                self.next += 1;
                let stream = dial(&self.poll, token, &read.peer, address, slot, now).map_err(|e| (id, e))?;
                self.streams.insert(token, stream);
                peer.slots[slot] = Some(token);
                token
            }
        };
        let Some(stream) = self.streams.get_mut(&token) else {
            return Ok(false);
        };
        let Some(chunk) = read
            .waiting
            .pop_front_if(|chunk| stream.has_room(chunk.len, &self.config))
        else {
            return Ok(false);
        };
        let landing =
            Gather::locate(&self.regions, &chunk.local).map_err(|run| (id, MoverError::LocalRange { run }))?;
        let crc = read.options.checksum.then_some(0);
        let gate = read.gate.clone();
        let asked = Asked {
            read: id,
            remote: chunk.remote,
            len: chunk.len,
            landing,
            gate,
            crc,
        };
        stream.ask(&read.token, asked, now);
        queue(&mut self.turns, token, stream);
        peer.queue.remove(at);
        peer.queue.push_back(id);
        Ok(true)
    }

    fn notice(&mut self, event: &Event) {
        let Some(stream) = self.streams.get_mut(&event.token()) else {
            return;
        };
        stream.readable |= event.is_readable() || event.is_read_closed() || event.is_error();
        stream.writable |= event.is_writable() || event.is_write_closed() || event.is_error();
        queue(&mut self.turns, event.token(), stream);
    }

    /// One turn for each stream that asked for one.
    fn serve(&mut self, now: Instant) {
        let mut outcomes = Vec::new();
        for _ in 0..self.turns.len() {
            let Some(token) = self.turns.pop_front() else { return };
            let Some(stream) = self.streams.get_mut(&token) else {
                continue;
            };
            stream.queued = false;
            let address = stream.address;
            let driven = stream.drive(&mut self.scratch, now, &mut outcomes);
            if let Ok(true) = driven {
                queue(&mut self.turns, token, stream);
            }
            let moved = !outcomes.is_empty();
            outcomes.drain(..).for_each(|outcome| self.settle(outcome));
            if let Err(error) = driven {
                self.lose(token, &error);
            }
            if moved {
                self.pump(address, now);
            }
        }
    }

    fn settle(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Failed { read, error } => self.finish(read, Err(error)),
            Outcome::Landed { read, bytes } => {
                let Some(active) = self.reads.get_mut(&read) else {
                    return;
                };
                active.landed += bytes;
                if active.landed == active.bytes {
                    let (bytes, chunks, elapsed) = (active.bytes, active.chunks, active.begun.elapsed());
                    self.finish(read, Ok(ReadStats { bytes, chunks, elapsed }));
                }
            }
        }
    }

    fn sweep(&mut self, now: Instant) {
        let late = |read: &Active| now.saturating_duration_since(read.begun) >= read.options.deadline;
        let late = self.reads.iter().filter(|(_, read)| late(read));
        for (id, peer, limit) in late
            .map(|(id, r)| (*id, r.peer.clone(), r.options.deadline))
            .collect::<Vec<_>>()
        {
            self.give_up(
                id,
                MoverError::Timeout {
                    peer: peer.to_string(),
                    wait: Wait::Deadline,
                    limit,
                },
            );
        }
        let overdue = |(token, stream): (&Token, &Stream)| Some((*token, stream.overdue(&self.config, now)?));
        for (token, error) in self.streams.iter().filter_map(overdue).collect::<Vec<_>>() {
            self.lose(token, &error);
        }
    }

    /// Ends a read from this side, and with it the streams that carry nothing else: the exporter stops sending at once.
    fn give_up(&mut self, id: u64, error: MoverError) {
        let Some(address) = self.reads.get(&id).map(|read| read.address) else {
            return;
        };
        self.finish(id, Err(error.clone()));
        let tokens = self
            .peers
            .get(&address)
            .map(|peer| peer.slots.iter().flatten().copied().collect::<Vec<_>>());
        for token in tokens.unwrap_or_default() {
            if self.streams.get(&token).is_some_and(Stream::is_pointless) {
                self.lose(token, &error);
            }
        }
        self.pump(address, Instant::now());
    }

    /// Closes a stream; the reads that wait on it fail.
    fn lose(&mut self, token: Token, error: &MoverError) {
        let Some(mut stream) = self.streams.remove(&token) else {
            return;
        };
        // Fails only for a socket that is not registered, which is what is wanted.
        let _ = self.poll.registry().deregister(&mut stream.socket);
        if let Some(peer) = self.peers.get_mut(&stream.address) {
            peer.slots[stream.slot] = None;
        }
        for read in stream.abandon() {
            self.finish(read, Err(error.clone()));
        }
        self.forget(stream.address);
    }

    /// Lands nothing more for the read and tells its owner.
    fn finish(&mut self, id: u64, result: Result<ReadStats, MoverError>) {
        let Some(read) = self.reads.remove(&id) else { return };
        read.gate.shut();
        call(read.done, result);
    }

    /// Drops the record of a peer that nothing is asked of.
    fn forget(&mut self, address: SocketAddr) {
        if self
            .peers
            .get(&address)
            .is_some_and(|peer| peer.slots.iter().all(Option::is_none) && peer.queue.is_empty())
        {
            self.peers.remove(&address);
        }
    }
}

impl Active {
    fn may_use(&self, slot: usize, slots: usize) -> bool {
        (slot + slots - self.base) % slots < self.options.streams.clamp(1, slots)
    }
}

/// Begins to connect.
fn dial(
    poll: &Poll,
    token: Token,
    peer: &Arc<str>,
    address: SocketAddr,
    slot: usize,
    now: Instant,
) -> Result<Stream, MoverError> {
    let failed = |e: io::Error| MoverError::Connect {
        peer: peer.to_string(),
        errno: crate::error::errno(&e),
    };
    let mut socket = TcpStream::connect(address).map_err(failed)?;
    socket.set_nodelay(true).map_err(failed)?;
    poll.registry()
        .register(&mut socket, token, Interest::READABLE | Interest::WRITABLE)
        .map_err(failed)?;
    Ok(Stream::new(socket, peer.clone(), address, slot, now))
}

fn queue(turns: &mut VecDeque<Token>, token: Token, stream: &mut Stream) {
    if !stream.queued {
        stream.queued = true;
        turns.push_back(token);
    }
}

/// Answers a command that the thread will not see any more.
pub(super) fn call_off(command: Command) {
    if let Command::Read(read) = command {
        read.gate.shut();
        call(read.done, Err(MoverError::Closed));
    }
}
