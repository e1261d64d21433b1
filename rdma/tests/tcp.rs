//! The tcp mover passes the conformance suite, through a proxy that has the faults.

use std::sync::Arc;

use kvc_rdma::{Mover, TcpConfig, TcpMover, conformance::Pair, fault::Proxy};

kvc_rdma::conform!(start);

fn start() -> Pair {
    let exporter = TcpMover::start(TcpConfig::default()).unwrap();
    let importer = TcpMover::start(TcpConfig::default()).unwrap();
    let proxy = Arc::new(Proxy::start(exporter.endpoint().parse().unwrap()).unwrap());
    let (endpoint, faults) = (proxy.endpoint(), proxy.clone());
    let inject = Box::new(move |fault| faults.inject(fault));
    Pair {
        exporter: Box::new(exporter),
        importer: Box::new(importer),
        endpoint,
        inject,
        keep: Box::new(proxy),
    }
}
