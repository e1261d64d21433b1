//! What the router costs: added latency, requests per CPU-second, memory under diverse sessions. Run by
//! `cargo run --release -p kvc-router --example router_bench [-- --quick | --soak N]`.
//!
//! Router, stub worker and load generator are processes of their own (this program again, with a role): CPU time and
//! memory are the router's alone, read from `/proc`.

use std::{
    fmt::Write as _,
    io::{BufRead, BufReader},
    net::SocketAddr,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use clap::Parser as _;
use kvc_proto::{
    id::{Incarnation, ReservationId},
    wire::{
        admit::{AdmitAnswer, LoadReport, Mode},
        info::{Role, WorkerInfo},
    },
};
use kvc_router::config::{Config, Options};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::Builder,
};

/// Token ids of the large body: 188 KB.
const LARGE_IDS: usize = 30_000;
/// Connections of the throughput runs, each with a session of its own.
const CONNECTIONS: usize = 16;
/// `/proc` counts CPU time in hundredths of a second on Linux.
const TICKS_PER_SECOND: f64 = 100.0;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = args.iter().skip(1).map(String::as_str).collect();
    match words.as_slice() {
        ["stub"] => block_on(stub()),
        ["router", rest @ ..] => router(rest),
        ["load", to, kind, connections, requests] => {
            block_on(load(to.parse()?, kind, connections.parse()?, requests.parse()?))
        }
        ["--quick"] => measure(60_000, 200_000),
        ["--soak", n] => measure(n.parse()?, 300_000),
        [] => measure(1_000_000, 300_000),
        _ => bail!("usage: router_bench [--quick | --soak REQUESTS]"),
    }
}

fn block_on(future: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    Builder::new_current_thread().enable_all().build()?.block_on(future)
}

/// A process of this program that has printed the address it listens on.
struct Process {
    child: Child,
    address: String,
}

impl Process {
    fn start(args: &[&str]) -> anyhow::Result<Process> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(args)
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("piped")?).read_line(&mut line)?;
        Ok(Process {
            child,
            address: line.trim().to_owned(),
        })
    }

    fn cpu_seconds(&self) -> anyhow::Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let after_name = stat.rsplit_once(')').context("stat")?.1;
        let fields: Vec<&str> = after_name.split_whitespace().collect();
        let ticks: u64 = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
        Ok(ticks as f64 / TICKS_PER_SECOND)
    }

    fn rss_mib(&self) -> anyhow::Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find(|l| l.starts_with("VmRSS")).context("VmRSS")?;
        let kib: f64 = line.split_whitespace().nth(1).context("VmRSS")?.parse()?;
        Ok(kib / 1024.0)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Clone, Copy, serde::Serialize, serde::Deserialize)]
struct Latency {
    p50: f64,
    p99: f64,
    seconds: f64,
}

fn run_load(to: &str, kind: &str, connections: usize, requests: usize) -> anyhow::Result<Latency> {
    let (connections, requests) = (connections.to_string(), requests.to_string());
    let output = Command::new(std::env::current_exe()?)
        .args(["load", to, kind, &connections, &requests])
        .stderr(Stdio::inherit())
        .output()?;
    serde_json::from_slice(&output.stdout).context("the load generator failed")
}

fn measure(soak: usize, throughput: usize) -> anyhow::Result<()> {
    let worker = Process::start(&["stub"])?;
    let asking = Process::start(&["router", &worker.address, "true"])?;
    let trusting = Process::start(&["router", &worker.address, "false"])?;
    println!(
        "router: 1 serving thread; stub worker and load generator in processes of their own; cores: {}",
        cores()
    );

    latency(
        "188 KB body (30,000 token ids)",
        "large",
        300,
        &worker,
        &asking,
        &trusting,
    )?;
    latency("small body", "small", 1_000, &worker, &asking, &trusting)?;

    for (name, router) in [
        ("with the admission exchange   ", &asking),
        ("without the admission exchange", &trusting),
    ] {
        run_load(&router.address, "small", CONNECTIONS, throughput / 10)?;
        let before = router.cpu_seconds()?;
        let run = run_load(&router.address, "small", CONNECTIONS, throughput)?;
        let cpu = router.cpu_seconds()? - before;
        println!(
            "small bodies, known sessions, {name}: {:>6.0} requests per router CPU-second ({:.0}/s wall, {CONNECTIONS} connections, {throughput} requests)",
            throughput as f64 / cpu,
            throughput as f64 / run.seconds,
        );
    }

    let step = 100_000.min(soak);
    run_load(&asking.address, "diverse-0", CONNECTIONS, step)?;
    let first = asking.rss_mib()?;
    let rest = soak - step;
    if rest == 0 {
        println!(
            "diverse sessions: resident {first:.1} MiB after {step} requests; the growth to 1,000,000 was not run"
        );
        return Ok(());
    }
    run_load(&asking.address, "diverse-1", CONNECTIONS, rest)?;
    let last = asking.rss_mib()?;
    println!(
        "diverse sessions (each request a new one): resident {first:.1} MiB after {step} requests, {last:.1} MiB after {soak}: growth {:.1} MiB{}",
        last - first,
        if soak < 1_000_000 {
            " (fewer than the 1,000,000 of the target)"
        } else {
            ""
        },
    );
    Ok(())
}

/// Rounds are interleaved, so that what else the machine does hits all three alike; the median round counts.
fn latency(
    title: &str,
    kind: &str,
    requests: usize,
    worker: &Process,
    asking: &Process,
    trusting: &Process,
) -> anyhow::Result<()> {
    let mut rounds: [Vec<f64>; 3] = Default::default();
    for process in [worker, trusting, asking] {
        run_load(&process.address, kind, 1, 100)?;
    }
    for _ in 0..9 {
        for (samples, process) in rounds.iter_mut().zip([worker, trusting, asking]) {
            samples.push(run_load(&process.address, kind, 1, requests)?.p50);
        }
    }
    let [straight, without, with] = rounds.map(|mut r| {
        r.sort_by(f64::total_cmp);
        r[r.len() / 2]
    });
    println!(
        "{title}: p50 straight to the worker {straight:.3} ms; added by the router {:.3} ms without the admission exchange, {:.3} ms with it",
        without - straight,
        with - straight,
    );
    Ok(())
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(0, usize::from)
}

fn router(args: &[&str]) -> anyhow::Result<()> {
    let [worker, admit_direct] = args else {
        bail!("router WORKER ADMIT")
    };
    let flags = [
        "kvc-router",
        "--listen",
        "127.0.0.1:0",
        "--threads",
        "1",
        "--admit-direct",
        admit_direct,
        "--worker",
    ];
    let spec = format!("role=decode,url=http://{worker}");
    let options = Options::try_parse_from(flags.into_iter().chain([spec.as_str()]))?;
    let running = kvc_router::serve::start(Config::load(options)?)?;
    while running.app().router().view.decoders().next().is_none() {
        std::thread::sleep(Duration::from_millis(5));
    }
    println!("{}", running.address());
    loop {
        std::thread::park();
    }
}

/// A worker that admits everything at once and answers at once.
async fn stub() -> anyhow::Result<()> {
    let socket = TcpListener::bind("127.0.0.1:0").await?;
    let address = socket.local_addr()?;
    println!("{address}");
    let info = serde_json::to_string(&info(address))?;
    let admitted = serde_json::to_string(&admitted())?;
    let (info, admitted) = (message(200, &info), message(200, &admitted));
    let unknown = message(404, r#"{"error":{"code":"unknown-session","message":"not here"}}"#);
    let generated = message(
        200,
        r#"{"text":"a","meta_info":{"prompt_tokens":9,"completion_tokens":1}}"#,
    );
    loop {
        let (mut stream, _) = socket.accept().await?;
        stream.set_nodelay(true)?;
        let (info, admitted, unknown, generated) = (info.clone(), admitted.clone(), unknown.clone(), generated.clone());
        tokio::spawn(async move {
            let mut buffer = Vec::with_capacity(256 << 10);
            while let Ok(Some(size)) = next_message(&mut stream, &mut buffer).await {
                let answer = match buffer.get(..20) {
                    Some(b) if b.starts_with(b"POST /admit_direct_a") => &admitted,
                    Some(b) if b.starts_with(b"GET /kvc/v1/info") => &info,
                    Some(b) if b.starts_with(b"GET /kvc/v1/sessions") => &unknown,
                    _ => &generated,
                };
                buffer.drain(..size);
                if stream.write_all(answer).await.is_err() {
                    return;
                }
            }
        });
    }
}

/// Length of the next whole message in `buffer`.
async fn next_message(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> std::io::Result<Option<usize>> {
    loop {
        if let Some(head) = memchr::memmem::find(buffer, b"\r\n\r\n") {
            let text = String::from_utf8_lossy(&buffer[..head]).to_ascii_lowercase();
            let length = text
                .split("content-length:")
                .nth(1)
                .and_then(|t| t.split("\r\n").next()?.trim().parse().ok());
            let size = head + 4 + length.unwrap_or(0);
            while buffer.len() < size {
                if stream.read_buf(buffer).await? == 0 {
                    return Ok(None);
                }
            }
            return Ok(Some(size));
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
}

fn message(status: u16, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}")
        .into_bytes()
}

fn info(address: SocketAddr) -> WorkerInfo {
    WorkerInfo {
        incarnation: Incarnation(1),
        role: Role::Decode,
        version: "0".into(),
        engine: "stub".into(),
        model: "m".into(),
        listen: address.to_string(),
        peer: address.to_string(),
        page_tokens: 1,
        capacity: 1 << 30,
        max_uncached_tokens: 1 << 20,
        layout: "l".into(),
        movers: vec!["tcp".into()],
        draining: false,
        load: LoadReport::default(),
    }
}

fn admitted() -> AdmitAnswer {
    AdmitAnswer {
        can_admit: true,
        mode: Some(Mode::Direct),
        reason: None,
        reservation: Some(ReservationId(1)),
        deadline_ms: Some(30_000),
        resident_tokens: LARGE_IDS as u32,
        epoch: None,
        moved: None,
        incarnation: Incarnation(1),
        load: LoadReport::default(),
    }
}

/// Sends `requests` over `connections`, one at a time on each, and prints what they took as JSON.
async fn load(to: SocketAddr, kind: &str, connections: usize, requests: usize) -> anyhow::Result<()> {
    let each = requests / connections;
    let started = Instant::now();
    let tasks: Vec<_> = (0..connections)
        .map(|c| tokio::spawn(client(to, kind.to_owned(), c, each)))
        .collect();
    let mut taken = Vec::with_capacity(requests);
    for task in tasks {
        taken.extend(task.await??);
    }
    let seconds = started.elapsed().as_secs_f64();
    taken.sort_by(f64::total_cmp);
    let at = |q: f64| taken[((taken.len() - 1) as f64 * q) as usize];
    let latency = Latency {
        p50: at(0.5),
        p99: at(0.99),
        seconds,
    };
    println!("{}", serde_json::to_string(&latency)?);
    Ok(())
}

/// Milliseconds of each request.
async fn client(to: SocketAddr, kind: String, index: usize, requests: usize) -> anyhow::Result<Vec<f64>> {
    let mut stream = TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    let mut taken = Vec::with_capacity(requests);
    let mut buffer = Vec::with_capacity(64 << 10);
    let body = match kind.as_str() {
        "large" => body(LARGE_IDS),
        _ => body(9),
    };
    let mut bytes = Vec::new();
    for i in 0..requests {
        let session = match kind.split_once('-') {
            Some((name, round)) => format!("{name}-{round}-{index}-{i}"),
            None => format!("{kind}-{index}"),
        };
        bytes.clear();
        let length = body.len();
        let head = format!(
            "POST /generate HTTP/1.1\r\nhost: b\r\nx-session-id: {session}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        );
        bytes.extend_from_slice(head.as_bytes());
        bytes.extend_from_slice(body.as_bytes());
        let started = Instant::now();
        stream.write_all(&bytes).await?;
        let size = next_message(&mut stream, &mut buffer)
            .await?
            .context("the connection closed")?;
        taken.push(started.elapsed().as_secs_f64() * 1e3);
        if !buffer.starts_with(b"HTTP/1.1 200") {
            bail!("{}", String::from_utf8_lossy(&buffer[..size]));
        }
        buffer.drain(..size);
    }
    Ok(taken)
}

fn body(ids: usize) -> String {
    let mut text = String::from(r#"{"input_ids":["#);
    for i in 0..ids {
        // Five digits and a comma most of the time, as ids of a vocabulary of 150k are.
        let _ = write!(
            text,
            "{}{}",
            if i == 0 { "" } else { "," },
            10_007 + (i * 7919) % 140_000
        );
    }
    text + r#"],"sampling_params":{"max_new_tokens":16}}"#
}
