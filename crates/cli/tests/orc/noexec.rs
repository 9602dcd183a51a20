//! Stores whose directory is where no code can be run from, as `/run` does on many machines.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::Stdio;

use orrery_testing::Killed;
use tempfile::TempDir;

use crate::guest::variables;
use crate::unmodified::{code, run};
use crate::{Store, eventually};

/// A file system of the test's own, mounted `noexec`.
pub(crate) struct Mount(TempDir);

impl Mount {
    fn new() -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let path = CString::new(directory.path().as_os_str().as_bytes()).unwrap();
        let (kind, options) = (c"tmpfs".as_ptr(), c"mode=755,size=64m".as_ptr());
        // SAFETY: C strings that live until the call is done.
        let mounted = unsafe { libc::mount(kind, path.as_ptr(), kind, libc::MS_NOEXEC, options.cast()) } == 0;
        if !mounted {
            orrery_testing::skipped!("no file system can be mounted: {}", std::io::Error::last_os_error());
        }
        mounted.then_some(Self(directory))
    }
}

impl Mount {
    /// The same files as in `directory`, by a mount from which no code may be run.
    pub(crate) fn again(directory: &Path) -> Option<Self> {
        let at = tempfile::tempdir().unwrap();
        let [from, to] =
            [directory, at.path()].map(|path| CString::new(path.as_os_str().as_bytes()).unwrap());
        let none = std::ptr::null();
        let flags = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_NOEXEC;
        // SAFETY: C strings that live until the calls are done.
        let mounted =
            unsafe { libc::mount(from.as_ptr(), to.as_ptr(), none, libc::MS_BIND, none.cast()) } == 0;
        if !mounted {
            orrery_testing::skipped!("nothing can be mounted: {}", std::io::Error::last_os_error());
            return None;
        }
        let mount = Self(at);
        // SAFETY: the path is a C string that lives until the call is done.
        assert_eq!(unsafe { libc::mount(none, to.as_ptr(), none, flags, none.cast()) }, 0);
        Some(mount)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let path = CString::new(self.0.path().as_os_str().as_bytes()).unwrap();
        // SAFETY: a C string; what is still in use goes when it is done with.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    }
}

fn start(mount: &Mount, state: &Path) -> Store {
    let directory = tempfile::tempdir_in(mount.0.path()).unwrap();
    std::fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let supervisor = crate::command(directory.path(), &[]).env("STATE_DIRECTORY", state).spawn().unwrap();
    let store = Store { directory, supervisor };
    let _ = store.client();
    store
}

#[test]
fn programs_share_by_an_auditor_that_lies_elsewhere() {
    let Some(mount) = Mount::new() else { return };
    let state = tempfile::tempdir().unwrap();
    std::fs::set_permissions(state.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let store = start(&mount, state.path());
    let auditor = variables(&store, &[]).into_iter().find(|(name, _)| name == "LD_AUDIT").unwrap().1;
    assert_eq!(Path::new(&auditor), state.path().join("auditor/$LIB/liborrery-orc.so"));
    let hello = run(&store, &["/bin/echo", "hello"]).output().unwrap();
    assert_eq!(hello.stdout, b"hello\n");
    let said = String::from_utf8_lossy(&hello.stderr);
    assert!(!said.contains("LD_AUDIT") && !said.contains("cannot be loaded"), "{said}");
    let child = run(&store, &["/bin/sleep", "1000"]).stderr(Stdio::null()).spawn().unwrap();
    let sleeper = Killed(child);
    eventually("the exchange", || code(sleeper.0.id(), "sleep").is_some_and(|(_, object)| object));
    drop(store);
    let auditor = auditor.replace("$LIB", "lib64");
    // A store that comes after it finds what this one has left, and uses it.
    let before = std::fs::metadata(&auditor).unwrap().modified().unwrap();
    let store = start(&mount, state.path());
    assert_eq!(run(&store, &["/bin/echo", "again"]).output().unwrap().stdout, b"again\n");
    assert_eq!(std::fs::metadata(&auditor).unwrap().modified().unwrap(), before);
}

#[test]
fn an_auditor_that_cannot_run_is_told_before_programs_fail_to_load_it() {
    let Some(mount) = Mount::new() else { return };
    let state = tempfile::tempdir().unwrap();
    let store = start(&mount, state.path());
    let link = store.path().join("liborrery-orc.so");
    std::fs::remove_file(&link).unwrap();
    std::fs::copy(state.path().join("auditor/liborrery-orc.so"), &link).unwrap();
    let refused = run(&store, &["/bin/echo", "hello"]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("noexec"), "{said}");
    // Nor is one installed where it could not run.
    let other = mount.0.path().join("other");
    let error =
        orrery_orc_auditor::install(mount.0.path(), std::slice::from_ref(&other)).unwrap_err().to_string();
    let home = other.join("auditor").display().to_string();
    assert!(error.contains(&format!("nor from {home}")) && error.contains("noexec"), "{error}");
    assert!(!mount.0.path().join("liborrery-orc.so").exists());
}
