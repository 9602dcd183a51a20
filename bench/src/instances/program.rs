//! Many runs of a program in one process, each in an instance of its own and by a thread of its own.
//!
//! The program is linked as a shared library whose `main` is called. It reports its progress to the descriptor that `-progress pipe:1`
//! names, as ffmpeg does: each instance gets a pipe, and the process reports the sum.

use std::env;
use std::ffi::{CString, c_char, c_int};
use std::io::{PipeReader, Read as _, Write as _};
use std::os::fd::{AsFd as _, IntoRawFd as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use orrery_orc_instance::{Instance, Library};
use rustix::event::{PollFd, PollFlags, poll};

use crate::ffmpeg::frames_of;

/// The first argument of the process that has the instances.
const SERVE: &str = "run-in-instances";
/// What a program may use of its stack, as for its first thread.
const STACK: usize = 8 << 20;

type Main = unsafe extern "C" fn(c_int, *mut *mut c_char) -> c_int;

/// Returns the path of the program that has the instances: this one.
///
/// # Errors
/// It is not known.
pub fn host() -> Result<PathBuf> {
    env::current_exe().context("cannot find this program's own file")
}

/// Returns the command that runs a library's `main` in `count` instances; arguments are appended.
#[must_use]
pub fn command(host: &Path, library: &Path, count: usize) -> Command {
    let mut command = Command::new(host);
    command.arg(SERVE).arg(library).arg(count.to_string());
    command
}

/// Does what [`command`] started this process for, and returns whether it did.
///
/// # Errors
/// An instance cannot be made.
pub fn serve() -> Result<bool> {
    let arguments: Vec<_> = env::args_os().collect();
    let [_, first, library, count, rest @ ..] = &arguments[..] else { return Ok(false) };
    if first != SERVE {
        return Ok(false);
    }
    let count: usize =
        count.to_str().and_then(|count| count.parse().ok()).context("no number of instances")?;
    let ends = block_termination();
    let library = Library::load(library)?;
    let main = library.symbol(c"main")?;
    // SAFETY: the library is a program, whose `main` has this type.
    let main: Main = unsafe { std::mem::transmute(main) };
    let mut pipes = Vec::new();
    for _ in 0..count {
        let (reader, writer) = std::io::pipe()?;
        // The instance has it until the process ends.
        let progress = format!("pipe:{}", writer.into_raw_fd());
        let mut own = vec![CString::new("program")?];
        for argument in rest {
            let bytes = if argument == "pipe:1" { progress.as_bytes() } else { argument.as_bytes() };
            own.push(CString::new(bytes)?);
        }
        let instance = library.create()?;
        let thread = std::thread::Builder::new().stack_size(STACK);
        thread.spawn(move || run(instance, main, own)).context("cannot start a thread")?;
        pipes.push(Progress { reader, line: Vec::new(), frames: 0 });
    }
    std::thread::spawn(move || {
        let failed = report(&mut pipes);
        eprintln!("{failed:?}");
        std::process::abort();
    });
    wait_for_termination(&ends)
}

/// Runs the program in an instance.
fn run(mut instance: Instance, main: Main, arguments: Vec<CString>) -> Result<()> {
    let count = c_int::try_from(arguments.len())?;
    let mut pointers: Vec<*mut c_char> = arguments.into_iter().map(CString::into_raw).collect();
    pointers.push(std::ptr::null_mut());
    // SAFETY: `main` gets strings that live as long as the process, and a null pointer behind them.
    let status = instance.enter()?.run(|| unsafe { main(count, pointers.as_mut_ptr()) });
    eprintln!("a program ended with status {status}");
    std::process::abort();
}

/// What an instance has reported.
struct Progress {
    reader: PipeReader,
    line: Vec<u8>,
    frames: u64,
}

/// Reports the sum of all instances' frames, as soon as each has reported some.
fn report(pipes: &mut [Progress]) -> Result<()> {
    let mut output = std::io::stdout();
    loop {
        let mut ready: Vec<_> =
            pipes.iter().map(|pipe| PollFd::from_borrowed_fd(pipe.reader.as_fd(), PollFlags::IN)).collect();
        poll(&mut ready, None)?;
        let ready: Vec<bool> = ready.iter().map(|found| !found.revents().is_empty()).collect();
        for (pipe, _) in pipes.iter_mut().zip(ready).filter(|(_, ready)| *ready) {
            let mut bytes = [0; 4096];
            let length = pipe.reader.read(&mut bytes)?;
            ensure!(length > 0, "a program has closed its pipe");
            for &byte in &bytes[..length] {
                if byte != b'\n' {
                    pipe.line.push(byte);
                    continue;
                }
                let frames = frames_of(&String::from_utf8_lossy(&pipe.line));
                pipe.frames = frames.unwrap_or(pipe.frames);
                pipe.line.clear();
            }
        }
        if pipes.iter().all(|pipe| pipe.frames > 0) {
            let sum: u64 = pipes.iter().map(|pipe| pipe.frames).sum();
            writeln!(output, "frame={sum}")?;
        }
    }
}

/// Blocks SIGTERM in this thread and those that it starts: programs have handlers of it, of which the process has but one.
fn block_termination() -> libc::sigset_t {
    // SAFETY: a set of signals is plain data, which sigemptyset initializes; the calls get pointers to it alone.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        set
    }
}

/// Ends the process at SIGTERM, with all threads that run.
fn wait_for_termination(set: &libc::sigset_t) -> ! {
    let mut signal = 0;
    // SAFETY: both are variables of ours.
    unsafe { libc::sigwait(set, &raw mut signal) };
    // SAFETY: no destructors run, which threads that go on would disturb.
    unsafe { libc::_exit(0) }
}
