//! Facilities that start, hold, watch and look into processes.

use std::mem::zeroed;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr;

use linux_raw_sys::general::{CLONE_PIDFD, clone_args};
use linux_raw_sys::prctl::PR_TIMER_CREATE_RESTORE_IDS;
use linux_raw_sys::ptrace::{PTRACE_GETREGSET, PTRACE_INTERRUPT, PTRACE_O_EXITKILL, PTRACE_SEIZE};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{CWD, MemfdFlags, Mode, OFlags, ResolveFlags, fstat, memfd_create, openat, openat2};
use rustix::io::Errno;
use rustix::process::{
    self, PidfdFlags, PidfdGetfdFlags, Signal, WaitOptions, pidfd_getfd, pidfd_open, pidfd_send_signal,
};
use syscalls::{Sysno, syscall};

use crate::child::{During, Note, Verdict, exit, expect};
use crate::facility::{Group, System};
use crate::row::{Family, Probe, Row};
use crate::tools::{self, Pages, Partner, leading_number, number_after, read_file};

const DOMAINS: &[System] =
    &[System::LwcRollback, System::Orbit, System::LwcContexts, System::Hijack, System::Orthros];

pub(crate) const FAMILY: Family = Family {
    group: Group::Processes,
    rows: &[
        Row {
            name: "pidfd_open",
            systems: DOMAINS,
            purpose: "holds a process by descriptor: its death is noticed at once, and its id cannot be mistaken",
            fallback: "a pipe that the process keeps open reports its death; PIDs are checked by start time",
            probe: Probe::Child(pidfd_open_probe),
        },
        Row {
            name: "pidfd_getfd",
            systems: &[System::LwcRollback, System::LwcContexts, System::Hijack, System::Orthros],
            purpose: "fetches a descriptor from a process that does not help (rollback: what the program closed)",
            fallback: "helpers send descriptors over a Unix socket; a descriptor lost to rollback is reported",
            probe: Probe::Child(pidfd_getfd_probe),
        },
        Row {
            name: "pidfd_thread",
            systems: &[System::LwcContexts, System::Hijack],
            purpose: "holds a single thread by descriptor and notices its end",
            fallback: "the thread's robust futex list reports its end",
            probe: Probe::Child(pidfd_thread),
        },
        Row {
            name: "kcmp",
            systems: &[System::LwcRollback, System::LwcContexts, System::Orthros],
            purpose: "compares two descriptors: are they the same open file?",
            fallback: "device and inode are compared, which misses a file that was opened again",
            probe: Probe::Child(kcmp),
        },
        Row {
            name: "clone3",
            systems: &[System::Orbit, System::LwcContexts],
            purpose: "starts a domain with its descriptor, free of the race for its id",
            fallback: "fork, then pidfd_open",
            probe: Probe::Child(clone3),
        },
        Row {
            name: "close_range",
            systems: &[System::Orbit, System::LwcContexts, System::LwcRollback],
            purpose: "closes every descriptor that a domain was not given, or that a rolled-back program opened",
            fallback: "those listed in /proc/self/fd are closed one by one",
            probe: Probe::Child(close_range),
        },
        Row {
            name: "process_vm_readv",
            systems: DOMAINS,
            purpose: "reads another process' memory (a held page, a delta, a call's arguments) in one copy",
            fallback: "/proc/PID/mem; rollback copies all memory at its first snapshot",
            probe: Probe::Child(process_vm_readv),
        },
        Row {
            name: "ptrace",
            systems: &[System::Hijack, System::LwcContexts, System::Orthros],
            purpose: "puts an executive into a program before its first instruction; slow way to mediate calls",
            fallback: "LD_PRELOAD for programs that are linked dynamically",
            probe: Probe::Child(ptrace),
        },
        Row {
            name: "proc_children",
            systems: &[System::LwcRollback, System::Orthros],
            purpose: "lists the children that a rolled-back program left behind",
            fallback: "left-behind children live on; orthros searches all of /proc",
            probe: Probe::Child(proc_children),
        },
        Row {
            name: "proc_timers",
            systems: &[System::LwcRollback, System::Orthros],
            purpose: "lists a process' POSIX timers: new ones can be deleted, old ones carried over",
            fallback: "POSIX timers stay as the program left them",
            probe: Probe::Child(proc_timers),
        },
        Row {
            name: "timer_restore_ids",
            systems: &[System::Orthros],
            purpose: "makes a POSIX timer again under its old id",
            fallback: "timers are made and deleted until the id comes up",
            probe: Probe::Child(timer_restore_ids),
        },
        Row {
            name: "openat2_beneath",
            systems: &[System::LwcContexts],
            purpose: "a monitor opens a path for its client without being led out of the allowed tree",
            fallback: "the path is walked one component at a time with O_NOFOLLOW",
            probe: Probe::Child(openat2_beneath),
        },
    ],
};

fn pidfd_open_probe(_: &mut Note) -> Verdict {
    let partner = Partner::asleep().during("fork")?;
    let held = pidfd_open(partner.pid(), PidfdFlags::empty()).during("pidfd_open")?;
    pidfd_send_signal(&held, Signal::KILL).during("pidfd_send_signal")?;
    poll(&mut [PollFd::new(&held, PollFlags::IN)], None).during("poll of a pidfd").map(drop)
}

fn pidfd_getfd_probe(_: &mut Note) -> Verdict {
    let theirs = memfd_create(c"orrery-probe", MemfdFlags::CLOEXEC).during("memfd_create")?;
    let partner = Partner::asleep().during("fork")?;
    let held = pidfd_open(partner.pid(), PidfdFlags::empty()).during("pidfd_open")?;
    let number: RawFd = theirs.as_raw_fd();
    let inode = fstat(&theirs).during("fstat")?.st_ino;
    drop(theirs);
    let fetched = pidfd_getfd(&held, number, PidfdGetfdFlags::empty()).during("pidfd_getfd")?;
    expect(fstat(&fetched).during("fstat")?.st_ino == inode, "another file was fetched")
}

fn pidfd_thread(_: &mut Note) -> Verdict {
    let thread = rustix::thread::gettid();
    pidfd_open(thread, PidfdFlags::from_bits_retain(OFlags::EXCL.bits()))
        .during("pidfd_open(PIDFD_THREAD)")
        .map(drop)
}

fn kcmp(_: &mut Note) -> Verdict {
    const KCMP_FILE: usize = 0;
    let file = memfd_create(c"orrery-probe", MemfdFlags::CLOEXEC).during("memfd_create")?;
    let twin = rustix::io::dup(&file).during("dup")?;
    let other = memfd_create(c"orrery-probe", MemfdFlags::CLOEXEC).during("memfd_create")?;
    let me = process::getpid().as_raw_nonzero().get();
    let differ = |second: &OwnedFd| {
        // SAFETY: the call takes numbers only, and compares two descriptors that are open.
        unsafe { syscall!(Sysno::kcmp, me, me, KCMP_FILE, file.as_raw_fd(), second.as_raw_fd()) }
            .during("kcmp")
    };
    expect(differ(&twin)? == 0 && differ(&other)? != 0, "equal and different files are mixed up")
}

fn clone3(_: &mut Note) -> Verdict {
    let mut pidfd: RawFd = -1;
    // SAFETY: all-zero arguments are valid: a plain fork.
    let mut args: clone_args = unsafe { zeroed() };
    args.flags = u64::from(CLONE_PIDFD);
    args.pidfd = ptr::from_mut(&mut pidfd).expose_provenance() as u64;
    // SAFETY: the arguments and the `pidfd` that they name outlive the call; they share nothing with the
    // child, which ends at once.
    let Some(pid) = unsafe { tools::clone3(&mut args) }.during("clone3")? else { exit(7) };
    let status = process::waitpid(Some(pid), WaitOptions::empty()).during("waitpid")?;
    expect(pidfd >= 0, "no pidfd came with the child")?;
    expect(status.and_then(|(_, status)| status.exit_status()) == Some(7), "the child's status got lost")
}

fn close_range(_: &mut Note) -> Verdict {
    let file = memfd_create(c"orrery-probe", MemfdFlags::CLOEXEC).during("memfd_create")?;
    let copy = rustix::io::fcntl_dupfd_cloexec(&file, 500).during("F_DUPFD_CLOEXEC")?;
    let number = std::os::fd::IntoRawFd::into_raw_fd(copy);
    // SAFETY: the only descriptor in the range is the copy, whose ownership was given up.
    unsafe { syscall!(Sysno::close_range, number, number, 0) }.during("close_range")?;
    // SAFETY: F_GETFD takes no pointer, and a closed number is an error.
    let gone = unsafe { syscall!(Sysno::fcntl, number, libc::F_GETFD) }.is_err();
    expect(gone, "the descriptor is still open")
}

fn process_vm_readv(_: &mut Note) -> Verdict {
    let pages = Pages::small(1).during("mmap")?;
    pages.write(0, 7);
    let partner = Partner::asleep().during("fork")?;
    pages.write(0, 8);
    let mut seen = [0u8; 1];
    let local = libc::iovec { iov_base: seen.as_mut_ptr().cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: pages.at(0), iov_len: 1 };
    let pid = partner.pid().as_raw_nonzero().get();
    // SAFETY: the kernel writes one byte to the local buffer.
    unsafe { syscall!(Sysno::process_vm_readv, pid, &raw const local, 1, &raw const remote, 1, 0) }
        .during("process_vm_readv")?;
    expect(seen == [7], "what was read is not the other's")
}

fn ptrace(_: &mut Note) -> Verdict {
    const NT_PRSTATUS: usize = 1;
    let partner = Partner::asleep().during("fork")?;
    let pid = partner.pid().as_raw_nonzero().get();
    // SAFETY: it attaches to our own child.
    unsafe { syscall!(Sysno::ptrace, PTRACE_SEIZE, pid, 0, PTRACE_O_EXITKILL) }.during("PTRACE_SEIZE")?;
    // SAFETY: the call stops our own child and uses no pointer.
    unsafe { syscall!(Sysno::ptrace, PTRACE_INTERRUPT, pid, 0, 0) }.during("PTRACE_INTERRUPT")?;
    let status = process::waitpid(Some(partner.pid()), WaitOptions::UNTRACED).during("waitpid")?;
    expect(status.is_some_and(|(_, status)| status.stopped()), "the traced process does not stop")?;
    let mut registers = [0u8; 1024];
    let mut buffer = libc::iovec { iov_base: registers.as_mut_ptr().cast(), iov_len: registers.len() };
    // SAFETY: the kernel writes at most the stated length to the buffer.
    unsafe { syscall!(Sysno::ptrace, PTRACE_GETREGSET, pid, NT_PRSTATUS, &raw mut buffer) }
        .during("PTRACE_GETREGSET")
        .map(drop)
}

fn proc_children(_: &mut Note) -> Verdict {
    let partner = Partner::asleep().during("fork")?;
    let mut text = [0; 256];
    let text = read_file(c"/proc/thread-self/children", &mut text).during("open /proc/TID/children")?;
    let pid = u64::from(partner.pid().as_raw_nonzero().get().unsigned_abs());
    expect(leading_number(text) == Some(pid), "the child is not listed")
}

/// Makes a POSIX timer that never notifies; `id` is what the kernel may be asked for.
fn silent_timer(id: &mut i32) -> Result<(), syscalls::Errno> {
    // SAFETY: a `sigevent` consists of integers and a union of them and pointers, for which all-zero is a
    // valid value.
    let mut event: libc::sigevent = unsafe { zeroed() };
    event.sigev_notify = libc::SIGEV_NONE;
    // SAFETY: the kernel reads the event and writes the id.
    unsafe { syscall!(Sysno::timer_create, libc::CLOCK_MONOTONIC, &raw const event, ptr::from_mut(id)) }
        .map(drop)
}

fn proc_timers(_: &mut Note) -> Verdict {
    let mut id = 0;
    silent_timer(&mut id).during("timer_create")?;
    let mut text = [0; 256];
    let text = read_file(c"/proc/self/timers", &mut text).during("open /proc/self/timers")?;
    expect(number_after(text, b"ID:") == u64::try_from(id).ok(), "the timer is not listed")
}

fn timer_restore_ids(_: &mut Note) -> Verdict {
    const WANTED: i32 = 1234;
    // SAFETY: it concerns the ids of timers that this child makes.
    unsafe { syscall!(Sysno::prctl, PR_TIMER_CREATE_RESTORE_IDS, 1, 0, 0, 0) }
        .during("PR_TIMER_CREATE_RESTORE_IDS")?;
    let mut id = WANTED;
    silent_timer(&mut id).during("timer_create with an id")?;
    expect(id == WANTED, "the timer got another id")
}

fn openat2_beneath(_: &mut Note) -> Verdict {
    let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let tree = openat(CWD, c"/proc", directory, Mode::empty()).during("open /proc")?;
    let open =
        |path| openat2(&tree, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::BENEATH);
    open(c"meminfo").during("openat2(RESOLVE_BENEATH)")?;
    expect(open(c"../proc").err() == Some(Errno::XDEV), "a path leads out of its tree")
}
