//! Seccomp user notification: a filter that has a monitor decide about calls.

use std::ffi::CStr;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::mpsc;
use std::thread;

use anyhow::{Result, ensure};

const RECEIVE: libc::c_ulong = 0xc050_2100;
const SEND: libc::c_ulong = 0xc018_2101;
const ADD: libc::c_ulong = 0x4018_2103;
const SET_FLAGS: libc::c_ulong = 0x4008_2104;
/// The monitor runs next on the same CPU, where the kernel (6.6 and later) knows how.
const SYNCHRONOUS: libc::c_ulong = 1;
const CONTINUE: u32 = 1;

/// Starts a second thread that decides about these calls of the calling thread, and allows each.
pub fn supervise_this_thread(calls: &[libc::c_long]) -> Result<()> {
    let (sender, receiver) = mpsc::channel::<OwnedFd>();
    // Made before the filter, so not under it.
    thread::spawn(move || {
        if let Ok(listener) = receiver.recv() {
            monitor(&listener, |_| (0, CONTINUE));
        }
    });
    sender.send(filter_this_thread(calls)?)?;
    Ok(())
}

/// Filters the calling thread, irrevocably: each of these calls waits for an answer through the descriptor.
pub fn filter_this_thread(calls: &[libc::c_long]) -> Result<OwnedFd> {
    let statement =
        |code: u32, k: u32| libc::sock_filter { code: u16::try_from(code).unwrap_or(0), jt: 0, jf: 0, k };
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0)];
    for (left, call) in (0..calls.len()).rev().zip(calls) {
        let matched = u8::try_from(left + 1)?;
        let mut compare = statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, u32::try_from(*call)?);
        compare.jt = matched;
        filter.push(compare);
    }
    filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_USER_NOTIF));
    let program = libc::sock_fprog { len: u16::try_from(filter.len())?, filter: filter.as_mut_ptr() };
    // SAFETY: the program lives while the kernel copies it.
    let listener = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    ensure!(listener >= 0, "install a filter with a listener: {}", io::Error::last_os_error());
    // SAFETY: just made for us.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(listener)?) })
}

/// Does the least that is possible for a call that opens a file: opens this one, whatever was asked for, and passes its descriptor
/// with the answer. Returns when nobody is left who could call.
pub fn open_for_all(listener: &OwnedFd, path: &CStr) {
    monitor(listener, |asked| {
        // SAFETY: the path ends with a zero; the structure is the kernel's, with a descriptor that is open.
        unsafe {
            let file = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
            let mut addition: libc::seccomp_notif_addfd = zeroed();
            addition.id = asked.id;
            addition.flags = u32::try_from(libc::SECCOMP_ADDFD_FLAG_SEND).unwrap_or(0);
            addition.srcfd = file.unsigned_abs();
            addition.newfd_flags = libc::O_CLOEXEC.unsigned_abs();
            let added = libc::ioctl(listener.as_raw_fd(), ADD, &raw mut addition);
            libc::close(file);
            if added >= 0 { ANSWERED } else { (-libc::EIO, 0) }
        }
    });
}

/// Marks a call that was answered already.
const ANSWERED: (i32, u32) = (0, u32::MAX);

/// Answers each call with an error, or 0, and flags.
fn monitor(listener: &OwnedFd, answer: impl Fn(&libc::seccomp_notif) -> (i32, u32)) {
    let listener = listener.as_raw_fd();
    // SAFETY: the structures are the kernel's, zeroed as it wants them.
    unsafe {
        libc::ioctl(listener, SET_FLAGS, SYNCHRONOUS);
        loop {
            let mut asked: libc::seccomp_notif = zeroed();
            if libc::ioctl(listener, RECEIVE, &raw mut asked) != 0 {
                match io::Error::last_os_error().raw_os_error() {
                    Some(libc::EINTR) => continue,
                    Some(libc::ENOENT) if !is_over(BorrowedFd::borrow_raw(listener)) => continue,
                    _ => return,
                }
            }
            let (error, flags) = answer(&asked);
            if (error, flags) == ANSWERED {
                continue;
            }
            let mut answer: libc::seccomp_notif_resp = zeroed();
            (answer.id, answer.error, answer.flags) = (asked.id, error, flags);
            libc::ioctl(listener, SEND, &raw mut answer);
        }
    }
}

/// Returns whether no filtered process is left.
fn is_over(listener: BorrowedFd<'_>) -> bool {
    let mut one = libc::pollfd { fd: listener.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: one structure.
    unsafe { libc::poll(&raw mut one, 1, 0) == 1 && one.revents & libc::POLLHUP != 0 }
}
