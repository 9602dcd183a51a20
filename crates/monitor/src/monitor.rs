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
use crate::job::{Answer, Job, Outcome};
use crate::learn::Learnt;
use crate::log::Writer;
use crate::mediate::Mediation;
use crate::own::Own;
use crate::perform::{HANDLERS, Handler, named};
use crate::policy::Policy;
use crate::policy::calls::Word;
use crate::rulings::{self, Ruling};
use orrery_sys::notify::{Listener, Notification as Call};
use orrery_sys::seccomp::{Action, Filter};

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
    rules: Filter,
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

impl Monitor {
    pub(crate) fn new(
        policy: Policy,
        listener: Listener,
        log: Writer,
        first: i32,
        executions_are_walled: bool,
        mediation: Option<Mediation>,
        rules: Filter,
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
            Action::Notify => None,
            Action::Fail(errno) => Some(Err(errno)),
            // No rule of ours has these.
            Action::Trap | Action::KillProcess => Some(Err(Errno::PERM)),
        })
    }

    /// Answers a call.
    pub(crate) fn give(&self, id: u64, outcome: Outcome) {
        match outcome {
            Ok(Answer::Value(value)) => {
                // The caller may have ended; nobody needs the answer then. So below.
                let _ = self.listener.answer(id, Ok(value));
            }
            Ok(Answer::File { file, close_on_exec }) => {
                if let Err(errno) = self.listener.answer_with_descriptor(id, file.as_fd(), close_on_exec) {
                    let _ = self.listener.answer(id, Err(errno));
                }
            }
            Ok(Answer::GoOn) => {
                let _ = self.listener.proceed(id);
            }
            // Another thread answers.
            Ok(Answer::Later(_)) => (),
            Err(errno) => {
                let _ = self.listener.answer(id, Err(errno));
            }
        }
    }
}
