//! A vault for servers: one that all processes of a program share, those forked later included.
//!
//! ```standalone_crate
//! use orrery_vault::shared::{Errno, VaultService, SharedVault};
//!
//! struct Sum(Vec<u8>);
//! impl VaultService for Sum {
//!     fn load(&mut self, key: &[u8], _answer: &mut [u8]) -> Result<usize, Errno> {
//!         self.0 = key.to_vec(); // or read it from a file
//!         Ok(0)
//!     } fn serve(&mut self, data: &[u8], answer: &mut [u8]) -> Result<usize, Errno> {
//!         answer[0] = self.0.iter().chain(data).fold(0, |a, b| a ^ b);
//!         Ok(1)
//!     }
//! }
//!
//! let vault = SharedVault::fork(Sum(Vec::new()))?;
//! vault.load(&[1, 2])?;
//! let mut answer = [0; 16];
//! assert_eq!(vault.call(&[4], &mut answer)?, 1); // here, or in any process forked from here
//! assert_eq!(answer[0], 7);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A [context](orrery_context) belongs to one thread and does not outlive a fork; a server reads its keys at the start,
//! becomes a daemon, forks workers, and forks new ones whenever it is told to reload. So this vault is no context but a
//! process beside the program, reached through a socket that forked processes inherit:
//!
//! ```text
//! master ──fork── worker ══ line ══ twin      a twin for each process that calls, on its CPU,
//!    │    └─fork── worker ══ line ══ twin      with memory and gate between the two alone
//!    └──── socket ────── keeper ─── spare      the keeper loads, and copies itself into twins
//! ```
//!
//! No process sees, delays or ends what another one asks: neither its socket nor its line is another's, and a fork leaves
//! nothing of the parent's in the child. The keeper gives each a turn.
//!
//! Calls go through a line of shared memory and a [gate](orrery_domain::gate) and cost what two hand-overs on one CPU
//! cost; only the first one of a process, which makes its twin, and loading go through the socket.
//!
//! # Who may what
//!
//! Whoever has a connection may ask for a twin, if it is of the user who made the vault, or of the first other user who
//! came: servers change their user once. Only the former (and the superuser) may have something loaded. The kernel
//! names the sender of each request; nothing that it says itself is believed.
//!
//! # Deaths
//!
//! A twin ends with its client, and is replaced at the client's next call if it dies; a call that it died of is made
//! once more. When the keeper dies, its spare takes over. When all processes of the program are gone, so are the
//! vault's. Only if keeper and spare are killed at the same time is the vault gone ([`Error::Gone`]): twins that exist
//! serve on, and whoever can load the secrets again makes a new vault.

use std::ffi::CStr;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::time::Duration;

use orrery_domain::copy::{Copied, Kin, copy_process};
use orrery_domain::watch::last_errno;
use orrery_sys::signals;
use rustix::process::{WaitId, WaitIdOptions};

pub use super::call_buffer::ROOM;
use super::client::{Client, Failure};
use super::message;
pub use super::message::LOAD_ROOM;
pub use super::{Loads, VaultService};
pub use rustix::io::Errno;

/// Where a program that was started as a vault finds its socket.
const SOCKET: i32 = 3;

/// Why a vault could not be made, or did not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The vault is dead, or has closed itself.
    #[error("the vault is gone; make it anew, for a server: restart or reload it")]
    Gone,
    /// No answer came in time; what was asked is forgotten.
    #[error("the vault gave no answer within 30 seconds")]
    TimedOut,
    /// The program has several threads, of which a copy would have one.
    #[error("a program with {threads} threads cannot make or be a vault: do it before they are made")]
    NotAlone {
        /// How many there are.
        threads: usize,
    },
    /// A program could not be started as a vault.
    #[error("cannot start {program:?} as a vault: {errno}")]
    Start {
        /// The program.
        program: CString,
        /// The error of execve(2).
        errno: Errno,
    },
    /// This program was not started as a vault: descriptor 3 is no socket of one.
    #[error("this program is started by others, as their vault, and not by itself")]
    NoVault,
    /// What the vault's functions, or the system, answered.
    #[error("the vault answered: {0}")]
    Errno(Errno),
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Gone => Self::Gone,
            Failure::TimedOut => Self::TimedOut,
            Failure::Errno(errno) => Self::Errno(errno),
        }
    }
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        Self::from(Failure::from(errno))
    }
}

/// A vault that processes share by fork(2).
///
/// Dropping it in the last process that has it ends the vault; so does the end of all those processes.
#[derive(Debug)]
pub struct SharedVault {
    client: Client,
    locked: bool,
}

impl SharedVault {
    /// Makes a vault from a copy of the calling process: the keeper's functions run there. Nothing has been loaded yet.
    ///
    /// # Errors
    /// [`Error::NotAlone`] where the program has other threads; [`Error::Errno`].
    pub fn fork<K: VaultService>(mut keeper: K) -> Result<Self, Error> {
        check_alone()?;
        Self::start(|socket| {
            let socket = alone_with(socket)?;
            super::supervisor::keep(socket, &mut keeper)
        })
    }

    /// Starts another program as a vault: it has nothing of the caller's memory, files or environment, and calls
    /// [`become_vault`]. `arguments` begins with its own name. The program may have threads.
    ///
    /// # Errors
    /// [`Error::Start`] where it cannot be started; [`Error::Errno`].
    pub fn exec(program: &CStr, arguments: &[&CStr]) -> Result<Self, Error> {
        let mut pointers: Vec<_> = arguments.iter().map(|argument| argument.as_ptr()).collect();
        pointers.push(std::ptr::null());
        // The vault's working directory is the root.
        let path = std::path::absolute(std::ffi::OsStr::from_bytes(program.to_bytes()))
            .ok()
            .and_then(|path| CString::new(path.into_os_string().into_vec()).ok())
            .unwrap_or_else(|| program.to_owned());
        let environment = [c"PATH=/usr/bin:/bin".as_ptr(), std::ptr::null()];
        let result = Self::start(|socket| {
            // Only system calls from here on: another thread may have had any lock at the fork.
            let socket = alone_with(socket)?;
            // SAFETY: clears CLOEXEC; and the strings and lists end as execve(2) wants them to.
            unsafe {
                libc::fcntl(socket.as_raw_fd(), libc::F_SETFD, 0);
                libc::execve(path.as_ptr(), pointers.as_ptr(), environment.as_ptr());
            }
            let errno = last_errno();
            // Through it, the failure is told.
            std::mem::forget(socket);
            Err(errno)
        });
        result.map_err(|error| match error {
            Error::Errno(errno) => Error::Start { program: program.to_owned(), errno },
            other => other,
        })
    }

    /// Runs `body` in a process that is nobody's child. It returns only if it failed.
    fn start(body: impl FnOnce(OwnedFd) -> Result<std::convert::Infallible, Errno>) -> Result<Self, Error> {
        let (ours, theirs) = message::pair()?;
        let cookie = rustix::net::sockopt::socket_cookie(&ours)?;
        message::send(ours.as_fd(), &message::Request::Hello(cookie).encode(), &[], true)?;
        let mask = signals::block_all();
        // SAFETY: the copy runs async-signal-safe code only, but where the process has one thread.
        let copied = unsafe { copy_process(Kin::HiddenChild) };
        let Ok(None) = copied else {
            signals::set_mask(mask);
            drop(theirs);
            let Copied { pidfd, .. } = copied?.ok_or(Errno::CHILD)?;
            // The child has a child of its own and ends at once. Hidden children are waited for with __WALL only.
            let options =
                WaitIdOptions::from_bits_retain(libc::WEXITED.cast_unsigned() | libc::__WALL.cast_unsigned());
            let _ =
                rustix::io::retry_on_intr(|| rustix::process::waitid(WaitId::PidFd(pidfd.as_fd()), options));
            return Self::greet(ours);
        };
        // The child.
        drop(ours);
        // SAFETY: the copy runs async-signal-safe code only, unless the process has one thread.
        let errno = match unsafe { copy_process(Kin::HiddenChild) } {
            Ok(Some(_)) => None,
            Ok(None) => {
                signals::set_mask(0);
                let copy = theirs.as_fd().try_clone_to_owned();
                let failed = copy.map_err(|_| Errno::MFILE).and_then(body);
                failed.err()
            }
            Err(errno) => Some(errno),
        };
        if let Some(errno) = errno {
            // `theirs` may be closed by now, and descriptor 3 be the same.
            let words = message::encode_answer(Err(errno));
            // SAFETY: descriptor 3, if it is anything, is the socket: all others were closed.
            let socket = unsafe { std::os::fd::BorrowedFd::borrow_raw(SOCKET) };
            if message::send(socket, &words, &[], false).is_err() {
                let _ = message::send(theirs.as_fd(), &words, &[], false);
            }
        }
        // SAFETY: ends the process without running anything of the program's.
        unsafe { libc::_exit(0) }
    }

    /// Waits until the vault is ready.
    fn greet(socket: OwnedFd) -> Result<Self, Error> {
        let client = Client::new(socket)?;
        match client.hear() {
            Ok(locked) => Ok(Self { client, locked }),
            Err(failure) => Err(failure.into()),
        }
    }

    /// Returns whether the vault's memory is kept from the swap partition. For that it needs CAP_IPC_LOCK, or a limit
    /// (RLIMIT_MEMLOCK) that is larger than its memory.
    pub fn is_locked(&self) -> bool {
        self.locked
    }

    /// Has the keeper load what `request` says, [`LOAD_ROOM`] bytes at most; gives its answer.
    ///
    /// # Errors
    /// [`Error::Errno`] with what [`VaultService::load`] returned, `EPERM` for users who may not, `EMSGSIZE`;
    /// [`Error::Gone`].
    pub fn load(&self, request: &[u8]) -> Result<Vec<u8>, Error> {
        Ok(self.client.load(request)?)
    }

    /// Has this process' twin serve `request`, [`ROOM`] bytes at most; gives how many bytes it answered.
    ///
    /// # Errors
    /// [`Error::Errno`] with what [`VaultService::serve`] returned, `EMSGSIZE` where request or answer are too long;
    /// `EUSERS` where there are too many twins; [`Error::Gone`], [`Error::TimedOut`].
    pub fn call(&self, request: &[u8], answer: &mut [u8]) -> Result<usize, Error> {
        Ok(self.client.call(request, answer)?)
    }
}

/// Fails with [`Error::NotAlone`] where the process has other threads.
fn check_alone() -> Result<(), Error> {
    let count = || std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    // A thread that was joined is still listed for a moment.
    let alone = (0..50).any(|_| count() == 1 || (std::thread::sleep(Duration::from_millis(1)), false).1);
    if alone { Ok(()) } else { Err(Error::NotAlone { threads: count() }) }
}

/// In a program started by [`SharedVault::exec`]: is the vault. Returns only if it was not started as one.
///
/// # Errors
/// [`Error::NoVault`]; [`Error::NotAlone`] where the process has other threads.
///
/// # Safety
/// Nothing in this process owns descriptor 3: if it is a socket as vaults have, it is closed when this ends.
pub unsafe fn become_vault<K: VaultService>(mut keeper: K) -> Error {
    // SAFETY: asks about a number; nothing is done to it unless it is a socket, which its starter left for us.
    let socket = unsafe { std::os::fd::BorrowedFd::borrow_raw(SOCKET) };
    if rustix::net::sockopt::socket_type(socket) != Ok(rustix::net::SocketType::SEQPACKET) {
        return Error::NoVault;
    }
    if let Err(error) = check_alone() {
        return error;
    }
    // SAFETY: descriptor 3 is a socket, and nothing else owns the number (# Safety).
    let socket = unsafe { OwnedFd::from_raw_fd(SOCKET) };
    let _ = rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC);
    super::supervisor::keep(socket, &mut keeper)
}

/// Closes all files but the socket, which becomes descriptor 3, and gives the process an empty standard input and
/// output. Async-signal-safe.
fn alone_with(socket: OwnedFd) -> Result<OwnedFd, Errno> {
    // SAFETY: system calls on numbers; all handles of the program's are copies in this process that nobody uses again.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        if null < 0 {
            return Err(last_errno());
        }
        // Both out of the way of the numbers that they are to have.
        let socket_up = libc::fcntl(socket.as_raw_fd(), libc::F_DUPFD, 10);
        let null_up = libc::fcntl(null, libc::F_DUPFD, 10);
        if socket_up < 0 || null_up < 0 {
            return Err(last_errno());
        }
        for number in 0..3 {
            libc::dup2(null_up, number);
        }
        libc::dup3(socket_up, SOCKET, libc::O_CLOEXEC);
        std::mem::forget(socket);
        if libc::syscall(libc::SYS_close_range, SOCKET + 1, u32::MAX, 0) < 0 {
            for number in SOCKET + 1..4096 {
                libc::close(number);
            }
        }
        // No directory is kept from being unmounted, and no path is meant relative to one.
        libc::chdir(c"/".as_ptr());
        Ok(OwnedFd::from_raw_fd(SOCKET))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_nobody_started_as_a_vault_is_none() {
        struct Nothing;
        impl VaultService for Nothing {
            fn load(&mut self, _: &[u8], _: &mut [u8]) -> Result<usize, Errno> {
                Ok(0)
            }
            fn serve(&mut self, _: &[u8], _: &mut [u8]) -> Result<usize, Errno> {
                Ok(0)
            }
        }
        // SAFETY: test programs have descriptor 3 for something else, or not at all; nothing is closed unless it is a socket of a vault.
        assert_eq!(unsafe { become_vault(Nothing) }, Error::NoVault);
    }
}
