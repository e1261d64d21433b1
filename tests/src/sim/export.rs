//! The exporter's side between machine and network: leases, what peers may read under them, and running reads
//! (`engine-ext/src/transfer/export.rs`, `peer/server.rs`).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use kvc_proto::{
    id::{Incarnation, LeaseId},
    time::Now,
    wire::reason::{Reason, Refusal},
    worker::{HandoverAnswer, LeaseAnswer, LeaseKind, LeaseRequest, Slot, Token},
};

use super::{
    kv::{self, Kv},
    message::{CallId, PeerAsk, PeerWhat, Reply},
    oracle::Oracle,
    process::{Process, Revoked, Tick},
};

/// The longest a peer waits for news, and for the end of a turn.
const WAIT: u64 = 200_000;
const BUSY: u64 = 40_000;

/// Leases that peers hold on this process's KV.
#[derive(Clone, Debug, Default)]
pub struct Exports {
    leases: BTreeMap<LeaseId, Export>,
    revoked: Revoked,
    ending: Option<LeaseId>,
    waiting: BTreeMap<CallId, PeerAsk>,
    reads: BTreeMap<CallId, (LeaseId, Arc<[Slot]>)>,
    /// Something may have become readable, or has arrived.
    pub(super) news: bool,
}

#[derive(Clone, Debug)]
struct Export {
    holder: Incarnation,
    kind: LeaseKind,
    truth: Vec<Kv>,
    expires: Now,
    dies: Now,
}

impl Exports {
    /// Live leases as the mover knows them.
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// A lease that somebody's request waits for.
    pub fn serving(&self) -> bool {
        self.leases.values().any(|l| l.kind != LeaseKind::Sync)
    }

    /// Peers' questions that wait for news.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// None.
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Running reads.
    pub fn reads(&self) -> BTreeSet<CallId> {
        self.reads.keys().copied().collect()
    }
}

impl Process {
    pub(super) fn export_asked(&mut self, call: CallId, ask: PeerAsk) {
        if let PeerWhat::Read(lease, slots) = &ask.what {
            self.read(call, ask.from, *lease, slots.clone());
            return;
        }
        if self.export_try(call, &ask) {
            return;
        }
        let wait = match ask.what {
            PeerWhat::Handover(..) => BUSY,
            _ => WAIT,
        };
        self.exports.waiting.insert(call, ask);
        self.after(wait, Tick::Waited(call));
    }

    pub(super) fn export_news(&mut self) {
        for (call, ask) in std::mem::take(&mut self.exports.waiting) {
            if !self.export_try(call, &ask) {
                self.exports.waiting.insert(call, ask);
            }
        }
    }

    /// A call has waited for news in vain.
    pub(super) fn export_waited(&mut self, call: CallId) {
        match self.exports.waiting.remove(&call).map(|a| a.what) {
            Some(PeerWhat::Watch(lease, from)) => match self.w.lease_view(lease, from) {
                Ok(view) => self.reply(call, Reply::View(view)),
                Err(why) => self.reply(call, Reply::No(why)),
            },
            Some(PeerWhat::Handover(..)) => self.reply(call, Reply::HandedOver(HandoverAnswer::Busy)),
            Some(_) => {
                let why = Refusal::new(Reason::DeadlineExceeded, "the session did not arrive");
                self.reply(call, Reply::No(why));
            }
            None => {}
        }
    }

    /// Answers if there is something to say; false: ask again after news.
    fn export_try(&mut self, call: CallId, ask: &PeerAsk) -> bool {
        let here = self.incarnation();
        let answer = match &ask.what {
            PeerWhat::Lease(session, placement, kind, have) => {
                let request = LeaseRequest {
                    session: session.clone(),
                    placement: *placement,
                    incarnation: ask.to,
                    kind: *kind,
                    have: *have,
                };
                match self.lease(&request, ask.from) {
                    Ok(None) => return false,
                    Ok(Some(granted)) => granted,
                    Err(why) => Reply::No(why),
                }
            }
            PeerWhat::Handover(request, held) => match self.handed_over(ask, request, *held) {
                None => return false,
                Some(answer) => answer,
            },
            // Everything else goes over a connection that was made to one process.
            _ if ask.to != here => Reply::No(Refusal::new(Reason::StaleIncarnation, "another process")),
            PeerWhat::Watch(lease, from) => match self.watch_lease(*lease, *from, ask.from) {
                Ok(None) => return false,
                Ok(Some(view)) => view,
                Err(why) => Reply::No(why),
            },
            PeerWhat::Announce(announcement) => self.announced(ask, announcement),
            PeerWhat::Renew(lease) => self.named(*lease, ask.from, |p, lease| p.renew(lease)),
            PeerWhat::Confirm(lease) => self.named(*lease, ask.from, |p, lease| p.confirm(lease)),
            PeerWhat::End(lease) => self.named(*lease, ask.from, |p, lease| {
                p.exports.ending = Some(lease);
                p.ask(|w, now| w.end_lease(lease, now));
                p.exports.ending = None;
                Ok(())
            }),
            PeerWhat::Read(..) => return true,
        };
        self.reply(call, answer);
        true
    }

    fn lease(&mut self, request: &LeaseRequest, holder: Incarnation) -> Result<Option<Reply>, Refusal> {
        let before = self.w.session(&request.session, self.now);
        let LeaseAnswer::Granted(grant) = self.ask(|w, now| w.lease(request, now))? else {
            return Ok(None);
        };
        let here = self.incarnation();
        self.watch.check(request.incarnation == here, Oracle::Incarnation, || {
            format!("a lease meant for {} was granted by {here}", request.incarnation)
        });
        // Only a seed's number and a reseed's were granted; a backup and a pending target change nothing (SES-4).
        if matches!(request.kind, LeaseKind::Follow | LeaseKind::Replica) {
            self.placed(&request.session, before.as_ref(), Some(request.placement));
        }
        let whole = match grant.after {
            0 => grant.tokens.clone(),
            after => self.whole(request, after, &grant.tokens),
        };
        let lives = self.w.config().lease;
        let export = Export {
            holder,
            kind: request.kind,
            truth: kv::truth(&grant.identity, &whole),
            expires: self.now + lives,
            dies: self.now + self.w.config().lease_max,
        };
        self.log(|| {
            format!(
                "lease {} on {}: {:?} of {} tokens after {}",
                grant.lease,
                request.session,
                request.kind,
                grant.tokens.len(),
                grant.after
            )
        });
        self.exports.leases.insert(grant.lease, export);
        Ok(Some(Reply::Granted(Box::new(grant))))
    }

    /// All tokens under a lease that does not repeat the first `after`.
    fn whole(&mut self, request: &LeaseRequest, after: u32, tokens: &[Token]) -> Arc<[Token]> {
        let request = LeaseRequest {
            have: None,
            ..request.clone()
        };
        let mut whole: Arc<[Token]> = Arc::from([]);
        if let Ok(LeaseAnswer::Granted(grant)) = self.w.lease(&request, self.now) {
            self.w.end_lease(grant.lease, self.now);
            while self.w.poll_effect().is_some() {}
            whole = grant.tokens;
        }
        let same = whole.get(after as usize..) == Some(tokens);
        self.watch.check(same, Oracle::TrueKv, || {
            format!("a lease on {} is not the end of its tokens", request.session)
        });
        whole
    }

    fn watch_lease(&mut self, lease: LeaseId, from: u32, holder: Incarnation) -> Result<Option<Reply>, Refusal> {
        self.export_held(lease, holder)?;
        let view = self.ask(|w, _| w.lease_view(lease, from))?;
        if view.slots.is_empty() && !view.complete {
            return Ok(None);
        }
        if let Some(export) = self.exports.leases.get(&lease) {
            for (slot, value) in view.slots.iter().zip(export.truth.iter().skip(from as usize)) {
                let right = self.pool.read(*slot) == *value;
                self.watch.check(right, Oracle::TrueKv, || {
                    format!("lease {lease} shows a wrong byte in slot {slot}")
                });
            }
        }
        self.pool.expose(lease, &view.slots, &mut self.watch);
        Ok(Some(Reply::View(view)))
    }

    fn renew(&mut self, lease: LeaseId) -> Result<(), Refusal> {
        self.ask(|w, now| w.renew(lease, now))?;
        let (now, lives) = (self.now, self.w.config().lease);
        if let Some(export) = self.exports.leases.get_mut(&lease) {
            export.expires = (now + lives).min(export.dies);
        }
        Ok(())
    }

    fn confirm(&mut self, lease: LeaseId) -> Result<(), Refusal> {
        let expired = self.exports.leases.get(&lease).is_none_or(|e| e.expires <= self.now);
        self.ask(|w, now| w.confirm(lease, now))?;
        let over = expired || self.exports.revoked.contains(&lease);
        self.watch.check(!over, Oracle::Confirm, || {
            format!("lease {lease} is over and was confirmed")
        });
        Ok(())
    }

    fn named(
        &mut self,
        lease: LeaseId,
        holder: Incarnation,
        call: impl FnOnce(&mut Process, LeaseId) -> Result<(), Refusal>,
    ) -> Reply {
        match self.export_held(lease, holder).and_then(|()| call(self, lease)) {
            Ok(()) => Reply::Fine,
            Err(why) => Reply::No(why),
        }
    }

    fn export_held(&self, lease: LeaseId, holder: Incarnation) -> Result<(), Refusal> {
        match self.exports.leases.get(&lease) {
            Some(export) if export.holder == holder => Ok(()),
            // The mover has forgotten it; whether it was revoked only the machine remembers.
            None if self.exports.revoked.contains(&lease) => Ok(()),
            _ => Err(Refusal::new(Reason::LeaseUnknown, format!("lease {lease}"))),
        }
    }

    /// Data plane: the mover looks at nothing but what is exposed.
    fn read(&mut self, call: CallId, holder: Incarnation, lease: LeaseId, slots: Arc<[Slot]>) {
        let known = self.exports.leases.get(&lease).is_some_and(|e| e.holder == holder);
        if !known || !slots.iter().all(|s| self.pool.is_exposed(lease, *s)) {
            let why = Refusal::new(Reason::LeaseRevoked, format!("lease {lease} exposes no such range"));
            self.reply(call, Reply::No(why));
            return;
        }
        let time = self.speed.read + self.rng.below(self.speed.read + 1);
        self.exports.reads.insert(call, (lease, slots));
        self.after(time, Tick::Serve(call));
    }

    pub(super) fn export_serve(&mut self, call: CallId) {
        if let Some((_, slots)) = self.exports.reads.remove(&call) {
            let bytes = slots.iter().map(|s| self.pool.read(*s)).collect();
            self.reply(call, Reply::Bytes(bytes));
        }
    }

    /// XFER-2: when it returns nothing can be read under this lease any more.
    pub(super) fn fence_lease(&mut self, lease: LeaseId) {
        self.exports.leases.remove(&lease);
        if self.exports.ending != Some(lease) {
            self.exports.revoked.insert(lease);
        }
        self.pool.conceal(lease);
        let dead: Vec<CallId> = self
            .exports
            .reads
            .iter()
            .filter(|(_, r)| r.0 == lease)
            .map(|(c, _)| *c)
            .collect();
        for call in dead {
            self.exports.reads.remove(&call);
            self.reply(
                call,
                Reply::No(Refusal::new(Reason::LeaseRevoked, format!("lease {lease}"))),
            );
        }
        self.exports.news = true;
        self.log(|| format!("lease {lease} fenced"));
    }

    /// Live leases and exposed ranges: nothing of it may be left at the end.
    pub fn exports_left(&self) -> usize {
        self.exports.leases.len() + self.pool.exposing() + self.exports.reads.len()
    }
}
