//! Algorithm 1, the policy `kvc`: which worker a dispatch asks next (ROUTE-1..5, ROUTE-7). Called by
//! [`crate::routing::Dispatch`] before every probe.

use crate::routing::{
    score::{self, Score},
    session::Record,
    view::{View, WorkerIndex},
};

/// The two numbers of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kvc {
    /// α, in hash blocks: what stickiness is worth against overlap (ROUTE-3).
    pub alpha: u32,
    /// τ_reject: a worker with this many counted rejects of a session is left alone (ROUTE-1).
    pub reject_threshold: u32,
}

impl Kvc {
    /// The worker to ask next, or none when every worker was tried or is no candidate (ROUTE-4, ROUTE-6).
    ///
    /// `tried` are the workers this dispatch has asked; `record` is the session's, absent for an unknown one;
    /// `input_tokens` bounds the overlap. O(|D|) (ROUTE-7), capacity is not looked at (ROUTE-5).
    pub fn choose(
        &self,
        view: &View,
        record: Option<&Record>,
        tried: &[WorkerIndex],
        input_tokens: u32,
    ) -> Option<WorkerIndex> {
        let untried = || view.decoders().filter(|d| !tried.contains(d));
        let rejects = |d| record.map_or(0, |r| r.rejects(view.at(d)));
        let below = || untried().filter(|&d| rejects(d) < self.reject_threshold);
        // Later equals do not displace: ties go to the lowest index (ROUTE-3).
        let best = |best: Option<(WorkerIndex, Score)>, d| {
            let score = score::of(view, record, d, input_tokens, self.alpha);
            match best {
                Some((_, held)) if held >= score => best,
                _ => Some((d, score)),
            }
        };
        if let Some((d, _)) = below().fold(None, best) {
            return Some(d);
        }
        // ROUTE-2: none is left below the threshold.
        let least = untried().map(rejects).min()?;
        untried()
            .filter(|&d| rejects(d) == least)
            .fold(None, best)
            .map(|(d, _)| d)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::testing::{D0, D1, D2, View3};

    const KVC: Kvc = Kvc {
        alpha: 1,
        reject_threshold: 3,
    };

    #[test]
    fn overlap_wins_over_load_and_is_counted_in_blocks() {
        // ROUTE-3
        let mut w = View3::new();
        w.hold(D1, 48);
        w.load(D1, 9);
        assert_eq!(KVC.choose(&w.view, Some(&w.record), &[], 100), Some(D1));
        w.hold(D2, 71); // two whole blocks as well, and less load
        assert_eq!(KVC.choose(&w.view, Some(&w.record), &[], 100), Some(D2));
        w.hold(D1, 72);
        assert_eq!(KVC.choose(&w.view, Some(&w.record), &[], 100), Some(D1));
        // Beyond the prompt nothing counts: now they tie again and load decides.
        assert_eq!(KVC.choose(&w.view, Some(&w.record), &[], 60), Some(D2));
    }

    #[test]
    fn the_pin_is_worth_alpha_blocks_and_breaks_ties() {
        // ROUTE-3: at equal sums the second integer, sticky, decides.
        let mut w = View3::new();
        w.pin(D2);
        assert_eq!(KVC.choose(&w.view, Some(&w.record), &[], 100), Some(D2));
        w.hold(D0, 24);
        assert_eq!(KVC.choose(&w.view, Some(&w.record), &[], 100), Some(D2));
        w.hold(D0, 48);
        assert_eq!(KVC.choose(&w.view, Some(&w.record), &[], 100), Some(D0));
    }

    #[test]
    fn inflight_then_assigned_then_index_break_ties() {
        // ROUTE-3
        let mut w = View3::new();
        assert_eq!(KVC.choose(&w.view, None, &[], 100), Some(D0));
        w.view.assign(D0);
        assert_eq!(KVC.choose(&w.view, None, &[], 100), Some(D1));
        w.load(D1, 1);
        assert_eq!(KVC.choose(&w.view, None, &[], 100), Some(D2));
    }

    #[test]
    fn a_rejected_worker_is_left_alone_until_all_are() {
        // ROUTE-1, ROUTE-2
        let mut w = View3::new();
        w.hold(D0, 96);
        w.reject(D0, 3);
        assert_eq!(KVC.choose(&w.view, Some(&w.record), &[], 100), Some(D1));
        w.reject(D1, 4);
        w.reject(D2, 5);
        assert_eq!(KVC.choose(&w.view, Some(&w.record), &[], 100), Some(D0));
        assert_eq!(KVC.choose(&w.view, Some(&w.record), &[D0], 100), Some(D1));
    }

    #[test]
    fn all_tried_is_no_candidate() {
        // ROUTE-4
        let w = View3::new();
        assert_eq!(KVC.choose(&w.view, None, &[D0, D1, D2], 100), None);
    }

    #[test]
    fn down_draining_and_unknown_workers_are_no_candidates() {
        // ROUTE-6
        let mut w = View3::new();
        w.hold(D0, 96);
        w.view.lost(D0);
        w.view.draining(D1);
        assert_eq!(KVC.choose(&w.view, Some(&w.record), &[], 100), Some(D2));
        w.view.lost(D2);
        assert_eq!(KVC.choose(&w.view, Some(&w.record), &[], 100), None);
    }

    #[test]
    fn what_an_earlier_process_held_or_refused_is_forgotten() {
        // ROUTE-6, F16: the same address, another incarnation.
        let mut w = View3::new();
        w.hold(D1, 96);
        w.reject(D0, 3);
        w.restart(D1);
        w.restart(D0);
        assert_eq!(KVC.choose(&w.view, Some(&w.record), &[], 100), Some(D0));
    }
}
