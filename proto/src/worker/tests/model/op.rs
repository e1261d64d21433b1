//! The steps of a random life, and how often each is taken.

use proptest::prelude::*;

pub(super) const SESSIONS: u8 = 5;

/// One step of a random life.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Arrive {
        session: u8,
        edit: u8,
        len: u8,
        max_new: u8,
        routed: bool,
        salt: bool,
    },
    Append {
        session: u8,
        len: u8,
    },
    Start {
        pick: u8,
        chunk: u8,
    },
    LockUnlock {
        pick: u8,
    },
    Chunk {
        pick: u8,
        chunk: u8,
    },
    Decode {
        pick: u8,
    },
    Commit {
        pick: u8,
    },
    Abort {
        pick: u8,
    },
    Retract {
        pick: u8,
    },
    Cancel {
        pick: u8,
    },
    Unwedge {
        pick: u8,
    },
    Poll,
    Pressure {
        pages: u8,
    },
    Admit {
        session: u8,
        input: u8,
        append: u8,
        via: bool,
        newer: bool,
    },
    Release {
        session: u8,
        drop: bool,
        named: bool,
    },
    Close {
        session: u8,
    },
    Import {
        session: u8,
    },
    Offer {
        pick: u8,
        edit: u8,
        len: u8,
    },
    Pull {
        pick: u8,
    },
    Confirm {
        pick: u8,
    },
    Fail {
        pick: u8,
    },
    Lease {
        session: u8,
    },
    Look {
        pick: u8,
    },
    EndLease {
        pick: u8,
    },
    Wait {
        seconds: u8,
    },
    Flush,
    Turn {
        session: u8,
        edit: u8,
        len: u8,
        out: u8,
    },
    Seed {
        session: u8,
        edit: u8,
        len: u8,
    },
    KillLanding,
    Finish {
        pick: u8,
    },
    Twins {
        one: u8,
        two: u8,
        len: u8,
    },
}

pub(super) fn ops() -> impl Strategy<Value = Op> {
    let s = 0..SESSIONS;
    let b = any::<u8>;
    prop_oneof![
        6 => (s.clone(), b(), 1u8..70, b(), any::<bool>(), prop::bool::weighted(0.1))
            .prop_map(|(session, edit, len, max_new, routed, salt)| Op::Arrive { session, edit, len, max_new, routed, salt }),
        8 => (s.clone(), b(), 1u8..70, 0u8..12).prop_map(|(session, edit, len, out)| Op::Turn { session, edit, len, out }),
        8 => (s.clone(), b(), 1u8..70).prop_map(|(session, edit, len)| Op::Seed { session, edit, len }),
        1 => Just(Op::KillLanding),
        6 => b().prop_map(|pick| Op::Finish { pick }),
        2 => (s.clone(), s.clone(), 20u8..50).prop_map(|(one, two, len)| Op::Twins { one, two, len }),
        2 => (s.clone(), 1u8..20).prop_map(|(session, len)| Op::Append { session, len }),
        8 => (b(), 1u8..80).prop_map(|(pick, chunk)| Op::Start { pick, chunk }),
        2 => b().prop_map(|pick| Op::LockUnlock { pick }),
        6 => (b(), 1u8..40).prop_map(|(pick, chunk)| Op::Chunk { pick, chunk }),
        4 => b().prop_map(|pick| Op::Decode { pick }),
        8 => b().prop_map(|pick| Op::Commit { pick }),
        1 => b().prop_map(|pick| Op::Abort { pick }),
        1 => b().prop_map(|pick| Op::Retract { pick }),
        1 => b().prop_map(|pick| Op::Cancel { pick }),
        1 => b().prop_map(|pick| Op::Unwedge { pick }),
        6 => Just(Op::Poll),
        1 => (1u8..30).prop_map(|pages| Op::Pressure { pages }),
        6 => (s.clone(), 1u8..90, b(), any::<bool>(), any::<bool>())
            .prop_map(|(session, input, append, via, newer)| Op::Admit { session, input, append, via, newer }),
        1 => (s.clone(), any::<bool>(), any::<bool>()).prop_map(|(session, drop, named)| Op::Release { session, drop, named }),
        1 => s.clone().prop_map(|session| Op::Close { session }),
        4 => s.clone().prop_map(|session| Op::Import { session }),
        6 => (b(), b(), 1u8..70).prop_map(|(pick, edit, len)| Op::Offer { pick, edit, len }),
        6 => b().prop_map(|pick| Op::Pull { pick }),
        6 => b().prop_map(|pick| Op::Confirm { pick }),
        1 => b().prop_map(|pick| Op::Fail { pick }),
        5 => s.prop_map(|session| Op::Lease { session }),
        6 => b().prop_map(|pick| Op::Look { pick }),
        1 => b().prop_map(|pick| Op::EndLease { pick }),
        1 => (0u8..40).prop_map(|seconds| Op::Wait { seconds }),
        1 => prop::bool::weighted(0.2).prop_map(|f| if f { Op::Flush } else { Op::Poll }),
    ]
}
