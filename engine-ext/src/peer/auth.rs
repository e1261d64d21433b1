//! Mutual proof of the shared secret by challenge and response (XFER-10): HMAC-SHA256 over everything that was said so
//! far, each direction under its own label, so that a proof can neither be replayed nor reflected.

use hmac::{Hmac, KeyInit, Mac};
use kvc_proto::id::Incarnation;
use sha2::Sha256;

use crate::config::Secret;

/// Fresh random bytes of one side.
pub(super) type Nonce = [u8; 32];

/// What both sides have said.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transcript {
    pub(super) protocol: u32,
    pub(super) client: Nonce,
    pub(super) server: Nonce,
    pub(super) incarnation: Incarnation,
}

/// Whose proof it is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Side {
    Client,
    Server,
}

impl Transcript {
    /// The proof of `side`. Without a secret (loopback, or mTLS alone) the key is empty and the proof shows nothing, but
    /// a side that has one refuses a side that has none.
    pub(super) fn prove(&self, side: Side, secret: Option<&Secret>) -> Vec<u8> {
        self.mac(side, secret)
            .map(|mac| mac.finalize().into_bytes().to_vec())
            .unwrap_or_default()
    }

    /// Compares in constant time.
    pub(super) fn verify(&self, side: Side, secret: Option<&Secret>, proof: &[u8]) -> bool {
        self.mac(side, secret)
            .is_some_and(|mac| mac.verify_slice(proof).is_ok())
    }

    fn mac(&self, side: Side, secret: Option<&Secret>) -> Option<Hmac<Sha256>> {
        let key = secret.map(Secret::bytes).unwrap_or_default();
        // HMAC takes keys of any length: never `None`.
        let mut mac = Hmac::<Sha256>::new_from_slice(key).ok()?;
        mac.update(match side {
            Side::Client => b"kvc peer client",
            Side::Server => b"kvc peer server",
        });
        mac.update(&self.protocol.to_be_bytes());
        mac.update(&self.client);
        mac.update(&self.server);
        mac.update(&self.incarnation.0.to_be_bytes());
        Some(mac)
    }
}

/// 32 bytes nobody can guess.
pub(super) fn random() -> Option<Nonce> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).ok()?;
    Some(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: Transcript = Transcript {
        protocol: 1,
        client: [1; 32],
        server: [2; 32],
        incarnation: Incarnation(7),
    };

    #[test]
    fn only_the_same_secret_proves() {
        let (own, other) = (Secret::new(b"0123456789abcdef"), Secret::new(b"0123456789abcdeX"));
        let proof = SAID.prove(Side::Client, own.as_ref());
        assert!(SAID.verify(Side::Client, own.as_ref(), &proof));
        assert!(!SAID.verify(Side::Client, other.as_ref(), &proof));
        assert!(!SAID.verify(Side::Client, None, &proof));
        assert!(!SAID.verify(Side::Client, own.as_ref(), &SAID.prove(Side::Client, None)));
        assert!(!SAID.verify(Side::Client, own.as_ref(), b""));
    }

    #[test]
    fn a_proof_is_good_for_one_direction_and_one_transcript() {
        let own = Secret::new(b"0123456789abcdef");
        let proof = SAID.prove(Side::Server, own.as_ref());
        assert!(!SAID.verify(Side::Client, own.as_ref(), &proof));
        for other in [
            Transcript { protocol: 2, ..SAID },
            Transcript {
                client: [3; 32],
                ..SAID
            },
            Transcript {
                server: [3; 32],
                ..SAID
            },
            Transcript {
                incarnation: Incarnation(8),
                ..SAID
            },
        ] {
            assert!(!other.verify(Side::Server, own.as_ref(), &proof));
        }
    }
}
