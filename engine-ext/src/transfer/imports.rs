//! [`Imports`]: the running pulls into our pages. The listener registers who waits, the machine starts others by itself
//! (SYNC-1), effects steer the tasks.

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
    worker::{Handover, ImportDone, LeaseKind, Slot},
};
use kvc_rdma::ReadHandle;
use tokio::sync::{mpsc, oneshot};

use crate::state::Shared;

use super::{
    import::{Order, Task},
    serving::{Active, Serving},
};

/// Running imports.
#[derive(Default)]
pub(crate) struct Imports {
    table: Mutex<HashMap<ImportId, Entry>>,
    serving: Arc<Serving>,
}

struct Entry {
    /// The reads under the lease it holds now.
    control: Arc<Control>,
    bytes: Arc<AtomicU64>,
    order: mpsc::UnboundedSender<Step>,
    kind: LeaseKind,
    began: Instant,
    waiter: Option<(Waiter, Active)>,
}

type Waiter = oneshot::Sender<Result<ImportAnswer, Refusal>>;
/// How an import ends, for who asked for it.
type Answer = oneshot::Receiver<Result<ImportAnswer, Refusal>>;

/// What the machine tells a pull.
pub(super) enum Step {
    Open(Order, Arc<Control>),
    Pull { from: u32, slots: Arc<[Slot]> },
    Confirm,
    AskHandover { peer: String, request: Handover },
    End,
}

/// The reads under one lease, so that they can be stopped from any thread.
#[derive(Default)]
pub(crate) struct Control {
    reads: Mutex<Reads>,
    bytes: Arc<AtomicU64>,
}

#[derive(Default)]
struct Reads {
    fenced: bool,
    running: Vec<ReadHandle>,
}

impl Imports {
    pub(crate) fn new(serving: Arc<Serving>) -> Self {
        Self {
            table: Mutex::default(),
            serving,
        }
    }

    /// Called while the machine's lock is held, in the step that made the import: no effect can miss the entry.
    pub(crate) fn request(&self, shared: &Arc<Shared>, import: ImportId, deadline: tokio::time::Instant) -> Answer {
        let (waiter, answer) = oneshot::channel();
        self.begin(shared, import, deadline, Some((waiter, self.serving.begin())));
        answer
    }

    /// As [`Imports::request`], for an import that the machine has started by itself, which nobody waits for (SYNC-3).
    pub(crate) fn adopt(&self, shared: &Arc<Shared>, import: ImportId) {
        if !self.lock().contains_key(&import) {
            let deadline = tokio::time::Instant::now() + shared.config.sync_deadline;
            self.begin(shared, import, deadline, None);
        }
    }

    /// The next lease of the import, with reads of its own. Gives those under the earlier one, to be fenced once the
    /// machine's lock has been dropped. This and the other steps are called while it is held, so that they stay in order.
    pub(crate) fn open(&self, import: ImportId, order: Order) -> Option<Arc<Control>> {
        let mut table = self.lock();
        let entry = table.get_mut(&import)?;
        entry.kind = order.kind;
        let control = Arc::new(Control {
            bytes: entry.bytes.clone(),
            ..Control::default()
        });
        let earlier = std::mem::replace(&mut entry.control, control.clone());
        entry.tell(Step::Open(order, control));
        Some(earlier)
    }

    pub(crate) fn pull(&self, import: ImportId, from: u32, slots: Arc<[Slot]>) {
        self.tell(import, Step::Pull { from, slots });
    }

    pub(crate) fn confirm(&self, import: ImportId) {
        self.tell(import, Step::Confirm);
    }

    pub(crate) fn ask_handover(&self, import: ImportId, peer: String, request: Handover) {
        self.tell(import, Step::AskHandover { peer, request });
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
    pub(crate) fn done(&self, shared: &Shared, import: ImportId, outcome: Result<ImportDone, Refusal>) {
        let Some(entry) = self.lock().remove(&import) else {
            return;
        };
        // Whatever the machine did, no read outlives its import.
        entry.control.fence();
        let took = entry.began.elapsed();
        let bytes = entry.bytes.load(Ordering::Relaxed);
        let failure = outcome.as_ref().err().map(|refusal| refusal.code);
        shared.metrics.import_done(entry.kind, failure, bytes, took);
        if let Some((waiter, _)) = entry.waiter {
            // Nobody listens any more if the client went away.
            let _ = waiter.send(outcome.map(|done| done.answer(bytes, took)));
        }
    }

    fn begin(
        &self,
        shared: &Arc<Shared>,
        import: ImportId,
        deadline: tokio::time::Instant,
        waiter: Option<(Waiter, Active)>,
    ) {
        let (order, steps) = mpsc::unbounded_channel();
        let gives_way = waiter.is_none();
        let entry = Entry {
            control: Arc::default(),
            bytes: Arc::default(),
            order,
            kind: LeaseKind::default(),
            began: Instant::now(),
            waiter,
        };
        self.lock().insert(import, entry);
        let task = Task {
            shared: shared.clone(),
            import,
            steps,
            deadline,
            gives_way,
        };
        shared.runtime.spawn(task.run());
    }

    fn tell(&self, import: ImportId, step: Step) {
        if let Some(entry) = self.lock().get(&import) {
            entry.tell(step);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<ImportId, Entry>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn tell(&self, step: Step) {
        // A task that is over needs no more steps.
        let _ = self.order.send(step);
    }
}

impl Control {
    /// Starts a read unless the lease is fenced; `start` returns at once.
    pub(super) fn read(&self, start: impl FnOnce() -> ReadHandle) -> bool {
        let mut reads = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        if reads.fenced {
            return false;
        }
        reads.running.push(start());
        true
    }

    /// Bytes of one read are there.
    pub(super) fn arrived(&self, bytes: u64) {
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
