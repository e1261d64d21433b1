//! `kvc-perf` as one uses it: two processes, a table or JSON, and one line that names the remedy. Over tcp and shm on any
//! machine; over verbs, beside `ib_read_bw`, in the guest of scripts/rdma.

use std::{
    env,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

/// The tool; in a guest it lies beside the tests.
fn tool() -> Command {
    Command::new(env::var("KVC_PERF").unwrap_or(env!("CARGO_BIN_EXE_kvc-perf").into()))
}

fn perf(arguments: &[&str]) -> Output {
    tool().args(arguments).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Without what a build with verbs says where there is no device.
fn complaints(output: &Output) -> Vec<String> {
    let lines = said(output);
    let lines = lines.lines().filter(|line| !line.contains("goes without"));
    lines.map(String::from).collect()
}

const QUICK: [&str; 7] = ["--seconds", "0.05", "--rounds", "1", "--pool", "16", "--json"];

fn rows(arguments: &[&str]) -> Vec<Value> {
    let output = perf(&[arguments, &QUICK].concat());
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn by(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["by"].as_str().unwrap()).collect()
}

/// A `serve` that a test started itself.
struct Serve {
    child: Child,
    at: String,
    key: String,
}

impl Serve {
    fn start(arguments: &[&str]) -> Self {
        let mut command = tool();
        command.args(["serve", "--bind", "127.0.0.1:0", "--pool", "16"]);
        let mut child = command
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!((words[0], words[1], words[3]), ("kvc-perf", "run", "--key"), "{line}");
        Serve {
            at: words[2].into(),
            key: words[4].into(),
            child,
        }
    }

    fn signal(&self, signal: &str) {
        signal_to(&self.child, signal);
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn signal_to(child: &Child, signal: &str) {
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status();
    assert!(sent.unwrap().success());
}

/// Its exit status and what it wrote to the error stream, within half a minute.
fn end(mut child: Child) -> (Option<i32>, String) {
    let until = Instant::now() + Duration::from_secs(30);
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None => assert!(Instant::now() < until, "it does not end"),
        }
        thread::sleep(Duration::from_millis(10));
    };
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    (status.code(), said)
}

/// The processes that `parent` started.
fn children(parent: u32) -> Vec<u32> {
    let of = format!("/proc/{parent}/task/{parent}/children");
    let pids = std::fs::read_to_string(of).unwrap_or_default();
    pids.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !is() {
        assert!(Instant::now() < until, "{what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// XFER-9: every mover that two processes of one host share, in one go.
#[test]
fn compare_measures_every_mover_that_both_ends_have() {
    let rows = rows(&[
        "compare", "--spawn", "1", "--movers", "shm,tcp", "--sizes", "64k", "--runs", "8",
    ]);
    assert_eq!(by(&rows)[..3], ["memcpy", "shm", "tcp"]);
    for row in &rows[1..3] {
        assert!(row["gb_s"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["messages_s"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["p50_us"].as_f64() <= row["p99_us"].as_f64(), "{row}");
        assert_eq!((&row["read"], &row["op"]), (&(8 * 65_536).into(), &"read".into()));
    }
    assert!(
        rows[1]["ratio"].as_f64().unwrap() > 0.0,
        "shm beside memcpy: {}",
        rows[1]
    );
    assert!(rows[0]["cpu_s_per_gb"].is_f64());
}

#[test]
fn the_table_has_a_line_per_mover() {
    let output = perf(&[
        "run",
        "--spawn",
        "1",
        "--mover",
        "tcp",
        "--seconds",
        "0.05",
        "--rounds",
        "1",
    ]);
    let table = String::from_utf8(output.stdout.clone()).unwrap();
    let cells = |line: &str| -> Vec<String> { line.split('|').map(|cell| cell.trim().into()).collect() };
    let lines: Vec<Vec<String>> = table.lines().map(cells).collect();
    let columns = [
        "by", "one read", "access", "depth", "streams", "peers", "GB/s", "runs/s", "p50 µs", "p99 µs",
    ];
    assert_eq!(lines[0][1..11], columns, "{table}");
    assert_eq!(lines[2][1..4], ["tcp", "256 x 64 KiB", "scattered"], "{table}");
    assert_eq!(lines[3][1..4], ["tcp", "16 x 1 MiB", "scattered"], "{table}");
    assert_eq!(complaints(&output), [""; 0], "progress is for terminals");
}

#[test]
fn a_layout_is_read_by_pages_contiguous_scattered_and_gathered() {
    let layout = "sglang:layers=3,heads=2,dim=16,dtype=bf16,page=4";
    let access = "contiguous,scattered,gathered";
    for mover in ["shm", "tcp"] {
        let rows = rows(&[
            "run", "--spawn", "1", "--mover", mover, "--layout", layout, "--tokens", "64", "--access", access,
        ]);
        let runs: Vec<u64> = rows.iter().map(|row| row["run"].as_u64().unwrap()).collect();
        assert_eq!(runs, [64 * 64, 4 * 64, 4 * 64], "{mover}");
        assert!(rows.iter().all(|row| row["gb_s"].as_f64().unwrap() > 0.0), "{mover}");
    }
}

#[test]
fn both_ends_read_at_once_with_checksums() {
    let rows = rows(&[
        "run",
        "--spawn",
        "1",
        "--movers",
        "shm,tcp",
        "--sizes",
        "64k",
        "--runs",
        "4",
        "--bidirectional",
        "--checksum",
    ]);
    assert_eq!(
        (&rows[0]["by"], &rows[0]["bidirectional"], &rows[0]["checksum"]),
        (&"shm".into(), &true.into(), &true.into())
    );
}

/// XFER-1: the peers fetch what is written.
#[test]
fn what_is_written_goes_to_the_peers() {
    for mover in ["shm", "tcp"] {
        let rows = rows(&[
            "run", "--spawn", "2", "--mover", mover, "--sizes", "64k", "--runs", "4", "--op", "write",
        ]);
        assert_eq!((&rows[0]["op"], &rows[0]["peers"]), (&"write".into(), &2.into()));
        assert!(rows[0]["gb_s"].as_f64().unwrap() > 0.0, "{}", rows[0]);
    }
}

#[test]
fn many_peers_are_read_from_at_once_under_one_key() {
    let serves = [(); 3].map(|()| Serve::start(&["--key", "shared", "--movers", "tcp"]));
    let peers = serves.each_ref().map(|serve| serve.at.as_str());
    let rows = rows(
        &[
            &["run"],
            &peers[..],
            &["--key", "shared", "--sizes", "64k", "--runs", "4"],
        ]
        .concat(),
    );
    assert_eq!((&rows[0]["by"], &rows[0]["peers"]), (&"tcp".into(), &3.into()));
}

#[test]
fn what_cannot_be_is_one_line_that_names_the_remedy() {
    let cases: [(&[&str], &str); 18] = [
        (&["run"], "--spawn 1"),
        (&["run", "127.0.0.1:1"], "--key is missing"),
        (
            &["run", "127.0.0.1:1", "--key", "k"],
            "start `kvc-perf serve --bind 127.0.0.1:1`",
        ),
        (&["run", "nowhere", "--key", "k"], "is no HOST:PORT"),
        (&["run", "--spawn", "0"], "1..=64"),
        (&["run", "--spawn", "1", "--sizes", "big"], "write 4096, 64k or 1m"),
        (&["run", "--spawn", "1", "--seconds", "nan"], "give more than 0"),
        (
            &["run", "--spawn", "1", "--mover", "ucx"],
            "possible values: verbs, shm, tcp",
        ),
        (
            &["run", "--spawn", "1", "--layout", "vllm:"],
            "write it as sglang:layers=",
        ),
        (
            &[
                "run",
                "--spawn",
                "1",
                "--layout",
                "sglang:layers=1,heads=1,dim=1,dtype=bf16,page=5",
            ],
            "give a multiple of the page, 5",
        ),
        (
            &["run", "--spawn", "1", "--pool", "1", "--sizes", "2m"],
            "give a larger --pool",
        ),
        (
            &["run", "--spawn", "1", "--access", "gathered", "--depth", "33"],
            "give 1 to 32",
        ),
        (
            &["run", "--spawn", "1", "--bidirectional", "--access", "gathered"],
            "take gathered out",
        ),
        (
            &["run", "--spawn", "1", "--mover", "shm", "--peer-memory", "heap"],
            "shared are: ",
        ),
        (
            &["run", "--spawn", "1", "--peer-memory", "heap", "--movers", "shm"],
            "add tcp to --movers",
        ),
        (&["serve", "--bind", "192.0.2.1:0"], "choose another --bind"),
        (&["serve", "--bind", "0.0.0.0:0"], "--advertise"),
        (&["serve", "--key", "", "--bind", "127.0.0.1:0"], "--key is empty"),
    ];
    for (arguments, remedy) in cases {
        let output = perf(arguments);
        assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}");
        let lines = complaints(&output);
        assert!(
            lines.len() == 1 && lines[0].contains(remedy),
            "{arguments:?}: {lines:?}"
        );
    }
}

#[test]
fn a_wrong_key_opens_nothing() {
    let serve = Serve::start(&["--key", "right"]);
    let refused = perf(&["run", &serve.at, "--key", "wrong", "--sizes", "64k", "--runs", "1"]);
    assert!(said(&refused).contains("wrong key: give --key as `kvc-perf serve` printed it"));
    assert_eq!(refused.status.code(), Some(1));
}

/// Whatever arrives at its port: it says so, and goes on serving.
#[test]
fn strangers_cost_the_server_nothing() {
    let mut serve = Serve::start(&["--movers", "tcp"]);
    let hello = |key: &str| format!("{{\"Hello\": {{\"version\": 2, \"key\": \"{key}\", \"offer\": null}}}}\n");
    let odd = |request: &str| [hello(&serve.key), request.into(), "\n".into()].concat();
    let strangers = [
        "GET / HTTP/1.1\r\n\r\n".into(),
        "\u{1b}[2J\n".into(),
        "[".repeat(10_000) + "\n",
        "x".repeat(1 << 20),
        hello("wrong"),
        odd(r#"{"Stage": 18446744073709551615}"#),
        odd(r#"{"Gather": [{"shape": {"Runs": {"len": 0, "count": 1}}, "access": "scattered"}, 0]}"#),
        odd(
            r#"{"Gather": [{"shape": {"Runs": {"len": 1, "count": 18446744073709551615}}, "access": "scattered"}, 0]}"#,
        ),
        odd(
            r#"{"Pull": ["tcp", {"shape": {"Runs": {"len": 1, "count": 1}}, "access": "scattered"}, {"seconds": -1, "depth": 1, "streams": 1, "checksum": false}]}"#,
        ),
        odd(r#"{"Perftest": {"tool": "Read", "size": 0, "iterations": 1, "pairs": 1}}"#),
    ];
    for stranger in &strangers {
        let mut socket = TcpStream::connect(&serve.at).unwrap();
        // It may have heard enough before it is all sent.
        let _ = socket.write_all(stranger.as_bytes());
        let _ = socket.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        let words = answer.lines().last().unwrap_or("");
        assert!(words.is_empty() || words.contains("Refused"), "{stranger:.60}: {words}");
    }
    let mut arguments = vec!["run", &serve.at, "--key", &serve.key, "--sizes", "64k", "--runs", "4"];
    arguments.extend(QUICK);
    assert!(perf(&arguments).status.success());
    serve.signal("-TERM");
    let (status, said) = end(std::mem::replace(
        &mut serve.child,
        Command::new("true").spawn().unwrap(),
    ));
    assert_eq!(status, Some(0), "{said}");
    assert!(
        said.ends_with("kvc-perf: stopped\n") && !said.contains("panicked"),
        "{said}"
    );
    assert!(!said.contains('\u{1b}'), "a stranger's words moved the cursor");
}

/// XFER-7: typed, at once, and not status 0; by whichever mover, and whatever `compare` was at.
#[test]
fn a_peer_that_dies_in_the_middle_is_told() {
    let typed = ["is gone", "hung up", "cannot connect", "ended inside", "nobody answers"];
    for (verb, mover, seconds) in [("run", "shm", "60"), ("run", "tcp", "60"), ("compare", "tcp", "0.3")] {
        let serve = Serve::start(&["--movers", mover]);
        let client = tool()
            .args([
                verb, &serve.at, "--key", &serve.key, "--movers", mover, "--rounds", "100",
            ])
            .args(["--sizes", "64k", "--seconds", seconds, "--pool", "16"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        thread::sleep(Duration::from_millis(700));
        drop(serve);
        let (status, said) = end(client);
        assert_eq!(status, Some(1), "{said}");
        assert!(typed.iter().any(|words| said.contains(words)), "{verb} {mover}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn an_interrupted_measurement_leaves_no_process() {
    for signal in ["-INT", "-TERM"] {
        let client = tool()
            .args([
                "run",
                "--spawn",
                "2",
                "--movers",
                "tcp",
                "--seconds",
                "60",
                "--pool",
                "16",
                "--runs",
                "4",
                "--sizes",
                "64k",
            ])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        wait_until("both are started", || children(client.id()).len() == 2);
        let started = children(client.id());
        thread::sleep(Duration::from_millis(100));
        signal_to(&client, signal);
        let (status, said) = end(client);
        assert_eq!(status, Some(if signal == "-INT" { 130 } else { 143 }));
        assert!(said.ends_with("kvc-perf: interrupted\n"), "{said}");
        let is_there = |pid: &u32| std::path::Path::new(&format!("/proc/{pid}")).exists();
        wait_until("they have ended", || !started.iter().any(is_there));
    }
}

/// A client that is killed takes the servers that it started with it.
#[test]
fn a_killed_client_leaves_no_server() {
    let mut client = tool()
        .args([
            "run",
            "--spawn",
            "1",
            "--movers",
            "tcp",
            "--seconds",
            "60",
            "--pool",
            "16",
            "--sizes",
            "64k",
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("it is started", || children(client.id()).len() == 1);
    let started = children(client.id())[0];
    client.kill().unwrap();
    client.wait().unwrap();
    wait_until("it has ended", || {
        !std::path::Path::new(&format!("/proc/{started}")).exists()
    });
}

#[test]
fn devices_says_what_it_found_whatever_it_is() {
    let output = perf(&["devices"]);
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(output.status.success());
    for head in ["kernel", "locked memory", "taken", "shared memory", "movers"] {
        assert!(text.lines().any(|line| line.starts_with(head)), "{head}: {text}");
    }
    let output = perf(&["devices", "--json", "--to", "127.0.0.1"]);
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(found["movers"].as_array().unwrap().contains(&"tcp".into()), "{found}");
    assert!(
        found["chosen"].as_array().unwrap().is_empty() != found["not_chosen"].is_null(),
        "{found}"
    );
}

#[test]
fn every_verb_has_help_with_examples() {
    assert!(
        String::from_utf8(perf(&["--help"]).stdout)
            .unwrap()
            .contains("A new node:")
    );
    for verb in ["serve", "run", "compare", "devices", "bench"] {
        let output = perf(&[verb, "--help"]);
        let help = String::from_utf8(output.stdout).unwrap();
        assert!(
            output.status.success() && help.contains("Examples:\n  kvc-perf "),
            "{help}"
        );
    }
}

/// In the guest of scripts/rdma, where a missing device is a failure.
#[test]
fn verbs_is_compared_with_perftest_and_the_other_movers() {
    if env::var_os("KVC_RDMA_GUEST").is_none() {
        return;
    }
    let output = perf(&["devices", "--json"]);
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["chosen"], serde_json::json!(["rxe0:1, gid 1"]), "{found}");
    assert_eq!(found["movers"], serde_json::json!(["verbs", "shm", "tcp"]));
    let small = ["--sizes", "64k", "--runs", "16"];
    let rows_of = |arguments: &[&str]| rows(&[arguments, &small].concat());
    let rows = rows_of(&["compare", "--spawn", "1"]);
    assert_eq!(
        by(&rows)[..6],
        ["memcpy", "verbs", "ib_read_bw", "ib_write_bw", "shm", "tcp"],
        "{rows:?}"
    );
    let verbs = &rows[1];
    assert_eq!(verbs["device"], "rxe0:1");
    assert!(
        verbs["gb_s"].as_f64().unwrap() > 0.0 && verbs["ratio"].as_f64().unwrap() > 0.0,
        "{verbs}"
    );
    let rows = rows_of(&["compare", "--spawn", "1", "--movers", "verbs", "--op", "write"]);
    assert_eq!(by(&rows)[..3], ["memcpy", "verbs", "ib_write_bw"], "{rows:?}");
    let rows = rows_of(&["run", "--spawn", "2", "--mover", "verbs", "--bidirectional"]);
    assert_eq!((&rows[0]["by"], &rows[0]["peers"]), (&"verbs".into(), &2.into()));
    let layout = "sglang:layers=3,heads=2,dim=16,dtype=bf16,page=4";
    let rows = self::rows(&[
        "run",
        "--spawn",
        "1",
        "--mover",
        "verbs",
        "--layout",
        layout,
        "--tokens",
        "64",
        "--access",
        "contiguous,scattered,gathered",
    ]);
    assert_eq!(rows.len(), 3);
}
