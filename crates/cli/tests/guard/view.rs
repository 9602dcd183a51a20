//! `[view]`: directories of the program's own in place of others, which no call sees through.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use orrery_testing::{Killed, PublicDirectory};
use tempfile::TempDir;

use crate::scene::{User, exists, is_superuser, text};

/// A directory in `/tmp` with one that is shown, and a policy under which `/tmp` is private, and everything is allowed there.
struct Covered {
    root: TempDir,
    base: PathBuf,
    user: User,
    orrery: PathBuf,
    _public: PublicDirectory,
}

const POLICY: &str = r#"
[view]
private = ["/tmp"]
show = ["BASE/work"]

[files]
stat = ["/"]
read = ["/usr", "/etc", "/lib", "/lib64", "/bin", "/proc", "/dev", "/tmp"]
write = ["/dev/null", "/tmp"]
create = ["/tmp"]
execute = ["/usr", "/tmp"]

[network]
connect = ["unix:/tmp"]
bind = ["unix:/tmp"]
"#;

impl Covered {
    /// `None` where nobody can become this user, or there may be no mount namespace.
    fn new(user: User) -> Option<Self> {
        if user == User::Nobody && (!is_superuser() || !exists("setpriv")) {
            orrery_testing::skipped!("only the superuser becomes somebody without rights");
            return None;
        }
        let root = tempfile::Builder::new().prefix("orrery-view-").tempdir_in("/tmp").unwrap();
        let base = root.path().to_owned();
        fs::create_dir(base.join("work")).unwrap();
        fs::write(base.join("secret"), "SECRET").unwrap();
        orrery_testing::write_program(base.join("tool"), "#!/bin/sh\necho OUT\n");
        fs::write(base.join("policy.toml"), POLICY.replace("BASE", base.to_str().unwrap())).unwrap();
        for (name, mode) in [("", 0o777), ("work", 0o777), ("secret", 0o666), ("tool", 0o777)] {
            fs::set_permissions(base.join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        let public = PublicDirectory::new();
        let orrery = public.copy(env!("CARGO_BIN_EXE_orrery"));
        let covered = Self { root, base, user, orrery, _public: public };
        let mut tried = covered.as_user("unshare");
        let tried = tried.args(["--user", "--mount", "true"]).stderr(Stdio::null()).status();
        if user == User::Nobody && !tried.is_ok_and(|status| status.success()) {
            orrery_testing::skipped!("this user may make no user namespace");
            return None;
        }
        Some(covered)
    }

    fn as_user(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = match self.user {
            User::Current => Command::new(program),
            User::Nobody => {
                let mut command = Command::new("setpriv");
                command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", "--"]);
                command.arg(program);
                command
            }
        };
        command.current_dir(self.base.join("work")).stdin(Stdio::null()).process_group(0);
        command
    }

    /// The guard, up to the program. It inherits the directory as descriptor 7, for `O_PATH` as 8, the secret for reading as 9, and as 6 a socket
    /// through which both descriptors of the directory come once more.
    fn guard(&self, options: &[&str]) -> Command {
        let inherit = "import os, socket, sys
base = sys.argv[1]
here, there = socket.socketpair()
socket.send_fds(there, [b'x'], [os.open(base, os.O_RDONLY), os.open(base, os.O_PATH)])
os.dup2(here.fileno(), 6, inheritable=True)
for number, name, flags in ((7, '', os.O_RDONLY), (8, '', os.O_PATH), (9, '/secret', os.O_RDONLY)):
    found = os.open(base + name, flags)
    os.dup2(found, number)
    os.set_inheritable(number, True)
os.execv(sys.argv[2], sys.argv[2:])";
        let mut command = self.as_user("/usr/bin/python3");
        command.args(["-S", "-c", inherit]).arg(&self.base).arg(&self.orrery);
        command.args(["guard", "--policy"]).arg(self.base.join("policy.toml")).args(options).arg("--");
        command
    }

    fn python(&self, options: &[&str], script: &str, arguments: &[&str]) -> Output {
        let mut command = self.guard(options);
        command.args(["/usr/bin/python3", "-S", "-c", script]).arg(&self.base).args(arguments);
        command.output().unwrap()
    }

    fn change(&self, how: impl FnOnce(String) -> String) {
        let policy = self.base.join("policy.toml");
        fs::write(&policy, how(fs::read_to_string(&policy).unwrap())).unwrap();
    }

    /// What is in the directory, and what the secret says.
    fn condition(&self) -> (Vec<String>, String) {
        let mut names: Vec<_> = fs::read_dir(&self.base)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let found = fs::metadata(self.base.join("secret")).unwrap();
        let secret = fs::read_to_string(self.base.join("secret")).unwrap();
        (names, format!("{secret} {:o} {:?}", found.permissions().mode(), found.modified().unwrap()))
    }
}

/// All ways to name, open, stand in and move what lies there agree.
const AGREES: &str = r#"
import ctypes, errno, mmap, os, shutil, socket, subprocess, sys, tempfile
base = sys.argv[1]
def attempt(what, *arguments, **named):
    try: return what(*arguments, **named)
    except OSError as error: return errno.errorcode[error.errno]
assert os.getcwd() == base + '/work', os.getcwd()
assert os.listdir('/tmp') == [os.path.basename(base)], os.listdir('/tmp')
assert os.listdir(base) == ['work'] and os.listdir('..') == ['work']
assert attempt(open, base + '/secret') == 'ENOENT'
assert os.stat('/tmp').st_mode & 0o7777 == 0o1777 and os.access('/tmp', os.W_OK)
open('/tmp/a', 'w').write('mine')
os.mkdir('/tmp/d')
os.chdir('/tmp/d')
assert os.getcwd() == os.readlink('/proc/self/cwd') == os.path.realpath('.') == '/tmp/d'
held, directory = os.open('../a', os.O_RDONLY), os.open('/tmp', os.O_RDONLY | os.O_DIRECTORY)
assert os.readlink(f'/proc/self/fd/{held}') == '/tmp/a' and os.readlink(f'/dev/fd/{directory}') == '/tmp'
names = ['/tmp/a', '../a', '/tmp/./d/../a', f'/proc/self/fd/{held}', f'/proc/self/fd/{directory}/a', '/proc/self/cwd/../a', '/proc/self/root/tmp/a', held]
numbers = {(found.st_dev, found.st_ino) for found in map(os.stat, names)} | {(found.st_dev, found.st_ino) for found in [os.stat('a', dir_fd=directory)]}
assert len(numbers) == 1, numbers
assert {open(name).read() for name in names[:-1]} == {'mine'}
mapped = mmap.mmap(held, 4, prot=mmap.PROT_READ)
assert mapped[:] == b'mine' and ' /tmp/a\n' in open('/proc/self/maps').read()
os.fchdir(directory)
assert os.getcwd() == '/tmp' and open('a').read() == 'mine'
os.rename('/tmp/a', 'd/b')
assert attempt(os.rename, '/tmp/d/b', base + '/work/b') == 'EXDEV' and attempt(os.link, '/tmp/d/b', base + '/work/b') == 'EXDEV'
shutil.move('/tmp/d/b', base + '/work/b')
assert open(base + '/work/b').read() == 'mine' and os.listdir('/tmp/d') == []
number, path = tempfile.mkstemp()
assert path.startswith('/tmp/') and os.path.samestat(os.fstat(number), os.stat(path))
unnamed = os.open('/tmp', os.O_TMPFILE | os.O_RDWR, 0o600)
assert os.write(unnamed, b'x') == 1
server, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
server.bind('/tmp/socket'); server.listen(); client.connect('/tmp/socket')
assert server.getsockname() == client.getpeername() == '/tmp/socket'
for name, text in (('script', '#!/bin/sh\necho "script $0"\n'), ('through', '#!/tmp/interpreter\n')):
    open('/tmp/' + name, 'w').write(text); os.chmod('/tmp/' + name, 0o755)
shutil.copy('/usr/bin/basename', '/tmp/interpreter')
run = lambda *command: subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
assert run('/tmp/script') == 'script /tmp/script\n' and run('./script') == 'script ./script\n'
assert run('/tmp/through') == 'through\n' and run('/tmp/interpreter', 'x/y') == 'y\n'
assert run('/usr/bin/readlink', '/proc/self/cwd') == '/tmp\n' and run('/bin/sh', '-c', 'cd d; pwd -P') == '/tmp/d\n'
open(base + '/work/left', 'w').write('shown')
print('agrees')
"#;

#[test]
fn a_private_directory_is_one_and_the_same_for_every_call() {
    for user in User::ALL {
        let Some(covered) = Covered::new(user) else { continue };
        let before = covered.condition();
        let output = covered.python(&["--quiet"], AGREES, &[]);
        assert_eq!(text(&output.stdout), "agrees\n", "{user:?}: {output:?}");
        assert_eq!(covered.condition(), before, "{user:?}");
        let shown = |name: &str| fs::read_to_string(covered.base.join("work").join(name)).unwrap();
        assert_eq!((shown("b"), shown("left")), ("mine".to_owned(), "shown".to_owned()));
        for name in ["/tmp/d", "/tmp/script", "/tmp/through", "/tmp/interpreter"] {
            assert!(!Path::new(name).exists(), "{name}");
        }
    }
}

/// Each way to what the view hides, tried once.
const ESCAPES: &str = r#"
import ctypes, os, socket, sys
base, outside = sys.argv[1], sys.argv[2]
c = ctypes.CDLL(None, use_errno=True)
tries = 0
def out(how, what, *arguments, **named):
    global tries
    tries += 1
    try: result = what(*arguments, **named)
    except (OSError, ValueError): return
    print('OUT:', how, result)
def call(number, *arguments):
    result = c.syscall(number, *arguments)
    if result < 0: raise OSError(ctypes.get_errno(), 'call')
    return result
def at(directory, path=b''): return ctypes.c_long(directory), ctypes.c_char_p(path)
def read(path, flags=os.O_RDONLY, **named):
    number = os.open(path, flags, **named)
    try: return os.read(number, 64) if not flags & os.O_PATH else os.stat(number)
    finally: os.close(number)
def connect(path):
    with socket.socket(socket.AF_UNIX) as client: client.connect(path)
name = base.split('/')[-1]
parent = os.getppid()
processes = [outside, str(parent), '1']
for process in processes:
    for part in (f'root{base}', 'cwd', f'cwd/../{name}', f'task/{process}/root{base}', f'task/{process}/cwd'):
        path = f'/proc/{process}/{part}'
        out(path, read, path + '/secret')
        out(path, os.stat, path + '/secret')
        out(path, os.listdir, path) if process != str(parent) else None
        out(path, read, path + '/secret', os.O_PATH)
        out(path, os.mkdir, path + '/made')
        out(path, os.unlink, path + '/secret')
        out(path, os.rename, path + '/secret', '/tmp/moved')
        out(path, os.link, path + '/secret', '/tmp/linked')
        out(path, os.chmod, path + '/secret', 0o600)
        out(path, os.truncate, path + '/secret', 0)
        out(path, os.access, path + '/secret', os.F_OK) if os.access(path + '/secret', os.F_OK) else None
        os.symlink(path + '/secret', f'/tmp/link{tries}')
        out('a link to ' + path, read, f'/tmp/link{tries - 0}')
    for number in range(10):
        out('a descriptor of another', read, f'/proc/{process}/fd/{number}/secret')
        out('a file of another', lambda: read(f'/proc/{process}/fd/{number}').index(b'SECRET'))
for path in (base + '/secret', f'/tmp/../tmp/{name}/secret', f'../secret', f'../../{name}/secret', f'/proc/self/cwd/../secret', f'/proc/self/root{base}/secret',
             f'/proc/thread-self/root{base}/secret', f'//{base}/./work/../secret', f'/../..{base}/secret'):
    out(path, read, path)
    out(path, os.stat, path)
# What was inherited: a directory (7, 8), and the secret to be read (9). A directory comes through a socket, too (6), and can then be listed.
_, sent, _, _ = socket.recv_fds(socket.socket(fileno=6), 1, 2)
assert len(sent) == 2 and os.listdir(sent[0])
for number in (7, 8, *sent):
    out('an inherited directory', read, 'secret', dir_fd=number)
    out('an inherited directory', os.listdir, f'/proc/self/fd/{number}') if number != sent[0] else None
    out('an inherited directory', os.open, '.', os.O_RDONLY, dir_fd=number)
    out('an inherited directory', os.stat, 'secret', dir_fd=number)
    if number in (7, 8):
        out('an inherited directory', os.listdir, number)
        out('an inherited directory', os.fchdir, number)
    else:
        os.fchdir(number)
        out('an inherited directory', read, 'secret')
        out('an inherited directory', os.stat, 'secret')
        out('an inherited directory', os.listdir, '.')
        out('an inherited directory', os.chmod, '.', 0o700)
        out('an inherited directory', connect, 'socket')
        out('an inherited directory', os.execv, './tool', ['tool'])
        os.chdir(base + '/work')
    out('an inherited directory', read, f'/proc/self/fd/{number}/secret')
    out('an inherited directory', read, f'../{name}/secret', dir_fd=number)
    out('an inherited directory', os.mkdir, 'made', dir_fd=number)
    out('an inherited directory', os.unlink, 'secret', dir_fd=number)
    out('an inherited directory', os.rename, 'secret', 'moved', src_dir_fd=number, dst_dir_fd=number)
    out('an inherited directory', os.link, 'secret', '/tmp/linked', src_dir_fd=number)
    out('an inherited directory', os.symlink, 'secret', 'made', dir_fd=number)
assert os.pread(9, 6, 0) == b'SECRET' and open('/proc/self/fd/9').read() == 'SECRET', 'what was open stays usable'
out('writing to what is open for reading', os.open, '/proc/self/fd/9', os.O_WRONLY)
out('truncating it', os.open, '/proc/self/fd/9', os.O_RDONLY | os.O_TRUNC)
out('truncating it', os.truncate, '/proc/self/fd/9', 0)
out('its mode', os.fchmod, 9, 0o600)
out('its mode', os.chmod, '/proc/self/fd/9', 0o600)
out('its times', os.utime, 9)
out('its times', os.utime, '/proc/self/fd/9')
out('its owner', os.fchown, 9, os.getuid(), os.getgid())
out('its attributes', os.setxattr, 9, 'user.x', b'y')
out('a name for it', os.link, '/proc/self/fd/9', '/tmp/linked', follow_symlinks=True)
out('a name for it', call, 265, *at(9), *at(-100, b'/tmp/linked2'), ctypes.c_long(0x1000))
out('executing it', os.execve, 9, ['x'], {})
out('a directory above it', read, '/proc/self/fd/9/../secret')
# Namespaces and mounts.
out('its mount namespace', lambda: call(308, os.open(f'/proc/{outside}/ns/mnt', os.O_RDONLY), 0))
out('a mount namespace', call, 272, 0x20000)
out('a user namespace', call, 272, 0x10000000)
out('a child with one', call, 56, ctypes.c_long(0x20000 | 17), 0, 0, 0, 0)
out('unmounting', call, 166, ctypes.c_char_p(b'/tmp'), 2)
out('mounting', call, 165, ctypes.c_char_p(b'/'), ctypes.c_char_p(b'/tmp'), None, ctypes.c_long(0x1000), None)
out('another root', call, 161, ctypes.c_char_p(b'/tmp'))
out('pivoting', call, 155, ctypes.c_char_p(b'/tmp'), ctypes.c_char_p(b'/tmp'))
out('a tree of mounts', call, 428, *at(-100, b'/'), ctypes.c_long(1))
out('a handle', call, 304, *at(-100, b'/tmp'), 0)
out('a socket outside', connect, base + '/socket')
out('a socket outside', connect, '/proc/self/fd/8/socket')
out('a socket outside', connect, f'/proc/{outside}/cwd/socket')
for path in (f'/proc/{outside}/root{base}', f'/proc/{outside}/cwd', f'/proc/1/root{base}'):
    try: os.chdir(path)
    except OSError: continue
    out('having gone to ' + path, read, 'secret')
    out('having gone to ' + path, os.listdir, '.')
    out('having gone to ' + path, os.stat, 'secret')
    out('having gone to ' + path, os.mkdir, 'made')
    out('having gone to ' + path, os.unlink, 'secret')
    out('having gone to ' + path, os.execv, './tool', ['tool'])
print(tries, 'tries')
"#;

#[test]
fn nothing_leads_out_of_a_view() {
    for user in User::ALL {
        for options in [&["--quiet"] as &[&str], &["--quiet", "--no-landlock"]] {
            let Some(covered) = Covered::new(user) else { continue };
            let socket = covered.base.join("socket");
            let _listens = UnixListener::bind(&socket).unwrap();
            fs::set_permissions(&socket, fs::Permissions::from_mode(0o777)).unwrap();
            let mut neighbour = covered.as_user("sleep");
            let neighbour: Child = neighbour.arg("600").current_dir(&covered.base).spawn().unwrap();
            let neighbour = Killed(neighbour);
            let stat = || fs::read_to_string(format!("/proc/{}/stat", neighbour.id())).unwrap_or_default();
            orrery_testing::eventually("the neighbour sleeps", || stat().contains("(sleep) S"));
            let before = covered.condition();
            let output = covered.python(options, ESCAPES, &[&neighbour.id().to_string()]);
            let said = text(&output.stdout);
            assert!(!said.contains("OUT"), "{user:?} {options:?}: {output:?}");
            let tries = said.lines().find_map(|line| line.strip_suffix(" tries")?.parse::<u32>().ok());
            assert!(tries.is_some_and(|tries| tries > 200), "{user:?} {options:?}: {output:?}");
            assert_eq!(covered.condition(), before, "{user:?} {options:?}");
        }
    }
}

/// A directory that is private within one that is shown within one that is private; files; and how much goes in.
#[test]
fn views_lie_within_views() {
    for user in User::ALL {
        let Some(covered) = Covered::new(user) else { continue };
        fs::create_dir_all(covered.base.join("work/keys")).unwrap();
        fs::write(covered.base.join("work/keys/key"), "KEY").unwrap();
        covered.change(|policy| {
            policy
                .replace("[\"/tmp\"]\nshow", "[\"/tmp\", \"BASE/work/keys\"]\nsize = \"1MiB\"\nshow")
                .replace("/work\"]", "/work\", \"BASE/secret\"]")
                .replace("BASE", covered.base.to_str().unwrap())
        });
        let script = "
import errno, os, sys
base = sys.argv[1]
print(sorted(os.listdir(base)), os.listdir('keys'), open(base + '/secret').read())
open('keys/new', 'w').write('new')
open(base + '/secret', 'a').write('!')
try: open('/tmp/big', 'wb').write(bytes(2 << 20)); print('room')
except OSError as error: print(errno.errorcode[error.errno])
";
        let output = covered.python(&["--quiet"], script, &[]);
        assert_eq!(text(&output.stdout), "['secret', 'work'] [] SECRET\nENOSPC\n", "{user:?}: {output:?}");
        assert_eq!(fs::read_to_string(covered.base.join("secret")).unwrap(), "SECRET!");
        assert_eq!(fs::read_dir(covered.base.join("work/keys")).unwrap().count(), 1);
    }
}

#[test]
fn identities_and_rights_are_as_without_a_view() {
    for user in User::ALL {
        let Some(covered) = Covered::new(user) else { continue };
        let script = "
import os
print(os.getresuid(), os.getresgid(), [line for line in open('/proc/self/status') if line.startswith(('CapEff', 'CapPrm', 'CapInh', 'CapAmb', 'NoNewPrivs'))])
";
        let with = covered.python(&["--quiet"], script, &[]);
        covered
            .change(|policy| policy.split_once("[files]").unwrap().1.to_owned().replacen("", "[files]", 1));
        let without = covered.python(&["--quiet"], script, &[]);
        assert!(text(&with.stdout).contains("NoNewPrivs"), "{user:?}: {with:?}");
        assert_eq!(text(&with.stdout), text(&without.stdout), "{user:?}");
    }
}

#[test]
fn a_view_that_cannot_be_starts_nothing() {
    let Some(covered) = Covered::new(User::Current) else { return };
    let elsewhere = covered.base.join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let hidden = covered.guard(&[]).arg("true").current_dir(&elsewhere).output().unwrap();
    let said = text(&hidden.stderr);
    assert_eq!(hidden.status.code(), Some(125), "{hidden:?}");
    assert!(said.contains("elsewhere: No such file or directory (os error 2); list it under show"), "{said}");
    // Under a guard that lets it do everything else there are no namespaces.
    let outer = covered.base.join("outer.toml");
    fs::write(
        &outer,
        "capabilities = []\n[files]\nread = ['/']\nwrite = ['/']\ncreate = ['/']\nexecute = ['/']\n",
    )
    .unwrap();
    let mut nested = Command::new(&covered.orrery);
    nested.args(["guard", "--quiet", "--policy"]).arg(&outer).arg("--").arg(&covered.orrery);
    nested.args(["guard", "--policy"]).arg(covered.base.join("policy.toml")).args(["--", "echo", "started"]);
    let refused = nested.current_dir(covered.base.join("work")).output().unwrap();
    let said = text(&refused.stderr);
    assert_eq!((refused.status.code(), text(&refused.stdout).as_str()), (Some(125), ""), "{refused:?}");
    assert!(
        said.contains("cannot make the view that the policy describes: unshare: ")
            && said.contains("user namespaces"),
        "{said}"
    );
    // The kernel cannot tell which descriptors lead out.
    let explained = Command::new(&covered.orrery)
        .args(["guard", "--explain", "--quiet", "--policy"])
        .arg(covered.base.join("policy.toml"))
        .output()
        .unwrap();
    let said = text(&explained.stdout);
    assert!(
        said.contains("lead out of the view only the monitor knows")
            && said.contains("the policy has a view"),
        "{said}"
    );
    drop(covered.root);
}

/// What a program does under a view is learnt, and what is refused is suggested, into files that the view covers.
#[test]
fn files_of_the_guard_lie_outside_of_the_view() {
    let Some(covered) = Covered::new(User::Current) else { return };
    let base = covered.base.display();
    let learnt = covered.base.join("learnt.toml");
    fs::write(&learnt, format!("[view]\nprivate = ['/tmp']\nshow = ['{base}/work']\n")).unwrap();
    let mut learning = Command::new(&covered.orrery);
    learning.args(["guard", "--learn"]).arg(&learnt).args([
        "--",
        "sh",
        "-c",
        "ls /tmp; cat /etc/hostname > here",
    ]);
    let output = learning.current_dir(covered.base.join("work")).output().unwrap();
    let top = covered.base.file_name().unwrap().to_str().unwrap();
    assert_eq!(text(&output.stdout), format!("{top}\n"), "{output:?}");
    let policy = fs::read_to_string(&learnt).unwrap();
    assert!(policy.contains("private = ['/tmp']") && policy.contains("\"/etc/hostname\""), "{policy}");
    let log = covered.base.join("log");
    covered.change(|policy| policy.replace("\"/etc\", ", ""));
    let log_option = format!("--log={}", log.display());
    let output = covered.guard(&["--suggest", &log_option]).args(["cat", "/etc/hostname"]).output().unwrap();
    assert!(text(&output.stderr).contains("read = [\"/etc/hostname\", "), "{output:?}");
    assert!(fs::read_to_string(&log).unwrap().contains("/etc/hostname"));
}
