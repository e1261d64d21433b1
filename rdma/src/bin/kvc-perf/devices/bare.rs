//! The devices of a build without the verbs mover: their names alone. [`super`] asks.

use super::{Device, Devices, Path, Rdma, fs};

pub fn look(_: &Devices, root: &Path) -> Rdma {
    let names = fs::read_dir(root.join("sys/class/infiniband")).into_iter().flatten();
    let device = |name: String| Device {
        name,
        pci: None,
        numa: None,
        ports: Vec::new(),
    };
    let why = "this build has no verbs: build it with --features verbs";
    Rdma {
        library: Err(why.into()),
        devices: names
            .flatten()
            .map(|entry| device(entry.file_name().to_string_lossy().into_owned()))
            .collect(),
        chosen: Vec::new(),
        not_chosen: Some(why.into()),
    }
}
