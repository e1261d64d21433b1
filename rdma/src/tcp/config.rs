//! What the tcp mover may be told; every default is written here. `engine-ext` fills it from its own configuration.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use super::wire::MAX_BODY;
use crate::{
    bounds::{self, HOUR, within},
    error::MoverError,
};

/// How a [`super::TcpMover`] is set up. `Default` listens on a free loopback port (XFER-10).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpConfig {
    /// Where the exporter listens.
    pub bind: SocketAddr,
    /// What peers are told instead of `bind`; needed when that is the unspecified address.
    pub advertise: Option<SocketAddr>,
    /// Connections the exporter keeps at once.
    pub connections: usize,
    /// Leases exposed at once.
    pub leases: usize,
    /// Reads at once, queued ones included.
    pub reads: usize,
    /// Streams to one peer, 1 to 64.
    pub streams: usize,
    /// Payload bytes of one request, 4 KiB to 4 MiB.
    pub chunk: u64,
    /// Payload bytes asked for and not yet received on one stream; at least one chunk is always asked for.
    pub window: u64,
    /// How long a connection may take to stand.
    pub connect: Duration,
    /// How long a request may take from its first byte to its last, and a new connection to its first valid token.
    pub request: Duration,
    /// How long either side waits for the next byte of an answer, or for room to send one.
    pub stall: Duration,
    /// How long the exporter keeps a connection without requests. The importer closes its own after half of it.
    pub idle: Duration,
}

impl Default for TcpConfig {
    fn default() -> Self {
        TcpConfig {
            bind: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            advertise: None,
            connections: 256,
            leases: 4096,
            reads: 1024,
            streams: 4,
            chunk: 1 << 20,
            window: 4 << 20,
            connect: Duration::from_secs(3),
            request: Duration::from_secs(5),
            stall: Duration::from_secs(10),
            idle: Duration::from_secs(60),
        }
    }
}

impl TcpConfig {
    /// Refuses what cannot work, by field.
    pub(super) fn check(&self) -> Result<(), MoverError> {
        within("connections", self.connections as u64, 1, 1 << 16)?;
        within("leases", self.leases as u64, 1, 1 << 24)?;
        within("reads", self.reads as u64, 1, 1 << 20)?;
        within("streams", self.streams as u64, 1, 64)?;
        within("chunk", self.chunk, 4 << 10, MAX_BODY)?;
        within("window", self.window, 4 << 10, 1 << 30)?;
        let waits = [
            ("connect", self.connect),
            ("request", self.request),
            ("stall", self.stall),
            ("idle", self.idle),
        ];
        for (field, wait) in waits {
            bounds::wait(field, wait, HOUR)?;
        }
        bounds::dialable(self.bind, self.advertise)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_listens_on_loopback_only() {
        let config = TcpConfig::default();
        assert!(config.bind.ip().is_loopback(), "XFER-10");
        assert_eq!(config.check(), Ok(()));
    }

    #[test]
    fn a_field_out_of_range_is_named_with_its_limits() {
        let refused = TcpConfig {
            streams: 65,
            ..TcpConfig::default()
        }
        .check();
        assert_eq!(
            refused,
            Err(MoverError::BadConfig {
                field: "streams",
                got: 65,
                least: 1,
                most: 64
            })
        );
        let refused = TcpConfig {
            stall: Duration::ZERO,
            ..TcpConfig::default()
        }
        .check();
        assert!(matches!(
            refused,
            Err(MoverError::BadConfig {
                field: "stall",
                got: 0,
                ..
            })
        ));
    }

    #[test]
    fn an_address_nobody_can_dial_is_not_announced() {
        let bind: SocketAddr = ([0, 0, 0, 0], 0).into();
        assert_eq!(
            TcpConfig {
                bind,
                ..TcpConfig::default()
            }
            .check(),
            Err(MoverError::NoAdvertise { bind })
        );
        let advertised = |advertise| TcpConfig {
            bind,
            advertise,
            ..TcpConfig::default()
        };
        assert_eq!(advertised(Some(([10, 0, 0, 1], 7).into())).check(), Ok(()));
        assert_eq!(advertised(Some(bind)).check(), Err(MoverError::NoAdvertise { bind }));
    }
}
