//! A thread in a system call is led to the library as the rescue does it, and goes on with the program's answer.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _};
use std::mem::{MaybeUninit, size_of};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use orrery_testing::Killed;
use orthros::{ASK, Block, FAIL, MARK};

/// The directory with the library, which is beside the directory of the tests.
fn library() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    own.ancestors().skip(1).find(|directory| directory.join("liborthros.so").is_file()).unwrap().to_owned()
}

fn compile(source: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(source.trim_end_matches(".c"));
    let library = library();
    let built = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"])
        .arg("-I")
        .arg(root.join("../../../include"))
        .arg(root.join("tests/c").join(source))
        .arg("-o")
        .arg(&program)
        .arg(format!("-L{}", library.display()))
        .arg("-lorthros")
        .arg(format!("-Wl,-rpath,{}", library.display()))
        .output()
        .ok()?;
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    Some(program)
}

/// Returns where the block is in a process: found by its mark, as the rescue finds it.
fn block(pid: i32) -> (u64, Vec<u8>) {
    let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    for line in maps.lines().filter(|line| line.contains("/liborthros.so") && line.contains(" rw")) {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let start = u64::from_str_radix(start, 16).unwrap();
        let length = u64::from_str_radix(end, 16).unwrap() - start;
        let mut bytes = vec![0; usize::try_from(length).unwrap()];
        memory.read_exact_at(&mut bytes, start).unwrap();
        let size = size_of::<Block>();
        let found = (0..bytes.len())
            .step_by(64)
            .find(|&at| bytes[at..].starts_with(&MARK) && at + size <= bytes.len());
        if let Some(at) = found {
            return (start + at as u64, bytes[at..at + size].to_vec());
        }
    }
    panic!("no block in {maps}");
}

fn ptrace(request: libc::c_uint, pid: i32, data: *mut libc::c_void) -> i64 {
    // SAFETY: the callers pass what each request wants.
    unsafe { libc::ptrace(request, pid, std::ptr::null_mut::<libc::c_void>(), data) }
}

#[test]
fn a_program_settles_its_call() {
    let Some(program) = compile("asked.c") else {
        orrery_testing::skipped!("there is no C compiler");
        return;
    };
    let mut child = Killed(Command::new(program).stdout(Stdio::piped()).spawn().unwrap());
    let pid = i32::try_from(child.0.id()).unwrap();
    let mut out = BufReader::new(child.0.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    while !fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default().starts_with("0 ") {
        std::thread::sleep(Duration::from_millis(2));
    }
    let (_, bytes) = block(pid);
    let answer = |call: usize| u16::from_le_bytes([bytes[24 + call * 2], bytes[25 + call * 2]]);
    assert_eq!((answer(0), answer(34), answer(1)), (ASK, FAIL | 125, 1), "read, pause, and write by default");
    let entry = u64::from_le_bytes(bytes[16..24].try_into().unwrap());

    if ptrace(libc::PTRACE_SEIZE, pid, std::ptr::null_mut()) != 0 {
        orrery_testing::skipped!("this machine does not let processes be traced");
        return;
    }
    assert_eq!(ptrace(libc::PTRACE_INTERRUPT, pid, std::ptr::null_mut()), 0);
    let mut status = 0;
    // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL) }, pid);
    let mut place = MaybeUninit::<libc::user_regs_struct>::zeroed();
    assert_eq!(ptrace(libc::PTRACE_GETREGS, pid, place.as_mut_ptr().cast()), 0);
    // SAFETY: zeros are registers, and the call has filled them in.
    let mut registers = unsafe { place.assume_init() };
    assert_eq!(registers.orig_rax, 0, "it waits in read");
    registers.rcx = registers.rip;
    registers.rip = entry;
    registers.rax = registers.orig_rax;
    registers.orig_rax = u64::MAX;
    assert_eq!(ptrace(libc::PTRACE_SETREGS, pid, (&raw mut registers).cast()), 0);
    assert_eq!(ptrace(libc::PTRACE_DETACH, pid, std::ptr::null_mut()), 0);

    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "read 8 settled call 0 kept 11 12 15 red 4711 vector 1.5\n");
    assert!(child.0.wait().unwrap().success());
}

#[test]
fn the_environment_answers_for_programs_that_know_nothing() {
    let preload = library().join("liborthros.so");
    let mut command = Command::new("sleep");
    command.arg("1000").env("LD_PRELOAD", preload).stderr(Stdio::piped());
    let mut child = Killed(command.env("ORTHROS_CALLS", "pause=EIO,write=default,nonsense").spawn().unwrap());
    let pid = i32::try_from(child.0.id()).unwrap();
    let mut errors = BufReader::new(child.0.stderr.take().unwrap());
    let mut line = String::new();
    errors.read_line(&mut line).unwrap();
    assert!(line.contains("nonsense"), "{line}");
    // That was its last part.
    let (_, bytes) = block(pid);
    let answer = |call: usize| u16::from_le_bytes([bytes[24 + call * 2], bytes[25 + call * 2]]);
    assert_eq!((answer(34), answer(1), answer(0)), (FAIL | 5, 0, 0));
}
