//! Processes that this one starts: `serve`, iperf3, perftest. None outlives it, whether it ends, fails or is interrupted.
//! `ends` and the tools' files start them, `interrupt` ends them.

use std::{
    io::{self, Read},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};

static ALL: Mutex<Vec<Weak<Mutex<Child>>>> = Mutex::new(Vec::new());

/// A running process; dropping it kills it.
pub struct Process(Arc<Mutex<Child>>);

/// What one said before it ended.
pub struct Output {
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output.
    pub said: String,
    /// Its standard error.
    pub complained: String,
}

impl Process {
    /// Starts it with its output and errors to be read here.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let mut all = lock(&ALL);
        let child = command.stdout(Stdio::piped()).spawn()?;
        let process = Process(Arc::new(Mutex::new(child)));
        all.retain(|each| each.strong_count() > 0);
        all.push(Arc::downgrade(&process.0));
        Ok(process)
    }

    /// For its pipes.
    pub fn child(&self) -> MutexGuard<'_, Child> {
        lock(&self.0)
    }

    /// Whether it runs no more.
    pub fn has_ended(&self) -> bool {
        !matches!(self.child().try_wait(), Ok(None))
    }

    /// Waits for its end, and kills it after `limit`. Wants both pipes.
    pub fn output(self, limit: Duration) -> Result<Output> {
        let (stdout, stderr) = {
            let mut child = self.child();
            (child.stdout.take(), child.stderr.take())
        };
        let (said, complained) = (collect(stdout)?, collect(stderr)?);
        let Ok(said) = said.recv_timeout(limit) else {
            bail!("no end after {} s", limit.as_secs());
        };
        // It closed its output, so this is short.
        let status = self.child().wait()?;
        Ok(Output {
            status,
            said,
            complained: complained.recv_timeout(limit).unwrap_or_default(),
        })
    }
}

impl Output {
    /// The last line of what went wrong.
    pub fn why(&self) -> String {
        let lines = self.said.lines().chain(self.complained.lines());
        let last = lines.map(str::trim).rfind(|line| !line.is_empty());
        last.map_or(self.status.to_string(), String::from)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        end(&mut self.child());
    }
}

/// Ends all that run. None can be started from here on: who calls this ends the process.
pub fn end_all() {
    let all = lock(&ALL);
    for child in all.iter().filter_map(Weak::upgrade) {
        end(&mut lock(&child));
    }
    std::mem::forget(all);
}

fn end(child: &mut Child) {
    // One that ended already says so, which is as good.
    child.kill().ok();
    child.wait().ok();
}

/// Reads a pipe to its end, beside whoever waits for it.
fn collect(pipe: Option<impl Read + Send + 'static>) -> Result<mpsc::Receiver<String>> {
    let mut pipe = pipe.context("a process without its pipes")?;
    let (text, collected) = mpsc::channel();
    thread::Builder::new().spawn(move || {
        let mut bytes = Vec::new();
        // What came before a fault is what there is.
        let _ = pipe.read_to_end(&mut bytes);
        // Nobody waits any more after the limit.
        let _ = text.send(String::from_utf8_lossy(&bytes).into_owned());
    })?;
    Ok(collected)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
