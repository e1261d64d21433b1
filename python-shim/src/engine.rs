//! The module of one engine process.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kvc_engine_ext::{Config, EngineFacts};
use kvc_proto::{
    id::{ImportId, PrefixHandle, SessionId, TurnId},
    worker::{Arrival, Identity, Prompt, Snapshot},
};
use pyo3::{
    prelude::*,
    types::{PyDict, PyList},
};
use tracing_subscriber::EnvFilter;

use crate::{
    command,
    error::{bad_request, configuration, refused},
    frees::{self, Frees, frees},
    layout::{self, Layout},
    memory::{self, Tensor},
    module::Module,
    tag::TurnTag,
    turn::Turn,
};

/// Threads, listeners and the machine. Its methods are for the engine's scheduler thread.
#[pyclass(frozen, module = "kvc._native")]
pub(crate) struct Engine(Arc<Module>);

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
        py.detach(|| kvc_engine_ext::Engine::start(config, facts))
            .map(|engine| Self(Arc::new(Module::new(engine))))
            .map_err(|error| configuration(py, error))
    }

    /// `host:port` of the module's HTTP listener.
    #[getter]
    fn listen(&self) -> String {
        self.0.engine().listen().to_string()
    }

    /// `host:port` of the peer control plane.
    #[getter]
    fn peer(&self) -> String {
        self.0.engine().peer_listen().to_string()
    }

    /// The module has failed: sessions are off, what they held stays allocated until the engine flushes.
    #[getter]
    fn faulted(&self) -> bool {
        self.0.faulted()
    }

    /// A session turn reached the scheduler with a prompt of `tokens`. If the session's history is `known` tokens long, as
    /// its last turn left it, the prompt begins with it and is not compared again; 0: it is. `Refused` if it may not run;
    /// `None` if sessions are off.
    fn arrive(
        &self,
        py: Python<'_>,
        tag: &TurnTag,
        identity: &str,
        tokens: &Bound<'_, PyList>,
        known: usize,
        max_new: u64,
    ) -> PyResult<Option<Turn>> {
        let tag = &tag.0;
        let appends = known > 0
            && known < tokens.len()
            && units(known) == self.0.ask(|worker, _| worker.history_len(&tag.session));
        let after = if appends { known } else { 0 };
        let tokens =
            tokens_of(tokens, after, "input_ids").map_err(|error| bad_request(py, error.value(py).to_string()))?;
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
        self.0
            .tell(py, |worker, now| Some(worker.arrive(arrival, now)))
            .transpose()
            .map(|id| id.map(|id| Turn::new(self.0.clone(), id)))
            .map_err(|refusal| refused(py, &refusal))
    }

    /// Tokens of history held for a session, 0 if none.
    fn history_len(&self, session: &str) -> u32 {
        SessionId::new(session).map_or(0, |session| self.0.ask(|worker, _| worker.history_len(&session)))
    }

    /// Tokens that `victim` can free.
    fn evictable(&self) -> u32 {
        self.0.ask(|worker, _| worker.evictable())
    }

    /// Tokens that neither the engine nor a running request nor an idle session accounts for.
    fn held(&self) -> u32 {
        self.0.ask(|worker, _| worker.held())
    }

    /// Handles of idle sessions' shared prefixes.
    fn idle_prefixes(&self) -> Vec<u64> {
        self.0
            .ask(|worker, _| worker.idle_prefixes().map(|handle| handle.0).collect())
    }

    /// What the next idle session gives up, or `None`: there is none.
    fn victim(&self, py: Python<'_>) -> Option<Frees> {
        self.0
            .tell(py, |worker, now| worker.victim(now))
            .map(|victim| frees::always(py, victim.frees))
    }

    /// Once per loop iteration: the engine's numbers in, commands out.
    #[pyo3(signature = (*, free, tree_evictable, running, waiting, pending_prefill_tokens, reserved, allocated))]
    #[allow(clippy::too_many_arguments)]
    fn poll(
        &self,
        py: Python<'_>,
        free: usize,
        tree_evictable: usize,
        running: usize,
        waiting: usize,
        pending_prefill_tokens: u64,
        reserved: usize,
        allocated: Vec<(u64, usize)>,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let snapshot = Snapshot {
            free: units(free),
            tree_evictable: units(tree_evictable),
            running: units(running),
            waiting: units(waiting),
            pending_prefill_tokens,
            reserved: units(reserved),
            allocated: allocated
                .into_iter()
                .map(|(turn, tokens)| (TurnId(turn), units(tokens)))
                .collect(),
        };
        let commands = py.detach(|| self.0.poll(&snapshot));
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
        let given = memory::read(head, |head| {
            memory::read(slots, |slots| {
                self.0.tell(py, |worker, now| {
                    worker.landed(ImportId(import_id), units(have), PrefixHandle(prefix), head, slots, now)
                })
            })
        })??;
        Ok(frees(py, given))
    }

    /// Answer to `Land`: there is no room.
    fn land_failed(&self, py: Python<'_>, import_id: u64) {
        self.0
            .tell(py, |worker, now| worker.land_failed(ImportId(import_id), now));
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
        let given = memory::read(head, |head| {
            self.0.tell(py, |worker, now| {
                worker.import_shared(ImportId(import_id), units(shared), PrefixHandle(prefix), head, now)
            })
        })?;
        Ok(frees(py, given))
    }

    /// Answer to `Commit`: done.
    fn import_committed(&self, py: Python<'_>, import_id: u64) {
        self.0
            .tell(py, |worker, now| worker.import_committed(ImportId(import_id), now));
    }

    /// The engine clears its pool: every KV is forgotten, every lease and import fenced.
    fn flush(&self, py: Python<'_>) {
        self.0.tell(py, |worker, now| worker.flush(now));
    }

    /// Drops a session's KV; true: at the end of its running turn.
    fn close(&self, py: Python<'_>, session: &str) -> bool {
        SessionId::new(session).is_ok_and(|session| self.0.tell(py, |worker, now| worker.close(&session, now)))
    }

    /// A descriptor that becomes readable when the loop has work.
    fn wake_fd(&self) -> i32 {
        self.0.engine().wake_fd()
    }

    /// Makes it unreadable.
    fn clear_wake(&self) {
        self.0.with(kvc_engine_ext::Engine::clear_wake);
    }

    /// Ends threads and listeners; nothing reads or writes the pool afterwards.
    fn shutdown(&self, py: Python<'_>) {
        py.detach(|| self.0.with(|engine| engine.shutdown(Duration::from_secs(2))));
    }

    /// Slows the pulls into this worker down to so many bytes per second in all, 0: not at all. For tests that act in the
    /// middle of one.
    fn limit_pulls(&self, bytes_per_s: u64) {
        self.0.with(|engine| engine.limit_pulls(bytes_per_s));
    }

    /// The session of a running import.
    fn session_of(&self, import_id: u64) -> Option<String> {
        let transfers = self.0.ask(|worker, now| worker.transfers(now));
        let import = transfers
            .imports
            .into_iter()
            .find(|import| import.import.0 == import_id)?;
        Some(import.session_id.as_str().to_owned())
    }

    /// The first sessions by id, for tests: id → {"state", "standing", "tokens", "shared", "leases"}.
    fn sessions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let out = PyDict::new(py);
        for view in self.0.ask(|worker, now| worker.sessions(None, 1000, now).sessions) {
            let session = PyDict::new(py);
            session.set_item("state", &view.state)?;
            session.set_item("standing", format!("{:?}", view.standing).to_lowercase())?;
            session.set_item("tokens", view.committed)?;
            session.set_item("shared", view.shared)?;
            session.set_item("leases", view.leases)?;
            out.set_item(view.session_id.as_str(), session)?;
        }
        Ok(out)
    }

    /// What the machine counts, for tests.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.0.ask(|worker, _| worker.counters().clone());
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
            ("announced", counters.announced),
            ("announcements", counters.announcements),
            ("syncs", counters.syncs),
            ("handed_over", counters.handed_over),
            ("taken_over", counters.taken_over),
            ("superseded_turns", counters.superseded_turns),
        ] {
            out.set_item(name, count)?;
        }
        Ok(out)
    }

    /// Fails as a bug in the module would, for tests: the engine must go on.
    fn fail(&self) {
        self.0.ask(|_, _| -> () { panic!("asked to fail by a test") });
    }
}

/// Reads file, environment and flags as `Engine` will and returns what the Python side must know: `listen`, `drain_ms`,
/// `movers`.
/// `ConfigurationError` says in one line what is wrong and how to fix it.
#[pyfunction]
pub(crate) fn settings<'py>(py: Python<'py>, flags: BTreeMap<String, String>) -> PyResult<Bound<'py, PyDict>> {
    let config = load(py, flags)?;
    let out = PyDict::new(py);
    out.set_item("listen", config.listen.to_string())?;
    out.set_item("drain_ms", config.drain.as_millis().to_string())?;
    let movers: Vec<_> = config.movers.iter().map(|kind| kind.as_str()).collect();
    out.set_item("movers", movers.join(","))?;
    Ok(out)
}

/// Whether this machine has what the settings demand for moving KV of a pool on `device`, asked before the model is loaded.
/// `ConfigurationError` if not.
#[pyfunction]
pub(crate) fn preflight(py: Python<'_>, flags: BTreeMap<String, String>, device: &str) -> PyResult<()> {
    let config = load(py, flags)?;
    let device = layout::device(py, device)?;
    py.detach(|| kvc_engine_ext::preflight(&config, device))
        .map_err(|error| configuration(py, error))
}

fn load(py: Python<'_>, flags: BTreeMap<String, String>) -> PyResult<Config> {
    let flags: Vec<_> = flags.into_iter().collect();
    // `vars` would panic on a variable of somebody else that is no UTF-8.
    let environment =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    Config::load(&flags, environment).map_err(|error| configuration(py, error))
}

/// A list of token ids from position `from` on, converted once per request.
pub(crate) fn tokens_of(list: &Bound<'_, PyList>, from: usize, name: &str) -> PyResult<Vec<u32>> {
    let mut tokens = Vec::with_capacity(list.len().saturating_sub(from));
    for at in from..list.len() {
        tokens.push(list.get_item(at)?.extract().map_err(|_| {
            pyo3::exceptions::PyValueError::new_err(format!("{name}[{at}] is no token id: 0 to {}", u32::MAX))
        })?);
    }
    Ok(tokens)
}

/// The machine counts in u32; no engine's pool or prompt is larger.
pub(crate) fn units(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
