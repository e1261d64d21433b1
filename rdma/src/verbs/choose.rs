//! Which device, port and GID a mover uses: a pure function over what the machine has and what is wanted.
//! [`super::VerbsMover`] asks it once at start.

use std::{
    cmp::Reverse,
    net::{IpAddr, Ipv6Addr},
};

use super::{
    error::VerbsError,
    nic::{Gid, GidKind, Link, Nic, Port, Tree},
};

/// What is wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// `mlx5_0`, or `mlx5_0:2` for its second port: exactly these, in this order. Empty: the best one is chosen.
    pub devices: Vec<String>,
    /// The address that packets to the peers leave with: a device that has it is preferred.
    pub source: Option<IpAddr>,
    /// What the device should be close to.
    pub near: Option<Near>,
}

/// A place in the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Near {
    /// A node of its memory.
    Numa(u32),
    /// A PCI function, a GPU: `0000:17:00.0`.
    Pci(String),
}

/// What a queue pair is made on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The device.
    pub device: String,
    /// Its port.
    pub port: u8,
    /// The port's link.
    pub link: Link,
    /// The address's place in the port's table.
    pub gid_index: u8,
    /// The address.
    pub gid: Ipv6Addr,
    /// Of InfiniBand, 0 for Ethernet.
    pub lid: u16,
}

/// The devices to use, all of one link type; at least one.
///
/// # Errors
/// [`VerbsError::NoDevice`], [`VerbsError::UnknownDevice`], [`VerbsError::PortDown`], [`VerbsError::NoGid`],
/// [`VerbsError::MixedLinks`].
pub fn choose(tree: &Tree, wish: &Wish) -> Result<Vec<Choice>, VerbsError> {
    let nics = tree.nics();
    if nics.is_empty() {
        return Err(VerbsError::NoDevice);
    }
    if !wish.devices.is_empty() {
        return named(&nics, wish);
    }
    let near = wish.near.as_ref().map(|near| Place::of(near, tree));
    let ports = nics
        .iter()
        .flat_map(|nic| nic.ports.iter().map(move |port| (nic, port)));
    let candidates = ports
        .clone()
        .filter_map(|(nic, port)| Some((nic, port, usable(nic, port, wish.source).ok()?)));
    let best = candidates.min_by_key(|(nic, port, choice)| {
        let routed = wish.source.is_some_and(|source| {
            port.gids
                .iter()
                .any(|gid| gid.index == choice.gid_index && gid.is_of(source))
        });
        // Software devices come last, whatever they claim; of equal ones the first by name, which is their order here.
        (
            nic.pci.is_empty(),
            !routed,
            near.as_ref().map(|near| near.distance(nic)),
            Reverse(port.rate),
        )
    });
    match best {
        Some((_, _, choice)) => Ok(vec![choice]),
        // Why the first one is not usable.
        None => Err(ports
            .into_iter()
            .find_map(|(nic, port)| usable(nic, port, wish.source).err())
            .unwrap_or(VerbsError::NoDevice)),
    }
}

fn named(nics: &[Nic], wish: &Wish) -> Result<Vec<Choice>, VerbsError> {
    let mut choices: Vec<Choice> = Vec::with_capacity(wish.devices.len());
    for wanted in &wish.devices {
        let (name, number) = match wanted.split_once(':') {
            Some((name, number)) => (name, number.parse().ok()),
            None => (wanted.as_str(), Some(1)),
        };
        let nic = nics.iter().find(|nic| nic.name == name);
        let found = nic.and_then(|nic| Some((nic, nic.ports.iter().find(|port| Some(port.number) == number)?)));
        let Some((nic, port)) = found else {
            let found: Vec<&str> = nics.iter().map(|nic| nic.name.as_str()).collect();
            return Err(VerbsError::UnknownDevice {
                device: wanted.clone(),
                found: found.join(", "),
            });
        };
        let choice = usable(nic, port, wish.source)?;
        if let Some(first) = choices.first().filter(|first| first.link != choice.link) {
            return Err(VerbsError::MixedLinks {
                first: first.device.clone(),
                first_link: first.link,
                second: choice.device,
                second_link: choice.link,
            });
        }
        choices.push(choice);
    }
    Ok(choices)
}

fn usable(nic: &Nic, port: &Port, source: Option<IpAddr>) -> Result<Choice, VerbsError> {
    if !port.is_active() {
        return Err(VerbsError::PortDown {
            device: nic.name.clone(),
            port: port.number,
            state: port.state.clone(),
        });
    }
    let gid = match port.link {
        Link::InfiniBand => port.gids.first(),
        Link::Ethernet => routable(&port.gids, source),
    };
    let gid = gid.ok_or(VerbsError::NoGid {
        device: nic.name.clone(),
        port: port.number,
    })?;
    Ok(Choice {
        device: nic.name.clone(),
        port: port.number,
        link: port.link,
        gid_index: gid.index,
        gid: gid.address,
        lid: port.lid,
    })
}

/// RoCEv2 over IPv4; that of the route if it is there.
fn routable(gids: &[Gid], source: Option<IpAddr>) -> Option<&Gid> {
    let routable = |gid: &&Gid| gid.kind == GidKind::RoceV2 && gid.ipv4().is_some();
    let of_route = source.and_then(|source| gids.iter().filter(routable).find(|gid| gid.is_of(source)));
    of_route.or_else(|| gids.iter().find(routable))
}

/// Where something is.
struct Place {
    numa: Option<u32>,
    pci: Vec<String>,
}

impl Place {
    fn of(near: &Near, tree: &Tree) -> Self {
        match near {
            Near::Numa(node) => Place {
                numa: Some(*node),
                pci: Vec::new(),
            },
            Near::Pci(function) => {
                let (pci, numa) = tree.pci(function).unwrap_or_default();
                Place { numa, pci }
            }
        }
    }

    /// Less is closer: another node of memory is worse than any way through bridges of the same, and the more bridges
    /// are shared the shorter the way.
    fn distance(&self, nic: &Nic) -> (bool, Reverse<usize>) {
        let elsewhere = matches!((self.numa, nic.numa), (Some(here), Some(there)) if here != there);
        let shared = self
            .pci
            .iter()
            .zip(&nic.pci)
            .take_while(|(here, there)| here == there)
            .count();
        (elsewhere, Reverse(shared))
    }
}
