//! Builds the auditor: a shared object without a C library, which the store carries along.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

const SOURCES: [&str; 13] = [
    "auditor",
    "environment",
    "files",
    "libraries",
    "line",
    "names",
    "origin",
    "place",
    "prepared",
    "relocated",
    "segments",
    "start",
    "static_tls",
];

fn main() {
    println!("cargo::rerun-if-changed=c");
    println!("cargo::rerun-if-env-changed=CC");
    println!("cargo::rerun-if-env-changed=ORRERY_SANITIZE");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default()).join("liborrery-orc.so");
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(&compiler);
    command.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-shared"]);
    // Nothing may be called that is not in it.
    command.args(["-nostdlib", "-ffreestanding", "-fno-builtin", "-fno-stack-protector"]);
    command.args(["-fvisibility=hidden", "-U_FORTIFY_SOURCE"]);
    // Few segments: each is a mapping to be made when a program starts.
    command.args(["-Wl,-z,defs,-z,now,-z,norelro,-z,noseparate-code,--hash-style=gnu,--build-id=none"]);
    command.arg("-Wl,-soname,liborrery-orc.so");
    // There is no room for a sanitizer's library: undefined behavior is an illegal instruction (`scripts/sanitize`).
    if std::env::var("ORRERY_SANITIZE").is_ok_and(|names| names.contains("undefined")) {
        command.args(["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]);
    }
    command.args(SOURCES.map(|name| format!("c/{name}.c"))).arg("-o").arg(&out);
    let built = command.status();
    assert!(
        matches!(&built, Ok(status) if status.success()),
        "building the auditor with {}: {built:?}; `make bootstrap` installs a C compiler",
        compiler.display()
    );
    build_stub(&compiler);
}

/// Builds what 32-bit programs find; an empty file where the compiler makes no 32-bit code, as for other processors.
fn build_stub(compiler: &OsStr) {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default()).join("stub.so");
    let mut command = Command::new(compiler);
    command.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-shared", "-m32"]);
    command.args(["-nostdlib", "-ffreestanding", "-fno-stack-protector", "-fcf-protection=none"]);
    command.args(["-Wl,--build-id=none,-s", "c/stub.c", "-o"]).arg(&out).stderr(Stdio::null());
    let is_x86_64 = std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|name| name == "x86_64");
    if !is_x86_64 || !command.status().is_ok_and(|status| status.success()) {
        let _ = std::fs::write(&out, []);
    }
}
