//! What every mover does, one function per behaviour (XFER-9). A mover's tests hand [`crate::conform!`] a way to make a
//! [`Pair`]; `tests/loopback.rs`, `tests/tcp.rs` and `tests/shm.rs` do.
//!
//! Source bytes are never [`AFTER_FENCE`] and never zero, so a byte's value tells where it came from.

mod bytes;
mod exposure;
mod failure;
mod fence;

pub use bytes::*;
pub use exposure::*;
pub use failure::*;
pub use fence::*;

use std::{
    any::Any,
    cell::Cell,
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    error::{MoverError, Wait},
    fault::Fault,
    mover::{Copy, LeaseToken, Mover, ReadHandle, ReadOptions, ReadStats},
    region::{HostRegion, RegionKey, Run},
    shm::Pages,
};

/// What a source is overwritten with once its lease is fenced.
const AFTER_FENCE: u8 = 0xee;
/// What a destination is overwritten with once its read is over.
const AFTER_READ: u8 = 0x77;
/// Longer than any read of the suite may take.
const LONG: Duration = Duration::from_secs(20);
/// More than any mover has on the way at once, so that a read of it is in the middle when it has begun.
const LARGE: usize = 12 << 20;

/// Two movers, and a hand on what goes wrong between them.
pub struct Pair {
    /// Serves.
    pub exporter: Box<dyn Mover>,
    /// Reads.
    pub importer: Box<dyn Mover>,
    /// What the importer dials to reach the exporter, through the faults.
    pub endpoint: String,
    /// Sets the fault of everything read from the exporter.
    pub inject: Box<dyn Fn(Option<Fault>)>,
    /// Whatever has to live as long.
    pub keep: Box<dyn Any>,
}

/// Makes a fresh pair.
pub type Start<'a> = &'a dyn Fn() -> Pair;

/// A test for each behaviour: `conform!(start)` with `fn start() -> Pair`; `conform!(start, is_there())` runs them only
/// where that is true.
#[macro_export]
macro_rules! conform {
    ($start:path) => {
        $crate::conform!($start, true);
    };
    ($start:path, $there:expr) => {
        $crate::conform!($start, $there;
            bytes_arrive_identical_at_odd_offsets_and_lengths,
            scattered_runs_land_in_order,
            nothing_outside_exposed_runs_is_readable,
            exposed_runs_grow_while_the_lease_lives,
            a_refused_extension_exposes_nothing,
            nothing_arrives_from_behind_the_fence,
            a_stalled_read_never_succeeds_after_the_fence,
            a_fence_leaves_other_leases_alone,
            a_fenced_token_is_unknown_and_may_be_exposed_again,
            nothing_lands_after_cancel,
            a_cancelled_stalled_read_is_done_once,
            a_peer_that_dies_in_the_middle_is_an_error,
            a_stream_that_ends_inside_a_frame_is_an_error,
            a_silent_peer_runs_into_the_deadline,
            a_late_peer_is_waited_for,
            many_parallel_reads_all_arrive,
            reads_of_nothing_succeed,
            malformed_reads_are_refused,
            a_wrong_token_reads_nothing,
            an_expired_lease_reads_nothing,
            a_lease_that_expires_in_the_middle_ends_the_read,
            a_token_is_exposed_once,
            a_checksum_catches_a_flipped_bit,
            a_dropped_importer_ends_its_reads,
            a_dropped_exporter_is_an_error_at_the_reader,
        );
    };
    ($start:path, $there:expr; $($behaviour:ident,)*) => {$(
        #[test]
        fn $behaviour() {
            if $there {
                $crate::conformance::$behaviour(&$start);
            }
        }
    )*};
}

/// A pair with a source exposed under a token and a destination.
struct Scene {
    pair: Pair,
    source: Arc<HostRegion>,
    target: Arc<HostRegion>,
    remote: RegionKey,
    local: RegionKey,
    token: LeaseToken,
}

impl Scene {
    fn new(start: Start<'_>, len: usize) -> Self {
        let scene = Scene::unexposed(start, len);
        scene.expose(scene.token, len);
        scene
    }

    fn unexposed(start: Start<'_>, len: usize) -> Self {
        let pair = start();
        let (source, target) = (exportable(&pattern(len)), HostRegion::new(len));
        let remote = pair.exporter.register(source.clone().into()).unwrap();
        let local = pair.importer.register(target.clone().into()).unwrap();
        Scene {
            pair,
            source,
            target,
            remote,
            local,
            token: LeaseToken::random().unwrap(),
        }
    }

    fn expose(&self, token: LeaseToken, len: usize) {
        self.pair.exporter.expose(token, LONG).unwrap();
        self.extend(0, len as u64).unwrap();
    }

    fn extend(&self, offset: u64, len: u64) -> Result<(), MoverError> {
        self.pair.exporter.extend(
            &self.token,
            &[Run {
                region: self.remote,
                offset,
                len,
            }],
        )
    }

    fn copy(&self, remote: u64, local: u64, len: u64) -> Copy {
        Copy {
            remote: Run {
                region: self.remote,
                offset: remote,
                len,
            },
            local: Run {
                region: self.local,
                offset: local,
                len,
            },
        }
    }

    fn whole(&self) -> Vec<Copy> {
        vec![self.copy(0, 0, self.source.len() as u64)]
    }

    fn begin(&self, copies: Vec<Copy>, options: ReadOptions) -> Reading {
        self.begin_as(self.token, copies, options)
    }

    fn begin_as(&self, token: LeaseToken, copies: Vec<Copy>, options: ReadOptions) -> Reading {
        let (tx, done) = mpsc::channel();
        let done_once = Box::new(move |result| tx.send(result).unwrap());
        let handle = self
            .pair
            .importer
            .read(&self.pair.endpoint, token, copies, options, done_once);
        Reading::new(handle, done)
    }

    fn read(&self, copies: Vec<Copy>) -> Result<ReadStats, MoverError> {
        self.begin(copies, options()).wait()
    }

    /// Waits until the first byte of the target has landed. A quick mover may be done by then.
    fn wait_for_landing(&self, reading: &Reading) {
        let begun = Instant::now();
        while self.target.read(0, 1) == [0] {
            assert!(begun.elapsed() < LONG, "nothing landed");
            if let Ok(ended) = reading.done.try_recv() {
                assert_ne!(self.target.read(0, 1), [0], "nothing landed: {ended:?}");
                reading.ended.set(Some(ended));
            }
            thread::yield_now();
        }
    }

    fn fill(region: &HostRegion, byte: u8) {
        region.write(0, &vec![byte; region.len()]);
    }

    /// Whether the streams carry on: reads through all of them, behind whatever was on its way.
    fn flush(&self) {
        let scratch = HostRegion::new(4 << 20);
        let local = self.pair.importer.register(scratch.into()).unwrap();
        let source = exportable(&pattern(4 << 20));
        let remote = self.pair.exporter.register(source.into()).unwrap();
        let token = LeaseToken::random().unwrap();
        let run = |region| Run {
            region,
            offset: 0,
            len: 4 << 20,
        };
        self.pair.exporter.expose(token, LONG).unwrap();
        self.pair.exporter.extend(&token, &[run(remote)]).unwrap();
        self.begin_as(
            token,
            vec![Copy {
                remote: run(remote),
                local: run(local),
            }],
            options(),
        )
        .wait()
        .unwrap();
    }
}

struct Reading {
    handle: ReadHandle,
    done: Receiver<Result<ReadStats, MoverError>>,
    /// The result, if it came while something else was waited for.
    ended: Cell<Option<Result<ReadStats, MoverError>>>,
}

impl Reading {
    fn new(handle: ReadHandle, done: Receiver<Result<ReadStats, MoverError>>) -> Self {
        let ended = Cell::new(None);
        Reading { handle, done, ended }
    }

    /// The result; `done` is called once and dropped.
    fn wait(self) -> Result<ReadStats, MoverError> {
        let ended = self.ended.take();
        let result = ended.unwrap_or_else(|| self.done.recv_timeout(LONG).expect("done is called"));
        assert!(self.done.recv_timeout(LONG).is_err(), "done is called once");
        result
    }
}

fn options() -> ReadOptions {
    ReadOptions {
        deadline: LONG,
        checksum: true,
        streams: 2,
    }
}

/// Bytes that differ from place to place, none of them zero or one of the two marks.
fn pattern(len: usize) -> Vec<u8> {
    let byte = |at: usize| 1 + ((at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 57) as u8 % 100;
    (0..len).map(byte).collect()
}

/// Memory that every mover can export: `shm` takes what lies in a memfd alone.
fn exportable(bytes: &[u8]) -> Arc<HostRegion> {
    let region = HostRegion::shared(bytes.len(), Pages::Default).unwrap();
    region.write(0, bytes);
    region
}

/// A small generator, so that a failure comes back.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

fn is_fenced(result: &Result<ReadStats, MoverError>) -> bool {
    matches!(
        result,
        Err(MoverError::Revoked { .. } | MoverError::UnknownToken { .. })
    )
}

fn is_gone(result: &Result<ReadStats, MoverError>) -> bool {
    use MoverError::{Connect, PeerGone, Truncated};
    matches!(result, Err(PeerGone { .. } | Truncated { .. } | Connect { .. }))
}
