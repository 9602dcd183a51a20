//! `orrery run --policy`: what rules do to real programs, and what is wrong with rules that are refused.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "run/facility.rs"]
mod facility;

use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");
const PYTHON: &str = "/usr/bin/python3";

/// Runs a program under a policy in which DIR is a directory of its own; with and without rewritten sites.
fn run(policy: &str, words: &[&str]) -> Output {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("file"), "content\n").unwrap();
    in_directory(directory.path(), policy, words, &[])
}

fn in_directory(directory: &Path, policy: &str, words: &[&str], options: &[&str]) -> Output {
    let directory = directory.canonicalize().unwrap();
    let file = directory.join("policy.toml");
    fs::write(&file, policy.replace("DIR", directory.to_str().unwrap())).unwrap();
    let mut command = Command::new(ORRERY);
    command.args(["run", "--policy"]).arg(&file).args(options).arg("--").args(words);
    command.current_dir(&directory).stdin(Stdio::null()).env("LC_ALL", "C").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn paths_are_denied_however_they_are_written() {
    if facility::is_missing() {
        return;
    }
    let policy = "[[rule]]\ncall = '%file'\npath = 'DIR/file'\ndeny = 'EACCES'";
    for path in ["file", "./file", "../../../proc/self/cwd/../cwd/x/../file"] {
        let output = run(policy, &["cat", path]);
        let expected = if path.starts_with("../../..") { Some(0) } else { Some(1) };
        // The last leads through links, which the chapter says are not followed.
        if expected == Some(1) {
            assert_eq!(text(&output.stderr), format!("cat: {path}: Permission denied\n"));
            assert_eq!(output.status.code(), expected);
        }
    }
    let output =
        run(policy, &["sh", "-c", "cd / && cat \"$OLDPWD/file\"; cd \"$OLDPWD\" && cp file copy; ls"]);
    assert_eq!(text(&output.stdout), "file\npolicy.toml\n", "{}", text(&output.stderr));
}

/// Asks about each path a hundred times: the first calls from a place are dispatched, further ones come from a rewritten place,
/// where the path is read as it is. All must be answered alike.
#[test]
fn rewritten_places_decide_about_paths_as_dispatch_does() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for name in ["secret", "open"] {
        fs::create_dir(directory.path().join(name)).unwrap();
        fs::write(directory.path().join(name).join("x"), "content\n").unwrap();
    }
    fs::write(directory.path().join("open/a.key"), "").unwrap();
    let policy = "
        [[rule]]
        call = ['access', 'faccessat', 'faccessat2', 'openat']
        path = ['DIR/secret/**', '/**/*.key']
        deny = 'EACCES'
        [[rule]]
        call = 'access'
        path = 'DIR/open/fi?st*'
        deny = 'EIO'";
    let script = "
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.sbrk.argtypes = [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
def by_access(path):
    return libc.access(path, 0)
def by_number(path):
    return libc.syscall(21, path, 0)
def by_directory(path):
    return libc.syscall(439, -100, path, 0, 0)
def often(path):
    told = set()
    for call in by_access, by_number, by_directory:
        for _ in range(100):
            ctypes.set_errno(0)
            told.add('ok' if call(path) == 0 else errno.errorcode[ctypes.get_errno()])
    return ' or '.join(sorted(told))
here = os.getcwd()
for path in ['secret/x', './secret/x', 'open/../secret/x', 'open/x', 'secret', 'secret/', 'secretive', 'open/a.key', 'open/./x',
             '.', '..', '', '/', '//', 'HERE/secret/x', 'HERE//./secret/./x/', 'HERE/open/x', '/../HERE/secret', '/HERE/open/../secret',
             '/etc/passwd', 'a' * 300, './' * 700 + 'open/x', './' * 700 + 'secret/x', '/nothing/a..b.key']:
    print(path[:30], often(path.replace('HERE', here).encode()))
os.chdir('secret'); print('x', often(b'x'))
os.chdir('../open'); print('x', often(b'x'), often(b'../secret/x'))
os.chdir('..')
void = ctypes.c_void_p
page = libc.mmap(None, 8192, 3, 0x22, -1, 0)
def put(at, path):
    ctypes.memmove(at, path, len(path))
    return void(at)
text = put(page + 100, b'open/x\\0'); print('mapped', often(text))
libc.mprotect(page, 4096, 0); print('protected', often(text))
libc.mprotect(page, 4096, 3); print('readable', often(text))
across = put(page + 4093, b'open/x\\0'); print('across', often(across))
libc.mprotect(page + 4096, 4096, 0); print('half', often(across))
last = put(page + 4089, b'open/x\\0'); print('last', often(last))
libc.munmap(page, 4096); print('unmapped', often(text))
print('nowhere', often(void(8)), often(void(1 << 63)), often(void(2**64 - 1)))
old = libc.sbrk(0); libc.sbrk(16384)
heap = put((old + 12288) & ~4095, b'open/x\\0'); print('heap', often(heap))
libc.sbrk(-16384); print('shrunk', often(heap))
";
    let output = in_directory(directory.path(), policy, &[PYTHON, "-c", script], &[]);
    let expected = "\
secret/x EACCES
./secret/x EACCES
open/../secret/x EACCES
open/x ok
secret EACCES
secret/ EACCES
secretive ENOENT
open/a.key EACCES
open/./x ok
. ok
.. ok
 ENOENT
/ ok
// ok
HERE/secret/x EACCES
HERE//./secret/./x/ EACCES
HERE/open/x ok
/../HERE/secret EACCES
/HERE/open/../secret EACCES
/etc/passwd ok
AAAA ENAMETOOLONG
./././././././././././././././ ok
./././././././././././././././ EACCES
/nothing/a..b.key EACCES
x EACCES
x ok EACCES
mapped ok
protected EFAULT
readable ok
across ok
half EFAULT
last ok
unmapped EFAULT
nowhere EFAULT EFAULT EFAULT
heap ok
shrunk EFAULT
";
    let told = text(&output.stdout).replace(&"a".repeat(30), "AAAA");
    assert_eq!(told, expected, "{}", text(&output.stderr));
}

/// Whether a call is an `fstat` is not for the C library to say.
#[test]
fn fstat_is_one_however_it_is_made() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("file"), "content\n").unwrap();
    let script = "
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
room = ctypes.create_string_buffer(512)
def told(*call):
    seen = set()
    for _ in range(100):
        ctypes.set_errno(0)
        seen.add('ok' if libc.syscall(*call) == 0 else errno.errorcode[ctypes.get_errno()])
    return ' or '.join(seen)
print(told(5, 0, room), told(262, 0, b'', room, 0x1000), told(332, 0, b'', 0x1000, 0xfff, room), told(262, 0, b'', room, 0))
";
    for (calls, expected) in [
        ("'%file'", "ok ok ok EACCES\n"),
        ("'fstat'", "EACCES ok ok ENOENT\n"),
        ("['%file', 'fstat']", "EACCES EACCES EACCES EACCES\n"),
        ("'newfstatat'", "ok EACCES ok EACCES\n"),
    ] {
        let directory = directory.path().canonicalize().unwrap();
        let policy = directory.join("policy.toml");
        let rule =
            format!("[[rule]]\ncall = {calls}\npath = '{}/file'\ndeny = 'EACCES'", directory.display());
        fs::write(&policy, rule).unwrap();
        let file = fs::File::open(directory.join("file")).unwrap();
        let mut command = Command::new(ORRERY);
        command.args(["run", "--policy"]).arg(&policy).args(["--", PYTHON, "-c", script]);
        let output = command.stdin(Stdio::from(file)).output().unwrap();
        assert_eq!(text(&output.stdout), expected, "{calls}: {}", text(&output.stderr));
    }
}

#[test]
fn what_comes_first_decides() {
    if facility::is_missing() {
        return;
    }
    let policy = "
        [[rule]]
        call = '%file'
        path = 'DIR/file'
        allow = true
        [[rule]]
        call = ['openat', 'open']
        path = 'DIR/**'
        deny = 'ENOENT'";
    assert_eq!(text(&run(policy, &["cat", "file"]).stdout), "content\n");
    assert_eq!(run(policy, &["cat", "policy.toml"]).status.code(), Some(1));
}

#[test]
fn values_are_returned_without_a_call() {
    if facility::is_missing() {
        return;
    }
    let policy = "[[rule]]\ncall = ['getuid', 'geteuid']\nreturn = 4711";
    assert_eq!(text(&run(policy, &["id", "-u"]).stdout), "4711\n");
    let policy = "[[rule]]\ncall = 'getppid'\nreturn = 7";
    // Often enough to be rewritten.
    let script = "import os; print({os.getppid() for _ in range(1000)})";
    assert_eq!(text(&run(policy, &[PYTHON, "-c", script]).stdout), "{7}\n");
}

#[test]
fn paths_are_rewritten() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("real")).unwrap();
    fs::write(directory.path().join("real/x"), "the real one\n").unwrap();
    let policy = "[[rule]]\ncall = '%file'\npath = '/nowhere/**'\nrewrite = 'DIR/real'";
    let script = "cat /nowhere/x; cd /nowhere && cat x; mv /nowhere/x /nowhere/y; ls /nowhere; echo new > /nowhere/z; ls";
    let output = in_directory(directory.path(), policy, &["sh", "-c", script], &[]);
    assert_eq!(text(&output.stdout), "the real one\nthe real one\ny\ny\nz\n", "{}", text(&output.stderr));
    assert_eq!(fs::read(directory.path().join("real/z")).unwrap(), b"new\n");
}

#[test]
fn programs_are_rewritten() {
    if facility::is_missing() {
        return;
    }
    let policy = "[[rule]]\ncall = 'execve'\npath = '/bin/echo'\nrewrite = '/bin/false'";
    assert_eq!(run(policy, &["sh", "-c", "/bin/echo x"]).status.code(), Some(1));
}

#[test]
fn connections_are_redirected() {
    if facility::is_missing() {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let policy =
        format!("[[rule]]\ncall = 'connect'\naddress = '192.0.2.0/24:80'\nredirect = '127.0.0.1:{port}'");
    for (family, address) in [("AF_INET", "192.0.2.7"), ("AF_INET6", "::ffff:192.0.2.7")] {
        let script = format!(
            "import socket; s = socket.socket(socket.{family}); s.connect(('{address}', 80)); s.send(b'redirected')"
        );
        let output = run(&policy, &[PYTHON, "-c", &script]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let mut got = String::new();
        listener.accept().unwrap().0.read_to_string(&mut got).unwrap();
        assert_eq!(got, "redirected");
    }
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join("socket")).unwrap();
    let policy = "[[rule]]\ncall = 'connect'\naddress = 'unix:/nowhere/*'\nredirect = 'unix:DIR/socket'";
    let script =
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/nowhere/x'); s.send(b'redirected')";
    let output = in_directory(directory.path(), policy, &[PYTHON, "-c", script], &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut got = String::new();
    listener.accept().unwrap().0.read_to_string(&mut got).unwrap();
    assert_eq!(got, "redirected");
}

#[test]
fn other_addresses_stay() {
    if facility::is_missing() {
        return;
    }
    let policy = "
        [[rule]]
        call = 'connect'
        address = '*:1'
        deny = 'ENETDOWN'";
    let script = "import socket
for family, address in [(socket.AF_INET, ('127.0.0.1', 1)), (socket.AF_INET6, ('::1', 1)), (socket.AF_INET, ('127.0.0.1', 2))]:
    try: socket.socket(family).connect(address)
    except OSError as error: print(error.strerror)";
    let output = run(policy, &[PYTHON, "-c", script]);
    assert!(
        text(&output.stdout).starts_with("Network is down\nNetwork is down\n"),
        "{}",
        text(&output.stdout)
    );
    assert!(!text(&output.stdout).ends_with("Network is down\nNetwork is down\nNetwork is down\n"));
}

#[test]
fn faults_are_injected_every_nth_time() {
    if facility::is_missing() {
        return;
    }
    let policy = "
        [[rule]]
        call = 'getppid'
        after = 30
        every = 10
        times = 3
        deny = 'EIO'";
    // It never fails, so the C library does not look for errors.
    let script = "import ctypes; f = ctypes.CDLL(None).getppid; print([i for i in range(100) if f() == -5])";
    assert_eq!(text(&run(policy, &[PYTHON, "-c", script]).stdout), "[39, 49, 59]\n");
}

#[test]
fn transfers_are_cut_short() {
    if facility::is_missing() {
        return;
    }
    let policy = "
        [[rule]]
        call = ['read', 'readv']
        path = 'DIR/file'
        short = 3";
    let script = "import os; f = os.open('file', 0); print(os.read(f, 100), os.readv(f, [bytearray(1), bytearray(9)]), os.read(f, 2))";
    assert_eq!(text(&run(policy, &[PYTHON, "-c", script]).stdout), "b'con' 1 b'en'\n");
    // A program that copies in a loop does not mind.
    assert_eq!(text(&run(policy, &["cat", "file"]).stdout), "content\n");
}

#[test]
fn interruptions_are_injected() {
    if facility::is_missing() {
        return;
    }
    let policy = "
        [[rule]]
        call = 'read'
        descriptor = 'pipe'
        every = 2
        deny = 'EINTR'";
    // Python's file objects try again.
    let script = "import os; r, w = os.pipe(); os.write(w, b'a\\n' * 9); os.close(w); print(len(os.fdopen(r).readlines()))";
    let output = run(policy, &[PYTHON, "-c", script]);
    assert_eq!(text(&output.stdout), "9\n", "{}", text(&output.stderr));
}

#[test]
fn kinds_of_descriptors_are_told_apart() {
    if facility::is_missing() {
        return;
    }
    let policy = "
        [[rule]]
        call = 'write'
        descriptor = 'socket'
        deny = 'EPIPE'
        [[rule]]
        call = 'write'
        descriptor = ['character', 'file']
        return = 1";
    let script = "
import os, socket
a, b = socket.socketpair()
try: os.write(a.fileno(), b'x')
except OSError as error: print(error.strerror, flush=True)
null = os.open('/dev/null', 1)
print(os.write(null, b'xyz'), flush=True)";
    assert_eq!(text(&run(policy, &[PYTHON, "-c", script]).stdout), "Broken pipe\n1\n");
}

#[test]
fn callers_and_programs_are_told_apart() {
    if facility::is_missing() {
        return;
    }
    // Made by the loader, these calls fail; made by the program's library, they do not.
    let policy = "
        [[rule]]
        call = 'access'
        caller = 'ld-linux-x86-64.so.2'
        log = true
        [[rule]]
        call = 'getuid'
        program = 'id'
        return = 11
        [[rule]]
        call = 'geteuid'
        caller = '/nowhere/library.so'
        return = 12";
    let output = run(policy, &["sh", "-c", "id -ru; id -u"]);
    assert_eq!(text(&output.stdout), format!("11\n{}\n", rustix::process::geteuid().as_raw()));
    assert!(text(&output.stderr).contains("access(\"/etc/ld.so.preload\""), "{}", text(&output.stderr));
    let policy = "[[rule]]\ncall = 'getuid'\ncaller = 'libc.so*'\nreturn = 11";
    assert_eq!(text(&run(policy, &["id", "-ru"]).stdout), "11\n");
}

#[test]
fn calls_are_delayed_and_logged() {
    if facility::is_missing() {
        return;
    }
    let policy = "[[rule]]\ncall = 'unlinkat'\ndelay = '300ms'\nlog = true";
    let start = Instant::now();
    let output = run(policy, &["rm", "file"]);
    assert!(start.elapsed() >= Duration::from_millis(300));
    assert!(text(&output.stderr).contains("unlinkat(AT_FDCWD, \"file\", 0) = 0"), "{}", text(&output.stderr));
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let policy = "[[rule]]\ncall = 'kill'\ndeny = 'EPERM'\nlog = true";
    let options = ["--log", log.to_str().unwrap()];
    let output = in_directory(directory.path(), policy, &["sh", "-c", "kill -9 $$; exit 5"], &options);
    assert_eq!(output.status.code(), Some(5), "{}", text(&output.stderr));
    let told = fs::read_to_string(log).unwrap();
    assert!(told.contains("SIGKILL) = -1 EPERM (Operation not permitted) (by policy)"), "{told}");
}

#[test]
fn rules_hold_in_all_processes_and_threads() {
    if facility::is_missing() {
        return;
    }
    let policy = "[[rule]]\ncall = 'getppid'\nreturn = 7";
    let script = "
import os, subprocess, sys, threading
seen = set()
def ask():
    for _ in range(500): seen.add(os.getppid())
threads = [threading.Thread(target=ask) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
print(seen, flush=True)
if os.fork() == 0:
    print(os.getppid(), flush=True)
    os._exit(0)
os.wait()
subprocess.run([sys.executable, '-c', 'import os; print(os.getppid())'])";
    assert_eq!(text(&run(policy, &[PYTHON, "-c", script]).stdout), "{7}\n7\n7\n");
}

/// Registers that a call leaves alone stay as they are, where the policy is asked by rewritten code.
#[test]
fn asking_the_policy_changes_no_register() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("tracee.c");
    fs::write(&source, include_str!("run/registers.c")).unwrap();
    let tracee = directory.path().join("tracee");
    orrery_testing::Compiler::c().build(&[&source], &tracee);
    let policy = "[[rule]]\ncall = '*'\npath = '/nowhere'\ndeny = 'EIO'\n[[rule]]\ncall = 'getppid'\nevery = 1000000\nreturn = 1";
    let output = in_directory(directory.path(), policy, &[tracee.to_str().unwrap()], &[]);
    assert_eq!((text(&output.stdout).as_str(), output.status.code()), ("1000 calls, 0 wrong\n", Some(0)));
}

#[test]
fn what_is_wrong_with_a_policy_is_told_before_anything_runs() {
    if facility::is_missing() {
        return;
    }
    for (policy, place, reason) in [
        ("[[rule]]\ncall = 'opnat'\ndeny = 'EIO'", "2:8", "no system call is called \"opnat\""),
        ("[[rule]]\ncall = ['open', 'x']\ndeny = 'EIO'", "2:17", "no system call is called \"x\""),
        ("[[rule]]\ncall = 'open'\ndeny = 'EFOO'", "3:8", "no error is called \"EFOO\""),
        ("[[rule]]\ncall = 'open'", "1:1", "the rule does nothing"),
        ("[[rule]]\ncall = 'open'\ncolour = 'red'", "3:1", "unknown field `colour`"),
        ("[[rule]\ncall = 'open'", "1:8", ""),
        ("[[rule]]\ndeny = 'EIO'", "1:1", "missing field `call`"),
        ("[[rule]]\ncall = 7\ndeny = 'EIO'", "2:8", "a string or a list of strings"),
        ("[[rule]]\ncall = 'exit_group'\ndeny = 'EIO'", "2:8", "exit_group cannot be answered"),
        (
            "[[rule]]\ncall = 'getpid'\npath = '/x'\ndeny = 'EIO'",
            "2:8",
            "getpid takes neither a path nor a descriptor",
        ),
        ("[[rule]]\ncall = 'open'\npath = 'x'\ndeny = 'EIO'", "3:8", "\"x\" is relative"),
        ("[[rule]]\ncall = 'open'\npath = []\ndeny = 'EIO'", "3:8", "the list is empty"),
        (
            "[[rule]]\ncall = 'read'\ndescriptor = 'fifo'\ndeny = 'EIO'",
            "3:14",
            "\"fifo\" is no kind of descriptor",
        ),
        ("[[rule]]\ncall = 'open'\nshort = 3", "2:8", "open transfers no bytes"),
        ("[[rule]]\ncall = 'read'\nshort = -3", "3:9", "a number from 0"),
        ("[[rule]]\ncall = 'open'\nrewrite = '/x'", "3:11", "rewrite needs one path pattern"),
        ("[[rule]]\ncall = 'open'\npath = '/y'\nrewrite = 'x'", "4:11", "a path from the root"),
        ("[[rule]]\ncall = 'connect'\naddress = '10.0.0.0/40'\ndeny = 'EIO'", "3:11", "0 to 32 bits"),
        ("[[rule]]\ncall = 'connect'\nredirect = '127.0.0.1:1'", "3:12", "redirect needs an address"),
        (
            "[[rule]]\ncall = 'connect'\naddress = '*:1'\nredirect = 'unix:/x'",
            "4:12",
            "a socket has one family",
        ),
        ("[[rule]]\ncall = 'read'\ndelay = '5 fortnights'", "3:9", "is no duration"),
        ("[[rule]]\ncall = 'read'\nallow = true\ndeny = 'EIO'", "4:8", "a rule does one thing"),
        ("[[rule]]\ncall = 'read'\nallow = false", "3:9", "allow is true, or left out"),
        ("[[rule]]\ncall = 'read'\nevery = 0\ndeny = 'EIO'", "3:9", "from 1 on"),
    ] {
        let output = run(policy, &["touch", "was-here"]);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{policy}");
        assert!(message.contains(&format!("policy.toml:{place}: ")), "{policy}\n{message}");
        assert!(message.contains(reason), "{policy}\n{message}");
    }
    let directory = tempfile::tempdir().unwrap();
    in_directory(directory.path(), "[[rule]]\ncall = 'x'\nallow = true", &["touch", "was-here"], &[]);
    assert!(!directory.path().join("was-here").exists());
    let missing =
        Command::new(ORRERY).args(["run", "--policy", "/nonexistent", "--", "true"]).output().unwrap();
    assert!(text(&missing.stderr).contains("read /nonexistent"), "{}", text(&missing.stderr));
}

#[test]
fn an_empty_policy_changes_nothing() {
    if facility::is_missing() {
        return;
    }
    assert_eq!(text(&run("", &["cat", "file"]).stdout), "content\n");
    assert_eq!(
        text(&run("[[rule]]\ncall = '*'\nallow = true", &["sh", "-c", "cat file | cat"]).stdout),
        "content\n"
    );
}
