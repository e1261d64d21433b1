//! What a stranger can say to the peer port.

use std::sync::mpsc;

use kvc_proto::{
    id::{Placement, StoreId},
    session::Digest,
    time::Now,
    wire::reason::Reason,
    worker::Have,
};
use kvc_rdma::{
    Copy, HostRegion, LeaseToken, Mover, MoverError, ReadOptions, RegionKey, Run, ShmConfig, ShmMover, TcpConfig,
    TcpMover,
};
use tokio::runtime::Runtime;
use tonic::{
    Code, Request,
    metadata::MetadataValue,
    transport::{Channel, Endpoint},
};

use crate::{
    Config,
    harness::{Start, TestEngine},
};

use super::{
    BEARER, PROTOCOL,
    auth::{Side, Transcript},
    client::{decided, granted},
    status::refusal,
    wire::{self, peer_client::PeerClient},
};

fn worker() -> TestEngine {
    TestEngine::start(Start::new(Config::defaults().unwrap(), 16)).unwrap()
}

async fn dial(worker: &TestEngine) -> PeerClient<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{}", worker.engine().peer_listen())).unwrap();
    PeerClient::new(endpoint.connect().await.unwrap())
}

async fn challenged(worker: &TestEngine, client: &mut PeerClient<Channel>) -> Transcript {
    let ask = wire::ChallengeRequest {
        protocol: PROTOCOL,
        nonce: vec![7; 32],
    };
    let reply = client.challenge(ask).await.unwrap().into_inner();
    Transcript {
        protocol: PROTOCOL,
        client: [7; 32],
        server: reply.nonce.try_into().unwrap(),
        incarnation: worker.engine().incarnation(),
    }
}

fn hello(worker: &TestEngine, said: &Transcript) -> wire::HelloRequest {
    wire::HelloRequest {
        proof: said.prove(Side::Client, None),
        incarnation: 1,
        want_incarnation: worker.engine().incarnation().0,
        model: worker.engine().info().model,
        layout: worker.engine().info().layout,
        version: String::new(),
    }
}

#[test]
fn nothing_is_answered_before_hello() {
    // XFER-10.
    let worker = worker();
    Runtime::new().unwrap().block_on(async {
        let mut client = dial(&worker).await;
        let lease = wire::LeaseRequest {
            session: "s".into(),
            ..Default::default()
        };
        let name = || wire::LeaseName { lease: 1 };
        let codes = [
            client.lease(lease).await.map(|_| ()).unwrap_err(),
            client
                .watch(wire::WatchRequest::default())
                .await
                .map(|_| ())
                .unwrap_err(),
            client.renew(name()).await.map(|_| ()).unwrap_err(),
            client.confirm(name()).await.map(|_| ()).unwrap_err(),
            client.end(name()).await.map(|_| ()).unwrap_err(),
            client.announce(news(|_| ())).await.map(|_| ()).unwrap_err(),
            client.handover(question(|_| ())).await.map(|_| ()).unwrap_err(),
        ];
        for status in &codes {
            assert_eq!(refusal("p", status).code, Reason::Unauthenticated, "{status}");
        }
    });
}

/// An announcement of 64 tokens, with one thing changed.
fn news(change: impl FnOnce(&mut wire::AnnounceRequest)) -> wire::AnnounceRequest {
    let mut news = wire::AnnounceRequest {
        session: "s".into(),
        placement: 3,
        store: 1,
        rewind: 0,
        committed: 64,
        digest: vec![7; 16],
        identity: String::new(),
        from: "127.0.0.1:1".into(),
    };
    change(&mut news);
    news
}

/// A question for ownership of 64 tokens, with one thing changed.
fn question(change: impl FnOnce(&mut wire::HandoverRequest)) -> wire::HandoverRequest {
    let mut question = wire::HandoverRequest {
        session: "s".into(),
        incarnation: 0,
        pending: 9,
        pending_store: 1,
        placement: 3,
        store: 1,
        rewind: 0,
        committed: 64,
        digest: vec![7; 16],
        to: "127.0.0.1:1".into(),
    };
    change(&mut question);
    question
}

/// Everything a message could change.
fn held(worker: &TestEngine) -> String {
    worker.engine().scheduler(|w, _| {
        let start = Now(0);
        format!(
            "{:?} {:?} {:?} {:?} {:?}",
            w.sessions(None, 100, start),
            w.transfers(start),
            w.load(None),
            w.sync_lag(),
            w.counts()
        )
    })
}

#[test]
fn a_bad_field_is_refused_by_name_and_changes_nothing() {
    // SYNC-1, MIG-1, T9.
    let worker = worker();
    Runtime::new().unwrap().block_on(async {
        let mut peer = Reader::greet(&worker, 1).await;
        let before = held(&worker);
        let long = "x".repeat(9 << 10);
        let announcements = [
            ("session_id", news(|n| n.session.clear())),
            ("session_id", news(|n| n.session = "x".repeat(300))),
            ("digest", news(|n| n.digest.truncate(15))),
            ("digest", news(|n| n.digest.push(0))),
            ("committed", news(|n| n.committed = 0)),
            ("committed", news(|n| n.committed = u32::MAX)),
            ("identity", news(|n| n.identity = long)),
            ("from", news(|n| n.from = "worker:70".into())),
            ("from", news(|n| n.from = "127.0.0.1:0".into())),
        ];
        for (field, message) in announcements {
            let why = peer.client.announce(peer.signed(message)).await.unwrap_err();
            let why = refusal("p", &why);
            assert_eq!(why.code, Reason::BadRequest, "{field}: {why}");
            assert!(why.message.contains(field), "{field}: {why}");
        }
        let questions = [
            ("session_id", question(|q| q.session = "a\u{1}".into())),
            ("digest", question(|q| q.digest.clear())),
            ("digest", question(|q| q.digest = vec![0; 32])),
            ("committed", question(|q| q.committed = 0)),
            ("to", question(|q| q.to.clear())),
        ];
        for (field, message) in questions {
            let why = peer.client.handover(peer.signed(message)).await.unwrap_err();
            let why = refusal("p", &why);
            assert_eq!(why.code, Reason::BadRequest, "{field}: {why}");
            assert!(why.message.contains(field), "{field}: {why}");
        }
        let ask = |change: fn(&mut wire::LeaseRequest)| {
            let mut ask = wire::LeaseRequest {
                session: "s".into(),
                placement: 3,
                store: 1,
                ..Default::default()
            };
            change(&mut ask);
            ask
        };
        let leases = [
            ("session_id", ask(|l| l.session.clear())),
            ("kind", ask(|l| l.kind = 4)),
            ("kind", ask(|l| l.kind = -1)),
            ("have_digest", ask(|l| l.have_tokens = 5)),
            ("have_digest", ask(|l| l.have_digest = vec![0; 16])),
            (
                "have_tokens",
                ask(|l| (l.have_tokens, l.have_digest) = (u32::MAX, vec![0; 16])),
            ),
        ];
        for (field, message) in leases {
            let why = peer.client.lease(peer.signed(message)).await.unwrap_err();
            let why = refusal("p", &why);
            assert_eq!(why.code, Reason::BadRequest, "{field}: {why}");
            assert!(why.message.contains(field), "{field}: {why}");
        }
        assert_eq!(held(&worker), before);
    });
}

#[test]
fn a_refusal_travels_with_its_reason() {
    // MIG-1, SYNC-1, SES-4.
    let mut worker = worker();
    let placement = Placement {
        n: 5,
        store: StoreId(1),
    };
    let prompt: Vec<u32> = (0..64).collect();
    let turn = worker.arrive("s", &prompt, 4, None, Some(placement)).unwrap();
    worker.finish(turn, &[1, 2]);
    worker.step();
    Runtime::new().unwrap().block_on(async {
        let mut peer = Reader::greet(&worker, 1).await;
        let own = worker.engine().incarnation().0;
        let before = held(&worker);
        let asked = |change: &dyn Fn(&mut wire::HandoverRequest)| {
            let mut asked = question(|q| q.incarnation = own);
            change(&mut asked);
            peer.signed(asked)
        };
        let questions = [
            (Reason::StaleIncarnation, asked(&|q| q.incarnation = own ^ 1)),
            (Reason::UnknownSession, asked(&|q| q.session = "t".into())),
            (Reason::StaleEpoch, asked(&|q| q.pending = 5)),
            (Reason::StaleEpoch, asked(&|q| q.pending = 4)),
        ];
        let mut client = peer.client.clone();
        for (reason, message) in questions {
            let why = client.handover(message).await.unwrap_err();
            assert_eq!(refusal("p", &why).code, reason, "{why}");
        }
        let older = peer.client.announce(peer.signed(news(|n| n.placement = 4))).await;
        assert_eq!(refusal("p", &older.unwrap_err()).code, Reason::StaleEpoch);
        assert_eq!(held(&worker), before);
    });
    assert!(worker.drain());
}

#[test]
fn nothing_beyond_what_is_committed_is_given() {
    // XFER-2, MIG-1.
    let mut worker = worker();
    let placement = Placement {
        n: 5,
        store: StoreId(1),
    };
    let prompt: Vec<u32> = (0..64).collect();
    let turn = worker.arrive("s", &prompt, 4, None, Some(placement)).unwrap();
    worker.finish(turn, &[1, 2]);
    worker.step();
    Runtime::new().unwrap().block_on(async {
        let mut peer = Reader::greet(&worker, 1).await;
        let ask = wire::LeaseRequest {
            session: "s".into(),
            placement: 5,
            store: 1,
            kind: wire::LeaseKind::Sync.into(),
            // It claims more than there is: every id is sent.
            have_tokens: 90,
            have_digest: vec![1; 16],
            movers: vec!["tcp".into()],
            ..Default::default()
        };
        let lease = peer.client.lease(peer.signed(ask)).await.unwrap().into_inner();
        assert_eq!((lease.after, lease.tokens.len(), lease.readable), (0, 65, 65));
        let watch = |from| wire::WatchRequest {
            lease: lease.lease,
            from,
            wait_ms: 0,
        };
        let beyond = peer.client.watch(peer.signed(watch(66))).await.unwrap_err();
        assert_eq!(refusal("p", &beyond).code, Reason::RangeNotReadable);
        let last = peer.client.watch(peer.signed(watch(64))).await.unwrap().into_inner();
        assert_eq!((last.runs.len(), last.complete), (1, true));
        peer.client
            .end(peer.signed(wire::LeaseName { lease: lease.lease }))
            .await
            .unwrap();
        let before = held(&worker);
        let question = question(|q| {
            q.incarnation = worker.engine().incarnation().0;
            q.placement = 5;
            q.committed = 90;
        });
        let answer = peer.client.handover(peer.signed(question)).await.unwrap().into_inner();
        assert_eq!(answer.answer(), wire::HandoverAnswer::Behind);
        assert_eq!(held(&worker), before, "it owns what it owned");
    });
    assert!(worker.drain());
}

#[test]
fn a_grant_that_skips_what_the_importer_lacks_is_none() {
    // SYNC-1, XFER-3.
    let reply = |after, tokens: usize, share| wire::LeaseReply {
        token: vec![7; 32],
        tokens: vec![1; tokens],
        after,
        share,
        lives_ms: 1000,
        ..Default::default()
    };
    let have = |tokens| {
        Some(Have {
            tokens,
            digest: Digest([0; 16]),
        })
    };
    assert!(granted(reply(0, 4, 4), None).is_some());
    assert!(granted(reply(5, 4, 9), have(5)).is_some());
    for (reply, have) in [
        (reply(5, 4, 0), None),
        (reply(5, 4, 0), have(4)),
        (reply(5, 4, 10), have(5)),
        (reply(u32::MAX, 4, 0), have(u32::MAX)),
    ] {
        assert!(granted(reply.clone(), have).is_none(), "{reply:?} {have:?}");
    }
    for answer in [0, 4, -1] {
        assert!(decided(&wire::HandoverReply { answer }).is_none());
    }
}

#[test]
fn a_worker_that_keeps_no_replicas_says_so() {
    // SYNC-3.
    let flags = [("sync".to_owned(), "false".to_owned())];
    let worker = TestEngine::start(Start::new(Config::load(&flags, []).unwrap(), 16)).unwrap();
    Runtime::new().unwrap().block_on(async {
        let mut peer = Reader::greet(&worker, 1).await;
        let why = peer.client.announce(peer.signed(news(|_| ()))).await.unwrap_err();
        assert_eq!(refusal("p", &why).code, Reason::SyncOff, "{why}");
    });
}

#[test]
fn a_lease_is_read_with_a_mover_that_both_have_or_not_given() {
    // XFER-9: and what a peer names is cut before it is repeated.
    let mut worker = worker();
    worker.run("s", &(0..64).collect::<Vec<_>>(), &[1]).unwrap();
    Runtime::new().unwrap().block_on(async {
        let mut peer = Reader::greet(&worker, 1).await;
        for movers in [vec![], vec!["verbs".into(), "shm".into()], vec!["x".repeat(5000); 9]] {
            let ask = wire::LeaseRequest {
                session: "s".into(),
                movers,
                ..Default::default()
            };
            let why = peer.client.lease(peer.signed(ask)).await.unwrap_err();
            assert_eq!(refusal("p", &why).code, Reason::NoCommonMover, "{why}");
            assert!(why.message().contains("[tcp]") && why.message().len() < 400, "{why}");
        }
        assert!(held(&worker).contains("leases: [], "), "{}", held(&worker));
    });
    assert!(worker.drain());
}

#[test]
fn a_challenge_is_good_for_one_answer() {
    let worker = worker();
    Runtime::new().unwrap().block_on(async {
        let mut client = dial(&worker).await;
        let said = challenged(&worker, &mut client).await;
        let mut wrong = hello(&worker, &said);
        wrong.proof[0] ^= 1;
        let refused = client.hello(wrong).await.unwrap_err();
        assert_eq!(refusal("p", &refused).code, Reason::Unauthenticated);
        // The right answer comes too late.
        let refused = client.hello(hello(&worker, &said)).await.unwrap_err();
        assert_eq!(refusal("p", &refused).code, Reason::Unauthenticated);
    });
}

#[test]
fn a_bearer_is_good_on_its_own_connection_only() {
    let worker = worker();
    Runtime::new().unwrap().block_on(async {
        let mut client = dial(&worker).await;
        let said = challenged(&worker, &mut client).await;
        let token = client.hello(hello(&worker, &said)).await.unwrap().into_inner().token;
        let renew = || {
            let mut request = Request::new(wire::LeaseName { lease: 99 });
            request
                .metadata_mut()
                .insert_bin(BEARER, MetadataValue::from_bytes(&token));
            request
        };
        let known = client.renew(renew()).await.unwrap_err();
        assert_eq!(refusal("p", &known).code, Reason::LeaseUnknown);
        let stolen = dial(&worker).await.renew(renew()).await.unwrap_err();
        assert_eq!(refusal("p", &stolen).code, Reason::Unauthenticated);
    });
}

/// A peer that has said hello: its signed requests, and movers to read with.
struct Reader {
    client: PeerClient<Channel>,
    token: Vec<u8>,
    /// Each way in that was offered.
    ways: Vec<(wire::Offer, Box<dyn Mover>, RegionKey)>,
}

impl Reader {
    async fn greet(worker: &TestEngine, incarnation: u64) -> Self {
        let mut client = dial(worker).await;
        let said = challenged(worker, &mut client).await;
        let mut hello = hello(worker, &said);
        hello.incarnation = incarnation;
        let reply = client.hello(hello).await.unwrap().into_inner();
        let way = |offer: wire::Offer| {
            let mover: Box<dyn Mover> = match offer.mover.as_str() {
                "shm" => Box::new(ShmMover::start(ShmConfig::default()).unwrap()),
                _ => Box::new(TcpMover::start(TcpConfig::default()).unwrap()),
            };
            let landing = mover.register(HostRegion::new(4096).into()).unwrap();
            (offer, mover, landing)
        };
        Self {
            client,
            token: reply.token,
            ways: reply.offers.into_iter().map(way).collect(),
        }
    }

    fn signed<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request
            .metadata_mut()
            .insert_bin(BEARER, MetadataValue::from_bytes(&self.token));
        request
    }

    /// Reads 32 bytes of a slot under a lease, every way.
    fn read(&self, token: &[u8], slot: u32) -> Vec<Result<(), MoverError>> {
        let run = |region, offset| Run {
            region,
            offset,
            len: 32,
        };
        let read = |(offer, mover, landing): &(wire::Offer, Box<dyn Mover>, RegionKey)| {
            let copy = Copy {
                remote: run(RegionKey(offer.keys[0]), u64::from(slot) * 32),
                local: run(*landing, 0),
            };
            let (done, outcome) = mpsc::channel();
            let token = LeaseToken::from_bytes(token.try_into().unwrap());
            let options = ReadOptions::default();
            let told = Box::new(move |outcome: Result<_, _>| drop(done.send(outcome.map(|_| ()))));
            let _read = mover.read(&offer.endpoint, token, vec![copy], options, told);
            outcome.recv().unwrap()
        };
        self.ways.iter().map(read).collect()
    }
}

#[test]
fn only_readable_slots_are_exposed_and_nothing_after_a_revocation() {
    // XFER-2: revoke, fence, free. When the scheduler's call returns nothing can be read any more.
    // However it was exposed (XFER-9).
    let mut start = Start::new(Config::defaults().unwrap(), 16);
    start.shared = true;
    let mut worker = TestEngine::start(start).unwrap();
    let prompt: Vec<u32> = (0..64).collect();
    let placement = Placement {
        n: 1,
        store: StoreId(1),
    };
    let mut turn = worker.arrive("s", &prompt, 0, None, Some(placement)).unwrap();
    worker.prefill(&mut turn, 32);
    Runtime::new().unwrap().block_on(async {
        let mut peer = Reader::greet(&worker, 1).await;
        let ask = wire::LeaseRequest {
            session: "s".into(),
            placement: 1,
            store: 1,
            wait_ms: 1000,
            movers: vec!["shm".into(), "tcp".into(), "a newer one".into()],
            ..Default::default()
        };
        assert_eq!(peer.ways.len(), 2);
        let lease = peer.client.lease(peer.signed(ask)).await.unwrap().into_inner();
        let first = worker.slot(&turn, 0);
        assert!(
            peer.read(&lease.token, first).iter().all(Result::is_err),
            "nothing is exposed before it is asked for"
        );
        let watch = wire::WatchRequest {
            lease: lease.lease,
            from: 0,
            wait_ms: 1000,
        };
        let view = peer.client.watch(peer.signed(watch)).await.unwrap().into_inner();
        assert_eq!(view.runs.iter().map(|r| r.len).sum::<u32>(), 32);
        assert_eq!(peer.read(&lease.token, first), [Ok(()), Ok(())]);
        assert!(
            peer.read(&lease.token, 0)
                .iter()
                .all(|read| matches!(read, Err(MoverError::RangeRefused { .. }))),
            "another session's slot"
        );
        // Another peer cannot use the lease, and does not learn that there is one.
        let mut other = Reader::greet(&worker, 2).await;
        let name = || wire::LeaseName { lease: lease.lease };
        let refused = other.client.confirm(other.signed(name())).await.unwrap_err();
        assert_eq!(refusal("p", &refused).code, Reason::LeaseUnknown);
        other.client.end(other.signed(name())).await.unwrap_err();
        assert_eq!(peer.read(&lease.token, first), [Ok(()), Ok(())]);
        worker.abort(turn);
        assert!(
            peer.read(&lease.token, first).iter().all(Result::is_err),
            "read after the fence"
        );
        let refused = peer.client.confirm(peer.signed(name())).await.unwrap_err();
        assert!([Reason::LeaseRevoked, Reason::LeaseUnknown].contains(&refusal("p", &refused).code));
    });
    assert!(worker.drain());
}

#[test]
fn another_protocol_is_refused_by_number() {
    let worker = worker();
    Runtime::new().unwrap().block_on(async {
        let ask = wire::ChallengeRequest {
            protocol: PROTOCOL + 1,
            nonce: vec![7; 32],
        };
        let refused = dial(&worker).await.challenge(ask).await.unwrap_err();
        assert_eq!(refusal("p", &refused).code, Reason::ProtocolMismatch);
        let short = wire::ChallengeRequest {
            protocol: PROTOCOL,
            nonce: vec![7; 31],
        };
        let refused = dial(&worker).await.challenge(short).await.unwrap_err();
        assert_eq!(refusal("p", &refused).code, Reason::BadRequest);
    });
}

#[test]
fn an_oversized_message_is_refused_and_the_next_one_answered() {
    let worker = worker();
    Runtime::new().unwrap().block_on(async {
        let mut client = dial(&worker).await;
        let huge = wire::ChallengeRequest {
            protocol: PROTOCOL,
            nonce: vec![7; 1 << 20],
        };
        assert_eq!(client.challenge(huge).await.unwrap_err().code(), Code::OutOfRange);
        challenged(&worker, &mut client).await;
    });
}
