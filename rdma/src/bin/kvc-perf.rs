//! `kvc-perf`: how fast the tcp mover is on this machine, beside iperf3 in the same run. `make bench` calls it.
//!
//! `serve` exposes memory and prints where; `read` pulls from a `serve`; `bench` does both with two processes over
//! loopback for each case and stream count, in rounds that alternate with iperf3 so that a noisy machine hits both.

use std::{
    env,
    fmt::Write as _,
    io::{BufRead, BufReader, Read},
    net::TcpListener,
    process::{Child, Command, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser, Subcommand};
use kvc_rdma::{Copy, HostRegion, LeaseToken, Mover, ReadHandle, ReadOptions, RegionKey, Run, TcpConfig, TcpMover};
use serde::Serialize;

/// How long a lease of this tool lives at most.
const LEASE: Duration = Duration::from_secs(3600);

#[derive(Parser)]
#[command(about = "Measures the tcp mover")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Exposes zeroed memory and prints `endpoint token`; ends with its standard input.
    Serve {
        /// MiB of memory.
        #[arg(long, default_value_t = 256)]
        pool: u64,
        /// Where to listen.
        #[arg(long, default_value = "127.0.0.1:0")]
        bind: std::net::SocketAddr,
    },
    /// Pulls from a `serve` and prints one line.
    Read {
        /// `endpoint` of the other side.
        peer: String,
        /// `token` of the other side.
        token: String,
        #[command(flatten)]
        load: Load,
        /// Bytes of a run.
        #[arg(long, default_value_t = 1 << 20)]
        run: u64,
        /// Runs of one read.
        #[arg(long, default_value_t = 64)]
        runs: u64,
        /// Streams.
        #[arg(long, default_value_t = 2)]
        streams: usize,
    },
    /// The table: 1 MiB runs and 256 scattered 64 KiB runs, 1, 2 and 4 streams, iperf3 beside them if it is installed.
    Bench {
        #[command(flatten)]
        load: Load,
        /// Rounds; medians are printed.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// One JSON document instead of the table.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args, Clone, Copy)]
struct Load {
    /// MiB of memory on either side; runs are scattered over all of it.
    #[arg(long, default_value_t = 256)]
    pool: u64,
    /// Seconds of one measurement.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Reads at once.
    #[arg(long, default_value_t = 2)]
    depth: usize,
    /// KiB of one request.
    #[arg(long, default_value_t = TcpConfig::default().chunk >> 10)]
    chunk: u64,
    /// KiB asked for and not yet received on one stream.
    #[arg(long, default_value_t = TcpConfig::default().window >> 10)]
    window: u64,
    /// With a checksum per chunk.
    #[arg(long)]
    checksum: bool,
}

/// What a case reads at once.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    run: u64,
    runs: u64,
}

const CASES: [Case; 2] = [
    Case {
        name: "1 MiB runs",
        run: 1 << 20,
        runs: 64,
    },
    Case {
        name: "256 x 64 KiB scattered",
        run: 64 << 10,
        runs: 256,
    },
];
const STREAMS: [usize; 3] = [1, 2, 4];

#[derive(Serialize)]
struct Row {
    case: &'static str,
    streams: usize,
    /// 10⁹ bytes per second, median of the rounds.
    gb_s: f64,
    /// iperf3's receiver with the same streams, median of the same rounds.
    iperf3_gb_s: Option<f64>,
    /// Median of the rounds' ratios.
    ratio: Option<f64>,
    /// Microseconds that a fence took under full load, median and worst of the rounds' fences.
    fence_us: [f64; 2],
}

fn main() -> Result<()> {
    match Cli::parse().verb {
        Verb::Serve { pool, bind } => serve(pool, bind),
        Verb::Read {
            peer,
            token,
            load,
            run,
            runs,
            streams,
        } => {
            let importer = Importer::start(&load, streams)?;
            let case = Case {
                name: "read",
                run,
                runs,
            };
            println!(
                "{:.2} GB/s",
                importer.measure(&peer, parse(&token)?, case, streams, &load)?
            );
            Ok(())
        }
        Verb::Bench { load, rounds, json } => bench(&load, rounds, json),
    }
}

fn serve(pool: u64, bind: std::net::SocketAddr) -> Result<()> {
    let mover = TcpMover::start(TcpConfig {
        bind,
        ..TcpConfig::default()
    })?;
    let len = pool << 20;
    let region = mover.register(touched(len)?.into())?;
    let token = LeaseToken::random()?;
    mover.expose(token, LEASE)?;
    mover.extend(&token, &[Run { region, offset: 0, len }])?;
    let hex = token.as_bytes().iter().fold(String::new(), |mut hex, byte| {
        // Writing to a string cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    });
    println!("{} {hex}", mover.endpoint());
    // Each line asks for a fence under load: how long it took is the answer.
    for line in std::io::stdin().lock().lines() {
        line?;
        let begun = Instant::now();
        mover.fence(&token);
        println!("{}", begun.elapsed().as_nanos());
        mover.expose(token, LEASE)?;
        mover.extend(&token, &[Run { region, offset: 0, len }])?;
    }
    Ok(())
}

fn bench(load: &Load, rounds: usize, json: bool) -> Result<()> {
    ensure!(rounds > 0, "--rounds is 0, expected at least 1");
    let iperf3 = Command::new("iperf3")
        .arg("--version")
        .stdout(Stdio::null())
        .status()
        .is_ok();
    let mut rows = Vec::new();
    for streams in STREAMS {
        for case in CASES {
            eprintln!("{} with {streams} streams: {rounds} rounds", case.name);
            rows.push(row(case, streams, load, rounds, iperf3)?);
        }
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
        return Ok(());
    }
    println!("| case | streams | GB/s | iperf3 GB/s | ratio | fence µs (median, worst) |\n|---|---|---|---|---|---|");
    let number = |value: Option<f64>| value.map_or("not installed".into(), |value| format!("{value:.2}"));
    for row in rows {
        let (iperf3, ratio) = (number(row.iperf3_gb_s), number(row.ratio));
        let [median, worst] = row.fence_us;
        println!(
            "| {} | {} | {:.2} | {iperf3} | {ratio} | {median:.0}, {worst:.0} |",
            row.case, row.streams, row.gb_s
        );
    }
    Ok(())
}

fn row(case: Case, streams: usize, load: &Load, rounds: usize, iperf3: bool) -> Result<Row> {
    let (mut ours, mut theirs, mut ratios, mut fences) = (vec![], vec![], vec![], vec![]);
    for _ in 0..rounds {
        let mut server = Server::start(load.pool)?;
        let importer = Importer::start(load, streams)?;
        let rate = importer.measure(&server.endpoint, server.token, case, streams, load)?;
        fences.extend(importer.fences(&mut server, case, streams, load)?);
        drop(importer);
        drop(server);
        ours.push(rate);
        if iperf3 {
            let their = iperf3_rate(streams, load.seconds)?;
            theirs.push(their);
            ratios.push(rate / their);
        }
    }
    let worst = fences.iter().copied().fold(0.0, f64::max);
    let fence_us = [median(&mut fences).unwrap_or(0.0), worst];
    let gb_s = median(&mut ours).unwrap_or(0.0);
    Ok(Row {
        case: case.name,
        streams,
        gb_s,
        iperf3_gb_s: median(&mut theirs),
        ratio: median(&mut ratios),
        fence_us,
    })
}

/// A `serve` process.
struct Server {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
    endpoint: String,
    token: LeaseToken,
}

impl Server {
    fn start(pool: u64) -> Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        command.args(["serve", "--pool", &pool.to_string()]);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start `serve`")?;
        let mut output = BufReader::new(child.stdout.take().context("output of `serve`")?);
        let mut line = String::new();
        output.read_line(&mut line)?;
        let (endpoint, token) = line.trim().split_once(' ').context("first line of `serve`")?;
        Ok(Server {
            child,
            output,
            endpoint: endpoint.into(),
            token: parse(token)?,
        })
    }

    /// Fences the lease and opens it again; how long the fence took.
    fn fence(&mut self) -> Result<Duration> {
        use std::io::Write;
        self.child
            .stdin
            .as_mut()
            .context("input of `serve`")?
            .write_all(b"\n")?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(Duration::from_nanos(line.trim().parse()?))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// The reading side.
struct Importer {
    mover: TcpMover,
    region: RegionKey,
    len: u64,
}

impl Importer {
    fn start(load: &Load, streams: usize) -> Result<Self> {
        let (len, chunk, window) = (load.pool << 20, load.chunk << 10, load.window << 10);
        let mover = TcpMover::start(TcpConfig {
            streams,
            chunk,
            window,
            ..TcpConfig::default()
        })?;
        let region = mover.register(touched(len)?.into())?;
        Ok(Importer { mover, region, len })
    }

    /// Reads for the load's time, `depth` reads at once, after one to warm up; GB/s.
    fn measure(&self, peer: &str, token: LeaseToken, case: Case, streams: usize, load: &Load) -> Result<f64> {
        let (tx, rx) = mpsc::channel();
        let mut order = Order::new(self.len, case)?;
        self.read(peer, token, &mut order, streams, load, &tx);
        rx.recv()??;
        let (begun, time) = (Instant::now(), Duration::from_secs_f64(load.seconds));
        let (mut bytes, mut running) = (0, 0);
        loop {
            while running < load.depth && begun.elapsed() < time {
                self.read(peer, token, &mut order, streams, load, &tx);
                running += 1;
            }
            if running == 0 {
                return Ok(bytes as f64 / begun.elapsed().as_secs_f64() / 1e9);
            }
            bytes += rx.recv()??;
            running -= 1;
        }
    }

    /// Fences the lease again and again in the middle of reads; microseconds.
    fn fences(&self, server: &mut Server, case: Case, streams: usize, load: &Load) -> Result<Vec<f64>> {
        let (tx, rx) = mpsc::channel();
        let mut order = Order::new(self.len, case)?;
        let mut fences = Vec::new();
        for _ in 0..20 {
            let peer = server.endpoint.clone();
            (0..load.depth).for_each(|_| drop(self.read(&peer, server.token, &mut order, streams, load, &tx)));
            thread::sleep(Duration::from_millis(2));
            fences.push(server.fence()?.as_secs_f64() * 1e6);
            // Most of them were revoked, which is what was asked for.
            (0..load.depth).try_for_each(|_| rx.recv().map(drop))?;
        }
        Ok(fences)
    }

    fn read(
        &self,
        peer: &str,
        token: LeaseToken,
        order: &mut Order,
        streams: usize,
        load: &Load,
        done: &mpsc::Sender<Result<u64, kvc_rdma::MoverError>>,
    ) -> ReadHandle {
        let options = ReadOptions {
            deadline: Duration::from_secs(30),
            checksum: load.checksum,
            streams,
        };
        let copies = order.copies(self.region);
        let done = done.clone();
        let done = move |result: Result<kvc_rdma::ReadStats, _>| {
            // The receiver ends before the last read only when the measurement failed.
            let _ = done.send(result.map(|stats| stats.bytes));
        };
        self.mover.read(peer, token, copies, options, Box::new(done))
    }
}

/// Scatters runs over the pools: each side walks all places of a run's size with a stride of its own, so that no two runs
/// of a read are neighbours and none is used again before all were.
struct Order {
    places: u64,
    case: Case,
    next: u64,
}

impl Order {
    fn new(pool: u64, case: Case) -> Result<Self> {
        let places = pool / case.run;
        ensure!(
            places >= 4 && places.is_power_of_two(),
            "--pool holds {places} runs, expected a power of two from 4"
        );
        Ok(Order { places, case, next: 0 })
    }

    fn copies(&mut self, region: RegionKey) -> Vec<Copy> {
        let Case { run: len, runs, .. } = self.case;
        let first = self.next;
        self.next += runs;
        let place = |at: u64, stride: u64| Run {
            region,
            offset: at * stride % self.places * len,
            len,
        };
        let half = self.places / 2;
        // Odd strides visit every place of a power of two.
        (first..first + runs)
            .map(|at| Copy {
                remote: place(at, half + 1),
                local: place(at, half - 1),
            })
            .collect()
    }
}

fn iperf3_rate(streams: usize, seconds: f64) -> Result<f64> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let mut server = Command::new("iperf3")
        .args(["-s", "-1", "-p", &port, "-B", "127.0.0.1", "--forceflush"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("start iperf3 -s")?;
    let mut banner = [0; 16];
    server
        .stdout
        .as_mut()
        .context("output of iperf3")?
        .read_exact(&mut banner)
        .context("iperf3 -s said nothing")?;
    let time = format!("{}", seconds.ceil());
    let args = [
        "-c",
        "127.0.0.1",
        "-p",
        &port,
        "-P",
        &streams.to_string(),
        "-t",
        &time,
        "-J",
    ];
    let output = Command::new("iperf3").args(args).output().context("start iperf3 -c")?;
    server.kill().ok();
    server.wait()?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).context("iperf3's report")?;
    let bits = report["end"]["sum_received"]["bits_per_second"].as_f64();
    let Some(bits) = bits else {
        bail!("iperf3: {}", report["error"])
    };
    Ok(bits / 8e9)
}

/// Memory whose pages are there already, as an engine's pool is.
fn touched(len: u64) -> Result<Arc<HostRegion>> {
    let region = HostRegion::new(usize::try_from(len)?);
    let page = [0xa5; 4096];
    (0..region.len() / page.len()).for_each(|at| region.write(at * page.len(), &page));
    Ok(region)
}

fn parse(hex: &str) -> Result<LeaseToken> {
    ensure!(
        hex.len() == 64 && hex.is_ascii(),
        "a token has 64 hexadecimal digits, got {}",
        hex.len()
    );
    let mut bytes = [0; 32];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).context("token")?;
    }
    Ok(LeaseToken::from_bytes(bytes))
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
