//! [`Config`]: what a person may set. Read once at start by [`Config::load`]; a value that exists is valid.
//!
//! Order, later wins: built-in default < TOML file < environment (`KVC_<KEY>`) < flags. The file is named by the flag
//! `config` or by `KVC_CONFIG`. Other `KVC_` variables are ignored: other parts use the prefix too. Every key, its default
//! and its meaning stand once, in [`KEYS`].

mod error;
mod keys;
mod source;

use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};

use kvc_proto::{
    wire::info::Role,
    worker::{CapacityRule, WorkerConfig},
};
use kvc_rdma::MoverKind;

pub use error::ConfigError;
pub use keys::{KEYS, Key};
use source::Source;

/// The module's settings.
#[derive(Clone, Debug)]
pub struct Config {
    /// The HTTP listener; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The peer control plane.
    pub peer_listen: SocketAddr,
    /// The mover's data endpoint.
    pub data_listen: SocketAddr,
    /// The IP address that others are told, where a listener is bound to "any".
    pub advertise: Option<std::net::IpAddr>,
    /// Shared secret of all workers (XFER-10).
    pub secret: Option<Secret>,
    /// Certificates of the peer control plane (XFER-10).
    pub tls: Option<Tls>,
    /// What the worker is for.
    pub role: Role,
    /// τ_append in tokens.
    pub max_uncached_tokens: u32,
    /// ρ in thousandths.
    pub rho_permille: u32,
    /// ADM-6.
    pub rule: CapacityRule,
    /// ADM-6, tokens.
    pub clip: u32,
    /// ADM-10.
    pub reservation: Duration,
    /// XFER-2: a lease's life without renewal.
    pub lease: Duration,
    /// XFER-2: a lease's longest life.
    pub lease_max: Duration,
    /// ADM-9.
    pub evict_idle: bool,
    /// SES-3: tokens one session may hold; absent: ρ·K_d.
    pub session_cap: Option<u32>,
    /// SES-1: evicted sessions that are remembered.
    pub remembered: usize,
    /// XFER-7: the longest an import may take, whatever the request says.
    pub import_deadline: Duration,
    /// SYNC-3: keep replicas, and announce to those that keep ours.
    pub sync: bool,
    /// SYNC-1: replicas pulled at the same time.
    pub sync_imports: usize,
    /// XFER-7: the longest a replica's pull may take.
    pub sync_deadline: Duration,
    /// MIG-2: the age at which a hand-over answer counts as lost.
    pub handover_deadline: Duration,
    /// MIG-1: how long a turn is held back for a target that is one step behind.
    pub handover_hold: Duration,
    /// MIG-4: how long a stopping engine drains; zero: not at all. For the adapter, which knows when its engine stops.
    pub drain: Duration,
    /// XFER-9: how KV may move, best first.
    pub movers: Vec<MoverKind>,
    /// XFER-9: over RDMA or not at all.
    pub force_rdma: bool,
    /// RDMA devices by name; none: the best one.
    pub ib_device: Vec<String>,
    /// Where peers ask for RDMA keys.
    pub rdma_listen: SocketAddr,
    /// Largest RDMA packet, bytes: a power of two.
    pub rdma_mtu: u32,
    /// An RDMA packet is sent again after 4.096 µs × 2^this.
    pub rdma_timeout: u8,
    /// How often.
    pub rdma_retries: u8,
    /// Of RoCE packets.
    pub rdma_traffic_class: u8,
    /// Data streams per read.
    pub streams: usize,
    /// XFER-8.
    pub checksum: bool,
}

/// The bytes of the secret file; never printed.
#[derive(Clone)]
pub struct Secret(Arc<[u8]>);

/// PEM texts of the peer control plane's certificates.
#[derive(Clone)]
pub struct Tls {
    /// Our certificate chain.
    pub cert: Arc<[u8]>,
    /// Its key.
    pub key: Arc<[u8]>,
    /// Who signs the peers' certificates.
    pub ca: Arc<[u8]>,
    /// The name peers' certificates carry; absent: the address they are reached at.
    pub name: Option<String>,
}

impl Config {
    /// Reads all sources.
    ///
    /// # Errors
    /// The first thing that is wrong, as one line that names the key, where it came from, and how to fix it.
    pub fn load(
        flags: &[(String, String)],
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, ConfigError> {
        Self::parse(&Source::collect(flags, environment)?)
    }

    fn parse(source: &Source) -> Result<Self, ConfigError> {
        let data_listen = source.address(keys::DATA_LISTEN)?;
        let config = Self {
            listen: source.address(keys::LISTEN)?,
            peer_listen: source.address(keys::PEER_LISTEN)?,
            data_listen,
            advertise: source.ip(keys::ADVERTISE)?,
            secret: source.secret(keys::SECRET_FILE)?,
            tls: source.tls()?,
            role: source.choice(
                keys::ROLE,
                &[
                    ("prefill", Role::Prefill),
                    ("decode", Role::Decode),
                    ("both", Role::Both),
                ],
            )?,
            max_uncached_tokens: source.number(keys::MAX_UNCACHED_TOKENS, 1, 1 << 30)?,
            rho_permille: source.permille(keys::RHO)?,
            rule: source.choice(
                keys::RULE,
                &[("growth", CapacityRule::Growth), ("paper", CapacityRule::Paper)],
            )?,
            clip: source.number(keys::CLIP, 1, 1 << 30)?,
            reservation: source.millis(keys::RESERVATION_MS, 100, 3_600_000)?,
            lease: source.millis(keys::LEASE_MS, 100, 600_000)?,
            lease_max: source.millis(keys::LEASE_MAX_MS, 100, 3_600_000)?,
            evict_idle: source.switch(keys::EVICT_IDLE)?,
            session_cap: source.optional_number(keys::SESSION_CAP, 1, 1 << 30)?,
            remembered: source.number(keys::REMEMBERED, 0, 10_000_000)? as usize,
            import_deadline: source.millis(keys::IMPORT_DEADLINE_MS, 10, 3_600_000)?,
            sync: source.switch(keys::SYNC)?,
            sync_imports: source.number(keys::SYNC_IMPORTS, 1, 64)? as usize,
            sync_deadline: source.millis(keys::SYNC_DEADLINE_MS, 100, 3_600_000)?,
            handover_deadline: source.millis(keys::HANDOVER_DEADLINE_MS, 10, 60_000)?,
            handover_hold: source.millis(keys::HANDOVER_HOLD_MS, 0, 1_000)?,
            drain: source.millis(keys::DRAIN_MS, 0, 3_600_000)?,
            movers: source.movers(keys::MOVERS)?,
            force_rdma: source.switch(keys::FORCE_RDMA)?,
            ib_device: source.devices(keys::IB_DEVICE)?,
            rdma_listen: source
                .optional_address(keys::RDMA_LISTEN)?
                .unwrap_or(SocketAddr::new(data_listen.ip(), 0)),
            rdma_mtu: source.choice(
                keys::RDMA_MTU,
                &[
                    ("256", 256),
                    ("512", 512),
                    ("1024", 1024),
                    ("2048", 2048),
                    ("4096", 4096),
                ],
            )?,
            rdma_timeout: source.number(keys::RDMA_TIMEOUT, 1, 31)? as u8,
            rdma_retries: source.number(keys::RDMA_RETRIES, 0, 7)? as u8,
            rdma_traffic_class: source.number(keys::RDMA_TRAFFIC_CLASS, 0, 255)? as u8,
            streams: source.number(keys::STREAMS, 1, 64)? as usize,
            checksum: source.switch(keys::CHECKSUM)?,
        };
        config.agree()?;
        Ok(config)
    }

    /// The defaults, for tests and benches.
    ///
    /// # Errors
    /// None with the built-in defaults.
    pub fn defaults() -> Result<Self, ConfigError> {
        Self::load(&[], [])
    }

    /// The part that the machine decides by.
    pub fn worker(&self, capacity: u32, page_tokens: u32) -> WorkerConfig {
        let usable = u64::from(capacity) * u64::from(self.rho_permille) / 1000;
        let usable = u32::try_from(usable).unwrap_or(capacity);
        WorkerConfig {
            capacity,
            page_tokens,
            rho_permille: self.rho_permille,
            max_uncached_tokens: self.max_uncached_tokens,
            rule: self.rule,
            clip: self.clip,
            reservation: self.reservation,
            evict_idle: self.evict_idle,
            session_cap: self.session_cap.unwrap_or(usable).min(usable.max(1)),
            lease: self.lease,
            lease_max: self.lease_max,
            sync: self.sync,
            sync_imports: self.sync_imports,
            sync_deadline: self.sync_deadline,
            handover_deadline: self.handover_deadline,
            handover_hold: self.handover_hold,
            remembered: self.remembered,
        }
    }

    /// The address others reach a listener at that is bound to `bound`.
    pub fn reachable(&self, bound: SocketAddr) -> SocketAddr {
        match self.advertise {
            Some(ip) if bound.ip().is_unspecified() => SocketAddr::new(ip, bound.port()),
            _ => bound,
        }
    }

    fn agree(&self) -> Result<(), ConfigError> {
        if self.lease_max < self.lease {
            return Err(ConfigError::Conflict {
                field: keys::LEASE_MAX_MS,
                fact: format!(
                    "{} ms is below {} ({} ms)",
                    self.lease_max.as_millis(),
                    keys::LEASE_MS,
                    self.lease.as_millis()
                ),
                fix: "raise it or lower the other",
            });
        }
        if self.force_rdma && !self.movers.contains(&MoverKind::Verbs) {
            return Err(ConfigError::Conflict {
                field: keys::FORCE_RDMA,
                fact: format!("{} leaves verbs out", keys::MOVERS),
                fix: "add verbs to it, or set force_rdma to false",
            });
        }
        for (field, address) in [
            (keys::LISTEN, self.listen),
            (keys::PEER_LISTEN, self.peer_listen),
            (keys::DATA_LISTEN, self.data_listen),
            (keys::RDMA_LISTEN, self.rdma_listen),
        ] {
            // XFER-10, F19.
            if !address.ip().is_loopback() && self.secret.is_none() && self.tls.is_none() {
                return Err(ConfigError::Conflict {
                    field,
                    fact: format!("{address} is beyond loopback and there are no credentials"),
                    fix: "set secret_file or tls.cert, tls.key and tls.ca, or listen on 127.0.0.1",
                });
            }
            if address.ip().is_unspecified() && self.advertise.is_none() {
                return Err(ConfigError::Conflict {
                    field,
                    fact: format!("{address} is no address that others can reach"),
                    fix: "set advertise to this machine's address",
                });
            }
        }
        Ok(())
    }
}

impl Secret {
    /// A secret of 16 bytes or more.
    pub(crate) fn new(bytes: &[u8]) -> Option<Self> {
        (bytes.len() >= Self::MIN).then(|| Self(bytes.into()))
    }

    /// Fewest bytes of a secret.
    pub const MIN: usize = 16;

    /// For the handshake's HMAC.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Fuzz target: a settings file is taken, or refused with one line.
#[cfg(feature = "harness")]
pub(crate) fn fuzz(text: &str) {
    let file = error::Origin::Flag("config".into());
    let config = Source::collect(&[], []).and_then(|mut source| {
        source.read_text("fuzz", text, file)?;
        Config::parse(&source)
    });
    if let Err(error) = config {
        assert!(!error.to_string().contains('\n'), "{error}");
    }
}

#[cfg(test)]
mod tests;
