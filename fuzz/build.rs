//! Compiles the C code that a target calls. Undefined behavior is an illegal instruction.

fn main() {
    println!("cargo::rerun-if-changed=c");
    println!("cargo::rerun-if-changed=../crates/orc/auditor/c");
    let mut build = cc::Build::new();
    build.file("c/library.c").file("../crates/orc/auditor/c/names.c").flag("-std=gnu11").flag("-Wno-unused");
    build.flag("-fsanitize=undefined").flag("-fsanitize-undefined-trap-on-error");
    build.compile("fuzz_library");
}
