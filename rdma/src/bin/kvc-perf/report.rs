//! What is shown: one row per measurement, as a table or as JSON, and a line of progress meanwhile.

use std::io::{IsTerminal, Write};

use serde::Serialize;

use crate::{
    case::{Access, Case},
    measure::{Load, Measured},
};

/// The median round of one measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `shm`, `tcp`; `memcpy` and `iperf3` beside them.
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
    /// Streams or threads of a read.
    pub streams: usize,
    /// Peers read from at the same time.
    pub peers: usize,
    /// Whether the peers read as well.
    pub bidirectional: bool,
    /// Whether each chunk had a checksum.
    pub checksum: bool,
    /// 10⁹ payload bytes per second, both directions together.
    pub gb_s: f64,
    /// Runs per second.
    pub messages_s: Option<f64>,
    /// Microseconds of a read.
    pub p50_us: Option<f64>,
    /// Microseconds of a read.
    pub p99_us: Option<f64>,
    /// Processor seconds of the reading process per 10⁹ bytes.
    pub cpu_s_per_gb: Option<f64>,
    /// Of the processes read from.
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
            bidirectional: false,
            checksum: load.checksum,
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

    /// Of a tool that says its rate alone.
    pub fn of_tool(by: &str, case: &Case, streams: usize, gb_s: f64) -> Self {
        let load = Load {
            seconds: 0.0,
            depth: 1,
            streams,
            checksum: false,
        };
        let row = Row::new(by, case, &load, 1, Measured::default());
        Row {
            case: "a stream of bytes".into(),
            access: None,
            gb_s,
            cpu_s_per_gb: None,
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

/// The middle number.
pub fn median(numbers: &mut [f64]) -> Option<f64> {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied()
}

/// Prints the rows.
pub fn show(rows: &[Row], json: bool) -> anyhow::Result<()> {
    if json {
        println!("{}", serde_json::to_string_pretty(rows)?);
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
        "fence µs (median, worst)",
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
        println!("| {} |", cells.join(" | "));
        if at == 0 {
            let rules: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
            println!("|-{}-|", rules.join("-|-"));
        }
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
    let both = if row.bidirectional { " both ways" } else { "" };
    let sum = if row.checksum { " + crc" } else { "" };
    vec![
        format!("{}{both}{sum}", row.by),
        row.case.clone(),
        access.into(),
        row.depth.to_string(),
        row.streams.to_string(),
        row.peers.to_string(),
        format!("{:.2}", row.gb_s),
        number(row.messages_s, 0),
        number(row.p50_us, 0),
        number(row.p99_us, 0),
        number(row.cpu_s_per_gb, 3),
        number(row.peer_cpu_s_per_gb, 3),
        number(row.ratio, 2),
        number(row.cpu_ratio, 2),
        row.fence_us
            .map_or("-".into(), |[median, worst]| format!("{median:.0}, {worst:.0}")),
    ]
}

/// Says on the error stream how far it is: one line that changes on a terminal, a line per step elsewhere.
pub struct Progress {
    steps: usize,
    done: usize,
    terminal: bool,
}

impl Progress {
    /// Of so many steps.
    pub fn new(steps: usize) -> Self {
        Progress {
            steps,
            done: 0,
            terminal: std::io::stderr().is_terminal(),
        }
    }

    /// The next step begins.
    pub fn step(&mut self, what: &str) {
        self.done += 1;
        let (done, steps) = (self.done, self.steps);
        let mut out = std::io::stderr();
        // Nobody to tell is no fault.
        let _ = match self.terminal {
            true => write!(out, "\r\x1b[K[{done}/{steps}] {what}").and_then(|()| out.flush()),
            false => writeln!(out, "[{done}/{steps}] {what}"),
        };
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.terminal {
            eprint!("\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Shape;

    #[test]
    fn a_row_has_rates_and_percentiles_of_its_round() {
        let case = Case {
            shape: Shape::Runs { len: 1 << 20, count: 4 },
            access: Access::Scattered,
        };
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
        };
        let row = Row::new("tcp", &case, &load, 1, measured);
        assert_eq!((row.gb_s, row.messages_s), (2.0, Some(200.0)));
        assert_eq!((row.p50_us, row.p99_us), (Some(51.0), Some(100.0)));
        assert_eq!((row.cpu_s_per_gb, row.peer_cpu_s_per_gb), (Some(0.25), Some(0.125)));
        let rounds = [3.0, 1.0, 2.0].map(|gb_s| Row { gb_s, ..row.clone() });
        assert_eq!(Row::median(rounds.to_vec()).unwrap().gb_s, 2.0);
    }
}
