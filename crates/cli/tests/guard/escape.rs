//! Every way out that is known, each tried once: see `escape.c`.

use std::fs;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::{Command, Stdio};

use crate::scene::{Scene, User, built, is_superuser, text};
use orrery_testing::Killed;

/// A process outside of the guard, of the same user, in a group of its own.
struct Neighbour(Killed);

impl Neighbour {
    fn new(user: User) -> Self {
        let mut command = match user {
            User::Current => Command::new("sleep"),
            User::Nobody => {
                let mut command = Command::new("setpriv");
                command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "sleep"]);
                command
            }
        };
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let child = command.arg("600").stdin(Stdio::null()).spawn().unwrap();
        let stat = || fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
        orrery_testing::eventually("the neighbour sleeps", || stat().contains("(sleep) S"));
        Self(Killed(child))
    }

    /// Returns what others might have changed of it.
    fn condition(&self) -> String {
        let read = |file: &str| {
            fs::read_to_string(format!("/proc/{}/{file}", self.0.id())).unwrap_or_else(|_| "gone".to_owned())
        };
        let stat = read("stat");
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        // State, priority, niceness, real-time priority, policy: proc(5).
        let chosen = [0, 15, 16, 37, 38].map(|field| fields.get(field).copied().unwrap_or("gone")).join(" ");
        let status = read("status");
        let processors = status.lines().find(|line| line.starts_with("Cpus_allowed:"));
        format!("{chosen}\n{}\n{}{}", processors.unwrap_or("gone"), read("limits"), read("oom_score_adj"))
    }
}

fn held(user: User, options: &[&str]) {
    if user == User::Nobody && !is_superuser() {
        return orrery_testing::skipped!("only the superuser becomes somebody without rights");
    }
    let program = built("escape").to_str().unwrap();
    // What is above of what the kernel is told by is listed; none of it is by name.
    let scene = Scene::new(&format!("execute = [\"{program}\"]\n"));
    scene.change(|policy| {
        policy
            .replace("read = [", &format!("read = [\"{program}\", \"/proc\", "))
            .replace("write = [", "write = [\"/proc\", \"/dev\", ")
            .replace("\"/proc/sys\", ", "")
    });
    let neighbour = Neighbour::new(user);
    let before = neighbour.condition();
    let streams = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let path = folder.path().join("socket");
    let _unix = UnixListener::bind(&path).unwrap();
    for (place, mode) in [(folder.path(), "755"), (path.as_path(), "777")] {
        assert!(Command::new("chmod").arg(mode).arg(place).status().unwrap().success());
    }
    let name = format!("orrery-escape-{}-{user:?}{}", std::process::id(), options.len());
    let _abstract = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let arguments = [
        "all".to_owned(),
        scene.work.display().to_string(),
        scene.secret.display().to_string(),
        neighbour.0.id().to_string(),
        path.display().to_string(),
        name,
        streams.local_addr().unwrap().port().to_string(),
    ];
    let options = [&["--quiet"], options].concat();
    let Some(output) = scene.run_as(user, &options, program, &arguments) else { return };
    let said = text(&output.stdout);
    assert!(output.status.success() && said.contains("held"), "{user:?} {options:?}: {output:?}");
    let tries: u32 = said.lines().find_map(|line| line.split_once(" tries")?.0.parse().ok()).unwrap();
    assert!(tries >= 180, "{said}");
    assert_eq!(neighbour.condition(), before, "{user:?} {options:?}");
    assert_eq!(fs::read_to_string(&scene.secret).unwrap(), "SECRET");
}

#[test]
fn whoever_runs_the_tests_does_not_get_out() {
    held(User::Current, &[]);
}

#[test]
fn somebody_without_rights_does_not_get_out() {
    held(User::Nobody, &[]);
}

#[test]
fn nobody_gets_out_without_landlock() {
    for user in User::ALL {
        held(user, &["--no-landlock"]);
    }
}

/// Python under guard, with this before the policy.
fn python(policy: &str, script: &str) -> String {
    let scene = Scene::ordinary();
    scene.change(|text| format!("{policy}\n{text}"));
    text(&scene.run(&["/usr/bin/python3", "-S", "-c", script]).stdout)
}

#[test]
fn the_superuser_keeps_what_the_policy_names() {
    if !is_superuser() {
        return orrery_testing::skipped!("only the superuser has something to lose");
    }
    let script = "
import os, re, subprocess
def sets(text): return {name: int(number, 16) for name, number in re.findall(r'Cap(\\w+):\\s*(\\w+)', text)}
def attempt(what, *arguments):
    try: what(*arguments); return 'ok'
    except OSError as error: return error.errno
own = sets(open('/proc/self/status').read())
print(*(hex(own[name]) for name in ('Inh', 'Prm', 'Eff', 'Bnd', 'Amb')), sets(subprocess.getoutput('cat /proc/self/status')) == own)
print(attempt(os.setpriority, os.PRIO_PROCESS, 0, -1), attempt(os.chown, '.', 1, 1))
";
    // chown to net_bind_service, without linux_immutable: what files, users, signals and ports take.
    assert_eq!(python("", script), "0x0 0x5ff 0x5ff 0x5ff 0x0 True\n13 ok\n");
    assert_eq!(python("capabilities = []", script), "0x0 0x0 0x0 0x0 0x0 True\n13 1\n");
    assert_eq!(
        python("capabilities = ['CAP_SYS_NICE', 'chown']", script),
        "0x0 0x800001 0x800001 0x800001 0x0 True\nok ok\n"
    );
}

/// Settings and devices are written where the policy names them, and not because of what is above.
#[test]
fn the_systems_own_files_have_to_be_named() {
    if !is_superuser() {
        return orrery_testing::skipped!("only the superuser changes settings");
    }
    let script = "
def attempt(path, mode):
    try: return open(path, mode).read(1) or 'empty'
    except OSError as error: return error.errno
now = open('/proc/sys/kernel/core_pattern').read()
try: open('/proc/sys/kernel/core_pattern', 'w').write(now); print('written')
except OSError as error: print(error.errno)
open('/dev/null', 'w').write('x'); print(len(open('/dev/urandom', 'rb').read(3)))
";
    let scene = Scene::ordinary();
    let run = || text(&scene.run(&["/usr/bin/python3", "-S", "-c", script]).stdout);
    scene.change(|policy| policy.replace("write = [", "write = [\"/proc\", \"/\", "));
    assert_eq!(run(), "13\n3\n");
    scene.change(|policy| policy.replace("write = [", "write = [\"/proc/sys/kernel\", "));
    assert_eq!(run(), "written\n3\n");
}

/// The kernel writes a core to wherever a process is.
#[test]
fn no_core_is_left_where_nothing_may_be_made() {
    let scene = Scene::ordinary();
    let folder = scene.secret.parent().unwrap();
    let script = format!(
        "import os, resource
print(resource.getrlimit(resource.RLIMIT_CORE))
try: resource.setrlimit(resource.RLIMIT_CORE, (4096, 4096)); print('raised')
except (OSError, ValueError): print('refused')
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.chdir('{}')
print('there', flush=True)
os.abort()",
        folder.display()
    );
    let output = scene.run(&["/usr/bin/python3", "-S", "-c", &script]);
    assert_eq!(text(&output.stdout), "(0, 0)\nrefused\nthere\n", "{output:?}");
    assert_eq!(fs::read_dir(folder).unwrap().count(), 1, "something lies beside the secret");
}

/// Of what can be read the guard gives a descriptor that reads it; of a pipe, one that only stands for it.
#[test]
fn descriptors_that_stand_for_files_change_nothing() {
    let scene = Scene::new("execute = [\"/usr/bin\"]\nstat = [\"/\"]\n");
    scene.same(
        "/usr/bin/python3 -S -c \"
import os
os.mkfifo('f')
held = os.open('f', os.O_PATH)
def attempt(what, *arguments):
    try: what(*arguments); return 'ok'
    except OSError as error: return error.errno
print(attempt(os.utime, held), attempt(os.fchmod, held, 0o600), attempt(os.fchown, held, -1, -1))
print(attempt(os.setxattr, held, 'user.x', b'y'), attempt(os.removexattr, held, 'user.x'))
print(attempt(os.utime, 'f'), attempt(os.utime, os.open('f', os.O_RDONLY | os.O_NONBLOCK)))
\"",
    );
}
