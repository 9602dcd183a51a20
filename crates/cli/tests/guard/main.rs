//! `orrery guard`, run as its users run it: on Debian's programs, and on one that tries to get out.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

mod ask;
mod attacks;
mod containers;
mod enforce;
mod escape;
mod hardship;
mod kernel;
mod learn;
mod network;
mod profiles;
mod scene;
mod settings;
mod unused;
mod view;

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};

use scene::{Scene, exists, is_superuser, text};

#[test]
fn what_is_allowed_happens_as_without_guard() {
    let scene = Scene::ordinary();
    scene.same("echo one > a; cat a; ls -l . | wc -l; mv a b; ln b c; ln -s b d; cat c d; rm b; ls; mkdir -p x/y; rmdir x/y");
    scene.same(
        "umask 027; touch a; mkdir b; mkfifo c; stat -c '%a %n' a b c; umask 0; touch d; stat -c '%a' d",
    );
    scene.same(
        "mkfifo p; (echo through > p) & cat p; cat < /dev/null; echo x > /dev/null; echo y | cat /dev/stdin",
    );
    scene.same("exec 3> file; echo held >&3; rm file; echo more >&3; cd /proc/self; echo $?; test -r status && echo readable");
    scene.same("find /usr/share/doc -maxdepth 1 | sort | md5sum; du -s /usr/share/doc | cut -f1");
    scene.same("tar cf t.tar /usr/include/linux 2>/dev/null; mkdir o; tar xf t.tar -C o; diff -r o/usr/include/linux /usr/include/linux; echo $?");
    scene.same("truncate -s 5 f; stat -c %s f; touch -d 2020-01-02 f; stat -c %y f; chmod 640 f; stat -c %a f; cp -a f g; stat -c '%a %y %s' g");
    scene.same(
        "ulimit -n 20; ulimit -n; ulimit -f 1; (head -c 4096 /dev/zero > big) 2>/dev/null || echo limited",
    );
}

#[test]
fn pythons_see_no_difference() {
    let scene = Scene::ordinary();
    scene.same(
        r#"/usr/bin/python3 - <<'END'
import os, subprocess, tempfile, threading, shutil, glob, multiprocessing
with tempfile.TemporaryDirectory(dir='.') as d:
    os.symlink('nowhere', d + '/l')
    print(os.path.islink(d + '/l'), os.path.exists(d + '/l'), os.readlink(d + '/l'))
    open(d + '/l', 'w').write('made through a dangling link')
    print(open(d + '/nowhere').read())
    def work(i):
        for j in range(50):
            p = f'{d}/t{i}-{j}'
            open(p, 'w').write(p)
            assert open(p).read() == p
            os.rename(p, p + 'x')
            os.unlink(p + 'x')
    ts = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in ts]
    [t.join() for t in ts]
    print(sorted(os.listdir(d)))
    fd = os.open(d, os.O_RDONLY)
    os.mkdir('sub', dir_fd=fd)
    print(os.stat('sub', dir_fd=fd).st_mode, os.listdir(fd))
    try: os.open(d + '/l', os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as e: print(e.errno)
    try: os.open(d + '/l', os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except OSError as e: print(e.errno)
    t = os.open(d, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(t, b'linked'); os.link(f'/proc/self/fd/{t}', d + '/linked', src_dir_fd=fd)
    print(open(d + '/linked').read())
    os.setxattr(d + '/linked', 'user.x', b'v') if 'tmpfs' not in subprocess.getoutput('stat -f -c %T .') else None
    print(os.listxattr(d + '/linked'), os.listxattr(d, follow_symlinks=False))
print(os.getcwd() == os.path.realpath('.'), os.path.realpath('/proc/self') == f'/proc/{os.getpid()}')
print(os.readlink('/proc/self/exe'), os.path.basename(os.readlink('/proc/self/cwd')))
print(subprocess.run(['sh', '-c', 'exit 7']).returncode)
print(multiprocessing.get_context('fork').Pool(3).map(abs, [-1, -2]))
END"#,
    );
}

#[test]
fn gits_and_databases_see_no_difference() {
    let scene = Scene::ordinary();
    if exists("git") {
        scene.same(
            "export HOME=$PWD GIT_AUTHOR_DATE='2020-01-01 00:00 +0' GIT_COMMITTER_DATE='2020-01-01 00:00 +0'
             git init -q r; cd r; git config user.email a@b; git config user.name n
             for i in 1 2 3; do echo $i > f; git add f; git commit -qm $i; done
             git log --format=%H; git checkout -q -b other HEAD~1; git merge -q master 2>/dev/null || git merge -q main
             git gc -q; git fsck; git clone -q . ../c; cat ../c/f",
        );
    }
    if exists("sqlite3") {
        scene.same(
            "sqlite3 d 'pragma journal_mode=wal; create table t(x); insert into t values (1), (2); select sum(x) from t;'
             sqlite3 d 'pragma journal_mode=delete; update t set x = x * 2; select * from t;'; ls",
        );
    }
    if exists("gcc") {
        scene.same("echo 'int main(void) { return 42; }' > m.c; gcc -O2 -static -o m m.c; ./m || echo $?; rm m; gcc -o m m.c; ./m || echo $?");
    }
    if exists("busybox") {
        scene.same("busybox sh -c 'echo in; ls /usr/bin | busybox wc -l; busybox cat /etc/hostname'");
    }
}

#[test]
fn what_is_not_allowed_is_refused_and_told() {
    let scene = Scene::ordinary();
    let secret = scene.secret.to_str().unwrap();
    for program in [
        vec!["cat", secret],
        vec!["cp", "/etc/passwd", secret],
        vec!["rm", "-f", secret],
        vec!["mv", secret, "x"],
        vec!["ln", secret, "x"],
        vec!["sh", "-c", "echo x > /root/there"],
        vec!["sh", "-c", "cat < $0 2>/dev/null || exit 5", secret],
    ] {
        let output = scene.run(&program);
        assert!(!output.status.success(), "{program:?}: {output:?}");
        assert!(text(&output.stderr).contains("orrery guard: ["), "{program:?}: {output:?}");
    }
    assert_eq!(fs::read_to_string(&scene.secret).unwrap(), "SECRET");
    let only = Scene::new("execute = [\"/usr/bin/env\", \"/usr/bin/true\"]\n");
    assert!(only.run(&["env", "true"]).status.success());
    let refused = only.run(&["env", "ls"]);
    assert_eq!(refused.status.code(), Some(126), "{refused:?}");
    assert!(
        text(&refused.stderr).contains("refused execve of /usr/bin/ls: the policy does not allow execute")
    );
    let itself = only.run(&["ls"]);
    assert_eq!(itself.status.code(), Some(126));
    assert!(text(&itself.stderr).contains("does the policy list it under execute?"), "{itself:?}");
    assert_eq!(only.run(&["no-such-program"]).status.code(), Some(127));
}

#[test]
fn refusals_are_lines_of_json() {
    let scene = Scene::ordinary();
    let log = scene.work.join("log");
    let output =
        scene.guard().arg("--log").arg(&log).args(["--", "cat"]).arg(&scene.secret).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let lines = fs::read_to_string(&log).unwrap();
    let line: serde_json::Value = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .find(|line: &serde_json::Value| line["path"] == scene.secret.to_str().unwrap())
        .unwrap();
    assert_eq!(
        (&line["call"], &line["action"], &line["missing"][0]),
        (&"openat".into(), &"refused".into(), &"read".into())
    );
    assert!(line["process"].as_i64().unwrap() > 1 && line["time"].as_f64().unwrap() > 1e9);
}

#[test]
fn policies_with_errors_start_nothing() {
    let scene = Scene::ordinary();
    fs::write(&scene.policy, "[files]\nread = [\"/usr\"]\nwrit = [\"/\"]\n").unwrap();
    let output = scene.run(&["touch", "started"]);
    assert_eq!(output.status.code(), Some(125));
    let said = text(&output.stderr);
    assert!(said.contains("policy.toml:3:1: unknown field `writ`"), "{said}");
    assert!(!scene.work.join("started").exists());
    let checked = scene.guard().arg("--check").output().unwrap();
    assert_eq!(checked.status.code(), Some(125));
}

/// A file may have parts for several commands. Each honours what it knows, and starts nothing under what it does not.
#[test]
fn every_command_honours_a_policy_or_tells_where_it_does_not() {
    let scene = Scene::ordinary();
    let lists = [
        "refusal = 'EPERM'",
        "mediation = 'always'",
        "capabilities = []",
        "[files]\nread = ['/']",
        "[network]\nconnect = ['*']",
        "[calls]\ndeny = ['ptrace']",
        "[limits]\nopen-files = 64",
        "[view]\nprivate = ['/tmp']",
    ];
    let rules = [
        "[[rule]]\ncall = 'getppid'\nreturn = 1",
        "[services]\nremember = ['user']",
        "[[mount]]\nprefix = '/opt/x'\narchive = 'x.tar'",
    ];
    let commands: [(&[&str], &[&str]); 4] =
        [(&["guard"], &rules), (&["run"], &lists), (&["run", "--enforce"], &lists), (&["trace"], &lists)];
    for (command, unknown) in commands {
        for part in unknown {
            fs::write(&scene.policy, format!("# A comment.\n\n{part}\n")).unwrap();
            let mut tried = Command::new(env!("CARGO_BIN_EXE_orrery"));
            tried.args(command).arg("--policy").arg(&scene.policy).args(["--", "touch", "started"]);
            let output = tried.current_dir(&scene.work).output().unwrap();
            let said = text(&output.stderr);
            assert!(
                !output.status.success() && said.contains("policy.toml:3:"),
                "{command:?} {part}: {output:?}"
            );
            let name = part.split(['\n', ' ']).next().unwrap();
            assert!(said.contains(&format!("cannot honour {name}")), "{command:?} {part}: {said}");
            assert!(!scene.work.join("started").exists(), "{command:?} {part}");
        }
    }
}

#[test]
fn ends_and_signals_are_passed_on() {
    let scene = Scene::ordinary();
    assert_eq!(scene.run(&["sh", "-c", "exit 42"]).status.code(), Some(42));
    assert_eq!(scene.run(&["sh", "-c", "kill -SEGV $$"]).status.signal(), Some(11));
    let mut waiting = scene
        .guard()
        .args([
            "--quiet",
            "--",
            "sh",
            "-c",
            "trap 'echo told; exit 9' TERM; echo ready; while :; do sleep 0.1; done",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(waiting.stdout.take().unwrap()));
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    Command::new("kill").arg(waiting.id().to_string()).status().unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "told");
    assert_eq!(waiting.wait().unwrap().code(), Some(9));
}

#[test]
fn a_learnt_policy_suffices() {
    let scene = Scene::ordinary();
    fs::write(scene.work.join("in"), "x").unwrap();
    let learnt = scene.work.join("../learnt.toml");
    let program = ["sh", "-c", "cat in > out; mkdir -p d; touch d/1; rm -r d; ls / > /dev/null; cat out"];
    let mut learning = Command::new(env!("CARGO_BIN_EXE_orrery"));
    learning.args(["guard", "--learn"]).arg(&learnt).arg("--").args(program).current_dir(&scene.work);
    let first = learning.output().unwrap();
    assert!(first.status.success() && text(&first.stdout) == "x", "{first:?}");
    let policy = fs::read_to_string(&learnt).unwrap();
    let mut again = Command::new(env!("CARGO_BIN_EXE_orrery"));
    again.args(["guard", "--policy"]).arg(&learnt).arg("--").args(program).current_dir(&scene.work);
    let second = again.output().unwrap();
    assert!(second.status.success() && text(&second.stdout) == "x", "{second:?}\n{policy}");
    let mut other = Command::new(env!("CARGO_BIN_EXE_orrery"));
    other.args(["guard", "--policy"]).arg(&learnt).args(["--", "cat"]).arg(&scene.secret);
    assert!(!other.output().unwrap().status.success(), "{policy}");
}

#[test]
fn addresses_are_held_against_the_policy() {
    let scene = Scene::ordinary();
    let listening = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let datagrams = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let socket = scene.work.join("socket");
    let _unix = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let port = |address: std::io::Result<std::net::SocketAddr>| address.unwrap().port();
    let policy = format!(
        "{}\n[network]\nconnect = [\"127.0.0.1:{}\", \"udp:127.0.0.1:{}\", \"unix:{}\"]\nbind = [\"unix:{}\"]\n",
        fs::read_to_string(&scene.policy).unwrap(),
        port(listening.local_addr()),
        port(datagrams.local_addr()),
        socket.display(),
        scene.work.display(),
    );
    fs::write(&scene.policy, policy).unwrap();
    let script = format!(
        r#"
import os, socket
def attempt(what, *arguments):
    try: what(*arguments); return 'ok'
    except OSError as error: return error.errno
tcp = lambda port: attempt(socket.create_connection, ('127.0.0.1', port))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
unix = socket.socket(socket.AF_UNIX)
print(tcp({0}), tcp({1}))
print(attempt(udp.sendto, b'x', ('127.0.0.1', {2})), attempt(udp.sendto, b'x', ('127.0.0.1', {1})))
print(attempt(udp.sendmsg, [b'a', b'b'], [], 0, ('127.0.0.1', {2})), attempt(udp.sendmsg, [b'x'], [], 0, ('127.0.0.1', {1})))
print(attempt(unix.connect, '{3}'), attempt(unix.bind, '/dev/shm/elsewhere'), attempt(udp.bind, ('127.0.0.1', 0)))
server = socket.socket(socket.AF_UNIX)
server.bind('own'); server.listen()
a, b = socket.socketpair()
socket.send_fds(a, [b'm'], [os.open('/dev/null', os.O_RDONLY)])
print(socket.recv_fds(b, 1, 1)[0], os.path.exists('own'))
"#,
        port(listening.local_addr()),
        port(other.local_addr()),
        port(datagrams.local_addr()),
        socket.display(),
    );
    let output = scene.run(&["/usr/bin/python3", "-c", &script]);
    assert_eq!(text(&output.stdout), "ok 13\nok 13\nok 13\nok 13 13\nb'm' True\n", "{output:?}");
    let mut received = [0; 8];
    assert_eq!(datagrams.recv(&mut received).unwrap(), 1);
    assert_eq!((datagrams.recv(&mut received).unwrap(), &received[..2]), (2, b"ab".as_slice()));
}

/// A socket is known by the path that it was bound to, as others find it there.
#[test]
fn sockets_have_the_names_that_they_were_given() {
    let scene = Scene::ordinary();
    scene.change(|policy| {
        format!(
            "{policy}\n[network]\nbind = [\"unix:{0}\"]\nconnect = [\"unix:{0}\"]\n",
            scene.work.display()
        )
    });
    scene.same(
        "mkdir sub; ln -s sub link; umask 027; /usr/bin/python3 -S - <<'END'
import os, socket
from multiprocessing.managers import SyncManager
here = os.getcwd()
for path in (here + '/absolute', 'relative', 'sub/below', './dots', 'link/through', here + '/link/both', '/proc/self/cwd/magic'):
    server = socket.socket(socket.AF_UNIX); server.bind(path); server.listen()
    name = server.getsockname()
    client = socket.socket(socket.AF_UNIX); client.connect(os.path.join(here, path))
    known = path.startswith('/proc') or name == path and client.getpeername() == path
    print(path.startswith('/') or path, known, oct(os.stat(path).st_mode))
    try: socket.socket(socket.AF_UNIX).bind(path)
    except OSError as error: print(error.errno)
manager = SyncManager(address=here + '/manager'); manager.start()
print(list(manager.list([1, 2]))); manager.shutdown()
print(sorted(os.listdir('.')), sorted(os.listdir('sub')), os.getcwd() == here)
END",
    );
}

#[test]
fn memory_of_others_is_not_attached() {
    if !exists("ipcmk") || !exists("ipcrm") {
        return;
    }
    let scene = Scene::ordinary();
    let made = text(&Command::new("ipcmk").args(["-M", "4096"]).output().unwrap().stdout);
    let number = made.rsplit(' ').next().unwrap().trim();
    let script = format!(
        "import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_ssize_t
print(libc.shmat({number}, None, 0), ctypes.get_errno(), libc.shmctl({number}, 0, None), ctypes.get_errno())
own = libc.shmget(0, 4096, 0o1600)
at = libc.shmat(own, None, 0)
ctypes.memset(at, 65, 2)
if os.fork() == 0:
    there = libc.shmat(own, None, 0)
    print(ctypes.string_at(there, 2)); os._exit(0)
os.wait()
print(libc.shmdt(ctypes.c_void_p(at)), libc.shmctl(own, 0, None))"
    );
    let output = scene.run(&["/usr/bin/python3", "-S", "-u", "-c", &script]);
    let removed = Command::new("ipcrm").args(["-m", number]).status().unwrap();
    assert_eq!(text(&output.stdout), "-1 13 -1 13\nb'AA'\n0 0\n", "{output:?}");
    assert!(removed.success(), "it was removed");
}

#[test]
fn calls_are_performed_as_whoever_made_them() {
    if !is_superuser() {
        return orrery_testing::skipped!("only the superuser becomes others");
    }
    let scene = Scene::ordinary();
    let private = scene.work.join("private");
    fs::write(&private, "x").unwrap();
    Command::new("chmod").args(["600"]).arg(&private).status().unwrap();
    Command::new("chmod").args(["777"]).arg(&scene.work).status().unwrap();
    Command::new("chmod").args(["711"]).arg(scene.work.parent().unwrap()).status().unwrap();
    let script = "
import os
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try: open('private'); print('read')
except PermissionError: print('refused')
open('made', 'w'); print(os.stat('made').st_uid, os.stat('made').st_gid, os.access('private', os.R_OK))
";
    let output = scene.run(&["/usr/bin/python3", "-c", script]);
    assert_eq!(text(&output.stdout), "refused\n65534 65534 False\n", "{output:?}");
}
