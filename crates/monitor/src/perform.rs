//! The calls that the monitor performs in the program's place: each on its own copy of the arguments.

mod attributes;
mod change;
mod execute;
mod look;
mod network;
mod open;
mod shared;

pub(crate) use network::described;
use rustix::io::Errno;
use syscalls::Sysno;

use crate::job::{Answer, Job, Outcome};
use crate::log::Event;
use crate::policy::calls::{REFUSED, Word};

/// Deals with one kind of call.
pub(crate) type Handler = for<'j, 'm> fn(&'j Job<'m>) -> Outcome;

/// What a handler is for, so that the filter need not ask about what is allowed anyway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum About {
    /// Metadata: not asked about where everything may be looked at.
    Looking,
    /// Anything else in the file system.
    Files,
    /// The network: not asked about where all addresses are allowed.
    Network,
    /// What is known of the caller.
    Caller,
    /// Memory that is shared by number.
    Shared,
}

/// All calls that are performed, by name: not every architecture has all of them.
pub(crate) const HANDLERS: &[(&str, About, Handler)] = &[
    ("open", About::Files, open::open),
    ("openat", About::Files, open::openat),
    ("openat2", About::Files, open::openat2),
    ("creat", About::Files, open::creat),
    ("stat", About::Looking, look::stat),
    ("lstat", About::Looking, look::lstat),
    ("newfstatat", About::Looking, look::newfstatat),
    ("statx", About::Looking, look::statx),
    ("access", About::Looking, look::access),
    ("faccessat", About::Looking, look::faccessat),
    ("faccessat2", About::Looking, look::faccessat2),
    ("readlink", About::Looking, look::readlink),
    ("readlinkat", About::Looking, look::readlinkat),
    ("statfs", About::Looking, look::statfs),
    ("getxattr", About::Files, look::getxattr),
    ("lgetxattr", About::Files, look::lgetxattr),
    ("listxattr", About::Files, look::listxattr),
    ("llistxattr", About::Files, look::llistxattr),
    ("getxattrat", About::Files, look::not_here),
    ("listxattrat", About::Files, look::not_here),
    ("file_getattr", About::Files, look::not_here),
    ("name_to_handle_at", About::Files, look::no_handles),
    ("inotify_add_watch", About::Files, look::inotify_add_watch),
    ("mkdir", About::Files, change::mkdir),
    ("mkdirat", About::Files, change::mkdirat),
    ("mknod", About::Files, change::mknod),
    ("mknodat", About::Files, change::mknodat),
    ("unlink", About::Files, change::unlink),
    ("unlinkat", About::Files, change::unlinkat),
    ("rmdir", About::Files, change::rmdir),
    ("rename", About::Files, change::rename),
    ("renameat", About::Files, change::renameat),
    ("renameat2", About::Files, change::renameat2),
    ("link", About::Files, change::link),
    ("linkat", About::Files, change::linkat),
    ("symlink", About::Files, change::symlink),
    ("symlinkat", About::Files, change::symlinkat),
    ("chmod", About::Files, attributes::chmod),
    ("fchmod", About::Files, attributes::fchmod),
    ("fchmodat", About::Files, attributes::fchmodat),
    ("fchmodat2", About::Files, attributes::fchmodat2),
    ("chown", About::Files, attributes::chown),
    ("lchown", About::Files, attributes::lchown),
    ("fchown", About::Files, attributes::fchown),
    ("fchownat", About::Files, attributes::fchownat),
    ("utime", About::Files, attributes::utime),
    ("utimes", About::Files, attributes::utimes),
    ("futimesat", About::Files, attributes::futimesat),
    ("utimensat", About::Files, attributes::utimensat),
    ("truncate", About::Files, attributes::truncate),
    ("setxattr", About::Files, attributes::setxattr),
    ("lsetxattr", About::Files, attributes::lsetxattr),
    ("fsetxattr", About::Files, attributes::fsetxattr),
    ("removexattr", About::Files, attributes::removexattr),
    ("lremovexattr", About::Files, attributes::lremovexattr),
    ("fremovexattr", About::Files, attributes::fremovexattr),
    ("setxattrat", About::Files, look::not_here),
    ("removexattrat", About::Files, look::not_here),
    ("file_setattr", About::Files, look::not_here),
    ("execve", About::Files, execute::execve),
    ("execveat", About::Files, execute::execveat),
    ("connect", About::Network, network::connect),
    ("bind", About::Network, network::bind),
    ("socket", About::Network, network::socket),
    ("socketpair", About::Network, network::socket),
    ("sendto", About::Network, network::sendto),
    ("sendmsg", About::Network, network::sendmsg),
    ("sendmmsg", About::Network, network::sendmmsg),
    ("shmget", About::Shared, shared::shmget),
    ("shmat", About::Shared, shared::by_number),
    ("shmctl", About::Shared, shared::by_number),
    ("setuid", About::Caller, identity),
    ("setgid", About::Caller, identity),
    ("setreuid", About::Caller, identity),
    ("setregid", About::Caller, identity),
    ("setresuid", About::Caller, identity),
    ("setresgid", About::Caller, identity),
    ("setfsuid", About::Caller, identity),
    ("setfsgid", About::Caller, identity),
    ("setgroups", About::Caller, identity),
    ("capset", About::Caller, identity),
];

/// The caller becomes somebody else: nothing to decide, but what is known of it ends here. The kernel changes ids after
/// this answer and before the thread's next call, so that the next look finds the new ones.
fn identity(job: &Job<'_>) -> Outcome {
    job.monitor.callers.diverge();
    job.monitor.callers.forget(job.call.thread);
    Ok(Answer::GoOn)
}

/// A call that is not performed but asked about: one that the policy names, or that is always refused.
pub(crate) fn named(job: &Job<'_>) -> Outcome {
    let call = usize::try_from(job.call.number).ok().and_then(Sysno::new);
    match call.and_then(|call| job.monitor.policy.calls.words.get(&call)) {
        Some(Word::Log) => {
            job.monitor.log.allowed(job.process(), job.call.thread, job.name());
            return if job.name() == "prctl" { identity(job) } else { Ok(Answer::GoOn) };
        }
        Some(Word::Deny(errno)) => {
            job.refuse(&Event::Call { reason: "the policy denies it" });
            return Err(*errno);
        }
        Some(Word::Allow) | None => (),
    }
    let why = REFUSED.iter().find(|(name, _)| *name == job.name());
    let reason = match (why, job.name()) {
        (Some((_, reason)), _) => reason,
        (None, "clone") => "new namespaces change what paths mean",
        (None, "seccomp") => "a listener of its own would be asked in the monitor's place",
        (None, "ioctl") => "it types into the terminal",
        (None, "prctl") => return identity(job),
        (None, "kill" | "tkill" | "tgkill" | "rt_sigqueueinfo" | "rt_tgsigqueueinfo" | "pidfd_open") => {
            return signal(job);
        }
        (None, _) => match job.monitor.policy.calls.otherwise {
            Some(errno) => {
                job.refuse(&Event::Call { reason: "the policy does not name it" });
                return Err(errno);
            }
            None => "it reaches around the monitor",
        },
    };
    if job.monitor.policy.learning {
        job.monitor.learnt.call(job.name());
    }
    job.refuse(&Event::Call { reason });
    // What containers answer; programs know it.
    Err(Errno::PERM)
}

/// Without Landlock's signal scope (Linux 6.12) the monitor itself looks whom a signal is for. It knows numbers only, which
/// are values; so the call may go on.
fn signal(job: &Job<'_>) -> Outcome {
    let target = job.int(0);
    let own = &job.monitor.own;
    let mine = rustix::process::getpgrp().as_raw_pid();
    let reaches_monitor = match (job.name(), target) {
        ("tgkill" | "rt_tgsigqueueinfo", _) => own.is_own_thread(target) || own.is_own_thread(job.int(1)),
        ("kill", -1) => true,
        ("kill", 0) => {
            let signal = job.int(1);
            signal == libc::SIGKILL || signal == libc::SIGSTOP
        }
        ("kill", group) if group < 0 => group == -mine,
        (_, target) => own.is_own_thread(target),
    };
    if reaches_monitor {
        job.refuse(&Event::Call { reason: "it would reach the monitor" });
        return Err(Errno::PERM);
    }
    Ok(Answer::GoOn)
}
