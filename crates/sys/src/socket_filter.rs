//! Filters on sockets, and what became of what they received ([socket(7)](https://man7.org/linux/man-pages/man7/socket.7.html):
//! `SO_ATTACH_FILTER`, `SO_MEMINFO`); descriptors of other processes
//! ([pidfd_getfd(2)](https://man7.org/linux/man-pages/man2/pidfd_getfd.2.html)).
//!
//! A filter runs where the packet arrives, in the kernel: what it drops wakes nobody and is never copied. Dropped packets count in
//! [`Memory::drops`] like those for which there was no room.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use linux_raw_sys::ptrace::{
    BPF_ABS, BPF_IMM, BPF_JGE, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, sock_filter, sock_fprog,
};
use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use crate::{Error, Result};

/// The offset of the kernel's own values, `SKF_AD_OFF`, and of a random number among them, `SKF_AD_RANDOM`.
const RANDOM: u32 = (-0x1000_i32).cast_unsigned() + 56;

/// What the first instruction loads, to no effect: by it a filter of this module is told from a program's own.
const MARK: u32 = u32::from_be_bytes(*b"orry");
/// How many instructions a filter of this module has.
const LENGTH: usize = 5;

/// Returns the mark, a load of a random word, a jump past the drop, the drop, and the whole packet.
fn drop_below(threshold: u32) -> [sock_filter; LENGTH] {
    let instruction =
        |code: u32, jt: u8, k: u32| sock_filter { code: u16::try_from(code).unwrap_or(0), jt, jf: 0, k };
    [
        instruction(BPF_LD | BPF_IMM, 0, MARK),
        instruction(BPF_LD | BPF_W | BPF_ABS, 0, RANDOM),
        instruction(BPF_JMP | BPF_JGE | BPF_K, 1, threshold),
        instruction(BPF_RET | BPF_K, 0, 0),
        instruction(BPF_RET | BPF_K, 0, u32::MAX),
    ]
}

/// Has the kernel drop a random part of what arrives: `threshold` of 2^32 packets. Replaces the socket's filter. Needs no
/// privilege.
///
/// # Errors
/// `EPERM` where the socket's filter is locked; those of setsockopt(2).
pub fn drop_randomly(socket: BorrowedFd<'_>, threshold: u32) -> Result<()> {
    let mut program = drop_below(threshold);
    let description = sock_fprog { len: LENGTH.try_into().unwrap_or(0), filter: program.as_mut_ptr() };
    set(socket, libc::SO_ATTACH_FILTER, &description)
}

/// The filter that a socket has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attached {
    /// None.
    None,
    /// One of [`drop_randomly`], with this threshold.
    Dropping(u32),
    /// Another one, of the classic or the extended kind.
    Other,
}

/// Returns which filter a socket has.
///
/// # Errors
/// Those of getsockopt(2).
pub fn attached(socket: BorrowedFd<'_>) -> Result<Attached> {
    let empty = || sock_filter { code: 0, jt: 0, jf: 0, k: 0 };
    let mut program: [sock_filter; LENGTH] = std::array::from_fn(|_| empty());
    // Of this option the length counts instructions.
    let mut length = libc::socklen_t::try_from(LENGTH).unwrap_or(0);
    let fd = socket.as_raw_fd();
    // SAFETY: the kernel writes at most as many instructions as the length says, for which the array has room, and the length.
    let found = unsafe {
        syscall!(
            Sysno::getsockopt,
            fd,
            libc::SOL_SOCKET,
            libc::SO_GET_FILTER,
            program.as_mut_ptr(),
            &raw mut length
        )
    };
    match found {
        Ok(_) if length == 0 => Ok(Attached::None),
        Ok(_) => {
            let threshold = program[2].k;
            let same =
                |(a, b): (&sock_filter, &sock_filter)| (a.code, a.jt, a.jf, a.k) == (b.code, b.jt, b.jf, b.k);
            let ours = length as usize == LENGTH && program.iter().zip(&drop_below(threshold)).all(same);
            Ok(if ours { Attached::Dropping(threshold) } else { Attached::Other })
        }
        // A longer one, and one of the extended kind, which cannot be read.
        Err(syscalls::Errno::EINVAL | syscalls::Errno::EACCES) => Ok(Attached::Other),
        Err(e) => Err(Error::raw("getsockopt SO_GET_FILTER", usize::try_from(fd).unwrap_or(0), e)),
    }
}

/// Removes the socket's filter.
///
/// # Errors
/// `ENOENT` where it has none.
pub fn remove(socket: BorrowedFd<'_>) -> Result<()> {
    set(socket, libc::SO_DETACH_FILTER, &0_i32)
}

fn set<T>(socket: BorrowedFd<'_>, option: i32, value: &T) -> Result<()> {
    let socket = socket.as_raw_fd();
    // SAFETY: the kernel reads `size_of::<T>()` bytes, and of a `sock_fprog` the program that it points to, which lives in the caller.
    unsafe {
        syscall!(
            Sysno::setsockopt,
            socket,
            libc::SOL_SOCKET,
            option,
            core::ptr::from_ref(value),
            size_of::<T>()
        )
    }
    .map(|_| ())
    .map_err(|e| Error::raw("setsockopt", usize::try_from(socket).unwrap_or(0), e))
}

/// The memory of a socket, in bytes, and what it dropped: a part of `SO_MEMINFO`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// What waits to be received.
    pub queued: u32,
    /// How much may wait.
    pub limit: u32,
    /// How many packets were dropped, by a filter or because there was no room. It wraps.
    pub drops: u32,
}

/// Returns the memory of a socket.
///
/// # Errors
/// Those of getsockopt(2).
pub fn memory(socket: BorrowedFd<'_>) -> Result<Memory> {
    // SK_MEMINFO_RMEM_ALLOC, SK_MEMINFO_RCVBUF and SK_MEMINFO_DROPS of nine words.
    const QUEUED: usize = 0;
    const LIMIT: usize = 1;
    const DROPS: usize = 8;
    let mut words = [0_u32; 9];
    let mut length = libc::socklen_t::try_from(size_of_val(&words)).unwrap_or(0);
    let fd = socket.as_raw_fd();
    // SAFETY: the kernel writes as many bytes as the length says, and the length.
    unsafe {
        syscall!(
            Sysno::getsockopt,
            fd,
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            words.as_mut_ptr(),
            &raw mut length
        )
    }
    .map_err(|e| Error::raw("getsockopt SO_MEMINFO", usize::try_from(fd).unwrap_or(0), e))?;
    Ok(Memory { queued: words[QUEUED], limit: words[LIMIT], drops: words[DROPS] })
}

/// Returns a copy of another process' descriptor.
///
/// # Errors
/// `EPERM` without the right to trace that process, `EBADF` where it has no such descriptor, `ENOSYS` before Linux 5.6.
pub fn of_process(pidfd: BorrowedFd<'_>, fd: i32) -> Result<OwnedFd> {
    // SAFETY: passes numbers only.
    let copy = unsafe { syscall!(Sysno::pidfd_getfd, pidfd.as_raw_fd(), fd, 0) }
        .map_err(|e| Error::raw("pidfd_getfd", usize::try_from(fd).unwrap_or(0), e))?;
    let copy = i32::try_from(copy).map_err(|_| Error::new("pidfd_getfd", 0, Errno::BADF))?;
    // SAFETY: a new descriptor, which nobody else knows.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    use super::*;

    fn pair() -> (UdpSocket, UdpSocket) {
        let (to, from) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        from.connect(to.local_addr().unwrap()).unwrap();
        to.set_nonblocking(true).unwrap();
        (to, from)
    }

    fn delivered((to, from): &(UdpSocket, UdpSocket), packets: u32) -> u32 {
        (0..packets)
            .filter(|_| from.send(b"x").is_ok() && to.recv(&mut [0; 8]).is_ok())
            .count()
            .try_into()
            .unwrap()
    }

    #[test]
    fn a_random_part_is_dropped_and_counted() {
        let pair = pair();
        assert_eq!(delivered(&pair, 500), 500);
        for (threshold, low, high) in [(0, 2000, 2000), (u32::MAX / 2, 850, 1150), (u32::MAX, 0, 1)] {
            drop_randomly(pair.0.as_fd(), threshold).unwrap();
            let before = memory(pair.0.as_fd()).unwrap().drops;
            let got = delivered(&pair, 2000);
            assert!((low..=high).contains(&got), "{got} of 2000 at {threshold}");
            assert_eq!(memory(pair.0.as_fd()).unwrap().drops - before, 2000 - got);
        }
        remove(pair.0.as_fd()).unwrap();
        assert_eq!(remove(pair.0.as_fd()).unwrap_err().errno, Errno::NOENT);
        assert_eq!(delivered(&pair, 500), 500);
    }

    #[test]
    fn a_filter_of_ours_is_told_from_others() {
        let (to, _from) = pair();
        let found = || attached(to.as_fd()).unwrap();
        assert_eq!(found(), Attached::None);
        for threshold in [0, 1, u32::MAX / 3, u32::MAX] {
            drop_randomly(to.as_fd(), threshold).unwrap();
            assert_eq!(found(), Attached::Dropping(threshold));
        }
        for length in [1, 4, LENGTH, 9] {
            // Only the last instruction counts: it takes the whole packet.
            let all =
                || sock_filter { code: u16::try_from(BPF_RET | BPF_K).unwrap(), jt: 0, jf: 0, k: u32::MAX };
            let mut program: Vec<sock_filter> = (0..length).map(|_| all()).collect();
            let description =
                sock_fprog { len: u16::try_from(length).unwrap(), filter: program.as_mut_ptr() };
            set(to.as_fd(), libc::SO_ATTACH_FILTER, &description).unwrap();
            assert_eq!(found(), Attached::Other, "{length} instructions");
        }
        remove(to.as_fd()).unwrap();
        assert_eq!(found(), Attached::None);
    }

    #[test]
    fn what_waits_is_counted() {
        let (to, from) = pair();
        let empty = memory(to.as_fd()).unwrap();
        assert_eq!((empty.queued, empty.drops), (0, 0));
        from.send(&[0; 100]).unwrap();
        let full = memory(to.as_fd()).unwrap();
        assert!(full.queued >= 100 && full.queued < full.limit, "{full:?}");
    }

    #[test]
    fn a_socket_of_this_process_is_had_by_its_pidfd() {
        let (to, _from) = pair();
        let me = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty())
            .unwrap();
        let copy = of_process(me.as_fd(), to.as_raw_fd()).unwrap();
        drop_randomly(copy.as_fd(), 1).unwrap();
        remove(to.as_fd()).unwrap();
        assert_eq!(of_process(me.as_fd(), 12345).unwrap_err().errno, Errno::BADF);
    }
}
