//! iperf3 beside the movers, where it is installed.

use std::{
    io::Read,
    net::{IpAddr, SocketAddr, TcpListener},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::process::Process;

/// Whether it can be started here.
pub fn is_installed() -> bool {
    let version = Command::new("iperf3")
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    version.is_ok_and(|status| status.success())
}

/// The server for one run, once it listens.
pub fn serve(ip: IpAddr) -> Result<(Process, u16)> {
    let port = TcpListener::bind((ip, 0))?.local_addr()?.port();
    let mut command = Command::new("iperf3");
    command
        .args([
            "-s",
            "-1",
            "-p",
            &port.to_string(),
            "-B",
            &ip.to_string(),
            "--forceflush",
        ])
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    let server = Process::start(&mut command).context("iperf3 is not installed there")?;
    let output = server.child().stdout.take();
    let mut banner = [0; 16];
    output
        .context("output of iperf3")?
        .read_exact(&mut banner)
        .context("iperf3 -s said nothing")?;
    Ok((server, port))
}

/// What the server received; 10⁹ bytes per second.
pub fn rate(server: SocketAddr, streams: usize, seconds: f64) -> Result<f64> {
    let (ip, port, time) = (
        server.ip().to_string(),
        server.port().to_string(),
        format!("{}", seconds.ceil()),
    );
    let args = ["-c", &ip, "-p", &port, "-P", &streams.to_string(), "-t", &time, "-J"];
    let mut command = Command::new("iperf3");
    command.args(args).stdin(Stdio::null()).stderr(Stdio::piped());
    let client = Process::start(&mut command).context("iperf3 is not installed here")?;
    let output = client.output(Duration::from_secs_f64(seconds.ceil() + 30.0))?;
    let report: serde_json::Value = serde_json::from_str(&output.said).context("iperf3's report")?;
    match report["end"]["sum_received"]["bits_per_second"].as_f64() {
        Some(bits) => Ok(bits / 8e9),
        None => bail!("iperf3: {}", report["error"]),
    }
}
