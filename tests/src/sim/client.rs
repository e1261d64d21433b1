//! Clients in a closed loop: one conversation each, with appends, rewinds, shortenings, and now and then a client that
//! goes away.

use std::sync::Arc;

use kvc_proto::{
    id::SessionId,
    routing::Outcome,
    worker::{Identity, Token},
};

use super::{
    kv,
    oracle::{Oracle, Watch},
    plan::Plan,
    rng::Rng,
};

/// One request of a client.
#[derive(Clone, Debug)]
pub struct Request {
    /// Whose.
    pub client: usize,
    /// The client's own number for it.
    pub number: u64,
    /// None: a request without session (DISP-5).
    pub session: Option<SessionId>,
    /// SES-5.
    pub identity: Identity,
    /// The prompt.
    pub prompt: Arc<[Token]>,
    /// The generation limit.
    pub max_new: u32,
    /// What the router takes the prompt's length and the limit for: it sees text (ADM-14).
    pub believed: (u32, Option<u32>),
    /// The client has asked for a stream.
    pub stream: bool,
    /// To this worker, without a router's dispatch.
    pub direct: Option<usize>,
}

/// How a request ended for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The whole answer.
    Tokens(Arc<[Token]>),
    /// An error, or a broken stream.
    Error(String),
}

/// One client.
#[derive(Debug)]
pub struct Client {
    index: usize,
    /// The router it talks to.
    pub router: usize,
    session: SessionId,
    identity: Identity,
    history: Vec<Token>,
    left: u64,
    numbers: u64,
    asked: Option<Request>,
    answers: u32,
    rng: Rng,
    /// Answers and errors it got.
    pub answered: u64,
    /// See there.
    pub errors: u64,
}

impl Client {
    /// The client of that index.
    pub fn new(index: usize, plan: &Plan, rng: Rng) -> Client {
        let mut rng = rng;
        Client {
            index,
            router: index % plan.routers,
            session: name(index % plan.sessions, 0),
            identity: identity(rng.chance(100)),
            history: system(rng.below(2), plan.vocabulary),
            left: rng.range(2, plan.turns.max(2)),
            numbers: 0,
            asked: None,
            answers: 0,
            rng,
            answered: 0,
            errors: 0,
        }
    }

    /// It has nothing more to ask.
    pub fn done(&self) -> bool {
        self.left == 0 && self.asked.is_none()
    }

    /// The request that it waits for.
    pub fn waits(&self) -> Option<u64> {
        self.asked.as_ref().map(|a| a.number)
    }

    /// The request that it waits for goes through a router's dispatch.
    pub fn is_routed(&self) -> bool {
        self.asked.as_ref().is_some_and(|a| a.direct.is_none())
    }

    /// The next request; none if it waits, or is done.
    pub fn next(&mut self, plan: &Plan) -> Option<Request> {
        if self.asked.is_some() || self.left == 0 {
            return None;
        }
        self.left -= 1;
        let max_new = self.rng.range(1, plan.new_max) as u32;
        self.edit(plan);
        let direct = self
            .rng
            .chance(plan.direct)
            .then(|| self.rng.below(plan.roles.len() as u64) as usize);
        self.numbers += 1;
        let request = Request {
            client: self.index,
            number: self.numbers,
            session: (!self.rng.chance(40)).then(|| self.session.clone()),
            identity: self.identity.clone(),
            prompt: self.history.as_slice().into(),
            max_new,
            believed: self.believed(plan, max_new),
            stream: self.rng.chance(500),
            direct,
        };
        self.answers = 0;
        self.asked = Some(request.clone());
        Some(request)
    }

    fn believed(&mut self, plan: &Plan, max_new: u32) -> (u32, Option<u32>) {
        let len = self.history.len() as u64;
        let wrong = if plan.estimated { self.rng.range(60, 140) } else { 100 };
        let limit = (!plan.estimated || self.rng.chance(700)).then_some(max_new);
        ((len * wrong / 100).max(1) as u32, limit)
    }

    /// Whether it goes away while it waits, and after how long.
    pub fn leaves(&mut self, plan: &Plan) -> Option<u64> {
        self.rng.chance(plan.cancel).then(|| self.rng.range(0, 60_000))
    }

    /// It has gone away: what still comes is of no interest.
    pub fn leave(&mut self, number: u64) -> bool {
        let waits = self.waits() == Some(number);
        if waits {
            self.asked = None;
        }
        waits
    }

    /// The answer. True: it goes on.
    pub fn answered(&mut self, number: u64, answer: &Answer, plan: &Plan, watch: &mut Watch) -> bool {
        let Some(asked) = self.asked.take().filter(|a| a.number == number) else {
            watch.fire(
                Oracle::OneAnswer,
                format!("client {} got a second answer to {number}", self.index),
            );
            return false;
        };
        match answer {
            Answer::Tokens(tokens) => {
                self.answered += 1;
                let truth = kv::answer(&asked.identity, &asked.prompt, asked.max_new, plan.vocabulary);
                watch.check(tokens[..] == truth[..], Oracle::TrueAnswer, || {
                    format!("client {} got {tokens:?}, a plain engine says {truth:?}", self.index)
                });
                self.history.extend(tokens.iter());
            }
            Answer::Error(_) => self.errors += 1,
        }
        true
    }

    /// How long it thinks.
    pub fn thinks(&mut self, plan: &Plan) -> u64 {
        self.rng.range(plan.think / 4, plan.think)
    }

    fn edit(&mut self, plan: &Plan) {
        let len = self.history.len() as u64;
        if self.rng.chance(plan.rewind) {
            // Re-tokenised tails are the normal case, rewritten histories the rare one (F17).
            let cut = if self.rng.chance(700) {
                self.rng.below(len.min(8))
            } else {
                self.rng.below(len)
            };
            self.history.truncate((len - cut).max(1) as usize);
        }
        let large = self.rng.chance(plan.large);
        let most = u64::from(plan.router.max_uncached_tokens);
        let more = if large {
            self.rng.range(most, most * 2)
        } else {
            self.rng.range(1, 24)
        };
        if self.history.len() as u64 + more + plan.new_max > plan.prompt_max {
            // Too long: the conversation starts over from its beginning, a few under another name.
            let keep = self.rng.range(1, plan.prompt_max / 3);
            self.history.truncate(keep as usize);
            if self.rng.chance(300) {
                self.session = name(self.index % plan.sessions, self.numbers + 1);
            }
        }
        let more = more.min(plan.prompt_max - (self.history.len() as u64).min(plan.prompt_max - 1));
        for _ in 0..more {
            self.history.push(self.rng.below(u64::from(plan.vocabulary)) as Token);
        }
    }
}

fn name(session: usize, life: u64) -> SessionId {
    // Never empty, never long.
    SessionId::new(&format!("s{session}.{life}")).unwrap_or_else(|e| unreachable!("{e}"))
}

fn identity(other: bool) -> Identity {
    if other {
        Identity("adapter".into())
    } else {
        Identity::default()
    }
}

/// One of few system prompts: sessions share prefixes (SES-6).
fn system(which: u64, vocabulary: u32) -> Vec<Token> {
    let mut rng = Rng::new(which + 77);
    (0..20).map(|_| rng.below(u64::from(vocabulary)) as Token).collect()
}

/// What a dispatch's end means to the client.
pub fn told(outcome: Outcome) -> Answer {
    Answer::Error(match outcome {
        Outcome::Refused(refused) => refused.reason.as_str().to_owned(),
        other => format!("{other:?}"),
    })
}
