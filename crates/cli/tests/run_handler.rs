//! `orrery run --policy` with rules whose handlers decide: WebAssembly modules, in the path of real programs' calls.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "run/facility.rs"]
mod facility;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use object::{Object as _, ObjectSymbol as _};
use orrery_testing::{Compiler, PublicDirectory, built, is_there, root, skipped};

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");
const PYTHON: &str = "/usr/bin/python3";
/// `nobody`.
const NOBODY: &str = "65534";

/// Answers `getppid` with a constant.
const ANSWERS: &str = r#"(module
    (import "orrery" "answer" (func $answer (param i64)))
    (func (export "decide") (param i32) (result i32)
        (call $answer (i64.const 4242)) (i32.const 2)))"#;
/// Denies paths that contain "secret": the example of the chapter.
const DENIES: &str = include_str!("../../../examples/handlers/secret.wat");
/// Fails.
const LOOPS: &str =
    r#"(module (func (export "decide") (param i32) (result i32) (loop (br 0)) (i32.const 0)))"#;

/// A directory with a module and a policy whose rule for `call` it is the handler of.
fn scene(call: &str, module: &str) -> PublicDirectory {
    let directory = PublicDirectory::new();
    fs::write(directory.path().join("module.wat"), module).unwrap();
    let policy = format!("[[rule]]\ncall = '{call}'\nhandler = 'module.wat'\n");
    fs::write(directory.path().join("policy.toml"), policy).unwrap();
    directory
}

fn command(directory: &Path, prefix: &[&str], orrery: &Path, words: &[&str]) -> Command {
    let mut all: Vec<PathBuf> = prefix.iter().map(PathBuf::from).collect();
    all.push(orrery.to_owned());
    let mut command = Command::new(all.remove(0));
    command.args(all).args(["run", "--policy", "policy.toml", "--"]).args(words);
    command.current_dir(directory).stdin(Stdio::null()).env("LC_ALL", "C");
    command
}

fn run(directory: &Path, words: &[&str]) -> Output {
    command(directory, &[], Path::new(ORRERY), words).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a script in Python, which says what it found.
fn python(call: &str, module: &str, script: &str) -> String {
    let directory = scene(call, module);
    let output = run(directory.path(), &[PYTHON, "-c", script]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn a_handler_answers() {
    if facility::is_missing() {
        return;
    }
    // From places that are dispatched at first, and rewritten then.
    assert_eq!(
        python("getppid", ANSWERS, "import os; print({os.getppid() for _ in range(100)})"),
        "{4242}\n"
    );
}

#[test]
fn a_handler_compares_arguments() {
    if facility::is_missing() {
        return;
    }
    let module = r#"(module
        (import "orrery" "argument" (func $argument (param i32) (result i64)))
        (func (export "decide") (param i32) (result i32)
            (if (result i32) (i64.eq (call $argument (i32.const 0)) (i64.const 1234567))
                (then (i32.const -71)) (else (i32.const 0)))))"#;
    let script = "
import os
def ask(number):
    try: return os.getpgid(number) == os.getpgrp()
    except OSError as error: return error.errno
print([{ask(number) for _ in range(50)} for number in (0, 1234567)])";
    assert_eq!(python("getpgid", module, script), "[{True}, {71}]\n");
}

#[test]
fn a_handler_denies_by_content() {
    if facility::is_missing() {
        return;
    }
    denies_by_content(DENIES.as_bytes());
}

/// The same example in C, as `orrery/handler.h` says that it is compiled.
#[test]
fn a_handler_in_c_denies_by_content() {
    if facility::is_missing() {
        return;
    }
    if !is_there("clang") {
        skipped!("there is no clang");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("secret.wasm");
    let mut clang = Command::new("clang");
    clang.args([
        "--target=wasm32",
        "-mcpu=mvp",
        "-O2",
        "-nostdlib",
        "-std=gnu11",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]);
    clang.args(["-Wl,--no-entry", "-Wl,-z,stack-size=8192", "-I"]).arg(root().join("include"));
    clang.arg("-o").arg(&output).arg(root().join("examples/handlers/secret.c"));
    let compiled = clang.output().unwrap();
    let errors = text(&compiled.stderr);
    if !compiled.status.success() && errors.contains("wasm-ld") && errors.contains("No such file") {
        skipped!("there is no wasm-ld");
        return;
    }
    assert!(compiled.status.success(), "{errors}");
    denies_by_content(&fs::read(output).unwrap());
}

/// And in Rust, where one of the targets is installed.
#[test]
fn a_handler_in_rust_denies_by_content() {
    if facility::is_missing() {
        return;
    }
    let sysroot = Command::new("rustc").args(["--print", "sysroot"]).output().unwrap();
    let sysroot = PathBuf::from(text(&sysroot.stdout).trim().to_owned());
    let is_installed = |target: &&str| sysroot.join("lib/rustlib").join(target).is_dir();
    let targets: Vec<_> =
        ["wasm32v1-none", "wasm32-unknown-unknown"].into_iter().filter(is_installed).collect();
    if targets.is_empty() {
        skipped!("the targets wasm32v1-none and wasm32-unknown-unknown are not installed");
    }
    for target in targets {
        let directory = tempfile::tempdir().unwrap();
        let sdk = directory.path().join("liborrery_handler_sdk.rlib");
        let rustc = |arguments: &[&str], source: &str, output: &Path| {
            let mut command = Command::new("rustc");
            command.args(["--edition=2024", "--target", target, "-Copt-level=2", "-Cpanic=abort"]);
            command.arg("-Ctarget-cpu=mvp").args(arguments).arg("-o").arg(output).arg(root().join(source));
            let compiled = command.output().unwrap();
            assert!(compiled.status.success(), "{target}: {}", text(&compiled.stderr));
        };
        let library = ["--crate-type=rlib", "--crate-name=orrery_handler_sdk"];
        rustc(&library, "crates/hijack/handler-sdk/src/lib.rs", &sdk);
        let module = directory.path().join("secret.wasm");
        let external = format!("--extern=orrery_handler_sdk={}", sdk.display());
        let flags = ["--crate-type=cdylib", "-Clto=fat", "-Clink-arg=-zstack-size=16384", &external];
        rustc(&flags, "examples/handlers/secret.rs", &module);
        denies_by_content(&fs::read(module).unwrap());
    }
}

fn denies_by_content(module: &[u8]) {
    let directory = scene("openat", "");
    fs::write(directory.path().join("module.wat"), module).unwrap();
    for name in ["secret", "plain", "a-secret-b"] {
        fs::write(directory.path().join(name), format!("{name}\n")).unwrap();
    }
    let output = run(directory.path(), &["cat", "plain", "secret", "./a-secret-b"]);
    assert_eq!(text(&output.stdout), "plain\n");
    assert_eq!(
        text(&output.stderr),
        "cat: secret: Permission denied\ncat: ./a-secret-b: Permission denied\n"
    );
    // What cannot be read is the kernel's to say.
    let script = "
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print({(libc.syscall(257, -100, ctypes.c_void_p(8), 0), ctypes.get_errno()) for _ in range(50)})";
    let output = run(directory.path(), &[PYTHON, "-c", script]);
    assert_eq!(text(&output.stdout), "{(-1, 14)}\n", "{}", text(&output.stderr));
    // And what is longer than the room is refused.
    let script = "
import os
try: os.open('/' * 4096, 0)
except OSError as error: print(error.errno)";
    let output = run(directory.path(), &[PYTHON, "-c", script]);
    assert_eq!(text(&output.stdout), "36\n", "{}", text(&output.stderr));
}

/// A handler that needs nothing but arguments is asked by another way than others, unless it is not the only rule: it decides the same.
#[test]
fn a_handler_that_needs_nothing_decides_the_same_as_others() {
    if facility::is_missing() {
        return;
    }
    let script = "
import os
def ask(number):
    try: return os.getpgid(number) == os.getpgrp()
    except OSError as error: return error.errno
print([[*{ask(number) for _ in range(50)}] for number in (0, 1, 2, 3, 4, 5, 6)])";
    // Passes 0, allows 1 (there is one), answers 2 with zero, denies 3, divides by zero at 4, returns no verdict for 5, and loops for 6.
    let module = |more: &str| {
        format!(
            r#"(module
            (import "orrery" "argument" (func $argument (param i32) (result i64)))
            (global $counted (mut i32) (i32.const 1))
            (func (export "decide") (param i32) (result i32) (local i32)
                (local.set 1 (i32.wrap_i64 (call $argument (i32.const 0)))) {more}
                (if (i32.eq (local.get 1) (i32.const 1)) (then (return (i32.const 1))))
                (if (i32.eq (local.get 1) (i32.const 2)) (then (return (i32.const 2))))
                (if (i32.eq (local.get 1) (i32.const 3)) (then (return (i32.const -71))))
                (if (i32.eq (local.get 1) (i32.const 4)) (then (return (i32.div_u (i32.const 1) (i32.const 0)))))
                (if (i32.eq (local.get 1) (i32.const 5)) (then (return (i32.const 3))))
                (if (i32.eq (local.get 1) (i32.const 6)) (then (loop (br 0))))
                (i32.const 0)))"#
        )
    };
    let bare = python("getpgid", &module(""), script);
    assert_eq!(bare, "[[True], [False], [False], [71], [1], [1], [1]]\n");
    // One with a variable, and one that is not alone.
    let counts = "(global.set $counted (i32.add (global.get $counted) (i32.const 1)))";
    assert_eq!(python("getpgid", &module(counts), script), bare);
    let directory = scene("getpgid", &module(""));
    let rule = "[[rule]]\ncall = 'getpgid'\nhandler = 'module.wat'\n";
    fs::write(directory.path().join("policy.toml"), rule.repeat(2)).unwrap();
    let output = run(directory.path(), &[PYTHON, "-c", script]);
    assert_eq!(text(&output.stdout), bare, "{}", text(&output.stderr));
}

#[test]
fn a_handler_rewrites_arguments() {
    if facility::is_missing() {
        return;
    }
    let module = r#"(module
        (import "orrery" "set_argument" (func $set (param i32 i64)))
        (func (export "decide") (param i32) (result i32) (call $set (i32.const 0) (i64.const 0x12)) (i32.const 1)))"#;
    assert_eq!(python("umask", module, "import os; os.umask(0o777); print(os.umask(0o777))"), "18\n");
    // A path that the program cannot change any more.
    let module = r#"(module
        (import "orrery" "copy_from" (func $copy (param i32 i32 i32 i32) (result i32)))
        (import "orrery" "replace" (func $replace (param i32 i32 i32) (result i32)))
        (memory 1) (data (i32.const 100) "other")
        (func (export "decide") (param i32) (result i32)
            (drop (call $copy (i32.const 1) (i32.const 0) (i32.const 0) (i32.const 5)))
            (if (i32.and (i32.eq (i32.load (i32.const 0)) (i32.const 0x656c6966)) (i32.eqz (i32.load8_u (i32.const 4))))
                (then (return (call $replace (i32.const 1) (i32.const 100) (i32.const 5)))))
            (i32.const 0)))"#;
    let directory = scene("openat", module);
    fs::write(directory.path().join("file"), "file\n").unwrap();
    fs::write(directory.path().join("other"), "other\n").unwrap();
    let script = "print({open('file').read() for _ in range(50)}, open('./file').read())";
    let output = run(directory.path(), &[PYTHON, "-c", script]);
    assert_eq!(text(&output.stdout), "{'other\\n'} file\n\n", "{}", text(&output.stderr));
}

#[test]
fn a_handler_delays() {
    if facility::is_missing() {
        return;
    }
    for (delay, least, most) in [("50000000", 50, 1000), ("-1", 1000, 60_000)] {
        let module = format!(
            r#"(module (import "orrery" "delay" (func $delay (param i64)))
                (func (export "decide") (param i32) (result i32) (call $delay (i64.const {delay})) (i32.const 0)))"#
        );
        let directory = scene("sync", &module);
        let script = "import os, time; start = time.monotonic(); os.sync(); print(time.monotonic() - start)";
        let start = Instant::now();
        let output = run(directory.path(), &[PYTHON, "-c", script]);
        let took: f64 = text(&output.stdout).trim().parse().unwrap();
        assert!(took >= f64::from(least) / 1000.0, "{delay}: {took}");
        // A second at most, and what the machine adds.
        assert!(start.elapsed() < Duration::from_millis(most) + Duration::from_secs(60), "{delay}: {took}");
    }
}

#[test]
fn a_handler_reports() {
    if facility::is_missing() {
        return;
    }
    let module = r#"(module (import "orrery" "emit" (func $emit (param i32 i32) (result i32)))
        (memory 1) (data (i32.const 60) "seen\n")
        (func (export "decide") (param i32) (result i32)
            (drop (call $emit (i32.const 60) (i32.const 5)))
            (select (i32.const -1) (i32.const 0) (i32.ne (call $emit (i32.const 0) (i32.const 353)) (i32.const -90)))))"#;
    let directory = scene("getppid", module);
    let output =
        run(directory.path(), &[PYTHON, "-c", "import os; print([os.getppid() > 0 for _ in range(2)])"]);
    assert_eq!(text(&output.stdout), "[True, True]\n", "{}", text(&output.stderr));
    let lines = text(&output.stderr);
    assert_eq!(lines.matches("*** getppid: seen\u{fffd} ***").count(), 2, "{lines}");
}

#[test]
fn a_handler_that_fails_refuses() {
    if facility::is_missing() {
        return;
    }
    let memory = r#"(module (memory 1) (func (export "decide") (param i32) (result i32)
        (i32.store (i32.const 0) (i32.const 1)) (i32.load (i32.const 65533))))"#;
    let deep = r#"(module (func $f (export "decide") (param i32) (result i32) (i32.add (i32.const 1) (call $f (local.get 0)))))"#;
    let verdict = r#"(module (func (export "decide") (param i32) (result i32) (i32.const 3)))"#;
    let error = r#"(module (func (export "decide") (param i32) (result i32) (i32.const -4096)))"#;
    let copy = r#"(module (import "orrery" "copy_from" (func $copy (param i32 i32 i32 i32) (result i32))) (memory 1)
        (func (export "decide") (param i32) (result i32) (call $copy (i32.const 0) (i32.const 0) (i32.const 65535) (i32.const 2))))"#;
    let script = "
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print({(libc.syscall(110), ctypes.get_errno()) for _ in range(30)})";
    for module in [LOOPS, memory, deep, verdict, error, copy] {
        assert_eq!(python("getppid", module, script), "{(-1, 1)}\n", "{module}");
    }
}

/// What is performed with the program's own registers is not performed with others in silence.
#[test]
fn arguments_that_cannot_be_changed_are_not() {
    if facility::is_missing() {
        return;
    }
    let module = r#"(module
        (import "orrery" "set_argument" (func $set (param i32 i64)))
        (import "orrery" "argument" (func $argument (param i32) (result i64)))
        (func (export "decide") (param i32) (result i32)
            (call $set (i32.const 0) (i64.add (call $argument (i32.const 0)) (i64.const 1))) (i32.const 0)))"#;
    let script = "
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print({(libc.syscall(131, 0, 0), ctypes.get_errno()) for _ in range(30)})";
    assert_eq!(python("sigaltstack", module, script), "{(-1, 1)}\n");
    let same = module.replace("i64.const 1)", "i64.const 0)");
    assert_eq!(python("sigaltstack", &same, script), "{(0, 0)}\n");
}

/// Each decision begins with the memory and the variables that the module says.
#[test]
fn nothing_stays_from_one_call_to_the_next() {
    if facility::is_missing() {
        return;
    }
    let module = r#"(module (import "orrery" "answer" (func $answer (param i64)))
        (memory 1) (data (i32.const 5000) "\07") (global $count (mut i64) (i64.const 100))
        (func (export "decide") (param i32) (result i32)
            (global.set $count (i64.add (global.get $count) (i64.load (i32.const 5000))))
            (i64.store (i32.const 5000) (i64.const 1000)) (i64.store (i32.const 65528) (i64.add (i64.load (i32.const 65528)) (i64.const 1)))
            (call $answer (i64.add (global.get $count) (i64.load (i32.const 65528)))) (i32.const 2)))"#;
    assert_eq!(python("getppid", module, "import os; print({os.getppid() for _ in range(100)})"), "{108}\n");
}

/// Permits a hundred calls of a process, and denies those that follow.
const HUNDRED: &str = r#"(module
    (import "orrery" "count" (func $count (param i32 i64) (result i64)))
    (func (export "decide") (param i32) (result i32)
        (if (result i32) (i64.gt_s (call $count (i32.const 7) (i64.const 1)) (i64.const 100))
            (then (i32.const -13)) (else (i32.const 0)))))"#;

#[test]
fn counters_count_all_threads_are_copied_by_fork_and_begin_anew_with_a_program() {
    if facility::is_missing() {
        return;
    }
    let script = "
import os, sys, threading
def calls(count):
    done = 0
    for _ in range(count):
        try: os.getpgid(0); done += 1
        except PermissionError: pass
    return done
if len(sys.argv) > 1:
    print('executed', calls(150)); sys.exit()
results = [0] * 8
def work(index): results[index] = calls(5)
def run(): 
    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
run()
print('threads', sum(results), flush=True)
if os.fork() == 0:
    print('child', calls(200), flush=True)
    os._exit(0)
os.wait()
print('parent', calls(20), flush=True)
run()
print('threads', sum(results), calls(50), flush=True)
os.execv(sys.executable, [sys.executable, '-c', open('/proc/self/cmdline').read().split(chr(0))[2], 'again'])";
    // 40 of the threads; 60 more of the child, which has a copy; of its parent, 20, then 40 more of threads, and none.
    let expected = "threads 40\nchild 60\nparent 20\nthreads 40 0\nexecuted 100\n";
    assert_eq!(python("getpgid", HUNDRED, script), expected);
}

#[test]
fn threads_that_count_at_once_lose_no_count() {
    if facility::is_missing() {
        return;
    }
    if !is_there("cc") {
        return skipped!("there is no C compiler");
    }
    let directory = scene(
        "getpgid",
        r#"(module
        (import "orrery" "count" (func $count (param i32 i64) (result i64)))
        (import "orrery" "answer" (func $answer (param i64)))
        (func (export "decide") (param i32) (result i32)
            (call $answer (call $count (i32.const 0) (i64.const 1))) (i32.const 2)))"#,
    );
    let source = directory.path().join("count.c");
    let program = directory.path().join("count");
    fs::write(
        &source,
        "#include <pthread.h>\n#include <stdio.h>\n#include <unistd.h>\n
static void *work(void *none) { for (int i = 0; i < 20000; i++) getpgid(0); return none; }
int main(void) {
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], 0, work, 0);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], 0);
    printf(\"%d\\n\", getpgid(0));
}
",
    )
    .unwrap();
    Compiler::c().flags(["-pthread"]).build(&[&source], &program);
    let output = run(directory.path(), &[program.to_str().unwrap()]);
    assert_eq!((text(&output.stdout).as_str(), text(&output.stderr).as_str()), ("80001\n", ""));
}

#[test]
fn a_rule_has_conditions_beside_its_handler() {
    if facility::is_missing() {
        return;
    }
    let directory = scene("getppid", ANSWERS);
    let policy = "[[rule]]\ncall = 'getppid'\nprogram = 'nothing'\nhandler = 'module.wat'\n
        [[rule]]\ncall = 'getppid'\nevery = 2\nhandler = 'module.wat'\n
        [[rule]]\ncall = 'getppid'\nreturn = 7\n";
    fs::write(directory.path().join("policy.toml"), policy).unwrap();
    let output = run(directory.path(), &[PYTHON, "-c", "import os; print([os.getppid() for _ in range(4)])"]);
    assert_eq!(text(&output.stdout), "[7, 4242, 7, 4242]\n", "{}", text(&output.stderr));
}

/// Handlers run in several threads at once, and are interrupted by signals whose handlers call them again, fork, or leave for good.
#[test]
fn threads_signals_and_children_do_not_meet_in_a_handler() {
    if facility::is_missing() {
        return;
    }
    let module = r#"(module
        (import "orrery" "argument" (func $argument (param i32) (result i64)))
        (import "orrery" "answer" (func $answer (param i64)))
        (memory 1)
        (func (export "decide") (param i32) (result i32) (local $i i64)
            (i64.store (i32.const 8) (call $argument (i32.const 0)))
            (local.set $i (i64.load (i32.const 8)))
            (block $done (loop $next (br_if $done (i64.eqz (local.get $i)))
                (i64.store (i32.const 20000) (i64.add (i64.load (i32.const 20000)) (local.get $i)))
                (local.set $i (i64.sub (local.get $i) (i64.const 1))) (br $next)))
            (call $answer (i64.add (i64.load (i32.const 20000)) (i64.load (i32.const 8)))) (i32.const 2)))"#;
    let directory = scene("getpgid", module);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/handlers.c");
    let program =
        Compiler::c().flag("-O1").flag("-pthread").build(&[source], directory.path().join("handlers"));
    let output = run(directory.path(), &[program.to_str().unwrap()]);
    assert_eq!(
        text(&output.stdout),
        "right known interrupted\n",
        "{:?} {}",
        output.status,
        text(&output.stderr)
    );
}

#[test]
fn an_ordinary_user_has_handlers_too() {
    if facility::is_missing() {
        return;
    }
    if !rustix::process::geteuid().is_root() || !is_there("setpriv") {
        skipped!("this needs the superuser, and setpriv");
        return;
    }
    let directory = scene("openat", DENIES);
    let orrery = directory.copy(ORRERY);
    let _manager = directory.copy(built("orrery-manager"));
    for name in ["secret", "plain"] {
        fs::write(directory.path().join(name), format!("{name}\n")).unwrap();
    }
    let user = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"];
    let output = command(directory.path(), &user, &orrery, &["cat", "plain", "secret"]).output().unwrap();
    assert_eq!(text(&output.stdout), "plain\n", "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "cat: secret: Permission denied\n");
}

#[test]
fn what_is_wrong_with_a_handler_is_told_before_anything_runs() {
    for (call, module, said) in [
        (
            "getppid",
            "(module)",
            "policy.toml:3:11: cannot use the handler module.wat: it exports no function `decide`",
        ),
        (
            "getppid",
            r#"(module (import "env" "open" (func)))"#,
            "policy.toml:3:11: cannot use the handler module.wat: cannot import env.open (at byte 0x11 of the module)",
        ),
        ("getppid", "(modul", "policy.toml:3:11: cannot use the handler module.wat: "),
        ("exit_group", ANSWERS, "policy.toml:2:8: exit_group cannot be answered"),
        ("rt_sigreturn", ANSWERS, "policy.toml:2:8: rt_sigreturn cannot be answered"),
    ] {
        let directory = scene(call, module);
        let output = run(directory.path(), &["echo", "ran"]);
        assert!(!output.status.success() && output.stdout.is_empty(), "{module}");
        assert!(text(&output.stderr).contains(said), "{}", text(&output.stderr));
    }
    for (handler, said) in
        [("nowhere.wat", "No such file or directory"), ("/dev/zero", "it is no regular file")]
    {
        let directory = scene("getppid", ANSWERS);
        let policy = format!("[[rule]]\ncall = 'getppid'\nhandler = '{handler}'\n");
        fs::write(directory.path().join("policy.toml"), policy).unwrap();
        let output = run(directory.path(), &["echo", "ran"]);
        assert!(!output.status.success() && output.stdout.is_empty(), "{handler}");
        assert!(text(&output.stderr).contains(said), "{}", text(&output.stderr));
    }
}

/// Handlers are compiled by a program of its own, which is installed with the command.
#[test]
fn without_a_compiler_nothing_runs() {
    let directory = scene("getppid", ANSWERS);
    let orrery = directory.copy(ORRERY);
    let alone = |libexec: Option<&Path>| {
        let mut command = command(directory.path(), &[], &orrery, &["echo", "ran"]);
        command.env_remove("ORRERY_LIBEXEC").envs(libexec.map(|path| ("ORRERY_LIBEXEC", path)));
        let output = command.output().unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        text(&output.stderr)
    };
    let said = alone(None);
    for part in [
        "policy.toml:3:11: cannot use the handler module.wat: there is no compiler for it",
        "the program orrery-manager is in none of",
        "package orrery",
        "ORRERY_LIBEXEC",
        "cargo build -p orrery-manager",
    ] {
        assert!(said.contains(part), "{said}");
    }
    // One that does not know how handlers are compiled.
    let other = directory.path().join("other");
    fs::create_dir(&other).unwrap();
    std::os::unix::fs::symlink("/bin/true", other.join("orrery-manager")).unwrap();
    let said = alone(Some(&other));
    let expected = format!(
        "policy.toml:3:11: cannot use the handler module.wat: its compiler {}/orrery-manager failed: what it has written is no compiled handler",
        other.display()
    );
    assert!(said.contains(&expected), "{said}");
}

/// The compiler is more than half of what the command would be with it.
#[test]
fn the_command_has_no_compiler_in_it() {
    let symbols = |program: &Path| {
        let bytes = fs::read(program).unwrap();
        let file = object::File::parse(bytes.as_slice()).unwrap();
        let functions = file.symbols().filter(|symbol| symbol.kind() == object::SymbolKind::Text);
        let names = functions.filter_map(|symbol| symbol.name().ok());
        names.filter(|name| name.contains("cranelift_codegen")).count()
    };
    assert_eq!(symbols(Path::new(ORRERY)), 0);
    // Symbols would show one.
    assert!(symbols(&built("orrery-manager")) > 0);
}

/// A call leaves the flags as they are, whether a handler alone is asked about it or rules are.
#[test]
fn flags_are_what_they_were_behind_a_call_that_is_decided() {
    if facility::is_missing() {
        return;
    }
    let module = r#"(module
        (import "orrery" "argument" (func $argument (param i32) (result i64)))
        (func (export "decide") (param i32) (result i32)
            (if (result i32) (i64.eq (call $argument (i32.const 0)) (i64.const 1234567))
                (then (i32.const -71)) (else (i32.const 0)))))"#;
    let directory = scene("getpgid", module);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/flags.c");
    let program = Compiler::c().flag("-O1").build(&[source], directory.path().join("flags"));
    let program = program.to_str().unwrap();
    let handler = "[[rule]]\ncall = 'getpgid'\nhandler = 'module.wat'\n";
    let denies = "[[rule]]\ncall = 'getpgid'\ncaller = '**/flags'\nreturn = -71\n";
    for policy in [handler.to_owned(), handler.repeat(2), denies.to_owned()] {
        fs::write(directory.path().join("policy.toml"), &policy).unwrap();
        let output = run(directory.path(), &[program]);
        assert_eq!(text(&output.stdout), "0 wrong, 5120 answers\n", "{policy}{}", text(&output.stderr));
    }
}

/// A rule with a handler keeps something from a program: what no rule names is closed, as with one that denies.
#[test]
fn a_handler_closes_what_no_rule_names() {
    if facility::is_missing() {
        return;
    }
    let script = "
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print([(libc.syscall(number, 0, 0), ctypes.get_errno()) for number in (425, 1000)])";
    assert_eq!(python("getppid", ANSWERS, script), "[(-1, 1), (-1, 38)]\n");
}

/// A process that may have no further code (`PR_SET_MDWE`) cannot be given the handler's.
#[test]
fn a_program_that_may_have_no_new_code_is_refused() {
    if facility::is_missing() {
        return;
    }
    let directory = scene("getppid", ANSWERS);
    let script = "
import ctypes, os, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) != 0: print('no MDWE'); sys.exit()
os.execv(sys.argv[1], [sys.argv[1], 'run', '--policy', 'policy.toml', '--', 'echo', 'ran'])";
    let words = ["-c", script, ORRERY];
    let output = Command::new(PYTHON).args(words).current_dir(directory.path()).output().unwrap();
    if text(&output.stdout) == "no MDWE\n" {
        skipped!("this kernel has no PR_SET_MDWE");
        return;
    }
    assert!(output.stdout.is_empty() && !output.status.success(), "{output:?}");
    assert!(
        text(&output.stderr).contains("cannot apply the policy to a program"),
        "{}",
        text(&output.stderr)
    );
}
