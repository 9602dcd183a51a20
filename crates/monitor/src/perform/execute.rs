//! Loading another program: the one thing that the monitor cannot do in the caller's place.
//!
//! It looks which file the path means and refuses what the policy does not allow; the call then goes on and the kernel
//! reads the path again, which may mean another file by then. What holds is the second wall: the program's Landlock
//! domain, made of the same policy, allows the kernel to execute nothing but what is listed, under any name. Where
//! there is no Landlock, a policy that limits execution lets nothing be executed but the program itself, once, while no
//! other thread exists that could exchange anything.

use std::os::fd::AsRawFd;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::answer::{Answer, Outcome};
use crate::file::{Location, ResolvedFile};
use crate::identity::decimal;
use crate::log::Event;
use crate::policy::Rights;
use crate::syscall::Syscall;

/// As many scripts may be each other's interpreters (execve(2)).
const MOST_INTERPRETERS: usize = 5;
/// As much of a script's first line counts.
const FIRST_LINE: usize = 256;

pub(super) fn execve(syscall: &Syscall<'_>) -> Outcome {
    execute(syscall, libc::AT_FDCWD, 0, 0)
}

pub(super) fn execveat(syscall: &Syscall<'_>) -> Outcome {
    execute(syscall, syscall.int(0), 1, syscall.int(4))
}

fn execute(syscall: &Syscall<'_>, directory: i32, path: usize, flags: i32) -> Outcome {
    let path = syscall.path(path)?;
    let found = if path.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
        syscall.examine(syscall.directory(directory)?, Some(Rights::empty()))?
    } else {
        syscall.find(directory, &path, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?
    };
    if found.location == Location::Anonymous && !syscall.state.policy.trees.all_executable() {
        syscall.refuse(&Event::Call { reason: "it would execute what has no path" });
        return Err(Errno::ACCESS);
    }
    check(syscall, &found, MOST_INTERPRETERS)?;
    let first = syscall.state.is_first_program(syscall.caller()?.process);
    if !first && !syscall.state.kernel_checks_executions {
        syscall
            .refuse(&Event::Call { reason: "without Landlock no further program can be recognized safely" });
        return Err(Errno::ACCESS);
    }
    syscall.state.callers.forget_process(syscall.caller()?.process);
    Ok(Answer::GoOn)
}

/// Refuses unless the file may be executed and, if it is a script, its interpreter.
fn check(syscall: &Syscall<'_>, found: &ResolvedFile, more: usize) -> Result<(), Errno> {
    syscall.check(found, Rights::EXECUTE)?;
    // The kernel would refuse it without a word.
    if let Location::Path(path) = &found.location
        && !syscall.state.executables.contain(&found.stat, path)
    {
        let reason = "the kernel executes what was there at the start, or lies in a listed directory";
        syscall.refuse(&Event::Call { reason });
        return Err(Errno::ACCESS);
    }
    let Some(interpreter) = interpreter(syscall, found) else { return Ok(()) };
    if more == 0 {
        return Err(Errno::LOOP);
    }
    check(syscall, &syscall.find(libc::AT_FDCWD, &interpreter, true)?, more - 1)
}

/// The path after `#!`.
fn interpreter(syscall: &Syscall<'_>, found: &ResolvedFile) -> Option<Vec<u8>> {
    if rustix::fs::FileType::from_raw_mode(found.stat.st_mode) != rustix::fs::FileType::RegularFile {
        return None;
    }
    let mut number = [0; 16];
    let number = decimal(found.file.as_raw_fd(), &mut number);
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(syscall.state.identity.descriptors(), number, flags, Mode::empty()).ok()?;
    let mut line = [0; FIRST_LINE];
    let read = rustix::io::pread(&file, &mut line, 0).ok()?;
    let line = line.get(..read)?.strip_prefix(b"#!")?.trim_ascii_start();
    let end = line.iter().position(|byte| matches!(byte, b' ' | b'\t' | b'\n' | 0)).unwrap_or(line.len());
    (end != 0).then(|| line[..end].to_vec())
}
