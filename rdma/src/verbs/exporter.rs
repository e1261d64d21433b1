//! The exporter's thread: accepts side channels, connects queue pairs for who shows a lease's token, answers what may be
//! read. The bytes are the devices' part. Started and joined by [`super::VerbsMover`].

use std::{
    collections::HashMap,
    io::{self, ErrorKind},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use mio::{Events, Interest, Poll, Token, Waker, net::TcpListener};

use super::{channel::Channel, config::VerbsConfig, door::Shared};

const LISTENER: Token = Token(0);
const WAKER: Token = Token(1);
const FIRST: usize = 2;

/// How often leases are looked at for their end while there are side channels.
const TICK: Duration = Duration::from_millis(10);

pub(super) struct Exporter {
    shared: Arc<Shared>,
    config: VerbsConfig,
    poll: Poll,
    listener: TcpListener,
    channels: HashMap<Token, Channel>,
    next: usize,
}

impl Exporter {
    /// Registers the listener; the waker makes [`Exporter::run`] look at `stop` and at doors that were shut.
    pub(super) fn new(
        shared: Arc<Shared>,
        config: VerbsConfig,
        mut listener: TcpListener,
    ) -> io::Result<(Self, Waker)> {
        let poll = Poll::new()?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        Ok((
            Exporter {
                shared,
                config,
                poll,
                listener,
                channels: HashMap::new(),
                next: FIRST,
            },
            waker,
        ))
    }

    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(256);
        let mut swept = Instant::now();
        while !self.shared.stop.load(Ordering::SeqCst) {
            let timeout = match self.channels.values().any(Channel::is_ready) {
                true => Some(Duration::ZERO),
                false => (!self.channels.is_empty()).then_some(TICK),
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
            let mut all = now.saturating_duration_since(swept) >= TICK;
            for event in &events {
                // A door was shut: its peer is told.
                all |= event.token() == WAKER;
                if let Some(channel) = self.channels.get_mut(&event.token()) {
                    channel.readable |= event.is_readable() || event.is_read_closed() || event.is_error();
                    channel.writable |= event.is_writable() || event.is_write_closed() || event.is_error();
                }
            }
            self.accept(now);
            if all {
                swept = now;
            }
            self.serve(all, now);
        }
        for token in self.channels.keys().copied().collect::<Vec<_>>() {
            self.close(token);
        }
    }

    fn accept(&mut self, now: Instant) {
        loop {
            let mut socket = match self.listener.accept() {
                Ok((socket, _)) => socket,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                // Out of descriptors, or a peer that went before it was accepted: tried again on the next turn.
                Err(e) => return tracing::warn!(error = %e, "cannot accept"),
            };
            let token = Token(self.next);
            let full = self.channels.len() >= self.config.connections;
            if full {
                tracing::debug!(limit = self.config.connections, "side channel turned away");
                Channel::turn_away(socket, self.config.connections);
                continue;
            }
            self.next += 1;
            let interest = Interest::READABLE | Interest::WRITABLE;
            let ready = socket
                .set_nodelay(true)
                .and_then(|()| self.poll.registry().register(&mut socket, token, interest));
            if let Err(e) = ready {
                tracing::debug!(error = %e, "side channel lost before it began");
                continue;
            }
            self.channels.insert(token, Channel::new(socket, token.0 as u64, now));
            self.shared.connections.store(self.channels.len(), Ordering::Relaxed);
        }
    }

    /// Those that have something to do, or all to see whether their leases live.
    fn serve(&mut self, all: bool, now: Instant) {
        let over: Vec<Token> = self
            .channels
            .iter_mut()
            .filter(|(_, channel)| all || channel.is_ready())
            .filter_map(|(token, channel)| (!channel.drive(&self.shared, &self.config, now)).then_some(*token))
            .collect();
        over.into_iter().for_each(|token| self.close(token));
    }

    fn close(&mut self, token: Token) {
        if let Some(mut channel) = self.channels.remove(&token) {
            // Fails only for a socket that is not registered, which is what is wanted.
            let _ = self.poll.registry().deregister(&mut channel.socket);
        }
        self.shared.forget(token.0 as u64);
        self.shared.connections.store(self.channels.len(), Ordering::Relaxed);
    }
}
