//! `devices`: what the RDMA selection finds on this machine.

/// Prints it.
pub fn show() {
    println!(
        "this build has no verbs, so no RDMA device is looked for: build it with --features verbs on a machine with libibverbs"
    );
}
