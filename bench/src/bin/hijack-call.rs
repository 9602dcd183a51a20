//! `make bench B=hijack-call`: a system call under an executive, and under its alternatives.
//!
//! Each contender makes the calls in a process of its own, through the C library's functions, bound to the same CPU. Where
//! another process or thread decides, that is bound there, too: a partner that has to be woken elsewhere is more expensive.
//!
//! The *additional* cost of a call is measured by two processes in turn, one of them native: the case `added` is the
//! difference.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use orrery_bench::rival::{dispatch, notify, page_zero};
use orrery_bench::{Bench, Case, Contender, Entry, Group, Pin, Sample, Unit, batched, serve};
use orrery_hijack::{Hijack, Policy};

/// The argument with which this program serves in a process that something else was put under.
const INSIDE: &str = "inside";
const PATCHED: &str = "executive";
const COUNTED: &str = "executive, counted";
const TIMED: &str = "executive, timed";
/// The calls of a site before it is rewritten; here, it never is.
const FIRST: &str = "executive, first calls";
const NATIVE: &str = "native";
const POLICY: &str = "executive, path policy";
const REMEMBERED: &str = "executive, remembered";
/// A handler that compares an argument, and lets the call pass.
const HANDLER: &str = "executive, handler";
/// The same handler, which copies eight bytes that an argument points to.
const COPYING: &str = "executive, copying handler";
/// A filter of the kernel's that compares an argument.
const FILTER: &str = "seccomp-bpf";
const PTRACE: &str = "ptrace (SYSCALL)";
const EMULATED: &str = "ptrace (SYSEMU)";
const PAGE_ZERO: &str = "page zero";
const NOTIFY: &str = "seccomp notify";
const STRACE: &str = "strace -c";
const PRELOAD: &str = "LD_PRELOAD";
/// The mechanism below executives: a thread whose calls could be dispatched, and are not; and a handler that does nothing else.
const ARMED: &str = "dispatch, armed only";
const BARE: &str = "dispatch, bare handler";

/// A rule that is checked for each call that takes a path, and matches none.
const RULES: &str = "[[rule]]\ncall = '%file'\npath = '/nowhere/**'\ndeny = 'EACCES'\n";
/// Calls that the executive answers by itself.
const ANSWERS: &str = "[services]\nremember = ['process', 'user']\n";
/// What decides about `getppid`, and about `write`.
const COMPARES: &str = r#"(module (import "orrery" "argument" (func $argument (param i32) (result i64)))
    (func (export "decide") (param i32) (result i32)
        (if (result i32) (i64.eq (call $argument (i32.const 0)) (i64.const 0x7ead)) (then (i32.const -1)) (else (i32.const 0)))))"#;
const COPIES: &str = r#"(module (import "orrery" "copy_from" (func $copy (param i32 i32 i32 i32) (result i32))) (memory 1)
    (func (export "decide") (param i32) (result i32)
        (drop (call $copy (i32.const 1) (i32.const 0) (i32.const 64) (i32.const 1)))
        (if (result i32) (i64.eq (i64.load (i32.const 64)) (i64.const 0x7ead)) (then (i32.const -1)) (else (i32.const 0)))))"#;
/// A library that is loaded before the C library and counts its calls.
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

fn main() -> Result<ExitCode> {
    if let [_, mode, pin] = &std::env::args().collect::<Vec<_>>()[..]
        && mode == INSIDE
    {
        let served = serve_calls(pin.parse().map_err(anyhow::Error::msg)?);
        return served.map(|()| ExitCode::SUCCESS);
    }
    let mut bench = Bench::new("hijack-call", "System calls under an executive beside their rivals");
    let pin = bench.options().pin()?;
    let entry = |bench: &Bench, way| bench.program(way, || contender(way, pin));
    let case = |work: &str, name: &str| Case::mean(work, name, Unit::Nanoseconds).quick(true);
    let ours = entry(&bench, PATCHED);
    let rivals =
        [NATIVE, COUNTED, TIMED, POLICY, FIRST, PRELOAD, PAGE_ZERO, NOTIFY, PTRACE, EMULATED, STRACE];
    let rivals = rivals.map(|way| entry(&bench, way));
    let cases = ["getppid", "write", "read", "open and close"].map(|call| case(call, call));
    bench.group(Group::new("call", ours, rivals).cases(cases));
    // The rules match the path of each call that takes one.
    let (ours, rival) = (entry(&bench, POLICY), entry(&bench, NATIVE));
    let cases = ["open and close", "stat", "stat, relative", "fstat"]
        .map(|call| case(call, &format!("{call}, path policy")));
    bench.group(Group::new("path rules", ours, [rival]).cases(cases));
    let (ours, rival) = (entry(&bench, REMEMBERED), entry(&bench, NATIVE));
    let cases = ["getpid", "geteuid"].map(|call| case(call, &format!("{call}, remembered")));
    bench.group(Group::new("remembered", ours, [rival]).cases(cases));
    let added = |bench: &Bench, name: &str, ours, rivals: &[&'static str]| {
        let entry = |way| {
            let (with, without) = (entry(bench, way), entry(bench, NATIVE));
            Entry::new(way, move || Ok(Added { with: with.start()?, without: without.start()? }))
        };
        let ours = entry(ours);
        Group::new(name, ours, rivals.iter().map(|way| entry(way))).case(case("getppid", name))
    };
    let rivals = [COUNTED, ARMED, PAGE_ZERO, PTRACE, EMULATED];
    bench.group(added(&bench, "added to getppid", PATCHED, &rivals));
    bench.group(added(&bench, "added to getppid, counted and timed", TIMED, &[STRACE]));
    // What a handler adds to a call from a rewritten place, and what others add to a native one to look at an argument.
    let on = |bench: &Bench, work, name: &str, ours, rivals: &[&'static str]| {
        let pair = |way, base| {
            let (with, without) = (entry(bench, way), entry(bench, base));
            Entry::new(way, move || Ok(Added { with: with.start()?, without: without.start()? }))
        };
        let rivals = rivals.iter().map(|way| pair(way, NATIVE));
        Group::new(name, pair(ours, PATCHED), rivals).case(case(work, name))
    };
    let rivals = [FILTER, PRELOAD, NOTIFY, PTRACE];
    bench.group(on(&bench, "getppid", "added by a handler to getppid", HANDLER, &rivals));
    bench.group(on(
        &bench,
        "write",
        "added by a copying handler to write",
        COPYING,
        &[PRELOAD, NOTIFY, PTRACE],
    ));
    let ours = entry(&bench, FIRST);
    let rivals = [NATIVE, BARE].map(|way| entry(&bench, way));
    bench.group(Group::new("first calls", ours, rivals).case(case("getppid", "first calls")));
    bench.run()
}

/// The time that a way adds to a native call.
struct Added {
    with: Box<dyn Contender>,
    without: Box<dyn Contender>,
}

impl Contender for Added {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        // In pieces, so that both meet the same disturbances.
        const PIECES: u32 = 8;
        let piece = iterations.div_ceil(PIECES);
        let (mut with, mut without) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..PIECES {
            with += self.with.measure(work, piece)?.elapsed;
            without += self.without.measure(work, piece)?.elapsed;
        }
        // A difference that cannot be measured counts as a nanosecond.
        let least = Duration::from_nanos(u64::from(piece * PIECES));
        let elapsed = with.saturating_sub(without).max(least);
        Ok(Sample { iterations: piece * PIECES, elapsed, latencies: Vec::new() })
    }
}

/// Puts what is to be measured under this program, which then serves as if it was native.
fn contender(way: &str, pin: Pin) -> Result<()> {
    let program = std::env::current_exe()?;
    let arguments = [INSIDE.into(), pin.to_string().into()];
    let options = orrery_hijack::Options::default();
    let options = match way {
        NATIVE => return serve_calls(pin),
        PTRACE => return traced(pin, false),
        EMULATED => return traced(pin, true),
        PAGE_ZERO => return with_page_zero(pin),
        NOTIFY => return notified(pin),
        FILTER => return filtered(pin),
        ARMED => return dispatched(pin, dispatch::arm_for_nothing),
        BARE => return dispatched(pin, dispatch::handle_barely),
        STRACE => {
            let mut strace = Command::new("strace");
            strace.args(["-c", "-f", "-qq", "-o", "/dev/null"]).arg(program).args(arguments);
            bail!("cannot execute strace: {}", strace.exec());
        }
        PRELOAD => return preloaded(pin),
        POLICY => options.counted(false).policy(Policy::parse(RULES, "built in")?),
        REMEMBERED => options.counted(false).policy(Policy::parse(ANSWERS, "built in")?),
        HANDLER => options.counted(false).policy(handled("getppid", COMPARES)?),
        COPYING => options.counted(false).policy(handled("write", COPIES)?),
        PATCHED => options.counted(false),
        COUNTED => options,
        TIMED => options.timed(true),
        FIRST => options.counted(false).threshold(u32::MAX),
        other => bail!("there is no contender {other:?}"),
    };
    Err(Hijack::start(options)?.execute(program.as_os_str(), &arguments).into())
}

/// Serves in this process, whatever is under it.
fn serve_calls(pin: Pin) -> Result<()> {
    serve(|| {
        pin.bind()?;
        // SAFETY: opens files that every system has.
        let (zero, null) = unsafe {
            (
                libc::open(c"/dev/zero".as_ptr(), libc::O_RDONLY),
                libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY),
            )
        };
        ensure!(
            zero >= 0 && null >= 0,
            "cannot open /dev/zero and /dev/null: {}",
            io::Error::last_os_error()
        );
        Ok(batched(move |work| call(work, zero, null)))
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
fn preloaded(pin: Pin) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let (source, library) = (directory.path().join("shim.c"), directory.path().join("shim.so"));
    std::fs::write(&source, SHIM)?;
    let mut compiler = Command::new("cc");
    let compiled =
        compiler.args(["-O2", "-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&source).status()?;
    ensure!(compiled.success(), "cannot compile the library to preload: {compiled}");
    let mut inside = Command::new(std::env::current_exe()?);
    let status = inside.args([INSIDE, &pin.to_string()]).env("LD_PRELOAD", &library).status()?;
    ensure!(status.success(), "the process with the library failed: {status}");
    Ok(())
}

/// A policy with a handler for a call.
fn handled(call: &str, module: &str) -> Result<Policy> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("module.wat");
    std::fs::write(&file, module)?;
    Ok(Policy::parse(&format!("[[rule]]\ncall = '{call}'\nhandler = '{}'\n", file.display()), "built in")?)
}

/// Serves with a filter that compares the first argument of `getppid`, and lets all calls pass.
fn filtered(pin: Pin) -> Result<()> {
    pin.bind()?;
    let load =
        |offset: usize| libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: u32::try_from(offset).unwrap_or(0) };
    let compare = |value: u32, jf: u8| libc::sock_filter { code: 0x15, jt: 0, jf, k: value };
    let give = |k| libc::sock_filter { code: 0x06, jt: 0, jf: 0, k };
    let mut program = [
        load(std::mem::offset_of!(libc::seccomp_data, nr)),
        compare(u32::try_from(libc::SYS_getppid)?, 3),
        load(std::mem::offset_of!(libc::seccomp_data, args)),
        compare(0x7ead, 1),
        give(libc::SECCOMP_RET_ERRNO | 1),
        give(libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: u16::try_from(program.len())?, filter: program.as_mut_ptr() };
    // SAFETY: the filter is whole, and stays until the call has copied it.
    let installed = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) == 0
    };
    ensure!(installed, "cannot install a filter: {}", io::Error::last_os_error());
    serve_calls(pin)
}

/// Serves with a filter that has another thread allow each call.
fn notified(pin: Pin) -> Result<()> {
    pin.bind()?;
    let calls = [libc::SYS_getppid, libc::SYS_read, libc::SYS_write, libc::SYS_openat, libc::SYS_close];
    notify::supervise_this_thread(&calls)?;
    serve_calls(pin)
}

/// Serves with calls that the kernel dispatches to this program, or looks whether it is to.
fn dispatched(pin: Pin, arm: fn() -> Result<()>) -> Result<()> {
    pin.bind()?;
    serve_after(arm(), pin)
}

/// Serves with the C library's functions rewritten to calls into page zero.
fn with_page_zero(pin: Pin) -> Result<()> {
    let functions = [
        libc::getppid as *const u8,
        libc::read as *const u8,
        libc::write as *const u8,
        libc::open as *const u8,
        libc::close as *const u8,
    ];
    serve_after(page_zero::install(&functions), pin)
}

/// Serves; or answers why it cannot.
fn serve_after(prepared: Result<()>, pin: Pin) -> Result<()> {
    match prepared {
        Ok(()) => serve_calls(pin),
        Err(error) => serve::<Box<dyn Contender>>(|| Err(error)),
    }
}

/// Serves in a child whose calls this process stops and continues: twice each, or, where it answers `getppid` itself, once.
fn traced(pin: Pin, emulated: bool) -> Result<()> {
    // SAFETY: the child traces itself to its parent, then serves; the parent only waits and continues.
    unsafe {
        let child = libc::fork();
        ensure!(child >= 0, "fork: {}", io::Error::last_os_error());
        if child == 0 {
            libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
            libc::raise(libc::SIGSTOP);
            return serve_calls(pin);
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
                ensure!(libc::WEXITSTATUS(status) == 0, "the traced process failed: status {status:#x}");
                return Ok(());
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

/// Answers a `getppid` that the kernel has skipped; lets the kernel perform other calls. Continues the child to its next call.
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
