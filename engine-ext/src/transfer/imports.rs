//! [`Imports`]: the running pulls into our pages. The listener registers who waits, effects steer the tasks.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use kvc_proto::{
    id::ImportId,
    wire::{admit::ImportAnswer, reason::Refusal},
    worker::{ImportDone, Slot},
};
use kvc_rdma::ReadHandle;
use tokio::sync::{mpsc, oneshot};

use crate::metrics::Metrics;

use super::import::Order;

/// Running imports.
#[derive(Default)]
pub(crate) struct Imports {
    table: Mutex<HashMap<ImportId, Entry>>,
}

struct Entry {
    control: Arc<Control>,
    order: mpsc::UnboundedSender<Step>,
    waiter: oneshot::Sender<Result<ImportAnswer, Refusal>>,
    began: Instant,
}

/// What the machine tells a pull.
#[derive(Debug)]
pub(crate) enum Step {
    Open(Order),
    Pull { from: u32, slots: Arc<[Slot]> },
    Confirm,
    End,
}

/// A pull's reads, so that they can be stopped from any thread.
#[derive(Default)]
pub(crate) struct Control {
    reads: Mutex<Reads>,
    bytes: AtomicU64,
}

#[derive(Default)]
struct Reads {
    fenced: bool,
    running: Vec<ReadHandle>,
}

/// What [`Imports::register`] gives to the caller: the task's ends of the import.
pub(crate) struct Registered {
    pub(crate) control: Arc<Control>,
    pub(crate) steps: mpsc::UnboundedReceiver<Step>,
    pub(crate) answer: oneshot::Receiver<Result<ImportAnswer, Refusal>>,
}

impl Imports {
    /// Called while the machine's lock is held, in the step that made the import: no effect can miss the entry.
    pub(crate) fn register(&self, import: ImportId) -> Registered {
        let control = Arc::new(Control::default());
        let (order, steps) = mpsc::unbounded_channel();
        let (waiter, answer) = oneshot::channel();
        let entry = Entry {
            control: control.clone(),
            order,
            waiter,
            began: Instant::now(),
        };
        self.lock().insert(import, entry);
        Registered { control, steps, answer }
    }

    pub(crate) fn open(&self, import: ImportId, order: Order) {
        self.tell(import, Step::Open(order));
    }

    pub(crate) fn pull(&self, import: ImportId, from: u32, slots: Arc<[Slot]>) {
        self.tell(import, Step::Pull { from, slots });
    }

    pub(crate) fn confirm(&self, import: ImportId) {
        self.tell(import, Step::Confirm);
    }

    pub(crate) fn end(&self, import: ImportId) {
        self.tell(import, Step::End);
    }

    /// When it returns nothing writes into the import's pages any more, and nothing will.
    pub(crate) fn fence(&self, import: ImportId) {
        let control = self.lock().get(&import).map(|entry| entry.control.clone());
        if let Some(control) = control {
            control.fence();
        }
    }

    /// The module ends.
    pub(crate) fn fence_all(&self) {
        let all: Vec<_> = self.lock().values().map(|entry| entry.control.clone()).collect();
        all.iter().for_each(|control| control.fence());
    }

    /// Answers who asked for the import, and forgets it: its task ends.
    pub(crate) fn done(&self, import: ImportId, outcome: Result<ImportDone, Refusal>, metrics: &Metrics) {
        let Some(entry) = self.lock().remove(&import) else {
            return;
        };
        // Whatever the machine did, no read outlives its import.
        entry.control.fence();
        let took = entry.began.elapsed();
        let bytes = entry.control.bytes.load(Ordering::Relaxed);
        metrics.import_done(outcome.as_ref().err().map(|refusal| refusal.code), bytes, took);
        // Nobody listens any more if the client went away.
        let _ = entry.waiter.send(outcome.map(|done| done.answer(bytes, took)));
    }

    fn tell(&self, import: ImportId, step: Step) {
        if let Some(entry) = self.lock().get(&import) {
            // A task that is over needs no more steps.
            let _ = entry.order.send(step);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<ImportId, Entry>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Control {
    /// Starts a read unless the import is fenced; `start` returns at once.
    pub(crate) fn read(&self, start: impl FnOnce() -> ReadHandle) -> bool {
        let mut reads = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        if reads.fenced {
            return false;
        }
        reads.running.push(start());
        true
    }

    /// Bytes of one read are there.
    pub(crate) fn arrived(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// XFER-2: stops every read and refuses new ones.
    pub(crate) fn fence(&self) {
        let mut reads = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        reads.fenced = true;
        for read in reads.running.drain(..) {
            read.cancel();
        }
    }
}
