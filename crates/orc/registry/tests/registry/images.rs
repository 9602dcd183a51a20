//! Ordinary images: their root file system, from layers of tar.

use std::fs;
use std::io::Write as _;

use serde_json::json;
use tar::{EntryType, Header};

use crate::server::Server;
use crate::{Machine, failed, result, succeeded};

/// What is in a layer: a path, its type, and bytes or the target of a link.
type Item<'a> = (&'a str, EntryType, &'a str);

const FILE: EntryType = EntryType::Regular;
const DIRECTORY: EntryType = EntryType::Directory;
const SYMLINK: EntryType = EntryType::Symlink;
const LINK: EntryType = EntryType::Link;

/// Makes an archive. Paths are written as they are, also those that no program writes.
fn archive(items: &[Item<'_>]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (path, kind, text) in items {
        let is_link = matches!(*kind, SYMLINK | LINK);
        let bytes = if is_link { &b""[..] } else { text.as_bytes() };
        let mut header = Header::new_gnu();
        header.as_gnu_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
        if is_link {
            header.as_gnu_mut().unwrap().linkname[..text.len()].copy_from_slice(text.as_bytes());
        }
        header.set_entry_type(*kind);
        header.set_mode(if *kind == DIRECTORY { 0o755 } else { 0o640 });
        header.set_uid(12);
        header.set_gid(34);
        header.set_mtime(1_600_000_000);
        header.set_size(bytes.len() as u64);
        header.set_device_major(1).unwrap();
        header.set_device_minor(3).unwrap();
        header.set_cksum();
        archive.append(&header, bytes).unwrap();
    }
    archive.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(bytes).unwrap();
    packed.finish().unwrap()
}

/// Two frames with one between them that has no content, as tools write that unpack parts.
fn zstd(bytes: &[u8]) -> Vec<u8> {
    let frame =
        |bytes: &[u8]| ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest);
    let (one, other) = bytes.split_at(bytes.len() / 2);
    [frame(one), [0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3].to_vec(), frame(other)].concat()
}

/// Puts an image into a registry.
fn put(server: &Server, name: &str, layers: &[(&str, &[u8])]) {
    let repository = name.split(':').next().unwrap();
    let config = server.put_blob(repository, b"{}");
    let layers: Vec<_> = layers
        .iter()
        .map(|(media_type, bytes)| {
            json!({"mediaType": media_type, "digest": server.put_blob(repository, bytes), "size": bytes.len()})
        })
        .collect();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config, "size": 2},
        "layers": layers,
    });
    server.put_manifest(name, "application/vnd.oci.image.manifest.v1+json", &manifest.to_string());
}

const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";

#[test]
fn an_image_becomes_a_tree() {
    let (Some(machine), Some(server)) = (Machine::with_store(), Server::new()) else { return };
    let base = archive(&[
        ("./", DIRECTORY, ""),
        ("usr/lib/", DIRECTORY, ""),
        ("lib", SYMLINK, "usr/lib"),
        ("usr/lib/libc", FILE, "of the base"),
        ("usr/lib/old", FILE, "old"),
        ("etc/", DIRECTORY, ""),
        ("etc/passwd", FILE, "root"),
        ("opaque/one", FILE, "one"),
        ("null", EntryType::Char, ""),
        ("fifo", EntryType::Fifo, ""),
    ]);
    let middle = archive(&[
        ("lib/new", FILE, "by a link"),
        ("usr/lib/.wh.old", FILE, ""),
        ("opaque/.wh..wh..opq", FILE, ""),
        ("opaque/two", FILE, "two"),
        ("hard", LINK, "usr/lib/libc"),
    ]);
    let top = archive(&[("/absolute", FILE, "at the top"), ("etc/passwd", FILE, "of the base")]);
    put(&server, "image:1", &[(GZIP, &gzip(&base)), (ZSTD, &zstd(&middle)), (TAR, &top)]);
    let pulled = result(&machine.pull(&server.reference("image:1"), "tree", &["--json"]));
    assert_eq!(pulled["fetched"]["blobs"], 3);
    let tree = machine.tree("tree");
    let read = |path: &str| fs::read_to_string(tree.join(path)).unwrap();
    assert_eq!((read("lib/libc"), read("lib/new")), ("of the base".into(), "by a link".into()));
    assert_eq!((read("hard"), read("etc/passwd")), ("of the base".into(), "of the base".into()));
    assert_eq!((read("opaque/two"), read("absolute")), ("two".into(), "at the top".into()));
    assert!(!tree.join("opaque/one").exists() && !tree.join("usr/lib/old").exists());
    assert!(tree.join("lib").is_symlink());
    let seen = crate::look(&tree);
    let passwd = seen.iter().find(|line| line.starts_with("\"etc/passwd\"")).unwrap();
    assert!(passwd.contains("100640 12:34 1600000000.000000000"), "{passwd}");
    assert!(
        seen.iter().any(|line| line.starts_with("\"null\" 20640") && line.contains(" 103 ")),
        "{seen:#?}"
    );
    // An image with the same base: its layers are known, also on another repository.
    put(&server, "other:2", &[(GZIP, &gzip(&base)), (TAR, &top)]);
    let before = server.count("GET", "/blobs/");
    let pulled = result(&machine.pull(&server.reference("other:2"), "other", &["--json"]));
    assert_eq!((&pulled["fetched"]["blobs"], &pulled["present"]), (&0.into(), &2.into()));
    assert_eq!(server.count("GET", "/blobs/"), before);
    assert!(machine.tree("other/opaque/one").exists());
    // The tree can go on, as one of Orrery's.
    succeeded(&machine.push(&tree, &server.reference("tree"), &[]));
    succeeded(&machine.pull(&server.reference("tree"), "again", &[]));
    assert_eq!(seen, crate::look(&machine.tree("again")));
}

/// Extended headers of PAX: long names, numbers, fractions of seconds, extended attributes.
#[test]
fn extended_headers_count() {
    let (Some(machine), Some(server)) = (Machine::with_store(), Server::new()) else { return };
    let long = format!("{}/{}", "d".repeat(200), "f".repeat(200));
    let mut archive = tar::Builder::new(Vec::new());
    let extensions: [(&str, &[u8]); 6] = [
        ("path", long.as_bytes()),
        ("uid", b"3000000"),
        ("gid", b"4000000"),
        ("mtime", b"1600000000.25"),
        ("SCHILY.xattr.trusted.x", b"value"),
        ("SCHILY.xattr.trusted.overlay.redirect", b"/etc/shadow"),
    ];
    archive.append_pax_extensions(extensions).unwrap();
    let mut header = Header::new_ustar();
    header.set_path("short").unwrap();
    header.set_mode(0o644);
    header.set_size(5);
    header.set_cksum();
    archive.append(&header, &b"bytes"[..]).unwrap();
    put(&server, "image:1", &[(TAR, &archive.into_inner().unwrap())]);
    succeeded(&machine.pull(&server.reference("image:1"), "tree", &[]));
    let seen = crate::look(&machine.tree("tree"));
    let line = seen.iter().find(|line| line.starts_with(&format!("{long:?}"))).unwrap();
    let wanted = format!("3000000:4000000 1600000000.250000000 0 [(\"trusted.x\", {:?})]", b"value");
    assert!(line.contains(&wanted), "{line}");
}

#[test]
fn archives_that_lead_elsewhere_make_no_tree() {
    let (Some(machine), Some(server)) = (Machine::with_store(), Server::new()) else { return };
    let outside = std::env::temp_dir().join("orrery-test-archive");
    let name = outside.to_str().unwrap();
    for (items, wanted) in [
        (&[("../../../../orrery-test-archive", FILE, "x")][..], "`..`"),
        (&[("a/../../x", FILE, "x")], "`..`"),
        (&[("hard", LINK, "../../etc/passwd")], "`..`"),
        (&[("hard", LINK, "/etc/passwd")], "not there"),
        (&[("s", SYMLINK, "s"), ("s/x", FILE, "x")], "too many symbolic links"),
        (&[("f", FILE, "x"), ("f/x", FILE, "x")], "no directory"),
        (&[("odd", EntryType::new(b'Z'), "")], "a type that is not known"),
        (&[(".", FILE, "x")], "no directory"),
    ] {
        put(&server, "image:1", &[(GZIP, &gzip(&archive(items)))]);
        let error = failed(&machine.pull(&server.reference("image:1"), "tree", &[]));
        assert!(error.contains(wanted), "{items:?}: {error}");
        assert!(
            !machine.tree("tree").exists() && machine.left_over().is_empty(),
            "{:?}",
            machine.left_over()
        );
    }
    // What is below a link to the outside lies inside.
    let temporary = std::env::temp_dir();
    let through = [("out", SYMLINK, temporary.to_str().unwrap()), ("out/orrery-test-archive", FILE, "x")];
    put(&server, "image:1", &[(TAR, &archive(&through))]);
    succeeded(&machine.pull(&server.reference("image:1"), "tree", &[]));
    assert!(machine.tree("tree").join(&name[1..]).is_file());
    assert!(!outside.exists());
}

#[test]
fn damaged_layers_make_no_tree() {
    let (Some(machine), Some(server)) = (Machine::with_store(), Server::new()) else { return };
    let whole = archive(&[("file", FILE, &"some bytes ".repeat(4000))]);
    let zeros = vec![0_u8; 3 << 20];
    let bomb = archive(&[("zeros", FILE, std::str::from_utf8(&zeros).unwrap())]);
    let mut long_name = Header::new_gnu();
    long_name.as_gnu_mut().unwrap().name[..13].copy_from_slice(b"././@LongLink");
    long_name.set_entry_type(EntryType::GNULongName);
    long_name.set_size(1 << 30);
    long_name.set_cksum();
    let long_name = [long_name.as_bytes(), &vec![b'a'; 16 << 20][..]].concat();
    for (what, bytes, wanted) in [
        ("text", b"no archive at all".to_vec(), "cannot read it as an archive"),
        ("cut gzip", gzip(&whole)[..200].to_vec(), "cannot read it as an archive"),
        ("cut zstd", zstd(&whole)[..100].to_vec(), "cannot read it as an archive"),
        ("cut archive", whole[..2000].to_vec(), "cannot read it as an archive"),
        ("bomb", gzip(&bomb), "more bytes than --limit"),
        ("names", gzip(&long_name), "more than 8 MiB of headers"),
    ] {
        put(&server, "image:1", &[(GZIP, &bytes)]);
        let error = failed(&machine.pull(&server.reference("image:1"), "tree", &["--limit", "2M"]));
        assert!(error.contains(wanted), "{what}: {error}");
        assert!(
            !machine.tree("tree").exists() && machine.left_over().is_empty(),
            "{:?}",
            machine.left_over()
        );
    }
}
