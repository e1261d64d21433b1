//! The mover's one control thread: connections of both sides, deadlines, commands. It copies nothing, so that nothing it
//! waits for is held up by a copy.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind},
    sync::Arc,
    time::{Duration, Instant},
};

use mio::{Events, Interest, Poll, Registry, Token, Waker, unix::SourceFd};

use super::{
    endpoint::Endpoint,
    exporter::{Exporter, Next},
    importer::Importer,
    read::Read,
    socket::Socket,
    wire::MAX_FRAME,
};
use crate::{error::MoverError, inbox};

const WAKER: Token = Token(0);
const LISTENER: Token = Token(1);
const FIRST: usize = 2;

/// How often waits are looked at while there are any.
const TICK: Duration = Duration::from_millis(10);
/// How often connections are looked at.
const IDLE_TICK: Duration = Duration::from_secs(1);

/// What the mover and its copying threads tell the thread.
pub(super) enum Command {
    /// Where to, or why nothing will be read.
    Read(Arc<Read>, Result<Endpoint, MoverError>),
    /// A read has room for more to be asked.
    More(u64),
    /// A read's gates are shut: tell its owner.
    Cancelled(u64),
}

/// Hands commands to the thread.
pub(super) type Inbox = inbox::Inbox<Command>;

/// Tells the owner of a read that will not be begun.
pub(super) fn call_off(command: Command) {
    if let Command::Read(read, _) = command {
        read.finish(Err(MoverError::Closed));
    }
}

pub(super) struct Driver {
    inbox: Arc<Inbox>,
    poll: Poll,
    listener: Socket,
    exporter: Exporter,
    importer: Importer,
    turns: VecDeque<Token>,
    next: usize,
    buffer: Box<[u8]>,
}

impl Driver {
    pub(super) fn inbox() -> io::Result<(Poll, Arc<Inbox>)> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        Ok((poll, Inbox::new(waker)))
    }

    pub(super) fn new(
        poll: Poll,
        inbox: Arc<Inbox>,
        listener: Socket,
        exporter: Exporter,
        importer: Importer,
    ) -> io::Result<Self> {
        poll.registry()
            .register(&mut SourceFd(&listener.raw()), LISTENER, Interest::READABLE)?;
        Ok(Driver {
            inbox,
            poll,
            listener,
            exporter,
            importer,
            turns: VecDeque::new(),
            next: FIRST,
            buffer: vec![0; MAX_FRAME].into(),
        })
    }

    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(256);
        let mut swept = Instant::now();
        while let Some(commands) = self.inbox.take() {
            commands.into_iter().for_each(|command| self.obey(command));
            for _ in 0..self.turns.len() {
                if let Some(token) = self.turns.pop_front() {
                    self.drive(token);
                }
            }
            let (now, idle) = (Instant::now(), self.importer.is_idle());
            let tick = if idle { IDLE_TICK } else { TICK };
            if now.saturating_duration_since(swept) >= tick {
                swept = now;
                self.sweep(now);
            }
            let timeout = match (self.turns.is_empty(), idle && self.exporter.count() == 0) {
                (false, _) => Some(Duration::ZERO),
                (true, false) => Some(tick),
                (true, true) => None,
            };
            match self.poll.poll(&mut events, timeout) {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => {
                    tracing::error!(error = %e, "the shm mover stopped: poll failed");
                    break;
                }
            }
            for event in &events {
                match event.token() {
                    WAKER => {}
                    LISTENER => self.accept(),
                    token => self.drive(token),
                }
            }
        }
        self.importer.close();
        self.inbox.close().into_iter().for_each(call_off);
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Read(read, Err(error)) => read.finish(Err(error)),
            Command::Read(read, Ok(to)) => {
                let fresh = Token(self.next);
                self.next += 1;
                let registry = self.poll.registry();
                self.importer
                    .begin(read, &to, fresh, |socket| watch(registry, socket, fresh));
            }
            Command::More(id) => self.importer.more(id),
            Command::Cancelled(id) => self.importer.cancel(id),
        }
    }

    fn accept(&mut self) {
        loop {
            let socket = match self.listener.accept() {
                Ok(socket) => Arc::new(socket),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => {
                    // Out of descriptors, say: who is left in the backlog is accepted with the next.
                    tracing::warn!(error = %e, "a connection was not accepted");
                    return;
                }
            };
            let token = Token(self.next);
            self.next += 1;
            if let Err(e) = watch(self.poll.registry(), &socket, token) {
                tracing::warn!(error = %e, "a connection was not accepted");
                continue;
            }
            if self.exporter.accept(token, &socket, Instant::now()) {
                self.drive(token);
            } else {
                unwatch(self.poll.registry(), &socket);
            }
        }
    }

    fn drive(&mut self, token: Token) {
        let next = if self.exporter.has(token) {
            self.exporter.drive(token, &mut self.buffer, Instant::now())
        } else if self.importer.has(token) {
            match self.importer.drive(token, &mut self.buffer) {
                Ok(next) => next,
                Err(error) => {
                    tracing::debug!(%error, "a peer is let go");
                    let registry = self.poll.registry();
                    return self.importer.remove(token, &error, |socket| unwatch(registry, socket));
                }
            }
        } else {
            return;
        };
        match next {
            Next::Wait => {}
            Next::Turn => self.turns.push_back(token),
            Next::Close => self.close(token),
        }
    }

    fn close(&mut self, token: Token) {
        if let Some(socket) = self.exporter.remove(token) {
            unwatch(self.poll.registry(), &socket);
        }
    }

    fn sweep(&mut self, now: Instant) {
        self.importer.sweep(now);
        self.exporter
            .overdue(now)
            .into_iter()
            .for_each(|token| self.close(token));
    }
}

fn watch(registry: &Registry, socket: &Socket, token: Token) -> io::Result<()> {
    registry.register(
        &mut SourceFd(&socket.raw()),
        token,
        Interest::READABLE | Interest::WRITABLE,
    )
}

fn unwatch(registry: &Registry, socket: &Socket) {
    if let Err(e) = registry.deregister(&mut SourceFd(&socket.raw())) {
        tracing::warn!(error = %e, "a connection was not taken from the poll");
    }
}
