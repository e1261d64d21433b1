//! Safety checks of the router that a test can switch off, as in `worker/mutation.rs` (kv-movement §6). Compiled into tests
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
        $crate::routing::mutation::is_off($crate::routing::mutation::Check::$check)
    };
}

pub(crate) use off;

#[cfg(any(test, feature = "mutation"))]
mod switch {
    use std::cell::Cell;

    /// A check.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Check {
        /// MIG-2: the target of a move is asked, or waited out, before another placement is made.
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
