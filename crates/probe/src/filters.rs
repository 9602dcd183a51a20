//! Facilities that stand between a program and its system calls.
//!
//! A filter can only be put on the calling thread, for good. So the probe's child filters itself, forks a partner that
//! inherits the filter, and lets the partner make the call that the filter is about ([`TRIAL`]): one that nothing else
//! here makes.

use std::mem::zeroed;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;

use linux_raw_sys::landlock::{LANDLOCK_ACCESS_FS_READ_FILE, LANDLOCK_CREATE_RULESET_VERSION};
use linux_raw_sys::ptrace::{
    SECCOMP_ADDFD_FLAG_SEND, SECCOMP_FILTER_FLAG_NEW_LISTENER, SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV,
    SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO, SECCOMP_RET_USER_NOTIF, SECCOMP_SET_MODE_FILTER,
    SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP, SECCOMP_USER_NOTIF_FLAG_CONTINUE, seccomp_notif, seccomp_notif_addfd,
    seccomp_notif_resp, sock_filter, sock_fprog,
};
use rustix::fs::{CWD, MemfdFlags, Mode, OFlags, fstat, memfd_create, openat};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};
use syscalls::{Sysno, syscall};

use crate::child::{During, Note, Trouble, Verdict, expect};
use crate::facility::{Group, System};
use crate::row::{Family, Probe, Row};
use crate::tools::{Partner, owned};
use crate::{dispatch, uring};

const MONITORED: &[System] = &[System::LwcContexts, System::Hijack];

pub(crate) const FAMILY: Family = Family {
    group: Group::SystemCalls,
    rows: &[
        Row {
            name: "seccomp_filter",
            systems: &[System::LwcRollback, System::LwcContexts, System::Hijack, System::Orbit, System::Orc],
            purpose: "takes system calls away from a domain, a worker or a guest",
            fallback: "ptrace stops every call; Landlock still guards files",
            probe: Probe::Child(seccomp_filter),
        },
        Row {
            name: "seccomp_notify",
            systems: MONITORED,
            purpose: "a monitor out of reach decides a call and answers it",
            fallback: "ptrace, at two to three times the cost of each call",
            probe: Probe::Child(seccomp_notify),
        },
        Row {
            name: "seccomp_addfd",
            systems: MONITORED,
            purpose: "the monitor's answer puts a descriptor into the asking process",
            fallback: "the monitored process fetches it from the monitor with pidfd_getfd or over a socket",
            probe: Probe::Child(seccomp_addfd),
        },
        Row {
            name: "seccomp_continue",
            systems: MONITORED,
            purpose: "the monitor lets a harmless call go on as it is",
            fallback: "the monitor performs the call itself, or the filter allows it outright",
            probe: Probe::Child(seccomp_continue),
        },
        Row {
            name: "seccomp_sync_wake_up",
            systems: MONITORED,
            purpose: "a monitor on the same CPU is switched to at once (2 us a call, not 70)",
            fallback: "monitor and program are pinned to one CPU without the hint",
            probe: Probe::Child(seccomp_sync_wake_up),
        },
        Row {
            name: "seccomp_wait_killable",
            systems: MONITORED,
            purpose: "a call that the monitor has taken up is not broken off by a signal",
            fallback: "broken-off calls are noticed by their id and undone",
            probe: Probe::Child(seccomp_wait_killable),
        },
        Row {
            name: "syscall_user_dispatch",
            systems: &[System::Hijack, System::LwcContexts],
            purpose: "every system call outside the executive becomes a SIGSYS, which finds the sites to rewrite",
            fallback: "ptrace finds them, at five times the cost of each first call",
            probe: Probe::Child(dispatch::all_but_a_range),
        },
        Row {
            name: "syscall_user_dispatch_inclusive",
            systems: &[System::Hijack],
            purpose: "the same for the calls of one range of addresses only",
            fallback: "syscall_user_dispatch with the range's complement, or with its selector switched",
            probe: Probe::Child(dispatch::only_a_range),
        },
        Row {
            name: "landlock",
            systems: &[System::LwcRollback, System::LwcContexts, System::Hijack, System::Orc],
            purpose: "a second wall: files and ports that no call of a sandboxed process reaches, monitor or not",
            fallback: "the first wall alone (filters, monitor), with a mount namespace where one may be made",
            probe: Probe::Child(landlock),
        },
        Row {
            name: "io_uring",
            systems: &[System::LwcContexts, System::Hijack],
            purpose: "to be refused to monitored code: its requests pass by every filter",
            fallback: "nothing to refuse",
            probe: Probe::Child(uring::no_operation),
        },
    ],
};

/// The call that the filters are about.
const TRIAL: Sysno = Sysno::getpgid;

fn make_trial_call() -> Result<usize, Errno> {
    // SAFETY: getpgid(2) takes a number and writes no memory.
    unsafe { syscall!(TRIAL, 0) }.map_err(|e| Errno::from_raw_os_error(e.into_raw()))
}

/// Filters this thread: `action` for the trial call, everything else is allowed. Returns what seccomp(2) returned.
fn filter(action: u32, flags: u32) -> Result<usize, Trouble> {
    const LOAD_WORD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let number = u32::try_from(TRIAL.id()).unwrap_or(u32::MAX);
    let mut program = [
        sock_filter { code: LOAD_WORD, jt: 0, jf: 0, k: 0 },
        sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: 1, k: number },
        sock_filter { code: RETURN, jt: 0, jf: 0, k: action },
        sock_filter { code: RETURN, jt: 0, jf: 0, k: SECCOMP_RET_ALLOW },
    ];
    let program = sock_fprog { len: 4, filter: program.as_mut_ptr() };
    rustix::thread::set_no_new_privs(true).during("PR_SET_NO_NEW_PRIVS")?;
    // SAFETY: the kernel copies the program; the filter concerns one call of this child and its children.
    unsafe { syscall!(Sysno::seccomp, SECCOMP_SET_MODE_FILTER, flags, &raw const program) }.during("seccomp")
}

fn seccomp_filter(_: &mut Note) -> Verdict {
    const ODD: Errno = Errno::XDEV;
    filter(SECCOMP_RET_ERRNO | ODD.raw_os_error().unsigned_abs(), 0)?;
    expect(make_trial_call() == Err(ODD), "the filter does not answer the call")
}

/// The listener of a filter that asks about the trial call.
struct Listener(OwnedFd);

impl Listener {
    fn new(more_flags: u32) -> Result<Self, Trouble> {
        let listener = filter(SECCOMP_RET_USER_NOTIF, SECCOMP_FILTER_FLAG_NEW_LISTENER | more_flags)?;
        // SAFETY: the kernel made the descriptor for us.
        unsafe { owned(Ok(listener)) }.during("seccomp(NEW_LISTENER)").map(Self)
    }

    /// Waits for the partner's call.
    fn receive(&self) -> Result<u64, Trouble> {
        const RECEIVE: Opcode = opcode::read_write::<seccomp_notif>(b'!', 0);
        // SAFETY: all-zero is what the kernel demands to be handed.
        let mut call: seccomp_notif = unsafe { zeroed() };
        // SAFETY: the kernel fills in a `struct seccomp_notif`.
        unsafe { syscall!(Sysno::ioctl, self.0.as_raw_fd(), RECEIVE, &raw mut call) }
            .during("SECCOMP_IOCTL_NOTIF_RECV")?;
        expect(call.data.nr == TRIAL.id(), "another call was reported")?;
        Ok(call.id)
    }

    fn answer(&self, mut response: seccomp_notif_resp) -> Verdict {
        const SEND: Opcode = opcode::read_write::<seccomp_notif_resp>(b'!', 1);
        // SAFETY: the kernel reads a `struct seccomp_notif_resp`.
        unsafe { syscall!(Sysno::ioctl, self.0.as_raw_fd(), SEND, &raw mut response) }
            .during("SECCOMP_IOCTL_NOTIF_SEND")
            .map(drop)
    }
}

/// The value that the monitor makes a call return.
const ANSWER: u16 = 4242;

/// One call of a partner, answered with a value.
fn round_trip(listener: &Listener) -> Verdict {
    // SAFETY: the partner makes one system call.
    let mut partner = unsafe { Partner::start(|| i32::from(make_trial_call() == Ok(usize::from(ANSWER)))) }
        .during("fork")?;
    let id = listener.receive()?;
    listener.answer(seccomp_notif_resp { id, val: i64::from(ANSWER), error: 0, flags: 0 })?;
    expect(partner.exit_status().during("waitpid")? == Some(1), "the answer did not arrive")
}

fn seccomp_notify(_: &mut Note) -> Verdict {
    round_trip(&Listener::new(0)?)
}

fn seccomp_wait_killable(_: &mut Note) -> Verdict {
    round_trip(&Listener::new(SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV)?)
}

fn seccomp_sync_wake_up(_: &mut Note) -> Verdict {
    const SET_FLAGS: Opcode = opcode::write::<u64>(b'!', 4);
    let listener = Listener::new(0)?;
    // SAFETY: the flags go by value and concern this listener only.
    unsafe { syscall!(Sysno::ioctl, listener.0.as_raw_fd(), SET_FLAGS, SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP) }
        .during("SECCOMP_IOCTL_NOTIF_SET_FLAGS(SYNC_WAKE_UP)")?;
    round_trip(&listener)
}

fn seccomp_continue(_: &mut Note) -> Verdict {
    let listener = Listener::new(0)?;
    // SAFETY: the partner makes one system call.
    let mut partner = unsafe { Partner::start(|| i32::from(make_trial_call().is_ok_and(|group| group > 0))) }
        .during("fork")?;
    let id = listener.receive()?;
    listener.answer(seccomp_notif_resp { id, val: 0, error: 0, flags: SECCOMP_USER_NOTIF_FLAG_CONTINUE })?;
    expect(partner.exit_status().during("waitpid")? == Some(1), "the call did not go on")
}

fn seccomp_addfd(note: &mut Note) -> Verdict {
    const ADDFD: Opcode = opcode::write::<seccomp_notif_addfd>(b'!', 3);
    let listener = Listener::new(0)?;
    // SAFETY: the partner makes two system calls.
    let mut partner = unsafe { Partner::start(receives_a_new_descriptor) }.during("fork")?;
    let gift = memfd_create(c"orrery-probe", MemfdFlags::CLOEXEC).during("memfd_create")?;
    rustix::fs::ftruncate(&gift, GIFT_SIZE).during("ftruncate")?;
    let id = listener.receive()?;
    let mut addition = seccomp_notif_addfd {
        id,
        flags: SECCOMP_ADDFD_FLAG_SEND,
        srcfd: gift.as_raw_fd().unsigned_abs(),
        newfd: 0,
        newfd_flags: 0,
    };
    // SAFETY: the kernel reads a `struct seccomp_notif_addfd`.
    let mut add = || unsafe { syscall!(Sysno::ioctl, listener.0.as_raw_fd(), ADDFD, &raw mut addition) };
    match add() {
        Err(syscalls::Errno::EINVAL) => {
            // Before Linux 5.14 the descriptor and the answer went separately.
            addition.flags = 0;
            // SAFETY: the kernel reads a `struct seccomp_notif_addfd`, which lives until the call returns.
            let fd = unsafe { syscall!(Sysno::ioctl, listener.0.as_raw_fd(), ADDFD, &raw mut addition) }
                .during("SECCOMP_IOCTL_NOTIF_ADDFD")?;
            listener.answer(seccomp_notif_resp {
                id,
                val: i64::try_from(fd).unwrap_or(-1),
                error: 0,
                flags: 0,
            })?;
            note.say(format_args!("in two steps (no SECCOMP_ADDFD_FLAG_SEND)"));
        }
        other => {
            other.during("SECCOMP_IOCTL_NOTIF_ADDFD")?;
            note.say(format_args!("with the answer, in one step"));
        }
    }
    expect(partner.exit_status().during("waitpid")? == Some(1), "the descriptor did not arrive")
}

/// What the given file is known by.
const GIFT_SIZE: u64 = 4242;

/// Returns the partner's side: the trial call returns a descriptor of the monitor's file.
fn receives_a_new_descriptor() -> i32 {
    let Some(fd) = make_trial_call().ok().and_then(|fd| i32::try_from(fd).ok()) else {
        return 0;
    };
    // SAFETY: the partner ends right after, and nobody closes the descriptor before.
    let file = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    i32::from(fstat(file).is_ok_and(|found| u64::try_from(found.st_size) == Ok(GIFT_SIZE)))
}

fn landlock(note: &mut Note) -> Verdict {
    let none: *const u64 = ptr::null();
    // SAFETY: with LANDLOCK_CREATE_RULESET_VERSION the kernel takes no attributes: the pointer is null and
    // the size 0.
    let abi = unsafe { syscall!(Sysno::landlock_create_ruleset, none, 0, LANDLOCK_CREATE_RULESET_VERSION) }
        .during("landlock_create_ruleset")?;
    let handled: u64 = u64::from(LANDLOCK_ACCESS_FS_READ_FILE);
    // SAFETY: the first field of the attributes is their first version; the kernel reads as much as is stated.
    let rules = unsafe { syscall!(Sysno::landlock_create_ruleset, &raw const handled, size_of::<u64>(), 0) }
        .during("landlock_create_ruleset")?;
    rustix::thread::set_no_new_privs(true).during("PR_SET_NO_NEW_PRIVS")?;
    // SAFETY: it restricts this child only.
    unsafe { syscall!(Sysno::landlock_restrict_self, rules, 0) }.during("landlock_restrict_self")?;
    let file = openat(CWD, c"/proc/self/status", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    expect(file.err() == Some(Errno::ACCESS), "a file outside the rules can be read")?;
    note.say(format_args!("ABI {abi}"));
    Ok(())
}
