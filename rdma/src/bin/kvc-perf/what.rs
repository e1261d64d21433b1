//! What `run` and `compare` are asked to measure: their options, and the cases they make.

use std::net::IpAddr;

use clap::Args;
use serde::Serialize;

use crate::{
    case::{Access, Case, Shape, parse_seconds, parse_size},
    layout::Layout,
    side::{Kind, Memory},
};

/// Bytes of a read, if nothing says otherwise.
const READ: u64 = 16 << 20;

/// Which way the bytes go. kvc moves them with reads alone (XFER-1): what is written here is fetched by the peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// From the peers to here
    Read,
    /// From here to the peers, which fetch them: over verbs RDMA READs too; for RDMA WRITE see ib_write_bw in `compare`
    Write,
}

/// What is measured, and against whom.
#[derive(Args)]
pub struct What {
    /// HOST:PORT of each `kvc-perf serve`; several are read from at the same time (give them one --key)
    #[arg(conflicts_with = "spawn")]
    pub peers: Vec<String>,
    /// Start this many `serve`s here instead
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=64))]
    pub spawn: Option<u64>,
    /// The key that `serve` printed
    #[arg(long, default_value = "", hide_default_value = true)]
    pub key: String,
    /// Movers to look at [default: all that start]
    #[arg(long, value_delimiter = ',')]
    pub movers: Vec<Kind>,
    /// Bytes of a run, a list
    #[arg(long, value_delimiter = ',', default_value = "64k,1m", value_parser = parse_size)]
    pub sizes: Vec<u64>,
    /// Runs of one read [default: as many as 16 MiB hold]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub runs: Option<u64>,
    /// Tokens of an engine's KV instead of runs: sglang:layers=48,heads=4,dim=128,dtype=bf16,page=1
    #[arg(long, conflicts_with_all = ["sizes", "runs"])]
    pub layout: Option<Layout>,
    /// Tokens of one read, with --layout
    #[arg(long, default_value_t = 256, requires = "layout")]
    pub tokens: u64,
    /// Where the runs lie, a list
    #[arg(long, value_delimiter = ',', default_value = "scattered")]
    pub access: Vec<Access>,
    /// Which way the bytes go
    #[arg(long, value_enum, default_value = "read")]
    pub op: Op,
    /// Both ways at the same time
    #[arg(long, conflicts_with = "op")]
    pub bidirectional: bool,
    /// Reads at once from each peer
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub depth: u64,
    /// Streams of tcp, threads of shm
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=64))]
    pub streams: u64,
    /// With a checksum per chunk
    #[arg(long)]
    pub checksum: bool,
    /// Seconds of one measurement
    #[arg(long, default_value_t = 1.0, value_parser = parse_seconds)]
    pub seconds: f64,
    /// Rounds; the median is printed
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub rounds: u64,
    /// MiB of memory here (and of each --spawn)
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub pool: u64,
    /// Its kind
    #[arg(long, default_value = "heap")]
    pub memory: Memory,
    /// That of each --spawn
    #[arg(long, default_value = "memfd")]
    pub peer_memory: Memory,
    /// Bytes of one request (tcp) or copy (shm) [default: the mover's]
    #[arg(long, value_parser = parse_size)]
    pub chunk: Option<u64>,
    /// Bytes asked for and not yet received on one stream of tcp, or from one peer by verbs [default: the mover's]
    #[arg(long, value_parser = parse_size)]
    pub window: Option<u64>,
    /// Queue pairs of verbs to one peer over each device [default: the mover's]
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub pairs: Option<u8>,
    /// The address of this machine that peers read from [default: that of the route to the first peer]
    #[arg(long)]
    pub bind: Option<IpAddr>,
    /// RDMA devices here, a list: mlx5_0,mlx5_1:1 [default: the best one]
    #[arg(long, value_delimiter = ',')]
    pub ib_device: Vec<String>,
    /// One JSON document instead of the table
    #[arg(long)]
    pub json: bool,
}

impl Default for What {
    /// As without options.
    fn default() -> Self {
        What {
            peers: Vec::new(),
            spawn: None,
            key: String::new(),
            movers: Vec::new(),
            sizes: vec![64 << 10, 1 << 20],
            runs: None,
            layout: None,
            tokens: 256,
            access: vec![Access::Scattered],
            op: Op::Read,
            bidirectional: false,
            depth: 4,
            streams: 2,
            checksum: false,
            seconds: 1.0,
            rounds: 3,
            pool: 256,
            memory: Memory::Heap,
            peer_memory: Memory::Memfd,
            chunk: None,
            window: None,
            pairs: None,
            bind: None,
            ib_device: Vec::new(),
            json: false,
        }
    }
}

impl What {
    /// Everything that is measured, in order.
    pub fn cases(&self) -> Vec<Case> {
        let shapes: Vec<Shape> = match self.layout {
            Some(layout) => vec![Shape::Tokens {
                layout,
                tokens: self.tokens,
            }],
            None => {
                let runs = |len: u64| self.runs.unwrap_or((READ / len).clamp(1, 4096));
                let shape = |len: &u64| Shape::Runs {
                    len: *len,
                    count: runs(*len),
                };
                self.sizes.iter().map(shape).collect()
            }
        };
        let cases = shapes
            .into_iter()
            .flat_map(|shape| self.access.iter().map(move |access| Case { shape, access: *access }));
        cases.collect()
    }
}
