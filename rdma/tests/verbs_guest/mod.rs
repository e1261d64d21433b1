//! Shared by the tests that need a device: where they run, and movers set up for a slow guest.

use std::{env, sync::OnceLock, time::Duration};

use kvc_rdma::{VerbsConfig, verbs};

/// Whether this is the guest. There must be a device in it; on any other machine the test is skipped and says so, also
/// where there is one: these tests take links and devices away.
pub fn is_there() -> bool {
    if env::var_os("KVC_RDMA_GUEST").is_none() {
        eprintln!("skipped: scripts/rdma/test.sh runs it in a guest with RDMA devices");
        return false;
    }
    assert!(
        !devices().is_empty(),
        "the guest has no RDMA device: {:?}",
        verbs::survey()
    );
    true
}

/// Over every device there is; an exporter has them in reverse, so that of two each talks to the other.
pub fn config(exports: bool) -> VerbsConfig {
    let mut devices = devices().to_vec();
    if exports {
        devices.reverse();
    }
    VerbsConfig {
        wish: verbs::Wish {
            devices,
            ..verbs::Wish::default()
        },
        // Pieces that the suite's faults can fall between.
        chunk: 256 << 10,
        window: 2 << 20,
        timeout: 17,
        connect: Duration::from_secs(10),
        ..VerbsConfig::default()
    }
}

/// Looked up once: reading the tree takes a fifth of a second there.
fn devices() -> &'static [String] {
    static DEVICES: OnceLock<Vec<String>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let mut devices = verbs::survey().verbs.unwrap_or_default();
        devices.sort();
        devices
    })
}
