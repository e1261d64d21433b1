//! A worker as the router sees one: engine and module on one port. It admits by what it holds and does otherwise as told.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, atomic::AtomicBool, atomic::Ordering},
    time::Duration,
};

use kvc_proto::{
    id::{Incarnation, ReservationId},
    wire::{
        admit::{AdmitAnswer, AdmitRequest, LoadReport, Mode},
        info::{Role, WorkerInfo},
        reason::Reason,
        turn::TurnTag,
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
};

use super::client;

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct Seen {
    pub path: String,
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
}

impl Seen {
    pub fn tag(&self) -> Option<TurnTag> {
        self.headers
            .get("x-kvc-turn")
            .map(|v| TurnTag::parse(v).expect("a router writes valid tags"))
    }
}

/// What a generation does.
#[derive(Clone, Debug)]
pub enum Generation {
    /// A JSON answer.
    Json(String),
    /// These events, then the end.
    Events(Vec<String>),
    /// These bytes of an event stream, then the connection closes without an end.
    BreakAfter(Vec<String>),
    /// These bytes of an event stream, then nothing.
    StallAfter(Vec<String>),
    /// Nothing at all.
    Stall,
    /// The connection closes.
    Close,
    /// A status and a body.
    Status(u16, String),
}

/// What an import does.
#[derive(Clone, Debug)]
pub enum Import {
    Commits,
    Fails(Reason),
    Stalls,
}

pub struct Behaviour {
    /// Answers to come; then by what is held.
    pub refusals: VecDeque<Reason>,
    /// Generations to come; then `generation`.
    pub next: VecDeque<Generation>,
    pub generation: Generation,
    pub import: Import,
    pub prefill: Generation,
    pub held: HashMap<String, u32>,
    pub info: bool,
}

pub struct Stub {
    pub role: Role,
    pub address: SocketAddr,
    state: Arc<State>,
    stop: watch::Sender<bool>,
}

struct State {
    role: Role,
    address: SocketAddr,
    incarnation: Mutex<u64>,
    behaviour: Mutex<Behaviour>,
    seen: Mutex<Vec<Seen>>,
    hung_up: Mutex<Vec<String>>,
    dead: AtomicBool,
}

impl Stub {
    pub async fn start(role: Role, incarnation: u64) -> Stub {
        let socket = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = socket.local_addr().expect("bound");
        let state = Arc::new(State {
            role,
            address,
            incarnation: Mutex::new(incarnation),
            behaviour: Mutex::new(Behaviour {
                refusals: VecDeque::new(),
                next: VecDeque::new(),
                generation: Generation::Json(r#"{"text":"ok","meta_info":{"completion_tokens":5}}"#.into()),
                import: Import::Commits,
                prefill: Generation::Json("{}".into()),
                held: HashMap::new(),
                info: true,
            }),
            seen: Mutex::default(),
            hung_up: Mutex::default(),
            dead: AtomicBool::new(false),
        });
        let (stop, stopping) = watch::channel(false);
        tokio::spawn(accept(socket, state.clone(), stopping));
        Stub {
            role,
            address,
            state,
            stop,
        }
    }

    pub fn behave(&self) -> MutexGuard<'_, Behaviour> {
        self.state.behaviour.lock().expect("not poisoned")
    }

    /// Requests to that path, in order of arrival.
    pub fn seen(&self, path: &str) -> Vec<Seen> {
        let seen = self.state.seen.lock().expect("not poisoned");
        seen.iter().filter(|s| s.path.ends_with(path)).cloned().collect()
    }

    /// Paths of requests whose client hung up before the answer's end.
    pub fn hung_up(&self) -> Vec<String> {
        self.state.hung_up.lock().expect("not poisoned").clone()
    }

    /// Every connection closes and nobody listens any more.
    pub fn die(&self) {
        self.state.dead.store(true, Ordering::SeqCst);
        let _ = self.stop.send(true);
    }

    pub fn become_incarnation(&self, n: u64) {
        *self.state.incarnation.lock().expect("not poisoned") = n;
        self.behave().held.clear();
    }
}

async fn accept(socket: TcpListener, state: Arc<State>, mut stopping: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            accepted = socket.accept() => {
                let Ok((stream, _)) = accepted else { return };
                let state = state.clone();
                let mut stopping = stopping.clone();
                tokio::spawn(async move {
                    tokio::select! {
                        () = serve(stream, state) => {}
                        _ = async { let _ = stopping.wait_for(|s| *s).await; } => {}
                    }
                });
            }
            _ = async { let _ = stopping.wait_for(|s| *s).await; } => return,
        }
    }
}

async fn serve(mut stream: TcpStream, state: Arc<State>) {
    let mut buffer = Vec::new();
    while let Some((first, headers, body)) = client::read_message(&mut stream, &mut buffer).await {
        let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
        let seen = Seen { path, headers, body };
        state.seen.lock().expect("not poisoned").push(seen.clone());
        if !answer(&mut stream, &state, seen).await {
            return;
        }
    }
}

/// False: the connection closes.
async fn answer(stream: &mut TcpStream, state: &Arc<State>, seen: Seen) -> bool {
    if state.dead.load(Ordering::SeqCst) {
        return false;
    }
    let path = seen.path.as_str();
    if path == "/kvc/v1/info" {
        let known = state.behaviour.lock().expect("not poisoned").info;
        return match known {
            true => {
                reply(
                    stream,
                    200,
                    "application/json",
                    &serde_json::to_string(&info(state)).expect("writes"),
                )
                .await
            }
            false => false,
        };
    }
    if path == "/admit_direct_append" {
        let question: AdmitRequest = serde_json::from_slice(&seen.body).expect("the router asks well");
        let answer = serde_json::to_string(&admit(state, &question)).expect("writes");
        return reply(stream, 200, "application/json", &answer).await;
    }
    if path.ends_with("/import") {
        let import = state.behaviour.lock().expect("not poisoned").import.clone();
        return match import {
            Import::Commits => {
                let done = r#"{"resident_tokens":1,"pulled_tokens":1,"bytes":10,"micros":5}"#;
                reply(stream, 200, "application/json", done).await
            }
            Import::Fails(reason) => {
                let body = format!(r#"{{"error":{{"code":"{reason}","message":"as told"}}}}"#);
                reply(stream, reason.status(), "application/json", &body).await
            }
            Import::Stalls => stall(stream, state, path).await,
        };
    }
    if path.ends_with("/release") {
        return reply(stream, 200, "application/json", r#"{"released":true,"kv":"kept"}"#).await;
    }
    if path.starts_with("/kvc/v1/sessions/") {
        let body = r#"{"error":{"code":"unknown-session","message":"not here"}}"#;
        return reply(stream, 404, "application/json", body).await;
    }
    if path == "/v1/models" {
        return reply(stream, 200, "application/json", r#"{"object":"list","data":[]}"#).await;
    }
    generate(stream, state, &seen).await
}

fn admit(state: &State, question: &AdmitRequest) -> AdmitAnswer {
    let mut behaviour = state.behaviour.lock().expect("not poisoned");
    let refusal = behaviour.refusals.pop_front();
    let resident = behaviour.held.get(question.session_id.as_str()).copied().unwrap_or(0);
    let mode = match (resident, question.turn) {
        (0, 0) => Mode::Seed,
        (0, _) => Mode::Reseed,
        _ => Mode::Direct,
    };
    AdmitAnswer {
        can_admit: refusal.is_none(),
        mode: Some(mode).filter(|_| refusal.is_none()),
        reason: refusal,
        reservation: Some(ReservationId(question.key.request)).filter(|_| refusal.is_none()),
        deadline_ms: Some(30_000),
        resident_tokens: resident,
        epoch: None,
        incarnation: Incarnation(*state.incarnation.lock().expect("not poisoned")),
        load: LoadReport::default(),
    }
}

async fn generate(stream: &mut TcpStream, state: &Arc<State>, seen: &Seen) -> bool {
    let tag = seen.tag();
    let generation = {
        let mut behaviour = state.behaviour.lock().expect("not poisoned");
        if let Some(tag) = &tag {
            behaviour.held.insert(tag.session.as_str().to_owned(), 1_000);
        }
        match tag.is_some_and(|t| t.prefill_only) {
            true => behaviour.prefill.clone(),
            false => behaviour
                .next
                .pop_front()
                .unwrap_or_else(|| behaviour.generation.clone()),
        }
    };
    match generation {
        Generation::Json(body) => reply(stream, 200, "application/json", &body).await,
        Generation::Status(status, body) => reply(stream, status, "application/json", &body).await,
        Generation::Close => false,
        Generation::Stall => stall(stream, state, &seen.path).await,
        Generation::Events(events) => begin(stream, &events).await && stream.write_all(b"0\r\n\r\n").await.is_ok(),
        Generation::BreakAfter(events) => {
            begin(stream, &events).await;
            false
        }
        Generation::StallAfter(events) => begin(stream, &events).await && stall(stream, state, &seen.path).await,
    }
}

async fn begin(stream: &mut TcpStream, events: &[String]) -> bool {
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    if stream.write_all(head.as_bytes()).await.is_err() {
        return false;
    }
    for event in events {
        let chunk = format!("{:x}\r\n{event}\r\n", event.len());
        if stream.write_all(chunk.as_bytes()).await.is_err() {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    true
}

/// Says nothing until the client hangs up.
async fn stall(stream: &mut TcpStream, state: &Arc<State>, path: &str) -> bool {
    let mut byte = [0; 1];
    let _ = stream.read(&mut byte).await;
    state.hung_up.lock().expect("not poisoned").push(path.to_owned());
    false
}

async fn reply(stream: &mut TcpStream, status: u16, content_type: &str, body: &str) -> bool {
    let answer = format!(
        "HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(answer.as_bytes()).await.is_ok()
}

fn info(state: &State) -> WorkerInfo {
    WorkerInfo {
        incarnation: Incarnation(*state.incarnation.lock().expect("not poisoned")),
        role: state.role,
        version: "0".into(),
        engine: "stub".into(),
        model: "m".into(),
        listen: state.address.to_string(),
        peer: format!("127.0.0.1:{}", 1000 + state.address.port() % 1000),
        page_tokens: 1,
        capacity: 1_000_000,
        max_uncached_tokens: 8192,
        layout: "l".into(),
        draining: false,
        load: LoadReport::default(),
    }
}
