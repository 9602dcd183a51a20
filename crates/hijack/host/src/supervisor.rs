//! The supervisor: a process beside the tracees that does what an executive cannot do itself.
//!
//! It puts executives under programs that tracees execute (it traces a thread from just before the `execve` until its
//! new program has its executive, and never else), and says which sites are safe to rewrite (a decoder has no place in
//! the path of a call). It belongs to no tracee: it is nobody's child but init's, has a session of its own and no
//! descriptor of the program's open. It ends when no tracee is left, which it knows from the number of those attached
//! to the pages. Each identity among the tracees has a page, and threads that serve it: what those of one user ask for
//! keeps others' waiting no longer.

mod liveness;
mod pid_namespaces;
mod stale_requests;
mod thread_pool;

use std::ffi::{c_int, c_uint};
use std::io::{self, PipeWriter, Read as _, Write as _};
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use orrery_hijack_image::request_slots::{
    ANSWERED, FutexOps, IN_SERVICE, PENDING, owner, release, state, tag,
};
use orrery_hijack_image::request_slots::{
    CODE, EXEC, EXEC_FAILED, Request, SITE, SITE_UNANSWERED, USER, YES,
};
use orrery_hijack_image::rewrite_plan::RewritePlan;
use orrery_hijack_image::shared_page::{SharedPage, Unfollowed, Verdict, Verdicts, code_hash};
use orrery_hijack_image::users::Identity;

use crate::error::{Error, Result};
use crate::futex::Futex;
use crate::identity;
use crate::image::Image;
use crate::inject::attach::attach;
use crate::inject::halt::Refusal;
use crate::inject::{Home, Settings, inject};
use crate::rewrite_window;
use crate::shared_segment::{SharedSegment, UserMemory};
use liveness::mark_alive;
use orrery_sys::process_memory;
use orrery_sys::ptrace::{Options, Stop, Tracee};
use stale_requests::StaleRequests;
use thread_pool::{ThreadPool, Work};

/// How often to look whether tracees are left.
const INTERVAL: Duration = Duration::from_millis(250);

/// Starts a supervisor for a shared page, which puts executives under these processes first. Returns when it is ready to be asked:
/// requests that come earlier wait. Returns why processes have no executive.
///
/// # Errors
/// Where no process could be made.
pub(crate) fn start(
    segment: &Arc<SharedSegment>,
    image: Arc<Image>,
    settings: Settings,
    running: &[libc::pid_t],
) -> Result<Vec<(libc::pid_t, String)>> {
    let (mut reports, report) =
        io::pipe().map_err(|source| Error::System { operation: "make a pipe", source })?;
    // SAFETY: the children run nothing of this process but what follows; see `Hijack::start` for threads.
    unsafe {
        let middle = libc::fork();
        if middle < 0 {
            return Err(Error::system("make a process for the supervisor"));
        }
        if middle == 0 {
            // The supervisor is to be nobody's child: programs wait for theirs.
            let supervisor = libc::fork();
            if supervisor != 0 {
                libc::_exit(c_int::from(supervisor < 0));
            }
            leave(&settings, report.as_raw_fd());
            Supervisor { segment: Arc::clone(segment), image, settings }.serve(running, report);
            libc::_exit(0);
        }
        drop(report);
        let mut status = 0;
        while libc::waitpid(middle, &raw mut status, 0) < 0 {
            if std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
                break;
            }
        }
        if status != 0 {
            return Err(Error::system("make a process for the supervisor"));
        }
    }
    if running.is_empty() {
        return Ok(Vec::new());
    }
    let mut text = String::new();
    reports
        .read_to_string(&mut text)
        .map_err(|source| Error::System { operation: "read what the supervisor reports", source })?;
    let of = |process: &libc::pid_t| {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{process} ")));
        // One that has ended has written nothing.
        (*process, line.unwrap_or("the supervisor has ended").to_owned())
    };
    Ok(running.iter().map(of).filter(|(_, reason)| reason != ATTACHED).collect())
}

/// What is reported of a process that has an executive.
const ATTACHED: &str = "attached";

/// Leaves everything behind that the program could notice us by, but what its mounts lead to, and the pipe for reports.
fn leave(settings: &Settings, report: c_int) {
    let mounted = settings.mounted.iter().map(|mounted| mounted.root.as_raw_fd());
    let mut kept: Vec<c_uint> =
        mounted.chain([report]).filter_map(|descriptor| descriptor.try_into().ok()).collect();
    kept.sort_unstable();
    let mut first = 0;
    // SAFETY: closes what this process inherited and does not use; the standard descriptors lead nowhere from here on.
    unsafe {
        for descriptor in kept {
            if descriptor > first {
                libc::syscall(libc::SYS_close_range, first, descriptor - 1, 0);
            }
            first = descriptor + 1;
        }
        libc::syscall(libc::SYS_close_range, first, c_uint::MAX, 0);
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, c"orrery-superv".as_ptr());
        for _ in 0..3 {
            libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        }
        // Before they are unblocked: one that has come already, as by ^C, ends it else.
        for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP, libc::SIGTERM, libc::SIGPIPE] {
            libc::signal(signal, libc::SIG_IGN);
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        let _root = libc::chdir(c"/".as_ptr());
    }
}

struct Supervisor {
    segment: Arc<SharedSegment>,
    image: Arc<Image>,
    settings: Settings,
}

impl Supervisor {
    fn serve(self, running: &[libc::pid_t], mut report: PipeWriter) {
        // It lives as long as its process.
        let supervisor: &'static Self = Box::leak(Box::new(self));
        let segment = &supervisor.segment;
        // A supervisor that does only a part of its work has others wait for ever. It aborts instead: those who wait
        // for a dead one notice.
        std::panic::set_hook(Box::new(|_| std::process::abort()));
        let own = identity::of_thread(std::process::id().cast_signed());
        segment.enter_first(&own.unwrap_or_else(|| std::process::abort()));
        let (ask, asked) = mpsc::channel::<NewUser>();
        thread::scope(|scope| {
            let serve = |user, memory: Arc<UserMemory>| {
                let page = memory.page();
                page.privileged.store(u32::from(may_trace_the_privileged()), Relaxed);
                live(&memory);
                page.supervisor.store(std::process::id(), Release);
                Futex.wake(&page.supervisor, u32::MAX);
                let service = UserService { supervisor, user, memory, new_users: ask.clone() };
                let pool: &'static ThreadPool<UserService> = Box::leak(Box::new(ThreadPool::new(service)));
                if !pool.spawn_worker(scope) {
                    std::process::abort();
                }
                (pool, StaleRequests::default())
            };
            let mut served: Vec<_> =
                segment.users().into_iter().enumerate().map(|(user, memory)| serve(user, memory)).collect();
            let find_or_add = |identity: &Identity, served: &mut Vec<_>| {
                segment.find(identity).or_else(|| {
                    let prepare = |user, memory: &Arc<UserMemory>| {
                        let reader = segment.first().journal().reader.load(Relaxed);
                        memory.journal().reader.store(reader, Relaxed);
                        served.push(serve(user, Arc::clone(memory)));
                    };
                    segment.add(identity, prepare).ok()
                })
            };
            for process in running {
                let user = identity::of_thread(*process).map(|identity| find_or_add(&identity, &mut served));
                let result = match user {
                    None => Err(Refusal::Absent),
                    Some(None) => Err(Refusal::Crowded),
                    Some(Some(user)) => supervisor.attach(*process, user),
                };
                let text = result.map_or_else(|refusal| refusal.to_string(), |()| ATTACHED.to_owned());
                let _unread = writeln!(report, "{process} {text}");
            }
            drop(report);
            loop {
                match asked.recv_timeout(INTERVAL) {
                    Ok(NewUser { identity, reply }) => {
                        let found = find_or_add(&identity, &mut served);
                        // The thread that has asked waits for it.
                        let _received = reply.send(found);
                    }
                    Err(_) => {
                        let unused = |(pool, _): &(&ThreadPool<UserService>, _)| {
                            pool.is_idle()
                                && pool.work().memory.attached().is_none_or(|attached| attached <= 1)
                        };
                        if served.iter().all(unused) {
                            break;
                        }
                        for (pool, stale) in &mut served {
                            stale.look(pool.work().memory.page());
                        }
                    }
                }
            }
            for (pool, _) in &served {
                pool.stop();
                ring(pool.work().memory.page());
            }
        });
    }
}

impl Supervisor {
    /// Puts an executive under a process that runs, which has the memory of this user.
    fn attach(&self, process: libc::pid_t, user: usize) -> std::result::Result<(), Refusal> {
        let Self { segment, image, settings } = self;
        let users = segment.users();
        let page = users.get(user).ok_or(Refusal::Crowded)?.page();
        let user_of = |thread| {
            let user = segment.find(&identity::of_thread(thread)?)?;
            Some((user, Arc::clone(users.get(user)?)))
        };
        let begin = || attach(process, image, &Home { segment, user, page, user_of: &user_of }, settings);
        // A thread of its own: the kernel lets what it traces go when it ends.
        let attached = thread::scope(|scope| scope.spawn(begin).join());
        attached.unwrap_or_else(|_| std::process::abort())
    }
}

/// Has a thread live as long as this process, so that tracees notice its death.
fn live(memory: &Arc<UserMemory>) {
    let (begun, begins) = mpsc::channel();
    let memory = Arc::clone(memory);
    let lives = move || {
        mark_alive(&memory.page().requests.supervisor_alive);
        let _begun = begun.send(());
        loop {
            thread::park();
        }
    };
    let started = thread::Builder::new().spawn(lives).is_ok();
    if !started || begins.recv().is_err() {
        std::process::abort();
    }
}

/// A tracee acts as a user that none did before.
struct NewUser {
    identity: Identity,
    /// Where to send which of the users that is; `None` where there cannot be one more.
    reply: mpsc::Sender<Option<usize>>,
}

/// Serves those who have one identity. What they ask for keeps no others waiting.
struct UserService {
    supervisor: &'static Supervisor,
    user: usize,
    memory: Arc<UserMemory>,
    new_users: mpsc::Sender<NewUser>,
}

impl UserService {
    /// Waits for a thread to execute a program, and puts an executive under that. Whether nothing is traced by this
    /// thread afterwards.
    fn follow(&self, asked: &Asked, request: &Request) -> bool {
        let mut tracee = match asked.trace() {
            Ok(tracee) => tracee,
            Err(reason) => {
                answer(request, asked.thread, reason as u32 + 1);
                return true;
            }
        };
        answer(request, asked.thread, YES);
        loop {
            match tracee.wait_over_exec() {
                Stop::Gone => return true,
                Stop::Exec => break,
                Stop::Group => tracee.listen(),
                Stop::Signal(libc::SIGSYS) if tracee.signal_value() == Some(EXEC_FAILED) => {
                    return tracee.detach();
                }
                Stop::Signal(signal) => tracee.resume(signal),
                Stop::Call | Stop::Other => tracee.resume(0),
            }
        }
        let Supervisor { segment, image, settings } = self.supervisor;
        let user_of = |thread| {
            let user = self.user_of(thread)?;
            Some((user, Arc::clone(segment.users().get(user)?)))
        };
        let home = Home { segment, user: self.user, page: self.memory.page(), user_of: &user_of };
        inject(tracee, (asked.mask, asked.forcible), image, &home, settings)
    }

    /// Returns which of the users a thread is.
    fn user_of(&self, thread: libc::pid_t) -> Option<usize> {
        let identity = identity::of_thread(thread)?;
        self.supervisor.segment.find(&identity).or_else(|| {
            let (reply, replied) = mpsc::channel();
            self.new_users.send(NewUser { identity, reply }).ok()?;
            replied.recv().ok()?
        })
    }
}

impl Work for UserService {
    /// The index of a request, and whose it is.
    type Task = (usize, u32);

    fn take(&self) -> Option<(usize, u32)> {
        let page = self.memory.page();
        let rung = page.requests.doorbell.load(Acquire);
        let take = |(index, request): (usize, &Request)| {
            let now = request.state.load(Acquire);
            let thread = owner(now);
            let taken = tag(now) == PENDING
                && request.state.compare_exchange(now, state(IN_SERVICE, thread), AcqRel, Relaxed).is_ok();
            taken.then_some((index, thread))
        };
        let found = page.requests.slots.iter().enumerate().find_map(take);
        if found.is_none() {
            Futex.wait(&page.requests.doorbell, rung);
        }
        found
    }

    fn perform(&self, (index, thread): (usize, u32)) -> bool {
        let Some(request) = self.memory.page().requests.slots.get(index) else { return true };
        match request.kind.load(Relaxed) {
            EXEC => return self.follow(&Asked::read(thread, request), request),
            USER => {
                let user = self.user_of(Asked::read(thread, request).number_here());
                let index = user.and_then(|user| u32::try_from(user).ok());
                answer(request, thread, index.map_or(0, |index| index + 1));
            }
            SITE => {
                let judged = judge(self.supervisor.segment.verdicts(), request);
                answer(request, thread, if judged { YES } else { 0 });
            }
            SITE_UNANSWERED => {
                judge(self.supervisor.segment.verdicts(), request);
                release(&self.memory.page().requests, request, state(IN_SERVICE, thread), &Futex);
            }
            _ => answer(request, thread, 0),
        }
        true
    }
}

/// What a request for [`EXEC`] says.
struct Asked {
    thread: u32,
    mask: u64,
    forcible: bool,
    nonce: u64,
    nonce_address: u64,
}

impl Asked {
    fn read(thread: u32, request: &Request) -> Self {
        Self {
            thread,
            mask: request.mask.load(Relaxed),
            forcible: request.ignores_forced.load(Relaxed) == 0,
            nonce: request.nonce.load(Relaxed),
            nonce_address: request.nonce_address.load(Relaxed),
        }
    }

    /// Returns whether this is the thread that asks; else, or where it cannot be looked at, not.
    ///
    /// # Errors
    /// The number of the error with which its memory could not be read.
    fn is_it(&self, thread: libc::pid_t) -> std::result::Result<bool, i32> {
        let mut found = [0; 8];
        match process_memory::read(thread, self.nonce_address, &mut found) {
            Ok(()) => Ok(u64::from_le_bytes(found) == self.nonce),
            Err(error) => Err(error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }

    /// The number that the thread has here. Where its memory cannot be looked at, what it says.
    fn number_here(&self) -> libc::pid_t {
        let number = i32::try_from(self.thread).unwrap_or(0);
        match self.is_it(number) {
            Ok(true) => number,
            _ => pid_namespaces::numbers_here(number)
                .find(|here| self.is_it(*here) == Ok(true))
                .unwrap_or(number),
        }
    }

    fn trace(&self) -> Result<Tracee, Unfollowed> {
        let number = i32::try_from(self.thread).unwrap_or(0);
        // In another PID namespace, the number is another process's here.
        let thread = match self.is_it(number) {
            Ok(true) => number,
            other => match pid_namespaces::numbers_here(number).find(|here| self.is_it(*here) == Ok(true)) {
                Some(here) => here,
                None if other == Err(libc::EPERM) => return Err(Unfollowed::Untraceable),
                None => return Err(Unfollowed::Namespace),
            },
        };
        Tracee::seize(thread, Options::TRACE_EXEC | Options::TRACE_SYSCALL_GOOD)
            .map_err(|_| Unfollowed::Untraceable)
    }
}

/// Returns whether tracing a program leaves it the privileges that it gains: where the tracer could have them anyway.
fn may_trace_the_privileged() -> bool {
    const CAP_SYS_PTRACE: u32 = 19;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|set| u64::from_str_radix(set.trim(), 16).ok())
        .is_some_and(|set| set >> CAP_SYS_PTRACE & 1 != 0)
}

/// Plans how to rewrite a site, and remembers it.
fn judge(verdicts: &Verdicts, request: &Request) -> bool {
    let words: [u64; CODE / 8] = std::array::from_fn(|index| request.code[index].load(Relaxed));
    let mut code = [0; CODE];
    for (bytes, word) in code.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    let plan = RewritePlan::encode(rewrite_window::plan(&code).as_ref());
    let hash = code_hash(&words);
    let free_or_its = |place: &&Verdict| {
        let same = || place.code.iter().zip(words).all(|(place, word)| place.load(Relaxed) == word);
        match place.hash.load(Relaxed) {
            0 => true,
            other => other == hash && same(),
        }
    };
    let Some(place) = verdicts.places(hash).find(free_or_its) else { return false };
    // One that is there already is the same.
    for (place, word) in place.plan.iter().zip(plan).chain(place.code.iter().zip(words)) {
        place.store(word, Relaxed);
    }
    place.hash.store(hash, Release);
    true
}

/// Answers who asked, if it still waits for that.
fn answer(request: &Request, thread: u32, answer: u32) {
    request.answer.store(answer, Relaxed);
    let answered = state(ANSWERED, thread);
    let _gone = request.state.compare_exchange(state(IN_SERVICE, thread), answered, Release, Relaxed);
    Futex.wake(&request.state, u32::MAX);
}

/// Wakes all threads that sleep until there is something to do.
fn ring(page: &SharedPage) {
    page.requests.doorbell.fetch_add(1, AcqRel);
    Futex.wake(&page.requests.doorbell, u32::MAX);
}
