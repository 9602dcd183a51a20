//! `make bench B=hijack-event`: how long it takes from an event to its handler, with and without other processes on the CPUs.
//!
//! Ours: the handler is the manager's. The event is a message at a connection (`emit`), or a system call of a tracee that its policy
//! logs, which reaches the manager through the executive's journal (`system call`). The manager stamps an event when it hands it to handlers.
//! `upcall` ends later: the message is an event of an extension, which emits it to the program that sent it, whose registered function runs.
//! `upcall, share` is the same for a program with guaranteed CPU time.
//! Rivals: a signal handler of another process, a thread that is woken by a futex, and a tracer that is woken by a ptrace stop.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use orrery_bench::{Bench, Case, Contender, Group, Quantity, Sample, Unit, serve};
use orrery_hijack::{Hijack, Policy};
use orrery_manager::client::{Client, SOCKET_VARIABLE};
use orrery_manager::experiment::Spinner;
use orrery_manager::join::{Joining, join};
use orrery_manager::protocol::{Reply, Request};
use orrery_manager::time::now;
use orrery_manager::{PrivateManager, Topic, load};

/// The argument with which this program serves under an executive.
const INSIDE: &str = "inside";
/// The same, where upcalls come from an extension.
const CALLED: &str = "called";
const EMIT: &str = "manager, emit";
const CALL: &str = "manager, system call";
const UPCALL: &str = "manager, extension, upcall";
const SHARED: &str = "manager, extension, upcall, --cpu 10ms/50ms";
const SIGNAL: &str = "signal handler";
const THREAD: &str = "woken thread";
const PTRACE: &str = "ptrace stop";

/// Names processes that are hogs while they are not stopped: none of what has a share.
const HOGS: &str = "ORRERY_BENCH_HOGS";

/// Events come after pauses, in which who waits for them sleeps.
const PAUSE: Duration = Duration::from_millis(1);
/// Of an extension's reservation.
const PERIOD: Duration = Duration::from_millis(10);
const CASES: [(&str, usize, bool); 4] =
    [("alone", 0, true), ("1 hog", 1, false), ("2 hogs", 2, false), ("4 hogs", 4, true)];

fn main() -> Result<ExitCode> {
    if std::env::args().nth(1).is_some_and(|argument| argument == INSIDE) {
        return serve(|| Ok(Source { way: Way::Call(listen(Topic::Call)?), hogs: Vec::new() }))
            .map(|()| ExitCode::SUCCESS);
    }
    if std::env::args().nth(1).is_some_and(|argument| argument == CALLED) {
        return serve(|| Ok(Source { way: Way::Upcall(register()?), hogs: Vec::new() }))
            .map(|()| ExitCode::SUCCESS);
    }
    let mut bench = Bench::new("hijack-event", "From an event to its handler");
    let entry = |way| bench.program(way, || contender(way));
    let (emit, call, upcall, shared) = (entry(EMIT), entry(CALL), entry(UPCALL), entry(SHARED));
    let rivals = [SIGNAL, THREAD, PTRACE].map(entry);
    let others = [SIGNAL, THREAD, PTRACE].map(entry);
    let third = [SIGNAL, THREAD, PTRACE].map(entry);
    let fourth = [SIGNAL, THREAD, PTRACE].map(entry);
    let cases = |prefix: &'static str| {
        CASES.map(|(name, _, quick)| {
            [50.0, 99.0].into_iter().fold(Case::new(name).quick(quick), |case, percent| {
                case.quantity(
                    format!("{prefix}, {name}, p{percent}"),
                    Quantity::Percentile(percent, Unit::Microseconds),
                )
            })
        })
    };
    bench.group(Group::new("emit", emit, rivals).cases(cases("emit")));
    bench.group(Group::new("system call", call, others).cases(cases("system call")));
    bench.group(Group::new("upcall", upcall, third).cases(cases("upcall")));
    bench.group(Group::new("upcall, share", shared, fourth).cases(cases("upcall, share")));
    bench.run()
}

fn contender(way: &'static str) -> Result<()> {
    match way {
        EMIT => {
            let manager = PrivateManager::start(&["--budget", "900ms"])?;
            serve(|| {
                let client = Client::connect(&manager.socket())?;
                let way = Way::Emit(client, listen_at(&manager, Topic::Custom)?);
                Ok(Source { way, hogs: Vec::new() })
            })
        }
        CALL => call_contender(),
        UPCALL => upcall_contender(&[]),
        SHARED => upcall_contender(&[("cpu.target", "10ms"), ("cpu.period", "50ms")]),
        SIGNAL => serve(|| Ok(Source { way: Way::Signal(Signalled::start()?), hogs: Vec::new() })),
        THREAD => serve(|| Ok(Source { way: Way::Thread(Woken::start()), hogs: Vec::new() })),
        _ => serve(|| Ok(Source { way: Way::Ptrace(Traced::start()?), hogs: Vec::new() })),
    }
}

/// Becomes a tracee whose calls of `getppid` the manager has.
fn call_contender() -> Result<()> {
    let manager = PrivateManager::start(&["--budget", "900ms"])?;
    let call = u32::try_from(libc::SYS_getppid)?;
    let policy = Policy::telling(vec![call], false);
    let hijack = Hijack::start(orrery_hijack::Options::default().policy(policy))?;
    let joining = Joining {
        socket: Some(manager.socket()),
        name: "bench".to_owned(),
        values: Vec::new(),
        journal: Some(hijack.journal()),
    };
    let _joined = join(&joining, std::process::id().cast_signed())?;
    // SAFETY: this process has one thread, so nobody reads the environment meanwhile.
    unsafe { std::env::set_var(SOCKET_VARIABLE, manager.socket()) };
    let program = std::env::current_exe()?;
    let child = hijack.spawn(program.as_os_str(), &[INSIDE.into()])?;
    let status = child.wait()?;
    ensure!(status.success(), "the tracee failed: {status}");
    Ok(())
}

/// An extension that makes an upcall of each event.
const FORWARDS: &str = r#"(module
    (import "orrery" "subscribe" (func $subscribe (param i32 i64) (result i32)))
    (import "orrery" "emit" (func $emit (param i32 i32 i32) (result i32)))
    (import "handle" "custom" (func $custom (result i32)))
    (import "handle" "notify" (func $notify (result i32)))
    (memory (export "memory") 1)
    (func (export "start") (drop (call $subscribe (call $custom) (i64.const 0))))
    (func (export "event") (param i32 i64 i64 i64)
        (drop (call $emit (call $notify) (i32.const 0) (i32.const 12)))))"#;
const MANIFEST: &str = "[extension]
name = 'forwards'
module = 'forwards.wasm'
fuel = 5_000
events = 64
[handle]
custom = { to = 'custom', rights = ['subscribe'] }
notify = { to = 'upcall', of = 'hijack-event', rights = ['emit'] }
";

/// Starts a tracee with these attributes whose events an extension makes upcalls of.
fn upcall_contender(attributes: &[(&str, &str)]) -> Result<()> {
    let manager = PrivateManager::start(&["--budget", "900ms"])?;
    // What the tracee starts would be a part of it, and use up its share.
    let hogs = (0..4).map(|_| Spinner::start(None)).collect::<Result<Vec<_>, _>>()?;
    hogs.iter().try_for_each(|hog| signal(hog.pid(), libc::SIGSTOP))?;
    let names: Vec<String> = hogs.iter().map(|hog| hog.pid().to_string()).collect();
    // SAFETY: this process has one thread, so nobody reads the environment meanwhile.
    unsafe { std::env::set_var(HOGS, names.join(" ")) };
    let directory = tempfile::tempdir()?;
    std::fs::write(directory.path().join("forwards.wasm"), wat::parse_str(FORWARDS)?)?;
    std::fs::write(directory.path().join("forwards.toml"), MANIFEST)?;
    // SAFETY: this process has one thread, so nobody reads the environment meanwhile.
    unsafe { std::env::set_var(SOCKET_VARIABLE, manager.socket()) };
    let hijack = Hijack::start(orrery_hijack::Options::default())?;
    let program = std::env::current_exe()?;
    let child = hijack.spawn(program.as_os_str(), &[CALLED.into()])?;
    let joining = Joining {
        socket: Some(manager.socket()),
        name: "bench".to_owned(),
        values: attributes.iter().map(|(class, value)| ((*class).to_owned(), (*value).to_owned())).collect(),
        journal: None,
    };
    let joined = join(&joining, child.pid())?;
    load(&joined.client, &directory.path().join("forwards.toml"))?;
    let status = child.wait()?;
    ensure!(status.success(), "the tracee failed: {status}");
    Ok(())
}

fn signal(process: i32, signal: libc::c_int) -> Result<()> {
    // SAFETY: the call takes numbers only.
    let sent = unsafe { libc::kill(process, signal) };
    ensure!(sent == 0, "kill: {}", std::io::Error::last_os_error());
    Ok(())
}

unsafe extern "C" fn called(_: i64, _: i64, _: *mut libc::c_void) {
    HANDLED.store(now(), SeqCst);
}

/// Registers a function for upcalls, as soon as this process has joined.
fn register() -> Result<Client> {
    loop {
        // SAFETY: the function reads the clock, and stores a number.
        match unsafe {
            orrery_upcall::register(&orrery_upcall::Options::default(), called, std::ptr::null_mut())
        } {
            Ok(()) => break,
            Err(orrery_upcall::UpcallError::Refused(_)) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => return Err(error.into()),
        }
    }
    // The extension may not be loaded yet.
    let client = Client::connect(&orrery_manager::client::default_socket())?;
    while HANDLED.load(SeqCst) == 0 {
        client.ask(&Request::Emit { tracee: None, number: 1, value: 0 })?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(client)
}

fn listen(topic: Topic) -> Result<Client> {
    let client = Client::connect(&orrery_manager::client::default_socket())?;
    client.ask(&Request::Subscribe { topics: vec![topic] })?;
    Ok(client)
}

fn listen_at(manager: &PrivateManager, topic: Topic) -> Result<Client> {
    let client = Client::connect(&manager.socket())?;
    client.ask(&Request::Subscribe { topics: vec![topic] })?;
    Ok(client)
}

struct Source {
    way: Way,
    hogs: Vec<Spinner>,
}

enum Way {
    Emit(Client, Client),
    Call(Client),
    Upcall(Client),
    Signal(Signalled),
    Thread(Woken),
    Ptrace(Traced),
}

impl Way {
    /// Causes one event; returns the nanoseconds until its handler.
    fn event(&mut self) -> Result<u64> {
        match self {
            Self::Emit(client, heard) => {
                let begin = now();
                client.ask(&Request::Emit { tracee: None, number: 1, value: 0 })?;
                Ok(stamp(heard)?.saturating_sub(begin))
            }
            Self::Call(heard) => {
                let begin = now();
                // SAFETY: the call takes nothing.
                unsafe { libc::getppid() };
                Ok(stamp(heard)?.saturating_sub(begin))
            }
            Self::Upcall(client) => {
                HANDLED.store(0, SeqCst);
                let begin = now();
                client.ask(&Request::Emit { tracee: None, number: 1, value: 0 })?;
                loop {
                    match HANDLED.load(SeqCst) {
                        0 => std::thread::sleep(Duration::from_micros(20)),
                        time => return Ok(time.saturating_sub(begin)),
                    }
                }
            }
            Self::Signal(other) => other.event(),
            Self::Thread(other) => other.event(),
            Self::Ptrace(other) => other.event(),
        }
    }
}

fn stamp(heard: &Client) -> Result<u64> {
    match heard.receive()?.0 {
        Reply::Event { event, .. } => Ok(event.time),
        _ => bail!("the manager sent no event"),
    }
}

impl Contender for Source {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let case = CASES.iter().find(|case| case.0 == work).context("no such case")?;
        // Until the executive has rewritten the call, which its supervisor has to look at once.
        for _ in 0..64 {
            self.way.event()?;
        }
        // Those events may have used up what the extension reserves for a period of 10 ms.
        std::thread::sleep(2 * PERIOD);
        let hogs = std::env::var(HOGS).unwrap_or_default();
        let outside = hogs.split_whitespace().map(str::parse).collect::<Result<Vec<i32>, _>>()?;
        outside.iter().take(case.1).try_for_each(|hog| signal(*hog, libc::SIGCONT))?;
        while outside.is_empty() && self.hogs.len() < case.1 {
            self.hogs.push(Spinner::start(None)?);
        }
        let mut latencies = Vec::new();
        for _ in 0..iterations {
            std::thread::sleep(PAUSE);
            latencies.push(Duration::from_nanos(self.way.event()?));
        }
        self.hogs.clear();
        outside.iter().try_for_each(|hog| signal(*hog, libc::SIGSTOP))?;
        Sample::of_latencies(latencies)
    }
}

/// A number that processes share.
struct Shared(*mut AtomicU64);

impl Shared {
    fn new() -> Result<Self> {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, of zeros, which is never unmapped.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, flags, -1, 0) };
        ensure!(at != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
        Ok(Self(at.cast()))
    }

    fn get(&self) -> &AtomicU64 {
        // SAFETY: mapped for as long as the process lives; zeros are a valid number.
        unsafe { &*self.0 }
    }

    fn wait(&self) -> u64 {
        loop {
            match self.get().swap(0, SeqCst) {
                0 => std::thread::sleep(Duration::from_micros(20)),
                time => return time,
            }
        }
    }
}

/// Where the signal handler writes to, or when the function for upcalls ran.
static HANDLED: AtomicU64 = AtomicU64::new(0);

extern "C" fn handler(_: libc::c_int) {
    let at = HANDLED.load(SeqCst);
    // SAFETY: the address of the shared number, set before the handler was installed.
    unsafe { &*std::ptr::with_exposed_provenance::<AtomicU64>(usize::try_from(at).unwrap_or(0)) }
        .store(now(), SeqCst);
}

/// Another process with a signal handler.
struct Signalled {
    pid: i32,
    shared: Shared,
}

impl Signalled {
    fn start() -> Result<Self> {
        let shared = Shared::new()?;
        HANDLED.store(shared.0.expose_provenance() as u64, SeqCst);
        // Before the fork, so that no signal comes too early.
        // SAFETY: the handler makes one system call and stores a number.
        unsafe {
            libc::signal(
                libc::SIGUSR1,
                handler as extern "C" fn(libc::c_int) as *const () as libc::sighandler_t,
            )
        };
        // SAFETY: the child only waits for signals.
        let pid = unsafe { libc::fork() };
        ensure!(pid >= 0, "fork: {}", std::io::Error::last_os_error());
        if pid == 0 {
            // SAFETY: prctl takes numbers, and only changes what happens to the child when its parent ends.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
                loop {
                    libc::pause();
                }
            }
        }
        Ok(Self { pid, shared })
    }

    fn event(&self) -> Result<u64> {
        let begin = now();
        // SAFETY: the call takes numbers only, and the process is a child that was not waited for.
        let sent = unsafe { libc::kill(self.pid, libc::SIGUSR1) };
        ensure!(sent == 0, "kill: {}", std::io::Error::last_os_error());
        Ok(self.shared.wait().saturating_sub(begin))
    }
}

/// A thread that sleeps until it is woken.
struct Woken {
    time: Arc<AtomicU64>,
    thread: std::thread::Thread,
}

impl Woken {
    fn start() -> Self {
        let time = Arc::new(AtomicU64::new(u64::MAX));
        let theirs = Arc::clone(&time);
        let thread = std::thread::spawn(move || {
            loop {
                std::thread::park();
                if theirs.load(SeqCst) == 0 {
                    theirs.store(now(), SeqCst);
                }
            }
        });
        Self { time, thread: thread.thread().clone() }
    }

    fn event(&self) -> Result<u64> {
        self.time.store(0, SeqCst);
        let begin = now();
        self.thread.unpark();
        loop {
            match self.time.load(SeqCst) {
                0 => std::thread::sleep(Duration::from_micros(20)),
                time => return Ok(time.saturating_sub(begin)),
            }
        }
    }
}

/// A tracee of ptrace, whose tracer this is.
struct Traced {
    pid: i32,
    shared: Shared,
}

impl Traced {
    fn start() -> Result<Self> {
        let shared = Shared::new()?;
        // SAFETY: the child makes system calls and stores numbers.
        let pid = unsafe { libc::fork() };
        ensure!(pid >= 0, "fork: {}", std::io::Error::last_os_error());
        if pid == 0 {
            // SAFETY: prctl takes numbers, and only changes what happens to the child when its parent ends.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
                libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
                libc::raise(libc::SIGSTOP);
                loop {
                    libc::usleep(1000);
                    shared.get().store(now(), SeqCst);
                    libc::raise(libc::SIGSTOP);
                }
            }
        }
        let traced = Self { pid, shared };
        traced.wait()?;
        Ok(traced)
    }

    fn wait(&self) -> Result<()> {
        let mut status = 0;
        // SAFETY: a child of this process; the status is written.
        let waited = unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
        ensure!(waited == self.pid && libc::WIFSTOPPED(status), "the tracee has ended");
        Ok(())
    }

    fn event(&self) -> Result<u64> {
        // SAFETY: the tracee is stopped, and goes on without the signal.
        unsafe { libc::ptrace(libc::PTRACE_CONT, self.pid, 0, 0) };
        self.wait()?;
        Ok(now().saturating_sub(self.shared.get().load(SeqCst)))
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        // SAFETY: the call takes numbers only, and the process is a child that was not waited for.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
    }
}
