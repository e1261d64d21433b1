//! The loopback mover passes the conformance suite.

use kvc_rdma::{Loopback, Mover, conformance::Pair, loopback::Network};

kvc_rdma::conform!(start);

fn start() -> Pair {
    let network = Network::default();
    let exporter = Loopback::start(&network, "exporter").unwrap();
    let importer = Loopback::start(&network, "importer").unwrap();
    let (endpoint, faults) = (exporter.endpoint(), exporter.faults());
    let inject = Box::new(move |fault| faults.inject(fault));
    Pair {
        exporter: Box::new(exporter),
        importer: Box::new(importer),
        endpoint,
        inject,
        keep: Box::new(network),
    }
}
