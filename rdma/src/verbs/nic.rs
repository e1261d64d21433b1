//! The RDMA devices of a machine as its sysfs shows them. [`super::choose`] picks among them, `kvc-perf devices` lists
//! them.

use std::{
    collections::BTreeMap,
    fmt, fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
};

const DEVICES: &str = "class/infiniband";

/// Files and links of a sysfs, by path below its root: read from a machine, or recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree {
    files: BTreeMap<String, String>,
    links: BTreeMap<String, String>,
}

/// What a port's frames travel on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Link {
    /// InfiniBand.
    InfiniBand,
    /// RoCE.
    Ethernet,
}

/// What makes a GID's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand, or RoCEv1, which is not routed.
    IbOrRoceV1,
    /// RoCEv2, over UDP.
    RoceV2,
}

/// An entry of a port's table of addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Its place, as a queue pair wants it.
    pub index: u8,
    /// The address.
    pub address: Ipv6Addr,
    /// Its packets.
    pub kind: GidKind,
    /// The network interface behind it.
    pub interface: Option<String>,
}

/// A port of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// From 1.
    pub number: u8,
    /// Its link.
    pub link: Link,
    /// As the kernel calls it: `ACTIVE`, `DOWN`, …
    pub state: String,
    /// Gb/s.
    pub rate: u32,
    /// Of InfiniBand, 0 for Ethernet.
    pub lid: u16,
    /// The entries in use.
    pub gids: Vec<Gid>,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// `mlx5_0`.
    pub name: String,
    /// The node of its memory, if the machine has several.
    pub numa: Option<u32>,
    /// Bridges above it and itself, from the root; empty for a device without hardware.
    pub pci: Vec<String>,
    /// Its ports.
    pub ports: Vec<Port>,
}

impl Tree {
    /// What [`Tree::nics`] and a search by distance look at, of the sysfs mounted at `root` (`/sys`).
    pub fn read(root: &Path) -> Self {
        let mut tree = Tree::default();
        for device in names(&root.join(DEVICES)) {
            let at = format!("{DEVICES}/{device}");
            tree.link(root, &at);
            tree.file(root, &format!("{at}/device/numa_node"));
            for port in names(&root.join(&at).join("ports")) {
                let at = format!("{at}/ports/{port}");
                for file in ["state", "link_layer", "rate", "lid"] {
                    tree.file(root, &format!("{at}/{file}"));
                }
                for index in names(&root.join(&at).join("gids")) {
                    let gid = format!("{at}/gids/{index}");
                    tree.file(root, &gid);
                    // Of up to a thousand entries a few are in use.
                    let unused = |gid: &String| gid.bytes().all(|byte| matches!(byte, b'0' | b':'));
                    if !tree.files.get(&gid).is_none_or(unused) {
                        for file in ["types", "ndevs"] {
                            tree.file(root, &format!("{at}/gid_attrs/{file}/{index}"));
                        }
                    }
                }
            }
        }
        for device in names(&root.join("bus/pci/devices")) {
            let at = format!("bus/pci/devices/{device}");
            tree.link(root, &at);
            tree.file(root, &format!("{at}/numa_node"));
        }
        tree
    }

    /// A recorded one: lines `path: content` and `path -> target`; others are passed over.
    pub fn parse(text: &str) -> Self {
        let mut tree = Tree::default();
        for line in text.lines() {
            if let Some((path, target)) = line.split_once(" -> ") {
                tree.links.insert(path.trim().into(), target.trim().into());
            } else if let Some((path, content)) = line.split_once(": ") {
                tree.files.insert(path.trim().into(), content.trim().into());
            }
        }
        tree
    }

    /// The devices, by name.
    pub fn nics(&self) -> Vec<Nic> {
        let mut nics: Vec<Nic> = self.below(DEVICES).into_iter().map(|name| self.nic(name)).collect();
        nics.sort_by(|a, b| natural(&a.name).cmp(&natural(&b.name)));
        nics
    }

    /// The bridges above a PCI function (`0000:17:00.0`) and itself, and the node of its memory.
    pub fn pci(&self, function: &str) -> Option<(Vec<String>, Option<u32>)> {
        let at = format!("bus/pci/devices/{function}");
        let numa = self.files.get(&format!("{at}/numa_node"));
        Some((pci_path(self.links.get(&at)?), numa.and_then(|node| node.parse().ok())))
    }

    fn nic(&self, name: &str) -> Nic {
        let at = format!("{DEVICES}/{name}");
        let numa = self.files.get(&format!("{at}/device/numa_node"));
        let target = self.links.get(&at).map_or("", String::as_str);
        let ports = self.below(&format!("{at}/ports"));
        Nic {
            name: name.into(),
            numa: numa.and_then(|node| node.parse().ok()),
            pci: pci_path(target),
            ports: ports.into_iter().filter_map(|port| self.port(&at, port)).collect(),
        }
    }

    fn port(&self, device: &str, number: &str) -> Option<Port> {
        let at = format!("{device}/ports/{number}");
        let text = |file: &str| self.files.get(&format!("{at}/{file}")).map_or("", String::as_str);
        let mut gids: Vec<Gid> = self
            .below(&format!("{at}/gids"))
            .into_iter()
            .filter_map(|index| self.gid(&at, index))
            .collect();
        gids.sort_by_key(|gid| gid.index);
        Some(Port {
            number: number.parse().ok()?,
            link: if text("link_layer") == "InfiniBand" {
                Link::InfiniBand
            } else {
                Link::Ethernet
            },
            // "4: ACTIVE"
            state: text("state").rsplit(' ').next().unwrap_or("").into(),
            // "200 Gb/sec (4X HDR)", and "2.5 Gb/sec" of software
            rate: text("rate")
                .split([' ', '.'])
                .next()
                .and_then(|rate| rate.parse().ok())
                .unwrap_or(0),
            lid: u16::from_str_radix(text("lid").trim_start_matches("0x"), 16).unwrap_or(0),
            gids,
        })
    }

    /// An entry in use: unused ones are zero, and their type cannot be read.
    fn gid(&self, port: &str, index: &str) -> Option<Gid> {
        let address: Ipv6Addr = self.files.get(&format!("{port}/gids/{index}"))?.parse().ok()?;
        let kind = match self.files.get(&format!("{port}/gid_attrs/types/{index}"))?.as_str() {
            "RoCE v2" => GidKind::RoceV2,
            _ => GidKind::IbOrRoceV1,
        };
        let interface = self.files.get(&format!("{port}/gid_attrs/ndevs/{index}")).cloned();
        let index = index.parse().ok()?;
        (!address.is_unspecified()).then_some(Gid {
            index,
            address,
            kind,
            interface,
        })
    }

    /// The names right below a path.
    fn below(&self, path: &str) -> Vec<&str> {
        let prefix = format!("{path}/");
        let mut names: Vec<&str> = [&self.files, &self.links]
            .into_iter()
            .flat_map(|map| {
                map.range(prefix.clone()..)
                    .map_while(|(path, _)| path.strip_prefix(&prefix))
            })
            .filter_map(|path| path.split('/').next())
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    fn file(&mut self, root: &Path, path: &str) {
        if let Ok(content) = fs::read_to_string(root.join(path)) {
            self.files.insert(path.into(), content.trim().into());
        }
    }

    fn link(&mut self, root: &Path, path: &str) {
        if let Ok(target) = fs::read_link(root.join(path)) {
            self.links.insert(path.into(), target.to_string_lossy().into_owned());
        }
    }
}

/// As recorded: what [`Tree::parse`] reads.
impl fmt::Display for Tree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.links
            .iter()
            .try_for_each(|(path, target)| writeln!(f, "{path} -> {target}"))?;
        self.files
            .iter()
            .try_for_each(|(path, content)| writeln!(f, "{path}: {content}"))
    }
}

impl Gid {
    /// The IPv4 address it stands for.
    pub fn ipv4(&self) -> Option<Ipv4Addr> {
        self.address.to_ipv4_mapped()
    }

    /// Whether packets of it leave with this address.
    pub fn is_of(&self, source: IpAddr) -> bool {
        match source {
            IpAddr::V4(source) => self.ipv4() == Some(source),
            IpAddr::V6(source) => self.address == source,
        }
    }
}

impl Port {
    /// Whether it carries traffic.
    pub fn is_active(&self) -> bool {
        self.state == "ACTIVE"
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Link::InfiniBand => "InfiniBand",
            Link::Ethernet => "Ethernet",
        })
    }
}

/// `../../devices/pci0000:16/0000:16:01.0/0000:17:00.0/infiniband/mlx5_0` → the parts with a PCI address, and the root.
fn pci_path(target: &str) -> Vec<String> {
    let is_pci = |part: &&str| part.starts_with("pci") || (part.len() == 12 && part.as_bytes()[4] == b':');
    target.split('/').filter(is_pci).map(String::from).collect()
}

/// So that mlx5_10 comes behind mlx5_9.
fn natural(name: &str) -> (&str, u64) {
    let digits = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (digits, name[digits.len()..].parse().unwrap_or(0))
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}
