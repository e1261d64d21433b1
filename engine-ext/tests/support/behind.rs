//! [`Behind`]: a worker whose KV others read through a proxy with faults.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use kvc_rdma::{
    Copy, Done, LeaseToken, Mover, MoverError, MoverKind, ReadHandle, ReadOptions, Region, RegionKey, Run, TcpConfig,
    TcpMover, fault::Proxy,
};

/// A tcp mover whose peers reach it through a proxy with faults.
pub struct Behind {
    kind: MoverKind,
    inner: TcpMover,
    /// Where to inject faults.
    pub proxy: Proxy,
    /// Bytes of the largest read that this worker has made of others.
    pub largest: AtomicU64,
    running: Arc<AtomicU64>,
    /// Its most reads at the same time.
    pub most: AtomicU64,
}

impl Behind {
    /// On free loopback ports.
    pub fn new() -> Arc<Self> {
        Self::named(MoverKind::Tcp)
    }

    /// As [`Behind::new`], going by another kind's name: a second way between two workers, which can be broken.
    pub fn named(kind: MoverKind) -> Arc<Self> {
        let inner = TcpMover::start(TcpConfig::default()).unwrap();
        let proxy = Proxy::start(inner.endpoint().parse().unwrap()).unwrap();
        Arc::new(Self {
            kind,
            inner,
            proxy,
            largest: AtomicU64::new(0),
            running: Arc::default(),
            most: AtomicU64::new(0),
        })
    }
}

impl Mover for Behind {
    fn kind(&self) -> MoverKind {
        self.kind
    }
    fn endpoint(&self) -> String {
        self.proxy.endpoint()
    }
    fn register(&self, region: Region) -> Result<RegionKey, MoverError> {
        self.inner.register(region)
    }
    fn expose(&self, token: LeaseToken, max_age: Duration) -> Result<(), MoverError> {
        self.inner.expose(token, max_age)
    }
    fn extend(&self, token: &LeaseToken, runs: &[Run]) -> Result<(), MoverError> {
        self.inner.extend(token, runs)
    }
    fn fence(&self, token: &LeaseToken) {
        self.inner.fence(token);
    }
    fn read(&self, peer: &str, token: LeaseToken, copies: Vec<Copy>, options: ReadOptions, done: Done) -> ReadHandle {
        let bytes = copies.iter().map(|copy| copy.local.len).sum();
        self.largest.fetch_max(bytes, Ordering::SeqCst);
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(running, Ordering::SeqCst);
        let counted = self.running.clone();
        let done = Box::new(move |outcome| {
            counted.fetch_sub(1, Ordering::SeqCst);
            done(outcome);
        });
        self.inner.read(peer, token, copies, options, done)
    }
}
