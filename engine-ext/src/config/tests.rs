//! Settings: order of sources, and what a person reads when one is wrong.

use std::{fs, path::PathBuf};

use super::*;

fn load(flags: &[(&str, &str)], environment: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let own = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
        pairs.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect()
    };
    Config::load(&own(flags), own(environment))
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvc-config-{name}-{}", std::process::id()));
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

#[test]
fn defaults_are_those_of_the_specification() {
    // algorithms §7.
    let c = Config::defaults().unwrap();
    assert_eq!((c.max_uncached_tokens, c.rho_permille, c.clip), (8192, 950, 4096));
    assert_eq!((c.reservation, c.rule), (Duration::from_secs(30), CapacityRule::Growth));
    assert_eq!(
        (c.handover_deadline, c.drain),
        (Duration::from_secs(2), Duration::from_secs(30))
    );
    assert_eq!((c.rdma_mtu, c.rdma_timeout, c.rdma_retries), (4096, 16, 7));
    assert!(c.sync && c.evict_idle && c.listen.ip().is_loopback() && c.peer_listen.ip().is_loopback());
}

#[test]
fn flags_win_over_environment_over_file() {
    let folder = Folder::new("order");
    let file = folder.file("kvc.toml", "clip = 1\nstreams = 3\nrho = 0.5\n[tls]\nname = \"\"\n");
    let c = load(
        &[("config", &file), ("clip", "7")],
        &[
            ("KVC_CLIP", "5"),
            ("KVC_STREAMS", "4"),
            ("OTHER", "x"),
            ("KVC_NOT_OURS", "y"),
        ],
    )
    .unwrap();
    assert_eq!((c.clip, c.streams, c.rho_permille), (7, 4, 500));
    let by_environment = load(&[], &[("KVC_CONFIG", &file)]).unwrap();
    assert_eq!(by_environment.clip, 1);
}

#[test]
fn a_dash_in_a_flag_is_an_underscore() {
    assert_eq!(
        load(&[("max-uncached-tokens", "9")], &[]).unwrap().max_uncached_tokens,
        9
    );
}

#[test]
fn each_mistake_is_one_line_with_field_and_fix() {
    let folder = Folder::new("mistakes");
    let short = folder.file("short", "abc\n");
    let broken = folder.file("broken.toml", "clip = = 3\n");
    let stray = folder.file("stray.toml", "clips = 3\n");
    type Pairs<'a> = &'a [(&'a str, &'a str)];
    let table: &[(Pairs<'_>, Pairs<'_>, &[&str])] = &[
        (
            &[("listen", "localhost")],
            &[],
            &["listen (flag listen)", "\"localhost\"", "ip:port"],
        ),
        (&[], &[("KVC_CLIP", "0")], &["clip (environment KVC_CLIP)", "from 1 to"]),
        (&[("rho", "1.5")], &[], &["rho", "0.05 to 1"]),
        (&[("rho", "NaN")], &[], &["rho", "0.05 to 1"]),
        (&[("rule", "both")], &[], &["rule", "growth or paper"]),
        (&[("role", "router")], &[], &["role", "prefill or decode or both"]),
        (&[("evict_idle", "yes")], &[], &["evict_idle", "true or false"]),
        (
            &[("reservation_ms", "-1")],
            &[],
            &["reservation_ms", "milliseconds from 100"],
        ),
        (&[("sync", "on")], &[], &["sync", "true or false"]),
        (&[], &[("KVC_SYNC_IMPORTS", "0")], &["sync_imports", "from 1 to"]),
        (
            &[("handover_deadline_ms", "0")],
            &[],
            &["handover_deadline_ms", "from 10"],
        ),
        (&[("session_cap", "0")], &[], &["session_cap", "from 1 to"]),
        (
            &[("nonsense", "1")],
            &[],
            &["nonsense (flag nonsense) is no setting", "max_uncached_tokens"],
        ),
        (
            &[("lease_ms", "9000"), ("lease_max_ms", "1000")],
            &[],
            &["lease_max_ms", "below lease_ms", "raise it"],
        ),
        (
            &[("secret_file", "/does/not/exist")],
            &[],
            &["secret_file", "/does/not/exist", "readable file"],
        ),
        (
            &[("secret_file", &short)],
            &[],
            &["secret_file", "holds 3 bytes", "16 random bytes"],
        ),
        (&[("tls.cert", &short)], &[], &["tls.key", "missing", "together"]),
        (
            &[("tls_cert", &short), ("tls_key", &short), ("tls_ca", &short)],
            &[],
            &["tls.cert", "no PEM block"],
        ),
        (&[("config", "/does/not/exist")], &[], &["config", "readable TOML file"]),
        (&[("config", &broken)], &[], &["config", "broken.toml"]),
        (&[("config", &stray)], &[], &["clips (file", "is no setting"]),
        (&[("advertise", "0.0.0.0")], &[], &["advertise", "IP address"]),
        (&[("movers", "tcp,rdma")], &[], &["movers", "verbs, shm and tcp"]),
        (&[("movers", "")], &[], &["movers", "verbs, shm and tcp"]),
        (
            &[("force_rdma", "true"), ("movers", "tcp")],
            &[],
            &["force_rdma", "leaves verbs out", "add verbs"],
        ),
        (&[("ib_device", "mlx5_0,")], &[], &["ib_device", "mlx5_0,mlx5_1:2"]),
        (&[("ib_device", "mlx5_0:0")], &[], &["ib_device", "mlx5_0,mlx5_1:2"]),
        (&[("rdma_listen", "mlx5_0")], &[], &["rdma_listen", "ip:port"]),
        (&[("rdma_mtu", "1500")], &[], &["rdma_mtu", "1024 or 2048"]),
        (&[("rdma_timeout", "0")], &[], &["rdma_timeout", "from 1 to 31"]),
    ];
    for (flags, environment, parts) in table {
        let text = load(flags, environment)
            .expect_err(&format!("{flags:?} {environment:?}"))
            .to_string();
        assert!(!text.contains('\n'), "{text}");
        for part in *parts {
            assert!(text.contains(part), "{text:?} lacks {part:?}");
        }
    }
}

#[test]
fn beyond_loopback_needs_credentials() {
    // XFER-10, F19.
    let folder = Folder::new("loopback");
    let secret = folder.file("secret", "0123456789abcdef0123\n");
    for key in ["listen", "peer_listen", "data_listen", "rdma_listen"] {
        let text = load(&[(key, "192.0.2.1:0")], &[]).unwrap_err().to_string();
        assert!(text.contains(key) && text.contains("secret_file"), "{text}");
        assert!(load(&[(key, "192.0.2.1:0"), ("secret_file", &secret)], &[]).is_ok());
        let any = load(&[(key, "0.0.0.0:0"), ("secret_file", &secret)], &[])
            .unwrap_err()
            .to_string();
        assert!(any.contains("advertise"), "{any}");
    }
}

#[test]
fn a_secret_is_never_printed() {
    let secret = Secret::new(b"0123456789abcdef").unwrap();
    assert_eq!(format!("{secret:?}"), "Secret(..)");
}

#[test]
fn the_readme_lists_every_setting_with_its_default() {
    let readme = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md")).unwrap();
    for key in KEYS {
        let variable = format!("KVC_{}", key.name.replace('.', "_").to_uppercase());
        let row = format!(
            "| `{}` | `{variable}` | {} |",
            key.name,
            key.default.unwrap_or_default()
        );
        assert!(readme.contains(&row), "README.md lacks {row:?}");
    }
}
