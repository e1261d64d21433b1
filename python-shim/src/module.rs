//! The module behind a wall: a panic in it ends the module, never the engine's process.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use kvc_engine_ext::Engine;
use kvc_proto::{
    time::Now,
    worker::{Command, Snapshot, Worker},
};
use pyo3::prelude::*;

/// Longest that the module takes to end.
const SHUTDOWN: Duration = Duration::from_secs(2);

/// The module of this process. After a fault every question gets its neutral answer: nothing matches, nothing is evictable,
/// nothing is given back; requests run plain and pages of sessions stay allocated until the engine flushes.
pub(crate) struct Module {
    engine: Engine,
    faulted: AtomicBool,
    version: AtomicU64,
}

impl Module {
    pub(crate) fn new(engine: Engine) -> Self {
        Self {
            engine,
            faulted: AtomicBool::new(false),
            version: AtomicU64::new(0),
        }
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(crate) fn faulted(&self) -> bool {
        self.faulted.load(Ordering::Relaxed)
    }

    /// Grows with every call of the scheduler thread that may change which slots a session holds. No other thread changes
    /// those of a turn that waits, other than by taking them off its end.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Relaxed)
    }

    /// A question that takes microseconds and changes no session's slots: the GIL is kept, giving it away would cost more.
    pub(crate) fn ask<R: Default>(&self, call: impl FnOnce(&mut Worker, Now) -> R) -> R {
        self.with(|engine| engine.scheduler(call))
    }

    /// As [`Self::ask`], for a call that changes something.
    pub(crate) fn change<R: Default>(&self, call: impl FnOnce(&mut Worker, Now) -> R) -> R {
        self.version.fetch_add(1, Ordering::Relaxed);
        self.ask(call)
    }

    /// A change that may fence (XFER-2): other Python threads run meanwhile.
    pub(crate) fn tell<R: Default + Send>(&self, py: Python<'_>, call: impl FnOnce(&mut Worker, Now) -> R + Send) -> R {
        py.detach(|| self.change(call))
    }

    /// Once per loop iteration.
    pub(crate) fn poll(&self, snapshot: &Snapshot) -> Vec<Command> {
        self.version.fetch_add(1, Ordering::Relaxed);
        self.with(|engine| engine.poll(snapshot))
    }

    /// Any call into the module.
    pub(crate) fn with<R: Default>(&self, call: impl FnOnce(&Engine) -> R) -> R {
        if self.faulted() {
            return R::default();
        }
        // The state behind the wall is not looked at again after a panic, except to end it.
        catch_unwind(AssertUnwindSafe(|| call(&self.engine))).unwrap_or_else(|_| {
            self.fail();
            R::default()
        })
    }

    /// Ends the module: peers can read nothing any more, routers see a worker that is down.
    fn fail(&self) {
        self.faulted.store(true, Ordering::Relaxed);
        tracing::error!("the module failed and is off until the engine restarts; requests run without sessions");
        if catch_unwind(AssertUnwindSafe(|| self.engine.shutdown(SHUTDOWN))).is_err() {
            tracing::error!("the module did not end cleanly");
        }
    }
}
