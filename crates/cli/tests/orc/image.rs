//! Images of trees: that they have what the trees have, and that what goes wrong leaves none.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::bytes;
use crate::rootfs::Trees;

/// Returns why no images can be made here.
pub(crate) fn missing() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("only root can make files immutable");
    }
    let found = Command::new("mkfs.erofs").arg("--help").stdout(Stdio::null()).stderr(Stdio::null()).status();
    found.is_err().then_some("there is no mkfs.erofs here (package erofs-utils)")
}

/// Runs `orrery orc image`; the output is a file in the directory `images`.
fn command(trees: &Trees, name: &str) -> Command {
    fs::create_dir_all(trees.path("images")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    command.args(["orc", "image", "--output"]).arg(trees.path("images").join(name)).stdin(Stdio::null());
    command
}

/// Makes an image and returns what is printed as JSON.
pub(crate) fn make(trees: &Trees, name: &str, of: &[&Path]) -> Value {
    let output = command(trees, name).arg("--json").args(of).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Checks that a run failed with this message and left nothing.
fn assert_fails(trees: &Trees, output: &Output, message: &str) {
    assert!(!output.status.success() && said(output).contains(message), "{}", said(output));
    let left: Vec<_> = fs::read_dir(trees.path("images")).unwrap().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Puts a program of the name of mkfs.erofs into a directory, which is not below `/tmp`, where it would be hidden: a script before the
/// real one.
fn stand_in(script: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("mkfs.erofs");
    orrery_testing::write_program(&path, &format!("#!/bin/sh\n{script}\n"));
    directory
}

/// Unpacks an image by fsck.erofs, which also checks it.
fn unpack(trees: &Trees, name: &str, to: &str) -> PathBuf {
    let to = trees.path(to);
    let mut extract = std::ffi::OsString::from("--extract=");
    extract.push(&to);
    let output =
        Command::new("fsck.erofs").arg(extract).arg(trees.path("images").join(name)).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    to
}

#[test]
fn an_image_cannot_change_and_has_the_files_of_its_trees() {
    if let Some(why) = missing() {
        orrery_testing::skipped!("{why}");
        return;
    }
    let trees = Trees::new();
    let (one, two) = (trees.plant("one"), trees.plant("two"));
    let made = make(&trees, "both", &[&one, &two]);
    let image = trees.path("images/both");
    let found = fs::metadata(&image).unwrap();
    assert_eq!((found.len(), found.mode() & 0o7777), (made["size"].as_u64().unwrap(), 0o440));
    // Linux maps persistent memory in these units. Of eight files of the same 300,000 bytes one is there.
    assert_eq!(found.len(), 2 << 20);
    assert!(found.blocks() * 512 < 450_000, "{} blocks", found.blocks());
    assert_eq!((made["files"].as_u64(), made["bytes"].as_u64()), (Some(10), Some(2 * (3 * 300_000 + 7 + 6))));
    assert!(File::options().write(true).open(&image).is_err());
    assert!(fs::remove_file(&image).is_err() && fs::rename(&image, trees.path("images/other")).is_err());

    let out = unpack(&trees, "both", "out-of-image");
    for name in ["one/library", "two/deep/er/same", "two/deep/linked"] {
        assert_eq!(fs::read(out.join(name)).unwrap(), bytes(300_000, 1), "{name}");
    }
    assert_eq!(fs::read_to_string(out.join("two/own")).unwrap(), "of two");
    assert_eq!(fs::read_link(out.join("one/link")).unwrap(), Path::new("deep/er"));

    let again = command(&trees, "both").arg(&one).output().unwrap();
    assert!(
        !again.status.success() && said(&again).contains("it is there; remove it with"),
        "{}",
        said(&again)
    );
    assert!(command(&trees, "both").arg("--remove").status().unwrap().success());
    assert!(!image.exists());
    // What is no image is not removed.
    fs::write(&image, bytes(4096, 3)).unwrap();
    let refused = command(&trees, "both").arg("--remove").output().unwrap();
    assert!(
        !refused.status.success() && said(&refused).contains("it is no image of a tree"),
        "{}",
        said(&refused)
    );
    assert!(image.exists());
}

/// On another file system, whose directories are in another order.
#[test]
fn equal_trees_have_equal_images() {
    if let Some(why) = missing() {
        orrery_testing::skipped!("{why}");
        return;
    }
    let trees = Trees::new();
    let one = trees.plant("one");
    let _socket = std::os::unix::net::UnixListener::bind(one.join("socket")).unwrap();
    let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
    let other = elsewhere.path().join("other");
    let copied = Command::new("cp").arg("-a").args([&one, &other]).status().unwrap();
    assert!(copied.success());
    fs::remove_file(other.join("socket")).unwrap();
    let time = fs::metadata(&one).unwrap().modified().unwrap();
    File::open(&other).unwrap().set_modified(time).unwrap();
    let [first, second] =
        [("first", &one), ("second", &other)].map(|(name, tree)| make(&trees, name, &[tree.as_path()]));
    assert_eq!(first["blake3"], second["blake3"]);
    assert_eq!(first["uuid"], second["uuid"]);
    // Several trees, whose common directory is made for the image.
    let [third, fourth] = ["third", "fourth"].map(|name| make(&trees, name, &[&one, &other]));
    assert_eq!(third["blake3"], fourth["blake3"]);
    fs::write(other.join("small"), "another").unwrap();
    assert_ne!(make(&trees, "fifth", &[&other])["blake3"], first["blake3"]);
}

#[test]
fn what_is_mounted_below_a_tree_is_left_out() {
    if let Some(why) = missing() {
        orrery_testing::skipped!("{why}");
        return;
    }
    let trees = Trees::new();
    let tree = trees.plant("one");
    let at = tree.join("deep/er");
    let mounted = Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&at).status().unwrap();
    if !mounted.success() {
        orrery_testing::skipped!("nothing can be mounted");
        return;
    }
    fs::write(at.join("secret"), "of another file system").unwrap();
    make(&trees, "image", &[&tree]);
    assert!(Command::new("umount").arg(&at).status().unwrap().success());
    let out = unpack(&trees, "image", "out-of-image");
    assert!(out.join("deep/er").is_dir() && !out.join("deep/er/secret").exists());
    assert_eq!(fs::read_to_string(out.join("small")).unwrap(), "a line\n");
}

#[test]
fn images_that_cannot_be_made_leave_nothing() {
    if let Some(why) = missing() {
        orrery_testing::skipped!("{why}");
        return;
    }
    let trees = Trees::new();
    let tree = trees.plant("one");
    let path = std::env::var("PATH").unwrap();
    let before = |directory: &Path| format!("{}:{path}", directory.display());
    let fails = |command: &mut Command, message: &str| {
        assert_fails(&trees, &command.output().unwrap(), message);
    };

    fails(
        command(&trees, "image").arg(&tree).env("PATH", trees.path("nothing")),
        "install the package erofs-utils",
    );
    fails(command(&trees, "image").arg(trees.path("nothing")), "it is no directory");
    fails(command(&trees, "image").args([&tree, &tree]), "two trees with the name one");
    fails(command(&trees, "image").arg(trees.path("")), "it is in the tree");

    // A file is cut while the image is written.
    let cut = stand_in("truncate -s 10 /tmp/tree/library\nexec /usr/bin/mkfs.erofs \"$@\"");
    fails(
        command(&trees, "image").arg(&tree).env("PATH", before(cut.path())),
        "it changes; stop what writes to it",
    );
    let gone = stand_in("rm /tmp/tree/own\nexec /usr/bin/mkfs.erofs \"$@\"");
    fails(
        command(&trees, "image").arg(&tree).env("PATH", before(gone.path())),
        "it changes; stop what writes to it",
    );
    // The program fails, writes nothing, half of an image, or another file system.
    let broken = stand_in("echo '<E> erofs: cannot go on' >&2\nexit 1");
    fails(command(&trees, "image").arg(&tree).env("PATH", before(broken.path())), "mkfs.erofs: cannot go on");
    let idle = stand_in("exit 0");
    fails(command(&trees, "image").arg(&tree).env("PATH", before(idle.path())), "it wrote no file system");
    let half = stand_in("/usr/bin/mkfs.erofs \"$@\"\ntruncate -s 100K /tmp/image");
    fails(command(&trees, "image").arg(&tree).env("PATH", before(half.path())), "it wrote 102400 bytes of");
    let other = stand_in("truncate -s 1M /tmp/image");
    fails(
        command(&trees, "image").arg(&tree).env("PATH", before(other.path())),
        "it wrote no EROFS file system",
    );
}

#[test]
fn a_full_file_system_is_named() {
    if let Some(why) = missing() {
        orrery_testing::skipped!("{why}");
        return;
    }
    let trees = Trees::new();
    let tree = trees.path("tree");
    fs::create_dir_all(&tree).unwrap();
    fs::write(tree.join("large"), bytes(8 << 20, 1)).unwrap();
    fs::create_dir_all(trees.path("images")).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=4M", "none"])
        .arg(trees.path("images"))
        .status();
    if !mounted.unwrap().success() {
        orrery_testing::skipped!("nothing can be mounted");
        return;
    }
    let output = command(&trees, "image").arg(&tree).output().unwrap();
    let left = fs::read_dir(trees.path("images")).unwrap().count();
    assert!(Command::new("umount").arg(trees.path("images")).status().unwrap().success());
    if said(&output).contains("immutable") {
        orrery_testing::skipped!("{}", said(&output));
        return;
    }
    assert!(
        !output.status.success() && said(&output).contains("of up to 16 MiB that it takes"),
        "{}",
        said(&output)
    );
    assert_eq!(left, 0);
}

#[test]
fn an_image_whose_making_is_killed_is_not_there() {
    if let Some(why) = missing() {
        orrery_testing::skipped!("{why}");
        return;
    }
    let trees = Trees::new();
    let tree = trees.plant("one");
    let slow = stand_in("/usr/bin/mkfs.erofs \"$@\"\necho $$ > /tmp/written\nexec sleep 1000");
    let path = format!("{}:{}", slow.path().display(), std::env::var("PATH").unwrap());
    let child = command(&trees, "image").arg(&tree).env("PATH", path).spawn().unwrap();
    let mut making = orrery_testing::Killed(child);
    let mut program = 0;
    orrery_testing::eventually("the image is written", || {
        let text = fs::read_to_string(trees.path("images/.image.draft/written")).unwrap_or_default();
        program = text.trim().parse().unwrap_or(0);
        program != 0
    });
    // No two make the same image at a time.
    let second = command(&trees, "image").arg(&tree).output().unwrap();
    assert!(!second.status.success() && said(&second).contains("cannot lock"), "{}", said(&second));
    making.0.kill().unwrap();
    making.0.wait().unwrap();
    assert!(!trees.path("images/image").exists());
    // What it has started ends with it.
    orrery_testing::eventually("mkfs.erofs has ended", || !Path::new(&format!("/proc/{program}")).exists());
    // The next one removes what was left.
    let next = command(&trees, "image").arg(&tree).output().unwrap();
    assert!(next.status.success(), "{}", said(&next));
    let left: Vec<_> =
        fs::read_dir(trees.path("images")).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["image"]);
}
