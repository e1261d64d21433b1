//! READs in linked batches: built in place, posted with one call, accounted for until they are complete. The importer's
//! thread owns every [`SendQueue`].

use std::{
    collections::{HashMap, VecDeque},
    marker::PhantomData,
    mem, ptr,
};

use super::{
    device::Completion,
    library::ffi,
    memory::{Key, Landing, Memory},
    queue_pair::QueuePair,
};
use crate::region::{RegionKey, Run};

/// Pieces of local memory that one READ fills at most.
pub const PIECES: usize = 4;

/// The keys that a peer gave for one lease, by region. They die with the lease's queue pairs; a [`PeerKey`] taken from
/// here cannot be used after that, which is when this is dropped:
///
/// ```
/// use kvc_rdma::{Run, verbs::{Landing, PeerKeys, Scratch}};
/// fn right(keys: PeerKeys, scratch: &mut Scratch, remote: &Run, landing: Landing<'_>) {
///     let key = keys.key(0, remote).unwrap();
///     scratch.batch().push(key, &[landing]);
///     drop(keys);
/// }
/// ```
/// ```compile_fail,E0505
/// use kvc_rdma::{Run, verbs::{Landing, PeerKeys, Scratch}};
/// fn wrong(keys: PeerKeys, scratch: &mut Scratch, remote: &Run, landing: Landing<'_>) {
///     let key = keys.key(0, remote).unwrap();
///     drop(keys);
///     scratch.batch().push(key, &[landing]);
/// }
/// ```
#[derive(Debug, Default)]
pub struct PeerKeys(HashMap<RegionKey, (u64, Vec<Key>)>);

/// The right to read one run of a peer's memory, while its lease lives. Used once.
#[derive(Debug)]
pub struct PeerKey<'k> {
    address: u64,
    key: u32,
    keys: PhantomData<&'k PeerKeys>,
}

/// Room for one batch, made once: nothing is allocated per work request.
pub struct Scratch {
    requests: Vec<ffi::ibv_send_wr>,
    pieces: Vec<ffi::ibv_sge>,
    used: usize,
    bytes: u64,
}

// SAFETY: obligation 1 — the pointers inside are set and used within one call of `SendQueue::post`.
unsafe impl Send for Scratch {}

/// Linked READs that are being put together. It borrows the memory they fill and the lease they read under.
pub struct Batch<'s, 'm, 'k> {
    scratch: &'s mut Scratch,
    names: PhantomData<(&'m Memory, &'k PeerKeys)>,
}

/// A queue pair and what is posted to it. The memory it may still write is borrowed for as long as it exists: it is
/// destroyed first, whatever happens.
pub(super) struct SendQueue<'m> {
    /// `None` once it was destroyed.
    pair: Option<QueuePair>,
    room: u32,
    next: u32,
    posted: VecDeque<Posted>,
    /// Work requests that are not complete, signalled or not.
    outstanding: u32,
    /// Bytes that they bring.
    bytes: u64,
    failed: Option<(u32, u32)>,
    memory: PhantomData<&'m Memory>,
}

/// A batch that is not complete.
#[derive(Clone, Copy, Debug)]
struct Posted {
    last: u32,
    requests: u32,
    bytes: u64,
    job: usize,
}

/// A batch that is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Finished {
    pub(super) job: usize,
    pub(super) requests: u32,
    pub(super) whole: bool,
}

impl PeerKeys {
    /// Takes a region's length and its keys, by path.
    pub(super) fn learn(&mut self, region: RegionKey, len: u64, keys: Vec<Key>) {
        self.0.insert(region, (len, keys));
    }

    /// The key for `remote` over path `path`; `None` if the peer gave none that covers it.
    pub fn key(&self, path: usize, remote: &Run) -> Option<PeerKey<'_>> {
        let (len, keys) = self.0.get(&remote.region)?;
        let key = keys.get(path).filter(|_| remote.end().is_some_and(|end| end <= *len))?;
        Some(PeerKey {
            address: key.address.wrapping_add(remote.offset),
            key: key.key,
            keys: PhantomData,
        })
    }

    /// Whether the whole of `remote` can be read over some path.
    pub(super) fn covers(&self, remote: &Run) -> bool {
        self.key(0, remote).is_some()
    }
}

impl Scratch {
    /// For up to `requests` READs at once.
    pub(super) fn new(requests: usize) -> Self {
        // SAFETY: obligation 1 — nothing is named: structs of numbers and pointers may be zero.
        let (request, piece) = unsafe { (mem::zeroed(), mem::zeroed()) };
        Scratch {
            requests: vec![request; requests.max(1)],
            pieces: vec![piece; requests.max(1) * PIECES],
            used: 0,
            bytes: 0,
        }
    }

    /// An empty batch.
    pub fn batch<'m, 'k>(&mut self) -> Batch<'_, 'm, 'k> {
        self.used = 0;
        self.bytes = 0;
        Batch {
            scratch: self,
            names: PhantomData,
        }
    }
}

impl<'m, 'k> Batch<'_, 'm, 'k> {
    /// Adds a READ that fills `landings` in order, at most [`PIECES`] of them; `false` if there is no room.
    pub fn push(&mut self, key: PeerKey<'k>, landings: &[Landing<'m>]) -> bool {
        let Scratch {
            requests,
            pieces,
            used,
            bytes,
        } = &mut *self.scratch;
        let Some(request) = requests.get_mut(*used) else {
            return false;
        };
        let Some(room) = pieces.get_mut(*used * PIECES..*used * PIECES + landings.len().min(PIECES + 1)) else {
            return false;
        };
        if landings.len() > PIECES {
            return false;
        }
        for (piece, landing) in room.iter_mut().zip(landings) {
            *piece = ffi::ibv_sge {
                addr: landing.address,
                length: landing.len,
                lkey: landing.key,
            };
            *bytes += u64::from(landing.len);
        }
        request.num_sge = landings.len() as i32;
        request.wr.rdma = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
            remote_addr: key.address,
            rkey: key.key,
        };
        *used += 1;
        true
    }

    /// READs in it.
    pub fn len(&self) -> usize {
        self.scratch.used
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.scratch.used == 0
    }
}

impl<'m> SendQueue<'m> {
    /// `pair` is started and takes `room` requests.
    pub(super) fn new(pair: QueuePair, room: u32) -> Self {
        SendQueue {
            pair: Some(pair),
            room,
            next: 0,
            posted: VecDeque::with_capacity(room as usize),
            outstanding: 0,
            bytes: 0,
            failed: None,
            memory: PhantomData,
        }
    }

    /// Requests that it takes now.
    pub(super) fn room(&self) -> u32 {
        if self.failed.is_some() || self.pair.is_none() {
            0
        } else {
            self.room - self.outstanding
        }
    }

    pub(super) fn outstanding(&self) -> u32 {
        self.outstanding
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The status and vendor's number of what went wrong.
    pub(super) fn failed(&self) -> Option<(u32, u32)> {
        self.failed
    }

    /// Ends it; what is posted completes.
    pub(super) fn fail(&self) {
        self.pair.iter().for_each(QueuePair::fail);
    }

    /// Destroys the queue pair: when it returns nothing lands through it any more, whatever was told complete.
    pub(super) fn destroy(&mut self) {
        self.pair = None;
    }

    /// Gives up on completions that will not come, of a queue pair that was destroyed: `finished` gets its batches as
    /// failed.
    pub(super) fn abandon(&mut self, finished: &mut Vec<Finished>) {
        (self.outstanding, self.bytes) = (0, 0);
        finished.extend(self.posted.drain(..).map(|batch| Finished {
            job: batch.job,
            requests: batch.requests,
            whole: false,
        }));
    }

    /// Posts the batch for `job`: one call, and only its last READ is signalled. Completions carry `queue`.
    pub(super) fn post(&mut self, queue: u32, job: usize, batch: Batch<'_, 'm, '_>) -> Result<u32, i32> {
        let Scratch {
            requests,
            pieces,
            used,
            bytes,
        } = batch.scratch;
        let count = *used;
        let Some(pair) = self.pair.as_ref().filter(|_| count > 0) else {
            return Ok(0);
        };
        let (first, pieces) = (requests.as_mut_ptr(), pieces.as_mut_ptr());
        for at in 0..count {
            let is_last = at + 1 == count;
            // SAFETY: obligation 1 — `at` < `count`, which are requests of the scratch; it has PIECES pieces for each.
            let (request, next, list) = unsafe { (&mut *first.add(at), first.add(at + 1), pieces.add(at * PIECES)) };
            request.wr_id = u64::from(queue) << 32 | u64::from(self.next.wrapping_add(at as u32));
            request.next = if is_last { ptr::null_mut() } else { next };
            request.sg_list = list;
            request.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_READ;
            let signalled = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
            request.send_flags = if is_last { signalled } else { 0 };
        }
        let mut bad = ptr::null_mut();
        // SAFETY: obligation 1 — the memory is borrowed for as long as this queue exists ('m); obligation 3 — the keys
        // are those of the lease that the batch borrows; obligation 4 — the read owns its landing runs until it is done.
        let code = unsafe {
            let post = (*(*pair.raw()).context).ops.post_send;
            post.map_or(libc::ENOSYS, |post| post(pair.raw(), first, &mut bad))
        };
        let taken = match code {
            0 => count,
            _ if bad.is_null() => 0,
            // Those before the bad one were taken, and none of them is signalled.
            _ => (bad as usize).saturating_sub(first as usize) / size_of::<ffi::ibv_send_wr>(),
        } as u32;
        if taken > 0 {
            let last = self.next.wrapping_add(taken - 1);
            self.posted.push_back(Posted {
                last,
                requests: taken,
                bytes: *bytes,
                job,
            });
            self.next = self.next.wrapping_add(taken);
            self.outstanding += taken;
            self.bytes += *bytes;
        }
        if code == 0 { Ok(taken) } else { Err(code.abs()) }
    }

    /// Takes a completion of this queue; `finished` gets the batches that are complete by it. They complete in order:
    /// one that went well says so for all before it, and after a failure each request has a completion of its own.
    pub(super) fn complete(&mut self, completion: &Completion, finished: &mut Vec<Finished>) {
        let at = completion.id as u32;
        if let Some(error) = completion.error {
            self.failed.get_or_insert(error);
        }
        while let Some(batch) = self.posted.front().copied() {
            let is_done = at.wrapping_sub(batch.last) < u32::MAX / 2;
            if !is_done {
                return;
            }
            self.posted.pop_front();
            self.outstanding -= batch.requests;
            self.bytes -= batch.bytes;
            // Counted as failed when anything on the queue has: its bytes are read again.
            let whole = self.failed.is_none();
            finished.push(Finished {
                job: batch.job,
                requests: batch.requests,
                whole,
            });
        }
    }
}

/// A completion status by name.
pub(super) fn status(status: u32) -> &'static str {
    const NAMES: [&str; 24] = [
        "success",
        "local length error",
        "local queue pair error",
        "local EE context error",
        "local protection error",
        "flushed",
        "memory window error",
        "bad response",
        "local access error",
        "remote invalid request",
        "remote access error",
        "remote operation error",
        "retries exceeded",
        "receiver not ready",
        "local RDD violation",
        "remote invalid RD request",
        "remote abort",
        "invalid EE context number",
        "invalid EE context state",
        "fatal error",
        "response timeout",
        "general error",
        "tag matching error",
        "incomplete rendezvous",
    ];
    NAMES.get(status as usize).copied().unwrap_or("unknown status")
}
