//! The pull itself: learns what became readable, plans coalesced chunks, keeps a bounded number of reads in flight
//! (XFER-4, XFER-5).

use std::{collections::VecDeque, sync::Arc, time::Duration};

use kvc_proto::{
    id::ImportId,
    wire::reason::{Reason, Refusal},
    worker::{LeaseView, Slot},
};
use kvc_rdma::{MoverError, ReadOptions, ReadStats};
use tokio::{
    sync::mpsc::{self, UnboundedReceiver, UnboundedSender},
    time::Instant,
};

use crate::state::Shared;

use super::{
    import::{Held, refused},
    imports::Control,
};

/// Bytes of one read, and reads in flight.
const CHUNK: u64 = 4 << 20;
const DEPTH: usize = 4;
/// The same for a pull that nobody waits for (SYNC-3): what a transfer that matters finds in its way at most, and all the
/// memory in flight.
const SMALL: u64 = 1 << 20;
const ALONE: usize = 1;
/// How long one question for news waits at the peer.
const WATCH: Duration = Duration::from_secs(5);
/// Before the next question after an empty answer.
const PAUSE: Duration = Duration::from_millis(2);

/// Pulls tokens `[from, from + slots.len())` into `slots`. Returns when every byte is there.
pub(super) async fn run(
    shared: &Arc<Shared>,
    import: ImportId,
    control: &Arc<Control>,
    held: &Held,
    from: u32,
    slots: &[Slot],
    deadline: Instant,
) -> Result<(), Refusal> {
    let (chunk, depth) = if held.gives_way { (SMALL, ALONE) } else { (CHUNK, DEPTH) };
    let mut flight = Flight::new(shared, import, control, held, slots, deadline);
    let mut known = 0;
    let mut complete = false;
    while known < slots.len() {
        if complete {
            return Err(Refusal::new(
                Reason::RangeNotReadable,
                format!("the peer's turn ended with {known} of {} tokens readable", slots.len()),
            ));
        }
        let at = position(from, known)?;
        let watch = held.peer.watch(held.lease, at, WATCH, deadline);
        let view = flight.meanwhile(watch).await??;
        complete = view.complete;
        let readable = checked(&view, at, slots.len() - known, held)?;
        if readable.is_empty() && !complete {
            // A peer that answers at once with nothing must not keep this task spinning.
            tokio::time::sleep(PAUSE).await;
        }
        for src in readable.chunks(chunk_tokens(shared, shared.pace.chunk(chunk))) {
            while flight.len() >= depth {
                let landed = flight.next().await;
                flight.landed(landed)?;
            }
            if held.gives_way {
                shared.serving.quiet(deadline).await?;
            }
            let pace = shared.pace.pass(token_bytes(shared) * src.len() as u64, deadline);
            flight.meanwhile(pace).await?;
            flight.start(src)?;
            known += src.len();
        }
    }
    while !flight.is_empty() {
        let landed = flight.next().await;
        flight.landed(landed)?;
    }
    Ok(())
}

/// Waits until the whole range is readable at the peer, for an importer that lacks none of it: only such a range is
/// confirmed (XFER-3).
pub(super) async fn wait_readable(held: &Held, deadline: Instant) -> Result<(), Refusal> {
    while !held.peer.watch(held.lease, held.end, WATCH, deadline).await?.complete {
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

type Landed = (u64, Result<ReadStats, MoverError>);

/// Reads in flight, oldest first.
struct Flight<'p> {
    shared: &'p Arc<Shared>,
    import: ImportId,
    control: &'p Control,
    held: &'p Held,
    /// Where all of it goes.
    slots: &'p [Slot],
    deadline: Instant,
    /// Number of the oldest piece.
    first: u64,
    pieces: VecDeque<Piece>,
    /// Tokens that have been asked for, and those that have arrived with all before them.
    asked: usize,
    pulled: usize,
    sender: UnboundedSender<Landed>,
    arrivals: UnboundedReceiver<Landed>,
}

/// What one read fetches.
struct Piece {
    /// Where its tokens are at the peer.
    src: Box<[Slot]>,
    /// The first of its places in `Flight::slots`.
    at: usize,
    /// Which of the peer's ways it is read over.
    over: usize,
    arrived: bool,
}

impl<'p> Flight<'p> {
    fn new(
        shared: &'p Arc<Shared>,
        import: ImportId,
        control: &'p Control,
        held: &'p Held,
        slots: &'p [Slot],
        deadline: Instant,
    ) -> Self {
        let (sender, arrivals) = mpsc::unbounded_channel();
        Self {
            shared,
            import,
            control,
            held,
            slots,
            deadline,
            first: 0,
            pieces: VecDeque::new(),
            asked: 0,
            pulled: 0,
            sender,
            arrivals,
        }
    }

    fn len(&self) -> usize {
        self.pieces.len()
    }

    fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Reads the tokens that come next.
    fn start(&mut self, src: &[Slot]) -> Result<(), Refusal> {
        let over = self.held.peer.ways.best(self.shared.now());
        self.pieces.push_back(Piece {
            src: src.into(),
            at: self.asked,
            over,
            arrived: false,
        });
        self.asked += src.len();
        self.read(self.pieces.len() - 1)
    }

    /// Starts the read of a piece over the mover it names.
    fn read(&self, index: usize) -> Result<(), Refusal> {
        let (shared, piece) = (self.shared, &self.pieces[index]);
        let offer = self.held.peer.ways.offer(piece.over);
        let path = shared.pool.path(offer.kind).ok_or_else(broken)?;
        let dst = &self.slots[piece.at..piece.at + piece.src.len()];
        let copies = shared
            .pool
            .copies(path, &offer.keys, &piece.src, dst)
            .ok_or_else(|| Refusal::new(Reason::LayoutMismatch, "the peer announced other buffers"))?;
        let number = self.first + index as u64;
        let sender = self.sender.clone();
        let options = ReadOptions {
            deadline: self.deadline.saturating_duration_since(Instant::now()),
            checksum: shared.config.checksum,
            streams: shared.config.streams,
        };
        let done = Box::new(move |outcome| {
            // The pull may have given up already.
            let _ = sender.send((number, outcome));
        });
        let (mover, token) = (&path.mover, self.held.lease.token);
        if self
            .control
            .read(|| mover.read(&offer.endpoint, token, copies, options, done))
        {
            Ok(())
        } else {
            Err(Refusal::new(Reason::Cancelled, "the import was fenced"))
        }
    }

    /// Waits for something, and takes what arrives meanwhile.
    async fn meanwhile<T>(&mut self, wait: impl Future<Output = T>) -> Result<T, Refusal> {
        tokio::pin!(wait);
        loop {
            tokio::select! {
                done = &mut wait => return Ok(done),
                landed = self.next(), if !self.is_empty() => self.landed(landed)?,
            }
        }
    }

    async fn next(&mut self) -> Landed {
        match self.arrivals.recv().await {
            Some(landed) => landed,
            // Cannot happen while `sender` lives here.
            None => (self.first, Err(MoverError::Closed)),
        }
    }

    fn landed(&mut self, (number, outcome): Landed) -> Result<(), Refusal> {
        let index = usize::try_from(number.wrapping_sub(self.first)).unwrap_or(usize::MAX);
        let Some(piece) = self.pieces.get_mut(index) else {
            return Ok(());
        };
        let stats = match outcome {
            Ok(stats) => stats,
            Err(error) => return self.again(index, &error),
        };
        piece.arrived = true;
        let kind = self.held.peer.ways.offer(piece.over).kind;
        self.control.arrived(stats.bytes);
        self.shared.metrics.moved_over(kind, stats.bytes);
        let before = self.pulled;
        while self.pieces.front().is_some_and(|piece| piece.arrived) {
            self.pulled += self.pieces.pop_front().map_or(0, |piece| piece.src.len());
            self.first += 1;
        }
        if self.pulled > before {
            let (import, pulled) = (self.import, u32::try_from(self.pulled).unwrap_or(u32::MAX));
            self.shared
                .call(|worker, now| worker.pull_progress(import, pulled, now));
        }
        Ok(())
    }

    /// XFER-9: a read that its mover could not do is done over the next one, under the same lease. The failed read writes
    /// nothing any more (XFER-2): its outcome is here.
    fn again(&mut self, index: usize, error: &MoverError) -> Result<(), Refusal> {
        let ways = &self.held.peer.ways;
        let over = self.pieces[index].over;
        let next = error
            .is_of_path()
            .then(|| ways.failed(over, self.shared.now()))
            .flatten();
        let Some((next, news)) = next else {
            return Err(refused(error));
        };
        if news {
            let (from, to) = (ways.offer(over).kind, ways.offer(next).kind);
            let peer = self.held.peer.address();
            tracing::warn!(import = %self.import, peer, from = from.as_str(), to = to.as_str(), %error, "falling back to another mover");
            self.shared.metrics.fell_back(from, to);
        }
        self.pieces[index].over = next;
        self.read(index)
    }
}

/// Cannot happen: the ways to a peer are movers that both sides have.
fn broken() -> Refusal {
    Refusal::new(Reason::Internal, "a way to a peer is no mover of ours")
}

fn token_bytes(shared: &Shared) -> u64 {
    shared.pool.layout().token_bytes().max(1)
}

fn chunk_tokens(shared: &Shared, bytes: u64) -> usize {
    usize::try_from(bytes / token_bytes(shared)).unwrap_or(1).max(1)
}

pub(super) fn position(from: u32, known: usize) -> Result<u32, Refusal> {
    u32::try_from(known)
        .ok()
        .and_then(|known| from.checked_add(known))
        .ok_or_else(|| Refusal::new(Reason::Internal, "a token position is above 32 bits"))
}

/// A peer's answer is checked before any of it is used.
fn checked<'a>(view: &'a LeaseView, at: u32, wanted: usize, held: &Held) -> Result<&'a [Slot], Refusal> {
    if view.from != at {
        return Err(Refusal::new(
            Reason::TransferFailed,
            format!("the peer answered for token {}, asked was {at}", view.from),
        ));
    }
    if let Some(slot) = view.slots.iter().find(|slot| **slot >= held.peer.slots) {
        return Err(Refusal::new(
            Reason::TransferFailed,
            format!("the peer named slot {slot} of {}", held.peer.slots),
        ));
    }
    Ok(&view.slots[..view.slots.len().min(wanted)])
}
