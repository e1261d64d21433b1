//! `kvc-perf` as one uses it: two processes, a table or JSON, and one line that names the remedy.

use std::process::{Command, Output};

fn perf(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvc-perf"))
        .args(arguments)
        .output()
        .unwrap()
}

fn rows(arguments: &[&str]) -> Vec<serde_json::Value> {
    let quick = [
        "--spawn",
        "1",
        "--seconds",
        "0.05",
        "--rounds",
        "1",
        "--pool",
        "16",
        "--json",
    ];
    let output = perf(&[arguments, &quick].concat());
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// XFER-9: every mover that two processes of one host share, in one go.
#[test]
fn compare_measures_every_mover_that_both_ends_have() {
    let rows = rows(&["compare", "--sizes", "64k", "--runs", "8"]);
    let by: Vec<&str> = rows.iter().map(|row| row["by"].as_str().unwrap()).collect();
    assert_eq!(by[..3], ["memcpy", "shm", "tcp"]);
    for row in &rows[1..3] {
        assert!(row["gb_s"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["p50_us"].as_f64() <= row["p99_us"].as_f64(), "{row}");
        assert_eq!(row["read"], 8 * 65_536);
    }
}

#[test]
fn a_layout_is_read_by_pages_contiguous_scattered_and_gathered() {
    let layout = "sglang:layers=3,heads=2,dim=16,dtype=bf16,page=4";
    let access = "contiguous,scattered,gathered";
    for mover in ["shm", "tcp"] {
        let rows = rows(&[
            "run", "--mover", mover, "--layout", layout, "--tokens", "64", "--access", access,
        ]);
        let runs: Vec<u64> = rows.iter().map(|row| row["run"].as_u64().unwrap()).collect();
        assert_eq!(runs, [64 * 64, 4 * 64, 4 * 64], "{mover}");
        assert!(rows.iter().all(|row| row["gb_s"].as_f64().unwrap() > 0.0), "{mover}");
    }
}

#[test]
fn both_ends_read_at_once_with_checksums() {
    let rows = rows(&["run", "--sizes", "64k", "--runs", "4", "--bidirectional", "--checksum"]);
    assert_eq!(
        (&rows[0]["by"], &rows[0]["bidirectional"]),
        (&"shm".into(), &true.into())
    );
}

#[test]
fn what_cannot_be_is_one_line_that_names_the_remedy() {
    let cases: [(&[&str], &str); 6] = [
        (&["run"], "--spawn 1"),
        (&["run", "--spawn", "1", "--sizes", "big"], "write 4096, 64k or 1m"),
        (
            &["run", "--spawn", "1", "--layout", "vllm:"],
            "write it as sglang:layers=",
        ),
        (&["run", "--spawn", "1", "--pool", "1", "--sizes", "2m"], "give --pool"),
        (
            &["run", "--spawn", "1", "--bidirectional", "--access", "gathered"],
            "take gathered out",
        ),
        (
            &["run", "--spawn", "1", "--mover", "shm", "--peer-memory", "heap"],
            "shared are: tcp",
        ),
    ];
    for (arguments, remedy) in cases {
        let output = perf(arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && output.stdout.is_empty());
        // A build with verbs says as well why it goes without them, where there is no device.
        let lines = said.lines().filter(|line| !line.contains("goes without"));
        assert!(lines.count() == 1 && said.contains(remedy), "{said}");
    }
}

#[test]
fn a_wrong_key_opens_nothing() {
    let serve = env!("CARGO_BIN_EXE_kvc-perf");
    let mut server = Command::new(serve)
        .args(["serve", "--bind", "127.0.0.1:0", "--pool", "1", "--key", "right"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let output = server.stdout.take().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line).unwrap();
    let at = line.split(' ').nth(2).unwrap();
    let refused = perf(&["run", at, "--key", "wrong", "--sizes", "64k", "--runs", "1"]);
    server.kill().unwrap();
    server.wait().unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(
        said.contains("wrong key: give --key as `kvc-perf serve` printed it"),
        "{said}"
    );
}

#[test]
fn devices_says_what_it_found() {
    let output = perf(&["devices"]);
    assert!(output.status.success() && !output.stdout.is_empty());
}
