//! The module of one engine process.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kvc_engine_ext::{Config, EngineFacts};
use kvc_proto::{
    id::{ImportId, PrefixHandle, SessionId, TurnId},
    worker::{Arrival, Frees as Given, Identity, Prompt, Snapshot},
};
use pyo3::{
    prelude::*,
    types::{PyDict, PyList},
};
use tracing_subscriber::EnvFilter;

use crate::{
    command,
    error::{bad_request, configuration, guarded, refused},
    frees::{self, Frees, frees},
    layout::Layout,
    memory::{self, Tensor},
    tag::TurnTag,
    turn::Turn,
};

/// Longest that `Engine.shutdown` waits.
const SHUTDOWN: Duration = Duration::from_secs(2);

/// Threads, listeners and the machine. Its methods are for the engine's scheduler thread.
#[pyclass(frozen, module = "kvc._native")]
pub(crate) struct Engine(Arc<kvc_engine_ext::Engine>);

#[pymethods]
impl Engine {
    /// `flags`: settings by name, as a TOML file would hold them; they win over file and environment.
    #[new]
    #[pyo3(signature = (*, flags, layout, capacity, engine, model))]
    fn new(
        py: Python<'_>,
        flags: BTreeMap<String, String>,
        layout: &Layout,
        capacity: u32,
        engine: String,
        model: String,
    ) -> PyResult<Self> {
        let filter = EnvFilter::try_from_env("KVC_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
        // Another subscriber in this process stays in charge.
        let _ = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .try_init();
        let config = load(py, flags)?;
        let facts = EngineFacts {
            layout: layout.0.clone(),
            model,
            engine,
            capacity,
        };
        let started = guarded(py, || py.detach(|| kvc_engine_ext::Engine::start(config, facts)))?;
        started
            .map(|engine| Self(Arc::new(engine)))
            .map_err(|error| configuration(py, error))
    }

    /// `host:port` of the module's HTTP listener.
    #[getter]
    fn listen(&self) -> String {
        self.0.listen().to_string()
    }

    /// `host:port` of the peer control plane.
    #[getter]
    fn peer(&self) -> String {
        self.0.peer_listen().to_string()
    }

    /// A session turn reached the scheduler: `tokens` follow the first `after` tokens of its history (0: the whole prompt).
    /// `Refused` if it may not run.
    fn arrive(
        &self,
        py: Python<'_>,
        tag: &TurnTag,
        identity: &str,
        after: usize,
        tokens: &Bound<'_, PyList>,
        max_new: u64,
    ) -> PyResult<Turn> {
        let tokens = tokens_of(tokens, "input_ids").map_err(|error| bad_request(py, error.value(py).to_string()))?;
        let tag = &tag.0;
        let arrival = Arrival {
            session: tag.session.clone(),
            identity: Identity(identity.into()),
            prompt: if after == 0 {
                Prompt::Full(tokens)
            } else {
                Prompt::Append {
                    after: units(after),
                    tokens,
                }
            },
            max_new: u32::try_from(max_new).unwrap_or(u32::MAX),
            reservation: tag.reservation,
            placement: tag.placement,
            origin: tag.origin,
        };
        let arrived = guarded(py, || {
            py.detach(|| self.0.scheduler(|worker, now| worker.arrive(arrival, now)))
        })?;
        arrived
            .map(|id| Turn::new(self.0.clone(), id))
            .map_err(|refusal| refused(py, &refusal))
    }

    /// Tokens of history held for a session, 0 if none.
    fn history_len(&self, py: Python<'_>, session: &str) -> PyResult<usize> {
        let Ok(session) = SessionId::new(session) else {
            return Ok(0);
        };
        guarded(py, || {
            self.0.scheduler(|worker, _| worker.history_len(&session) as usize)
        })
    }

    /// Tokens that `victim` can free.
    fn evictable(&self, py: Python<'_>) -> PyResult<usize> {
        guarded(py, || self.0.scheduler(|worker, _| worker.evictable() as usize))
    }

    /// Tokens that neither the engine nor a running request nor an idle session accounts for.
    fn held(&self, py: Python<'_>) -> PyResult<usize> {
        guarded(py, || self.0.scheduler(|worker, _| worker.held() as usize))
    }

    /// Handles of idle sessions' shared prefixes.
    fn idle_prefixes(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        guarded(py, || {
            self.0
                .scheduler(|worker, _| worker.idle_prefixes().map(|handle| handle.0).collect())
        })
    }

    /// What the next idle session gives up, or `None`: there is none.
    fn victim(&self, py: Python<'_>) -> PyResult<Option<Frees>> {
        let victim = guarded(py, || py.detach(|| self.0.scheduler(|worker, now| worker.victim(now))))?;
        Ok(victim.map(|victim| frees::always(py, victim.frees)))
    }

    /// Once per loop iteration: the engine's numbers in, commands out.
    #[pyo3(signature = (*, free, tree_evictable, running, waiting, pending_prefill_tokens, allocated))]
    #[allow(clippy::too_many_arguments)]
    fn poll(
        &self,
        py: Python<'_>,
        free: usize,
        tree_evictable: usize,
        running: usize,
        waiting: usize,
        pending_prefill_tokens: u64,
        allocated: Vec<(u64, usize)>,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let snapshot = Snapshot {
            free: units(free),
            tree_evictable: units(tree_evictable),
            running: units(running),
            waiting: units(waiting),
            pending_prefill_tokens,
            allocated: allocated
                .into_iter()
                .map(|(turn, tokens)| (TurnId(turn), units(tokens)))
                .collect(),
        };
        let commands = guarded(py, || py.detach(|| self.0.poll(&snapshot)))?;
        commands
            .into_iter()
            .map(|command| command::object(py, command))
            .collect()
    }

    /// Answer to `Land`: the tree holds `have` tokens under `prefix`, whose slots are `head`; `slots` were allocated. If the
    /// answer names `prefix`, the import has died.
    fn landed(
        &self,
        py: Python<'_>,
        import_id: u64,
        have: usize,
        prefix: u64,
        head: Tensor,
        slots: Tensor,
    ) -> PyResult<Option<Frees>> {
        self.import_call(py, [head, slots], |worker, [head, slots], now| {
            worker.landed(ImportId(import_id), units(have), PrefixHandle(prefix), head, slots, now)
        })
    }

    /// Answer to `Land`: there is no room.
    fn land_failed(&self, py: Python<'_>, import_id: u64) -> PyResult<()> {
        guarded(py, || {
            py.detach(|| {
                self.0
                    .scheduler(|worker, now| worker.land_failed(ImportId(import_id), now))
            })
        })
    }

    /// Answer to `Commit`: the first `shared` tokens lie in the tree under `prefix`, in the slots `head`.
    fn import_shared(
        &self,
        py: Python<'_>,
        import_id: u64,
        shared: usize,
        prefix: u64,
        head: Tensor,
    ) -> PyResult<Option<Frees>> {
        self.import_call(py, [head, (0, 0)], |worker, [head, _], now| {
            worker.import_shared(ImportId(import_id), units(shared), PrefixHandle(prefix), head, now)
        })
    }

    /// Answer to `Commit`: done.
    fn import_committed(&self, py: Python<'_>, import_id: u64) -> PyResult<()> {
        guarded(py, || {
            py.detach(|| {
                self.0
                    .scheduler(|worker, now| worker.import_committed(ImportId(import_id), now))
            })
        })
    }

    /// The engine clears its pool: every KV is forgotten, every lease and import fenced.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        guarded(py, || py.detach(|| self.0.scheduler(|worker, now| worker.flush(now))))
    }

    /// Drops a session's KV; true: at the end of its running turn.
    fn close(&self, py: Python<'_>, session: &str) -> PyResult<bool> {
        let Ok(session) = SessionId::new(session) else {
            return Ok(false);
        };
        guarded(py, || {
            py.detach(|| self.0.scheduler(|worker, now| worker.close(&session, now)))
        })
    }

    /// A descriptor that becomes readable when the loop has work.
    fn wake_fd(&self) -> i32 {
        self.0.wake_fd()
    }

    /// Makes it unreadable.
    fn clear_wake(&self, py: Python<'_>) -> PyResult<()> {
        guarded(py, || self.0.clear_wake())
    }

    /// The session of a running import, for tests.
    fn session_of(&self, py: Python<'_>, import_id: u64) -> PyResult<Option<String>> {
        guarded(py, || {
            let transfers = self.0.scheduler(|worker, now| worker.transfers(now));
            let found = transfers
                .imports
                .into_iter()
                .find(|import| import.import.0 == import_id);
            found.map(|import| import.session_id.as_str().to_owned())
        })
    }

    /// The first sessions by id, for tests: id → {"state", "tokens", "shared", "leases"}.
    fn sessions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let list = guarded(py, || self.0.scheduler(|worker, now| worker.sessions(None, 1000, now)))?;
        let out = PyDict::new(py);
        for view in list.sessions {
            let session = PyDict::new(py);
            session.set_item("state", &view.state)?;
            session.set_item("tokens", view.committed)?;
            session.set_item("shared", view.shared)?;
            session.set_item("leases", view.leases)?;
            out.set_item(view.session_id.as_str(), session)?;
        }
        Ok(out)
    }

    /// What the machine counts, for tests.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = guarded(py, || self.0.scheduler(|worker, _| worker.counters().clone()))?;
        let out = PyDict::new(py);
        for (name, count) in [
            ("turns", counters.turns),
            ("commits", counters.commits),
            ("prompt_tokens", counters.prompt_tokens),
            ("restored_tokens", counters.restored_tokens),
            ("rewinds", counters.rewinds),
            ("retracts", counters.retracts),
            ("aborts", counters.aborts),
            ("cancels", counters.cancels),
            ("evictions", counters.evictions),
            ("unwedged", counters.unwedged),
            ("imports", counters.imports),
            ("imports_committed", counters.imports_committed),
            ("imported_tokens", counters.imported_tokens),
            ("leases", counters.leases),
            ("revocations", counters.revocations),
            ("flushes", counters.flushes),
        ] {
            out.set_item(name, count)?;
        }
        Ok(out)
    }

    /// Ends threads and listeners; nothing reads or writes the pool afterwards.
    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        guarded(py, || py.detach(|| self.0.shutdown(SHUTDOWN)))
    }
}

impl Engine {
    fn import_call(
        &self,
        py: Python<'_>,
        [first, second]: [Tensor; 2],
        call: impl FnOnce(&mut kvc_proto::worker::Worker, [&[i64]; 2], kvc_proto::time::Now) -> Given + Send,
    ) -> PyResult<Option<Frees>> {
        let given = memory::read(first, |first: &[i64]| {
            memory::read(second, |second: &[i64]| {
                guarded(py, || {
                    py.detach(|| self.0.scheduler(|worker, now| call(worker, [first, second], now)))
                })
            })
        })???;
        Ok(frees(py, given))
    }
}

/// Reads file, environment and flags as `Engine` will and returns what the parent process must know: `listen`.
/// `ConfigurationError` says in one line what is wrong and how to fix it.
#[pyfunction]
pub(crate) fn settings<'py>(py: Python<'py>, flags: BTreeMap<String, String>) -> PyResult<Bound<'py, PyDict>> {
    let config = load(py, flags)?;
    let out = PyDict::new(py);
    out.set_item("listen", config.listen.to_string())?;
    Ok(out)
}

fn load(py: Python<'_>, flags: BTreeMap<String, String>) -> PyResult<Config> {
    let flags: Vec<_> = flags.into_iter().collect();
    // `vars` would panic on a variable of somebody else that is no UTF-8.
    let environment =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    Config::load(&flags, environment).map_err(|error| configuration(py, error))
}

/// A list of token ids, converted once per request.
pub(crate) fn tokens_of(list: &Bound<'_, PyList>, name: &str) -> PyResult<Vec<u32>> {
    let mut tokens = Vec::with_capacity(list.len());
    for (at, item) in list.iter().enumerate() {
        tokens.push(item.extract().map_err(|_| {
            pyo3::exceptions::PyValueError::new_err(format!("{name}[{at}] is no token id: 0 to {}", u32::MAX))
        })?);
    }
    Ok(tokens)
}

/// The machine counts in u32; no engine's pool or prompt is larger.
pub(crate) fn units(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
