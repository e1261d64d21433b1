//! How long `/admit_direct_append` takes over keep-alive loopback, against a bare echo server in a process of its own,
//! asked alternately by the same client: `cargo run --release -p kvc-engine-ext --example admission_bench [rounds]`.
//!
//! The module runs in a process of its own too, with an idle engine loop that polls every millisecond.

use std::{
    env,
    error::Error,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use kvc_engine_ext::{
    Config,
    harness::{Client, Start, TestEngine},
};

const WARM: usize = 2000;

fn main() -> Result<(), Box<dyn Error>> {
    match env::args().nth(1).as_deref() {
        Some("echo") => echo(),
        Some("worker") => worker(),
        rounds => bench(rounds.map_or(Ok(20_000), str::parse)?),
    }
}

fn bench(rounds: usize) -> Result<(), Box<dyn Error>> {
    let (mut echo_process, echo_port) = spawn("echo")?;
    let (mut worker_process, worker_port) = spawn("worker")?;
    let mut echo = Client::connect(([127, 0, 0, 1], echo_port).into())?;
    let mut worker = Client::connect(([127, 0, 0, 1], worker_port).into())?;
    let (mut bare, mut asked) = (Vec::with_capacity(rounds), Vec::with_capacity(rounds));
    for round in 0..rounds + WARM {
        // The answer and the question are about as long at both.
        let request = question(round as u64);
        let began = Instant::now();
        assert_eq!(echo.raw(&request)?, 200);
        let one = began.elapsed();
        let began = Instant::now();
        assert_eq!(worker.raw(&request)?, 200);
        let two = began.elapsed();
        if round >= WARM {
            bare.push(one);
            asked.push(two);
        }
    }
    let _ = (echo_process.kill(), worker_process.kill());
    report("bare echo", &mut bare);
    report("/admit_direct_append", &mut asked);
    let at = |times: &[Duration], q: f64| times[(times.len() as f64 * q) as usize].as_secs_f64();
    println!(
        "p50 ratio {:.2}  p99 ratio {:.2}",
        at(&asked, 0.5) / at(&bare, 0.5),
        at(&asked, 0.99) / at(&bare, 0.99)
    );
    Ok(())
}

fn report(name: &str, times: &mut [Duration]) {
    times.sort_unstable();
    let at = |q: f64| times[(times.len() as f64 * q) as usize].as_secs_f64() * 1e6;
    println!(
        "{name:24} n {:6}  p50 {:7.1} us  p90 {:7.1} us  p99 {:7.1} us  p99.9 {:7.1} us",
        times.len(),
        at(0.5),
        at(0.9),
        at(0.99),
        at(0.999)
    );
}

/// A new session each time: every question is a grant, and the worker holds all of them.
fn question(session: u64) -> Vec<u8> {
    let body = format!(
        "{{\"session_id\":\"s{session}\",\"turn\":0,\"input_tokens\":16,\"append_tokens\":16,\"max_new_tokens\":16,\
         \"router\":\"00000000000000aa\",\"request\":{session},\"attempt\":0}}"
    );
    format!(
        "POST /admit_direct_append HTTP/1.1\r\nhost: kvc\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

fn spawn(part: &str) -> Result<(Child, u16), Box<dyn Error>> {
    let mut child = Command::new(env::current_exe()?)
        .arg(part)
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    Ok((child, line.trim().parse()?))
}

fn worker() -> Result<(), Box<dyn Error>> {
    let mut start = Start::new(Config::defaults()?, 1);
    start.pages = 1 << 20;
    let mut engine = TestEngine::start(start)?;
    println!("{}", engine.engine().listen().port());
    loop {
        engine.step();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Reads a request and sends back as many bytes, from a blocking thread: the floor of this machine.
fn echo() -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?.port());
    let (stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    serve(stream)
}

fn serve(mut stream: TcpStream) -> Result<(), Box<dyn Error>> {
    let mut buffer = vec![0; 4096];
    let mut body = vec![b' '; 420];
    loop {
        let got = stream.read(&mut buffer)?;
        if got == 0 {
            return Ok(());
        }
        body[..got.min(420)].copy_from_slice(&buffer[..got.min(420)]);
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
        let mut answer = head.into_bytes();
        answer.extend_from_slice(&body);
        stream.write_all(&answer)?;
    }
}
