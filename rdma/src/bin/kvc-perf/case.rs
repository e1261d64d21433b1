//! What one read is made of, and where its bytes lie on either side. Both ends make the same list from a [`Case`] and the
//! read's number, so that nothing but those two goes over the wire.

use anyhow::{Result, ensure};
use kvc_rdma::{Copy, RegionKey, Run};
use serde::{Deserialize, Serialize};

use crate::layout::Layout;

/// Reads that are made at once, and their runs.
const ROUND: u64 = 64;
/// Runs of one read at most: what the lists of one read may cost in memory, whoever asks for it.
const MOST_RUNS: u64 = 1 << 20;
/// Runs of all reads at once at most.
const MOST_RUNNING: u64 = 1 << 22;
/// Gathered reads at once: each has a connection of its own.
const MOST_GATHERING: u64 = 32;

/// Where the runs of a read lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// Side by side on both ends.
    Contiguous,
    /// All over the pool on both ends, each run read by itself.
    Scattered,
    /// As scattered; the server copies them together, one run is read, the client spreads it out (XFER-5).
    Gathered,
}

/// The bytes of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Shape {
    /// `count` runs of `len` bytes.
    Runs {
        /// Bytes of each.
        len: u64,
        /// How many.
        count: u64,
    },
    /// `tokens` tokens of a KV layout, page by page, buffer by buffer.
    Tokens {
        /// Of which layout.
        layout: Layout,
        /// How many, a multiple of the page.
        tokens: u64,
    },
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// The bytes.
    pub shape: Shape,
    /// Where they lie.
    pub access: Access,
}

impl Case {
    /// Bytes of one read.
    pub fn bytes(&self) -> u64 {
        match self.shape {
            Shape::Runs { len, count } => len * count,
            Shape::Tokens { layout, tokens } => layout.token() * tokens,
        }
    }

    /// Bytes of a run as it lies in the pool.
    pub fn run(&self) -> u64 {
        match (self.shape, self.access) {
            (Shape::Runs { len, .. }, Access::Scattered | Access::Gathered) => len,
            (Shape::Runs { len, count }, Access::Contiguous) => len * count,
            (Shape::Tokens { layout, .. }, Access::Scattered | Access::Gathered) => layout.row() * layout.page,
            (Shape::Tokens { layout, tokens }, Access::Contiguous) => layout.row() * tokens,
        }
    }

    /// For the table.
    pub fn name(&self) -> String {
        match self.shape {
            Shape::Runs { len, count } => format!("{count} x {}", size(len)),
            Shape::Tokens { layout, tokens } => format!("{tokens} tokens of {layout}"),
        }
    }

    /// Runs of one read as they lie in the pool.
    pub fn count(&self) -> u64 {
        match self.shape {
            Shape::Runs { count, .. } => count,
            Shape::Tokens { layout, tokens } => layout.buffers() * (tokens / layout.page),
        }
    }

    /// Refuses what a pool of `pool` bytes cannot hold and what is out of bounds; everything else here relies on it, and
    /// it relies on nothing: a case may come from the other end.
    pub fn check(&self, pool: u64, whose: &str) -> Result<()> {
        let bytes = match self.shape {
            Shape::Runs { len, count } => len.checked_mul(count),
            Shape::Tokens { layout, tokens } => {
                layout.check()?;
                ensure!(
                    tokens > 0 && tokens.is_multiple_of(layout.page),
                    "--tokens is {tokens}: give a multiple of the page, {}",
                    layout.page
                );
                layout.token().checked_mul(tokens)
            }
        };
        // A number that does not exist is more than any pool.
        let bytes = bytes.unwrap_or(u64::MAX);
        ensure!(
            (1..=pool).contains(&bytes),
            "one read is {} MiB and {whose} pool {} MiB: give a larger --pool, or fewer --runs or --tokens",
            bytes.div_ceil(1 << 20),
            pool >> 20
        );
        let runs = self.count();
        ensure!(
            runs <= MOST_RUNS,
            "one read has {runs} runs, {MOST_RUNS} are allowed: give fewer --runs or --tokens"
        );
        Ok(())
    }

    /// Refuses more reads at once than lists of their runs have room.
    pub fn check_depth(&self, depth: u64) -> Result<()> {
        let most = (MOST_RUNNING / self.count().max(1)).clamp(1, 1024);
        let gathered = self.access == Access::Gathered;
        let most = if gathered { most.min(MOST_GATHERING) } else { most };
        ensure!(
            (1..=most).contains(&depth),
            "--depth is {depth}: give 1 to {most}{}, or smaller reads",
            if gathered { " for gathered reads" } else { "" }
        );
        Ok(())
    }

    /// The runs of read `number` in `[base, base + pool)` of a pool, in order. `salt` sets the two sides apart, so that
    /// neighbours on one are none on the other.
    pub fn runs(&self, number: u64, region: RegionKey, base: u64, pool: u64, salt: u64) -> Vec<Run> {
        let run = |offset, len| Run {
            region,
            offset: base + offset,
            len,
        };
        match self.shape {
            Shape::Runs { len, count } => {
                let places = pool / len;
                let at = Places::new(places, count, number, self.access, salt);
                (0..count).map(|index| run(at.place(index) * len, len)).collect()
            }
            Shape::Tokens { layout, tokens } => {
                let (row, page) = (layout.row(), layout.page);
                let pages = pool / layout.token() / page;
                let buffer = pages * page * row;
                let count = tokens / page;
                let at = Places::new(pages, count, number, self.access, salt);
                let one = |buffer_at: u64, index| run(buffer_at * buffer + at.place(index) * page * row, page * row);
                (0..layout.buffers())
                    .flat_map(|buffer_at| (0..count).map(move |index| (buffer_at, index)))
                    .map(|(buffer_at, index)| one(buffer_at, index))
                    .collect()
            }
        }
    }

    /// The reads that a measurement goes through again and again, made before it begins: all that fit into the smaller
    /// pool, at most [`ROUND`], of at most [`MOST_RUNS`] runs together.
    pub fn round(&self, from: Pool, to: Pool) -> Vec<Vec<Copy>> {
        let most = (MOST_RUNS / self.count().max(1)).clamp(1, ROUND);
        let reads = (from.len.min(to.len) / self.bytes()).clamp(1, most);
        (0..reads).map(|number| self.copies(number, from, to)).collect()
    }

    /// The copies of read `number`, not gathered.
    pub fn copies(&self, number: u64, from: Pool, to: Pool) -> Vec<Copy> {
        let remote = self.runs(number, from.region, from.base, from.len, 1);
        let local = self.runs(number, to.region, to.base, to.len, 2);
        remote
            .into_iter()
            .zip(local)
            .map(|(remote, local)| Copy { remote, local })
            .collect()
    }
}

/// A part of a region that reads go from or to.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    /// Which region.
    pub region: RegionKey,
    /// Its first byte.
    pub base: u64,
    /// Its bytes.
    pub len: u64,
}

/// Places of equal size: a read takes `count` of them, the next read the next ones.
struct Places {
    all: u64,
    first: u64,
    /// Shares no factor with `all`, so that every place is visited before one is again; 1 is side by side.
    stride: u64,
}

impl Places {
    fn new(all: u64, count: u64, number: u64, access: Access, salt: u64) -> Self {
        let stride = match access {
            Access::Contiguous => 1,
            // The golden section, and for the other side its half, keep neighbours of a read apart.
            _ => coprime(all * 618 / 1000 / salt, all),
        };
        let reads = (all / count).max(1);
        let first = number % reads * count;
        Places { all, first, stride }
    }

    fn place(&self, index: u64) -> u64 {
        ((u128::from(self.first + index) * u128::from(self.stride)) % u128::from(self.all.max(1))) as u64
    }
}

/// The first number from `from` that shares no factor with `all`.
fn coprime(from: u64, all: u64) -> u64 {
    let shares = |mut a: u64, mut b: u64| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a > 1
    };
    (from.max(1)..).find(|number| !shares(*number, all)).unwrap_or(1)
}

/// As people write it: 64 KiB.
pub fn size(bytes: u64) -> String {
    match bytes {
        b if b > 0 && b % (1 << 20) == 0 => format!("{} MiB", b >> 20),
        b if b > 0 && b % (1 << 10) == 0 => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

/// `64k`, `1m`, `4096`.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    let lower = lower.trim_end_matches("ib").trim_end_matches('b');
    let (digits, unit) = match lower.as_bytes().last() {
        Some(b'k') => (&lower[..lower.len() - 1], 10),
        Some(b'm') => (&lower[..lower.len() - 1], 20),
        Some(b'g') => (&lower[..lower.len() - 1], 30),
        _ => (lower, 0),
    };
    let number = digits.trim().parse::<u64>().ok().filter(|number| *number > 0);
    number
        .and_then(|number| number.checked_mul(1 << unit))
        .filter(|bytes| *bytes <= 1 << 40)
        .ok_or(format!("{text:?} is no size: write 4096, 64k or 1m"))
}

/// More than 0 and at most an hour.
pub fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds| *seconds > 0.0 && *seconds <= 3600.0);
    seconds.ok_or("give more than 0 and at most 3600".into())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn pool(len: u64) -> Pool {
        Pool {
            region: RegionKey(0),
            base: 0,
            len,
        }
    }

    fn runs(access: Access) -> Case {
        Case {
            shape: Shape::Runs { len: 64, count: 8 },
            access,
        }
    }

    #[test]
    fn scattered_runs_are_no_neighbours_and_no_place_is_used_twice() {
        for places in [64, 100, 257] {
            let mut seen = HashSet::new();
            for number in 0..places / 8 {
                let copies = runs(Access::Scattered).copies(number, pool(places * 64), pool(places * 64));
                assert!(copies.iter().all(|copy| seen.insert(copy.remote.offset)));
                assert!(copies.iter().all(|copy| copy.remote.offset + 64 <= places * 64));
                let touching = |pair: &[Copy]| pair[0].remote.offset + 64 == pair[1].remote.offset;
                assert!(!copies.windows(2).any(touching), "{places}");
            }
        }
    }

    #[test]
    fn contiguous_runs_follow_each_other() {
        let copies = runs(Access::Contiguous).copies(1, pool(1 << 20), pool(1 << 20));
        assert_eq!(copies[0].remote.offset, 512);
        assert!(
            copies
                .windows(2)
                .all(|pair| pair[0].local.offset + 64 == pair[1].local.offset)
        );
    }

    #[test]
    fn tokens_are_a_run_per_page_and_buffer() {
        let layout: Layout = "sglang:layers=2,heads=1,dim=8,dtype=bf16,page=4".parse().unwrap();
        let case = Case {
            shape: Shape::Tokens { layout, tokens: 16 },
            access: Access::Scattered,
        };
        let (len, copies) = (64 << 10, case.copies(3, pool(64 << 10), pool(64 << 10)));
        assert_eq!((copies.len(), copies[0].remote.len), (4 * 4, 64));
        assert_eq!(copies.iter().map(|copy| copy.local.len).sum::<u64>(), case.bytes());
        assert!(copies.iter().all(|copy| copy.local.end().is_some_and(|end| end <= len)));
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(
            ["4096", "64k", "1MiB", "2g"].map(parse_size),
            [Ok(4096), Ok(65_536), Ok(1 << 20), Ok(2 << 30)]
        );
        assert!(parse_size("big").unwrap_err().contains("write 4096, 64k or 1m"));
        assert!(parse_size("0").is_err());
        assert_eq!((size(65_536), size(100)), ("64 KiB".into(), "100 B".into()));
    }

    /// From the other end's line: none of them may be divided by, multiplied or allocated for.
    #[test]
    fn what_no_read_can_be_is_refused_before_it_is_used() {
        let tokens = |layout: &str, tokens: u64| {
            let text = format!(
                r#"{{"shape": {{"Tokens": {{"layout": {layout}, "tokens": {tokens}}}}}, "access": "scattered"}}"#
            );
            serde_json::from_str::<Case>(&text).unwrap()
        };
        let runs = |len, count| Case {
            shape: Shape::Runs { len, count },
            access: Access::Scattered,
        };
        let most = u64::MAX;
        let wrong = [
            runs(0, 4),
            runs(4, 0),
            runs(most, 2),
            runs(most, most),
            runs(1, MOST_RUNS + 1),
            tokens(r#"{"layers": 1, "heads": 1, "dim": 1, "element": 2, "page": 0}"#, 1),
            tokens(r#"{"layers": 0, "heads": 1, "dim": 1, "element": 2, "page": 1}"#, 1),
            tokens(
                r#"{"layers": 18446744073709551615, "heads": 9, "dim": 9, "element": 2, "page": 1}"#,
                1,
            ),
            tokens(r#"{"layers": 1, "heads": 1, "dim": 1, "element": 2, "page": 4}"#, 6),
            tokens(r#"{"layers": 1, "heads": 1, "dim": 1, "element": 2, "page": 1}"#, most),
            tokens(
                r#"{"layers": 65536, "heads": 1, "dim": 1, "element": 1, "page": 1}"#,
                16,
            ),
        ];
        for case in wrong {
            assert!(case.check(1 << 40, "the server's").is_err(), "{case:?}");
        }
        let ok = runs(1 << 20, 4);
        assert!(ok.check(4 << 20, "the server's").is_ok());
        assert!(ok.check_depth(0).is_err() && ok.check_depth(1024).is_ok() && ok.check_depth(1025).is_err());
        let many = runs(1, MOST_RUNS);
        assert!(many.check_depth(4).is_ok() && many.check_depth(5).is_err());
    }

    /// Small numbers, and the largest.
    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![20 => 1u64..5, 1 => 0u64..64, 1 => Just(1 << 20), 1 => Just(u64::MAX), 1 => any::<u64>()]
    }

    fn shape() -> impl Strategy<Value = Shape> {
        let runs = (number(), number()).prop_map(|(len, count)| Shape::Runs { len, count });
        let fields = (number(), number(), number(), number(), number(), number());
        let tokens = fields.prop_map(|(layers, heads, dim, element, page, tokens)| Shape::Tokens {
            layout: Layout {
                layers,
                heads,
                dim,
                element,
                page,
            },
            tokens,
        });
        prop_oneof![runs, tokens]
    }

    proptest! {
        /// XFER-10: a case may come from the other end. What passes the check is copied inside both pools, and costs no
        /// more than its bounds.
        #[test]
        fn whatever_passes_the_check_lies_inside_both_pools(shape in shape(), access in 0..3, number in number(), (from, to) in (1u64..1 << 22, 1u64..1 << 22)) {
            let access = [Access::Contiguous, Access::Scattered, Access::Gathered][access as usize];
            let case = Case { shape, access };
            if case.check(from, "the server's").and(case.check(to, "the client's")).is_ok() {
                let copies = case.copies(number, pool(from), pool(to));
                prop_assert_eq!(copies.len() as u64, case.count());
                prop_assert!(copies.iter().all(|copy| copy.remote.end().is_some_and(|end| end <= from)));
                prop_assert!(copies.iter().all(|copy| copy.local.end().is_some_and(|end| end <= to)));
                prop_assert_eq!(copies.iter().map(|copy| copy.remote.len).sum::<u64>(), case.bytes());
                let all: usize = case.round(pool(from), pool(to)).iter().map(Vec::len).sum();
                prop_assert!(all as u64 <= MOST_RUNS);
                let _ = case.check_depth(number);
            }
        }
    }

    #[test]
    fn a_read_that_does_not_fit_its_pool_names_the_remedy() {
        let refused = runs(Access::Scattered)
            .check(100, "the server's")
            .unwrap_err()
            .to_string();
        assert!(refused.contains("larger --pool"), "{refused}");
    }
}
