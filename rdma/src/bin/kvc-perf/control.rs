//! What the two ends say to each other beside the movers: a line of JSON each way, over TCP. Whoever has the key may
//! measure; nothing is exposed but memory that this tool filled itself.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    case::Case,
    measure::{Load, Measured},
    side::{Kind, Offer},
};

/// Of these lines.
pub const VERSION: u32 = 1;
/// The longest line: the latencies of a long pull.
const LINE: u64 = 64 << 20;
/// For the other end to answer, a measurement included.
const ANSWER: Duration = Duration::from_secs(300);

/// What a client asks.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// The first line.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// As the server printed it.
        key: String,
        /// What the server may read from, if it shall.
        offer: Option<Offer>,
    },
    /// Processor seconds so far.
    Cpu,
    /// Fence the lease and open it again.
    Fence(Kind),
    /// Memory of that many bytes to gather into.
    Stage(u64),
    /// Gather the runs of a read.
    Gather(Case, u64),
    /// Read from the client.
    Pull(Kind, Case, Load),
    /// Start iperf3 for one run.
    Iperf,
}

/// What a server answers.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// What the client may read from.
    Welcome(Offer),
    /// Seconds.
    Cpu(f64),
    /// Nanoseconds of the fence.
    Fenced(u64),
    /// The region.
    Staged(u32),
    /// It lies there.
    Gathered,
    /// What came out.
    Pulled(Measured),
    /// Its port.
    Iperf(u16),
    /// Why not.
    Refused(String),
}

/// One end of the connection.
pub struct Line {
    input: BufReader<TcpStream>,
    output: TcpStream,
}

impl Line {
    /// Over a connection that stands.
    pub fn new(socket: TcpStream) -> Result<Self> {
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(ANSWER))?;
        socket.set_write_timeout(Some(ANSWER))?;
        let output = socket.try_clone()?;
        let input = BufReader::new(socket);
        Ok(Line { input, output })
    }

    /// Sends one line.
    pub fn send(&mut self, line: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        Ok(self.output.write_all(&text)?)
    }

    /// The next line; `None` at the end.
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let mut text = Vec::new();
        let got = self.input.by_ref().take(LINE).read_until(b'\n', &mut text)?;
        if got == 0 {
            return Ok(None);
        }
        let line = serde_json::from_slice(&text).context("the other end speaks another language: is it a kvc-perf?")?;
        Ok(Some(line))
    }
}

/// A server as a client sees it.
pub struct Peer {
    line: Line,
    address: SocketAddr,
    /// What may be read.
    pub offer: Offer,
}

impl Peer {
    /// Connects to a `serve`.
    pub fn connect(at: &str, key: &str, offer: Option<Offer>) -> Result<Self> {
        let address = at
            .to_socket_addrs()
            .ok()
            .and_then(|mut all| all.next())
            .with_context(|| format!("{at:?} is no HOST:PORT: give what `kvc-perf serve` printed"))?;
        let socket = TcpStream::connect_timeout(&address, Duration::from_secs(5))
            .with_context(|| format!("nobody answers at {at}: start `kvc-perf serve --bind {at}` there"))?;
        let mut line = Line::new(socket)?;
        let hello = Request::Hello {
            version: VERSION,
            key: key.into(),
            offer,
        };
        line.send(&hello)?;
        match line.receive()? {
            Some(Reply::Welcome(offer)) => Ok(Peer { line, address, offer }),
            Some(Reply::Refused(why)) => bail!("{at}: {why}"),
            _ => bail!("{at} hung up: is it a kvc-perf of this version?"),
        }
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its processor seconds so far.
    pub fn cpu(&mut self) -> Result<f64> {
        match self.ask(&Request::Cpu)? {
            Reply::Cpu(seconds) => Ok(seconds),
            other => bail!("unexpected answer {other:?}"),
        }
    }

    /// Asks one thing.
    pub fn ask(&mut self, request: &Request) -> Result<Reply> {
        self.line.send(request)?;
        match self.line.receive()? {
            Some(Reply::Refused(why)) => bail!("{}: {why}", self.address),
            Some(reply) => Ok(reply),
            None => bail!("{} hung up", self.address),
        }
    }
}
