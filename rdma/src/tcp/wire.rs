//! The frames of the tcp mover: data only, little-endian, fixed sizes (F19). Decoders are total: any bytes give a value
//! or a [`WireError`]. Both ends of [`super`] and the fuzz targets call it.
//!
//! ```text
//! request  magic 4 · version 2 · flags 2 · id 8 · token 32 · len 8 · runs 4 · zero 4 · runs × (region 4 · offset 8 · len 8)
//! head     magic 4 · version 2 · status 2 · id 8 · len 8 · fact 8
//! body     len bytes, only after a head with status ok
//! tail     status 2 · zero 2 · crc32c 4 · id 8, only after a body
//! ```
//! Answers come in the order of the requests. A lease that ends inside a body is filled up with zeros and said so in the
//! tail: nothing counts before its tail says ok.

use crate::{
    mover::LeaseToken,
    region::{RegionKey, Run},
};

/// "KVCQ", first in a request.
pub const REQUEST_MAGIC: u32 = u32::from_le_bytes(*b"KVCQ");
/// "KVCA", first in an answer's head.
pub const ANSWER_MAGIC: u32 = u32::from_le_bytes(*b"KVCA");
/// The version spoken here; no other is understood.
pub const VERSION: u16 = 1;
/// Bytes of a request before its runs.
pub const REQUEST_HEAD: usize = 64;
/// Bytes of a run in a request.
pub const RUN: usize = 20;
/// Runs in a request at most.
pub const MAX_RUNS: usize = 512;
/// Bytes of the largest request.
pub const MAX_REQUEST: usize = REQUEST_HEAD + MAX_RUNS * RUN;
/// Payload bytes of an answer at most.
pub const MAX_BODY: u64 = 4 << 20;
/// Bytes of an answer's head.
pub const HEAD: usize = 32;
/// Bytes of an answer's tail.
pub const TAIL: usize = 16;

const FLAG_CHECKSUM: u16 = 1;

/// A range request.
#[derive(Clone, Debug)]
pub struct Request {
    /// The importer's number for it, echoed in the answer.
    pub id: u64,
    /// The lease.
    pub token: LeaseToken,
    /// Whether the tail carries a checksum of the body.
    pub checksum: bool,
    /// What to send, in this order.
    pub runs: Vec<Run>,
}

/// How a request went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// A body follows, or in the tail: it was whole.
    Ok,
    /// No such lease.
    UnknownToken,
    /// The lease reached its maximum age.
    Expired,
    /// The lease was fenced.
    Revoked,
    /// A run is not exposed; the fact is its index in the request.
    RangeRefused,
    /// A count is above a limit; the fact is the limit.
    TooLarge,
    /// The request was no frame of this protocol; the fact is what was expected.
    BadFrame,
    /// Another version; the fact is the one spoken.
    BadVersion,
    /// No room for the connection; the fact is the limit.
    Busy,
}

/// Every status with its number on the wire.
const STATUS: [(Status, u16); 9] = [
    (Status::Ok, 0),
    (Status::UnknownToken, 1),
    (Status::Expired, 2),
    (Status::Revoked, 3),
    (Status::RangeRefused, 4),
    (Status::TooLarge, 5),
    (Status::BadFrame, 6),
    (Status::BadVersion, 7),
    (Status::Busy, 8),
];

/// What an answer begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Ok: a body and a tail follow. Else nothing does.
    pub status: Status,
    /// The request's number, 0 if it had none that could be read.
    pub id: u64,
    /// Bytes of the body.
    pub len: u64,
    /// See [`Status`].
    pub fact: u64,
}

/// What an answer ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail {
    /// Whether the body was whole.
    pub status: Status,
    /// Of the body; 0 if none was asked for.
    pub crc: u32,
    /// The request's number.
    pub id: u64,
}

/// Why bytes are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The first four bytes.
    #[error("magic {got:#010x}, expected {expected:#010x}")]
    Magic {
        /// As received.
        got: u32,
        /// Ours.
        expected: u32,
    },
    /// Another version.
    #[error("version {got}, expected {expected}")]
    Version {
        /// As received.
        got: u16,
        /// Ours.
        expected: u16,
    },
    /// A count above its limit.
    #[error("{what} of {got}, at most {limit}")]
    TooLarge {
        /// What was counted.
        what: &'static str,
        /// As received.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// A field with a value that has no meaning.
    #[error("{what} is {got}, expected {expected}")]
    Field {
        /// The field.
        what: &'static str,
        /// As received.
        got: u64,
        /// What was allowed: a value, or the largest one.
        expected: u64,
    },
}

/// Appends a request for `runs`, at most [`MAX_RUNS`] runs and [`MAX_BODY`] bytes.
pub fn encode_request(out: &mut Vec<u8>, id: u64, token: &LeaseToken, checksum: bool, runs: &[Run]) {
    out.extend(REQUEST_MAGIC.to_le_bytes());
    out.extend(VERSION.to_le_bytes());
    out.extend(if checksum { FLAG_CHECKSUM } else { 0 }.to_le_bytes());
    out.extend(id.to_le_bytes());
    out.extend(token.0);
    out.extend(runs.iter().map(|run| run.len).sum::<u64>().to_le_bytes());
    out.extend((runs.len() as u32).to_le_bytes());
    out.extend([0; 4]);
    for run in runs {
        out.extend(run.region.0.to_le_bytes());
        out.extend(run.offset.to_le_bytes());
        out.extend(run.len.to_le_bytes());
    }
}

/// The request at the front of `input` and how many bytes it takes; `None` if more must come. A wrong beginning is
/// refused as soon as it is there, whatever follows.
///
/// # Errors
/// [`WireError`]; the stream cannot be understood from here on.
pub fn decode_request(input: &[u8]) -> Result<Option<(Request, usize)>, WireError> {
    let mut fields = Fields(input);
    let Some(magic) = fields.u32() else { return Ok(None) };
    expect_magic(magic, REQUEST_MAGIC)?;
    let Some(version) = fields.u16() else { return Ok(None) };
    expect_version(version)?;
    let Some(RequestHead {
        flags,
        id,
        token,
        len,
        runs,
        zero,
    }) = fields.request_head()
    else {
        return Ok(None);
    };
    if flags & !FLAG_CHECKSUM != 0 {
        return Err(WireError::Field {
            what: "flags",
            got: flags.into(),
            expected: FLAG_CHECKSUM.into(),
        });
    }
    if zero != 0 {
        return Err(WireError::Field {
            what: "reserved",
            got: zero.into(),
            expected: 0,
        });
    }
    at_most("runs", runs.into(), MAX_RUNS as u64)?;
    at_most("body", len, MAX_BODY)?;
    let count = runs as usize;
    if fields.0.len() < count * RUN {
        return Ok(None);
    }
    let mut sum = 0u64;
    let mut decoded = Vec::with_capacity(count);
    for _ in 0..count {
        let Some(run) = fields.run() else { return Ok(None) };
        if run.end().is_none() {
            return Err(WireError::Field {
                what: "run end",
                got: run.len,
                expected: u64::MAX - run.offset,
            });
        }
        sum = sum.saturating_add(run.len);
        decoded.push(run);
    }
    if sum != len {
        return Err(WireError::Field {
            what: "len",
            got: len,
            expected: sum,
        });
    }
    let checksum = flags & FLAG_CHECKSUM != 0;
    Ok(Some((
        Request {
            id,
            token: LeaseToken(token),
            checksum,
            runs: decoded,
        },
        REQUEST_HEAD + count * RUN,
    )))
}

/// Appends an answer's head.
pub fn encode_head(out: &mut Vec<u8>, head: &Head) {
    out.extend(ANSWER_MAGIC.to_le_bytes());
    out.extend(VERSION.to_le_bytes());
    out.extend(number(head.status).to_le_bytes());
    out.extend(head.id.to_le_bytes());
    out.extend(head.len.to_le_bytes());
    out.extend(head.fact.to_le_bytes());
}

/// An answer's head.
///
/// # Errors
/// [`WireError`].
pub fn decode_head(input: &[u8; HEAD]) -> Result<Head, WireError> {
    let [m0, m1, m2, m3, v0, v1, s0, s1, rest @ ..] = input;
    expect_magic(u32::from_le_bytes([*m0, *m1, *m2, *m3]), ANSWER_MAGIC)?;
    expect_version(u16::from_le_bytes([*v0, *v1]))?;
    let status = status(u16::from_le_bytes([*s0, *s1]))?;
    let mut fields = Fields(rest);
    let (id, len, fact) = (fields.fixed_u64(), fields.fixed_u64(), fields.fixed_u64());
    at_most("body", len, MAX_BODY)?;
    Ok(Head { status, id, len, fact })
}

/// Appends an answer's tail.
pub fn encode_tail(out: &mut Vec<u8>, tail: &Tail) {
    out.extend(number(tail.status).to_le_bytes());
    out.extend([0; 2]);
    out.extend(tail.crc.to_le_bytes());
    out.extend(tail.id.to_le_bytes());
}

/// An answer's tail.
///
/// # Errors
/// [`WireError`].
pub fn decode_tail(input: &[u8; TAIL]) -> Result<Tail, WireError> {
    let [s0, s1, z0, z1, c0, c1, c2, c3, rest @ ..] = input;
    let status = status(u16::from_le_bytes([*s0, *s1]))?;
    let zero = u16::from_le_bytes([*z0, *z1]);
    if zero != 0 {
        return Err(WireError::Field {
            what: "reserved",
            got: zero.into(),
            expected: 0,
        });
    }
    Ok(Tail {
        status,
        crc: u32::from_le_bytes([*c0, *c1, *c2, *c3]),
        id: u64::from_le_bytes(*rest),
    })
}

fn expect_magic(got: u32, expected: u32) -> Result<(), WireError> {
    if got == expected {
        Ok(())
    } else {
        Err(WireError::Magic { got, expected })
    }
}

fn expect_version(got: u16) -> Result<(), WireError> {
    if got == VERSION {
        Ok(())
    } else {
        Err(WireError::Version { got, expected: VERSION })
    }
}

fn at_most(what: &'static str, got: u64, limit: u64) -> Result<(), WireError> {
    if got <= limit {
        Ok(())
    } else {
        Err(WireError::TooLarge { what, got, limit })
    }
}

fn number(status: Status) -> u16 {
    STATUS
        .iter()
        .find(|(each, _)| *each == status)
        .map_or(0, |(_, number)| *number)
}

fn status(got: u16) -> Result<Status, WireError> {
    let found = STATUS.iter().find(|(_, number)| *number == got);
    let expected = STATUS.len() as u64 - 1;
    found.map(|(status, _)| *status).ok_or(WireError::Field {
        what: "status",
        got: got.into(),
        expected,
    })
}

/// A request's fields between its version and its runs, unchecked.
struct RequestHead {
    flags: u16,
    id: u64,
    token: [u8; 32],
    len: u64,
    runs: u32,
    zero: u32,
}

/// Takes fields off the front.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    /// For inputs of a fixed size that is known to suffice.
    fn fixed_u64(&mut self) -> u64 {
        self.u64().unwrap_or(0)
    }

    fn request_head(&mut self) -> Option<RequestHead> {
        let (flags, id, token) = (self.u16()?, self.u64()?, self.take()?);
        Some(RequestHead {
            flags,
            id,
            token,
            len: self.u64()?,
            runs: self.u32()?,
            zero: self.u32()?,
        })
    }

    fn run(&mut self) -> Option<Run> {
        Some(Run {
            region: RegionKey(self.u32()?),
            offset: self.u64()?,
            len: self.u64()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(runs: &[Run]) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode_request(&mut bytes, 9, &LeaseToken([3; 32]), true, runs);
        bytes
    }

    fn run(offset: u64, len: u64) -> Run {
        Run {
            region: RegionKey(5),
            offset,
            len,
        }
    }

    #[test]
    fn a_request_waits_for_its_last_byte() {
        let bytes = request(&[run(1, 2), run(10, 3)]);
        for cut in 0..bytes.len() {
            assert!(
                decode_request(&bytes[..cut]).unwrap().is_none(),
                "{cut} bytes were taken for a request"
            );
        }
        let (got, used) = decode_request(&bytes).unwrap().unwrap();
        assert_eq!((used, got.id, got.checksum), (bytes.len(), 9, true));
        assert_eq!((got.token.0, got.runs), ([3; 32], vec![run(1, 2), run(10, 3)]));
    }

    #[test]
    fn a_request_is_refused_by_the_field_that_is_wrong() {
        let good = request(&[run(1, 2)]);
        let refusal = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            decode_request(&bytes).unwrap_err()
        };
        assert!(matches!(refusal(0, 0), WireError::Magic { .. }));
        assert_eq!(
            refusal(4, 2),
            WireError::Version {
                got: 2,
                expected: VERSION
            }
        );
        assert!(matches!(refusal(6, 2), WireError::Field { what: "flags", .. }));
        assert_eq!(
            refusal(48, 3),
            WireError::Field {
                what: "len",
                got: 3,
                expected: 2
            }
        );
        assert!(matches!(refusal(54, 1), WireError::TooLarge { what: "body", .. }));
        assert!(matches!(refusal(58, 1), WireError::TooLarge { what: "runs", .. }));
        assert!(matches!(refusal(63, 1), WireError::Field { what: "reserved", .. }));
        let wraps = request(&[Run {
            offset: u64::MAX,
            ..run(1, 2)
        }]);
        assert!(matches!(
            decode_request(&wraps),
            Err(WireError::Field { what: "run end", .. })
        ));
    }

    #[test]
    fn http_is_refused_at_its_first_word() {
        assert!(matches!(decode_request(b"GET "), Err(WireError::Magic { .. })));
    }

    proptest! {
        #[test]
        fn a_request_comes_back_as_it_went(id: u64, checksum: bool, token: [u8; 32],
            runs in prop::collection::vec((any::<u32>(), 0u64..1 << 40, 0u64..4096), 0..MAX_RUNS)) {
            let runs: Vec<Run> = runs.into_iter()
                .map(|(region, offset, len)| Run { region: RegionKey(region), offset, len }).collect();
            let mut bytes = Vec::new();
            encode_request(&mut bytes, id, &LeaseToken(token), checksum, &runs);
            let (got, used) = decode_request(&bytes).unwrap().unwrap();
            prop_assert_eq!((used, got.id, got.checksum, got.token.0), (bytes.len(), id, checksum, token));
            prop_assert_eq!(got.runs, runs);
        }

        #[test]
        fn an_answer_comes_back_as_it_went(which in 0..STATUS.len(), id: u64, len in 0..=MAX_BODY, fact: u64, crc: u32) {
            let (head, tail) = (Head { status: STATUS[which].0, id, len, fact }, Tail { status: STATUS[which].0, crc, id });
            let mut bytes = Vec::new();
            encode_head(&mut bytes, &head);
            encode_tail(&mut bytes, &tail);
            prop_assert_eq!(decode_head(bytes[..HEAD].try_into().unwrap()), Ok(head));
            prop_assert_eq!(decode_tail(bytes[HEAD..].try_into().unwrap()), Ok(tail));
        }
    }
}
