//! What every mover does, one function per behaviour (XFER-9). A mover's tests hand [`crate::conform!`] a way to make a
//! [`Pair`]; `tests/loopback.rs` and `tests/tcp.rs` do.
//!
//! Source bytes are never [`AFTER_FENCE`] and never zero, so a byte's value tells where it came from.

use std::{
    any::Any,
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

/// A test for each behaviour: `conform!(start)` with `fn start() -> Pair`.
#[macro_export]
macro_rules! conform {
    ($start:path) => {
        $crate::conform!($start:
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
    ($start:path: $($behaviour:ident,)*) => {$(
        #[test]
        fn $behaviour() {
            $crate::conformance::$behaviour(&$start);
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
        let (source, target) = (HostRegion::from_bytes(&pattern(len)), HostRegion::new(len));
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
        Reading { handle, done }
    }

    fn read(&self, copies: Vec<Copy>) -> Result<ReadStats, MoverError> {
        self.begin(copies, options()).wait()
    }

    /// Waits until the first byte of the target has landed.
    fn wait_for_landing(&self, reading: &Reading) {
        let begun = Instant::now();
        while self.target.read(0, 1) == [0] {
            let ended = reading.done.try_recv();
            assert!(begun.elapsed() < LONG && ended.is_err(), "nothing landed: {ended:?}");
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
        let source = HostRegion::from_bytes(&pattern(4 << 20));
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
}

impl Reading {
    /// The result; `done` is called once and dropped.
    fn wait(self) -> Result<ReadStats, MoverError> {
        let result = self.done.recv_timeout(LONG).expect("done is called");
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

/// XFER-1: what is read is what is there, to the byte, and nothing beside it is touched.
pub fn bytes_arrive_identical_at_odd_offsets_and_lengths(start: Start<'_>) {
    let scene = Scene::new(start, 3 << 20);
    let (bytes, mut dice) = (pattern(3 << 20), Dice(7));
    for checksum in [true, false] {
        for _ in 0..20 {
            let len = 1 + dice.below(1 << 21);
            let (from, to) = (dice.below((3 << 20) - len), dice.below((3 << 20) - len));
            Scene::fill(&scene.target, 0);
            let reading = scene.begin(vec![scene.copy(from, to, len)], ReadOptions { checksum, ..options() });
            assert_eq!(reading.wait().unwrap().bytes, len);
            let (from, to, len) = (from as usize, to as usize, len as usize);
            let mut expected = vec![0; 3 << 20];
            expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
            assert!(
                scene.target.read(0, 3 << 20) == expected,
                "from {from} to {to}, {len} bytes"
            );
        }
    }
}

/// XFER-5: hundreds of scattered runs of uneven length, on either side, in one read.
pub fn scattered_runs_land_in_order(start: Start<'_>) {
    let scene = Scene::new(start, 4 << 20);
    let (bytes, mut dice) = (pattern(4 << 20), Dice(11));
    let mut expected = vec![0; 4 << 20];
    let places = 1500u64;
    let copies: Vec<Copy> = (0..places)
        .map(|at| {
            let (from, to) = (at * 7 % places * 2500, at * 11 % places * 2500);
            let (len, skew) = (dice.below(2400), dice.below(100));
            let (source, target) = ((from + skew) as usize, to as usize);
            expected[target..target + len as usize].copy_from_slice(&bytes[source..source + len as usize]);
            scene.copy(from + skew, to, len)
        })
        .collect();
    let total: u64 = copies.iter().map(|copy| copy.remote.len).sum();
    assert_eq!(scene.read(copies).unwrap().bytes, total);
    assert!(scene.target.read(0, 4 << 20) == expected);
}

/// XFER-2, XFER-10: a token opens its runs, to the byte, and nothing else of the region or of another.
pub fn nothing_outside_exposed_runs_is_readable(start: Start<'_>) {
    let scene = Scene::unexposed(start, 1000);
    let other = scene
        .pair
        .exporter
        .register(HostRegion::from_bytes(&pattern(1000)).into())
        .unwrap();
    scene.pair.exporter.expose(scene.token, LONG).unwrap();
    let runs = [(100, 50), (150, 50), (400, 100)];
    runs.into_iter()
        .for_each(|(offset, len)| scene.extend(offset, len).unwrap());
    assert_eq!(scene.read(vec![scene.copy(120, 0, 60)]).unwrap().bytes, 60);
    scene
        .read(vec![scene.copy(100, 0, 100), scene.copy(400, 100, 100)])
        .unwrap();
    for (offset, len) in [
        (99, 2),
        (100, 101),
        (199, 2),
        (200, 1),
        (150, 300),
        (499, 2),
        (0, 1000),
        (999, 1),
        (990, 20),
    ] {
        let refused = scene.read(vec![scene.copy(offset, 0, len)]);
        let run = Run {
            region: scene.remote,
            offset,
            len,
        };
        assert!(
            matches!(refused, Err(MoverError::RangeRefused { run: got, .. }) if got == run),
            "{run}: {refused:?}"
        );
    }
    for region in [other, RegionKey(77)] {
        let remote = Run {
            region,
            offset: 100,
            len: 10,
        };
        let refused = scene.read(vec![Copy {
            remote,
            ..scene.copy(100, 0, 10)
        }]);
        assert!(
            matches!(refused, Err(MoverError::RangeRefused { run, .. }) if run == remote),
            "{refused:?}"
        );
    }
    let mixed = scene.read(vec![scene.copy(400, 0, 10), scene.copy(300, 10, 10)]);
    assert!(
        matches!(mixed, Err(MoverError::RangeRefused { run, .. }) if run.offset == 300),
        "{mixed:?}"
    );
}

/// XFER-4: pages become readable while the lease is already in use.
pub fn exposed_runs_grow_while_the_lease_lives(start: Start<'_>) {
    let scene = Scene::unexposed(start, 1000);
    scene.pair.exporter.expose(scene.token, LONG).unwrap();
    for page in 0..10 {
        let copy = || vec![scene.copy(page * 100, page * 100, 100)];
        assert!(matches!(scene.read(copy()), Err(MoverError::RangeRefused { .. })));
        scene.extend(page * 100, 100).unwrap();
        scene.read(copy()).unwrap();
    }
    assert_eq!(scene.target.read(0, 1000), pattern(1000));
}

/// An extension with one run outside its region changes nothing.
pub fn a_refused_extension_exposes_nothing(start: Start<'_>) {
    let scene = Scene::unexposed(start, 1000);
    scene.pair.exporter.expose(scene.token, LONG).unwrap();
    let run = |offset, len| Run {
        region: scene.remote,
        offset,
        len,
    };
    for bad in [
        run(900, 101),
        run(u64::MAX, 2),
        Run {
            region: RegionKey(9),
            ..run(0, 1)
        },
    ] {
        let refused = scene.pair.exporter.extend(&scene.token, &[run(0, 10), bad]);
        assert_eq!(refused, Err(MoverError::LocalRange { run: bad }));
    }
    assert!(matches!(
        scene.read(vec![scene.copy(0, 0, 10)]),
        Err(MoverError::RangeRefused { .. })
    ));
    let unknown = scene
        .pair
        .exporter
        .extend(&LeaseToken::random().unwrap(), &[run(0, 10)]);
    assert!(matches!(unknown, Err(MoverError::UnknownToken { .. })));
}

/// XFER-2: the source is rewritten the moment `fence` returns, wherever the read is, and no byte of it arrives.
pub fn nothing_arrives_from_behind_the_fence(start: Start<'_>) {
    let scene = Scene::unexposed(start, LARGE);
    let bytes = pattern(LARGE);
    let mut dice = Dice(3);
    for round in 0..8 {
        scene.source.write(0, &bytes);
        Scene::fill(&scene.target, 0);
        scene.expose(scene.token, LARGE);
        let reading = scene.begin(
            scene.whole(),
            ReadOptions {
                checksum: round % 2 == 0,
                ..options()
            },
        );
        scene.wait_for_landing(&reading);
        thread::sleep(Duration::from_micros(dice.below(3000)));
        scene.pair.exporter.fence(&scene.token);
        Scene::fill(&scene.source, AFTER_FENCE);
        let result = reading.wait();
        let landed = scene.target.read(0, LARGE);
        assert!(
            !landed.contains(&AFTER_FENCE),
            "round {round}: a byte written after the fence arrived"
        );
        match result {
            Ok(_) => assert!(landed == bytes, "round {round}: success with other bytes"),
            error => assert!(is_fenced(&error), "round {round}: {error:?}"),
        }
    }
}

/// XFER-2: a read that was in the middle at the fence ends revoked, however late its peer's bytes come.
pub fn a_stalled_read_never_succeeds_after_the_fence(start: Start<'_>) {
    let scene = Scene::new(start, LARGE);
    (scene.pair.inject)(Some(Fault::Stall { after: 600_000 }));
    let reading = scene.begin(scene.whole(), options());
    scene.wait_for_landing(&reading);
    scene.pair.exporter.fence(&scene.token);
    Scene::fill(&scene.source, AFTER_FENCE);
    (scene.pair.inject)(None);
    let result = reading.wait();
    assert!(is_fenced(&result), "{result:?}");
    assert!(!scene.target.read(0, LARGE).contains(&AFTER_FENCE));
}

/// The end of one lease is no event for a read under another, on the same streams.
pub fn a_fence_leaves_other_leases_alone(start: Start<'_>) {
    let scene = Scene::new(start, LARGE);
    let other = LeaseToken::random().unwrap();
    scene.pair.exporter.expose(other, LONG).unwrap();
    let run = Run {
        region: scene.remote,
        offset: 0,
        len: LARGE as u64,
    };
    scene.pair.exporter.extend(&other, &[run]).unwrap();
    let target = HostRegion::new(LARGE);
    let local = scene.pair.importer.register(target.into()).unwrap();
    let doomed = scene.begin_as(
        other,
        vec![Copy {
            remote: run,
            local: Run { region: local, ..run },
        }],
        options(),
    );
    let reading = scene.begin(scene.whole(), options());
    scene.wait_for_landing(&reading);
    scene.pair.exporter.fence(&other);
    reading.wait().unwrap();
    assert!(scene.target.read(0, LARGE) == pattern(LARGE));
    let result = doomed.wait();
    assert!(
        matches!(
            result,
            Ok(_) | Err(MoverError::Revoked { .. } | MoverError::UnknownToken { .. })
        ),
        "{result:?}"
    );
}

/// Fencing twice, or what was never exposed, is nothing; a token that was fenced opens nothing until exposed anew.
pub fn a_fenced_token_is_unknown_and_may_be_exposed_again(start: Start<'_>) {
    let scene = Scene::new(start, 1000);
    scene.read(scene.whole()).unwrap();
    for _ in 0..2 {
        scene.pair.exporter.fence(&scene.token);
        assert!(matches!(
            scene.read(scene.whole()),
            Err(MoverError::UnknownToken { .. })
        ));
        assert!(matches!(scene.extend(0, 10), Err(MoverError::UnknownToken { .. })));
    }
    scene.pair.exporter.expose(scene.token, LONG).unwrap();
    assert!(
        matches!(scene.read(scene.whole()), Err(MoverError::RangeRefused { .. })),
        "old runs are gone"
    );
    scene.extend(0, 1000).unwrap();
    scene.read(scene.whole()).unwrap();
}

/// XFER-2, F11: the importer's fence. The destination is rewritten the moment `cancel` returns and stays so.
pub fn nothing_lands_after_cancel(start: Start<'_>) {
    let scene = Scene::new(start, LARGE);
    let mut dice = Dice(5);
    for round in 0..8 {
        Scene::fill(&scene.target, 0);
        let reading = scene.begin(
            scene.whole(),
            ReadOptions {
                checksum: round % 2 == 0,
                ..options()
            },
        );
        scene.wait_for_landing(&reading);
        thread::sleep(Duration::from_micros(dice.below(3000)));
        reading.handle.cancel();
        Scene::fill(&scene.target, AFTER_READ);
        let result = reading.wait();
        assert!(
            matches!(result, Ok(_) | Err(MoverError::Cancelled)),
            "round {round}: {result:?}"
        );
        scene.flush();
        let landed = scene.target.read(0, LARGE);
        assert!(
            landed == vec![AFTER_READ; LARGE],
            "round {round}: a byte landed after cancel"
        );
    }
}

/// F12, F14: a read on a silent peer can be given up at any time, twice as well as once, and says so once.
pub fn a_cancelled_stalled_read_is_done_once(start: Start<'_>) {
    let scene = Scene::new(start, LARGE);
    (scene.pair.inject)(Some(Fault::Stall { after: 600_000 }));
    let reading = scene.begin(scene.whole(), options());
    scene.wait_for_landing(&reading);
    reading.handle.cancel();
    reading.handle.cancel();
    let handle = reading.handle.clone();
    assert_eq!(reading.wait(), Err(MoverError::Cancelled));
    handle.cancel();
    (scene.pair.inject)(None);
    scene.flush();
}

/// T7: the exporter's process ends in the middle of a pull.
pub fn a_peer_that_dies_in_the_middle_is_an_error(start: Start<'_>) {
    let scene = Scene::new(start, LARGE);
    (scene.pair.inject)(Some(Fault::Die { after: 2_000_000 }));
    let result = scene.read(scene.whole());
    assert!(is_gone(&result), "{result:?}");
    let again = scene.read(scene.whole());
    assert!(is_gone(&again), "{again:?}");
    (scene.pair.inject)(None);
    Scene::fill(&scene.target, 0);
    scene.read(scene.whole()).unwrap();
    assert!(
        scene.target.read(0, LARGE) == pattern(LARGE),
        "F15: nothing is held against a peer that is back"
    );
}

/// T7: truncated frames.
pub fn a_stream_that_ends_inside_a_frame_is_an_error(start: Start<'_>) {
    let scene = Scene::new(start, 1 << 20);
    (scene.pair.inject)(Some(Fault::Truncate { after: 300_000 }));
    let result = scene
        .begin(
            scene.whole(),
            ReadOptions {
                streams: 1,
                ..options()
            },
        )
        .wait();
    assert!(
        matches!(result, Err(MoverError::Truncated { got, expected, .. }) if got < expected),
        "{result:?}"
    );
}

/// XFER-7, F12: silence ends at the read's own deadline.
pub fn a_silent_peer_runs_into_the_deadline(start: Start<'_>) {
    let scene = Scene::new(start, LARGE);
    (scene.pair.inject)(Some(Fault::Stall { after: 100_000 }));
    let (deadline, begun) = (Duration::from_millis(60), Instant::now());
    let result = scene.begin(scene.whole(), ReadOptions { deadline, ..options() }).wait();
    let late = MoverError::Timeout {
        peer: scene.pair.endpoint.clone(),
        wait: Wait::Deadline,
        limit: deadline,
    };
    assert_eq!(result, Err(late));
    assert!(begun.elapsed() >= deadline);
    Scene::fill(&scene.target, AFTER_READ);
    (scene.pair.inject)(None);
    scene.flush();
    assert!(
        scene.target.read(0, LARGE) == vec![AFTER_READ; LARGE],
        "late bytes landed"
    );
}

/// Slow is not silent.
pub fn a_late_peer_is_waited_for(start: Start<'_>) {
    let scene = Scene::new(start, 1 << 20);
    (scene.pair.inject)(Some(Fault::Delay {
        pause: Duration::from_millis(3),
    }));
    scene.read(scene.whole()).unwrap();
    assert!(scene.target.read(0, 1 << 20) == pattern(1 << 20));
}

/// Reads of one importer share its streams; each gets its own bytes, under its own lease.
pub fn many_parallel_reads_all_arrive(start: Start<'_>) {
    let scene = Scene::unexposed(start, 4 << 20);
    let bytes = pattern(4 << 20);
    let share = (4 << 20) / 64;
    let readings: Vec<Reading> = (0..64)
        .map(|at| {
            let token = LeaseToken::random().unwrap();
            let run = Run {
                region: scene.remote,
                offset: at * share,
                len: share,
            };
            scene.pair.exporter.expose(token, LONG).unwrap();
            scene.pair.exporter.extend(&token, &[run]).unwrap();
            let streams = 1 + at as usize % 3;
            scene.begin_as(
                token,
                vec![scene.copy(at * share, at * share, share)],
                ReadOptions { streams, ..options() },
            )
        })
        .collect();
    for reading in readings {
        assert_eq!(reading.wait().unwrap().bytes, share);
    }
    assert!(scene.target.read(0, 4 << 20) == bytes);
}

/// Zero bytes are none to ask for.
pub fn reads_of_nothing_succeed(start: Start<'_>) {
    let scene = Scene::new(start, 1000);
    assert_eq!(scene.read(vec![]).unwrap().bytes, 0);
    assert_eq!(
        scene
            .read(vec![scene.copy(0, 0, 0), scene.copy(1000, 1000, 0)])
            .unwrap()
            .bytes,
        0
    );
    assert_eq!(
        scene
            .read(vec![scene.copy(0, 0, 0), scene.copy(5, 6, 7)])
            .unwrap()
            .bytes,
        7
    );
    scene.extend(500, 0).unwrap();
}

/// What cannot be done is refused before a byte moves.
pub fn malformed_reads_are_refused(start: Start<'_>) {
    let scene = Scene::new(start, 1000);
    let good = scene.copy(0, 0, 10);
    let longer = Run { len: 11, ..good.local };
    let refused = scene.read(vec![good, Copy { local: longer, ..good }]);
    assert_eq!(refused, Err(MoverError::LengthMismatch { remote: 10, local: 11 }));
    let outside = [
        Run {
            offset: 991,
            ..good.local
        },
        Run {
            offset: u64::MAX - 3,
            ..good.local
        },
        Run {
            region: RegionKey(40),
            ..good.local
        },
    ];
    for run in outside {
        assert_eq!(
            scene.read(vec![good, Copy { local: run, ..good }]),
            Err(MoverError::LocalRange { run })
        );
    }
    let remote = Run {
        offset: u64::MAX - 3,
        ..good.remote
    };
    assert!(matches!(
        scene.read(vec![Copy { remote, ..good }]),
        Err(MoverError::TooLarge { .. })
    ));
    assert_eq!(scene.target.read(0, 1000), vec![0; 1000], "a byte moved");
}

/// XFER-10.
pub fn a_wrong_token_reads_nothing(start: Start<'_>) {
    let scene = Scene::new(start, 1000);
    let mut bytes = *scene.token.as_bytes();
    bytes[31] ^= 1;
    for token in [LeaseToken::from_bytes(bytes), LeaseToken::from_bytes([0; 32])] {
        let result = scene.begin_as(token, scene.whole(), options()).wait();
        assert!(matches!(result, Err(MoverError::UnknownToken { .. })), "{result:?}");
    }
    assert_eq!(scene.target.read(0, 1000), vec![0; 1000]);
}

/// XFER-2: the maximum age.
pub fn an_expired_lease_reads_nothing(start: Start<'_>) {
    let scene = Scene::unexposed(start, 1000);
    scene.pair.exporter.expose(scene.token, Duration::ZERO).unwrap();
    assert!(matches!(scene.extend(0, 1000), Err(MoverError::Expired { .. })));
    assert!(matches!(scene.read(scene.whole()), Err(MoverError::Expired { .. })));
    assert_eq!(scene.target.read(0, 1000), vec![0; 1000]);
}

/// XFER-2: the maximum age holds for a read that began in time.
pub fn a_lease_that_expires_in_the_middle_ends_the_read(start: Start<'_>) {
    let scene = Scene::unexposed(start, LARGE);
    scene
        .pair
        .exporter
        .expose(scene.token, Duration::from_millis(200))
        .unwrap();
    scene.extend(0, LARGE as u64).unwrap();
    (scene.pair.inject)(Some(Fault::Stall { after: 600_000 }));
    let reading = scene.begin(scene.whole(), options());
    while scene.extend(0, 1).is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
    (scene.pair.inject)(None);
    let result = reading.wait();
    assert!(matches!(result, Err(MoverError::Expired { .. })), "{result:?}");
}

/// Two leases never share a token.
pub fn a_token_is_exposed_once(start: Start<'_>) {
    let scene = Scene::new(start, 1000);
    assert_eq!(
        scene.pair.exporter.expose(scene.token, LONG),
        Err(MoverError::TokenInUse)
    );
    scene.read(scene.whole()).unwrap();
}

/// XFER-8, and its negative control: without the checksum the same bit goes unseen.
pub fn a_checksum_catches_a_flipped_bit(start: Start<'_>) {
    let scene = Scene::new(start, 1 << 20);
    (scene.pair.inject)(Some(Fault::Corrupt { at: 123_456 }));
    let read = |checksum| {
        scene
            .begin(
                scene.whole(),
                ReadOptions {
                    checksum,
                    streams: 1,
                    ..options()
                },
            )
            .wait()
    };
    let caught = read(true);
    assert!(
        matches!(caught, Err(MoverError::Checksum { got, expected, .. }) if got != expected),
        "{caught:?}"
    );
    let scene = Scene::new(start, 1 << 20);
    (scene.pair.inject)(Some(Fault::Corrupt { at: 123_456 }));
    scene
        .begin(
            scene.whole(),
            ReadOptions {
                checksum: false,
                streams: 1,
                ..options()
            },
        )
        .wait()
        .unwrap();
    let wrong = scene
        .target
        .read(0, 1 << 20)
        .iter()
        .zip(pattern(1 << 20))
        .filter(|(got, sent)| **got != *sent)
        .count();
    assert_eq!(wrong, 1, "the fault is there");
}

/// Obligation 1: a mover that is gone writes nothing, and its readers know.
pub fn a_dropped_importer_ends_its_reads(start: Start<'_>) {
    let scene = Scene::new(start, LARGE);
    (scene.pair.inject)(Some(Fault::Stall { after: 600_000 }));
    let reading = scene.begin(scene.whole(), options());
    scene.wait_for_landing(&reading);
    let Scene {
        pair:
            Pair {
                importer,
                inject,
                keep,
                exporter,
                ..
            },
        target,
        ..
    } = scene;
    drop(importer);
    Scene::fill(&target, AFTER_READ);
    assert_eq!(reading.wait(), Err(MoverError::Closed));
    inject(None);
    drop((keep, exporter));
    assert!(target.read(0, LARGE) == vec![AFTER_READ; LARGE]);
}

/// Obligation 1: a mover that is gone reads nothing.
pub fn a_dropped_exporter_is_an_error_at_the_reader(start: Start<'_>) {
    let Scene {
        pair,
        source,
        target,
        remote,
        local,
        token,
    } = Scene::new(start, LARGE);
    let Pair {
        exporter,
        importer,
        endpoint,
        inject,
        keep,
    } = pair;
    inject(Some(Fault::Stall { after: 600_000 }));
    let run = |region| Run {
        region,
        offset: 0,
        len: LARGE as u64,
    };
    let (tx, done) = mpsc::channel();
    let done_once = Box::new(move |result| tx.send(result).unwrap());
    let copies = vec![Copy {
        remote: run(remote),
        local: run(local),
    }];
    let handle = importer.read(&endpoint, token, copies, options(), done_once);
    let begun = Instant::now();
    while target.read(0, 1) == [0] && begun.elapsed() < LONG {
        thread::yield_now();
    }
    drop(exporter);
    Scene::fill(&source, AFTER_FENCE);
    inject(None);
    let result = Reading { handle, done }.wait();
    assert!(is_gone(&result), "{result:?}");
    assert!(!target.read(0, LARGE).contains(&AFTER_FENCE));
    drop(keep);
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
