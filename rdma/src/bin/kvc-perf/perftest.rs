//! `ib_read_bw` and `ib_write_bw` of perftest beside the verbs mover, where they are installed: `compare` runs the client
//! here and has `serve` start the other end, on the devices that the movers took.

use std::{
    fs,
    net::{IpAddr, SocketAddr, TcpListener},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::{cpu, measure::Measured, process::Process, side::Rail};

/// For its server to listen.
const START: Duration = Duration::from_secs(15);
/// For the last words of one that ended.
const WORDS: Duration = Duration::from_secs(1);
/// READs that a queue pair has on the wire, as the mover's default.
const BEGUN: u32 = 16;

/// What one of them does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tool {
    /// RDMA READ.
    Read,
    /// RDMA WRITE, which kvc never does.
    Write,
}

/// One run of a tool; both ends are told the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Which.
    pub tool: Tool,
    /// Bytes of one operation.
    pub size: u64,
    /// Operations of each queue pair.
    pub iterations: u64,
    /// Queue pairs.
    pub pairs: u64,
}

impl Tool {
    /// The program.
    pub fn name(self) -> &'static str {
        match self {
            Tool::Read => "ib_read_bw",
            Tool::Write => "ib_write_bw",
        }
    }

    /// Whether it can be started here.
    pub fn is_installed(self) -> bool {
        let version = Command::new(self.name())
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        version.is_ok()
    }
}

impl Job {
    /// As long as a measurement at `rate` bytes per second takes.
    pub fn lasting(tool: Tool, size: u64, pairs: u64, seconds: f64, rate: f64) -> Self {
        let operations = seconds * rate / size.max(1) as f64 / pairs.max(1) as f64;
        Job {
            tool,
            size,
            // What is no number becomes 0 here.
            iterations: (operations as u64).clamp(20, 1_000_000),
            pairs,
        }
    }

    /// Refuses what the tool would take for something else, or not end with.
    pub fn check(&self) -> Result<()> {
        let within = |what, got: u64, most: u64| {
            ensure!(
                (1..=most).contains(&got),
                "{what} of perftest is {got}: give 1 to {most}"
            );
            Ok(())
        };
        within("size", self.size, 1 << 30)?;
        within("iterations", self.iterations, 1_000_000)?;
        within("pairs", self.pairs, 16)
    }

    fn command(&self, rail: &Rail, port: u16) -> Command {
        let mut command = Command::new(self.tool.name());
        command
            .args(["-F", "-d", &rail.device, "-i", &rail.port.to_string()])
            .args(["-x", &rail.gid_index.to_string(), "-p", &port.to_string()])
            .args(["-s", &self.size.to_string(), "-n", &self.iterations.to_string()])
            .args(["-t", &BEGUN.to_string(), "-q", &self.pairs.to_string()])
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        if self.tool == Tool::Read {
            command.args(["-o", &BEGUN.to_string()]);
        }
        command
    }
}

/// The server for one run, once it listens, and its port.
pub fn serve(job: &Job, rail: &Rail, ip: IpAddr) -> Result<(Process, u16)> {
    job.check()?;
    let port = TcpListener::bind((ip, 0))?.local_addr()?.port();
    let process = Process::start(&mut job.command(rail, port))
        .with_context(|| format!("{} is not installed there: install perftest", job.tool.name()))?;
    let until = Instant::now() + START;
    while !listens(port) {
        if process.has_ended() {
            bail!("{} does not start: {}", job.tool.name(), process.output(WORDS)?.why());
        }
        ensure!(Instant::now() < until, "{} does not listen", job.tool.name());
        thread::sleep(Duration::from_millis(20));
    }
    Ok((process, port))
}

/// Runs the client; `limit` is for all of it.
pub fn measure(job: &Job, rail: &Rail, server: SocketAddr, limit: Duration) -> Result<Measured> {
    let before = cpu::of_children();
    let mut command = job.command(rail, server.port());
    let process = Process::start(command.arg(server.ip().to_string()))
        .with_context(|| format!("{} is not installed here: install perftest", job.tool.name()))?;
    let output = process.output(limit)?;
    let rate = rate(&output.said).filter(|rate| *rate > 0.0);
    let rate = rate.with_context(|| format!("{} measured nothing: {}", job.tool.name(), output.why()))?;
    let operations = job.iterations * job.pairs;
    let bytes = operations * job.size;
    Ok(Measured {
        bytes,
        seconds: bytes as f64 / rate,
        reads: operations,
        messages: operations,
        cpu: cpu::of_children() - before,
        ..Measured::default()
    })
}

/// Average bytes per second: the fourth of the numbers below `#bytes #iterations BW peak[MiB/sec] BW average[MiB/sec]`.
fn rate(said: &str) -> Option<f64> {
    let below = said.lines().skip_while(|line| !line.trim_start().starts_with("#bytes"));
    let numbers: Vec<f64> = below.skip(1).find_map(|line| {
        let numbers = line.split_whitespace().map(str::parse).collect::<Result<_, _>>();
        numbers.ok().filter(|numbers: &Vec<f64>| numbers.len() >= 4)
    })?;
    Some(numbers[3] * f64::from(1 << 20))
}

/// Whether somebody on this machine listens on the port: connecting would be taken for the client.
fn listens(port: u16) -> bool {
    ["/proc/net/tcp", "/proc/net/tcp6"]
        .into_iter()
        .any(|table| fs::read_to_string(table).is_ok_and(|table| is_listening(&table, port)))
}

/// The second field is the local address in hexadecimal, the fourth 0A for a socket that listens.
fn is_listening(table: &str, port: u16) -> bool {
    let port = format!(":{port:04X}");
    table.lines().any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        fields.next().is_some_and(|local| local.ends_with(&port)) && fields.nth(1) == Some("0A")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_is_read_from_what_the_tool_prints() {
        let said = "\
 local address: LID 0000 QPN 0x0011 PSN 0x8eaf94
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
Conflicting CPU frequency values detected: 2450.000000 != 1500.000000.
 65536      1600             181.71             160.50             0.002568
---------------------------------------------------------------------------------------";
        assert_eq!(rate(said), Some(160.5 * 1_048_576.0));
        assert_eq!(rate("Couldn't connect to 10.0.0.1:18515"), None);
    }

    #[test]
    fn a_run_lasts_about_as_long_as_a_measurement() {
        let job = Job::lasting(Tool::Read, 1 << 20, 2, 2.0, 100.0 * f64::from(1 << 20));
        assert_eq!((job.iterations, job.pairs), (100, 2));
        for rate in [0.0, f64::NAN, f64::INFINITY] {
            assert!(Job::lasting(Tool::Read, 65_536, 1, 1.0, rate).check().is_ok());
        }
        let wrong = Job { size: 0, ..job };
        assert!(
            wrong
                .check()
                .unwrap_err()
                .to_string()
                .starts_with("size of perftest is 0")
        );
    }

    #[test]
    fn a_listening_port_is_found_without_connecting() {
        let table = "  sl  local_address rem_address   st tx_queue\n   0: 0100007F:4853 00000000:0000 0A 0:0 0:0\n   1: 0100007F:4854 0100007F:1234 01";
        assert!(is_listening(table, 0x4853) && !is_listening(table, 0x4854) && !is_listening(table, 1));
    }
}
