//! From a grant to bytes that landed: keys, batches, completions.

use std::time::Instant;

use super::{
    super::{
        device::Completion,
        error::VerbsError,
        job::{Cut, Job},
        library::ffi::ibv_wc_status as Status,
        line::{Cause, Heard},
        wire::Grant,
        work::{Finished, PIECES, status},
    },
    Importer,
};
use crate::error::MoverError;

/// Bytes of a batch, so that a large run is spread over the queue pairs.
const BATCH: u64 = 1 << 20;
/// How often a chunk is read again over another path.
const TRIES: u8 = 4;

impl Importer<'_> {
    pub(super) fn hear(&mut self, at: usize, heard: Heard, now: Instant) {
        match heard {
            Heard::Welcome => {
                let Some(line) = self.lines.get_mut(&at) else { return };
                for (path, each) in line.paths.iter_mut().enumerate() {
                    for (place, (number, _)) in each.queues.iter_mut().enumerate() {
                        *number = self.next_queue;
                        self.queues.insert(self.next_queue, (at, path, place));
                        self.next_queue = self.next_queue.wrapping_add(1);
                    }
                }
            }
            Heard::Granted(job, grant) => self.grant(at, job, grant, now),
            Heard::Refused(job, head) => {
                let Some(job) = self.jobs.remove(job) else { return };
                let Some(line) = self.lines.get_mut(&at) else { return };
                line.inflight -= job.chunk.len;
                let error = line.refusal(&head, &job.chunk.remote);
                self.give_up(job.read, error, now);
                self.pump(at, now);
            }
        }
    }

    /// XFER-10: keys are taken for what was asked, and only when they cover it.
    pub(super) fn grant(&mut self, at: usize, number: usize, grant: Grant, now: Instant) {
        let Some((line, job)) = self.lines.get_mut(&at).zip(self.jobs.one(number)) else {
            return;
        };
        let named = |region| job.chunk.remote.iter().any(|run| run.region == region);
        let stray = grant
            .regions
            .iter()
            .map(|each| each.region)
            .find(|region| !named(*region));
        for each in grant.regions {
            line.keys.learn(each.region, each.len, each.keys);
        }
        let bare = job
            .chunk
            .remote
            .iter()
            .find(|run| !line.keys.covers(run))
            .map(|run| run.region);
        if let Some(region) = stray.or(bare) {
            let error = VerbsError::StrayKey {
                peer: line.peer.to_string(),
                region: region.0,
            };
            return self.end_line(at, error.into(), Cause::Peer, now);
        }
        if let Some(read) = self.reads.get_mut(&job.read) {
            read.on_old_line = false;
        }
        job.crc = grant.crc;
        line.ready.push_back(number);
    }

    /// Posts what is granted, in batches, each to the queue pair with the fewest bytes on its way.
    pub(super) fn post(&mut self, at: usize, now: Instant) -> bool {
        let mut moved = false;
        while let Some(number) = self.lines.get(&at).and_then(|line| line.ready.front().copied()) {
            let Some(line) = self.lines.get_mut(&at).filter(|line| line.ending.is_none()) else {
                break;
            };
            let Some(job) = self.jobs.one(number) else {
                line.ready.pop_front();
                continue;
            };
            let over = self.reads.get(&job.read).is_none_or(|read| read.ending.is_some());
            if over || job.failed || job.cut.is_done(&job.chunk) {
                line.ready.pop_front();
                self.settle(number, now);
                continue;
            }
            let streams = self.reads.get(&job.read).map_or(1, |read| read.options.streams);
            let left = |rail: usize| self.rails[rail].completions.size - self.posted[rail];
            let Some((path, place, room)) = line.roomiest(job.read, streams, left) else {
                break;
            };
            let pieces = self.rails[line.paths[path].rail].pieces;
            let view = self.memory.view();
            let mut batch = self.scratch.batch();
            let (mut bytes, mut outside) = (0, None);
            while batch.len() < room as usize && bytes < BATCH {
                let before = job.cut;
                let Some(request) = job.cut.next(&job.chunk, pieces) else {
                    break;
                };
                let mut landings = [None; PIECES];
                for (landing, local) in landings.iter_mut().zip(request.local()) {
                    *landing = view.landing(line.paths[path].rail, local);
                }
                let known = landings.iter().flatten().count();
                let (Some(key), true, Some(first)) = (
                    line.keys.key(path, &request.remote),
                    known == request.local().len(),
                    landings[0],
                ) else {
                    outside = request.local().first().copied();
                    break;
                };
                let landings = landings.map(|landing| landing.unwrap_or(first));
                if !batch.push(key, &landings[..known]) {
                    job.cut = before;
                    break;
                }
                bytes += request.remote.len;
            }
            if let Some(run) = outside {
                // Checked when the read began, and regions only come: not reached.
                let read = job.read;
                job.failed = true;
                self.give_up(read, MoverError::LocalRange { run }, now);
                continue;
            }
            let rail = line.paths[path].rail;
            let Some((id, queue)) = line.paths[path].queues.get_mut(place) else {
                break;
            };
            let before = queue.outstanding();
            let posted = queue.post(*id, number, batch);
            let count = queue.outstanding() - before;
            self.posted[rail] += count;
            if count > 0 {
                moved = true;
                job.outstanding += 1;
                if let Some(read) = self.reads.get_mut(&job.read) {
                    read.outstanding += 1;
                }
            }
            if let Err(errno) = posted {
                let device = self.rails[rail].choice.device.clone();
                let error = VerbsError::Call {
                    call: "ibv_post_send",
                    device,
                    errno,
                };
                job.failed = true;
                self.lose_path(at, path, error.into(), now);
            }
        }
        moved
    }

    /// Takes completions off every rail.
    pub(super) fn complete(&mut self, now: Instant) -> bool {
        let mut moved = false;
        for (at, rail) in self.rails.iter().enumerate() {
            loop {
                self.completions.clear();
                let polled = rail.poll(&mut self.completions);
                let completions = std::mem::take(&mut self.completions);
                completions.iter().for_each(|completion| self.take(at, completion, now));
                let count = completions.len();
                self.completions = completions;
                moved |= count > 0;
                match polled {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(error) => {
                        // A queue that overran or a device that is gone: nothing on it completes any more.
                        if rail.lose() {
                            tracing::error!(%error, "completions are lost");
                        }
                        break;
                    }
                }
            }
        }
        moved
    }

    pub(super) fn take(&mut self, rail: usize, completion: &Completion, now: Instant) {
        // Of a queue pair that was destroyed before it drained.
        let Some(&(at, path, place)) = self.queues.get(&((completion.id >> 32) as u32)) else {
            return;
        };
        let Some(line) = self.lines.get_mut(&at) else { return };
        let Some((_, queue)) = line.paths.get_mut(path).and_then(|path| path.queues.get_mut(place)) else {
            return;
        };
        let was_well = queue.failed().is_none();
        queue.complete(completion, &mut self.finished);
        if completion.error.is_none() {
            line.moved = now;
        }
        let failed = queue
            .failed()
            .filter(|_| was_well)
            .map(|failed| (failed, line.peer.to_string()));
        let mut finished = std::mem::take(&mut self.finished);
        self.account(rail, &finished, now);
        finished.clear();
        self.finished = finished;
        if let Some(((code, vendor), peer)) = failed {
            // A port that went down may be why: it is told apart from this.
            self.hear_device(rail);
            let device = self.rails[rail].choice.device.clone();
            let error = match code {
                _ if self.rails[rail].is_down() => self.rails[rail].loss().into(),
                Status::IBV_WC_RETRY_EXC_ERR | Status::IBV_WC_RNR_RETRY_EXC_ERR | Status::IBV_WC_RESP_TIMEOUT_ERR => {
                    MoverError::PeerGone {
                        peer,
                        errno: libc::ETIMEDOUT,
                    }
                }
                _ => VerbsError::Work {
                    peer,
                    device,
                    status: status(code),
                    vendor,
                }
                .into(),
            };
            self.lose_path(at, path, error, now);
        }
    }

    /// Batches over a rail that are not on their way any more.
    pub(super) fn account(&mut self, rail: usize, finished: &[Finished], now: Instant) {
        for batch in finished {
            self.posted[rail] -= batch.requests;
            if let Some(job) = self.jobs.one(batch.job) {
                job.outstanding -= 1;
                job.failed |= !batch.whole;
                if let Some(read) = self.reads.get_mut(&job.read) {
                    read.outstanding -= 1;
                }
            }
            self.settle(batch.job, now);
        }
    }

    /// Looks whether a job, and with it its read, is complete.
    pub(super) fn settle(&mut self, number: usize, now: Instant) {
        let Some(job) = self.jobs.one(number) else { return };
        if job.outstanding > 0 {
            return;
        }
        let (id, at) = (job.read, job.line);
        let Some(line) = self.lines.get_mut(&at) else { return };
        let over = self.reads.get(&id).is_none_or(|read| read.ending.is_some());
        if !over && job.failed {
            // Its bytes are read again: over another path of this line, or by another line once this one has ended.
            if line.ending.is_none() && line.paths.iter().any(|path| !path.is_dead()) {
                job.tries += 1;
                let tried = job.tries > TRIES;
                (job.failed, job.cut) = (false, Cut::default());
                if tried {
                    let peer = line.peer.to_string();
                    return self.give_up(id, MoverError::PeerGone { peer, errno: libc::EIO }, now);
                }
                if !line.ready.contains(&number) {
                    line.ready.push_front(number);
                }
            }
            return;
        }
        if !over && !job.cut.is_done(&job.chunk) {
            return;
        }
        let Some(job) = self.jobs.remove(number) else { return };
        line.inflight -= job.chunk.len;
        line.ready.retain(|each| *each != number);
        if over {
            self.drained(id);
        } else {
            match self.check(&job) {
                Err(error) => self.give_up(id, error, now),
                Ok(()) => self.land(id, job.chunk.len),
            }
        }
        self.pump(at, now);
    }

    /// XFER-8: the bytes that landed are those that were granted.
    pub(super) fn check(&self, job: &Job) -> Result<(), MoverError> {
        #[cfg(feature = "fault")]
        self.flip(job);
        let Some(read) = self.reads.get(&job.read).filter(|read| read.options.checksum) else {
            return Ok(());
        };
        let view = self.memory.view();
        let got = job.chunk.local.iter().fold(0, |crc, run| {
            // SAFETY: obligation 4 — the read owns its landing runs, and nothing of this chunk is on its way any more.
            let bytes = unsafe { view.bytes(run) };
            bytes.map_or(crc, |bytes| crc32c::crc32c_append(crc, bytes))
        });
        if got == job.crc {
            return Ok(());
        }
        Err(MoverError::Checksum {
            peer: read.peer.to_string(),
            got,
            expected: job.crc,
        })
    }

    #[cfg(feature = "fault")]
    pub(super) fn flip(&self, job: &Job) {
        use crate::fault::Effect;
        let fault = *self.fault.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some(Effect::Flip(_, index)) = fault.map(|fault| fault.effect(job.base, job.chunk.len as usize)) else {
            return;
        };
        let mut index = index as u64;
        for run in &job.chunk.local {
            if index < run.len {
                let at = crate::region::Run {
                    offset: run.offset + index,
                    len: 1,
                    ..*run
                };
                // SAFETY: obligation 4 — the read owns its landing runs, and nothing of this chunk is on its way.
                return unsafe { self.memory.view().flip(&at) };
            }
            index -= run.len;
        }
    }

    /// Asks for an event at the next completion of every rail with work on it; whether there is any.
    pub(super) fn arm(&mut self) -> bool {
        let mut any = false;
        for (rail, _) in self.rails.iter().zip(&self.posted).filter(|(_, posted)| **posted > 0) {
            any = true;
            if let Err(error) = rail.completions.arm()
                && rail.lose()
            {
                tracing::error!(%error, "completions are not announced");
            }
        }
        any
    }
}
