//! Limits of configured numbers. The `config` of every mover asks here.

use std::{net::SocketAddr, time::Duration};

use crate::error::MoverError;

/// The longest wait that makes sense, in milliseconds.
pub(crate) const HOUR: u64 = 3_600_000;

/// Refuses a number outside of `least..=most` by the field's name.
pub(crate) fn within(field: &'static str, got: u64, least: u64, most: u64) -> Result<(), MoverError> {
    let refused = MoverError::BadConfig {
        field,
        got,
        least,
        most,
    };
    (least..=most).contains(&got).then_some(()).ok_or(refused)
}

/// The same for a wait of at least a millisecond and at most `most` of them.
pub(crate) fn wait(field: &'static str, got: Duration, most: u64) -> Result<(), MoverError> {
    within(field, u64::try_from(got.as_millis()).unwrap_or(u64::MAX), 1, most)
}

/// Refuses to announce an address that nobody can dial.
pub(crate) fn dialable(bind: SocketAddr, advertise: Option<SocketAddr>) -> Result<(), MoverError> {
    let announced = advertise.unwrap_or(bind).ip();
    (!announced.is_unspecified())
        .then_some(())
        .ok_or(MoverError::NoAdvertise { bind })
}
