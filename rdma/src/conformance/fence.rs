//! The two fences: nothing leaves from behind the exporter's, nothing lands behind the importer's.

use super::*;

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
