//! The simulation must be able to fail (kv-movement §6): with one safety rule switched off the bounded batch finds a
//! world in which its oracle fires; the same world with the rule on keeps every rule.
//!
//! Not here: `FenceImport`, because the transfer engine fences its reads a second time when an import is over; proto's
//! own random lives catch it. `ReplicaRefuses`, because no router offers a number that one worker owns to another;
//! `handover.rs` does and catches it.

use kvc_proto::mutation::{Check, without};
use kvc_tests::sim::{Limits, Oracle, Violation, run};

/// Worlds that a mutation may take to be caught.
const WORLDS: u64 = 2_000;
const FIRST: u64 = 1_000_000;

/// Looks for a world in which one of `oracles` fires under the mutation; the world must be sound without it.
fn caught(name: &str, limits: &Limits, oracles: &[Oracle], mutated: impl Fn(u64) -> Result<(), Violation>) {
    // A mutated machine may panic before an oracle looks.
    std::panic::set_hook(Box::new(|_| {}));
    let mut others = Vec::new();
    for seed in FIRST..FIRST + WORLDS {
        let Err(violation) = mutated(seed) else { continue };
        let healthy = Limits {
            reset_on_success: true,
            ..*limits
        };
        if let Err(too) = run(seed, &healthy) {
            drop(std::panic::take_hook());
            panic!("{name}: world {seed} ends with {violation}, but without the mutation too: {too}");
        }
        if oracles.contains(&violation.oracle) {
            let (nth, before) = (seed - FIRST + 1, others.len());
            println!("{name}: caught in world {seed}, the {nth}th (others fired in {before} before): {violation}");
            return;
        }
        others.push(violation.oracle);
    }
    drop(std::panic::take_hook());
    panic!("{name}: not caught in {WORLDS} worlds by {oracles:?}; others: {others:?}");
}

fn catches(check: Check, oracles: &[Oracle]) {
    let limits = Limits::default();
    caught(&format!("{check:?}"), &limits, oracles, |seed| {
        without(check, || run(seed, &limits).map(drop))
    });
}

#[test]
fn confirm_before_commit() {
    // XFER-3
    catches(Check::ConfirmFailsWhenRevoked, &[Oracle::Confirm]);
}

#[test]
fn fence_before_free() {
    // XFER-2: revoke → fence → free
    catches(Check::FenceLease, &[Oracle::FreedUnderRead, Oracle::ReadableChanged]);
}

#[test]
fn lease_on_eviction() {
    // XFER-2, SES-3
    catches(Check::LeaseOnEviction, &[Oracle::FreedUnderRead]);
}

#[test]
fn lease_past_a_cut() {
    // OWN-7
    catches(Check::RevokePastCut, &[Oracle::FreedUnderRead, Oracle::ReadableChanged]);
}

#[test]
fn replaced_page_under_a_lease() {
    // OWN-4
    catches(Check::RetireUnderLease, &[Oracle::FreedUnderRead]);
}

#[test]
fn cut_to_common_prefix() {
    // XFER-3
    catches(Check::CutBeforeExtend, &[Oracle::TrueKv]);
}

#[test]
fn charge_until_finish() {
    // ADM-7
    catches(Check::ChargeUntilFinish, &[Oracle::Ledger]);
}

#[test]
fn capacity() {
    // INV-1
    catches(Check::Capacity, &[Oracle::Inv1]);
}

#[test]
fn incarnation() {
    // F16
    catches(Check::StaleIncarnation, &[Oracle::Incarnation]);
}

#[test]
fn stale_placement() {
    // SES-4
    catches(Check::StalePlacement, &[Oracle::Placement]);
}

#[test]
fn busy_session() {
    // ADM-8
    catches(Check::Busy, &[Oracle::OneTurn]);
}

#[test]
fn identity_ends_the_prefix() {
    // SES-5
    catches(Check::Identity, &[Oracle::TrueKv]);
}

#[test]
fn rewind_cuts_the_copy() {
    // OWN-7
    catches(Check::Rewind, &[Oracle::TrueKv, Oracle::Sum, Oracle::OneOwner]);
}

#[test]
fn restore_after_no_result() {
    // F8, F9
    catches(Check::Restore, &[Oracle::TrueKv]);
}

#[test]
fn claimed_match_stays() {
    // ADM-9
    catches(Check::Claim, &[Oracle::Sum, Oracle::OneOwner, Oracle::Room]);
}

#[test]
fn dead_import_gives_back() {
    // F13
    catches(Check::GiveBack, &[Oracle::Sum, Oracle::Leak]);
}

#[test]
fn reset_on_success() {
    // DISP-7
    let limits = Limits {
        reset_on_success: false,
        ..Limits::default()
    };
    caught("reset_on_success", &limits, &[Oracle::RejectsCleared], |seed| {
        run(seed, &limits).map(drop)
    });
}

#[test]
fn only_an_equal_copy_is_handed_over_to() {
    // MIG-1: the single commit decision, its first half
    catches(Check::HandoverEqual, &[Oracle::WholeHandover]);
}

#[test]
fn only_an_idle_session_is_handed_over() {
    // MIG-1: its second half
    catches(Check::HandoverIdle, &[Oracle::Superseded, Oracle::WholeHandover]);
}

#[test]
fn a_source_decides_once() {
    // MIG-1: what was handed over answers `moved`
    catches(
        Check::MovedRefuses,
        &[Oracle::OneDecision, Oracle::Placement, Oracle::OneHolder],
    );
}

#[test]
fn an_old_hand_over_answer_counts_as_lost() {
    // MIG-2
    catches(Check::HandoverAge, &[Oracle::LateOwner]);
}

#[test]
fn what_was_withdrawn_is_never_owned() {
    // MIG-2
    catches(Check::WithdrawnForGood, &[Oracle::Withdrawn]);
}

#[test]
fn an_older_announcement_is_refused() {
    // SES-4, SYNC-1
    catches(Check::AnnounceEpoch, &[Oracle::Placement]);
}

#[test]
fn ids_are_left_out_only_where_digests_agree() {
    // SYNC-1, XFER-3
    catches(Check::HaveDigest, &[Oracle::TrueKv]);
}

#[test]
fn the_pending_target_is_asked_first() {
    // MIG-2
    catches(Check::PendingAskedFirst, &[Oracle::PendingFirst]);
}

#[test]
fn every_placement_takes_a_fresh_number() {
    // SES-4
    catches(Check::FreshNumber, &[Oracle::OneOwnerOfPlacement, Oracle::OneHolder]);
}
