//! What of a context's is reached for a system call that another one makes on its behalf ([`crate::syscalls::remote`]):
//! pieces of its memory, and descriptors.
//!
//! Of one that is stopped in a trapped call, they are taken by way of that call. One that is parked is asked, and looks
//! at the rights of the descriptor over which the question came, as with overlays.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use orrery_sys::{PAGE, PageRange};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::PidfdGetfdFlags;
use syscalls::{Sysno, syscall};

use crate::error::{Error, Result};
use crate::id::Id;
use crate::peers::introduction;
use crate::peers::socket;
use crate::rights::Rights;
use crate::shared::link::{Kind, Message, ROOM};
use crate::spawn::process_status::pid_of;
use crate::state::State;
use crate::switch::slow;
use crate::syscalls::signatures;
use crate::syscalls::trap;
use crate::threads::state_lock::Held;

/// A directory that stands for itself.
const HERE: u32 = libc::AT_FDCWD.cast_unsigned();

/// Copies a peer's memory. Gives how much of the buffer was filled.
pub(crate) fn copy_in(state: &mut Held, slot: usize, address: u64, buffer: &mut [u8]) -> Result<usize> {
    if trap::pending(state, slot).is_some() {
        return trap::copy_in(state, slot, address, buffer);
    }
    let length = buffer.len().min(ROOM);
    let reply = slow::ask(state, slot, Kind::Read, (address, length as u64), &[])?;
    answered(state, slot, &reply, address, length)?;
    let there = reply.bytes.len().min(length);
    buffer[..there].copy_from_slice(&reply.bytes[..there]);
    Ok(there)
}

/// Writes into a peer's memory; at most what a link carries.
pub(crate) fn copy_out(state: &mut Held, slot: usize, address: u64, bytes: &[u8]) -> Result<()> {
    if trap::pending(state, slot).is_some() {
        return trap::copy_out(state, slot, address, bytes);
    }
    let reply = slow::ask(state, slot, Kind::Write, (address, 0), bytes)?;
    answered(state, slot, &reply, address, bytes.len())
}

/// Returns a peer's descriptor, in our table; none where it names nothing there.
pub(crate) fn borrow(state: &mut Held, slot: usize, number: RawFd) -> Result<Option<OwnedFd>> {
    let failed =
        |errno| Error::system("borrow a descriptor of a context", number.unsigned_abs() as usize, errno);
    let stopped = trap::pending(state, slot).is_some();
    let peer = state.peer(slot)?;
    if number < 0 && number != libc::AT_FDCWD {
        return Ok(None);
    }
    if stopped {
        let file = if number == libc::AT_FDCWD {
            let pid = pid_of(peer.pidfd.as_fd()).ok_or(failed(Errno::SRCH))?;
            let path = format!("/proc/{}/cwd", pid.as_raw_pid());
            rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        } else {
            rustix::process::pidfd_getfd(&peer.pidfd, number, PidfdGetfdFlags::empty())
        };
        return match file {
            Ok(file) => Ok(Some(file)),
            Err(Errno::BADF) => Ok(None),
            Err(errno) => Err(failed(errno)),
        };
    }
    let asked = (u64::from(number.cast_unsigned()), 0);
    let reply = slow::ask(state, slot, Kind::File, asked, &[])?;
    let peer = state.peer(slot)?;
    match i32::try_from(reply.word) {
        Ok(0) => {}
        Ok(libc::EBADF) => return Ok(None),
        Ok(libc::EPERM) => {
            let descriptor = peer.fd.as_raw_fd();
            return Err(Error::Denied { descriptor, start: number.unsigned_abs() as usize, length: 1 });
        }
        Ok(errno @ 1..4096) => return Err(failed(Errno::from_raw_os_error(errno))),
        _ => return Err(failed(Errno::IO)),
    }
    let sent = socket::receive_on(&peer.fd, &mut [0]).and_then(|fds| fds.into_iter().next());
    sent.map(Some).ok_or(failed(Errno::IO))
}

/// Puts a file that call `call` made into a peer's table; gives its number there.
pub(crate) fn give(
    state: &mut Held,
    slot: usize,
    call: u32,
    file: BorrowedFd<'_>,
    close_on_exec: bool,
) -> Result<RawFd> {
    if trap::pending(state, slot).is_some() {
        return trap::give(state, slot, file, close_on_exec);
    }
    let failed = |errno| Error::system("put a descriptor into a context", call as usize, errno);
    let mark = Id::new()?;
    introduction::send_marked(&state.peer(slot)?.fd, mark, file).map_err(failed)?;
    let asked = (u64::from(call), u64::from(close_on_exec));
    let reply = slow::ask(state, slot, Kind::Take, asked, &mark.0)?;
    match (i32::try_from(reply.word), i32::try_from(reply.extent)) {
        (Ok(0), Ok(number)) => Ok(number),
        (Ok(libc::EPERM), _) => {
            Err(Error::CallDenied { descriptor: state.peer(slot)?.fd.as_raw_fd(), number: call })
        }
        (Ok(errno @ 1..4096), _) => Err(failed(Errno::from_raw_os_error(errno))),
        _ => Err(failed(Errno::IO)),
    }
}

fn answered(state: &State, slot: usize, reply: &Message, address: u64, length: usize) -> Result<()> {
    let start = usize::try_from(address).unwrap_or(usize::MAX);
    match i32::try_from(reply.word) {
        Ok(0) => Ok(()),
        Ok(libc::EPERM) => Err(Error::Denied { descriptor: state.peer(slot)?.fd.as_raw_fd(), start, length }),
        Ok(libc::EFAULT) => {
            Err(Error::Memory { address: start, what: "copied", why: "the context has none there" })
        }
        Ok(errno @ 1..4096) => {
            Err(Error::system("copy memory of a context", start, Errno::from_raw_os_error(errno)))
        }
        _ => Err(Error::system("copy memory of a context", start, Errno::IO)),
    }
}

/// In the target: the bytes that were asked for, as far as there are any.
pub(crate) fn read(rights: &Rights, address: u64, length: u64) -> rustix::io::Result<Vec<u8>> {
    let length = usize::try_from(length).ok().filter(|length| *length <= ROOM).ok_or(Errno::INVAL)?;
    allow(rights, address, length)?;
    let mut bytes = vec![0; length];
    let there = copy_own(address, &mut bytes)?;
    bytes.truncate(there);
    Ok(bytes)
}

/// In the target: writes what was sent.
pub(crate) fn write(rights: &Rights, address: u64, bytes: &[u8]) -> rustix::io::Result<()> {
    allow(rights, address, bytes.len())?;
    write_own(address, bytes)
}

/// In the target: has the file that was sent, which a call made that the asker could have had made here.
pub(crate) fn take(
    state: &mut State,
    through: usize,
    call: u64,
    close_on_exec: bool,
    mark: &[u8],
) -> rustix::io::Result<u64> {
    let Some(Some(grant)) = state.grants.get(through) else { return Err(Errno::PERM) };
    let may =
        |call: &u32| grant.rights.calls.has(*call) && signatures::of(*call).is_some_and(|s| s.makes_file);
    if !u32::try_from(call).is_ok_and(|call| may(&call)) {
        return Err(Errno::PERM);
    }
    let mark = Id(mark.try_into().map_err(|_| Errno::INVAL)?);
    let file = introduction::take_marked(state, mark).ok_or(Errno::BADMSG)?;
    let command = if close_on_exec { libc::F_DUPFD_CLOEXEC } else { libc::F_DUPFD };
    // SAFETY: the call takes numbers only, and copies a descriptor that `file` keeps open.
    let number = unsafe { syscall!(Sysno::fcntl, file.as_raw_fd(), command, 0) };
    number.map(|number| number as u64).map_err(|errno| Errno::from_raw_os_error(errno.into_raw()))
}

/// In the target: a copy of the descriptor that was asked for; the library's own are nobody's.
pub(crate) fn copy_descriptor(state: &State, number: u32) -> rustix::io::Result<OwnedFd> {
    if number == HERE {
        return rustix::fs::openat(CWD, c".", OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    }
    let number = i32::try_from(number).map_err(|_| Errno::BADF)?;
    if state.is_own(number) {
        return Err(Errno::BADF);
    }
    // SAFETY: a number that is no descriptor is an error; the copy is ours.
    rustix::io::fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(number) }, 0)
}

fn allow(rights: &Rights, address: u64, length: usize) -> rustix::io::Result<()> {
    let start = usize::try_from(address).map_err(|_| Errno::FAULT)?;
    let end = start.checked_add(length).and_then(|end| end.checked_next_multiple_of(PAGE));
    let range = PageRange::new(start - start % PAGE, end.ok_or(Errno::FAULT)?);
    if rights.allow_memory(range) { Ok(()) } else { Err(Errno::PERM) }
}

/// Copies memory of our own that may not be there.
pub(crate) fn copy_own(address: u64, buffer: &mut [u8]) -> rustix::io::Result<usize> {
    let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    move_own(Sysno::process_vm_readv, address, local)
}

/// Writes to memory of our own that may not be there.
pub(crate) fn write_own(address: u64, bytes: &[u8]) -> rustix::io::Result<()> {
    let local = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    match move_own(Sysno::process_vm_writev, address, local)? {
        moved if moved == bytes.len() => Ok(()),
        _ => Err(Errno::FAULT),
    }
}

fn move_own(call: Sysno, address: u64, local: libc::iovec) -> rustix::io::Result<usize> {
    let start = usize::try_from(address).unwrap_or(usize::MAX);
    let remote =
        libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(start), iov_len: local.iov_len };
    let own = rustix::process::getpid().as_raw_pid();
    // SAFETY: one side is a buffer of ours; the other the kernel checks.
    unsafe { syscall!(call, own, &raw const local, 1, &raw const remote, 1, 0) }
        .map_err(|errno| Errno::from_raw_os_error(errno.into_raw()))
}
