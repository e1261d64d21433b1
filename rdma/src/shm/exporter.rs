//! The exporter's side of the control sockets: looks whether a lease covers what is asked, and hands out the words and
//! the files. The mover's thread (`driver`) drives it; bytes are copied by the importers.

use std::{
    collections::{HashMap, HashSet},
    io::ErrorKind,
    sync::Arc,
    time::Instant,
};

use mio::Token;

use super::{
    config::ShmConfig,
    grants::{Grants, Link},
    memory,
    socket::{Outbox, Socket, own_user},
    wire::{self, Answer, Ask, Bad, Reply, Status},
};
use crate::{
    lease::{Denied, Leases},
    region::{RegionKey, Regions, Run},
};

/// Frames that wait for a peer to read; with more it is given up.
const MAX_DUE: usize = 4096;
/// Frames answered for one connection before the others have their turn.
const TURN: usize = 8;

/// What the mover and its thread have in common.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) regions: Arc<Regions>,
    pub(super) leases: Leases,
    pub(super) grants: Grants,
}

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

pub(super) struct Exporter {
    shared: Arc<Shared>,
    config: ShmConfig,
    connections: HashMap<Token, Served>,
}

/// One accepted connection.
struct Served {
    socket: Arc<Socket>,
    /// Made with the first valid token (XFER-10: no file before it).
    link: Option<Arc<Link>>,
    /// Regions whose files it has.
    known: HashSet<RegionKey>,
    out: Outbox,
    opened: Instant,
    /// It broke the protocol: what is due is still sent.
    refused: bool,
}

impl Exporter {
    pub(super) fn new(shared: Arc<Shared>, config: ShmConfig) -> Self {
        Exporter {
            shared,
            config,
            connections: HashMap::new(),
        }
    }

    /// Takes a fresh connection in, or turns it away: `false`.
    pub(super) fn accept(&mut self, token: Token, socket: &Arc<Socket>, now: Instant) -> bool {
        let user = socket.peer_user();
        if user.as_ref().ok() != Some(&own_user()) {
            tracing::warn!(?user, "a connection of another user was refused");
            return false;
        }
        let limit = self.config.connections;
        if self.connections.len() >= limit {
            let busy = Reply::Answer(answer(0, Status::Busy, limit as u64));
            // A fresh socket takes a frame; if not, the peer sees the connection end, which says as much.
            let _ = socket.send(&wire::encode_reply(&busy), None);
            return false;
        }
        let served = Served {
            socket: socket.clone(),
            link: None,
            known: HashSet::new(),
            out: Outbox::default(),
            opened: now,
            refused: false,
        };
        self.connections.insert(token, served);
        true
    }

    pub(super) fn has(&self, token: Token) -> bool {
        self.connections.contains_key(&token)
    }

    pub(super) fn count(&self) -> usize {
        self.connections.len()
    }

    /// Answers what came.
    pub(super) fn drive(&mut self, token: Token, buffer: &mut [u8], now: Instant) -> Next {
        let Some(served) = self.connections.get_mut(&token) else {
            return Next::Wait;
        };
        for _ in 0..TURN {
            if served.out.flush(&served.socket).is_err() {
                return Next::Close;
            }
            if served.refused {
                return if served.out.len() == 0 { Next::Close } else { Next::Wait };
            }
            let len = match served.socket.receive(buffer) {
                Ok(received) if received.len > 0 => received.len,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Next::Wait,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                _ => return Next::Close,
            };
            let asked = wire::decode_ask(&buffer[..len]);
            let reply = match asked {
                Ok(ask) => served.answer(&self.shared, &self.config, &ask, now),
                Err(bad) => {
                    served.refused = true;
                    refusal(bad)
                }
            };
            served.out.push(wire::encode_reply(&Reply::Answer(reply)), None);
            if served.out.len() > MAX_DUE {
                return Next::Close;
            }
        }
        Next::Turn
    }

    /// Forgets a connection; gives its socket to be taken from the poll.
    pub(super) fn remove(&mut self, token: Token) -> Option<Arc<Socket>> {
        let served = self.connections.remove(&token)?;
        if let Some(link) = &served.link {
            self.shared.grants.forget(link);
        }
        Some(served.socket)
    }

    /// Connections that showed no valid token in time (F12).
    pub(super) fn overdue(&self, now: Instant) -> Vec<Token> {
        let limit = self.config.request;
        let over = |served: &Served| served.link.is_none() && now.saturating_duration_since(served.opened) >= limit;
        let tokens = self.connections.iter().filter(|(_, served)| over(served));
        tokens.map(|(token, _)| *token).collect()
    }
}

impl Served {
    fn answer(&mut self, shared: &Shared, config: &ShmConfig, ask: &Ask, now: Instant) -> Answer {
        let refuse = |status, fact| answer(ask.id, status, fact);
        let lease = match shared.leases.find(&ask.token, now) {
            Ok(lease) => lease,
            Err(denied) => return refuse(status(denied), 0),
        };
        let refuse_run = |run: &Run| {
            let index = ask.runs.iter().position(|each| each == run).unwrap_or(0);
            refuse(Status::RangeRefused, index as u64)
        };
        if let Some(run) = lease.uncovered(&ask.runs) {
            return refuse_run(run);
        }
        let link = match self.link(config) {
            Ok(link) => link,
            Err(error) => {
                tracing::error!(%error, "no words for a connection");
                return refuse(Status::Busy, 0);
            }
        };
        let slot = match lease.pass(now, || shared.grants.grant(&ask.token, &link)) {
            Ok(Some(slot)) => slot,
            Ok(None) => return refuse(Status::Busy, link.slots().into()),
            Err(denied) => return refuse(status(denied), 0),
        };
        let regions = shared.regions.view();
        for run in ask.runs.iter().filter(|run| run.len > 0) {
            if !self.known.contains(&run.region) {
                let file = regions
                    .region(run.region)
                    .and_then(|region| Some((region.len(), region.file()?)));
                let Some((len, file)) = file else {
                    return refuse_run(run);
                };
                let (key, offset) = (run.region, file.offset);
                let frame = wire::encode_reply(&Reply::Region { key, offset, len });
                self.out.push(frame, Some(file.file.clone()));
                self.known.insert(key);
            }
        }
        let (mut sums, mut rest) = (Vec::with_capacity(ask.chunks.len()), &ask.runs[..]);
        for &count in &ask.chunks {
            let (chunk, behind) = rest.split_at((count as usize).min(rest.len()));
            rest = behind;
            match lease.pass(now, || memory::checksum(&regions, chunk)) {
                Ok(Ok(sum)) => sums.push(sum),
                Ok(Err(run)) => return refuse_run(&run),
                Err(denied) => return refuse(status(denied), 0),
            }
        }
        Answer {
            slot: slot.index,
            generation: slot.generation,
            left: u64::try_from(lease.left(now).as_nanos()).unwrap_or(u64::MAX),
            sums,
            ..refuse(Status::Ok, 0)
        }
    }

    /// The words of this connection; the peer is sent them with the first answer that needs them.
    fn link(&mut self, config: &ShmConfig) -> Result<Arc<Link>, crate::MoverError> {
        if let Some(link) = &self.link {
            return Ok(link.clone());
        }
        let slots = u32::try_from(config.leases).unwrap_or(u32::MAX);
        let (link, file) = Link::new(self.socket.clone(), slots)?;
        self.out.push(wire::encode_reply(&Reply::Page { slots }), Some(file));
        Ok(self.link.insert(Arc::new(link)).clone())
    }
}

fn answer(id: u64, status: Status, fact: u64) -> Answer {
    Answer {
        status,
        id,
        slot: 0,
        generation: 0,
        left: 0,
        fact,
        sums: Vec::new(),
    }
}

fn status(denied: Denied) -> Status {
    match denied {
        Denied::Unknown => Status::UnknownToken,
        Denied::Expired => Status::Expired,
        Denied::Revoked => Status::Revoked,
    }
}

fn refusal(bad: Bad) -> Answer {
    match bad {
        Bad::Magic { .. } => answer(0, Status::BadFrame, wire::MAGIC.into()),
        Bad::Version { .. } => answer(0, Status::BadVersion, wire::VERSION.into()),
        Bad::Field { expected, .. } => answer(0, Status::BadFrame, expected),
    }
}
