//! Several engines that speak to each other at once: what one wants of another is asked and answered in one step. A
//! story can also take single steps itself.

use std::sync::Arc;

use super::{
    engine::{Engine, Pull, Reader, config, identity, name},
    field::{ask, placed},
};
use crate::{
    id::*,
    time::Now,
    wire::{
        admit::{AdmitAnswer, AdmitRequest, ImportRequest, PeerRef, Source, WithdrawAnswer, WithdrawRequest},
        info::{SessionView, Standing},
        reason::{Reason, Refusal},
    },
    worker::*,
};

/// The engines; number `i` is the process `100 + i` at the address `n<i>`.
pub struct Peers {
    pub at: Vec<Engine>,
    requests: u64,
}

pub fn peer(i: usize) -> PeerRef {
    PeerRef {
        peer: format!("n{i}"),
        incarnation: Incarnation(100 + i as u64),
    }
}

impl Peers {
    pub fn new(n: usize, page: u32) -> Peers {
        Peers::of((0..n).map(|_| config(1024, page)))
    }

    pub fn of(configs: impl IntoIterator<Item = WorkerConfig>) -> Peers {
        let engine = |(i, config)| Engine::of(config, Incarnation(100 + i as u64));
        Peers {
            at: configs.into_iter().enumerate().map(engine).collect(),
            requests: 0,
        }
    }

    pub fn view(&self, i: usize, session: u8) -> SessionView {
        let e = &self.at[i];
        e.w.session(&name(session), e.now).expect("known")
    }

    pub fn standing(&self, i: usize, session: u8) -> Standing {
        self.view(i, session).standing
    }

    /// Workers that own the session.
    pub fn owners(&self, session: u8) -> Vec<usize> {
        (0..self.at.len())
            .filter(|i| {
                let e = &self.at[*i];
                e.w.session(&name(session), e.now)
                    .is_some_and(|s| s.standing == Standing::Owner && s.epoch.is_some())
            })
            .collect()
    }

    pub fn question(&mut self, session: u8, input: usize, n: u64, backup: Option<usize>) -> AdmitRequest {
        self.requests += 1;
        AdmitRequest {
            placement: placed(n),
            backup: backup.map(peer),
            turn: 1,
            ..ask(session, input as u32, self.requests)
        }
    }

    pub fn admit(&mut self, i: usize, session: u8, input: usize, n: u64, backup: Option<usize>) -> AdmitAnswer {
        let question = self.question(session, input, n, backup);
        let now = self.at[i].now;
        let answer = self.at[i].w.admit(&question, now);
        self.at[i].effects();
        answer
    }

    /// A routed turn under placement `n`, to its end; the history after it.
    pub fn turn(&mut self, i: usize, session: u8, prompt: &[Token], n: u64, backup: Option<usize>) -> Vec<Token> {
        let id = self.begin(i, session, prompt, n, backup).expect("granted");
        let history = self.at[i].finish(id, 3);
        self.at[i].poll();
        history
    }

    /// A routed turn that waits in the engine.
    pub fn begin(
        &mut self,
        i: usize,
        session: u8,
        prompt: &[Token],
        n: u64,
        backup: Option<usize>,
    ) -> Result<TurnId, Reason> {
        let answer = self.admit(i, session, prompt.len(), n, backup);
        let grant = answer.reservation.ok_or_else(|| answer.reason.unwrap())?;
        let mut arrival = Engine::arrival(session, identity(0), prompt.to_vec(), 10);
        (arrival.reservation, arrival.placement) = (Some(grant), placed(n));
        self.at[i].arrive(session, arrival, prompt.to_vec()).map_err(|r| r.code)
    }

    /// `POST …/import` at `i`.
    pub fn import(
        &mut self,
        i: usize,
        session: u8,
        from: usize,
        source: Source,
        n: u64,
        reservation: Option<ReservationId>,
    ) -> Result<ImportId, Refusal> {
        let PeerRef { peer, incarnation } = peer(from);
        let request = ImportRequest {
            reservation,
            placement: placed(n).unwrap(),
            source,
            peer,
            incarnation,
            deadline_ms: 10_000,
        };
        let now = self.at[i].now;
        let import = self.at[i].w.import(&name(session), &request, now);
        self.at[i].effects();
        import
    }

    pub fn withdraw(&mut self, i: usize, session: u8, n: u64) -> WithdrawAnswer {
        let request = WithdrawRequest {
            placement: placed(n).unwrap(),
            incarnation: peer(i).incarnation,
        };
        let now = self.at[i].now;
        let answer = self.at[i].w.withdraw(&name(session), &request, now).unwrap();
        self.at[i].effects();
        answer
    }

    /// Everything that can go on without a clock, to the end.
    pub fn settle(&mut self) {
        for _ in 0..200 {
            let mut still = true;
            for i in 0..self.at.len() {
                for said in std::mem::take(&mut self.at[i].said) {
                    still = false;
                    self.carry(i, said);
                }
                still &= !self.pull_and_confirm(i);
            }
            if still
                && self
                    .at
                    .iter()
                    .all(|e| e.said.is_empty() && e.w.counts().2 == waiting(e))
            {
                return;
            }
        }
        panic!("does not come to rest");
    }

    /// Bytes arrive at `i`, leases are confirmed, and its engine's loop turns once. False if no byte arrived.
    pub fn pull_and_confirm(&mut self, i: usize) -> bool {
        let flying = |p: &&Pull| p.flight.is_some() && !p.written;
        let pulls: Vec<_> = self.at[i].pulls.iter().filter(flying).map(|p| p.import).collect();
        for import in &pulls {
            self.at[i].pull_all(*import);
        }
        self.confirm_all(i);
        self.at[i].poll();
        self.at[i].check();
        !pulls.is_empty()
    }

    /// A message of `i` reaches its peer, and the answer comes back.
    pub fn carry(&mut self, i: usize, said: Effect) {
        match said {
            Effect::OpenLease {
                import,
                session,
                peer,
                incarnation,
                placement,
                kind,
                have,
            } => {
                let from = node(&peer);
                let request = LeaseRequest {
                    session: session.clone(),
                    placement,
                    incarnation,
                    kind,
                    have,
                };
                let now = self.at[from].now;
                let answer = self.at[from].w.lease(&request, now);
                self.at[from].effects();
                match answer {
                    Ok(LeaseAnswer::Granted(grant)) => self.granted(i, import, &session, from, grant),
                    Ok(LeaseAnswer::Wait) => {
                        self.at[from].poll(); // what ends the turn that is waited for
                        let again = Effect::OpenLease {
                            import,
                            session,
                            peer,
                            incarnation,
                            placement,
                            kind,
                            have,
                        };
                        self.at[i].said.push(again);
                    }
                    Err(why) => {
                        let now = self.at[i].now;
                        self.at[i].w.import_failed(import, why, now);
                        self.at[i].effects();
                    }
                }
            }
            Effect::AskHandover { import, peer, request } => {
                let asked = self.at[i].now;
                let answer = self.handover(node(&peer), i, &request);
                self.answered(i, import, asked, answer);
            }
            Effect::Announce { to, announcement } => {
                let backup = node(&to.peer);
                let now = self.at[backup].now;
                let answer = self.at[backup].w.announced(peer(i), &announcement, now);
                self.at[backup].effects();
                if let Err(why) = answer {
                    let (session, epoch) = (&announcement.session, announcement.epoch);
                    let now = self.at[i].now;
                    self.at[i].w.announce_refused(session, epoch, why.code, now);
                    self.at[i].effects();
                }
            }
            Effect::EndLease { import } => {
                if let Some((from, lease)) = self.at[i].leases.remove(&import) {
                    let now = self.at[from].now;
                    self.at[from].w.end_lease(lease, now);
                    self.at[from].effects();
                }
            }
            other => panic!("{other:?} is for no peer"),
        }
    }

    pub fn handover(&mut self, source: usize, target: usize, asked: &Handover) -> Result<HandoverAnswer, Refusal> {
        let now = self.at[source].now;
        let answer = self.at[source].w.handover(asked, peer(target), now);
        self.at[source].effects();
        answer
    }

    pub fn answered(&mut self, i: usize, import: ImportId, asked: Now, answer: Result<HandoverAnswer, Refusal>) {
        let now = self.at[i].now;
        self.at[i].w.handover_answered(import, asked, answer, now);
        self.at[i].effects();
    }

    /// The lease travels: readers at the exporter, the pull at the importer.
    pub fn granted(&mut self, i: usize, import: ImportId, session: &SessionId, from: usize, grant: LeaseGrant) {
        let whole: Arc<[Token]> = {
            let copy = self.at[from]
                .w
                .sessions
                .by_id(session)
                .and_then(|s| s.copy.as_ref())
                .expect("granted");
            copy.tokens[..(grant.after as usize + grant.tokens.len())].into()
        };
        let reader = Reader {
            tokens: whole.clone(),
            identity: grant.identity.clone(),
            seen: Vec::new(),
        };
        self.at[from].readers.insert(grant.lease, reader);
        self.at[i].leases.insert(import, (from, grant.lease));
        let number = session.as_str()[1..].parse().expect("s<number>");
        self.at[i].granted(import, number, grant, whole);
    }

    fn confirm_all(&mut self, i: usize) {
        let confirming: Vec<_> = self.at[i]
            .pulls
            .iter()
            .filter(|p| p.confirming)
            .map(|p| p.import)
            .collect();
        for import in confirming {
            let Some((from, lease)) = self.at[i].leases.remove(&import) else {
                continue;
            };
            let now = self.at[from].now;
            let confirmed = self.at[from].w.confirm(lease, now);
            self.at[from].w.end_lease(lease, now);
            self.at[from].effects();
            self.at[i]
                .pulls
                .iter_mut()
                .filter(|p| p.import == import)
                .for_each(|p| p.confirming = false);
            match confirmed {
                Ok(()) => self.at[i].confirmed(import),
                Err(why) => {
                    let now = self.at[i].now;
                    self.at[i].w.import_failed(import, why, now);
                    self.at[i].effects();
                }
            }
        }
    }

    /// Time passes everywhere.
    pub fn wait_ms(&mut self, ms: u64) {
        for e in &mut self.at {
            e.now = e.now + std::time::Duration::from_millis(ms);
            e.w.handle_timeout(e.now);
            e.effects();
        }
    }
}

/// Imports of an engine that wait for a timer: a hand-over to be asked for again, or a lost answer.
fn waiting(e: &Engine) -> usize {
    let transfers = e.w.transfers(e.now);
    transfers.imports.iter().filter(|i| i.phase == "handing-over").count()
}

fn node(address: &str) -> usize {
    address[1..].parse().expect("n<number>")
}
