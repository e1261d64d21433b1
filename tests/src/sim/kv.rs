//! The true KV of a position: a hash of its identity, its place and every token up to it. A page that ends up at another
//! position, in another session or rewritten under a reader is seen, whatever the tokens are.

use kvc_proto::worker::{Identity, Token};

/// What a slot holds in place of a position's bytes.
pub type Kv = u64;

/// The value before the first token.
pub fn root(identity: &Identity) -> Kv {
    identity
        .0
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |h, b| mix(h, u64::from(b) + 1000))
}

/// The value of the position after `before`.
pub fn next(before: Kv, token: Token) -> Kv {
    mix(before, u64::from(token))
}

/// The values of all positions.
pub fn truth(identity: &Identity, tokens: &[Token]) -> Vec<Kv> {
    let mut h = root(identity);
    tokens
        .iter()
        .map(|t| {
            h = next(h, *t);
            h
        })
        .collect()
}

/// What the model says after the position with this KV: an engine that reads a wrong byte says something else.
pub fn sample(last: Kv, vocabulary: u32) -> Token {
    ((last >> 20) % u64::from(vocabulary)) as Token
}

/// The whole answer of a plain engine.
pub fn answer(identity: &Identity, prompt: &[Token], len: u32, vocabulary: u32) -> Vec<Token> {
    let mut h = prompt.iter().fold(root(identity), |h, t| next(h, *t));
    (0..len)
        .map(|_| {
            let token = sample(h, vocabulary);
            h = next(h, token);
            token
        })
        .collect()
}

fn mix(h: u64, v: u64) -> u64 {
    let z = (h ^ v.wrapping_add(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 29)).rotate_left(17).wrapping_mul(0x94d0_49bb_1331_11eb)
}
