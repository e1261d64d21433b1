//! [`Movers`]: which ways KV can take to and from this worker (XFER-9). Started once by [`crate::Engine::start`]; which of
//! them a peer is read with is decided in `kvc_proto::transfer::route`.

use std::{net::SocketAddr, sync::Arc};

use kvc_cuda::Device;
use kvc_rdma::{Mover, MoverError, MoverKind, ShmConfig, ShmMover, TcpConfig, TcpMover};

use crate::{Config, StartError};

/// Running movers, best first.
pub(crate) struct Movers(Vec<Arc<dyn Mover>>);

impl Movers {
    /// Starts those that the settings allow and this machine has; memory on `device` is to be moved.
    ///
    /// # Errors
    /// A mover that has to be there cannot start: tcp, and verbs if it is forced or its devices are named.
    pub(crate) fn start(config: &Config, device: Device) -> Result<Self, StartError> {
        let mut movers = Vec::new();
        for kind in &config.movers {
            match kind {
                MoverKind::Verbs => movers.extend(rdma(config, device)?),
                _ if config.force_rdma => {}
                // A peer of this host that may read a file of ours; nothing is lost without it.
                MoverKind::Shm if device == Device::Host => match ShmMover::start(ShmConfig::default()) {
                    Ok(mover) => movers.push(Arc::new(mover) as Arc<dyn Mover>),
                    Err(error) => without_shm(&error),
                },
                MoverKind::Tcp => movers.push(Arc::new(tcp(config)?)),
                MoverKind::Shm | MoverKind::Loopback => {}
            }
        }
        Ok(Self(movers))
    }

    /// These, best first.
    pub(crate) fn of(movers: Vec<Arc<dyn Mover>>) -> Self {
        Self(movers)
    }

    pub(crate) fn into_iter(self) -> impl Iterator<Item = Arc<dyn Mover>> {
        self.0.into_iter()
    }
}

/// Whether this machine has what the settings demand of it, before anything else is started: an adapter asks where the
/// answer can still be one line. Nothing is left running.
///
/// # Errors
/// As [`crate::Engine::start`], for `force_rdma` and `ib_device`.
pub fn preflight(config: &Config, device: Device) -> Result<(), StartError> {
    if demanded(config).is_none() {
        return Ok(());
    }
    let anywhere = Config {
        rdma_listen: SocketAddr::new(config.rdma_listen.ip(), 0),
        ..config.clone()
    };
    rdma(&anywhere, device).map(drop)
}

/// Shared memory cannot be used: told once, KV moves over what is left.
pub(crate) fn without_shm(error: &MoverError) {
    tracing::warn!(%error, "no KV moves through shared memory");
}

fn tcp(config: &Config) -> Result<TcpMover, StartError> {
    let started = TcpMover::start(TcpConfig {
        bind: config.data_listen,
        advertise: advertised(config, config.data_listen),
        streams: config.streams,
        ..TcpConfig::default()
    });
    started.map_err(|source| StartError::Mover {
        field: "data_listen",
        source,
    })
}

fn advertised(config: &Config, bind: SocketAddr) -> Option<SocketAddr> {
    config.advertise.map(|ip| SocketAddr::new(ip, bind.port()))
}

/// The field that says that RDMA has to work here, if one does.
fn demanded(config: &Config) -> Option<&'static str> {
    if config.force_rdma {
        Some("force_rdma")
    } else if !config.ib_device.is_empty() {
        Some("ib_device")
    } else {
        None
    }
}

/// RDMA could not be used, or could not take the pool: fatal where it is demanded, else told once.
pub(crate) fn without_rdma(config: &Config, error: MoverError) -> Result<(), StartError> {
    match demanded(config) {
        Some(field) => Err(StartError::Mover { field, source: error }),
        None if is_absent(&error) => {
            tracing::info!(%error, "no KV moves over RDMA");
            Ok(())
        }
        None => {
            tracing::warn!(%error, "no KV moves over RDMA, though there is a device");
            Ok(())
        }
    }
}

/// Whether the machine has no RDMA at all, as most have not.
fn is_absent(error: &MoverError) -> bool {
    #[cfg(feature = "verbs")]
    {
        use kvc_rdma::verbs::VerbsError;
        matches!(
            error,
            MoverError::Verbs(VerbsError::NoLibrary | VerbsError::NoKernel { .. } | VerbsError::NoDevice)
        )
    }
    #[cfg(not(feature = "verbs"))]
    {
        let _ = error;
        true
    }
}

#[cfg(feature = "verbs")]
fn rdma(config: &Config, device: Device) -> Result<Option<Arc<dyn Mover>>, StartError> {
    use kvc_rdma::{VerbsConfig, VerbsMover, verbs::Wish};
    if let Device::Cuda(_) = device {
        return on_device(config);
    }
    let own = config.advertise.unwrap_or(config.rdma_listen.ip());
    let started = VerbsMover::start(VerbsConfig {
        bind: config.rdma_listen,
        advertise: advertised(config, config.rdma_listen),
        wish: Wish {
            devices: config.ib_device.clone(),
            // The device that this address belongs to is the one that peers reach.
            source: Some(own).filter(|ip| !ip.is_loopback() && !ip.is_unspecified()),
            near: None,
        },
        // As the library counts them: 256 is 1.
        mtu: (config.rdma_mtu.trailing_zeros() - 7) as u8,
        timeout: config.rdma_timeout,
        retries: config.rdma_retries,
        traffic_class: config.rdma_traffic_class,
        ..VerbsConfig::default()
    });
    match started {
        Ok(mover) => {
            for (choice, _) in mover.devices() {
                tracing::info!(device = choice.device, port = choice.port, link = %choice.link, gid = %choice.gid, "KV moves over RDMA");
            }
            Ok(Some(Arc::new(mover)))
        }
        Err(error @ (MoverError::System { .. } | MoverError::NoAdvertise { .. })) => Err(StartError::Mover {
            field: "rdma_listen",
            source: error,
        }),
        Err(error) => without_rdma(config, error).map(|()| None),
    }
}

#[cfg(not(feature = "verbs"))]
fn rdma(config: &Config, device: Device) -> Result<Option<Arc<dyn Mover>>, StartError> {
    if let Device::Cuda(_) = device {
        return on_device(config);
    }
    match demanded(config) {
        Some(field) => Err(StartError::NoRdmaBuild { field }),
        None => Ok(None),
    }
}

/// KV on a GPU cannot be moved yet.
fn on_device(config: &Config) -> Result<Option<Arc<dyn Mover>>, StartError> {
    match demanded(config) {
        Some(field) => Err(StartError::DeviceMemory { field }),
        None => Ok(None),
    }
}
