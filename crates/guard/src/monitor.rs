//! The monitor: threads that take calls up, decide, perform and answer.

use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use syscalls::Sysno;

use crate::assume::Assumed;
use crate::blocking;
use crate::caller::Callers;
use crate::crew::{Calls, Crew};
use crate::filter::{Action, Rules, When};
use crate::job::{Answer, Job, Outcome};
use crate::learn::Learnt;
use crate::listener::{Call, Listener};
use crate::log::Writer;
use crate::mediate::Mediation;
use crate::perform::{About, HANDLERS, Handler, named};
use crate::plan::Plan;
use crate::policy::Policy;
use crate::policy::calls::{REFUSED, Word};
use crate::resolve::Own;
use crate::rulings::{self, Ruling};

/// What all threads of the monitor share.
#[derive(Debug)]
pub(crate) struct Monitor {
    pub(crate) policy: Policy,
    pub(crate) listener: Listener,
    pub(crate) callers: Callers,
    pub(crate) own: Own,
    pub(crate) log: Writer,
    pub(crate) learnt: Learnt,
    /// Whether the kernel executes nothing that the policy does not allow.
    pub(crate) executions_are_walled: bool,
    /// The process whose first execve(2) starts the program, until it did.
    first: AtomicI32,
    handlers: Handlers,
    mediation: Option<Mediation>,
    /// What the filter does without the mediation.
    rules: Rules,
}

impl Calls for Arc<Monitor> {
    fn one(&self, busy: &dyn Fn()) -> bool {
        match self.listener.receive() {
            Ok(call) => {
                busy();
                self.deal(call);
                true
            }
            Err(Errno::INTR) => true,
            // The caller went before it could be told of, or nobody is left.
            Err(_) => !self.is_over(),
        }
    }

    fn waiting(&self) -> bool {
        self.polled().contains(PollFlags::IN)
    }

    fn begin(&self) {
        // A umask and a current directory of its own.
        // SAFETY: what the C library believes of the current directory does not matter: all paths here are absolute.
        if unsafe { libc::unshare(libc::CLONE_FS) } != 0 {
            eprintln!("orrery guard: unshare(CLONE_FS): {}", std::io::Error::last_os_error());
            std::process::abort();
        }
    }
}

/// Handlers by the number of their call.
struct Handlers(Vec<Option<Handler>>);

impl core::fmt::Debug for Handlers {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(out, "{} handlers", self.0.iter().flatten().count())
    }
}

/// The rules for a policy: which calls are asked about. `walled_signals`: the kernel keeps signals and ptrace(2) away from
/// the monitor by itself.
pub(crate) fn rules(policy: &Policy, walled: bool, plan: &Plan) -> Rules {
    let mut rules = Rules::default();
    let looking = !policy.trees.all_visible() || policy.learning;
    let network = !policy.network.is_everything() || policy.learning;
    if let Some(errno) = policy.calls.otherwise {
        rules.otherwise(Action::Fail(errno));
        for call in ALWAYS.iter().filter_map(|name| name.parse().ok()) {
            rules.set(call, Action::Allow);
        }
    }
    for (call, about) in HANDLERS.iter().filter_map(|(name, about, _)| Some((name.parse().ok()?, *about))) {
        let asked = match about {
            About::Looking => looking,
            About::Network => network,
            About::Files | About::Caller => true,
        };
        rules.set(call, if asked { Action::Ask } else { Action::Allow });
    }
    if network {
        sends(policy, &mut rules);
    }
    for call in REFUSED.iter().filter_map(|(name, _)| name.parse::<Sysno>().ok()) {
        rules.set(call, Action::Ask);
    }
    let mut replace = |name: &str, whens: &[When], action: Action| {
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
    replace("clone", &[When::AnyBit { argument: 0, bits: spaces.cast_unsigned() }], Action::Ask);
    // Its flags lie in memory. The C library falls back to clone.
    replace("clone3", &[When::Always], Action::Fail(Errno::NOSYS));
    let listener = u32::try_from(libc::SECCOMP_FILTER_FLAG_NEW_LISTENER).unwrap_or(8);
    replace("seccomp", &[When::AnyBit { argument: 1, bits: listener }], Action::Ask);
    let typing = [libc::TIOCSTI, libc::TIOCLINUX]
        .map(|request| When::Is { argument: 1, value: u32::try_from(request).unwrap_or(u32::MAX) });
    replace("ioctl", &typing, Action::Ask);
    if plan.kernel_opens() {
        // Landlock says nothing of descriptors that only stand for a file. (openat2 has its flags in memory.)
        let standing = |argument| When::AnyBit { argument, bits: libc::O_PATH.cast_unsigned() };
        replace("open", &[standing(1)], Action::Ask);
        replace("openat", &[standing(2)], Action::Ask);
        replace("creat", &[], Action::Ask);
    }
    if !walled {
        for name in ["kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open"] {
            replace(name, &[When::Always], Action::Ask);
        }
        for name in
            ["ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "process_madvise", "kcmp"]
        {
            replace(name, &[When::Always], Action::Ask);
        }
    }
    for (call, word) in &policy.calls.words {
        let performed = HANDLERS.iter().any(|(name, ..)| *name == call.name());
        match word {
            // What is performed stays so: the policy's other parts decide about it.
            Word::Allow if performed => rules.set(*call, Action::Ask),
            Word::Allow => rules.set(*call, Action::Allow),
            Word::Log | Word::Deny(_) => rules.set(*call, Action::Ask),
        }
    }
    if let Some(given) = &policy.rules {
        by_rules(&*given.0, &mut rules);
    }
    // What changes the capabilities of programs that are executed later: the monitor has to hear of it.
    if rules.action(Sysno::prctl.id(), &[0; 6]) == Action::Allow {
        rules.clear(Sysno::prctl);
        for option in [libc::PR_CAPBSET_DROP, libc::PR_SET_SECUREBITS, libc::PR_CAP_AMBIENT] {
            let is = When::Is { argument: 0, value: option.cast_unsigned() };
            rules.add(Sysno::prctl, is, Action::Ask);
        }
    }
    rules
}

/// Which calls are asked about for rules that were given: those that they are about, and those by which paths come to
/// mean something else.
fn by_rules(given: &dyn rulings::Rules, rules: &mut Rules) {
    let paths = HANDLERS
        .iter()
        .any(|(name, about, _)| matches!(about, About::Files | About::Looking) && given.asks(name));
    for (name, about, _) in HANDLERS {
        let Ok(call) = name.parse::<Sysno>() else { continue };
        // What tells who somebody is, what is executed, and calls that the monitor cannot look into.
        let always = *about == About::Caller || matches!(*name, "execve" | "execveat");
        let names = matches!(*name, "rename" | "renameat" | "renameat2") || UNSEEN.contains(name);
        let asked = always || given.asks(name) || paths && names;
        rules.set(call, if asked { Action::Ask } else { Action::Allow });
    }
    let bits = libc::MSG_FASTOPEN.cast_unsigned();
    if given.asks("connect") || given.asks("sendto") {
        let sends = [(Sysno::sendto, 3), (Sysno::sendmsg, 2), (Sysno::sendmmsg, 3)];
        for (call, argument) in sends {
            rules.clear(call);
            rules.add(call, When::AnyBit { argument, bits }, Action::Fail(Errno::OPNOTSUPP));
        }
    }
    if given.asks("sendto") {
        rules.add(Sysno::sendto, When::NotNull { argument: 4 }, Action::Ask);
        for call in [Sysno::sendmsg, Sysno::sendmmsg] {
            rules.add(call, When::Always, Action::Ask);
        }
    }
    for call in Sysno::iter().filter(|call| !ALWAYS.contains(&call.name())) {
        match rulings::unconditional(given, call) {
            Some(Ruling::Fails(error)) => rules.set(call, Action::Fail(Errno::from_raw_os_error(error))),
            Some(Ruling::Returns(_)) => rules.set(call, Action::Ask),
            _ => (),
        }
    }
    rules.known_only();
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

/// Which ways of sending are asked about.
fn sends(policy: &Policy, rules: &mut Rules) {
    let bits = libc::MSG_FASTOPEN.cast_unsigned();
    rules.clear(Sysno::sendto);
    rules.add(Sysno::sendto, When::NotNull { argument: 4 }, Action::Ask);
    rules.add(Sysno::sendto, When::AnyBit { argument: 3, bits }, Action::Fail(Errno::OPNOTSUPP));
    if !policy.network.has_datagrams() {
        // Streams go where they were connected to, whatever a message says.
        rules.clear(Sysno::sendmsg);
        rules.add(Sysno::sendmsg, When::AnyBit { argument: 2, bits }, Action::Fail(Errno::OPNOTSUPP));
        rules.clear(Sysno::sendmmsg);
        rules.add(Sysno::sendmmsg, When::AnyBit { argument: 3, bits }, Action::Fail(Errno::OPNOTSUPP));
    }
}

/// Without these no program starts or ends.
const ALWAYS: &[&str] = &[
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

impl Monitor {
    pub(crate) fn new(
        policy: Policy,
        listener: Listener,
        log: Writer,
        first: i32,
        executions_are_walled: bool,
        mediation: Option<Mediation>,
        rules: Rules,
    ) -> Result<Self, Errno> {
        let mut handlers: Vec<Option<Handler>> = vec![None; 1024];
        let index = |call: Sysno| usize::try_from(call.id()).unwrap_or(usize::MAX);
        for (name, _, handler) in HANDLERS {
            if let Some(slot) = name.parse::<Sysno>().ok().and_then(|call| handlers.get_mut(index(call))) {
                *slot = Some(*handler);
            }
        }
        // What a policy says of a call that is performed comes first.
        for (call, word) in &policy.calls.words {
            if let (Word::Deny(_), Some(slot)) = (word, handlers.get_mut(index(*call))) {
                *slot = None;
            }
        }
        Ok(Self {
            policy,
            listener,
            callers: Callers::new()?,
            own: Own::new()?,
            log,
            learnt: Learnt::default(),
            executions_are_walled,
            first: AtomicI32::new(first),
            handlers: Handlers(handlers),
            mediation,
            rules,
        })
    }

    /// Whether this is the program's own start, which happens once.
    pub(crate) fn is_first_program(&self, process: i32) -> bool {
        self.first.compare_exchange(process, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Starts the threads that answer.
    ///
    /// # Errors
    /// Where no thread can be made.
    pub(crate) fn start(self: &Arc<Self>) -> std::io::Result<()> {
        Crew::start(Arc::clone(self))
    }

    fn is_over(&self) -> bool {
        self.polled().contains(PollFlags::HUP)
    }

    /// What the listener has to tell right now.
    fn polled(&self) -> PollFlags {
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let listener = self.listener.as_fd();
        let mut waited = [PollFd::new(&listener, PollFlags::IN)];
        match poll(&mut waited, Some(&now)) {
            Ok(_) => waited[0].revents(),
            Err(_) => PollFlags::empty(),
        }
    }

    /// Answers one call, whatever happens.
    fn deal(self: &Arc<Self>, call: Call) {
        // A fault of ours must not let a call pass or wait for ever.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.decide(call))).unwrap_or(Err(Errno::IO));
        self.give(call.id, outcome);
    }

    fn decide(self: &Arc<Self>, call: Call) -> Outcome {
        let handler = usize::try_from(call.number).ok().and_then(|number| *self.handlers.0.get(number)?);
        let job = Job::new(self, call);
        let other =
            if handler.is_none() || self.callers.alike() { None } else { job.caller()?.other.as_ref() };
        let _assumed = match other {
            Some(other) => {
                let real = matches!(job.name(), "access" | "faccessat")
                    || job.name() == "faccessat2" && job.int(3) & libc::AT_EACCESS == 0;
                Some(Assumed::new(other, real)?)
            }
            None => None,
        };
        if let Some(outcome) = self.ruled(&job).or_else(|| self.mediated(&job)) {
            return outcome;
        }
        let outcome = handler.unwrap_or(named)(&job);
        if let (Err(Errno::CANCELED), Some(value)) = (&outcome, job.returns.get()) {
            return Ok(Answer::Value(value));
        }
        match outcome? {
            Answer::Later(work) => {
                blocking::start(&job, work)?;
                Ok(Answer::Later(Box::new(|| Err(Errno::INTR))))
            }
            answer => Ok(answer),
        }
    }

    /// What rules say of a call whatever its arguments are.
    fn ruled(&self, job: &Job<'_>) -> Option<Outcome> {
        let rules = self.policy.rules.as_ref()?;
        let call = usize::try_from(job.call.number).ok().and_then(Sysno::new)?;
        match rulings::unconditional(&*rules.0, call)? {
            Ruling::Returns(value) => Some(Ok(Answer::Value(value))),
            Ruling::Fails(error) => Some(Err(Errno::from_raw_os_error(error))),
            Ruling::Pass | Ruling::Path(_) | Ruling::Address(_) => None,
        }
    }

    /// What the function says that the guard was given, if it is about this call and does not leave it to the policy.
    fn mediated(&self, job: &Job<'_>) -> Option<Outcome> {
        let mediation = self.mediation.as_ref()?;
        let call = usize::try_from(job.call.number).ok().and_then(Sysno::new)?;
        if !mediation.calls.contains(&call) {
            return None;
        }
        mediation.ask(job).or_else(|| match self.rules.action(job.call.number, &job.call.arguments) {
            Action::Allow => Some(Ok(Answer::GoOn)),
            Action::Ask => None,
            Action::Fail(errno) => Some(Err(errno)),
        })
    }

    /// Answers a call.
    pub(crate) fn give(&self, id: u64, outcome: Outcome) {
        match outcome {
            Ok(Answer::Value(value)) => self.listener.answer(id, Ok(value)),
            Ok(Answer::File { file, close_on_exec }) => {
                self.listener.answer_with(id, file.as_fd(), close_on_exec);
            }
            Ok(Answer::GoOn) => self.listener.let_go_on(id),
            // Another thread answers.
            Ok(Answer::Later(_)) => (),
            Err(errno) => self.listener.answer(id, Err(errno)),
        }
    }
}
