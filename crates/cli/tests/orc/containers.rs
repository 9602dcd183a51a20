//! Containers with root file systems of their own, started by an OCI runtime.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::unmodified::code;
use crate::{Store, eventually};

/// A bundle with a program and its libraries, copied.
fn plant(folder: &Path) {
    let root = folder.join("rootfs");
    for empty in ["proc", "dev", "sys", "tmp", "run"] {
        fs::create_dir_all(root.join(empty)).unwrap();
    }
    let output = Command::new("ldd").arg("/bin/sleep").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let libraries = text.split_whitespace().filter(|word| word.starts_with('/'));
    for file in libraries.chain(["/bin/sleep"]) {
        let to = root.join(&file[1..]);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(file, &to).unwrap();
    }
    let spec = Command::new("runc").args(["spec", "--bundle"]).arg(folder).status().unwrap();
    assert!(spec.success());
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["process"]["terminal"] = json!(false);
    config["process"]["args"] = json!(["/bin/sleep", "1000"]);
    fs::write(&path, config.to_string()).unwrap();
}

/// A container that ends with the test.
struct Container {
    name: String,
    root: PathBuf,
    pid: u32,
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
        assert_eq!(said, "", "it said");
        Ok(Self { name: name.to_owned(), root: root.to_owned(), pid })
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

#[test]
fn containers_of_a_tenant_share_their_files() {
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
    let folder = work.path().join("tenant");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    let store = Store::new(&["--tenant", &format!("acme={}", folder.join("socket").display())]);
    let _ = store.client();
    let containers: Vec<_> = (0..)
        .zip(&bundles)
        .map(|(number, bundle)| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
            command.args(["orc", "oci", "--directory"]).arg(&folder).arg("--");
            Container::start(command, &name(number), bundle, &root).unwrap()
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
    // They are the tenant's, although root's, and the host's users know nothing of them.
    let objects = store.client().report().unwrap().objects;
    assert!(!objects.is_empty() && objects.iter().all(|object| object.realm == "tenant acme"), "{objects:?}");
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
