//! What all threads of the monitor share.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use orrery_sys::notify::Listener;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::answer::{Answer, Outcome};
use crate::caller::Callers;
use crate::identity::MonitorIdentity;
use crate::landlock::Executables;
use crate::log::Writer;
use crate::made_files::MadeFiles;
use crate::policy::Policy;
use crate::policy_recorder::PolicyRecorder;
use crate::questions::Questions;
use crate::view::OwnMounts;

/// What all threads of the monitor share.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) policy: Policy,
    pub(crate) listener: Listener,
    pub(crate) callers: Callers,
    pub(crate) identity: MonitorIdentity,
    pub(crate) log: Writer,
    /// Who is asked about what the policy does not allow, if anybody.
    pub(crate) questions: Option<Arc<Questions>>,
    pub(crate) recorder: PolicyRecorder,
    /// What guarded programs have made where they may make their own.
    pub(crate) made: MadeFiles,
    /// Whether the kernel executes nothing that the policy does not allow.
    pub(crate) kernel_checks_executions: bool,
    /// What it executes.
    pub(crate) executables: Executables,
    /// The mounts of the program's view, if it has one of its own.
    pub(crate) mounts: Option<OwnMounts>,
    /// The process whose first execve(2) starts the program, until it did.
    first: AtomicI32,
}

impl State {
    pub(crate) fn new(
        policy: Policy,
        listener: Listener,
        (log, questions): (Writer, Option<Arc<Questions>>),
        first: i32,
        (kernel_checks_executions, executables): (bool, Executables),
        mounts: Option<OwnMounts>,
    ) -> Result<Self, Errno> {
        let capabilities = policy.capabilities.bits();
        Ok(Self {
            policy,
            listener,
            callers: Callers::new(capabilities)?,
            identity: MonitorIdentity::new()?,
            log,
            questions,
            recorder: PolicyRecorder::default(),
            made: MadeFiles::default(),
            kernel_checks_executions,
            executables,
            mounts,
            first: AtomicI32::new(first),
        })
    }

    /// Whether this is the program's own start, which happens once.
    pub(crate) fn is_first_program(&self, process: i32) -> bool {
        self.first.compare_exchange(process, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Returns whether no process with the filter is left.
    pub(crate) fn is_over(&self) -> bool {
        self.polled().contains(PollFlags::HUP)
    }

    /// Returns what the listener is ready for.
    pub(crate) fn polled(&self) -> PollFlags {
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let listener = self.listener.as_fd();
        let mut waited = [PollFd::new(&listener, PollFlags::IN)];
        match poll(&mut waited, Some(&now)) {
            Ok(_) => waited[0].revents(),
            Err(_) => PollFlags::empty(),
        }
    }

    /// Answers a call.
    pub(crate) fn give(&self, id: u64, outcome: Outcome) {
        match outcome {
            Ok(Answer::Value(value)) => surely(|| self.listener.answer(id, Ok(value))),
            Ok(Answer::File { file, close_on_exec }) => {
                if let Err(errno) = self.listener.answer_with_descriptor(id, file.as_fd(), close_on_exec) {
                    surely(|| self.listener.answer(id, Err(errno)));
                }
            }
            Ok(Answer::GoOn) => surely(|| self.listener.proceed(id)),
            // Another thread answers.
            Ok(Answer::Later(_)) => (),
            Err(errno) => surely(|| self.listener.answer(id, Err(errno))),
        }
    }
}

/// Answers, again where the kernel could not pass the answer on: its caller would wait for ever.
fn surely(answer: impl Fn() -> Result<(), Errno>) {
    const TRIES: u32 = 100;
    const PAUSE: std::time::Duration = std::time::Duration::from_millis(20);
    for _ in 0..TRIES {
        match answer() {
            // The caller may have ended, or have its answer; nobody needs this one then.
            Ok(()) | Err(Errno::NOENT | Errno::INPROGRESS) => return,
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}
