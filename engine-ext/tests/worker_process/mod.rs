//! A worker in a process of its own: the test binary started anew, told what to do over a pipe.

use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    net::SocketAddr,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use kvc_engine_ext::harness::{Client, Start, TestEngine, TestTurn};
use kvc_proto::{
    id::ReservationId,
    wire::admit::{ADMIT_PATH, AdmitRequest, PeerRef},
    worker::Token,
};
use kvc_rdma::{VerbsConfig, VerbsMover, fault::Fault};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::support;

/// Set for the worker's process: its [`Plan`].
const PLAN: &str = "KVC_TEST_WORKER";
/// What lines of the worker begin with; all others are the test framework's.
const ANSWER: &str = "worker: ";
const LONG: Duration = Duration::from_secs(60);

/// How a worker starts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Plan {
    /// Settings over the defaults.
    pub settings: Vec<(String, String)>,
    /// Only verbs, and its exporter falls silent after so many bytes of a connection.
    pub stall: Option<u64>,
}

/// What the worker's engine is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// A request arrives; it is the worker's only turn until it is finished.
    Arrive {
        session: String,
        prompt: Vec<Token>,
        reservation: Option<u64>,
        placed: u64,
    },
    /// The prompt's KV up to here is computed.
    Prefill(usize),
    /// The rest of it, then this output.
    Finish(Vec<Token>),
    /// A turn that compares each reused byte with the true KV (T1) and ends there; answers how many tokens were reused.
    Compare {
        session: String,
        prompt: Vec<Token>,
        placed: u64,
    },
    /// Everything is dropped; answers whether every page came back.
    Drain,
}

/// The worker, as the process that started it sees it. Ends with it.
pub struct Worker {
    process: Child,
    orders: ChildStdin,
    answers: Receiver<Value>,
    pub listen: SocketAddr,
    pub peer: PeerRef,
}

impl Worker {
    /// A worker with these settings.
    pub fn start(settings: &[(&str, &str)]) -> Self {
        Self::start_as(&Plan {
            settings: settings.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect(),
            ..Plan::default()
        })
    }

    pub fn start_as(plan: &Plan) -> Self {
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--exact", "a_worker_of_its_own", "--nocapture"])
            .env(PLAN, serde_json::to_string(plan).unwrap())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(process.stdout.take().unwrap());
        let (tx, answers) = mpsc::channel();
        thread::spawn(move || {
            let lines = out.lines().map_while(Result::ok);
            let told = lines.filter_map(|line| Some(serde_json::from_str(line.strip_prefix(ANSWER)?).unwrap()));
            told.take_while(|answer: &Value| tx.send(answer.clone()).is_ok())
                .for_each(drop);
        });
        let started: Value = answers.recv_timeout(LONG).expect("the worker starts");
        Worker {
            orders: process.stdin.take().unwrap(),
            process,
            answers,
            listen: started["listen"].as_str().unwrap().parse().unwrap(),
            peer: serde_json::from_value(started["peer"].clone()).unwrap(),
        }
    }

    /// Does it and answers.
    pub fn tell(&mut self, order: &Order) -> Value {
        let mut line = serde_json::to_string(order).unwrap();
        line.push('\n');
        self.orders.write_all(line.as_bytes()).unwrap();
        self.answers.recv_timeout(LONG).expect("the worker answers")
    }

    pub fn client(&self) -> Client {
        Client::connect(self.listen).unwrap()
    }

    /// As `support::admit`.
    pub fn admit(&self, question: &AdmitRequest, mode: &str) -> u64 {
        let (status, answer) = self.client().post(ADMIT_PATH, question).unwrap();
        assert_eq!(
            (status, &answer["mode"], &answer["can_admit"]),
            (200, &json!(mode), &json!(true)),
            "{answer}"
        );
        answer["reservation"].as_u64().unwrap()
    }

    /// As `support::view`.
    pub fn view(&self, session: &str) -> Value {
        match self.client().get(&format!("/kvc/v1/sessions/{session}")).unwrap() {
            (200, view) => view,
            _ => Value::Null,
        }
    }

    /// As `support::metric`.
    pub fn metric(&self, sample: &str) -> f64 {
        let page = self.client().get("/metrics").unwrap().1;
        let samples = page.as_str().unwrap().lines().filter_map(|line| line.rsplit_once(' '));
        let mut values = samples
            .filter(|(name, _)| *name == sample)
            .map(|(_, value)| value.parse().unwrap());
        values.next().unwrap_or(0.0)
    }

    /// From one moment to the next.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The worker's process, until its orders end; nothing in any other process.
pub fn run() {
    let Some(plan) = env::var_os(PLAN) else { return };
    let plan: Plan = serde_json::from_str(plan.to_str().unwrap()).unwrap();
    let settings: Vec<_> = plan.settings.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    let mut start = start(&settings);
    if let Some(after) = plan.stall {
        let verbs = VerbsMover::start(VerbsConfig::default()).unwrap();
        verbs.faults().inject(Some(Fault::Stall { after }));
        start.movers = vec![Arc::new(verbs)];
    }
    let mut engine = TestEngine::start(start).unwrap();
    say(&json!({"listen": engine.engine().listen().to_string(), "peer": support::peer(&engine)}));
    let (tx, orders) = mpsc::channel();
    thread::spawn(move || {
        let lines = io::stdin().lines().map_while(Result::ok);
        lines
            .map(|line| serde_json::from_str(&line).unwrap())
            .take_while(|order: &Order| tx.send(order.clone()).is_ok())
            .for_each(drop);
    });
    let mut turn = None;
    loop {
        match orders.recv_timeout(Duration::from_millis(1)) {
            Ok(order) => say(&obey(&mut engine, &mut turn, order)),
            Err(RecvTimeoutError::Timeout) => engine.step(),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// An engine whose KV is 1 KiB a token.
pub fn start(settings: &[(&str, &str)]) -> Start {
    let mut start = Start::new(support::config(settings), 16);
    start.heads = 16;
    start
}

fn obey(engine: &mut TestEngine, turn: &mut Option<TestTurn>, order: Order) -> Value {
    match order {
        Order::Arrive {
            session,
            prompt,
            reservation,
            placed,
        } => {
            let reservation = reservation.map(ReservationId);
            let placed = Some(support::placement(placed));
            *turn = Some(engine.arrive(&session, &prompt, 4, reservation, placed).unwrap());
            json!(null)
        }
        Order::Prefill(upto) => {
            engine.prefill(turn.as_mut().unwrap(), upto);
            json!(null)
        }
        Order::Finish(output) => {
            engine.finish(turn.take().unwrap(), &output);
            engine.step();
            json!(null)
        }
        Order::Compare {
            session,
            prompt,
            placed,
        } => {
            let placed = Some(support::placement(placed));
            let mut turn = engine.arrive(&session, &prompt, 0, None, placed).unwrap();
            engine.begin(&mut turn);
            support::compare_reused(engine, &turn, &prompt);
            let reused = turn.reused;
            engine.abort(turn);
            engine.step();
            json!(reused)
        }
        Order::Drain => json!(engine.drain()),
    }
}

fn say(answer: &Value) {
    println!("\n{ANSWER}{answer}");
}
