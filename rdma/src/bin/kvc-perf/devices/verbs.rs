//! The devices as the verbs mover would see them, and what it would take. [`super`] asks.

use std::net::SocketAddr;

use kvc_rdma::verbs::{Choice, Gid, Nic, Survey, Tree, Wish, choose, source_towards, survey};

use super::{Device, Devices, Path, Port, Rdma, fs};

pub fn look(asked: &Devices, root: &Path) -> Rdma {
    let towards = |ip| source_towards(SocketAddr::new(ip, 9)).ok();
    let wish = Wish {
        devices: asked.ib_device.clone(),
        source: asked.to.and_then(towards),
        ..Wish::default()
    };
    judge(&Tree::read(&root.join("sys")), &wish, survey(), |interface| {
        let mtu = fs::read_to_string(root.join("sys/class/net").join(interface).join("mtu"));
        mtu.ok()?.trim().parse().ok()
    })
}

/// As the mover does at its start: the library first, then what the tree offers, then whether it opens.
pub fn judge(tree: &Tree, wish: &Wish, survey: Survey, mtu: impl Fn(&str) -> Option<u64>) -> Rdma {
    let library = survey.verbs.map_err(|error| error.to_string());
    let chosen = choose(tree, wish).map_err(|error| error.to_string());
    let opens = |choice: &Choice| match &library {
        Ok(names) if !names.contains(&choice.device) => Err(format!(
            "libibverbs does not open {}: in a container pass /dev/infiniband in, else install its provider \
             (ibverbs-providers)",
            choice.device
        )),
        _ => Ok(()),
    };
    let taken = library.clone().and(chosen).and_then(|choices| {
        choices.iter().try_for_each(opens)?;
        Ok(choices.iter().map(name).collect())
    });
    let device = |nic: &Nic| Device {
        name: nic.name.clone(),
        pci: nic.pci.last().cloned(),
        numa: nic.numa,
        ports: nic.ports.iter().map(|each| port(tree, wish, nic, each, &mtu)).collect(),
    };
    Rdma {
        devices: tree.nics().iter().map(device).collect(),
        library,
        not_chosen: taken.clone().err(),
        chosen: taken.unwrap_or_default(),
    }
}

/// Of a port by itself.
fn port(tree: &Tree, wish: &Wish, nic: &Nic, port: &kvc_rdma::verbs::Port, mtu: &impl Fn(&str) -> Option<u64>) -> Port {
    let alone = Wish {
        devices: vec![format!("{}:{}", nic.name, port.number)],
        ..wish.clone()
    };
    let choice = choose(tree, &alone).map(|choices| choices.into_iter().next());
    let choice = choice.map_err(|error| error.to_string());
    let choice = choice.and_then(|choice| choice.ok_or(String::new()));
    let taken = choice.as_ref().ok().map(|choice| choice.gid_index);
    let gid = port.gids.iter().find(|gid| Some(gid.index) == taken);
    Port {
        number: port.number,
        link: port.link.to_string(),
        state: port.state.clone(),
        gb_s: port.rate,
        mtu: gid.and_then(|gid| mtu(gid.interface.as_deref()?)),
        usable: choice.map(|choice| format!("gid {}", choice.gid_index)),
        addresses: port.gids.iter().map(address).collect(),
    }
}

fn address(gid: &Gid) -> String {
    let on = gid
        .interface
        .as_deref()
        .map_or(String::new(), |name| format!(" on {name}"));
    let at = gid.ipv4().map_or(gid.address.to_string(), |ip| ip.to_string());
    format!("gid {}: {at}, {:?}{on}", gid.index, gid.kind)
}

fn name(choice: &Choice) -> String {
    format!("{}:{}, gid {}", choice.device, choice.port, choice.gid_index)
}

#[cfg(test)]
mod tests {
    use kvc_rdma::verbs::{Survey, Tree, VerbsError, Wish};

    use super::{
        super::{Found, LargePages},
        judge,
    };

    const TREE: &str = "\
class/infiniband/mlx5_0 -> ../../devices/pci0000:16/0000:16:01.0/0000:17:00.0/infiniband/mlx5_0
class/infiniband/mlx5_0/device/numa_node: 0
class/infiniband/mlx5_0/ports/1/state: 4: ACTIVE
class/infiniband/mlx5_0/ports/1/link_layer: Ethernet
class/infiniband/mlx5_0/ports/1/rate: 200 Gb/sec (4X HDR)
class/infiniband/mlx5_0/ports/1/lid: 0x0
class/infiniband/mlx5_0/ports/1/gids/3: 0000:0000:0000:0000:0000:ffff:0a00:0001
class/infiniband/mlx5_0/ports/1/gid_attrs/types/3: RoCE v2
class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/3: eth2
class/infiniband/mlx5_1 -> ../../devices/pci0000:16/0000:16:02.0/0000:18:00.0/infiniband/mlx5_1
class/infiniband/mlx5_1/ports/1/state: 1: DOWN
class/infiniband/mlx5_1/ports/1/link_layer: Ethernet
class/infiniband/mlx5_1/ports/1/rate: 200 Gb/sec (4X HDR)
";

    fn text(verbs: Result<Vec<String>, VerbsError>, wish: &Wish) -> String {
        let tree = Tree::parse(TREE);
        let survey = Survey {
            nics: tree.nics(),
            verbs,
        };
        let rdma = judge(&tree, wish, survey, |interface| (interface == "eth2").then_some(1500));
        let found = Found {
            built: true,
            library: rdma.library,
            modules: vec!["ib_uverbs", "mlx5_ib"],
            files: Vec::new(),
            locked_memory: Some(8 << 20),
            devices: rdma.devices,
            chosen: rdma.chosen,
            not_chosen: rdma.not_chosen,
            large_pages: LargePages {
                shmem_enabled: "never".into(),
                nr_hugepages: 0,
            },
            movers: Vec::new(),
        };
        found.lines().join("\n")
    }

    #[test]
    fn what_is_taken_and_why_the_others_are_not() {
        let both = || Ok(vec!["mlx5_0".into(), "mlx5_1".into()]);
        let found = text(both(), &Wish::default());
        for line in [
            "taken          mlx5_0:1, gid 3",
            "device         mlx5_0 (0000:17:00.0, NUMA node 0)",
            "port 1: Ethernet, ACTIVE, 200 Gb/s: usable, gid 3",
            "gid 3: 10.0.0.1, RoceV2 on eth2",
            "MTU 1500: with 4200 or more",
            "port 1: Ethernet, DOWN, 200 Gb/s: not usable: port 1 of mlx5_1 is DOWN: bring its link up",
            "locked memory  8 MiB",
            "pass /dev/infiniband in",
        ] {
            assert!(found.contains(line), "{line}\n{found}");
        }
        let named = Wish {
            devices: vec!["mlx5_1".into()],
            ..Wish::default()
        };
        assert!(text(both(), &named).contains("taken          none: port 1 of mlx5_1 is DOWN"));
    }

    /// The bottom of what is missing is what is told.
    #[test]
    fn a_missing_library_or_an_unopened_device_is_why_nothing_is_taken() {
        let found = text(Err(VerbsError::NoLibrary), &Wish::default());
        assert!(
            found.contains("taken          none: libibverbs.so.1 cannot be loaded"),
            "{found}"
        );
        assert!(found.contains("usable, gid 3"), "{found}");
        let found = text(Ok(Vec::new()), &Wish::default());
        assert!(
            found.contains("taken          none: libibverbs does not open mlx5_0"),
            "{found}"
        );
    }
}
