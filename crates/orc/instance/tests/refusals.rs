//! What cannot have instances is refused, with a reason.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use orrery_orc_instance::{Error, Library};

fn compile(driver: &Path, text: &str, name: &str, flags: &[&str], directory: &Path) -> PathBuf {
    let (source, output) = (directory.join(format!("{name}.c")), directory.join(format!("{name}.so")));
    std::fs::write(&source, text).unwrap();
    let mut command = Command::new(driver);
    command.args(["-shared", "-fPIC", "-O1"]).arg(&source).args(flags).arg("-o").arg(&output);
    let result = command.output().unwrap();
    assert!(result.status.success(), "{command:?}: {}", String::from_utf8_lossy(&result.stderr));
    output
}

fn refusal(path: &Path) -> Error {
    Library::load(path).map(drop).unwrap_err()
}

#[test]
fn what_is_no_such_library_is_refused() {
    let Some(pass) = orrery_testing::cls::pass() else { return };
    let directory = tempfile::tempdir().unwrap();
    let (here, driver) = (directory.path(), pass.join("bin/orrery-cc"));
    let text = "int state = 1; int *get(void) { return &state; }";

    assert!(matches!(refusal(&here.join("absent.so")), Error::Open { .. }));
    let no_elf = here.join("text.so");
    std::fs::write(&no_elf, "no library").unwrap();
    assert!(matches!(refusal(&no_elf), Error::Elf { .. }));
    assert!(matches!(
        refusal(&std::env::current_exe().unwrap()),
        Error::NotBuilt { .. } | Error::Mixed { .. }
    ));

    let plain = compile(Path::new("clang"), text, "plain", &[], here);
    let error = refusal(&plain);
    assert!(matches!(error, Error::NotBuilt { .. }));
    let way_out = "it was not built for instances; build it with orrery-cc, or load it as a mapped library";
    assert!(error.to_string().ends_with(way_out), "{error}");

    let plain_unit = here.join("unit.o");
    let unit = here.join("unit.c");
    std::fs::write(&unit, "long more[20] = {1}; long *get_more(void) { return more; }").unwrap();
    let built =
        Command::new("clang").args(["-c", "-fPIC"]).arg(&unit).arg("-o").arg(&plain_unit).status().unwrap();
    assert!(built.success());
    let mixed = compile(&driver, text, "mixed", &[plain_unit.to_str().unwrap()], here);
    let error = refusal(&mixed);
    // The array is aligned after what the compiler's start files have there.
    assert!(
        matches!(&error, Error::Mixed { section, bytes: 160..=200, .. } if section == ".data"),
        "{error}"
    );

    let stack = compile(&driver, text, "stack", &["-Wl,-z,execstack"], here);
    assert!(matches!(refusal(&stack), Error::ExecutableStack { .. }));

    let assembly = here.join("text.s");
    std::fs::write(
        &assembly,
        ".globl f\nf: movabs $get, %rax\nret\n.section .note.GNU-stack,\"\",@progbits\n",
    )
    .unwrap();
    let relocated = compile(&driver, text, "relocated", &["-Wl,-z,notext", assembly.to_str().unwrap()], here);
    assert!(matches!(refusal(&relocated), Error::TextRelocations { .. }), "{}", refusal(&relocated));

    let broken =
        compile(&driver, "int nowhere(void); int get(void) { return nowhere(); }", "broken", &[], here);
    let error = refusal(&broken);
    assert!(matches!(&error, Error::Load { cause, .. } if cause.contains("nowhere")), "{error}");

    // What fails leaves nothing: the library that is right loads, twice as one.
    let good = compile(&driver, text, "good", &[], here);
    let (one, two) = (Library::load(&good).unwrap(), Library::load(&good).unwrap());
    assert_eq!(one.symbol(c"get").unwrap(), two.symbol(c"get").unwrap());
}

#[test]
fn truncated_files_are_refused() {
    let Some(path) = common::built("state.c") else { return };
    let bytes = std::fs::read(path).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let cut = directory.path().join("cut.so");
    for part in [0, 1, 16, 63, 64, 200, 1000, bytes.len() / 2, bytes.len() - 100] {
        std::fs::write(&cut, &bytes[..part]).unwrap();
        let error = refusal(&cut);
        assert!(
            matches!(error, Error::Elf { .. } | Error::NotBuilt { .. } | Error::Mixed { .. }),
            "{part}: {error}"
        );
    }
}

const LACKS_ADDRESSES: &str = "ORRERY_TEST_LACKS_ADDRESSES";

/// Lets this process have so many more bytes of address space.
fn limit_addresses(more: u64) {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    let limit = pages * 4096 + more;
    let limit = libc::rlimit { rlim_cur: limit, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the kernel reads one `rlimit`, which outlives the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
}

/// What the next test runs in a process of its own.
#[test]
fn lacks_addresses() {
    if std::env::var_os(LACKS_ADDRESSES).is_none() {
        return;
    }
    let Some(path) = common::built("state.c") else { return };
    limit_addresses(30 << 20);
    let error = refusal(&path);
    assert!(matches!(error, Error::AddressSpace { .. }), "{error}");
    assert!(error.to_string().ends_with("; raise RLIMIT_AS"), "{error}");
    // So much that the smallest region fits, but no larger one.
    limit_addresses(160 << 20);
    let library = Library::load(&path).unwrap();
    // SAFETY: the function has this type in the library's source.
    let next: common::Number = unsafe { common::function(&library, c"next") };
    let mut instances = Vec::new();
    let error = loop {
        match library.create() {
            Ok(mut instance) => {
                assert_eq!(instance.enter().unwrap().run(|| next()), 2);
                instances.push(instance);
            }
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::AddressSpace { .. }), "{error}");
    assert!(instances.len() > 1000, "{}", instances.len());
    for instance in &mut instances {
        assert_eq!(instance.enter().unwrap().run(|| next()), 3);
    }
    instances.pop().unwrap().destroy().unwrap();
    assert_eq!(library.create().unwrap().enter().unwrap().run(|| next()), 2);
    println!("LACKED");
}

#[test]
fn where_address_space_ends_instances_go_on() {
    if common::built("state.c").is_none() {
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "lacks_addresses", "--nocapture", "--test-threads=1"]).env(LACKS_ADDRESSES, "1");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("LACKED"), "{text}");
}

#[test]
fn a_library_that_was_used_before_is_refused() {
    let Some(pass) = orrery_testing::cls::pass() else { return };
    let directory = tempfile::tempdir().unwrap();
    let text = "int state = 1; int next(void) { return state++; }";
    let path = compile(&pass.join("bin/orrery-cc"), text, "used", &[], directory.path());
    let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the name is a C string, and the library that is loaded has no constructors.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null());
    assert!(matches!(refusal(&path), Error::Loaded { .. }));
    // SAFETY: the handle is that of the library just opened, and is closed once.
    unsafe { libc::dlclose(handle) };
    Library::load(&path).unwrap();
}
