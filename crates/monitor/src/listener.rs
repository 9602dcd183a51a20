//! The monitor's end of seccomp(2): [seccomp_unotify(2)](https://man7.org/linux/man-pages/man2/seccomp_unotify.2.html).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use linux_raw_sys::ptrace::{
    SECCOMP_ADDFD_FLAG_SEND, SECCOMP_FILTER_FLAG_NEW_LISTENER, SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV,
    SECCOMP_SET_MODE_FILTER, SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP, SECCOMP_USER_NOTIF_FLAG_CONTINUE,
    seccomp_notif, seccomp_notif_addfd, seccomp_notif_resp, sock_filter, sock_fprog,
};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};
use syscalls::{Sysno, syscall};

const RECEIVE: Opcode = opcode::read_write::<seccomp_notif>(b'!', 0);
const SEND: Opcode = opcode::read_write::<seccomp_notif_resp>(b'!', 1);
const ID_VALID: Opcode = opcode::write::<u64>(b'!', 2);
const ADD: Opcode = opcode::write::<seccomp_notif_addfd>(b'!', 3);
const SET_FLAGS: Opcode = opcode::write::<u64>(b'!', 4);

pub(crate) fn errno(error: syscalls::Errno) -> Errno {
    Errno::from_raw_os_error(error.into_raw())
}

/// A call that waits for its answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    /// The kernel's name for this waiting.
    pub(crate) id: u64,
    /// The calling thread.
    pub(crate) thread: i32,
    /// Which call.
    pub(crate) number: i32,
    /// Its arguments.
    pub(crate) arguments: [u64; 6],
}

/// The descriptor through which the kernel tells of calls.
#[derive(Debug)]
pub(crate) struct Listener(OwnedFd);

/// Puts the filter on the calling thread for good, after giving up setuid programs, and returns the listener's number.
/// Makes two system calls and nothing else, for the time between fork and exec.
///
/// # Errors
/// Those of prctl(2) and seccomp(2).
pub(crate) fn filter_this_thread(program: &[sock_filter]) -> Result<OwnedFd, Errno> {
    let length = u16::try_from(program.len()).map_err(|_| Errno::INVAL)?;
    let program = sock_fprog { len: length, filter: program.as_ptr().cast_mut() };
    rustix::thread::set_no_new_privs(true)?;
    let install = |flags: u32| {
        // SAFETY: the kernel copies the program, whose length is right.
        unsafe { syscall!(Sysno::seccomp, SECCOMP_SET_MODE_FILTER, flags, &raw const program) }
    };
    let listener = match install(SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV) {
        // Before Linux 5.19 a signal could break off a call that the monitor had taken up.
        Err(syscalls::Errno::EINVAL) => install(SECCOMP_FILTER_FLAG_NEW_LISTENER),
        other => other,
    };
    let listener = i32::try_from(listener.map_err(errno)?).map_err(|_| Errno::BADF)?;
    // SAFETY: the kernel made the descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(listener) })
}

impl Listener {
    /// Takes over a listener, and has the kernel switch straight to whoever it wakes (Linux 6.6), where it can: else a
    /// call costs a wake-up of another CPU.
    pub(crate) fn new(descriptor: OwnedFd) -> Self {
        // SAFETY: the flags go by value.
        let _ = unsafe {
            syscall!(
                Sysno::ioctl,
                descriptor.as_raw_fd(),
                SET_FLAGS,
                u64::from(SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP)
            )
        };
        Self(descriptor)
    }

    /// Waits for the next call.
    ///
    /// # Errors
    /// `ENOENT` where the caller has gone already or nobody is left to call; `EINTR` upon a signal.
    pub(crate) fn receive(&self) -> Result<Call, Errno> {
        // SAFETY: the structure consists of numbers; the kernel wants it to be zero.
        let mut call: seccomp_notif = unsafe { core::mem::zeroed() };
        // SAFETY: the kernel fills in a structure of that size, which the request's number states.
        unsafe { syscall!(Sysno::ioctl, self.0.as_raw_fd(), RECEIVE, &raw mut call) }.map_err(errno)?;
        Ok(Call {
            id: call.id,
            thread: call.pid.cast_signed(),
            number: call.data.nr,
            arguments: call.data.args,
        })
    }

    /// Whether the caller still waits: the thread's number still means the thread that called.
    pub(crate) fn waits(&self, id: u64) -> bool {
        // SAFETY: the kernel reads a number.
        unsafe { syscall!(Sysno::ioctl, self.0.as_raw_fd(), ID_VALID, &raw const id) }.is_ok()
    }

    /// Answers with a value or an error. Where the caller has gone nobody needs the answer.
    pub(crate) fn answer(&self, id: u64, answer: Result<i64, Errno>) {
        let (val, error) = match answer {
            Ok(value) => (value, 0),
            Err(errno) => (0, -errno.raw_os_error()),
        };
        let _ = self.send(seccomp_notif_resp { id, val, error, flags: 0 });
    }

    /// Lets the call go on as it is. The program may have changed what its arguments point to.
    pub(crate) fn let_go_on(&self, id: u64) {
        let _ =
            self.send(seccomp_notif_resp { id, val: 0, error: 0, flags: SECCOMP_USER_NOTIF_FLAG_CONTINUE });
    }

    fn send(&self, mut response: seccomp_notif_resp) -> Result<(), Errno> {
        // SAFETY: the kernel reads a structure of that size, which the request's number states.
        unsafe { syscall!(Sysno::ioctl, self.0.as_raw_fd(), SEND, &raw mut response) }
            .map(drop)
            .map_err(errno)
    }

    /// Answers with a new descriptor of the caller for `file`: the lowest that is free there, within the caller's limit.
    pub(crate) fn answer_with(&self, id: u64, file: BorrowedFd<'_>, close_on_exec: bool) {
        let addition = seccomp_notif_addfd {
            id,
            flags: SECCOMP_ADDFD_FLAG_SEND,
            srcfd: file.as_raw_fd().unsigned_abs(),
            newfd: 0,
            newfd_flags: if close_on_exec { libc::O_CLOEXEC.unsigned_abs() } else { 0 },
        };
        match self.add(addition) {
            Ok(_) => (),
            // Before Linux 5.14 descriptor and answer go separately.
            Err(Errno::INVAL) => match self.add(seccomp_notif_addfd { flags: 0, ..addition }) {
                Ok(number) => self.answer(id, Ok(number)),
                Err(errno) => self.answer(id, Err(errno)),
            },
            Err(errno) => self.answer(id, Err(errno)),
        }
    }

    fn add(&self, mut addition: seccomp_notif_addfd) -> Result<i64, Errno> {
        loop {
            // SAFETY: the kernel reads a structure of that size, which the request's number states.
            match unsafe { syscall!(Sysno::ioctl, self.0.as_raw_fd(), ADD, &raw mut addition) } {
                Ok(number) => return Ok(i64::try_from(number).unwrap_or(-1)),
                Err(syscalls::Errno::EINTR) => (),
                Err(error) => return Err(errno(error)),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
