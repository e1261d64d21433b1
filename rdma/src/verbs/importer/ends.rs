//! What fails or runs out: reads that are late, paths, lines, devices. One that is lost takes nothing else with it.

use std::time::{Duration, Instant};

use super::{
    super::{
        device::Event,
        line::{Cause, Line, Path},
    },
    Importer,
};
use crate::error::{MoverError, Wait};

/// How long a read that ends waits for its work before its queue pairs are failed.
const GRACE: Duration = Duration::from_millis(10);
/// How long a queue pair that was failed may take to flush before it is destroyed, which is the fence as well. A device
/// that is there flushes in microseconds.
const FLUSH: Duration = Duration::from_millis(50);

impl Importer<'_> {
    /// F16's sibling for devices: a port that goes down takes its paths with it and no others.
    pub(super) fn hear_device(&mut self, at: usize) {
        let rails = self.rails;
        let Some(rail) = rails.get(at) else { return };
        while let Some(event) = rail.domain.device.event() {
            let (device, port) = (rail.choice.device.as_str(), rail.choice.port);
            match event {
                Event::PortDown(number) if number == port => {
                    tracing::warn!(device, port, "port is down");
                    rail.set_down(true);
                }
                Event::PortUp(number) if number == port => {
                    tracing::info!(device, port, "port is up");
                    rail.set_down(false);
                    continue;
                }
                Event::Gone if rail.lose() => tracing::error!(device, "device is gone"),
                Event::Overrun if rail.lose() => tracing::error!(device, "a completion queue overran"),
                _ => continue,
            }
            self.leave(at, Instant::now());
        }
    }

    /// Takes every line off a device that is down.
    fn leave(&mut self, rail: usize, now: Instant) {
        for at in self.lines.keys().copied().collect::<Vec<_>>() {
            let loss = || MoverError::from(self.rails[rail].loss());
            let Some(line) = self.lines.get(&at) else { continue };
            // One that is still greeting with it begins again without.
            if line.greets_with(rail) && line.ending.is_none() {
                self.end_line(at, loss(), Cause::Device, now);
                continue;
            }
            let on_it = line.paths.iter().enumerate().filter(|(_, path)| path.rail == rail);
            for path in on_it.map(|(path, _)| path).collect::<Vec<_>>() {
                self.lose_path(at, path, loss(), now);
            }
        }
    }

    /// No more over this path; the line goes on over the others.
    pub(super) fn lose_path(&mut self, at: usize, path: usize, error: MoverError, now: Instant) {
        let Some(line) = self.lines.get_mut(&at) else { return };
        let Some(lost) = line.paths.get_mut(path).filter(|path| !path.is_dead()) else {
            return;
        };
        lost.fail(now);
        if line.ending.is_some() {
            return;
        }
        if line.paths.iter().all(|path| path.is_dead()) {
            return self.end_line(at, error, Cause::Peer, now);
        }
        tracing::warn!(peer = %line.peer, %error, "a path is lost, the others carry on");
    }

    pub(super) fn end_line(&mut self, at: usize, error: MoverError, cause: Cause, now: Instant) {
        let Some(line) = self.lines.get_mut(&at) else { return };
        line.end(error, cause, now);
        // Fails only for a socket that is not registered, which is what is wanted.
        let _ = self.poll.registry().deregister(&mut line.socket);
        let key = (line.address, line.token.0);
        if self.current.get(&key) == Some(&at) {
            self.current.remove(&key);
        }
    }

    /// Takes an ended line apart once nothing of it is on its way.
    pub(super) fn bury(&mut self, at: usize, now: Instant) {
        let is_over = |line: &Line<'_>| line.ending.is_some() && line.outstanding() == 0;
        if !self.lines.get(&at).is_some_and(is_over) {
            return;
        }
        let Some(line) = self.lines.remove(&at) else { return };
        let Some(ending) = line.ending.as_ref() else { return };
        let (error, cause) = (ending.error.clone(), ending.cause);
        for (number, _) in line.paths.iter().flat_map(|path| &path.queues) {
            self.queues.remove(number);
        }
        drop(line);
        for number in self.jobs.of_line(at) {
            let Some(job) = self.jobs.remove(number) else { continue };
            if let Some(read) = self.reads.get_mut(&job.read) {
                read.waiting.push_front((job.base, job.chunk));
            }
        }
        let reads: Vec<u64> = self
            .reads
            .iter()
            .filter(|(_, read)| read.line == at)
            .map(|(id, _)| *id)
            .collect();
        for id in reads {
            let Some(read) = self.reads.get_mut(&id) else { continue };
            read.outstanding = 0;
            let again = match cause {
                Cause::Peer => read.on_old_line && !read.restarted,
                Cause::Read(which) => which != id,
                Cause::Device => true,
            };
            if let Some((error, _)) = read.ending.take() {
                self.finish(id, Err(error));
            } else if again {
                read.restarted |= cause == Cause::Peer;
                self.place(id, now);
            } else {
                self.finish(id, Err(error.clone()));
            }
        }
    }

    /// Destroys the queue pairs that were failed and have not flushed: their device is gone, or too slow to wait for.
    fn abandon(&mut self, now: Instant) {
        let late = |path: &Path<'_>| {
            path.dead
                .is_some_and(|since| now.saturating_duration_since(since) >= FLUSH)
                && path.queues.iter().any(|(_, queue)| queue.outstanding() > 0)
        };
        let paths = self.lines.iter().flat_map(|(at, line)| {
            let late = line.paths.iter().enumerate().filter(|(_, path)| late(path));
            late.map(|(path, _)| (*at, path))
        });
        let paths: Vec<(usize, usize)> = paths.collect();
        if paths.is_empty() {
            return;
        }
        for (at, path) in &paths {
            if let Some(path) = self.lines.get_mut(at).and_then(|line| line.paths.get_mut(*path)) {
                tracing::debug!(
                    device = self.rails[path.rail].choice.device,
                    "queue pairs did not flush"
                );
                path.queues.iter_mut().for_each(|(_, queue)| queue.destroy());
            }
        }
        // What they had told before is taken off the completion queue first, so that what is posted still fits it.
        self.complete(now);
        for (at, path) in paths {
            let Some(path) = self.lines.get_mut(&at).and_then(|line| line.paths.get_mut(path)) else {
                continue;
            };
            let rail = path.rail;
            let mut finished = std::mem::take(&mut self.finished);
            path.queues
                .iter_mut()
                .for_each(|(_, queue)| queue.abandon(&mut finished));
            self.account(rail, &finished, now);
            finished.clear();
            self.finished = finished;
        }
    }

    pub(super) fn sweep(&mut self, now: Instant) {
        let late = self
            .reads
            .iter()
            .filter(|(_, read)| now.saturating_duration_since(read.begun) >= read.options.deadline);
        let late: Vec<(u64, String, Duration)> = late
            .map(|(id, read)| (*id, read.peer.to_string(), read.options.deadline))
            .collect();
        for (id, peer, limit) in late {
            self.give_up(
                id,
                MoverError::Timeout {
                    peer,
                    wait: Wait::Deadline,
                    limit,
                },
                now,
            );
        }
        let stuck = self.reads.iter().filter_map(|(id, read)| {
            let (error, since) = read.ending.as_ref()?;
            (now.saturating_duration_since(*since) >= GRACE).then(|| (*id, read.line, error.clone()))
        });
        for (id, line, error) in stuck.collect::<Vec<_>>() {
            self.end_line(line, error, Cause::Read(id), now);
        }
        let overdue = self.lines.iter().filter(|(_, line)| line.ending.is_none());
        let overdue: Vec<(usize, MoverError)> = overdue
            .filter_map(|(at, line)| Some((*at, line.overdue(&self.config, now)?)))
            .collect();
        overdue
            .into_iter()
            .for_each(|(at, error)| self.end_line(at, error, Cause::Peer, now));
        for rail in 0..self.rails.len() {
            if self.rails[rail].is_down() {
                self.leave(rail, now);
            }
        }
        self.abandon(now);
    }
}
