//! What the two ends say to each other beside the movers: a line of JSON each way, over TCP. Whoever has the key may
//! measure; nothing is exposed but memory that this tool filled itself. The key is shown as it is: it keeps strangers
//! out, not listeners. What either end may make the other allocate is bounded, before the key more tightly.

use std::{
    io::{BufRead, BufReader, ErrorKind, Write},
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    case::Case,
    measure::{Load, Measured},
    perftest::Job,
    side::{Kind, Offer},
};

/// Of these lines.
pub const VERSION: u32 = 2;
/// The longest question, a hello with an offer included.
pub const QUESTION: usize = 16 << 10;
/// The longest answer: the latencies of a pull.
const ANSWER: usize = 8 << 20;
/// For the other end to say its next word, beside what it was asked to measure.
pub const WAIT: Duration = Duration::from_secs(60);

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
    /// Start perftest for one run.
    Perftest(Job),
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
    /// The port of the tool that was started.
    Port(u16),
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
        socket.set_write_timeout(Some(WAIT))?;
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

    /// The next line, of at most `longest` bytes, whole before `wait` is over; `None` at the end.
    pub fn receive<T: DeserializeOwned>(&mut self, longest: usize, wait: Duration) -> Result<Option<T>> {
        let until = Instant::now() + wait;
        let mut text = Vec::new();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "the other end said nothing for {} s", wait.as_secs());
            self.input.get_ref().set_read_timeout(Some(left))?;
            let some = match self.input.fill_buf() {
                Ok([]) if text.is_empty() => return Ok(None),
                Ok([]) => bail!("the other end hung up in the middle of a line"),
                Ok(some) => some,
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) =>
                {
                    continue;
                }
                Err(e) => return Err(e.into()),
            };
            let end = some.iter().position(|byte| *byte == b'\n');
            let taken = end.unwrap_or(some.len());
            ensure!(
                text.len() + taken <= longest,
                "the other end's line is longer than {longest} bytes: is it a kvc-perf of this version?"
            );
            text.extend_from_slice(&some[..taken]);
            self.input.consume(end.map_or(taken, |end| end + 1));
            if end.is_some() {
                break;
            }
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
        match line.receive(ANSWER, WAIT)? {
            Some(Reply::Welcome(offer)) => {
                offer.check().with_context(|| at.to_string())?;
                Ok(Peer { line, address, offer })
            }
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
        let measures = match request {
            Request::Pull(_, _, load) => Duration::from_secs_f64(load.seconds),
            _ => Duration::ZERO,
        };
        let asked = self.line.send(request);
        match asked.and_then(|()| self.line.receive(ANSWER, WAIT + measures)) {
            Ok(Some(Reply::Refused(why))) => bail!("{}: {why}", self.address),
            Ok(Some(reply)) => Ok(reply),
            Ok(None) => bail!("{} hung up: look there why `kvc-perf serve` ended", self.address),
            Err(error) => Err(error.context(format!("{} does not answer", self.address))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, net::TcpListener, thread};

    use super::*;

    /// A line whose other end sends `bytes` and hangs up.
    fn line(bytes: Vec<u8>) -> Line {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let mut socket = listener.accept().unwrap().0;
            // The reader may have enough of it before it is all sent.
            let _ = socket.write_all(&bytes);
        });
        Line::new(TcpStream::connect(address).unwrap()).unwrap()
    }

    #[test]
    fn a_line_longer_than_allowed_is_not_collected() {
        let mut long = line(vec![b'x'; 1 << 20]);
        let refused = long.receive::<Request>(QUESTION, WAIT).unwrap_err().to_string();
        assert!(refused.contains("longer than 16384 bytes"), "{refused}");
    }

    #[test]
    fn words_that_are_none_are_faults_and_an_end_is_none() {
        let mut odd = line(b"\"Cpu\"\n{\"Gather\": [1]}\n".to_vec());
        assert!(matches!(odd.receive(QUESTION, WAIT), Ok(Some(Request::Cpu))));
        assert!(odd.receive::<Request>(QUESTION, WAIT).is_err());
        assert!(odd.receive::<Request>(QUESTION, WAIT).unwrap().is_none());
        assert!(line(b"\"Cpu\"".to_vec()).receive::<Request>(QUESTION, WAIT).is_err());
    }

    #[test]
    fn a_silent_end_is_not_waited_for_for_ever() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut line = Line::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap()).unwrap();
        let refused = line
            .receive::<Request>(QUESTION, Duration::from_millis(10))
            .unwrap_err();
        assert!(refused.to_string().contains("said nothing"), "{refused}");
    }
}
