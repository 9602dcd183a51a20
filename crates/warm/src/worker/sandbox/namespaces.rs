//! Namespaces of the worker's own: processes, mounts, IPC and, unless it is wanted, no network.
//!
//! A process cannot enter a new process id namespace itself, only its children can; and the first of them, process 1
//! there, cannot be killed from within and takes all others along when it ends. So three processes stand in a row:
//!
//! ```text
//! master
//! └── outer    waits for init, then ends as the worker ended, so that the master sees a true wait status
//!     └── init    process 1 of the namespace: reaps, passes the worker's wait status out through a pipe
//!         └── worker    process 2: runs scripts
//! ```
//!
//! Each dies with its parent (`PR_SET_PDEATHSIG`).

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use orrery_sys::{mounts, namespaces};
use rustix::process::{Signal, WaitOptions};

use super::error::{Protections, SandboxError, io_error};
use crate::config::Sandbox;

/// Puts this process into namespaces of its own, as far as that is permitted. Returns in the process that is to be
/// the worker, which may be a grandchild of the calling one; the others never return.
///
/// Call it while the process has one thread.
///
/// # Errors
/// See [`SandboxError`].
pub fn enter_namespaces(sandbox: &Sandbox) -> Result<Protections, SandboxError> {
    // For tests of what the other protections do alone.
    let forbidden = std::env::var_os("ORRERY_NAMESPACES").is_some_and(|value| value == "off");
    if forbidden || !unshare(sandbox)? {
        eprintln!("orrery: warm: namespaces are not permitted; the sandbox works without them");
        return Ok(Protections::default());
    }
    let (reader, writer) = io::pipe().map_err(io_error("pipe"))?;
    // SAFETY: the process has one thread, so the child may do whatever the parent may.
    match unsafe { libc::fork() } {
        -1 => return Err(io_error("fork")(io::Error::last_os_error())),
        0 => drop(reader),
        init => {
            drop(writer);
            be_outer(init, reader);
        }
    }
    die_with_parent().map_err(io_error("PR_SET_PDEATHSIG"))?;
    let protections = Protections { namespaces: rearrange_mounts(sandbox)? };
    // SAFETY: the process has one thread, so the child may do whatever the parent may.
    match unsafe { libc::fork() } {
        -1 => Err(io_error("fork")(io::Error::last_os_error())),
        0 => {
            drop(writer);
            die_with_parent().map_err(io_error("PR_SET_PDEATHSIG"))?;
            rustix::process::setsid().map_err(io_error("setsid"))?;
            Ok(protections)
        }
        worker => be_init(worker, writer.into()),
    }
}

fn die_with_parent() -> rustix::io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
}

/// Returns whether new namespaces could be made.
fn unshare(sandbox: &Sandbox) -> Result<bool, SandboxError> {
    let mut flags = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC;
    if !sandbox.net {
        flags |= libc::CLONE_NEWNET;
    }
    match namespaces::unshare(flags) {
        Ok(None) => Ok(true),
        Ok(Some(unmapped)) => {
            unmapped.map().map_err(|error| io_error(error.operation)(error.errno))?;
            Ok(true)
        }
        Err(_) => Ok(false),
    }
}

/// Waits for init's report and ends like the worker; without a report, like init.
fn be_outer(init: libc::pid_t, mut report: io::PipeReader) -> ! {
    rename(c"orrery-outer");
    let mut bytes = [0; 4];
    let mut status = libc::SIGKILL;
    if report.read_exact(&mut bytes).is_ok() {
        status = i32::from_ne_bytes(bytes);
    } else {
        // Init could not set things up, which it says itself, or was killed.
        // SAFETY: the pointer is to a live local.
        while unsafe { libc::waitpid(init, &raw mut status, 0) } == -1
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
    }
    if libc::WIFSIGNALED(status) {
        crate::die::die_by_signal(libc::WTERMSIG(status));
    }
    // SAFETY: ends the process; there is nothing to clean up.
    unsafe { libc::_exit(libc::WEXITSTATUS(status)) }
}

/// Reaps whatever dies, until it is the worker.
fn be_init(worker: libc::pid_t, report: OwnedFd) -> ! {
    rename(c"orrery-init");
    let report = rustix::io::fcntl_dupfd_cloexec(&report, crate::descriptors::first_reserved());
    if let Ok(report) = report {
        // SAFETY: init uses nothing but the report, which was moved out of the way. Without close_range(2) it keeps
        // what it has, which is no more than the worker has.
        unsafe { libc::close_range(3, report.as_raw_fd().unsigned_abs() - 1, 0) };
        loop {
            match rustix::process::wait(WaitOptions::empty()) {
                Ok(Some((pid, status))) if pid.as_raw_nonzero().get() == worker => {
                    // If the outer process has gone, nobody wants to know.
                    let _ = File::from(report).write_all(&status.as_raw().to_ne_bytes());
                    break;
                }
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => break,
            }
        }
    }
    // SAFETY: ends the process, and with it everything in the namespace.
    unsafe { libc::_exit(0) }
}

fn rename(name: &std::ffi::CStr) {
    // A name is for people who look at the list of processes; without it they see the program's.
    let _ = rustix::thread::set_name(name);
}

/// Makes every mount read-only but those of the paths that scripts may change, and mounts a `/proc` of the new
/// namespace. Answers whether all of that worked.
fn rearrange_mounts(sandbox: &Sandbox) -> Result<bool, SandboxError> {
    let steps = || -> io::Result<()> {
        mount("none", "/", "", libc::MS_REC | libc::MS_PRIVATE)?;
        for path in &sandbox.write {
            mount(path, path, "", libc::MS_BIND | libc::MS_REC)?;
        }
        set_read_only("/", true)?;
        for path in &sandbox.write {
            set_read_only(path, false)?;
        }
        mount("proc", "/proc", "proc", libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC)
    };
    for path in &sandbox.write {
        fs::metadata(path).map_err(io_error("a path of --write"))?;
    }
    match steps() {
        Ok(()) => Ok(true),
        Err(error) => {
            eprintln!("orrery: warm: cannot change mounts: {error}; the sandbox works without");
            Ok(false)
        }
    }
}

fn c_path(path: impl AsRef<Path>) -> io::Result<CString> {
    Ok(CString::new(path.as_ref().as_os_str().as_bytes())?)
}

fn mount(
    source: impl AsRef<Path>,
    target: impl AsRef<Path>,
    kind: &str,
    flags: libc::c_ulong,
) -> io::Result<()> {
    let (source, target, kind) = (c_path(source)?, c_path(target)?, c_path(kind)?);
    mounts::mount(&source, &target, &kind, flags, c"").map_err(|error| error.errno.into())
}

/// [`mount_setattr(2)`](https://man7.org/linux/man-pages/man2/mount_setattr.2.html), for a whole tree.
fn set_read_only(path: impl AsRef<Path>, read_only: bool) -> io::Result<()> {
    let path = c_path(path)?;
    let (attr_set, attr_clr) = if read_only {
        (libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID, 0)
    } else {
        (0, libc::MOUNT_ATTR_RDONLY)
    };
    let attributes = libc::mount_attr { attr_set, attr_clr, propagation: 0, userns_fd: 0 };
    // SAFETY: a C string, and a structure with its size.
    let status = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::AT_RECURSIVE,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
