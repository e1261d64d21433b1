//! How far it is, on the error stream: one line that changes, on a terminal only.

use std::{
    io::{IsTerminal, Write, stderr},
    time::{Duration, Instant},
};

/// Steps of about the same length.
pub struct Progress {
    steps: usize,
    begun: usize,
    since: Instant,
}

impl Progress {
    /// Of so many steps.
    pub fn new(steps: usize) -> Self {
        Progress {
            steps,
            begun: 0,
            since: Instant::now(),
        }
    }

    /// The next step begins.
    pub fn step(&mut self, what: &str) {
        self.begun += 1;
        if !stderr().is_terminal() {
            return;
        }
        let line = line(self.begun, self.steps, self.since.elapsed(), what);
        let mut out = stderr();
        // Nobody to tell is no fault.
        let _ = write!(out, "\r\x1b[K{line}").and_then(|()| out.flush());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        clear();
    }
}

/// Takes the line away.
pub fn clear() {
    if stderr().is_terminal() {
        // Nobody to tell is no fault.
        let _ = write!(stderr(), "\r\x1b[K");
    }
}

fn line(begun: usize, steps: usize, elapsed: Duration, what: &str) -> String {
    let done = begun.saturating_sub(1);
    let left = match done {
        0 => String::new(),
        done => {
            let each = elapsed.as_secs_f64() / done as f64;
            format!(", {:.0} s left", each * steps.saturating_sub(done) as f64)
        }
    };
    format!("[{begun}/{steps}{left}] {what}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_what_runs_and_how_long_the_rest_takes() {
        assert_eq!(line(1, 4, Duration::ZERO, "tcp"), "[1/4] tcp");
        assert_eq!(line(3, 4, Duration::from_secs(6), "shm"), "[3/4, 6 s left] shm");
        assert_eq!(line(9, 4, Duration::from_secs(6), "shm"), "[9/4, 0 s left] shm");
    }
}
