//! A door before memory: open while bytes may move, shut by whoever needs the memory back. A lease has one at the
//! exporter, a read has one at the importer; both fences of XFER-2 are this type.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

/// Lets one thread at a time through while open.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    shut: AtomicBool,
    inside: Mutex<()>,
}

impl Gate {
    /// Runs `work`, which must not block, unless the gate is shut.
    pub(crate) fn pass<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        // Before the lock, so that a thread that passes again and again never starves the one that shuts.
        if self.is_shut() {
            return None;
        }
        let _inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        (!self.is_shut()).then(work)
    }

    /// When it returns nobody is inside and nobody comes in any more. Waits for one `work` at most.
    pub(crate) fn shut(&self) {
        self.shut.store(true, Ordering::SeqCst);
        drop(self.inside.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn is_shut(&self) -> bool {
        self.shut.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicU64, Ordering},
        },
        thread,
    };

    use super::Gate;

    #[test]
    fn nobody_is_inside_after_it_was_shut() {
        for _ in 0..50 {
            let (gate, count) = (Arc::new(Gate::default()), Arc::new(AtomicU64::new(0)));
            let writer = thread::spawn({
                let (gate, count) = (gate.clone(), count.clone());
                move || while gate.pass(|| count.fetch_add(1, Ordering::Relaxed)).is_some() {}
            });
            while count.load(Ordering::Relaxed) == 0 {
                thread::yield_now();
            }
            gate.shut();
            let seen = count.load(Ordering::Relaxed);
            writer.join().unwrap();
            assert_eq!(
                count.load(Ordering::Relaxed),
                seen,
                "XFER-2: work was done behind the fence"
            );
        }
    }
}
