//! Libraries of the tests.

#![allow(dead_code, reason = "each test program uses a part")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard};

use orrery_orc_instance::Library;
use orrery_testing::cls::Build;

/// Returns the path of a library of `tests/libraries`, built with the pass; none where that cannot be.
pub(crate) fn built(source: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libraries").join(source);
    let build = Build::of_instances();
    let name = format!("{}{}", source.replace('.', "-"), if build == Build::Gs { "-gs" } else { "" });
    let flags: &[&str] = if source.ends_with("cc") { &["-O2", "-std=c++17"] } else { &["-O2"] };
    orrery_testing::cls::library(&name, &[path], flags, build)
}

/// Returns a function of a library, by its type.
///
/// # Safety
/// `F` is the type of a function pointer, and that of the function of this name.
pub(crate) unsafe fn function<F: Copy>(library: &Library, name: &CStr) -> F {
    let symbol: NonNull<c_void> = library.symbol(name).unwrap();
    assert_eq!(size_of::<F>(), size_of::<NonNull<c_void>>());
    // SAFETY: both are pointers, and the caller knows the type.
    unsafe { std::mem::transmute_copy(&symbol) }
}

/// A function of no arguments that returns a number.
pub(crate) type Number = extern "C" fn() -> i32;

/// Held by tests that look at what all instances share.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Runs each test of this program in a process of its own, with libraries whose accesses are relative to GS: one such library can be
/// in a process at a time. `without` names tests that do not depend on that.
pub(crate) fn repeat_relative_to_gs(without: &[&str], options: &[(&str, &str)]) {
    let program = std::env::current_exe().unwrap();
    let list = Command::new(&program).args(["--list", "--format", "terse"]).output().unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    let tests = list.lines().filter_map(|line| line.strip_suffix(": test"));
    let mut count = 0;
    for test in tests.filter(|test| !without.contains(test)) {
        let mut command = Command::new(&program);
        command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
        command.env(orrery_testing::cls::BASE, "gs").envs(options.iter().copied());
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let good = output.status.success() && text.contains("1 passed");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(good, "{test} {options:?}: {}\n{text}\n{errors}", output.status);
        count += 1;
    }
    assert!(count > 0);
}
