//! Where a draining worker's sessions go: by capacity (MIG-4). Called by the router's drainer.

use super::view::{View, WorkerIndex};

/// The worker with the most free capacity, in tokens, among those that take turns, but for `source` and `except`;
/// `promised` is what is on its way to a worker and not yet in its load report. Ties: the lowest index.
pub fn most_free(
    view: &View,
    source: WorkerIndex,
    except: &[WorkerIndex],
    promised: impl Fn(WorkerIndex) -> u64,
) -> Option<WorkerIndex> {
    let free = |w: WorkerIndex| {
        let load = view.worker(w).load();
        load.capacity.saturating_sub(load.used).saturating_sub(promised(w))
    };
    view.decoders()
        .filter(|w| *w != source && !except.contains(w))
        .max_by_key(|&w| (free(w), std::cmp::Reverse(w)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        routing::testing::{D0, D1, D2, View3},
        wire::admit::LoadReport,
    };

    #[test]
    fn a_target_is_up_takes_turns_and_has_the_most_room() {
        // MIG-4
        let mut v = View3::new().view;
        let load = |used, capacity| LoadReport {
            used,
            capacity,
            ..LoadReport::default()
        };
        v.load_is(D0, load(0, 1000));
        v.load_is(D1, load(500, 1000));
        v.load_is(D2, load(1500, 2000));
        let most = |v: &View, except: &[WorkerIndex], promised: u64| {
            most_free(v, D0, except, |w| if w == D1 { promised } else { 0 })
        };
        assert_eq!(
            most(&v, &[], 0),
            Some(D1),
            "equal room: the lowest index, never the source"
        );
        assert_eq!(most(&v, &[], 1), Some(D2), "what is on its way counts");
        assert_eq!(most(&v, &[D1], 0), Some(D2));
        v.draining(D1);
        assert_eq!(most(&v, &[], 0), Some(D2));
        v.lost(D2);
        assert_eq!(most(&v, &[], 0), None);
    }
}
