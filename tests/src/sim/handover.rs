//! The decision of a move (MIG-1, MIG-2): the target asks, the source answers once and for all
//! (`engine-ext/src/transfer/import.rs`, `peer/server.rs`).

use kvc_proto::{
    id::{ImportId, Placement, SessionId},
    time::Now,
    wire::{
        admit::{PeerRef, WithdrawAnswer, WithdrawRequest},
        info::{SessionView, Standing},
        reason::Refusal,
    },
    worker::{Handover, HandoverAnswer},
};

use super::{
    import::Step,
    message::{Held, NodeId, PeerAsk, PeerWhat, Reply},
    oracle::Oracle,
    process::{Out, Process},
};

/// How long the source may take to answer, or six times that: answers older than the hand-over deadline come in too.
const ANSWER: u64 = 60_000;

/// A question that is under way.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    peer: NodeId,
    /// Before it was sent, on this process's own clock.
    pub(super) asked: Now,
}

impl Process {
    pub(super) fn handover_ask(&mut self, import: ImportId, peer: &str, request: Handover) {
        let (peer, asked) = (peer.parse().unwrap_or(self.id), self.now);
        let session = request.session.clone();
        let Some(task) = self.imports.get_mut(&import) else {
            return;
        };
        task.question = Some(Question { peer, asked });
        self.log(|| {
            format!(
                "asks {peer} to hand {session} over under {}: {} tokens of epoch {}.{}",
                request.pending.n, request.committed, request.epoch.placement.n, request.epoch.rewind
            )
        });
        let held = self.held(&session);
        let within = self.rng.pick(&[ANSWER, 6 * ANSWER]);
        self.import_call(import, PeerWhat::Handover(request, held), Step::Handover, within);
        self.milestone("asked", peer);
    }

    /// The source has answered, or nobody has.
    pub(super) fn handover_answered(&mut self, import: ImportId, answer: Result<HandoverAnswer, Refusal>) {
        let Some(task) = self.imports.get_mut(&import) else {
            return;
        };
        let Some(question) = task.question.take() else { return };
        let (session, pending) = (task.order.session.clone(), task.order.placement);
        self.log(|| format!("import {import}: the source says {answer:?}"));
        let granted = matches!(answer, Ok(HandoverAnswer::Granted));
        self.ask(|w, now| w.handover_answered(import, question.asked, answer, now));
        let owns = |v: SessionView| v.standing == Standing::Owner && v.epoch.is_some_and(|e| e.placement == pending);
        if granted && self.w.session(&session, self.now).is_some_and(owns) {
            self.push(Out::Taken(session, pending));
        }
        self.dirty = true;
        self.milestone("answered", question.peer);
    }

    /// The source's side. None: busy, ask again after news.
    pub(super) fn handed_over(&mut self, ask: &PeerAsk, request: &Handover, held: Held) -> Option<Reply> {
        let to = PeerRef {
            peer: ask.peer.to_string(),
            incarnation: ask.from,
        };
        let session = &request.session;
        let here = self.incarnation();
        let (mine, before) = (self.held(session), self.w.session(session, self.now));
        let answer = self.ask(|w, now| w.handover(request, to, now));
        self.dirty = true;
        match answer {
            Ok(HandoverAnswer::Granted) => {
                self.watch.check(request.incarnation == here, Oracle::Incarnation, || {
                    format!("a question for {} was granted by {here}", request.incarnation)
                });
                let owned = before
                    .as_ref()
                    .and_then(|v| v.moved.is_none().then_some(v.epoch?.placement));
                if let Some(owned) = owned {
                    self.log(|| format!("hands {session} over to {} under {}", ask.peer, request.pending.n));
                    self.watch.check(held == mine, Oracle::WholeHandover, || {
                        format!("{session} goes to {} with {held:?}, here it has {mine:?}", ask.peer)
                    });
                    self.decided(session.clone(), owned, ask.peer, request.pending);
                }
                self.push(Out::Granted(session.clone(), request.pending));
                self.placed(session, before.as_ref(), Some(request.pending));
                self.milestone("granted", ask.peer);
                Some(Reply::HandedOver(HandoverAnswer::Granted))
            }
            Ok(HandoverAnswer::Busy) => None,
            Ok(answer) => Some(Reply::HandedOver(answer)),
            Err(why) => Some(Reply::No(why)),
        }
    }

    /// MIG-2: the pending target is asked what became of it.
    pub(super) fn withdraw(&mut self, session: &SessionId, request: &WithdrawRequest) -> Reply {
        let answer = self.ask(|w, now| w.withdraw(session, request, now));
        self.dirty = true;
        self.log(|| format!("withdraw {session} from {}: {answer:?}", request.placement.n));
        match answer {
            Ok(answer) => {
                if answer == WithdrawAnswer::Withdrawn {
                    self.books.withdrawn.insert((session.clone(), request.placement.n));
                }
                Reply::Withdrawn(Ok(answer))
            }
            Err(why) => Reply::Withdrawn(Err(why.code)),
        }
    }

    fn decided(&mut self, session: SessionId, owned: Placement, to: NodeId, pending: Placement) {
        self.push(Out::Decided(session, owned, to, pending));
    }

    /// A step of a move between this process and a peer: a good moment for a fault.
    pub(super) fn milestone(&mut self, what: &'static str, peer: NodeId) {
        self.push(Out::Milestone(what, peer));
    }
}
