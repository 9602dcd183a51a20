//! One call, while the monitor deals with it.

use std::cell::{Cell, OnceCell, RefCell};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use syscalls::Sysno;

use crate::caller::Caller;
use crate::log::Event;
use crate::memory;
use crate::monitor::Monitor;
use crate::own::process_in;
use crate::policy::{Refusal, Rights};
use crate::resolve::{Found, Name, Place, is_directory};
use orrery_sys::notify::Notification as Call;

/// How a call ends.
pub(crate) enum Answer {
    /// It returns this.
    Value(i64),
    /// It returns a new descriptor of this file.
    File { file: OwnedFd, close_on_exec: bool },
    /// The kernel performs it after all. Only where what it does depends on nothing that its arguments point to, or where
    /// the second wall holds whatever they point to by then.
    GoOn,
    /// It takes a while: a thread of its own answers.
    Later(Box<dyn FnOnce() -> Outcome + Send>),
}

pub(crate) type Outcome = Result<Answer, Errno>;

/// A call and who made it.
#[derive(Debug)]
pub(crate) struct Job<'m> {
    pub(crate) monitor: &'m Arc<Monitor>,
    pub(crate) call: Call,
    caller: OnceCell<Arc<Caller>>,
    /// What rules have rewritten its paths to.
    pub(crate) rewrote: RefCell<Vec<Vec<u8>>>,
    /// A rule has it return this, which is told as the error `ECANCELED` until the call is answered.
    pub(crate) returns: Cell<Option<i64>>,
}

/// What of `/proc/NUMBER` may be read about processes that are not guarded: what `ps` shows.
const HARMLESS: [&[u8]; 12] = [
    b"",
    b"cgroup",
    b"cmdline",
    b"comm",
    b"limits",
    b"oom_score",
    b"oom_score_adj",
    b"sched",
    b"schedstat",
    b"stat",
    b"statm",
    b"status",
];

impl<'m> Job<'m> {
    pub(crate) fn new(monitor: &'m Arc<Monitor>, call: Call) -> Self {
        Self { monitor, call, caller: OnceCell::new(), rewrote: RefCell::default(), returns: Cell::new(None) }
    }
}

impl Job<'_> {
    /// Who calls. Looked up when it is first asked for: most calls by path go without.
    ///
    /// # Errors
    /// `ESRCH` where the caller has gone.
    pub(crate) fn caller(&self) -> Result<&Arc<Caller>, Errno> {
        if let Some(caller) = self.caller.get() {
            return Ok(caller);
        }
        let caller = self.monitor.callers.get(self.call.thread)?;
        Ok(self.caller.get_or_init(|| caller))
    }

    /// The calling process; zero where it has gone.
    pub(crate) fn process(&self) -> i32 {
        self.caller().map_or(0, |caller| caller.process)
    }

    /// Argument `index`, as the kernel sees an `int`.
    #[expect(clippy::cast_possible_truncation, reason = "as the kernel does")]
    pub(crate) fn int(&self, index: usize) -> i32 {
        self.call.arguments[index] as i32
    }

    /// Argument `index`, as the kernel sees an `unsigned int`.
    #[expect(clippy::cast_possible_truncation, reason = "as the kernel does")]
    pub(crate) fn unsigned(&self, index: usize) -> u32 {
        self.call.arguments[index] as u32
    }

    /// Argument `index`.
    pub(crate) fn argument(&self, index: usize) -> u64 {
        self.call.arguments[index]
    }

    /// The path that argument `index` points to, copied.
    pub(crate) fn path(&self, index: usize) -> Result<Vec<u8>, Errno> {
        memory::read_path(self.call.thread, self.argument(index))
    }

    /// `N` bytes that argument `index` points to, copied.
    pub(crate) fn bytes<const N: usize>(&self, index: usize) -> Result<[u8; N], Errno> {
        let mut bytes = [0; N];
        memory::read(self.call.thread, self.argument(index), &mut bytes)?;
        Ok(bytes)
    }

    /// Writes to where argument `index` points.
    pub(crate) fn write(&self, index: usize, bytes: &[u8]) -> Result<(), Errno> {
        memory::write(self.call.thread, self.argument(index), bytes)
    }

    /// The call's name.
    pub(crate) fn name(&self) -> &'static str {
        usize::try_from(self.call.number).ok().and_then(Sysno::new).map_or("unknown", |call| call.name())
    }

    /// Makes sure that the copies came from the caller: that its number has not come to mean another thread. To be asked
    /// before anything changes.
    pub(crate) fn still_waits(&self) -> Result<(), Errno> {
        if self.monitor.listener.is_waiting(self.call.id) { Ok(()) } else { Err(Errno::SRCH) }
    }

    /// The name under which policies know a path: `/proc/self` for what is the caller's there.
    pub(crate) fn known_as(&self, path: &[u8]) -> Vec<u8> {
        match process_in(path) {
            Some((process, b"")) if process == self.process() => b"/proc/self".to_vec(),
            Some((process, rest)) if process == self.process() => [b"/proc/self/", rest].concat(),
            _ => path.to_vec(),
        }
    }

    /// The rights over a file, with what it is known as.
    pub(crate) fn rights(&self, found: &Found) -> (Rights, Vec<u8>) {
        let Name::Path(path) = &found.name else { return (Rights::all(), Vec::new()) };
        let name = self.known_as(path);
        let mut rights = self.monitor.policy.rights(&name);
        if self.monitor.own.is_proc(&found.stat)
            && let Some((process, rest)) = process_in(&name)
            && !self.is_guarded(process)
        {
            let file = rest.strip_prefix(b"task/").map_or(rest, |thread| {
                thread
                    .iter()
                    .position(|&byte| byte == b'/')
                    .map_or(b"".as_slice(), |slash| &thread[slash + 1..])
            });
            rights &= match file {
                b"task" => Rights::STAT | Rights::LIST,
                file if HARMLESS.contains(&file) => Rights::STAT | Rights::LIST | Rights::READ,
                _ => Rights::STAT,
            };
        }
        (rights | found.granted, name)
    }

    /// Refuses unless all of `needed` is allowed for a file.
    pub(crate) fn check(&self, found: &Found, needed: Rights) -> Result<(), Errno> {
        // Reading a directory is listing it.
        let needed = if is_directory(&found.stat) && needed.contains(Rights::READ) {
            (needed - Rights::READ) | Rights::LIST
        } else {
            needed
        };
        let (rights, name) = self.rights(found);
        self.decide(rights, needed, &name)
    }

    /// Refuses unless names may be made and removed there.
    pub(crate) fn check_place(&self, place: &Place, needed: Rights) -> Result<(), Errno> {
        self.decide(self.monitor.policy.rights(&place.path), needed, &place.path)
    }

    fn decide(&self, rights: Rights, needed: Rights, name: &[u8]) -> Result<(), Errno> {
        if self.monitor.policy.learning && !name.is_empty() {
            self.monitor.learnt.file(name, needed);
        }
        if !name.is_empty() {
            self.ask_rules(name)?;
        }
        if rights.contains(needed) {
            return Ok(());
        }
        Err(self.refuse(&Event::File { path: name, missing: needed - rights }))
    }

    /// Writes down that something is not done.
    pub(crate) fn note(&self, event: &Event<'_>) {
        self.monitor.log.refused(self.process(), self.call.thread, self.name(), event);
    }

    /// Writes a refusal down, and tells what the program is to see of it.
    pub(crate) fn refuse(&self, event: &Event<'_>) -> Errno {
        self.note(event);
        match self.monitor.policy.refusal {
            Refusal::Fails(errno) => errno,
            Refusal::Kills => {
                if let Ok(caller) = self.caller() {
                    let _ = rustix::process::pidfd_send_signal(caller, rustix::process::Signal::KILL);
                }
                Errno::PERM
            }
        }
    }

    /// The umask of the caller, taken over by the calling thread of the monitor, which has one of its own.
    pub(crate) fn assume_umask(&self) -> Result<(), Errno> {
        let umask = crate::caller::Status::of(self.call.thread)?.umask;
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(umask));
        Ok(())
    }
}
