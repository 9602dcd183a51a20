//! What tests of pairs have in common: what they need of the host, and how they run the command.

use std::path::{Path, PathBuf};
use std::process::Command;

use orrery_orthros::{KernelFiles, command};
use serde_json::Value;

pub(crate) const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");

pub(crate) fn cache() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("orthros-cache")
}

/// What is missing to run a pair with these programs.
pub(crate) fn missing(programs: &[(&str, &'static str)]) -> Option<String> {
    let common = [("qemu-system-x86_64", "qemu-system-x86"), ("criu", "criu"), ("busybox", "busybox-static")];
    if !rustix::process::geteuid().is_root() {
        return Some("it takes root".to_owned());
    }
    if !Path::new(ORRERY).with_file_name("orrery-guest").is_file() {
        return Some("orrery-guest is not built; cargo build --workspace does".to_owned());
    }
    for (program, package) in common.iter().chain(programs) {
        if let Err(error) = command::require(program, package) {
            return Some(error.to_string());
        }
    }
    KernelFiles::obtain(&cache()).err().map(|error| format!("no kernel to boot: {error}"))
}

pub(crate) fn orthros() -> Command {
    let mut command = Command::new(ORRERY);
    command.arg("orthros").env("ORRERY_CACHE", cache());
    command
}

/// The events among the lines that a command has printed.
pub(crate) fn events(output: &[u8]) -> Vec<Value> {
    output.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}
