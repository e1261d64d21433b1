//! `serve`: exposes memory, and answers clients (`run`, `compare`, `bench`), a thread each.

use std::{
    io::Read,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    process,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use kvc_rdma::{LeaseToken, RegionKey};

use crate::{
    case::Pool,
    control::{Line, Reply, Request, VERSION},
    cpu, iperf,
    measure::{Target, gather},
    side::{Kind, Memory, Offer, Setup, Side, Staging},
};

/// Clients at once.
const CLIENTS: usize = 64;

/// Exposes memory to be read; prints where, and the key that a client has to show. Runs until it is stopped.
#[derive(Args)]
pub struct Serve {
    /// Where to listen for clients; tcp reads come to a free port of the same address
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
    #[arg(long, default_value_t = 256)]
    pool: u64,
    /// Its kind
    #[arg(long, default_value = "memfd")]
    memory: Memory,
    /// Streams of tcp, threads of shm, for reads in the other direction
    #[arg(long, default_value_t = 2)]
    streams: usize,
    /// End with the standard input
    #[arg(long, hide = true)]
    with_parent: bool,
}

impl Serve {
    /// Until it is stopped.
    pub fn run(self) -> Result<()> {
        ensure!(self.pool > 0, "--pool is 0: give at least 1 (MiB)");
        let setup = Setup {
            quiet: self.with_parent,
            devices: self.ib_device,
            ip: self.bind.ip(),
            advertise: self.advertise,
            streams: self.streams,
            chunk: None,
            window: None,
        };
        let side = Arc::new(Side::start(&self.movers, self.memory, self.pool << 20, &setup)?);
        ensure!(
            !side.offer().movers.is_empty(),
            "no mover is left: --memory heap cannot be exported by shm, add tcp to --movers"
        );
        let key = match self.key {
            Some(key) => key,
            None => LeaseToken::random()?.as_bytes()[..8]
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
        };
        let listener = TcpListener::bind(self.bind)
            .with_context(|| format!("cannot listen on {}: choose another --bind", self.bind))?;
        let mut at = listener.local_addr()?;
        if let Some(ip) = self.advertise {
            at.set_ip(ip);
        }
        println!("kvc-perf run {at} --key {key}");
        if self.with_parent {
            thread::spawn(|| {
                // Whatever it brings: its end is the parent's.
                let _ = std::io::stdin().read_to_end(&mut Vec::new());
                process::exit(0);
            });
        }
        let clients = Arc::new(AtomicUsize::new(0));
        for client in listener.incoming().flatten() {
            if clients.fetch_add(1, Ordering::SeqCst) >= CLIENTS {
                clients.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            let (side, key, clients) = (side.clone(), key.clone(), clients.clone());
            thread::spawn(move || {
                if let Err(error) = Client::serve(side, &key, client) {
                    eprintln!("kvc-perf: a client: {error:#}");
                }
                clients.fetch_sub(1, Ordering::SeqCst);
            });
        }
        Ok(())
    }
}

/// One client's connection.
struct Client {
    side: Arc<Side>,
    ip: IpAddr,
    offer: Option<Offer>,
    staging: Option<Staging>,
    iperf: Option<process::Child>,
}

impl Client {
    fn serve(side: Arc<Side>, key: &str, socket: TcpStream) -> Result<()> {
        let ip = socket.local_addr()?.ip();
        let mut line = Line::new(socket)?;
        let offer = match line.receive()? {
            Some(Request::Hello {
                version,
                key: shown,
                offer,
            }) => {
                let refusal = if version != VERSION {
                    Some(format!(
                        "this is version {VERSION}, the client is {version}: use equal builds"
                    ))
                } else if !equal(&shown, key) {
                    Some("wrong key: give --key as `kvc-perf serve` printed it".into())
                } else {
                    None
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
        };
        while let Some(request) = line.receive()? {
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
                ensure!(bytes <= self.side.pool.len() as u64, "staged is more than the pool");
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
                drop(self.iperf.take().map(|mut child| child.wait()));
                let (child, port) = iperf::serve(self.ip)?;
                self.iperf = Some(child);
                Reply::Iperf(port)
            }
        })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if let Some(staging) = self.staging.take() {
            self.side.unstage(staging);
        }
        if let Some(mut child) = self.iperf.take() {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

/// Without telling by its time how much was right.
fn equal(shown: &str, key: &str) -> bool {
    let differ = |(one, other): (u8, u8)| one ^ other;
    shown.len() == key.len()
        && shown
            .bytes()
            .zip(key.bytes())
            .map(differ)
            .fold(0, |all, each| all | each)
            == 0
}
