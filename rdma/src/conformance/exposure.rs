//! What a lease shows: the exposed runs under the right token, while it lives.

use super::*;

/// XFER-2, XFER-10: a token opens its runs, to the byte, and nothing else of the region or of another.
pub fn nothing_outside_exposed_runs_is_readable(start: Start<'_>) {
    let scene = Scene::unexposed(start, 1000);
    let other = scene.pair.exporter.register(exportable(&pattern(1000)).into()).unwrap();
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
