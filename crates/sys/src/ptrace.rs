//! Tracing threads of other processes: ptrace(2).
//!
//! All requests must come from the thread that has seized the tracee. The kernel detaches a tracee when that thread ends.

use std::ffi::{c_int, c_long, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::thread;
use std::time::{Duration, Instant};

/// Why a tracee stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// It has ended, or cannot be waited for.
    Gone,
    /// It has executed another program.
    Exec,
    /// It entered or left a system call.
    Call,
    /// It is to receive a signal.
    Signal(c_int),
    /// Its process is stopped (a group-stop).
    Group,
    /// Any other event.
    Other,
}

/// The `word` of a ptrace request that needs none.
const NONE: usize = 0;
/// `NT_X86_XSTATE`: the registers of the FPU and of vectors.
const EXTENDED_STATE: usize = 0x202;
/// More than the extended state of any processor so far, in bytes.
const MAX_EXTENDED_STATE: usize = 16 << 10;
/// `PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG` (Linux 6.4).
const GET_SYSCALL_USER_DISPATCH_CONFIG: libc::c_uint = 0x4211;
/// How often it is looked whether a tracee has stopped.
const LOOK_INTERVAL: Duration = Duration::from_micros(200);
const SIGNAL_SET: usize = 8;

fn ptrace(request: libc::c_uint, pid: libc::pid_t, address: usize, data: usize) -> io::Result<c_long> {
    let (address, data): (*mut c_void, *mut c_void) =
        (std::ptr::with_exposed_provenance_mut(address), std::ptr::with_exposed_provenance_mut(data));
    // SAFETY: `data` is a number, or points to a live structure that is as large as the request wants: see the methods below.
    let result = unsafe { libc::ptrace(request, pid, address, data) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

bitflags::bitflags! {
    /// `PTRACE_O_*`: at which events a tracee stops, and how.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Options: libc::c_int {
        /// Stops when it has executed a program.
        const TRACE_EXEC = libc::PTRACE_O_TRACEEXEC;
        /// Tells stops at system calls from SIGTRAP.
        const TRACE_SYSCALL_GOOD = libc::PTRACE_O_TRACESYSGOOD;
        /// Traces the threads that it makes, too.
        const TRACE_CLONE = libc::PTRACE_O_TRACECLONE;
        /// Suspends its seccomp filters; requires `CAP_SYS_ADMIN`.
        const SUSPEND_SECCOMP = libc::PTRACE_O_SUSPEND_SECCOMP;
    }
}

/// Waits for any thread that this one traces to stop or to end, and returns it. `None`: it traces none.
pub fn wait_for_any() -> Option<(Tracee, Stop)> {
    wait_for(-1, libc::__WALL | libc::__WNOTHREAD).map(|(pid, stop)| (Tracee { pid }, stop))
}

/// Waits for a thread that this one traces, or for any (-1). With `WNOHANG`, the thread ID is 0 if none has stopped.
fn wait_for(pid: libc::pid_t, flags: c_int) -> Option<(libc::pid_t, Stop)> {
    let mut status = 0;
    let pid = loop {
        // SAFETY: `status` is an integer that lives until the call returns.
        let pid = unsafe { libc::waitpid(pid, &raw mut status, flags) };
        if pid >= 0 {
            break pid;
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return None;
        }
    };
    if !libc::WIFSTOPPED(status) {
        return Some((pid, Stop::Gone));
    }
    let signal = libc::WSTOPSIG(status);
    let stop = match status >> 16 {
        libc::PTRACE_EVENT_EXEC => Stop::Exec,
        libc::PTRACE_EVENT_STOP => match signal {
            libc::SIGSTOP | libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU => Stop::Group,
            _ => Stop::Other,
        },
        0 if signal == libc::SIGTRAP | 0x80 => Stop::Call,
        0 => Stop::Signal(signal),
        _ => Stop::Other,
    };
    Some((pid, stop))
}

/// A seized thread.
#[derive(Debug)]
pub struct Tracee {
    pid: libc::pid_t,
}

impl Tracee {
    /// Traces a thread without stopping it (`PTRACE_SEIZE`).
    ///
    /// # Errors
    /// `EPERM`: another process traces the thread, or this one may not. `ESRCH`: there is no such thread.
    pub fn seize(pid: libc::pid_t, options: Options) -> io::Result<Self> {
        ptrace(libc::PTRACE_SEIZE, pid, NONE, usize::try_from(options.bits()).unwrap_or(0))?;
        Ok(Self { pid })
    }

    /// Stops it (`PTRACE_INTERRUPT`); [`Tracee::wait`] returns when it has stopped.
    ///
    /// # Errors
    /// `ESRCH`: it has ended.
    pub fn interrupt(&self) -> io::Result<()> {
        ptrace(libc::PTRACE_INTERRUPT, self.pid, NONE, NONE).map(drop)
    }

    /// Returns its thread ID.
    #[must_use]
    pub fn pid(&self) -> libc::pid_t {
        self.pid
    }

    /// Waits for it to stop.
    pub fn wait(&self) -> Stop {
        wait_for(self.pid, libc::__WALL).map_or(Stop::Gone, |(_, stop)| stop)
    }

    /// Waits until a time for it to stop; `None`: it has not. A thread that sleeps in the kernel so that only its death could wake
    /// it, as one whose `vfork` child runs, does not stop.
    pub fn wait_until(&self, deadline: Instant) -> Option<Stop> {
        loop {
            match wait_for(self.pid, libc::__WALL | libc::WNOHANG) {
                Some((0, _)) if Instant::now() >= deadline => return None,
                Some((0, _)) => thread::sleep(LOOK_INTERVAL),
                Some((_, stop)) => return Some(stop),
                None => return Some(Stop::Gone),
            }
        }
    }

    /// Waits for it to stop, where this thread traces no other one. A thread that executes a program takes the PID of its process;
    /// this finds it all the same.
    pub fn wait_over_exec(&mut self) -> Stop {
        // Only what this thread traces is waited for.
        let Some((pid, stop)) = wait_for(-1, libc::__WALL | libc::__WNOTHREAD) else { return Stop::Gone };
        if stop != Stop::Gone {
            self.pid = pid;
        }
        stop
    }

    /// Lets it run, and delivers a signal to it unless that is zero (`PTRACE_CONT`).
    pub fn resume(&self, signal: c_int) {
        let _gone = ptrace(libc::PTRACE_CONT, self.pid, NONE, usize::try_from(signal).unwrap_or(0));
    }

    /// Leaves it in its group-stop until SIGCONT comes (`PTRACE_LISTEN`).
    pub fn listen(&self) {
        let _gone = ptrace(libc::PTRACE_LISTEN, self.pid, NONE, NONE);
    }

    /// Lets it run until it next enters or leaves a system call, and delivers a signal to it unless that is zero (`PTRACE_SYSCALL`).
    ///
    /// # Errors
    /// `ESRCH`: it has ended, or is not stopped.
    pub fn resume_to_syscall(&self, signal: c_int) -> io::Result<()> {
        ptrace(libc::PTRACE_SYSCALL, self.pid, NONE, usize::try_from(signal).unwrap_or(0)).map(drop)
    }

    /// Lets it execute one instruction, behind which it stops by a SIGTRAP (`PTRACE_SINGLESTEP`). The kernel resets the action of a SIGTRAP
    /// that is ignored.
    ///
    /// # Errors
    /// `ESRCH`: it has ended, or is not stopped.
    pub fn step(&self) -> io::Result<()> {
        ptrace(libc::PTRACE_SINGLESTEP, self.pid, NONE, NONE).map(drop)
    }

    /// Detaches from it, and returns whether that worked: it does not where the tracee is not stopped.
    pub fn detach(&self) -> bool {
        ptrace(libc::PTRACE_DETACH, self.pid, NONE, NONE).is_ok()
    }

    /// Returns its general registers.
    ///
    /// # Errors
    /// `ESRCH`: it has ended, or is not stopped.
    pub fn registers(&self) -> io::Result<libc::user_regs_struct> {
        let mut registers = MaybeUninit::<libc::user_regs_struct>::uninit();
        ptrace(libc::PTRACE_GETREGS, self.pid, NONE, registers.as_mut_ptr().expose_provenance())?;
        // SAFETY: the kernel has filled all of it.
        Ok(unsafe { registers.assume_init() })
    }

    /// Sets its general registers.
    ///
    /// # Errors
    /// `ESRCH`: it has ended, or is not stopped. `EIO`: no thread can have these registers.
    pub fn set_registers(&self, registers: &libc::user_regs_struct) -> io::Result<()> {
        let registers = std::ptr::from_ref(registers).expose_provenance();
        ptrace(libc::PTRACE_SETREGS, self.pid, NONE, registers).map(drop)
    }

    /// Returns the registers of its FPU and vectors, in the form of XSAVE (`PTRACE_GETREGSET`).
    ///
    /// # Errors
    /// `ESRCH`: it has ended, or is not stopped.
    pub fn extended_state(&self) -> io::Result<Vec<u8>> {
        let mut state = vec![0; MAX_EXTENDED_STATE];
        let mut vector = libc::iovec { iov_base: state.as_mut_ptr().cast(), iov_len: state.len() };
        ptrace(libc::PTRACE_GETREGSET, self.pid, EXTENDED_STATE, (&raw mut vector).expose_provenance())?;
        state.truncate(vector.iov_len);
        Ok(state)
    }

    /// Sets what [`Tracee::extended_state`] returned.
    ///
    /// # Errors
    /// `ESRCH`: it has ended, or is not stopped. `EINVAL`: no thread can have this state.
    pub fn set_extended_state(&self, state: &[u8]) -> io::Result<()> {
        let vector = libc::iovec { iov_base: state.as_ptr().cast_mut().cast(), iov_len: state.len() };
        let vector = (&raw const vector).expose_provenance();
        ptrace(libc::PTRACE_SETREGSET, self.pid, EXTENDED_STATE, vector).map(drop)
    }

    /// Returns the address and the length of the code whose system calls are not dispatched to a handler of its own, if others are
    /// (`PR_SET_SYSCALL_USER_DISPATCH`).
    ///
    /// # Errors
    /// `ESRCH`: it has ended, or is not stopped. `EIO`: a kernel before 6.4.
    pub fn undispatched_code(&self) -> io::Result<Option<(u64, u64)>> {
        // `struct ptrace_sud_config`: mode, selector, offset, length.
        let mut config = [0_u64; 4];
        let at = config.as_mut_ptr().expose_provenance();
        ptrace(GET_SYSCALL_USER_DISPATCH_CONFIG, self.pid, size_of_val(&config), at)?;
        let [mode, _, start, length] = config;
        Ok((mode != 0).then_some((start, length)))
    }

    /// Returns the number of the system call that it has entered, if it stopped for that ([`Stop::Call`]) before the kernel looked at it
    /// (`PTRACE_GET_SYSCALL_INFO`, Linux 5.3).
    #[must_use]
    pub fn entered_call(&self) -> Option<u64> {
        let mut info = MaybeUninit::<libc::ptrace_syscall_info>::zeroed();
        let (length, info_at) = (size_of_val(&info), info.as_mut_ptr().expose_provenance());
        ptrace(libc::PTRACE_GET_SYSCALL_INFO, self.pid, length, info_at).ok()?;
        // SAFETY: numbers, which are zero where the kernel has not written; `entry` is what it wrote where `op` says so.
        unsafe {
            let info = info.assume_init();
            (info.op == libc::PTRACE_SYSCALL_INFO_ENTRY).then_some(info.u.entry.nr)
        }
    }

    /// Returns its signal mask; that of a thread in sigsuspend(2) and its like is the one that it will have afterwards.
    ///
    /// # Errors
    /// `ESRCH`: it has ended, or is not stopped.
    pub fn mask(&self) -> io::Result<u64> {
        let mut mask = 0_u64;
        let at = (&raw mut mask).expose_provenance();
        ptrace(libc::PTRACE_GETSIGMASK, self.pid, SIGNAL_SET, at)?;
        Ok(mask)
    }

    /// Sets its signal mask.
    ///
    /// # Errors
    /// `ESRCH`: it has ended, or is not stopped.
    pub fn set_mask(&self, mask: u64) -> io::Result<()> {
        let mask = (&raw const mask).expose_provenance();
        ptrace(libc::PTRACE_SETSIGMASK, self.pid, SIGNAL_SET, mask).map(drop)
    }

    /// Returns the value that a queued signal carries, if the stop is for one.
    #[must_use]
    pub fn signal_value(&self) -> Option<u64> {
        let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
        ptrace(libc::PTRACE_GETSIGINFO, self.pid, NONE, info.as_mut_ptr().expose_provenance()).ok()?;
        // SAFETY: the kernel has filled it; a queued signal carries a value.
        unsafe {
            let info = info.assume_init();
            (info.si_code == libc::SI_QUEUE).then(|| info.si_value().sival_ptr.addr() as u64)
        }
    }

    /// Replaces a word of its memory, even where it may not write itself, and returns the word that was there.
    ///
    /// # Errors
    /// `EIO`: nothing is mapped there. `ESRCH`: it has ended, or is not stopped.
    pub fn replace_word(&self, at: u64, word: u64) -> io::Result<u64> {
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
