//! The small things: working directory, umask, resource limits, and what prctl(2) and the scheduler know of us.

use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};

use orrery_sys::descriptors::raise;
use orrery_sys::process::{Contents, WholeFile};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::process::{DumpableBehavior, Signal};
use syscalls::{Sysno, syscall};

use crate::error::{Error, Leftover, Result};
use crate::undo::descriptors::{Keepers, borrow};

/// `RLIMIT_*` are numbered from 0 to this, exclusively.
const LIMITS: usize = 16;

/// What `/proc/self/status` says of a thread.
pub type Status = Contents<4096>;

/// The files of `/proc` that show many attributes at once, where there are any.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) status: Option<WholeFile>,
    limits: Option<WholeFile>,
}

impl Files {
    /// Opens those of thread `thread`, the calling one.
    pub(crate) fn open(thread: i32) -> Self {
        Self { status: WholeFile::status(thread).ok(), limits: WholeFile::limits().ok() }
    }

    /// Returns what is shown of the thread and its process now.
    pub(crate) fn status(&self) -> Status {
        self.status.as_ref().map_or(Contents::UNKNOWN, WholeFile::read)
    }

    fn limits(&self) -> Contents<2048> {
        self.limits.as_ref().map_or(Contents::UNKNOWN, WholeFile::read)
    }
}

/// The soft and the hard limit.
type Limit = [u64; 2];

/// Holds the limits of all resources.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    each: [Limit; LIMITS],
    /// What the kernel says of all at once, in full: while it says the same, they are the same.
    shown: Contents<2048>,
}

impl Limits {
    /// None that was asked about.
    pub(crate) const UNKNOWN: Self = Self { each: [[0; 2]; LIMITS], shown: Contents::UNKNOWN };

    /// Returns whether these are the limits of which the kernel says this.
    fn are_as_shown(&self, now: &Contents<2048>) -> bool {
        now.whole().is_some() && now.whole() == self.shown.whole()
    }

    /// Makes these the limits of now.
    fn update(&mut self, files: &Files) {
        let now = files.limits();
        if !self.are_as_shown(&now) {
            self.each = std::array::from_fn(get_limit);
            self.shown = now;
        }
    }
}

/// A number that the kernel keeps for this process or thread.
struct Attribute {
    name: &'static str,
    get: fn() -> u64,
    set: fn(u64) -> bool,
}

/// What is remembered as a number each.
const ATTRIBUTES: [Attribute; 5] = [
    Attribute { name: "parent-death signal", get: parent_death_signal, set: set_parent_death_signal },
    Attribute { name: "dumpable flag", get: dumpable, set: set_dumpable },
    Attribute { name: "niceness", get: niceness, set: set_niceness },
    Attribute { name: "timer slack", get: timer_slack, set: set_timer_slack },
    Attribute { name: "personality", get: || personality(0xffff_ffff), set: set_personality },
];

/// The place of the dumpable flag among them.
const DUMPABLE: usize = 1;

/// Small state of the process.
#[derive(Debug)]
pub(crate) struct Attributes {
    directory: Option<Directory>,
    umask: Mode,
    limits: Limits,
    numbers: [u64; ATTRIBUTES.len()],
    name: [u8; 16],
    /// How the name is shown, with signs for what cannot be printed.
    name_shown: Option<ShownName>,
}

/// A thread's name as `/proc/self/status` shows it: at most 15 characters, each in up to four signs.
type ShownName = [u8; 80];

fn shown_name(status: &Status) -> Option<ShownName> {
    let shown = status.after(b"Name:")?;
    let mut name = [0; 80];
    name.get_mut(..shown.len())?.copy_from_slice(shown);
    Some(name)
}

fn shown_umask(status: &Status) -> Option<Mode> {
    let digits = std::str::from_utf8(status.value(b"Umask:")?).ok()?;
    u32::from_str_radix(digits, 8).ok().map(Mode::from_raw_mode)
}

/// Which directory it is.
type Identity = (u64, u64);

/// The working directory, held open. A program that closes what is not its own takes the descriptor away, so the number
/// is not owned as surely as an `OwnedFd` is.
#[derive(Debug)]
struct Directory {
    fd: i32,
    identity: Identity,
}

impl Attributes {
    pub(crate) fn new() -> Self {
        Self {
            directory: None,
            umask: Mode::empty(),
            limits: Limits::UNKNOWN,
            numbers: [0; 5],
            name: [0; 16],
            name_shown: None,
        }
    }

    /// Remembers what there is now. `limits` are those of an earlier capture, and become those of now; `status` is what the kernel shows.
    pub(crate) fn capture(
        &mut self,
        keepers: &mut Keepers,
        files: &Files,
        limits: &mut Limits,
        status: &Status,
    ) -> Result<()> {
        let here = current_directory();
        if here.is_none() || self.directory.as_ref().map(|directory| directory.identity) != here {
            self.clear(keepers);
            if let Some(identity) = here {
                // Snapshots share it, or each would need a keeper of its own.
                let fd = match keepers.directory(identity) {
                    Some(fd) => {
                        keepers.hold(fd)?;
                        fd
                    }
                    None => {
                        let fd = open_directory()?;
                        keepers.hold(fd.as_raw_fd())?;
                        fd.into_raw_fd()
                    }
                };
                self.directory = Some(Directory { fd, identity });
            }
        }
        self.umask = rustix::process::umask(Mode::empty());
        rustix::process::umask(self.umask);
        limits.update(files);
        self.limits.clone_from(limits);
        self.numbers = ATTRIBUTES.map(|attribute| (attribute.get)());
        self.name = thread_name();
        self.name_shown = shown_name(status);
        Ok(())
    }

    /// Lets go of the working directory.
    pub(crate) fn clear(&mut self, keepers: &mut Keepers) {
        if let Some(directory) = self.directory.take() {
            let last = keepers.unhold(directory.fd);
            // SAFETY: only asked about.
            let fd = unsafe { borrow(directory.fd) };
            let found = rustix::fs::fstat(fd).map(|found| (found.st_dev, found.st_ino));
            // It may have been closed, and the number may name something else.
            if last && found == Ok(directory.identity) {
                // SAFETY: we opened it for our own use.
                unsafe { rustix::io::close(directory.fd) };
            }
        }
    }

    /// Returns the descriptor that holds the working directory.
    pub(crate) fn directory(&self) -> Option<i32> {
        self.directory.as_ref().map(|directory| directory.fd)
    }

    /// Puts limits back, which everything else may need. `files` are those that show them, if they are in place; `bounded` says
    /// whether the engine itself lowered one.
    pub(crate) fn restore_limits(
        &self,
        files: Option<&Files>,
        bounded: bool,
    ) -> std::result::Result<(), Leftover> {
        if bounded {
            // What is in its way is found below.
            set_limit(libc::RLIMIT_DATA as usize, &self.limits.each[libc::RLIMIT_DATA as usize]);
        }
        let now = files.map_or(Contents::UNKNOWN, Files::limits);
        if self.limits.are_as_shown(&now) {
            return Ok(());
        }
        for (which, limit) in self.limits.each.iter().enumerate() {
            if get_limit(which) != *limit && !set_limit(which, limit) {
                return Err(Leftover::Limit(i32::try_from(which).unwrap_or(0)));
            }
        }
        Ok(())
    }

    /// Puts the rest back, where `status` is what the kernel shows now that nobody else can change it.
    pub(crate) fn restore(&self, status: &Status) -> std::result::Result<(), Leftover> {
        if shown_umask(status) != Some(self.umask) {
            rustix::process::umask(self.umask);
        }
        if let Some(directory) = &self.directory
            && current_directory() != Some(directory.identity)
        {
            // SAFETY: the engine's own descriptors are back, and this is one; of a file it is refused.
            rustix::process::fchdir(unsafe { borrow(directory.fd) }).map_err(|_| Leftover::Directory)?;
        }
        (0..ATTRIBUTES.len())
            .filter(|&which| which != DUMPABLE)
            .try_for_each(|which| self.restore_one(which))?;
        let name_is_shown = self.name_shown.is_some() && shown_name(status) == self.name_shown;
        if !name_is_shown && thread_name() != self.name {
            // SAFETY: PR_SET_NAME reads at most 16 bytes.
            let _ = unsafe { syscall!(Sysno::prctl, libc::PR_SET_NAME, self.name.as_ptr()) };
        }
        Ok(())
    }

    /// Puts back whether others may look into this process: while they may not, an ordinary user may not compare the
    /// descriptors with their copy either.
    pub(crate) fn restore_dumpable(&self) -> std::result::Result<(), Leftover> {
        self.restore_one(DUMPABLE)
    }

    fn restore_one(&self, which: usize) -> std::result::Result<(), Leftover> {
        let (attribute, wanted) = (&ATTRIBUTES[which], self.numbers[which]);
        if (attribute.get)() != wanted && !(attribute.set)(wanted) {
            return Err(Leftover::Attribute(attribute.name));
        }
        Ok(())
    }

    /// Sets the limit on private writable memory, in bytes.
    pub(crate) fn set_data_limit(bytes: u64) -> bool {
        let [_, hard] = get_limit(libc::RLIMIT_DATA as usize);
        set_limit(libc::RLIMIT_DATA as usize, &[bytes.min(hard), hard])
    }
}

fn current_directory() -> Option<Identity> {
    // A directory that was removed has no name, but `.` still leads to it.
    rustix::fs::stat(c".").ok().map(|found| (found.st_dev, found.st_ino))
}

fn open_directory() -> Result<OwnedFd> {
    rustix::fs::openat(CWD, c".", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map(raise)
        .map_err(|errno| Error::System(orrery_sys::Error::new("open the working directory", 0, errno)))
}

fn get_limit(which: usize) -> Limit {
    let mut limit = [0; 2];
    // SAFETY: the kernel writes one `struct rlimit64`.
    let _ = unsafe { syscall!(Sysno::prlimit64, 0, which, 0, limit.as_mut_ptr()) };
    limit
}

fn set_limit(which: usize, limit: &Limit) -> bool {
    // SAFETY: the kernel reads one `struct rlimit64`.
    unsafe { syscall!(Sysno::prlimit64, 0, which, limit.as_ptr(), 0) }.is_ok()
}

fn thread_name() -> [u8; 16] {
    let mut name = [0; 16];
    // SAFETY: PR_GET_NAME writes 16 bytes.
    let _ = unsafe { syscall!(Sysno::prctl, libc::PR_GET_NAME, name.as_mut_ptr()) };
    name
}

fn parent_death_signal() -> u64 {
    rustix::process::parent_process_death_signal()
        .ok()
        .flatten()
        .map_or(0, |signal| signal.as_raw().unsigned_abs().into())
}

fn set_parent_death_signal(number: u64) -> bool {
    let signal = i32::try_from(number).ok().and_then(Signal::from_named_raw);
    rustix::process::set_parent_process_death_signal(signal).is_ok()
}

fn dumpable() -> u64 {
    match rustix::process::dumpable_behavior() {
        Ok(DumpableBehavior::NotDumpable) => 0,
        Ok(DumpableBehavior::Dumpable) => 1,
        _ => 2,
    }
}

fn set_dumpable(number: u64) -> bool {
    let behavior = if number == 0 { DumpableBehavior::NotDumpable } else { DumpableBehavior::Dumpable };
    // "Readable by root only" cannot be asked for.
    number < 2 && rustix::process::set_dumpable_behavior(behavior).is_ok()
}

/// 1 (least nice) to 40, as the system call has it.
fn niceness() -> u64 {
    // SAFETY: getpriority reads nothing of ours.
    unsafe { syscall!(Sysno::getpriority, libc::PRIO_PROCESS, 0) }.map_or(20, |raw| raw as u64)
}

fn set_niceness(raw: u64) -> bool {
    let nice = 20 - i32::try_from(raw).unwrap_or(20);
    // SAFETY: setpriority reads nothing of ours.
    unsafe { syscall!(Sysno::setpriority, libc::PRIO_PROCESS, 0, nice) }.is_ok()
}

fn timer_slack() -> u64 {
    // SAFETY: PR_GET_TIMERSLACK returns a number.
    unsafe { syscall!(Sysno::prctl, libc::PR_GET_TIMERSLACK) }.map_or(0, |n| n as u64)
}

fn set_timer_slack(nanoseconds: u64) -> bool {
    // SAFETY: PR_SET_TIMERSLACK takes a number.
    unsafe { syscall!(Sysno::prctl, libc::PR_SET_TIMERSLACK, nanoseconds) }.is_ok()
}

fn personality(number: u64) -> u64 {
    // SAFETY: personality takes and returns a number; 0xffffffff only asks.
    unsafe { syscall!(Sysno::personality, number) }.map_or(0, |n| n as u64)
}

fn set_personality(number: u64) -> bool {
    personality(number);
    true
}
