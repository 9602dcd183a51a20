//! Starting a program with an executive under it.

use std::env;
use std::ffi::{CString, OsStr, OsString, c_char};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::{Arc, OnceLock};
use std::thread;

use orrery_hijack_image::request_slots::{self, FutexOps};
use orrery_hijack_image::request_slots::{EXEC, EXEC_FAILED, YES};
use orrery_hijack_image::shared_page::Unfollowed;

use crate::archive::Mounted;
use crate::error::{Error, Result};
use crate::events::Events;
use crate::futex::Futex;
use crate::image::Image;
use crate::inject::detach;
use crate::inject::halt::Refusal;
use crate::inject::{Settings, Tables};
use crate::policy::{Policy, Strictness};
use crate::shared_code::SharedCode;
use crate::shared_segment::SharedSegment;
use crate::syscall_counts::Counts;
use crate::{archive, program, supervisor, unfollowed};

/// A site is rewritten when so many of its calls were dispatched: about as many as rewriting costs, which is 16 us.
const THRESHOLD: u32 = 16;
const PR_SET_PTRACER: i32 = 0x5961_6d61;

/// How executives are to behave.
#[derive(Debug, Clone)]
pub struct Options {
    counted: bool,
    timed: bool,
    patch: bool,
    threshold: u32,
    policy: Policy,
    strict: bool,
}

impl Default for Options {
    fn default() -> Self {
        let policy = Policy::default();
        Self { counted: true, timed: false, patch: true, threshold: THRESHOLD, policy, strict: true }
    }
}

impl Options {
    /// Sets whether calls are counted: see [`Hijack::counts`].
    #[must_use]
    pub fn counted(mut self, counted: bool) -> Self {
        self.counted = counted;
        self
    }

    /// Sets whether calls and their errors are timed and counted, which costs some 50 ns a call.
    #[must_use]
    pub fn timed(mut self, timed: bool) -> Self {
        self.timed = timed;
        self
    }

    /// Sets whether hot sites are rewritten; else all calls are dispatched by the kernel.
    #[must_use]
    pub fn patch(mut self, patch: bool) -> Self {
        self.patch = patch;
        self
    }

    /// Sets what is done with calls: see [`crate::policy`].
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Sets whether a policy that [denies](Policy::denies) something refuses what it cannot be applied to: programs
    /// that cannot be followed, calls newer than this version knows, io_uring where the policy names paths or
    /// addresses. Else there is a warning about such programs.
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Sets how many calls of one site are dispatched before it is rewritten.
    #[must_use]
    pub fn threshold(mut self, calls: u32) -> Self {
        self.threshold = calls.max(1);
        self
    }
}

/// Executives, ready to be put under a program and all that it starts.
#[derive(Debug)]
pub struct Hijack {
    segment: Arc<SharedSegment>,
    image: Arc<Image>,
    code: Option<Arc<SharedCode>>,
    /// What programs see where the kernel has nothing: from when a supervisor attends.
    mounted: OnceLock<Arc<[Mounted]>>,
}

impl Hijack {
    /// Prepares: makes the shared memory, and a supervisor process that ends when no tracee is left.
    ///
    /// The supervisor is a forked child: call this before the process has threads of its own.
    ///
    /// # Errors
    /// [`Error::Facility`] and [`Error::Traced`] say what this process or kernel cannot do.
    pub fn start(options: Options) -> Result<Self> {
        let hijack = Self::prepare()?;
        hijack.attend(options)?;
        Ok(hijack)
    }

    /// Makes the shared memory only. Some process has to [attend](Self::attend) before programs are started.
    ///
    /// # Errors
    /// As of [`Hijack::start`].
    pub fn prepare() -> Result<Self> {
        check_this_process()?;
        let (segment, image) = (Arc::new(SharedSegment::new()?), Arc::new(Image::embedded()?));
        let code = SharedCode::share(&image).map(Arc::new);
        Ok(Self { segment, image, code, mounted: OnceLock::new() })
    }

    /// Starts the supervisor, as a child of this process which it leaves at once. What confines this process (a filter,
    /// a Landlock domain) confines the supervisor, too: it can do no more to other processes than its tracees can.
    ///
    /// # Errors
    /// Where no process could be made.
    pub fn attend(&self, options: Options) -> Result<()> {
        self.supervise(options, &[]).map(drop)
    }

    /// Puts executives under processes that run, and under all that these start from now on; to be called in place of
    /// [`Hijack::attend`], of which all else holds. Returns those that have none, with the reason.
    ///
    /// Threads of a process are stopped meanwhile, for some milliseconds. A system call that is interrupted is made again as after a
    /// stop by a signal. A process keeps its executive until it ends or executes a program in which it cannot be followed.
    ///
    /// # Errors
    /// Where no supervisor could be started.
    pub fn attach(&self, options: Options, processes: &[i32]) -> Result<Vec<(i32, String)>> {
        self.supervise(options, processes)
    }

    /// Takes the executives away from all programs of this run that this process may trace, which go on without. Returns those that keep
    /// theirs, with the reason.
    ///
    /// The image stays in a process, and nothing refers to it when the threads that are in it have returned. A policy is not applied to the
    /// programs any more.
    #[must_use]
    pub fn detach(&self) -> Vec<(i32, String)> {
        let mut seen = vec![std::process::id().cast_signed(), self.supervisor()];
        let mut kept = Vec::new();
        // Children that were made meanwhile are found by looking again.
        loop {
            let found = detach::attached_to(self.segment.verdicts_id());
            let new: Vec<i32> = found.into_iter().filter(|process| !seen.contains(process)).collect();
            if new.is_empty() {
                return kept;
            }
            for process in new {
                seen.push(process);
                // A thread of its own: the kernel lets what it traces go when it ends.
                let detach = || detach::detach(process, &self.image);
                let result = thread::scope(|scope| scope.spawn(detach).join());
                let reason = match result {
                    Ok(Ok(true) | Err(Refusal::Absent)) => continue,
                    Ok(Ok(false)) => "its executive is another one".to_owned(),
                    Ok(Err(refusal)) => refusal.to_string(),
                    Err(_) => "the thread that traces it has failed".to_owned(),
                };
                kept.push((process, reason));
            }
        }
    }

    fn supervise(&self, options: Options, running: &[i32]) -> Result<Vec<(i32, String)>> {
        let segment = &self.segment;
        let Options { mut counted, timed, patch, threshold, policy, strict } = options;
        let strictness = Strictness { strict, messages: unfollowed::standard_error() };
        counted |= timed;
        let mounted: Arc<[Mounted]> = archive::make_all(&policy.services().mounts)?.into();
        let mounted = Arc::clone(self.mounted.get_or_init(|| mounted));
        let (code, tables) = (self.code.clone(), Tables::default());
        let settings =
            Settings { code, counted, timed, patch, threshold, policy, strictness, mounted, tables };
        supervisor::start(segment, Arc::clone(&self.image), settings, running)
    }

    /// The process number of the supervisor, as the shared memory has it, where tracees can write.
    pub fn supervisor(&self) -> i32 {
        i32::try_from(self.segment.first().page().supervisor.load(Relaxed)).unwrap_or(0)
    }

    /// Becomes the program: as `exec` does, with the same process, parent and terminal.
    ///
    /// Returns only where that failed.
    pub fn execute(&self, name: &OsStr, arguments: &[OsString]) -> Error {
        match program::find(name, &|path| self.seen(path, std::process::id())) {
            Ok(found) => self.become_program(&found, name, arguments),
            Err(error) => error,
        }
    }

    /// Starts the program as a child of this process.
    ///
    /// # Errors
    /// Where it cannot be executed. What the kernel refuses only when the child tries is printed by the child on
    /// standard error, and by its exit status.
    pub fn spawn(&self, name: &OsStr, arguments: &[OsString]) -> Result<Child> {
        // SAFETY: nothing is prepared.
        unsafe { self.spawn_prepared(name, arguments, || Ok(())) }
    }

    /// As [`Self::spawn`], and calls `prepare` in the child before the program is executed. If it fails, the child prints why, and ends
    /// with status 126.
    ///
    /// # Errors
    /// Those of [`Self::spawn`].
    ///
    /// # Safety
    /// `prepare` runs between fork and exec, in a process in which no other thread is left: it does not wait for what another thread
    /// would have to do, as for a lock.
    pub unsafe fn spawn_prepared(
        &self,
        name: &OsStr,
        arguments: &[OsString],
        prepare: impl FnOnce() -> io::Result<()>,
    ) -> Result<Child> {
        let found = program::find(name, &|path| self.seen(path, std::process::id()))?;
        // SAFETY: the child does nothing but prepare, as the caller promises, and execute the program.
        let pid = unsafe { libc::fork() };
        match pid {
            -1 => Err(Error::system("make a process for the program")),
            0 => {
                let error = match prepare() {
                    Ok(()) => self.become_program(&found, name, arguments),
                    Err(source) => Error::NotExecutable { program: found, source },
                };
                eprintln!("orrery: {}", error.with_causes());
                // SAFETY: ends the child; the exit handlers are its parent's.
                unsafe { libc::_exit(error.exit_status().into()) }
            }
            pid => Ok(Child { pid }),
        }
    }

    /// Returns what was counted so far, of all tracees.
    pub fn counts(&self) -> Counts {
        Counts::of(&self.segment.users())
    }

    /// Single calls, as rules of the policy ask for them. One reader at a time, from before the program starts.
    pub fn events(&self) -> Events {
        Events::new(Arc::clone(&self.segment))
    }

    /// Returns what another process of the same user can read the events by: see [`Events::attach`].
    pub fn journal(&self) -> i32 {
        self.segment.first().journal_id()
    }

    /// Returns how often each rule of the policy fitted a call, and how often it acted: nothing for rules whose handlers decide about
    /// every call that fits.
    pub fn rule_hits(&self) -> Vec<(u64, u64)> {
        let users = self.segment.users();
        let of = |index: usize| {
            let rows = users.iter().filter_map(|user| user.page().rules.get(index));
            let add = |sum: u64, more: &AtomicU64| sum.saturating_add(more.load(Relaxed));
            rows.fold((0, 0), |(hits, acts), row| (add(hits, &row.hits), add(acts, &row.acts)))
        };
        (0..self.segment.first().page().rules.len()).map(of).collect()
    }

    /// Returns how many calls were refused because a handler of the policy has failed.
    pub fn handler_failures(&self) -> u64 {
        let users = self.segment.users();
        let rules = users.iter().flat_map(|user| &user.page().rules);
        rules.fold(0, |sum, row| sum.saturating_add(row.failures.load(Relaxed)))
    }

    /// Returns where the kernel has what a program sees at a path, by the descriptors of a process that holds the
    /// mounts.
    fn seen(&self, path: &Path, holder: u32) -> PathBuf {
        let whole = archive::joined(&env::current_dir().unwrap_or_default(), path);
        let mounted = self.mounted.get().map(|mounted| &**mounted).unwrap_or_default();
        let within = mounted.iter().find_map(|mounted| Some((mounted, mounted.rest(&whole)?)));
        match within {
            Some((mounted, rest)) => mounted.path(holder).join(rest),
            None => path.to_owned(),
        }
    }

    fn become_program(&self, found: &Path, name: &OsStr, arguments: &[OsString]) -> Error {
        let refused = |source| Error::NotExecutable { program: found.to_owned(), source };
        let text = |text: &OsStr| CString::new(text.as_bytes()).map_err(|error| refused(error.into()));
        let prepared = (|| {
            let supervisor = self.wait_for_supervisor();
            let seen = |path: &Path| self.seen(path, supervisor);
            // The kernel would look for the interpreter where there is none, and pass it a path that it does not know.
            let script = program::script(&seen(found));
            let script = script
                .filter(|(interpreter, _)| [found, interpreter].iter().any(|path| seen(path) != **path));
            let (path, first) = match &script {
                Some((interpreter, argument)) => {
                    let own = [Some(interpreter.as_os_str()), argument.as_deref(), Some(found.as_os_str())];
                    (seen(interpreter), own.into_iter().flatten().collect())
                }
                None => (seen(found), vec![name]),
            };
            let all = first.into_iter().chain(arguments.iter().map(OsString::as_os_str));
            let all: Result<Vec<CString>> = all.map(text).collect();
            Ok((text(path.as_os_str())?, all?))
        })();
        let (path, all) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return error,
        };
        let mut pointers: Vec<*const c_char> = all.iter().map(|argument| argument.as_ptr()).collect();
        pointers.push(ptr::null());
        let mask = block_signals();
        let answer = self.request_tracing(mask);
        let error = match answer {
            Some(YES) => {
                // SAFETY: the lists end with null; `environ` is this process's own.
                unsafe {
                    libc::execv(path.as_ptr(), pointers.as_ptr());
                }
                let source = io::Error::last_os_error();
                cancel_tracing();
                refused(source)
            }
            Some(reason) => {
                let index = usize::try_from(reason).unwrap_or(0).wrapping_sub(1);
                let reason = Unfollowed::ALL.get(index).copied().unwrap_or(Unfollowed::Deserted);
                Error::Unfollowed(reason.reason())
            }
            None => Error::Unfollowed(Unfollowed::Deserted.reason()),
        };
        set_mask(mask);
        error
    }

    /// The supervisor's process number, when it has begun.
    fn wait_for_supervisor(&self) -> u32 {
        let page = self.segment.first().page();
        let mut waits = 0;
        while page.supervisor.load(Acquire) == 0 && !request_slots::supervisor_is_gone(&page.requests, waits)
        {
            Futex.wait(&page.supervisor, 0);
            waits += 1;
        }
        page.supervisor.load(Acquire)
    }

    /// Has the supervisor trace this thread, as an executive would.
    fn request_tracing(&self, mask: u64) -> Option<u32> {
        // SAFETY: says who may trace this process, where only parents may; asks for a number.
        let thread = unsafe {
            libc::prctl(PR_SET_PTRACER, u64::from(self.wait_for_supervisor()), 0, 0, 0);
            u32::try_from(libc::syscall(libc::SYS_gettid)).unwrap_or(0)
        };
        let ignored = ignores_forced();
        let nonce = u64::from(thread) << 32 ^ (&raw const mask).addr() as u64;
        let answer =
            request_slots::submit(&self.segment.first().page().requests, EXEC, thread, &Futex, |request| {
                request.mask.store(mask, Relaxed);
                request.ignores_forced.store(u32::from(ignored), Relaxed);
                request.nonce.store(nonce, Relaxed);
                request.nonce_address.store((&raw const nonce).expose_provenance() as u64, Relaxed);
            });
        std::hint::black_box(&nonce);
        answer
    }
}

/// A program that was started.
#[derive(Debug)]
pub struct Child {
    pid: libc::pid_t,
}

impl Child {
    /// Returns the PID of the program.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Waits for it to end: its wait status.
    ///
    /// # Errors
    /// Where another thread has waited for it.
    pub fn wait(self) -> Result<std::process::ExitStatus> {
        let pid = rustix::process::Pid::from_raw(self.pid);
        let ended = rustix::io::retry_on_intr(|| {
            rustix::process::waitpid(pid, rustix::process::WaitOptions::empty())
        });
        match ended {
            Ok(Some((_, status))) => Ok(std::os::unix::process::ExitStatusExt::from_raw(status.as_raw())),
            Ok(None) => Err(Error::System {
                operation: "wait for the program",
                source: io::Error::from_raw_os_error(libc::ECHILD),
            }),
            Err(error) => Err(Error::System { operation: "wait for the program", source: error.into() }),
        }
    }
}

fn check_this_process() -> Result<()> {
    const PR_SET_SYSCALL_USER_DISPATCH: i32 = 59;
    // SAFETY: turns off what is not on; a kernel without dispatch, or an executive under this process, refuses.
    if unsafe { libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, 0, 0, 0, 0) } != 0 {
        return Err(Error::Facility {
            facility: "syscall user dispatch",
            cause: io::Error::last_os_error(),
            way_out: "it needs a kernel with CONFIG_GENERIC_ENTRY from 5.11 on, and a process that has no executive yet",
        });
    }
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    match tracer.and_then(|tracer| tracer.trim().parse().ok()).unwrap_or(0) {
        0 => Ok(()),
        tracer => Err(Error::Traced(tracer)),
    }
}

const SIG_SETMASK: i32 = 2;
const SIGSYS_BIT: u64 = 1 << (libc::SIGSYS - 1);

/// Blocks all signals but SIGSYS; gives the mask before. By the kernel's own interface: the C library would leave out
/// the signals that are its own.
fn block_signals() -> u64 {
    let (all, mut before) = (!SIGSYS_BIT, 0_u64);
    // SAFETY: both are sets of eight bytes.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, SIG_SETMASK, &raw const all, &raw mut before, 8) };
    before
}

/// Returns whether a signal is ignored here, and so will be in the program, that the kernel may force on it meanwhile.
fn ignores_forced() -> bool {
    // SAFETY: zeros are a valid `sigaction`, into which the kernel writes.
    [libc::SIGTRAP, libc::SIGSEGV].into_iter().any(|signal| unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, ptr::null(), &raw mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    })
}

fn set_mask(mask: u64) {
    // SAFETY: the set has eight bytes.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, SIG_SETMASK, &raw const mask, 0, 8) };
}

/// Notifies the supervisor that the program could not be executed: it suppresses the signal.
fn cancel_tracing() {
    let mut info = [0_u32; 32];
    info[0] = libc::SIGSYS.cast_unsigned();
    info[2] = libc::SI_QUEUE.cast_unsigned();
    let value = EXEC_FAILED.to_ne_bytes();
    for (index, half) in value.chunks_exact(4).enumerate() {
        info[6 + index] = half.try_into().map_or(0, u32::from_ne_bytes);
    }
    // SAFETY: a signal to this thread; the structure is as large as the kernel's.
    unsafe {
        let thread = libc::syscall(libc::SYS_gettid);
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, libc::getpid(), thread, libc::SIGSYS, &raw const info);
    }
}
