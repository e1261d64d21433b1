//! The shm mover passes the conformance suite; the importer has its peer's faults.

use kvc_rdma::{Mover, ShmConfig, ShmMover, conformance::Pair};

kvc_rdma::conform!(start);

fn start() -> Pair {
    let exporter = ShmMover::start(ShmConfig::default()).unwrap();
    let importer = ShmMover::start(ShmConfig::default()).unwrap();
    let (endpoint, faults) = (exporter.endpoint(), importer.faults());
    let inject = Box::new(move |fault| faults.inject(fault));
    Pair {
        exporter: Box::new(exporter),
        importer: Box::new(importer),
        endpoint,
        inject,
        keep: Box::new(()),
    }
}
