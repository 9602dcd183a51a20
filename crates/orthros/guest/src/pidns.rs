//! The PID namespace of a service, in which it has its PIDs for itself.
//!
//! In the backup the same PIDs are then free, no matter what else runs there. The init process of the namespace only
//! reaps processes; helpers (criu) get PIDs from 30,000 on, out of the way.

use std::fs;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use orrery_orthros_images::ExitedLeaders;
use orrery_orthros_wire::{MainProcess, Report, ServiceExit};
use orrery_sys::signals::{self, mask_of};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};

use crate::command::run_to_exit;
use crate::control::Control;
use crate::daemon;
use crate::output::Output;
use crate::service::Service;

const FIRST_HELPER_PID: u32 = 30_000;

/// What is run in a new PID namespace.
pub(crate) enum Job<'j> {
    /// criu, which must exit with success, in the session and process group of these, and with a new pipe for the
    /// service's output in the place of one.
    Restore(&'j [String], ExitedLeaders, Option<u32>),
    /// The service, which is only started.
    Service(&'j Service),
}

/// Makes a PID namespace and runs a program in it. Returns the outer PID of its init process when a helper has exited
/// with success, or the service has been started. `meanwhile` is called once the program may be running.
///
/// # Errors
///
/// The namespaces cannot be made, or the program failed; the namespace is then gone.
pub(crate) fn start(job: &Job<'_>, meanwhile: impl FnOnce()) -> Result<i32> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    // SAFETY: this process has one thread here, so that the child may do more than async-signal-safe calls.
    let outer = unsafe { libc::fork() };
    if outer < 0 {
        bail!("cannot fork: {}", std::io::Error::last_os_error());
    }
    if outer == 0 {
        // SAFETY: unshare takes no pointers. The next fork's child is the init process of the new PID namespace.
        let failed = unsafe { libc::unshare(libc::CLONE_NEWPID | libc::CLONE_NEWNS) } != 0;
        // SAFETY: a forked child has one thread, so that its own child may do more than async-signal-safe calls.
        let inner = if failed { -1 } else { unsafe { libc::fork() } };
        if inner == 0 {
            let result = run_init(job, &writer);
            let text = result.err().map(|error| format!("{error:#}")).unwrap_or_default();
            let _ = rustix::io::write(&writer, format!("E{text}").as_bytes());
            std::process::exit(1);
        }
        let pid = format!("P{inner}\n");
        let _ = rustix::io::write(&writer, pid.as_bytes());
        std::process::exit(i32::from(inner < 0));
    }
    drop(writer);
    meanwhile();
    let mut result = String::new();
    fs::File::from(reader).read_to_string(&mut result)?;
    let mut status = 0;
    // SAFETY: `status` is a live integer, which the call writes.
    unsafe { libc::waitpid(outer, &raw mut status, 0) };
    let pid =
        result.lines().find_map(|line| line.strip_prefix('P')?.parse().ok()).filter(|&pid: &i32| pid > 0);
    let pid = pid.context("cannot make namespaces")?;
    if let Some(start) = result.find('E') {
        // A half restored process must not outlive the page server.
        end(pid);
        bail!("{}", &result[start + 1..]);
    }
    Ok(pid)
}

/// Runs as the init process of the namespace; never returns but with an error.
fn run_init(job: &Job<'_>, writer: &impl rustix::fd::AsFd) -> Result<()> {
    rustix::process::setsid()?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    mount("proc", "/proc", "proc", MountFlags::empty(), None)
        .context("cannot mount /proc of the PID namespace")?;
    let (mut output, service_end) = Output::new()?;
    match job {
        Job::Restore(argv, leaders, pipe) => {
            run_criu(argv, *leaders, pipe.map(|pipe| (pipe, service_end.as_fd())))?;
        }
        Job::Service(service) => {
            service.run_pre_commands()?;
            kill_all();
            service.run_start_commands()?;
            let mut command = service.command()?;
            command.stdin(Stdio::null()).stdout(service_end.try_clone()?).stderr(service_end.try_clone()?);
            let program = command.get_program().display().to_string();
            let child = command.spawn().with_context(|| format!("cannot run {program}"))?;
            drop(command);
            if let MainProcess::Left { pid_file } = service.main_process() {
                daemon::wait(child, &program, pid_file.as_deref().map(Path::new), &mut output)?;
            }
        }
    }
    // The caller of `start` waits until all copies of the pipe are closed.
    // SAFETY: the descriptor is not used after this: process 1 never returns from here but to exit.
    unsafe { libc::close(std::os::fd::AsRawFd::as_raw_fd(&writer.as_fd())) };
    drop(service_end);
    // Whether it was started or restored, it is the first child; one that has exited is there until it is waited for.
    watch(first_child(1), output)
}

/// Waits for all processes of the namespace, of which this is the init process, and reports how the main one exits.
/// Returns only if it cannot wait.
fn watch(main: Option<i32>, mut output: Output) -> Result<()> {
    let children = signals::descriptor(mask_of(&[libc::SIGCHLD])).context("cannot wait for the service")?;
    let mut exit: Option<ServiceExit> = None;
    loop {
        loop {
            let mut status = 0;
            // SAFETY: `status` is a live integer, which the call writes.
            let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
            if pid == 0 {
                break;
            }
            if pid < 0 {
                if let Some(exit @ ServiceExit { remains: true, .. }) = exit {
                    report_exit(&ServiceExit { remains: false, output: output.last_lines(), ..exit });
                }
                std::process::exit(0);
            }
            if Some(pid) == main {
                let ended = ServiceExit {
                    status: libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)),
                    signal: libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status)),
                    remains: first_child(1).is_some(),
                    output: output.last_lines(),
                };
                report_exit(&ended);
                exit = Some(ended);
            }
        }
        let mut ready = vec![PollFd::new(&children, PollFlags::IN)];
        ready.extend(output.reader().map(|reader| PollFd::from_borrowed_fd(reader, PollFlags::IN)));
        rustix::event::poll(&mut ready, None).or_else(|errno| match errno {
            Errno::INTR => Ok(0),
            errno => Err(errno),
        })?;
        let mut seen = [0; 4096];
        // All that it says is that something has happened.
        let _ = rustix::io::read(&children, &mut seen);
        output.read();
    }
}

/// Reports to the host how the service has ended. Where that is impossible, the host sees a service that does nothing.
fn report_exit(exit: &ServiceExit) {
    let _ = Control::open().and_then(|mut control| control.send(&Report::ServiceExited(exit.clone())));
}

/// Returns the PID of the first child of a process that has one thread.
fn first_child(pid: i32) -> Option<i32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

/// Kills everything else in the PID namespace, of which this is the init process.
fn kill_all() {
    // SAFETY: kill takes no pointers. From the init process of a PID namespace, -1 reaches all other processes in it,
    // and no others.
    unsafe { libc::kill(-1, libc::SIGKILL) };
    let mut status = 0;
    // SAFETY: `status` is a live integer, which the call writes.
    while unsafe { libc::waitpid(-1, &raw mut status, 0) } >= 0 {}
}

/// Runs criu, which must exit with success. The service's own process is restored into the session and process group
/// that criu is in.
fn run_criu(argv: &[String], leaders: ExitedLeaders, output: Option<(u32, BorrowedFd<'_>)>) -> Result<()> {
    let (program, arguments) = argv.split_first().context("nothing to run")?;
    let mut command = Command::new(program);
    command.args(arguments);
    // Its copy is inherited until it is closed, with this function's end.
    let inherited = output.map(|(_, end)| rustix::io::dup(end)).transpose()?;
    if let (Some((pipe, _)), Some(end)) = (output, &inherited) {
        command.args(["--inherit-fd", &format!("fd[{}]:pipe:[{pipe}]", end.as_raw_fd())]);
    }
    let first = leaders.session.or(leaders.group).unwrap_or(FIRST_HELPER_PID);
    set_next_pid(first).context("cannot set the next PID")?;
    // SAFETY: the closure only makes system calls, and allocates nothing: it is async-signal-safe.
    unsafe { command.pre_exec(move || lead(leaders)) };
    // If criu is killed, it leaves behind what it had half made.
    let (status, output) = run_to_exit(&mut command)?;
    ensure!(status.success(), "{program}: {status}: {output}");
    Ok(())
}

/// Sets the PID that the next process of this namespace gets (proc_sys_kernel(5), ns_last_pid). Async-signal-safe.
fn set_next_pid(pid: u32) -> rustix::io::Result<()> {
    let file =
        rustix::fs::open(c"/proc/sys/kernel/ns_last_pid", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    let (mut digits, mut rest, mut start) = ([0; 10], pid.saturating_sub(1), 10);
    while rest > 0 || start == 10 {
        start -= 1;
        digits[start] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    rustix::io::write(&file, &digits[start..]).map(drop)
}

/// Makes the calling process the leader of the session, and itself or a child, in which this returns, that of the
/// process group. Whatever is started next gets a PID that is no service's. Async-signal-safe.
fn lead(leaders: ExitedLeaders) -> io::Result<()> {
    let is = |leader: u32| rustix::process::getpid().as_raw_nonzero().get().cast_unsigned() == leader;
    let taken = || io::Error::from(rustix::io::Errno::EXIST);
    if let Some(session) = leaders.session {
        if !is(session) {
            return Err(taken());
        }
        rustix::process::setsid()?;
    }
    // The leader of a session leads a group of the same number.
    if let Some(group) = leaders.group.filter(|_| leaders.group != leaders.session) {
        if !is(group) {
            set_next_pid(group)?;
            // SAFETY: this process has one thread; the child makes system calls only, until it executes criu.
            let child = unsafe { libc::fork() };
            if child < 0 {
                return Err(io::Error::last_os_error());
            }
            if child > 0 {
                let mut status = 0;
                // SAFETY: `status` is a live integer, which the call writes.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                // SAFETY: ends the process, whose memory is nobody's but its own.
                unsafe { libc::_exit(if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 1 }) };
            }
            if !is(group) {
                return Err(taken());
            }
        }
        rustix::process::setpgid(None, None)?;
    }
    Ok(set_next_pid(FIRST_HELPER_PID)?)
}

/// Kills the init process of a PID namespace, and with it all its processes.
pub(crate) fn end(init: i32) {
    // SAFETY: kill takes no pointers; nobody else waits for the process, so that its PID is not reused.
    unsafe { libc::kill(init, libc::SIGKILL) };
    while Path::new(&format!("/proc/{init}")).exists() {
        let mut status = 0;
        // SAFETY: `status` is a live integer, which the call writes. Orphans are reparented to this process, the
        // guest's init.
        unsafe { libc::waitpid(init, &raw mut status, 0) };
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the outer PID of the service that runs in this guest, if one does.
pub(crate) fn any_service() -> Option<i32> {
    let own = fs::read_link("/proc/self/ns/pid").ok()?;
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let inner = |pid: &i32| {
        let space = fs::read_link(format!("/proc/{pid}/ns/pid")).ok()?;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        Some(space != own && numbers.split_whitespace().last() == Some("1"))
    };
    let init = pids.find(|pid| inner(pid).unwrap_or(false))?;
    service(init).map(|(outer, _)| outer)
}

/// Returns the outer and inner PID of the service: the first child of the namespace's init process.
pub(crate) fn service(init: i32) -> Option<(i32, i32)> {
    let outer = first_child(init)?;
    let status = fs::read_to_string(format!("/proc/{outer}/status")).ok()?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    Some((outer, numbers.split_whitespace().last()?.parse().ok()?))
}
