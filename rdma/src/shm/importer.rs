//! The importer's side of the control sockets: asks for what reads want, maps what the exporter sends, and starts the
//! copies. The mover's thread (`driver`) drives it.

use std::{
    collections::HashMap,
    io::{ErrorKind, Result as IoResult},
    os::fd::OwnedFd,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use mio::Token;

use super::{
    endpoint::Endpoint,
    exporter::Next,
    memory::Maps,
    pool::Pool,
    read::{Granted, Piece, Read},
    socket::{Outbox, Received, Socket, own_user},
    wire::{self, Answer, Ask, Bad, Reply, Status},
    word::{Page, Slot},
};
use crate::{
    error::{MoverError, Wait, errno},
    lease::{Denied, denied},
    mover::ReadStats,
};

/// Replies taken from one connection before the others have their turn.
const TURN: usize = 64;
/// Longer than any lease: the end of time, for one that says so.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// A peer as the copying threads need it. Its socket is closed after the last of them has let it go, so that the exporter
/// may take the hang-up for the end of all copies.
#[derive(Debug)]
pub(super) struct Remote {
    pub(super) page: OnceLock<Page>,
    pub(super) maps: Maps,
    pub(super) socket: Socket,
}

pub(super) struct Importer {
    pool: Arc<Pool>,
    peers: HashMap<Arc<str>, Token>,
    connections: HashMap<Token, Dialled>,
    reads: HashMap<u64, (Arc<Read>, Token)>,
    next_ask: u64,
    #[cfg(feature = "fault")]
    flaws: Arc<super::fault::Flaws>,
}

/// One connection to a peer.
struct Dialled {
    peer: Arc<str>,
    remote: Arc<Remote>,
    out: Outbox,
    asked: HashMap<u64, Asked>,
}

/// A request on its way.
struct Asked {
    read: Arc<Read>,
    pieces: Vec<Piece>,
    sent: Instant,
}

impl Importer {
    pub(super) fn new(pool: Arc<Pool>, #[cfg(feature = "fault")] flaws: Arc<super::fault::Flaws>) -> Self {
        Importer {
            pool,
            peers: HashMap::new(),
            connections: HashMap::new(),
            reads: HashMap::new(),
            next_ask: 1,
            #[cfg(feature = "fault")]
            flaws,
        }
    }

    /// Whether anything waits for time to pass.
    pub(super) fn is_idle(&self) -> bool {
        self.reads.is_empty()
    }

    pub(super) fn has(&self, token: Token) -> bool {
        self.connections.contains_key(&token)
    }

    /// Takes a read in and asks for it; a connection that was made for it is watched by `watch` under `fresh`.
    pub(super) fn begin(
        &mut self,
        read: Arc<Read>,
        to: &Endpoint,
        fresh: Token,
        watch: impl FnOnce(&Socket) -> IoResult<()>,
    ) {
        if read.is_empty() {
            let elapsed = read.begun.elapsed();
            return read.finish(Ok(ReadStats {
                elapsed,
                ..ReadStats::default()
            }));
        }
        let token = match self.peers.get(&read.what.peer) {
            Some(token) => *token,
            None => match self.connect(&read.what.peer, to, watch) {
                Ok(dialled) => {
                    self.peers.insert(read.what.peer.clone(), fresh);
                    self.connections.insert(fresh, dialled);
                    fresh
                }
                Err(error) => return read.finish(Err(error)),
            },
        };
        let Some(dialled) = self.connections.get_mut(&token) else {
            return read.finish(Err(MoverError::Closed));
        };
        read.attach(dialled.remote.clone());
        self.reads.insert(read.what.id, (read.clone(), token));
        self.ask(&read, token);
    }

    /// Asks for what a read can have next. A connection that breaks is seen when it is driven.
    pub(super) fn more(&mut self, id: u64) {
        if let Some((read, token)) = self.reads.get(&id).cloned() {
            self.ask(&read, token);
        }
    }

    /// The read's gates are shut: its owner is told.
    pub(super) fn cancel(&mut self, id: u64) {
        if let Some((read, _)) = self.reads.remove(&id) {
            read.finish(Err(MoverError::Cancelled));
        }
    }

    fn connect(
        &self,
        peer: &Arc<str>,
        to: &Endpoint,
        watch: impl FnOnce(&Socket) -> IoResult<()>,
    ) -> Result<Dialled, MoverError> {
        let failed = |errno| MoverError::Connect {
            peer: peer.to_string(),
            errno,
        };
        #[cfg(feature = "fault")]
        if self.flaws.are_dead() {
            return Err(failed(libc::ECONNREFUSED));
        }
        let socket = Socket::connect(&to.name).map_err(|e| match e.kind() {
            ErrorKind::WouldBlock => MoverError::PeerBusy { peer: peer.to_string() },
            _ => failed(errno(&e)),
        })?;
        // Before it is shown a token (XFER-10): a name that is free can be taken by anybody.
        let (got, expected) = (socket.peer_user().map_err(|e| failed(errno(&e)))?, own_user());
        if got != expected {
            return Err(MoverError::OtherUser {
                peer: peer.to_string(),
                got,
                expected,
            });
        }
        watch(&socket).map_err(|e| MoverError::system("epoll_ctl", &e))?;
        let remote = Remote {
            page: OnceLock::new(),
            maps: Maps::default(),
            socket,
        };
        Ok(Dialled {
            peer: peer.clone(),
            remote: Arc::new(remote),
            out: Outbox::default(),
            asked: HashMap::new(),
        })
    }

    fn ask(&mut self, read: &Arc<Read>, token: Token) {
        let Some(dialled) = self.connections.get_mut(&token) else {
            return;
        };
        while let Some(pieces) = read.next_batch() {
            let id = self.next_ask;
            self.next_ask += 1;
            let runs = pieces.iter().flat_map(|piece| &piece.chunk.remote).copied().collect();
            let counts = || pieces.iter().map(|piece| piece.chunk.remote.len() as u32).collect();
            let chunks = if read.what.options.checksum {
                counts()
            } else {
                Vec::new()
            };
            let ask = Ask {
                id,
                token: read.what.token,
                runs,
                chunks,
            };
            dialled.out.push(wire::encode_ask(&ask), None);
            let (read, sent) = (read.clone(), Instant::now());
            dialled.asked.insert(id, Asked { read, pieces, sent });
        }
        // What fails here is the connection's end, which the poll reports as well.
        let _ = dialled.out.flush(&dialled.remote.socket);
    }

    /// Takes what came from a peer; closes it on `Err` and tells its reads why.
    pub(super) fn drive(&mut self, token: Token, buffer: &mut [u8]) -> Result<Next, MoverError> {
        let Some(dialled) = self.connections.get_mut(&token) else {
            return Ok(Next::Wait);
        };
        let gone = |peer: &str, errno| MoverError::PeerGone {
            peer: peer.into(),
            errno,
        };
        if let Err(e) = dialled.out.flush(&dialled.remote.socket) {
            return Err(gone(&dialled.peer, errno(&e)));
        }
        for _ in 0..TURN {
            match dialled.remote.socket.receive(buffer) {
                Ok(Received { len: 0, .. }) => return Err(gone(&dialled.peer, 0)),
                Ok(Received { len, file }) => {
                    let reply = wire::decode_reply(&buffer[..len]).map_err(|bad| broken(&dialled.peer, bad))?;
                    dialled.take(reply, file, &self.pool)?;
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(Next::Wait),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(gone(&dialled.peer, errno(&e))),
            }
        }
        Ok(Next::Turn)
    }

    /// Lets a peer go: its reads fail. `unwatch` is called before anything else lets its socket go.
    pub(super) fn remove(&mut self, token: Token, error: &MoverError, unwatch: impl FnOnce(&Socket)) {
        let Some(dialled) = self.connections.remove(&token) else {
            return;
        };
        unwatch(&dialled.remote.socket);
        self.peers.remove(&dialled.peer);
        let lost = self.reads.extract_if(|_, (_, on)| *on == token);
        lost.for_each(|(_, (read, _))| read.finish(Err(error.clone())));
    }

    /// Ends reads that are out of time and forgets those that are done.
    pub(super) fn sweep(&mut self, now: Instant) {
        for (read, _) in self.reads.values() {
            let limit = read.what.options.deadline;
            if now.saturating_duration_since(read.begun) >= limit {
                let peer = read.what.peer.to_string();
                let wait = Wait::Deadline;
                read.finish(Err(MoverError::Timeout { peer, wait, limit }));
            }
        }
        self.reads.retain(|_, (read, _)| !read.is_done());
    }

    /// The mover ends.
    pub(super) fn close(&mut self) {
        self.reads
            .drain()
            .for_each(|(_, (read, _))| read.finish(Err(MoverError::Closed)));
    }
}

impl Dialled {
    fn take(&mut self, reply: Reply, file: Option<OwnedFd>, pool: &Pool) -> Result<(), MoverError> {
        let bad = |peer: &str, what, got| MoverError::BadFrame {
            peer: peer.into(),
            what,
            got,
            expected: 1,
        };
        match (reply, file) {
            (Reply::Page { slots }, Some(file)) => {
                let page = Page::open(&file, slots)?;
                let twice = self.remote.page.set(page);
                twice.map_err(|_| bad(&self.peer, "second words", slots.into()))
            }
            (Reply::Region { key, offset, len }, Some(file)) => self.remote.maps.add(key, &file, offset, len),
            (Reply::Answer(answer), None) => match self.asked.remove(&answer.id) {
                Some(asked) => self.answered(asked, answer, pool),
                // What has no number is about the connection.
                None => Err(refused(&self.peer, &answer, &[])),
            },
            _ => Err(bad(&self.peer, "descriptor", 0)),
        }
    }

    fn answered(&self, asked: Asked, answer: Answer, pool: &Pool) -> Result<(), MoverError> {
        let Asked { read, pieces, sent } = asked;
        if answer.status != Status::Ok {
            read.finish(Err(refused(&self.peer, &answer, &pieces)));
            return Ok(());
        }
        let sums = if read.what.options.checksum { pieces.len() } else { 0 };
        if answer.sums.len() != sums {
            return Err(MoverError::BadFrame {
                peer: self.peer.to_string(),
                what: "checksums",
                got: answer.sums.len() as u64,
                expected: sums as u64,
            });
        }
        let slot = Slot {
            index: answer.slot,
            generation: answer.generation,
        };
        // Counted from when it was asked, so that it ends before the exporter's own clock ends it.
        let until = sent + Duration::from_nanos(answer.left).min(FOREVER);
        let mut sums = answer.sums.into_iter();
        let granted = pieces.into_iter().map(|piece| Granted {
            piece,
            slot,
            until,
            sum: sums.next(),
        });
        for lane in read.grant(granted) {
            pool.push(read.clone(), lane);
        }
        Ok(())
    }
}

fn refused(peer: &str, answer: &Answer, pieces: &[Piece]) -> MoverError {
    let bad = |what, got, expected| MoverError::BadFrame {
        peer: peer.into(),
        what,
        got,
        expected,
    };
    match answer.status {
        Status::UnknownToken => denied(Denied::Unknown, peer),
        Status::Expired => denied(Denied::Expired, peer),
        Status::Revoked => denied(Denied::Revoked, peer),
        Status::Busy => MoverError::PeerBusy { peer: peer.into() },
        Status::BadVersion => MoverError::BadVersion {
            peer: peer.into(),
            got: u16::try_from(answer.fact).unwrap_or(u16::MAX),
            expected: wire::VERSION,
        },
        Status::RangeRefused => {
            let mut runs = pieces.iter().flat_map(|piece| &piece.chunk.remote);
            match usize::try_from(answer.fact).ok().and_then(|at| runs.nth(at)) {
                Some(run) => MoverError::RangeRefused {
                    peer: peer.into(),
                    run: *run,
                },
                None => bad("refused run", answer.fact, 0),
            }
        }
        Status::Ok => bad("id", answer.id, 0),
        Status::BadFrame => bad("request", 0, answer.fact),
    }
}

fn broken(peer: &str, bad: Bad) -> MoverError {
    let peer = peer.to_string();
    match bad {
        Bad::Magic { got } => MoverError::BadMagic {
            peer,
            got,
            expected: wire::MAGIC,
        },
        Bad::Version { got } => MoverError::BadVersion {
            peer,
            got,
            expected: wire::VERSION,
        },
        Bad::Field { what, got, expected } => MoverError::BadFrame {
            peer,
            what,
            got,
            expected,
        },
    }
}
