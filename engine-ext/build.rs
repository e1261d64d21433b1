//! Compiles the peer protocol without a `protoc` binary: protox parses it in Rust, so that a machine with Cargo alone
//! builds the module.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/peer.proto");
    let files = protox::compile(["proto/peer.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
