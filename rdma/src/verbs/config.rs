//! What the verbs mover may be told; every default is written here. `engine-ext` fills it from its own configuration.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use super::{
    choose::Wish,
    queue_pair::Tuning,
    wire::{MAX_ENDS, MAX_PAIRS},
};
use crate::{
    bounds::{self, HOUR, within},
    error::MoverError,
    tcp::wire::MAX_BODY,
};

/// How a [`super::VerbsMover`] is set up. `Default` takes the best device and has its side channel on a free loopback port
/// (XFER-10).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsConfig {
    /// Where the side channel listens.
    pub bind: SocketAddr,
    /// What peers are told instead of `bind`; needed when that is the unspecified address.
    pub advertise: Option<SocketAddr>,
    /// Which devices.
    pub wish: Wish,
    /// Queue pairs for one lease over each device, 1 to 16. More than one only helps where one cannot fill the link.
    pub pairs: u8,
    /// Work requests that one queue pair takes at once.
    pub depth: u32,
    /// Work requests over one device at once: completions of all of them fit its queue (XFER-5).
    pub entries: u32,
    /// Work requests posted with one call, of which one is signalled.
    pub batch: u32,
    /// READs that one queue pair has on the wire at once; the peer's limit counts too.
    pub reads_begun: u8,
    /// Payload bytes of one question to the exporter, 4 KiB to 4 MiB.
    pub chunk: u64,
    /// Payload bytes of one lease asked for or on their way at once; at least one chunk always is.
    pub window: u64,
    /// The largest packets, as the library counts them (1 is 256 bytes, 5 is 4096); the ports' limits count too.
    pub mtu: u8,
    /// A packet is sent again after 4.096 µs × 2^timeout, 1 to 31: 16 is 0.27 s.
    pub timeout: u8,
    /// How often, 0 to 7.
    pub retries: u8,
    /// Of RoCE packets; what the switches' lossless class expects.
    pub traffic_class: u8,
    /// Of InfiniBand packets, 0 to 15.
    pub service_level: u8,
    /// How long completions are polled for before the thread sleeps.
    pub spin: Duration,
    /// Side channels the exporter keeps at once.
    pub connections: usize,
    /// Leases exposed at once.
    pub leases: usize,
    /// Reads at once, queued ones included.
    pub reads: usize,
    /// How long a side channel may take to stand, its queue pairs included.
    pub connect: Duration,
    /// How long a new connection may take to its first valid token.
    pub request: Duration,
    /// How long either side waits for the other's next word, and for posted work to drain.
    pub stall: Duration,
    /// How long the exporter keeps a side channel without questions. The importer closes its own after half of it.
    pub idle: Duration,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        VerbsConfig {
            bind: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            advertise: None,
            wish: Wish::default(),
            pairs: 2,
            depth: 256,
            entries: 8192,
            batch: 32,
            reads_begun: 16,
            chunk: 4 << 20,
            window: 32 << 20,
            mtu: 5,
            timeout: 16,
            retries: 7,
            traffic_class: 0,
            service_level: 0,
            spin: Duration::from_micros(50),
            connections: 1024,
            leases: 4096,
            reads: 1024,
            connect: Duration::from_secs(3),
            request: Duration::from_secs(5),
            stall: Duration::from_secs(10),
            idle: Duration::from_secs(60),
        }
    }
}

impl VerbsConfig {
    /// Refuses what cannot work, by field.
    pub(super) fn check(&self) -> Result<(), MoverError> {
        within("devices", self.wish.devices.len() as u64, 0, MAX_ENDS as u64)?;
        within("pairs", self.pairs.into(), 1, MAX_PAIRS as u64)?;
        within("depth", self.depth.into(), 1, 1 << 15)?;
        within("entries", self.entries.into(), 1, 1 << 20)?;
        within("batch", self.batch.into(), 1, 1 << 10)?;
        within("reads_begun", self.reads_begun.into(), 1, 255)?;
        within("chunk", self.chunk, 4 << 10, MAX_BODY)?;
        within("mtu", self.mtu.into(), 1, 5)?;
        within("timeout", self.timeout.into(), 1, 31)?;
        within("retries", self.retries.into(), 0, 7)?;
        within("service_level", self.service_level.into(), 0, 15)?;
        within("connections", self.connections as u64, 1, 1 << 20)?;
        within("leases", self.leases as u64, 1, 1 << 24)?;
        within("reads", self.reads as u64, 1, 1 << 20)?;
        within("window", self.window, 4 << 10, 1 << 40)?;
        for (field, wait) in [
            ("connect", self.connect),
            ("request", self.request),
            ("stall", self.stall),
            ("idle", self.idle),
        ] {
            bounds::wait(field, wait, HOUR)?;
        }
        bounds::dialable(self.bind, self.advertise)
    }

    pub(super) fn tuning(&self) -> Tuning {
        Tuning {
            timeout: self.timeout,
            retries: self.retries,
            traffic_class: self.traffic_class,
            service_level: self.service_level,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_listens_on_loopback_only() {
        let config = VerbsConfig::default();
        assert!(config.bind.ip().is_loopback(), "XFER-10");
        assert_eq!(config.check(), Ok(()));
    }

    #[test]
    fn a_field_out_of_range_is_named_with_its_limits() {
        let default = VerbsConfig::default;
        for (config, field, most) in [
            (VerbsConfig { pairs: 0, ..default() }, "pairs", 16),
            (VerbsConfig { mtu: 6, ..default() }, "mtu", 5),
            (VerbsConfig { leases: 0, ..default() }, "leases", 1 << 24),
            (VerbsConfig { reads: 0, ..default() }, "reads", 1 << 20),
            (VerbsConfig { window: 0, ..default() }, "window", 1 << 40),
            (
                VerbsConfig {
                    stall: Duration::ZERO,
                    ..default()
                },
                "stall",
                HOUR,
            ),
        ] {
            match config.check() {
                Err(MoverError::BadConfig {
                    field: named,
                    most: limit,
                    ..
                }) => assert_eq!((named, limit), (field, most)),
                other => panic!("{field}: {other:?}"),
            }
        }
    }
}
