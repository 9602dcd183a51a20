//! `orrery guard --learn`: what was learnt suffices for the same run, for another one, and for little else.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::scene::{Scene, exists, is_superuser, text};

/// A scene with a file for the policy.
struct School {
    scene: Scene,
    learnt: PathBuf,
}

impl School {
    fn new() -> Self {
        let scene = Scene::ordinary();
        let learnt = scene.work.parent().unwrap().join("learnt.toml");
        Self { scene, learnt }
    }

    fn guard(&self, option: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
        command.args(["guard", option]).arg(&self.learnt).current_dir(&self.scene.work).stdin(Stdio::null());
        command.env("HOME", &self.scene.work);
        command
    }

    fn run(&self, option: &str, script: &str) -> Output {
        self.guard(option).args(["--", "sh", "-ec", script]).output().unwrap()
    }

    /// An empty directory, and in it what `before` makes.
    fn prepare(&self, before: &str) {
        let _ = fs::remove_dir_all(&self.scene.work);
        fs::create_dir(&self.scene.work).unwrap();
        let mut command = Command::new("sh");
        command.args(["-ec", before]).current_dir(&self.scene.work).env("HOME", &self.scene.work);
        let made = command.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
        assert!(made.success(), "{before}");
    }

    fn policy(&self) -> String {
        fs::read_to_string(&self.learnt).unwrap()
    }

    /// Learns a script, and runs it under what was learnt: from the same beginning, then where the first run ended.
    fn suffices(&self, before: &str, script: &str) {
        self.prepare(before);
        let first = self.run("--learn", script);
        assert!(first.status.success(), "{script}: {first:?}");
        for again in [true, false] {
            if again {
                self.prepare(before);
            }
            let second = self.run("--policy", script);
            assert!(second.status.success(), "{script}, {again}: {second:?}\n{}", self.policy());
            assert_eq!(text(&second.stdout), text(&first.stdout), "{script}: {second:?}\n{}", self.policy());
        }
        let secret = self.run("--policy", &format!("cat {}", self.scene.secret.display()));
        assert!(!text(&secret.stdout).contains("SECRET"), "{}", self.policy());
    }
}

#[test]
fn names_that_differ_each_time_are_learnt() {
    let school = School::new();
    school.suffices(
        "",
        "/usr/bin/python3 - <<'END'
import os, tempfile
with tempfile.NamedTemporaryFile('w+') as file:
    file.write('named'); file.seek(0); print(open(file.name).read(), file.read())
with tempfile.TemporaryFile() as file: file.write(b'x'); print(file.tell())
with tempfile.TemporaryDirectory() as folder:
    os.makedirs(folder + '/a/b'); open(folder + '/a/b/c', 'w').write('deep'); print(open(folder + '/a/b/c').read())
    os.rename(folder + '/a', folder + '/d'); print(os.listdir(folder + '/d/b'))
handle, name = tempfile.mkstemp(dir='.')
os.write(handle, b'replaced'); os.close(handle); os.replace(name, 'result'); print(open('result').read())
END",
    );
    assert!(school.policy().contains("own = ["), "{}", school.policy());
    // What others have there stays closed.
    let other = tempfile::NamedTempFile::new_in("/tmp").unwrap();
    fs::write(other.path(), "SECRET of another").unwrap();
    let path = other.path().display();
    let tried = school
        .run("--policy", &format!("cat {path} || echo x > {path} || rm {path} || mv {path} {path}x || true"));
    assert!(!text(&tried.stdout).contains("SECRET"), "{tried:?}");
    assert_eq!(fs::read_to_string(other.path()).unwrap(), "SECRET of another");
}

#[test]
fn files_that_are_changed_in_place_are_learnt() {
    School::new().suffices(
        "printf '3\\n1\\n2\\n' > list; mkdir logs",
        "sed -i s/9/8/ list; sort -o list list; cat list; : > logs/run-$$-$(date +%N).log; echo x >> total; d=$(mktemp -d); echo made > $d/f; cat $d/f; rm -r $d",
    );
}

#[test]
fn a_clone_with_hard_links_is_learnt() {
    if !exists("git") {
        return;
    }
    let school = School::new();
    let before = "export GIT_AUTHOR_DATE='2020-01-01 00:00 +0' GIT_COMMITTER_DATE='2020-01-01 00:00 +0'
        git init -q src; cd src; git config user.email a@b; git config user.name n
        for i in 1 2 3; do echo $i > f$i; git add .; git commit -qm $i; done";
    school.prepare(before);
    school
        .suffices(before, "rm -rf clone; git clone -q src clone; cat clone/f3; git -C clone log --format=%s");
    // Whether git reads a file again depends on the time at which it last did.
    let commit =
        "cat src/f2 src/f3; cd src; echo more >> f1; git commit -qam more; git status --short | wc -l";
    school.suffices(before, commit);
}

/// Between directories a second name is refused while learning as it is afterwards, and told in both cases.
#[test]
fn hard_links_are_learnt_as_the_guard_has_them() {
    let school = School::new();
    school.suffices(
        "echo x > a; mkdir d",
        "rm -f b; ln a b; cat b; cp -l a d/c 2>/dev/null || cp a d/c; cat d/c",
    );
    school.prepare("echo x > a; mkdir d");
    let told = school.run("--policy", "ln a d/c");
    assert!(text(&told.stderr).contains("second name"), "{told:?}");
}

#[test]
fn a_compiler_is_learnt() {
    if !exists("gcc") {
        return;
    }
    School::new().suffices(
        "echo 'int main(void) { return 0; }' > m.c",
        "gcc -c m.c; gcc -o m m.o; rm m.o; ./m && echo ran; ls",
    );
}

#[test]
fn package_managers_are_learnt() {
    let school = School::new();
    let pip = Command::new("/usr/bin/python3").args(["-m", "pip", "--version"]).output().unwrap();
    if pip.status.success() {
        let wheel = "/usr/bin/python3 -c \"
import zipfile
with zipfile.ZipFile('thing-1.0-py3-none-any.whl', 'w') as wheel:
    wheel.writestr('thing.py', 'answer = 42')
    wheel.writestr('thing-1.0.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: thing\\nVersion: 1.0\\n')
    wheel.writestr('thing-1.0.dist-info/WHEEL', 'Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    wheel.writestr('thing-1.0.dist-info/RECORD', 'thing.py,,\\nthing-1.0.dist-info/METADATA,,\\nthing-1.0.dist-info/WHEEL,,\\nthing-1.0.dist-info/RECORD,,\\n')
\"";
        let install = "rm -rf out; /usr/bin/python3 -m pip install -q --no-index --no-deps --disable-pip-version-check --root-user-action=ignore --target out ./*.whl
            PYTHONPATH=out /usr/bin/python3 -c 'import thing; print(thing.answer)'";
        school.suffices(wheel, install);
    } else {
        orrery_testing::skipped!("there is no pip");
    }
    if exists("npm") {
        let package =
            "mkdir package; echo '{\"name\": \"thing\", \"version\": \"1.0.0\"}' > package/package.json";
        School::new().suffices(package, "cd package; npm pack --silent --offline; ls");
    }
}

#[test]
fn several_runs_are_one_policy() {
    let school = School::new();
    school.prepare("echo one > a; echo two > b");
    fs::write(&school.learnt, "# By hand.\n[files]\nstat = [\"/\"]   # everything\n").unwrap();
    assert!(school.run("--learn", "cat a").status.success());
    assert!(!school.run("--policy", "cat b").status.success());
    assert!(school.run("--learn", "cat b").status.success());
    let policy = school.policy();
    assert!(policy.contains("# By hand.") && policy.contains("# everything"), "{policy}");
    let both = school.run("--policy", "cat a b");
    assert_eq!(text(&both.stdout), "one\ntwo\n", "{both:?}\n{policy}");
    // The same run teaches nothing.
    assert!(school.run("--learn", "cat a").status.success());
    assert_eq!(school.policy(), policy);
    let mut forgetting = school.guard("--learn");
    assert!(forgetting.args(["--force", "--", "cat", "a"]).output().unwrap().status.success());
    let forgotten = school.policy();
    assert!(!forgotten.contains("By hand") && !forgotten.contains("/b\""), "{forgotten}");
}

#[test]
fn a_file_that_cannot_learn_starts_nothing() {
    let school = School::new();
    let started = school.scene.work.join("started");
    fs::write(&school.learnt, "this is no policy").unwrap();
    let refused = school.run("--learn", "touch started");
    let said = text(&refused.stderr);
    assert!(
        refused.status.code() == Some(125) && said.contains("learnt.toml:1:") && said.contains("--force"),
        "{said}"
    );
    assert!(!started.exists());
    assert_eq!(school.policy(), "this is no policy");
    let mut nowhere = Command::new(env!("CARGO_BIN_EXE_orrery"));
    nowhere.args(["guard", "--learn", "/nowhere/learnt.toml", "--", "touch"]).arg(&started);
    let refused = nowhere.output().unwrap();
    assert!(refused.status.code() == Some(125) && !started.exists(), "{refused:?}");
    if !is_superuser() {
        fs::set_permissions(&school.learnt, fs::Permissions::from_mode(0o444)).unwrap();
        assert_eq!(school.run("--learn", "touch started").status.code(), Some(125));
    }
    let new = school.scene.work.join("new.toml");
    let mut missing = Command::new(env!("CARGO_BIN_EXE_orrery"));
    missing.args(["guard", "--learn"]).arg(&new).args(["--", "no-such-program"]);
    assert_eq!(missing.output().unwrap().status.code(), Some(127));
    assert!(!Path::new(&new).exists(), "an empty policy was left");
}

/// What a policy allows to be made of one's own is no way to what is there.
#[test]
fn ones_own_files_are_those_that_one_made() {
    let scene = Scene::new("own = [\"OWN\"]\nexecute = [\"/usr/bin\"]\n");
    let own = scene.work.parent().unwrap().join("own");
    fs::create_dir(&own).unwrap();
    fs::write(own.join("there"), "SECRET").unwrap();
    scene.change(|policy| policy.replace("OWN", own.to_str().unwrap()));
    let script = format!(
        "import os
os.chdir('{}')
def attempt(what, *arguments):
    try: what(*arguments); return 'ok'
    except OSError as error: return error.errno
print([attempt(open, 'there', mode) for mode in ('r', 'w', 'a', 'x')])
print(attempt(os.unlink, 'there'), attempt(os.rename, 'there', 'mine'), attempt(os.link, 'there', 'mine'), attempt(os.stat, 'there'))
print(attempt(os.mkdir, 'folder'), attempt(open, 'folder/file', 'w'), attempt(open, 'mine', 'x'), attempt(os.symlink, 'there', 'soft'))
print(attempt(open, 'soft', 'r'), attempt(os.rename, 'mine', 'there'), attempt(os.rename, 'mine', 'folder/yours'), attempt(os.link, 'folder/yours', 'hard'))
print(sorted(os.listdir('folder')), attempt(os.listdir, '.'), attempt(os.unlink, 'hard'), attempt(open, 'hard'))
print(attempt(os.chmod, 'folder', 0o700), attempt(os.truncate, 'folder/yours', 3), attempt(os.mkfifo, 'pipe'))
import socket
server = socket.socket(socket.AF_UNIX); server.bind('socket'); server.listen(); socket.socket(socket.AF_UNIX).connect('socket')
print(attempt(os.execv, 'folder/yours', ['x']))",
        own.display()
    );
    let output = scene.run(&["/usr/bin/python3", "-S", "-c", &script]);
    assert_eq!(
        text(&output.stdout),
        "[13, 13, 13, 13]\n13 13 13 13\nok ok ok ok\n13 13 ok ok\n['file', 'yours'] 13 ok 2\nok ok ok\n13\n",
        "{output:?}"
    );
    assert_eq!(fs::read_to_string(own.join("there")).unwrap(), "SECRET");
    // Another run did not make what this one did.
    let later = scene.run(&["cat", own.join("folder/yours").to_str().unwrap()]);
    assert!(!later.status.success(), "{later:?}");
}
