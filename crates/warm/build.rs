//! Compiles the few lines of C that need CPython's internal headers: see `runtime.c`.

use std::env;
use std::process::Command;

const SOURCE: &str = "src/bin/orrery-warm-python/runtime.c";

fn main() {
    println!("cargo:rerun-if-changed={SOURCE}");
    println!("cargo:rerun-if-env-changed=PYO3_PYTHON");
    let python = env::var("PYO3_PYTHON").unwrap_or_else(|_| "/usr/bin/python3".to_owned());
    let mut build = cc::Build::new();
    build
        .file(SOURCE)
        .warnings_into_errors(true)
        .extra_warnings(true)
        .flag_if_supported("-Wno-unused-parameter");
    for key in ["include", "platinclude"] {
        let include = include_directory(&python, key);
        build.include(format!("{include}/internal")).include(include);
    }
    // Bound to the one program that links libpython, and to nothing else that uses this library.
    build.cargo_metadata(false).compile("orrery_warm_runtime");
    let directory = env::var("OUT_DIR").unwrap_or_default();
    println!("cargo:rustc-link-arg-bin=orrery-warm-python={directory}/liborrery_warm_runtime.a");
}

fn include_directory(python: &str, key: &str) -> String {
    let program = format!("import sysconfig; print(sysconfig.get_path({key:?}))");
    let output = Command::new(python).args(["-c", &program]).output();
    match output {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        other => {
            println!(
                "cargo:warning={python} does not tell where its headers are ({other:?}): install python3-dev"
            );
            std::process::exit(1);
        }
    }
}
