//! Which device, port and GID are chosen, on trees of real machines' shape (tests/verbs_trees). Needs no device.

use kvc_rdma::verbs::{Choice, Link, Near, Tree, VerbsError, Wish, choose};

/// A node with two mlx5 RoCE ports of 200 Gb/s, one at each socket, and GPUs beside them.
const TWO_ROCE: &str = include_str!("verbs_trees/two_roce.txt");
/// A node with four InfiniBand HCAs and a RoCE one for storage; mlx5_10 sorts behind mlx5_2.
const INFINIBAND: &str = include_str!("verbs_trees/infiniband.txt");
/// A machine with software RoCE alone.
const SOFTWARE: &str = include_str!("verbs_trees/software.txt");
/// Its cable is out.
const PORT_DOWN: &str = include_str!("verbs_trees/port_down.txt");
/// Its interface has no IPv4 address: link-local GIDs, and RoCEv1 ones.
const NO_GID: &str = include_str!("verbs_trees/no_gid.txt");

fn chosen(tree: &str, wish: &Wish) -> Result<Vec<Choice>, VerbsError> {
    choose(&Tree::parse(tree), wish)
}

fn names(tree: &str, wish: &Wish) -> Vec<String> {
    chosen(tree, wish)
        .unwrap()
        .into_iter()
        .map(|choice| format!("{}:{}/{}", choice.device, choice.port, choice.gid_index))
        .collect()
}

fn named(devices: &[&str]) -> Wish {
    Wish {
        devices: devices.iter().map(|name| name.to_string()).collect(),
        ..Wish::default()
    }
}

#[test]
fn the_routable_gid_of_a_roce_port_is_chosen() {
    let choice = chosen(TWO_ROCE, &Wish::default()).unwrap();
    let [choice] = choice.as_slice() else {
        panic!("{choice:?}")
    };
    assert_eq!(
        (choice.device.as_str(), choice.port, choice.gid_index, choice.link),
        ("mlx5_0", 1, 3, Link::Ethernet)
    );
    assert_eq!(choice.gid.to_ipv4_mapped(), Some([10, 1, 0, 5].into()));
}

#[test]
fn named_devices_come_in_the_order_they_are_named() {
    assert_eq!(
        names(TWO_ROCE, &named(&["mlx5_1", "mlx5_0:1"])),
        ["mlx5_1:1/5", "mlx5_0:1/3"]
    );
}

#[test]
fn the_device_of_the_route_is_preferred() {
    let source = Some([10, 2, 0, 5].into());
    assert_eq!(
        names(
            TWO_ROCE,
            &Wish {
                source,
                ..Wish::default()
            }
        ),
        ["mlx5_1:1/5"]
    );
    let elsewhere = Some([192, 168, 0, 1].into());
    assert_eq!(
        names(
            TWO_ROCE,
            &Wish {
                source: elsewhere,
                ..Wish::default()
            }
        ),
        ["mlx5_0:1/3"]
    );
}

#[test]
fn the_device_close_to_the_memory_or_the_gpu_is_preferred() {
    for (near, expected) in [
        (Near::Numa(0), "mlx5_0:1/3"),
        (Near::Numa(1), "mlx5_1:1/5"),
        (Near::Pci("0000:18:00.0".into()), "mlx5_0:1/3"),
        (Near::Pci("0000:9b:00.0".into()), "mlx5_1:1/5"),
        // One that is not there is close to nothing.
        (Near::Pci("0000:ff:00.0".into()), "mlx5_0:1/3"),
    ] {
        assert_eq!(
            names(
                TWO_ROCE,
                &Wish {
                    near: Some(near.clone()),
                    ..Wish::default()
                }
            ),
            [expected],
            "{near:?}"
        );
    }
}

/// A GPU and an HCA behind one switch are closer than two on one socket.
#[test]
fn shared_bridges_count_within_a_socket() {
    let near = Some(Near::Pci("0000:3b:00.0".into()));
    assert_eq!(
        names(
            INFINIBAND,
            &Wish {
                near,
                ..Wish::default()
            }
        ),
        ["mlx5_2:1/0"]
    );
}

#[test]
fn infiniband_goes_by_its_first_gid_and_its_lid() {
    let choice = chosen(INFINIBAND, &named(&["mlx5_10"])).unwrap();
    assert_eq!(
        (choice[0].link, choice[0].lid, choice[0].gid_index),
        (Link::InfiniBand, 0x2f, 0)
    );
    assert_eq!(
        Tree::parse(INFINIBAND).nics().last().map(|nic| nic.name.clone()),
        Some("mlx5_10".into()),
        "natural order"
    );
}

#[test]
fn the_faster_port_is_preferred_and_software_comes_last() {
    assert_eq!(
        names(INFINIBAND, &Wish::default()),
        ["mlx5_0:1/0"],
        "400 Gb/s before the storage port's 25"
    );
    assert_eq!(names(SOFTWARE, &Wish::default()), ["rxe0:1/1"]);
    let both = format!("{SOFTWARE}{TWO_ROCE}");
    let near = Some(Near::Numa(1));
    assert_eq!(
        names(
            &both,
            &Wish {
                near,
                ..Wish::default()
            }
        ),
        ["mlx5_1:1/5"]
    );
}

#[test]
fn each_refusal_is_one_line_with_its_remedy() {
    let refusal = |tree, wish: &Wish| chosen(tree, wish).unwrap_err();
    for (refused, facts, remedy) in [
        (refusal("", &Wish::default()), "no RDMA device", "rdma link"),
        (
            refusal(TWO_ROCE, &named(&["mlx5_7"])),
            "mlx5_7: there are mlx5_0, mlx5_1",
            "there are",
        ),
        (refusal(TWO_ROCE, &named(&["mlx5_0:2"])), "mlx5_0:2", "there are"),
        (
            refusal(PORT_DOWN, &Wish::default()),
            "port 1 of mlx5_0 is DOWN",
            "bring its link up",
        ),
        (
            refusal(PORT_DOWN, &named(&["mlx5_0"])),
            "port 1 of mlx5_0 is DOWN",
            "bring its link up",
        ),
        (
            refusal(NO_GID, &Wish::default()),
            "no RoCEv2 GID",
            "give its network interface one",
        ),
        (
            refusal(INFINIBAND, &named(&["mlx5_0", "mlx5_1"])),
            "mlx5_1 is Ethernet",
            "name devices of one link type",
        ),
    ] {
        let line = refused.to_string();
        assert!(
            line.contains(facts) && line.contains(remedy) && !line.contains('\n'),
            "{line}"
        );
    }
}

#[test]
fn a_tree_comes_back_as_it_was_recorded() {
    for tree in [TWO_ROCE, INFINIBAND, SOFTWARE, PORT_DOWN, NO_GID].map(Tree::parse) {
        assert_eq!(Tree::parse(&tree.to_string()), tree);
    }
}
