//! `serve`: exposes memory, and answers clients (`run`, `compare`, `bench`), a thread each.

use std::{
    io::{BufRead, BufReader, Read, stdin},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    process,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use kvc_rdma::{LeaseToken, RegionKey};
use subtle::ConstantTimeEq;

use crate::{
    case::Pool,
    control::{Line, QUESTION, Reply, Request, VERSION},
    cpu,
    interrupt::{self, Role},
    iperf,
    measure::{Target, gather},
    perftest,
    process::{Process, end_all},
    report::{complain, say},
    side::{Kind, Memory, Offer, Setup, Side, Staging},
};

/// What is printed before the address.
pub const STARTED: &str = "kvc-perf run ";
/// What a client that started it reads instead, before the cause.
pub const FAILED: &str = "failed: ";
/// Clients at once.
const CLIENTS: usize = 256;
/// For a new one to show the key.
const HELLO: Duration = Duration::from_secs(5);
/// For the next question: measurements of an hour and their end.
const IDLE: Duration = Duration::from_secs(3600 + 300);

const EXAMPLES: &str = "\
Examples:
  kvc-perf serve --bind 10.0.0.1:4790                  then, on the other machine, the line that it prints
  kvc-perf serve --bind 10.0.0.1:4790 --ib-device mlx5_0,mlx5_1
  kvc-perf serve --bind 0.0.0.0:4790 --advertise 10.0.0.1 --movers verbs,tcp";

/// Exposes memory to be read; prints where, and the key that a client has to show. Runs until it is stopped.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Serve {
    /// Where to listen for clients; movers take free ports of the same address
    #[arg(long, default_value = "127.0.0.1:4790")]
    bind: SocketAddr,
    /// What clients reach this machine by, if --bind is 0.0.0.0
    #[arg(long)]
    advertise: Option<IpAddr>,
    /// What a client has to show [default: a random one, printed]
    #[arg(long)]
    key: Option<String>,
    /// Movers to offer [default: all that start]
    #[arg(long, value_delimiter = ',')]
    movers: Vec<Kind>,
    /// RDMA devices, a list: mlx5_0,mlx5_1:1 [default: the best one]
    #[arg(long, value_delimiter = ',')]
    ib_device: Vec<String>,
    /// MiB of memory
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pool: u64,
    /// Its kind
    #[arg(long, default_value = "memfd")]
    memory: Memory,
    /// Streams of tcp, threads of shm, for reads in the other direction
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=64))]
    streams: u64,
    /// Queue pairs of verbs over each device, for reads in the other direction [default: the mover's]
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=16))]
    pairs: Option<u8>,
    /// The key is the first line of the standard input; end with it
    #[arg(long, hide = true)]
    with_parent: bool,
}

impl Serve {
    /// Until it is stopped. To who started it, it says on the output why it did not start.
    pub fn run(self) -> Result<()> {
        let spawned = self.with_parent;
        match self.serve() {
            Err(error) if spawned => {
                say(&format!("{FAILED}{error:#}"));
                process::exit(1)
            }
            result => result,
        }
    }

    fn serve(self) -> Result<()> {
        let mut input = BufReader::new(stdin());
        let key = match self.key {
            _ if self.with_parent => {
                let mut line = String::new();
                input.read_line(&mut line)?;
                line.trim().into()
            }
            Some(key) => key,
            None => random_key()?,
        };
        ensure!(!key.is_empty(), "--key is empty: leave it out for a random one");
        interrupt::watch(if self.with_parent { Role::Spawned } else { Role::Server })?;
        let unspecified = self.bind.ip().is_unspecified();
        ensure!(
            !unspecified || self.advertise.is_some(),
            "--bind is {}: say with --advertise which address clients reach this machine by",
            self.bind
        );
        let listener = TcpListener::bind(self.bind)
            .with_context(|| format!("cannot listen on {}: choose another --bind", self.bind))?;
        let setup = Setup {
            quiet: self.with_parent,
            devices: self.ib_device,
            ip: self.bind.ip(),
            advertise: self.advertise,
            streams: self.streams as usize,
            chunk: None,
            window: None,
            pairs: self.pairs,
        };
        let side = Arc::new(Side::start(&self.movers, self.memory, self.pool << 20, &setup)?);
        ensure!(
            !side.offer().movers.is_empty(),
            "no mover is left: --memory heap cannot be exported by shm, add tcp to --movers"
        );
        let mut at = listener.local_addr()?;
        if let Some(ip) = self.advertise {
            at.set_ip(ip);
        }
        say(&format!("{STARTED}{at} --key {key}"));
        if self.with_parent {
            thread::Builder::new().spawn(move || {
                // Nothing more comes: its end is the parent's.
                let _ = input.read(&mut [0]);
                end_all();
                process::exit(0);
            })?;
        }
        let clients = Arc::new(AtomicUsize::new(0));
        loop {
            let client = match listener.accept() {
                Ok((client, _)) => client,
                // Of that one client, or of a moment without descriptors.
                Err(error) => {
                    complain(&format!("a client did not come through: {error}"));
                    thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            if clients.load(Ordering::SeqCst) >= CLIENTS {
                // It may not even read this.
                let full = format!("{CLIENTS} clients are here: end some, or try later");
                let _ = Line::new(client).and_then(|mut line| line.send(&Reply::Refused(full)));
                continue;
            }
            clients.fetch_add(1, Ordering::SeqCst);
            let (side, key, here) = (side.clone(), key.clone(), clients.clone());
            let spawned = thread::Builder::new().spawn(move || {
                if let Err(error) = Client::serve(side, &key, client) {
                    complain(&format!("a client: {error:#}"));
                }
                here.fetch_sub(1, Ordering::SeqCst);
            });
            if spawned.is_err() {
                clients.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }
}

/// 16 hexadecimal digits that nobody guesses.
pub fn random_key() -> Result<String> {
    let random = LeaseToken::random()?;
    Ok(random.as_bytes()[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

/// One client's connection.
struct Client {
    side: Arc<Side>,
    ip: IpAddr,
    offer: Option<Offer>,
    staging: Option<Staging>,
    iperf: Option<Process>,
    perftest: Option<Process>,
}

impl Client {
    fn serve(side: Arc<Side>, key: &str, socket: TcpStream) -> Result<()> {
        let ip = socket.local_addr()?.ip();
        let mut line = Line::new(socket)?;
        let offer = match line.receive(QUESTION, HELLO)? {
            Some(Request::Hello {
                version,
                key: shown,
                offer,
            }) => {
                let refusal = if version != VERSION {
                    Some(format!(
                        "this is version {VERSION}, the client is {version}: use equal builds"
                    ))
                } else if !bool::from(shown.as_bytes().ct_eq(key.as_bytes())) {
                    Some("wrong key: give --key as `kvc-perf serve` printed it".into())
                } else {
                    let wrong = offer.as_ref().and_then(|offer| offer.check().err());
                    wrong.map(|error| format!("{error:#}"))
                };
                if let Some(why) = refusal {
                    return line.send(&Reply::Refused(why));
                }
                offer
            }
            _ => bail!("the first line was no hello"),
        };
        line.send(&Reply::Welcome(side.offer()))?;
        let mut client = Client {
            side,
            ip,
            offer,
            staging: None,
            iperf: None,
            perftest: None,
        };
        while let Some(request) = line.receive(QUESTION, IDLE)? {
            let reply = client
                .answer(request)
                .unwrap_or_else(|error| Reply::Refused(format!("{error:#}")));
            line.send(&reply)?;
        }
        Ok(())
    }

    fn answer(&mut self, request: Request) -> Result<Reply> {
        Ok(match request {
            Request::Hello { .. } => bail!("a second hello"),
            Request::Cpu => Reply::Cpu(cpu::seconds()),
            Request::Fence(kind) => Reply::Fenced(self.side.fence(kind)?.as_nanos() as u64),
            Request::Stage(bytes) => {
                ensure!(self.staging.is_none(), "staged already");
                let most = self.side.pool.len() as u64;
                ensure!(
                    (1..=most).contains(&bytes),
                    "{bytes} bytes cannot be staged: give 1 to {most}"
                );
                let staging = self.staging.insert(self.side.stage(bytes)?);
                Reply::Staged(staging.key.0)
            }
            Request::Gather(case, number) => {
                let pool = self.side.pool.len() as u64;
                case.check(pool, "the server's")?;
                let staging = self.staging.as_ref().context("nothing was staged")?;
                ensure!(
                    staging.region.len() as u64 >= case.bytes(),
                    "staged is less than gathered"
                );
                gather(
                    &self.side.pool,
                    &staging.region,
                    &case.runs(number, RegionKey(0), 0, pool, 1),
                );
                Reply::Gathered
            }
            Request::Pull(kind, case, load) => {
                let offer = self.offer.as_ref().context("the client offered nothing")?;
                case.check(self.side.pool.len() as u64, "the server's")?;
                case.check(offer.pool, "the client's")?;
                let landing = Pool {
                    region: RegionKey(0),
                    base: 0,
                    len: self.side.pool.len() as u64,
                };
                let target = Target { kind, offer, landing };
                // The client counts its own.
                Reply::Pulled(self.side.measure(&target, &case, &load, &mut || Ok(0.0))?)
            }
            Request::Iperf => {
                self.iperf = None;
                let (process, port) = iperf::serve(self.ip)?;
                self.iperf = Some(process);
                Reply::Port(port)
            }
            Request::Perftest(job) => {
                self.perftest = None;
                let rail = self.side.rail.as_ref().context("no RDMA device is in use there")?;
                let (process, port) = perftest::serve(&job, rail, self.ip)?;
                self.perftest = Some(process);
                Reply::Port(port)
            }
        })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if let Some(staging) = self.staging.take() {
            self.side.unstage(staging);
        }
    }
}
