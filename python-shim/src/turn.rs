//! One session turn, from arrival to its end.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use kvc_proto::{
    id::{PrefixHandle, TurnId},
    worker::{Matched, Rollback},
};
use pyo3::{prelude::*, types::PyList};

use crate::{
    engine::{tokens_of, units},
    frees::{Frees, frees},
    memory,
    module::Module,
    rows::Rows,
};

/// A turn that arrived. Dropping it cancels the turn: a request that vanishes with all its references must not leave its
/// session busy.
#[pyclass(frozen, module = "kvc._native")]
pub(crate) struct Turn {
    module: Arc<Module>,
    id: TurnId,
    over: AtomicBool,
}

impl Turn {
    pub(crate) fn new(module: Arc<Module>, id: TurnId) -> Self {
        Self {
            module,
            id,
            over: AtomicBool::new(false),
        }
    }
}

#[pymethods]
impl Turn {
    /// Its number in the load snapshot.
    #[getter]
    fn id(&self) -> u64 {
        self.id.0
    }

    /// (tokens restored, of these shared, prefix handle, version), or `None`: match the engine's own tree. Changes nothing.
    /// Equal answers to one turn name the same slots.
    #[pyo3(name = "match")]
    fn matched(&self, limit: usize) -> Option<(u32, u32, u64, u64)> {
        self.module
            .ask(|worker, _| match worker.match_turn(self.id, units(limit)) {
                Matched::Tree => None,
                Matched::Session { tokens, shared, prefix } => Some((tokens, shared, prefix.0)),
            })
            .map(|(tokens, shared, prefix)| (tokens, shared, prefix, self.module.version()))
    }

    /// Writes the slots of the first `len` restored tokens to an int64 tensor.
    fn slots_into(&self, address: usize, len: usize) -> PyResult<()> {
        memory::write((address, len), |out| {
            self.module.ask(|worker, _| worker.slots_into(self.id, out))
        })
    }

    /// The engine has locked a match of this many tokens; nests.
    fn claim(&self, tokens: usize) {
        self.module.ask(|worker, _| worker.claim(self.id, units(tokens)));
    }

    /// The engine has unlocked it.
    fn unclaim(&self) {
        self.module.ask(|worker, _| worker.unclaim(self.id));
    }

    /// The engine is about to allocate.
    fn begin(&self, py: Python<'_>) -> Option<Frees> {
        frees(py, self.module.tell(py, |worker, now| worker.begin(self.id, now)))
    }

    /// KV of the first `readable` tokens is written, in the slots that the row names.
    fn progress(&self, readable: usize, rows: &Rows, row: usize) -> PyResult<()> {
        rows.read(row, readable, |row| {
            self.module
                .change(|worker, now| worker.progress(self.id, units(readable), row, now));
        })
    }

    /// How many tokens belong in the engine's tree.
    fn share_len(&self) -> u32 {
        self.module.ask(|worker, _| worker.share_len(self.id))
    }

    /// The first `shared` tokens lie in the engine's tree under `prefix` now; the row names `len` slots.
    fn adopt(
        &self,
        py: Python<'_>,
        shared: usize,
        prefix: u64,
        rows: &Rows,
        row: usize,
        len: usize,
    ) -> PyResult<Option<Frees>> {
        let given = rows.read(row, len, |row| {
            self.module.tell(py, |worker, now| {
                worker.adopt(self.id, units(shared), PrefixHandle(prefix), row, now)
            })
        })?;
        Ok(frees(py, given))
    }

    /// The turn succeeded with its first `committed` tokens; `output` are the generated ones. The turn is over.
    fn commit(
        &self,
        py: Python<'_>,
        committed: usize,
        output: &Bound<'_, PyList>,
        rows: &Rows,
        row: usize,
    ) -> PyResult<Option<Frees>> {
        let output = tokens_of(output, 0, "output_ids")?;
        let given = rows.read(row, committed, |row| {
            self.over.store(true, Ordering::Relaxed);
            self.module.tell(py, |worker, now| {
                worker.commit(self.id, units(committed), &output, row, now)
            })
        })?;
        Ok(frees(py, given))
    }

    /// A begun turn ends without a result after `end` tokens were allocated. It is over unless it is a retract.
    fn rollback(&self, py: Python<'_>, end: usize, rows: &Rows, row: usize, retract: bool) -> PyResult<Option<Frees>> {
        let how = if retract { Rollback::Retract } else { Rollback::Abort };
        let given = rows.read(row, end, |row| {
            self.over.store(!retract, Ordering::Relaxed);
            self.module
                .tell(py, |worker, now| worker.rollback(self.id, units(end), row, how, now))
        })?;
        Ok(frees(py, given))
    }

    /// Last resort while nothing runs: the waiting turn's own session goes.
    fn unwedge(&self, py: Python<'_>) -> Option<Frees> {
        frees(py, self.module.tell(py, |worker, now| worker.unwedge(self.id, now)))
    }

    /// The request left the queue before it began. The turn is over.
    fn cancel(&self, py: Python<'_>) {
        if !self.over.swap(true, Ordering::Relaxed) {
            self.module.tell(py, |worker, now| worker.cancel(self.id, now));
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if !*self.over.get_mut() {
            self.module.change(|worker, now| worker.cancel(self.id, now));
        }
    }
}
