//! Cuts a read into chunks: neighbours become one run, no chunk is above its limits (XFER-5). Pure; every mover's
//! importer calls it.

use crate::{
    error::MoverError,
    mover::Copy,
    region::{Regions, Run},
};

/// How large a chunk may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkLimits {
    /// Payload bytes, at least 1.
    pub(crate) bytes: u64,
    /// Runs on either side, at least 1.
    pub(crate) runs: usize,
}

/// One request's worth: the remote bytes in order, and where they go in the same order. Each side is merged by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) remote: Vec<Run>,
    pub(crate) local: Vec<Run>,
    pub(crate) len: u64,
}

impl Chunk {
    fn has_room(&self, piece: &Copy, limits: &ChunkLimits) -> bool {
        let fits = |runs: &[Run], run: &Run| runs.len() < limits.runs || touches(runs, run);
        self.len < limits.bytes && fits(&self.remote, &piece.remote) && fits(&self.local, &piece.local)
    }

    fn push(&mut self, piece: &Copy) {
        append(&mut self.remote, piece.remote);
        append(&mut self.local, piece.local);
        self.len += piece.remote.len;
    }
}

/// The bytes of `copies`, if each is well-formed and lands in registered memory.
pub(crate) fn check(copies: &[Copy], regions: &Regions) -> Result<u64, MoverError> {
    let mut total = 0u64;
    for Copy { remote, local } in copies {
        if remote.len != local.len {
            return Err(MoverError::LengthMismatch {
                remote: remote.len,
                local: local.len,
            });
        }
        if remote.end().is_none() {
            return Err(MoverError::TooLarge {
                what: "remote offset",
                got: remote.offset,
                limit: u64::MAX - remote.len,
            });
        }
        total = total.saturating_add(remote.len);
    }
    regions.check(copies.iter().map(|copy| &copy.local))?;
    Ok(total)
}

/// The chunks of `copies`, which were checked, in order. Empty copies vanish.
pub(crate) fn chunks(copies: &[Copy], limits: &ChunkLimits) -> Vec<Chunk> {
    let mut done = Vec::new();
    let mut chunk = Chunk::default();
    for copy in copies {
        let mut rest = *copy;
        while rest.remote.len > 0 {
            if !chunk.has_room(&rest, limits) {
                done.push(std::mem::take(&mut chunk));
            }
            let len = rest.remote.len.min(limits.bytes - chunk.len);
            chunk.push(&Copy {
                remote: Run { len, ..rest.remote },
                local: Run { len, ..rest.local },
            });
            rest = Copy {
                remote: skip(rest.remote, len),
                local: skip(rest.local, len),
            };
        }
    }
    if chunk.len > 0 {
        done.push(chunk);
    }
    done
}

fn touches(runs: &[Run], run: &Run) -> bool {
    runs.last()
        .is_some_and(|last| last.region == run.region && last.end() == Some(run.offset))
}

fn append(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.region == run.region && last.end() == Some(run.offset) => last.len += run.len,
        _ => runs.push(run),
    }
}

fn skip(run: Run, len: u64) -> Run {
    Run {
        offset: run.offset + len,
        len: run.len - len,
        ..run
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::region::RegionKey;

    fn copy(remote: u64, local: u64, len: u64) -> Copy {
        Copy {
            remote: Run {
                region: RegionKey(1),
                offset: remote,
                len,
            },
            local: Run {
                region: RegionKey(2),
                offset: local,
                len,
            },
        }
    }

    #[test]
    fn consecutive_pages_become_one_run() {
        let pages: Vec<Copy> = (0..16).map(|page| copy(page * 64, 4096 + page * 64, 64)).collect();
        let plan = chunks(
            &pages,
            &ChunkLimits {
                bytes: 1 << 20,
                runs: 4,
            },
        );
        assert_eq!(plan.len(), 1);
        assert_eq!(
            plan[0].remote,
            [Run {
                region: RegionKey(1),
                offset: 0,
                len: 1024
            }]
        );
        assert_eq!(
            plan[0].local,
            [Run {
                region: RegionKey(2),
                offset: 4096,
                len: 1024
            }]
        );
    }

    #[test]
    fn a_side_that_is_consecutive_is_merged_though_the_other_is_scattered() {
        let plan = chunks(
            &[copy(0, 1000, 10), copy(10, 500, 10)],
            &ChunkLimits {
                bytes: 1 << 20,
                runs: 4,
            },
        );
        assert_eq!((plan.len(), plan[0].remote.len(), plan[0].local.len()), (1, 1, 2));
    }

    #[test]
    fn empty_copies_vanish() {
        assert_eq!(chunks(&[copy(5, 6, 0)], &ChunkLimits { bytes: 8, runs: 1 }), []);
    }

    fn bytes(runs: &[Run]) -> Vec<(RegionKey, u64)> {
        runs.iter()
            .flat_map(|run| (run.offset..run.offset + run.len).map(|byte| (run.region, byte)))
            .collect()
    }

    proptest! {
        /// XFER-5 against the naive model, a list of byte pairs: same bytes, same order, within limits, fully merged.
        #[test]
        fn a_plan_moves_the_same_bytes_within_limits(
            copies in prop::collection::vec((0u32..2, 0u64..100, 0u32..2, 0u64..100, 0u64..40), 0..20),
            limit in 1u64..50,
            runs in 1usize..5,
        ) {
            let copies: Vec<Copy> = copies.into_iter().map(|(from, remote, to, local, len)| Copy {
                remote: Run { region: RegionKey(from), offset: remote, len },
                local: Run { region: RegionKey(to), offset: local, len },
            }).collect();
            let remote: Vec<Run> = copies.iter().map(|copy| copy.remote).collect();
            let local: Vec<Run> = copies.iter().map(|copy| copy.local).collect();
            let plan = chunks(&copies, &ChunkLimits { bytes: limit, runs });
            prop_assert_eq!(bytes(&remote), plan.iter().flat_map(|c| bytes(&c.remote)).collect::<Vec<_>>());
            prop_assert_eq!(bytes(&local), plan.iter().flat_map(|c| bytes(&c.local)).collect::<Vec<_>>());
            for chunk in &plan {
                prop_assert!(chunk.len > 0 && chunk.len <= limit);
                for side in [&chunk.remote, &chunk.local] {
                    prop_assert_eq!(side.iter().map(|run| run.len).sum::<u64>(), chunk.len);
                    prop_assert!(side.len() <= runs && side.iter().all(|run| run.len > 0));
                    prop_assert!(side.windows(2).all(|pair| !touches(&pair[..1], &pair[1])));
                }
            }
        }
    }
}
