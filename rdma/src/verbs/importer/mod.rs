//! The importer's thread: asks what may be read, posts READs over the paths of each lease, calls `done` when nothing of a
//! read is on its way any more. Started and joined by [`super::VerbsMover`].
//!
//! `reads` begins and ends reads, `flow` takes them through grants, work requests and completions, `ends` sees to lines,
//! paths and devices that fail. All of it is one thread's.

mod ends;
mod flow;
mod reads;

use std::{
    collections::HashMap,
    io::{self, ErrorKind},
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use mio::{Events, Interest, Poll, Token, Waker, unix::SourceFd};

use super::{
    config::VerbsConfig,
    device::Completion,
    job::Jobs,
    line::{Cause, Heard, Line},
    memory::Memory,
    rail::Rail,
    read::{Command, Inbox, call_off},
    work::{Finished, Scratch},
};
use crate::error::MoverError;
use reads::Active;

const WAKER: usize = 0;
const FIRST: usize = 1 << 16;

/// How often waits are looked at while there are any.
const TICK: Duration = Duration::from_millis(5);
/// How often idle lines are looked at.
const IDLE_TICK: Duration = Duration::from_secs(1);

pub(super) struct Importer<'m> {
    lines: HashMap<usize, Line<'m>>,
    inbox: Arc<Inbox>,
    memory: &'m Memory,
    rails: &'m [Arc<Rail>],
    config: VerbsConfig,
    poll: Poll,
    reads: HashMap<u64, Active>,
    jobs: Jobs,
    /// The line that takes new reads, by peer and token.
    current: HashMap<(SocketAddr, [u8; 32]), usize>,
    /// Line, path and place of each queue pair, by the number that completions carry.
    queues: HashMap<u32, (usize, usize, usize)>,
    /// Work requests on each rail.
    posted: Vec<u32>,
    next_line: usize,
    next_queue: u32,
    scratch: Scratch,
    turn: Vec<usize>,
    heard: Vec<Heard>,
    completions: Vec<Completion>,
    finished: Vec<Finished>,
    #[cfg(feature = "fault")]
    pub(super) fault: Arc<std::sync::Mutex<Option<crate::fault::Fault>>>,
}

/// Registers what the thread listens to; the poll is for [`Importer::new`].
pub(super) fn listen(rails: &[Arc<Rail>]) -> io::Result<(Poll, Waker)> {
    let poll = Poll::new()?;
    let waker = Waker::new(poll.registry(), Token(WAKER))?;
    for (at, rail) in rails.iter().enumerate() {
        for (side, fd) in [rail.completions.events(), rail.domain.device.events()]
            .into_iter()
            .enumerate()
        {
            poll.registry()
                .register(&mut SourceFd(&fd), Token(1 + at * 2 + side), Interest::READABLE)?;
        }
    }
    Ok((poll, waker))
}

impl<'m> Importer<'m> {
    pub(super) fn new(
        memory: &'m Memory,
        rails: &'m [Arc<Rail>],
        config: VerbsConfig,
        poll: Poll,
        inbox: Arc<Inbox>,
    ) -> Self {
        Importer {
            lines: HashMap::new(),
            inbox,
            memory,
            rails,
            poll,
            reads: HashMap::new(),
            jobs: Jobs::default(),
            current: HashMap::new(),
            queues: HashMap::new(),
            posted: vec![0; rails.len()],
            next_line: FIRST,
            next_queue: 0,
            scratch: Scratch::new(config.batch as usize),
            turn: Vec::new(),
            heard: Vec::new(),
            completions: Vec::with_capacity(256),
            finished: Vec::with_capacity(256),
            config,
            #[cfg(feature = "fault")]
            fault: Arc::default(),
        }
    }

    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(256);
        let (mut swept, mut busy) = (Instant::now(), Instant::now());
        while let Some(commands) = self.inbox.take() {
            let now = Instant::now();
            let mut moved = !commands.is_empty();
            commands.into_iter().for_each(|command| self.obey(command, now));
            moved |= self.complete(now);
            moved |= self.serve(now);
            let tick = if self.reads.is_empty() { IDLE_TICK } else { TICK };
            if now.saturating_duration_since(swept) >= tick {
                swept = now;
                self.sweep(now);
            }
            if moved {
                busy = now;
            }
            let timeout = match now.saturating_duration_since(busy) < self.config.spin {
                true => Some(Duration::ZERO),
                // Armed, then looked at once more: a completion that came before is not announced.
                false if self.arm() && self.complete(now) => Some(Duration::ZERO),
                false => (!self.reads.is_empty() || !self.lines.is_empty()).then_some(tick),
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
    }

    fn obey(&mut self, command: Command, now: Instant) {
        match command {
            Command::Read(read) => self.begin(read, now),
            Command::Cancelled(id) => self.give_up(id, MoverError::Cancelled, now),
        }
    }

    fn notice(&mut self, event: &mio::event::Event) {
        let token = event.token().0;
        if let Some(line) = self.lines.get_mut(&token) {
            line.readable |= event.is_readable() || event.is_read_closed() || event.is_error();
            line.writable |= event.is_writable() || event.is_write_closed() || event.is_error();
        } else if token != WAKER && token < FIRST && (token - 1) % 2 == 1 {
            self.hear_device((token - 1) / 2);
        }
    }

    /// Drives lines whose sockets are ready, posts what is granted, buries lines that have drained.
    fn serve(&mut self, now: Instant) -> bool {
        let mut moved = false;
        // Both lists are kept, so that a turn allocates nothing.
        let (mut turn, mut heard) = (std::mem::take(&mut self.turn), std::mem::take(&mut self.heard));
        turn.extend(self.lines.keys());
        for at in turn.drain(..) {
            let Some(line) = self.lines.get_mut(&at) else { continue };
            let driven = line.drive(&mut heard, self.rails, &self.config, now);
            moved |= !heard.is_empty();
            heard.drain(..).for_each(|heard| self.hear(at, heard, now));
            if let Err(error) = driven {
                self.end_line(at, error, Cause::Peer, now);
                moved = true;
            }
            moved |= self.post(at, now);
            self.bury(at, now);
        }
        (self.turn, self.heard) = (turn, heard);
        moved
    }
}

/// However the thread ends, its reads are done.
impl Drop for Importer<'_> {
    fn drop(&mut self) {
        let left = self.inbox.close();
        // Destroys the queue pairs: nothing lands any more.
        self.lines.clear();
        for id in self.reads.keys().copied().collect::<Vec<_>>() {
            self.finish(id, Err(MoverError::Closed));
        }
        left.into_iter().for_each(call_off);
    }
}
