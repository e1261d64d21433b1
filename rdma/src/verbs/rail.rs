//! One device of a mover with everything shared on it. The exporter and the importer have the rails in common.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use super::{
    choose::Choice,
    config::VerbsConfig,
    device::{Completion, Completions, Device, Domain},
    error::VerbsError,
    queue_pair::{Path, QueuePair},
    wire::End,
    work::PIECES,
};

#[derive(Debug)]
pub(super) struct Rail {
    pub(super) choice: Choice,
    pub(super) domain: Arc<Domain>,
    /// Where the importer's work completes.
    pub(super) completions: Arc<Completions>,
    /// Of the exporter's queue pairs, which post nothing.
    silent: Arc<Completions>,
    /// Work requests that one queue pair takes.
    pub(super) depth: u32,
    /// Pieces of local memory that one READ fills.
    pub(super) pieces: usize,
    mtu: u8,
    begun: u8,
    answered: u8,
    down: AtomicBool,
    lost: AtomicBool,
    #[cfg(feature = "fault")]
    deaf: AtomicBool,
}

impl Rail {
    pub(super) fn open(choice: Choice, config: &VerbsConfig) -> Result<Arc<Self>, VerbsError> {
        let device = Device::open(&choice.device)?;
        let mtu = device.mtu(choice.port)?.min(config.mtu.into()) as u8;
        Ok(Arc::new(Rail {
            depth: config.depth.min(device.limits.requests).max(1),
            pieces: PIECES.min(device.limits.pieces as usize).max(1),
            mtu,
            begun: device.limits.begun.min(config.reads_begun).max(1),
            answered: device.limits.answered.min(config.reads_begun).max(1),
            completions: Completions::new(&device, config.entries)?,
            silent: Completions::new(&device, 16)?,
            domain: Domain::new(device)?,
            down: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            #[cfg(feature = "fault")]
            deaf: AtomicBool::new(false),
            choice,
        }))
    }

    /// Whether nothing goes over it now.
    pub(super) fn is_down(&self) -> bool {
        self.down.load(Ordering::SeqCst) || self.lost.load(Ordering::SeqCst)
    }

    pub(super) fn set_down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
    }

    /// The device is gone or tells nothing more, for good; `true` if it was not known.
    pub(super) fn lose(&self) -> bool {
        !self.lost.swap(true, Ordering::SeqCst)
    }

    /// Why nothing goes over it.
    pub(super) fn loss(&self) -> VerbsError {
        let device = self.choice.device.clone();
        match self.lost.load(Ordering::SeqCst) {
            true => VerbsError::DeviceLost { device },
            false => VerbsError::DeviceDown { device },
        }
    }

    /// What the device told complete.
    pub(super) fn poll(&self, into: &mut Vec<Completion>) -> Result<usize, VerbsError> {
        #[cfg(feature = "fault")]
        if self.deaf.load(Ordering::SeqCst) {
            return Ok(0);
        }
        self.completions.poll(into)
    }

    /// From now on no completion is seen, as of a device that is gone.
    #[cfg(feature = "fault")]
    pub(super) fn deafen(&self, deaf: bool) {
        self.deaf.store(deaf, Ordering::SeqCst);
    }

    /// A queue pair that posts READs. The peer reads nothing through it.
    pub(super) fn asking(&self) -> Result<QueuePair, VerbsError> {
        QueuePair::new(
            &self.domain,
            &self.completions,
            &self.choice,
            (self.depth, self.pieces as u32),
            false,
        )
    }

    /// A queue pair that answers them.
    pub(super) fn answering(&self) -> Result<QueuePair, VerbsError> {
        QueuePair::new(&self.domain, &self.silent, &self.choice, (1, 1), true)
    }

    /// This rail as the other side needs to know it.
    pub(super) fn end(&self, path: u8, asks: bool, pairs: Vec<(u32, u32)>) -> End {
        End {
            path,
            link: self.choice.link,
            mtu: self.mtu,
            reads: if asks { self.begun } else { self.answered },
            lid: self.choice.lid,
            gid: self.choice.gid,
            pairs,
        }
    }

    /// The way to pair `at` of the other side.
    pub(super) fn path(&self, there: &End, at: usize, asks: bool) -> Option<Path> {
        let (number, psn) = *there.pairs.get(at)?;
        Some(Path {
            gid: there.gid,
            lid: there.lid,
            number,
            psn,
            mtu: self.mtu.min(there.mtu).into(),
            reads: if asks { self.begun } else { self.answered }.min(there.reads).max(1),
        })
    }
}

/// 24 bits to begin with that nobody guesses.
pub(super) fn packet_number() -> u32 {
    let mut bytes = [0; 4];
    // Without a random source any number does: it protects against strays of an older connection, not against anybody.
    let _ = getrandom::fill(&mut bytes);
    u32::from_le_bytes(bytes) & 0x00ff_ffff
}
