//! Every key with its default and meaning, once: read by [`Config::load`](super::Config::load), shown by the shim's help.

/// One setting.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Its name in the file, with `_` as written; in the environment `KVC_` and upper case, `.` becoming `_`.
    pub name: &'static str,
    /// What it is when nobody sets it; `None` where it may be absent.
    pub default: Option<&'static str>,
    /// What it means, with unit.
    pub meaning: &'static str,
}

macro_rules! keys {
    ($($name:ident = $text:literal, $default:expr, $meaning:literal;)*) => {
        $(pub(super) const $name: &str = $text;)*
        /// All settings.
        pub const KEYS: &[Key] = &[$(Key { name: $text, default: $default, meaning: $meaning }),*];
    };
}

keys! {
    LISTEN = "listen", Some("127.0.0.1:0"), "ip:port of the HTTP listener; port 0 takes a free one";
    PEER_LISTEN = "peer_listen", Some("127.0.0.1:0"), "ip:port of the peer control plane";
    DATA_LISTEN = "data_listen", Some("127.0.0.1:0"), "ip:port of the data mover";
    ADVERTISE = "advertise", None, "IP address told to others where a listener is bound to 0.0.0.0 or [::]";
    SECRET_FILE = "secret_file", None, "file with the secret that all workers share, 16 bytes or more (XFER-10)";
    TLS_CERT = "tls.cert", None, "PEM file: certificate chain of the peer control plane (XFER-10)";
    TLS_KEY = "tls.key", None, "PEM file: its private key";
    TLS_CA = "tls.ca", None, "PEM file: who signs the peers' certificates";
    TLS_NAME = "tls.name", None, "the name that every peer's certificate carries; absent: the peer's IP address";
    ROLE = "role", Some("both"), "prefill, decode or both";
    MAX_UNCACHED_TOKENS = "max_uncached_tokens", Some("8192"), "largest append in tokens that is computed here (ADM-2)";
    RHO = "rho", Some("0.95"), "share of the pool that admission fills (ADM-6)";
    RULE = "rule", Some("growth"), "growth or paper (ADM-6)";
    CLIP = "clip", Some("4096"), "what an absent or larger generation limit counts as, in tokens (ADM-6)";
    RESERVATION_MS = "reservation_ms", Some("30000"), "how long a grant lives without a sign of life (ADM-10)";
    LEASE_MS = "lease_ms", Some("10000"), "how long a peer's lease lives without renewal (XFER-2)";
    LEASE_MAX_MS = "lease_max_ms", Some("300000"), "how long a peer's lease lives at most (XFER-2)";
    EVICT_IDLE = "evict_idle", Some("true"), "whether admission counts idle sessions as room (ADM-9)";
    SESSION_CAP = "session_cap", None, "most tokens one session may hold; absent: rho of the pool (SES-3)";
    REMEMBERED = "remembered", Some("100000"), "evicted sessions whose identity is kept (SES-1)";
    IMPORT_DEADLINE_MS = "import_deadline_ms", Some("120000"), "the longest an import may take (XFER-7)";
    SYNC = "sync", Some("true"), "keep replicas for others and announce to those that keep ours (SYNC-3)";
    SYNC_IMPORTS = "sync_imports", Some("2"), "replicas pulled at the same time (SYNC-1)";
    SYNC_DEADLINE_MS = "sync_deadline_ms", Some("60000"), "the longest a replica's pull may take (XFER-7)";
    HANDOVER_DEADLINE_MS = "handover_deadline_ms", Some("2000"), "a hand-over answer older than this counts as lost (MIG-2)";
    HANDOVER_HOLD_MS = "handover_hold_ms", Some("20"), "how long a turn is held back for a target one step behind; 0: never (MIG-1)";
    DRAIN_MS = "drain_ms", Some("30000"), "how long a stopping engine waits for its sessions to be moved; 0: not at all (MIG-4)";
    MOVERS = "movers", Some("verbs,shm,tcp"), "how KV may move, of verbs, shm and tcp; the best that both workers have is used (XFER-9)";
    FORCE_RDMA = "force_rdma", Some("false"), "move KV over RDMA only, and do not start without it (XFER-9)";
    IB_DEVICE = "ib_device", None, "RDMA devices, like mlx5_0,mlx5_1:2; the start fails if one cannot be used. Absent: the best one";
    RDMA_LISTEN = "rdma_listen", None, "ip:port at which peers ask for RDMA keys; absent: data_listen's address, any port";
    RDMA_MTU = "rdma_mtu", Some("4096"), "largest RDMA packet in bytes, 256 to 4096; the ports' own limits count too";
    RDMA_TIMEOUT = "rdma_timeout", Some("16"), "an RDMA packet is sent again after 4.096 µs times 2 to this power: 16 is 0.27 s";
    RDMA_RETRIES = "rdma_retries", Some("7"), "how often an RDMA packet is sent again before its peer counts as gone, 0 to 7";
    RDMA_TRAFFIC_CLASS = "rdma_traffic_class", Some("0"), "traffic class of RoCE packets, for the network's lossless class, 0 to 255";
    STREAMS = "streams", Some("2"), "data streams per read";
    CHECKSUM = "checksum", Some("false"), "checksum every chunk (XFER-8)";
}
