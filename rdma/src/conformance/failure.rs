//! Peers that die, stall or come late.

use super::*;

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
    let result = Reading::new(handle, done).wait();
    assert!(is_gone(&result), "{result:?}");
    assert!(!target.read(0, LARGE).contains(&AFTER_FENCE));
    drop(keep);
}
