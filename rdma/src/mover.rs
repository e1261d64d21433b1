//! The one interface of every mover: expose runs under a token, read a peer's runs. `engine-ext` drives it.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use crate::{
    error::MoverError,
    region::{Region, RegionKey, Run},
};

/// How bytes travel (XFER-9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MoverKind {
    /// Inside one process.
    Loopback,
    /// TCP range requests.
    Tcp,
    /// Shared memory of one host.
    Shm,
    /// RDMA READs.
    Verbs,
}

impl MoverKind {
    /// Its name in configuration, on the wire and in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            MoverKind::Loopback => "loopback",
            MoverKind::Tcp => "tcp",
            MoverKind::Shm => "shm",
            MoverKind::Verbs => "verbs",
        }
    }
}

/// 32 unguessable bytes that name a lease to the mover (XFER-10). Who has them can read what is exposed under them, so
/// they are never logged: `Debug` hides them.
#[derive(Clone, Copy)]
pub struct LeaseToken(pub(crate) [u8; 32]);

impl LeaseToken {
    /// Fresh bytes from the system's random source.
    pub fn random() -> Result<Self, MoverError> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(|e| MoverError::System {
            call: "getrandom",
            errno: e.raw_os_error().unwrap_or(0),
        })?;
        Ok(LeaseToken(bytes))
    }

    /// As received in a lease grant.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        LeaseToken(bytes)
    }

    /// For the lease grant.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for LeaseToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LeaseToken(..)")
    }
}

/// Bytes to fetch: the peer's run and where it goes, equal in length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Where the bytes are at the peer.
    pub remote: Run,
    /// Where they go here.
    pub local: Run,
}

/// How one read is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadOptions {
    /// From the call to the last byte (XFER-7).
    pub deadline: Duration,
    /// Whether every chunk carries a checksum (XFER-8).
    pub checksum: bool,
    /// How many streams it may use at most, cut to what the mover allows, at least one: connections (tcp), threads (shm),
    /// queue pairs over each device (verbs). What a lease has of them is set up once; reads of it share them.
    pub streams: usize,
}

impl Default for ReadOptions {
    /// 30 s, no checksum, two streams.
    fn default() -> Self {
        ReadOptions {
            deadline: Duration::from_secs(30),
            checksum: false,
            streams: 2,
        }
    }
}

/// What a finished read did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadStats {
    /// Payload bytes.
    pub bytes: u64,
    /// Requests it was cut into.
    pub chunks: u64,
    /// From the call to the last byte.
    pub elapsed: Duration,
}

/// Called exactly once per read, on a thread of the mover; it must not block. When it is called nothing writes into the
/// read's local runs any more.
pub type Done = Box<dyn FnOnce(Result<ReadStats, MoverError>) + Send>;

/// Starts a thread of a mover.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, MoverError> {
    let spawned = thread::Builder::new().name(name.into()).spawn(run);
    spawned.map_err(|e| MoverError::system("clone", &e))
}

/// A panic in an owner's `done` must not take every other read with it.
pub(crate) fn call(done: Done, result: Result<ReadStats, MoverError>) {
    if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
        tracing::error!("a read's done panicked");
    }
}

/// Moves bytes between registered regions. Every call returns at once: waiting is the mover's own threads' part.
///
/// Dropping a mover ends its threads: nothing reads or writes registered memory any more, and reads that still ran are
/// done with [`MoverError::Closed`].
pub trait Mover: Send + Sync {
    /// How it moves bytes.
    fn kind(&self) -> MoverKind;

    /// What peers pass to [`Mover::read`] to reach this one.
    fn endpoint(&self) -> String;

    /// Makes memory known, for exporting and for landing.
    ///
    /// # Errors
    /// [`MoverError::TooMany`].
    fn register(&self, region: Region) -> Result<RegionKey, MoverError>;

    /// Opens a lease under which nothing is readable yet. It dies by [`Mover::fence`], or by itself after `max_age`; its
    /// entry stays until it is fenced.
    ///
    /// # Errors
    /// [`MoverError::TokenInUse`], [`MoverError::TooMany`].
    fn expose(&self, token: LeaseToken, max_age: Duration) -> Result<(), MoverError>;

    /// Makes more bytes readable under the token (XFER-4). Runs may touch and overlap. All or nothing.
    ///
    /// # Errors
    /// [`MoverError::LocalRange`]; [`MoverError::UnknownToken`] or [`MoverError::Expired`] with this mover as peer.
    fn extend(&self, token: &LeaseToken, runs: &[Run]) -> Result<(), MoverError>;

    /// Ends the lease: when it returns nothing reads the exposed memory under this token any more, and the memory may be
    /// written (XFER-2). Unknown tokens are ignored.
    ///
    /// Waits for what is in the middle: over tcp one non-blocking write; over shared memory one copy of an importer, and
    /// past its deadline none (what is copied from then on is thrown away there); over verbs one checksum of a chunk or
    /// one queue pair being connected, and the driver's time to destroy the lease's queue pairs, a millisecond or so each.
    fn fence(&self, token: &LeaseToken);

    /// Fetches `copies` from `peer` (its [`Mover::endpoint`]) under `token`. The local runs belong to the read until
    /// `done` is called; if it fails their content is undefined.
    fn read(&self, peer: &str, token: LeaseToken, copies: Vec<Copy>, options: ReadOptions, done: Done) -> ReadHandle;
}

/// A running read. Dropping it lets the read run on.
#[derive(Clone)]
pub struct ReadHandle(pub(crate) Arc<dyn Cancel>);

impl ReadHandle {
    /// The importer's fence: when it returns nothing writes into the read's local runs any more, and `done` has been
    /// called or will be, once, with [`MoverError::Cancelled`] or what had happened before.
    ///
    /// Waits for what is in the middle: over tcp one non-blocking read, over shared memory one copy of a chunk; over verbs
    /// the work that is with the device, 10 ms and then 50 ms for its queue pairs to flush, then the driver's time to
    /// destroy them, each looked at every 5 ms. Over verbs it does not wait inside a `done` of the same mover (that thread
    /// is the one it would wait for): there the read's own `done` is the fence.
    pub fn cancel(&self) {
        self.0.cancel();
    }
}

impl fmt::Debug for ReadHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadHandle")
    }
}

/// What a mover does when a read is cancelled.
pub(crate) trait Cancel: Send + Sync {
    fn cancel(&self);
}
