//! Where the tests play: directories, policies, programs.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;

use tempfile::TempDir;

/// Who starts a guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum User {
    /// Whoever runs the tests.
    Current,
    /// Somebody without rights, which only the superuser becomes.
    Nobody,
}

impl User {
    pub(crate) const ALL: [Self; 2] = [Self::Current, Self::Nobody];
}

/// A directory to work in, one with a secret, and a policy.
pub(crate) struct Scene {
    _root: TempDir,
    pub(crate) work: PathBuf,
    pub(crate) secret: PathBuf,
    pub(crate) policy: PathBuf,
}

/// What ordinary programs need.
const SYSTEM: &str = r#"
read = ["/usr", "/etc", "/lib", "/lib64", "/bin", "/sbin", "/proc/self", "/proc/filesystems", "/proc/sys", "/proc/meminfo",
        "/proc/stat", "/proc/cpuinfo", "/dev", "/sys/devices/system/cpu", "WORK"]
write = ["/dev/null", "/dev/tty", "/dev/full", "/dev/zero", "/dev/shm", "WORK"]
create = ["WORK", "/dev/shm"]
"#;

impl Scene {
    pub(crate) fn new(more: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let base = root.path().canonicalize().unwrap();
        let (work, hidden) = (base.join("work"), base.join("hidden"));
        fs::create_dir(&work).unwrap();
        fs::create_dir(&hidden).unwrap();
        let secret = hidden.join("secret");
        fs::write(&secret, "SECRET").unwrap();
        let policy = base.join("policy.toml");
        let text = format!("[files]\n{SYSTEM}{more}").replace("WORK", work.to_str().unwrap());
        fs::write(&policy, text).unwrap();
        Self { _root: root, work, secret, policy }
    }

    pub(crate) fn ordinary() -> Self {
        Self::new("execute = [\"/usr/bin\", \"/usr/sbin\", \"/usr/lib\", \"/usr/libexec\", \"WORK\"]\n")
    }

    /// Puts something before, or in place of, what the policy says.
    pub(crate) fn change(&self, how: impl FnOnce(String) -> String) {
        let policy = fs::read_to_string(&self.policy).unwrap();
        fs::write(&self.policy, how(policy)).unwrap();
    }

    pub(crate) fn guard(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
        command.args(["guard", "--policy"]).arg(&self.policy).current_dir(&self.work);
        command
    }

    pub(crate) fn run(&self, program: &[&str]) -> Output {
        self.guard().arg("--").args(program).stdin(Stdio::null()).output().unwrap()
    }

    /// Returns what a program does under guard, started by this user; `None` where nobody can become that one.
    pub(crate) fn run_as(
        &self,
        user: User,
        options: &[&str],
        program: &str,
        arguments: &[String],
    ) -> Option<Output> {
        if user == User::Current {
            let mut command = self.guard();
            command.args(options).args(["--", program]).args(arguments).stdin(Stdio::null());
            return Some(command.process_group(0).output().unwrap());
        }
        if !is_superuser() || !exists("setpriv") {
            orrery_testing::skipped!("only the superuser becomes somebody without rights");
            return None;
        }
        let open = |mode: &str, path: &Path| {
            assert!(Command::new("chmod").arg(mode).arg(path).status().unwrap().success());
        };
        open("755", self.work.parent().unwrap());
        open("777", &self.work);
        open("755", Path::new(program).parent().unwrap());
        // Others may not enter the checkout.
        let public = orrery_testing::PublicDirectory::new();
        let orrery = public.copy(env!("CARGO_BIN_EXE_orrery"));
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", "--"]);
        command.arg(&orrery).args(["guard", "--policy"]).arg(&self.policy).args(options);
        command.args(["--", program]).args(arguments).current_dir(&self.work).stdin(Stdio::null());
        Some(command.process_group(0).output().unwrap())
    }

    /// The shell's output, without guard and with it, in directories of the same name and content.
    pub(crate) fn same(&self, script: &str) {
        let run = |command: &mut Command| {
            let _ = fs::remove_dir_all(&self.work);
            fs::create_dir(&self.work).unwrap();
            let output = command.args(["sh", "-ec", script]).stdin(Stdio::null()).output().unwrap();
            (output.status, text(&output.stdout), text(&output.stderr))
        };
        let plain = run(Command::new("env").current_dir(&self.work));
        let guarded = run(self.guard().args(["--quiet", "--"]));
        assert!(plain.0.success(), "{script}: {plain:?}");
        assert_eq!(guarded, plain, "{script}");
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(crate) fn exists(program: &str) -> bool {
    let there =
        Command::new("sh").args(["-c", &format!("command -v {program}")]).output().unwrap().status.success();
    if !there {
        orrery_testing::skipped!("there is no {program}");
    }
    there
}

/// The programs that were built, each with its directory.
static BUILT: Mutex<BTreeMap<&str, (TempDir, &Path)>> = Mutex::new(BTreeMap::new());

/// Returns a program, built once from its source beside these tests. It is where other users can be let in, until these tests end.
pub(crate) fn built(name: &'static str) -> &'static Path {
    let mut built = BUILT.lock().unwrap();
    if built.is_empty() {
        // SAFETY: the function takes nothing, and drops what no test uses any more.
        assert_eq!(unsafe { libc::atexit(remove_built) }, 0);
    }
    built.entry(name).or_insert_with(|| build(name)).1
}

/// Statics are not dropped.
extern "C" fn remove_built() {
    if let Ok(mut built) = BUILT.lock() {
        built.clear();
    }
}

fn build(name: &str) -> (TempDir, &'static Path) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().canonicalize().unwrap().join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/guard/{name}.c"));
    let compiled = Command::new("cc")
        .args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .args([&path, &source])
        .status()
        .unwrap();
    assert!(compiled.success());
    (directory, Box::leak(path.into_boxed_path()))
}

pub(crate) fn attack(name: &str, options: &[&str]) -> (Scene, String) {
    let program = built("attack").to_str().unwrap();
    let scene = Scene::new(&format!("execute = [\"/usr/bin\", \"{program}\"]\n"));
    let policy = fs::read_to_string(&scene.policy).unwrap();
    fs::write(&scene.policy, policy.replace("read = [", &format!("read = [\"{program}\", \"/proc\", ")))
        .unwrap();
    let output = scene
        .guard()
        .args(options)
        .args(["--quiet", "--", program, name])
        .args([&scene.work, &scene.secret])
        // One of them signals its whole group.
        .process_group(0)
        .output()
        .unwrap();
    let said = text(&output.stdout);
    assert!(output.status.success() && said.contains("held"), "{name}: {output:?}");
    assert_eq!(fs::read_to_string(&scene.secret).unwrap(), "SECRET", "{name}");
    (scene, said)
}

pub(crate) fn is_superuser() -> bool {
    text(&Command::new("id").arg("-u").output().unwrap().stdout).trim() == "0"
}
