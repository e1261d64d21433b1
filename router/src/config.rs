//! The router's configuration: TOML file < `KVC_ROUTER_*` environment < flags, and the defaults, each written once here.
//! Read by `main`. A [`Config`] that exists is valid.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::Parser;
use hyper::header::HeaderName;
use kvc_proto::{policy::kvc::Kvc, routing::RouterConfig, wire::info::Role};
use serde::Deserialize;

/// Routes agent sessions to the workers that hold their KV.
///
/// Every option can stand in the TOML file (with `_` for `-`), in the environment as KVC_ROUTER_<OPTION>, or here; the
/// later of these wins.
#[derive(Clone, Debug, Default, Parser, Deserialize)]
#[command(name = "kvc-router", version)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// A TOML file with any of the options below.
    #[arg(long, env = "KVC_ROUTER_CONFIG")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// Address to serve clients on [default: 127.0.0.1:30000].
    #[arg(long, env = "KVC_ROUTER_LISTEN", value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// A worker: `role=prefill|decode|both,url=http://HOST:PORT` of its engine, and optionally `listen=HOST:PORT` of its
    /// module's listener (else learned from the engine). Repeat for each; in the environment separate them by `;`.
    #[arg(
        long = "worker",
        env = "KVC_ROUTER_WORKER",
        value_delimiter = ';',
        value_name = "SPEC"
    )]
    #[serde(default)]
    pub worker: Vec<String>,
    /// Counted rejects after which a session leaves a worker alone (τ_reject) [default: 3].
    #[arg(long, env = "KVC_ROUTER_KVCACHE_MIGRATION_REJECT_THRESHOLD", value_name = "N")]
    pub kvcache_migration_reject_threshold: Option<u32>,
    /// Most new tokens of a turn sent to its worker without asking (τ_append), for `--admit-direct false`; the worker's
    /// own limit decides otherwise [default: 8192].
    #[arg(long, env = "KVC_ROUTER_KVCACHE_DIRECT_MAX_UNCACHED_TOKENS", value_name = "TOKENS")]
    pub kvcache_direct_max_uncached_tokens: Option<u32>,
    /// Ask the worker for admission before a direct turn too; `false` lets the worker admit it on arrival [default: true].
    #[arg(long, env = "KVC_ROUTER_ADMIT_DIRECT", value_name = "BOOL")]
    pub admit_direct: Option<bool>,
    /// Count every refusal as a reject, as printed in the paper [default: false].
    #[arg(long, env = "KVC_ROUTER_COUNT_ALL_REJECTS", value_name = "BOOL")]
    pub count_all_rejects: Option<bool>,
    /// Let a completed direct turn clear the session's rejects everywhere [default: true].
    #[arg(long, env = "KVC_ROUTER_RESET_ON_SUCCESS", value_name = "BOOL")]
    pub reset_on_success: Option<bool>,
    /// Let the prefill side follow what decode workers append: name a backup in every admission question [default: true].
    #[arg(long, env = "KVC_ROUTER_SYNC", value_name = "BOOL")]
    pub sync: Option<bool>,
    /// A header that names the session, besides X-Session-Id, which goes first [default: none].
    #[arg(long, env = "KVC_ROUTER_SESSION_HEADER", value_name = "NAME")]
    pub session_header: Option<String>,
    /// Sessions remembered; the least recently used are forgotten [default: 100000].
    #[arg(long, env = "KVC_ROUTER_MAX_SESSIONS", value_name = "N")]
    pub max_sessions: Option<usize>,
    /// How long a turn waits while another turn of its session runs, before 409 [default: 1000].
    #[arg(long, env = "KVC_ROUTER_BUSY_WAIT_MS", value_name = "MS")]
    pub busy_wait_ms: Option<u64>,
    /// Threads that serve clients [default: the machine's cores, at most 4].
    #[arg(long, env = "KVC_ROUTER_THREADS", value_name = "N")]
    pub threads: Option<usize>,
    /// Client connections open at once; more wait to be accepted [default: 4096].
    #[arg(long, env = "KVC_ROUTER_MAX_CONNECTIONS", value_name = "N")]
    pub max_connections: Option<usize>,
    /// Largest request body in bytes [default: 33554432].
    #[arg(long, env = "KVC_ROUTER_MAX_BODY_BYTES", value_name = "BYTES")]
    pub max_body_bytes: Option<usize>,
    /// Idle connections kept per worker and thread [default: 64].
    #[arg(long, env = "KVC_ROUTER_POOL_SIZE", value_name = "N")]
    pub pool_size: Option<usize>,
    /// How long a client may take to send a request's head; an idle connection is closed after it [default: 60000].
    #[arg(long, env = "KVC_ROUTER_CLIENT_HEAD_TIMEOUT_MS", value_name = "MS")]
    pub client_head_timeout_ms: Option<u64>,
    /// How long a client may take to send a request's body [default: 30000].
    #[arg(long, env = "KVC_ROUTER_CLIENT_BODY_TIMEOUT_MS", value_name = "MS")]
    pub client_body_timeout_ms: Option<u64>,
    /// How long a connection to a worker may take [default: 1000].
    #[arg(long, env = "KVC_ROUTER_CONNECT_TIMEOUT_MS", value_name = "MS")]
    pub connect_timeout_ms: Option<u64>,
    /// How long an answer of a worker's listener may take [default: 2000].
    #[arg(long, env = "KVC_ROUTER_ADMIT_TIMEOUT_MS", value_name = "MS")]
    pub admit_timeout_ms: Option<u64>,
    /// How long workers may take to say what they hold of a session that is reseeded [default: 500].
    #[arg(long, env = "KVC_ROUTER_LOCATE_TIMEOUT_MS", value_name = "MS")]
    pub locate_timeout_ms: Option<u64>,
    /// How long the silent target of a move is waited out before its session is placed elsewhere: the workers' hand-over
    /// deadline and a margin [default: 3000].
    #[arg(long, env = "KVC_ROUTER_HANDOVER_WAIT_MS", value_name = "MS")]
    pub handover_wait_ms: Option<u64>,
    /// Sessions of a draining worker that are moved at the same time [default: 4].
    #[arg(long, env = "KVC_ROUTER_DRAIN_MOVES", value_name = "N")]
    pub drain_moves: Option<usize>,
    /// How long a prefill with import may take, before the decode worker computes the prompt itself [default: 60000].
    #[arg(long, env = "KVC_ROUTER_IMPORT_TIMEOUT_MS", value_name = "MS")]
    pub import_timeout_ms: Option<u64>,
    /// How long the first token may take [default: 600000].
    #[arg(long, env = "KVC_ROUTER_FIRST_TOKEN_TIMEOUT_MS", value_name = "MS")]
    pub first_token_timeout_ms: Option<u64>,
    /// How long the next token may take [default: 120000].
    #[arg(long, env = "KVC_ROUTER_NEXT_TOKEN_TIMEOUT_MS", value_name = "MS")]
    pub next_token_timeout_ms: Option<u64>,
    /// How often workers are asked for their state [default: 1000].
    #[arg(long, env = "KVC_ROUTER_POLL_INTERVAL_MS", value_name = "MS")]
    pub poll_interval_ms: Option<u64>,
    /// How long running requests may take to end after SIGTERM [default: 30000].
    #[arg(long, env = "KVC_ROUTER_DRAIN_TIMEOUT_MS", value_name = "MS")]
    pub drain_timeout_ms: Option<u64>,
    /// What is logged, as `tracing` filters [default: info].
    #[arg(long, env = "KVC_ROUTER_LOG", value_name = "FILTER")]
    pub log: Option<String>,
    /// Log lines as JSON [default: false].
    #[arg(long, env = "KVC_ROUTER_LOG_JSON", value_name = "BOOL")]
    pub log_json: Option<bool>,
}

/// What the router runs with.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where clients connect.
    pub listen: SocketAddr,
    /// The workers, in the order given; the order is their index.
    pub workers: Vec<WorkerConfig>,
    /// Routing and dispatch.
    pub routing: RouterConfig,
    /// A session header besides `X-Session-Id`.
    pub session_header: Option<HeaderName>,
    /// Threads that serve clients.
    pub threads: usize,
    /// Client connections open at once.
    pub max_connections: usize,
    /// Largest request body in bytes.
    pub max_body_bytes: usize,
    /// Idle connections kept per worker and thread.
    pub pool_size: usize,
    /// Sessions of a draining worker moved at the same time (MIG-4).
    pub drain_moves: usize,
    /// Every wait's limit.
    pub timeouts: Timeouts,
    /// Log filter.
    pub log: String,
    /// Log as JSON.
    pub log_json: bool,
}

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// A client's request head.
    pub client_head: Duration,
    /// A client's request body.
    pub client_body: Duration,
    /// Connecting to a worker.
    pub connect: Duration,
    /// A worker's listener.
    pub admit: Duration,
    /// The same, when a granted turn waits for the answer (SYNC-2).
    pub locate: Duration,
    /// The first token.
    pub first_token: Duration,
    /// Each later token.
    pub next_token: Duration,
    /// Between polls of a worker.
    pub poll: Duration,
    /// After SIGTERM.
    pub drain: Duration,
}

/// One worker as configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerConfig {
    /// What it is for.
    pub role: Role,
    /// `host:port` of its engine.
    pub engine: String,
    /// `host:port` of its module's listener, if not to be learned from the engine.
    pub listen: Option<String>,
}

/// Why a configuration is none: one line that says how to fix it.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}: {error}; check --config", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The file is no TOML of the options.
    #[error("{path}: {message}", path = path.display())]
    Toml {
        /// Which.
        path: PathBuf,
        /// Where and why, on one line.
        message: String,
    },
    /// An option has no valid value.
    #[error("{option}: {problem}; {fix}")]
    Option {
        /// Which.
        option: &'static str,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        fix: &'static str,
    },
}

impl Config {
    /// From flags and environment (as clap has read them) and the file they name.
    pub fn load(cli: Options) -> Result<Config, ConfigError> {
        let file = match &cli.config {
            None => Options::default(),
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|error| ConfigError::File {
                    path: path.clone(),
                    error,
                })?;
                toml::from_str(&text).map_err(|e| ConfigError::Toml {
                    path: path.clone(),
                    message: e.to_string().split_whitespace().collect::<Vec<_>>().join(" "),
                })?
            }
        };
        Config::of(cli, file)
    }

    fn of(cli: Options, file: Options) -> Result<Config, ConfigError> {
        macro_rules! option {
            ($name:ident, $default:expr) => {
                cli.$name.or(file.$name).unwrap_or($default)
            };
        }
        macro_rules! positive {
            ($name:ident, $flag:literal, $default:expr) => {{
                let value = option!($name, $default);
                if value == 0 {
                    return Err(bad($flag, "is 0".into(), "give a number of 1 or more"));
                }
                value
            }};
        }
        let listen = option!(listen, "127.0.0.1:30000".into());
        let specs = if cli.worker.is_empty() { file.worker } else { cli.worker };
        let header = cli.session_header.or(file.session_header);
        let defaults = RouterConfig::default();
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get().min(4));
        let ms = Duration::from_millis;
        Ok(Config {
            listen: listen.parse().map_err(|_| {
                bad(
                    "--listen",
                    format!("{listen:?} is no address"),
                    "give an IP address and a port, as 127.0.0.1:30000",
                )
            })?,
            workers: workers(&specs)?,
            routing: RouterConfig {
                policy: Kvc {
                    reject_threshold: positive!(
                        kvcache_migration_reject_threshold,
                        "--kvcache-migration-reject-threshold",
                        defaults.policy.reject_threshold
                    ),
                    ..defaults.policy
                },
                count_all_rejects: option!(count_all_rejects, defaults.count_all_rejects),
                reset_on_success: option!(reset_on_success, defaults.reset_on_success),
                admit_direct: option!(admit_direct, defaults.admit_direct),
                max_uncached_tokens: option!(kvcache_direct_max_uncached_tokens, defaults.max_uncached_tokens),
                max_sessions: positive!(max_sessions, "--max-sessions", defaults.max_sessions),
                busy_wait: ms(option!(busy_wait_ms, 1_000)),
                sync: option!(sync, defaults.sync),
                handover_wait: ms(positive!(handover_wait_ms, "--handover-wait-ms", 3_000)),
                import_deadline: ms(positive!(import_timeout_ms, "--import-timeout-ms", 60_000)),
                ..defaults
            },
            session_header: header
                .map(|name| {
                    name.parse().map_err(|_| {
                        bad(
                            "--session-header",
                            format!("{name:?} is no header name"),
                            "give a name as X-Conversation-Id",
                        )
                    })
                })
                .transpose()?,
            threads: positive!(threads, "--threads", cores),
            max_connections: positive!(max_connections, "--max-connections", 4096),
            max_body_bytes: positive!(max_body_bytes, "--max-body-bytes", 32 << 20),
            pool_size: option!(pool_size, 64),
            drain_moves: positive!(drain_moves, "--drain-moves", 4),
            timeouts: Timeouts {
                client_head: ms(positive!(client_head_timeout_ms, "--client-head-timeout-ms", 60_000)),
                client_body: ms(positive!(client_body_timeout_ms, "--client-body-timeout-ms", 30_000)),
                connect: ms(positive!(connect_timeout_ms, "--connect-timeout-ms", 1_000)),
                admit: ms(positive!(admit_timeout_ms, "--admit-timeout-ms", 2_000)),
                locate: ms(positive!(locate_timeout_ms, "--locate-timeout-ms", 500)),
                first_token: ms(positive!(first_token_timeout_ms, "--first-token-timeout-ms", 600_000)),
                next_token: ms(positive!(next_token_timeout_ms, "--next-token-timeout-ms", 120_000)),
                poll: ms(positive!(poll_interval_ms, "--poll-interval-ms", 1_000)),
                drain: ms(option!(drain_timeout_ms, 30_000)),
            },
            log: option!(log, "info".into()),
            log_json: option!(log_json, false),
        })
    }
}

fn bad(option: &'static str, problem: String, fix: &'static str) -> ConfigError {
    ConfigError::Option { option, problem, fix }
}

fn workers(specs: &[String]) -> Result<Vec<WorkerConfig>, ConfigError> {
    const FIX: &str = "write --worker role=decode,url=http://127.0.0.1:31000";
    let wrong = |problem: String| bad("--worker", problem, FIX);
    let mut workers: Vec<WorkerConfig> = Vec::new();
    for spec in specs {
        let worker = worker(spec).map_err(|problem| wrong(format!("{spec:?} {problem}")))?;
        if workers.iter().any(|w| w.engine == worker.engine) {
            return Err(wrong(format!("{} stands twice", worker.engine)));
        }
        workers.push(worker);
    }
    if !workers.iter().any(|w| w.role != Role::Prefill) {
        return Err(wrong("no worker takes turns (role decode or both)".into()));
    }
    if workers.len() > usize::from(u16::MAX) {
        return Err(wrong(format!("{} workers are too many", workers.len())));
    }
    Ok(workers)
}

fn worker(spec: &str) -> Result<WorkerConfig, String> {
    let (mut role, mut engine, mut listen) = (Role::Both, None, None);
    for part in spec.split(',') {
        let (name, value) = part.trim().split_once('=').ok_or("has a part without `=`")?;
        match name {
            "role" => {
                role = match value {
                    "prefill" => Role::Prefill,
                    "decode" => Role::Decode,
                    "both" => Role::Both,
                    _ => return Err(format!("has the role {value:?}, not prefill, decode or both")),
                }
            }
            "url" => {
                let rest = value
                    .strip_prefix("http://")
                    .ok_or("has a url that does not begin with http://")?;
                engine = Some(authority(rest.trim_end_matches('/'))?);
            }
            "listen" => listen = Some(authority(value)?),
            _ => return Err(format!("has the unknown field {name:?}")),
        }
    }
    Ok(WorkerConfig {
        role,
        engine: engine.ok_or("has no url")?,
        listen,
    })
}

/// `host:port`.
fn authority(text: &str) -> Result<String, String> {
    let parsed = text.parse::<hyper::http::uri::Authority>().ok();
    match parsed.filter(|a| a.port_u16().is_some() && !a.as_str().contains('@')) {
        Some(_) => Ok(text.to_owned()),
        None => Err(format!("has {text:?} where HOST:PORT should stand")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cli(args: &[&str]) -> Options {
        Options::try_parse_from(["kvc-router"].iter().chain(args)).expect("flags parse")
    }

    const WORKER: &str = "role=decode,url=http://127.0.0.1:31000";

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let file =
            toml::from_str("listen = \"127.0.0.1:1\"\nmax_sessions = 5\nworker = [\"url=http://h:1\"]").expect("TOML");
        let config = Config::of(cli(&["--listen", "127.0.0.1:2"]), file).expect("valid");
        assert_eq!((config.listen.port(), config.routing.max_sessions), (2, 5));
        assert_eq!(config.workers[0].role, Role::Both);
        assert_eq!(config.routing.policy.reject_threshold, 3);
    }

    #[test]
    fn every_flag_has_an_environment_variable_of_its_name_and_documents_its_default() {
        use clap::CommandFactory;
        for arg in Options::command()
            .get_arguments()
            .filter(|a| !["help", "version"].contains(&a.get_id().as_str()))
        {
            let name = arg.get_id().as_str();
            let env = arg.get_env().and_then(|e| e.to_str());
            assert_eq!(env, Some(format!("KVC_ROUTER_{}", name.to_uppercase()).as_str()));
            let help = arg.get_help().map(|h| h.to_string()).unwrap_or_default();
            assert!(
                help.contains("[default:") || ["config", "worker"].contains(&name),
                "{name}: {help}"
            );
        }
    }

    #[test]
    fn mistakes_are_named_on_one_line_with_the_way_out() {
        let no_file = Options::default;
        for (args, expected) in [
            (vec![], "no worker takes turns"),
            (vec!["--worker", "role=prefill,url=http://h:1"], "no worker takes turns"),
            (vec!["--worker", "role=chef,url=http://h:1"], "role \"chef\""),
            (vec!["--worker", "role=decode"], "has no url"),
            (vec!["--worker", "url=https://h:1"], "http://"),
            (vec!["--worker", "url=http://h"], "HOST:PORT"),
            (vec!["--worker", "url=http://h:1,colour=red"], "\"colour\""),
            (vec!["--worker", WORKER, "--worker", WORKER], "stands twice"),
            (vec!["--worker", WORKER, "--listen", "nowhere"], "--listen"),
            (vec!["--worker", WORKER, "--threads", "0"], "--threads: is 0"),
            (vec!["--worker", WORKER, "--session-header", "a b"], "--session-header"),
        ] {
            let error = Config::of(cli(&args), no_file()).expect_err("invalid").to_string();
            assert!(
                error.contains(expected) && error.contains(';') && !error.contains('\n'),
                "{error}"
            );
        }
    }

    #[test]
    fn a_bad_file_is_named() {
        let missing = Config::load(cli(&["--config", "/nonexistent/kvc.toml"])).expect_err("missing");
        assert!(missing.to_string().contains("/nonexistent/kvc.toml"));
        let unknown = toml::from_str::<Options>("listne = \"x\"")
            .expect_err("unknown")
            .to_string();
        assert!(unknown.contains("listne"));
    }
}
