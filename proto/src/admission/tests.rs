//! The ledger against its naive recomputation, and INV-1.

use std::time::Duration;

use proptest::prelude::*;

use super::{Charge, Ledger, Question, decide};
use crate::{
    wire::admit::Mode,
    worker::api::{CapacityRule, WorkerConfig},
};

fn config(page_tokens: u32, rule: CapacityRule) -> WorkerConfig {
    WorkerConfig {
        capacity: 1000,
        page_tokens,
        rho_permille: 950,
        max_uncached_tokens: 200,
        rule,
        clip: 100,
        reservation: Duration::from_secs(30),
        evict_idle: true,
        session_cap: 1000,
        lease: Duration::from_secs(5),
        lease_max: Duration::from_secs(60),
        sync: true,
        sync_imports: 2,
        sync_deadline: Duration::from_secs(60),
        handover_deadline: Duration::from_secs(2),
        handover_hold: Duration::from_millis(20),
        remembered: 10,
    }
}

#[derive(Clone, Debug)]
enum Op {
    Poll {
        free: u32,
        tree: u32,
    },
    Ask {
        resident: Option<u32>,
        input: u32,
        append: u32,
        growth: u32,
        via: bool,
        session: usize,
    },
    Allocate {
        pick: usize,
        running: u32,
        landed: u32,
    },
    Finish {
        pick: usize,
        own: u32,
    },
    Reclaim {
        own: u32,
    },
}

fn ops() -> impl Strategy<Value = Op> {
    let p = any::<prop::sample::Index>;
    prop_oneof![
        (0u32..1000, 0u32..300).prop_map(|(free, tree)| Op::Poll { free, tree }),
        (
            prop::option::of(1u32..400),
            1u32..500,
            1u32..300,
            0u32..100,
            any::<bool>(),
            0usize..4
        )
            .prop_map(|(resident, input, append, growth, via, session)| Op::Ask {
                resident,
                input,
                append,
                growth,
                via,
                session
            }),
        (p(), 0u32..400, 0u32..300).prop_map(|(pick, running, landed)| Op::Allocate {
            pick: pick.index(1000),
            running,
            landed
        }),
        (p(), 0u32..100).prop_map(|(pick, own)| Op::Finish {
            pick: pick.index(1000),
            own
        }),
        (0u32..200).prop_map(|own| Op::Reclaim { own }),
    ]
}

proptest! {
    /// ADM-7: used is what a sum over everything says. INV-1: no decision takes it above ρ·K_d.
    #[test]
    fn the_ledger_is_the_sum_and_no_decision_exceeds_the_limit(
        page in prop::sample::select(vec![1u32, 16]), paper: bool, ops in prop::collection::vec(ops(), 1..80),
    ) {
        let config = config(page, if paper { CapacityRule::Paper } else { CapacityRule::Growth });
        let mut ledger = Ledger::new(config.capacity, config.rho_permille);
        // The naive side: every number kept apart, summed when asked.
        let (mut base, mut charges, mut idle) = (0i64, Vec::<Charge>::new(), [0u32; 4]);
        for op in ops {
            match op {
                Op::Poll { free, tree } => {
                    ledger.snapshot(free, tree);
                    base = (1000 - i64::from(free) - i64::from(tree)).max(0);
                }
                Op::Ask { resident, input, append, growth, via, session } => {
                    let unreclaimed = if resident.is_some() { idle[session] } else { 0 };
                    let question = Question { resident, unreclaimed, input, append: append.min(input), growth, first: false, via_prefill: via };
                    if let Ok(verdict) = decide(question, &ledger, &config) {
                        if resident.is_some() {
                            ledger.reclaim(idle[session], 0);
                            idle[session] = 0;
                        }
                        let charge = Charge { reserved: verdict.need, ..Charge::default() };
                        ledger.open(charge);
                        charges.push(charge);
                        prop_assert!(ledger.used() <= ledger.limit(), "INV-1");
                        prop_assert!(verdict.mode == Mode::Direct || via || resident.is_none());
                        prop_assert_eq!(verdict.need % page, 0);
                    }
                }
                Op::Allocate { pick, running, landed } if !charges.is_empty() => {
                    let at = pick % charges.len();
                    let mut charge = charges[at];
                    ledger.change(&mut charge, Charge { running, landed, ..charges[at] });
                    charges[at] = charge;
                }
                Op::Finish { pick, own } if !charges.is_empty() => {
                    ledger.close(charges.swap_remove(pick % charges.len()));
                    ledger.reclaim(idle[pick % 4], own);
                    idle[pick % 4] = own;
                }
                Op::Reclaim { own } => {
                    ledger.freed(own);
                    base = (base - i64::from(own)).max(0);
                }
                Op::Allocate { .. } | Op::Finish { .. } => {}
            }
            let promised: i64 = charges.iter().map(|c| (i64::from(c.reserved) - i64::from(c.landed) - i64::from(c.running)).max(0)).sum();
            let naive = (base - idle.iter().map(|i| i64::from(*i)).sum::<i64>()).max(0) + promised;
            prop_assert_eq!(ledger.used() as i64, naive);
        }
    }
}
