//! The importer's thread: asks what may be read, posts READs over the paths of each lease, calls `done` when nothing of a
//! read is on its way any more. Started and joined by [`super::VerbsMover`].

use std::{
    collections::{HashMap, VecDeque},
    io::{self, ErrorKind},
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use mio::{Events, Interest, Poll, Token, Waker, unix::SourceFd};

use super::{
    config::VerbsConfig,
    device::{Completion, Event},
    error::VerbsError,
    job::{Cut, Job, Jobs},
    library::ffi::ibv_wc_status as Status,
    line::{Heard, Line, State},
    memory::Memory,
    rail::Rail,
    read::{Command, Inbox, Read, Ticket, call, call_off},
    wire::Grant,
    work::{Finished, PIECES, Scratch, status},
};
use crate::{
    error::{MoverError, Wait},
    mover::{Done, LeaseToken, ReadOptions, ReadStats},
    plan::Chunk,
    region::Run,
};

const WAKER: usize = 0;
const FIRST: usize = 1 << 16;

/// How often waits are looked at while there are any.
const TICK: Duration = Duration::from_millis(5);
/// How often idle lines are looked at.
const IDLE_TICK: Duration = Duration::from_secs(1);
/// How long a read that ends waits for its work before its queue pairs are failed.
const GRACE: Duration = Duration::from_millis(10);
/// Bytes of a batch, so that a large run is spread over the queue pairs.
const BATCH: u64 = 1 << 20;
/// How often a chunk is read again over another path.
const TRIES: u8 = 4;

pub(super) struct Importer<'m> {
    // Before everything else: queue pairs are destroyed before a ticket says that a read is over.
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
    completions: Vec<Completion>,
    finished: Vec<Finished>,
    #[cfg(feature = "fault")]
    pub(super) fault: Arc<std::sync::Mutex<Option<crate::fault::Fault>>>,
}

/// A read that has begun.
struct Active {
    line: usize,
    address: SocketAddr,
    peer: Arc<str>,
    token: LeaseToken,
    options: ReadOptions,
    begun: Instant,
    /// What was not asked for, with its place in the read.
    waiting: VecDeque<(u64, Chunk)>,
    bytes: u64,
    chunks: u64,
    landed: u64,
    /// Batches that are not complete.
    outstanding: u32,
    /// Its line stood before it began, and may have ended unnoticed: it may begin anew once.
    on_old_line: bool,
    restarted: bool,
    ending: Option<(MoverError, Instant)>,
    ticket: Ticket,
    done: Done,
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
            completions: Vec::with_capacity(256),
            finished: Vec::with_capacity(256),
            config,
            #[cfg(feature = "fault")]
            fault: Arc::default(),
        }
    }

    pub(super) fn run(mut self) {
        self.inbox.begin();
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
        let left = self.inbox.close();
        // Destroys the queue pairs: nothing lands any more.
        self.lines.clear();
        for id in self.reads.keys().copied().collect::<Vec<_>>() {
            self.finish(id, Err(MoverError::Closed));
        }
        left.into_iter().for_each(call_off);
    }

    fn obey(&mut self, command: Command, now: Instant) {
        match command {
            Command::Read(read) => self.begin(read, now),
            Command::Cancelled(id) => self.give_up(id, MoverError::Cancelled, now),
        }
    }

    fn begin(&mut self, read: Read, now: Instant) {
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
    fn place(&mut self, id: u64, now: Instant) {
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

    fn dial(&mut self, id: u64, now: Instant) -> Result<usize, MoverError> {
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
    fn pump(&mut self, at: usize, now: Instant) {
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

    fn notice(&mut self, event: &mio::event::Event) {
        let token = event.token().0;
        if let Some(line) = self.lines.get_mut(&token) {
            line.readable |= event.is_readable() || event.is_read_closed() || event.is_error();
            line.writable |= event.is_writable() || event.is_write_closed() || event.is_error();
        } else if token != WAKER && token < FIRST && (token - 1) % 2 == 1 {
            self.hear_device((token - 1) / 2);
        }
    }

    /// F16's sibling for devices: a port that goes down takes its paths with it and no others.
    fn hear_device(&mut self, at: usize) {
        let rails = self.rails;
        let Some(rail) = rails.get(at) else { return };
        while let Some(event) = rail.domain.device.event() {
            let (device, port) = (rail.choice.device.as_str(), rail.choice.port);
            match event {
                Event::PortDown(number) if number == port => tracing::warn!(device, port, "port is down"),
                Event::Gone => tracing::warn!(device, "device is gone"),
                Event::PortUp(number) if number == port => {
                    tracing::info!(device, port, "port is up");
                    rail.set_down(false);
                    continue;
                }
                _ => continue,
            }
            rail.set_down(true);
            let now = Instant::now();
            for line in self.lines.keys().copied().collect::<Vec<_>>() {
                let paths = self.lines.get(&line).map_or(0, |line| line.paths.len());
                for path in 0..paths {
                    if self.lines.get(&line).is_some_and(|line| line.paths[path].rail == at) {
                        self.lose_path(line, path, VerbsError::DeviceDown { device: device.into() }.into(), now);
                    }
                }
                // One that was still greeting counted on the device.
                if self
                    .lines
                    .get(&line)
                    .is_some_and(|line| !matches!(line.state, State::Open))
                {
                    self.end_line(line, VerbsError::DeviceDown { device: device.into() }.into(), None, now);
                }
            }
        }
    }

    /// Drives lines whose sockets are ready, posts what is granted, buries lines that have drained.
    fn serve(&mut self, now: Instant) -> bool {
        let mut moved = false;
        for at in self.lines.keys().copied().collect::<Vec<_>>() {
            let mut heard = Vec::new();
            let Some(line) = self.lines.get_mut(&at) else { continue };
            let driven = line.drive(&mut heard, self.rails, &self.config, now);
            moved |= !heard.is_empty();
            heard.into_iter().for_each(|heard| self.hear(at, heard, now));
            if let Err(error) = driven {
                self.end_line(at, error, None, now);
                moved = true;
            }
            moved |= self.post(at, now);
            self.bury(at, now);
        }
        moved
    }

    fn hear(&mut self, at: usize, heard: Heard, now: Instant) {
        match heard {
            Heard::Welcome => {
                let Some(line) = self.lines.get_mut(&at) else { return };
                for (path, each) in line.paths.iter_mut().enumerate() {
                    for (place, (number, _)) in each.queues.iter_mut().enumerate() {
                        *number = self.next_queue;
                        self.queues.insert(self.next_queue, (at, path, place));
                        self.next_queue = self.next_queue.wrapping_add(1);
                    }
                }
            }
            Heard::Granted(job, grant) => self.grant(at, job, grant, now),
            Heard::Refused(job, head) => {
                let Some(job) = self.jobs.remove(job) else { return };
                let Some(line) = self.lines.get_mut(&at) else { return };
                line.inflight -= job.chunk.len;
                let error = line.refusal(&head, Some(&job.chunk.remote));
                self.give_up(job.read, error, now);
                self.pump(at, now);
            }
        }
    }

    /// XFER-10: keys are taken for what was asked, and only when they cover it.
    fn grant(&mut self, at: usize, number: usize, grant: Grant, now: Instant) {
        let Some((line, job)) = self.lines.get_mut(&at).zip(self.jobs.one(number)) else {
            return;
        };
        let named = |region| job.chunk.remote.iter().any(|run| run.region == region);
        let stray = grant
            .regions
            .iter()
            .map(|each| each.region)
            .find(|region| !named(*region));
        for each in grant.regions {
            line.keys.learn(each.region, each.len, each.keys);
        }
        let bare = job
            .chunk
            .remote
            .iter()
            .find(|run| !line.keys.covers(run))
            .map(|run| run.region);
        if let Some(region) = stray.or(bare) {
            let error = VerbsError::StrayKey {
                peer: line.peer.to_string(),
                region: region.0,
            };
            return self.end_line(at, error.into(), None, now);
        }
        if let Some(read) = self.reads.get_mut(&job.read) {
            read.on_old_line = false;
        }
        job.crc = grant.crc;
        line.ready.push_back(number);
    }

    /// Posts what is granted, in batches, each to the queue pair with the fewest bytes on its way.
    fn post(&mut self, at: usize, now: Instant) -> bool {
        let mut moved = false;
        while let Some(number) = self.lines.get(&at).and_then(|line| line.ready.front().copied()) {
            let Some(line) = self.lines.get_mut(&at).filter(|line| line.ending.is_none()) else {
                break;
            };
            let Some(job) = self.jobs.one(number) else {
                line.ready.pop_front();
                continue;
            };
            let over = self.reads.get(&job.read).is_none_or(|read| read.ending.is_some());
            if over || job.failed || job.cut.is_done(&job.chunk) {
                line.ready.pop_front();
                self.settle(number, now);
                continue;
            }
            let rooms = line
                .paths
                .iter()
                .enumerate()
                .filter(|(_, path)| !path.dead)
                .flat_map(|(at, path)| {
                    let on_rail = self.rails[path.rail].completions.size - self.posted[path.rail];
                    path.queues
                        .iter()
                        .enumerate()
                        .map(move |(place, (_, queue))| (at, place, queue.room().min(on_rail), queue.bytes()))
                });
            let Some((path, place, room, _)) = rooms
                .filter(|(_, _, room, _)| *room > 0)
                .min_by_key(|(_, _, _, bytes)| *bytes)
            else {
                break;
            };
            let view = self.memory.view();
            let mut batch = self.scratch.batch();
            let (mut bytes, mut outside) = (0, None);
            while batch.len() < room as usize && bytes < BATCH {
                let before = job.cut;
                let Some(request) = job.cut.next(&job.chunk) else { break };
                let mut landings = [None; PIECES];
                for (landing, local) in landings.iter_mut().zip(request.local()) {
                    *landing = view.landing(line.paths[path].rail, local);
                }
                let known = landings.iter().flatten().count();
                let (Some(key), true, Some(first)) = (
                    line.keys.key(path, &request.remote),
                    known == request.local().len(),
                    landings[0],
                ) else {
                    outside = request.local().first().copied();
                    break;
                };
                let landings = landings.map(|landing| landing.unwrap_or(first));
                if !batch.push(key, &landings[..known]) {
                    job.cut = before;
                    break;
                }
                bytes += request.remote.len;
            }
            if let Some(run) = outside {
                // Checked when the read began, and regions only come: not reached.
                let read = job.read;
                job.failed = true;
                self.give_up(read, MoverError::LocalRange { run }, now);
                continue;
            }
            let rail = line.paths[path].rail;
            let Some((id, queue)) = line.paths[path].queues.get_mut(place) else {
                break;
            };
            let before = queue.outstanding();
            let posted = queue.post(*id, number, batch);
            let count = queue.outstanding() - before;
            self.posted[rail] += count;
            if count > 0 {
                moved = true;
                job.outstanding += 1;
                if let Some(read) = self.reads.get_mut(&job.read) {
                    read.outstanding += 1;
                }
            }
            if let Err(errno) = posted {
                let device = self.rails[rail].choice.device.clone();
                let error = VerbsError::Call {
                    call: "ibv_post_send",
                    device,
                    errno,
                };
                job.failed = true;
                self.lose_path(at, path, error.into(), now);
            }
        }
        moved
    }

    /// Takes completions off every rail.
    fn complete(&mut self, now: Instant) -> bool {
        let mut moved = false;
        for (at, rail) in self.rails.iter().enumerate() {
            loop {
                self.completions.clear();
                let polled = rail.completions.poll(&mut self.completions);
                let completions = std::mem::take(&mut self.completions);
                completions.iter().for_each(|completion| self.take(at, completion, now));
                let count = completions.len();
                self.completions = completions;
                moved |= count > 0;
                match polled {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(error) => {
                        // A queue that overran or a device that is gone: nothing on it completes any more.
                        if !rail.is_down() {
                            tracing::error!(%error, "completions are lost");
                            rail.set_down(true);
                        }
                        break;
                    }
                }
            }
        }
        moved
    }

    fn take(&mut self, rail: usize, completion: &Completion, now: Instant) {
        // Of a queue pair that was destroyed before it drained.
        let Some(&(at, path, place)) = self.queues.get(&((completion.id >> 32) as u32)) else {
            return;
        };
        let Some(line) = self.lines.get_mut(&at) else { return };
        let Some((_, queue)) = line.paths.get_mut(path).and_then(|path| path.queues.get_mut(place)) else {
            return;
        };
        let was_well = queue.failed().is_none();
        queue.complete(completion, &mut self.finished);
        if completion.error.is_none() {
            line.moved = now;
        }
        let failed = queue.failed().filter(|_| was_well);
        let peer = line.peer.to_string();
        let finished = std::mem::take(&mut self.finished);
        for batch in &finished {
            self.posted[rail] -= batch.requests;
            if let Some(job) = self.jobs.one(batch.job) {
                job.outstanding -= 1;
                job.failed |= !batch.whole;
                if let Some(read) = self.reads.get_mut(&job.read) {
                    read.outstanding -= 1;
                }
            }
            self.settle(batch.job, now);
        }
        self.finished = finished;
        self.finished.clear();
        if let Some((code, vendor)) = failed {
            // A port that went down may be why: it is told apart from this.
            self.hear_device(rail);
            let device = self.rails[rail].choice.device.clone();
            let error = match code {
                _ if self.rails[rail].is_down() => VerbsError::DeviceDown { device }.into(),
                Status::IBV_WC_RETRY_EXC_ERR | Status::IBV_WC_RNR_RETRY_EXC_ERR | Status::IBV_WC_RESP_TIMEOUT_ERR => {
                    MoverError::PeerGone {
                        peer,
                        errno: libc::ETIMEDOUT,
                    }
                }
                _ => VerbsError::Work {
                    peer,
                    device,
                    status: status(code),
                    vendor,
                }
                .into(),
            };
            self.lose_path(at, path, error, now);
        }
    }

    /// Looks whether a job, and with it its read, is complete.
    fn settle(&mut self, number: usize, now: Instant) {
        let Some(job) = self.jobs.one(number) else { return };
        if job.outstanding > 0 {
            return;
        }
        let (id, at) = (job.read, job.line);
        let Some(line) = self.lines.get_mut(&at) else { return };
        let over = self.reads.get(&id).is_none_or(|read| read.ending.is_some());
        if !over && job.failed {
            // Its bytes are read again: over another path of this line, or by another line once this one has ended.
            if line.ending.is_none() && line.paths.iter().any(|path| !path.dead) {
                job.tries += 1;
                let tried = job.tries > TRIES;
                (job.failed, job.cut) = (false, Cut::default());
                if tried {
                    let peer = line.peer.to_string();
                    return self.give_up(id, MoverError::PeerGone { peer, errno: libc::EIO }, now);
                }
                if !line.ready.contains(&number) {
                    line.ready.push_front(number);
                }
            }
            return;
        }
        if !over && !job.cut.is_done(&job.chunk) {
            return;
        }
        let Some(job) = self.jobs.remove(number) else { return };
        line.inflight -= job.chunk.len;
        line.ready.retain(|each| *each != number);
        if over {
            self.drained(id);
        } else {
            match self.check(&job) {
                Err(error) => self.give_up(id, error, now),
                Ok(()) => self.land(id, job.chunk.len),
            }
        }
        self.pump(at, now);
    }

    /// XFER-8: the bytes that landed are those that were granted.
    fn check(&self, job: &Job) -> Result<(), MoverError> {
        #[cfg(feature = "fault")]
        self.flip(job);
        let Some(read) = self.reads.get(&job.read).filter(|read| read.options.checksum) else {
            return Ok(());
        };
        let view = self.memory.view();
        let got = job.chunk.local.iter().fold(0, |crc, run| {
            // SAFETY: obligation 4 — the read owns its landing runs, and nothing of this chunk is on its way any more.
            let bytes = unsafe { view.bytes(run) };
            bytes.map_or(crc, |bytes| crc32c::crc32c_append(crc, bytes))
        });
        if got == job.crc {
            return Ok(());
        }
        Err(MoverError::Checksum {
            peer: read.peer.to_string(),
            got,
            expected: job.crc,
        })
    }

    #[cfg(feature = "fault")]
    fn flip(&self, job: &Job) {
        use crate::fault::Effect;
        let fault = *self.fault.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some(Effect::Flip(_, index)) = fault.map(|fault| fault.effect(job.base, job.chunk.len as usize)) else {
            return;
        };
        let mut index = index as u64;
        for run in &job.chunk.local {
            if index < run.len {
                let at = Run {
                    offset: run.offset + index,
                    len: 1,
                    ..*run
                };
                // SAFETY: obligation 4 — the read owns its landing runs, and nothing of this chunk is on its way.
                return unsafe { self.memory.view().flip(&at) };
            }
            index -= run.len;
        }
    }

    fn land(&mut self, id: u64, bytes: u64) {
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
    fn give_up(&mut self, id: u64, error: MoverError, now: Instant) {
        let Some(read) = self.reads.get_mut(&id) else { return };
        if read.ending.is_none() {
            read.ending = Some((error, now));
            read.waiting.clear();
        }
        self.drained(id);
    }

    fn drained(&mut self, id: u64) {
        let Some(read) = self.reads.get_mut(&id) else { return };
        if read.outstanding == 0
            && let Some((error, _)) = read.ending.take()
        {
            self.finish(id, Err(error));
        }
    }

    /// No more over this path; the line goes on over the others.
    fn lose_path(&mut self, at: usize, path: usize, error: MoverError, now: Instant) {
        let Some(line) = self.lines.get_mut(&at) else { return };
        let Some(lost) = line.paths.get_mut(path).filter(|path| !path.dead) else {
            return;
        };
        lost.dead = true;
        lost.queues.iter().for_each(|(_, queue)| queue.fail());
        if line.ending.is_some() {
            return;
        }
        if line.paths.iter().all(|path| path.dead) {
            return self.end_line(at, error, None, now);
        }
        tracing::warn!(peer = %line.peer, %error, "a path is lost, the others carry on");
    }

    fn end_line(&mut self, at: usize, error: MoverError, blame: Option<u64>, now: Instant) {
        let Some(line) = self.lines.get_mut(&at) else { return };
        line.end(error, blame, now);
        // Fails only for a socket that is not registered, which is what is wanted.
        let _ = self.poll.registry().deregister(&mut line.socket);
        let key = (line.address, line.token.0);
        if self.current.get(&key) == Some(&at) {
            self.current.remove(&key);
        }
    }

    /// Takes an ended line apart once nothing of it is on its way, or once its peer and device had all the time there is:
    /// then destroying the queue pairs is the fence.
    fn bury(&mut self, at: usize, now: Instant) {
        let Some(line) = self.lines.get(&at) else { return };
        let Some(ending) = &line.ending else { return };
        let drained = line.outstanding() == 0;
        let late = now.saturating_duration_since(ending.since) >= self.config.stall;
        if !drained && !late {
            return;
        }
        let Some(line) = self.lines.remove(&at) else { return };
        let Some(ending) = line.ending.as_ref() else { return };
        let (error, blame) = (ending.error.clone(), ending.blame);
        for path in &line.paths {
            for (number, queue) in &path.queues {
                self.queues.remove(number);
                self.posted[path.rail] -= queue.outstanding();
            }
        }
        drop(line);
        for number in self.jobs.of_line(at) {
            let Some(job) = self.jobs.remove(number) else { continue };
            if let Some(read) = self.reads.get_mut(&job.read) {
                read.waiting.push_front((job.base, job.chunk));
            }
        }
        let reads: Vec<u64> = self
            .reads
            .iter()
            .filter(|(_, read)| read.line == at)
            .map(|(id, _)| *id)
            .collect();
        for id in reads {
            let Some(read) = self.reads.get_mut(&id) else { continue };
            read.outstanding = 0;
            let stale = read.on_old_line || blame.is_some_and(|blamed| blamed != id);
            if let Some((error, _)) = read.ending.take() {
                self.finish(id, Err(error));
            } else if stale && !read.restarted {
                read.restarted = true;
                self.place(id, now);
            } else {
                self.finish(id, Err(error.clone()));
            }
        }
    }

    fn sweep(&mut self, now: Instant) {
        let late = self
            .reads
            .iter()
            .filter(|(_, read)| now.saturating_duration_since(read.begun) >= read.options.deadline);
        let late: Vec<(u64, String, Duration)> = late
            .map(|(id, read)| (*id, read.peer.to_string(), read.options.deadline))
            .collect();
        for (id, peer, limit) in late {
            self.give_up(
                id,
                MoverError::Timeout {
                    peer,
                    wait: Wait::Deadline,
                    limit,
                },
                now,
            );
        }
        let stuck = self.reads.iter().filter_map(|(id, read)| {
            let (error, since) = read.ending.as_ref()?;
            (now.saturating_duration_since(*since) >= GRACE).then(|| (*id, read.line, error.clone()))
        });
        for (id, line, error) in stuck.collect::<Vec<_>>() {
            self.end_line(line, error, Some(id), now);
        }
        let overdue = self.lines.iter().filter(|(_, line)| line.ending.is_none());
        let overdue: Vec<(usize, MoverError)> = overdue
            .filter_map(|(at, line)| Some((*at, line.overdue(&self.config, now)?)))
            .collect();
        overdue
            .into_iter()
            .for_each(|(at, error)| self.end_line(at, error, None, now));
        for (at, rail) in self.rails.iter().enumerate().filter(|(_, rail)| rail.is_down()) {
            let device = &rail.choice.device;
            let on_it = self.lines.iter().flat_map(|(line, each)| {
                each.paths
                    .iter()
                    .enumerate()
                    .filter(|(_, path)| path.rail == at && !path.dead)
                    .map(|(path, _)| (*line, path))
            });
            for (line, path) in on_it.collect::<Vec<_>>() {
                self.lose_path(
                    line,
                    path,
                    VerbsError::DeviceDown { device: device.clone() }.into(),
                    now,
                );
            }
        }
    }

    /// Asks for an event at the next completion of every rail with work on it; whether there is any.
    fn arm(&mut self) -> bool {
        let mut any = false;
        for (rail, _) in self.rails.iter().zip(&self.posted).filter(|(_, posted)| **posted > 0) {
            any = true;
            if let Err(error) = rail.completions.arm()
                && !rail.is_down()
            {
                tracing::error!(%error, "completions are not announced");
                rail.set_down(true);
            }
        }
        any
    }

    /// Tells the read's owner. Nothing of it is on its way.
    fn finish(&mut self, id: u64, result: Result<ReadStats, MoverError>) {
        let Some(read) = self.reads.remove(&id) else { return };
        let failed = result.is_err();
        if let Some(line) = self.lines.get_mut(&read.line) {
            line.reads = line.reads.saturating_sub(1);
            // Whoever is left to answer does it for nobody: the exporter learns so at once.
            if failed && line.reads == 0 && !line.asked.is_empty() && line.ending.is_none() {
                self.end_line(read.line, MoverError::Cancelled, None, Instant::now());
            }
        }
        let Active { ticket, done, .. } = read;
        drop(ticket);
        call(done, result);
    }
}
