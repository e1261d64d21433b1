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
    let mut flight = Flight::new();
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
        let view = flight.meanwhile(shared, import, control, watch).await??;
        complete = view.complete;
        let readable = checked(&view, at, slots.len() - known, held)?;
        if readable.is_empty() && !complete {
            // A peer that answers at once with nothing must not keep this task spinning.
            tokio::time::sleep(PAUSE).await;
        }
        for src in readable.chunks(chunk_tokens(shared, shared.pace.chunk(chunk))) {
            while flight.len() >= depth {
                let landed = flight.next().await;
                flight.landed(shared, import, control, landed)?;
            }
            if held.gives_way {
                shared.serving.quiet(deadline).await?;
            }
            let pace = shared.pace.pass(token_bytes(shared) * src.len() as u64, deadline);
            flight.meanwhile(shared, import, control, pace).await?;
            let dst = &slots[known..known + src.len()];
            flight.start(shared, control, held, src, dst, deadline)?;
            known += src.len();
        }
    }
    while !flight.is_empty() {
        let landed = flight.next().await;
        flight.landed(shared, import, control, landed)?;
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
struct Flight {
    /// Number of the oldest read, then one entry per read: its tokens, and whether they have arrived.
    first: u64,
    reads: VecDeque<(usize, bool)>,
    pulled: usize,
    sender: UnboundedSender<Landed>,
    arrivals: UnboundedReceiver<Landed>,
}

impl Flight {
    fn new() -> Self {
        let (sender, arrivals) = mpsc::unbounded_channel();
        Self {
            first: 0,
            reads: VecDeque::new(),
            pulled: 0,
            sender,
            arrivals,
        }
    }

    fn len(&self) -> usize {
        self.reads.len()
    }

    fn is_empty(&self) -> bool {
        self.reads.is_empty()
    }

    fn start(
        &mut self,
        shared: &Arc<Shared>,
        control: &Control,
        held: &Held,
        src: &[Slot],
        dst: &[Slot],
        deadline: Instant,
    ) -> Result<(), Refusal> {
        let copies = shared
            .pool
            .copies(&held.peer.pool, src, dst)
            .ok_or_else(|| Refusal::new(Reason::LayoutMismatch, "the peer announced other buffers"))?;
        let number = self.first + self.reads.len() as u64;
        let sender = self.sender.clone();
        let options = ReadOptions {
            deadline: deadline.saturating_duration_since(Instant::now()),
            checksum: shared.config.checksum,
            streams: shared.config.streams,
        };
        let done = Box::new(move |outcome| {
            // The pull may have given up already.
            let _ = sender.send((number, outcome));
        });
        let started = control.read(|| {
            shared
                .mover
                .read(&held.peer.data, held.lease.token, copies, options, done)
        });
        if !started {
            return Err(Refusal::new(Reason::Cancelled, "the import was fenced"));
        }
        self.reads.push_back((src.len(), false));
        Ok(())
    }

    /// Waits for something, and takes what arrives meanwhile.
    async fn meanwhile<T>(
        &mut self,
        shared: &Arc<Shared>,
        import: ImportId,
        control: &Control,
        wait: impl Future<Output = T>,
    ) -> Result<T, Refusal> {
        tokio::pin!(wait);
        loop {
            tokio::select! {
                done = &mut wait => return Ok(done),
                landed = self.next(), if !self.is_empty() => self.landed(shared, import, control, landed)?,
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

    fn landed(
        &mut self,
        shared: &Arc<Shared>,
        import: ImportId,
        control: &Control,
        (number, outcome): Landed,
    ) -> Result<(), Refusal> {
        let stats = outcome.map_err(|e| refused(&e))?;
        control.arrived(stats.bytes);
        let index = usize::try_from(number - self.first).unwrap_or(usize::MAX);
        if let Some(read) = self.reads.get_mut(index) {
            read.1 = true;
        }
        let before = self.pulled;
        while let Some(&(tokens, true)) = self.reads.front() {
            self.reads.pop_front();
            self.first += 1;
            self.pulled += tokens;
        }
        if self.pulled > before {
            let pulled = u32::try_from(self.pulled).unwrap_or(u32::MAX);
            shared.call(|worker, now| worker.pull_progress(import, pulled, now));
        }
        Ok(())
    }
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
    if let Some(slot) = view.slots.iter().find(|slot| **slot >= held.peer.pool.slots) {
        return Err(Refusal::new(
            Reason::TransferFailed,
            format!("the peer named slot {slot} of {}", held.peer.pool.slots),
        ));
    }
    Ok(&view.slots[..view.slots.len().min(wanted)])
}
