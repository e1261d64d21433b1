//! A pair of movers between which something goes wrong, and the means to make it go wrong.

use std::{
    process::Command,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use kvc_rdma::{
    Copy, HostRegion, LeaseToken, Mover, MoverError, ReadHandle, ReadOptions, ReadStats, RegionKey, Run, VerbsConfig,
    VerbsMover, verbs::survey,
};

use super::verbs_guest::config;

pub const LONG: Duration = Duration::from_secs(60);
pub const LEN: usize = 16 << 20;
const IP: &str = "/opt/bin/ip";

pub type Outcome = Result<ReadStats, MoverError>;

/// An exporter with a lease on all of its region, and an importer.
pub struct Scene {
    pub exporter: VerbsMover,
    pub importer: VerbsMover,
    pub token: LeaseToken,
    pub copy: Copy,
    pub target: Arc<HostRegion>,
}

impl Scene {
    /// Every device of the one talks to the same of the other.
    pub fn new(len: usize, change: impl Fn(&mut VerbsConfig)) -> Self {
        let start = || {
            let mut config = config(false);
            change(&mut config);
            VerbsMover::start(config).unwrap()
        };
        let (exporter, importer) = (start(), start());
        let (token, region) = expose(&exporter, len);
        let target = HostRegion::new(len);
        let local = importer.register(target.clone().into()).unwrap();
        let run = |region| Run {
            region,
            offset: 0,
            len: len as u64,
        };
        Scene {
            copy: Copy {
                remote: run(region),
                local: run(local),
            },
            exporter,
            importer,
            token,
            target,
        }
    }

    pub fn begin(&self) -> (ReadHandle, mpsc::Receiver<Outcome>) {
        begin(&self.importer, &self.exporter.endpoint(), self.token, vec![self.copy])
    }

    pub fn is_whole(&self) -> bool {
        self.target.read(0, LEN.min(self.target.len())) == pattern(self.target.len())
    }
}

pub fn expose(exporter: &VerbsMover, len: usize) -> (LeaseToken, RegionKey) {
    let region = exporter.register(HostRegion::from_bytes(&pattern(len)).into()).unwrap();
    let token = LeaseToken::random().unwrap();
    exporter.expose(token, LONG).unwrap();
    exporter
        .extend(
            &token,
            &[Run {
                region,
                offset: 0,
                len: len as u64,
            }],
        )
        .unwrap();
    (token, region)
}

pub fn begin(
    importer: &VerbsMover,
    peer: &str,
    token: LeaseToken,
    copies: Vec<Copy>,
) -> (ReadHandle, mpsc::Receiver<Outcome>) {
    let (tx, done) = mpsc::channel();
    let options = ReadOptions {
        deadline: LONG,
        ..ReadOptions::default()
    };
    (
        importer.read(
            peer,
            token,
            copies,
            options,
            Box::new(move |result| tx.send(result).unwrap()),
        ),
        done,
    )
}

pub fn wait(done: &mpsc::Receiver<Outcome>) -> Outcome {
    done.recv_timeout(LONG).expect("done is called")
}

pub fn wait_for_landing(target: &HostRegion, done: &mpsc::Receiver<Outcome>) {
    let begun = Instant::now();
    while target.read(0, 1) == [0] {
        assert!(begun.elapsed() < LONG && done.try_recv().is_err(), "nothing landed");
        thread::yield_now();
    }
}

/// Never zero, and no two neighbouring pages alike.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| 1 + (at ^ at >> 12) as u8 % 250).collect()
}

pub fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}: {status}");
}

/// An interface that is down, until this is dropped.
pub struct Down(&'static str);

impl Down {
    pub fn take(interface: &'static str) -> Self {
        run(IP, &["link", "set", interface, "down"]);
        Down(interface)
    }
}

impl Drop for Down {
    fn drop(&mut self) {
        run(IP, &["link", "set", self.0, "up"]);
    }
}

pub fn devices() -> Vec<String> {
    survey().verbs.unwrap_or_default()
}

/// After a `done` with an error nothing lands any more (XFER-2).
pub fn nothing_lands(target: &HostRegion) {
    target.write(0, &vec![0x77; target.len()]);
    thread::sleep(Duration::from_millis(300));
    assert!(
        target.read(0, target.len()).iter().all(|byte| *byte == 0x77),
        "a byte landed after done"
    );
}

/// The device's interface without its IPv4 address, until this is dropped.
pub struct Unaddressed(&'static str, &'static str);

impl Unaddressed {
    pub fn take(interface: &'static str, address: &'static str) -> Self {
        run(IP, &["addr", "del", address, "dev", interface]);
        Unaddressed(interface, address)
    }
}

impl Drop for Unaddressed {
    fn drop(&mut self) {
        run(IP, &["addr", "add", self.1, "dev", self.0]);
    }
}

/// What processes hold of the devices, as the kernel counts it: contexts, domains, queue pairs, regions.
pub fn held() -> String {
    let shown = Command::new("/bin/rdma").args(["resource", "show"]).output().unwrap();
    String::from_utf8(shown.stdout).unwrap()
}
