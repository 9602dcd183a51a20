//! Guards and containers: seccomp profiles that a guard holds, commands inside of containers with the default profile, and the guard as
//! an OCI runtime.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use syscalls::Sysno;

use crate::scene::{Scene, User, is_superuser, text};

/// The default profile of Podman.
const PROFILE: &str = "/usr/share/containers/seccomp.json";

/// What containers have by default.
const CAPABILITIES: [&str; 14] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];
/// What a guarded program of the superuser has.
const GUARDED: [&str; 10] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
];

fn default_profile() -> Option<Value> {
    match fs::read(PROFILE) {
        Ok(text) => Some(serde_json::from_slice(&text).unwrap()),
        Err(error) => {
            orrery_testing::skipped!(
                "cannot read {PROFILE} (package golang-github-containers-common): {error}"
            );
            None
        }
    }
}

/// The rules of a profile for a container with these capabilities, as engines convert them for a runtime.
fn converted(profile: &Value, capabilities: &[&str]) -> Value {
    let names = |rule: &Value, which: &str, what: &str| -> Vec<String> {
        let list = rule[which][what].as_array().cloned().unwrap_or_default();
        list.iter().map(|name| name.as_str().unwrap().to_owned()).collect()
    };
    let applies = |rule: &&Value| {
        let arches = names(rule, "includes", "arches");
        let has = |name: &String| capabilities.contains(&name.as_str());
        (arches.is_empty() || arches.iter().any(|name| name == "amd64"))
            && !names(rule, "excludes", "arches").iter().any(|name| name == "amd64")
            && names(rule, "includes", "caps").iter().all(has)
            && !names(rule, "excludes", "caps").iter().any(has)
    };
    let rules = profile["syscalls"].as_array().unwrap().iter().filter(applies);
    let keep = |rule: &Value| {
        let mut kept = json!({"names": rule["names"], "action": rule["action"]});
        for key in ["args", "errnoRet"] {
            if !rule[key].is_null() {
                kept[key] = rule[key].clone();
            }
        }
        kept
    };
    json!({
        "defaultAction": profile["defaultAction"], "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": rules.map(keep).collect::<Vec<_>>()
    })
}

/// The error of each call that a converted profile refuses whatever its arguments are.
fn refused(converted: &Value) -> BTreeMap<&'static str, i64> {
    let default = converted["defaultErrnoRet"].as_i64().unwrap();
    // No filter is asked about these, which are for the kernel's own code (SIGILL elsewhere).
    let asked = Sysno::iter().filter(|call| !matches!(call.name(), "uprobe" | "uretprobe"));
    let mut all: BTreeMap<&str, Option<i64>> = asked.map(|call| (call.name(), Some(default))).collect();
    let mut said = std::collections::BTreeSet::new();
    for rule in converted["syscalls"].as_array().unwrap() {
        let has_conditions = rule["args"].as_array().is_some_and(|all| !all.is_empty());
        for name in rule["names"].as_array().unwrap() {
            let Some(entry) = all.get_mut(name.as_str().unwrap()) else { continue };
            // The first rule without conditions is what counts.
            if has_conditions {
                *entry = None;
            } else if said.insert(name.as_str().unwrap()) {
                let fails = rule["action"] == "SCMP_ACT_ERRNO";
                *entry = fails.then(|| rule["errnoRet"].as_i64().unwrap_or(1));
            }
        }
    }
    all.into_iter().filter_map(|(name, errno)| Some((name, errno?))).collect()
}

/// Makes each of the calls with arguments that mean nothing, and prints the errors.
const CALLER: &str = "
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
bad = [ctypes.c_long(-1)] * 6
for word in sys.argv[1:]:
    name, number = word.split('=')
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(int(number)), *bad)
    print(name, ctypes.get_errno() if result == -1 else 0)
";

fn caller(calls: &BTreeMap<&str, i64>) -> Vec<String> {
    let words = calls.keys().map(|name| format!("{name}={}", name.parse::<Sysno>().unwrap().id()));
    ["-c".to_owned(), CALLER.to_owned()].into_iter().chain(words).collect()
}

fn said(output: &Output) -> BTreeMap<String, i64> {
    let lines = text(&output.stdout);
    lines
        .lines()
        .map(|line| {
            line.split_once(' ').map(|(name, errno)| (name.to_owned(), errno.parse().unwrap())).unwrap()
        })
        .collect()
}

#[test]
fn the_default_profile_of_containers_holds_under_guard_as_in_a_container() {
    let Some(profile) = default_profile() else { return };
    for user in User::ALL {
        let scene = Scene::ordinary();
        let capabilities: &[&str] = if is_superuser() && user == User::Current { &GUARDED } else { &[] };
        let rules = converted(&profile, capabilities);
        let expected = refused(&rules);
        assert!(expected.len() > 40 && expected.contains_key("kexec_load"), "{expected:?}");
        let options = ["--quiet", "--seccomp", PROFILE];
        let Some(output) = scene.run_as(user, &options, "/usr/bin/python3", &caller(&expected)) else {
            continue;
        };
        let wanted: BTreeMap<String, i64> =
            expected.iter().map(|(name, errno)| ((*name).to_owned(), *errno)).collect();
        assert_eq!(said(&output), wanted, "{user:?}: {output:?}");
        if user == User::Nobody {
            continue;
        }
        let Some(bundle) = Bundle::new() else { continue };
        let mut config = bundle.config("/usr/bin/python3", &caller(&expected), capabilities);
        config["linux"]["seccomp"] = rules;
        let output = bundle.run(&config);
        assert_eq!(said(&output), wanted, "{output:?}");
    }
}

/// Compares arguments: what is refused and what is not.
const COMPARED: &str = "
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_ulong(one) for one in arguments])
    return ctypes.get_errno() if result == -1 else 0
print(*[call(135, one) for one in (0xffffffff, 8, 0x20008, 1 << 32 | 8)], call(140, 2, 7), call(140, 1, 7), call(39))
";

#[test]
fn profiles_compare_arguments() {
    let profile = json!({
        "defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
        "syscalls": [
            {"names": ["personality"], "action": "SCMP_ACT_ERRNO", "errnoRet": 100,
             "args": [{"index": 0, "op": "SCMP_CMP_MASKED_EQ", "value": 0x1_0002_0008_u64, "valueTwo": 0x2_0008}]},
            {"names": ["personality"], "action": "SCMP_ACT_ERRNO", "errnoRet": 101,
             "args": [{"index": 0, "op": "SCMP_CMP_GT", "value": 0xffff_ffff_u64}]},
            {"names": ["getpriority"], "action": "SCMP_ACT_ERRNO", "errnoRet": 102,
             "args": [{"index": 0, "op": "SCMP_CMP_EQ", "value": 2}, {"index": 1, "op": "SCMP_CMP_GE", "value": 7}]},
            {"names": ["getpid"], "action": "SCMP_ACT_ERRNO", "errno": "ENOTTY"}
        ]
    });
    for user in User::ALL {
        let scene = Scene::ordinary();
        let path = scene.policy.with_file_name("profile.json");
        fs::write(&path, profile.to_string()).unwrap();
        let arguments = ["-c".to_owned(), COMPARED.to_owned()];
        let option = ["--seccomp", path.to_str().unwrap()];
        let Some(output) = scene.run_as(user, &option, "/usr/bin/python3", &arguments) else { continue };
        // No process has the number 7 as its group: `getpriority` fails with ESRCH where it is let through.
        assert_eq!(text(&output.stdout), "100 0 100 101 102 3 25\n", "{user:?}: {output:?}");
        // The policy names it as well.
        scene.change(|policy| format!("{policy}\n[calls]\nseccomp = {path:?}\n"));
        let output = scene.run_as(user, &[], "/usr/bin/python3", &arguments).unwrap();
        assert_eq!(text(&output.stdout), "100 0 100 101 102 3 25\n", "{user:?}: {output:?}");
    }
}

#[test]
fn profiles_that_are_not_honoured_start_nothing() {
    let scene = Scene::ordinary();
    let path = scene.policy.with_file_name("profile.json");
    for (profile, told) in [
        ("{\"defaultAction\": \"SCMP_ACT_LOG\"}", "defaultAction \"SCMP_ACT_LOG\": the kernel does not log"),
        ("{\n\"defaultAction\": 1}", ":2:18: cannot honour the seccomp profile: invalid type"),
    ] {
        fs::write(&path, profile).unwrap();
        let mut command = scene.guard();
        command.arg("--seccomp").arg(&path).args(["--", "touch", "started"]);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(125), "{output:?}");
        assert!(text(&output.stderr).contains(told), "{output:?}");
        scene.change(|policy| {
            if policy.contains("seccomp") {
                policy
            } else {
                format!("{policy}\n[calls]\nseccomp = {path:?}\n")
            }
        });
        let output = scene.run(&["touch", "started"]);
        assert_eq!(output.status.code(), Some(125), "{output:?}");
        assert!(
            text(&output.stderr).contains("policy.toml:") && text(&output.stderr).contains(told),
            "{output:?}"
        );
    }
    assert!(!scene.work.join("started").exists());
    // One that lets no program start: there is an end, and a reason.
    let scene = Scene::ordinary();
    let path = scene.policy.with_file_name("profile.json");
    fs::write(&path, "{\"defaultAction\": \"SCMP_ACT_ERRNO\", \"syscalls\": [{\"names\": [\"write\", \"exit_group\"], \"action\": \"SCMP_ACT_ALLOW\"}]}").unwrap();
    let output = scene.guard().arg("--seccomp").arg(&path).args(["--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(126), "{output:?}");
    assert!(text(&output.stderr).contains("does the seccomp profile allow execve?"), "{output:?}");
}

/// A bundle whose root file system is the system's, read-only.
struct Bundle {
    directory: tempfile::TempDir,
}

impl Bundle {
    fn new() -> Option<Self> {
        if !is_superuser() || Command::new("runc").arg("--version").output().is_err() {
            orrery_testing::skipped!("there is no runc, or no superuser to start containers");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for name in [
            "proc",
            "dev",
            "sys",
            "tmp",
            "run",
            "usr",
            "etc",
            "lib",
            "lib64",
            "bin",
            "sbin",
            "opt/orrery",
            "data",
        ] {
            fs::create_dir_all(directory.path().join("rootfs").join(name)).unwrap();
        }
        fs::set_permissions(directory.path().join("rootfs/tmp"), fs::Permissions::from_mode(0o1777)).unwrap();
        let bundle = Self { directory };
        let output = bundle.run(&bundle.config("/bin/true", &[], &CAPABILITIES));
        if !output.status.success() {
            orrery_testing::skipped!("runc cannot run containers here: {}", text(&output.stderr).trim());
            return None;
        }
        Some(bundle)
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn config(&self, program: &str, arguments: &[String], capabilities: &[&str]) -> Value {
        let _ = fs::remove_file(self.path().join("config.json"));
        assert!(Command::new("runc").args(["spec", "--bundle"]).arg(self.path()).status().unwrap().success());
        let mut config: Value =
            serde_json::from_slice(&fs::read(self.path().join("config.json")).unwrap()).unwrap();
        config["process"]["terminal"] = json!(false);
        let words: Vec<&str> = std::iter::once(program).chain(arguments.iter().map(String::as_str)).collect();
        config["process"]["args"] = json!(words);
        config["process"]["capabilities"] =
            json!({"bounding": capabilities, "effective": capabilities, "permitted": capabilities});
        config["root"]["readonly"] = json!(false);
        let mut bind = |source: &Path, destination: &str| {
            let mounts = config["mounts"].as_array_mut().unwrap();
            mounts.push(json!({"destination": destination, "type": "bind", "source": source, "options": ["rbind", "ro"]}));
        };
        for name in ["/usr", "/etc", "/lib", "/lib64", "/bin", "/sbin"] {
            bind(&fs::canonicalize(name).unwrap(), name);
        }
        bind(Path::new(env!("CARGO_BIN_EXE_orrery")).parent().unwrap(), "/opt/orrery");
        config
    }

    fn name() -> String {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        format!("orrery-guard-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Runs a container to its end by runc.
    fn run(&self, config: &Value) -> Output {
        self.run_by(Command::new("runc"), config)
    }

    /// The same by what stands in for runc.
    fn run_by(&self, mut runtime: Command, config: &Value) -> Output {
        fs::write(self.path().join("config.json"), config.to_string()).unwrap();
        runtime
            .arg("--root")
            .arg(self.path().join("runc"))
            .args(["run", "--bundle"])
            .arg(self.path())
            .arg(Self::name());
        runtime.stdin(Stdio::null()).output().unwrap()
    }
}

/// A policy that is about what a container has.
const POLICY: &str = r#"
[files]
read = ["/usr", "/etc", "/lib", "/lib64", "/bin", "/sbin", "/proc/self", "/tmp", "/opt"]
write = ["/tmp", "/dev/null"]
create = ["/tmp"]
execute = ["/usr", "/bin", "/sbin", "/lib", "/opt"]
"#;

/// The default profile of Docker refuses more than that of Podman, for containers without further capabilities.
fn as_docker_has_it(mut rules: Value) -> Value {
    const REFUSED: [&str; 9] = [
        "kcmp",
        "mount",
        "open_tree",
        "pidfd_getfd",
        "process_madvise",
        "setns",
        "umount2",
        "unshare",
        "clone3",
    ];
    for rule in rules["syscalls"].as_array_mut().unwrap() {
        rule["names"].as_array_mut().unwrap().retain(|name| !REFUSED.contains(&name.as_str().unwrap()));
    }
    let rules_of = rules["syscalls"].as_array_mut().unwrap();
    rules_of.retain(|rule| !rule["names"].as_array().unwrap().is_empty());
    rules_of.push(json!({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}));
    rules_of.push(json!({"names": REFUSED[..8], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}));
    rules
}

/// Runs a script on warm interpreters twice.
const WARM: &str = r#"
socket=/tmp/warm-$(id -u)-$$.socket script=/tmp/script-$(id -u)-$$.py
echo 'print("warm")' > $script
/opt/orrery/orrery warm serve --python --workers 1 --socket $socket > /dev/null 2>&1 &
for try in $(seq 600); do ! /opt/orrery/orrery warm status --socket $socket > /dev/null 2>&1 || break; sleep 0.1; done
/opt/orrery/orrery warm run --socket $socket $script
/opt/orrery/orrery warm run --socket $socket $script
kill $!
"#;

#[test]
fn commands_work_within_the_default_profile_or_say_what_they_need() {
    let (Some(profile), Some(bundle)) = (default_profile(), Bundle::new()) else { return };
    fs::write(bundle.path().join("rootfs/policy.toml"), POLICY).unwrap();
    let podman = converted(&profile, &CAPABILITIES);
    let docker = as_docker_has_it(podman.clone());
    let run = |profile: &Value, user: u32, words: &[&str]| {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let mut config = bundle.config("/opt/orrery/orrery", &words, &CAPABILITIES);
        config["linux"]["seccomp"] = profile.clone();
        config["process"]["user"] = json!({"uid": user, "gid": user});
        if user != 0 {
            config["process"]["capabilities"] = json!({"bounding": CAPABILITIES});
        }
        bundle.run(&config)
    };
    let guarded = ["guard", "--policy", "/policy.toml", "--", "sh", "-c", "echo in; cat /policy.toml"];
    for user in [0, 1000] {
        let output = run(&podman, user, &guarded);
        assert_eq!(text(&output.stdout), "in\n", "{user}: {output:?}");
        assert!(text(&output.stderr).contains("refused openat of /policy.toml"), "{user}: {output:?}");
        let output = run(&docker, user, &guarded);
        assert_eq!(
            (output.status.code(), text(&output.stdout).as_str()),
            (Some(125), ""),
            "{user}: {output:?}"
        );
        let said = text(&output.stderr);
        assert!(
            said.contains(
                "cannot guard a program here: these system calls are refused: unshare, pidfd_getfd;"
            ),
            "{user}: {said}"
        );
        assert!(said.contains("--security-opt") && said.contains("orrery guard oci"), "{user}: {said}");
        // Neither trace nor warm interpreters need what Docker refuses.
        for profile in [&podman, &docker] {
            let output = run(profile, user, &["trace", "-e", "getcwd", "--", "sh", "-c", "/bin/pwd"]);
            let said = text(&output.stderr);
            assert!(output.status.success() && said.contains("getcwd("), "{user}: {output:?}");
            let mut config = bundle.config("/bin/sh", &["-ec".to_owned(), WARM.to_owned()], &CAPABILITIES);
            config["linux"]["seccomp"] = profile.clone();
            config["process"]["user"] = json!({"uid": user, "gid": user});
            let output = bundle.run(&config);
            assert!(output.status.success() && text(&output.stdout) == "warm\nwarm\n", "{user}: {output:?}");
        }
    }
}

/// The guard as a runtime, with options.
fn runtime(options: &[&str], paths: &[&Path]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    command.args(["guard", "oci"]);
    for (option, path) in options.iter().zip(paths) {
        command.arg(option).arg(path);
    }
    command.arg("--");
    command
}

/// A bundle, and policies beside it.
fn guarded_bundle() -> Option<(Bundle, tempfile::TempDir)> {
    let (bundle, policies) = (Bundle::new()?, tempfile::tempdir().unwrap());
    fs::write(policies.path().join("ordinary.toml"), POLICY).unwrap();
    fs::write(
        policies.path().join("open.toml"),
        "[files]\nread = ['/']\nwrite = ['/']\ncreate = ['/']\nexecute = ['/']\n",
    )
    .unwrap();
    fs::write(policies.path().join("wrong.toml"), "[filess]\n").unwrap();
    fs::write(bundle.path().join("rootfs/data/secret"), "SECRET").unwrap();
    Some((bundle, policies))
}

#[test]
fn containers_of_the_runtime_are_guarded() {
    let Some((bundle, policies)) = guarded_bundle() else { return };
    let policy = policies.path().join("ordinary.toml");
    let script = "cat /data/secret; cat /etc/hostname > /tmp/x-$(id -u) && echo written; id -u; echo $GREETING; exit 7";
    for user in [0, 1000] {
        let mut config = bundle.config("/bin/sh", &["-c".to_owned(), script.to_owned()], &CAPABILITIES);
        config["process"]["user"] = json!({"uid": user, "gid": user});
        config["process"]["env"] = json!(["PATH=/usr/bin:/bin", "GREETING=hello world"]);
        if user != 0 {
            config["process"]["capabilities"] = json!({"bounding": CAPABILITIES});
        }
        // Within the profile that a guard cannot work in: it is the program's only.
        if let Some(profile) = default_profile() {
            config["linux"]["seccomp"] = as_docker_has_it(converted(&profile, &CAPABILITIES));
        }
        for _again in 0..2 {
            let output = bundle.run_by(runtime(&["--policy"], &[&policy]), &config);
            assert_eq!(output.status.code(), Some(7), "{user}: {output:?}");
            assert_eq!(text(&output.stdout), format!("written\n{user}\nhello world\n"), "{user}: {output:?}");
            assert!(text(&output.stderr).contains("refused openat of /data/secret"), "{user}: {output:?}");
            // As an engine that tries once more with the bundle that was changed.
            config = serde_json::from_slice(&fs::read(bundle.path().join("config.json")).unwrap()).unwrap();
        }
    }
    // The profile holds for the program.
    if let Some(profile) = default_profile() {
        let call = BTreeMap::from([("kcmp", 1), ("unshare", 1), ("pidfd_getfd", 1), ("getpid", 0)]);
        let mut config = bundle.config("/usr/bin/python3", &caller(&call), &CAPABILITIES);
        config["linux"]["seccomp"] = as_docker_has_it(converted(&profile, &CAPABILITIES));
        let output = bundle.run_by(runtime(&["--policy"], &[&policy]), &config);
        let found = said(&output);
        assert_eq!(
            found.iter().map(|(name, errno)| (name.as_str(), *errno)).collect::<BTreeMap<_, _>>(),
            call,
            "{output:?}"
        );
    }
}

#[test]
fn policies_of_containers_are_found_or_nothing_is_started() {
    let Some((bundle, policies)) = guarded_bundle() else { return };
    let (directory, ordinary) = (policies.path(), policies.path().join("ordinary.toml"));
    let missing = directory.join("missing.toml");
    let secret = ["-c".to_owned(), "cat /data/secret && echo; touch /data/started; exit 0".to_owned()];
    let run = |annotation: Option<Value>, command: Command| {
        let _ = fs::remove_file(bundle.path().join("rootfs/data/started"));
        let mut config = bundle.config("/bin/sh", &secret, &CAPABILITIES);
        if let Some(name) = annotation {
            config["annotations"] = json!({"orrery.guard.policy": name});
        }
        let output = bundle.run_by(command, &config);
        (output, bundle.path().join("rootfs/data/started").exists())
    };
    let both = || runtime(&["--policy", "--policies"], &[&ordinary, directory]);
    for (annotation, wanted) in [(None, ""), (Some(json!("ordinary")), ""), (Some(json!("open")), "SECRET\n")]
    {
        let (output, started) = run(annotation.clone(), both());
        assert!(output.status.success(), "{annotation:?}: {output:?}");
        assert_eq!(
            (text(&output.stdout).as_str(), started),
            (wanted, !wanted.is_empty()),
            "{annotation:?}: {output:?}"
        );
    }
    let refused = [
        (None, runtime(&[], &[]), "has no annotation orrery.guard.policy"),
        (None, runtime(&["--policies"], &[directory]), "has no annotation orrery.guard.policy"),
        (None, runtime(&["--policy"], &[&missing]), "cannot read the policy"),
        (Some(json!("missing")), both(), "cannot read the policy"),
        (Some(json!("wrong")), both(), "wrong.toml:1:2: unknown field `filess`"),
        (Some(json!("../ordinary")), both(), "a name has letters"),
        (Some(json!("")), both(), "a name has letters"),
        (Some(json!(1)), both(), "it is no text"),
        (Some(json!("ordinary")), runtime(&["--policy"], &[&ordinary]), "--policies says not where"),
    ];
    for (annotation, command, told) in refused {
        let (output, started) = run(annotation.clone(), command);
        assert!(!output.status.success() && !started, "{annotation:?}: {output:?}");
        assert!(text(&output.stderr).contains(told), "{annotation:?}: {told}: {output:?}");
        assert_eq!(text(&output.stdout), "", "{annotation:?}");
    }
    // An engine reads the reason in the log that it names.
    let log = directory.join("log");
    let mut command = runtime(&[], &[]);
    command.arg("--log").arg(&log);
    assert!(!run(None, command).0.status.success());
    let line: Value = serde_json::from_str(fs::read_to_string(&log).unwrap().trim()).unwrap();
    assert!(line["level"] == "error" && line["msg"].as_str().unwrap().contains("annotation"), "{line}");
    for words in [&["exec", "name", "sh"][..], &["restore", "name"], &["unknown", "name"]] {
        let output = runtime(&["--policy"], &[&ordinary]).args(words).output().unwrap();
        assert!(
            !output.status.success() && text(&output.stderr).contains("cannot guard"),
            "{words:?}: {output:?}"
        );
    }
    // A link of the image in the guard's place.
    std::os::unix::fs::symlink("/data", bundle.path().join("rootfs/.orrery-guard")).unwrap_or_else(|_| {
        fs::remove_dir(bundle.path().join("rootfs/.orrery-guard")).unwrap();
        std::os::unix::fs::symlink("/data", bundle.path().join("rootfs/.orrery-guard")).unwrap();
    });
    let (output, started) = run(Some(json!("open")), both());
    assert!(
        !output.status.success() && !started && text(&output.stderr).contains("is no directory"),
        "{output:?}"
    );
}

/// Tries to change what guards it, though the policy lets everything be written.
const INTRUDER: &str = r#"
attempt() { ("$@") 2>/dev/null && echo "$*"; }
write() { echo x >> "$1"; }
attempt write /.orrery-guard/policy.toml; attempt write /.orrery-guard/orrery; attempt write /.orrery-guard/new
attempt mkdir -p /.orrery-guard/glibc-hwcaps/x86-64-v2; attempt rm /.orrery-guard/policy.toml; attempt mv /.orrery-guard /other
attempt umount -l /.orrery-guard; attempt umount -l /.orrery-guard/policy.toml; attempt mount -t tmpfs none /.orrery-guard
attempt mount -o remount,rw /.orrery-guard; attempt kill -9 1; attempt write /data/free
"#;

#[test]
fn containers_cannot_change_what_guards_them() {
    let Some((bundle, policies)) = guarded_bundle() else { return };
    let open = policies.path().join("open.toml");
    let mut all: Vec<&str> = CAPABILITIES.to_vec();
    all.extend(["CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"]);
    for capabilities in [&CAPABILITIES[..], &all] {
        let mut config = bundle.config("/bin/sh", &["-c".to_owned(), INTRUDER.to_owned()], capabilities);
        config["linux"].as_object_mut().unwrap().remove("seccomp");
        let output = bundle.run_by(runtime(&["--policy"], &[&open]), &config);
        assert_eq!(text(&output.stdout), "write /data/free\n", "{output:?}");
    }
}

/// An image may have no C library, or one with other files; nothing of it gets into the guard.
#[test]
fn images_bring_nothing_into_their_guards() {
    let Some((bundle, policies)) = guarded_bundle() else { return };
    let Ok(busybox) = fs::canonicalize("/bin/busybox") else {
        orrery_testing::skipped!("there is no busybox (package busybox-static)");
        return;
    };
    let root = bundle.path().join("rootfs");
    for directory in ["etc", "lib", "bin"] {
        let _ = fs::create_dir_all(root.join(directory));
    }
    fs::copy(busybox, root.join("bin/busybox")).unwrap();
    let source = bundle.path().join("intruder.c");
    fs::write(
        &source,
        "#include <unistd.h>\n__attribute__((constructor)) static void in(void) { (void)!write(2, \"INTRUDER\\n\", 9); }\n",
    )
    .unwrap();
    let library = root.join("lib/intruder.so");
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status().unwrap();
    assert!(built.success());
    fs::write(root.join("etc/ld.so.preload"), "/lib/intruder.so\n").unwrap();
    fs::write(
        policies.path().join("small.toml"),
        "[files]\nread = ['/etc', '/lib', '/proc/self']\nexecute = ['/bin']\n",
    )
    .unwrap();
    let script = "cat /etc/ld.so.preload; cat /data/secret; echo $LD_PRELOAD; echo $ORRERY_GUARD_LANDLOCK; tr '\\0' '\\n' < /proc/self/environ | wc -l";
    let mut config =
        bundle.config("/bin/busybox", &["sh".to_owned(), "-c".to_owned(), script.to_owned()], &CAPABILITIES);
    // Nothing of the system's.
    config["mounts"].as_array_mut().unwrap().retain(|mount| mount["type"] != "bind");
    config["process"]["env"] = json!([
        "PATH=/bin",
        "LD_PRELOAD=/lib/intruder.so",
        "LD_AUDIT=/lib/intruder.so",
        "LD_LIBRARY_PATH=/lib",
        "ORRERY_GUARD_LANDLOCK=off"
    ]);
    // What is meant to get in does, where nothing is done about it.
    let program = policies.path().join("small.toml");
    let output = bundle.run_by(runtime(&["--policy"], &[&program]), &config);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{output:?}");
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[..3], ["/lib/intruder.so", "/lib/intruder.so", "off"], "{output:?}");
    assert!(err.contains("refused openat of /data/secret") && !err.contains("INTRUDER"), "{output:?}");
}

#[test]
fn further_processes_are_guarded_and_signals_arrive() {
    let Some((bundle, policies)) = guarded_bundle() else { return };
    let policy = policies.path().join("ordinary.toml");
    let (root, name) = (bundle.path().join("runc"), Bundle::name());
    let script = "trap 'exit 3' TERM; while :; do sleep 0.1; done";
    let config = bundle.config("/bin/sh", &["-c".to_owned(), script.to_owned()], &CAPABILITIES);
    fs::write(bundle.path().join("config.json"), config.to_string()).unwrap();
    let call = |words: &[&str]| {
        let mut command = runtime(&["--policy"], &[&policy]);
        // What runs on would keep a pipe open.
        let said = bundle.path().join("said");
        let out = || Stdio::from(fs::OpenOptions::new().create(true).append(true).open(&said).unwrap());
        let _ = fs::remove_file(&said);
        command.arg("--root").arg(&root).args(words).stdin(Stdio::null()).stdout(out()).stderr(out());
        let status = command.status().unwrap();
        (status, fs::read_to_string(&said).unwrap())
    };
    let path = bundle.path().to_str().unwrap();
    assert!(call(&["create", "--bundle", path, &name]).0.success());
    assert!(call(&["start", &name]).0.success());
    let described = bundle.path().join("process.json");
    let execute = |script: &str| {
        let mut process = config["process"].clone();
        process["args"] = json!(["/bin/sh", "-c", script]);
        process["env"] = json!(["PATH=/usr/bin:/bin", "LD_PRELOAD=/data/none.so"]);
        fs::write(&described, process.to_string()).unwrap();
        call(&["exec", "--process", described.to_str().unwrap(), &name])
    };
    let (status, said) =
        execute("cat /data/secret; grep -c NoNewPrivs:.1 /proc/self/status; echo $LD_PRELOAD; exit 5");
    assert_eq!(status.code(), Some(5), "{said}");
    assert!(said.contains("refused openat of /data/secret") && !said.contains("SECRET"), "{said}");
    assert!(said.contains("1\n/data/none.so\n"), "{said}");
    // A container that was created without a guard has none to offer.
    let hidden = bundle.path().join("orrery-guard");
    fs::rename(&hidden, bundle.path().join("elsewhere")).unwrap();
    let (status, said) = execute("echo started");
    assert!(
        !status.success() && said.contains("was not created under guard") && !said.contains("started\n"),
        "{said}"
    );
    fs::rename(bundle.path().join("elsewhere"), &hidden).unwrap();
    // Nor has one in which the files are others.
    fs::write(hidden.join("new"), POLICY).unwrap();
    fs::rename(hidden.join("new"), hidden.join("policy.toml")).unwrap();
    let (status, said) = execute("echo started");
    assert!(!status.success() && said.contains("is not") && !said.contains("started\n"), "{said}");
    assert!(call(&["kill", &name, "TERM"]).0.success());
    let state = || call(&["state", &name]).1;
    orrery_testing::eventually("the end of the container", || state().contains("stopped"));
    assert!(call(&["delete", &name]).0.success());
}
