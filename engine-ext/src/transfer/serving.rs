//! [`Serving`]: how many transfers are under way that a turn or a router waits for. A replica's pull gives way to them
//! (SYNC-3).

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use kvc_proto::wire::reason::{Reason, Refusal};
use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

/// Shared by imports and exports.
#[derive(Debug, Default)]
pub(crate) struct Serving {
    active: AtomicUsize,
    quiet: Notify,
}

/// One transfer somebody waits for, until it is dropped.
#[derive(Debug)]
pub(crate) struct Active(Arc<Serving>);

impl Serving {
    /// Counts one in.
    pub(crate) fn begin(self: &Arc<Self>) -> Active {
        self.active.fetch_add(1, Ordering::AcqRel);
        Active(self.clone())
    }

    /// Returns when there is none.
    pub(crate) async fn quiet(&self, deadline: Instant) -> Result<(), Refusal> {
        loop {
            let quiet = self.quiet.notified();
            tokio::pin!(quiet);
            // Registered before the count is looked at: an end in between is not missed.
            quiet.as_mut().enable();
            if self.active.load(Ordering::Acquire) == 0 {
                return Ok(());
            }
            timeout_at(deadline, quiet).await.map_err(|_| {
                Refusal::new(
                    Reason::DeadlineExceeded,
                    "other transfers came first until the deadline",
                )
            })?;
        }
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        if self.0.active.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.quiet.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn who_gives_way_waits_for_the_last_one() {
        // SYNC-3.
        let serving = Arc::new(Serving::default());
        let soon = || Instant::now() + Duration::from_secs(1);
        serving.quiet(soon()).await.unwrap();
        let (first, second) = (serving.begin(), serving.begin());
        let waiting = tokio::spawn({
            let serving = serving.clone();
            async move { serving.quiet(Instant::now() + Duration::from_secs(60)).await }
        });
        drop(first);
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        assert!(!waiting.is_finished());
        drop(second);
        waiting.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn it_waits_no_longer_than_its_deadline() {
        // XFER-7.
        let serving = Arc::new(Serving::default());
        let _active = serving.begin();
        let why = serving
            .quiet(Instant::now() + Duration::from_millis(5))
            .await
            .unwrap_err();
        assert_eq!(why.code, Reason::DeadlineExceeded);
    }
}
