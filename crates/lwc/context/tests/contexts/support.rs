//! Helpers of all rooms.

use std::convert::Infallible;
use std::ffi::c_void;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use orrery_context::{Calls, Context, Error, Forked, FromCaller, Start, fork};
use rustix::mm::MapFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{
    DumpableBehavior, Pid, PidfdFlags, PidfdGetfdFlags, Signal, WaitOptions, geteuid, getpid, kill_process,
    pidfd_getfd, pidfd_open, set_child_subreaper, set_dumpable_behavior, wait, waitpid,
};

use crate::pages::anonymous;

/// Returns the context that a number names.
pub(crate) fn named(number: RawFd) -> Result<Context, Error> {
    // SAFETY: what the cases pass is theirs alone, or a name already.
    unsafe { Context::of_descriptor(number) }
}

/// Returns to every caller what `answer` makes of its value.
pub(crate) fn server(answer: impl Fn(u64) -> u64 + 'static) -> impl FnOnce(Start) -> Infallible {
    move |start| {
        let mut arrival = start.arrival;
        loop {
            arrival = arrival.caller.switch(answer(arrival.word), &[]).unwrap();
        }
    }
}

/// Ends the calling process at once: nothing runs that was left for its end, by whomever it was forked from.
pub(crate) fn end(status: i32) -> ! {
    // SAFETY: no code of this process runs after it.
    unsafe { libc::_exit(status) }
}

/// Ends the calling process as somebody else could.
pub(crate) fn die() -> ! {
    kill(std::process::id().cast_signed(), Signal::KILL);
    unreachable!("it was killed");
}

/// Sends a signal to a process; whether the kernel lets it.
pub(crate) fn kill(pid: i32, signal: Signal) -> bool {
    kill_process(Pid::from_raw(pid).unwrap(), signal).is_ok()
}

/// Returns a plain fork(2), of which the library knows nothing: 0 in the child, the child's process in its parent.
pub(crate) fn plain_fork() -> i32 {
    // SAFETY: a case is alone in its process. Either it has no other thread when it forks, or its child only makes
    // system calls until it ends (`kill_after`): nobody waits for a lock whose holder was not copied. The watchers that
    // the library has beside its threads hold none.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", errno());
    pid
}

/// The case's own process made a root elsewhere: runs `root` in a forked child; gives its wait status.
pub(crate) fn in_child(root: impl FnOnce()) -> i32 {
    match plain_fork() {
        0 => {
            root();
            end(99)
        }
        pid => status_of(pid),
    }
}

/// When those are buried who have lost their parents.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Burial {
    /// As soon as they are dead: the kernel tells of them no more, but their pidfds do (Linux 6.15).
    AtOnce,
    /// When the program is gone: until then they are listed, for those who may look into them.
    Late,
}

/// Runs `root` like [`in_child`], where orphans go to this process and not to init, of whose habits nothing is known.
/// All of them end.
pub(crate) fn with_orphans(buried: Burial, root: impl FnOnce()) {
    set_child_subreaper(Some(getpid())).unwrap();
    let pid = match plain_fork() {
        0 => {
            root();
            end(0)
        }
        pid => pid,
    };
    let status = loop {
        if buried == Burial::Late {
            break status_of(pid);
        }
        let (ended, status) = wait(WaitOptions::empty()).unwrap().unwrap();
        if ended.as_raw_pid() == pid {
            break status.as_raw();
        }
    };
    assert_eq!(status, 0);
    while wait(WaitOptions::empty()).is_ok() {}
}

/// Returns whether pidfds know how a process ended that was buried (Linux 6.15).
pub(crate) fn pidfds_remember() -> bool {
    let pid = plain_fork();
    if pid == 0 {
        end(3);
    }
    let pidfd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    reap(pid);
    orrery_domain::process::end_of(pidfd.as_fd()) == orrery_domain::End::Exited { status: 3 }
}

/// Runs `child` in a program that is forked with its contexts; gives its process.
pub(crate) fn forked(child: impl FnOnce()) -> i32 {
    // SAFETY: other threads of a case that forks wait for the one that does, and hold nothing.
    match unsafe { fork() }.unwrap() {
        Forked::Child => {
            child();
            end(0)
        }
        Forked::Parent(pid) => i32::try_from(pid).unwrap(),
    }
}

/// Waits for the end of a child; gives its wait status.
pub(crate) fn status_of(pid: i32) -> i32 {
    let (ended, status) = waitpid(Pid::from_raw(pid), WaitOptions::empty()).unwrap().unwrap();
    assert_eq!(ended.as_raw_pid(), pid);
    status.as_raw()
}

/// Returns a page of zeros that root and contexts share in the kernel's own way. It stays mapped until the process
/// ends.
pub(crate) fn shared_page() -> *mut c_void {
    anonymous(1, MapFlags::SHARED)
}

/// Words in such a page.
pub(crate) fn shared_words() -> &'static [AtomicU64; 8] {
    // SAFETY: a page is aligned for words, has room for eight, and stays; they are zero, and nobody knows them as
    // anything but atomics.
    unsafe { &*shared_page().cast() }
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

/// Returns whether a number is that of an open descriptor.
pub(crate) fn is_open(number: RawFd) -> bool {
    // SAFETY: takes numbers only, and changes nothing.
    unsafe { libc::fcntl(number, libc::F_GETFD) != -1 }
}

/// Copies a descriptor to the first free number from `least` on, as which it stays open.
pub(crate) fn copy_high(file: &std::fs::File, least: RawFd) -> RawFd {
    // SAFETY: takes numbers only; the new one is nobody's yet.
    let number = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD, least) };
    assert!(number >= least);
    number
}

/// Kills a process from outside, after so many microseconds.
pub(crate) fn kill_after(victim: u64, delay: u64) -> i32 {
    let victim = i32::try_from(victim).unwrap();
    let pid = plain_fork();
    if pid == 0 {
        std::thread::sleep(Duration::from_micros(delay));
        kill(victim, Signal::KILL);
        end(0);
    }
    pid
}

pub(crate) fn reap(pid: i32) {
    status_of(pid);
}

/// setresuid(2) as the C library does it, for all threads that it knows of; whether that was allowed.
pub(crate) fn set_users(real: u32, effective: u32, saved: u32) -> bool {
    // SAFETY: the call takes numbers only; a change of identity invalidates no memory.
    unsafe { libc::setresuid(real, effective, saved) == 0 }
}

/// Calls setresgid(2), likewise.
pub(crate) fn set_groups(real: u32, effective: u32, saved: u32) -> bool {
    // SAFETY: the call takes numbers only; a change of identity invalidates no memory.
    unsafe { libc::setresgid(real, effective, saved) == 0 }
}

/// Calls setgroups(2), likewise.
pub(crate) fn set_further_groups(groups: &[u32]) -> bool {
    // SAFETY: reads as many numbers as the slice has.
    unsafe { libc::setgroups(groups.len(), groups.as_ptr()) == 0 }
}

/// Makes the calling process an ordinary user's, that others of the same user may look into.
pub(crate) fn become_ordinary() -> bool {
    const NOBODY: u32 = 65534;
    if geteuid().is_root() {
        let gone = set_further_groups(&[])
            && set_groups(NOBODY, NOBODY, NOBODY)
            && set_users(NOBODY, NOBODY, NOBODY);
        assert!(gone);
    }
    set_dumpable_behavior(DumpableBehavior::Dumpable).is_ok()
}

/// uname(2), a call that no context needs, and that is withheld from some, or trapped; what it says, or its errno.
pub(crate) fn uname() -> Result<libc::utsname, i32> {
    let mut name = MaybeUninit::<libc::utsname>::zeroed();
    // SAFETY: has room for what is written.
    let answer = unsafe { libc::uname(name.as_mut_ptr()) };
    if answer != 0 {
        return Err(errno());
    }
    // SAFETY: characters, of which zero is one: who answers in the kernel's place may have written none.
    Ok(unsafe { name.assume_init() })
}

/// Returns which of the kernel's ways into process `pid` are open: to its memory at `address`, its descriptors, its
/// control.
pub(crate) fn open_ways(pid: i32, address: usize) -> Vec<&'static str> {
    let mut open = Vec::new();
    let mut byte = [0_u8; 8];
    let local = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 8 };
    let remote = libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(address), iov_len: 8 };
    // SAFETY: writes to the local buffer only; of the other process the kernel asks whether we may.
    if unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) } > 0 {
        open.push("process_vm_readv");
    }
    // SAFETY: reads the local buffer only, and writes nothing of this process's.
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
    let pidfd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty());
    if pidfd.is_ok_and(|pidfd| pidfd_getfd(pidfd, 0, PidfdGetfdFlags::empty()).is_ok()) {
        open.push("pidfd_getfd");
    }
    // SAFETY: changes nothing of this process's memory.
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

pub(crate) fn uname_of(other: Context, mut arrival: orrery_context::Arrival) -> u64 {
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

/// Returns a context's name, for a call or two before the case closes it.
pub(crate) fn lent(context: Context) -> BorrowedFd<'static> {
    // SAFETY: the name is the case's own, and open; no case keeps a loan until it closes the name.
    unsafe { BorrowedFd::borrow_raw(context.descriptor()) }
}

pub(crate) const OWN_MEMORY: FromCaller = FromCaller { memory: true, descriptors: false, credentials: false };

/// Returns a socket and its other end.
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
