//! Has the module of a handler compiled, by a program of its own: the compiler is larger than all the rest, and most policies have no
//! handler.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use orrery_compiled_handler::{COMMAND, Handler, LARGEST_REPLY, PROGRAM, Reply, decode};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

/// How long the compiler may take. It limits its own CPU time to half of that.
const PATIENCE: Duration = Duration::from_secs(120);

/// Compiles a module.
///
/// # Errors
/// What is wrong with it and where, or why there is no compiler; a sentence for the user.
pub(super) fn compile(source: &[u8]) -> Result<Handler, String> {
    let program = orrery_sys::programs::find_helper(PROGRAM).map_err(|error| {
        format!(
            "there is no compiler for it: {error} (package orrery; in a source tree, `cargo build -p {PROGRAM}`)"
        )
    })?;
    compile_by(&program, source, PATIENCE)
}

fn compile_by(program: &Path, source: &[u8], patience: Duration) -> Result<Handler, String> {
    let failed =
        |cause: &dyn std::fmt::Display| format!("its compiler {} failed: {cause}", program.display());
    let written = run(program, source, patience).map_err(|error| failed(&error))?;
    match decode(&written).map_err(|invalid| failed(&invalid))? {
        Reply::Compiled(handler) => Ok(handler),
        Reply::Refused(why) => Err(why),
    }
}

/// Executes the compiler; returns what it has written.
fn run(program: &Path, source: &[u8], patience: Duration) -> io::Result<Vec<u8>> {
    // Files, and no pipes: nobody waits for the other one, whatever it reads and writes.
    let mut input = memory_file("module")?;
    input.write_all(source)?;
    input.rewind()?;
    let mut output = memory_file("handler")?;
    let mut command = Command::new(program);
    command.arg(COMMAND).stdin(Stdio::from(input)).stdout(Stdio::from(output.try_clone()?));
    let mut child = command.spawn()?;
    let ended = wait(&child, patience);
    if !matches!(ended, Ok(true)) {
        child.kill()?;
    }
    let status = child.wait()?;
    if !ended? {
        return Err(io::Error::other(format!("it has not ended within {} s", patience.as_secs_f32())));
    }
    if !status.success() {
        return Err(io::Error::other(describe(status)));
    }
    let length = output.metadata()?.len();
    if length > LARGEST_REPLY as u64 {
        return Err(io::Error::other(format!("it has written {length} bytes, and {LARGEST_REPLY} at most")));
    }
    let mut written = Vec::new();
    output.rewind()?;
    output.take(LARGEST_REPLY as u64).read_to_end(&mut written)?;
    Ok(written)
}

fn memory_file(name: &str) -> io::Result<File> {
    Ok(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?.into())
}

/// Returns whether a child ends within a time.
fn wait(child: &Child, patience: Duration) -> io::Result<bool> {
    let pid = Pid::from_child(child);
    let process = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    let until = std::time::Instant::now() + patience;
    loop {
        let left = until.saturating_duration_since(std::time::Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match rustix::event::poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => {}
            other => return Ok(other? > 0),
        }
    }
}

/// How it has ended, with a guess why: the command that an older or newer one does not know is a wrong one there.
fn describe(status: ExitStatus) -> String {
    /// What programs end with whose command line is wrong.
    const USAGE: i32 = 2;
    if status.code() == Some(USAGE) {
        return format!("{status}; is it of another version than this program? Install both together");
    }
    status.to_string()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Instant;

    use super::*;

    /// What a compiler that is this script does with a module.
    fn compiled_by(script: &str, patience: Duration) -> String {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("compiler");
        orrery_testing::write_program(&program, &format!("#!/bin/sh\n{script}\n"));
        let shown = program.display().to_string();
        compile_by(&program, b"(module)", patience).unwrap_err().replace(&shown, "PROGRAM")
    }

    #[test]
    fn a_compiler_that_fails_is_named_with_the_reason() {
        for (script, said) in [
            ("exit 0", "its compiler PROGRAM failed: what it has written is no compiled handler"),
            ("cat", "its compiler PROGRAM failed: what it has written is no compiled handler"),
            ("exit 3", "its compiler PROGRAM failed: exit status: 3"),
            (
                "exit 2",
                "its compiler PROGRAM failed: exit status: 2; is it of another version than this program? Install both together",
            ),
            ("kill -KILL $$", "its compiler PROGRAM failed: signal: 9 (SIGKILL)"),
            (
                "printf orrhandl01234567",
                "its compiler PROGRAM failed: it is of another version than this program: install both together",
            ),
            (
                "truncate --size=2M /dev/stdout",
                "its compiler PROGRAM failed: it has written 2097152 bytes, and 1179648 at most",
            ),
        ] {
            assert_eq!(compiled_by(script, PATIENCE), said, "{script}");
        }
        let nothing = compile_by(Path::new("/nowhere"), b"", PATIENCE).unwrap_err();
        assert!(nothing.starts_with("its compiler /nowhere failed: No such file"), "{nothing}");
    }

    #[test]
    fn a_compiler_that_never_ends_is_killed() {
        let begin = Instant::now();
        let said = compiled_by("exec sleep 600", Duration::from_millis(300));
        assert_eq!(said, "its compiler PROGRAM failed: it has not ended within 0.3 s");
        assert!(begin.elapsed() < Duration::from_secs(300));
    }

    #[test]
    fn it_is_given_the_module_and_how_it_is_called() {
        // Both are in what it says on its way out.
        let directory = tempfile::tempdir().unwrap();
        let heard = directory.path().join("heard");
        let script = format!("{{ echo \"$*\"; cat; }} > {}", heard.display());
        compiled_by(&script, PATIENCE);
        assert_eq!(fs::read_to_string(heard).unwrap(), "compile-handler\n(module)");
    }
}
