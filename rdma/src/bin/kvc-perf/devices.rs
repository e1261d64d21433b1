//! `devices`: what the RDMA selection finds on this machine, and what it would take.

/// Prints it.
#[cfg(feature = "verbs")]
pub fn show() {
    use std::path::Path;

    use kvc_rdma::verbs::{Tree, Wish, choose, survey};

    let survey = survey();
    match &survey.verbs {
        Ok(names) => println!("libibverbs opens: {}", list(names)),
        Err(error) => println!("libibverbs: {error}"),
    }
    for nic in &survey.nics {
        let numa = nic.numa.map_or("?".into(), |node| node.to_string());
        let pci = nic.pci.last().map_or("no hardware", String::as_str);
        println!("{} ({pci}, NUMA node {numa})", nic.name);
        for port in &nic.ports {
            println!(
                "  port {}: {:?}, {}, {} Gb/s",
                port.number, port.link, port.state, port.rate
            );
            for gid in &port.gids {
                let interface = gid.interface.as_deref().unwrap_or("-");
                println!("    gid {}: {} {:?} {interface}", gid.index, gid.address, gid.kind);
            }
        }
    }
    match choose(&Tree::read(Path::new("/sys")), &Wish::default()) {
        Ok(choices) => choices.iter().for_each(|choice| {
            println!(
                "taken without --ib-device: {}:{}, gid {}",
                choice.device, choice.port, choice.gid_index
            );
        }),
        Err(error) => println!("taken: none: {error}"),
    }
}

/// Says why nothing is looked for.
#[cfg(not(feature = "verbs"))]
pub fn show() {
    println!("this build has no verbs, so no RDMA device is looked for: build it with --features verbs");
}

#[cfg(feature = "verbs")]
fn list(names: &[String]) -> String {
    if names.is_empty() {
        "nothing".into()
    } else {
        names.join(", ")
    }
}
