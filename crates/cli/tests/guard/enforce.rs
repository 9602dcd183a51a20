//! `orrery run --enforce`: rules that hold against code which fights the executive (`enforce.c`).

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

use crate::scene::{built, exists, is_superuser, text};

/// A directory to work in, a file that the policy hides, one that it exchanges, and the policy.
struct Stage {
    base: PathBuf,
    _root: TempDir,
}

impl Stage {
    fn new(more: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let base = root.path().canonicalize().unwrap().join("stage");
        for folder in ["work", "hidden", "copy", "orig"] {
            fs::create_dir_all(base.join(folder)).unwrap();
        }
        fs::write(base.join("hidden/secret"), "SECRET").unwrap();
        fs::write(base.join("copy/file"), "copy").unwrap();
        fs::write(base.join("orig/file"), "orig").unwrap();
        let policy = format!(
            "[[rule]]\ncall = '%file'\npath = 'BASE/hidden/**'\ndeny = 'ENOENT'\n\n[[rule]]\ncall = '%file'\n\
             path = 'BASE/orig/**'\nrewrite = 'BASE/copy'\n\n{more}"
        );
        fs::write(base.join("policy.toml"), policy.replace("BASE", base.to_str().unwrap())).unwrap();
        Self { base, _root: root }
    }

    fn command(&self, options: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
        command.arg("run").args(options).arg("--policy").arg(self.base.join("policy.toml"));
        command.current_dir(self.base.join("work")).stdin(Stdio::null());
        command
    }

    fn run(&self, program: &[&str]) -> Output {
        self.command(&["--enforce"]).arg("--").args(program).output().unwrap()
    }

    fn attack(&self, options: &[&str], name: &str, port: u16) -> Output {
        self.command(options)
            .arg("--")
            .arg(built("enforce"))
            .arg(name)
            .args([self.base.join("work"), self.base.join("hidden/secret")])
            .arg(port.to_string())
            .output()
            .unwrap()
    }

    fn held(&self, name: &str, port: u16) -> String {
        let output = self.attack(&["--enforce"], name, port);
        let said = text(&output.stdout);
        assert!(output.status.success() && said.contains("held"), "{name}: {output:?}");
        assert_eq!(fs::read_to_string(self.base.join("hidden/secret")).unwrap(), "SECRET", "{name}");
        said
    }
}

/// Returns whether executives can run under a guard here: the supervisor has to trace, and Landlock to confine it.
fn possible(stage: &Stage) -> bool {
    let output = stage.run(&["true"]);
    if !output.status.success() {
        orrery_testing::skipped!("no executive under guard: {}", text(&output.stderr).trim());
    }
    output.status.success()
}

#[test]
fn calls_from_the_executives_own_range_are_held() {
    let stage = Stage::new("");
    if !possible(&stage) {
        return;
    }
    let said = stage.held("range", 0);
    assert!(said.contains("called from its range"), "the attack was none: {said}");
    let without = stage.attack(&[], "range", 0);
    assert!(text(&without.stdout).contains("BROKEN"), "held without --enforce, too? {without:?}");
}

#[test]
fn dispatch_that_is_turned_off_is_missed_by_nobody() {
    let stage = Stage::new("");
    if !possible(&stage) {
        return;
    }
    let said = stage.held("dispatch", 0);
    assert!(said.contains("dispatch is off"), "the attack was none: {said}");
    let without = stage.attack(&[], "dispatch", 0);
    assert!(text(&without.stdout).contains("BROKEN"), "held without --enforce, too? {without:?}");
}

#[test]
fn a_guest_that_fights_its_executive_gets_nothing() {
    let stage = Stage::new("");
    if !possible(&stage) {
        return;
    }
    for name in ["unmap", "sigsys", "code", "race", "names", "supervisor"] {
        stage.held(name, 0);
    }
}

#[test]
fn addresses_are_held_however_they_are_written() {
    let listening = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let datagrams = std::net::UdpSocket::bind(listening.local_addr().unwrap()).unwrap();
    datagrams.set_nonblocking(true).unwrap();
    let port = listening.local_addr().unwrap().port();
    let stage = Stage::new(&format!(
        "[[rule]]\ncall = '%network'\naddress = '127.0.0.0/8:{port}'\ndeny = 'EACCES'\n"
    ));
    if !possible(&stage) {
        return;
    }
    stage.held("addresses", port);
    assert!(datagrams.recv(&mut [0; 8]).is_err(), "a datagram came through");
}

#[test]
fn rules_mean_what_they_mean_without_enforcement() {
    let stage = Stage::new(
        "[[rule]]\ncall = 'getppid'\nreturn = 4711\n\n[[rule]]\ncall = 'write'\ntimes = 1\nlog = true\n",
    );
    if !possible(&stage) {
        return;
    }
    let program = "import os; print(os.getppid(), open('../orig/file').read(), os.path.exists('../hidden/secret'))
print(open(os.path.realpath('..') + '/orig/file').read(), sorted(os.listdir(os.path.realpath('..') + '/orig')), flush=True)
os.execl('/bin/sh', 'sh', '-c', 'cat ' + os.path.realpath('..') + '/orig/file; exit 7')";
    let program = ["/usr/bin/python3", "-S", "-c", program];
    let enforced = stage.run(&program);
    assert_eq!(enforced.status.code(), Some(7), "{enforced:?}");
    assert_eq!(text(&enforced.stdout), "4711 copy False\ncopy ['file']\ncopy", "{enforced:?}");
    assert!(text(&enforced.stderr).contains("write("), "what is logged is told: {enforced:?}");
    let plain = stage.command(&[]).arg("--").args(program).output().unwrap();
    assert_eq!(text(&plain.stdout), text(&enforced.stdout), "{plain:?}");
}

/// Landlock allows only, so a denied program's directory is replaced by what else lay in it at the start.
#[test]
fn what_comes_after_the_start_beside_a_denied_program_is_told() {
    let stage =
        Stage::new("[[rule]]\ncall = ['execve', 'execveat']\npath = 'BASE/work/denied'\ndeny = 'EACCES'\n");
    if !possible(&stage) {
        return;
    }
    for name in ["denied", "before"] {
        orrery_testing::copy_program("/bin/true", stage.base.join("work").join(name));
    }
    let output = stage.run(&[
        "sh",
        "-c",
        "./before && echo ran; cp before after; ./after || echo refused; ./denied || echo denied",
    ]);
    assert_eq!(text(&output.stdout), "ran\nrefused\ndenied\n", "{output:?}");
    let told = text(&output.stderr);
    assert!(told.contains("refused execve: the kernel executes what was there at the start"), "{told}");
}

/// Who binds every address binds each of them, and those of IPv4 by way of IPv6.
#[test]
fn every_address_is_each_of_them() {
    let shown = text(&Command::new("hostname").arg("-I").output().unwrap().stdout);
    let Some(own) = shown.split_whitespace().find(|address| !address.contains(':')) else {
        return orrery_testing::skipped!("this machine has no address but the loopback address");
    };
    let stage = Stage::new(&format!("[[rule]]\ncall = 'bind'\naddress = '{own}:18997'\ndeny = 'EACCES'\n"));
    if !possible(&stage) {
        return;
    }
    let script = "import socket
def attempt(family, *address):
    try: socket.socket(family, socket.SOCK_STREAM).bind(address); return 'ok'
    except OSError as error: return error.errno
print(attempt(socket.AF_INET, '0.0.0.0', 18997), attempt(socket.AF_INET6, '::', 18997), attempt(socket.AF_INET6, '::ffff:0.0.0.0', 18997))
print(attempt(socket.AF_INET, '0.0.0.0', 0), attempt(socket.AF_INET, '127.0.0.1', 18997))";
    let output = stage.run(&["/usr/bin/python3", "-S", "-c", script]);
    assert_eq!(text(&output.stdout), "13 13 13\nok ok\n", "{output:?}");
}

/// The kernel starts what `core_pattern` names outside of every guard; so rules about anything are void where that can be written.
#[test]
fn settings_of_the_kernel_are_not_written_under_any_rules() {
    if !is_superuser() {
        return orrery_testing::skipped!("only the superuser changes settings");
    }
    for policy in [None, Some("[[rule]]\ncall = 'connect'\naddress = '*'\ndeny = 'EACCES'\n")] {
        let stage = Stage::new("");
        if let Some(policy) = policy {
            fs::write(stage.base.join("policy.toml"), policy).unwrap();
        }
        if !possible(&stage) {
            return;
        }
        let script = "import os
now = open('/proc/sys/kernel/core_pattern').read()
def attempt(path, flags):
    try: os.write(os.open(path, flags), now.encode()); return 'written'
    except OSError as error: return error.errno
print(attempt('/proc/sys/kernel/core_pattern', os.O_WRONLY), attempt('/proc/sys/kernel/core_pattern', os.O_RDWR))
print(attempt('/proc/self/root/proc/sys/kernel/core_pattern', os.O_WRONLY | os.O_TRUNC))
print(attempt('/dev/null', os.O_WRONLY), attempt('mine', os.O_WRONLY | os.O_CREAT))";
        let output = stage.run(&["/usr/bin/python3", "-S", "-c", script]);
        assert_eq!(text(&output.stdout), "13 13\n13\nwritten written\n", "{policy:?}: {output:?}");
    }
}

/// A path to what cannot be handed over could be exchanged until the kernel reads it.
#[test]
fn what_only_stands_for_a_pipe_is_not_opened_by_name() {
    let stage = Stage::new("");
    if !possible(&stage) {
        return;
    }
    let script = "import os
os.mkfifo('pipe')
try: os.open('pipe', os.O_PATH); print('opened')
except PermissionError: print('refused')
os.close(os.open('.', os.O_PATH)); print('opened')";
    let output = stage.run(&["/usr/bin/python3", "-S", "-c", script]);
    assert_eq!(text(&output.stdout), "refused\nopened\n", "{output:?}");
    assert!(text(&output.stderr).contains("O_PATH needs a file that can be read"), "{output:?}");
}

/// What a service answers concerns nobody but the program; what rules are about is decided as ever.
#[test]
fn services_are_on_and_rules_are_held() {
    let stage =
        Stage::new("[[rule]]\ncall = 'getppid'\nreturn = 4711\n\n[services]\nremember = ['process']\n");
    if !possible(&stage) {
        return;
    }
    let script = "import ctypes, os, time
begin = time.monotonic()
for _ in range(50): time.sleep(0.001)
print(time.monotonic() - begin >= 0.05, ctypes.CDLL(None).prctl(30, 0, 0, 0, 0) <= 1)
own = os.getpid()
print({os.getpid() for _ in range(100)} == {own}, os.getuid() == os.stat('/proc/self').st_uid, os.getppid())
child = os.fork()
if child == 0: os._exit(os.getpid() == own)
print(os.waitpid(child, 0)[1], os.path.exists('../hidden/secret'), open('../orig/file').read())";
    // The slack is nothing at all for who may have real-time priority.
    let services = ["--enforce", "--sleep", "realtime", "--remember", "user"];
    for patching in [&[][..], &["--no-patch"]] {
        let mut command = stage.command(&[&services[..], patching].concat());
        let output = command.arg("--").args(["/usr/bin/python3", "-S", "-c", script]).output().unwrap();
        assert_eq!(text(&output.stdout), "True True\nTrue True 4711\n0 False copy\n", "{output:?}");
    }
    let checked = text(&stage.command(&["--enforce", "--check"]).output().unwrap().stdout);
    assert!(checked.contains("\nservices: the executive's alone"), "{checked}");
    // Each attack again, now that the executive does more.
    for name in ["range", "dispatch", "unmap", "sigsys", "code", "names"] {
        let output = stage.attack(&services, name, 0);
        assert!(output.status.success() && text(&output.stdout).contains("held"), "{name}: {output:?}");
    }
}

#[test]
fn archives_are_no_places_for_rules() {
    let stage = Stage::new("");
    let mut command = stage.command(&["--enforce", "--mount", "/opt/app=app.tar"]);
    let output = command.args(["--", "touch", "started"]).output().unwrap();
    assert!(!output.status.success() && !stage.base.join("work/started").exists(), "{output:?}");
    let said = text(&output.stderr);
    assert!(said.contains("what is mounted at /opt/app") && said.contains("have a rule rewrite"), "{said}");
}

#[test]
fn redirections_and_executions_are_the_monitors() {
    let listening = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listening.local_addr().unwrap().port();
    let stage = Stage::new(&format!(
        "[[rule]]\ncall = 'connect'\naddress = '10.9.8.7:1'\nredirect = '127.0.0.1:{port}'\n\n\
         [[rule]]\ncall = ['execve', 'execveat']\npath = '/usr/bin/id'\ndeny = 'EACCES'\n"
    ));
    if !possible(&stage) {
        return;
    }
    // Past the executive, which is not asked to redirect: the monitor does.
    let script = "import socket, os
s = socket.create_connection(('10.9.8.7', 1), timeout=10); print(s.getpeername()[1])
try: os.execv('/bin/id', ['id'])
except PermissionError: print('refused')";
    let output = stage.run(&["/usr/bin/python3", "-S", "-c", script]);
    assert_eq!(text(&output.stdout), format!("{port}\nrefused\n"), "{output:?}");
}

#[test]
fn what_is_held_and_what_not_is_told() {
    let stage = Stage::new("[[rule]]\ncall = 'write'\npath = '/tmp/**'\nevery = 20\ndeny = 'ENOSPC'\n");
    let checked = stage.command(&["--enforce", "--check"]).output().unwrap();
    assert!(checked.status.success(), "{checked:?}");
    let said = text(&checked.stdout);
    assert!(said.starts_with("line 1: enforced for open, "), "{said}");
    assert!(said.contains("line 11: advisory for write (it counts calls)"), "{said}");
    let forged = Stage::new("");
    let policy = forged.base.join("policy.toml");
    let rest = fs::read_to_string(&policy).unwrap();
    fs::write(&policy, format!("[[rule]]\ncall = '%file'\ncaller = 'libc.so*'\nallow = true\n{rest}"))
        .unwrap();
    let refused = forged.run(&["touch", "started"]);
    assert!(!refused.status.success() && !forged.base.join("work/started").exists());
    assert!(
        text(&refused.stderr).contains("line 1: this rule exempts calls from the one in line 5"),
        "{refused:?}"
    );
}

#[test]
fn ordinary_programs_see_no_difference() {
    let stage = Stage::new("");
    if !possible(&stage) {
        return;
    }
    let same = |script: &str| {
        let work = stage.base.join("work");
        let run = |command: &mut Command| {
            fs::remove_dir_all(&work).unwrap();
            fs::create_dir(&work).unwrap();
            let output = command.args(["sh", "-ec", script]).stdin(Stdio::null()).output().unwrap();
            (output.status, text(&output.stdout), text(&output.stderr))
        };
        let plain = run(Command::new("env").current_dir(&work));
        let enforced = run(stage.command(&["--enforce"]).arg("--"));
        assert!(plain.0.success(), "{script}: {plain:?}");
        assert_eq!(enforced, plain, "{script}");
    };
    same(
        "mkfifo p; (echo through > p) & cat p; seq 1 3 | xargs -n1 -P3 echo | sort; echo a > f; mv f g; ln g h; ls; rm g",
    );
    same(
        "/usr/bin/python3 -c 'import subprocess, multiprocessing, os
print(subprocess.run([\"sh\", \"-c\", \"exit 7\"]).returncode, os.path.realpath(\"/proc/self\") == f\"/proc/{os.getpid()}\")
print(multiprocessing.get_context(\"fork\").Pool(3).map(abs, [-1, -2]))'",
    );
    if exists("gcc") {
        same(
            "echo 'int main(void) { return 42; }' > m.c; gcc -O2 -static -o m m.c; ./m || echo $?; gcc -o m m.c; ./m || echo $?",
        );
    }
    if exists("git") {
        same(
            "export HOME=$PWD GIT_AUTHOR_DATE='2020-01-01 00:00 +0' GIT_COMMITTER_DATE='2020-01-01 00:00 +0'
             git init -q r; cd r; git config user.email a@b; git config user.name n
             for i in 1 2 3; do echo $i > f; git add f; git commit -qm $i; done; git log --format=%H; git gc -q; git clone -q . ../c; cat ../c/f",
        );
    }
    if exists("sqlite3") {
        same(
            "sqlite3 d 'pragma journal_mode=wal; create table t(x); insert into t values (1), (2); select sum(x) from t;'",
        );
    }
}

#[test]
fn programs_end_as_they_would() {
    let stage = Stage::new("");
    if !possible(&stage) {
        return;
    }
    assert_eq!(stage.run(&["sh", "-c", "exit 42"]).status.code(), Some(42));
    assert_eq!(stage.run(&["sh", "-c", "kill -SEGV $$"]).status.signal(), Some(11));
    let missing = stage.run(&["no-such-program"]);
    assert_eq!(missing.status.code(), Some(127), "{missing:?}");
    assert_eq!(
        text(&missing.stderr),
        "orrery run: running no-such-program: No such file or directory (os error 2)\n"
    );
    assert_eq!(stage.run(&["/etc/hostname"]).status.code(), Some(126));
    // What stays behind stays under the same rules until it ends.
    let left = "(sleep 0.3; cat ../hidden/secret 2>&1; echo done) & exit 3";
    let output = stage.run(&["sh", "-c", left]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let said = text(&output.stdout);
    assert!(said.contains("No such file") && said.contains("done"), "{output:?}");
}
