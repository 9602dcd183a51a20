//! Namespaces: whether this process may have its own. Each probe leaves its namespace behind when its child ends.

use std::ffi::CStr;
use std::fmt::Write as _;

use rustix::fs::stat;
use rustix::io::Errno;
use rustix::process::{Uid, geteuid, getpid, getuid};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use syscalls::{Sysno, syscall};

use crate::child::{During, Note, Verdict, expect};
use crate::facility::{Group, System};
use crate::row::{Family, Probe, Row};
use crate::text::Text;
use crate::tools::{Partner, read_file, write_file};

pub(crate) const FAMILY: Family = Family {
    group: Group::Processes,
    rows: &[
        Row {
            name: "user_namespace",
            systems: &[System::LwcContexts, System::Orc, System::Orthros],
            purpose: "lets an ordinary user make the other namespaces",
            fallback: "root, or doing without: filters and Landlock stay as walls",
            probe: Probe::Child(user_namespace),
        },
        Row {
            name: "pid_namespace",
            systems: &[System::LwcContexts, System::Orthros],
            purpose: "ends a whole family of processes with its first; keeps process ids over a failover",
            fallback: "a subreaper with pidfds; orthros needs it",
            probe: Probe::Child(pid_namespace),
        },
        Row {
            name: "mount_namespace",
            systems: &[System::LwcContexts, System::Orc],
            purpose: "a domain sees only the files it was given",
            fallback: "Landlock",
            probe: Probe::Child(mount_namespace),
        },
        Row {
            name: "detached_mount",
            systems: &[System::Hijack],
            purpose: "a file system that only those see who were given its descriptor",
            fallback: "nothing: archives have to be unpacked",
            probe: Probe::Child(detached_mount),
        },
        Row {
            name: "net_namespace",
            systems: &[System::LwcContexts, System::Orthros],
            purpose: "cuts a domain off the network; holds the bridge between the two kernels",
            fallback: "the system-call filter refuses sockets; orthros joins a bridge that it is given",
            probe: Probe::Child(net_namespace),
        },
        Row {
            name: "time_namespace",
            systems: &[System::Orthros],
            purpose: "the monotonic clock of a rescued process goes on where it stood",
            fallback: "the clock jumps to the survivor's, as after a suspend",
            probe: Probe::Child(time_namespace),
        },
    ],
};

/// Enters a new namespace, from inside a new user namespace if that is what it takes, and makes sure by its `link` that
/// it is a new one: a filter may answer "done" without doing it, and what follows must not happen outside.
fn enter(flag: UnshareFlags, link: &CStr, note: &mut Note) -> Verdict {
    let before = number_of(link);
    // SAFETY: the child has no other thread, and these namespaces share no descriptor table that code relies on.
    match unsafe { unshare_unsafe(flag) } {
        Err(Errno::PERM) => {
            enter_user_namespace(flag).during("unshare, also with CLONE_NEWUSER")?;
            note.say(format_args!("inside a user namespace"));
        }
        other => other.during("unshare")?,
    }
    expect(before.is_some() && number_of(link) != before, "unshare leaves the old namespace in place")
}

/// Enters a new user namespace, along with others, as its root.
fn enter_user_namespace(others: UnshareFlags) -> Result<(), Errno> {
    let uid = getuid();
    // SAFETY: the child has no other thread, and these namespaces share no descriptor table that code relies
    // on.
    unsafe { unshare_unsafe(UnshareFlags::NEWUSER | others) }?;
    let mut map = Text::<32>::new();
    let _ = write!(map, "0 {} 1", uid.as_raw());
    write_file(c"/proc/self/uid_map", map.bytes())
}

/// Returns which namespace a link under `/proc/self/ns` stands for. One for children that has none yet has no number.
fn number_of(link: &CStr) -> Option<u64> {
    stat(link).map(|found| found.st_ino).ok()
}

/// Moves the calling child to a network of its own, where it may make interfaces that nobody else sees.
pub(crate) fn enter_own_network(note: &mut Note) -> Verdict {
    enter(UnshareFlags::NEWNET, c"/proc/self/ns/net", note)
}

fn user_namespace(_: &mut Note) -> Verdict {
    enter_user_namespace(UnshareFlags::empty()).during("unshare(CLONE_NEWUSER)")?;
    expect(geteuid() == Uid::ROOT, "the caller is not root inside")
}

fn pid_namespace(note: &mut Note) -> Verdict {
    enter(UnshareFlags::NEWPID, c"/proc/self/ns/pid_for_children", note)?;
    // SAFETY: the child calls getpid(2) only, which is async-signal-safe.
    let mut first = unsafe { Partner::start(|| getpid().as_raw_nonzero().get()) }.during("fork")?;
    expect(first.exit_status().during("waitpid")? == Some(1), "the first process inside is not number 1")
}

fn mount_namespace(note: &mut Note) -> Verdict {
    enter(UnshareFlags::NEWNS, c"/proc/self/ns/mnt", note)?;
    let (root, none, tmpfs) = (c"/".as_ptr(), c"none".as_ptr(), c"tmpfs".as_ptr());
    // SAFETY: inside the new namespace; the strings end in NUL.
    unsafe { syscall!(Sysno::mount, none, root, 0, libc::MS_REC | libc::MS_PRIVATE, 0) }
        .during("mount(MS_PRIVATE)")?;
    // SAFETY: the strings end in NUL; the process is inside the new namespace, so nothing mounted here is
    // seen outside.
    unsafe { syscall!(Sysno::mount, none, c"/proc".as_ptr(), tmpfs, 0, 0) }.during("mount of a tmpfs")?;
    expect(stat(c"/proc/self").err() == Some(Errno::NOENT), "the mount is not seen")
}

fn detached_mount(note: &mut Note) -> Verdict {
    const FSCONFIG_CMD_CREATE: u32 = 6;
    // SAFETY: the kernel reads the literal up to its NUL, which is static.
    let open = || unsafe { syscall!(Sysno::fsopen, c"tmpfs".as_ptr(), 0) };
    let context = match open() {
        Err(error) if error.into_raw() == libc::EPERM => {
            enter_user_namespace(UnshareFlags::NEWNS).during("fsopen, also after unshare(CLONE_NEWUSER)")?;
            note.say(format_args!("inside a user namespace"));
            open()
        }
        other => other,
    };
    let context = context.during("fsopen")?;
    // SAFETY: for FSCONFIG_CMD_CREATE the kernel reads no string: key and value are null.
    unsafe { syscall!(Sysno::fsconfig, context, FSCONFIG_CMD_CREATE, 0, 0, 0) }.during("fsconfig")?;
    // SAFETY: only a descriptor is made, which the child leaves behind.
    unsafe { syscall!(Sysno::fsmount, context, 0, 0) }.during("fsmount").map(drop)
}

fn net_namespace(note: &mut Note) -> Verdict {
    enter_own_network(note)?;
    let mut text = [0; 2048];
    let text = read_file(c"/proc/self/net/dev", &mut text).during("read /proc/self/net/dev")?;
    let interfaces = text.iter().filter(|&&byte| byte == b':').count();
    expect(interfaces <= 1, "interfaces from outside are seen inside")
}

fn time_namespace(note: &mut Note) -> Verdict {
    let flag = UnshareFlags::from_bits_retain(libc::CLONE_NEWTIME.unsigned_abs());
    enter(flag, c"/proc/self/ns/time_for_children", note)?;
    write_file(c"/proc/self/timens_offsets", b"monotonic 1000000 0")
        .during("write /proc/self/timens_offsets")?;
    let clock = || rustix::time::clock_gettime(rustix::time::ClockId::Monotonic).tv_sec;
    let outside = clock();
    // Only children are inside; there the clock is a million seconds ahead.
    // SAFETY: the child calls clock_gettime(2) only, which is async-signal-safe.
    let mut inside =
        unsafe { Partner::start(|| i32::from(clock() - outside >= 1_000_000)) }.during("fork")?;
    expect(inside.exit_status().during("waitpid")? == Some(1), "the clock inside is not shifted")
}
