//! [`Plan`]: which bytes to fetch for a range of tokens, in as few runs as the slots allow (XFER-5). The transfer engine
//! makes one per chunk.

use kvc_proto::worker::Slot;

/// Consecutive slots on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRun {
    /// First slot at the exporter.
    pub src: Slot,
    /// First slot here.
    pub dst: Slot,
    /// How many.
    pub len: u32,
}

/// Bytes of one buffer to fetch; offsets count from the buffer's base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteCopy {
    /// Which buffer, in layout order.
    pub buffer: usize,
    /// Offset at the exporter.
    pub src: u64,
    /// Offset here.
    pub dst: u64,
    /// Bytes.
    pub len: u64,
}

/// The runs that bring the KV of some tokens from a peer's slots into our own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    runs: Vec<SlotRun>,
}

impl Plan {
    /// Token `i` lies in `src[i]` at the peer and goes to `dst[i]` here. Slots that are consecutive on both sides become
    /// one run. `None` if the two differ in length.
    pub fn new(src: &[Slot], dst: &[Slot]) -> Option<Self> {
        if src.len() != dst.len() {
            return None;
        }
        let mut runs: Vec<SlotRun> = Vec::new();
        for (&src, &dst) in src.iter().zip(dst) {
            match runs.last_mut() {
                Some(run) if follows(run, src, dst) => run.len += 1,
                _ => runs.push(SlotRun { src, dst, len: 1 }),
            }
        }
        Some(Self { runs })
    }

    /// The runs of slots, the same for every buffer.
    pub fn runs(&self) -> &[SlotRun] {
        &self.runs
    }

    /// The runs of bytes over buffers of `row` bytes per slot: buffer by buffer, ascending as the tokens do.
    pub fn copies<'a>(&'a self, rows: &'a [u32]) -> impl Iterator<Item = ByteCopy> + 'a {
        rows.iter().enumerate().flat_map(move |(buffer, &row)| {
            let row = u64::from(row);
            self.runs.iter().map(move |run| ByteCopy {
                buffer,
                src: u64::from(run.src) * row,
                dst: u64::from(run.dst) * row,
                len: u64::from(run.len) * row,
            })
        })
    }
}

fn follows(run: &SlotRun, src: Slot, dst: Slot) -> bool {
    run.src.checked_add(run.len) == Some(src) && run.dst.checked_add(run.len) == Some(dst)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn consecutive_slots_become_one_run() {
        let plan = Plan::new(&[4, 5, 6, 9], &[0, 1, 2, 3]).unwrap();
        assert_eq!(
            plan.runs(),
            [SlotRun { src: 4, dst: 0, len: 3 }, SlotRun { src: 9, dst: 3, len: 1 }]
        );
        let bytes: Vec<_> = plan.copies(&[8, 8]).collect();
        assert_eq!(
            bytes[0],
            ByteCopy {
                buffer: 0,
                src: 32,
                dst: 0,
                len: 24
            }
        );
        assert_eq!(
            bytes[3],
            ByteCopy {
                buffer: 1,
                src: 72,
                dst: 24,
                len: 8
            }
        );
    }

    #[test]
    fn unequal_lengths_are_no_plan() {
        assert_eq!(Plan::new(&[1], &[]), None);
    }

    proptest! {
        // XFER-5: a plan moves exactly what copying token by token moves, in no more runs.
        #[test]
        fn a_plan_moves_what_a_copy_per_token_moves(
            src in proptest::collection::vec(0u32..40, 0..60),
            start in 0u32..10,
            holes in proptest::collection::vec(0u32..3, 60),
        ) {
            let (row, slots) = (3usize, 200usize);
            let mut next = start;
            let dst: Vec<u32> = holes.iter().take(src.len()).map(|h| { next += 1 + h / 2; next }).collect();
            let theirs: Vec<u8> = (0..slots * row).map(|i| (i * 7 + i / row) as u8).collect();
            let (mut naive, mut planned) = (vec![0u8; slots * row], vec![0u8; slots * row]);
            for (&s, &d) in src.iter().zip(&dst) {
                let (s, d) = (s as usize * row, d as usize * row);
                naive[d..d + row].copy_from_slice(&theirs[s..s + row]);
            }
            let plan = Plan::new(&src, &dst).unwrap();
            prop_assert!(plan.runs().len() <= src.len());
            for c in plan.copies(&[row as u32]) {
                let (s, d, n) = (c.src as usize, c.dst as usize, c.len as usize);
                planned[d..d + n].copy_from_slice(&theirs[s..s + n]);
            }
            prop_assert_eq!(naive, planned);
        }
    }
}
