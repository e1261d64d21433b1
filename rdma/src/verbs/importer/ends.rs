//! What fails or runs out: reads that are late, paths, lines, devices. One that is lost takes nothing else with it.

use std::time::{Duration, Instant};

use super::{
    super::{device::Event, error::VerbsError, line::State},
    Importer,
};
use crate::error::{MoverError, Wait};

/// How long a read that ends waits for its work before its queue pairs are failed.
const GRACE: Duration = Duration::from_millis(10);

impl Importer<'_> {
    /// F16's sibling for devices: a port that goes down takes its paths with it and no others.
    pub(super) fn hear_device(&mut self, at: usize) {
        let rails = self.rails;
        let Some(rail) = rails.get(at) else { return };
        while let Some(event) = rail.domain.device.event() {
            let (device, port) = (rail.choice.device.as_str(), rail.choice.port);
            match event {
                Event::PortDown(number) if number == port => tracing::warn!(device, port, "port is down"),
                Event::Gone => tracing::warn!(device, "device is gone"),
                Event::PortUp(number) if number == port => {
                    tracing::info!(device, port, "port is up");
                    rail.set_down(false);
                    continue;
                }
                _ => continue,
            }
            rail.set_down(true);
            let now = Instant::now();
            for line in self.lines.keys().copied().collect::<Vec<_>>() {
                let paths = self.lines.get(&line).map_or(0, |line| line.paths.len());
                for path in 0..paths {
                    if self.lines.get(&line).is_some_and(|line| line.paths[path].rail == at) {
                        self.lose_path(line, path, VerbsError::DeviceDown { device: device.into() }.into(), now);
                    }
                }
                // One that was still greeting counted on the device.
                if self
                    .lines
                    .get(&line)
                    .is_some_and(|line| !matches!(line.state, State::Open))
                {
                    self.end_line(line, VerbsError::DeviceDown { device: device.into() }.into(), None, now);
                }
            }
        }
    }

    /// No more over this path; the line goes on over the others.
    pub(super) fn lose_path(&mut self, at: usize, path: usize, error: MoverError, now: Instant) {
        let Some(line) = self.lines.get_mut(&at) else { return };
        let Some(lost) = line.paths.get_mut(path).filter(|path| !path.dead) else {
            return;
        };
        lost.dead = true;
        lost.queues.iter().for_each(|(_, queue)| queue.fail());
        if line.ending.is_some() {
            return;
        }
        if line.paths.iter().all(|path| path.dead) {
            return self.end_line(at, error, None, now);
        }
        tracing::warn!(peer = %line.peer, %error, "a path is lost, the others carry on");
    }

    pub(super) fn end_line(&mut self, at: usize, error: MoverError, blame: Option<u64>, now: Instant) {
        let Some(line) = self.lines.get_mut(&at) else { return };
        line.end(error, blame, now);
        // Fails only for a socket that is not registered, which is what is wanted.
        let _ = self.poll.registry().deregister(&mut line.socket);
        let key = (line.address, line.token.0);
        if self.current.get(&key) == Some(&at) {
            self.current.remove(&key);
        }
    }

    /// Takes an ended line apart once nothing of it is on its way, or once its peer and device had all the time there is:
    /// then destroying the queue pairs is the fence.
    pub(super) fn bury(&mut self, at: usize, now: Instant) {
        let Some(line) = self.lines.get(&at) else { return };
        let Some(ending) = &line.ending else { return };
        let drained = line.outstanding() == 0;
        let late = now.saturating_duration_since(ending.since) >= self.config.stall;
        if !drained && !late {
            return;
        }
        let Some(line) = self.lines.remove(&at) else { return };
        let Some(ending) = line.ending.as_ref() else { return };
        let (error, blame) = (ending.error.clone(), ending.blame);
        for path in &line.paths {
            for (number, queue) in &path.queues {
                self.queues.remove(number);
                self.posted[path.rail] -= queue.outstanding();
            }
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
            let stale = read.on_old_line || blame.is_some_and(|blamed| blamed != id);
            if let Some((error, _)) = read.ending.take() {
                self.finish(id, Err(error));
            } else if stale && !read.restarted {
                read.restarted = true;
                self.place(id, now);
            } else {
                self.finish(id, Err(error.clone()));
            }
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
            self.end_line(line, error, Some(id), now);
        }
        let overdue = self.lines.iter().filter(|(_, line)| line.ending.is_none());
        let overdue: Vec<(usize, MoverError)> = overdue
            .filter_map(|(at, line)| Some((*at, line.overdue(&self.config, now)?)))
            .collect();
        overdue
            .into_iter()
            .for_each(|(at, error)| self.end_line(at, error, None, now));
        for (at, rail) in self.rails.iter().enumerate().filter(|(_, rail)| rail.is_down()) {
            let device = &rail.choice.device;
            let on_it = self.lines.iter().flat_map(|(line, each)| {
                each.paths
                    .iter()
                    .enumerate()
                    .filter(|(_, path)| path.rail == at && !path.dead)
                    .map(|(path, _)| (*line, path))
            });
            for (line, path) in on_it.collect::<Vec<_>>() {
                self.lose_path(
                    line,
                    path,
                    VerbsError::DeviceDown { device: device.clone() }.into(),
                    now,
                );
            }
        }
    }
}
