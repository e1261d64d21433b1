//! Who owns what across all workers (SES-4, MIG-1, MIG-3): no placement has two owners, its turns commit in one place,
//! and its owner decides once who comes next. Kept by the world.

use std::collections::BTreeMap;

use kvc_proto::id::{Placement, SessionId};

use super::{
    clock::Time,
    message::NodeId,
    oracle::{Oracle, Watch},
};

/// A process: its node and which of its lives.
type Life = (NodeId, u64);

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Owners {
    /// What each living process owns.
    owned: BTreeMap<NodeId, BTreeMap<SessionId, u64>>,
    /// Where turns have committed under each placement.
    committed: BTreeMap<(SessionId, u64), Life>,
    /// To whom, and under which number, the owner of a placement has handed over.
    decided: BTreeMap<(SessionId, u64), (Life, NodeId, u64)>,
    /// When a source last said so.
    granted: BTreeMap<(SessionId, u64), Time>,
    /// Hand-overs decided.
    pub moves: u64,
}

impl Owners {
    /// What a process owns from here on.
    pub fn owns(&mut self, node: NodeId, owned: BTreeMap<SessionId, u64>, watch: &mut Watch) {
        for (session, n) in &owned {
            let other = self
                .owned
                .iter()
                .find(|(o, of)| **o != node && of.get(session) == Some(n));
            watch.check(other.is_none(), Oracle::OneOwnerOfPlacement, || {
                format!(
                    "{session} under {n} is owned by {node} and by {}",
                    other.map_or(0, |(o, _)| *o)
                )
            });
        }
        self.owned.insert(node, owned);
    }

    /// The process has ended.
    pub fn gone(&mut self, node: NodeId) {
        self.owned.remove(&node);
    }

    /// The owner with the highest number of each session.
    pub fn all(&self) -> BTreeMap<SessionId, (u64, NodeId)> {
        let mut all = BTreeMap::new();
        for (node, owned) in &self.owned {
            for (session, n) in owned {
                let best = all.entry(session.clone()).or_insert((*n, *node));
                *best = (*best).max((*n, *node));
            }
        }
        all
    }

    /// Sessions a process owns.
    pub fn of(&self, node: NodeId) -> usize {
        self.owned.get(&node).map_or(0, BTreeMap::len)
    }

    /// MIG-3: a placement's turns commit in one process, as long as that lives.
    pub fn commits(&mut self, life: Life, session: SessionId, n: u64, lives: impl Fn(Life) -> bool, watch: &mut Watch) {
        let facts = format!("{session} under {n} commits on worker {}", life.0);
        if let Some(other) = self.committed.insert((session, n), life) {
            watch.check(other.0 == life.0 || !lives(other), Oracle::OneHolder, || {
                format!("{facts}, and has on {}", other.0)
            });
        }
    }

    /// MIG-2: a target owns the session by its source's word.
    pub fn takes(
        &mut self,
        node: NodeId,
        session: &SessionId,
        pending: Placement,
        now: Time,
        deadline: Time,
        watch: &mut Watch,
    ) {
        let granted = self.granted.get(&(session.clone(), pending.n)).copied();
        // A hundredth for the clock's drift.
        let fresh = granted.is_some_and(|at| now <= at + deadline + deadline / 100 + 1);
        watch.check(fresh, Oracle::LateOwner, || {
            let age = granted.map(|at| now - at);
            format!(
                "{node} takes {session} under {} by a word of {age:?} us ago, {deadline} us are allowed",
                pending.n
            )
        });
    }

    /// The source has said it, for the first time or again.
    pub fn grants(&mut self, session: SessionId, pending: Placement, now: Time) {
        self.granted.insert((session, pending.n), now);
    }

    /// MIG-1: the source's answer is the single decision point.
    pub fn decides(
        &mut self,
        life: Life,
        session: SessionId,
        owned: Placement,
        to: NodeId,
        pending: Placement,
        watch: &mut Watch,
    ) {
        self.moves += 1;
        let facts = format!(
            "{session} under {} goes from {} to {to} under {}",
            owned.n, life.0, pending.n
        );
        let before = self.decided.insert((session, owned.n), (life, to, pending.n));
        let same = before.is_none_or(|b| b.0 != life || (b.1, b.2) == (to, pending.n));
        watch.check(same, Oracle::OneDecision, || {
            format!("{facts}, and has gone: {before:?}")
        });
    }
}
