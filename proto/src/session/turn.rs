//! One request of a session, from its arrival at the engine's scheduler to its end.

use crate::{
    id::{ReservationId, TurnId},
    worker::api::{Identity, Token},
};

use super::{Copy, Key};

/// A turn.
#[derive(Clone, Debug)]
pub struct Turn {
    /// Its number.
    pub id: TurnId,
    /// Whose turn it is.
    pub session: Key,
    /// SES-5.
    pub identity: Identity,
    /// Its prompt, until it begins.
    pub prompt: TurnPrompt,
    /// Length of the prompt in tokens.
    pub len: u32,
    /// Tokens the prompt has in common with the copy; computed once: while the turn lives nobody else extends the copy.
    pub common: u32,
    /// How often the engine holds its match locked.
    pub claims: u32,
    /// The growth it may need: min(max_new, clip).
    pub growth: u32,
    /// Its charge.
    pub reservation: ReservationId,
    /// How far it is.
    pub phase: Phase,
}

/// Where a turn's prompt is.
#[derive(Clone, Debug)]
pub enum TurnPrompt {
    /// All of it here.
    Full(Vec<Token>),
    /// The session's first `after` tokens, then these.
    Append {
        /// Tokens of the copy.
        after: u32,
        /// New ones.
        tokens: Vec<Token>,
    },
    /// Moved into the copy when the turn began.
    InCopy,
}

/// How far a turn is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// In the engine's queue.
    Waiting,
    /// The engine has allocated for it, or is about to.
    Running(Started),
}

/// What a running turn started from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Started {
    /// This many tokens of the session were restored; an end without result goes back to them (F4, F8, F9).
    Session {
        /// Tokens.
        restored: u32,
    },
    /// The engine's tree. Until `adopt` its row may name tree pages: none of it is the session's.
    Tree {
        /// The shared part is known.
        adopted: bool,
    },
}

impl Turn {
    /// The whole prompt while the turn waits. `copy` is its session's.
    pub fn tokens(&self, copy: Option<&Copy>) -> Vec<Token> {
        match (&self.prompt, copy) {
            (TurnPrompt::Full(tokens), _) => tokens.clone(),
            (TurnPrompt::Append { after, tokens }, Some(copy)) => {
                [&copy.tokens[..(*after as usize).min(copy.tokens.len())], tokens].concat()
            }
            (TurnPrompt::Append { tokens, .. }, None) => tokens.clone(),
            (TurnPrompt::InCopy, copy) => copy.map_or_else(Vec::new, |c| c.tokens.clone()),
        }
    }

    /// Before the copy loses tokens: an append keeps its own text.
    pub fn keep_prompt(&mut self, copy: Option<&Copy>) {
        if matches!(self.prompt, TurnPrompt::Append { .. }) {
            self.prompt = TurnPrompt::Full(self.tokens(copy));
        }
    }
}
