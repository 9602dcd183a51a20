//! A nest: a process-number namespace (and mounts) of its own, in which a service has its numbers for itself.
//!
//! In the backup the same numbers are then free, whatever else runs there. The nest's process 1 only waits for the
//! service; programs that help (criu) get numbers from 30,000 on, out of the way.

use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};

use crate::service::Service;
use crate::setup::run_to_exit;

const HELPERS_FROM: &str = "30000";

/// What is run in a nest.
pub(crate) enum Job<'j> {
    /// A program that helps, to its end.
    Helper(&'j [String]),
    /// The service, which is only started.
    Service(&'j Service),
}

/// Makes a nest and runs a program in it; when a helper has ended well, or the service has been started, gives the
/// number of the nest's process 1, as seen from outside. The nest stays. `meanwhile` is called once the program may be running.
///
/// # Errors
///
/// Where the namespaces cannot be had, or the program failed; the nest is then gone.
pub(crate) fn start(job: &Job<'_>, meanwhile: impl FnOnce()) -> Result<i32> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    // SAFETY: this process has one thread when nests are made, so that the child may go on as it likes.
    let outer = unsafe { libc::fork() };
    if outer < 0 {
        bail!("cannot fork: {}", std::io::Error::last_os_error());
    }
    if outer == 0 {
        // SAFETY: no pointers are involved. The next fork's child is the namespace's process 1.
        let failed = unsafe { libc::unshare(libc::CLONE_NEWPID | libc::CLONE_NEWNS) } != 0;
        // SAFETY: as above; this child has one thread.
        let inner = if failed { -1 } else { unsafe { libc::fork() } };
        if inner == 0 {
            let result = keep(job, &writer);
            let text = result.err().map(|error| format!("{error:#}")).unwrap_or_default();
            let _ = rustix::io::write(&writer, format!("E{text}").as_bytes());
            std::process::exit(1);
        }
        let number = format!("P{inner}\n");
        let _ = rustix::io::write(&writer, number.as_bytes());
        std::process::exit(i32::from(inner < 0));
    }
    drop(writer);
    meanwhile();
    let mut said = String::new();
    fs::File::from(reader).read_to_string(&mut said)?;
    let mut status = 0;
    // SAFETY: `status` is writable; the child is ours.
    unsafe { libc::waitpid(outer, &raw mut status, 0) };
    let pid = said.lines().find_map(|line| line.strip_prefix('P')?.parse().ok()).filter(|&pid: &i32| pid > 0);
    let pid = pid.context("cannot make namespaces")?;
    if let Some(start) = said.find('E') {
        // What was half made must not outlast whoever brings its memory.
        end(pid);
        bail!("{}", &said[start + 1..]);
    }
    Ok(pid)
}

/// The life of a nest's process 1.
fn keep(job: &Job<'_>, writer: &impl rustix::fd::AsFd) -> Result<()> {
    rustix::process::setsid()?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    mount("proc", "/proc", "proc", MountFlags::empty(), None).context("cannot mount the nest's /proc")?;
    match job {
        Job::Helper(argv) => help(argv)?,
        Job::Service(service) => {
            service.run_pre_commands()?;
            clear();
            let mut command = service.command()?;
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command.spawn().with_context(|| format!("cannot run {}", command.get_program().display()))?;
        }
    }
    // Whoever made the nest waits until all copies of the pipe are closed.
    // SAFETY: the descriptor is not used after this, and process 1 never returns from here but to exit.
    unsafe { libc::close(std::os::fd::AsRawFd::as_raw_fd(&writer.as_fd())) };
    loop {
        let mut status = 0;
        // SAFETY: `status` is writable.
        if unsafe { libc::waitpid(-1, &raw mut status, 0) } < 0 {
            std::process::exit(0);
        }
    }
}

/// Ends whatever was left behind in the nest, of which this is process 1.
fn clear() {
    // SAFETY: no pointers are involved; from a namespace's process 1 this reaches all others in it, and nobody else.
    unsafe { libc::kill(-1, libc::SIGKILL) };
    let mut status = 0;
    // SAFETY: `status` is writable.
    while unsafe { libc::waitpid(-1, &raw mut status, 0) } >= 0 {}
}

/// Runs a program that helps to its end, which must be a good one.
fn help(argv: &[String]) -> Result<()> {
    fs::write("/proc/sys/kernel/ns_last_pid", HELPERS_FROM).context("cannot set the nest's numbers")?;
    let (program, arguments) = argv.split_first().context("nothing to run")?;
    // If criu is killed, it leaves behind what it had half made.
    let (status, said) = run_to_exit(Command::new(program).args(arguments))?;
    ensure!(status.success(), "{program}: {status}: {said}");
    Ok(())
}

/// Ends a nest: with its process 1 the kernel ends all processes in it.
pub(crate) fn end(nest: i32) {
    // SAFETY: no pointers are involved; the nest's process 1 was a child of a child, so that nobody else waits for it.
    unsafe { libc::kill(nest, libc::SIGKILL) };
    while Path::new(&format!("/proc/{nest}")).exists() {
        let mut status = 0;
        // SAFETY: `status` is writable. Orphans become children of init, which this is.
        unsafe { libc::waitpid(nest, &raw mut status, 0) };
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The service of whatever nest there is in this guest, seen from outside.
pub(crate) fn any_service() -> Option<i32> {
    let own = fs::read_link("/proc/self/ns/pid").ok()?;
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let inner = |pid: &i32| {
        let space = fs::read_link(format!("/proc/{pid}/ns/pid")).ok()?;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        Some(space != own && numbers.split_whitespace().last() == Some("1"))
    };
    let nest = numbers.find(|pid| inner(pid).unwrap_or(false))?;
    service(nest).map(|(outer, _)| outer)
}

/// The first child of a nest's process 1: the service. Seen from outside, and from within.
pub(crate) fn service(nest: i32) -> Option<(i32, i32)> {
    let children = fs::read_to_string(format!("/proc/{nest}/task/{nest}/children")).ok()?;
    let outer: i32 = children.split_whitespace().next()?.parse().ok()?;
    let status = fs::read_to_string(format!("/proc/{outer}/status")).ok()?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    Some((outer, numbers.split_whitespace().last()?.parse().ok()?))
}
