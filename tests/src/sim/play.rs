//! What a router and a client ask of a [`Stage`], in words: turns, moves, reseeds, withdrawals of one session.

use std::{sync::Arc, time::Duration};

use kvc_proto::{
    id::{Placement, RequestKey, ReservationId, RouterId, SessionId, StoreId},
    wire::{
        admit::{
            AdmitAnswer, AdmitRequest, ImportAnswer, ImportRequest, PeerRef, Source, WithdrawAnswer, WithdrawRequest,
        },
        info::{Role, Standing},
        reason::Reason,
        turn::TurnTag,
    },
    worker::{CapacityRule, Identity, Token, WorkerConfig},
};

use super::{
    kv,
    message::{Ask, CallId, NodeId, Reply, TurnAsk},
    oracle::Violation,
    stage::Stage,
};

/// Token ids in use: those of [`Stage`]'s engines.
const VOCABULARY: u32 = 16;

/// One session's story. Numbers of placements are given by the caller.
#[derive(Clone, Debug)]
pub struct Play {
    /// Where it plays.
    pub stage: Stage,
    /// Whose.
    pub session: SessionId,
    /// What the client has said and heard so far.
    pub history: Vec<Token>,
    requests: u64,
}

/// How a turn ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// The answer, which is the plain engine's.
    Tokens(u32),
    /// The admission was refused.
    NotAdmitted(Reason),
    /// The turn was refused on arrival.
    Refused(Reason),
    /// The engine gave it up.
    Failed(Reason),
    /// Nothing was heard.
    Silence,
}

/// Numbers of a worker that is small enough to see through.
pub fn small(capacity: u32) -> WorkerConfig {
    WorkerConfig {
        capacity,
        page_tokens: 4,
        rho_permille: 1000,
        max_uncached_tokens: 64,
        rule: CapacityRule::Growth,
        clip: 8,
        reservation: Duration::from_secs(30),
        evict_idle: true,
        session_cap: capacity,
        lease: Duration::from_millis(200),
        lease_max: Duration::from_secs(2),
        sync: true,
        sync_imports: 1,
        sync_deadline: Duration::from_millis(500),
        handover_deadline: Duration::from_millis(50),
        handover_hold: Duration::from_millis(5),
        remembered: 64,
    }
}

/// Decode workers, the last `prefill` of which prefill.
pub fn workers(decode: usize, prefill: usize, config: &WorkerConfig) -> Vec<(Role, WorkerConfig)> {
    let roles = std::iter::repeat_n(Role::Decode, decode).chain(std::iter::repeat_n(Role::Prefill, prefill));
    roles.map(|role| (role, config.clone())).collect()
}

impl Play {
    /// A session that nobody knows.
    pub fn new(stage: Stage, name: &str) -> Play {
        Play {
            stage,
            session: SessionId::new(name).unwrap_or_else(|e| unreachable!("{e}")),
            history: Vec::new(),
            requests: 0,
        }
    }

    /// The client says something new.
    pub fn say(&mut self, tokens: impl IntoIterator<Item = Token>) {
        self.history.extend(tokens);
    }

    /// The client takes back all but the first tokens.
    pub fn take_back(&mut self, kept: usize) {
        self.history.truncate(kept);
    }

    /// A whole turn at a worker under a placement: admitted, run, and its answer compared and kept.
    pub fn turn(&mut self, node: NodeId, placement: u64, max_new: u32, backup: Option<NodeId>) -> Told {
        let answer = match self.admit(node, placement, max_new, backup) {
            Some(answer) => answer,
            None => return Told::Silence,
        };
        match (answer.reservation, answer.reason) {
            (None, reason) => Told::NotAdmitted(reason.unwrap_or(Reason::Internal)),
            (grant, _) => self.run(node, placement, grant, max_new),
        }
    }

    /// The admission question.
    pub fn admit(&mut self, node: NodeId, placement: u64, max_new: u32, backup: Option<NodeId>) -> Option<AdmitAnswer> {
        self.requests += 1;
        let input = self.history.len() as u32;
        let request = AdmitRequest {
            session_id: self.session.clone(),
            turn: 1,
            input_tokens: input,
            append_tokens: 1,
            max_new_tokens: Some(max_new),
            estimated: false,
            via: None,
            placement: Some(number(placement)),
            incarnation: Some(self.stage.nodes[node].as_ref()?.incarnation()),
            backup: backup.and_then(|b| self.peer(b)),
            key: RequestKey {
                router: RouterId(1),
                request: self.requests,
                attempt: 1,
            },
        };
        let call = self.stage.ask(node, Ask::Admit(Box::new(request)));
        match self.stage.reply(call)? {
            Reply::Admit(answer) => Some((**answer).clone()),
            _ => None,
        }
    }

    /// The turn itself, under a grant or without.
    pub fn run(&mut self, node: NodeId, placement: u64, grant: Option<ReservationId>, max_new: u32) -> Told {
        let call = self.send_turn(node, placement, grant, max_new);
        self.heard(call, max_new)
    }

    /// The turn's body, whose answer is asked for with [`Play::heard`].
    pub fn send_turn(&mut self, node: NodeId, placement: u64, grant: Option<ReservationId>, max_new: u32) -> CallId {
        let tag = TurnTag {
            session: self.session.clone(),
            reservation: grant,
            placement: Some(number(placement)),
            origin: Some((RouterId(1), self.requests)),
            prefill_only: false,
        };
        let body = TurnAsk {
            tag: Some(tag),
            identity: Identity::default(),
            prompt: self.history.as_slice().into(),
            max_new,
            stream: true,
        };
        self.stage.ask(node, Ask::Turn(Box::new(body)))
    }

    /// What came of a turn; its tokens join the history.
    pub fn heard(&mut self, call: CallId, max_new: u32) -> Told {
        match self.stage.reply(call) {
            Some(Reply::Done(tokens)) => {
                let truth = kv::answer(&Identity::default(), &self.history, max_new, VOCABULARY);
                assert_eq!(tokens[..], truth[..], "a plain engine says something else");
                let tokens = Arc::clone(tokens);
                self.history.extend(tokens.iter());
                Told::Tokens(tokens.len() as u32)
            }
            Some(Reply::Refused(why)) => Told::Refused(*why),
            Some(Reply::Failed(why)) => Told::Failed(*why),
            _ => Told::Silence,
        }
    }

    /// The session is reseeded at a worker from what another holds, and the turn runs there; the messages between the
    /// two pass.
    pub fn reseed(&mut self, node: NodeId, placement: u64, from: NodeId, max_new: u32) -> Told {
        let Some(answer) = self.admit(node, placement, max_new, None) else {
            return Told::Silence;
        };
        let Some(grant) = answer.reservation else {
            return Told::NotAdmitted(answer.reason.unwrap_or(Reason::Internal));
        };
        let import = self.import(node, Some(grant), Source::Replica, placement, from);
        let pair = [node, from];
        self.stage
            .deliver_all(|w| pair.contains(&w.from) && pair.contains(&w.to));
        let done = self.imported(import);
        self.stage.say(|| format!("the import at {node} ends with {done:?}"));
        self.run(node, placement, Some(grant), max_new)
    }

    /// `POST …/import`.
    pub fn import(
        &mut self,
        node: NodeId,
        reservation: Option<ReservationId>,
        source: Source,
        placement: u64,
        from: NodeId,
    ) -> CallId {
        let incarnation = match self.peer(from) {
            Some(peer) => peer.incarnation,
            None => kvc_proto::id::Incarnation(from as u64 * 1000 + 1),
        };
        let request = ImportRequest {
            reservation,
            placement: number(placement),
            source,
            peer: from.to_string(),
            incarnation,
            deadline_ms: 1_000,
        };
        self.stage.ask(node, Ask::Import(self.session.clone(), request))
    }

    /// A move begins: `to` prepares under a pending number.
    pub fn prepare(&mut self, from: NodeId, to: NodeId, pending: u64) -> CallId {
        self.import(to, None, Source::Owner, pending, from)
    }

    /// How an import ended, once it has.
    pub fn imported(&self, call: CallId) -> Option<Result<ImportAnswer, Reason>> {
        match self.stage.reply(call) {
            Some(Reply::Imported(answer)) => Some(*answer),
            _ => None,
        }
    }

    /// The pending target is asked.
    pub fn withdraw(&mut self, node: NodeId, pending: u64) -> Option<WithdrawAnswer> {
        let incarnation = self.peer(node)?.incarnation;
        let request = WithdrawRequest {
            placement: number(pending),
            incarnation,
        };
        let call = self.stage.ask(node, Ask::Withdraw(self.session.clone(), request));
        match self.stage.reply(call) {
            Some(Reply::Withdrawn(Ok(answer))) => Some(*answer),
            _ => None,
        }
    }

    /// What a worker is to the session, under which number, with how many tokens.
    pub fn standing(&self, node: NodeId) -> Option<(Standing, u64, u32)> {
        let view = self.stage.session(node, &self.session)?;
        let n = view.epoch.map_or(0, |e| e.placement.n);
        Some((view.standing, n, view.committed))
    }

    /// Workers that own it.
    pub fn owners(&self) -> Vec<NodeId> {
        let owns = |n: &NodeId| matches!(self.standing(*n), Some((Standing::Owner, n, _)) if n > 0);
        (0..self.stage.nodes.len()).filter(owns).collect()
    }

    /// Every rule holds, and the bytes of every copy are its tokens' KV.
    ///
    /// # Errors
    /// The first violation.
    pub fn check(&mut self) -> Result<(), Violation> {
        self.stage.judge()
    }

    fn peer(&self, node: NodeId) -> Option<PeerRef> {
        let incarnation = self.stage.nodes[node].as_ref()?.incarnation();
        Some(PeerRef {
            peer: node.to_string(),
            incarnation,
        })
    }
}

/// A placement of the one store.
pub fn number(n: u64) -> Placement {
    Placement { n, store: StoreId(9) }
}
