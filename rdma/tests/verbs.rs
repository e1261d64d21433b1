//! The verbs mover passes the conformance suite, in a guest with software RoCE (scripts/rdma/test.sh). On one device, or
//! on two when there are two: then the importer's first device is the exporter's second, so that frames cross the wire.

mod verbs_guest;

use kvc_rdma::{Mover, VerbsMover, conformance::Pair};
use verbs_guest::config;

kvc_rdma::conform!(start, verbs_guest::is_there());

fn start() -> Pair {
    let exporter = VerbsMover::start(config(true)).unwrap();
    let importer = VerbsMover::start(config(false)).unwrap();
    let (endpoint, faults) = (exporter.endpoint(), [exporter.faults(), importer.faults()]);
    let inject = Box::new(move |fault| faults.iter().for_each(|each| each.inject(fault)));
    Pair {
        exporter: Box::new(exporter),
        importer: Box::new(importer),
        endpoint,
        inject,
        keep: Box::new(()),
    }
}
