//! Tables and the quarantine against the naive version: one list of slots, one set of readers per page.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::{Quarantine, Table, ceil, floor, pages};
use crate::{id::LeaseId, worker::api::Slot};

#[derive(Clone, Debug)]
enum Op {
    Extend(u32),
    Cut(u32),
    Replace(u32),
    Split(u32),
    Lease { pages: u32, lease: u64 },
    Over(u64),
    Free,
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (1u32..40).prop_map(Op::Extend),
        2 => (0u32..80).prop_map(Op::Cut),
        2 => (0u32..40).prop_map(Op::Replace),
        1 => (0u32..20).prop_map(Op::Split),
        2 => (1u32..10, 1u64..4).prop_map(|(pages, lease)| Op::Lease { pages, lease }),
        2 => (1u64..4).prop_map(Op::Over),
        1 => Just(Op::Free),
    ]
}

/// The engine's row: slots of tokens `[0, n)`, whole pages in token order.
fn row(owned: &[u32], page: u32, n: u32) -> Vec<i32> {
    (0..n)
        .map(|t| (owned[(t / page) as usize] * page + t % page) as i32)
        .collect()
}

proptest! {
    /// OWN-4: a page is in the table, in the quarantine while a lease covers it, or free; never in two places.
    #[test]
    fn tables_and_quarantine_agree_with_the_naive_model(page in prop::sample::select(vec![1u32, 4, 16]), ops in prop::collection::vec(ops(), 1..60)) {
        let mut table = Table::new(page);
        let mut quarantine = Quarantine::default();
        // The model: pages in token order, tokens used, leases per page wherever it is, pages outside.
        let (mut owned, mut tokens, mut next) = (Vec::<u32>::new(), 0u32, 1u32);
        let mut readers = BTreeMap::<u32, BTreeSet<u64>>::new();
        let mut outside = BTreeSet::<u32>::new();
        let mut free = BTreeSet::<u32>::new();
        for op in ops {
            match op {
                Op::Extend(more) => {
                    tokens += more;
                    while (owned.len() as u32) < pages(tokens, page) {
                        owned.push(next);
                        next += 1;
                    }
                    table.extend_from_row(tokens, &row(&owned, page, tokens));
                }
                Op::Cut(to) => {
                    tokens = tokens.min(to);
                    let mut freed = Vec::new();
                    table.cut(pages(tokens, page), &mut freed);
                    let gone = owned.split_off(pages(tokens, page) as usize);
                    prop_assert_eq!(freed, gone.iter().map(|p| p * page).collect::<Vec<Slot>>());
                    for p in gone {
                        // A cut revokes first: no reader is left.
                        let _ = readers.remove(&p);
                        free.insert(p);
                    }
                }
                Op::Replace(n) => {
                    let count = floor(n.min(tokens), page) / page;
                    let mut new = owned.clone();
                    for p in new.iter_mut().take(count as usize).step_by(2) {
                        *p = next;
                        next += 1;
                    }
                    let slots = row(&new, page, count * page);
                    let mut replaced = Vec::new();
                    table.replace_from_row(count, &slots, |index, old| replaced.push((index, old)));
                    let want: Vec<_> = (0u32..).zip(owned.iter().zip(&new)).filter(|(_, (a, b))| a != b).map(|(i, (a, _))| (i, *a)).collect();
                    prop_assert_eq!(&replaced, &want);
                    owned = new;
                    for (_, old) in replaced {
                        let leases: Vec<_> = readers.get(&old).into_iter().flatten().map(|l| LeaseId(*l)).collect();
                        quarantine.retire(old * page, leases);
                        outside.insert(old);
                    }
                }
                Op::Split(at) => {
                    let rest = table.split_off(at);
                    table.append(&rest);
                }
                Op::Lease { pages, lease } => owned.iter().take(pages as usize).for_each(|p| {
                    readers.entry(*p).or_default().insert(lease);
                }),
                Op::Over(lease) => {
                    quarantine.lease_over(LeaseId(lease));
                    readers.values_mut().for_each(|l| {
                        l.remove(&lease);
                    });
                }
                Op::Free => {
                    for slot in quarantine.take_loose() {
                        let p = slot / page;
                        prop_assert!(readers.get(&p).is_none_or(BTreeSet::is_empty), "freed under a reader");
                        prop_assert!(outside.remove(&p));
                        prop_assert!(free.insert(p), "freed twice");
                    }
                    prop_assert!(outside.iter().all(|p| !readers[p].is_empty()), "everything that could go went");
                }
            }
            prop_assert_eq!(table.pages(), &owned[..]);
            let slots: Vec<i64> = row(&owned, page, tokens).into_iter().map(i64::from).collect();
            let mut out = vec![0; slots.len()];
            table.slots_into(&mut out);
            prop_assert_eq!(&out, &slots);
            let from = tokens / 3;
            prop_assert_eq!(table.slots(from, tokens), slots[from as usize..].iter().map(|s| *s as Slot).collect::<Vec<_>>());
            prop_assert_eq!(quarantine.slots().map(|s| s / page).collect::<BTreeSet<_>>(), outside.clone());
            prop_assert_eq!(quarantine.pages() as usize, outside.len());
            prop_assert!(owned.iter().all(|p| !outside.contains(p) && !free.contains(p)));
        }
    }

    #[test]
    fn rounding_is_to_pages(tokens in 0u32..10_000, page in 1u32..100) {
        prop_assert_eq!(ceil(tokens, page), pages(tokens, page) * page);
        prop_assert!(floor(tokens, page) <= tokens && tokens <= ceil(tokens, page));
        prop_assert!(ceil(tokens, page) - floor(tokens, page) <= page);
    }

    /// Memory: the table never keeps more than an eighth beside what it holds (and a little).
    #[test]
    fn tables_grow_in_small_steps(steps in prop::collection::vec(1u32..300, 1..60)) {
        let mut table = Table::new(1);
        let (mut tokens, row) = (0, (0..20_000).collect::<Vec<i32>>());
        for step in steps {
            tokens += step;
            table.extend_from_row(tokens, &row);
            prop_assert!(table.heap_bytes() <= (tokens + tokens / 8 + 300) as usize * 4);
        }
    }
}

#[test]
fn a_row_that_is_too_short_or_names_no_slot_extends_as_far_as_it_goes() {
    let mut table = Table::new(4);
    table.extend_from_row(12, &[4, 5, 6, 7, -1, -1, -1, -1, 8]);
    assert_eq!(table.pages(), [1]);
    table.extend_from_row(100, &[4, 5, 6, 7, 20]);
    assert_eq!(table.pages(), [1, 5]);
}
