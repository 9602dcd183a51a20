//! The programs in `examples` that are written in C.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::machine;

/// Builds the program in `examples/NAME` with the C library beside this program, in `directory`.
pub(crate) fn build(name: &str, directory: &Path) -> Result<PathBuf> {
    let libraries = machine::program_directory()?;
    ensure!(
        libraries.join("liborrery.so").exists(),
        "there is no liborrery.so in {} (build it with cargo build --release --workspace)",
        libraries.display()
    );
    let root = machine::source_root();
    let mut sources = Vec::new();
    for entry in fs::read_dir(root.join("examples").join(name)).context("cannot look for an example")? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "c") {
            sources.push(path);
        }
    }
    let program = directory.join(name);
    let mut command = Command::new("cc");
    command.args(["-std=c11", "-D_GNU_SOURCE", "-O2", "-I"]).arg(root.join("include")).args(sources);
    command.arg("-o").arg(&program).arg("-L").arg(&libraries).args(["-lorrery", "-pthread"]);
    command.arg(format!("-Wl,-rpath,{}", libraries.display()));
    let output = command.output().context("cannot start cc")?;
    ensure!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
    Ok(program)
}
