//! The exporter's thread: accepts connections and serves them. Started and joined by [`super::TcpMover`].

use std::{
    collections::{HashMap, VecDeque},
    io::{self, ErrorKind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use mio::{Events, Interest, Poll, Token, Waker, event::Event, net::TcpListener};

use super::{
    config::TcpConfig,
    connection::{Connection, Next},
};
use crate::{lease::Leases, region::Regions};

const LISTENER: Token = Token(0);
const WAKER: Token = Token(1);
const FIRST: usize = 2;

/// How often waits are looked at, as a part of the shortest.
const SWEEPS: u32 = 4;

/// What the exporter shares with the mover.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) leases: Leases,
    pub(super) regions: Arc<Regions>,
    pub(super) connections: AtomicUsize,
    pub(super) stop: AtomicBool,
}

pub(super) struct Exporter {
    shared: Arc<Shared>,
    config: TcpConfig,
    poll: Poll,
    listener: TcpListener,
    connections: HashMap<Token, Connection>,
    turns: VecDeque<Token>,
    next: usize,
    scratch: Vec<u8>,
}

impl Exporter {
    /// Registers the listener; the waker ends [`Exporter::run`] once `stop` is set.
    pub(super) fn new(shared: Arc<Shared>, config: TcpConfig, mut listener: TcpListener) -> io::Result<(Self, Waker)> {
        let poll = Poll::new()?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let exporter = Exporter {
            shared,
            config,
            poll,
            listener,
            connections: HashMap::new(),
            turns: VecDeque::new(),
            next: FIRST,
            scratch: vec![0; 64 << 10],
        };
        Ok((exporter, waker))
    }

    pub(super) fn run(mut self) {
        let tick = [self.config.request, self.config.stall, self.config.idle]
            .into_iter()
            .min()
            .unwrap_or_default();
        let tick = (tick / SWEEPS).clamp(Duration::from_millis(1), Duration::from_secs(1));
        let mut events = Events::with_capacity(256);
        let mut swept = Instant::now();
        while !self.shared.stop.load(Ordering::SeqCst) {
            let timeout = match (self.turns.is_empty(), self.connections.is_empty()) {
                (false, _) => Some(Duration::ZERO),
                (true, false) => Some(tick),
                (true, true) => None,
            };
            match self.poll.poll(&mut events, timeout) {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => {
                    tracing::error!(error = %e, "exporter stopped: poll failed");
                    break;
                }
            }
            let now = Instant::now();
            for event in &events {
                self.notice(event, now);
            }
            self.serve(now);
            if now.saturating_duration_since(swept) >= tick {
                swept = now;
                self.sweep(now);
            }
        }
        self.shared.connections.store(0, Ordering::Relaxed);
    }

    fn notice(&mut self, event: &Event, now: Instant) {
        match event.token() {
            LISTENER => self.accept(now),
            WAKER => {}
            token => {
                let Some(connection) = self.connections.get_mut(&token) else {
                    return;
                };
                connection.readable |= event.is_readable() || event.is_read_closed() || event.is_error();
                connection.writable |= event.is_writable() || event.is_write_closed() || event.is_error();
                queue(&mut self.turns, token, connection);
            }
        }
    }

    fn accept(&mut self, now: Instant) {
        loop {
            let mut socket = match self.listener.accept() {
                Ok((socket, _)) => socket,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                // Out of descriptors, or a peer that went before it was accepted: the next sweep tries again.
                Err(e) => return tracing::warn!(error = %e, "cannot accept"),
            };
            if self.connections.len() >= self.config.connections {
                tracing::debug!(limit = self.config.connections, "connection turned away");
                Connection::new(socket, now).turn_away(self.config.connections);
                continue;
            }
            let token = Token(self.next);
            self.next += 1;
            let interest = Interest::READABLE | Interest::WRITABLE;
            let ready = socket
                .set_nodelay(true)
                .and_then(|()| self.poll.registry().register(&mut socket, token, interest));
            if let Err(e) = ready {
                tracing::debug!(error = %e, "connection lost before it began");
                continue;
            }
            let mut connection = Connection::new(socket, now);
            queue(&mut self.turns, token, &mut connection);
            self.connections.insert(token, connection);
            self.shared.connections.store(self.connections.len(), Ordering::Relaxed);
        }
    }

    /// One turn for each connection that asked for one.
    fn serve(&mut self, now: Instant) {
        for _ in 0..self.turns.len() {
            let Some(token) = self.turns.pop_front() else { return };
            let Some(connection) = self.connections.get_mut(&token) else {
                continue;
            };
            connection.queued = false;
            match connection.drive(&self.shared.leases, &self.shared.regions, &mut self.scratch, now) {
                Next::Wait => {}
                Next::Turn => queue(&mut self.turns, token, connection),
                Next::Close => self.close(token),
            }
        }
    }

    fn sweep(&mut self, now: Instant) {
        let overdue = self
            .connections
            .iter()
            .filter(|(_, each)| each.is_overdue(&self.config, now));
        for token in overdue.map(|(token, _)| *token).collect::<Vec<_>>() {
            tracing::debug!("connection closed: its peer kept it waiting");
            self.close(token);
        }
        self.accept(now);
    }

    fn close(&mut self, token: Token) {
        if let Some(mut connection) = self.connections.remove(&token) {
            // Fails only for a socket that is not registered, which is what is wanted.
            let _ = self.poll.registry().deregister(&mut connection.socket);
        }
        self.shared.connections.store(self.connections.len(), Ordering::Relaxed);
    }
}

fn queue(turns: &mut VecDeque<Token>, token: Token, connection: &mut Connection) {
    if !connection.queued {
        connection.queued = true;
        turns.push_back(token);
    }
}
