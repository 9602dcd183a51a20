//! Compiles the executive as a freestanding image: with the compiler that compiles everything else, and its own `core`.

use std::env;
use std::path::PathBuf;
use std::process::{Command, exit};

fn main() {
    let sources = PathBuf::from("../image/src");
    println!("cargo:rerun-if-changed={}", sources.display());
    println!("cargo:rerun-if-env-changed=CC");
    let output = PathBuf::from(env::var("OUT_DIR").unwrap_or_default()).join("executive.so");
    let rustc = env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    // The image must hold nothing that the kernel or a C library would have to provide: no start files, no libraries,
    // no relocations but those that add where it is.
    let mut link = "-nostdlib -nostartfiles -Wl,-Bsymbolic,-z,defs,-z,now,-z,noexecstack,-z,max-page-size=4096,--gc-sections,--build-id=sha1".to_owned();
    // What debuggers read is most of the image, and half a megabyte of each program that has it. Tests read it as it is.
    if env::var("PROFILE").is_ok_and(|profile| profile == "release") {
        link.push_str(",--compress-debug-sections=zlib");
    }
    let status = Command::new(rustc)
        .args(["--edition", "2024", "--crate-name", "orrery_hijack_image", "--crate-type", "cdylib"])
        .args(["--cfg", "feature=\"image\"", "--cap-lints", "warn"])
        .arg("--remap-path-prefix")
        .arg(format!("{}=orrery-hijack-image", sources.display()))
        .args([
            "-C",
            "opt-level=2",
            "-C",
            "panic=abort",
            "-C",
            "relocation-model=pic",
            "-C",
            "codegen-units=1",
        ])
        .args([
            "-C",
            "lto=fat",
            "-C",
            // What debuggers are told of it (`symbols`): the lines and frames of its functions. Programs get none of that.
            "strip=none",
            "-C",
            "debuginfo=line-tables-only",
            "-C",
            "force-unwind-tables=no",
            "-C",
            "overflow-checks=no",
            "-C",
            "force-frame-pointers=yes",
        ])
        .arg("-C")
        .arg(format!("linker={}", env::var("CC").unwrap_or_else(|_| "cc".to_owned())))
        .arg("-C")
        .arg(format!("link-args={link}"))
        .arg("-o")
        .arg(&output)
        .arg(sources.join("lib.rs"))
        .status();
    match status {
        Ok(status) if status.success() => {}
        other => {
            println!("cargo:warning=the executive's image could not be built ({other:?})");
            exit(1);
        }
    }
}
