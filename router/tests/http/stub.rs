//! A worker as the router sees one: engine and module on one port. It admits by what it holds and does otherwise as told.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use kvc_proto::{
    id::{Epoch, Incarnation, Placement, ReservationId, SessionId, StoreId},
    wire::{
        admit::{AdmitAnswer, AdmitRequest, ImportRequest, LoadReport, Mode, MovedTo, PeerRef, Source, WithdrawAnswer},
        info::{Role, SessionList, SessionView, Standing, WorkerInfo},
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
    pub at: std::time::Instant,
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
    /// The connection closes.
    Breaks,
}

/// What the target of a move says.
#[derive(Clone, Copy, Debug)]
pub enum Withdraw {
    Says(WithdrawAnswer),
    /// The connection closes.
    Breaks,
}

/// Called with the session's name when an import of that source commits.
pub type OnImport = Arc<dyn Fn(&str, Source) + Send + Sync>;

pub struct Behaviour {
    /// Answers to come; then by what is held.
    pub refusals: VecDeque<Reason>,
    /// Generations to come; then `generation`.
    pub next: VecDeque<Generation>,
    pub generation: Generation,
    /// Imports to come; then `import`.
    pub imports: VecDeque<Import>,
    pub import: Import,
    pub on_import: Option<OnImport>,
    pub import_takes: Duration,
    pub withdraw: Withdraw,
    pub prefill: Generation,
    pub held: HashMap<String, u32>,
    /// What it shows of sessions.
    pub views: BTreeMap<String, SessionView>,
    /// Sessions it has handed over.
    pub moved: HashMap<String, MovedTo>,
    pub draining: bool,
    /// Questions about sessions are not answered.
    pub stalls_sessions: bool,
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
    imports: AtomicUsize,
    most_imports: AtomicUsize,
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
                imports: VecDeque::new(),
                import: Import::Commits,
                on_import: None,
                import_takes: Duration::ZERO,
                withdraw: Withdraw::Says(WithdrawAnswer::Withdrawn),
                prefill: Generation::Json("{}".into()),
                held: HashMap::new(),
                views: BTreeMap::new(),
                moved: HashMap::new(),
                draining: false,
                stalls_sessions: false,
                info: true,
            }),
            seen: Mutex::default(),
            hung_up: Mutex::default(),
            dead: AtomicBool::new(false),
            imports: AtomicUsize::new(0),
            most_imports: AtomicUsize::new(0),
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

    /// Most imports that ran at the same time.
    pub fn most_imports(&self) -> usize {
        self.state.most_imports.load(Ordering::SeqCst)
    }

    /// It shows that it holds so much of a session, as what, under which placement.
    pub fn shows(&self, session: &str, standing: Standing, committed: u32, placement: Placement) {
        let view = view(session, standing, committed, placement);
        let mut behaviour = self.behave();
        behaviour.held.insert(session.to_owned(), committed);
        behaviour.views.insert(session.to_owned(), view);
    }

    /// Its process, as peers reach it.
    pub fn peer(&self) -> PeerRef {
        let info = info(&self.state);
        PeerRef {
            peer: info.peer,
            incarnation: info.incarnation,
        }
    }

    /// Calls back, of its imports, hand sessions over at this worker.
    pub fn hands_over(&self, to: PeerRef) -> OnImport {
        let state = self.state.clone();
        Arc::new(move |session, source| {
            let mut behaviour = state.behaviour.lock().expect("not poisoned");
            if let (Source::Owner, Some(view)) = (source, behaviour.views.get_mut(session)) {
                view.standing = Standing::Moved;
                let placement = placement(view.epoch.map_or(1, |e| e.placement.n + 1));
                behaviour.moved.insert(
                    session.to_owned(),
                    MovedTo {
                        to: to.clone(),
                        placement,
                    },
                );
            }
        })
    }

    pub fn become_incarnation(&self, n: u64) {
        *self.state.incarnation.lock().expect("not poisoned") = n;
        self.behave().held.clear();
    }
}

/// A number of a store that is not the router's.
pub fn placement(n: u64) -> Placement {
    Placement { n, store: StoreId(9) }
}

fn view(session: &str, standing: Standing, committed: u32, placement: Placement) -> SessionView {
    SessionView {
        session_id: SessionId::new(session).expect("a plain name"),
        state: "idle".into(),
        standing,
        moved: None,
        backup: None,
        committed,
        readable: committed,
        shared: 0,
        epoch: Some(Epoch { placement, rewind: 0 }),
        leases: 0,
        idle_ms: 0,
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
        let seen = Seen {
            path,
            headers,
            body,
            at: std::time::Instant::now(),
        };
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
        let question: ImportRequest = serde_json::from_slice(&seen.body).expect("the router asks well");
        let (import, on_import) = {
            let mut behaviour = state.behaviour.lock().expect("not poisoned");
            let next = behaviour.imports.pop_front();
            (
                next.unwrap_or_else(|| behaviour.import.clone()),
                behaviour.on_import.clone(),
            )
        };
        return match import {
            Import::Breaks => false,
            Import::Commits => {
                let now = state.imports.fetch_add(1, Ordering::SeqCst) + 1;
                state.most_imports.fetch_max(now, Ordering::SeqCst);
                let takes = state.behaviour.lock().expect("not poisoned").import_takes;
                tokio::time::sleep(takes).await;
                state.imports.fetch_sub(1, Ordering::SeqCst);
                if let Some(on_import) = on_import {
                    on_import(path.split('/').rev().nth(1).unwrap_or_default(), question.source);
                }
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
    if path.ends_with("/withdraw") {
        let says = state.behaviour.lock().expect("not poisoned").withdraw;
        return match says {
            Withdraw::Breaks => false,
            Withdraw::Says(answer) => {
                let body = serde_json::to_string(&answer).expect("writes");
                reply(stream, 200, "application/json", &body).await
            }
        };
    }
    if let Some(query) = path.strip_prefix("/kvc/v1/sessions?") {
        let body = serde_json::to_string(&page(state, query)).expect("writes");
        return reply(stream, 200, "application/json", &body).await;
    }
    if let Some(session) = path.strip_prefix("/kvc/v1/sessions/") {
        let (stalls, view) = {
            let behaviour = state.behaviour.lock().expect("not poisoned");
            (behaviour.stalls_sessions, behaviour.views.get(session).cloned())
        };
        if stalls {
            return stall(stream, state, path).await;
        }
        if let Some(view) = view {
            let body = serde_json::to_string(&view).expect("writes");
            return reply(stream, 200, "application/json", &body).await;
        }
        let body = r#"{"error":{"code":"unknown-session","message":"not here"}}"#;
        return reply(stream, 404, "application/json", body).await;
    }
    if path == "/v1/models" {
        return reply(stream, 200, "application/json", r#"{"object":"list","data":[]}"#).await;
    }
    generate(stream, state, &seen).await
}

/// Two sessions at a time.
fn page(state: &State, query: &str) -> SessionList {
    let after = query.split_once("after=").map(|(_, after)| after.to_owned());
    let behaviour = state.behaviour.lock().expect("not poisoned");
    let later = behaviour
        .views
        .iter()
        .filter(|(name, _)| after.as_ref().is_none_or(|a| *name > a));
    SessionList {
        sessions: later.take(2).map(|(_, view)| view.clone()).collect(),
        total: behaviour.views.len() as u64,
    }
}

fn admit(state: &State, question: &AdmitRequest) -> AdmitAnswer {
    let mut behaviour = state.behaviour.lock().expect("not poisoned");
    let moved = behaviour.moved.get(question.session_id.as_str()).cloned();
    let moved = moved.filter(|m| question.placement.is_none_or(|p| p.n <= m.placement.n));
    let refusal = match (&moved, behaviour.draining) {
        (Some(_), _) => Some(Reason::Moved),
        (None, true) => Some(Reason::Draining),
        (None, false) => behaviour.refusals.pop_front(),
    };
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
        moved,
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
        movers: vec!["tcp".into()],
        draining: state.behaviour.lock().expect("not poisoned").draining,
        load: LoadReport {
            capacity: 1_000_000,
            ..LoadReport::default()
        },
    }
}
