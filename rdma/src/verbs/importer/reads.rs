//! Reads as they begin and end: cut into chunks, placed on a line, asked for, done.

use std::{collections::VecDeque, net::SocketAddr, sync::Arc, time::Instant};

use mio::{Interest, Token};

use super::{
    super::{
        job::{Cut, Job},
        line::{Cause, Line},
        read::{Read, Ticket},
    },
    Importer,
};
use crate::{
    error::MoverError,
    mover::{Done, LeaseToken, ReadOptions, ReadStats, call},
    plan::Chunk,
};

/// A read that has begun.
pub(super) struct Active {
    pub(super) line: usize,
    pub(super) address: SocketAddr,
    pub(super) peer: Arc<str>,
    pub(super) token: LeaseToken,
    pub(super) options: ReadOptions,
    pub(super) begun: Instant,
    /// What was not asked for, with its place in the read.
    pub(super) waiting: VecDeque<(u64, Chunk)>,
    pub(super) bytes: u64,
    pub(super) chunks: u64,
    pub(super) landed: u64,
    /// Batches that are not complete.
    pub(super) outstanding: u32,
    /// Its line stood before it began, and may have ended unnoticed: it may begin anew once.
    pub(super) on_old_line: bool,
    pub(super) restarted: bool,
    pub(super) ending: Option<(MoverError, Instant)>,
    pub(super) ticket: Ticket,
    pub(super) done: Done,
}

impl Importer<'_> {
    pub(in super::super) fn begin(&mut self, read: Read, now: Instant) {
        let Read {
            id,
            peer,
            plan,
            token,
            options,
            ticket,
            begun,
            done,
        } = read;
        let full = self.reads.len() >= self.config.reads;
        let full = full.then_some(MoverError::TooMany {
            what: "reads",
            limit: self.config.reads as u64,
        });
        let (address, chunks) = match plan.and_then(|plan| full.map_or(Ok(plan), Err)) {
            Ok((_, chunks)) if chunks.is_empty() => {
                drop(ticket);
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
                drop(ticket);
                return call(done, Err(error));
            }
        };
        let count = chunks.len() as u64;
        let mut bytes = 0;
        let waiting = chunks.into_iter().map(|chunk| {
            let base = bytes;
            bytes += chunk.len;
            (base, chunk)
        });
        let waiting = waiting.collect();
        let active = Active {
            line: 0,
            address,
            peer,
            token,
            options,
            begun,
            waiting,
            bytes,
            chunks: count,
            landed: 0,
            outstanding: 0,
            on_old_line: false,
            restarted: false,
            ending: None,
            ticket,
            done,
        };
        self.reads.insert(id, active);
        self.place(id, now);
    }

    /// Gives a read to the line of its peer and token, which is dialed if there is none.
    pub(super) fn place(&mut self, id: u64, now: Instant) {
        let Some(read) = self.reads.get_mut(&id) else { return };
        let key = (read.address, read.token.0);
        let known = self
            .current
            .get(&key)
            .copied()
            .filter(|line| self.lines.contains_key(line));
        read.on_old_line = known.is_some();
        let at = match known {
            Some(at) => at,
            None => match self.dial(id, now) {
                Ok(at) => at,
                Err(error) => return self.finish(id, Err(error)),
            },
        };
        let Some((line, read)) = self.lines.get_mut(&at).zip(self.reads.get_mut(&id)) else {
            return;
        };
        read.line = at;
        line.reads += 1;
        line.queue.push_back(id);
        self.current.insert(key, at);
        self.pump(at, now);
    }

    pub(super) fn dial(&mut self, id: u64, now: Instant) -> Result<usize, MoverError> {
        let Some(read) = self.reads.get(&id) else {
            return Err(MoverError::Closed);
        };
        let mut line = Line::dial(self.rails, &self.config, &read.peer, read.address, read.token, now)?;
        let at = self.next_line;
        self.next_line += 1;
        let interest = Interest::READABLE | Interest::WRITABLE;
        let registered = self.poll.registry().register(&mut line.socket, Token(at), interest);
        registered.map_err(|e| MoverError::Connect {
            peer: read.peer.to_string(),
            errno: crate::error::errno(&e),
        })?;
        self.lines.insert(at, line);
        Ok(at)
    }

    /// Asks for waiting chunks as far as the line's window goes, one of each read in turn.
    pub(super) fn pump(&mut self, at: usize, now: Instant) {
        let Some(line) = self.lines.get_mut(&at) else { return };
        while let Some(id) = line.queue.pop_front() {
            let Some(read) = self
                .reads
                .get_mut(&id)
                .filter(|read| read.line == at && read.ending.is_none())
            else {
                continue;
            };
            let Some((_, chunk)) = read.waiting.front() else {
                continue;
            };
            if !line.has_room(chunk.len, &self.config) {
                line.queue.push_front(id);
                return;
            }
            let Some((base, chunk)) = read.waiting.pop_front() else {
                continue;
            };
            let (len, checksum) = (chunk.len, read.options.checksum);
            let job = Job {
                read: id,
                line: at,
                base,
                chunk,
                crc: 0,
                cut: Cut::default(),
                outstanding: 0,
                failed: false,
                tries: 0,
            };
            let job = self.jobs.add(job);
            if let Some(Job { chunk, .. }) = self.jobs.one(job) {
                line.ask(job, &chunk.remote, len, checksum, now);
            }
            line.queue.push_back(id);
        }
    }

    pub(super) fn land(&mut self, id: u64, bytes: u64) {
        let Some(read) = self.reads.get_mut(&id) else { return };
        read.landed += bytes;
        if read.landed == read.bytes {
            let stats = ReadStats {
                bytes: read.bytes,
                chunks: read.chunks,
                elapsed: read.begun.elapsed(),
            };
            self.finish(id, Ok(stats));
        }
    }

    /// Ends a read from this side; it is done once nothing of it is on its way.
    pub(super) fn give_up(&mut self, id: u64, error: MoverError, now: Instant) {
        let Some(read) = self.reads.get_mut(&id) else { return };
        if read.ending.is_none() {
            read.ending = Some((error, now));
            read.waiting.clear();
        }
        self.drained(id);
    }

    pub(super) fn drained(&mut self, id: u64) {
        let Some(read) = self.reads.get_mut(&id) else { return };
        if read.outstanding == 0
            && let Some((error, _)) = read.ending.take()
        {
            self.finish(id, Err(error));
        }
    }

    /// Tells the read's owner. Nothing of it is on its way.
    pub(super) fn finish(&mut self, id: u64, result: Result<ReadStats, MoverError>) {
        let Some(read) = self.reads.remove(&id) else { return };
        let failed = result.is_err();
        if let Some(line) = self.lines.get_mut(&read.line) {
            line.reads = line.reads.saturating_sub(1);
            // Whoever is left to answer does it for nobody: the exporter learns so at once.
            if failed && line.reads == 0 && !line.asked.is_empty() && line.ending.is_none() {
                self.end_line(read.line, MoverError::Cancelled, Cause::Peer, Instant::now());
            }
        }
        let Active { ticket, done, .. } = read;
        drop(ticket);
        call(done, result);
    }
}
