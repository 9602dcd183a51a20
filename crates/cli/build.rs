//! Has the linker pack the addresses in the command that depend on where it is loaded, where the C library can unpack them, and take the
//! unwinder into it: one shared library less takes 0.1 ms less of each start.

use std::env;
use std::process::Command;

/// The first version of glibc that can (`DT_RELR`).
const FIRST: (u32, u32) = (2, 36);

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let is = |name: &str, value: &str| env::var(name).is_ok_and(|found| found == value);
    // What is built for another machine will meet another library.
    let native = env::var("HOST").ok() == env::var("TARGET").ok();
    if native && is("PROFILE", "release") && glibc().is_some_and(|version| version >= FIRST) {
        println!("cargo:rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
    println!("cargo:rustc-link-lib=dylib=gcc_eh");
}

/// Returns the version of this machine's C library; `None` if it is not glibc.
fn glibc() -> Option<(u32, u32)> {
    let output = Command::new("getconf").arg("GNU_LIBC_VERSION").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let (major, rest) = text.trim().strip_prefix("glibc ")?.split_once('.')?;
    let minor = rest.split('.').next()?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}
