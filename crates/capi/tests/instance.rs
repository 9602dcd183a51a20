//! `orrery/instance.h`, used by a C program with a library that is built with the pass.

use std::path::Path;
use std::process::Command;

#[test]
fn a_c_program_has_instances() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/instance");
    let of_library = [sources.join("library.c")];
    let build = |name, with_pass| orrery_testing::cls::library(name, &of_library, &["-O1"], with_pass);
    let (Some(library), Some(plain)) = (build("capi-cls", true), build("capi-plain", false)) else { return };
    let libraries = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let directory = tempfile::tempdir().unwrap();
    for (compiler, language) in [("gcc", "c"), ("clang", "c"), ("g++", "c++")] {
        if !orrery_testing::is_there(compiler) {
            continue;
        }
        let program = directory.path().join("program");
        let mut command = Command::new(compiler);
        command.args(["-Wall", "-Wextra", "-Werror", "-g", "-O1", "-pthread", "-x", language]);
        command.arg("-I").arg(sources.join("../../../../include")).arg(sources.join("program.c"));
        command.arg(format!("-Wl,-rpath,{}", libraries.display())).arg("-L").arg(&libraries);
        let output = command.args(["-lorrery", "-o"]).arg(&program).output().unwrap();
        assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
        let run = Command::new("timeout").arg("120").arg(&program).args([&library, &plain]).output().unwrap();
        assert!(run.status.success(), "{compiler}: {}: {}", run.status, String::from_utf8_lossy(&run.stderr));
    }
}
