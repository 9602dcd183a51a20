//! Calls that a monitor checks: inside the program, in a process over a Unix socket, or by ptrace.

use std::ffi::CString;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use tempfile::TempDir;

use super::notify;
use crate::contender::{Contender, Sample};

/// The number of bytes that are read and written at a time.
const BYTES: usize = 64;

/// A contender that works in a temporary directory of its own.
pub struct InDirectory<C> {
    contender: C,
    // Removed after the contender.
    _directory: TempDir,
}

impl<C: Contender> InDirectory<C> {
    /// Makes the directory, and in it the contender.
    pub fn new(contender: impl FnOnce(&Path) -> Result<C>) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        Ok(Self { contender: contender(&directory.path().canonicalize()?)?, _directory: directory })
    }
}

impl<C: Contender> Contender for InDirectory<C> {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        self.contender.measure(work, iterations)
    }
}

/// Something that makes calls.
pub trait Caller {
    /// Makes one call: `open` (with the close), `stat`, `read` or `write`.
    fn call(&mut self, work: &str) -> Result<()>;
}

/// Makes calls itself, and checks before each if the path is allowed, if asked to.
pub struct Direct {
    path: CString,
    file: File,
    allowed: Option<Vec<u8>>,
}

impl Direct {
    /// Prepares calls about a file in `directory`.
    pub fn new(directory: &Path) -> Result<Self> {
        let path = directory.join("file");
        std::fs::write(&path, [7; BYTES])?;
        let file = File::options().read(true).write(true).open(&path)?;
        Ok(Self { path: CString::new(path.as_os_str().as_bytes())?, file, allowed: None })
    }

    /// Adds a check in the program: the path is in the directory and has no `..`.
    pub fn checked(directory: &Path) -> Result<Self> {
        let allowed = Some(directory.as_os_str().as_bytes().to_vec());
        Ok(Self { allowed, ..Self::new(directory)? })
    }

    fn check(&self) -> Result<()> {
        if let Some(directory) = &self.allowed {
            ensure!(is_within(self.path.as_bytes(), directory), "not allowed");
        }
        Ok(())
    }
}

/// Returns what all of these monitors check.
fn is_within(path: &[u8], directory: &[u8]) -> bool {
    path.starts_with(directory)
        && path.get(directory.len()) == Some(&b'/')
        && path.split(|&byte| byte == b'/').all(|name| name != b"..")
}

impl Caller for Direct {
    fn call(&mut self, work: &str) -> Result<()> {
        self.check()?;
        match work {
            "open" => drop(rustix::fs::open(
                self.path.as_c_str(),
                rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC,
                rustix::fs::Mode::empty(),
            )?),
            "stat" => {
                ensure!(
                    rustix::fs::stat(self.path.as_c_str())?.st_size == i64::try_from(BYTES)?,
                    "another file"
                )
            }
            "read" => self.file.read_exact_at(&mut [0; BYTES], 0)?,
            "write" => self.file.write_all_at(&[7; BYTES], 0)?,
            other => bail!("there is no call {other:?}"),
        }
        Ok(())
    }
}

/// A caller in another process, which makes calls on request.
pub struct Remote {
    to: UnixStream,
}

/// The monitor's end of the connection.
pub struct Served {
    from: UnixStream,
    /// The remote's, to be closed in the other process.
    other: OwnedFd,
}

impl Remote {
    /// Makes both ends.
    pub fn new() -> Result<(Self, Served)> {
        let (to, from) = UnixStream::pair()?;
        // The other process has a copy of this end, too, and must not wait for itself.
        let other = OwnedFd::from(to.try_clone()?);
        Ok((Self { to }, Served { from, other }))
    }
}

impl Served {
    /// Makes calls until the requests end. Returns an exit status.
    pub fn serve(mut self, caller: &mut dyn Caller) -> i32 {
        drop(self.other);
        // SAFETY: one argument, a signal number; it ends this process with its parent.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        let mut request = [0; 12];
        while self.from.read_exact(&mut request).is_ok() {
            let work = String::from_utf8_lossy(&request[..8]);
            let work = work.trim_end_matches('\0');
            let iterations = u32::from_ne_bytes([request[8], request[9], request[10], request[11]]);
            let start = Instant::now();
            let done = (0..iterations).try_for_each(|_| caller.call(work));
            let elapsed = start.elapsed();
            if let Err(error) = &done {
                eprintln!("{error:#}");
            }
            let answer = if done.is_ok() { u64::try_from(elapsed.as_nanos()).unwrap_or(0) } else { 0 };
            if self.from.write_all(&answer.to_ne_bytes()).is_err() {
                break;
            }
        }
        0
    }
}

impl Contender for Remote {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        ensure!(work.len() <= 8, "there is no call {work:?}");
        let mut request = [0; 12];
        request[..work.len()].copy_from_slice(work.as_bytes());
        request[8..].copy_from_slice(&iterations.to_ne_bytes());
        self.to.write_all(&request)?;
        let mut answer = [0; 8];
        self.to.read_exact(&mut answer).context("the calling process is gone")?;
        let nanoseconds = u64::from_ne_bytes(answer);
        ensure!(nanoseconds != 0, "a call failed");
        Ok(Sample { iterations, elapsed: Duration::from_nanos(nanoseconds), latencies: Vec::new() })
    }
}

/// Checks inside of the program, which could as well leave it.
pub struct InlineCheck {
    caller: Direct,
}

impl InlineCheck {
    /// Prepares calls about a file in `directory`.
    pub fn new(directory: &Path) -> Result<Self> {
        Ok(Self { caller: Direct::checked(directory)? })
    }
}

impl Contender for InlineCheck {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        Sample::batch(iterations, |_| {
            self.caller.call(work)?;
            Ok(())
        })
    }
}

/// A process that makes calls for others who ask over a Unix socket, as privilege-separated servers do.
pub struct SeparateProcess {
    socket: UnixStream,
    path: Vec<u8>,
}

impl SeparateProcess {
    /// Starts it for files in `directory`.
    pub fn new(directory: &Path) -> Result<Self> {
        let direct = Direct::new(directory)?;
        let path = direct.path.as_bytes().to_vec();
        let (socket, other) = UnixStream::pair()?;
        let directory = directory.as_os_str().as_bytes().to_vec();
        // SAFETY: contenders have one thread when they are made, so the child finds no lock held by another
        // one.
        match unsafe { libc::fork() } {
            0 => {
                drop(socket);
                // SAFETY: PR_SET_PDEATHSIG takes numbers only.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                let _ = perform_for(&other, &direct.file, &directory);
                // SAFETY: the call takes a number and ends the process, so that nothing of the parent's runs
                // in it.
                unsafe { libc::_exit(0) }
            }
            child => ensure!(child > 0, "fork: {}", std::io::Error::last_os_error()),
        }
        Ok(Self { socket, path })
    }
}

/// Sends a descriptor.
fn send(to: &UnixStream, file: &OwnedFd) -> Result<()> {
    let files = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    ensure!(control.push(SendAncillaryMessage::ScmRights(&files)), "no room");
    sendmsg(to, &[IoSlice::new(b"o")], &mut control, SendFlags::empty())?;
    Ok(())
}

/// Receives what [`send`] sent.
fn receive(from: &UnixStream) -> Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(from, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let files = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    files.context("no descriptor arrived")
}

/// Requests begin with the first letter of the call; then come the path or the bytes to write.
fn perform_for(socket: &UnixStream, file: &File, directory: &[u8]) -> Result<()> {
    let mut request = [0; 4096];
    loop {
        let length = (&*socket).read(&mut request)?;
        let Some((kind, rest)) = request[..length].split_first() else { return Ok(()) };
        match kind {
            b'o' => {
                ensure!(is_within(rest, directory), "not allowed");
                let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
                send(socket, &rustix::fs::open(rest, flags, rustix::fs::Mode::empty())?)?;
            }
            b's' => {
                ensure!(is_within(rest, directory), "not allowed");
                let found = std::fs::metadata(std::ffi::OsStr::from_bytes(rest))?;
                // As long as a `struct stat`.
                let mut answer = [0; 144];
                answer[..8].copy_from_slice(&found.size().to_ne_bytes());
                (&*socket).write_all(&answer)?;
            }
            b'r' => {
                let mut bytes = [0; BYTES];
                file.read_exact_at(&mut bytes, 0)?;
                (&*socket).write_all(&bytes)?;
            }
            _ => {
                file.write_all_at(rest, 0)?;
                (&*socket).write_all(b"w")?;
            }
        }
    }
}

impl SeparateProcess {
    fn ask(&mut self, work: &str) -> Result<()> {
        let mut request = Vec::with_capacity(self.path.len() + 1);
        match work {
            "open" => {
                request.push(b'o');
                request.extend(&self.path);
                self.socket.write_all(&request)?;
                receive(&self.socket)?;
            }
            "stat" => {
                request.push(b's');
                request.extend(&self.path);
                self.socket.write_all(&request)?;
                let mut answer = [0; 144];
                self.socket.read_exact(&mut answer)?;
                ensure!(answer[..8] == (BYTES as u64).to_ne_bytes(), "another file");
            }
            "read" => {
                self.socket.write_all(b"r")?;
                self.socket.read_exact(&mut [0; BYTES])?;
            }
            "write" => {
                request.push(b'w');
                request.extend([7; BYTES]);
                self.socket.write_all(&request)?;
                self.socket.read_exact(&mut [0])?;
            }
            other => bail!("there is no call {other:?}"),
        }
        Ok(())
    }
}

impl Contender for SeparateProcess {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        Sample::batch(iterations, |_| {
            self.ask(work)?;
            Ok(())
        })
    }
}

/// A process for which another one opens a file, without a look at what it asks for: no monitor by notification can do with less.
pub struct LeastOpen {
    caller: Remote,
}

impl LeastOpen {
    /// Starts both.
    pub fn new(directory: &Path) -> Result<Self> {
        let (caller, served) = Remote::new()?;
        let mut direct = Direct::new(directory)?;
        // What it asks for is not there: nothing but the other one's answer will do.
        let absent = CString::new(directory.join("absent").as_os_str().as_bytes())?;
        let path = std::mem::replace(&mut direct.path, absent);
        let (receiving, sending) = UnixStream::pair()?;
        // SAFETY: contenders have one thread when they are made, so the child finds no lock held by another
        // one.
        match unsafe { libc::fork() } {
            0 => {
                drop(receiving);
                let heard = notify::filter_this_thread(&[libc::SYS_open, libc::SYS_openat])
                    .and_then(|file| send(&sending, &file));
                drop(sending);
                let status = if heard.is_ok() { served.serve(&mut direct) } else { 1 };
                // SAFETY: the call takes a number and ends the process, so that nothing of the parent's runs
                // in it.
                unsafe { libc::_exit(status) }
            }
            child => ensure!(child > 0, "fork: {}", std::io::Error::last_os_error()),
        }
        drop((served, sending));
        let listener = receive(&receiving)?;
        std::thread::Builder::new().spawn(move || notify::open_for_all(listener, &path))?;
        Ok(Self { caller })
    }
}

impl Contender for LeastOpen {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        ensure!(work == "open", "there is no call {work:?}");
        self.caller.measure(work, iterations)
    }
}

/// Which calls a tracer stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stops {
    /// All, twice each: what ptrace(2) does by itself.
    All,
    /// Those that a filter picks (`SECCOMP_RET_TRACE`), once each.
    Picked,
}

/// A process that a tracer watches.
pub struct Traced {
    caller: Remote,
}

impl Traced {
    /// Starts both.
    pub fn new(directory: &Path, stops: Stops) -> Result<Self> {
        let (caller, served) = Remote::new()?;
        let mut direct = Direct::new(directory)?;
        let directory = directory.as_os_str().as_bytes().to_vec();
        let filter = picked()?;
        std::thread::Builder::new().spawn(move || {
            // SAFETY: the child makes system calls and does what is requested; other threads of this process
            // hold no locks that it needs.
            match unsafe { libc::fork() } {
                0 => {
                    // SAFETY: the thread that forked traces this process.
                    unsafe {
                        libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
                        libc::raise(libc::SIGSTOP);
                    }
                    if stops == Stops::Picked && seccompiler::apply_filter(&filter).is_err() {
                        // SAFETY: the call takes a number and ends the process, so that nothing of the
                        // parent's runs in it.
                        unsafe { libc::_exit(1) }
                    }
                    let status = served.serve(&mut direct);
                    // SAFETY: the call ends the process at once and takes a number.
                    unsafe { libc::_exit(status) }
                }
                child => {
                    drop(served);
                    trace(child, stops, &directory);
                }
            }
        })?;
        Ok(Self { caller })
    }
}

impl Contender for Traced {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        self.caller.measure(work, iterations)
    }
}

/// Calls that open files or look at them, and which argument is the path.
const WITH_PATH: [(i64, usize); 5] = [
    (libc::SYS_open, 0),
    (libc::SYS_openat, 1),
    (libc::SYS_stat, 0),
    (libc::SYS_newfstatat, 1),
    (libc::SYS_statx, 1),
];

fn picked() -> Result<seccompiler::BpfProgram> {
    let calls = [&WITH_PATH[..], &[(libc::SYS_pread64, 0), (libc::SYS_pwrite64, 0)]].concat();
    let rules = calls.into_iter().map(|(call, _)| (call, Vec::new())).collect();
    let arch = std::env::consts::ARCH.try_into()?;
    let (allow, trace) = (seccompiler::SeccompAction::Allow, seccompiler::SeccompAction::Trace(0));
    Ok(seccompiler::SeccompFilter::new(rules, allow, trace, arch)?.try_into()?)
}

/// Traces: looks at each call, and at the path of those that have one.
fn trace(child: i32, stops: Stops, directory: &[u8]) {
    let mut status = 0;
    // SAFETY: the status lives; the child is this thread's.
    let wait = |status: &mut i32| unsafe { libc::waitpid(child, status, libc::__WALL) } == child;
    if !wait(&mut status) {
        return;
    }
    let (options, go_on) = match stops {
        Stops::All => (libc::PTRACE_O_TRACESYSGOOD, libc::PTRACE_SYSCALL),
        Stops::Picked => (libc::PTRACE_O_TRACESECCOMP, libc::PTRACE_CONT),
    };
    // SAFETY: the child is stopped and this thread's.
    unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, child, 0, options | libc::PTRACE_O_EXITKILL) };
    let mut entering = false;
    let mut signal = 0;
    loop {
        // SAFETY: the child is stopped, and this thread traces it; the request takes numbers.
        unsafe { libc::ptrace(go_on, child, 0, signal) };
        if !wait(&mut status) || !libc::WIFSTOPPED(status) {
            return;
        }
        signal = 0;
        let stopped = libc::WSTOPSIG(status);
        let looks = match stops {
            Stops::All if stopped == libc::SIGTRAP | 0x80 => {
                entering = !entering;
                entering
            }
            Stops::Picked if status >> 8 == libc::SIGTRAP | (libc::PTRACE_EVENT_SECCOMP << 8) => true,
            _ => {
                signal = stopped;
                false
            }
        };
        if looks && !look(child, directory) {
            // SAFETY: a call that is not allowed ends the program; here none is.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
    }
}

/// Returns whether the call that the child is about to make is allowed.
fn look(child: i32, directory: &[u8]) -> bool {
    // SAFETY: the registers are numbers, and the kernel fills in as much as there is.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one `user_regs_struct` to `registers`, which outlives the call; where the
    // child is not stopped, it is an error.
    unsafe { libc::ptrace(libc::PTRACE_GETREGS, child, 0, &raw mut registers) };
    let call = i64::try_from(registers.orig_rax).unwrap_or(-1);
    let Some((_, argument)) = WITH_PATH.iter().find(|(number, _)| *number == call) else { return true };
    let mut path = [0_u8; 256];
    let here = libc::iovec { iov_base: path.as_mut_ptr().cast(), iov_len: path.len() };
    let at = usize::try_from(if *argument == 0 { registers.rdi } else { registers.rsi }).unwrap_or(0);
    let there = libc::iovec { iov_base: std::ptr::without_provenance_mut(at), iov_len: path.len() };
    // SAFETY: the local vector describes `path`, to which the kernel writes no more than its length; bad
    // addresses of the child's are an error.
    unsafe { libc::process_vm_readv(child, &raw const here, 1, &raw const there, 1, 0) };
    let length = path.iter().position(|&byte| byte == 0).unwrap_or(path.len());
    length == 0 || is_within(&path[..length], directory)
}
