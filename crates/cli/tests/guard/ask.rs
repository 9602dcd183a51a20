//! What the policy does not allow is asked about (`--ask`).

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::sync::mpsc::{Receiver, channel};

use serde_json::Value;

use crate::scene::{Scene, User, exists, text};

/// A program that answers by `decide`; what it was asked can be received. `None` closes the connection.
fn answers(
    scene: &Scene,
    decide: impl Fn(&Value) -> Option<&'static str> + Send + 'static,
) -> (PathBuf, Receiver<Value>) {
    let socket = scene.policy.with_file_name("ask");
    let listener = UnixListener::bind(&socket).unwrap();
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    let (sender, asked) = channel();
    std::thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        for line in BufReader::new(connection.try_clone().unwrap()).lines() {
            let Ok(line) = line else { return };
            let question: Value = serde_json::from_str(&line).unwrap();
            let answer = if question["withdrawn"] == true { Some("") } else { decide(&question) };
            let _ = sender.send(question.clone());
            match answer {
                None => return,
                Some("") => (),
                Some(answer) => {
                    let line = format!("{{\"id\":{},\"answer\":\"{answer}\"}}\n", question["id"]);
                    connection.write_all(line.as_bytes()).unwrap();
                }
            }
        }
    });
    (socket, asked)
}

/// Answers nothing where the secret is meant.
fn silent(question: &Value) -> Option<&'static str> {
    Some(if question["path"].as_str().is_some_and(|path| path.ends_with("secret")) { "" } else { "deny" })
}

fn run(scene: &Scene, socket: &PathBuf, script: &str) -> Output {
    let mut command = scene.guard();
    command.arg("--ask").arg(socket).args(["--", "sh", "-c", script]).arg("sh").arg(&scene.secret);
    command.stdin(Stdio::null()).output().unwrap()
}

#[test]
fn files_are_read_as_it_is_answered() {
    for (answer, expected) in
        [("once", "SECRETSECRET"), ("always", "SECRETSECRET"), ("deny", ""), ("never", "")]
    {
        let scene = Scene::ordinary();
        let (socket, asked) = answers(&scene, move |_| Some(answer));
        let output = run(&scene, &socket, "cat $1; cat $1");
        assert_eq!(text(&output.stdout), expected, "{answer}: {output:?}");
        let asked: Vec<Value> = asked.iter().collect();
        let reads: Vec<_> =
            asked.iter().filter(|question| question["missing"] == serde_json::json!(["read"])).collect();
        assert!(!reads.is_empty(), "{asked:?}");
        for question in &reads {
            assert_eq!(question["path"], scene.secret.to_str().unwrap());
            assert_eq!(question["program"], "cat");
            assert!(question["call"].as_str().unwrap().starts_with("open"));
        }
        // What was answered for good is not asked again.
        let often = matches!(answer, "once" | "deny");
        assert_eq!(reads.len(), if often { 2 } else { 1 }, "{asked:?}");
    }
}

#[test]
fn ordinary_users_are_asked_too() {
    let scene = Scene::ordinary();
    let (socket, asked) = answers(&scene, |_| Some("once"));
    fs::set_permissions(scene.secret.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
    let secret = scene.secret.to_str().unwrap().to_owned();
    let options = ["--ask", socket.to_str().unwrap()];
    let Some(output) = scene.run_as(User::Nobody, &options, "/usr/bin/cat", &[secret]) else { return };
    assert_eq!(text(&output.stdout), "SECRET", "{output:?}");
    assert!(asked.iter().count() > 0);
}

#[test]
fn files_are_made_and_addresses_reached_where_that_is_answered() {
    if !exists("bash") {
        return;
    }
    let scene = Scene::ordinary();
    let (socket, asked) = answers(&scene, |_| Some("once"));
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    let served = std::thread::spawn(move || server.accept().unwrap().0.write_all(b"served").unwrap());
    let script =
        format!("echo made > ${{1%secret}}new && bash -c 'exec 3<>/dev/tcp/127.0.0.1/{port} && cat <&3'");
    let output = run(&scene, &socket, &script);
    assert_eq!(text(&output.stdout), "served", "{output:?}");
    served.join().unwrap();
    assert_eq!(fs::read_to_string(scene.secret.with_file_name("new")).unwrap(), "made\n");
    let addresses: Vec<_> = asked.iter().filter(|question| question["address"].is_string()).collect();
    assert_eq!(addresses.len(), 1, "{addresses:?}");
    assert_eq!(addresses[0]["address"], format!("tcp:127.0.0.1:{port}"));
}

#[test]
fn without_an_answer_calls_are_refused() {
    let scene = Scene::ordinary();
    let missing = run(&scene, &scene.policy.with_file_name("none"), "echo started");
    assert_eq!((missing.status.code(), text(&missing.stdout).as_str()), (Some(125), ""), "{missing:?}");
    assert!(text(&missing.stderr).contains("cannot connect to"), "{missing:?}");

    let (socket, _asked) = answers(&scene, |_| None);
    let output = run(&scene, &socket, "cat $1; cat $1; echo $?");
    assert_eq!(text(&output.stdout), "1\n", "{output:?}");
    assert!(text(&output.stderr).contains("questions are not answered any more"), "{output:?}");
}

#[test]
fn a_call_that_ends_withdraws_its_question_and_others_go_on() {
    let scene = Scene::ordinary();
    let (socket, asked) = answers(&scene, silent);
    let output = run(
        &scene,
        &socket,
        "timeout -s KILL 1 cat $1 & cat /etc/hostname > /dev/null && echo on; wait; sleep 1; echo over",
    );
    assert_eq!(text(&output.stdout), "on\nover\n", "{output:?}");
    assert!(asked.iter().any(|question| question["withdrawn"] == true));
}

/// A program that does nothing but ask for what it cannot have.
#[test]
fn more_questions_than_are_answered_are_refused() {
    let scene = Scene::ordinary();
    let (socket, asked) = answers(&scene, silent);
    let script = "i=0; while [ $i -lt 100 ]; do cat $1 2>/dev/null & i=$((i+1)); done; sleep 2; cat /etc/hostname >/dev/null && echo on; kill -9 0";
    let mut command = scene.guard();
    command
        .process_group(0)
        .arg("--ask")
        .arg(&socket)
        .args(["--quiet", "--", "sh", "-c", script, "sh"])
        .arg(&scene.secret);
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert_eq!(text(&output.stdout), "on\n", "{output:?}");
    let asked: Vec<Value> = asked.iter().filter(|question| silent(question) == Some("")).collect();
    assert!((1..=32).contains(&asked.len()), "{}: {:?}", asked.len(), asked.last());
}

/// What a program executes was settled before it started, and what leads around the monitor is never allowed.
#[test]
fn some_things_are_not_asked_about() {
    let scene = Scene::ordinary();
    let (socket, asked) = answers(&scene, |_| Some("always"));
    let tool = scene.secret.with_file_name("tool");
    orrery_testing::copy_program("/usr/bin/true", &tool);
    let script = "${1%secret}tool && echo executed; unshare -U true && echo unshared; ls -l /proc/self/fd";
    let mut command = scene.guard();
    command.arg("--ask").arg(&socket).args(["--", "sh", "-c", script, "sh"]).arg(&scene.secret);
    // Other tests' descriptors may have come here.
    let close = || {
        // SAFETY: only marks descriptors to be closed on execution.
        let marked =
            unsafe { libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC.cast_signed()) };
        if marked == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: nothing but a system call happens between fork and exec.
    unsafe { command.pre_exec(close) };
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = text(&output.stdout);
    assert!(!said.contains("executed") && !said.contains("unshared"), "{output:?}");
    // The connection is the monitor's alone.
    assert!(said.contains("/proc/") && !said.contains("socket:"), "{said}");
    assert!(asked.iter().all(|question| !question["missing"].to_string().contains("execute")));
}
