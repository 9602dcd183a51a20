//! `orrery guard --unused`: the entries of a policy that a run did not need, while the policy holds as ever.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::scene::{Scene, exists, text};

const POLICY: &str = r#"[files]
read = ["/usr", "/etc", "/proc", "WORK/in",
        "WORK/not-read"]
stat = ["/"]
list = ["WORK/listed", "WORK/in"]
write = ["/dev/null", "WORK/out", "WORK/not-written"]
create = ["WORK/out", "WORK/not-created"]
own = ["WORK/own", "WORK/not-owned"]
execute = ["/usr/bin", "/usr/sbin"]
deny = ["WORK/in/denied"]

[network]
connect = ["127.0.0.1:PORT", "[2001:db8::]/32:443", "unix:/run/none"]
bind = ["*"]

[calls]
allow = ["keyctl", "bpf"]
deny = ["acct"]
"#;

const SCRIPT: &str = r#"cat in/file; cat in/denied 2>/dev/null && exit 3; ls listed >/dev/null; test -r /etc/passwd
echo text >out/file; rm out/file; echo own >own/file; cat own/file; rm own/file; cat /proc/self/stat >/dev/null
exec /usr/bin/python3 -c '
import ctypes, socket
socket.create_connection(("127.0.0.1", PORT)).close()
get_keyring_id, thread_keyring = 0, -1
ctypes.CDLL(None).syscall(250, get_keyring_id, thread_keyring, 0)
'"#;

/// A scene with the files that the script uses, and a policy in which these words stand for what they mean.
fn scene(port: u16) -> (Scene, PathBuf) {
    let scene = Scene::ordinary();
    for directory in ["in", "listed", "out", "own", "not-owned"] {
        fs::create_dir(scene.work.join(directory)).unwrap();
    }
    fs::write(scene.work.join("in/file"), "in\n").unwrap();
    fs::write(scene.work.join("in/denied"), "SECRET").unwrap();
    let policy = scene.work.parent().unwrap().join("audited.toml");
    fs::write(&policy, worded(POLICY, &scene.work, port)).unwrap();
    (scene, policy)
}

fn worded(text: &str, work: &Path, port: u16) -> String {
    text.replace("WORK", work.to_str().unwrap()).replace("PORT", &port.to_string())
}

fn audit(scene: &Scene, policy: &Path, script: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    command.args(["guard", "--unused", "--policy"]).arg(policy).args(["--", "sh", "-ec", script]);
    command.current_dir(&scene.work).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn entries_that_allowed_nothing_are_listed() {
    if !exists("/usr/bin/python3") {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (scene, policy) = scene(port);
    let script = worded(SCRIPT, &scene.work, port);
    let output = audit(&scene, &policy, &script);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stdout), "in\nown\n", "{output:?}");
    let said = text(&output.stderr);
    let name = policy.display().to_string();
    let expected = worded(
        "the run did not use 10 of the entries of NAME:\n\
         NAME:3:9: [files] read = \"WORK/not-read\"\n\
         NAME:5:LIST: [files] list = \"WORK/in\"\n\
         NAME:6:NOT-WRITTEN: [files] write = \"WORK/not-written\"\n\
         NAME:7:NOT-CREATED: [files] create = \"WORK/not-created\"\n\
         NAME:8:NOT-OWNED: [files] own = \"WORK/not-owned\"\n\
         NAME:9:24: [files] execute = \"/usr/sbin\"\n\
         NAME:13:SECOND: [network] connect = \"[2001:db8::]/32:443\"\n\
         NAME:13:THIRD: [network] connect = \"unix:/run/none\"\n\
         NAME:14:9: [network] bind = \"*\"\n\
         NAME:17:20: [calls] allow = \"bpf\"\n",
        &scene.work,
        port,
    );
    let written = fs::read_to_string(&policy).unwrap();
    let column = |line: usize, entry: &str| {
        let line = written.lines().nth(line - 1).unwrap();
        (line.find(&format!("\"{}\"", worded(entry, &scene.work, port))).unwrap() + 1).to_string()
    };
    let expected = expected
        .replace("NAME", &name)
        .replace(":LIST:", &format!(":{}:", column(5, "WORK/in")))
        .replace("NOT-WRITTEN", &column(6, "WORK/not-written"))
        .replace("NOT-CREATED", &column(7, "WORK/not-created"))
        .replace("NOT-OWNED", &column(8, "WORK/not-owned"))
        .replace("SECOND", &column(13, "[2001:db8::]/32:443"))
        .replace("THIRD", &column(13, "unix:/run/none"));
    let report = said.split_once("orrery guard: the run").map(|(_, report)| format!("the run{report}"));
    assert_eq!(report.as_deref(), Some(expected.as_str()), "{said}");

    // Without these the same run passes, and all is used.
    let mut less = written;
    for entry in expected.lines().skip(1).map(|line| line.split_once(" = ").unwrap().1) {
        let (all, last) = (format!("{entry}, "), format!(", {entry}"));
        let key = expected.lines().find(|line| line.ends_with(entry)).unwrap();
        let key = key.split_whitespace().nth(2).unwrap();
        let lines = less.lines().map(|line| {
            let is_here = line.starts_with(&format!("{key} = ")) || key == "read" && !line.contains('=');
            if !is_here || line.starts_with("deny") {
                line.to_owned()
            } else {
                line.replace(&all, "").replace(&last, "").replace(entry, "")
            }
        });
        less = lines.collect::<Vec<_>>().join("\n");
    }
    fs::write(&policy, less).unwrap();
    let output = audit(&scene, &policy, &script);
    assert!(output.status.success() && text(&output.stdout) == "in\nown\n", "{output:?}");
    assert!(text(&output.stderr).ends_with(&format!("the run used all that {name} allows\n")), "{output:?}");
}

/// What the kernel decides by itself cannot be recorded: nothing is started.
#[test]
fn an_audit_needs_a_monitor_that_opens() {
    let (scene, policy) = scene(1);
    fs::write(&policy, format!("mediation = \"kernel\"\n{}", fs::read_to_string(&policy).unwrap())).unwrap();
    let output = audit(&scene, &policy, "echo started");
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(125), String::new()), "{output:?}");
    assert!(text(&output.stderr).contains("which entries are used is to be reported"), "{output:?}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    let output = command.args(["guard", "--unused", "--profile", "python", "--", "true"]).output().unwrap();
    assert!(!output.status.success() && text(&output.stderr).contains("--profile"), "{output:?}");
}
