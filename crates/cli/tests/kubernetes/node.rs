//! A node without a kubelet: containerd with its CRI plug-in, images made here, and what a kubelet does with pods.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use orrery_testing::{Killed, built, copy_program, until};
use serde_json::{Value, json};

use crate::cri::{self, Runtime};
use crate::pod;

/// The whole of a node; all that it started ends with it.
pub(crate) struct Node {
    directory: tempfile::TempDir,
    engine: Killed,
    runtime: Runtime,
    sandboxes: Mutex<Vec<String>>,
    pods: AtomicU32,
    cgroup: String,
}

/// A pod that runs.
#[derive(Clone)]
pub(crate) struct Pod {
    id: String,
    pub(crate) spec: Value,
    pub(crate) containers: Vec<(String, String)>,
}

/// How a command in a container ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: i32,
    pub(crate) output: String,
    pub(crate) errors: String,
}

fn succeed(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{error}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Copies a file and the libraries that it needs to the same paths below `root`.
fn plant(root: &Path, file: &Path, to: &str) {
    let copy = |from: &Path, to: &Path| {
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        if !to.exists() {
            copy_program(from, to);
        }
    };
    copy(file, &root.join(to));
    let libraries = Command::new("ldd").arg(file).output().unwrap();
    for library in String::from_utf8_lossy(&libraries.stdout).split_whitespace() {
        if let Some(below) = library.strip_prefix('/') {
            copy(Path::new(library), &root.join(below));
        }
    }
}

/// A root file system with `sleep` and a shell: as large as need be, and with files of its own.
fn plant_small(root: &Path) {
    for directory in ["bin", "proc", "sys", "dev", "tmp", "run", "etc", "var/lib"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    plant(root, Path::new("/bin/busybox"), "bin/busybox");
    for name in ["sh", "cat", "chmod", "chown", "cp", "mv", "rm"] {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(name)).unwrap();
    }
    plant(root, Path::new("/bin/sleep"), "bin/sleep");
}

/// What the package's image has: the command, the server of interpreters, and an interpreter.
fn plant_orrery(root: &Path) {
    plant_small(root);
    plant(root, Path::new(env!("CARGO_BIN_EXE_orrery")), "usr/bin/orrery");
    let helpers = ["orrery-warm-python", "orrery-warm-http"];
    let place = |name: &str| format!("usr/libexec/orrery/{name}");
    for name in helpers {
        plant(root, &built(name), &place(name));
    }
    for program in [&place(helpers[0]), &place(helpers[1]), "usr/bin/orrery"] {
        succeed(Command::new("strip").arg("--strip-debug").arg(root.join(program)));
    }
    let runtime = orrery_testing::root().join("examples/oci/orrery-runc");
    copy_program(runtime, root.join("usr/libexec/orrery/orrery-runc"));
    plant(root, Path::new("/usr/bin/python3"), "usr/bin/python3");
    let library = succeed(
        Command::new("/usr/bin/python3").args(["-c", "import os; print(os.path.dirname(os.__file__))"]),
    );
    let library = library.trim();
    let mut copy = Command::new("sh");
    copy.args(["-c", "tar -C / --exclude=test --exclude='config-*' --exclude=dist-packages -cf - \"$1\" | tar -C \"$2\" -xf -"]);
    succeed(copy.arg("copy").arg(&library[1..]).arg(root));
    for module in fs::read_dir(Path::new(library).join("lib-dynload")).unwrap().flatten() {
        let path = module.path();
        plant(root, &path, path.strip_prefix("/").unwrap().to_str().unwrap());
    }
}

impl Node {
    /// Starts containerd.
    ///
    /// # Errors
    /// Why none can be had here.
    pub(crate) fn start(runtimes: &str) -> Result<Self, String> {
        for program in ["containerd", "ctr", "runc", "curl", "unshare", "strip"] {
            if !orrery_testing::is_there(program) {
                return Err(format!("there is no {program}"));
            }
        }
        if !rustix::process::geteuid().is_root() {
            return Err("containerd needs root".to_owned());
        }
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let config = format!(
            "version = 2\nroot = {:?}\nstate = {:?}\n[grpc]\naddress = {:?}\n\
             [plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"localhost/pause:1\"\n\
             restrict_oom_score_adj = true\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n\
             runtime_type = \"io.containerd.runc.v2\"\n{runtimes}",
            path("root"),
            path("state"),
            path("socket")
        );
        fs::write(path("config.toml"), config).unwrap();
        let log = fs::File::create(path("log")).unwrap();
        // Directories of the node that pods mount are this node's own; from /run no programs can be run, as on most machines.
        let mounts = "mount -t tmpfs -o mode=755,nosuid,nodev,noexec tmpfs /run && mount -t tmpfs -o mode=755 tmpfs /opt \
                      && mount --bind \"$2\" /var/lib && exec containerd --config \"$1\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", mounts, "node"]);
        // Objects on disk need a file system with immutable files, as that of the test may be.
        fs::create_dir(path("lib")).unwrap();
        command.arg(path("config.toml")).arg(path("lib")).stdout(log.try_clone().unwrap()).stderr(log);
        let engine = Killed(command.spawn().map_err(|error| error.to_string())?);
        let runtime = Runtime { socket: path("socket") };
        let mut node = Self {
            directory,
            engine,
            runtime,
            sandboxes: Mutex::default(),
            pods: AtomicU32::new(0),
            cgroup: format!("/orrery-kubernetes-{}", std::process::id()),
        };
        let begin = std::time::Instant::now();
        let answers = loop {
            let ended = node.engine.0.try_wait().unwrap().is_some();
            let asked = node.runtime.call::<cri::Nothing>("Version", &cri::Nothing {});
            if asked.is_ok() || ended {
                break asked.is_ok();
            }
            let log = || fs::read_to_string(node.path("log")).unwrap_or_default();
            assert!(begin.elapsed() < orrery_testing::PATIENCE, "containerd: {asked:?}\n{}", log());
            std::thread::sleep(std::time::Duration::from_millis(100));
        };
        let log = fs::read_to_string(node.path("log")).unwrap();
        answers.then_some(node).ok_or(format!("containerd does not run here: {log}"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Whether files can be made immutable where the node has `/var/lib`; reports it if not.
    pub(crate) fn has_immutable_files(&self) -> bool {
        let file = self.path("lib/trial");
        fs::write(&file, "").unwrap();
        let change = |flag| {
            Command::new("chattr").arg(flag).arg(&file).output().is_ok_and(|output| output.status.success())
        };
        let has = change("+i") && change("-i");
        if !has {
            orrery_testing::skipped!(
                "no files can be immutable in {}: objects are in memory",
                file.display()
            );
        }
        has
    }

    /// Returns where a path of the node is for this test.
    pub(crate) fn host(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.engine.0.id()))
    }

    /// Makes an image, of the package's files or small, and imports it; `mark` distinguishes it from others.
    pub(crate) fn import(&self, name: &str, is_small: bool, mark: &str) {
        let work = tempfile::tempdir_in(self.directory.path()).unwrap();
        let (root, layer) = (work.path().join("rootfs"), work.path().join("layer.tar"));
        fs::create_dir(&root).unwrap();
        if is_small {
            plant_small(&root)
        } else {
            plant_orrery(&root)
        }
        fs::write(root.join("etc/mark"), mark).unwrap();
        succeed(Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(&layer).arg("."));
        let sum = succeed(Command::new("sha256sum").arg(&layer));
        let architecture = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
        let config = json!({
            "architecture": architecture, "os": "linux",
            "config": {"Entrypoint": ["/bin/sleep", "1000000"]},
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", sum.split_whitespace().next().unwrap())]},
        });
        fs::write(work.path().join("config.json"), config.to_string()).unwrap();
        let manifest = json!([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]);
        fs::write(work.path().join("manifest.json"), manifest.to_string()).unwrap();
        let image = work.path().join("image.tar");
        let mut pack = Command::new("tar");
        pack.arg("-C").arg(work.path()).arg("-cf").arg(&image);
        succeed(pack.args(["manifest.json", "config.json", "layer.tar"]));
        let mut import = Command::new("ctr");
        import.arg("--address").arg(&self.runtime.socket).args(["--namespace", "k8s.io", "images", "import"]);
        succeed(import.arg(&image));
    }

    /// Runs a pod by a handler, as far as its containers being started.
    ///
    /// # Errors
    /// What the runtime reports, and init containers that fail.
    pub(crate) fn run(&self, handler: &str, name: &str, spec: &Value) -> Result<Pod, String> {
        let name = format!("{name}-{}", self.pods.fetch_add(1, Ordering::Relaxed));
        let (logs, empty) = (self.path("logs"), self.path("empty").join(&name));
        fs::create_dir_all(logs.join(&name)).unwrap();
        for directory in pod::host_directories(spec) {
            fs::create_dir_all(self.host(&directory)).unwrap();
        }
        for volume in spec["volumes"].as_array().map(Vec::as_slice).unwrap_or_default() {
            let directory = empty.join(volume["name"].as_str().unwrap());
            fs::create_dir_all(&directory).unwrap();
            // As kubelets make emptyDir.
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
            fs::set_permissions(&directory, mode).unwrap();
        }
        let sandbox = pod::sandbox(spec, &name, logs.to_str().unwrap(), &self.cgroup);
        let run = cri::RunSandbox { config: Some(sandbox.clone()), runtime_handler: handler.to_owned() };
        let id = self.runtime.call::<cri::Id>("RunPodSandbox", &run)?.id;
        self.sandboxes.lock().unwrap().push(id.clone());
        let start = |container: &Value| -> Result<String, String> {
            let config = pod::container(spec, container, 0, empty.to_str().unwrap());
            let create = cri::CreateContainer {
                sandbox: id.clone(),
                config: Some(config),
                sandbox_config: Some(sandbox.clone()),
            };
            let id = self.runtime.call::<cri::Id>("CreateContainer", &create)?;
            self.runtime.call::<cri::Nothing>("StartContainer", &id)?;
            Ok(id.id)
        };
        for container in spec["initContainers"].as_array().map(Vec::as_slice).unwrap_or_default() {
            let started = start(container)?;
            let status = until("the init container ends", || {
                let status = self.status(&started);
                (status.state == cri::EXITED).then_some(status)
            });
            if status.exit_code != 0 {
                return Err(format!("{}: {status:?}\n{}", container["name"], self.logs(&name)));
            }
        }
        let mut containers = Vec::new();
        for container in spec["containers"].as_array().unwrap() {
            containers.push((container["name"].as_str().unwrap().to_owned(), start(container)?));
        }
        Ok(Pod { id, spec: spec.clone(), containers })
    }

    /// Returns what a pod's containers wrote.
    fn logs(&self, name: &str) -> String {
        let files = fs::read_dir(self.path("logs").join(name)).unwrap().flatten();
        files.map(|file| fs::read_to_string(file.path()).unwrap_or_default()).collect()
    }

    pub(crate) fn all_logs(&self) -> String {
        let pods = fs::read_dir(self.path("logs")).unwrap().flatten();
        pods.map(|pod| format!("{:?}:\n{}", pod.file_name(), self.logs(pod.file_name().to_str().unwrap())))
            .collect()
    }

    pub(crate) fn status(&self, container: &str) -> cri::Status {
        let request = cri::StatusRequest { id: container.to_owned(), verbose: false };
        self.runtime.call::<cri::StatusAnswer>("ContainerStatus", &request).unwrap().status.unwrap()
    }

    /// Returns the process of a container.
    pub(crate) fn pid(&self, container: &str) -> u32 {
        let request = cri::StatusRequest { id: container.to_owned(), verbose: true };
        let answer = self.runtime.call::<cri::StatusAnswer>("ContainerStatus", &request).unwrap();
        let info: Value = serde_json::from_str(&answer.info[0].value).unwrap();
        u32::try_from(info["pid"].as_u64().unwrap()).unwrap()
    }

    /// Runs a command in a container.
    pub(crate) fn exec(&self, container: &str, command: &[&str]) -> Ended {
        let command = command.iter().map(|word| (*word).to_owned()).collect();
        let request = cri::Exec { id: container.to_owned(), command, timeout: 120 };
        let answer = self.runtime.call::<cri::ExecAnswer>("ExecSync", &request).unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ended { status: answer.exit_code, output: text(&answer.stdout), errors: text(&answer.stderr) }
    }

    /// Runs a probe of the pod's only container.
    pub(crate) fn probe(&self, pod: &Pod, name: &str) -> Ended {
        let command = &pod.spec["containers"][0][name]["exec"]["command"];
        let command: Vec<&str> =
            command.as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
        self.exec(&pod.containers[0].1, &command)
    }

    /// Runs the pod of a DaemonSet, until its probes of starting and readiness succeed.
    pub(crate) fn daemon(&self, set: &Value) -> Pod {
        let spec = &set["spec"]["template"]["spec"];
        let pod = self.run("", set["metadata"]["name"].as_str().unwrap(), spec).unwrap();
        for probe in ["startupProbe", "readinessProbe"] {
            until(probe, || {
                let status = self.status(&pod.containers[0].1);
                assert_eq!(status.state, cri::RUNNING, "{status:?}\n{}", self.all_logs());
                (self.probe(&pod, probe).status == 0).then_some(())
            });
        }
        pod
    }

    /// Ends a pod as a kubelet does, and returns how its first container ended.
    pub(crate) fn end(&self, pod: &Pod) -> cri::Status {
        let timeout = pod.spec["terminationGracePeriodSeconds"].as_i64().unwrap_or(30);
        for (_, container) in &pod.containers {
            let stop = cri::StopContainer { id: container.clone(), timeout };
            self.runtime.call::<cri::Nothing>("StopContainer", &stop).unwrap();
        }
        let status = self.status(&pod.containers[0].1);
        self.remove(&pod.id).unwrap();
        self.sandboxes.lock().unwrap().retain(|id| *id != pod.id);
        status
    }

    fn remove(&self, sandbox: &str) -> Result<(), String> {
        let id = cri::Id { id: sandbox.to_owned() };
        self.runtime.call::<cri::Nothing>("StopPodSandbox", &id)?;
        self.runtime.call::<cri::Nothing>("RemovePodSandbox", &id).map(drop)
    }

    /// Returns the processes whose command lines name this node's directory.
    fn processes(&self) -> Vec<i32> {
        processes_of(self.directory.path())
    }

    /// Ends everything, and returns the node's directory, which is gone then.
    pub(crate) fn finish(self) -> PathBuf {
        self.directory.path().to_owned()
    }
}

/// Returns the processes whose command lines name a directory.
pub(crate) fn processes_of(directory: &Path) -> Vec<i32> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let directory = directory.to_str().unwrap();
    let is_of_node = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(directory)
    };
    pids.filter(is_of_node).collect()
}

impl Drop for Node {
    fn drop(&mut self) {
        let sandboxes = self.sandboxes.get_mut().map(std::mem::take).unwrap_or_default();
        for sandbox in sandboxes {
            let _ = self.remove(&sandbox);
        }
        let signal = |pid: i32, signal| {
            // Those that have ended meanwhile are as wanted.
            let _ = rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), signal);
        };
        signal(i32::try_from(self.engine.0.id()).unwrap(), rustix::process::Signal::TERM);
        let _ = self.engine.0.wait();
        // Shims whose pods could not be removed.
        for pid in self.processes() {
            signal(pid, rustix::process::Signal::KILL);
        }
        // Objects that the last store has left. Where there are none, or no such files, as well.
        let _ = Command::new("chattr").args(["-R", "-i"]).arg(self.path("lib")).output();
        for root in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new) {
            let hierarchies = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
            for hierarchy in hierarchies.chain([root.to_owned()]) {
                let _ = fs::remove_dir(hierarchy.join(&self.cgroup[1..]));
            }
        }
    }
}
