//! Registries that lie: a clear error, no tree, and a store that is unharmed.

use std::time::Duration;

use serde_json::{Value, json};

use crate::fake::{Fake, Reply, Served, digest, ok, status};
use crate::{Machine, failed, succeeded};

const FILES: [(&str, &[u8]); 2] = [("a", b"bytes of a file"), ("b", b"more")];

fn blob(bytes: &[u8]) -> String {
    format!("blobs/{}", digest(bytes))
}

/// Pulls from a registry that lies about something, and returns what the error says. Then an honest one serves the same machine.
fn pull(served: Served, options: &[&str]) -> Option<String> {
    let machine = Machine::with_store()?;
    let fake = served.serve();
    let error = failed(&machine.pull(&fake.reference("x"), "tree", options));
    assert!(error.contains("cannot pull 127.0.0.1"), "{error}");
    assert!(!machine.tree("tree").exists() && machine.left_over().is_empty(), "{:?}", machine.left_over());
    // What is there can be used, and is what it claims to be.
    for path in crate::below(&machine.content()).iter().filter(|path| path.is_file()) {
        let bytes = std::fs::read(path).unwrap();
        assert!(FILES.iter().any(|(_, other)| *other == bytes), "{}", path.display());
    }
    let honest = Served::tree(&FILES).serve();
    succeeded(&machine.pull(&honest.reference("x"), "tree", &[]));
    assert_eq!(std::fs::read(machine.tree("tree").join("a")).unwrap(), FILES[0].1);
    Some(error)
}

fn refuses(what: &str, served: Served, wanted: &str) {
    let Some(error) = pull(served, &[]) else { return };
    assert!(error.contains(wanted), "{what}: {error}");
}

/// A tree of which one path is answered otherwise.
fn with(path: &str, reply: Reply) -> Served {
    let mut served = Served::tree(&FILES);
    served.set(path, reply);
    served
}

#[test]
fn other_bytes_are_refused() {
    let a = blob(FILES[0].1);
    refuses("others", with(&a, ok(b"BYTES of a file")), "the registry sent other bytes, those of sha256:");
    refuses("none", with(&a, ok(b"")), "the registry sends 0 bytes of 15");
    refuses("fewer", with(&a, ok(b"bytes")), "the registry sends 5 bytes of 15");
    refuses("more", with(&a, ok(b"bytes of a file and more")), "the registry sends 24 bytes of 15");
    let head =
        |rest: &str| Reply::Bytes(format!("HTTP/1.1 200 OK\r\nconnection: close\r\n{rest}").into_bytes());
    refuses("more, unannounced", with(&a, head("\r\nbytes of a file and more")), "more than its 15 bytes");
    let chunked = "transfer-encoding: chunked\r\n\r\n";
    refuses(
        "chunks",
        with(&a, head(&format!("{chunked}20\r\n{:32}\r\n0\r\n\r\n", "x"))),
        "more than its 15 bytes",
    );
    refuses("bad chunks", with(&a, head(&format!("{chunked}zz\r\n"))), "cannot fetch the blob");
    refuses("no HTTP", with(&a, Reply::Bytes(b"SSH-2.0\r\n".to_vec())), "cannot fetch the blob");
    refuses("a long head", with(&a, head(&"x: y\r\n".repeat(40_000))), "cannot fetch the blob");
}

/// A body that ends early is asked for again, and then given up.
#[test]
fn bytes_that_are_missing_are_noticed() {
    let a = blob(FILES[0].1);
    let cut = |rest: &str| Reply::Bytes(format!("HTTP/1.1 200 OK\r\n{rest}\r\nbytes").into_bytes());
    let Some(error) = pull(with(&a, cut("content-length: 15\r\n")), &[]) else { return };
    assert!(error.contains("it failed 5 times") && error.contains("after 5 of 15 bytes"), "{error}");
    refuses("unannounced", with(&a, cut("connection: close\r\n")), "after 5 of 15 bytes");
}

/// Whatever a machine is busy with besides: it only makes what is too slow slower.
#[test]
fn a_registry_that_takes_its_time_is_given_up() {
    let a = blob(FILES[0].1);
    let head = b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\nb";
    let drip = |head: &[u8], pause| Reply::Drip(head.to_vec(), Duration::from_millis(pause));
    for (what, served) in [
        ("silence", with(&a, Reply::Hang(Vec::new()))),
        ("a silent blob", with(&a, Reply::Hang(head.to_vec()))),
        ("a silent manifest", with("manifests/latest", Reply::Hang(head.to_vec()))),
        // One byte now and then: within the time for one, but not for all.
        ("a slow head", with(&a, drip(b"HTTP/1.1 200 OK\r\nx: ", 20))),
        ("a slow blob", with(&a, drip(head, 700))),
        ("a slow manifest", with("manifests/latest", drip(b"HTTP/1.1 200 OK\r\n\r\n{", 20))),
    ] {
        let Some(error) = pull(served, &["--timeout", "1s"]) else { return };
        assert!(error.contains("the registry is too slow"), "{what}: {error}");
    }
}

#[test]
fn manifests_are_checked() {
    let latest = "manifests/latest";
    refuses("no JSON", with(latest, ok(b"<html>")), "it is no OCI or Docker manifest");
    refuses("too long", with(latest, ok(&vec![b' '; (4 << 20) + 1])), "more than 4 MiB");
    let claimed = format!("docker-content-digest: {}\r\n", digest(b"other"));
    refuses("another digest", with(latest, status(200, &claimed, b"{}")), "and the registry claims");
    refuses(
        "not there",
        with(
            latest,
            status(404, "", br#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"no \u001b[31mred"}]}"#),
        ),
        "404 Not Found: MANIFEST_UNKNOWN: no [31mred",
    );
    let descriptor =
        |media_type: &str, size: u64| json!({"mediaType": media_type, "digest": digest(b"d"), "size": size});
    let manifest = |config: Value, layers: Value| {
        ok(json!({"schemaVersion": 2, "config": config, "layers": layers}).to_string().as_bytes())
    };
    let listing = "application/vnd.orrery.tree.v1+json";
    let layer = "application/vnd.oci.image.layer.v1.tar+gzip";
    refuses(
        "a huge listing",
        with(latest, manifest(descriptor(listing, 1 << 40), json!([]))),
        "more than 64 MiB",
    );
    refuses(
        "no image",
        with(latest, manifest(descriptor("a/b", 1), json!([descriptor("a/b", 1)]))),
        "it is no image: a layer is of the type",
    );
    refuses(
        "a huge layer",
        with(latest, manifest(descriptor("a/b", 1), json!([descriptor(layer, u64::MAX)]))),
        "more than --limit 64 GiB",
    );
    refuses(
        "many layers",
        with(latest, manifest(descriptor("a/b", 1), json!(vec![descriptor(layer, 1); 600]))),
        "it has 600 layers",
    );
    let index =
        |manifests: Value| ok(json!({"schemaVersion": 2, "manifests": manifests}).to_string().as_bytes());
    refuses("no platform", with(latest, index(json!([]))), "it has no image for linux/");
    let tree = |size: u64| json!({"mediaType": "x", "digest": digest(b"d"), "size": size, "artifactType": "application/vnd.orrery.tree.v1"});
    refuses("a huge manifest", with(latest, index(json!([tree(1 << 40)]))), "more than 4 MiB");
    let mut loops = with(latest, index(json!([tree(100)])));
    loops.set(&format!("manifests/{}", digest(b"d")), index(json!([tree(100)])));
    refuses("another one", loops, "the registry sent another one");
    let inner = json!({"schemaVersion": 2, "manifests": []}).to_string();
    let mut nested = with(
        latest,
        index(
            json!([{"mediaType": "x", "digest": digest(inner.as_bytes()), "size": 1, "artifactType": "application/vnd.orrery.tree.v1"}]),
        ),
    );
    nested.set(&format!("manifests/{}", digest(inner.as_bytes())), ok(inner.as_bytes()));
    refuses("an index in an index", nested, "an index names another index");
}

/// All that can be wrong with a listing has a test beside its parser; here is what it comes to.
#[test]
fn listings_that_lead_elsewhere_make_no_tree() {
    let (bytes, path) = (FILES[0].1, std::env::temp_dir().join("orrery-test-outside"));
    let id = orrery_orc_wire::ObjectId::of(bytes).to_string();
    let top = json!({"path": "", "type": "directory", "mode": "0755", "uid": 0, "gid": 0, "time": [0, 0]});
    let entry = |path: &str, more: Value| {
        let mut entry = json!({"path": path, "type": "file", "mode": "0644", "uid": 0, "gid": 0, "time": [0, 0], "content": 0});
        for (name, value) in more.as_object().unwrap() {
            entry[name] = value.clone();
        }
        entry
    };
    let symlink = json!({"path": "s", "type": "symlink", "target": "/tmp", "mode": "0777", "uid": 0, "gid": 0, "time": [0, 0]});
    let content =
        |blake3: &str, size: u64| json!([{"digest": digest(bytes), "blake3": blake3, "size": size}]);
    let plain = content(&id, bytes.len() as u64);
    let other = orrery_orc_wire::ObjectId::of(b"other").to_string();
    let huge = content(&other, 1 << 60);
    for (contents, entries, wanted) in [
        (&plain, json!([top, entry("../orrery-test-outside", json!({}))]), "`..`"),
        (&plain, json!([top, entry(path.to_str().unwrap(), json!({}))]), "empty name"),
        (
            &plain,
            json!([top, symlink, entry("s/orrery-test-outside", json!({}))]),
            "is below what is no directory",
        ),
        (&plain, json!([top, entry("a", json!({})), entry("a", json!({}))]), "is there twice"),
        (
            &plain,
            json!([top, entry("a", json!({})), {"path": "b", "type": "link", "target": "c"}]),
            "does not stand before it",
        ),
        (&plain, json!([entry("a", json!({}))]), "begins with its top directory"),
        (&plain, json!([]), "is no file's"),
        (&plain, json!([top, entry("a", json!({"content": 1}))]), "not listed"),
        (
            &plain,
            json!([top, entry("a", json!({"xattrs": [["trusted.overlay.redirect", "/etc/shadow"]]}))]),
            "overlays",
        ),
        (&huge, json!([top, entry("a", json!({}))]), "more than --limit 64 GiB"),
        (&content(&other, bytes.len() as u64), json!([top, entry("a", json!({}))]), "and the listing claims"),
    ] {
        let listing = json!({"schema": 1, "contents": contents, "entries": entries}).to_string();
        refuses(&listing, Served::listing(listing.as_bytes(), &FILES), wanted);
        assert!(!path.exists());
    }
    // Cut short, with a digest that fits.
    let whole = json!({"schema": 1, "contents": plain, "entries": [top, entry("a", json!({}))]}).to_string();
    refuses("cut", Served::listing(&whole.as_bytes()[..whole.len() - 3], &FILES), "it is no listing");
}

#[test]
fn no_room_is_noticed_before_anything_is_fetched() {
    let Some(machine) = Machine::with_store() else { return };
    let bytes = FILES[0].1;
    let listing = json!({
        "schema": 1,
        "contents": [{"digest": digest(bytes), "blake3": digest(b"x")[7..], "size": 1_u64 << 60}],
        "entries": [
            {"path": "", "type": "directory", "mode": "0755", "uid": 0, "gid": 0, "time": [0, 0]},
            {"path": "a", "type": "file", "mode": "0644", "uid": 0, "gid": 0, "time": [0, 0], "content": 0},
        ],
    });
    let fake = Served::listing(listing.to_string().as_bytes(), &FILES).serve();
    let error = failed(&machine.pull(&fake.reference("x"), "tree", &["--limit", "8000000T"]));
    assert!(error.contains("it needs 1073741824 GiB, and"), "{error}");
    assert_eq!(fake.lines().len(), 2, "{:?}", fake.lines());
}

#[test]
fn registries_that_send_in_circles_are_left() {
    let Some(machine) = Machine::with_store() else { return };
    // Each address leads to the next.
    let circle = Fake::new(|request| {
        let number = request.line.len();
        status(307, &format!("location: /v2/x/manifests/{}\r\n", "n".repeat(number)), b"")
    });
    let error = failed(&machine.pull(&circle.reference("x"), "tree", &[]));
    assert!(error.contains("redirects more than 5 times"), "{error}");
    assert_eq!(circle.lines().len(), 6);
    for (location, wanted) in [
        ("", "a redirection leads nowhere"),
        ("location: file:///etc/passwd\r\n", "which is no"),
        ("location: x\r\n", "which is no address"),
    ] {
        let fake = Fake::new(move |_| status(302, location, b""));
        let error = failed(&machine.pull(&fake.reference("x"), "tree", &[]));
        assert!(error.contains(wanted), "{error}");
    }
}
