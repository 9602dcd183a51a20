//! `orrery trace` shows calls as strace(1) does: both look at the same program, and their lines are compared.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "run/facility.rs"]
mod facility;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use orrery_hijack::calls::{self, Argument, Signature};
use orrery_testing::{Compiler, is_there};

/// Calls whose lines differ from strace's, and how. Of these, only names of constants are compared.
const DIFFERENT: [(&str, &str); 20] = [
    ("arch_prctl", "zero is NULL"),
    ("clone", "arguments are those of the call, in their order, without names"),
    ("epoll_ctl", "the data of an event is one number"),
    ("fcntl", "a lock has its l_pid"),
    ("getrlimit", "RLIM_INFINITY, as in getrlimit(2)"),
    ("setrlimit", "RLIM_INFINITY, as in getrlimit(2)"),
    ("getrusage", "the maximal resident set is shown, too"),
    ("ioctl", "what the argument points to is not shown"),
    ("keyctl", "all arguments are shown, as numbers"),
    ("membarrier", "the result is a number"),
    ("personality", "the result is a number"),
    ("poll", "events that came are shown with those that were asked for"),
    ("prctl", "the result is a number"),
    ("ptrace", "zero is NULL"),
    ("pwritev2", "buffers are shown as what they hold together"),
    ("sendmsg", "of a header, what there is"),
    ("setsockopt", "times are structures"),
    ("statfs", "f_fsid is not shown"),
    ("waitid", "times of the child are not shown"),
    ("writev", "buffers are shown as what they hold together"),
];

/// Names that only one of both has, where every call is made with arguments that are refused, and why.
const NAMES_OF_ONE: [(&str, &str); 6] = [
    ("AT_HANDLE_MNT_ID_UNIQUE", "it is newer than strace 6.1"),
    ("FAN_NOFD", "a descriptor is a number"),
    ("IOPRIO_", "priorities of input and output are numbers"),
    ("RSEQ_FLAG_UNREGISTER", "strace 6.1 shows numbers"),
    ("SYSLOG_ACTION_", "strace shows it in a comment"),
    ("TFD_TIMER_ABSTIME", "timerfd_create does not take it"),
];

/// Calls that the second comparison cannot make: they would end, stop or change the program, or the machine.
const NOT_MADE: [&str; 35] = [
    "alarm",
    "brk",
    "clone",
    "clone3",
    "delete_module",
    "execve",
    "exit",
    "exit_group",
    "fork",
    "getppid",
    "init_module",
    "finit_module",
    "ioperm",
    "iopl",
    "kexec_file_load",
    "kexec_load",
    "modify_ldt",
    "pause",
    "personality",
    "ppoll",
    "pselect6",
    "reboot",
    "restart_syscall",
    "rt_sigreturn",
    "rt_sigprocmask",
    "seccomp",
    "select",
    "setdomainname",
    "sethostname",
    "sync",
    "unshare",
    "uprobe",
    "uretprobe",
    "vfork",
    "vhangup",
];

/// A program, and what both say of the calls that its first thread makes between its two calls of `getppid`.
fn lines(directory: &Path, program: &Path, arguments: &[&str]) -> [Vec<String>; 2] {
    let [strace, trace] = ["strace", "orrery"].map(|name| directory.join(name).to_str().unwrap().to_owned());
    let run = |command: &mut Command| {
        let status =
            command.arg(program).args(arguments).stdin(Stdio::null()).env("LC_ALL", "C").output().unwrap();
        assert!(status.status.success(), "{status:?}");
    };
    run(Command::new("strace").args(["-s", "48", "-o", &strace]));
    run(Command::new(env!("CARGO_BIN_EXE_orrery")).args(["trace", "-o", &trace, "--"]));
    let between = |lines: Vec<String>| {
        let mut markers = 0;
        let inside = lines.into_iter().filter(move |line| {
            markers += usize::from(line.starts_with("getppid("));
            markers == 1 && !line.starts_with("getppid(") && !line.starts_with("---")
        });
        inside.collect::<Vec<_>>()
    };
    let read = |path: &str| String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned();
    let own = read(&trace);
    let thread = own.split_ascii_whitespace().next().unwrap().to_owned();
    let of_thread = own.lines().filter_map(|line| line.trim_start().strip_prefix(&thread)?.strip_prefix(' '));
    [
        between(read(&strace).lines().map(str::to_owned).collect()),
        between(of_thread.map(str::to_owned).collect()),
    ]
}

/// A line without what differs between two runs, and with flags in one order.
fn plain(line: &str, child: Option<&str>) -> String {
    let mut text = line.to_owned();
    // What strace says of a number that has no name for it.
    while let Some((before, rest)) = text.split_once(" /*") {
        text = format!("{before}{}", rest.split_once("*/").map_or("", |(_, behind)| behind));
    }
    if let Some(child) = child {
        text = text.replace(child, "CHILD");
    }
    let text = text
        .replace("{WIFEXITED(s) && WEXITSTATUS(s) == 3}", "exited with 3")
        .replace("WUNTRACED", "WSTOPPED");
    let mut words = Vec::new();
    for word in text.split_ascii_whitespace() {
        let start = word
            .find(|each: char| !"([{=".contains(each) && !each.is_ascii_lowercase() && each != '_')
            .unwrap_or(0);
        let end = word.rfind(|each: char| !")]},".contains(each)).map_or(word.len(), |end| end + 1);
        let (start, end) = if start < end && word.contains('|') { (start, end) } else { (0, word.len()) };
        let mut flags: Vec<_> = word[start..end].split('|').collect();
        if flags.iter().all(|flag| flag.chars().all(|each| each.is_ascii_alphanumeric() || each == '_')) {
            flags.sort_unstable();
        }
        words.push(format!("{}{}{}", &word[..start], flags.join("|"), &word[end..]));
    }
    let text = words.join(" ");
    // Addresses.
    let mut result = String::new();
    let mut rest = text.as_str();
    while let Some((before, behind)) = rest.split_once("0x") {
        let digits = behind.len() - behind.trim_start_matches(|each: char| each.is_ascii_hexdigit()).len();
        result.push_str(before);
        result.push_str(if digits > 6 { "ADDRESS" } else { "0x" });
        rest = if digits > 6 { &behind[digits..] } else { behind };
    }
    result + rest
}

fn name(line: &str) -> &str {
    line.split('(').next().unwrap_or_default()
}

/// Names of constants among the arguments, without what strings hold.
fn constants(line: &str) -> BTreeSet<&str> {
    let arguments = line.rsplit_once(" = ").map_or(line, |(arguments, _)| arguments);
    let outside = arguments.split('"').step_by(2);
    let words =
        outside.flat_map(|text| text.split(|each: char| !each.is_ascii_alphanumeric() && each != '_'));
    words
        .filter(|word| {
            word.len() > 3
                && word.contains('_')
                && word.chars().next().is_some_and(|first| first.is_ascii_uppercase())
        })
        .collect()
}

fn build(directory: &Path) -> std::path::PathBuf {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/trace/typical.c");
    // Arguments are wrong on purpose, and results are of no interest.
    let compiler =
        Compiler::c().flags(["-static", "-Wno-nonnull", "-Wno-unused-result", "-Wno-stringop-overflow"]);
    compiler.build(&[source], directory.join("typical"))
}

#[test]
fn typical_calls_are_shown_as_strace_shows_them() {
    if facility::is_missing() || !is_there("strace") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = build(directory.path());
    let [theirs, ours] = lines(directory.path(), &program, &[]);
    assert!(theirs.len() > 150 && theirs.len() == ours.len(), "{} {}", theirs.len(), ours.len());
    let child = |lines: &[String]| {
        let line = lines.iter().find(|line| name(line) == "clone").unwrap();
        line.rsplit(' ').next().unwrap().to_owned()
    };
    let children = [child(&theirs), child(&ours)];
    let mut wrong = String::new();
    for (their, our) in theirs.iter().zip(&ours) {
        let (their, our) = (plain(their, Some(&children[0])), plain(our, Some(&children[1])));
        let different = DIFFERENT.iter().any(|(call, _)| *call == name(&our));
        let infinity = |line: &str| line.replace("RLIM64_", "RLIM_");
        let (one, other) = (infinity(&their), infinity(&our));
        let same = if different { constants(&one) == constants(&other) } else { their == our };
        if !same {
            writeln!(wrong, "strace: {their}\norrery: {our}").unwrap();
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    // Of lines that differ, what matters.
    let all = ours.join("\n");
    for part in [
        ", F_SETLK, {l_type=F_RDLCK, l_whence=SEEK_SET, l_start=0, l_len=5, l_pid=0}) = 0",
        "{msg_iov=\"q\", msg_control=[{cmsg_level=SOL_SOCKET, cmsg_type=SCM_RIGHTS, cmsg_data=[",
        "getrlimit(RLIMIT_CORE, {rlim_cur=",
        "setrlimit(RLIMIT_CPU, {rlim_cur=RLIM_INFINITY, rlim_max=RLIM_INFINITY}) = 0",
        "SO_RCVTIMEO_OLD, {tv_sec=1, tv_usec=500}, 16) = 0",
        ", events=POLLIN|POLLPRI, revents=POLLIN}], 1, 0) = 1",
        "prctl(PR_GET_NAME, \"typical\") = 0",
        "\"abcde\", 2) = 5",
    ] {
        assert!(all.contains(part), "{part}\n{all}");
    }
}

/// Returns what an argument is in the second comparison: something that the kernel refuses.
fn argument(call: &Signature, argument: &Argument) -> &'static str {
    let number = ["pid", "tgid", "upid", "who", "pid1", "pid2"].contains(&argument.name);
    let id = ["uid", "gid", "user", "group", "ruid", "euid", "suid", "rgid", "egid", "sgid"]
        .contains(&argument.name);
    match argument.kind {
        _ if call.is_path(argument) => "path",
        kind if kind.ends_with('*') => "0",
        _ if argument.is_descriptor() || argument.name.ends_with("fd") || id => "-1",
        _ if number => "999999",
        "umode_t" => "0600",
        _ => "1",
    }
}

#[test]
fn no_call_is_shown_with_names_that_strace_does_not_know() {
    if facility::is_missing() || !is_there("strace") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = build(directory.path());
    let mut list = String::new();
    let made = calls::all().iter().filter(|call| !NOT_MADE.contains(&call.name));
    for call in made {
        let given = call.arguments.iter().flatten().map(|each| argument(call, each));
        let all: Vec<_> = given.chain(std::iter::repeat("0")).take(6).collect();
        writeln!(list, "{} {}", call.number, all.join(" ")).unwrap();
    }
    let file = directory.path().join("list");
    fs::write(&file, list).unwrap();
    let [theirs, ours] = lines(directory.path(), &program, &[file.to_str().unwrap()]);
    let [theirs, ours] =
        [theirs, ours].map(|lines| lines.iter().map(|line| plain(line, None)).collect::<Vec<_>>());
    let theirs: BTreeMap<_, _> = theirs.iter().map(|line| (name(line), line)).collect();
    assert!(ours.len() > 300, "{} {:?}", ours.len(), ours.last());
    let mut wrong = String::new();
    // A newer kernel's calls are numbers to strace.
    for (our, their) in ours.iter().filter_map(|our| Some((our, *theirs.get(name(our))?))) {
        let (their_names, our_names) = (constants(their), constants(our));
        let mut differing = their_names.symmetric_difference(&our_names);
        let expected = |name: &&str| NAMES_OF_ONE.iter().any(|(known, _)| name.starts_with(known));
        if !differing.all(expected) {
            writeln!(wrong, "strace: {their}\norrery: {our}").unwrap();
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}
