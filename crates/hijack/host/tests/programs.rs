//! Whole programs (`scripts`): they do the same with an executive as without, and no call is missed.
//!
//! Each script is run natively, under `orrery run`, and under `orrery trace -c` beneath the oracle: it must say the same,
//! end the same and leave the same files, and the kernel must have performed no call but executives', and as many as
//! were counted. What has small stacks or many threads is run under policies and `orrery trace`, too. `ORRERY_WHOLE` chooses the long
//! forms of the scripts, and more ways to run them (`make soak`).

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "support/facility.rs"]
mod facility;
#[path = "support/losses.rs"]
mod losses;
#[path = "support/oracle.rs"]
mod oracle;
#[path = "support/perf.rs"]
mod perf;
#[path = "support/tracefs.rs"]
mod tracefs;

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use facility::ORRERY;
use losses::without_losses;

const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/scripts");

/// What these rules deny, no script asks for.
const DECIDES: &str = "[[rule]]\ncall = '%file'\npath = '/nowhere/**'\ndeny = 'EACCES'\n";
const LOGS: &str = "[[rule]]\ncall = '*'\nlog = true\n";

/// Calls whose numbers say nothing: executives make them for themselves, or answer them without the kernel.
const TREATED: [i64; 26] = [
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_capget,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_sigaltstack,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_futex,
    libc::SYS_prctl,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_sched_yield,
    libc::SYS_sched_getscheduler,
    libc::SYS_newfstatat,
    libc::SYS_getxattr,
    libc::SYS_exit,
    libc::SYS_restart_syscall,
    libc::SYS_execve,
];

/// Calls that wait. The kernel restarts them after a signal; a call of a thread that was killed while it waited was
/// counted.
const WAITING: [i64; 22] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_select,
    libc::SYS_pselect6,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_openat,
    libc::SYS_clone,
    libc::SYS_flock,
];

fn is_whole() -> bool {
    std::env::var_os("ORRERY_WHOLE").is_some()
}

/// What others can see of a run: output, how it ended, and the files it left: mode and content.
#[derive(Debug, PartialEq, Eq)]
struct Visible {
    output: String,
    errors: String,
    code: Option<i32>,
    signal: Option<i32>,
    files: BTreeMap<PathBuf, (u32, u64)>,
}

fn files(directory: &Path, under: &Path, found: &mut BTreeMap<PathBuf, (u32, u64)>) {
    for entry in fs::read_dir(directory.join(under)).unwrap().flatten() {
        let (path, name) = (entry.path(), under.join(entry.file_name()));
        let about = fs::symlink_metadata(&path).unwrap();
        let mut hasher = DefaultHasher::new();
        if about.is_dir() {
            files(directory, &name, found);
        } else if about.is_symlink() {
            fs::read_link(&path).unwrap().hash(&mut hasher);
        } else if about.is_file() {
            fs::read(&path).unwrap().hash(&mut hasher);
        }
        found.insert(name, (about.permissions().mode(), hasher.finish()));
    }
}

fn visible(output: &Output, directory: &Path) -> Visible {
    let mut left = BTreeMap::new();
    files(directory, Path::new(""), &mut left);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Visible {
        output: text(&output.stdout),
        errors: without_losses(&text(&output.stderr)),
        code: output.status.code(),
        signal: output.status.signal(),
        files: left,
    }
}

/// A script of `scripts`, and where it is run.
struct Program {
    script: PathBuf,
    place: tempfile::TempDir,
    cache: PathBuf,
}

impl Program {
    /// Returns where the script's programs are installed; says so where they are not.
    fn find(name: &str) -> Option<Self> {
        if facility::is_missing() {
            return None;
        }
        let script = Path::new(SCRIPTS).join(format!("{name}.sh"));
        let text = fs::read_to_string(&script).unwrap();
        let needs = text.lines().next().and_then(|line| line.strip_prefix("# needs: ")).unwrap();
        let path = std::env::var_os("PATH").unwrap_or_default();
        for need in needs.split(' ') {
            let there = std::env::split_paths(&path)
                .chain(["/usr/sbin".into()])
                .any(|place| place.join(need).exists());
            if !there {
                orrery_testing::skipped!("{need} is not installed");
                return None;
            }
        }
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hijack-programs");
        fs::create_dir_all(&cache).unwrap();
        let program = Self { script, place: tempfile::tempdir().unwrap(), cache };
        let prepare = Path::new(SCRIPTS).join(format!("{name}.prepare.sh"));
        if prepare.exists() {
            let prepared = program.within(Command::new("sh"), &[prepare.to_str().unwrap()]).output().unwrap();
            if !prepared.status.success() {
                orrery_testing::skipped!("{name}: {}", String::from_utf8_lossy(&prepared.stderr));
                return None;
            }
        }
        Some(program)
    }

    /// The command with these words, in an empty directory that has the same name each time.
    fn within(&self, mut command: Command, words: &[&str]) -> Command {
        let directory = self.directory();
        if directory.exists() {
            Command::new("rm").arg("-rf").arg(&directory).status().unwrap();
        }
        fs::create_dir(&directory).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        command.args(words).current_dir(&directory).stdin(Stdio::null());
        command.env("HOME", &directory).env("TMPDIR", &directory).env("LC_ALL", "C.UTF-8");
        command.env("PROGRAMS", SCRIPTS).env("CACHE", &self.cache).env("PORT", port.to_string());
        command.env("PATH", format!("{}:/usr/sbin", std::env::var("PATH").unwrap_or_default()));
        command.env("WHOLE", if is_whole() { std::env::var("ORRERY_WHOLE").unwrap() } else { String::new() });
        command
    }

    fn directory(&self) -> PathBuf {
        self.place.path().join("here")
    }

    fn command(&self, words: &[&str]) -> Command {
        let script = ["sh", self.script.to_str().unwrap()];
        let words = [words, &script].concat();
        self.within(Command::new(words[0]), &words[1..])
    }

    fn run(&self, words: &[&str]) -> Visible {
        let output = self.command(words).output().unwrap();
        visible(&output, &self.directory())
    }

    /// Runs it beneath the oracle, and checks that nothing was missed.
    fn watch(&self) -> Option<Visible> {
        let report = self.place.path().join("report");
        let words = [*ORRERY, "trace", "-c", "--untimed", "--json", "-o", report.to_str().unwrap(), "--"];
        // On a busy machine the kernel's buffers may be full before they are read, which is no fault of what is watched.
        let mut tries = 3;
        let (output, seen) = loop {
            tries -= 1;
            match oracle::watch(self.command(&words)) {
                Ok((_, seen)) if tries > 0 && seen.missed.iter().any(|missed| missed == oracle::LOST) => {}
                Ok(watched) => break watched,
                Err(reason) => {
                    orrery_testing::skipped!("{reason}");
                    return None;
                }
            }
        };
        let visible = visible(&output, &self.directory());
        let report = fs::read(report).unwrap_or_else(|error| panic!("no report, {error}: {visible:?}"));
        let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
        assert_eq!(seen.missed, [""; 0], "{}", self.script.display());
        assert_eq!(report["unfollowed"], serde_json::json!([]));
        assert_eq!(report["unarmed_threads"], 0);
        // Some may have been killed between having an executive and being counted.
        assert!(report["programs"].as_u64().unwrap() <= seen.programs);
        let count = |call: &serde_json::Value| Some((call["number"].as_i64()?, call["calls"].as_u64()?));
        let counted: BTreeMap<i64, u64> =
            report["calls"].as_array().unwrap().iter().filter_map(count).collect();
        let mut compared = 0;
        for (number, performed) in seen.performed.iter().filter(|(number, _)| !TREATED.contains(number)) {
            let counted = counted.get(number).copied().unwrap_or(0);
            let same = counted == *performed || counted < *performed && WAITING.contains(number);
            assert!(
                same,
                "call {number}: performed {performed}, counted {counted}, {}",
                self.script.display()
            );
            compared += counted;
        }
        assert!(compared > 100, "{compared} calls were compared");
        Some(visible)
    }
}

/// Checks that a script is the same in all ways.
fn assert_same(name: &str) {
    if let Some(program) = Program::find(name) {
        check(&program, name);
    }
}

/// Checks that a script is the same in all ways, and where each call is decided, logged or printed.
fn assert_same_under_policies(name: &str) {
    let Some(program) = Program::find(name) else { return };
    let expected = check(&program, name);
    let policy = |name: &str, text: &str| {
        let file = program.place.path().join(name);
        fs::write(&file, text).unwrap();
        file.into_os_string().into_string().unwrap()
    };
    let (decides, logs) = (policy("decides.toml", DECIDES), policy("logs.toml", LOGS));
    for way in [
        &["run", "--policy", &decides][..],
        &["run", "--policy", &logs, "--log", "/dev/null"],
        &["trace", "-o", "/dev/null"],
    ] {
        let words = [&[*ORRERY], way, &["--"]].concat();
        assert_eq!(program.run(&words), expected, "{name}, {way:?}");
    }
}

/// Runs a script natively, which is what it returns, and checks that it is the same with an executive.
fn check(program: &Program, name: &str) -> Visible {
    let expected = program.run(&[]);
    assert!(!expected.output.is_empty(), "{expected:?}");
    let mut ways: Vec<&[&str]> = vec![&["run"]];
    if is_whole() {
        ways.extend([&["run", "--no-patch"][..], &["trace", "-c", "-o", "/dev/null"]]);
    }
    for way in ways {
        let words = [&[*ORRERY], way, &["--"]].concat();
        assert_eq!(program.run(&words), expected, "{name}, {way:?}");
    }
    if let Some(watched) = program.watch() {
        assert_eq!(watched, expected, "{name}, watched");
    }
    expected
}

macro_rules! programs {
    ($($name:ident: $script:literal),* $(,)?) => { $(#[test] fn $name() { assert_same($script); })* };
}

/// The oracle would tell: without executive, each call is one that was missed.
#[test]
fn the_oracle_sees_calls_without_executive() {
    let mut command = Command::new("sh");
    command.args(["-c", "/bin/true; exit 3"]);
    match oracle::watch(command) {
        Err(reason) => orrery_testing::skipped!("{reason}"),
        Ok((output, seen)) => {
            assert_eq!(output.status.code(), Some(3));
            assert!(
                seen.missed.iter().any(|call| call.contains("by sh, which had no executive")),
                "{seen:?}"
            );
            assert_eq!(seen.programs, 0);
        }
    }
}

/// Goroutines have small stacks.
#[test]
fn go_is_the_same() {
    assert_same_under_policies("go");
}

#[test]
fn node_is_the_same() {
    assert_same_under_policies("node");
}

/// Each of the threads waits in a `vfork`, more of them at once than the executive has room for at first.
#[test]
fn java_pools_that_start_programs_are_the_same() {
    assert_same_under_policies("java-pool");
}

programs! {
    bash_is_the_same: "bash",
    busybox_is_the_same: "busybox",
    coreutils_are_the_same: "coreutils",
    gcc_is_the_same: "gcc",
    git_is_the_same: "git",
    java_is_the_same: "java",
    nginx_is_the_same: "nginx",
    python_is_the_same: "python",
    redis_is_the_same: "redis",
    sqlite_is_the_same: "sqlite",
    users_are_the_same: "users",
}
