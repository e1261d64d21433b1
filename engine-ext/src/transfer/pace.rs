//! [`Pace`]: how many bytes per second this worker pulls at most, together. For operators who share a link, and for tests
//! that need a pull to last.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use tokio::{
    sync::{Mutex, Notify},
    time::Instant,
};

/// Reads are cut so that about so many are started per second.
const STEPS: u64 = 20;

/// See the module. Without a limit it costs one load.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    rate: AtomicU64,
    changed: Notify,
    turn: Mutex<()>,
}

impl Pace {
    /// 0: no limit. Holds for running pulls too.
    pub(crate) fn limit(&self, bytes_per_s: u64) {
        self.rate.store(bytes_per_s, Ordering::Release);
        self.changed.notify_waiters();
    }

    /// Of a read of at most `bytes`, how much is read at once.
    pub(super) fn chunk(&self, bytes: u64) -> u64 {
        match self.rate.load(Ordering::Acquire) {
            0 => bytes,
            rate => bytes.min((rate / STEPS).max(1)),
        }
    }

    /// Returns when `bytes` may be read, at the deadline at the latest.
    pub(super) async fn pass(&self, bytes: u64, deadline: Instant) {
        if self.rate.load(Ordering::Acquire) == 0 {
            return;
        }
        let _turn = self.turn.lock().await;
        let began = Instant::now();
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let rate = self.rate.load(Ordering::Acquire);
            if rate == 0 {
                return;
            }
            let due = began + Duration::from_secs_f64(bytes as f64 / rate as f64);
            tokio::select! {
                () = tokio::time::sleep_until(due.min(deadline)) => return,
                () = changed => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn a_limit_holds_until_it_is_lifted() {
        let pace = Arc::new(Pace::default());
        let far = Instant::now() + Duration::from_secs(600);
        assert_eq!(pace.chunk(4 << 20), 4 << 20);
        pace.pass(1 << 30, far).await;
        pace.limit(1000);
        assert_eq!(pace.chunk(4 << 20), 50);
        let began = Instant::now();
        pace.pass(50, far).await;
        assert!(began.elapsed() >= Duration::from_millis(50));
        let waiting = tokio::spawn({
            let pace = pace.clone();
            async move { pace.pass(1 << 20, far).await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        pace.limit(0);
        waiting.await.unwrap();
    }
}
