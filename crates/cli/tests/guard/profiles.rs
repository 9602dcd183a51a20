//! Ready policies, on the programs that they are for; and what `--suggest` prints.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output, Stdio};

use crate::scene::{exists, is_superuser, text};

/// A profile, a program that it is for, and what that must be able to do; something is printed at the end.
const PROGRAMS: [(&str, &str, &str); 6] = [
    (
        "python",
        "/usr/bin/python3",
        "/usr/bin/python3 -c 'import sqlite3, ssl, subprocess, tempfile; tempfile.NamedTemporaryFile().write(b\"x\"); \
         open(\"out\", \"w\").write(subprocess.run([\"ls\"], capture_output=True).stdout.decode())'; cat out",
    ),
    ("node", "node", "node -e 'require(\"fs\").writeFileSync(\"out\", \"1\"); console.log(process.version)'"),
    (
        "git",
        "git",
        "git init -q r && cd r && git config user.email a@b && git config user.name n && cp ../input . && git add input && \
         git commit -qm message && git gc -q && git clone -q . ../copy && git worktree add -q ../tree && git log --oneline",
    ),
    ("curl", "curl", "curl -sS -o out file://$PWD/input && cat out"),
    ("ffmpeg", "ffmpeg", "ffmpeg -v error -f lavfi -i testsrc=d=1 -y out.mp4 && ls out.mp4"),
    ("compiler", "cc", "echo 'int main(void) { return 0; }' > m.c && cc -O2 m.c -o m && ./m && ls m"),
];

fn guard(directory: &tempfile::TempDir, options: &[&str], script: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    command.arg("guard").args(options).args(["--", "sh", "-c", script]).current_dir(directory.path());
    command.env("HOME", directory.path()).stdin(Stdio::null()).output().unwrap()
}

/// As [`guard`], by somebody without rights; `None` where nobody can become that one.
fn guard_as_nobody(directory: &tempfile::TempDir, options: &[&str], script: &str) -> Option<Output> {
    if !is_superuser() || !exists("setpriv") {
        return None;
    }
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    // Others may not enter the checkout.
    let public = orrery_testing::PublicDirectory::new();
    let orrery = public.copy(env!("CARGO_BIN_EXE_orrery"));
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", "--"]).arg(orrery);
    command.arg("guard").args(options).args(["--", "sh", "-c", script]).current_dir(directory.path());
    Some(command.env("HOME", directory.path()).stdin(Stdio::null()).output().unwrap())
}

#[test]
fn programs_work_under_their_profiles_and_reach_nothing_else() {
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret");
    fs::write(&secret, "SECRET").unwrap();
    for path in [outside.path(), &secret] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    }
    let attempt = format!("cat {0}; echo x > {0}", secret.display());
    for (profile, program, script) in PROGRAMS {
        if !exists(program) {
            continue;
        }
        for guard in [|d: &_, o: &[&str], s: &str| Some(guard(d, o, s)), guard_as_nobody] {
            let directory = tempfile::tempdir().unwrap();
            fs::write(directory.path().join("input"), "input").unwrap();
            let options = ["--profile", profile];
            let Some(output) = guard(&directory, &options, script) else { continue };
            let said = format!("{profile}: {}{}", text(&output.stdout), text(&output.stderr));
            assert!(output.status.success() && !output.stdout.is_empty(), "{said}");
            assert!(!said.contains("refused"), "{said}");
            let Some(output) = guard(&directory, &options, &attempt) else { continue };
            assert!(!text(&output.stdout).contains("SECRET"), "{profile}");
            assert_eq!(fs::read_to_string(&secret).unwrap(), "SECRET", "{profile}");
        }
    }
}

/// Programs like git look at thousands of files, and are several times slower where a monitor does.
#[test]
fn profiles_leave_looking_at_metadata_to_the_kernel() {
    for profile in ["python", "node", "git", "compiler"] {
        let output = Command::new(env!("CARGO_BIN_EXE_orrery"))
            .args(["guard", "--explain", "--profile", profile])
            .output()
            .unwrap();
        let said = text(&output.stdout);
        let line = said.lines().find(|line| line.starts_with("stat, access")).unwrap();
        assert!(line.contains(" nobody "), "{profile}: {line}");
    }
}

/// Keys beside the certificates that a profile lets programs read.
#[test]
fn certificates_are_read_and_private_keys_are_not() {
    for profile in ["curl", "git", "node"] {
        let output = Command::new(env!("CARGO_BIN_EXE_orrery"))
            .args(["guard", "--profile", profile, "--print"])
            .output()
            .unwrap();
        let said = text(&output.stdout);
        assert!(said.contains("\"/etc/ssl/certs\""), "{profile}: {said}");
        assert!(!said.contains("\"/etc/ssl\"") && !said.contains("\"/etc\""), "{profile}: {said}");
    }
    if !std::path::Path::new("/etc/ssl/private").exists() || !is_superuser() {
        orrery_testing::skipped!("there are no private keys that this user could read");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for profile in ["curl", "git", "node"] {
        let script = "ls /etc/ssl/certs > /dev/null && echo certificates; ls /etc/ssl/private && echo keys";
        let said = text(&guard(&directory, &["--profile", profile], script).stdout);
        assert_eq!(said, "certificates\n", "{profile}");
    }
}

#[test]
fn pip_installs_wheels_under_the_profile_of_python() {
    let python = "/usr/bin/python3";
    let pip = Command::new(python).args(["-m", "pip", "--version"]).output();
    if !pip.is_ok_and(|output| output.status.success()) {
        orrery_testing::skipped!("there is no pip for {python}");
        return;
    }
    let wheel = "import zipfile\nwith zipfile.ZipFile('w-1-py3-none-any.whl', 'w') as file:\n  \
                 file.writestr('w.py', '')\n  file.writestr('w-1.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: w\\nVersion: 1\\n')\n  \
                 file.writestr('w-1.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n  \
                 file.writestr('w-1.dist-info/RECORD', 'w.py,,\\n')\n";
    let script = format!("{python} -m pip install --no-index --no-cache-dir --target out *.whl");
    for guard in [|d: &_, o: &[&str], s: &str| Some(guard(d, o, s)), guard_as_nobody] {
        let directory = tempfile::tempdir().unwrap();
        let made = Command::new(python).args(["-c", wheel]).current_dir(directory.path()).status().unwrap();
        assert!(made.success());
        let Some(output) = guard(&directory, &["--profile", "python"], &script) else { continue };
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert!(output.status.success() && directory.path().join("out/w.py").exists(), "{said}");
    }
}

#[test]
fn a_profile_is_printed_to_start_from() {
    let orrery = |arguments: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_orrery")).arg("guard").args(arguments).output().unwrap()
    };
    for (profile, ..) in PROGRAMS {
        let printed = text(&orrery(&["--profile", profile, "--print"]).stdout);
        assert!(printed.starts_with("# ") && printed.contains("[files]"), "{profile}: {printed}");
        assert!(orrery(&["--profile", profile, "--check"]).status.success(), "{profile}");
    }
    assert_eq!(orrery(&["--profile", "nonsense", "true"]).status.code(), Some(2));
    assert_eq!(orrery(&["--print"]).status.code(), Some(2));
}

#[test]
fn a_suggestion_that_is_followed_leaves_no_refusal() {
    let directory = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    let policy = directory.path().join("policy.toml");
    let system = "read = ['/usr', '/bin', '/lib', '/lib64', '/etc', '/proc', '/sys', '/dev/null']\nwrite = ['/dev/null']\n\
                  execute = ['/usr', '/bin', '/lib', '/lib64']\n";
    fs::write(&policy, format!("[files]\n{system}")).unwrap();
    let (secret, new) = (outside.path().join("secret"), outside.path().join("new"));
    fs::write(&secret, "SECRET").unwrap();
    let script = format!("cat {}; echo x > {}", secret.display(), new.display());
    let policy_option = policy.to_str().unwrap().to_owned();
    let run = |script: &str| guard(&directory, &["--suggest", "--policy", &policy_option], script);
    let run_program = |options: &[&str], program: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
        command.arg("guard").args(options).args(["--", program]).output().unwrap()
    };
    for _ in 0..4 {
        let output = run(&script);
        let suggestion = text(&output.stderr);
        let suggestion = &suggestion[suggestion.find("orrery guard: ").unwrap()..];
        if suggestion.contains("nothing was refused") {
            fs::write(
                &policy,
                format!("{}deny = ['{}']\n", fs::read_to_string(&policy).unwrap(), secret.display()),
            )
            .unwrap();
            let denied = text(&run(&script).stderr);
            assert!(
                denied.contains("# no line would allow openat of") && !denied.contains("read = ["),
                "{denied}"
            );
            let not_started =
                text(&run_program(&["--suggest", "--policy", &policy_option], "/opt/none").stderr);
            assert!(!not_started.contains("nothing was refused"), "{not_started}");
            assert_eq!(text(&output.stdout), "SECRET");
            assert_eq!(fs::read_to_string(&new).unwrap(), "x\n");
            return;
        }
        // The lines of the suggestion join those that are there, as a user would put them.
        let mut entries = String::new();
        for line in suggestion.lines().filter(|line| line.contains(" = [")) {
            let (key, list) = line.split_once(" = ").unwrap();
            entries.push_str(&format!("{key} {list}\n"));
        }
        let mut text = fs::read_to_string(&policy).unwrap();
        for entry in entries.lines() {
            let (key, list) = entry.split_once(' ').unwrap();
            let items = list.trim_start_matches('[').trim_end_matches(']');
            text = match text.lines().find(|line| line.starts_with(&format!("{key} ="))) {
                Some(line) => text.replace(line, &format!("{}, {items}]", line.trim_end_matches(']'))),
                None => format!("{text}{key} = [{items}]\n"),
            };
        }
        fs::write(&policy, text).unwrap();
    }
    panic!("it never ends: {}", fs::read_to_string(&policy).unwrap());
}
