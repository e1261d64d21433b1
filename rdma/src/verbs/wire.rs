//! What the two ends of a lease's side channel say to each other. Pure; both threads call it.
//!
//! ```text
//! hello    magic 4 · version 2 · ends 1 · pairs 1 · token 32 · ends × end           importer, once, first
//! end      path 1 · link 1 · mtu 1 · reads 1 · lid 2 · zero 2 · gid 16 · pairs × (number 4 · psn 4)
//! welcome  head (tcp/wire) with a body: the ends that answer, same number of pairs  exporter, once
//! ask      request (tcp/wire): token, runs, whether a checksum is wanted            importer
//! grant    head with a body: crc32c 4 · keys 4 · keys × key                         exporter, in order
//! key      region 4 · paths 4 · len 8 · paths × (address 8 · key 4 · zero 4)
//! notice   head with id 0: the lease is over, and why                               exporter, last
//! ```
//! Numbers are little-endian. A region's keys are sent with the first grant that needs them.

use std::net::Ipv6Addr;

use super::{memory::Key, nic::Link};
use crate::{
    mover::LeaseToken,
    region::RegionKey,
    tcp::wire::{VERSION, WireError},
};

/// "KVCV", first in a hello.
pub(super) const HELLO_MAGIC: u32 = u32::from_le_bytes(*b"KVCV");
/// Bytes of a hello before its ends.
pub(super) const HELLO_HEAD: usize = 40;
/// Bytes of an end before its pairs.
const END: usize = 24;
/// Bytes of a pair.
const PAIR: usize = 8;
/// Devices of one mover at most.
pub(super) const MAX_ENDS: usize = 8;
/// Queue pairs over one path at most.
pub(super) const MAX_PAIRS: usize = 16;
/// Regions in one grant at most: one a run.
const MAX_KEYS: u32 = crate::tcp::wire::MAX_RUNS as u32;

/// One device's part of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct End {
    /// The importer's number for the path.
    pub(super) path: u8,
    pub(super) link: Link,
    /// As the library counts it.
    pub(super) mtu: u8,
    /// READs begun (importer) or answered (exporter) at once by one queue pair.
    pub(super) reads: u8,
    pub(super) lid: u16,
    pub(super) gid: Ipv6Addr,
    /// Number and first packet number of each queue pair.
    pub(super) pairs: Vec<(u32, u32)>,
}

/// The first message.
#[derive(Clone, Debug)]
pub(super) struct Hello {
    pub(super) token: LeaseToken,
    pub(super) ends: Vec<End>,
}

/// A region's keys as granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RegionKeys {
    pub(super) region: RegionKey,
    pub(super) len: u64,
    /// By path, in the order of the welcome's ends.
    pub(super) keys: Vec<Key>,
}

/// What an ask is answered with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Grant {
    /// Of all its bytes, 0 if none was asked for.
    pub(super) crc: u32,
    /// Of the regions that were not granted before.
    pub(super) regions: Vec<RegionKeys>,
}

pub(super) fn encode_hello(out: &mut Vec<u8>, hello: &Hello) {
    out.extend(HELLO_MAGIC.to_le_bytes());
    out.extend(VERSION.to_le_bytes());
    out.push(hello.ends.len() as u8);
    out.push(hello.ends.first().map_or(0, |end| end.pairs.len()) as u8);
    out.extend(hello.token.as_bytes());
    encode_ends(out, &hello.ends);
}

/// The hello at the front of `input` and how many bytes it takes; `None` if more must come.
pub(super) fn decode_hello(input: &[u8]) -> Result<Option<(Hello, usize)>, WireError> {
    let mut fields = Fields(input);
    let Some(magic) = fields.u32() else { return Ok(None) };
    if magic != HELLO_MAGIC {
        return Err(WireError::Magic {
            got: magic,
            expected: HELLO_MAGIC,
        });
    }
    let Some(version) = fields.u16() else { return Ok(None) };
    if version != VERSION {
        return Err(WireError::Version {
            got: version,
            expected: VERSION,
        });
    }
    let (Some(ends), Some(pairs), Some(token)) = (fields.u8(), fields.u8(), fields.take::<32>()) else {
        return Ok(None);
    };
    within("ends", ends.into(), MAX_ENDS as u64)?;
    within("pairs", pairs.into(), MAX_PAIRS as u64)?;
    let len = usize::from(ends) * (END + usize::from(pairs) * PAIR);
    if fields.0.len() < len {
        return Ok(None);
    }
    let ends = decode_ends(&fields.0[..len], usize::from(pairs))?;
    Ok(Some((
        Hello {
            token: LeaseToken::from_bytes(token),
            ends,
        },
        HELLO_HEAD + len,
    )))
}

pub(super) fn encode_ends(out: &mut Vec<u8>, ends: &[End]) {
    for end in ends {
        out.extend([end.path, end.link as u8, end.mtu, end.reads]);
        out.extend(end.lid.to_le_bytes());
        out.extend([0; 2]);
        out.extend(end.gid.octets());
        for (number, psn) in &end.pairs {
            out.extend(number.to_le_bytes());
            out.extend(psn.to_le_bytes());
        }
    }
}

/// All of `input`, ends with `pairs` pairs each.
pub(super) fn decode_ends(input: &[u8], pairs: usize) -> Result<Vec<End>, WireError> {
    let size = END + pairs * PAIR;
    if !input.len().is_multiple_of(size) || input.len() / size > MAX_ENDS {
        return Err(WireError::Field {
            what: "ends",
            got: input.len() as u64,
            expected: size as u64,
        });
    }
    input.chunks_exact(size).map(|end| decode_end(end, pairs)).collect()
}

fn decode_end(input: &[u8], pairs: usize) -> Result<End, WireError> {
    let mut fields = Fields(input);
    let short = WireError::Field {
        what: "end",
        got: input.len() as u64,
        expected: END as u64,
    };
    let mut end = || {
        let [path, link, mtu, reads] = fields.take::<4>()?;
        let (lid, _, gid) = (fields.u16()?, fields.u16()?, Ipv6Addr::from(fields.take::<16>()?));
        let link = [Link::InfiniBand, Link::Ethernet]
            .into_iter()
            .find(|each| *each as u8 == link);
        let pairs = (0..pairs)
            .map(|_| Some((fields.u32()?, fields.u32()?)))
            .collect::<Option<_>>()?;
        Some((path, link, mtu, reads, lid, gid, pairs))
    };
    let (path, link, mtu, reads, lid, gid, pairs) = end().ok_or(short)?;
    let link = link.ok_or(WireError::Field {
        what: "link",
        got: input[1].into(),
        expected: 1,
    })?;
    if !(1..=5).contains(&mtu) {
        return Err(WireError::Field {
            what: "mtu",
            got: mtu.into(),
            expected: 5,
        });
    }
    Ok(End {
        path,
        link,
        mtu,
        reads,
        lid,
        gid,
        pairs,
    })
}

pub(super) fn encode_grant(out: &mut Vec<u8>, grant: &Grant) {
    out.extend(grant.crc.to_le_bytes());
    out.extend((grant.regions.len() as u32).to_le_bytes());
    for region in &grant.regions {
        out.extend(region.region.0.to_le_bytes());
        out.extend((region.keys.len() as u32).to_le_bytes());
        out.extend(region.len.to_le_bytes());
        for key in &region.keys {
            out.extend(key.address.to_le_bytes());
            out.extend(key.key.to_le_bytes());
            out.extend([0; 4]);
        }
    }
}

/// A grant over `paths` paths, all of `input`.
pub(super) fn decode_grant(input: &[u8], paths: usize) -> Result<Grant, WireError> {
    let mut fields = Fields(input);
    let short = WireError::Field {
        what: "grant",
        got: input.len() as u64,
        expected: 8,
    };
    let (Some(crc), Some(count)) = (fields.u32(), fields.u32()) else {
        return Err(short);
    };
    within("keys", count.into(), MAX_KEYS.into())?;
    let mut regions = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let (Some(region), Some(given), Some(len)) = (fields.u32(), fields.u32(), fields.u64()) else {
            return Err(short);
        };
        if given as usize != paths {
            return Err(WireError::Field {
                what: "paths",
                got: given.into(),
                expected: paths as u64,
            });
        }
        let mut key = || {
            let (address, key, _) = (fields.u64()?, fields.u32()?, fields.u32()?);
            Some(Key { address, key })
        };
        let keys = (0..paths).map(|_| key()).collect::<Option<_>>().ok_or(short)?;
        regions.push(RegionKeys {
            region: RegionKey(region),
            len,
            keys,
        });
    }
    if !fields.0.is_empty() {
        return Err(WireError::Field {
            what: "grant",
            got: input.len() as u64,
            expected: (input.len() - fields.0.len()) as u64,
        });
    }
    Ok(Grant { crc, regions })
}

fn within(what: &'static str, got: u64, limit: u64) -> Result<(), WireError> {
    if got <= limit {
        Ok(())
    } else {
        Err(WireError::TooLarge { what, got, limit })
    }
}

/// Takes fields off the front.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take().map(u8::from_le_bytes)
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
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn end(pairs: usize) -> impl Strategy<Value = End> {
        let pairs = prop::collection::vec(any::<(u32, u32)>(), pairs);
        (any::<(u8, bool, u8, u16, u128)>(), 1u8..=5, pairs).prop_map(|((path, ib, reads, lid, gid), mtu, pairs)| End {
            path,
            link: if ib { Link::InfiniBand } else { Link::Ethernet },
            mtu,
            reads,
            lid,
            gid: Ipv6Addr::from(gid),
            pairs,
        })
    }

    fn ends() -> impl Strategy<Value = Vec<End>> {
        (1..=MAX_PAIRS).prop_flat_map(|pairs| prop::collection::vec(end(pairs), 1..=MAX_ENDS))
    }

    proptest! {
        #[test]
        fn a_hello_waits_for_its_last_byte_and_comes_back_as_it_went(token: [u8; 32], ends in ends()) {
            let mut bytes = Vec::new();
            encode_hello(&mut bytes, &Hello { token: LeaseToken::from_bytes(token), ends: ends.clone() });
            for cut in 0..bytes.len() {
                prop_assert!(decode_hello(&bytes[..cut]).unwrap().is_none());
            }
            let (hello, used) = decode_hello(&bytes).unwrap().unwrap();
            prop_assert_eq!((used, *hello.token.as_bytes(), hello.ends), (bytes.len(), token, ends));
        }

        #[test]
        fn a_grant_comes_back_as_it_went(
            crc: u32,
            (paths, regions) in (0usize..4).prop_flat_map(|paths| {
                let keys = prop::collection::vec(any::<(u64, u32)>(), paths);
                (Just(paths), prop::collection::vec((any::<u32>(), any::<u64>(), keys), 0..8))
            }),
        ) {
            let regions = regions.into_iter().map(|(region, len, keys)| RegionKeys {
                region: RegionKey(region),
                len,
                keys: keys.into_iter().map(|(address, key)| Key { address, key }).collect(),
            });
            let grant = Grant { crc, regions: regions.collect() };
            let mut bytes = Vec::new();
            encode_grant(&mut bytes, &grant);
            prop_assert_eq!(decode_grant(&bytes, paths), Ok(grant));
        }

        /// F19: bytes from anywhere are refused, not followed.
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), pairs in 0usize..20, paths in 0usize..4) {
            let _ = decode_hello(&bytes);
            let _ = decode_ends(&bytes, pairs);
            let _ = decode_grant(&bytes, paths);
        }
    }
}
