//! Ctrl-C and its like: what was started ends, the progress line goes, and the status says how it ended.

use std::{
    io, process,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};

use crate::{process::end_all, progress, report::complain};

/// A signal came.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// What a signal ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A measurement, which is not complete then: status 128 + the signal's number.
    Client,
    /// What runs until it is stopped: status 0.
    Server,
    /// A server that a client started, which says what there is to say and ends it.
    Spawned,
}

/// From now on a signal ends this process cleanly.
pub fn watch(role: Role) -> io::Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
    thread::Builder::new().name("kvc-perf-signals".into()).spawn(move || {
        // Ctrl-C reaches all processes of the terminal: the client says when a spawned server ends.
        let counts = |signal: &i32| role != Role::Spawned || *signal != SIGINT;
        let Some(signal) = signals.forever().find(counts) else {
            return;
        };
        BEGUN.store(true, Ordering::SeqCst);
        end_all();
        progress::clear();
        match role {
            Role::Client => complain("interrupted"),
            Role::Server => complain("stopped"),
            Role::Spawned => {}
        }
        process::exit(if role == Role::Client { 128 + signal } else { 0 });
    })?;
    Ok(())
}

/// Waits for the end if a signal brings it: what fails meanwhile fails because of it.
pub fn give_way() {
    while BEGUN.load(Ordering::SeqCst) {
        thread::park();
    }
}
