//! `make bench B=hijack-call`: what a system call costs under an executive, and under what else could be put under it.
//!
//! Each contender makes the calls in a process of its own, through the C library's functions, bound to the same CPU. Where
//! another process or thread has its say, that is bound there, too: a partner that has to be woken elsewhere is dearer.
//!
//! What calls cost *in addition* is measured by two processes in turn, one of them without anything: the case `added` is the
//! difference.

use std::ffi::{OsString, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use orrery_bench::rival::{dispatch, notify, page_zero};
use orrery_bench::{
    Bench, Case, CommandLine, Contender, Entry, Group, Part, Pin, Quantity, Sample, Unit, Worker, batched,
    machine, serve,
};
use orrery_hijack::{Hijack, Policy};

const PATCHED: &str = "executive";
const COUNTED: &str = "executive, counted";
const TIMED: &str = "executive, timed";
/// A site's calls before it is rewritten; here, it never is.
const FIRST: &str = "executive, first calls";
const NATIVE: &str = "native";
const POLICY: &str = "executive, path policy";
const REMEMBERED: &str = "executive, remembered";
const PTRACE: &str = "ptrace (SYSCALL)";
const EMULATED: &str = "ptrace (SYSEMU)";
const PAGE_ZERO: &str = "page zero";
const NOTIFY: &str = "seccomp notify";
const STRACE: &str = "strace -c";
const PRELOAD: &str = "LD_PRELOAD";
/// What executives stand on: a thread whose calls could be dispatched, and are not; and a handler that does nothing else.
const ARMED: &str = "dispatch, armed only";
const BARE: &str = "dispatch, bare handler";

/// A rule that is asked about each call that takes a path, and fits none.
const RULES: &str = "[[rule]]\ncall = '%file'\npath = '/nowhere/**'\ndeny = 'EACCES'\n";
/// Answers that executives give themselves.
const ANSWERS: &str = "[services]\nremember = ['process', 'user']\n";
/// What a library that is loaded before the C library does to see its calls.
const SHIM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <unistd.h>
long calls;
#define NEXT(name) static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name); calls++
pid_t getppid(void) { NEXT(getppid); return next(); }
ssize_t read(int fd, void *to, size_t size) { NEXT(read); return next(fd, to, size); }
ssize_t write(int fd, const void *from, size_t size) { NEXT(write); return next(fd, from, size); }
int close(int fd) { NEXT(close); return next(fd); }
int open(const char *path, int flags, ...) {
    NEXT(open);
    va_list list;
    va_start(list, flags);
    int mode = va_arg(list, int);
    va_end(list);
    return next(path, flags, mode);
}
"#;

const CASES: [&str; 4] = ["getppid", "write", "read", "open and close"];

fn main() -> Result<ExitCode> {
    let about = "System calls under an executive beside their rivals";
    let CommandLine { options, part } = CommandLine::read(about);
    if let Some(part) = part {
        return contender(&part.name, part.pin);
    }
    let pin = options.pin_or(Pin::Cpu(machine::last_cpu()?));
    let mut bench = Bench::new("hijack-call", options);
    let mut group = Group::new("call", entry(PATCHED, pin));
    let rivals =
        [NATIVE, COUNTED, TIMED, POLICY, FIRST, PRELOAD, PAGE_ZERO, NOTIFY, PTRACE, EMULATED, STRACE];
    for way in rivals {
        group = group.against(entry(way, pin));
    }
    for case in CASES {
        group = group.case(Case::new(case).quantity(case, Quantity::Mean(Unit::Nanoseconds)).quick(true));
    }
    bench.group(group);
    // Of each call that takes a path, the rules want to know which.
    let mut ruled = Group::new("path rules", entry(POLICY, pin)).against(entry(NATIVE, pin));
    for case in ["open and close", "stat", "stat, relative", "fstat"] {
        let name = format!("{case}, path policy");
        ruled = ruled.case(Case::new(case).quantity(name, Quantity::Mean(Unit::Nanoseconds)).quick(true));
    }
    bench.group(ruled);
    let mut remembered = Group::new("remembered", entry(REMEMBERED, pin)).against(entry(NATIVE, pin));
    for case in ["getpid", "geteuid"] {
        let name = format!("{case}, remembered");
        remembered =
            remembered.case(Case::new(case).quantity(name, Quantity::Mean(Unit::Nanoseconds)).quick(true));
    }
    bench.group(remembered);
    let added = |name: &'static str, ours: &'static str, rivals: &[&'static str]| {
        let quantity = Quantity::Mean(Unit::Nanoseconds);
        let case = Case::new("getppid").quantity(name, quantity).quick(true);
        let group = Group::new(name, added_entry(ours, pin)).case(case);
        rivals.iter().fold(group, |group, way| group.against(added_entry(way, pin)))
    };
    bench.group(added("added to getppid", PATCHED, &[COUNTED, ARMED, PAGE_ZERO, PTRACE, EMULATED]));
    bench.group(added("added to getppid, counted and timed", TIMED, &[STRACE]));
    let first = Case::new("getppid").quantity("first calls", Quantity::Mean(Unit::Nanoseconds)).quick(true);
    let group = Group::new("first calls", entry(FIRST, pin)).against(entry(NATIVE, pin));
    bench.group(group.against(entry(BARE, pin)).case(first));
    bench.run()
}

/// What a way costs in addition.
struct Added {
    with: Worker,
    without: Worker,
}

impl Contender for Added {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        // In pieces: both are to meet the same moments.
        const PIECES: u32 = 8;
        let piece = iterations.div_ceil(PIECES);
        let (mut with, mut without) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..PIECES {
            with += self.with.measure(work, piece)?.elapsed;
            without += self.without.measure(work, piece)?.elapsed;
        }
        // What cannot be told from nothing counts as a nanosecond.
        let least = Duration::from_nanos(u64::from(piece * PIECES));
        let elapsed = with.saturating_sub(without).max(least);
        Ok(Sample { iterations: piece * PIECES, elapsed, latencies: Vec::new() })
    }
}

fn added_entry(way: &'static str, pin: Pin) -> Entry {
    Entry::new(way, move || {
        Ok(Added { with: Part::new(way, pin).start()?, without: Part::new(NATIVE, pin).start()? })
    })
}

fn entry(way: &'static str, pin: Pin) -> Entry {
    Part::new(way, pin).entry()
}

/// Puts what is to be measured under this program, which then serves as if it was native.
fn contender(way: &str, pin: Pin) -> Result<ExitCode> {
    let own = std::env::current_exe()?;
    let natively = Part::new(NATIVE, pin).arguments();
    let options = orrery_hijack::Options::default();
    let options = match way {
        NATIVE => return Ok(inside(pin)),
        PTRACE => return traced(pin, false),
        EMULATED => return traced(pin, true),
        PAGE_ZERO => return with_page_zero(pin),
        NOTIFY => return notified(pin),
        ARMED => return dispatched(pin, dispatch::arm_for_nothing),
        BARE => return dispatched(pin, dispatch::handle_barely),
        STRACE => {
            let mut strace = Command::new("strace");
            strace.args(["-c", "-f", "-qq", "-o", "/dev/null"]).arg(own).args(natively);
            bail!("execute strace: {}", strace.exec());
        }
        PRELOAD => return preloaded(pin),
        POLICY => options.counted(false).policy(Policy::parse(RULES, "built in")?),
        REMEMBERED => options.counted(false).policy(Policy::parse(ANSWERS, "built in")?),
        PATCHED => options.counted(false),
        COUNTED => options,
        TIMED => options.timed(true),
        FIRST => options.counted(false).threshold(u32::MAX),
        other => bail!("there is no contender {other:?}"),
    };
    let words: Vec<OsString> = natively.into_iter().map(OsString::from).collect();
    Err(Hijack::start(options)?.execute(own.as_os_str(), &words).into())
}

fn inside(pin: Pin) -> ExitCode {
    serve(|| {
        pin.bind()?;
        // SAFETY: opens files that every system has.
        let (zero, null) = unsafe {
            (
                libc::open(c"/dev/zero".as_ptr(), libc::O_RDONLY),
                libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY),
            )
        };
        ensure!(zero >= 0 && null >= 0, "open /dev/zero and /dev/null: {}", io::Error::last_os_error());
        Ok(Box::new(batched(move |work| call(work, zero, null))))
    })
}

fn call(work: &str, zero: c_int, null: c_int) -> Result<()> {
    let mut byte = 0_u8;
    let place: *mut c_void = (&raw mut byte).cast();
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: one byte is read or written; what is opened is closed; a status has room for a status.
    let result = unsafe {
        match work {
            "getppid" => isize::from(libc::getppid() != 0),
            "read" => libc::read(zero, place, 1),
            "write" => libc::write(null, place, 1),
            "open and close" => {
                let file = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY);
                isize::from(libc::close(file) == 0)
            }
            "getpid" => isize::from(libc::getpid() != 0),
            "geteuid" => isize::from(libc::geteuid() != libc::uid_t::MAX),
            "stat" => isize::from(libc::stat(c"/dev/null".as_ptr(), status.as_mut_ptr()) == 0),
            "stat, relative" => isize::from(libc::stat(c".".as_ptr(), status.as_mut_ptr()) == 0),
            "fstat" => isize::from(libc::fstat(zero, status.as_mut_ptr()) == 0),
            other => bail!("there is no call {other:?}"),
        }
    };
    ensure!(result == 1, "{work}: {}", io::Error::last_os_error());
    Ok(())
}

/// Serves with a library before the C library.
fn preloaded(pin: Pin) -> Result<ExitCode> {
    let directory = tempfile::tempdir()?;
    let (source, library) = (directory.path().join("shim.c"), directory.path().join("shim.so"));
    std::fs::write(&source, SHIM)?;
    let mut compiler = Command::new("cc");
    let compiled =
        compiler.args(["-O2", "-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&source).status()?;
    ensure!(compiled.success(), "the library to preload could not be compiled");
    let mut inside = Command::new(std::env::current_exe()?);
    let status = inside.args(Part::new(NATIVE, pin).arguments()).env("LD_PRELOAD", &library).status()?;
    Ok(ExitCode::from(u8::try_from(status.code().unwrap_or(1))?))
}

/// Serves with a filter that has another thread decide about each call, which says yes.
fn notified(pin: Pin) -> Result<ExitCode> {
    pin.bind()?;
    let calls = [libc::SYS_getppid, libc::SYS_read, libc::SYS_write, libc::SYS_openat, libc::SYS_close];
    notify::supervise_this_thread(&calls)?;
    Ok(inside(pin))
}

/// Serves with calls that the kernel dispatches, or looks whether it is to.
fn dispatched(pin: Pin, arm: fn() -> Result<()>) -> Result<ExitCode> {
    pin.bind()?;
    Ok(match arm() {
        Ok(()) => inside(pin),
        Err(error) => serve(|| Err(error)),
    })
}

/// Serves with the C library's functions rewritten to calls into page zero.
fn with_page_zero(pin: Pin) -> Result<ExitCode> {
    let functions = [
        libc::getppid as *const u8,
        libc::read as *const u8,
        libc::write as *const u8,
        libc::open as *const u8,
        libc::close as *const u8,
    ];
    let installed = page_zero::install(&functions);
    Ok(match installed {
        Ok(()) => inside(pin),
        Err(error) => serve(|| Err(error)),
    })
}

/// Serves in a child whose calls this process stops and lets go on: twice each, or, where it answers `getppid` itself, once.
fn traced(pin: Pin, emulated: bool) -> Result<ExitCode> {
    // SAFETY: the child traces itself to its parent, then serves; the parent only waits and continues.
    unsafe {
        let child = libc::fork();
        ensure!(child >= 0, "fork: {}", io::Error::last_os_error());
        if child == 0 {
            libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
            libc::raise(libc::SIGSTOP);
            return Ok(inside(pin));
        }
        // A partner that has to be woken belongs on the same CPU.
        pin.bind()?;
        let mut status = 0;
        loop {
            ensure!(
                libc::waitpid(child, &raw mut status, 0) == child,
                "wait: {}",
                io::Error::last_os_error()
            );
            if libc::WIFEXITED(status) {
                return Ok(ExitCode::from(u8::try_from(libc::WEXITSTATUS(status))?));
            }
            ensure!(libc::WIFSTOPPED(status), "the traced process died: status {status:#x}");
            if emulated {
                emulate(child)?;
            } else {
                libc::ptrace(libc::PTRACE_SYSCALL, child, 0, 0);
            }
        }
    }
}

/// Answers a `getppid` that the kernel has left out; has other calls performed. Lets the child go on to its next call.
unsafe fn emulate(child: libc::pid_t) -> Result<()> {
    const CALL: u64 = 2;
    // SAFETY: the child is stopped and traced by this thread; the registers are as large as the kernel's.
    unsafe {
        let mut registers: libc::user_regs_struct = std::mem::zeroed();
        libc::ptrace(libc::PTRACE_GETREGS, child, 0, &raw mut registers);
        if registers.orig_rax == libc::SYS_getppid.cast_unsigned() {
            registers.rax = u64::from(std::process::id());
            libc::ptrace(libc::PTRACE_SETREGS, child, 0, &raw const registers);
        } else if registers.orig_rax.cast_signed() >= 0 {
            // Once more, with the kernel: it stops at the end of what it left out, then at the beginning and the end of this.
            registers.rip -= CALL;
            registers.rax = registers.orig_rax;
            registers.orig_rax = u64::MAX;
            libc::ptrace(libc::PTRACE_SETREGS, child, 0, &raw const registers);
            let mut status = 0;
            for _ in 0..3 {
                libc::ptrace(libc::PTRACE_SYSCALL, child, 0, 0);
                ensure!(
                    libc::waitpid(child, &raw mut status, 0) == child,
                    "wait: {}",
                    io::Error::last_os_error()
                );
                if !libc::WIFSTOPPED(status) {
                    std::process::exit(libc::WEXITSTATUS(status));
                }
            }
        }
        libc::ptrace(libc::PTRACE_SYSEMU, child, 0, 0);
    }
    Ok(())
}
