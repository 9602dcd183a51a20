//! Which errors a system call returns for want of a resource.

use libc::{EAGAIN, EIO, EMFILE, ENOMEM, ENOSPC};
use syscalls::Sysno;

/// The calls that ask for memory.
pub const MEMORY: [Sysno; 7] =
    [Sysno::mmap, Sysno::mremap, Sysno::mprotect, Sysno::madvise, Sysno::munmap, Sysno::mlock, Sysno::brk];

/// Errors by the calls that may return them, as their manual pages have it; where a page does not, whatever a file system or a device
/// may return. Not close(2), with which nothing can be done: the standard library panics where a directory's fails.
const ERRORS: &[(&[Sysno], &[i32])] = &[
    (&[Sysno::open, Sysno::openat, Sysno::openat2, Sysno::creat], &[EMFILE, ENOMEM, ENOSPC, EIO]),
    (&[Sysno::read, Sysno::pread64, Sysno::readv, Sysno::preadv, Sysno::preadv2], &[EIO, EAGAIN, ENOMEM]),
    (
        &[Sysno::write, Sysno::pwrite64, Sysno::writev, Sysno::pwritev, Sysno::pwritev2],
        &[ENOSPC, EIO, EAGAIN],
    ),
    (&[Sysno::recvfrom, Sysno::recvmsg, Sysno::recvmmsg], &[ENOMEM, EAGAIN]),
    (&[Sysno::sendto, Sysno::sendmsg, Sysno::sendmmsg], &[ENOMEM, EAGAIN]),
    // Not EAGAIN, which says that nobody is there, about a connection that poll(2) announces again at once.
    (&[Sysno::accept, Sysno::accept4], &[EMFILE, ENOMEM]),
    (
        &[
            Sysno::socket,
            Sysno::socketpair,
            Sysno::pipe,
            Sysno::pipe2,
            Sysno::eventfd2,
            Sysno::memfd_create,
            Sysno::pidfd_open,
            Sysno::pidfd_getfd,
            Sysno::epoll_create1,
            Sysno::inotify_init1,
            Sysno::timerfd_create,
            Sysno::signalfd4,
            Sysno::userfaultfd,
        ],
        &[EMFILE, ENOMEM],
    ),
    (&[Sysno::dup, Sysno::dup2, Sysno::dup3], &[EMFILE]),
    (&[Sysno::fcntl], &[EMFILE, EAGAIN]),
    (&[Sysno::connect, Sysno::bind, Sysno::listen], &[EAGAIN, ENOMEM]),
    (&[Sysno::epoll_ctl, Sysno::inotify_add_watch], &[ENOMEM, ENOSPC]),
    (&[Sysno::poll, Sysno::ppoll, Sysno::select, Sysno::pselect6], &[ENOMEM]),
    (&[Sysno::fork, Sysno::vfork, Sysno::clone, Sysno::clone3], &[EAGAIN, ENOMEM]),
    (&[Sysno::mmap, Sysno::mremap], &[ENOMEM, EAGAIN]),
    (&[Sysno::mprotect, Sysno::madvise, Sysno::munmap, Sysno::mlock, Sysno::mlock2, Sysno::brk], &[ENOMEM]),
    (&[Sysno::ftruncate, Sysno::fallocate], &[ENOSPC, EIO]),
    (&[Sysno::fsync, Sysno::fdatasync, Sysno::sync_file_range], &[EIO, ENOSPC]),
    (&[Sysno::getdents64], &[EIO, ENOMEM]),
    (
        &[
            Sysno::stat,
            Sysno::lstat,
            Sysno::fstat,
            Sysno::newfstatat,
            Sysno::statx,
            Sysno::access,
            Sysno::faccessat,
            Sysno::faccessat2,
            Sysno::readlink,
            Sysno::readlinkat,
            Sysno::statfs,
            Sysno::fstatfs,
        ],
        &[EIO, ENOMEM],
    ),
    (
        &[
            Sysno::mkdir,
            Sysno::mkdirat,
            Sysno::rename,
            Sysno::renameat,
            Sysno::renameat2,
            Sysno::link,
            Sysno::linkat,
            Sysno::symlink,
            Sysno::symlinkat,
        ],
        &[ENOSPC, EIO],
    ),
    (&[Sysno::unlink, Sysno::unlinkat, Sysno::rmdir, Sysno::chmod, Sysno::fchmod, Sysno::fchmodat], &[EIO]),
    (&[Sysno::ioctl], &[EIO, ENOMEM]),
    (&[Sysno::process_vm_readv, Sysno::process_vm_writev], &[ENOMEM]),
    (&[Sysno::unshare, Sysno::capset], &[ENOMEM]),
    (&[Sysno::getsockopt, Sysno::setsockopt], &[ENOMEM]),
];

/// Returns the errors that a call may return for want of a resource; none for those that need nothing.
#[must_use]
pub fn errors_of(call: u64) -> &'static [i32] {
    let named = |calls: &[Sysno]| calls.iter().any(|of| u64::from(*of as u32) == call);
    ERRORS.iter().find(|(calls, _)| named(calls)).map_or(&[], |(_, errors)| errors)
}
