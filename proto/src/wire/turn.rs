//! The header that ties an engine request to its session, reservation and placement: `X-Kvc-Turn`.
//!
//! The router adds it, so the client's body goes on byte for byte (DISP-8); the engine's HTTP server hands it to the
//! scheduler as the request's routing key. A client without a router may send it with `s=` alone.
//!
//! `s=<session, percent-encoded>[;r=<reservation>][;p=<n>.<store>][;q=<router>.<request>][;prefill]`

use std::{
    fmt::{self, Write as _},
    str::FromStr,
};

use crate::id::{Placement, ReservationId, RouterId, SessionId, SessionIdError};

/// The header's name, lower case.
pub const TURN_HEADER: &str = "x-kvc-turn";
/// The longest header value that is read, in bytes.
pub const TURN_HEADER_MAX: usize = 1024;

/// What the header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnTag {
    /// Whose turn it is.
    pub session: SessionId,
    /// The grant it runs under; without one it is admitted afresh on arrival (ADM-10).
    pub reservation: Option<ReservationId>,
    /// The placement it runs under.
    pub placement: Option<Placement>,
    /// Router and its request number, for the load report (EAR-7).
    pub origin: Option<(RouterId, u64)>,
    /// Compute the prompt's KV and generate nothing: the prefill side of a seed or reseed (DISP-3).
    pub prefill_only: bool,
}

/// Why a header value is no [`TurnTag`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TurnTagError {
    /// Longer than [`TURN_HEADER_MAX`].
    #[error("{TURN_HEADER} has {got} bytes, at most {TURN_HEADER_MAX} are read")]
    TooLong {
        /// Its length in bytes.
        got: usize,
    },
    /// `s=` is missing.
    #[error("{TURN_HEADER} has no s=<session>")]
    NoSession,
    /// The session id is not acceptable.
    #[error("{TURN_HEADER}: s: {0}")]
    Session(#[from] SessionIdError),
    /// A `%` without two hexadecimal digits after it, or bytes that are no UTF-8.
    #[error("{TURN_HEADER}: s: bad percent-encoding at byte {at} of the value")]
    Percent {
        /// Where.
        at: usize,
    },
    /// A field is not of its form.
    #[error("{TURN_HEADER}: {field}: expected {expected}")]
    Field {
        /// Which.
        field: &'static str,
        /// What should stand there.
        expected: &'static str,
    },
    /// A field stands twice.
    #[error("{TURN_HEADER}: {field} stands twice")]
    Twice {
        /// Which.
        field: &'static str,
    },
    /// A field that this version does not know.
    #[error("{TURN_HEADER}: unknown field {field:?}")]
    Unknown {
        /// Its first 32 characters.
        field: String,
    },
}

impl TurnTag {
    /// A tag that names the session and nothing else.
    pub fn of(session: SessionId) -> TurnTag {
        TurnTag {
            session,
            reservation: None,
            placement: None,
            origin: None,
            prefill_only: false,
        }
    }

    /// Reads a header value.
    ///
    /// ```
    /// use kvc_proto::wire::turn::TurnTag;
    /// let tag = TurnTag::parse("s=agent%207;r=12;prefill").unwrap();
    /// assert_eq!((tag.session.as_str(), tag.prefill_only), ("agent 7", true));
    /// assert_eq!(tag.to_string(), "s=agent%207;r=12;prefill");
    /// ```
    pub fn parse(value: &str) -> Result<TurnTag, TurnTagError> {
        if value.len() > TURN_HEADER_MAX {
            return Err(TurnTagError::TooLong { got: value.len() });
        }
        let (mut session, mut reservation, mut placement, mut origin, mut prefill) = (None, None, None, None, None);
        for part in value.split(';') {
            let (name, text) = part.split_once('=').map_or((part, None), |(n, t)| (n, Some(t)));
            match (name, text) {
                ("s", Some(t)) => once(&mut session, "s", session_id(t)?)?,
                ("r", Some(t)) => once(&mut reservation, "r", ReservationId(decimal(t, "r", "a number")?))?,
                ("p", Some(t)) => once(&mut placement, "p", pair_placement(t)?)?,
                ("q", Some(t)) => once(&mut origin, "q", pair_origin(t)?)?,
                ("prefill", None) => once(&mut prefill, "prefill", ())?,
                _ => {
                    return Err(TurnTagError::Unknown {
                        field: name.chars().take(32).collect(),
                    });
                }
            }
        }
        Ok(TurnTag {
            session: session.ok_or(TurnTagError::NoSession)?,
            reservation,
            placement,
            origin,
            prefill_only: prefill.is_some(),
        })
    }
}

impl FromStr for TurnTag {
    type Err = TurnTagError;
    fn from_str(value: &str) -> Result<TurnTag, TurnTagError> {
        TurnTag::parse(value)
    }
}

impl fmt::Display for TurnTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("s=")?;
        for &byte in self.session.as_str().as_bytes() {
            if plain(byte) {
                f.write_char(char::from(byte))?;
            } else {
                write!(f, "%{byte:02X}")?;
            }
        }
        if let Some(r) = self.reservation {
            write!(f, ";r={r}")?;
        }
        if let Some(Placement { n, store }) = self.placement {
            write!(f, ";p={n}.{store}")?;
        }
        if let Some((router, request)) = self.origin {
            write!(f, ";q={router}.{request}")?;
        }
        if self.prefill_only {
            f.write_str(";prefill")?;
        }
        Ok(())
    }
}

/// RFC 3986 "unreserved" plus `:`, `/` and `@`, which ids often contain; all are visible and none is a separator here.
fn plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~:/@".contains(&byte)
}

fn once<T>(place: &mut Option<T>, field: &'static str, value: T) -> Result<(), TurnTagError> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(TurnTagError::Twice { field }),
    }
}

fn session_id(text: &str) -> Result<SessionId, TurnTagError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let at = text.len() - rest.len();
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let [high, low, tail @ ..] = rest else {
            return Err(TurnTagError::Percent { at });
        };
        let digit = |b: u8| char::from(b).to_digit(16).and_then(|d| u8::try_from(d).ok());
        let (Some(high), Some(low)) = (digit(*high), digit(*low)) else {
            return Err(TurnTagError::Percent { at });
        };
        bytes.push(high << 4 | low);
        rest = tail;
    }
    let text = std::str::from_utf8(&bytes).map_err(|e| TurnTagError::Percent { at: e.valid_up_to() })?;
    Ok(SessionId::new(text)?)
}

/// Digits only: `u64::from_str` would also take a leading `+`.
fn decimal(text: &str, field: &'static str, expected: &'static str) -> Result<u64, TurnTagError> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits
        .then(|| text.parse().ok())
        .flatten()
        .ok_or(TurnTagError::Field { field, expected })
}

fn pair_placement(text: &str) -> Result<Placement, TurnTagError> {
    let wrong = TurnTagError::Field {
        field: "p",
        expected: "<n>.<store, 16 hexadecimal digits>",
    };
    let (n, store) = text.split_once('.').ok_or(wrong.clone())?;
    let n = decimal(n, "p", "<n>.<store, 16 hexadecimal digits>")?;
    Ok(Placement {
        n,
        store: store.parse().map_err(|_| wrong)?,
    })
}

fn pair_origin(text: &str) -> Result<(RouterId, u64), TurnTagError> {
    let wrong = TurnTagError::Field {
        field: "q",
        expected: "<router, 16 hexadecimal digits>.<request>",
    };
    let (router, request) = text.split_once('.').ok_or(wrong.clone())?;
    let request = decimal(request, "q", "<router, 16 hexadecimal digits>.<request>")?;
    Ok((router.parse().map_err(|_| wrong)?, request))
}

#[cfg(test)]
mod tests {
    use proptest::{option, prelude::*};

    use super::*;
    use crate::id::StoreId;

    prop_compose! {
        fn tags()(
            session in "[^\\p{Cc}]{1,60}",
            reservation in option::of(any::<u64>()),
            placement in option::of((any::<u64>(), any::<u64>())),
            origin in option::of((any::<u64>(), any::<u64>())),
            prefill_only: bool,
        ) -> TurnTag {
            TurnTag {
                session: SessionId::new(&session).expect("no control characters, at most 240 bytes"),
                reservation: reservation.map(ReservationId),
                placement: placement.map(|(n, s)| Placement { n, store: StoreId(s) }),
                origin: origin.map(|(r, q)| (RouterId(r), q)),
                prefill_only,
            }
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(tag in tags()) {
            let text = tag.to_string();
            prop_assert!(text.len() <= TURN_HEADER_MAX);
            prop_assert!(text.bytes().all(|b| (0x21..0x7f).contains(&b)), "a header value is visible ASCII");
            prop_assert_eq!(TurnTag::parse(&text), Ok(tag));
        }

        #[test]
        fn any_text_is_read_or_refused_and_what_is_read_is_canonical_after_one_round(text in "\\PC{0,80}|s=[%0-9a-f;=rpq.]{0,60}") {
            if let Ok(tag) = TurnTag::parse(&text) {
                prop_assert_eq!(TurnTag::parse(&tag.to_string()), Ok(tag));
            }
        }
    }

    #[test]
    fn the_longest_session_id_fits() {
        let tag = TurnTag {
            session: SessionId::new(&" ".repeat(crate::id::SESSION_ID_MAX)).unwrap(),
            reservation: Some(ReservationId(u64::MAX)),
            placement: Some(Placement {
                n: u64::MAX,
                store: StoreId(1),
            }),
            origin: Some((RouterId(1), u64::MAX)),
            prefill_only: true,
        };
        assert!(tag.to_string().len() <= TURN_HEADER_MAX);
    }

    #[test]
    fn bad_values_are_refused_with_the_field() {
        use TurnTagError::*;
        let cases = [
            ("", Unknown { field: "".into() }),
            ("r=1", NoSession),
            ("s=", Session(SessionIdError::Empty)),
            ("s=%0a", Session(SessionIdError::Control { at: 0 })),
            ("s=a%2", Percent { at: 1 }),
            ("s=%ff", Percent { at: 0 }),
            ("s=a;s=b", Twice { field: "s" }),
            (
                "s=a;r=+1",
                Field {
                    field: "r",
                    expected: "a number",
                },
            ),
            (
                "s=a;r=99999999999999999999",
                Field {
                    field: "r",
                    expected: "a number",
                },
            ),
            (
                "s=a;prefill=1",
                Unknown {
                    field: "prefill".into(),
                },
            ),
            ("s=a;x", Unknown { field: "x".into() }),
        ];
        for (text, error) in cases {
            assert_eq!(TurnTag::parse(text), Err(error), "{text}");
        }
        assert!(matches!(TurnTag::parse("s=a;p=1.12"), Err(Field { field: "p", .. })));
        assert!(matches!(
            TurnTag::parse("s=a;q=0000000000000001.x"),
            Err(Field { field: "q", .. })
        ));
        assert_eq!(
            TurnTag::parse(&format!("s={}", "a".repeat(1100))),
            Err(TooLong { got: 1102 })
        );
    }
}
