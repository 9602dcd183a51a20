//! mkfs.erofs, which writes the image: in mount namespaces of its own, where it sees the trees and the draft and nothing else of /tmp.
//!
//! There each tree is mounted without what is mounted below it. The program keeps the chunks of files in /tmp, even where
//! `TMPDIR` names another directory, until it copies them to the image: so /tmp is the draft's directory, which has the room.

use std::env;
use std::ffi::{CString, OsString};
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use orrery_sys::mounts;
use rustix::process::Signal;
use rustix::thread::UnshareFlags;

use super::scan::Scan;
use crate::error::{Error, Result};

/// The name of the program.
pub(super) const NAME: &str = "mkfs.erofs";
/// The name of the image in the directory of the draft.
pub(super) const IMAGE: &str = "image";
/// The name of the directory there where the trees are mounted.
const TREE: &str = "tree";
/// The size of the chunks of files, of which equal ones are there once.
const CHUNK: &str = "--chunksize=65536";
/// The variable by which the times of files are bounded (reproducible-builds.org); the program takes it as the image's own time, too.
const EPOCH: &str = "SOURCE_DATE_EPOCH";

/// The program, where it was found.
pub(super) struct Program(PathBuf);

/// Finds the program.
///
/// # Errors
/// [`Error::NoProgram`].
pub(super) fn find() -> Result<Program> {
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).map(|directory| directory.join(NAME)).find(|path| path.is_file());
    found.map(Program).ok_or(Error::NoProgram(NAME))
}

impl Program {
    /// Has the image of the trees written in the directory of the draft.
    ///
    /// # Errors
    /// [`Error::Program`] or [`Error::NoSpace`] if it fails; [`Error::File`] if the trees cannot be mounted for it.
    pub(super) fn run(&self, draft: &Path, trees: &[(String, PathBuf)], scan: &Scan) -> Result<()> {
        let mut mounted = Vec::new();
        let top = draft.join(TREE);
        create(&top)?;
        for (name, tree) in trees {
            let at = if trees.len() == 1 { top.clone() } else { top.join(name) };
            if trees.len() > 1 {
                create(&at)?;
            }
            mounted.push((text(tree)?, text(&at)?));
        }
        let draft_text = text(draft)?;
        let mut command = Command::new(&self.0);
        command.args(["--quiet", CHUNK, "-U", &scan.uuid()]);
        for socket in &scan.sockets {
            let mut option = OsString::from("--exclude-path=");
            option.push(socket);
            command.arg(option);
        }
        command.arg(Path::new("/tmp").join(IMAGE)).arg(Path::new("/tmp").join(TREE));
        command.env("LC_ALL", "C").env("TMPDIR", "/tmp").stdin(Stdio::null());
        if env::var_os(EPOCH).is_none_or(|value| value.is_empty()) {
            command.env(EPOCH, scan.newest.max(0).to_string());
        }
        // SAFETY: between fork and execve nothing but system calls is made, on strings that were made before.
        unsafe { command.pre_exec(move || enter(&mounted, &draft_text)) };
        let output = command.output().map_err(|cause| match cause.raw_os_error() {
            Some(_) => {
                Error::file("mount for an image", trees.first().map_or(draft, |(_, tree)| tree))(cause)
            }
            None => Error::Program { program: NAME, reason: cause.to_string() },
        })?;
        if output.status.success() { Ok(()) } else { Err(failure(&output, draft, scan.room)) }
    }
}

/// Mounts what the program needs, in a mount namespace that ends with it, as it does with its parent.
fn enter(trees: &[(CString, CString)], draft: &std::ffi::CStr) -> io::Result<()> {
    let raw = |error: orrery_sys::Error| io::Error::from_raw_os_error(error.errno.raw_os_error());
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // SAFETY: mounts are no memory of this process, and no other thread is in it.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    mounts::mount(c"none", c"/", c"", libc::MS_REC | libc::MS_PRIVATE, c"").map_err(raw)?;
    for (tree, at) in trees {
        mounts::mount(tree, at, c"", libc::MS_BIND, c"").map_err(raw)?;
    }
    mounts::mount(draft, c"/tmp", c"", libc::MS_BIND | libc::MS_REC, c"").map_err(raw)
}

fn text(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|error| Error::file("mount", path)(io::Error::other(error)))
}

fn create(directory: &Path) -> Result<()> {
    fs::create_dir(directory)
        // The mode of the image's top directory, where it has several trees.
        .and_then(|()| fs::set_permissions(directory, Permissions::from_mode(0o755)))
        .map_err(Error::file("create", directory))
}

/// Returns the error of a run that failed. The program calls a full file system an input/output error.
fn failure(output: &Output, draft: &Path, room: u64) -> Error {
    let said = String::from_utf8_lossy(&output.stderr);
    let mut lines = said.lines().filter_map(|line| line.strip_prefix("<E> "));
    let reason = match lines.next() {
        Some(line) => line.strip_prefix("erofs:").unwrap_or(line).trim().to_owned(),
        None => format!("{}: {}", output.status, said.trim()),
    };
    let directory = draft.parent().unwrap_or(draft);
    let free =
        rustix::fs::statvfs(draft).map_or(u64::MAX, |found| found.f_bavail.saturating_mul(found.f_frsize));
    // Chunks are in a file of their own first.
    let needed = room.saturating_mul(2);
    if free < needed {
        let (available, needed) = (free >> 20, needed.div_ceil(1 << 20));
        return Error::NoSpace { path: directory.to_owned(), program: NAME, reason, available, needed };
    }
    Error::Program { program: NAME, reason }
}
