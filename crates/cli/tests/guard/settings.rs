//! What is read only or an exception, and the settings of other sandboxes that say so.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::scene::{Scene, User, exists, text};

/// Runs a shell under settings, in the scene's directory.
fn under(scene: &Scene, json: &str, script: &str, options: &[&str]) -> Output {
    let settings = scene.policy.with_file_name("settings.json");
    fs::write(&settings, json).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    command.arg("guard").args(options).arg("--settings").arg(&settings).args(["--", "sh", "-c", script]);
    command.current_dir(&scene.work).stdin(Stdio::null()).output().unwrap()
}

/// Each way to change something without the right is tried by itself; what works is printed.
const CHANGES: &str = r#"
attempt() { ("$@") 2>/dev/null && echo "$*"; }
write() { echo x >> "$1"; }
attempt write there/config; attempt write there/new; attempt rm there/config; attempt mv there/config out; attempt mv -T there out
attempt mkdir there/sub; attempt chmod 600 there/config; attempt touch -d 2001-01-01 there/config; attempt truncate -s 0 there/config
attempt rmdir absent; attempt mkdir absent; attempt write absent; attempt ln -s elsewhere absent
attempt ln -s elsewhere way; attempt write stub; attempt mv stub way; rm -f stub
mkdir -p other/hooks; ln -s other link
attempt mv -T other way; attempt mv -T link way; attempt ln link way
attempt ln there/config name && attempt write name
mkdir -p way; attempt mkdir way/hooks; attempt ln -s ../other/hooks way/hooks; attempt write way/free
attempt cat there/config
"#;

#[test]
fn what_is_read_only_stays_as_it_is() {
    for user in User::ALL {
        let scene = Scene::new(
            "execute = ['/usr', '/lib', '/lib64', 'WORK']\nread-only = ['WORK/there', 'WORK/absent', 'WORK/way/hooks']\n",
        );
        let there = scene.work.join("there");
        fs::create_dir(&there).unwrap();
        fs::write(there.join("config"), "config\n").unwrap();
        for path in [&there, &there.join("config")] {
            assert!(Command::new("chmod").arg("a+rwX").arg(path).status().unwrap().success());
        }
        let Some(output) = scene.run_as(user, &["--quiet"], "/usr/bin/sh", &["-c".into(), CHANGES.into()])
        else {
            continue;
        };
        let done = text(&output.stdout);
        let allowed = ["write stub", "write way/free", "config", "cat there/config"];
        // What is moved there would be a file, of which nothing is beneath.
        let lines: Vec<_> = done.lines().filter(|line| !line.starts_with("mv stub")).collect();
        assert_eq!(lines, allowed, "{user:?}: {output:?}");
        assert_eq!(fs::read_to_string(there.join("config")).unwrap(), "config\n");
        assert!(!scene.work.join("absent").exists(), "{user:?}");
        assert!(!scene.work.join("way").is_symlink(), "{user:?}");
    }
}

/// The kernel cannot hold such a policy; where it opens files, it must not be trusted with it.
#[test]
fn the_kernel_opens_nothing_of_a_read_only_policy() {
    for entry in ["WORK", "WORK/file", "/"] {
        let scene = Scene::new(&format!("execute = ['/usr', '/lib', '/lib64']\nread-only = ['{entry}']\n"));
        fs::write(scene.work.join("file"), "").unwrap();
        let script = "cd; echo x > \"$0\"/file".to_owned();
        let output = scene
            .guard()
            .args(["--quiet", "--", "sh", "-c", &script])
            .arg(&scene.work)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(!output.status.success(), "{entry}: {output:?}");
        assert_eq!(fs::read_to_string(scene.work.join("file")).unwrap(), "", "{entry}");
        scene.change(|policy| format!("mediation = 'kernel'\n{policy}"));
        let refused = scene.guard().args(["--quiet", "--", "true"]).output().unwrap();
        assert_eq!(refused.status.code(), Some(125), "{entry}: {refused:?}");
    }
}

#[test]
fn settings_of_agents_are_held() {
    let scene = Scene::ordinary();
    let base = scene.work.parent().unwrap();
    fs::create_dir(scene.work.join("locked")).unwrap();
    let json = format!(
        r#"{{"filesystem": {{"denyRead": ["{0}"], "allowRead": ["."], "allowWrite": [".", "{0}/new"], "denyWrite": ["locked", "./later/**"]}},
            "network": {{"allowedDomains": []}}}}"#,
        base.display()
    );
    let script = format!(
        "cat {}; ls {}; echo x > locked/x; mkdir later; touch /usr/x; echo in > file; cat file; realpath file; id -un > /dev/null; \
         sh -c 'echo started'; python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 9))'",
        scene.secret.display(),
        base.display()
    );
    let output = under(&scene, &json, &script, &[]);
    let real = scene.work.canonicalize().unwrap();
    let expected = format!("in\n{}\nstarted\n", real.join("file").display());
    assert_eq!(text(&output.stdout), expected, "{output:?}");
    assert!(!scene.work.join("later").exists() && !scene.work.join("locked/x").exists(), "{output:?}");
    assert!(!Path::new("/usr/x").exists());
    let said = text(&output.stderr);
    assert!(said.contains("Permission denied") && !said.contains("Connection refused"), "{said}");
}

#[test]
fn settings_that_are_not_honoured_start_nothing() {
    let scene = Scene::ordinary();
    for (json, named) in [
        (r#"{"network": {"allowedDomains": ["example.org"]}}"#, "network.allowedDomains \"example.org\""),
        (r#"{"filesystem": {"denyRead": ["*.pem"]}}"#, "filesystem.denyRead \"*.pem\""),
        (
            r#"{"permissions": {}}"#,
            "settings.json:1:14: cannot honour the settings: unknown field `permissions`",
        ),
    ] {
        let output = under(&scene, json, "touch started", &[]);
        assert_eq!(output.status.code(), Some(125), "{output:?}");
        assert!(text(&output.stderr).contains(named), "{output:?}");
        assert!(!scene.work.join("started").exists());
    }
    let printed = under(&scene, r#"{"filesystem": {"denyWrite": ["x"]}}"#, "true", &["--print"]);
    assert!(text(&printed.stdout).contains("read-only = [\"x\"]"), "{printed:?}");
}

/// A git worktree keeps its state in the repository that it belongs to.
#[test]
fn git_worktrees_work_where_their_repository_may_be_written() {
    if !exists("git") {
        return;
    }
    let scene = Scene::ordinary();
    let base = scene.work.parent().unwrap();
    let git = "export HOME=$PWD GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b\n";
    let made = format!(
        "{git}cd {} && git init -q r && cd r && git commit -q --allow-empty -m 1 && git worktree add -q {}/tree",
        base.display(),
        scene.work.display()
    );
    assert!(Command::new("sh").args(["-c", &made]).current_dir(&scene.work).status().unwrap().success());
    let repository = base.join("r/.git");
    let json = format!(
        r#"{{"filesystem": {{"allowWrite": [".", "{0}"], "denyWrite": ["{0}/hooks", "{0}/config"]}}}}"#,
        repository.display()
    );
    let script = format!(
        "{git}cd tree && echo x > f && git add f && git commit -qm 2 && git log --oneline | wc -l; git config a.b c; echo x > {}/hooks/post-commit",
        repository.display()
    );
    let output = under(&scene, &json, &script, &[]);
    assert_eq!(text(&output.stdout), "2\n", "{output:?}");
    assert!(!repository.join("hooks/post-commit").exists());
    assert!(!fs::read_to_string(repository.join("config")).unwrap().contains("[a]"));
}

/// What was refused is known while the program still runs.
#[test]
fn refusals_are_lines_while_they_happen() {
    let scene = Scene::ordinary();
    let mut running = scene
        .guard()
        .args(["--log", "/dev/stderr", "--", "sh", "-c", "cat \"$0\" 2>/dev/null; read line; echo \"$line\""])
        .arg(&scene.secret)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Where the shell looks at its own directory, that is refused, too.
    let refusals = std::io::BufReader::new(running.stderr.take().unwrap());
    let refused = std::io::BufRead::lines(refusals).any(|line| {
        let line: serde_json::Value = serde_json::from_str(&line.unwrap()).unwrap();
        line["action"] == "refused" && line["path"] == scene.secret.to_str().unwrap()
    });
    assert!(refused);
    let mut input = running.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, b"goes on\n").unwrap();
    assert_eq!(text(&running.wait_with_output().unwrap().stdout), "goes on\n");
}
