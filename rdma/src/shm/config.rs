//! What the `shm` mover may be told; every default is written here.

use std::time::Duration;

use crate::{
    bounds::{self, HOUR, within},
    error::MoverError,
};

/// How a [`super::ShmMover`] is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmConfig {
    /// Threads that copy, 1 to 64; a read uses as many as its `streams` at most.
    pub threads: usize,
    /// Bytes copied between two looks at the fences, 4 KiB to 16 MiB: what `fence` and `cancel` wait for.
    pub chunk: u64,
    /// Leases exposed at once.
    pub leases: usize,
    /// Reads at once, queued ones included.
    pub reads: usize,
    /// Connections the exporter keeps at once.
    pub connections: usize,
    /// How long a new connection may take to its first valid token.
    pub request: Duration,
    /// How long `fence` waits for a living importer that does not leave a copy; its chunk is void then.
    pub fence: Duration,
}

impl Default for ShmConfig {
    fn default() -> Self {
        ShmConfig {
            threads: 2,
            chunk: 512 << 10,
            leases: 4096,
            reads: 1024,
            connections: 256,
            request: Duration::from_secs(5),
            fence: Duration::from_secs(1),
        }
    }
}

impl ShmConfig {
    /// Refuses what cannot work, by field.
    pub(super) fn check(&self) -> Result<(), MoverError> {
        within("threads", self.threads as u64, 1, 64)?;
        within("chunk", self.chunk, 4 << 10, super::wire::MAX_BYTES)?;
        within("leases", self.leases as u64, 1, 1 << 20)?;
        within("reads", self.reads as u64, 1, 1 << 20)?;
        within("connections", self.connections as u64, 1, 1 << 16)?;
        bounds::wait("request", self.request, HOUR)?;
        bounds::wait("fence", self.fence, 60_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_sound() {
        assert_eq!(ShmConfig::default().check(), Ok(()));
    }

    #[test]
    fn a_field_out_of_range_is_named_with_its_limits() {
        let refused = ShmConfig {
            threads: 0,
            ..ShmConfig::default()
        };
        let expected = MoverError::BadConfig {
            field: "threads",
            got: 0,
            least: 1,
            most: 64,
        };
        assert_eq!(refused.check(), Err(expected));
    }
}
