//! Generates the messages of CRIU's image format from `proto/`. protox compiles the files, so that no protoc is needed.

const FILES: [&str; 7] = [
    "tree.proto",
    "process.proto",
    "memory.proto",
    "owner.proto",
    "files.proto",
    "sockets.proto",
    "terminals.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    prost_build::Config::new().compile_fds(descriptors)?;
    Ok(())
}
