//! Trees that are pushed from one machine and pulled on another one.

use std::fs::{self, File, Permissions};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::{CWD, FileType, Mode, XattrFlags};

use crate::server::Server;
use crate::{Machine, below, failed, look, result, succeeded};

/// Makes a tree with all kinds of files.
fn plant(machine: &Machine, name: &str) -> PathBuf {
    let tree = machine.path(name);
    fs::create_dir_all(tree.join("deep/er")).unwrap();
    fs::create_dir(tree.join("none")).unwrap();
    fs::write(tree.join("large"), large(1)).unwrap();
    fs::write(tree.join("deep/er/same"), large(1)).unwrap();
    fs::write(tree.join("small"), "a line\n").unwrap();
    fs::write(tree.join("own"), format!("of {name}")).unwrap();
    fs::write(tree.join("empty"), "").unwrap();
    fs::hard_link(tree.join("large"), tree.join("deep/linked")).unwrap();
    fs::hard_link(tree.join("empty"), tree.join("deep/empty")).unwrap();
    std::os::unix::fs::symlink("../../etc/passwd", tree.join("link")).unwrap();
    fs::write(tree.join(std::ffi::OsStr::from_bytes(b"not \xff text\n")), "x").unwrap();
    fs::set_permissions(tree.join("small"), Permissions::from_mode(0o4751)).unwrap();
    fs::set_permissions(tree.join("none"), Permissions::from_mode(0o1700)).unwrap();
    std::os::unix::fs::chown(tree.join("own"), Some(12), Some(34)).unwrap();
    std::os::unix::fs::lchown(tree.join("link"), Some(56), Some(78)).unwrap();
    rustix::fs::mknodat(CWD, tree.join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    let null = rustix::fs::makedev(1, 3);
    rustix::fs::mknodat(CWD, tree.join("device"), FileType::CharacterDevice, Mode::RUSR, null).unwrap();
    rustix::fs::setxattr(tree.join("own"), "trusted.x", b"\x00\xff", XattrFlags::empty()).unwrap();
    rustix::fs::setxattr(tree.join("deep"), "trusted.y", b"value", XattrFlags::empty()).unwrap();
    for (index, path) in below(&tree).iter().enumerate() {
        if path.is_file() {
            let time = UNIX_EPOCH + Duration::new(1_600_000_000 + index as u64, 123_456_789);
            File::open(path).unwrap().set_modified(time).unwrap();
        }
    }
    File::open(&tree).unwrap().set_modified(UNIX_EPOCH + Duration::new(1, 2)).unwrap();
    tree
}

/// Bytes that differ from page to page.
fn large(seed: u8) -> Vec<u8> {
    (0..300_000_u32).map(|at| (at / 7).to_le_bytes()[0] ^ (at >> 12).to_le_bytes()[0] ^ seed).collect()
}

fn arrives(options: &[&str]) {
    let (Some(one), Some(other), Some(server)) =
        (Machine::with_store(), Machine::with_store(), Server::new())
    else {
        return;
    };
    let tree = plant(&one, "tree");
    let reference = server.reference("team/tree:1.0");
    let pushed = result(&one.push(&tree, &reference, &["--json"]));
    assert_eq!((&pushed["contents"], &pushed["sent"]["contents"]), (&4.into(), &4.into()));
    let pulled = result(&other.pull(&reference, "tree", &[&["--json"], options].concat()));
    assert_eq!(pulled["digest"], pushed["digest"]);
    assert_eq!(look(&tree), look(&other.tree("tree")));
    // Contents are those of the store, and nothing else is there.
    assert!(File::options().write(true).open(other.tree("tree").join("large")).is_err());
    assert!(
        other.left_over().iter().all(|name| name == "tree" || name == ".tree.layers"),
        "{:?}",
        other.left_over()
    );
    // By digest, too, and where it is already nothing is made.
    let by_digest = format!("{}@{}", server.reference("team/tree"), pushed["digest"].as_str().unwrap());
    succeeded(&other.pull(&by_digest, "again", options));
    let error = failed(&other.pull(&by_digest, "again", options));
    assert!(error.contains("it is there; remove it"), "{error}");
    other.remove("again");
    assert_eq!(look(&tree), look(&other.tree("tree")));
}

#[test]
fn a_tree_is_the_same_on_another_machine() {
    arrives(&[]);
}

#[test]
fn a_tree_of_links_is_the_same_on_another_machine() {
    arrives(&["--links", "--suid"]);
}

/// Without the option, nothing that a registry sends gives anybody privileges.
#[test]
fn programs_of_a_registry_give_no_privileges() {
    let (Some(machine), Some(server)) = (Machine::with_store(), Server::new()) else { return };
    let tree = plant(&machine, "tree");
    let reference = server.reference("x");
    succeeded(&machine.push(&tree, &reference, &[]));
    let options = |name: &str, options: &[&str]| {
        succeeded(&machine.pull(&reference, name, options));
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let path = machine.tree(name);
        let line = mounts.lines().find(|line| line.split(' ').nth(4) == path.to_str()).unwrap().to_owned();
        line.split(' ').nth(5).unwrap().to_owned()
    };
    let plain = options("plain", &[]);
    assert!(plain.contains("nosuid") && plain.contains("nodev"), "{plain}");
    let trusted = options("trusted", &["--suid"]);
    assert!(!trusted.contains("nosuid") && !trusted.contains("nodev"), "{trusted}");
    // Nor when it is mounted again.
    let layout = orrery_orc_rootfs::Layout::new(&machine.path("out"), "plain");
    orrery_orc_rootfs::overlay::unmount(&machine.tree("plain")).unwrap();
    layout.mount_again(&orrery_orc_rootfs::Content::open(&machine.content()).unwrap(), false).unwrap();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let is_mounted = |line: &&str| line.contains(machine.tree("plain").to_str().unwrap());
    assert!(mounts.lines().find(is_mounted).unwrap().contains("nosuid"));
    // The devices among the names have no effect.
    let layers = fs::metadata(machine.path("out/.plain.layers")).unwrap();
    assert_eq!(layers.permissions().mode() & 0o777, 0o700);
    let error = failed(&machine.pull(&reference, "linked", &["--links"]));
    assert!(error.contains("pass --suid if you trust the registry"), "{error}");
    assert!(!machine.tree("linked").exists());
}

#[test]
fn what_is_there_is_not_sent_again() {
    let (machine, Some(server)) = (Machine::new(), Server::new()) else { return };
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can make devices and give files away");
        return;
    }
    let tree = plant(&machine, "tree");
    let reference = server.reference("one:first");
    succeeded(&machine.push(&tree, &reference, &[]));
    // Four contents, the listing and the manifest.
    assert_eq!((server.count("PUT", "/blobs/"), server.count("PUT", "/manifests/")), (5, 1));
    let before = server.requests().len();
    let again = result(&machine.push(&tree, &reference, &["--json"]));
    assert_eq!((&again["is_new"], &again["requests"]), (&false.into(), &1.into()));
    assert_eq!(server.requests().len(), before + 1);
    // One file more is one content more; the tag moves.
    fs::write(tree.join("new"), "new").unwrap();
    let more = result(&machine.push(&tree, &reference, &["--json"]));
    assert_eq!((&more["sent"]["contents"], &more["present"]), (&1.into(), &4.into()));
    assert_eq!((server.count("PUT", "/blobs/"), server.count("PUT", "/manifests/")), (7, 2));
    // Another repository of the registry takes what the first one has.
    let other = result(&machine.push(&tree, &server.reference("two"), &["--json", "--mount-from", "one"]));
    assert_eq!((&other["mounted"], &other["sent"]["contents"]), (&5.into(), &0.into()));
}

#[test]
fn what_is_there_is_not_fetched_again() {
    let (Some(one), Some(other), Some(server)) =
        (Machine::with_store(), Machine::with_store(), Server::new())
    else {
        return;
    };
    let tree = plant(&one, "tree");
    succeeded(&one.push(&tree, &server.reference("x:1"), &[]));
    succeeded(&other.pull(&server.reference("x:1"), "first", &[]));
    // Four contents and the listing.
    assert_eq!(server.count("GET", "/blobs/"), 5);
    fs::write(tree.join("new"), "new").unwrap();
    fs::rename(tree.join("large"), tree.join("renamed")).unwrap();
    succeeded(&one.push(&tree, &server.reference("x:2"), &[]));
    let second = result(&other.pull(&server.reference("x:2"), "second", &["--json"]));
    assert_eq!((&second["fetched"]["blobs"], &second["present"]), (&2.into(), &4.into()));
    assert_eq!(server.count("GET", "/blobs/"), 7);
    assert_eq!(look(&tree), look(&other.tree("second")));
    // What a machine made by itself counts as well.
    let content = orrery_orc_rootfs::Content::open(&one.content()).unwrap();
    for name in ["renamed", "small", "own", "new"] {
        content.add(&tree.join(name)).unwrap();
    }
    let own = result(&one.pull(&server.reference("x:2"), "own", &["--json"]));
    assert_eq!((&own["fetched"]["blobs"], &own["present"]), (&2.into(), &4.into()));
    assert_eq!(look(&tree), look(&one.tree("own")));
}

/// What writes to a tree writes to a layer of its own.
#[test]
fn a_tree_can_be_written_to_where_it_is_asked_for() {
    let (Some(machine), Some(server)) = (Machine::with_store(), Server::new()) else { return };
    let tree = plant(&machine, "tree");
    succeeded(&machine.push(&tree, &server.reference("x"), &[]));
    succeeded(&machine.pull(&server.reference("x"), "mine", &["--writable"]));
    succeeded(&machine.pull(&server.reference("x"), "yours", &[]));
    fs::write(machine.tree("mine").join("large"), "mine").unwrap();
    assert_eq!(look(&tree), look(&machine.tree("yours")));
    assert!(fs::write(machine.tree("yours").join("large"), "yours").is_err());
}

#[test]
fn standard_tools_copy_what_was_pushed() {
    let (Some(machine), Some(server), Some(mirror)) = (Machine::with_store(), Server::new(), Server::new())
    else {
        return;
    };
    if !orrery_testing::is_there("skopeo") {
        return;
    }
    let tree = plant(&machine, "tree");
    let reference = server.reference("x:1");
    let digest = result(&machine.push(&tree, &reference, &["--json"]))["digest"].clone();
    let skopeo = |words: &[&str]| succeeded(&Command::new("skopeo").args(words).output().unwrap());
    let url = |server: &Server| format!("docker://{}", server.reference("x:1"));
    let raw = skopeo(&["inspect", "--raw", "--tls-verify=false", &url(&server)]);
    assert_eq!(crate::fake::digest(raw.as_bytes()), digest);
    skopeo(&["copy", "--src-tls-verify=false", "--dest-tls-verify=false", &url(&server), &url(&mirror)]);
    let pulled = result(&machine.pull(&mirror.reference("x:1"), "copied", &["--json"]));
    assert_eq!(pulled["digest"], digest);
    assert_eq!(look(&tree), look(&machine.tree("copied")));
}

/// A tree with more contents than one manifest names is under an index, whose other manifests name the contents for the registry.
#[test]
fn a_tree_is_found_in_an_index() {
    let (Some(machine), Some(server)) = (Machine::with_store(), Server::new()) else { return };
    let tree = plant(&machine, "tree");
    succeeded(&machine.push(&tree, &server.reference("x:1"), &[]));
    let mut manifest = ureq::get(server.url("/v2/x/manifests/1"))
        .header("accept", "application/vnd.oci.image.manifest.v1+json")
        .call()
        .unwrap();
    let manifest = manifest.body_mut().read_to_string().unwrap();
    let index = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "artifactType": "application/vnd.orrery.tree.v1",
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "artifactType": "application/vnd.orrery.tree.v1",
            "digest": crate::fake::digest(manifest.as_bytes()),
            "size": manifest.len(),
        }],
    });
    server.put_manifest("x:all", "application/vnd.oci.image.index.v1+json", &index.to_string());
    succeeded(&machine.pull(&server.reference("x:all"), "all", &[]));
    assert_eq!(look(&tree), look(&machine.tree("all")));
}

#[test]
fn an_empty_tree_can_be_pushed() {
    let (Some(machine), Some(server)) = (Machine::with_store(), Server::new()) else { return };
    let tree = machine.path("tree");
    fs::create_dir(&tree).unwrap();
    succeeded(&machine.push(&tree, &server.reference("x"), &[]));
    succeeded(&machine.pull(&server.reference("x"), "empty", &[]));
    assert_eq!(look(&tree), look(&machine.tree("empty")));
}

/// Pushing takes no rights but those to read; pulling does.
#[test]
fn an_ordinary_user_can_push() {
    use std::os::unix::process::CommandExt as _;
    let Some(server) = Server::new() else { return };
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can run a program as another user");
        return;
    }
    let public = orrery_testing::PublicDirectory::new();
    let program = public.copy(crate::PROGRAM);
    let tree = public.directory_of(65534, "tree");
    fs::write(tree.join("file"), "bytes").unwrap();
    let run = |words: &[&str], paths: &[&Path]| {
        let mut command = Command::new(&program);
        command.args(words).args(paths).env("HOME", "/nonexistent").uid(65534).gid(65534).output().unwrap()
    };
    let reference = server.reference("x");
    succeeded(&run(&["push", "--plain-http"], &[&tree, Path::new(&reference)]));
    fs::write(tree.join("secret"), "bytes of root").unwrap();
    fs::set_permissions(tree.join("secret"), Permissions::from_mode(0o600)).unwrap();
    let error = failed(&run(&["push", "--plain-http"], &[&tree, Path::new(&reference)]));
    assert!(error.contains("cannot read") && error.contains("secret"), "{error}");
    let (content, made) =
        (public.directory_of(65534, "content"), public.directory_of(65534, "out").join("made"));
    let words = ["pull", "--plain-http", "--content", content.to_str().unwrap(), &reference];
    let error = failed(&run(&words, &[&made]));
    assert!(error.contains("as root"), "{error}");
    assert!(!made.exists());
}

#[test]
fn what_cannot_be_pushed_sends_nothing() {
    let (machine, Some(server)) = (Machine::new(), Server::new()) else { return };
    let file = machine.path("file");
    fs::write(&file, "").unwrap();
    let digest = format!("{}@{}", server.reference("x"), crate::fake::digest(b""));
    for (tree, reference, wanted) in [
        (machine.path("nothing"), server.reference("x"), "it is no directory"),
        (file, server.reference("x"), "it is no directory"),
        (machine.path(""), digest, "cannot push to a digest"),
    ] {
        let error = failed(&machine.push(&tree, &reference, &[]));
        assert!(error.contains(wanted), "{error}");
    }
    let bad = machine.push(&machine.path(""), "no-host/x", &[]);
    assert_eq!(bad.status.code(), Some(2));
    assert!(server.requests().is_empty(), "{:?}", server.requests());
}
