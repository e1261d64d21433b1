//! A chunk on its way: asked for, granted, cut into READs, complete. The importer's thread owns all of them.

use super::work::PIECES;
use crate::{plan::Chunk, region::Run};

/// A chunk of a read.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) read: u64,
    pub(super) line: usize,
    /// Its first byte's place in the read.
    pub(super) base: u64,
    pub(super) chunk: Chunk,
    /// As granted.
    pub(super) crc: u32,
    pub(super) cut: Cut,
    /// Batches that are not complete.
    pub(super) outstanding: u32,
    /// A batch of it failed: once none is outstanding it is read again, or its read ends.
    pub(super) failed: bool,
    pub(super) tries: u8,
}

/// How far a chunk is cut into READs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cut {
    remote: Place,
    local: Place,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Place {
    run: usize,
    within: u64,
}

/// One READ: consecutive remote bytes and the pieces they fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) remote: Run,
    local: [Run; PIECES],
    pieces: usize,
}

impl Request {
    pub(super) fn local(&self) -> &[Run] {
        &self.local[..self.pieces]
    }
}

impl Cut {
    pub(super) fn is_done(&self, chunk: &Chunk) -> bool {
        self.remote.run >= chunk.remote.len()
    }

    /// The next READ: as much of a remote run as `pieces` local runs take, at most [`PIECES`] and at least one.
    pub(super) fn next(&mut self, chunk: &Chunk, pieces: usize) -> Option<Request> {
        let most = pieces.clamp(1, PIECES);
        let whole = chunk.remote.get(self.remote.run)?;
        let start = self.remote.within;
        let mut request = Request {
            remote: Run {
                offset: whole.offset + start,
                len: 0,
                ..*whole
            },
            local: [*whole; PIECES],
            pieces: 0,
        };
        while request.pieces < most && self.remote.within < whole.len {
            let to = chunk.local.get(self.local.run)?;
            let len = (whole.len - self.remote.within).min(to.len - self.local.within);
            request.local[request.pieces] = Run {
                offset: to.offset + self.local.within,
                len,
                ..*to
            };
            request.pieces += 1;
            request.remote.len += len;
            self.remote.within += len;
            self.local.step(len, to.len);
        }
        self.remote.step(0, whole.len);
        Some(request)
    }
}

impl Place {
    fn step(&mut self, by: u64, len: u64) {
        self.within += by;
        if self.within >= len {
            *self = Place {
                run: self.run + 1,
                within: 0,
            };
        }
    }
}

/// Jobs by number.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    all: Vec<Option<Job>>,
    free: Vec<usize>,
}

impl Jobs {
    pub(super) fn add(&mut self, job: Job) -> usize {
        match self.free.pop() {
            Some(at) => {
                self.all[at] = Some(job);
                at
            }
            None => {
                self.all.push(Some(job));
                self.all.len() - 1
            }
        }
    }

    pub(super) fn one(&mut self, at: usize) -> Option<&mut Job> {
        self.all.get_mut(at)?.as_mut()
    }

    pub(super) fn remove(&mut self, at: usize) -> Option<Job> {
        let job = self.all.get_mut(at)?.take();
        if job.is_some() {
            self.free.push(at);
        }
        job
    }

    pub(super) fn of_line(&self, line: usize) -> Vec<usize> {
        let of_line = |at: &usize| self.all[*at].as_ref().is_some_and(|job| job.line == line);
        (0..self.all.len()).filter(of_line).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        mover::Copy,
        plan::{ChunkLimits, chunks},
        region::RegionKey,
    };

    fn bytes(runs: &[Run]) -> Vec<(RegionKey, u64)> {
        runs.iter()
            .flat_map(|run| (run.offset..run.offset + run.len).map(|byte| (run.region, byte)))
            .collect()
    }

    /// XFER-5: work requests per transfer = runs, where the landing is consecutive too.
    #[test]
    fn a_run_is_one_request() {
        let run = |offset, len| Run {
            region: RegionKey(1),
            offset,
            len,
        };
        let chunk = Chunk {
            remote: vec![run(0, 100), run(500, 50)],
            local: vec![run(7, 150)],
            len: 150,
        };
        let mut cut = Cut::default();
        assert_eq!(
            cut.next(&chunk, PIECES).map(|r| (r.remote, r.local().to_vec())),
            Some((run(0, 100), vec![run(7, 100)]))
        );
        assert_eq!(
            cut.next(&chunk, PIECES).map(|r| (r.remote, r.local().to_vec())),
            Some((run(500, 50), vec![run(107, 50)]))
        );
        assert!(cut.is_done(&chunk) && cut.next(&chunk, PIECES).is_none());
    }

    proptest! {
        /// Against the naive model, a list of byte pairs.
        #[test]
        fn requests_move_the_same_bytes(
            copies in prop::collection::vec((0u32..2, 0u64..100, 0u32..2, 0u64..100, 0u64..40), 0..20),
            most in 1..=PIECES,
        ) {
            let copies: Vec<Copy> = copies.into_iter().map(|(from, remote, to, local, len)| Copy {
                remote: Run { region: RegionKey(from), offset: remote, len },
                local: Run { region: RegionKey(to), offset: local, len },
            }).collect();
            for chunk in chunks(&copies, &ChunkLimits { bytes: 1 << 20, runs: 64 }) {
                let (mut cut, mut remote, mut local) = (Cut::default(), Vec::new(), Vec::new());
                while let Some(request) = cut.next(&chunk, most) {
                    let pieces = request.local();
                    prop_assert!(!pieces.is_empty() && pieces.len() <= most && request.remote.len > 0);
                    prop_assert_eq!(request.remote.len, pieces.iter().map(|run| run.len).sum::<u64>());
                    remote.extend(bytes(&[request.remote]));
                    local.extend(bytes(pieces));
                }
                prop_assert!(cut.is_done(&chunk));
                prop_assert_eq!(remote, bytes(&chunk.remote));
                prop_assert_eq!(local, bytes(&chunk.local));
            }
        }
    }
}
