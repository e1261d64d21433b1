//! What a stranger can say to the peer port.

use kvc_proto::wire::reason::Reason;
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
        ];
        for status in &codes {
            assert_eq!(refusal("p", status).code, Reason::Unauthenticated, "{status}");
        }
    });
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
