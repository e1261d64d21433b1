//! Why bytes did not move: one closed set with the facts, for every mover. `engine-ext` maps them to a recompute.

use std::{io, net::SocketAddr, time::Duration};

use crate::region::Run;

/// Which wait ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wait {
    /// For the connection to stand.
    Connect,
    /// For the next byte of an answer.
    Idle,
    /// For the whole read.
    Deadline,
}

/// What a mover answers when it cannot do what was asked (XFER-7).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoverError {
    /// The peer's endpoint is not of this mover's form.
    #[error("peer {peer:?} is no endpoint of this mover (tcp: numeric ip:port; shm: shm:host:namespace:name)")]
    BadPeer {
        /// As given.
        peer: String,
    },
    /// No connection could be made.
    #[error("cannot connect to {peer}: errno {errno}")]
    Connect {
        /// Who.
        peer: String,
        /// The system's number, 0 if it gave none.
        errno: i32,
    },
    /// The peer went away between two frames, or the connection broke.
    #[error("peer {peer} is gone: errno {errno}")]
    PeerGone {
        /// Who.
        peer: String,
        /// The system's number, 0 for an orderly end.
        errno: i32,
    },
    /// The peer's stream ended inside a frame.
    #[error("peer {peer} ended inside a frame: {got} of {expected} bytes")]
    Truncated {
        /// Who.
        peer: String,
        /// Bytes that came.
        got: u64,
        /// Bytes of the frame.
        expected: u64,
    },
    /// A wait ran out.
    #[error("{wait:?} wait for {peer} ran out after {limit:?}")]
    Timeout {
        /// Who.
        peer: String,
        /// Which wait.
        wait: Wait,
        /// Its length.
        limit: Duration,
    },
    /// The peer does not know the token: never exposed, or fenced already.
    #[error("peer {peer} does not know the lease token")]
    UnknownToken {
        /// Who.
        peer: String,
    },
    /// The lease reached its maximum age.
    #[error("the lease at {peer} has expired")]
    Expired {
        /// Who.
        peer: String,
    },
    /// The lease was fenced in the middle of an answer. A fence between two requests of a read shows as
    /// [`MoverError::UnknownToken`].
    #[error("the lease at {peer} was revoked")]
    Revoked {
        /// Who.
        peer: String,
    },
    /// The peer's lease does not cover a run.
    #[error("peer {peer} does not expose {run}")]
    RangeRefused {
        /// Who.
        peer: String,
        /// The first such run as it went over the wire (merged, cut to chunks).
        run: Run,
    },
    /// A local run lies outside its region, or the region is unknown.
    #[error("local {run} is not registered")]
    LocalRange {
        /// Which.
        run: Run,
    },
    /// The run lies in memory of this process alone: `shm` cannot export it.
    #[error("local {run} is in no memfd: allocate the pool in one, or export it over another mover")]
    NotShared {
        /// Which.
        run: Run,
    },
    /// GPU memory, and a mover that copies with the processor; or a checksum of GPU memory.
    #[error("{len} bytes of GPU memory are out of the processor's reach: stage them through host memory, or use verbs")]
    NotHost {
        /// Of the region.
        len: u64,
    },
    /// A file that peers could not map safely.
    #[error("the file of a region: {what} is {got:#x}, expected {expected:#x}")]
    NotShareable {
        /// What was looked at.
        what: &'static str,
        /// As found; an errno where a call was refused.
        got: u64,
        /// As needed.
        expected: u64,
    },
    /// Memory is shared within one host and network namespace only.
    #[error("peer {peer} is on another host or in another network namespace: use tcp or verbs")]
    OtherHost {
        /// Who.
        peer: String,
    },
    /// The other end of the socket belongs to somebody else (XFER-10).
    #[error("peer {peer} runs as user {got}, expected {expected}")]
    OtherUser {
        /// Who.
        peer: String,
        /// Its user id.
        got: u32,
        /// Ours.
        expected: u32,
    },
    /// The two runs of a copy differ in length.
    #[error("a copy's remote run has {remote} bytes, its local run {local}")]
    LengthMismatch {
        /// Bytes.
        remote: u64,
        /// Bytes.
        local: u64,
    },
    /// A frame or a read is larger than allowed.
    #[error("{what} of {got} is above the limit of {limit}")]
    TooLarge {
        /// What was counted.
        what: &'static str,
        /// How much.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// A bounded table is full here.
    #[error("too many {what}, at most {limit} are allowed")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The peer has no room for another connection.
    #[error("peer {peer} has no room for another stream")]
    PeerBusy {
        /// Who.
        peer: String,
    },
    /// What came does not begin like a frame of this protocol.
    #[error("peer {peer} speaks another protocol: magic {got:#010x}, expected {expected:#010x}")]
    BadMagic {
        /// Who.
        peer: String,
        /// As received.
        got: u32,
        /// Ours.
        expected: u32,
    },
    /// The peer speaks another version.
    #[error("peer {peer} speaks version {got}, expected {expected}")]
    BadVersion {
        /// Who.
        peer: String,
        /// As received.
        got: u16,
        /// Ours.
        expected: u16,
    },
    /// A frame breaks the protocol in another way.
    #[error("peer {peer} broke the protocol: {what} is {got}, expected {expected}")]
    BadFrame {
        /// Who.
        peer: String,
        /// The field.
        what: &'static str,
        /// As received.
        got: u64,
        /// What was allowed.
        expected: u64,
    },
    /// The bytes that arrived are not those that were sent (XFER-8).
    #[error("checksum of {peer} is {expected:#010x}, the bytes have {got:#010x}")]
    Checksum {
        /// Who.
        peer: String,
        /// Of the bytes that arrived.
        got: u32,
        /// As sent.
        expected: u32,
    },
    /// The read was cancelled here.
    #[error("the read was cancelled")]
    Cancelled,
    /// The token is exposed already.
    #[error("the lease token is in use")]
    TokenInUse,
    /// The mover is shutting down.
    #[error("the mover is closed")]
    Closed,
    /// The mover's configuration cannot work.
    #[error("{field} is {got}, expected {least} to {most}")]
    BadConfig {
        /// The field; waits are counted in milliseconds.
        field: &'static str,
        /// As given.
        got: u64,
        /// The smallest value.
        least: u64,
        /// The largest value.
        most: u64,
    },
    /// Peers cannot dial the unspecified address.
    #[error("bind is {bind}: set advertise to an address that peers can reach")]
    NoAdvertise {
        /// As given.
        bind: SocketAddr,
    },
    /// RDMA cannot be used, or failed.
    #[cfg(feature = "verbs")]
    #[error(transparent)]
    Verbs(#[from] crate::verbs::VerbsError),
    /// The system refused.
    #[error("{call}: errno {errno}")]
    System {
        /// The call.
        call: &'static str,
        /// The system's number, 0 if it gave none.
        errno: i32,
    },
}

impl MoverError {
    /// Whether the way to the peer failed, so that another mover may bring the same bytes under the same lease (XFER-9). What
    /// the lease, the caller or the bytes themselves are to blame for fails over any mover.
    pub fn is_of_path(&self) -> bool {
        match self {
            MoverError::BadPeer { .. }
            | MoverError::Connect { .. }
            | MoverError::PeerGone { .. }
            | MoverError::Truncated { .. }
            | MoverError::NotShared { .. }
            | MoverError::NotShareable { .. }
            | MoverError::NotHost { .. }
            | MoverError::OtherHost { .. }
            | MoverError::OtherUser { .. }
            | MoverError::TooMany { .. }
            | MoverError::PeerBusy { .. }
            | MoverError::BadMagic { .. }
            | MoverError::BadVersion { .. }
            | MoverError::BadFrame { .. }
            | MoverError::System { .. } => true,
            #[cfg(feature = "verbs")]
            MoverError::Verbs(_) => true,
            MoverError::Timeout { wait, .. } => *wait != Wait::Deadline,
            MoverError::UnknownToken { .. }
            | MoverError::Expired { .. }
            | MoverError::Revoked { .. }
            | MoverError::RangeRefused { .. }
            | MoverError::LocalRange { .. }
            | MoverError::LengthMismatch { .. }
            | MoverError::TooLarge { .. }
            | MoverError::Checksum { .. }
            | MoverError::Cancelled
            | MoverError::TokenInUse
            | MoverError::Closed
            | MoverError::BadConfig { .. }
            | MoverError::NoAdvertise { .. } => false,
        }
    }

    pub(crate) fn system(call: &'static str, error: &io::Error) -> Self {
        MoverError::System {
            call,
            errno: errno(error),
        }
    }
}

pub(crate) fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(0)
}
