//! The mover inside one process: the plain version of what every mover does, for tests here and above it.
//!
//! Movers on one [`Network`] reach each other by name. Bytes are copied by the importer's thread, a piece at a time,
//! inside the gates of both sides, exactly where tcp sends and receives.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::{
    error::{MoverError, Wait},
    fault::{Effect, Fault},
    gate::Gate,
    lease::{Leases, denied},
    mover::{Cancel, Copy, Done, LeaseToken, Mover, MoverKind, ReadHandle, ReadOptions, ReadStats},
    plan::{self, Chunk, ChunkLimits},
    region::{Region, RegionKey, Regions, Run},
};

/// Bytes copied inside the gates at once.
const PIECE: u64 = 256 << 10;
/// Leases exposed at once.
const LEASES: usize = 4096;
/// Reads at once.
const READS: usize = 1024;
/// How often a read that waits for a stalled peer looks again.
const TICK: Duration = Duration::from_millis(2);

/// The movers that can reach each other.
#[derive(Clone, Default)]
pub struct Network(Arc<Mutex<HashMap<String, Weak<Memory>>>>);

/// Moves bytes inside one process. Not to be dropped inside `done`.
pub struct Loopback {
    network: Network,
    name: String,
    memory: Arc<Memory>,
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
}

/// Sets the fault of one mover's exporter, while it lives.
#[derive(Clone)]
pub struct Faults(Weak<Memory>);

impl Faults {
    /// From now on reads from the mover have this fault; `None` heals it.
    pub fn inject(&self, fault: Option<Fault>) {
        if let Some(memory) = self.0.upgrade() {
            *memory.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
        }
    }
}

/// What a mover has registered and exposed.
struct Memory {
    regions: Regions,
    leases: Leases,
    fault: Mutex<Option<Fault>>,
}

#[derive(Default)]
struct Inbox {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    closed: bool,
    reads: VecDeque<Reading>,
    /// Not done, those in the thread's hands included.
    count: usize,
}

struct Reading {
    peer: String,
    /// What is left to copy, one run on either side each; or why nothing will be.
    plan: Result<VecDeque<Chunk>, MoverError>,
    token: LeaseToken,
    options: ReadOptions,
    gate: Arc<Gate>,
    begun: Instant,
    stats: ReadStats,
    done: Done,
}

/// How far a read has come.
enum Step {
    More,
    Stalled,
    Done(Result<ReadStats, MoverError>),
}

impl Loopback {
    /// A mover that others on the network reach as `name`; an older one of that name is no longer reached (F16).
    ///
    /// # Errors
    /// [`MoverError::System`] when there is no thread for it.
    pub fn start(network: &Network, name: &str) -> Result<Self, MoverError> {
        let memory = Arc::new(Memory {
            regions: Regions::default(),
            leases: Leases::new(LEASES),
            fault: Mutex::new(None),
        });
        let inbox = Arc::new(Inbox::default());
        let worker = Worker {
            network: network.clone(),
            memory: memory.clone(),
            inbox: inbox.clone(),
        };
        let thread = thread::Builder::new()
            .name("kvc-loopback".into())
            .spawn(move || worker.run());
        let thread = Some(thread.map_err(|e| MoverError::system("clone", &e))?);
        network.lock().insert(name.into(), Arc::downgrade(&memory));
        Ok(Loopback {
            network: network.clone(),
            name: name.into(),
            memory,
            inbox,
            thread,
        })
    }

    /// A hand on what goes wrong with reads from this mover.
    pub fn faults(&self) -> Faults {
        Faults(Arc::downgrade(&self.memory))
    }

    fn plan(&self, copies: &[Copy]) -> Result<VecDeque<Chunk>, MoverError> {
        plan::check(copies, &self.memory.regions)?;
        Ok(plan::chunks(copies, &ChunkLimits { bytes: PIECE, runs: 1 }).into())
    }
}

impl Mover for Loopback {
    fn kind(&self) -> MoverKind {
        MoverKind::Loopback
    }

    fn endpoint(&self) -> String {
        self.name.clone()
    }

    fn register(&self, region: Region) -> Result<RegionKey, MoverError> {
        self.memory.regions.add(region)
    }

    fn expose(&self, token: LeaseToken, max_age: Duration) -> Result<(), MoverError> {
        self.memory.leases.expose(token, Instant::now(), max_age)
    }

    fn extend(&self, token: &LeaseToken, runs: &[Run]) -> Result<(), MoverError> {
        let Memory { leases, regions, .. } = &*self.memory;
        leases.extend(token, runs, regions, &self.name)
    }

    fn fence(&self, token: &LeaseToken) {
        self.memory.leases.fence(token);
    }

    fn read(&self, peer: &str, token: LeaseToken, copies: Vec<Copy>, options: ReadOptions, done: Done) -> ReadHandle {
        let gate = Arc::new(Gate::default());
        let (begun, stats) = (Instant::now(), ReadStats::default());
        let plan = self.plan(&copies);
        let reading = Reading {
            peer: peer.into(),
            plan,
            token,
            options,
            gate: gate.clone(),
            begun,
            stats,
            done,
        };
        self.inbox.send(reading);
        ReadHandle(Arc::new(Running {
            gate,
            inbox: self.inbox.clone(),
        }))
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        let mut movers = self.network.lock();
        if movers
            .get(&self.name)
            .is_some_and(|memory| memory.as_ptr() == Arc::as_ptr(&self.memory))
        {
            movers.remove(&self.name);
        }
        drop(movers);
        // Peers that hold this memory in mid-copy are waited for; afterwards no lease lets them in.
        self.memory.leases.fence_all();
        self.inbox.close();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a loopback mover thread panicked");
        }
    }
}

impl Network {
    fn find(&self, name: &str) -> Option<Arc<Memory>> {
        self.lock().get(name)?.upgrade()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Weak<Memory>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inbox {
    fn send(&self, mut reading: Reading) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.closed {
            drop(state);
            return (reading.done)(Err(MoverError::Closed));
        }
        if state.count >= READS {
            reading.plan = Err(MoverError::TooMany {
                what: "reads",
                limit: READS as u64,
            });
        }
        state.count += 1;
        state.reads.push_back(reading);
        self.wake.notify_one();
    }

    fn close(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.wake.notify_one();
    }

    /// The reads that were sent; waits for one while `idle`. `None` ends the thread.
    fn take(&self, wait: Option<Duration>) -> Option<VecDeque<Reading>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.reads.is_empty() && !state.closed {
            match wait {
                None => state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(wait) => {
                    state = self
                        .wake
                        .wait_timeout(state, wait)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                    break;
                }
            }
        }
        (!state.closed).then(|| std::mem::take(&mut state.reads))
    }

    fn finished(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).count -= 1;
    }
}

/// The thread: one piece for each read in turn.
struct Worker {
    network: Network,
    memory: Arc<Memory>,
    inbox: Arc<Inbox>,
}

impl Worker {
    fn run(self) {
        let mut reads: VecDeque<Reading> = VecDeque::new();
        let mut wait = None;
        while let Some(new) = self.inbox.take(wait) {
            reads.extend(new);
            let mut moved = false;
            for _ in 0..reads.len() {
                let Some(mut reading) = reads.pop_front() else { break };
                match self.step(&mut reading) {
                    Step::Done(result) => self.finish(reading, result),
                    step => {
                        moved |= matches!(step, Step::More);
                        reads.push_back(reading);
                    }
                }
            }
            wait = match (reads.is_empty(), moved) {
                (true, _) => None,
                (false, true) => Some(Duration::ZERO),
                (false, false) => Some(TICK),
            };
        }
        let left = std::mem::take(&mut self.inbox.state.lock().unwrap_or_else(PoisonError::into_inner).reads);
        for reading in reads.into_iter().chain(left) {
            self.finish(reading, Err(MoverError::Closed));
        }
    }

    fn finish(&self, reading: Reading, result: Result<ReadStats, MoverError>) {
        reading.gate.shut();
        self.inbox.finished();
        (reading.done)(result);
    }

    fn step(&self, reading: &mut Reading) -> Step {
        if reading.gate.is_shut() {
            return Step::Done(Err(MoverError::Cancelled));
        }
        let chunks = match &mut reading.plan {
            Ok(chunks) => chunks,
            Err(error) => return Step::Done(Err(error.clone())),
        };
        let (now, peer) = (Instant::now(), &reading.peer);
        let Some(chunk) = chunks.pop_front() else {
            reading.stats.elapsed = now - reading.begun;
            return Step::Done(Ok(reading.stats));
        };
        let limit = reading.options.deadline;
        if now - reading.begun >= limit {
            return Step::Done(Err(MoverError::Timeout {
                peer: peer.clone(),
                wait: Wait::Deadline,
                limit,
            }));
        }
        let Some(exporter) = self.network.find(peer) else {
            return Step::Done(Err(MoverError::PeerGone {
                peer: peer.clone(),
                errno: 0,
            }));
        };
        match self.copy(&chunk, reading, &exporter, now) {
            Ok(true) => {
                reading.stats.bytes += chunk.len;
                reading.stats.chunks += 1;
                Step::More
            }
            Ok(false) => {
                if let Ok(chunks) = &mut reading.plan {
                    chunks.push_front(chunk);
                }
                Step::Stalled
            }
            Err(error) => Step::Done(Err(error)),
        }
    }

    /// Copies one chunk; `false` if the peer stalls.
    fn copy(&self, chunk: &Chunk, reading: &Reading, exporter: &Memory, now: Instant) -> Result<bool, MoverError> {
        let peer = &reading.peer;
        let gone = || MoverError::PeerGone {
            peer: peer.clone(),
            errno: 0,
        };
        let refused = |why| denied(why, peer);
        let lease = exporter.leases.find(&reading.token, now).map_err(refused)?;
        if let Some(run) = lease.uncovered(&chunk.remote) {
            return Err(MoverError::RangeRefused {
                peer: peer.clone(),
                run: *run,
            });
        }
        let flip = match exporter.effect(reading.stats.bytes, chunk.len as usize) {
            Flaw::None => None,
            Flaw::Flip(at) => Some(at),
            Flaw::Stall => return Ok(false),
            Flaw::Die => return Err(gone()),
            Flaw::End(got) => {
                return Err(MoverError::Truncated {
                    peer: peer.clone(),
                    got: got as u64,
                    expected: chunk.len,
                });
            }
        };
        let (Some(remote), Some(local)) = (chunk.remote.first(), chunk.local.first()) else {
            return Ok(true);
        };
        let from = exporter.regions.locate(remote).ok_or_else(gone)?;
        let to = self
            .memory
            .regions
            .locate(local)
            .ok_or(MoverError::LocalRange { run: *local })?;
        let len = chunk.len as usize;
        let copied = lease.pass(now, || {
            reading.gate.pass(|| {
                // SAFETY: obligations 1 and 4 — both runs lie in regions that live (`exporter` and `self.memory` hold
                // them), the lease is open so nobody writes the source, the read owns its local run; `copy` allows
                // them to overlap.
                unsafe { to.as_ptr().copy_from(from.as_ptr(), len) };
                if let Some(at) = flip {
                    // SAFETY: as above, `at` < `len`.
                    unsafe { *to.as_ptr().add(at) ^= 1 };
                }
                let sums = reading.options.checksum.then(|| {
                    // SAFETY: as above; nobody writes either run while both gates are held.
                    let sides = unsafe {
                        [
                            std::slice::from_raw_parts(from.as_ptr(), len),
                            std::slice::from_raw_parts(to.as_ptr(), len),
                        ]
                    };
                    sides.map(crc32c::crc32c)
                });
                match sums {
                    Some([expected, got]) if expected != got => Err(MoverError::Checksum {
                        peer: peer.clone(),
                        got,
                        expected,
                    }),
                    _ => Ok(true),
                }
            })
        });
        copied.map_err(refused)?.unwrap_or(Err(MoverError::Cancelled))
    }
}

/// What the exporter's fault makes of a chunk.
enum Flaw {
    None,
    Flip(usize),
    Stall,
    Die,
    End(usize),
}

impl Memory {
    fn effect(&self, sent: u64, len: usize) -> Flaw {
        let Some(fault) = *self.fault.lock().unwrap_or_else(PoisonError::into_inner) else {
            return Flaw::None;
        };
        thread::sleep(fault.pause());
        match fault.effect(sent, len) {
            Effect::Pass(all) if all == len => Flaw::None,
            Effect::Flip(_, at) => Flaw::Flip(at),
            // A chunk comes whole or not at all: what ends inside one ends before it.
            Effect::Pass(some) => match fault.effect(sent + some as u64, len - some) {
                Effect::Stall => Flaw::Stall,
                Effect::Die => Flaw::Die,
                _ => Flaw::End(some),
            },
            Effect::Stall => Flaw::Stall,
            Effect::Die => Flaw::Die,
            Effect::End => Flaw::End(0),
        }
    }
}

/// A read as its owner holds it.
struct Running {
    gate: Arc<Gate>,
    inbox: Arc<Inbox>,
}

impl Cancel for Running {
    fn cancel(&self) {
        self.gate.shut();
        self.inbox.wake.notify_one();
    }
}
