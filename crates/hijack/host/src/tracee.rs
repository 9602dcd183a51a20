//! A thread that this one traces: ptrace(2), as far as it is needed here.

use std::ffi::{c_int, c_long, c_void};
use std::io;
use std::mem::MaybeUninit;

/// Why a traced thread stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// It ended.
    Gone,
    /// It has executed another program.
    Exec,
    /// It entered or left a system call.
    Call,
    /// It is to receive a signal.
    Signal(c_int),
    /// Its process is stopped.
    Group,
    /// Something that says nothing to us.
    Other,
}

/// The `word` of a ptrace request that needs none.
const NONE: usize = 0;
const SIGNAL_SET: usize = 8;

fn ptrace(request: libc::c_uint, pid: libc::pid_t, address: usize, data: usize) -> io::Result<c_long> {
    let (address, data): (*mut c_void, *mut c_void) =
        (std::ptr::with_exposed_provenance_mut(address), std::ptr::with_exposed_provenance_mut(data));
    // SAFETY: what `data` points to is valid for the request, by the functions below.
    let result = unsafe { libc::ptrace(request, pid, address, data) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// One traced thread. It is let go of when the tracing thread ends.
#[derive(Debug)]
pub(crate) struct Tracee {
    pid: libc::pid_t,
}

impl Tracee {
    /// Traces a thread without stopping it; it will stop when it has executed a program.
    pub(crate) fn seize(pid: libc::pid_t) -> io::Result<Self> {
        let options = libc::PTRACE_O_TRACEEXEC | libc::PTRACE_O_TRACESYSGOOD;
        ptrace(libc::PTRACE_SEIZE, pid, NONE, usize::try_from(options).unwrap_or(0))?;
        Ok(Self { pid })
    }

    pub(crate) fn pid(&self) -> libc::pid_t {
        self.pid
    }

    /// Waits for the thread to stop. A thread that executes a program takes its process's number.
    pub(crate) fn wait(&mut self) -> Stop {
        let mut status = 0;
        let pid = loop {
            // SAFETY: `status` takes an integer. Only what this thread traces is waited for.
            let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
            if pid >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                break pid;
            }
        };
        if pid < 0 || !libc::WIFSTOPPED(status) {
            return Stop::Gone;
        }
        self.pid = pid;
        let signal = libc::WSTOPSIG(status);
        match status >> 16 {
            libc::PTRACE_EVENT_EXEC => Stop::Exec,
            libc::PTRACE_EVENT_STOP => match signal {
                libc::SIGSTOP | libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU => Stop::Group,
                _ => Stop::Other,
            },
            0 if signal == libc::SIGTRAP | 0x80 => Stop::Call,
            0 => Stop::Signal(signal),
            _ => Stop::Other,
        }
    }

    /// Lets it run, with a signal or zero.
    pub(crate) fn resume(&self, signal: c_int) {
        let _gone = ptrace(libc::PTRACE_CONT, self.pid, NONE, usize::try_from(signal).unwrap_or(0));
    }

    /// Lets it be stopped until it is continued.
    pub(crate) fn listen(&self) {
        let _gone = ptrace(libc::PTRACE_LISTEN, self.pid, NONE, NONE);
    }

    /// Lets it run to where it next enters or leaves the kernel.
    pub(crate) fn to_call(&self) -> io::Result<()> {
        ptrace(libc::PTRACE_SYSCALL, self.pid, NONE, NONE).map(drop)
    }

    /// Lets it perform the system call that it stands at, and stops it behind that, by a SIGTRAP: a stop less than by `to_call`. Who
    /// ignores that signal does not any more afterwards.
    pub(crate) fn over_call(&self) -> io::Result<()> {
        ptrace(libc::PTRACE_SINGLESTEP, self.pid, NONE, NONE).map(drop)
    }

    /// Stops tracing. Whether that worked; if not, the thread is let go of when the tracing thread ends.
    pub(crate) fn detach(self) -> bool {
        ptrace(libc::PTRACE_DETACH, self.pid, NONE, NONE).is_ok()
    }

    pub(crate) fn registers(&self) -> io::Result<libc::user_regs_struct> {
        let mut registers = MaybeUninit::<libc::user_regs_struct>::uninit();
        ptrace(libc::PTRACE_GETREGS, self.pid, NONE, registers.as_mut_ptr().expose_provenance())?;
        // SAFETY: the kernel has filled all of it.
        Ok(unsafe { registers.assume_init() })
    }

    pub(crate) fn set_registers(&self, registers: &libc::user_regs_struct) -> io::Result<()> {
        let registers = std::ptr::from_ref(registers).expose_provenance();
        ptrace(libc::PTRACE_SETREGS, self.pid, NONE, registers).map(drop)
    }

    /// Sets its signal mask.
    pub(crate) fn set_mask(&self, mask: u64) -> io::Result<()> {
        let mask = (&raw const mask).expose_provenance();
        ptrace(libc::PTRACE_SETSIGMASK, self.pid, SIGNAL_SET, mask).map(drop)
    }

    /// The number that a queued signal carries, if the stop is for one.
    pub(crate) fn signal_value(&self) -> Option<u64> {
        let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
        ptrace(libc::PTRACE_GETSIGINFO, self.pid, NONE, info.as_mut_ptr().expose_provenance()).ok()?;
        // SAFETY: the kernel has filled it; a queued signal carries a value.
        unsafe {
            let info = info.assume_init();
            (info.si_code == libc::SI_QUEUE).then(|| info.si_value().sival_ptr.addr() as u64)
        }
    }

    /// Writes to code that it cannot write to itself; gives the word that was there.
    pub(crate) fn exchange(&self, at: u64, word: u64) -> io::Result<u64> {
        let at = usize::try_from(at).unwrap_or(0);
        // SAFETY: errno alone tells a word of all ones from a failure, and is cleared for that.
        let before = unsafe {
            *libc::__errno_location() = 0;
            libc::ptrace(libc::PTRACE_PEEKTEXT, self.pid, at, 0)
        };
        if before == -1 && io::Error::last_os_error().raw_os_error() != Some(0) {
            return Err(io::Error::last_os_error());
        }
        ptrace(libc::PTRACE_POKETEXT, self.pid, at, usize::try_from(word).unwrap_or(0))?;
        Ok(before.cast_unsigned())
    }
}

/// Reads a process's memory.
pub(crate) fn read_memory(pid: libc::pid_t, from: u64, to: &mut [u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
    let remote = remote(from, to.len());
    // SAFETY: the local piece is the slice.
    let done = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    complete(done, to.len())
}

/// Writes to a process's memory: pieces that lie one behind the other there.
pub(crate) fn write_memory<const N: usize>(pid: libc::pid_t, to: u64, from: [&[u8]; N]) -> io::Result<()> {
    let local =
        from.map(|piece| libc::iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() });
    let length = from.iter().map(|piece| piece.len()).sum();
    let remote = remote(to, length);
    let pieces = libc::c_ulong::try_from(N).unwrap_or(0);
    // SAFETY: the local pieces are the slices, and only read.
    let done = unsafe { libc::process_vm_writev(pid, local.as_ptr(), pieces, &raw const remote, 1, 0) };
    complete(done, length)
}

fn remote(at: u64, length: usize) -> libc::iovec {
    let at = usize::try_from(at).unwrap_or(0);
    libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(at), iov_len: length }
}

fn complete(done: isize, length: usize) -> io::Result<()> {
    match usize::try_from(done) {
        Ok(done) if done == length => Ok(()),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}
