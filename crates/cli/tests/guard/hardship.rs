//! What happens when things go wrong: monitors that die, processes without end, no descriptors left.

use std::fs;
use std::process::{Command, Output, Stdio};

use crate::scene::{Scene, exists, is_superuser, text};

#[test]
fn without_a_monitor_nothing_passes() {
    let scene = Scene::ordinary();
    let script = "trap '' TERM; echo ready; while :; do cat /etc/hostname > out 2>/dev/null; done";
    let mut guarded = scene
        .guard()
        .args(["--quiet", "--", "setsid", "sh", "-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(guarded.stdout.take().unwrap()));
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    std::thread::sleep(std::time::Duration::from_millis(50));
    guarded.kill().unwrap();
    guarded.wait().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(100));
    let _ = fs::remove_file(scene.work.join("out"));
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(!scene.work.join("out").exists(), "a call passed without a monitor");
}

/// A shell command as `nobody`, which the superuser runs; the guard is then nobody's, too.
fn as_nobody(scene: &Scene, shell: &str) -> Option<Output> {
    if !is_superuser() || !exists("setpriv") {
        orrery_testing::skipped!("only the superuser becomes somebody without rights");
        return None;
    }
    for folder in [scene.work.parent().unwrap(), &scene.work] {
        Command::new("chmod").arg("777").arg(folder).status().unwrap();
    }
    // Others may not enter the checkout.
    let public = orrery_testing::PublicDirectory::new();
    let orrery = public.copy(env!("CARGO_BIN_EXE_orrery"));
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", "--"];
    let output = Command::new("setpriv")
        .args(nobody)
        .args(["sh", "-c", shell])
        .arg(&orrery)
        .arg(&scene.policy)
        .current_dir(&scene.work)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    Some(output)
}

#[test]
fn setuid_programs_gain_nothing() {
    let scene = Scene::ordinary();
    let program = scene.work.join("id");
    orrery_testing::copy_program("/usr/bin/id", &program);
    Command::new("chmod").arg("4755").arg(&program).status().unwrap();
    // Without --no-new-privs the program would be root's: so the guard has to see to it.
    if !is_superuser() || !exists("setpriv") {
        return orrery_testing::skipped!("only the superuser makes programs that are root's");
    }
    for folder in [scene.work.parent().unwrap(), &scene.work] {
        Command::new("chmod").arg("755").arg(folder).status().unwrap();
    }
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups", "--"];
    let plain = Command::new("setpriv").args(nobody).arg(&program).arg("-u").output().unwrap();
    if text(&plain.stdout).trim() != "0" {
        return orrery_testing::skipped!("set-user-ID programs gain nothing here anyway: {plain:?}");
    }
    let public = orrery_testing::PublicDirectory::new();
    let orrery = public.copy(env!("CARGO_BIN_EXE_orrery"));
    let guarded = Command::new("setpriv")
        .args(nobody)
        .arg(&orrery)
        .args(["guard", "--policy"])
        .arg(&scene.policy)
        .arg("--")
        .arg(&program)
        .arg("-u")
        .current_dir("/")
        .output()
        .unwrap();
    assert_eq!(text(&guarded.stdout).trim(), "65534", "{guarded:?}");
}

#[test]
fn what_somebody_without_rights_guards_is_guarded() {
    let scene = Scene::ordinary();
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let script =
        r#""$0" guard --policy "$1" -- sh -c 'echo x > f; (cat f &) ; sleep 0.1; cat ../hidden/secret'"#;
    let Some(output) = as_nobody(&scene, script) else { return };
    match scope.trim() {
        "2" | "3" => {
            orrery_testing::skipped!("with kernel.yama.ptrace_scope={scope} only the superuser guards");
        }
        // Orphans, too, are read by the monitor, which has taken them in.
        _ => {
            assert_eq!(text(&output.stdout), "x\n", "{output:?}");
            assert!(text(&output.stderr).contains("refused openat of"), "{output:?}");
        }
    }
    if scope.is_empty() {
        orrery_testing::skipped!("there is no Yama here: its scopes 1 and 2 were not tried");
    }
}

#[test]
fn fork_bombs_end_at_the_limit() {
    let scene = Scene::ordinary();
    scene.change(|policy| format!("{policy}\n[limits]\nprocesses = 40\n"));
    let script = r#""$0" guard --policy "$1" -- /usr/bin/python3 -S -c '
import os, sys, time
made = 0
for i in range(200):
    try: pid = os.fork()
    except BlockingIOError: break
    if pid == 0:
        open("f%d" % i, "w").close(); time.sleep(30); os._exit(0)
    made += 1
print(made < 60, open("/etc/hostname").read() != "")
sys.stdout.flush()
os.killpg(0, 9)
'"#;
    let script = format!("exec setsid -w {}", script.replace("\"$0\" guard", "\"$0\" guard --quiet"));
    let Some(output) = as_nobody(&scene, &script) else { return };
    assert_eq!(text(&output.stdout), "True True\n", "{output:?}");
}

#[test]
fn running_out_of_descriptors_is_the_programs_own_trouble() {
    let scene = Scene::ordinary();
    let script = "
import os, threading, resource, errno
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True: held.append(os.open('/etc/hostname', os.O_RDONLY))
except OSError as error: print(error.errno == errno.EMFILE, len(held) > 40, max(held) == 63)
print(os.stat('/etc/hostname').st_size > 0)
for fd in held: os.close(fd)
print(len(open('/etc/hostname').read()) > 0)
";
    // The monitor itself has few to begin with, and holds one for each thread that it has to know.
    let output = Command::new("sh")
        .args(["-c", "ulimit -S -n 48; exec \"$0\" guard --policy \"$1\" -- /usr/bin/python3 -S -c \"$2\""])
        .args([env!("CARGO_BIN_EXE_orrery"), scene.policy.to_str().unwrap(), script])
        .current_dir(&scene.work)
        .output()
        .unwrap();
    assert_eq!(text(&output.stdout), "True True True\nTrue\nTrue\n", "{output:?}");
}

#[test]
fn a_hundred_threads_are_served() {
    let scene = Scene::ordinary();
    let script = "
import os, threading
folder = os.open('.', os.O_RDONLY)
done = []
def work(i):
    for j in range(20):
        name = f'{i}-{j}'
        fd = os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=folder)
        os.write(fd, name.encode()); os.close(fd)
        os.rename(name, name + 'x', src_dir_fd=folder, dst_dir_fd=folder)
        assert open(os.path.realpath(name + 'x')).read() == name
        os.unlink(name + 'x')
    done.append(i)
threads = [threading.Thread(target=work, args=(i,)) for i in range(100)]
[t.start() for t in threads]; [t.join() for t in threads]
print(len(done), os.listdir('.'))
";
    for limit in ["20000", "64"] {
        let output = Command::new("sh")
            .args(["-c", "ulimit -n \"$3\" 2>/dev/null; exec \"$0\" guard --policy \"$1\" -- /usr/bin/python3 -S -c \"$2\""])
            .args([env!("CARGO_BIN_EXE_orrery"), scene.policy.to_str().unwrap(), script, limit])
            .current_dir(&scene.work)
            .output()
            .unwrap();
        // With 64 descriptors, threads may find none free; none of them gets stuck.
        if limit != "64" {
            assert_eq!(text(&output.stdout), "100 []\n", "{output:?}");
        } else {
            assert!(text(&output.stdout).contains('['), "{output:?}");
        }
    }
}

#[test]
fn a_monitor_that_dies_under_load_takes_nobody_along_and_lets_nothing_pass() {
    let scene = Scene::ordinary();
    let script = "
import os, threading, time, signal
for child in range(4):
    if os.fork() == 0:
        os.setsid()
        def work(i):
            while True:
                try: os.close(os.open(f'made-{os.getpid()}-{i}', os.O_CREAT | os.O_WRONLY))
                except OSError: pass
        for i in range(5): threading.Thread(target=work, args=(i,), daemon=True).start()
        os.write(1, b'%d\\n' % os.getpid())
        time.sleep(60)
time.sleep(60)
";
    let mut guarded = scene
        .guard()
        .args(["--quiet", "--", "/usr/bin/python3", "-S", "-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = std::io::BufRead::lines(std::io::BufReader::new(guarded.stdout.take().unwrap()));
    let children: Vec<String> = lines.take(4).map(|line| line.unwrap()).collect();
    std::thread::sleep(std::time::Duration::from_millis(100));
    guarded.kill().unwrap();
    guarded.wait().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(200));
    let made = || {
        let entries = fs::read_dir(&scene.work).unwrap().flatten();
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("made-")).collect::<Vec<_>>()
    };
    assert!(!made().is_empty(), "nothing was made under guard");
    made().iter().for_each(|entry| fs::remove_file(entry.path()).unwrap());
    std::thread::sleep(std::time::Duration::from_millis(300));
    let after = made().len();
    // Nobody waits for an answer for ever: all can be ended.
    for child in &children {
        Command::new("kill").args(["-9", child]).stderr(Stdio::null()).status().unwrap();
    }
    let gone = |child: &String| {
        let status = fs::read_to_string(format!("/proc/{child}/status")).unwrap_or_default();
        status.is_empty() || status.contains("State:\tZ")
    };
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while !children.iter().all(gone) {
        assert!(std::time::Instant::now() < end, "a guarded process cannot be killed");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(after, 0, "files were made without a monitor");
}

/// nginx starts as root, binds, drops its privileges in its workers, reloads, and goes.
#[test]
fn nginx_serves_drops_privileges_and_reloads() {
    if !is_superuser() || !exists("nginx") || !exists("curl") {
        return orrery_testing::skipped!("this takes the superuser, nginx and curl");
    }
    let scene = Scene::ordinary();
    let base = scene.work.to_str().unwrap();
    Command::new("chmod").arg("711").arg(scene.work.parent().unwrap()).status().unwrap();
    Command::new("chmod").arg("755").arg(&scene.work).status().unwrap();
    // A port that is free, or was a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    fs::create_dir(scene.work.join("root")).unwrap();
    fs::write(scene.work.join("root/page"), "served").unwrap();
    fs::write(scene.work.join("root/private"), "private").unwrap();
    Command::new("chmod").arg("600").arg(scene.work.join("root/private")).status().unwrap();
    std::os::unix::fs::symlink(&scene.secret, scene.work.join("root/secret")).unwrap();
    Command::new("chmod").arg("644").arg(&scene.secret).status().unwrap();
    Command::new("chmod").arg("755").arg(scene.secret.parent().unwrap()).status().unwrap();
    let configuration = |word: &str| {
        let text = format!(
            "user nobody nogroup; worker_processes 2; pid {base}/pid; error_log {base}/errors; daemon off;
             events {{ }}
             http {{ access_log off; client_body_temp_path {base}/t1; proxy_temp_path {base}/t2; fastcgi_temp_path {base}/t3;
                     uwsgi_temp_path {base}/t4; scgi_temp_path {base}/t5;
                     server {{ listen 127.0.0.1:{port}; root {base}/root; add_header X-Word {word}; }} }}"
        );
        fs::write(scene.work.join("nginx.conf"), text).unwrap();
    };
    configuration("first");
    scene.change(|policy| {
        let policy = policy.replace("read = [", "read = [\"/run\", ");
        format!("{policy}\n[network]\nbind = [\"127.0.0.1:{port}\"]\nconnect = []\n")
    });
    let nginx =
        ["nginx", "-e", &format!("{base}/errors"), "-c", &format!("{base}/nginx.conf")].map(str::to_owned);
    let mut guarded = scene.guard().args(["--quiet", "--"]).args(&nginx).spawn().unwrap();
    let url = |page: &str| format!("http://127.0.0.1:{port}/{page}");
    let fetch = |page: &str| {
        let output = Command::new("curl").args(["-s", "-i", "--max-time", "5", &url(page)]).output().unwrap();
        text(&output.stdout)
    };
    let until = |wanted: &str| {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
        loop {
            let answer = fetch("page");
            if answer.contains(wanted) {
                break answer;
            }
            assert!(
                std::time::Instant::now() < end,
                "{answer}\n{}",
                fs::read_to_string(scene.work.join("errors")).unwrap_or_default()
            );
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    };
    assert!(until("X-Word: first").ends_with("served"));
    let master = fs::read_to_string(scene.work.join("pid")).unwrap().trim().to_owned();
    // The workers are nobody, for the monitor, too.
    assert!(fetch("private").contains("403 Forbidden"));
    assert!(fetch("secret").contains("403 Forbidden"), "the policy does not list it");
    configuration("second");
    Command::new("kill").args(["-HUP", &master]).status().unwrap();
    assert!(until("X-Word: second").ends_with("served"));
    assert!(fetch("private").contains("403 Forbidden"));
    // A worker that is killed is replaced.
    let workers = fs::read_to_string(format!("/proc/{master}/task/{master}/children")).unwrap();
    for worker in workers.split_whitespace() {
        Command::new("kill").args(["-9", worker]).status().unwrap();
    }
    assert!(until("X-Word: second").ends_with("served"));
    Command::new("kill").args(["-QUIT", &master]).status().unwrap();
    assert!(guarded.wait().unwrap().success());
}
