//! What is shown: one row per measurement, as a table or as JSON; and how lines come out at all.

use std::io::{Write, stderr, stdout};

use serde::Serialize;

use crate::{
    case::{Access, Case, size},
    measure::{Load, Measured},
    perftest::Job,
    what::Op,
};

/// The median round of one measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `verbs`, `shm`, `tcp`; `ib_read_bw`, `ib_write_bw`, `memcpy` and `iperf3` beside them.
    pub by: String,
    /// One read.
    pub case: String,
    /// Where its runs lie.
    pub access: Option<Access>,
    /// Bytes of a run.
    pub run: u64,
    /// Bytes of a read.
    pub read: u64,
    /// Reads at once.
    pub depth: usize,
    /// Streams, threads or queue pairs of a read.
    pub streams: usize,
    /// Peers read from at the same time.
    pub peers: usize,
    /// Which way the bytes went.
    pub op: Op,
    /// Whether they went the other way as well.
    pub bidirectional: bool,
    /// Whether each chunk had a checksum.
    pub checksum: bool,
    /// The RDMA device here and its port.
    pub device: Option<String>,
    /// 10⁹ payload bytes per second, both directions together.
    pub gb_s: f64,
    /// Runs per second.
    pub messages_s: Option<f64>,
    /// Microseconds of a read.
    pub p50_us: Option<f64>,
    /// Microseconds of a read.
    pub p99_us: Option<f64>,
    /// Processor seconds of this process per 10⁹ bytes.
    pub cpu_s_per_gb: Option<f64>,
    /// Of the peers.
    pub peer_cpu_s_per_gb: Option<f64>,
    /// To what it was measured against in the same rounds, median of the rounds' ratios.
    pub ratio: Option<f64>,
    /// The other's processor seconds per byte over those of both processes here: what a busy machine does not change.
    pub cpu_ratio: Option<f64>,
    /// Microseconds that a fence took under full load, median and worst.
    pub fence_us: Option<[f64; 2]>,
}

impl Row {
    /// Of one round.
    pub fn new(by: &str, case: &Case, load: &Load, peers: usize, measured: Measured) -> Self {
        let Measured {
            bytes,
            seconds,
            messages,
            mut latencies,
            cpu,
            peer_cpu,
            ..
        } = measured;
        latencies.sort_by(f32::total_cmp);
        let at = |part: f64| {
            let index = (latencies.len() as f64 * part) as usize;
            latencies
                .get(index.min(latencies.len().saturating_sub(1)))
                .map(|us| f64::from(*us))
        };
        let giga = bytes as f64 / 1e9;
        let each = |cpu: f64| (giga > 0.0).then(|| cpu / giga);
        Row {
            by: by.into(),
            case: case.name(),
            access: Some(case.access),
            run: case.run(),
            read: case.bytes(),
            depth: load.depth,
            streams: load.streams,
            peers,
            op: Op::Read,
            bidirectional: false,
            checksum: load.checksum,
            device: None,
            gb_s: if seconds > 0.0 { giga / seconds } else { 0.0 },
            messages_s: (seconds > 0.0).then(|| messages as f64 / seconds),
            p50_us: at(0.5),
            p99_us: at(0.99),
            cpu_s_per_gb: each(cpu),
            peer_cpu_s_per_gb: each(peer_cpu),
            ratio: None,
            cpu_ratio: None,
            fence_us: None,
        }
    }

    /// Of iperf3, which says its rate alone.
    pub fn of_iperf3(case: &Case, streams: usize, gb_s: f64) -> Self {
        let load = Load {
            seconds: 0.0,
            depth: 1,
            streams,
            checksum: false,
        };
        let row = Row::new("iperf3", case, &load, 1, Measured::default());
        Row {
            case: "a stream of bytes".into(),
            access: None,
            gb_s,
            messages_s: None,
            cpu_s_per_gb: None,
            peer_cpu_s_per_gb: None,
            ..row
        }
    }

    /// Of a tool of perftest: one buffer of `job.size` bytes over and over. Its other end says no processor time.
    pub fn of_perftest(by: &str, case: &Case, job: &Job, measured: Measured) -> Self {
        let load = Load {
            seconds: 0.0,
            depth: 16,
            streams: job.pairs as usize,
            checksum: false,
        };
        let row = Row::new(by, case, &load, 1, measured);
        Row {
            case: size(job.size),
            access: None,
            run: job.size,
            read: job.size,
            peer_cpu_s_per_gb: None,
            ..row
        }
    }

    /// The round in the middle.
    pub fn median(mut rounds: Vec<Row>) -> Option<Row> {
        rounds.sort_by(|one, other| one.gb_s.total_cmp(&other.gb_s));
        let middle = rounds.len() / 2;
        rounds.into_iter().nth(middle)
    }
}

/// Ours against what ran beside it: the median of the rounds' ratios of rates, and of processor time per byte where both
/// sides' is known.
pub fn ratios(ours: &[Row], theirs: &[Row]) -> (Option<f64>, Option<f64>) {
    let pairs = || ours.iter().zip(theirs);
    let mut rates: Vec<f64> = pairs().map(|(ours, theirs)| ours.gb_s / theirs.gb_s).collect();
    let cpu = |(ours, theirs): (&Row, &Row)| {
        let all = ours.cpu_s_per_gb? + ours.peer_cpu_s_per_gb?;
        let other = theirs.cpu_s_per_gb? + theirs.peer_cpu_s_per_gb?;
        Some(other / all).filter(|ratio| ratio.is_finite())
    };
    let mut cpus: Vec<f64> = pairs().filter_map(cpu).collect();
    rates.retain(|ratio| ratio.is_finite());
    (median(&mut rates), median(&mut cpus))
}

/// The middle number.
pub fn median(numbers: &mut [f64]) -> Option<f64> {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied()
}

/// A line of the result. A reader that went away is nobody's fault.
pub fn say(line: &str) {
    let _ = writeln!(stdout(), "{line}");
}

/// A line beside the result. It may hold the other end's words, so nothing in it moves the cursor.
pub fn complain(line: &str) {
    let plain = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    let line: String = line.chars().map(plain).collect();
    let _ = writeln!(stderr(), "kvc-perf: {line}");
}

/// Prints the rows.
pub fn show(rows: &[Row], json: bool) -> anyhow::Result<()> {
    if json {
        say(&serde_json::to_string_pretty(rows)?);
        return Ok(());
    }
    let head = [
        "by",
        "one read",
        "access",
        "depth",
        "streams",
        "peers",
        "GB/s",
        "runs/s",
        "p50 µs",
        "p99 µs",
        "CPU s/GB",
        "peer CPU s/GB",
        "ratio",
        "CPU ratio",
    ];
    let table = std::iter::once(head.map(String::from).to_vec()).chain(rows.iter().map(cells));
    print(&table.collect::<Vec<_>>());
    Ok(())
}

/// A Markdown table with columns of one width.
pub fn print(table: &[Vec<String>]) {
    let columns = table.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = table.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for (at, line) in table.iter().enumerate() {
        let cells = line.iter().zip(&widths);
        let cells: Vec<String> = cells.map(|(cell, width)| format!("{cell:<width$}")).collect();
        say(&format!("| {} |", cells.join(" | ")));
        if at == 0 {
            let rules: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
            say(&format!("|-{}-|", rules.join("-|-")));
        }
    }
}

/// Three digits that say something, an emulated device's rates included.
pub fn rate(gb_s: f64) -> String {
    match gb_s {
        slow if slow < 1.0 => format!("{slow:.3}"),
        fast => format!("{fast:.2}"),
    }
}

fn cells(row: &Row) -> Vec<String> {
    let number = |value: Option<f64>, digits: usize| value.map_or("-".into(), |value| format!("{value:.digits$}"));
    let access = match row.access {
        None => "-",
        Some(Access::Contiguous) => "contiguous",
        Some(Access::Scattered) => "scattered",
        Some(Access::Gathered) => "gathered",
    };
    let both = match (row.bidirectional, row.op) {
        (true, _) => " both ways",
        (_, Op::Read) => "",
        (_, Op::Write) => " write",
    };
    let sum = if row.checksum { " + crc" } else { "" };
    vec![
        format!("{}{both}{sum}", row.by),
        row.case.clone(),
        access.into(),
        row.depth.to_string(),
        row.streams.to_string(),
        row.peers.to_string(),
        rate(row.gb_s),
        number(row.messages_s, 0),
        number(row.p50_us, 0),
        number(row.p99_us, 0),
        number(row.cpu_s_per_gb, 3),
        number(row.peer_cpu_s_per_gb, 3),
        number(row.ratio, 2),
        number(row.cpu_ratio, 2),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Shape;

    const CASE: Case = Case {
        shape: Shape::Runs { len: 1 << 20, count: 4 },
        access: Access::Scattered,
    };

    #[test]
    fn a_ratio_is_that_of_the_same_round_and_of_the_whole_work() {
        let row = |gb_s, cpu, peer: Option<f64>| Row {
            gb_s,
            cpu_s_per_gb: Some(cpu),
            peer_cpu_s_per_gb: peer,
            ..Row::of_iperf3(&CASE, 1, 0.0)
        };
        let ours = [1.0, 8.0, 3.0].map(|gb_s| row(gb_s, 0.1, Some(0.1)));
        let theirs = [2.0, 8.0, 4.0].map(|gb_s| row(gb_s, 0.1, Some(0.0)));
        assert_eq!(ratios(&ours, &theirs), (Some(0.75), Some(0.5)));
        let silent = theirs.map(|row| Row {
            peer_cpu_s_per_gb: None,
            ..row
        });
        assert_eq!(ratios(&ours, &silent), (Some(0.75), None));
        assert_eq!(ratios(&ours, &[]), (None, None));
    }

    #[test]
    fn a_row_has_rates_and_percentiles_of_its_round() {
        let load = Load {
            seconds: 2.0,
            depth: 1,
            streams: 1,
            checksum: false,
        };
        let measured = Measured {
            bytes: 4_000_000_000,
            seconds: 2.0,
            reads: 100,
            messages: 400,
            latencies: (1..=100).rev().map(|us| us as f32).collect(),
            cpu: 1.0,
            peer_cpu: 0.5,
            every: 1,
        };
        let row = Row::new("tcp", &CASE, &load, 1, measured);
        assert_eq!((row.gb_s, row.messages_s), (2.0, Some(200.0)));
        assert_eq!((row.p50_us, row.p99_us), (Some(51.0), Some(100.0)));
        assert_eq!((row.cpu_s_per_gb, row.peer_cpu_s_per_gb), (Some(0.25), Some(0.125)));
        let rounds = [3.0, 1.0, 2.0].map(|gb_s| Row { gb_s, ..row.clone() });
        assert_eq!(Row::median(rounds.to_vec()).unwrap().gb_s, 2.0);
    }
}
