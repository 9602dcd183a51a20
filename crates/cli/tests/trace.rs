//! `orrery trace`: what it tells, of which calls, and in what form.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "run/facility.rs"]
mod facility;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");

fn trace(options: &[&str], words: &[&str]) -> Output {
    let mut command = Command::new(ORRERY);
    command.arg("trace").args(options).arg("--").args(words).stdin(Stdio::null()).env("LC_ALL", "C");
    command.output().unwrap()
}

fn told(options: &[&str], words: &[&str]) -> String {
    String::from_utf8_lossy(&trace(options, words).stderr).into_owned()
}

/// The lines that tell of calls.
fn calls(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.contains(" +++ ") && !line.contains(" --- "))
}

#[test]
fn calls_are_told_with_their_arguments() {
    if facility::is_missing() {
        return;
    }
    let text = told(&[], &["cat", "/etc/passwd", "/nonexistent"]);
    for part in [
        "openat(AT_FDCWD, \"/etc/passwd\", O_RDONLY",
        "openat(AT_FDCWD, \"/nonexistent\", O_RDONLY) = -1 ENOENT (No such file or directory)",
        "read(3, \"root:x:0:0:",
        "mmap(NULL, ",
        "PROT_READ|PROT_WRITE, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0) = 0x",
        "exit_group(1) = ?",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
}

#[test]
fn structures_are_told_by_their_members() {
    if facility::is_missing() {
        return;
    }
    let script = r"
import os, select, signal, socket, time
server = socket.socket()
server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
server.bind(('127.0.0.1', 0))
server.listen()
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
peer.sendmsg([b'first', b'second'])
client.recvmsg(100)
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
poll = select.poll(); poll.register(peer, select.POLLOUT); poll.poll(5)
epoll = select.epoll(); epoll.register(peer, select.EPOLLOUT); epoll.poll(1)
select.select([], [peer], [], 1)
os.stat('/dev/null'); os.pipe(); os.writev(1, [b'one', b'two']); os.uname()
os.access('/', os.R_OK | os.X_OK)
time.sleep(0.001)
if os.fork() == 0: os._exit(3)
os.wait()
";
    let text = told(&[], &["/usr/bin/python3", "-I", "-S", "-c", script]);
    for part in [
        "SOL_TCP, TCP_NODELAY, [1], 4) = 0",
        ", 127.0.0.1:0, 16) = 0",
        "\"firstsecond\", 0) = 11",
        "rt_sigaction(SIGUSR1, {sa_handler=0x",
        "sa_flags=SA_RESTORER|SA_ONSTACK, ",
        "rt_sigprocmask(SIG_BLOCK, [TERM], [], 8) = 0",
        "events=POLLOUT, revents=POLLOUT}]",
        "{events=EPOLLOUT, data=",
        "\"/dev/null\", {st_mode=S_IFCHR|0666, st_rdev=makedev(0x1, 0x3), ...}, 0) = 0",
        "writev(1, \"onetwo\", 2) = 6",
        "uname({sysname=\"Linux\", nodename=",
        "(\"/\", R_OK|X_OK) = 0",
        "clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, {tv_sec=",
        "[exited with 3]",
        "CLONE_CHILD_SETTID|SIGCHLD",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let told = |call: &str| text.lines().find(|line| line.contains(call)).unwrap().to_owned();
    // Who connected, and how long its address is.
    assert!(told(" accept4(").contains(", 127.0.0.1:") && told(" accept4(").contains(", [16], "), "{text}");
    // Both ends of a pipe.
    assert!(told(" pipe2(").contains("pipe2(["), "{text}");
}

#[test]
fn commands_are_told_with_their_arguments() {
    if facility::is_missing() {
        return;
    }
    let text = told(&["-e", "execve"], &["sh", "-c", "exec env -i A=b /bin/echo 'a \"word\"' two"]);
    assert!(text.contains("[\"/bin/echo\", \"a \\\"word\\\"\", \"two\"]"), "{text}");
}

#[test]
fn all_members_are_told_on_request() {
    if facility::is_missing() {
        return;
    }
    let text = told(&["-v", "-e", "newfstatat,statx"], &["stat", "-c", "%s", "/etc/passwd"]);
    assert!(text.contains("_nlink=1") && text.contains("tv_nsec="), "{text}");
}

#[test]
fn children_and_what_they_become_are_told() {
    if facility::is_missing() {
        return;
    }
    let text = told(
        &["-e", "vfork,fork,clone,clone3,execve,wait4,exit_group"],
        &["sh", "-c", "/bin/true; /bin/false; exit 9"],
    );
    assert!(text.contains("execve(\"/bin/true\""), "{text}");
    assert!(text.contains("execve(\"/bin/false\""), "{text}");
    let threads: std::collections::BTreeSet<_> =
        text.lines().filter_map(|line| line.split_ascii_whitespace().next()).collect();
    assert_eq!(threads.len(), 3, "{text}");
    for status in [0, 1, 9] {
        assert!(text.contains(&format!("exit_group({status}) = ?")), "{text}");
    }
    // Whoever makes a child is told its number.
    let born = text.lines().filter(|line| line.contains("fork(") || line.contains("clone")).count();
    assert_eq!(born, 2, "{text}");
    let numbers = text.lines().filter(|line| line.contains("fork(") || line.contains("clone"));
    assert!(numbers.clone().all(|line| threads.contains(line.rsplit(' ').next().unwrap())), "{text}");
}

#[test]
fn calls_are_chosen_by_name_path_failure_and_duration() {
    if facility::is_missing() {
        return;
    }
    let text = told(&["-e", "%file", "-P", "/etc/**"], &["cat", "/etc/passwd", "/nonexistent"]);
    assert!(
        text.contains("\"/etc/passwd\"") && !text.contains("\"/nonexistent\"") && !text.contains("libc.so"),
        "{text}"
    );
    // Where descriptors lead counts, too.
    let text = told(&["-e", "read", "-P", "/etc/passwd"], &["cat", "/etc/passwd"]);
    assert!(text.contains("read(3, \"root:"), "{text}");
    let text = told(&["-Z"], &["sh", "-c", "test -e /nonexistent; test -e /"]);
    assert!(text.contains("/nonexistent") && calls(&text).all(|line| line.contains(" = -1 E")), "{text}");
    let text = told(&["-z", "-e", "openat,exit_group"], &["cat", "/nonexistent", "/etc/passwd"]);
    assert!(text.contains("/etc/passwd") && calls(&text).all(|line| !line.contains(" = -1 E")), "{text}");
    // Any call may take long where others want the CPU.
    let text = told(&["--slower", "100ms", "-T"], &["sleep", "0.15"]);
    let duration =
        |line: &str| line.rsplit_once('<').unwrap().1.trim_end_matches('>').parse::<f64>().unwrap();
    assert!(calls(&text).all(|line| duration(line) >= 0.099), "{text}");
    let sleep = calls(&text).find(|line| line.contains("clock_nanosleep(")).unwrap();
    assert!(duration(sleep) >= 0.149, "{text}");
}

#[test]
fn calls_are_chosen_in_straces_words() {
    if facility::is_missing() {
        return;
    }
    let words = ["sh", "-c", "echo some >/dev/null; cat /nonexistent 2>/dev/null"];
    let names = |options: &[&str]| {
        let text = told(options, &words);
        let name =
            |line: &str| line.split_ascii_whitespace().nth(1).unwrap().split('(').next().unwrap().to_owned();
        calls(&text).map(name).collect::<std::collections::BTreeSet<_>>()
    };
    let of = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(names(&["-f", "-q", "-e", "trace=write,execve"]), of(&["execve", "write"]));
    let rest = names(&["-e", "trace=!%file,%memory,%descriptor"]);
    assert!(
        rest.contains("exit_group") && rest.is_disjoint(&of(&["execve", "openat", "mmap", "write"])),
        "{rest:?}"
    );
    assert_eq!(
        names(&["-e", "%process", "-e", "!wait4,%signal,*fork,clone*"]),
        of(&["execve", "exit_group"])
    );
    assert_eq!(names(&["-e", "openat", "-e", "status=failed"]), of(&["openat"]));
    assert_eq!(names(&["-e", "/^exec|^exit_/"]), of(&["execve", "exit_group"]));
    for (options, message) in
        [(&["-e", "inject=openat"][..], "it says nothing to do"), (&["-e", "%nonsense"], "groups are %file")]
    {
        let output = trace(options, &["true"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains(message), "{said}");
    }
    // What runs already is no program to start.
    let output = trace(&["-p", "1"], &["true"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("cannot be used with"), "{said}");
}

#[test]
fn descriptors_are_told_with_where_they_lead() {
    if facility::is_missing() {
        return;
    }
    let script = "
import os, socket
directory = os.open('/etc', os.O_RDONLY)
file = os.open('passwd', os.O_RDONLY, dir_fd=directory)
os.read(file, 4); os.close(file)
one, other = socket.socketpair(); one.send(b'x'); os.read(0, 1)";
    let text = told(&["-y"], &["/usr/bin/python3", "-I", "-S", "-c", script]);
    let line = |part: &str| {
        calls(&text).find(|line| line.contains(part)).unwrap_or_else(|| panic!("{part}\n{text}"))
    };
    let opened = line("</etc>, \"passwd\", O_RDONLY");
    assert!(opened.ends_with("</etc/passwd>"), "{opened}");
    let descriptor = opened.rsplit(' ').next().unwrap();
    for call in [format!("read({descriptor}, \"root\", 4) = 4"), format!("close({descriptor}) = 0")] {
        line(&call);
    }
    assert!(line("sendto(").contains("<socket:["), "{text}");
    line("read(0</dev/null>, \"\", 1) = 0");
    // Nothing leads anywhere from a descriptor that there is not; AT_FDCWD stands for one.
    assert!(!text.contains("-1<") && !text.contains("-100"), "{text}");
    let here = std::env::current_dir().unwrap();
    line(&format!("openat(AT_FDCWD<{}>, \"/etc\", O_RDONLY", here.display()));
}

#[test]
fn lines_tell_as_much_as_is_asked_for() {
    if facility::is_missing() {
        return;
    }
    let words = ["/usr/bin/python3", "-I", "-S", "-c", "import os; os.write(1, b'0123456789' * 30)"];
    let written = |options: &[&str]| {
        let text = told(&[&["-e", "write"], options].concat(), &words);
        let line = calls(&text).find(|line| line.contains("write(1, ")).unwrap().to_owned();
        line.split('"').nth(1).unwrap().len()
    };
    assert_eq!([written(&[]), written(&["-s", "7"]), written(&["-s", "200"])], [48, 7, 200]);
    // Times.
    let text = told(&["-ttt", "-e", "clock_nanosleep"], &["sleep", "0.1"]);
    let begin: f64 = text.split_ascii_whitespace().nth(1).unwrap().parse().unwrap();
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
    assert!((now - 600.0..now).contains(&begin), "{text}");
    for (option, form) in [("-t", "00:00:00"), ("-tt", "00:00:00.000000")] {
        let text = told(&[option, "-e", "clock_nanosleep"], &["sleep", "0.1"]);
        let time = text.split_ascii_whitespace().nth(1).unwrap();
        let digits = time.replace(|each: char| each.is_ascii_digit(), "0");
        assert_eq!(digits, form, "{text}");
    }
    let text = told(&["-r", "-e", "clock_nanosleep,exit_group"], &["sleep", "0.1"]);
    let since: f64 = calls(&text).nth(1).unwrap().split_ascii_whitespace().nth(1).unwrap().parse().unwrap();
    assert!((0.1..60.0).contains(&since), "{text}");
    // From where.
    let text =
        told(&["-k", "-e", "getppid"], &["/usr/bin/python3", "-I", "-S", "-c", "import os; os.getppid()"]);
    let frames: Vec<_> = text.lines().skip_while(|line| !line.contains("getppid()")).skip(1).collect();
    assert!(frames[0].contains(" > libc.so.6+0x") && frames[0].contains(" (getppid+0x"), "{text}");
    assert!(frames[1].contains("python3") && frames[1].contains("+0x"), "{text}");
}

#[test]
fn callers_are_found_in_pages_that_were_rewritten() {
    if facility::is_missing() {
        return;
    }
    // So many that the place is rewritten, and with it the page of the C library that it is in.
    let script = "import os\nfor i in range(60): os.getppid()";
    let text = told(&["-k", "-e", "getppid"], &["/usr/bin/python3", "-I", "-S", "-c", script]);
    let innermost: Vec<_> = text
        .lines()
        .zip(text.lines().skip(1))
        .filter_map(|(call, frame)| call.contains(" getppid()").then_some(frame))
        .collect();
    assert_eq!(innermost.len(), 60, "{text}");
    assert!(
        innermost.iter().all(|frame| frame.contains(" > libc.so.6+0x") && frame.contains("(getppid+0x")),
        "{text}"
    );
    assert!(!text.contains(" > 0x"), "{text}");
}

#[test]
fn traces_are_added_to_a_file() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("trace");
    let ends = |options: &[&str]| {
        let output =
            trace(&[&["-e", "exit_group", "-o", file.to_str().unwrap()], options].concat(), &["true"]);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        fs::read_to_string(&file).unwrap().matches("exit_group(0) = ?").count()
    };
    assert_eq!([ends(&[]), ends(&["-A"]), ends(&["-A"]), ends(&[])], [1, 2, 3, 1]);
}

#[test]
fn lines_can_be_objects() {
    if facility::is_missing() {
        return;
    }
    let text = told(&["--json", "-e", "openat"], &["sh", "-c", "exec 2>/dev/null; cat /nonexistent"]);
    let line = text.lines().find(|line| line.contains("/nonexistent") && line.starts_with('{')).unwrap();
    let object: serde_json::Value = serde_json::from_str(line).unwrap();
    assert_eq!(
        (&object["call"], &object["error"], object["result"].as_i64()),
        (&"openat".into(), &"ENOENT".into(), Some(-2))
    );
    assert_eq!(object["arguments"][1], serde_json::json!({"name": "filename", "value": "\"/nonexistent\""}));
    assert!(
        object["duration_ns"].as_u64().unwrap() > 0 && object["time"].as_str().unwrap().ends_with('Z'),
        "{line}"
    );
}

#[test]
fn a_trace_is_complete_however_fast_the_program_is() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("trace");
    let script = "import os\nfor i in range(30000): os.getppid()";
    trace(&["-e", "getppid", "-o", file.to_str().unwrap()], &["/usr/bin/python3", "-c", script]);
    let text = fs::read_to_string(file).unwrap();
    assert_eq!(text.lines().filter(|line| line.contains(" getppid() = ")).count(), 30_000);
}

#[test]
fn counts_tell_durations() {
    if facility::is_missing() {
        return;
    }
    let text = told(&["-c", "-e", "clock_nanosleep,openat"], &["sleep", "0.1"]);
    let names = |sort: &str| {
        let text = told(&["-c", "-S", sort, "-e", "clock_nanosleep,openat,close"], &["sleep", "1"]);
        let rows = text.lines().skip(1).map(|line| line.split_ascii_whitespace().next().unwrap().to_owned());
        rows.take(3).collect::<Vec<_>>()
    };
    assert_eq!(names("name"), ["clock_nanosleep", "close", "openat"]);
    assert_eq!(names("total-time")[0], "clock_nanosleep");
    assert_ne!(names("calls")[0], "clock_nanosleep");
    assert!(text.contains("p99 <") && text.contains("clock_nanosleep") && !text.contains("mmap"), "{text}");
}

#[test]
fn what_a_policy_answers_is_told() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let policy = directory.path().join("p.toml");
    fs::write(&policy, "[[rule]]\ncall = 'openat'\npath = '/etc/passwd'\ndeny = 'EIO'").unwrap();
    let text = told(&["-e", "openat", "--policy", policy.to_str().unwrap()], &["cat", "/etc/passwd"]);
    assert!(text.contains("\"/etc/passwd\", O_RDONLY) = -1 EIO (Input/output error) (by policy)"), "{text}");
}

#[test]
fn calls_are_tampered_with() {
    if facility::is_missing() {
        return;
    }
    let text = told(
        &["-E", "LD_LIBRARY_PATH", "-e", "openat", "-e", "fault=openat:error=EMFILE:when=2+"],
        &["cat", "/etc/passwd"],
    );
    let ways: Vec<_> = calls(&text)
        .filter(|line| line.contains("openat("))
        .map(|line| line.contains(" = -1 EMFILE"))
        .collect();
    assert!(ways.len() >= 2 && !ways[0] && ways[1..].iter().all(|fails| *fails), "{text}");

    let script = "import os\nprint([os.getppid() for _ in range(6)], flush=True)\nos.write(1, b'more')";
    let options =
        ["-e", "getppid", "-e", "inject=getppid:retval=7:when=1+3", "-e", "inject=write:delay_enter=80ms"];
    let begun = std::time::Instant::now();
    let output = trace(&options, &["/usr/bin/python3", "-I", "-S", "-c", script]);
    assert!(begun.elapsed() >= std::time::Duration::from_millis(160), "{output:?}");
    let printed = String::from_utf8_lossy(&output.stdout);
    let answers: Vec<_> = printed.trim_start_matches('[').split([',', ']']).map(str::trim).take(6).collect();
    let sevens: Vec<_> = answers.iter().map(|answer| *answer == "7").collect();
    assert_eq!(sevens, [true, false, false, true, false, false], "{printed}");
    assert!(printed.ends_with("more"), "{printed}");
}

#[test]
fn variables_and_users_are_changed_for_the_program() {
    if facility::is_missing() {
        return;
    }
    let output = trace(
        &["-e", "none", "-E", "ADDED=a=b", "-E", "LC_ALL"],
        &["sh", "-c", "echo ${ADDED-} ${LC_ALL-none}"],
    );
    assert_eq!(String::from_utf8_lossy(&output.stdout), "a=b none\n", "{output:?}");
    let is_root = rustix::process::geteuid().is_root();
    let output = trace(
        &["-e", "execve,openat", "-u", "nobody"],
        &["sh", "-c", "id -un; id -G; exec cat /etc/passwd >/dev/null"],
    );
    if !is_root {
        assert!(String::from_utf8_lossy(&output.stderr).contains("only root may"), "{output:?}");
        return;
    }
    let printed = String::from_utf8_lossy(&output.stdout);
    let own = Command::new("id").args(["-G", "nobody"]).output().unwrap();
    assert_eq!(printed, format!("nobody\n{}", String::from_utf8_lossy(&own.stdout)), "{output:?}");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("\"/etc/passwd\", O_RDONLY") && text.contains("execve("), "{text}");
    // Counted as well, by another way.
    let output = trace(&["-c", "-u", "nobody"], &["id", "-un"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "nobody\n", "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("openat"), "{output:?}");
}

#[test]
fn the_programs_end_is_the_traces() {
    if facility::is_missing() {
        return;
    }
    assert_eq!(trace(&["-e", "getpid"], &["sh", "-c", "exit 7"]).status.code(), Some(7));
    assert_eq!(trace(&["-e", "getpid"], &["sh", "-c", "kill -USR1 $$"]).status.signal(), Some(10));
    let ended = |script: &str| told(&["-e", "none"], &["sh", "-c", script]);
    assert!(ended("exit 7").ends_with(" +++ exited with 7 +++\n"));
    assert!(ended("kill -USR1 $$").ends_with(" +++ killed by SIGUSR1 +++\n"));
    let output = trace(&["-e", "nonsense"], &["true"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("no system call is called \"nonsense\""));
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn what_the_kernel_has_not_written_is_a_pointer() {
    if facility::is_missing() {
        return;
    }
    let script = r"
import ctypes, os, signal, time
libc = ctypes.CDLL(None)
status = ctypes.c_int(0x7d)
child = os.fork()
if child == 0: time.sleep(600)
libc.wait4(child, ctypes.byref(status), os.WNOHANG, None)
os.kill(child, signal.SIGKILL)
libc.wait4(child, ctypes.byref(status), 0, None)
names = ctypes.create_string_buffer(b'left over')
libc.getxattr(b'/dev/null', b'user.a', names, 0)
libc.listxattr(b'/proc/self', names, 0)
";
    let text = told(&["-e", "wait4,getxattr,listxattr"], &["/usr/bin/python3", "-I", "-S", "-c", script]);
    let waited: Vec<_> = calls(&text).filter(|line| line.contains(" wait4(")).collect();
    assert!(waited[0].contains(", 0x") && waited[0].ends_with(", WNOHANG, NULL) = 0"), "{text}");
    assert!(waited[1].contains(", [killed by SIGKILL], 0, NULL) = "), "{text}");
    assert!(!text.contains("left over"), "{text}");
}

#[test]
fn calls_that_have_not_returned_are_told() {
    if facility::is_missing() {
        return;
    }
    // It ends when it is told to, in a call that it never returned from.
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("trace");
    let started = |options: &[&str], words: &[&str]| {
        let mut command = Command::new(ORRERY);
        command.args(["trace", "-o", file.to_str().unwrap()]).args(options).arg("--").args(words);
        command.stdin(Stdio::piped()).env("LC_ALL", "C").spawn().unwrap()
    };
    let waits = |process: u32, call: &str| {
        let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap();
        let Some(child) = children.split_ascii_whitespace().next() else { return false };
        fs::read_to_string(format!("/proc/{child}/syscall")).is_ok_and(|text| text.starts_with(call))
    };
    let send = |process: u32, signal: i32| {
        // SAFETY: a signal to a child that was not waited for.
        assert_eq!(unsafe { libc::kill(libc::pid_t::try_from(process).unwrap(), signal) }, 0);
    };
    let text = || fs::read_to_string(&file).unwrap_or_default();
    // 0: read; 230: clock_nanosleep.
    for (words, call, line) in [
        (&["cat"][..], "0 0x0 ", " read(0, <unfinished ...>"),
        (
            &["sleep", "1000"],
            "230 0x0 0x0 ",
            " clock_nanosleep(CLOCK_REALTIME, 0, {tv_sec=1000, tv_nsec=0}, <unfinished ...>",
        ),
    ] {
        let mut trace = started(&["-e", "read,clock_nanosleep"], words);
        orrery_testing::eventually("the program waits", || waits(trace.id(), call));
        // Looks come in intervals; each says what the last one saw.
        std::thread::sleep(std::time::Duration::from_millis(500));
        // Waiting would close it, and so end the call.
        let input = trace.stdin.take();
        send(trace.id(), libc::SIGTERM);
        assert_eq!(trace.wait().unwrap().signal(), Some(libc::SIGTERM));
        drop(input);
        assert!(text().contains(line), "{}", text());
        assert_eq!(text().matches("unfinished").count(), 1, "{}", text());
    }
    // One that goes on is told of when somebody interrupts, and then as it returns.
    let script = "import os, signal; signal.signal(signal.SIGUSR1, lambda *_: None); os.read(0, 1)";
    let mut trace = started(&["-e", "read"], &["/usr/bin/python3", "-I", "-S", "-c", script]);
    orrery_testing::eventually("the program waits", || waits(trace.id(), "0 0x0 "));
    send(trace.id(), libc::SIGUSR1);
    orrery_testing::eventually("the call is told", || {
        // Again, should the thread have run just then.
        send(trace.id(), libc::SIGUSR1);
        std::thread::sleep(std::time::Duration::from_millis(300));
        text().contains(" read(0, <unfinished ...>")
    });
    drop(trace.stdin.take());
    assert!(trace.wait().unwrap().success());
    assert!(text().contains(" read(0, \"\", 1) = 0"), "{}", text());
    // What returns is told once.
    let mut trace = started(&["-e", "clock_nanosleep"], &["sleep", "0.5"]);
    assert!(trace.wait().unwrap().success());
    assert!(
        text().contains("{tv_sec=0, tv_nsec=500000000}, ") && !text().contains("unfinished"),
        "{}",
        text()
    );
}

#[test]
fn what_is_not_offered_is_refused_by_name() {
    if facility::is_missing() {
        return;
    }
    for (options, code, message) in [
        (
            &["-s", "4000"][..],
            2,
            "at most 200 bytes of a buffer are recorded; for more, use `strace -s 4000`",
        ),
        (&["-s", "x"], 2, "it is no number from 0 to 200"),
        (&["-o", "|cat"], 1, "cannot write to the command |cat"),
        (&["-e", "decode-fds=inode"], 1, "cannot decode descriptors as \"inode\""),
        (&["-U", "calls"], 2, "--count"),
        (&["-X", "raw"], 2, "-X"),
        (&["-Y"], 2, "-Y"),
        (&["-e", "inject=read:signal=SIGINT"], 1, "signal= cannot be had here"),
        (&["-u", "no user has this name"], 1, "there is no such user"),
        (&["-E", "=b"], 1, "a variable has a name"),
        (&["-D"], 2, "-D"),
    ] {
        let output = trace(options, &["true"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(code) && said.contains(message), "{options:?}: {output:?}");
    }
}

#[test]
fn each_thread_has_a_file_on_request() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("trace");
    let script = "/bin/true; exit 3";
    let output = trace(
        &["-ff", "-o", file.to_str().unwrap(), "-e", "exit_group", "-e", "signal=none"],
        &["sh", "-c", script],
    );
    assert!(output.status.code() == Some(3) && output.stderr.is_empty(), "{output:?}");
    assert!(!file.exists());
    let mut texts: Vec<_> = fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap())
        .collect();
    texts.sort();
    assert_eq!(
        texts,
        ["exit_group(0) = ?\n+++ exited with 0 +++\n", "exit_group(3) = ?\n+++ exited with 3 +++\n"]
    );
}

#[test]
fn strings_are_hexadecimal_on_request() {
    if facility::is_missing() {
        return;
    }
    let written = |option: &str, format: &str| {
        let text = told(&[option, "-e", "write"], &["printf", format]);
        text.lines().find(|line| line.contains(" write(1, ")).unwrap().split('"').nth(1).unwrap().to_owned()
    };
    assert_eq!(written("-x", "a\\tb"), "a\\tb");
    assert_eq!(written("-x", "a\\001"), "\\x61\\x01");
    assert_eq!(written("-xx", "ab"), "\\x61\\x62");
    if orrery_testing::is_there("strace") {
        for (option, format) in [("-x", "a\\001"), ("-x", "ab"), ("-xx", "a b")] {
            let mut strace = Command::new("strace");
            let output =
                strace.args([option, "-e", "write", "printf", format]).stdin(Stdio::null()).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(
                said.contains(&format!("write(1, \"{}\"", written(option, format))),
                "{option} {format}: {said}"
            );
        }
    }
    // Paths, too, and what structures hold.
    let text =
        told(&["-xx", "-y", "-e", "openat,uname,write"], &["sh", "-c", "exec uname </dev/null >/dev/null"]);
    assert!(text.contains("\"\\x2f\\x64\\x65\\x76\\x2f\\x6e\\x75\\x6c\\x6c\""), "{text}");
    assert!(
        text.contains("{sysname=\"\\x4c\\x69\\x6e\\x75\\x78\"") && text.contains("write(1<\\x2f"),
        "{text}"
    );
}

#[test]
fn lines_have_numbers_addresses_and_columns_on_request() {
    if facility::is_missing() {
        return;
    }
    let text = told(&["-n", "-i", "-a", "70", "-e", "write,exit_group"], &["echo", "word"]);
    let line = text.lines().find(|line| line.contains("write(1, ")).unwrap();
    let words: Vec<&str> = line.split(['[', ']']).collect();
    assert_eq!(words[1], "   1", "{line}");
    assert!(words[3].len() == 16 && u64::from_str_radix(words[3], 16).unwrap() > 0x1000, "{line}");
    assert_eq!(line.find(" = ").map(|place| place + 1), Some(70), "{line}");
    assert!(text.contains("[ 231] ["), "{text}");
    // What is longer is not cut.
    let text = told(&["-a", "5", "-e", "write"], &["echo", "word"]);
    assert!(text.contains(" write(1, \"word\\n\", 5) = 5"), "{text}");
}

#[test]
fn calls_and_their_summary_go_together() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("trace");
    for options in [&["-C"][..], &["-C", "-o", file.to_str().unwrap()]] {
        let mut text =
            told(&[options, &["-e", "write,openat", "-U", "calls,name", "-w"]].concat(), &["echo", "word"]);
        if options.len() > 1 {
            assert_eq!(text, "");
            text = fs::read_to_string(&file).unwrap();
        }
        let call = text.find(" write(1, \"word\\n\", 5) = 5").unwrap();
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        let header = rows.iter().position(|row| *row == ["calls", "call"]).unwrap();
        assert!(rows[header + 1..].contains(&vec!["1", "write"]), "{text}");
        assert!(!rows.iter().any(|row| row.contains(&"brk")), "{text}");
        assert!(text.find("calls").unwrap() > call, "{text}");
    }
}
