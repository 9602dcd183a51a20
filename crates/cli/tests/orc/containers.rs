//! Containers with root file systems of their own, started by an OCI runtime.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use orrery_testing::Compiler;
use serde_json::{Value, json};

use crate::unmodified::code;
use crate::{Store, eventually};

/// A bundle with `/bin/sleep` and its libraries, copied.
fn plant(directory: &Path) {
    let output = Command::new("ldd").arg("/bin/sleep").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let libraries = text.split_whitespace().filter(|word| word.starts_with('/'));
    let files: Vec<_> = libraries.chain(["/bin/sleep"]).map(|file| (Path::new(file), file)).collect();
    plant_files(directory, &files);
}

/// A bundle with the musl C library, as Alpine Linux has it, and a program that waits as `/bin/sleep`. Each bundle has copies of its own.
///
/// # Errors
/// Why it cannot be built here.
fn plant_musl(directory: &Path) -> Result<(), String> {
    const LIBRARY: &str = "/lib/ld-musl-x86_64.so.1";
    if Command::new("musl-gcc").arg("--version").output().is_err() {
        return Err("there is no musl-gcc (package musl-tools)".to_owned());
    }
    let work = tempfile::tempdir().unwrap();
    let source = work.path().join("sleep.c");
    fs::write(&source, "#include <unistd.h>\nint main(void) { for (;;) pause(); }").unwrap();
    let program = Compiler::named("musl-gcc").build(&[source], work.path().join("sleep"));
    plant_files(directory, &[(Path::new(LIBRARY), LIBRARY), (&program, "/bin/sleep")]);
    Ok(())
}

/// A bundle with copies of these files, each with its path in the container, of which it runs `/bin/sleep`.
fn plant_files(directory: &Path, files: &[(&Path, &str)]) {
    let root = directory.join("rootfs");
    for empty in ["proc", "dev", "sys", "tmp", "run"] {
        fs::create_dir_all(root.join(empty)).unwrap();
    }
    for (file, path) in files {
        let to = root.join(&path[1..]);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        orrery_testing::copy_program(file, &to);
    }
    let spec = Command::new("runc").args(["spec", "--bundle"]).arg(directory).status().unwrap();
    assert!(spec.success());
    let path = directory.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["process"]["terminal"] = json!(false);
    config["process"]["args"] = json!(["/bin/sleep", "1000"]);
    fs::write(&path, config.to_string()).unwrap();
}

/// An engine of the test's own.
struct Containerd {
    directory: tempfile::TempDir,
    engine: orrery_testing::Killed,
    tasks: Vec<String>,
}

impl Containerd {
    fn start() -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let config = format!(
            "version = 2\nroot = {:?}\nstate = {:?}\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n\
             [grpc]\naddress = {:?}\n",
            path("root"),
            path("state"),
            path("socket")
        );
        fs::write(path("config.toml"), config).unwrap();
        let log = fs::File::create(path("log")).unwrap();
        let mut command = Command::new("containerd");
        command.arg("--config").arg(path("config.toml")).stdout(log.try_clone().unwrap()).stderr(log);
        let engine = orrery_testing::Killed(command.spawn().ok()?);
        let engine = Self { engine, tasks: Vec::new(), directory };
        eventually("containerd answers or ends", || {
            let ended =
                fs::read_to_string(engine.directory.path().join("log")).unwrap().contains("level=fatal");
            ended || engine.ctr(&["version"]).is_ok()
        });
        engine.ctr(&["version"]).is_ok().then_some(engine)
    }

    fn ctr(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new("timeout");
        command.args(["20", "ctr", "--address"]).arg(self.directory.path().join("socket")).args(arguments);
        let output = command.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// Runs `sleep` in a container of this root file system; its process.
    fn run(&mut self, name: &str, root: &Path, options: &[&str]) -> Result<u32, String> {
        let run = [&["run", "--detach"], options, &["--rootfs"]].concat();
        self.ctr(&[&run[..], &[root.to_str().unwrap(), name, "/bin/sleep", "1000"]].concat())?;
        self.tasks.push(name.to_owned());
        let tasks = self.ctr(&["task", "ls"])?;
        let line = tasks.lines().find(|line| line.starts_with(name)).ok_or("it is not told of")?;
        line.split_whitespace().nth(1).and_then(|pid| pid.parse().ok()).ok_or_else(|| tasks.clone())
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        for name in &self.tasks {
            let _ = self.ctr(&["task", "rm", "--force", name]);
            let _ = self.ctr(&["container", "rm", name]);
        }
        crate::signal(i32::try_from(self.engine.0.id()).unwrap(), libc::SIGTERM);
        let _ = self.engine.0.wait();
    }
}

#[test]
fn containers_of_an_engine_share_their_files() {
    let work = tempfile::tempdir().unwrap();
    fs::set_permissions(work.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let Some(mut engine) = Containerd::start() else {
        orrery_testing::skipped!("there is no containerd, or it does not run here");
        return;
    };
    let roots = ["one", "two"].map(|name| work.path().join(name));
    roots.iter().for_each(|root| plant(root));
    let name = |number: usize| format!("orrery-engine-{}-{number}", std::process::id());
    let root = |number: usize| roots[number].join("rootfs");
    if let Err(why) = engine.run(&name(9), &root(0), &[]) {
        orrery_testing::skipped!("containerd cannot run containers here: {}", why.trim());
        return;
    }
    let (store, directory) = store_for_containers(work.path());
    let _ = store.client();
    // What examples/oci names to engines.
    let runtime = work.path().join("orrery-runc");
    let script = format!(
        "#!/bin/sh\nexec {} orc oci --directory {} -- \"$@\"\n",
        env!("CARGO_BIN_EXE_orrery"),
        directory.display()
    );
    orrery_testing::write_program(&runtime, &script);
    let options = ["--runc-binary", runtime.to_str().unwrap()];
    let pids = [0, 1].map(|number| engine.run(&name(number), &root(number), &options).unwrap());
    for file in ["sleep", "libc.so.6"] {
        for pid in pids {
            eventually("the exchange", || code(pid, file).is_some_and(|(_, is_object)| is_object));
        }
        assert_eq!(code(pids[0], file), code(pids[1], file), "{file}");
    }
}

/// Returns a store with a trust domain for containers, and the directory of its socket.
fn store_for_containers(work: &Path) -> (Store, PathBuf) {
    let directory = work.join("domain");
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
    let domain = format!("acme={}", directory.join("socket").display());
    (Store::new(&["--trust-domain", &domain]), directory)
}

/// A container that ends with the test.
struct Container {
    name: String,
    root: PathBuf,
    pid: u32,
    /// What was said when it was started.
    said: String,
}

impl Container {
    /// Starts it with `command`, which ends in the runtime's arguments.
    fn start(mut command: Command, name: &str, bundle: &Path, root: &Path) -> Result<Self, String> {
        let (pid, log) = (bundle.join("pid"), bundle.join("log"));
        command.arg("--root").arg(root).args(["run", "--detach", "--bundle"]).arg(bundle);
        command.arg("--pid-file").arg(&pid).arg(name).stdin(Stdio::null()).stdout(Stdio::null());
        let status = command.stderr(fs::File::create(&log).unwrap()).status().unwrap();
        let said = fs::read_to_string(&log).unwrap();
        if !status.success() {
            return Err(said);
        }
        let pid = fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
        Ok(Self { name: name.to_owned(), root: root.to_owned(), pid, said })
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = Command::new("runc")
            .arg("--root")
            .arg(&self.root)
            .args(["delete", "--force", &self.name])
            .status();
    }
}

/// Gives a container a user namespace of its own, in which nobody of the host has a number.
fn make_rootless(bundle: &Path) {
    let path = bundle.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["linux"]["namespaces"].as_array_mut().unwrap().push(json!({"type": "user"}));
    let mapping = json!([{"containerID": 0, "hostID": 100_000, "size": 65_536}]);
    config["linux"]["uidMappings"] = mapping.clone();
    config["linux"]["gidMappings"] = mapping;
    fs::write(&path, config.to_string()).unwrap();
}

#[test]
fn containers_in_user_namespaces_are_left_alone() {
    if Command::new("runc").arg("--version").output().is_err() {
        orrery_testing::skipped!("there is no runc");
        return;
    }
    let work = tempfile::tempdir().unwrap();
    fs::set_permissions(work.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (bundle, root) = (work.path().join("one"), work.path().join("runc"));
    plant(&bundle);
    make_rootless(&bundle);
    let name = |number: usize| format!("orrery-rootless-{}-{number}", std::process::id());
    if let Err(why) = Container::start(Command::new("runc"), &name(0), &bundle, &root) {
        orrery_testing::skipped!("runc cannot run such containers here: {}", why.trim());
        return;
    }
    let (store, directory) = store_for_containers(work.path());
    let _ = store.client();
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    command.args(["orc", "oci", "--directory"]).arg(&directory).arg("--");
    let container = Container::start(command, &name(1), &bundle, &root).unwrap();
    // It runs as ever, with its own files.
    eventually("its code", || code(container.pid, "/libc.so.6").is_some_and(|(_, is_object)| !is_object));
    eventually("sleep", || {
        fs::read_to_string(format!("/proc/{}/comm", container.pid)).is_ok_and(|name| name == "sleep\n")
    });
    assert!(container.said.contains("no number in its user namespace"), "{}", container.said);
    assert!(store.client().report().unwrap().objects.is_empty());
}

#[test]
fn where_the_stores_user_has_a_number_user_namespaces_share() {
    let store = Store::new(&[]);
    let _ = store.client();
    let probe = Command::new("unshare").args(["--user", "--map-root-user", "true"]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        orrery_testing::skipped!("no user namespace can be made here");
        return;
    }
    // As rootless engines do it, whose user is root inside.
    let mut command =
        crate::unmodified::run(&store, &["unshare", "--user", "--map-root-user", "sleep", "1000"]);
    let program = orrery_testing::Killed(command.stderr(Stdio::null()).spawn().unwrap());
    let pid = program.0.id();
    eventually("the exchange", || {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n")
            && code(pid, "libc.so.6").is_some_and(|(_, is_object)| is_object)
    });
}

#[test]
fn containers_of_a_trust_domain_share_their_files() {
    if Command::new("runc").arg("--version").output().is_err() {
        orrery_testing::skipped!("there is no runc");
        return;
    }
    let work = tempfile::tempdir().unwrap();
    fs::set_permissions(work.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let root = work.path().join("runc");
    let bundles: Vec<PathBuf> = ["one", "two"].map(|name| work.path().join(name)).into();
    bundles.iter().for_each(|bundle| plant(bundle));
    let name = |number: usize| format!("orrery-test-{}-{number}", std::process::id());
    match Container::start(Command::new("runc"), &name(0), &bundles[0], &root) {
        Ok(_) => {}
        Err(why) => {
            orrery_testing::skipped!("runc cannot run containers here: {}", why.trim());
            return;
        }
    }
    let (store, directory) = store_for_containers(work.path());
    let _ = store.client();
    let containers: Vec<_> = (0..)
        .zip(&bundles)
        .map(|(number, bundle)| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
            command.args(["orc", "oci", "--directory"]).arg(&directory).arg("--");
            let container = Container::start(command, &name(number), bundle, &root).unwrap();
            assert_eq!(container.said, "");
            container
        })
        .collect();
    for file in ["sleep", "libc.so.6"] {
        let mut seen = Vec::new();
        for container in &containers {
            eventually("the exchange", || code(container.pid, file).is_some_and(|(_, object)| object));
            seen.push(code(container.pid, file).unwrap().0);
        }
        assert_eq!(seen[0], seen[1], "{file}");
    }
    // So does what is started in a container later, as engines do it.
    let mut process: Value =
        serde_json::from_slice(&fs::read(bundles[0].join("config.json")).unwrap()).unwrap();
    let mut process = process["process"].take();
    process["env"] = json!(["PATH=/bin"]);
    process["args"] = json!(["/bin/sleep", "999"]);
    let (described, pid) = (work.path().join("process.json"), work.path().join("further.pid"));
    fs::write(&described, process.to_string()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    command.args(["orc", "oci", "--directory"]).arg(&directory).args(["--", "--root"]).arg(&root);
    command.args(["exec", "--process"]).arg(&described).args(["--detach", "--pid-file"]).arg(&pid);
    // The process goes on with these, too: a pipe would not end.
    let log = work.path().join("further.log");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&log).unwrap());
    let status = command.arg(name(0)).status().unwrap();
    let said = fs::read_to_string(&log).unwrap();
    assert!(status.success() && said.is_empty(), "{said}");
    let further = fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    for file in ["sleep", "libc.so.6"] {
        eventually("the exchange", || code(further, file).is_some_and(|(_, object)| object));
        assert_eq!(code(further, file), code(containers[1].pid, file), "{file}");
    }
    // They are the trust domain's, although root's, and the host's users know nothing of them.
    let objects = store.client().report().unwrap().objects;
    assert!(
        !objects.is_empty() && objects.iter().all(|object| object.trust_domain == "named acme"),
        "{objects:?}"
    );
    drop(containers);
    // Without a store a container runs as ever, and is told.
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    command.args(["orc", "oci", "--directory", "/nonexistent", "--"]);
    command.arg("--root").arg(&root).args(["run", "--bundle"]).arg(&bundles[0]).arg(name(9));
    let path = bundles[0].join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["process"]["args"] = json!(["/bin/sleep", "0"]);
    fs::write(&path, config.to_string()).unwrap();
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("shares nothing"), "{output:?}");
}

#[test]
fn containers_are_never_in_the_trust_domain_of_the_hosts_root() {
    let store = Store::new(&[]);
    let _ = store.client();
    let bundle = tempfile::tempdir().unwrap();
    let config = json!({"process": {"env": []}}).to_string();
    fs::write(bundle.path().join("config.json"), &config).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    command.args(["orc", "oci", "--runtime", "true", "--directory"]).arg(store.path());
    let output = command.args(["--", "create", "--bundle"]).arg(bundle.path()).arg("name").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("shares nothing") && said.contains("--trust-domain"), "{said}");
    assert_eq!(fs::read_to_string(bundle.path().join("config.json")).unwrap(), config);
}

/// As much of the code of a file of a process is shared with others as the kernel says.
fn is_shared(pid: u32, file: &str) -> bool {
    let areas = orrery_orc_store::measure::mappings(i32::try_from(pid).unwrap()).unwrap_or_default();
    let code = areas.iter().find(|area| area.access == "r-xp" && area.name.ends_with(file));
    code.is_some_and(|area| area.resident > 0 && area.proportional * 4 <= area.resident * 3)
}

#[test]
fn containers_have_trees_on_request() {
    containers_have_trees(
        |bundle| {
            plant(bundle);
            Ok(())
        },
        "/libc.so.6",
    );
}

#[test]
fn containers_with_another_c_library_have_trees() {
    containers_have_trees(plant_musl, "/ld-musl-x86_64.so.1");
}

/// Starts two containers of bundles that `plant` makes, and sees that they share `library`.
fn containers_have_trees(plant: fn(&Path) -> Result<(), String>, library: &str) {
    if Command::new("runc").arg("--version").output().is_err() {
        orrery_testing::skipped!("there is no runc");
        return;
    }
    let work = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let root = work.path().join("runc");
    let bundles = ["one", "two"].map(|name| work.path().join(name));
    if let Err(why) = bundles.iter().try_for_each(|bundle| plant(bundle)) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let name =
        |number: usize| format!("orrery-tree{library}-{}-{number}", std::process::id()).replace('/', "-");
    if let Err(why) = Container::start(Command::new("runc"), &name(0), &bundles[0], &root) {
        orrery_testing::skipped!("runc cannot run containers here: {}", why.trim());
        return;
    }
    let orrery = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
        command.args(["orc", "oci", "--rootfs", "--content"]).arg(work.path().join("content")).arg("--");
        command
    };
    let start = |number: usize| Container::start(orrery(), &name(number), &bundles[number], &root).unwrap();
    let containers = [start(0), start(1)];
    let clean = || {
        for number in 0..2 {
            let mut delete = orrery();
            delete.arg("--root").arg(&root).args(["delete", "--force", &name(number)]);
            assert!(delete.status().unwrap().success());
        }
        let _ = Command::new("chattr").args(["-R", "-i"]).arg(work.path().join("content")).output();
    };
    if containers.iter().any(|container| container.said.contains("immutable")) {
        orrery_testing::skipped!("{}", containers[0].said);
        clean();
        return;
    }
    assert_eq!((containers[0].said.as_str(), containers[1].said.as_str()), ("", ""));
    for container in &containers {
        eventually("the C library is shared", || is_shared(container.pid, library));
        let variables = fs::read(format!("/proc/{}/environ", container.pid)).unwrap();
        assert!(!String::from_utf8_lossy(&variables).contains("LD_AUDIT"));
    }
    let tree = work.path().join("trees").join(name(0));
    assert!(tree.join("bin").exists());
    clean();
    assert!(!tree.exists(), "nothing is left");
}

/// Podman, with storage of its own.
struct Podman {
    directory: tempfile::TempDir,
    containers: Vec<String>,
}

impl Podman {
    fn command(&self, runtime: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command.args(["60", "podman", "--cgroup-manager", "cgroupfs", "--events-backend", "none"]);
        for (option, name) in [("--root", "storage"), ("--runroot", "run"), ("--tmpdir", "tmp")] {
            command.arg(option).arg(self.directory.path().join(name));
        }
        command.args(["--runtime", runtime]).args(arguments).stdin(Stdio::null());
        command
    }

    /// Returns the name of the control groups in which it puts containers. It never removes them.
    fn control_group() -> String {
        format!("orrery-podman-{}", std::process::id())
    }

    /// Returns these control groups, in all hierarchies, each after those below it.
    fn control_groups() -> Vec<PathBuf> {
        let hierarchies = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
        let roots = hierarchies.map(|entry| entry.path()).chain([PathBuf::from("/sys/fs/cgroup")]);
        let mut found: Vec<_> = roots.map(|root| root.join(Self::control_group())).collect();
        found.retain(|group| group.is_dir() && !group.is_symlink());
        let mut next = 0;
        while let Some(group) = found.get(next).cloned() {
            let below = fs::read_dir(group).into_iter().flatten().flatten();
            found.extend(below.map(|entry| entry.path()).filter(|path| path.is_dir()));
            next += 1;
        }
        found.reverse();
        found
    }

    /// Runs `sleep` in a container of this root file system; returns its process and what was said.
    fn run(&mut self, name: &str, runtime: &str, root: &Path) -> Result<(u32, String), String> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        self.containers.push(name.to_owned());
        // Its own limits are higher than those that a test may have.
        let limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000"];
        let run = ["run", "--detach", "--network", "none", "--log-driver", "none", "--name", name];
        // What watches over it stays in the control group of the test.
        let group = format!("/{}", Self::control_group());
        let groups = ["--cgroups", "no-conmon", "--cgroup-parent", &group];
        let mut command = self.command(runtime, &[&run[..], &limits, &groups, &["--rootfs"]].concat());
        let output = command.arg(root).args(["/bin/sleep", "1000"]).output().unwrap();
        if !output.status.success() {
            return Err(text(&output.stderr));
        }
        let found = self.command(runtime, &["inspect", "--format", "{{.State.Pid}}", name]).output().unwrap();
        let pid = text(&found.stdout).parse().ok().filter(|&pid| pid != 0);
        Ok((pid.ok_or_else(|| format!("{found:?}"))?, text(&output.stderr)))
    }

    fn remove(&mut self, runtime: &str) {
        for name in self.containers.drain(..).collect::<Vec<_>>() {
            let _ = self.command(runtime, &["rm", "--force", "--time", "0", &name]).output();
        }
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        self.remove("runc");
        for storage in ["storage/overlay", "storage/overlay-containers"] {
            let _ = Command::new("umount").arg(self.directory.path().join(storage)).output();
        }
        // A container ends a moment after it was removed.
        for _ in 0..100 {
            Self::control_groups().iter().for_each(|group| drop(fs::remove_dir(group)));
            if Self::control_groups().is_empty() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }
}

#[test]
fn containers_of_podman_have_trees() {
    let work = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    if Command::new("podman").arg("--version").output().is_err() {
        orrery_testing::skipped!("there is no Podman");
        return;
    }
    let bundles = ["one", "two"].map(|name| work.path().join(name));
    bundles.iter().for_each(|bundle| plant(bundle));
    let root = |number: usize| bundles[number].join("rootfs");
    let name = |number: usize| format!("orrery-podman-{}-{number}", std::process::id());
    let mut podman = Podman { directory: tempfile::tempdir().unwrap(), containers: Vec::new() };
    if let Err(why) = podman.run(&name(9), "runc", &root(0)) {
        orrery_testing::skipped!("Podman cannot run containers here: {why}");
        return;
    }
    let runtime = work.path().join("orrery-runc");
    let script = format!(
        "#!/bin/sh\nexec {} orc oci --rootfs --content {} -- \"$@\"\n",
        env!("CARGO_BIN_EXE_orrery"),
        work.path().join("content").display()
    );
    orrery_testing::write_program(&runtime, &script);
    let runtime = runtime.to_str().unwrap();
    let started = [0, 1].map(|number| podman.run(&name(number), runtime, &root(number)).unwrap());
    let can_share = !started.iter().any(|(_, said)| said.contains("immutable"));
    if can_share {
        for (pid, _) in &started {
            eventually("the C library is shared", || is_shared(*pid, "/libc.so.6"));
        }
    }
    podman.remove(runtime);
    let _ = Command::new("chattr").args(["-R", "-i"]).arg(work.path().join("content")).output();
    if can_share {
        let left: Vec<_> = fs::read_dir(work.path().join("trees")).into_iter().flatten().flatten().collect();
        assert!(left.is_empty(), "{left:?}");
    } else {
        orrery_testing::skipped!("{}", started[0].1);
    }
}
