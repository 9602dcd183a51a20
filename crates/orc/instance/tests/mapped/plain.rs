//! Libraries that a plain compiler builds.

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use orrery_orc_instance::{MappedInstance, MappedLibrary};
use tempfile::TempDir;

/// A function of no arguments that returns a number.
pub(crate) type Number = extern "C" fn() -> i32;

/// Where libraries are built that all tests of this process use.
fn directory() -> &'static Path {
    static DIRECTORY: OnceLock<TempDir> = OnceLock::new();
    DIRECTORY.get_or_init(|| tempfile::tempdir().unwrap()).path()
}

/// Builds a library from a file.
pub(crate) fn build(compiler: &str, source: &Path, flags: &[&str], output: &Path) {
    let mut command = Command::new(compiler);
    command.args(["-shared", "-fPIC", "-O1"]).arg(source).args(flags).arg("-o").arg(output);
    let result = command.output().unwrap();
    assert!(result.status.success(), "{command:?}: {}", String::from_utf8_lossy(&result.stderr));
}

/// Returns the path of a library of `tests/libraries`, built with flags.
pub(crate) fn built(source: &str, flags: &[&str]) -> PathBuf {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let output = directory().join(format!("{source}{}.so", flags.concat().replace(['/', ','], "")));
    if !output.exists() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libraries").join(source);
        let compiler = if source.extension().is_some_and(|end| end == "cc") { "c++" } else { "cc" };
        build(compiler, &source, flags, &output);
    }
    output
}

/// Makes an instance of a library of these tests, which use nothing of it once it is dropped.
pub(crate) fn create(library: &MappedLibrary) -> MappedInstance {
    // SAFETY: the tests use nothing of an instance once it has ended.
    unsafe { library.create() }.unwrap()
}

/// Returns a function of an instance, by its type.
///
/// # Safety
/// `F` is the type of a function pointer, and that of the function of this name; it is called as long as the instance is.
pub(crate) unsafe fn function<F: Copy>(instance: &MappedInstance, name: &CStr) -> F {
    let symbol = instance.symbol(name).unwrap();
    assert_eq!(size_of::<F>(), size_of_val(&symbol));
    // SAFETY: both are pointers, and the caller knows the type.
    unsafe { std::mem::transmute_copy(&symbol) }
}

/// Calls a function of no arguments.
pub(crate) fn call(instance: &MappedInstance, name: &CStr) -> i32 {
    // SAFETY: the tests name functions of this type.
    let function: Number = unsafe { function(instance, name) };
    function()
}

/// Returns what `/proc/self/FILE` has of the mappings of a file: of each, the header and the lines that follow it.
pub(crate) fn mappings(file: &str, path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(format!("/proc/self/{file}")).unwrap();
    let (mut found, mut within) = (Vec::<String>::new(), false);
    for line in text.lines() {
        if line.split_whitespace().next().is_some_and(|word| !word.ends_with(':')) {
            within = line.ends_with(path.to_str().unwrap());
            if within {
                found.push(line.to_owned());
            }
        } else if within && let Some(last) = found.last_mut() {
            last.push('\n');
            last.push_str(line);
        }
    }
    found
}
