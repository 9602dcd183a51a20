//! What cannot be mapped several times is refused, with a reason; nothing is left of it.

use std::path::{Path, PathBuf};
use std::process::Command;

use orrery_orc_instance::{Error, MappedLibrary};

use crate::plain::{build, built, call, create, mappings};

fn compile(text: &str, name: &str, flags: &[&str], directory: &Path) -> PathBuf {
    let (source, output) = (directory.join(format!("{name}.c")), directory.join(format!("{name}.so")));
    std::fs::write(&source, text).unwrap();
    build("cc", &source, flags, &output);
    output
}

fn build_program(source: &Path, output: &Path) {
    let built =
        Command::new("cc").args(["-fPIE", "-pie"]).arg(source).arg("-o").arg(output).status().unwrap();
    assert!(built.success());
}

/// Returns the error, after which nothing of the file is mapped.
fn refusal(path: &Path) -> Error {
    let error = MappedLibrary::load(path).map(drop).unwrap_err();
    assert_eq!(mappings("maps", path), Vec::<String>::new(), "{error}");
    error
}

const TEXT: &str = "int state = 1; int *get(void) { return &state; }";

#[test]
fn what_cannot_be_mapped_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    assert!(matches!(refusal(&here.join("absent.so")), Error::Open { .. }));
    assert!(matches!(refusal(here), Error::Open { .. }));
    let no_elf = here.join("text.so");
    std::fs::write(&no_elf, "no library").unwrap();
    assert!(matches!(refusal(&no_elf), Error::Elf { .. }));
    // A position-independent program is a shared object, too.
    let program = here.join("program");
    let source = here.join("program.c");
    std::fs::write(&source, "int main(void) { return 0; }").unwrap();
    build_program(&source, &program);
    let error = refusal(&program);
    assert!(matches!(error, Error::Elf { .. }) && error.to_string().ends_with("it is a program"), "{error}");

    let stack = compile(TEXT, "stack", &["-Wl,-z,execstack"], here);
    assert!(matches!(refusal(&stack), Error::ExecutableStack { .. }));

    let assembly = here.join("text.s");
    std::fs::write(
        &assembly,
        ".globl f\nf: movabs $get, %rax\nret\n.section .note.GNU-stack,\"\",@progbits\n",
    )
    .unwrap();
    let relocated = compile(TEXT, "relocated", &["-Wl,-z,notext", assembly.to_str().unwrap()], here);
    assert!(matches!(refusal(&relocated), Error::TextRelocations { .. }));

    let text = "__thread int state; int *get(void) { return &state; }";
    let fixed = compile(text, "fixed", &["-ftls-model=initial-exec"], here);
    let error = refusal(&fixed);
    assert!(matches!(error, Error::InitialExec { .. }), "{error}");
    assert!(error.to_string().ends_with("; build it without -ftls-model"), "{error}");

    let lacking = compile("int nowhere(void); int get(void) { return nowhere(); }", "lacking", &[], here);
    let error = refusal(&lacking);
    assert!(matches!(&error, Error::Import { symbol, .. } if symbol == "nowhere"), "{error}");

    // What it needs has gone since it was linked.
    let other = compile("int other(void) { return 7; }", "libother", &["-Wl,-soname,libother.so"], here);
    let text = "int other(void); int get(void) { return other(); }";
    let needs = compile(text, "needs", &["-L", here.to_str().unwrap(), "-lother"], here);
    let error = refusal(&needs);
    assert!(matches!(&error, Error::Load { cause, .. } if cause.contains("libother.so")), "{error}");

    // Where it says itself where that is, it is found.
    let flags = ["-L", here.to_str().unwrap(), "-lother", "-Wl,-rpath,$ORIGIN"];
    let library = MappedLibrary::load(compile(text, "finds", &flags, here)).unwrap();
    assert_eq!(call(&create(&library), c"get"), 7);
    drop(library);
    std::fs::remove_file(other).unwrap();
}

/// A symbol that may be missing is null; one of which another version is there is an error.
#[test]
fn imports_have_versions() {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    let text = "extern int nowhere(void) __attribute__((weak)); int get(void) { return nowhere ? 1 : 2; }";
    let library = MappedLibrary::load(compile(text, "weak", &[], here)).unwrap();
    assert_eq!(call(&create(&library), c"get"), 2);

    let script = here.join("versions");
    std::fs::write(&script, "ONE { global: *; };\nTWO { } ONE;\n").unwrap();
    let script = format!("-Wl,--version-script,{}", script.display());
    let text = "int one(void) { return 1; } int two(void) { return 2; }
        __asm__(\".symver one,number@ONE\"); __asm__(\".symver two,number@@TWO\");";
    let both = compile(text, "libboth", &[&script, "-Wl,-soname,libboth.so"], here);
    let link = ["-L", here.to_str().unwrap(), "-lboth", "-Wl,-rpath,$ORIGIN"];
    let text = "int number(void); __asm__(\".symver number,number@ONE\"); int get(void) { return number(); }";
    let old = compile(text, "old", &link, here);
    let new = compile("int number(void); int get(void) { return number(); }", "new", &link, here);
    let get = |path: &Path| call(&create(&MappedLibrary::load(path).unwrap()), c"get");
    assert_eq!((get(&old), get(&new)), (1, 2));

    let without = here.join("later");
    std::fs::write(&without, "ONE { global: *; };\n").unwrap();
    let script = format!("-Wl,--version-script,{}", without.display());
    std::fs::remove_file(both).unwrap();
    compile("int number(void) { return 1; }", "libboth", &[&script, "-Wl,-soname,libboth.so"], here);
    let error = refusal(&new);
    assert!(matches!(&error, Error::Import { symbol, .. } if symbol == "number@TWO"), "{error}");
}

#[test]
fn malformed_files_are_refused() {
    let whole = std::fs::read(built("mapped.c", &[])).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("changed.so");
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        refusal(&path).to_string()
    };
    for part in [0, 1, 16, 63, 64, 200, 1000, whole.len() / 4] {
        refused(&whole[..part]);
    }
    let changed = |at: usize, byte: u8| {
        let mut bytes = whole.clone();
        bytes[at] = byte;
        refused(&bytes)
    };
    // e_machine, EI_CLASS, EI_DATA, e_type.
    assert!(changed(18, 183).ends_with("it is for another machine"), "{}", changed(18, 183));
    changed(4, 1);
    changed(5, 2);
    assert!(changed(16, 2).ends_with("it is no shared object"));
    // The headers of segments, by their types: PT_DYNAMIC is 2.
    let header = |kind: u32| {
        let at = |number: usize| 64 + 56 * number;
        let count = usize::from(whole[56]);
        let find = |number: &usize| whole[at(*number)..][..4] == kind.to_le_bytes();
        at((0..count).find(find).unwrap())
    };
    assert!(changed(header(2), 4).ends_with("it has no dynamic section"));
    let first = header(1);
    // PF_W of a segment with code is wrong, as are an offset and a size of their own.
    assert!(changed(first + 4, 7).contains("writable and executable"));
    assert!(changed(first + 8, 8).contains("not aligned"));
    assert!(changed(first + 16 + 4, 1).contains("order"));
    assert!(changed(first + 32 + 5, 1).contains("ends before its segments do"));
}
