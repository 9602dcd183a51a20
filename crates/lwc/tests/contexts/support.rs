//! Helpers of all rooms.

use std::convert::Infallible;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use orrery_lwc::context::{Calls, Context, Own, Start};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

pub(crate) const PAGE: usize = 4096;

/// Returns to every caller what `answer` makes of its value.
pub(crate) fn server(answer: impl Fn(u64) -> u64 + 'static) -> impl FnOnce(Start) -> Infallible {
    move |start| {
        let mut arrival = start.arrival;
        loop {
            arrival = arrival.caller.switch(answer(arrival.word), &[]).unwrap();
        }
    }
}

/// The case's own process made a root elsewhere: runs `root` in a forked child; gives its wait status.
pub(crate) fn in_child(root: impl FnOnce()) -> i32 {
    match unsafe { libc::fork() } {
        0 => {
            root();
            unsafe { libc::_exit(99) }
        }
        pid => {
            let mut status = 0;
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            status
        }
    }
}

pub(crate) fn mapped(pages: usize) -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let start = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, protection, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    start.cast()
}

/// Memory that root and contexts share in the kernel's own way.
pub(crate) fn shared_words() -> &'static [AtomicU64; 8] {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let start = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, protection, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    unsafe { &*start.cast() }
}

pub(crate) fn own_pid() -> u64 {
    u64::from(std::process::id())
}

pub(crate) fn is_running(pid: u64) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    !status.rsplit(')').next().unwrap().trim_start().starts_with(['Z', 'X'])
}

pub(crate) fn await_end_of(pid: u64) {
    let start = Instant::now();
    while is_running(pid) {
        assert!(start.elapsed() < Duration::from_secs(20), "process {pid} goes on");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn is_mapped(address: *const u8) -> bool {
    let mut pipe = [0; 2];
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    let there = unsafe { libc::write(pipe[1], address.cast(), 1) } == 1;
    unsafe { libc::close(pipe[0]) };
    unsafe { libc::close(pipe[1]) };
    there
}

/// Kills a process from outside, after so many microseconds.
pub(crate) fn kill_after(victim: u64, delay: u64) -> i32 {
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        std::thread::sleep(Duration::from_micros(delay));
        unsafe { libc::kill(i32::try_from(victim).unwrap(), libc::SIGKILL) };
        unsafe { libc::_exit(0) };
    }
    pid
}

pub(crate) fn reap(pid: i32) {
    assert_eq!(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }, pid);
}

/// Makes the calling process an ordinary user's, that others of the same user may look into.
pub(crate) fn become_ordinary() -> bool {
    if unsafe { libc::geteuid() } == 0 {
        let gone = unsafe { libc::setgroups(0, std::ptr::null()) } == 0
            && unsafe { libc::setresgid(65534, 65534, 65534) } == 0
            && unsafe { libc::setresuid(65534, 65534, 65534) } == 0;
        assert!(gone);
    }
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) == 0 }
}

/// Which of the kernel's ways into process `pid` are open: to its memory at `address`, its descriptors, its control.
pub(crate) fn open_ways(pid: i32, address: usize) -> Vec<&'static str> {
    let mut open = Vec::new();
    let mut byte = [0_u8; 8];
    let local = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 8 };
    let remote = libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(address), iov_len: 8 };
    if unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) } > 0 {
        open.push("process_vm_readv");
    }
    if unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) } > 0 {
        open.push("process_vm_writev");
    }
    for file in ["mem", "maps", "pagemap", "environ", "auxv", "syscall"] {
        use std::io::Read;
        let opened = std::fs::File::open(format!("/proc/{pid}/{file}"));
        // Some of them are refused at open, others at read.
        if let Ok(mut opened) = opened
            && (file == "mem" || opened.read(&mut byte).is_ok_and(|read| read > 0))
        {
            open.push(file);
        }
    }
    if std::fs::read_dir(format!("/proc/{pid}/fd")).is_ok() {
        open.push("fd");
    }
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd, 0, 0) } >= 0 {
        open.push("pidfd_getfd");
    }
    if unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) } == 0 {
        open.push("ptrace");
    }
    open
}

pub(crate) fn call_number(call: libc::c_long) -> u32 {
    u32::try_from(call).unwrap()
}

pub(crate) fn only(call: libc::c_long) -> Calls {
    Calls::none().with(call_number(call), call_number(call))
}

pub(crate) fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

pub(crate) fn uname_of(other: Context, mut arrival: orrery_lwc::context::Arrival) -> u64 {
    while let Some(call) = arrival.call {
        assert_eq!(call.number, call_number(libc::SYS_uname));
        arrival = other.switch((-i64::from(libc::ENOTTY)).cast_unsigned(), &[]).unwrap();
    }
    arrival.word
}

pub(crate) fn written(file: &std::fs::File) -> String {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; 100];
    let read = file.read_at(&mut bytes, 0).unwrap();
    String::from_utf8(bytes[..read].to_vec()).unwrap()
}

pub(crate) const OWN_MEMORY: Own = Own { memory: true, descriptors: false, credentials: false };

/// A socket and its other end.
pub(crate) fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

/// Passes descriptors over a socket of the program's own.
pub(crate) fn send(over: &OwnedFd, fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(fds));
    sendmsg(over, &[IoSlice::new(b"01234567")], &mut ancillary, SendFlags::empty()).unwrap();
}

/// Takes the first one of those.
pub(crate) fn receive(over: &OwnedFd) -> OwnedFd {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    recvmsg(over, &mut [IoSliceMut::new(&mut [0; 8])], &mut ancillary, RecvFlags::CMSG_CLOEXEC).unwrap();
    let message = ancillary.drain().next().unwrap();
    let RecvAncillaryMessage::ScmRights(mut fds) = message else { panic!("no descriptor came") };
    fds.next().unwrap()
}
