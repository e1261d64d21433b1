//! Safety checks that a test can switch off, to show that the random lives notice (kv-movement §6). Compiled into tests
//! and the feature `mutation` only: `off!(Check)` is `false` everywhere else.

#[cfg(any(test, feature = "mutation"))]
pub use switch::{Check, is_off, without};

/// Whether a check is switched off.
#[cfg(not(any(test, feature = "mutation")))]
macro_rules! off {
    ($check:ident) => {
        false
    };
}

/// Whether a check is switched off.
#[cfg(any(test, feature = "mutation"))]
macro_rules! off {
    ($check:ident) => {
        $crate::mutation::is_off($crate::mutation::Check::$check)
    };
}

pub(crate) use off;

#[cfg(any(test, feature = "mutation"))]
mod switch {
    use std::cell::Cell;

    /// A check.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Check {
        /// OWN-7: leases past a cut are revoked.
        RevokePastCut,
        /// OWN-4: a replaced page under a lease is retired, not freed.
        RetireUnderLease,
        /// XFER-3: a revoked lease does not confirm.
        ConfirmFailsWhenRevoked,
        /// XFER-3: an older copy is cut to the common prefix before it is extended.
        CutBeforeExtend,
        /// SES-5: another identity ends the common prefix.
        Identity,
        /// ADM-6.
        Capacity,
        /// ADM-8.
        Busy,
        /// A claimed match is not evictable.
        Claim,
        /// F8, F9: an end without result goes back to what was restored.
        Restore,
        /// What lands for a dead import comes back.
        GiveBack,
        /// XFER-2: landing pages go back only by the poll after the fence.
        FenceImport,
        /// OWN-7: the copy is cut where the history diverges.
        Rewind,
        /// XFER-2: a revoked lease is fenced.
        FenceLease,
        /// XFER-2, SES-3: an evicted copy's leases are revoked.
        LeaseOnEviction,
        /// ADM-7: a turn is charged until it finishes.
        ChargeUntilFinish,
        /// F16: a message for an earlier process is refused.
        StaleIncarnation,
        /// SES-4: a message of an older placement is refused.
        StalePlacement,
        /// MIG-1: only a copy equal to the owner's is handed over to.
        HandoverEqual,
        /// MIG-1: only an idle session is handed over.
        HandoverIdle,
        /// MIG-1: an owner that has handed over refuses turns.
        MovedRefuses,
        /// MIG-2: a hand-over answer older than the deadline is discarded.
        HandoverAge,
        /// MIG-2: a withdrawn number is never owned later.
        WithdrawnForGood,
        /// SES-4: an announcement of an older placement is refused.
        AnnounceEpoch,
        /// SYNC-1: token ids are left out only where the digests agree.
        HaveDigest,
        /// SES-4: a copy kept for another owner runs no turn under that owner's placement.
        ReplicaRefuses,
        /// MIG-2: the router asks or waits out the target of a move before it makes another placement.
        PendingAskedFirst,
        /// SES-4: every placement takes a number of its own.
        FreshNumber,
    }

    thread_local! {
        static OFF: Cell<Option<Check>> = const { Cell::new(None) };
    }

    /// Whether a check is switched off on this thread.
    pub fn is_off(check: Check) -> bool {
        OFF.get() == Some(check)
    }

    /// Runs `f` with one check switched off on this thread.
    pub fn without<T>(check: Check, f: impl FnOnce() -> T) -> T {
        struct On;
        impl Drop for On {
            fn drop(&mut self) {
                OFF.set(None);
            }
        }
        OFF.set(Some(check));
        let _on = On;
        f()
    }
}
