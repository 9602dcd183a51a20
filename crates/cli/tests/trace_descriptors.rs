//! `orrery trace -yy` shows what descriptors lead to as strace(1) does: both look at the same program, and what they show is compared.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "run/facility.rs"]
mod facility;

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use orrery_testing::is_there;

/// A call about each socket when it is made, when it is bound and when it is connected, then about devices and a process.
const PROGRAM: &str = r"
import os, socket, stat
from socket import *
def look(thing): os.lseek(thing, 0, 1) if isinstance(thing, int) else thing.getsockopt(SOL_SOCKET, SO_TYPE)
def listening(family, address):
    server = socket(family); look(server)
    server.bind(address); server.listen(); look(server)
    return server
def pair(server, address):
    client = socket(server.family); client.connect(address); look(client)
    peer, _ = server.accept(); look(peer); client.send(b'x'); peer.shutdown(SHUT_RDWR)
    return client, peer
kept = []
server = listening(AF_INET, ('127.0.0.1', 0)); kept.append((server, pair(server, server.getsockname())))
try:
    server = listening(AF_INET6, ('::1', 0)); kept.append((server, pair(server, server.getsockname()[:2])))
except OSError: pass
server = listening(AF_UNIX, 'here'); kept.append((server, pair(server, 'here')))
for family in (AF_INET, AF_UNIX):
    one = socket(family, SOCK_DGRAM); look(one); one.bind(('127.0.0.1', 0) if family == AF_INET else 'there'); look(one)
    other = socket(family, SOCK_DGRAM); other.connect(one.getsockname()); look(other); other.send(b'y')
    kept.append((one, other))
packets = socket(AF_UNIX, SOCK_SEQPACKET); look(packets); packets.bind('\0' + 'orrery test %d' % os.getpid()); look(packets)
for family in (0, 4): 
    net = socket(AF_NETLINK, SOCK_RAW, family); look(net); net.bind((0, 0)); look(net); kept.append(net)
for family, kind, protocol in ((AF_INET, SOCK_RAW, 1), (AF_PACKET, SOCK_RAW, 0)):
    try: one = socket(family, kind, protocol); look(one); kept.append(one)
    except OSError: pass
for path in ('/dev/null', '/dev/zero', '/etc'):
    try: look(os.open(path, os.O_RDONLY))
    except OSError: pass
try:
    os.mknod('block', stat.S_IFBLK | 0o600, os.makedev(7, 1))
    try: look(os.open('block', os.O_PATH))
    except OSError: pass
except OSError: pass
try: look(os.pidfd_open(os.getppid()))
except OSError: pass
";

/// The calls of the program that are compared: those that are about one descriptor, and those that return one.
const CALLS: &str = "socket,bind,listen,connect,getsockopt,sendto,shutdown,lseek,openat,pidfd_open";

/// Names and descriptors of the calls of a trace from the first socket on, with inodes, ports and PIDs numbered in the order in which they come.
fn descriptors(text: &str) -> Vec<String> {
    let mut known = HashMap::new();
    let mut shown = Vec::new();
    let lines =
        text.lines().map(|line| line.trim_start_matches(|each: char| each == ' ' || each.is_ascii_digit()));
    for line in lines.skip_while(|line| !line.starts_with("socket(")).filter(|line| line.contains('<')) {
        let name = line.split('(').next().unwrap();
        let mut words = vec![name.to_owned()];
        let mut rest = line;
        while let Some(start) = rest.find('<') {
            // To the bracket that closes it; `->` is none.
            let (mut depth, mut end, mut before) = (0, rest.len(), ' ');
            for (at, each) in rest[start..].char_indices() {
                depth += i32::from(each == '<') - i32::from(each == '>' && before != '-');
                before = each;
                if depth == 0 {
                    end = start + at + 1;
                    break;
                }
            }
            words.push(rest[start..end].to_owned());
            rest = &rest[end..];
        }
        shown.push(numbered(&words.join(" "), &mut known));
    }
    shown
}

/// What PIDs stand behind, however small they are: the kernel begins again after the largest.
const PIDS_FOLLOW: [&str; 4] = ["pid:", "ROUTE:", "SOCK_DIAG:", "orrery test "];

/// Replaces numbers that differ from run to run, and the peers of Unix sockets, which only strace shows.
fn numbered(text: &str, known: &mut HashMap<String, usize>) -> String {
    let mut result = String::new();
    let mut rest = text;
    while let Some(start) = rest.find(|each: char| each.is_ascii_digit()) {
        let end = rest[start..]
            .find(|each: char| !each.is_ascii_digit())
            .map_or(rest.len(), |length| start + length);
        let number = &rest[start..end];
        if rest[..start].ends_with("->") && result.contains("UNIX") {
            result.push_str(rest[..start].trim_end_matches("->"));
        } else {
            result.push_str(&rest[..start]);
            let is_pid = PIDS_FOLLOW.iter().any(|before| rest[..start].ends_with(before));
            if number.len() < 4 && !is_pid {
                result.push_str(number);
            } else {
                let next = known.len();
                result.push_str(&format!("#{}", known.entry(number.to_owned()).or_insert(next)));
            }
        }
        rest = &rest[end..];
    }
    result + rest
}

/// Has a program traced in a directory of its own, and returns what is written.
fn traced(tracer: &mut Command) -> String {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("trace");
    let mut words = vec!["-o", output.to_str().unwrap(), "-e", CALLS];
    words.extend(["/usr/bin/python3", "-I", "-S", "-c", PROGRAM]);
    let work = directory.path().join("work");
    fs::create_dir(&work).unwrap();
    let status = tracer.args(words).current_dir(&work).stdin(Stdio::null()).status().unwrap();
    assert!(status.success(), "{status}");
    let text = fs::read_to_string(&output).unwrap();
    text.replace(work.canonicalize().unwrap().to_str().unwrap(), "WORK")
}

#[test]
fn descriptors_are_shown_as_strace_shows_them() {
    if facility::is_missing() {
        return;
    }
    if !is_there("strace") || !Path::new("/usr/bin/python3").exists() {
        orrery_testing::skipped!("there is no strace, or no Python");
        return;
    }
    for option in ["-yy", "-y", "--decode-fds=path,socket", "--decode-fds=dev,pidfd"] {
        let theirs = descriptors(&traced(Command::new("strace").arg(option)));
        let ours = match option.strip_prefix("--") {
            Some(set) => traced(Command::new(env!("CARGO_BIN_EXE_orrery")).args(["trace", "-e", set])),
            None => traced(Command::new(env!("CARGO_BIN_EXE_orrery")).args(["trace", option])),
        };
        let ours = descriptors(&ours);
        let differing: Vec<_> = theirs.iter().zip(&ours).filter(|(one, other)| one != other).collect();
        assert!(
            differing.is_empty() && theirs.len() == ours.len(),
            "{option}: {differing:#?}\n{theirs:#?}\n{ours:#?}"
        );
        let all = ours.join("\n");
        let parts = match option {
            "-yy" => &[
                "<TCP:[127.0.0.1:#",
                "<UDP:[127",
                "<UNIX-STREAM:[#",
                "\"here\"]",
                "<NETLINK:[ROUTE:#",
                "<NETLINK:[SOCK_DIAG:#",
                "/dev/null<char 1:3>",
            ][..],
            "-y" => &["<socket:[#", "</dev/null>"],
            "--decode-fds=path,socket" => &["<TCP:[127", "</dev/null>"],
            _ => &["</dev/null<char 1:3>>"],
        };
        for part in parts {
            assert!(all.contains(part), "{option}: {part}\n{all}");
        }
    }
}

/// Has sockets that have the same descriptor one after the other, and prints what each of them is bound to.
const REUSES: &str = r"
from socket import *
for number in range(40):
    one = socket(AF_INET, SOCK_STREAM if number % 2 else SOCK_DGRAM)
    one.bind(('127.0.0.1', 0)); one.getsockopt(SOL_SOCKET, SO_TYPE)
    print('%d<%s:[127.0.0.1:%d]>' % (one.fileno(), 'TCP' if number % 2 else 'UDP', one.getsockname()[1]))
    one.close()
";

#[test]
fn a_descriptor_that_is_used_again_is_shown_as_what_it_is_now() {
    if facility::is_missing() {
        return;
    }
    if !Path::new("/usr/bin/python3").exists() {
        orrery_testing::skipped!("there is no Python");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    command.args(["trace", "-yy", "-e", "getsockopt", "-o"]).arg(&trace);
    command.args(["--", "/usr/bin/python3", "-I", "-S", "-c", REUSES]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let bound = String::from_utf8(output.stdout).unwrap();
    let expected: Vec<&str> = bound.lines().collect();
    let trace = fs::read_to_string(&trace).unwrap();
    let calls = trace.lines().filter_map(|line| line.split_once("getsockopt(")?.1.split_once(','));
    let shown: Vec<&str> = calls.map(|(descriptor, _)| descriptor).collect();
    assert_eq!(shown, expected);
    let descriptors: HashSet<&str> = expected.iter().filter_map(|line| line.split('<').next()).collect();
    assert_eq!((expected.len(), descriptors.len()), (40, 1), "{expected:?}");
}
