//! The naive books next to the worker's own: what running turns were promised, which placements it has accepted, and
//! that an admission stays below ρ·K_d.

use std::collections::{BTreeMap, BTreeSet};

use kvc_proto::{
    id::{Placement, ReservationId, SessionId},
    wire::{
        admit::{AdmitAnswer, AdmitRequest},
        info::SessionView,
    },
    worker::{Command, Snapshot},
};

use super::{
    engine::Request,
    oracle::Oracle,
    process::{Out, Process},
};

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Books {
    granted: BTreeSet<ReservationId>,
    placements: BTreeMap<SessionId, Placement>,
    /// The same as it was when the engine's loop last asked the machine: what an older turn says from then on is nobody's.
    closed: BTreeMap<SessionId, Placement>,
    /// Numbers that this process has withdrawn from for good (MIG-2).
    pub(super) withdrawn: BTreeSet<(SessionId, u64)>,
    /// Admissions granted and refused.
    pub admitted: u64,
    /// See there.
    pub refused: u64,
    /// Turns committed.
    pub commits: u64,
}

impl Process {
    /// An admission question, its answer looked at.
    pub(super) fn admit(&mut self, request: &AdmitRequest) -> AdmitAnswer {
        let before = self.w.session(&request.session_id, self.now);
        let answer = self.ask(|w, now| w.admit(request, now));
        self.log(|| {
            let (id, mode, reason) = (&request.session_id, answer.mode, answer.reason);
            format!(
                "admit {id} {} tokens: {mode:?} {reason:?} used {}",
                request.input_tokens, answer.load.used
            )
        });
        let Some(reservation) = answer.reservation else {
            self.books.refused += 1;
            return answer;
        };
        let here = self.incarnation();
        let meant = request.incarnation.is_none_or(|i| i == here);
        self.watch.check(meant, Oracle::Incarnation, || {
            format!("a question for {:?} was granted by {here}", request.incarnation)
        });
        if self.books.granted.insert(reservation) {
            self.books.admitted += 1;
            let limit = answer.load.capacity * u64::from(self.w.config().rho_permille) / 1000;
            self.watch.check(answer.load.used <= limit, Oracle::Inv1, || {
                format!(
                    "used {} of {limit} after admission of {}",
                    answer.load.used, request.session_id
                )
            });
            self.placed(&request.session_id, before.as_ref(), request.placement);
        }
        answer
    }

    /// A message under this placement has been accepted for the session.
    pub(super) fn placed(&mut self, session: &SessionId, before: Option<&SessionView>, got: Option<Placement>) {
        if before.is_none() {
            // Forgotten meanwhile: nobody could know.
            self.books.placements.remove(session);
        }
        let Some(got) = got else { return };
        let held = self.books.placements.insert(session.clone(), got);
        let stale = held.is_some_and(|h| got.n < h.n);
        self.watch.check(!stale, Oracle::Placement, || {
            format!("{session} went back from placement {held:?} to {got:?}")
        });
    }

    pub(super) fn committed(&mut self, request: &Request) {
        self.books.commits += 1;
        if let Some(session) = &request.session {
            let history = request.truth[..request.row.len()].to_vec();
            self.histories.insert(session.clone(), history);
            if let Some(placement) = request.placement {
                self.push(Out::Holds(session.clone(), placement));
            }
        }
        self.log(|| {
            let name = request.session.as_ref().map_or("", SessionId::as_str);
            format!("turn of {name} committed {} tokens", request.row.len())
        });
    }

    /// What the machine charges for this many new tokens and this growth, page-rounded.
    pub(super) fn needs(&self, new: u32, growth: u32) -> u32 {
        (new + growth).div_ceil(self.pool.page) * self.pool.page
    }

    /// After a poll: used covers what is occupied and cannot be evicted, and what running turns may still take.
    pub(super) fn check_ledger(&mut self, snapshot: &Snapshot, commands: &[Command]) {
        let page = self.pool.page;
        let capacity = self.pool.pages * page;
        let taken = capacity.saturating_sub(snapshot.free + snapshot.tree_evictable);
        let owed: u32 = self
            .requests
            .values()
            .filter(|r| r.begun && r.turn.is_some())
            .map(|r| {
                let allocated = (r.row.len() as u32).saturating_sub(r.matched);
                r.promised.saturating_sub(allocated + page)
            })
            .sum();
        // What the poll itself gives up is off the ledger at once.
        let given: usize = commands
            .iter()
            .map(|c| match c {
                Command::Free(frees) | Command::Drop { frees, .. } => frees.slots.len(),
                Command::Land { .. } | Command::Commit { .. } | Command::Abort { .. } => 0,
            })
            .sum();
        let least = u64::from(taken.saturating_sub(self.w.evictable() + given as u32 * page) + owed);
        let used = self.w.load(None).used;
        self.watch.check(used >= least, Oracle::Ledger, || {
            format!("used {used}, but {taken} are taken and {owed} are owed to running turns")
        });
    }

    /// The machine has been asked what to do: turns under placements that it knows to be over were aborted by it.
    pub(super) fn close_placements(&mut self) {
        self.books.closed = self.books.placements.clone();
    }

    /// SES-4, MIG-3: a token of this request goes to its client.
    pub(super) fn check_superseded(&mut self, request: u64) {
        let Some(request) = self.requests.get(&request) else {
            return;
        };
        let (Some(session), Some(placement)) = (&request.session, request.placement) else {
            return;
        };
        let closed = self.books.closed.get(session).filter(|c| c.n > placement.n);
        self.watch.check(closed.is_none(), Oracle::Superseded, || {
            format!(
                "a token of {session} goes out under {}, {closed:?} is known",
                placement.n
            )
        });
    }
}
