//! Where a `shm` mover is reached: `shm:HOST:NAMESPACE:NAME`. Two processes share memory if the first two are equal.

use std::{fmt, fs, os::unix::fs::MetadataExt, sync::OnceLock};

use crate::{error::MoverError, mover::LeaseToken};

/// Parsed, and of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) name: String,
}

impl Endpoint {
    /// A name that nobody has and nobody guesses.
    pub(super) fn fresh() -> Result<Self, MoverError> {
        let random = LeaseToken::random()?;
        let name = random.0[..16]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>();
        Ok(Endpoint {
            name: format!("kvc-{name}"),
        })
    }

    /// Refuses what has another form and what is elsewhere.
    pub(super) fn parse(peer: &str) -> Result<Self, MoverError> {
        let parts: Vec<&str> = peer.split(':').collect();
        let ["shm", host, namespace, name] = parts[..] else {
            return Err(MoverError::BadPeer { peer: peer.into() });
        };
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if name.is_empty() || name.len() > 64 || !name.bytes().all(plain) {
            return Err(MoverError::BadPeer { peer: peer.into() });
        }
        if format!("{host}:{namespace}") != here() {
            return Err(MoverError::OtherHost { peer: peer.into() });
        }
        Ok(Endpoint { name: name.into() })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shm:{}:{}", here(), self.name)
    }
}

/// Whether a peer that announces `endpoint` shares memory with this process, so that `shm` may be chosen (XFER-9). A pure
/// look at the text: nothing is dialled.
pub fn is_here(endpoint: &str) -> bool {
    Endpoint::parse(endpoint).is_ok()
}

/// This boot of this host and this network namespace, which abstract sockets belong to.
fn here() -> &'static str {
    static HERE: OnceLock<String> = OnceLock::new();
    HERE.get_or_init(|| {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let namespace = fs::metadata("/proc/self/ns/net").map_or(0, |link| link.ino());
        format!("{}:{namespace}", boot.trim().replace('-', ""))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_of_this_host_is_read_back() {
        let endpoint = Endpoint::fresh().unwrap();
        assert_eq!(Endpoint::parse(&endpoint.to_string()), Ok(endpoint.clone()));
        assert!(is_here(&endpoint.to_string()));
        assert_ne!(endpoint, Endpoint::fresh().unwrap());
    }

    #[test]
    fn another_host_or_namespace_is_told_from_another_form() {
        let peer = Endpoint::fresh().unwrap().to_string();
        let parts: Vec<&str> = peer.split(':').collect();
        for other in [
            format!("shm:0{}:{}:{}", parts[1], parts[2], parts[3]),
            format!("shm:{}:1:{}", parts[1], parts[3]),
        ] {
            assert_eq!(
                Endpoint::parse(&other),
                Err(MoverError::OtherHost { peer: other.clone() })
            );
            assert!(!is_here(&other));
        }
        for bad in ["127.0.0.1:4000", "shm:a:b", "shm:a:b:", "shm:a:b:c/d", "shm:a:b:c:d"] {
            assert!(matches!(Endpoint::parse(bad), Err(MoverError::BadPeer { .. })), "{bad}");
        }
    }
}
