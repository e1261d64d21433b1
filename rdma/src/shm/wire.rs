//! The frames of the `shm` mover's control socket, little-endian, one per packet. A request names its lease by token and
//! the runs it will copy; the exporter answers with the lease's slot, after the descriptors the importer does not have yet.

use crate::{
    mover::LeaseToken,
    region::{RegionKey, Run},
};

/// `KVSH`.
pub(super) const MAGIC: u32 = u32::from_le_bytes(*b"KVSH");
/// Of these frames.
pub(super) const VERSION: u16 = 1;
/// Runs of one request.
pub(super) const MAX_RUNS: usize = 2048;
/// Bytes that the runs of one request hold together at most.
pub(super) const MAX_BYTES: u64 = 16 << 20;
/// The largest frame.
pub(super) const MAX_FRAME: usize = 8 + 8 + 32 + 8 + MAX_RUNS * RUN + MAX_RUNS * 4;
const RUN: usize = 20;

const ASK: u16 = 1;
const ANSWER: u16 = 2;
const PAGE: u16 = 3;
const REGION: u16 = 4;

/// What an importer asks.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) id: u64,
    pub(super) token: LeaseToken,
    pub(super) runs: Vec<Run>,
    /// Runs of each chunk whose checksum is wanted; empty for none, else they sum up to all runs.
    pub(super) chunks: Vec<u32>,
}

/// How an exporter answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Status {
    Ok = 0,
    UnknownToken = 1,
    Expired = 2,
    Revoked = 3,
    /// `fact` is the index of the first run that is not exposed.
    RangeRefused = 4,
    /// No slot, no connection; `fact` is the limit.
    Busy = 5,
    /// `fact` is the version spoken here.
    BadVersion = 6,
    BadFrame = 7,
}

/// The answer to one [`Ask`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) status: Status,
    pub(super) id: u64,
    pub(super) slot: u32,
    pub(super) generation: u32,
    /// Nanoseconds that the lease lives yet.
    pub(super) left: u64,
    pub(super) fact: u64,
    /// Checksums, if they were asked for.
    pub(super) sums: Vec<u32>,
}

/// What an exporter sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Answer(Answer),
    /// The words of this connection; its file comes along.
    Page {
        slots: u32,
    },
    /// A region; its file comes along.
    Region {
        key: RegionKey,
        offset: u64,
        len: u64,
    },
}

/// Why a frame is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bad {
    Magic {
        got: u32,
    },
    Version {
        got: u16,
    },
    Field {
        what: &'static str,
        got: u64,
        expected: u64,
    },
}

pub(super) fn encode_ask(ask: &Ask) -> Vec<u8> {
    let mut frame = head(ASK, 48 + ask.runs.len() * RUN + ask.chunks.len() * 4);
    frame.extend(ask.id.to_le_bytes());
    frame.extend(ask.token.0);
    frame.extend((ask.runs.len() as u32).to_le_bytes());
    frame.extend((ask.chunks.len() as u32).to_le_bytes());
    for run in &ask.runs {
        frame.extend(run.region.0.to_le_bytes());
        frame.extend(run.offset.to_le_bytes());
        frame.extend(run.len.to_le_bytes());
    }
    ask.chunks.iter().for_each(|count| frame.extend(count.to_le_bytes()));
    frame
}

pub(super) fn decode_ask(frame: &[u8]) -> Result<Ask, Bad> {
    let mut fields = Fields(frame);
    expect("kind", fields.head()?.into(), ASK.into())?;
    let id = fields.u64()?;
    let token = LeaseToken(fields.take()?);
    let (runs, chunks) = (fields.u32()? as usize, fields.u32()? as usize);
    within("runs", runs as u64, MAX_RUNS as u64)?;
    within("chunks", chunks as u64, runs as u64)?;
    expect("length", fields.0.len() as u64, (runs * RUN + chunks * 4) as u64)?;
    let mut bytes = 0u64;
    let run = |fields: &mut Fields<'_>| {
        Ok(Run {
            region: RegionKey(fields.u32()?),
            offset: fields.u64()?,
            len: fields.u64()?,
        })
    };
    let runs = (0..runs).map(|_| run(&mut fields)).collect::<Result<Vec<_>, Bad>>()?;
    runs.iter().for_each(|run| bytes = bytes.saturating_add(run.len));
    within("bytes", bytes, MAX_BYTES)?;
    let chunks = (0..chunks).map(|_| fields.u32()).collect::<Result<Vec<_>, Bad>>()?;
    if !chunks.is_empty() {
        let all = chunks.iter().map(|&count| u64::from(count)).sum();
        expect("runs of chunks", all, runs.len() as u64)?;
    }
    Ok(Ask {
        id,
        token,
        runs,
        chunks,
    })
}

pub(super) fn encode_reply(reply: &Reply) -> Vec<u8> {
    match reply {
        Reply::Answer(answer) => {
            let mut frame = head(ANSWER, 40 + answer.sums.len() * 4);
            frame.extend((answer.status as u16).to_le_bytes());
            frame.extend((answer.sums.len() as u16).to_le_bytes());
            frame.extend(answer.slot.to_le_bytes());
            frame.extend(answer.generation.to_le_bytes());
            frame.extend(answer.id.to_le_bytes());
            frame.extend(answer.left.to_le_bytes());
            frame.extend(answer.fact.to_le_bytes());
            answer.sums.iter().for_each(|sum| frame.extend(sum.to_le_bytes()));
            frame
        }
        Reply::Page { slots } => {
            let mut frame = head(PAGE, 4);
            frame.extend(slots.to_le_bytes());
            frame
        }
        Reply::Region { key, offset, len } => {
            let mut frame = head(REGION, 20);
            frame.extend(key.0.to_le_bytes());
            frame.extend(offset.to_le_bytes());
            frame.extend(len.to_le_bytes());
            frame
        }
    }
}

pub(super) fn decode_reply(frame: &[u8]) -> Result<Reply, Bad> {
    let mut fields = Fields(frame);
    let reply = match fields.head()? {
        ANSWER => {
            let status = fields.u16()?;
            let status = Status::parse(status).ok_or(field("status", status.into(), Status::BadFrame as u64))?;
            let sums = usize::from(fields.u16()?);
            let (slot, generation, id) = (fields.u32()?, fields.u32()?, fields.u64()?);
            let (left, fact) = (fields.u64()?, fields.u64()?);
            let sums = (0..sums).map(|_| fields.u32()).collect::<Result<Vec<_>, Bad>>()?;
            Reply::Answer(Answer {
                status,
                id,
                slot,
                generation,
                left,
                fact,
                sums,
            })
        }
        PAGE => Reply::Page { slots: fields.u32()? },
        REGION => Reply::Region {
            key: RegionKey(fields.u32()?),
            offset: fields.u64()?,
            len: fields.u64()?,
        },
        kind => return Err(field("kind", kind.into(), ANSWER.into())),
    };
    expect("bytes behind", fields.0.len() as u64, 0)?;
    Ok(reply)
}

impl Status {
    fn parse(status: u16) -> Option<Self> {
        use Status::{BadFrame, BadVersion, Busy, Expired, Ok, RangeRefused, Revoked, UnknownToken};
        [
            Ok,
            UnknownToken,
            Expired,
            Revoked,
            RangeRefused,
            Busy,
            BadVersion,
            BadFrame,
        ]
        .into_iter()
        .find(|each| *each as u16 == status)
    }
}

fn head(kind: u16, room: usize) -> Vec<u8> {
    let mut frame = Vec::with_capacity(8 + room);
    frame.extend(MAGIC.to_le_bytes());
    frame.extend(VERSION.to_le_bytes());
    frame.extend(kind.to_le_bytes());
    frame
}

/// What is left of a frame.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    /// The frame's kind.
    fn head(&mut self) -> Result<u16, Bad> {
        let magic = self.u32()?;
        if magic != MAGIC {
            return Err(Bad::Magic { got: magic });
        }
        let version = self.u16()?;
        if version != VERSION {
            return Err(Bad::Version { got: version });
        }
        self.u16()
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Bad> {
        let short = field("length", self.0.len() as u64, N as u64);
        let (first, rest) = self.0.split_first_chunk::<N>().ok_or(short)?;
        self.0 = rest;
        Ok(*first)
    }

    fn u16(&mut self) -> Result<u16, Bad> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Bad> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Bad> {
        self.take().map(u64::from_le_bytes)
    }
}

fn field(what: &'static str, got: u64, expected: u64) -> Bad {
    Bad::Field { what, got, expected }
}

fn expect(what: &'static str, got: u64, expected: u64) -> Result<(), Bad> {
    if got == expected {
        Ok(())
    } else {
        Err(field(what, got, expected))
    }
}

fn within(what: &'static str, got: u64, limit: u64) -> Result<(), Bad> {
    if got <= limit {
        Ok(())
    } else {
        Err(field(what, got, limit))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ask(runs: usize) -> Ask {
        let run = |at| Run {
            region: RegionKey(at as u32),
            offset: at as u64 * 7,
            len: 3,
        };
        Ask {
            id: 9,
            token: LeaseToken([5; 32]),
            runs: (0..runs).map(run).collect(),
            chunks: vec![1, runs as u32 - 1],
        }
    }

    #[test]
    fn an_ask_comes_back_as_sent_and_its_largest_fits_a_frame() {
        let sent = ask(MAX_RUNS);
        let frame = encode_ask(&sent);
        assert!(frame.len() <= MAX_FRAME);
        let got = decode_ask(&frame).unwrap();
        assert_eq!((got.id, got.token.0, &got.runs), (9, sent.token.0, &sent.runs));
        assert_eq!(got.chunks, sent.chunks);
    }

    #[test]
    fn replies_come_back_as_sent() {
        let answer = Answer {
            status: Status::RangeRefused,
            id: 1,
            slot: 2,
            generation: 3,
            left: 4,
            fact: 5,
            sums: vec![6, 7],
        };
        let region = Reply::Region {
            key: RegionKey(1),
            offset: 2,
            len: 3,
        };
        for reply in [Reply::Answer(answer), Reply::Page { slots: 8 }, region] {
            assert_eq!(decode_reply(&encode_reply(&reply)), Ok(reply));
        }
    }

    #[test]
    fn what_is_out_of_bounds_is_named() {
        let named = |frame: &[u8]| match decode_ask(frame) {
            Err(Bad::Field { what, .. }) => what,
            other => panic!("{other:?}"),
        };
        assert_eq!(named(&encode_ask(&ask(MAX_RUNS + 1))), "runs");
        let mut large = ask(2);
        large.runs[0].len = MAX_BYTES;
        assert_eq!(named(&encode_ask(&large)), "bytes");
        let mut split = ask(2);
        split.chunks = vec![2, 2];
        assert_eq!(named(&encode_ask(&split)), "runs of chunks");
        let frame = encode_ask(&ask(2));
        assert_eq!(named(&frame[..frame.len() - 1]), "length");
        assert!(matches!(decode_ask(b"GET / HTTP"), Err(Bad::Magic { .. })));
        let mut other = frame;
        other[4] = 9;
        assert!(matches!(decode_ask(&other), Err(Bad::Version { got: 9 })));
    }

    proptest! {
        /// Whatever comes is decoded or named, and never a panic.
        #[test]
        fn any_bytes_are_decoded_or_refused(kind in 0u16..6, rest in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut frame = head(kind, rest.len());
            frame.extend(rest);
            let _ = (decode_ask(&frame), decode_reply(&frame));
        }
    }
}
