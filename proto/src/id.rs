//! Names of things: newtypes, so that a turn is never taken for a lease.

use std::{fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The longest session id that is accepted, in bytes.
pub const SESSION_ID_MAX: usize = 256;

/// A session's name, chosen by the client: 1 to [`SESSION_ID_MAX`] bytes, no control characters.
/// A name alone gives access to nothing (SES-5).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct SessionId(Arc<str>);

/// Why a text is no [`SessionId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionIdError {
    /// The text is empty.
    #[error("session_id is empty")]
    Empty,
    /// The text is longer than [`SESSION_ID_MAX`] bytes.
    #[error("session_id has {got} bytes, at most {SESSION_ID_MAX} are allowed")]
    TooLong {
        /// Its length in bytes.
        got: usize,
    },
    /// The text contains a control character.
    #[error("session_id has a control character at byte {at}")]
    Control {
        /// Where.
        at: usize,
    },
}

impl SessionId {
    /// Checks a client's text.
    pub fn new(text: &str) -> Result<Self, SessionIdError> {
        if text.is_empty() {
            return Err(SessionIdError::Empty);
        }
        if text.len() > SESSION_ID_MAX {
            return Err(SessionIdError::TooLong { got: text.len() });
        }
        if let Some((at, _)) = text.char_indices().find(|(_, c)| c.is_control()) {
            return Err(SessionIdError::Control { at });
        }
        Ok(Self(text.into()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for SessionId {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(d)?;
        SessionId::new(&text).map_err(serde::de::Error::custom)
    }
}

macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u64);
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { write!(f, "{}", self.0) }
        }
    )*};
}

numbers! {
    /// One request of a session as this worker knows it; given out by the worker, never reused.
    TurnId;
    /// A grant of admission (ADM-10): the turn, the import and a release name it.
    ReservationId;
    /// A peer's permission to read a token range (XFER-2).
    LeaseId;
    /// A running pull of a token range into this worker.
    ImportId;
    /// The engine's own handle of a locked-or-lockable shared prefix (a radix tree node); opaque here.
    PrefixHandle;
}

impl PrefixHandle {
    /// The root of the engine's tree: nothing is shared. Never handed back, never to be locked or guarded.
    pub const ROOT: PrefixHandle = PrefixHandle(0);
}

macro_rules! random_ids {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        /// Written as 16 hexadecimal digits.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { write!(f, "{:016x}", self.0) }
        }
        impl FromStr for $name {
            type Err = HexError;
            fn from_str(s: &str) -> Result<Self, HexError> { hex16(s).map($name) }
        }
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> { s.collect_str(self) }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<str>::deserialize(d)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}

random_ids! {
    /// Random id of a worker process: a restart on the same address is another incarnation (SES-4, F16).
    Incarnation;
    /// Random id of a router process.
    RouterId;
    /// Random id of a session store that gives out placement numbers (SES-4).
    StoreId;
}

/// A text that is not 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected 16 hexadecimal digits")]
pub struct HexError;

fn hex16(s: &str) -> Result<u64, HexError> {
    if s.len() != 16 || !s.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(HexError);
    }
    u64::from_str_radix(s, 16).map_err(|_| HexError)
}

/// Who asks for admission: makes grants idempotent (ADM-10).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RequestKey {
    /// The asking router.
    pub router: RouterId,
    /// Its own increasing number for the client's request; also its sequence number in the load report.
    pub request: u64,
    /// Which probe of that request this is.
    pub attempt: u32,
}

/// Where a session lives: a number given out once by a session store (SES-4). Ordered by `n` first; the same `n`
/// from two stores is a conflict, never an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Placement {
    /// Increasing.
    pub n: u64,
    /// Who gave it out.
    pub store: StoreId,
}

/// ⟨placement, rewind⟩, ordered; only the holder raises `rewind` (SES-4, OWN-7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Epoch {
    /// Where the session lives.
    pub placement: Placement,
    /// How often its history was cut there.
    pub rewind: u32,
}
