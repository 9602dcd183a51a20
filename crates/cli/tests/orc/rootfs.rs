//! File trees whose files' contents are in memory once, for programs without an auditor.

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::bytes;

/// A directory with trees, contents and what is made of them; all is removed when this is dropped.
pub(crate) struct Trees(tempfile::TempDir);

impl Trees {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Makes a tree with all kinds of files.
    pub(crate) fn plant(&self, name: &str) -> PathBuf {
        let tree = self.path("trees").join(name);
        fs::create_dir_all(tree.join("deep/er")).unwrap();
        fs::write(tree.join("library"), bytes(300_000, 1)).unwrap();
        fs::write(tree.join("deep/er/same"), bytes(300_000, 1)).unwrap();
        // Hard links are of files with equal times only.
        for equal in ["library", "deep/er/same"] {
            let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000);
            File::options().write(true).open(tree.join(equal)).unwrap().set_modified(time).unwrap();
        }
        fs::write(tree.join("small"), "a line\n").unwrap();
        fs::write(tree.join("own"), format!("of {name}")).unwrap();
        fs::write(tree.join("empty"), "").unwrap();
        fs::hard_link(tree.join("library"), tree.join("deep/linked")).unwrap();
        std::os::unix::fs::symlink("deep/er", tree.join("link")).unwrap();
        fs::set_permissions(tree.join("small"), fs::Permissions::from_mode(0o4751)).unwrap();
        std::os::unix::fs::chown(tree.join("own"), Some(12), Some(34)).unwrap();
        let made = Command::new("mkfifo").arg(tree.join("fifo")).status().unwrap();
        assert!(made.success());
        tree
    }

    fn rootfs(&self, options: &[&str], trees: &[&Path]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
        command.args(["orc", "rootfs", "--content"]).arg(self.path("content"));
        command.arg("--output").arg(self.path("out")).args(options).args(trees).output().unwrap()
    }

    /// Makes them; `false` where that cannot be done here.
    fn make(&self, options: &[&str], trees: &[&Path]) -> bool {
        let output = self.rootfs(options, trees);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() && said.contains("immutable") {
            orrery_testing::skipped!("{said}");
            return false;
        }
        assert!(output.status.success(), "{said}");
        true
    }
}

impl Drop for Trees {
    fn drop(&mut self) {
        for entry in fs::read_dir(self.path("out")).into_iter().flatten().flatten() {
            self.rootfs(&["--remove"], &[&entry.path()]);
        }
        let immutable = ["content", "images"].map(|name| self.path(name));
        let _ = Command::new("chattr").args(["-R", "-i"]).args(immutable).output();
    }
}

/// Everything that can be seen of a file, but for inodes.
fn look(path: &Path) -> (u32, u32, u32, u64, i64, i64) {
    let found = fs::symlink_metadata(path).unwrap();
    let length = if found.is_dir() { 0 } else { found.len() };
    (found.mode(), found.uid(), found.gid(), length, found.mtime(), found.mtime_nsec())
}

fn below(directory: &Path) -> Vec<PathBuf> {
    let (mut all, mut waiting) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(next) = waiting.pop() {
        for entry in fs::read_dir(next).unwrap().flatten() {
            if entry.file_type().unwrap().is_dir() {
                waiting.push(entry.path());
            }
            all.push(entry.path());
        }
    }
    all.sort();
    all
}

fn assert_equal(tree: &Path, made: &Path) {
    let names = |directory: &Path| -> Vec<PathBuf> {
        below(directory).iter().map(|path| path.strip_prefix(directory).unwrap().to_owned()).collect()
    };
    assert_eq!(names(tree), names(made));
    for name in names(tree) {
        let (one, other) = (tree.join(&name), made.join(&name));
        assert_eq!(look(&one), look(&other), "{}", name.display());
        let kind = fs::symlink_metadata(&one).unwrap().file_type();
        if kind.is_file() {
            assert_eq!(fs::read(&one).unwrap(), fs::read(&other).unwrap(), "{}", name.display());
        } else if kind.is_symlink() {
            assert_eq!(fs::read_link(&one).unwrap(), fs::read_link(&other).unwrap());
        } else {
            assert!(kind.is_dir() || kind.is_fifo());
        }
    }
}

/// Drops what is cached of a file.
fn forget(path: &Path) {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// Returns how many pages of a file are in memory, as a mapping of it shows.
fn pages(path: &Path) -> usize {
    let output =
        Command::new("fincore").args(["--bytes", "--noheadings", "--output", "PAGES"]).arg(path).output();
    String::from_utf8(output.unwrap().stdout).unwrap().trim().parse().unwrap()
}

fn trees_are_shared(options: &[&str]) {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can make files immutable");
        return;
    }
    let trees = Trees::new();
    let (one, two) = (trees.plant("one"), trees.plant("two"));
    if !trees.make(options, &[&one, &two]) {
        return;
    }
    let made = ["one", "two"].map(|name| trees.path("out").join(name));
    assert_equal(&one, &made[0]);
    assert_equal(&two, &made[1]);
    // What one tree reads is in memory for the other, and nobody can write to it.
    let [library, same] = [made[0].join("library"), made[1].join("deep/er/same")];
    forget(&library);
    forget(&same);
    assert_eq!((pages(&library), pages(&same)), (0, 0));
    fs::read(&library).unwrap();
    assert!(pages(&same) >= 73, "{} pages", pages(&same));
    assert!(File::options().write(true).open(&library).is_err());
    let found = trees.rootfs(options, &[&one]);
    assert!(!found.status.success() && String::from_utf8_lossy(&found.stderr).contains("it is there"));
    // One goes, the other stays.
    assert!(trees.rootfs(&["--remove"], &[&one]).status.success());
    assert!(!made[0].exists());
    assert_equal(&two, &made[1]);
}

#[test]
fn trees_of_overlays_are_in_memory_once() {
    trees_are_shared(&[]);
}

#[test]
fn trees_of_links_are_in_memory_once() {
    trees_are_shared(&["--links"]);
}

#[test]
fn what_is_written_is_each_trees_own() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can mount");
        return;
    }
    let trees = Trees::new();
    let (one, two) = (trees.plant("one"), trees.plant("two"));
    if !trees.make(&["--writable"], &[&one, &two]) {
        return;
    }
    let made = ["one", "two"].map(|name| trees.path("out").join(name));
    let file = File::options().append(true).open(made[0].join("library")).unwrap();
    std::io::Write::write_all(&mut &file, b"more").unwrap();
    fs::write(made[0].join("new"), "new").unwrap();
    fs::remove_file(made[0].join("small")).unwrap();
    assert_eq!(fs::metadata(made[0].join("library")).unwrap().len(), 300_004);
    assert_equal(&two, &made[1]);
    assert_eq!(fs::read(one.join("library")).unwrap(), bytes(300_000, 1));
}

/// Programs whose loader calls no auditor run from such trees.
#[test]
fn static_programs_share_their_code() {
    let trees = Trees::new();
    let tree = trees.path("trees/static");
    fs::create_dir_all(&tree).unwrap();
    let source = trees.path("program.c");
    fs::write(&source, "#include <unistd.h>\nint main(void) { write(1, \"it runs\\n\", 8); pause(); }")
        .unwrap();
    let built = Command::new("cc").args(["-static", "-o"]).arg(tree.join("program")).arg(&source).status();
    if !rustix::process::geteuid().is_root() || !built.unwrap().success() {
        orrery_testing::skipped!("no static program can be built, or this is not root");
        return;
    }
    let other = trees.path("trees/again");
    fs::create_dir_all(&other).unwrap();
    orrery_testing::copy_program(tree.join("program"), other.join("program"));
    if !trees.make(&[], &[&tree, &other]) {
        return;
    }
    let private = |name: &str| {
        let mut command = Command::new(trees.path("out").join(name).join("program"));
        let mut child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut line = [0; 8];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
        assert_eq!(&line, b"it runs\n");
        orrery_testing::Killed(child)
    };
    let _running = [private("static"), private("again")];
    let pid = i32::try_from(_running[0].0.id()).unwrap();
    let areas = orrery_orc_store::measure::mappings(pid).unwrap();
    let code = areas.iter().find(|area| area.access == "r-xp" && area.name.ends_with("/program")).unwrap();
    assert!(code.proportional * 4 <= code.resident * 3, "{code:?}");
}

#[test]
fn what_cannot_be_shared_changes_nothing() {
    let trees = Trees::new();
    let tree = trees.plant("one");
    for (options, tree, wanted) in [
        (&[][..], trees.path("nothing"), "it is no directory"),
        (&["--remove"], PathBuf::from("/"), "cannot name a tree"),
    ] {
        let output = trees.rootfs(options, &[&tree]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(wanted), "{said}");
    }
    let twice = trees.rootfs(&[], &[&tree, &tree]);
    assert!(String::from_utf8_lossy(&twice.stderr).contains("two trees with the name one"));
    assert!(!trees.path("out").exists() && !trees.path("content").exists());
}
