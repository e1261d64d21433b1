//! A running read: what is still to be asked, what the exporter has granted, and the gates of its lanes. The mover's
//! thread asks and grants; the copying threads take and land; whoever ends it first tells its owner.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use super::{
    importer::Remote,
    wire::{MAX_BYTES, MAX_RUNS},
    word::Slot,
};
use crate::{
    error::MoverError,
    gate::Gate,
    mover::{Done, LeaseToken, ReadOptions, ReadStats, call},
    plan::Chunk,
};

pub(super) struct Read {
    pub(super) what: What,
    pub(super) begun: Instant,
    /// One for each lane, since a gate lets one thread through at a time.
    gates: Box<[Gate]>,
    flow: Mutex<Flow>,
    done: Mutex<Option<Done>>,
    /// Reads of the mover that are not done.
    open: Arc<AtomicUsize>,
}

/// What its owner asked for.
pub(super) struct What {
    pub(super) id: u64,
    pub(super) peer: Arc<str>,
    pub(super) token: LeaseToken,
    pub(super) options: ReadOptions,
}

#[derive(Default)]
struct Flow {
    waiting: VecDeque<Piece>,
    granted: VecDeque<Granted>,
    /// Asked for or granted, and not taken.
    ahead_bytes: u64,
    ahead_runs: usize,
    /// More was called for and not asked yet.
    calling: bool,
    /// Lanes without work.
    idle: Vec<usize>,
    /// Chunks that have not landed.
    left: usize,
    stats: ReadStats,
    remote: Option<Arc<Remote>>,
    ended: bool,
}

/// A chunk of the read.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) chunk: Chunk,
    /// Where it begins among the read's bytes.
    #[cfg(feature = "fault")]
    pub(super) at: u64,
}

/// A chunk that may be copied.
#[derive(Debug)]
pub(super) struct Granted {
    pub(super) piece: Piece,
    pub(super) slot: Slot,
    /// The end of the lease, or before.
    pub(super) until: Instant,
    pub(super) sum: Option<u32>,
}

/// What a lane gets.
pub(super) enum Taken {
    /// Work, and whether the mover's thread should ask for more.
    Work(Granted, Arc<Remote>, bool),
    /// Nothing now: the next grant starts the lane again.
    Idle,
}

impl Read {
    pub(super) fn new(what: What, lanes: usize, chunks: Vec<Chunk>, done: Done, open: Arc<AtomicUsize>) -> Self {
        open.fetch_add(1, Ordering::Relaxed);
        #[cfg(feature = "fault")]
        let mut next = 0;
        let piece = |chunk: Chunk| Piece {
            #[cfg(feature = "fault")]
            at: {
                next += chunk.len;
                next - chunk.len
            },
            chunk,
        };
        let waiting: VecDeque<Piece> = chunks.into_iter().map(piece).collect();
        let flow = Flow {
            left: waiting.len(),
            waiting,
            idle: (0..lanes).rev().collect(),
            ..Flow::default()
        };
        Read {
            what,
            begun: Instant::now(),
            gates: (0..lanes).map(|_| Gate::default()).collect(),
            flow: Mutex::new(flow),
            done: Mutex::new(Some(done)),
            open,
        }
    }

    pub(super) fn gate(&self, lane: usize) -> &Gate {
        &self.gates[lane]
    }

    /// When it returns nothing lands any more.
    pub(super) fn shut(&self) {
        self.gates.iter().for_each(Gate::shut);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.flow().left == 0
    }

    pub(super) fn is_done(&self) -> bool {
        self.flow().ended
    }

    /// From here on its lanes copy from there.
    pub(super) fn attach(&self, remote: Arc<Remote>) {
        self.flow().remote = Some(remote);
    }

    /// The chunks of the next request, if there is room for one ahead of the copies.
    pub(super) fn next_batch(&self) -> Option<Vec<Piece>> {
        let mut flow = self.flow();
        flow.calling = false;
        if flow.ended || flow.ahead_bytes >= MAX_BYTES || flow.ahead_runs >= MAX_RUNS {
            return None;
        }
        let (mut batch, mut bytes, mut runs) = (Vec::new(), 0, 0);
        while let Some(piece) = flow.waiting.front() {
            let (more_bytes, more_runs) = (bytes + piece.chunk.len, runs + piece.chunk.remote.len());
            if !batch.is_empty() && (more_bytes > MAX_BYTES || more_runs > MAX_RUNS) {
                break;
            }
            (bytes, runs) = (more_bytes, more_runs);
            batch.extend(flow.waiting.pop_front());
        }
        flow.ahead_bytes += bytes;
        flow.ahead_runs += runs;
        (!batch.is_empty()).then_some(batch)
    }

    /// Makes chunks ready to be copied; the lanes to start.
    pub(super) fn grant(&self, granted: impl IntoIterator<Item = Granted>) -> Vec<usize> {
        let mut flow = self.flow();
        if flow.ended {
            return Vec::new();
        }
        flow.granted.extend(granted);
        let lanes = flow.idle.len().saturating_sub(flow.granted.len());
        flow.idle.split_off(lanes)
    }

    /// The next chunk for a lane.
    pub(super) fn take(&self, lane: usize) -> Taken {
        let mut flow = self.flow();
        let (Some(granted), Some(remote)) = (flow.granted.pop_front(), flow.remote.clone()) else {
            flow.idle.push(lane);
            return Taken::Idle;
        };
        flow.ahead_bytes -= granted.piece.chunk.len;
        flow.ahead_runs -= granted.piece.chunk.remote.len();
        let low = flow.ahead_bytes < MAX_BYTES && flow.ahead_runs < MAX_RUNS;
        let call = low && !flow.calling && !flow.waiting.is_empty();
        flow.calling |= call;
        Taken::Work(granted, remote, call)
    }

    /// Gives a chunk back that could not be copied now.
    #[cfg(feature = "fault")]
    pub(super) fn put_back(&self, granted: Granted) {
        let mut flow = self.flow();
        if !flow.ended {
            flow.ahead_bytes += granted.piece.chunk.len;
            flow.ahead_runs += granted.piece.chunk.remote.len();
            flow.granted.push_front(granted);
        }
    }

    /// A chunk has landed; the figures if it was the last.
    pub(super) fn landed(&self, bytes: u64) -> Option<ReadStats> {
        let mut flow = self.flow();
        flow.stats.bytes += bytes;
        flow.stats.chunks += 1;
        flow.left -= 1;
        (flow.left == 0).then(|| ReadStats {
            elapsed: self.begun.elapsed(),
            ..flow.stats
        })
    }

    /// Ends the read: shuts its gates, then tells its owner, unless somebody has. Not to be called inside a gate.
    pub(super) fn finish(&self, result: Result<ReadStats, MoverError>) {
        self.shut();
        {
            let mut flow = self.flow();
            flow.ended = true;
            flow.waiting.clear();
            flow.granted.clear();
            // The peer's socket and mappings may go, however long the handle is kept.
            flow.remote = None;
        }
        let Some(done) = self.done.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        self.open.fetch_sub(1, Ordering::Relaxed);
        call(done, result);
    }

    fn flow(&self) -> std::sync::MutexGuard<'_, Flow> {
        self.flow.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
