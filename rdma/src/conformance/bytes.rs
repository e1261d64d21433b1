//! What a read delivers: every byte, in order, once.

use super::*;

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
