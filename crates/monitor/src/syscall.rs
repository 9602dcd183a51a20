//! One call, while the monitor deals with it.

use std::cell::{Cell, OnceCell, RefCell};
use std::sync::Arc;

use rustix::io::Errno;
use syscalls::Sysno;

use crate::caller::Caller;
use crate::file::{DirectoryEntry, Location, ResolvedFile, is_directory};
use crate::identity::process_in;
use crate::log::Event;
use crate::made_files::OWN;
use crate::memory;
use crate::policy::syscalls::Word;
use crate::policy::{Refusal, Rights};
use crate::questions::AskedCall;
use crate::state::State;
use crate::system_files::{self, Named};
use orrery_sys::notify::Notification;

/// A call and who made it.
#[derive(Debug)]
pub(crate) struct Syscall<'m> {
    pub(crate) state: &'m Arc<State>,
    pub(crate) notification: Notification,
    caller: OnceCell<Arc<Caller>>,
    /// What rules have rewritten its paths to.
    pub(crate) rewrote: RefCell<Vec<Vec<u8>>>,
    /// A rule has it return this, which is reported as the error `ECANCELED` until the call is answered.
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

/// Whether there is something of this name, be it a link that leads nowhere.
pub(crate) fn exists(place: &DirectoryEntry) -> bool {
    rustix::fs::statat(&place.directory, place.name.as_slice(), rustix::fs::AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

impl<'m> Syscall<'m> {
    pub(crate) fn new(state: &'m Arc<State>, notification: Notification) -> Self {
        Self {
            state,
            notification,
            caller: OnceCell::new(),
            rewrote: RefCell::default(),
            returns: Cell::new(None),
        }
    }
}

impl Syscall<'_> {
    /// Who calls. Looked up when it is first asked for: most calls by path go without.
    ///
    /// # Errors
    /// `ESRCH` where the caller has gone.
    pub(crate) fn caller(&self) -> Result<&Arc<Caller>, Errno> {
        if let Some(caller) = self.caller.get() {
            return Ok(caller);
        }
        let caller = self.state.callers.get(self.notification.thread)?;
        Ok(self.caller.get_or_init(|| caller))
    }

    /// The calling process; zero where it has gone.
    pub(crate) fn process(&self) -> i32 {
        self.caller().map_or(0, |caller| caller.process)
    }

    /// Argument `index`, as the kernel sees an `int`.
    #[expect(clippy::cast_possible_truncation, reason = "as the kernel does")]
    pub(crate) fn int(&self, index: usize) -> i32 {
        self.notification.arguments[index] as i32
    }

    /// Argument `index`, as the kernel sees an `unsigned int`.
    #[expect(clippy::cast_possible_truncation, reason = "as the kernel does")]
    pub(crate) fn unsigned(&self, index: usize) -> u32 {
        self.notification.arguments[index] as u32
    }

    /// Argument `index`.
    pub(crate) fn argument(&self, index: usize) -> u64 {
        self.notification.arguments[index]
    }

    /// The path that argument `index` points to, copied.
    pub(crate) fn path(&self, index: usize) -> Result<Vec<u8>, Errno> {
        memory::read_path(self.notification.thread, self.argument(index))
    }

    /// `N` bytes that argument `index` points to, copied.
    pub(crate) fn bytes<const N: usize>(&self, index: usize) -> Result<[u8; N], Errno> {
        let mut bytes = [0; N];
        memory::read(self.notification.thread, self.argument(index), &mut bytes)?;
        Ok(bytes)
    }

    /// Writes to where argument `index` points.
    pub(crate) fn write(&self, index: usize, bytes: &[u8]) -> Result<(), Errno> {
        memory::write(self.notification.thread, self.argument(index), bytes)
    }

    /// The call's name.
    pub(crate) fn name(&self) -> &'static str {
        usize::try_from(self.notification.number)
            .ok()
            .and_then(Sysno::new)
            .map_or("unknown", |call| call.name())
    }

    /// What the policy says of such calls by name.
    pub(crate) fn word(&self) -> Option<Word> {
        let words = &self.state.policy.calls.words;
        if words.is_empty() {
            return None;
        }
        words.get(&usize::try_from(self.notification.number).ok().and_then(Sysno::new)?).copied()
    }

    /// Makes sure that the copies came from the caller: that its number has not come to mean another thread. To be
    /// asked before anything changes.
    pub(crate) fn still_waits(&self) -> Result<(), Errno> {
        if self.state.listener.is_waiting(self.notification.id) { Ok(()) } else { Err(Errno::SRCH) }
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
    pub(crate) fn rights(&self, found: &ResolvedFile) -> (Rights, Vec<u8>) {
        let path = match &found.location {
            Location::Path(path) => path,
            Location::Outside(path) => return (found.granted, path.clone()),
            Location::Anonymous => return (Rights::all(), Vec::new()),
        };
        let name = self.known_as(path);
        let mut rights = self.rights_at(&name);
        if self.state.identity.is_proc(&found.stat)
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
        if let Some(named) = system_files::named(&name, &found.stat) {
            rights = self.without_unnamed(rights, &name, named, system_files::leads_around(&found.stat));
        }
        (rights | found.granted, name)
    }

    /// Without rights over a part of the system that no entry names. Rules that let pass what they do not name have no
    /// entries: only what leads around them is refused then.
    fn without_unnamed(&self, rights: Rights, name: &[u8], named: Named, leads_around: bool) -> Rights {
        let policy = &self.state.policy;
        if policy.learning || policy.rules.is_some() && !leads_around {
            return rights;
        }
        let by_name = policy.trees.rights_by_entries_of(name, named.least);
        rights - (named.rights - by_name)
    }

    /// Refuses unless all of `needed` is allowed for a file.
    pub(crate) fn check(&self, found: &ResolvedFile, needed: Rights) -> Result<(), Errno> {
        // Reading a directory is listing it.
        let needed = if is_directory(&found.stat) && needed.contains(Rights::READ) {
            (needed - Rights::READ) | Rights::LIST
        } else {
            needed
        };
        let (rights, name) = self.rights(found);
        self.decide(rights, needed, &name)
    }

    /// The rights over what is at a path: the policy's, and those over what the program made itself.
    pub(crate) fn rights_at(&self, path: &[u8]) -> Rights {
        let rights = self.state.policy.rights(path);
        if self.state.policy.trees.owns(path) && self.state.made.contain(path) {
            rights | OWN
        } else {
            rights
        }
    }

    /// Refuses unless what is there may be removed or renamed.
    pub(crate) fn check_entry(&self, place: &DirectoryEntry, needed: Rights) -> Result<(), Errno> {
        self.decide(self.rights_at(&place.path), needed, &place.path)
    }

    /// Refuses unless something may be made there. Returns whether only because it becomes the program's own: then
    /// nothing must be there yet.
    pub(crate) fn check_new_entry(&self, place: &DirectoryEntry, needed: Rights) -> Result<bool, Errno> {
        let own = self.state.policy.trees.owns(&place.path)
            && !self.rights_at(&place.path).contains(needed)
            && !exists(place);
        let rights = if own { OWN } else { self.rights_at(&place.path) };
        self.decide(rights, needed, &place.path).map(|()| own)
    }

    /// Something has been made there, which [`Syscall::check_new_entry`] allowed because it becomes the program's
    /// `own`.
    pub(crate) fn made(&self, path: &[u8], own: bool) {
        if own {
            self.state.made.insert(path);
        }
        if self.state.policy.learning || self.state.policy.audited && own {
            self.state.recorder.made(path);
        }
    }

    fn decide(&self, rights: Rights, needed: Rights, name: &[u8]) -> Result<(), Errno> {
        if self.state.policy.learning && !name.is_empty() {
            self.state.recorder.file(name, needed);
        }
        if !name.is_empty() {
            self.ask_rules(name)?;
        }
        if rights.contains(needed) {
            self.record_use(needed, name);
            return Ok(());
        }
        self.refuse_or_ask(&Event::File { path: name, missing: needed - rights })
    }

    /// Records for an audit what the policy has allowed.
    pub(crate) fn record_use(&self, rights: Rights, name: &[u8]) {
        if self.state.policy.audited && !name.is_empty() {
            self.state.recorder.file(name, rights);
        }
    }

    /// Refuses, unless the program that is asked about what the policy does not allow, if there is one, allows it.
    pub(crate) fn refuse_or_ask(&self, event: &Event<'_>) -> Result<(), Errno> {
        // What may be executed is settled before the program starts: by Landlock's rules, or to be nothing.
        let is_settled = matches!(event, Event::File { missing, .. } if missing.contains(Rights::EXECUTE));
        let (process, thread, call) = (self.process(), self.notification.thread, self.name());
        let is_allowed = self.state.questions.as_ref().filter(|_| !is_settled).is_some_and(|questions| {
            let still_waits = || self.state.listener.is_waiting(self.notification.id);
            questions.allow(AskedCall { process, thread, call }, event, still_waits)
        });
        if is_allowed {
            self.state.log.granted(process, thread, call, event);
            return Ok(());
        }
        Err(self.refuse(event))
    }

    /// Writes down that something is not done.
    pub(crate) fn note(&self, event: &Event<'_>) {
        self.state.log.refused(self.process(), self.notification.thread, self.name(), event);
    }

    /// Writes a refusal down, and tells what the program is to see of it.
    pub(crate) fn refuse(&self, event: &Event<'_>) -> Errno {
        self.note(event);
        match self.state.policy.refusal {
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
        let umask = crate::caller::Status::of(self.notification.thread)?.umask;
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(umask));
        Ok(())
    }

    /// Whether a process is one that this monitor guards: all of them descend from it.
    pub(crate) fn is_guarded(&self, process: i32) -> bool {
        if process == self.process() {
            return true;
        }
        let mut process = process;
        for _ in 0..4096 {
            if process <= 1 || self.state.identity.is_own_thread(process) {
                return false;
            }
            match crate::caller::Status::of(process) {
                // A process that has been a monitor's own child from elsewhere has no filter.
                Ok(status) if status.parent == self.state.identity.process => return status.filtered,
                Ok(status) => process = status.parent,
                Err(_) => return false,
            }
        }
        false
    }
}
