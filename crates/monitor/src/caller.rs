//! Threads that call: what the monitor must know of them, looked up once and kept while it stays true.
//!
//! A thread's number may come to mean another thread once the first has gone. So a record holds a descriptor of the
//! thread itself (`PIDFD_THREAD`, Linux 6.9), which tells in a tenth of a microsecond whether the number still means
//! it. User and group ids change only through calls that the monitor hears of ([`Callers::forget`]), before they happen
//! and from the very thread, whose next call comes after. What other threads may change under one's hands (the umask,
//! the current directory, descriptors) is never kept.
//!
//! As long as no thread has changed its identity, all guarded threads are who the monitor is ([`Callers::alike`]):
//! nothing but a few calls that the monitor hears of changes that (`no_new_privs` keeps execve(2) from it). Then a call
//! by path is performed without asking who calls.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use crate::credentials;
use orrery_sys::errno;

/// `PIDFD_THREAD`: the thread, not its process.
const OF_THREAD: i32 = libc::O_EXCL;
/// More are not kept: a program that starts threads without end costs the monitor no memory.
const KEPT: usize = 8192;
/// Nor more than this part of the descriptors that the monitor may have.
const PART: usize = 4;

/// Who does something, as the file system sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// User, for files.
    pub(crate) user: u32,
    /// Real user, for access(2).
    pub(crate) real_user: u32,
    /// Group, for files.
    pub(crate) group: u32,
    /// Real group.
    pub(crate) real_group: u32,
    /// Further groups.
    pub(crate) groups: Vec<u32>,
    /// Effective capabilities.
    pub(crate) capabilities: u64,
}

/// What `/proc/TID/status` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) process: i32,
    /// The same process in the caller's own PID namespace.
    pub(crate) own_process: i32,
    pub(crate) parent: i32,
    pub(crate) umask: u32,
    pub(crate) credentials: Credentials,
    /// Signals that wait for the thread or its process, are not blocked and have a handler.
    pub(crate) interrupting: u64,
    /// Whether seccomp filters its calls.
    pub(crate) filtered: bool,
    /// Capabilities that a program executed by the superuser has at most.
    bounding: u64,
}

/// One thread.
#[derive(Debug)]
pub(crate) struct Caller {
    /// The process that it belongs to.
    pub(crate) process: i32,
    /// Who it is; `None`: who the monitor is.
    pub(crate) other: Option<Credentials>,
    handle: OwnedFd,
    /// Whether the handle is that of the thread.
    lasting: bool,
}

/// Threads by their numbers, each with a descriptor.
#[derive(Debug)]
struct Known {
    callers: HashMap<i32, Arc<Caller>>,
    /// At so many those that have ended are looked for.
    full: usize,
}

/// So many are looked through at least, and twice as many as lived last time: a thread costs a look or two in all.
const FEW: usize = 64;

/// The threads seen so far.
#[derive(Debug)]
pub(crate) struct Callers {
    known: Mutex<Known>,
    monitor: Credentials,
    /// Threads may have changed their identities.
    differ: AtomicBool,
    /// How many are kept.
    most: usize,
}

impl Credentials {
    /// Whether files and sockets know no difference between the two.
    fn acts_as(&self, other: &Self) -> bool {
        let plain = |who: &Self| Self { capabilities: who.capabilities & !credentials::MINE, ..who.clone() };
        plain(self) == plain(other)
    }
}

impl Status {
    /// Reads the status of a thread.
    ///
    /// # Errors
    /// `ESRCH` where it has gone.
    pub(crate) fn of(thread: i32) -> Result<Self, Errno> {
        let text = std::fs::read_to_string(format!("/proc/{thread}/status")).map_err(|_| Errno::SRCH)?;
        Self::parse(&text).ok_or(Errno::SRCH)
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
        };
        let numbers =
            |name| field(name).map(|line| line.split_whitespace().filter_map(|n| n.parse().ok()).collect());
        let mask = |name| field(name).and_then(|line| u64::from_str_radix(line, 16).ok());
        let users: Vec<u32> = numbers("Uid")?;
        let groups: Vec<u32> = numbers("Gid")?;
        let pending = mask("SigPnd")? | mask("ShdPnd")?;
        Some(Self {
            process: field("Tgid")?.parse().ok()?,
            own_process: field("NStgid").or(field("Tgid"))?.split_whitespace().last()?.parse().ok()?,
            parent: field("PPid")?.parse().ok()?,
            umask: u32::from_str_radix(field("Umask").unwrap_or("022"), 8).ok()?,
            credentials: Credentials {
                user: *users.get(3)?,
                real_user: *users.first()?,
                group: *groups.get(3)?,
                real_group: *groups.first()?,
                groups: numbers("Groups")?,
                capabilities: mask("CapEff")?,
            },
            interrupting: pending & !mask("SigBlk")? & mask("SigCgt")?,
            filtered: field("Seccomp") == Some("2"),
            bounding: mask("CapBnd")?,
        })
    }

    /// Whether a program that this process executes has the same credentials.
    fn keeps_over_exec(&self) -> bool {
        let Credentials { user, real_user, capabilities, .. } = &self.credentials;
        let superuser = *user == 0 && *real_user == 0 && capabilities & !self.bounding == 0;
        // SAFETY: this prctl(2) takes no pointer and changes nothing.
        let plain = unsafe { libc::prctl(libc::PR_GET_SECUREBITS) } == 0;
        plain && (*capabilities == 0 || superuser)
    }
}

impl Callers {
    /// None yet. The calling process is the monitor, whose program keeps the capabilities `kept`.
    ///
    /// # Errors
    /// Where `/proc` is not there.
    pub(crate) fn new(kept: u64) -> Result<Self, Errno> {
        let status = Status::of(rustix::process::getpid().as_raw_pid())?;
        let differ = AtomicBool::new(!status.keeps_over_exec());
        let mut monitor = status.credentials;
        monitor.capabilities &= kept;
        let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let most = descriptors.map_or(KEPT, |most| usize::try_from(most).unwrap_or(KEPT) / PART).min(KEPT);
        let known = Mutex::new(Known { callers: HashMap::new(), full: FEW.min(most) });
        Ok(Self { known, monitor, differ, most })
    }

    /// Whether all that are guarded are who the monitor is.
    pub(crate) fn alike(&self) -> bool {
        !self.differ.load(Ordering::SeqCst)
    }

    /// From now on threads may have other identities.
    pub(crate) fn diverge(&self) {
        self.differ.store(true, Ordering::SeqCst);
    }

    /// The thread that waits for an answer right now.
    ///
    /// # Errors
    /// `ESRCH` where it has gone.
    pub(crate) fn get(&self, thread: i32) -> Result<Arc<Caller>, Errno> {
        let known = self.known().callers.get(&thread).cloned();
        if let Some(caller) = known
            && caller.lasting
            && caller.lives()
        {
            return Ok(caller);
        }
        let (handle, lasting) = match open(thread, OF_THREAD) {
            Ok(handle) => (handle, true),
            Err(Errno::INVAL) => {
                let process = Status::of(thread)?.process;
                (open(process, 0)?, false)
            }
            Err(error) => return Err(error),
        };
        let status = Status::of(thread)?;
        let other = (!self.monitor.acts_as(&status.credentials)).then_some(status.credentials);
        if other.is_some() {
            self.diverge();
        }
        let caller = Arc::new(Caller { process: status.process, other, handle, lasting });
        let mut known = self.known();
        if known.callers.len() >= known.full {
            known.callers.retain(|_, caller| caller.lives());
            if known.callers.len() >= self.most {
                known.callers.clear();
            }
            known.full = (2 * known.callers.len()).max(FEW).min(self.most);
        }
        known.callers.insert(thread, Arc::clone(&caller));
        Ok(caller)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known of a thread may change from its next call on.
    pub(crate) fn forget(&self, thread: i32) {
        self.known().callers.remove(&thread);
    }

    /// What is known of all threads of a process may change: another program is loaded.
    pub(crate) fn forget_process(&self, process: i32) {
        self.known().callers.retain(|_, caller| caller.process != process);
    }
}

fn open(thread: i32, flags: i32) -> Result<OwnedFd, Errno> {
    // SAFETY: the call takes numbers only, and makes a descriptor that nobody knows yet.
    let handle = unsafe { syscall!(Sysno::pidfd_open, thread, flags) }.map_err(errno)?;
    let handle = i32::try_from(handle).map_err(|_| Errno::BADF)?;
    // SAFETY: the kernel made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(handle) })
}

impl Caller {
    fn lives(&self) -> bool {
        // SAFETY: the call's pointer is null, and signal 0 changes nothing.
        let asked = unsafe { syscall!(Sysno::pidfd_send_signal, self.handle.as_raw_fd(), 0, 0, 0) };
        asked != Err(syscalls::Errno::ESRCH)
    }

    /// The file that is the caller's descriptor `number`.
    ///
    /// # Errors
    /// `EBADF`.
    pub(crate) fn descriptor(&self, number: i32) -> Result<OwnedFd, Errno> {
        // SAFETY: the call takes numbers only, and makes a descriptor that nobody knows yet.
        let file =
            unsafe { syscall!(Sysno::pidfd_getfd, self.handle.as_raw_fd(), number, 0) }.map_err(errno)?;
        let file = i32::try_from(file).map_err(|_| Errno::BADF)?;
        // SAFETY: the kernel made it for us.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }
}

impl AsFd for Caller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_known_while_it_lives() {
        let callers = Callers::new(u64::MAX).unwrap();
        let me = rustix::thread::gettid().as_raw_pid();
        let first = callers.get(me).unwrap();
        assert_eq!(first.process, rustix::process::getpid().as_raw_pid());
        assert_eq!(first.other, None);
        if first.lasting {
            assert!(Arc::ptr_eq(&first, &callers.get(me).unwrap()));
        }
        callers.forget_process(first.process);
        assert!(!Arc::ptr_eq(&first, &callers.get(me).unwrap()));
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let id = i32::try_from(child.id()).unwrap();
        let known = callers.get(id).unwrap();
        assert!(known.lives());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!known.lives());
        assert!(callers.get(id).is_err());
    }

    #[test]
    fn threads_that_have_ended_hold_no_descriptors() {
        let callers = Callers::new(u64::MAX).unwrap();
        for _ in 0..3 * FEW {
            let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
            let _known = callers.get(i32::try_from(child.id()).unwrap()).unwrap();
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(callers.known().callers.len() <= FEW);
    }

    #[test]
    fn descriptors_are_fetched() {
        let callers = Callers::new(u64::MAX).unwrap();
        let me = callers.get(rustix::thread::gettid().as_raw_pid()).unwrap();
        let file = tempfile::tempfile().unwrap();
        let copy = me.descriptor(file.as_raw_fd()).unwrap();
        assert_eq!(rustix::fs::fstat(&copy).unwrap().st_ino, rustix::fs::fstat(&file).unwrap().st_ino);
        assert_eq!(me.descriptor(-1).unwrap_err(), Errno::BADF);
    }
}
