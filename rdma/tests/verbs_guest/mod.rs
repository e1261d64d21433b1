//! Shared by the tests that need a device: where they run, and movers set up for a slow guest.

use std::{env, time::Duration};

use kvc_rdma::{VerbsConfig, verbs};

/// Whether there is a device. In the guest there must be one; on any other machine the test is skipped and says so.
pub fn is_there() -> bool {
    let found = verbs::survey();
    let devices = found.verbs.as_ref().map_or(0, Vec::len);
    if env::var_os("KVC_RDMA_GUEST").is_some() {
        assert!(devices > 0, "the guest has no RDMA device: {found:?}");
    } else if devices == 0 {
        eprintln!("skipped: no RDMA device here; scripts/rdma/test.sh runs it in a guest");
    }
    devices > 0
}

/// Over every device there is; an exporter has them in reverse, so that of two each talks to the other.
pub fn config(exports: bool) -> VerbsConfig {
    let mut devices = verbs::survey().verbs.unwrap_or_default();
    devices.sort();
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
