//! Which calls are asked about, which fail at once, and which pass: the filter's rules for a policy.

use rustix::io::Errno;
use syscalls::Sysno;

use crate::audit::can_be_asked;
use crate::perform::network::ROUTES;
use crate::perform::processes::{F_SETOWN_EX, FIOSETOWN, SIOCSPGRP};
use crate::perform::{About, HANDLERS};
use crate::policy::Policy;
use crate::policy::rules::{self as given_rules, Verdict};
use crate::policy::syscalls::{REFUSED, Word};
use orrery_sys::capability::CapabilitySet;
use orrery_sys::seccomp::{Action, Condition, Filter};

/// The rules for a policy: which calls are asked about. `walled_signals`: the kernel keeps signals and ptrace(2) away
/// from the monitor by itself.
pub(crate) fn rules(policy: &Policy, walled: bool, kernel_opens: bool) -> Filter {
    let mut rules = Filter::new(Action::Allow);
    let looking = !policy.all_visible() || policy.is_recorded();
    let network = !policy.network.is_everything() || policy.is_recorded();
    if let Some(errno) = policy.calls.otherwise {
        rules.set_default(Action::Fail(errno));
        for call in ALWAYS.iter().filter_map(|name| name.parse::<Sysno>().ok()) {
            rules.set(call, Action::Allow);
        }
    }
    for (call, about) in
        HANDLERS.iter().filter_map(|(name, about, _)| Some((name.parse::<Sysno>().ok()?, *about)))
    {
        let apart = matches!(about, About::Shared | About::Processes | About::Apart | About::Routes);
        if apart && policy.calls.otherwise.is_some() {
            continue;
        }
        let asked = match about {
            About::Looking => looking,
            About::Network => network,
            About::Files | About::Caller | About::Shared => true,
            About::Processes => {
                processes(call, &mut rules);
                continue;
            }
            About::Apart => {
                apart_from_others(call, walled, &mut rules);
                continue;
            }
            About::Routes => continue,
        };
        rules.set(call, if asked { Action::Notify } else { Action::Allow });
    }
    if network {
        sends(policy, &mut rules);
        if policy.calls.otherwise.is_none() {
            routes(&mut rules);
        }
    }
    let sets_clock = policy.capabilities.contains(CapabilitySet::SYS_TIME) && policy.rules.is_none();
    for (name, _) in REFUSED {
        let granted = sets_clock && matches!(*name, "clock_settime" | "settimeofday");
        if let (Ok(call), false) = (name.parse::<Sysno>(), granted) {
            rules.set(call, Action::Notify);
        }
    }
    let mut replace = |name: &str, whens: &[Condition], action: Action| {
        if let Ok(call) = name.parse::<Sysno>() {
            rules.clear(call);
            for when in whens {
                rules.add(call, *when, action);
            }
        }
    };
    let spaces = libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWUTS;
    replace("clone", &[Condition::AnyBit { argument: 0, bits: spaces.cast_unsigned() }], Action::Notify);
    // Its flags lie in memory. The C library falls back to clone.
    replace("clone3", &[Condition::Always], Action::Fail(Errno::NOSYS));
    let listener = u32::try_from(libc::SECCOMP_FILTER_FLAG_NEW_LISTENER).unwrap_or(8);
    replace("seccomp", &[Condition::AnyBit { argument: 1, bits: listener }], Action::Notify);
    let mut requests =
        [libc::TIOCSTI, libc::TIOCLINUX].map(|request| u32::try_from(request).unwrap_or(u32::MAX)).to_vec();
    if !walled {
        requests.extend([FIOSETOWN, SIOCSPGRP]);
    }
    let requests: Vec<_> =
        requests.into_iter().map(|value| Condition::Equals { argument: 1, value }).collect();
    replace("ioctl", &requests, Action::Notify);
    if kernel_opens {
        // Landlock says nothing of descriptors that only stand for a file. (openat2 has its flags in memory.)
        let standing = |argument| Condition::AnyBit { argument, bits: libc::O_PATH.cast_unsigned() };
        replace("open", &[standing(1)], Action::Notify);
        replace("openat", &[standing(2)], Action::Notify);
        replace("creat", &[], Action::Notify);
    }
    if !walled {
        for name in ["ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "process_madvise"] {
            replace(name, &[Condition::Always], Action::Notify);
        }
    }
    for (call, word) in &policy.calls.words {
        let about = HANDLERS.iter().find(|(name, ..)| *name == call.name()).map(|(_, about, _)| *about);
        match (word, about) {
            // What is performed stays so: the policy's other parts decide about it.
            (Word::Allow, Some(About::Processes)) => processes(*call, &mut rules),
            (Word::Allow, Some(About::Apart)) => apart_from_others(*call, walled, &mut rules),
            (Word::Allow, Some(About::Routes)) if network => routes(&mut rules),
            (Word::Allow, Some(About::Routes)) => rules.set(*call, Action::Allow),
            (Word::Allow, Some(_)) => rules.set(*call, Action::Notify),
            (Word::Allow, None) if policy.audited && can_be_asked(*call) => rules.set(*call, Action::Notify),
            (Word::Allow, None) => rules.set(*call, Action::Allow),
            (Word::Log | Word::Deny(_), _) => rules.set(*call, Action::Notify),
        }
    }
    if let Some(given) = &policy.rules {
        by_rules(&*given.0, &mut rules);
    }
    // What changes the capabilities of programs that are executed later: the monitor has to hear of it.
    if rules.action(Sysno::prctl.id(), &[0; 6]) == Action::Allow {
        rules.clear(Sysno::prctl);
        for option in [libc::PR_CAPBSET_DROP, libc::PR_SET_SECUREBITS, libc::PR_CAP_AMBIENT] {
            let is = Condition::Equals { argument: 0, value: option.cast_unsigned() };
            rules.add(Sysno::prctl, is, Action::Notify);
        }
    }
    rules
}

/// Which calls are asked about for rules that were given: those that they are about, and those by which paths come to
/// mean something else.
fn by_rules(given: &dyn given_rules::Rules, rules: &mut Filter) {
    let paths = HANDLERS
        .iter()
        .any(|(name, about, _)| matches!(about, About::Files | About::Looking) && given.asks(name));
    for (name, about, _) in HANDLERS {
        let Ok(call) = name.parse::<Sysno>() else { continue };
        // What the policy's part says of them holds here, too.
        if matches!(about, About::Processes | About::Apart | About::Routes) {
            continue;
        }
        // What changes identities, what is executed, and calls that the monitor cannot look into.
        let always = matches!(about, About::Caller | About::Shared) || matches!(*name, "execve" | "execveat");
        let names = matches!(*name, "rename" | "renameat" | "renameat2") || UNSEEN.contains(name);
        let asked = always || given.asks(name) || paths && names;
        rules.set(call, if asked { Action::Notify } else { Action::Allow });
    }
    if !paths && rustix::process::geteuid().is_root() {
        settings(rules);
    }
    let bits = libc::MSG_FASTOPEN.cast_unsigned();
    if ["connect", "sendto", "bind", "listen"].into_iter().any(|call| given.asks(call)) {
        routes(rules);
        // Raw ones and those of other families go where no rule can say.
        rules.set(Sysno::socket, Action::Notify);
        let sends = [(Sysno::sendto, 3), (Sysno::sendmsg, 2), (Sysno::sendmmsg, 3)];
        for (call, argument) in sends {
            rules.clear(call);
            rules.add(call, Condition::AnyBit { argument, bits }, Action::Fail(Errno::OPNOTSUPP));
        }
    }
    if given.asks("sendto") {
        rules.add(Sysno::sendto, Condition::NotNull { argument: 4 }, Action::Notify);
        for call in [Sysno::sendmsg, Sysno::sendmmsg] {
            rules.add(call, Condition::Always, Action::Notify);
        }
    }
    for call in Sysno::iter().filter(|call| !ALWAYS.contains(&call.name())) {
        match given_rules::unconditional(given, call) {
            Some(Verdict::Fails(error)) => rules.set(call, Action::Fail(Errno::from_raw_os_error(error))),
            Some(Verdict::Returns(_)) => rules.set(call, Action::Notify),
            _ => (),
        }
    }
    rules.fail_unknown();
}

/// Which opens are asked about so that the superuser writes no settings of the kernel and no disks, where no rule has a
/// path.
fn settings(rules: &mut Filter) {
    const WRITES: u32 = 3;
    for (call, argument) in [("open", 1), ("openat", 2)] {
        if let Ok(call) = call.parse::<Sysno>() {
            rules.clear(call);
            rules.add(call, Condition::AnyBit { argument, bits: WRITES }, Action::Notify);
        }
    }
    for call in ["creat", "openat2"].into_iter().filter_map(|call| call.parse::<Sysno>().ok()) {
        rules.set(call, Action::Notify);
    }
}

/// Calls by path that are answered with `ENOSYS` or the like, because the monitor cannot perform them.
const UNSEEN: &[&str] = &[
    "getxattrat",
    "listxattrat",
    "setxattrat",
    "removexattrat",
    "file_getattr",
    "file_setattr",
    "name_to_handle_at",
];

/// Which calls about other processes are asked about: not those that name the caller itself.
fn processes(call: Sysno, rules: &mut Filter) {
    rules.clear(call);
    let core = |argument| Condition::Equals { argument, value: libc::RLIMIT_CORE };
    match call.name() {
        "setrlimit" => rules.add(call, core(0), Action::Notify),
        // The monitor decides by caller and owner.
        "setpriority" | "ioprio_set" => rules.set(call, Action::Notify),
        name => {
            if name == "prlimit64" {
                rules.add(call, core(1), Action::Notify);
            }
            rules.add(call, Condition::Differs { argument: 0, value: 0 }, Action::Notify);
        }
    }
}

/// Which calls are asked about because Landlock does not keep the program apart from others.
fn apart_from_others(call: Sysno, walled: bool, rules: &mut Filter) {
    if walled {
        rules.set(call, Action::Allow);
    } else if call == Sysno::fcntl {
        rules.clear(call);
        for command in [libc::F_SETOWN, F_SETOWN_EX] {
            let is = Condition::Equals { argument: 1, value: command.cast_unsigned() };
            rules.add(call, is, Action::Notify);
        }
    } else {
        rules.set(call, Action::Notify);
    }
}

/// Which options of sockets are asked about: those of these numbers, of any level.
fn routes(rules: &mut Filter) {
    rules.clear(Sysno::setsockopt);
    for option in ROUTES {
        let is = Condition::Equals { argument: 2, value: option.cast_unsigned() };
        rules.add(Sysno::setsockopt, is, Action::Notify);
    }
}

/// Which ways of sending are asked about.
fn sends(policy: &Policy, rules: &mut Filter) {
    let bits = libc::MSG_FASTOPEN.cast_unsigned();
    rules.clear(Sysno::sendto);
    rules.add(Sysno::sendto, Condition::NotNull { argument: 4 }, Action::Notify);
    rules.add(Sysno::sendto, Condition::AnyBit { argument: 3, bits }, Action::Fail(Errno::OPNOTSUPP));
    if !policy.network.has_datagrams() {
        // Streams go where they were connected to, whichever address a message has.
        rules.clear(Sysno::sendmsg);
        rules.add(Sysno::sendmsg, Condition::AnyBit { argument: 2, bits }, Action::Fail(Errno::OPNOTSUPP));
        rules.clear(Sysno::sendmmsg);
        rules.add(Sysno::sendmmsg, Condition::AnyBit { argument: 3, bits }, Action::Fail(Errno::OPNOTSUPP));
    }
}

/// Without these no program starts or ends.
pub(crate) const ALWAYS: &[&str] = &[
    "arch_prctl",
    "brk",
    "exit",
    "exit_group",
    "restart_syscall",
    "rt_sigreturn",
    "set_robust_list",
    "set_tid_address",
    "rseq",
];
