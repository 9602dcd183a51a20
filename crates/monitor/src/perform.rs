//! The calls that the monitor performs in the program's place: each on its own copy of the arguments.

mod attributes;
mod directory;
mod execute;
pub(crate) mod network;
mod open;
pub(crate) mod processes;
mod shared_memory;
mod stat;

use rustix::io::Errno;
use syscalls::Sysno;

use crate::answer::{Answer, Outcome};
use crate::log::Event;
use crate::policy::syscalls::{REFUSED, Word};
use crate::syscall::Syscall;

/// Deals with one kind of call.
pub(crate) type Handler = for<'j, 'm> fn(&'j Syscall<'m>) -> Outcome;

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
    /// Other processes: asked about where it may be another one that is meant.
    Processes,
    /// Memory, files and signals of other processes, which Landlock keeps apart: asked about where it does not.
    Apart,
    /// Which way packets take: asked about with the network.
    Routes,
}

/// All calls that are performed, by name: not every architecture has all of them.
pub(crate) const HANDLERS: &[(&str, About, Handler)] = &[
    ("open", About::Files, open::open),
    ("openat", About::Files, open::openat),
    ("openat2", About::Files, open::openat2),
    ("creat", About::Files, open::creat),
    ("stat", About::Looking, stat::stat),
    ("lstat", About::Looking, stat::lstat),
    ("newfstatat", About::Looking, stat::newfstatat),
    ("statx", About::Looking, stat::statx),
    ("access", About::Looking, stat::access),
    ("faccessat", About::Looking, stat::faccessat),
    ("faccessat2", About::Looking, stat::faccessat2),
    ("readlink", About::Looking, stat::readlink),
    ("readlinkat", About::Looking, stat::readlinkat),
    ("statfs", About::Looking, stat::statfs),
    ("getxattr", About::Files, stat::getxattr),
    ("lgetxattr", About::Files, stat::lgetxattr),
    ("listxattr", About::Files, stat::listxattr),
    ("llistxattr", About::Files, stat::llistxattr),
    ("getxattrat", About::Files, stat::not_here),
    ("listxattrat", About::Files, stat::not_here),
    ("file_getattr", About::Files, stat::not_here),
    ("name_to_handle_at", About::Files, stat::no_handles),
    ("inotify_add_watch", About::Files, stat::inotify_add_watch),
    ("mkdir", About::Files, directory::mkdir),
    ("mkdirat", About::Files, directory::mkdirat),
    ("mknod", About::Files, directory::mknod),
    ("mknodat", About::Files, directory::mknodat),
    ("unlink", About::Files, directory::unlink),
    ("unlinkat", About::Files, directory::unlinkat),
    ("rmdir", About::Files, directory::rmdir),
    ("rename", About::Files, directory::rename),
    ("renameat", About::Files, directory::renameat),
    ("renameat2", About::Files, directory::renameat2),
    ("link", About::Files, directory::link),
    ("linkat", About::Files, directory::linkat),
    ("symlink", About::Files, directory::symlink),
    ("symlinkat", About::Files, directory::symlinkat),
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
    ("setxattrat", About::Files, stat::not_here),
    ("removexattrat", About::Files, stat::not_here),
    ("file_setattr", About::Files, stat::not_here),
    ("execve", About::Files, execute::execve),
    ("execveat", About::Files, execute::execveat),
    ("connect", About::Network, network::connect),
    ("bind", About::Network, network::bind),
    ("listen", About::Network, network::listen),
    ("setsockopt", About::Routes, network::setsockopt),
    ("socket", About::Network, network::socket),
    ("socketpair", About::Network, network::socket),
    ("sendto", About::Network, network::sendto),
    ("sendmsg", About::Network, network::sendmsg),
    ("sendmmsg", About::Network, network::sendmmsg),
    ("shmget", About::Shared, shared_memory::shmget),
    ("shmat", About::Shared, shared_memory::by_number),
    ("shmctl", About::Shared, shared_memory::by_number),
    ("prlimit64", About::Processes, processes::prlimit64),
    ("setrlimit", About::Processes, processes::setrlimit),
    ("setpriority", About::Processes, processes::setpriority),
    ("ioprio_set", About::Processes, processes::ioprio_set),
    ("sched_setscheduler", About::Processes, processes::of_thread),
    ("sched_setparam", About::Processes, processes::of_thread),
    ("sched_setattr", About::Processes, processes::of_thread),
    ("sched_setaffinity", About::Processes, processes::of_thread),
    ("migrate_pages", About::Apart, processes::of_thread),
    ("move_pages", About::Apart, processes::of_thread),
    ("kcmp", About::Apart, processes::of_two),
    ("kill", About::Apart, processes::kill),
    ("tkill", About::Apart, processes::of_thread),
    ("tgkill", About::Apart, processes::of_two),
    ("rt_sigqueueinfo", About::Apart, processes::of_thread),
    ("rt_tgsigqueueinfo", About::Apart, processes::of_two),
    ("pidfd_open", About::Apart, processes::of_thread),
    ("pidfd_send_signal", About::Apart, processes::pidfd_send_signal),
    ("fcntl", About::Apart, processes::fcntl),
    ("setuid", About::Caller, change_credentials),
    ("setgid", About::Caller, change_credentials),
    ("setreuid", About::Caller, change_credentials),
    ("setregid", About::Caller, change_credentials),
    ("setresuid", About::Caller, change_credentials),
    ("setresgid", About::Caller, change_credentials),
    ("setfsuid", About::Caller, change_credentials),
    ("setfsgid", About::Caller, change_credentials),
    ("setgroups", About::Caller, change_credentials),
    ("capset", About::Caller, change_credentials),
];

/// Whether the monitor can hold a rule about this call's paths or addresses: those of the calls that it performs.
#[must_use]
pub fn can_enforce(call: &str) -> bool {
    let held = |about: About| matches!(about, About::Looking | About::Files | About::Network);
    HANDLERS.iter().any(|(name, about, _)| *name == call && held(*about))
}

/// The caller changes its identity: nothing to decide, but what is known of it ends here. The kernel changes ids after
/// this answer and before the thread's next call, so that the next look finds the new ones.
fn change_credentials(syscall: &Syscall<'_>) -> Outcome {
    syscall.state.callers.diverge();
    syscall.state.callers.forget(syscall.notification.thread);
    Ok(Answer::GoOn)
}

/// A call that is not performed but asked about: one that the policy names, or that is always refused.
pub(crate) fn named(syscall: &Syscall<'_>) -> Outcome {
    let call = usize::try_from(syscall.notification.number).ok().and_then(Sysno::new);
    match call.and_then(|call| syscall.state.policy.calls.words.get(&call)) {
        Some(Word::Log) => {
            syscall.state.log.allowed(syscall.process(), syscall.notification.thread, syscall.name());
            return if syscall.name() == "prctl" { change_credentials(syscall) } else { Ok(Answer::GoOn) };
        }
        Some(Word::Deny(errno)) => {
            syscall.refuse(&Event::Call { reason: "the policy denies it" });
            return Err(*errno);
        }
        // Without an audit nothing is asked about such calls, but for some of prctl(2).
        Some(Word::Allow) if syscall.state.policy.audited => {
            syscall.state.recorder.call(syscall.name());
            return if syscall.name() == "prctl" { change_credentials(syscall) } else { Ok(Answer::GoOn) };
        }
        Some(Word::Allow) | None => (),
    }
    let why = REFUSED.iter().find(|(name, _)| *name == syscall.name());
    let reason = match (why, syscall.name()) {
        (Some((_, reason)), _) => reason,
        (None, "clone") => "new namespaces change what paths mean",
        (None, "seccomp") => "a listener of its own would be asked in the monitor's place",
        (None, "ioctl") => match syscall.unsigned(1) {
            processes::FIOSETOWN | processes::SIOCSPGRP => "it would choose who is signalled",
            _ => "it types into the terminal",
        },
        (None, "prctl") => return change_credentials(syscall),
        (None, _) => match syscall.state.policy.calls.otherwise {
            Some(errno) => {
                syscall.refuse(&Event::Call { reason: "the policy does not name it" });
                return Err(errno);
            }
            None => "it reaches around the monitor",
        },
    };
    if syscall.state.policy.learning {
        syscall.state.recorder.call(syscall.name());
    }
    syscall.refuse(&Event::Call { reason });
    // What containers answer; programs know it.
    Err(Errno::PERM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_performed_is_held() {
        assert!(
            can_enforce("openat") && can_enforce("connect") && can_enforce("fchmod") && can_enforce("execve")
        );
        assert!(
            !can_enforce("read") && !can_enforce("chdir") && !can_enforce("setuid") && !can_enforce("shmat")
        );
    }
}
