//! A digest of a history, kept up at the cost of what is new: equal digests of equal length mean equal identity and
//! tokens (SYNC-1, MIG-1). SHA-256, because a client chooses the tokens and must not be able to make two histories look
//! alike (SES-5).

use sha2::{Digest as _, Sha256};

use crate::worker::api::{Identity, Token};

/// Tokens between two marks.
const SPAN: usize = 512;

/// The first 128 bits of the chain's hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 16]);

/// Marks of a growing history: the hash after each whole span.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    marks: Vec<[u8; 32]>,
}

impl Chain {
    /// The digest of the first `n` tokens; hashes what lies past the last mark. The marks must be those of `identity`
    /// and `tokens`: [`Chain::cut`] whenever tokens are taken back.
    pub fn digest(&mut self, identity: &Identity, tokens: &[Token], n: u32) -> Digest {
        let tokens = &tokens[..(n as usize).min(tokens.len())];
        let whole = tokens.len() / SPAN;
        for span in self.marks.len()..whole {
            let before = self.before(identity, span);
            self.marks.push(link(before, &tokens[span * SPAN..(span + 1) * SPAN]));
        }
        let last = link(self.before(identity, whole), &tokens[whole * SPAN..]);
        let mut digest = [0; 16];
        digest.copy_from_slice(&last[..16]);
        Digest(digest)
    }

    /// Only the first `n` tokens are still the same.
    pub fn cut(&mut self, n: u32) {
        self.marks.truncate(n as usize / SPAN);
    }

    fn before(&self, identity: &Identity, span: usize) -> [u8; 32] {
        match span.checked_sub(1) {
            Some(last) => self.marks[last],
            None => Sha256::digest(identity.0.as_bytes()).into(),
        }
    }
}

fn link(before: [u8; 32], tokens: &[Token]) -> [u8; 32] {
    let mut hash = Sha256::new_with_prefix(before);
    let mut bytes = [0; SPAN * 4];
    for (four, token) in bytes.chunks_exact_mut(4).zip(tokens) {
        four.copy_from_slice(&token.to_le_bytes());
    }
    hash.update(&bytes[..tokens.len() * 4]);
    hash.finalize().into()
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fresh(identity: &Identity, tokens: &[Token]) -> Digest {
        Chain::default().digest(identity, tokens, tokens.len() as u32)
    }

    proptest! {
        /// SYNC-1: however a history grew and was cut, its digest is that of its tokens.
        #[test]
        fn a_kept_chain_is_a_fresh_one(steps in prop::collection::vec((0usize..3000, 0u32..4, 1usize..1500), 1..8)) {
            let identity = Identity("a".into());
            let (mut chain, mut tokens) = (Chain::default(), Vec::new());
            for (cut, token, grow) in steps {
                let cut = cut.min(tokens.len());
                tokens.truncate(cut);
                chain.cut(cut as u32);
                tokens.extend((0..grow as u32).map(|i| token + i % 7));
                let n = tokens.len() as u32 / 2;
                prop_assert_eq!(chain.digest(&identity, &tokens, n), fresh(&identity, &tokens[..n as usize]));
                prop_assert_eq!(chain.digest(&identity, &tokens, tokens.len() as u32), fresh(&identity, &tokens));
            }
        }
    }

    #[test]
    fn length_token_order_and_identity_count() {
        let (a, b) = (Identity("a".into()), Identity("b".into()));
        let tokens: Vec<Token> = (0..1000).collect();
        let digest = fresh(&a, &tokens);
        assert_ne!(digest, fresh(&b, &tokens));
        assert_ne!(digest, fresh(&a, &tokens[..999]));
        let mut swapped = tokens.clone();
        swapped.swap(100, 900);
        assert_ne!(digest, fresh(&a, &swapped));
    }
}
