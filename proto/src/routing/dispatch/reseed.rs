//! Where the KV of a granted seed or reseed comes from: from who holds it, computed by a prefill worker on top of what it
//! has, or from nowhere, and the decode worker computes it (DISP-3, SYNC-2, XFER-7).

use super::{Dispatch, Effect, ExecutionMode, Handover, Prefill, Run, State, Then};
use crate::{
    id::{Epoch, Placement},
    mutation::off,
    routing::{
        Router,
        resident::{Resident, higher},
        session::SessionStore,
        view::{Ticket, View, WorkerIndex},
    },
    time::Now,
    wire::{
        admit::{ImportRequest, PeerRef, Source},
        info::Standing,
        reason::Reason,
        turn::TurnTag,
    },
};

/// Most workers asked what they hold.
const ASKED_MAX: usize = 8;
/// Holders tried before a prefill worker computes.
const IMPORTS_MAX: u32 = 2;

/// A granted seed or reseed on its way to its KV.
#[derive(Debug)]
pub(super) struct Reseed {
    pub(super) run: Run,
    /// The number that the admission question named.
    sent: Option<Placement>,
    /// What the decode worker holds itself.
    own: Resident,
    /// What others hold, in their own words, without those that failed.
    holders: Vec<Resident>,
    imports_left: u32,
}

/// An import under way.
#[derive(Debug)]
pub(super) enum Kv {
    /// From a worker that has committed it.
    Held {
        /// Who.
        by: WorkerIndex,
    },
    /// From a worker that computes it.
    Prefilled {
        /// Who.
        by: WorkerIndex,
        /// Its count.
        ticket: Ticket,
    },
}

/// The ways to the KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Import from that holder; the decode worker computes the rest.
    Import(Resident),
    /// The prefill worker computes on top of what it has, or imports from that holder before.
    Prefill(WorkerIndex, Option<Resident>),
    /// The decode worker computes all.
    Run,
}

impl Reseed {
    pub(super) fn new(run: Run, sent: Option<Placement>, own: Resident) -> Reseed {
        Reseed {
            run,
            sent,
            own,
            holders: Vec::new(),
            imports_left: IMPORTS_MAX,
        }
    }
}

impl Dispatch {
    /// A grant without resident KV: takes its number, then asks who holds the session (SYNC-2).
    pub(super) fn reseed<S: SessionStore>(&mut self, router: &mut Router<S>, mut reseed: Box<Reseed>, now: Now) {
        if self.needs_target_first(router) {
            self.ask_target(router, Then::Grant(reseed), now);
            return;
        }
        reseed.run.placement = self.granted_number(router, reseed.sent, reseed.own.epoch);
        self.placing(router, true);
        self.offered(router, reseed.run.placement);
        let workers = match reseed.run.mode {
            ExecutionMode::Reseed => self.believed_holders(router, reseed.run.worker),
            _ => Vec::new(),
        };
        match self.turn.session.clone().filter(|_| !workers.is_empty()) {
            Some(session) => {
                self.state = State::Locating { reseed };
                self.effects.push_back(Effect::Locate { session, workers });
            }
            None => self.hand_over(router, reseed, now),
        }
    }

    /// What they hold, in their own words.
    pub(super) fn located<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        mut reseed: Box<Reseed>,
        found: &[Resident],
        now: Now,
    ) {
        let mut heard = None;
        for r in found {
            self.cut(router, r.worker, r.tokens);
            heard = higher(heard, r.highest());
        }
        // SES-4: somebody has taken a later number meanwhile; holders would refuse ours.
        let outrun = heard.filter(|h| reseed.run.placement.is_some_and(|ours| ours.n <= h.n));
        if let (Some(_), Some(session)) = (outrun, self.turn.session.as_ref()) {
            reseed.run.placement = Some(router.store.take(session, outrun));
            self.offered(router, reseed.run.placement);
        }
        let d = reseed.run.worker;
        let can = |r: &&Resident| r.tokens > 0 && r.worker != d && router.view.worker(r.worker).as_peer().is_some();
        let owns = |r: &&Resident| r.standing == Standing::Owner && r.is_known() && r.worker != d;
        reseed.run.owners = found.iter().filter(owns).map(|r| r.worker).collect();
        reseed.holders = found.iter().filter(can).copied().collect();
        self.hand_over(router, reseed, now);
    }

    /// The import has committed.
    pub(super) fn imported<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        mut reseed: Box<Reseed>,
        kv: Kv,
        now: Now,
    ) {
        self.trace.source = Some(match kv {
            Kv::Held { by } => {
                // Its lease was under the new number.
                reseed.run.owners.retain(|w| *w != by);
                reseed.run.source = Some(by);
                Source::Replica
            }
            Kv::Prefilled { by, ticket } => {
                router.view.leave(ticket);
                router.view.succeeded(by);
                reseed.run.prefilled = Some(by);
                Source::Prefill
            }
        });
        self.run(router, reseed.run, now);
    }

    /// XFER-7: the next source; at last the decode worker computes the prompt itself, and the grant covers it. That is no
    /// reject of the decode worker.
    pub(super) fn import_failed<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        mut reseed: Box<Reseed>,
        kv: Kv,
        reason: Reason,
        now: Now,
    ) {
        self.trace.chain.push(reason);
        match kv {
            Kv::Held { by } => {
                reseed.holders.retain(|r| r.worker != by);
                self.hand_over(router, reseed, now);
            }
            Kv::Prefilled { ticket, .. } => {
                router.view.leave(ticket);
                self.run(router, reseed.run, now);
            }
        }
    }

    /// The number a granted seed or reseed runs under: the one just taken, or a fresh one if the worker was thought to
    /// hold the session (SES-4). A granted number is never offered to another worker.
    fn granted_number<S: SessionStore>(
        &mut self,
        router: &mut Router<S>,
        sent: Option<Placement>,
        epoch: Option<Epoch>,
    ) -> Option<Placement> {
        let taken = if off!(FreshNumber) {
            self.taken
        } else {
            self.taken.take()
        };
        if taken.is_some() && taken == sent {
            return taken;
        }
        let session = self.turn.session.as_ref()?;
        let known = router.sessions.peek(session).and_then(|r| r.above());
        let above = higher(known, higher(sent, epoch.map(|e| e.placement)));
        Some(router.store.take(session, above))
    }

    /// Whom to ask before `d` is given the KV: nobody, when nobody is believed to hold any.
    fn believed_holders<S: SessionStore>(&self, router: &Router<S>, d: WorkerIndex) -> Vec<WorkerIndex> {
        let record = self.turn.session.as_ref().and_then(|s| router.sessions.peek(s));
        let believed = record.map(|r| r.holders()).unwrap_or_default().into_iter();
        believed
            .filter(|&at| at.worker != d && router.view.is_present(at) && router.view.worker(at.worker).answers())
            .map(|at| at.worker)
            .take(ASKED_MAX)
            .collect()
    }

    /// DISP-3, SYNC-2.
    fn hand_over<S: SessionStore>(&mut self, router: &mut Router<S>, mut reseed: Box<Reseed>, now: Now) {
        let record = self.turn.session.as_ref().and_then(|s| router.sessions.peek(s));
        let replica = record.and_then(|r| r.replica);
        let d = reseed.run.worker;
        let prefill = router.view.backup(replica, d);
        let way = choose(&router.view, &reseed, self.turn.input_tokens, prefill);
        let parts = (
            self.turn.session.clone(),
            reseed.run.placement,
            reseed.run.grant.and_then(|g| g.reservation),
        );
        let (Some(session), Some(placement), Some(reservation)) = parts else {
            self.run(router, reseed.run, now);
            return;
        };
        let deadline_ms = router.config.import_deadline_ms();
        let import = |peer: PeerRef, source| ImportRequest {
            reservation: Some(reservation),
            placement,
            source,
            peer: peer.peer,
            incarnation: peer.incarnation,
            deadline_ms,
        };
        let (import, prefill, kv) = match way {
            Way::Import(holder) => match router.view.worker(holder.worker).as_peer() {
                Some(peer) => {
                    reseed.imports_left -= 1;
                    (import(peer, Source::Replica), None, Kv::Held { by: holder.worker })
                }
                None => return self.run(router, reseed.run, now),
            },
            Way::Prefill(_, from) => {
                // In turn, if the replica's holder is not the one.
                let Some(p) = router.view.next_prefill(replica) else {
                    return self.run(router, reseed.run, now);
                };
                let Some(peer) = router.view.worker(p).as_peer() else {
                    return self.run(router, reseed.run, now);
                };
                router.view.assign(p);
                let tag = TurnTag {
                    session: session.clone(),
                    reservation: None,
                    placement: Some(placement),
                    origin: Some((self.router, self.trace.request)),
                    prefill_only: true,
                };
                let prefill = Prefill {
                    worker: p,
                    tag,
                    refresh: from.and_then(|holder| refresh(&router.view, &holder, deadline_ms)),
                };
                let ticket = router.view.enter(p);
                (
                    import(peer, Source::Prefill),
                    Some(prefill),
                    Kv::Prefilled { by: p, ticket },
                )
            }
            // No prefill worker answers and nobody holds more: the decode worker computes the prompt itself.
            Way::Run => return self.run(router, reseed.run, now),
        };
        self.trace.mode = Some(reseed.run.mode);
        self.trace.worker = Some(d);
        self.state = State::Importing { reseed, kv };
        self.effects.push_back(Effect::HandOver(Box::new(Handover {
            session,
            decode: d,
            import,
            prefill,
        })));
    }
}

/// SYNC-2. The source is the holder with most committed tokens, up to the prompt; among equals the later placement, then its
/// owner (ownership goes with the data, SES-4), then a prefill worker.
fn choose(view: &View, reseed: &Reseed, input: u32, prefill: Option<WorkerIndex>) -> Way {
    let worth = |r: &Resident| {
        let placement = r.epoch.map_or(0, |e| e.placement.n);
        (
            r.tokens.min(input),
            placement,
            r.standing == Standing::Owner,
            Some(r.worker) == prefill,
            std::cmp::Reverse(r.worker),
        )
    };
    let best = reseed.holders.iter().max_by_key(|r| worth(r)).copied();
    let d = view.worker(reseed.run.worker);
    if let Some(best) = best.filter(|r| r.tokens > reseed.own.tokens && reseed.imports_left > 0) {
        let rest = input.saturating_sub(best.tokens);
        if rest <= d.max_uncached_tokens() || prefill.is_none() {
            return Way::Import(best);
        }
    }
    let Some(p) = prefill else { return Way::Run };
    let has = reseed.holders.iter().find(|r| r.worker == p).map_or(0, |r| r.tokens);
    // The decode worker itself may be the holder (DISP-6).
    let from = best.into_iter().chain([reseed.own]).max_by_key(|r| worth(r));
    Way::Prefill(p, from.filter(|r| r.worker != p && r.tokens.min(input) > has))
}

/// The prefill worker follows the holder under the holder's own placement (SYNC-4).
fn refresh(view: &View, holder: &Resident, deadline_ms: u32) -> Option<ImportRequest> {
    let peer = view.worker(holder.worker).as_peer()?;
    Some(ImportRequest {
        reservation: None,
        placement: holder.epoch?.placement,
        source: Source::Replica,
        peer: peer.peer,
        incarnation: peer.incarnation,
        deadline_ms,
    })
}
