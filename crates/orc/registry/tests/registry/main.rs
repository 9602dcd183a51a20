//! Trees and images that go from one machine to another by a registry: Debian's docker-registry, and registries that lie.
//!
//! A machine is a directory of contents of its own; two of them share nothing but the registry.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

mod access;
mod fake;
mod images;
mod interrupted;
mod liars;
mod server;
mod trees;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// The program under test.
const PROGRAM: &str = env!("CARGO_BIN_EXE_orrery-orc-registry");

/// A machine: contents, and the trees that are made of them. All is removed when this is dropped.
struct Machine {
    directory: tempfile::TempDir,
    /// Passwords and variables of the user who runs the tests are not looked at.
    home: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Self { directory, home: tempfile::tempdir().unwrap() }
    }

    /// One whose store works; `None`, with a remark, where that cannot be.
    fn with_store() -> Option<Self> {
        let machine = Self::new();
        if !rustix::process::geteuid().is_root() {
            orrery_testing::skipped!("only root can make files immutable");
            return None;
        }
        if let Err(error) = orrery_orc_rootfs::Content::open(&machine.content()) {
            orrery_testing::skipped!("{error}");
            return None;
        }
        Some(machine)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn content(&self) -> PathBuf {
        self.path("content")
    }

    /// The program, with an environment of its own.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(words).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("HOME", self.home.path());
        command
    }

    fn push(&self, tree: &Path, reference: &str, options: &[&str]) -> Output {
        let mut command = self.command(&["push", "--plain-http"]);
        command.args(options).arg(tree).arg(reference).output().unwrap()
    }

    fn pull_command(&self, reference: &str, tree: &str, options: &[&str]) -> Command {
        let mut command = self.command(&["pull", "--plain-http", "--content"]);
        command.arg(self.content()).args(options).arg(reference).arg(self.path("out").join(tree));
        command
    }

    fn pull(&self, reference: &str, tree: &str, options: &[&str]) -> Output {
        self.pull_command(reference, tree, options).output().unwrap()
    }

    fn tree(&self, name: &str) -> PathBuf {
        self.path("out").join(name)
    }

    /// Removes a tree.
    fn remove(&self, name: &str) {
        orrery_orc_rootfs::Layout::new(&self.path("out"), name).remove().unwrap();
    }

    /// The names of what is beside the trees and in the store's directory, but for contents.
    fn left_over(&self) -> Vec<String> {
        let names = |directory: PathBuf| fs::read_dir(directory).into_iter().flatten().flatten();
        let all = names(self.path("out")).chain(names(self.content()));
        let names = all.map(|entry| entry.file_name().into_string().unwrap());
        names.filter(|name| name.len() != 2 && name != "layers").collect()
    }

    /// The number of contents.
    fn contents(&self) -> usize {
        below(&self.content()).into_iter().filter(|path| path.is_file()).count()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for entry in fs::read_dir(self.path("out")).into_iter().flatten().flatten() {
            let name = entry.file_name().into_string().unwrap();
            if !name.starts_with('.') {
                let _ = orrery_orc_rootfs::Layout::new(&self.path("out"), &name).remove();
            }
        }
        let _ = Command::new("chattr").args(["-R", "-f", "-i"]).arg(self.directory.path()).output();
    }
}

fn succeeded(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn result(output: &Output) -> Value {
    serde_json::from_str(&succeeded(output)).unwrap()
}

/// Returns what a program that failed printed.
fn failed(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("orrery-orc-registry: cannot "), "{error}");
    error
}

/// Returns all paths below a directory, in order.
fn below(directory: &Path) -> Vec<PathBuf> {
    let (mut all, mut waiting) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(next) = waiting.pop() {
        for entry in fs::read_dir(next).into_iter().flatten().flatten() {
            if entry.file_type().unwrap().is_dir() {
                waiting.push(entry.path());
            }
            all.push(entry.path());
        }
    }
    all.sort();
    all
}

/// Everything that can be seen of a file but its inode: of further names the first one's place.
fn look(directory: &Path) -> Vec<String> {
    let mut inodes: Vec<(u64, u64)> = Vec::new();
    let mut seen = Vec::new();
    for path in std::iter::once(directory.to_owned()).chain(below(directory)) {
        let found = fs::symlink_metadata(&path).unwrap();
        let inode = (found.dev(), found.ino());
        let first = inodes.iter().position(|other| *other == inode);
        inodes.push(inode);
        let mut names = vec![0; 1 << 16];
        let length = rustix::fs::llistxattr(&path, &mut names).unwrap_or(0);
        let mut extended = Vec::new();
        for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            let name = String::from_utf8(name.to_vec()).unwrap();
            let mut value = vec![0; 1 << 16];
            let length = rustix::fs::lgetxattr(&path, &name, &mut value).unwrap();
            extended.push((name, value[..length].to_vec()));
        }
        extended.sort();
        let bytes = match found.file_type() {
            kind if kind.is_file() => fs::read(&path).unwrap(),
            kind if kind.is_symlink() => fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
            _ => Vec::new(),
        };
        seen.push(format!(
            "{:?} {:o} {}:{} {}.{:09} {:x} {extended:?} {:?} {:x?}",
            path.strip_prefix(directory).unwrap(),
            found.mode(),
            found.uid(),
            found.gid(),
            found.mtime(),
            found.mtime_nsec(),
            found.rdev(),
            first,
            orrery_orc_wire::ObjectId::of(&bytes),
        ));
    }
    seen
}
