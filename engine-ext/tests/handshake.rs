//! XFER-6 and XFER-10: who may exchange KV with whom.

mod support;

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    time::{Duration, Instant},
};

use kvc_cuda::{Device, KvLayout};
use kvc_engine_ext::{
    Engine, EngineFacts, StartError,
    harness::{Client, Start, TestEngine},
};
use kvc_rdma::MoverKind;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use support::*;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvc-handshake-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Status and reason of a seed of 64 tokens from `p` to `d`.
fn seed(p: &mut TestEngine, d: &mut TestEngine) -> (u16, String) {
    d.step();
    let turn = p.arrive("s", &tokens(7, 64), 0, None, Some(placement(1))).unwrap();
    p.finish(turn, &[]);
    let reservation = admit(d, &question("s", 0, 64, 64, 1, 1), "seed");
    let answer = import(d, "s", &order(reservation, 1, p, 10_000));
    let (status, body) = answered(d, answer);
    (status, body["error"]["code"].as_str().unwrap_or_default().to_owned())
}

fn expect(p: &mut TestEngine, d: &mut TestEngine, status: u16, code: &str) {
    assert_eq!(seed(p, d), (status, code.to_owned()));
    assert_eq!(leases(p), 0, "nothing was granted");
    assert!(p.drain() && d.drain(), "pages leaked");
}

#[test]
fn another_model_is_refused() {
    let mut other = Start::new(config(&[]), 16);
    other.model = "other";
    let (mut p, mut d) = (TestEngine::start(other).unwrap(), engine(&[], 16));
    expect(&mut p, &mut d, 502, "model-mismatch");
}

#[test]
fn another_layout_is_refused() {
    // F21.
    let mut other = Start::new(config(&[]), 16);
    other.heads = 4;
    let (mut p, mut d) = (TestEngine::start(other).unwrap(), engine(&[], 16));
    expect(&mut p, &mut d, 502, "layout-mismatch");
}

#[test]
fn only_workers_with_the_same_secret_exchange_kv() {
    let folder = Folder::new("secret");
    let one = folder.file("one", "0123456789abcdef-one");
    let two = folder.file("two", "0123456789abcdef-two");
    for (theirs, ours, right) in [
        (Some(&one), Some(&one), true),
        (Some(&one), Some(&two), false),
        (Some(&one), None, false),
        (None, Some(&two), false),
    ] {
        let with = |secret: Option<&String>| match secret {
            Some(path) => engine(&[("secret_file", path)], 16),
            None => engine(&[], 16),
        };
        let (mut p, mut d) = (with(theirs), with(ours));
        if right {
            assert_eq!(seed(&mut p, &mut d).0, 200);
        } else {
            expect(&mut p, &mut d, 401, "unauthenticated");
        }
    }
}

/// A certificate authority and what it signs.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Settings of a worker with a certificate of this authority for `name`, trusting `trusted`.
    fn worker(&self, folder: &Folder, file: &str, name: &str, trusted: &Authority) -> Vec<(&'static str, String)> {
        let key = KeyPair::generate().unwrap();
        let cert = CertificateParams::new(vec![name.to_owned()])
            .unwrap()
            .signed_by(&key, &self.0)
            .unwrap();
        vec![
            ("tls.cert", folder.file(&format!("{file}.cert"), &cert.pem())),
            ("tls.key", folder.file(&format!("{file}.key"), &key.serialize_pem())),
            ("tls.ca", folder.file(&format!("{file}.ca"), &trusted.0.pem())),
        ]
    }
}

fn with_tls(settings: &[(&'static str, String)]) -> TestEngine {
    let settings: Vec<_> = settings.iter().map(|(k, v)| (*k, v.as_str())).collect();
    engine(&settings, 16)
}

#[test]
fn workers_with_certificates_of_one_authority_exchange_kv() {
    let folder = Folder::new("mtls");
    let ca = Authority::new();
    let mut p = with_tls(&ca.worker(&folder, "p", "127.0.0.1", &ca));
    let mut d = with_tls(&ca.worker(&folder, "d", "127.0.0.1", &ca));
    assert_eq!(seed(&mut p, &mut d), (200, String::new()));
    assert!(p.drain() && d.drain());
}

#[test]
fn certificates_may_carry_one_name_for_all_workers() {
    let folder = Folder::new("mtls-name");
    let ca = Authority::new();
    let named = |file| {
        let mut settings = ca.worker(&folder, file, "kvc.internal", &ca);
        settings.push(("tls.name", "kvc.internal".into()));
        with_tls(&settings)
    };
    let (mut p, mut d) = (named("p"), named("d"));
    assert_eq!(seed(&mut p, &mut d), (200, String::new()));
}

#[test]
fn a_certificate_of_another_authority_is_refused_by_either_side() {
    let folder = Folder::new("mtls-wrong");
    let (ca, other) = (Authority::new(), Authority::new());
    // The importer does not trust the exporter's certificate.
    let mut p = with_tls(&other.worker(&folder, "p1", "127.0.0.1", &ca));
    let mut d = with_tls(&ca.worker(&folder, "d1", "127.0.0.1", &ca));
    expect(&mut p, &mut d, 401, "unauthenticated");
    // The exporter does not trust the importer's.
    let mut p = with_tls(&ca.worker(&folder, "p2", "127.0.0.1", &ca));
    let mut d = with_tls(&other.worker(&folder, "d2", "127.0.0.1", &ca));
    expect(&mut p, &mut d, 401, "unauthenticated");
    // Somebody without any certificate.
    let mut d = engine(&[], 16);
    let (status, _) = seed(&mut p, &mut d);
    assert!([401, 502].contains(&status), "{status}");
    assert_eq!(leases(&p), 0);
}

#[test]
fn a_key_that_does_not_fit_stops_the_start() {
    let folder = Folder::new("mtls-key");
    let ca = Authority::new();
    let mut settings = ca.worker(&folder, "a", "127.0.0.1", &ca);
    let other = ca.worker(&folder, "b", "127.0.0.1", &ca);
    settings[1] = other[1].clone();
    let settings: Vec<_> = settings.iter().map(|(k, v)| (*k, v.as_str())).collect();
    let error = TestEngine::start(Start::new(config(&settings), 16))
        .err()
        .expect("an error")
        .to_string();
    assert!(error.contains("tls.key") && !error.contains('\n'), "{error}");
}

#[test]
fn an_address_in_use_stops_the_start() {
    let running = engine(&[], 16);
    for (field, address) in [
        ("listen", running.engine().listen().to_string()),
        ("peer_listen", running.engine().peer_listen().to_string()),
        ("data_listen", running.engine().endpoint(MoverKind::Tcp).unwrap()),
    ] {
        let error = TestEngine::start(Start::new(config(&[(field, &address)]), 16))
            .err()
            .expect("an error")
            .to_string();
        assert!(error.contains(field), "{error}");
    }
}

#[test]
fn a_pool_that_cannot_be_served_is_refused() {
    let arena = engine(&[], 16).arena().clone();
    let facts = |capacity| EngineFacts {
        layout: arena.layout().clone(),
        model: "tiny".into(),
        engine: "harness".into(),
        capacity,
    };
    for capacity in [0, 17, 1 << 30] {
        let error = Engine::start(config(&[]), facts(capacity)).err().expect("an error");
        assert!(matches!(error, StartError::Facts { field: "capacity", .. }), "{error}");
    }
}

#[test]
fn kv_on_a_device_is_served_but_never_moved() {
    let mut d = engine(&[], 16);
    let host = d.arena().clone();
    // SAFETY: obligation 1 — the arena outlives the engine below; the device is only claimed.
    let layout = unsafe {
        KvLayout::from_raw(
            *host.layout().shape(),
            Device::Cuda(0),
            host.layout().buffers().to_vec(),
        )
    };
    let facts = EngineFacts {
        layout: layout.unwrap(),
        model: "tiny".into(),
        engine: "harness".into(),
        capacity: 64,
    };
    let device = Engine::start(config(&[]), facts).unwrap();
    d.step();
    let reservation = admit(&d, &question("s", 0, 64, 64, 1, 1), "seed");
    let order = order_from(reservation, 1, device.peer_listen(), device.incarnation(), 5000);
    let answer = import(&d, "s", &order);
    assert_eq!(answered(&mut d, answer).1["error"]["code"], "layout-mismatch");
    let (status, body) = Client::connect(device.listen())
        .unwrap()
        .post("/kvc/v1/sessions/s/import", &order)
        .unwrap();
    assert_eq!(
        (status, &body["error"]["code"]),
        (502, &"layout-mismatch".into()),
        "{body}"
    );
    assert!(d.drain());
}

/// Whether the other side closes the connection, at the latest after `within`.
fn closed(mut stream: TcpStream, within: Duration) -> bool {
    stream.set_read_timeout(Some(within)).unwrap();
    let began = Instant::now();
    let mut sink = [0; 4096];
    loop {
        match stream.read(&mut sink) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(e) => return e.kind() == std::io::ErrorKind::ConnectionReset,
        }
        if began.elapsed() > within {
            return false;
        }
    }
}

#[test]
fn garbage_on_any_port_ends_its_connection_only() {
    // T7, T9: truncated and oversized frames. F19.
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    let garbage: Vec<Vec<u8>> = vec![
        vec![0; 4096],
        vec![0xff; 4096],
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        b"\x16\x03\x01\xff\xff".repeat(1000),
        // A frame of 16 MiB, then nothing.
        [preface.clone(), vec![0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat(),
        // Headers that are no headers.
        [preface, vec![0, 0, 4, 1, 4, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff]].concat(),
        b"POST /admit_direct_append HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n".to_vec(),
    ];
    let data: SocketAddr = p.engine().endpoint(MoverKind::Tcp).unwrap().parse().unwrap();
    for address in [p.engine().listen(), p.engine().peer_listen(), data] {
        for bytes in &garbage {
            let mut stream = TcpStream::connect(address).unwrap();
            let _ = stream.write_all(bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            assert!(
                closed(stream, Duration::from_secs(10)),
                "{address} keeps {:?}",
                &bytes[..9]
            );
        }
    }
    assert_eq!(seed(&mut p, &mut d).0, 200, "others are still served");
    assert!(p.drain() && d.drain());
}

#[test]
fn a_peer_that_never_finishes_its_greeting_is_closed() {
    // Slow loris: one byte a second would hold the slot for ever.
    let (mut p, mut d) = (engine(&[], 16), engine(&[], 16));
    let mut stream = TcpStream::connect(p.engine().peer_listen()).unwrap();
    let began = Instant::now();
    for byte in b"PRI * HTTP/2.0\r\n\r\n" {
        if stream.write_all(&[*byte]).is_err() || began.elapsed() > Duration::from_secs(8) {
            break;
        }
        std::thread::sleep(Duration::from_millis(450));
    }
    assert!(closed(stream, Duration::from_secs(5)));
    assert_eq!(seed(&mut p, &mut d).0, 200, "others are still served");
}
