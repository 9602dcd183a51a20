//! The monitor: threads that take calls up, decide, perform and answer.

use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use rustix::event::PollFlags;
use rustix::io::Errno;
use syscalls::Sysno;

use crate::answer::{Answer, Outcome};
use crate::blocking;
use crate::callback::Callback;
use crate::credentials::{self, AssumedCredentials};
use crate::perform::{HANDLERS, Handler, named};
use crate::policy::rules::{self, Verdict};
use crate::policy::syscalls::Word;
use crate::state::State;
use crate::syscall::Syscall;
use crate::thread_pool::{CallSource, ThreadPool};
use orrery_sys::notify::Notification;
use orrery_sys::seccomp::{Action, Filter};

/// How long a thread waits before it asks again for a call that it could not receive.
const SHORTAGE_PAUSE: std::time::Duration = std::time::Duration::from_millis(2);

/// Receives calls, has them decided and performed, and answers them.
#[derive(Debug)]
pub(crate) struct Monitor {
    state: Arc<State>,
    handlers: Handlers,
    callback: Option<Callback>,
    /// What the filter does without the callback.
    rules: Filter,
}

impl CallSource for Arc<Monitor> {
    fn handle_next(&self, busy: &dyn Fn()) -> bool {
        match self.state.listener.receive() {
            Ok(call) => {
                busy();
                self.deal(call);
                true
            }
            Err(Errno::INTR) => true,
            // The caller was gone before it could be reported, or none is left.
            Err(Errno::NOENT) => !self.state.is_over(),
            // Short of memory, say: the call still waits, and would be announced again at once.
            Err(_) => {
                std::thread::sleep(SHORTAGE_PAUSE);
                !self.state.is_over()
            }
        }
    }

    fn waiting(&self) -> bool {
        self.state.polled().contains(PollFlags::IN)
    }

    fn begin(&self) -> bool {
        // A umask and a current directory of its own.
        // SAFETY: what the C library believes of the current directory does not matter: all paths here are absolute.
        let unshared = match unsafe { libc::unshare(libc::CLONE_FS) } {
            0 => Ok(()),
            _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        };
        let begun = unshared.map_err(|errno| ("unshare(CLONE_FS)", errno)).and_then(|()| {
            credentials::keep(self.state.policy.capabilities.bits()).map_err(|errno| ("capset", errno))
        });
        let Err((call, errno)) = begun else { return true };
        if errno == Errno::NOMEM {
            let text = format!("orrery guard: cannot begin a thread: {call}: {errno}; it is tried again");
            let _ = writeln!(std::io::stderr(), "{text}");
            return false;
        }
        let _ = writeln!(std::io::stderr(), "orrery guard: {call}: {errno}");
        std::process::abort();
    }
}

/// Handlers by the number of their call.
struct Handlers(Vec<Option<Handler>>);

impl std::fmt::Debug for Handlers {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} handlers", self.0.iter().flatten().count())
    }
}

impl Monitor {
    pub(crate) fn new(state: Arc<State>, callback: Option<Callback>, rules: Filter) -> Self {
        let mut handlers: Vec<Option<Handler>> = vec![None; 1024];
        let index = |call: Sysno| usize::try_from(call.id()).unwrap_or(usize::MAX);
        for (name, _, handler) in HANDLERS {
            if let Some(slot) = name.parse::<Sysno>().ok().and_then(|call| handlers.get_mut(index(call))) {
                *slot = Some(*handler);
            }
        }
        // What a policy says of a call that is performed comes first.
        for (call, word) in &state.policy.calls.words {
            if let (Word::Deny(_), Some(slot)) = (word, handlers.get_mut(index(*call))) {
                *slot = None;
            }
        }
        Self { state, handlers: Handlers(handlers), callback, rules }
    }

    /// Starts the threads that answer.
    ///
    /// # Errors
    /// Where no thread can be made.
    pub(crate) fn start(self: &Arc<Self>) -> std::io::Result<()> {
        ThreadPool::start(Arc::clone(self))
    }

    /// Answers one call in every case.
    fn deal(self: &Arc<Self>, call: Notification) {
        // A fault of ours must not let a call pass or wait for ever.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.decide(call))).unwrap_or(Err(Errno::IO));
        self.state.give(call.id, outcome);
    }

    fn decide(self: &Arc<Self>, call: Notification) -> Outcome {
        let handler = usize::try_from(call.number).ok().and_then(|number| *self.handlers.0.get(number)?);
        let syscall = Syscall::new(&self.state, call);
        let other = if handler.is_none() || self.state.callers.alike() {
            None
        } else {
            syscall.caller()?.other.as_ref()
        };
        let _assumed = match other {
            Some(other) => {
                let real = matches!(syscall.name(), "access" | "faccessat")
                    || syscall.name() == "faccessat2" && syscall.int(3) & libc::AT_EACCESS == 0;
                Some(AssumedCredentials::new(other, real)?)
            }
            None => None,
        };
        if let Some(outcome) = self.ruled(&syscall).or_else(|| self.by_callback(&syscall)) {
            return outcome;
        }
        if handler.is_some() {
            match syscall.word() {
                Some(Word::Log) => {
                    self.state.log.allowed(syscall.process(), syscall.notification.thread, syscall.name());
                }
                Some(Word::Allow) if self.state.policy.audited => self.state.recorder.call(syscall.name()),
                _ => (),
            }
        }
        let outcome = handler.unwrap_or(named)(&syscall);
        if let (Err(Errno::CANCELED), Some(value)) = (&outcome, syscall.returns.get()) {
            return Ok(Answer::Value(value));
        }
        match outcome? {
            Answer::Later(work) => {
                blocking::start(&syscall, work)?;
                Ok(Answer::Later(Box::new(|| Err(Errno::INTR))))
            }
            answer => Ok(answer),
        }
    }

    /// What rules say of a call with any arguments.
    fn ruled(&self, syscall: &Syscall<'_>) -> Option<Outcome> {
        let rules = self.state.policy.rules.as_ref()?;
        let call = usize::try_from(syscall.notification.number).ok().and_then(Sysno::new)?;
        match rules::unconditional(&*rules.0, call)? {
            Verdict::Returns(value) => Some(Ok(Answer::Value(value))),
            Verdict::Fails(error) => Some(Err(Errno::from_raw_os_error(error))),
            Verdict::Pass | Verdict::Path(_) | Verdict::Address(_) => None,
        }
    }

    /// What the function says that the guard was given, if it is about this call and does not leave it to the policy.
    fn by_callback(&self, syscall: &Syscall<'_>) -> Option<Outcome> {
        let callback = self.callback.as_ref()?;
        let call = usize::try_from(syscall.notification.number).ok().and_then(Sysno::new)?;
        if !callback.calls.contains(&call) {
            return None;
        }
        callback.ask(syscall).or_else(|| {
            match self.rules.action(syscall.notification.number, &syscall.notification.arguments) {
                Action::Allow => Some(Ok(Answer::GoOn)),
                Action::Notify => None,
                Action::Fail(errno) => Some(Err(errno)),
                // No rule of ours has these.
                Action::Trap | Action::KillThread | Action::KillProcess => Some(Err(Errno::PERM)),
            }
        })
    }
}
