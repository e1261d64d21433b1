//! `devices`: what this machine has for each mover, what RDMA would take, and why not the rest. The first thing to look at
//! on a new node; it needs neither a device, nor the kernel's RDMA, nor its library.

#[cfg(not(feature = "verbs"))]
#[path = "devices/bare.rs"]
mod rdma;
#[cfg(feature = "verbs")]
#[path = "devices/verbs.rs"]
mod rdma;

use std::{fs, net::IpAddr, path::Path};

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use crate::report::say;

/// Modules of the kernel that matter: what verbs needs, drivers, and GPUDirect's.
const MODULES: [&str; 9] = [
    "ib_core",
    "ib_uverbs",
    "mlx5_core",
    "mlx5_ib",
    "irdma",
    "bnxt_re",
    "rdma_rxe",
    "siw",
    "nvidia_peermem",
];
/// An interface's MTU below which RoCE packets carry less than 4096 bytes.
const MTU: u64 = 4200;

const EXAMPLES: &str = "\
Examples:
  kvc-perf devices                        what is there, and what a worker would take
  kvc-perf devices --to 10.0.0.2          for peers behind that address
  kvc-perf devices --ib-device mlx5_0,mlx5_1:1
  kvc-perf devices --json

Exit status 0, whatever is there: `chosen` and `movers` of --json are for scripts.";

/// What this machine has for each mover, what RDMA would take, and why not the rest.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Devices {
    /// As if workers were told to take these: mlx5_0,mlx5_1:1
    #[arg(long, value_delimiter = ',')]
    ib_device: Vec<String>,
    /// A peer's address: the device of the route to it is preferred
    #[arg(long, value_name = "IP")]
    to: Option<IpAddr>,
    /// One JSON document instead of the text
    #[arg(long)]
    json: bool,
}

/// All that is said.
#[derive(Debug, Serialize)]
struct Found {
    /// Whether this build has the verbs mover.
    built: bool,
    /// Whether libibverbs can be used, and why not.
    library: Result<Vec<String>, String>,
    /// Those of [`MODULES`] that are loaded.
    modules: Vec<&'static str>,
    /// What the library opens: `/dev/infiniband/uverbs0`.
    files: Vec<String>,
    /// Bytes that may be locked, none without a limit.
    locked_memory: Option<u64>,
    devices: Vec<Device>,
    /// What verbs would take.
    chosen: Vec<String>,
    /// Why it would take nothing.
    not_chosen: Option<String>,
    large_pages: LargePages,
    /// That would start here, the best first.
    movers: Vec<&'static str>,
}

#[derive(Debug, Serialize)]
struct Device {
    name: String,
    /// Its PCI function, none for software.
    pci: Option<String>,
    numa: Option<u32>,
    ports: Vec<Port>,
}

#[derive(Debug, Serialize)]
struct Port {
    number: u8,
    link: String,
    state: String,
    gb_s: u32,
    /// Of the interface behind the address that would be taken.
    mtu: Option<u64>,
    /// The address that would be taken, or why none.
    usable: Result<String, String>,
    addresses: Vec<String>,
}

/// Of shared memory.
#[derive(Debug, Serialize)]
struct LargePages {
    shmem_enabled: String,
    nr_hugepages: u64,
}

impl Devices {
    /// Looks and prints.
    pub fn run(self) -> Result<()> {
        let found = Found::look(&self, Path::new("/"));
        if self.json {
            say(&serde_json::to_string_pretty(&found)?);
        } else {
            found.lines().iter().for_each(|line| say(line));
        }
        Ok(())
    }
}

impl Found {
    fn look(asked: &Devices, root: &Path) -> Self {
        let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let sees = |module: &&str| root.join("sys/module").join(module).exists();
        let mut files: Vec<String> = fs::read_dir(root.join("dev/infiniband"))
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .filter(|name| name.starts_with("uverbs"))
            .map(|name| format!("/dev/infiniband/{name}"))
            .collect();
        files.sort();
        let shmem = text("sys/kernel/mm/transparent_hugepage/shmem_enabled");
        let enabled = shmem.split(['[', ']']).nth(1).unwrap_or("unknown");
        let rdma = rdma::look(asked, root);
        let verbs = (!rdma.chosen.is_empty()).then_some("verbs");
        Found {
            built: cfg!(feature = "verbs"),
            library: rdma.library,
            modules: MODULES.into_iter().filter(sees).collect(),
            files,
            locked_memory: locked_memory(&text("proc/self/limits")),
            devices: rdma.devices,
            chosen: rdma.chosen,
            not_chosen: rdma.not_chosen,
            large_pages: LargePages {
                shmem_enabled: enabled.into(),
                nr_hugepages: text("proc/sys/vm/nr_hugepages").trim().parse().unwrap_or(0),
            },
            movers: verbs.into_iter().chain(["shm", "tcp"]).collect(),
        }
    }

    fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut line = |head: &str, text: &str| lines.push(format!("{head:<14} {text}"));
        match (self.built, &self.library) {
            (false, _) => line("verbs", "not in this build: build it with --features verbs"),
            (true, Ok(names)) => line("libibverbs", &format!("is there, opens: {}", list(names))),
            (true, Err(why)) => line("libibverbs", why),
        }
        line("kernel", &format!("modules: {}", list(&self.modules)));
        if !self.modules.contains(&"ib_uverbs") {
            line(
                "",
                "without ib_uverbs nothing is opened: `modprobe ib_uverbs`, and the driver of the NIC",
            );
        }
        line("", &format!("files: {}", list(&self.files)));
        if self.files.is_empty() && !self.devices.is_empty() {
            line(
                "",
                "in a container: pass /dev/infiniband in (`--device /dev/infiniband`)",
            );
        }
        match self.locked_memory {
            None => line("locked memory", "unlimited"),
            Some(limit) => {
                line(
                    "locked memory",
                    &format!("{} MiB, and every byte of KV is locked: raise it with", limit >> 20),
                );
                line(
                    "",
                    "`ulimit -l unlimited`, systemd LimitMEMLOCK=infinity, Docker --ulimit memlock=-1",
                );
            }
        }
        if self.devices.is_empty() {
            line("devices", "none, as far as /sys/class/infiniband shows");
        }
        for device in &self.devices {
            let pci = device.pci.as_deref().unwrap_or("software");
            let numa = device.numa.map_or(String::new(), |node| format!(", NUMA node {node}"));
            line("device", &format!("{} ({pci}{numa})", device.name));
            device.ports.iter().for_each(|port| port.lines(&mut line));
        }
        match &self.not_chosen {
            None => line("taken", &self.chosen.join(", ")),
            Some(why) => line("taken", &format!("none: {why}")),
        }
        if self.devices.len() > 1 {
            let order = "of the usable ports: hardware first, then that of the route, the closest, the fastest";
            line("", order);
        }
        let LargePages {
            shmem_enabled,
            nr_hugepages,
        } = &self.large_pages;
        line(
            "shared memory",
            &format!("large pages: shmem_enabled {shmem_enabled}, vm.nr_hugepages {nr_hugepages}"),
        );
        line("movers", &self.movers.join(", "));
        lines
    }
}

impl Port {
    fn lines(&self, line: &mut impl FnMut(&str, &str)) {
        let Port {
            number, link, state, ..
        } = self;
        let usable = match &self.usable {
            Ok(address) => format!("usable, {address}"),
            Err(why) => format!("not usable: {why}"),
        };
        line(
            "",
            &format!("port {number}: {link}, {state}, {} Gb/s: {usable}", self.gb_s),
        );
        self.addresses
            .iter()
            .for_each(|address| line("", &format!("  {address}")));
        if let Some(mtu) = self.mtu.filter(|mtu| *mtu < MTU && link == "Ethernet") {
            line("", &format!("  MTU {mtu}: with {MTU} or more packets carry 4096 bytes"));
        }
    }
}

/// The soft limit; `None` without one, and where the system does not say.
fn locked_memory(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn list<T: AsRef<str>>(names: &[T]) -> String {
    match names {
        [] => "none".into(),
        names => names.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", "),
    }
}

/// What the verbs mover would make of the machine.
struct Rdma {
    library: Result<Vec<String>, String>,
    devices: Vec<Device>,
    chosen: Vec<String>,
    not_chosen: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_locked_memory_is_the_soft_one() {
        let limits =
            |value: &str| format!("Max processes  1 2 processes\nMax locked memory  {value}  unlimited  bytes\n");
        assert_eq!(locked_memory(&limits("8388608")), Some(8 << 20));
        assert_eq!(locked_memory(&limits("unlimited")), None);
        assert_eq!(locked_memory(""), None);
    }

    /// A machine that has nothing is told so, and what it goes with.
    #[test]
    fn an_empty_machine_has_shm_and_tcp() {
        let asked = Devices {
            ib_device: Vec::new(),
            to: None,
            json: false,
        };
        let found = Found::look(&asked, Path::new("/nowhere"));
        assert_eq!(found.movers, ["shm", "tcp"]);
        assert!(found.not_chosen.is_some() && found.devices.is_empty());
        let text = found.lines().join("\n");
        assert!(
            text.contains("modprobe ib_uverbs") && text.contains("taken          none: "),
            "{text}"
        );
        assert!(serde_json::to_string(&found).is_ok());
    }
}
