//! Domains are created here: forked from main through libc, so that everybody's fork handlers run, or cloned from a parked
//! *spare*.
//!
//! **In the child, from fork(2) to the call of the body, only async-signal-safe code runs** (see [`crate::post_fork`]).
//!
//! A program with threads and gigabytes should not fork while it serves. So a domain that may be restarted keeps a
//! spare: a process forked once, when the domain was made, which does nothing but sleep until main orders an instance.
//! It clones one with CLONE_PARENT (clone(2)), so that instances are main's own children, with main's memory, files
//! and directory as of the domain's creation.
//!
//! Nothing that an instance can write is believed by the spare or, once the instance runs its body, by main. The page
//! over which main and the spare talk (the `SparePage`) is left out of what the spare's clones inherit (MADV_DONTFORK),
//! and an instance unmaps the page of its setup (the `SetupPage`) before its body runs. The spare makes one instance per
//! request, and dies with main like any domain.
//!
//! How an instance is made, step by step, over the setup page:
//!
//! 1. The child starts its watcher, then waits for `go`. It cannot end by itself meanwhile, so its number cannot be
//!    anybody else's when main
//! 2. takes hold of it (pidfd_open(2)) and says `go`.
//! 3. The child settles: groups, limits, scheduling, descriptors, signals. It reports success or the step that failed.
//! 4. It runs the body, and ends with it.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use orrery_sys::descriptors::{self, VerifiedFd};
use orrery_sys::signals;
use rustix::event::EventfdFlags;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};
use rustix::thread::futex;

use crate::channel::Channel;
use crate::copy::{Kin, copy_process};
use crate::end::End;
use crate::enforcement::Enforcement;
use crate::forked::{self, Creator};
use crate::gate::is_dead;
use crate::limits::Limits;
use crate::post_fork::{Descriptors, PostForkSetup, Signals, set_name};
use crate::process::Process;
use crate::scheduling::Scheduling;
use crate::setup_step::SetupStep;
use crate::shared::{self, SharedMemory};
use crate::time::Moment;
use crate::watch::{EventSource, Watcher, last_errno};
use crate::{Error, Result};

/// How long a new process may take for a step that main waits for.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Who takes the status of a dead domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Reaper {
    /// The library, so that no zombie stays.
    #[default]
    Library,
    /// The program: the domain is an ordinary child, and its end shows in `waitpid(-1)`.
    Program,
}

/// What a domain should be.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Settings {
    /// Its name; the process is called so (the first 15 bytes).
    pub name: String,
    /// Which of main's open files it keeps.
    pub descriptors: Descriptors,
    /// What becomes of main's signal dispositions.
    pub signals: Signals,
    /// When and where it runs.
    pub scheduling: Scheduling,
    /// What it may use.
    pub limits: Limits,
    /// How many bytes of address space the body maps, privately and writable, to see memory of others: a bound on memory
    /// that a process limit holds allows for them. For as much again, mapped later, the body may raise the soft limit
    /// (RLIMIT_DATA).
    pub viewed: u64,
    /// Whether a dead instance can be followed by another: costs a parked process.
    pub restartable: bool,
    /// The process that reaps the domain. Restartable domains are always reaped by the library.
    pub reaper: Reaper,
}

/// What a domain runs: called in the new process, which ends when it returns.
pub type Body = Box<dyn Fn() + Send + Sync>;

/// Forks: is given libc's fork(2) and calls it once, around it whatever has to be. Returns what that returned, or -1
/// with errno set.
pub type ForkBy<'a> = &'a dyn Fn(&dyn Fn() -> i32) -> i32;

/// What main and the spare tell each other; no instance has it.
#[repr(C)]
struct SparePage {
    /// The number of the last request of main's.
    requested: AtomicU32,
    /// The number of the last request that the spare has answered.
    answered: AtomicU32,
    /// The answer: a process id, or a negated errno.
    answer: AtomicU32,
}

/// What main and an instance tell each other until the instance runs its body, before which it unmaps the page.
#[repr(C)]
struct SetupPage {
    /// Main has taken hold of the child.
    may_set_up: AtomicU32,
    /// 0: not yet; 1: done; otherwise the failed step in the upper half and the errno in the lower.
    setup_result: AtomicU32,
}

/// Everything that a child needs, laid out before the fork.
struct ChildSpec {
    setup: PostForkSetup,
    setup_memory: SharedMemory,
    spare_memory: Option<SharedMemory>,
    watcher: Watcher,
    spare_watcher: Option<Watcher>,
    /// For what an instance forks.
    descendant_watcher: Watcher,
    body: Body,
}

impl ChildSpec {
    /// Must not be called in an instance that runs its body.
    fn setup_page(&self) -> &SetupPage {
        // SAFETY: the memory is at least a page, zeroed, and holds nothing but this; all fields are atomics.
        unsafe { self.setup_memory.start().cast::<SetupPage>().as_ref() }
    }
}

/// A domain, seen from main. Dropping it kills it.
pub struct Domain {
    name: String,
    // In a domain the watcher runs on the spec, so it is never freed there: see `Drop`.
    spec: core::mem::ManuallyDrop<Box<ChildSpec>>,
    spare: Option<Process>,
    process: Arc<Process>,
    reap: bool,
    creator: Creator,
    /// Readable when all processes of the domain are to end.
    ending: VerifiedFd,
    _main: VerifiedFd,
}

impl Domain {
    /// Makes a domain with the settings, which runs `body`. The kernel marks the death of each instance in `channel`.
    ///
    /// # Errors
    /// [`Error::Setting`], [`Error::Setup`], [`Error::DiedEarly`], [`Error::System`]; nothing is left over then.
    ///
    /// # Safety
    /// `channel` outlives the domain. `body` runs in a forked child of a process that may have other threads: it must
    /// not wait for locks that they may have held (std's and libc's allocators are safe).
    pub unsafe fn start(settings: &Settings, channel: &Channel, body: Body) -> Result<Self> {
        // SAFETY: `channel` outlives the domain, and `body` keeps to what a forked child may do (# Safety);
        // no other memory is shared.
        unsafe { Self::start_by(settings, channel, &[], body, &|fork| fork()) }
    }

    /// Like [`Domain::start`], for those who have something to do around the fork, or more memory to share with the
    /// domain than the channel: `shared`.
    ///
    /// # Errors
    /// Those of [`Domain::start`].
    ///
    /// # Safety
    /// As for [`Domain::start`]; and what `by` does in the child before it returns is async-signal-safe.
    pub unsafe fn start_by(
        settings: &Settings,
        channel: &Channel,
        shared: &[&SharedMemory],
        body: Body,
        by: ForkBy<'_>,
    ) -> Result<Self> {
        let bounds = settings.limits.prepare(&settings.name, settings.scheduling.nice, settings.viewed)?;
        let scheduling = settings.scheduling.prepare(bounds.nice())?;
        let main = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
            .map(descriptors::raise)
            .and_then(VerifiedFd::new)
            .map_err(|e| Error::system("pidfd_open(self)", 0, e))?;
        let ending = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(descriptors::raise)
            .and_then(VerifiedFd::new)
            .map_err(|e| Error::system("eventfd", 0, e))?;
        let prepare_watcher = |mark| {
            // SAFETY: the mark is null, or in the channel's memory, which is shared with the domain and never
            // unmapped there.
            let mut watcher = unsafe { Watcher::prepare(main.unverified().as_raw_fd(), mark)? };
            let source = EventSource {
                fd: ending.unverified().as_raw_fd(),
                on_readable: end_process,
                with: core::ptr::null(),
                on_idle: None,
            };
            // SAFETY: it makes one system call, and needs nothing.
            unsafe { watcher.listen(source) };
            Ok::<_, Error>(watcher)
        };
        let watcher = prepare_watcher(channel.domain_mark())?;
        let spare_watcher = settings.restartable.then(|| prepare_watcher(core::ptr::null())).transpose()?;
        let descendant_watcher = prepare_watcher(core::ptr::null())?;
        forked::prepare_descendants();
        let setup = PostForkSetup {
            bounds,
            scheduling,
            signals: settings.signals,
            keep: kept_descriptors(
                &settings.descriptors,
                &[main.unverified().as_raw_fd(), ending.unverified().as_raw_fd()],
            ),
            name: process_name(&settings.name),
        };
        let setup_memory = SharedMemory::for_domains("orrery-setup", 1)?;
        let spare_memory =
            settings.restartable.then(|| SharedMemory::for_domains("orrery-spare", 1)).transpose()?;
        let spec = Box::new(ChildSpec {
            setup,
            setup_memory,
            spare_memory,
            watcher,
            spare_watcher,
            descendant_watcher,
            body,
        });
        let shared: Vec<&SharedMemory> = channel.memory().into_iter().chain(shared.iter().copied()).collect();
        let reap = settings.restartable || settings.reaper == Reaper::Library;
        let (spare, process) = if settings.restartable {
            let spare = fork(&spec, Role::Spare, &shared, by)?;
            let spare = Process::hold_child(spare, true)?;
            let process =
                request_instance(&spec, &spare, &settings.name).and_then(|pid| await_setup(&spec, pid, true));
            match process {
                Ok(process) => (Some(spare), process),
                Err(error) => {
                    spare.kill();
                    return Err(error);
                }
            }
        } else {
            let pid = fork(&spec, Role::Instance, &shared, by)?;
            (None, await_setup(&spec, pid, reap)?)
        };
        Ok(Self {
            name: settings.name.clone(),
            spec: core::mem::ManuallyDrop::new(spec),
            spare,
            process: Arc::new(process),
            reap,
            creator: Creator::here(),
            ending,
            _main: main,
        })
    }

    /// Returns the process that is the domain now.
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// Returns the parked spare, where there is one.
    pub fn spare(&self) -> Option<&Process> {
        self.spare.as_ref()
    }

    /// Replaces the dead instance by a new one. A living one is killed first.
    ///
    /// # Errors
    /// [`Error::SpareGone`] where the domain is not restartable any more, [`Error::Setup`] (`EAGAIN`: no more processes
    /// may be made now), [`Error::DiedEarly`], [`Error::System`]. It may be tried again later.
    pub fn relaunch(&mut self) -> Result<()> {
        self.process.kill();
        let Some(spare) = &self.spare else { return Err(Error::SpareGone { name: self.name.clone() }) };
        let pid = request_instance(&self.spec, spare, &self.name)?;
        self.process = Arc::new(await_setup(&self.spec, pid, self.reap)?);
        Ok(())
    }

    /// Kills its processes for good, and waits until they are dead. In a forked child of main it does nothing.
    pub fn kill(&self) {
        if !self.creator.is_here() {
            return;
        }
        let all = self.spare.iter().chain([&*self.process]);
        // Main may have given up the privileges that signals to them take; to end by their watchers takes none.
        if all.clone().any(|process| process.signal(Signal::KILL).is_err() && process.is_alive()) {
            let ending = self.ending.verified();
            let _ = ending.and_then(|ending| rustix::io::write(ending, &1_u64.to_ne_bytes()));
        }
        all.for_each(Process::kill);
    }

    /// Returns the mechanisms that enforce the limits.
    pub fn enforcement(&self) -> Enforcement {
        self.spec.setup.bounds.enforcement
    }

    /// Returns how often the kernel killed an instance because the memory limit was reached; control groups only.
    pub fn memory_kills(&self) -> u64 {
        self.spec.setup.bounds.group.memory_kills()
    }

    /// Returns the bytes of memory in use, if a control group limits it.
    pub fn memory_used(&self) -> Option<u64> {
        self.spec.setup.bounds.group.memory_used()
    }
}

impl core::fmt::Debug for Domain {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Domain")
            .field("name", &self.name)
            .field("process", &self.process)
            .finish_non_exhaustive()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // In a forked child the processes are not ours, and in the domain itself the spec is in use.
        if self.creator.is_here() {
            self.kill();
            // SAFETY: dropped once, here; nothing uses the spec after this.
            unsafe { core::mem::ManuallyDrop::drop(&mut self.spec) };
        }
    }
}

/// On the watcher's thread: ends the process.
unsafe extern "C" fn end_process(_: *const c_void) {
    // SAFETY: ends the whole process; no memory is involved.
    let _ = unsafe { syscalls::syscall!(syscalls::Sysno::exit_group, 0) };
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Instance,
    Spare,
}

/// Forks through libc, with `shared` and the spec's pages in what the child inherits; the child never returns from here.
fn fork(spec: &ChildSpec, role: Role, shared: &[&SharedMemory], by: ForkBy<'_>) -> Result<Pid> {
    let page = spec.setup_page();
    page.may_set_up.store(0, Ordering::SeqCst);
    page.setup_result.store(0, Ordering::SeqCst);
    let all: Vec<&SharedMemory> =
        shared.iter().copied().chain([&spec.setup_memory]).chain(&spec.spare_memory).collect();
    let mask = signals::block_all();
    // SAFETY: the child runs async-signal-safe code only, up to the body, for which the caller of `start` vouches.
    let pid = by(&|| shared::inherited(&all, || unsafe { libc::fork() }));
    if pid == 0 {
        forked::enter();
        match role {
            Role::Instance => run_instance(spec, mask),
            Role::Spare => run_spare(spec, mask),
        }
    }
    let errno = last_errno();
    signals::set_mask(mask);
    Pid::from_raw(pid.max(0)).ok_or(Error::Setup { step: SetupStep::Fork, errno })
}

/// In the spare: sleeps, and clones an instance whenever main orders one.
fn run_spare(spec: &ChildSpec, mask: signals::Mask) -> ! {
    set_name(b"orrery-spare\0\0\0\0");
    let Some(memory) = &spec.spare_memory else { exit() };
    let page = spare_page(memory);
    let answer = |request: u32, value: i32| {
        page.answer.store(value.cast_unsigned(), Ordering::SeqCst);
        page.answered.store(request, Ordering::SeqCst);
        wake(&page.answered);
    };
    // What instances have of the page they could write, and the spare would obey.
    let ready = memory.leave_out_of_forks().and_then(|()| match &spec.spare_watcher {
        Some(watcher) => watcher.start().map(drop),
        None => Ok(()),
    });
    if let Err(errno) = ready {
        answer(1, errno.raw_os_error().wrapping_neg());
        exit();
    }
    let mut answered = 0;
    loop {
        let request = page.requested.load(Ordering::SeqCst);
        if request == answered {
            let _ = futex::wait(&page.requested, futex::Flags::empty(), answered, None);
            continue;
        }
        // SAFETY: the spare has one thread as far as libc knows, and the copy goes on to `run_instance`.
        let pid = match unsafe { copy_process(Kin::Sibling) } {
            Ok(None) => run_instance(spec, mask),
            Ok(Some(copied)) => copied.pid.as_raw_pid(),
            Err(errno) => errno.raw_os_error().wrapping_neg(),
        };
        // One instance for this request, however far its number is from the last one's.
        answered = request;
        answer(request, pid);
    }
}

/// In the new domain: settles, then lives.
fn run_instance(spec: &ChildSpec, mask: signals::Mask) -> ! {
    // SAFETY: in a domain the spec is never freed.
    forked::watch_descendants(unsafe { &*core::ptr::from_ref(&spec.descendant_watcher) });
    let page = spec.setup_page();
    let fail = |step: SetupStep, errno: Errno| -> ! {
        let packed = (step as u32) << 16 | errno.raw_os_error().unsigned_abs() & 0xffff;
        page.setup_result.store(packed, Ordering::SeqCst);
        wake(&page.setup_result);
        exit()
    };
    if let Err(errno) = spec.watcher.start() {
        fail(SetupStep::Watch, errno);
    }
    while page.may_set_up.load(Ordering::SeqCst) == 0 {
        let _ = futex::wait(&page.may_set_up, futex::Flags::empty(), 0, None);
    }
    if let Err((step, errno)) = spec.setup.apply() {
        fail(step, errno);
    }
    page.setup_result.store(1, Ordering::SeqCst);
    wake(&page.setup_result);
    // SAFETY: nothing in an instance uses the page after its setup.
    if unsafe { spec.setup_memory.unmap_here() }.is_err() {
        exit();
    }
    signals::set_mask(if spec.setup.signals == Signals::Keep { mask } else { 0 });
    (spec.body)();
    exit()
}

fn exit() -> ! {
    // SAFETY: ends the process without running anything of the program's.
    unsafe { libc::_exit(0) }
}

fn wake(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), u32::MAX >> 1);
}

/// Orders an instance of the spare; returns its process id.
fn request_instance(spec: &ChildSpec, spare: &Process, name: &str) -> Result<Pid> {
    let Some(page) = spec.spare_memory.as_ref().map(spare_page) else {
        return Err(Error::SpareGone { name: name.to_owned() });
    };
    let setup = spec.setup_page();
    setup.may_set_up.store(0, Ordering::SeqCst);
    setup.setup_result.store(0, Ordering::SeqCst);
    let number = page.requested.load(Ordering::SeqCst).wrapping_add(1);
    page.requested.store(number, Ordering::SeqCst);
    wake(&page.requested);
    let answered = await_word(&page.answered, spare.as_fd(), |value| value == number)?;
    if !answered {
        return Err(Error::SpareGone { name: name.to_owned() });
    }
    let answer = page.answer.load(Ordering::SeqCst).cast_signed();
    Pid::from_raw(answer.max(0))
        .ok_or(Error::Setup { step: SetupStep::Fork, errno: errno_of(answer.wrapping_neg()) })
}

fn spare_page(memory: &SharedMemory) -> &SparePage {
    // SAFETY: the memory is at least a page, zeroed, and holds nothing but this; all fields are atomics.
    unsafe { memory.start().cast::<SparePage>().as_ref() }
}

/// Returns an errno that another process wrote.
fn errno_of(raw: i32) -> Errno {
    if (1..4096).contains(&raw) { Errno::from_raw_os_error(raw) } else { Errno::IO }
}

/// Takes hold of a new child and lets it settle.
fn await_setup(spec: &ChildSpec, pid: Pid, reap: bool) -> Result<Process> {
    let page = spec.setup_page();
    let process = Process::hold_child(pid, reap)?.leading_group();
    page.may_set_up.store(1, Ordering::SeqCst);
    wake(&page.may_set_up);
    let done = await_word(&page.setup_result, process.as_fd(), |value| value != 0);
    let state = page.setup_result.load(Ordering::SeqCst);
    match (done, state) {
        (Ok(true), 1) => Ok(process),
        (Ok(true), packed) => {
            process.kill();
            let errno = errno_of(i32::try_from(packed & 0xffff).unwrap_or(0));
            Err(Error::Setup { step: SetupStep::of(packed >> 16), errno })
        }
        (Ok(false), _) => {
            let end = process.end().unwrap_or(End::Unknown);
            process.reap();
            Err(Error::DiedEarly { end })
        }
        (Err(error), _) => {
            process.kill();
            Err(error)
        }
    }
}

/// Waits until `word` is as wanted (true) or the process is dead (false).
fn await_word(word: &AtomicU32, pidfd: BorrowedFd<'_>, wanted: impl Fn(u32) -> bool) -> Result<bool> {
    let end = Moment::now().after(TIMEOUT);
    loop {
        let value = word.load(Ordering::SeqCst);
        if wanted(value) {
            return Ok(true);
        }
        if is_dead(pidfd) {
            return Ok(wanted(word.load(Ordering::SeqCst)));
        }
        if Moment::now() >= end {
            return Err(Error::system("wait for the new domain", 0, Errno::TIMEDOUT));
        }
        let sleep = rustix::time::Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
        let _ = futex::wait(word, futex::Flags::empty(), value, Some(&sleep));
    }
}

/// Returns the sorted descriptors that the child keeps, the watcher's among them.
fn kept_descriptors(descriptors: &Descriptors, own: &[RawFd]) -> Option<Vec<RawFd>> {
    let Descriptors::Only(list) = descriptors else { return None };
    let mut keep: Vec<RawFd> =
        list.iter().copied().filter(|fd| *fd >= 0).chain(own.iter().copied()).collect();
    keep.sort_unstable();
    keep.dedup();
    Some(keep)
}

fn process_name(name: &str) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (to, from) in bytes[..15].iter_mut().zip(name.bytes()) {
        *to = from;
    }
    bytes
}
