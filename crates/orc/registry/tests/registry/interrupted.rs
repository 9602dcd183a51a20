//! Pulls that do not come to their end: there is no tree, what was fetched stays, and the next one goes on.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use orrery_testing::{Killed, eventually};
use rustix::process::{Pid, Signal, kill_process};

use crate::fake::{Fake, Reply, Served, digest, status};
use crate::{Machine, failed, succeeded};

const FILES: [(&str, &[u8]); 4] = [("a", b"one"), ("b", b"two"), ("c", b"three"), ("d", b"four")];

fn fetched(fake: &Fake, bytes: &[u8]) -> usize {
    let line = format!("GET /v2/x/blobs/{}", digest(bytes));
    fake.lines().iter().filter(|found| **found == line).count()
}

#[test]
fn a_pull_that_failed_goes_on_with_what_is_left() {
    let Some(machine) = Machine::with_store() else { return };
    let mut broken = Served::tree(&FILES);
    broken.set(&format!("blobs/{}", digest(b"four")), status(404, "", b""));
    let broken = broken.serve();
    let error = failed(&machine.pull(&broken.reference("x"), "tree", &["--jobs", "1"]));
    assert!(error.contains("404"), "{error}");
    assert!(!machine.tree("tree").exists() && machine.left_over().is_empty(), "{:?}", machine.left_over());
    assert_eq!(machine.contents(), 3);
    let whole = Served::tree(&FILES).serve();
    succeeded(&machine.pull(&whole.reference("x"), "tree", &[]));
    assert_eq!([0, 0, 0, 1], FILES.map(|(_, bytes)| fetched(&whole, bytes)));
    assert_eq!(std::fs::read(machine.tree("tree").join("c")).unwrap(), b"three");
}

fn ended_by(signal: Signal, status: Option<i32>) {
    let Some(machine) = Machine::with_store() else { return };
    let mut stuck = Served::tree(&FILES);
    stuck.set(
        &format!("blobs/{}", digest(b"four")),
        Reply::Hang(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfo".to_vec()),
    );
    let stuck = stuck.serve();
    let mut command = machine.pull_command(&stuck.reference("x"), "tree", &["--jobs", "1"]);
    let mut child = Killed(command.stderr(Stdio::null()).spawn().unwrap());
    eventually("the last blob is asked for", || fetched(&stuck, b"four") == 1);
    kill_process(Pid::from_child(&child), signal).unwrap();
    assert_eq!(child.wait().unwrap().code(), status);
    assert!(!machine.tree("tree").exists() && machine.left_over().is_empty(), "{:?}", machine.left_over());
    assert_eq!(machine.contents(), 3);
    let whole = Served::tree(&FILES).serve();
    succeeded(&machine.pull(&whole.reference("x"), "tree", &[]));
    assert_eq!([0, 0, 0, 1], FILES.map(|(_, bytes)| fetched(&whole, bytes)));
}

#[test]
fn an_interrupted_pull_leaves_no_tree() {
    ended_by(Signal::INT, Some(130));
}

#[test]
fn a_pull_that_is_killed_leaves_no_tree() {
    ended_by(Signal::KILL, None);
}

/// What another process left, or is making.
#[test]
fn one_process_makes_a_tree_at_a_time() {
    let Some(machine) = Machine::with_store() else { return };
    let fake = Served::tree(&FILES).serve();
    // As a process leaves it that is killed while it makes the tree.
    let draft = machine.path("out/.tree.draft");
    std::fs::create_dir_all(draft.join("names/deep")).unwrap();
    std::fs::write(draft.join("names/deep/file"), "").unwrap();
    let lock = std::fs::File::open(&draft).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let error = failed(&machine.pull(&fake.reference("x"), "tree", &[]));
    assert!(error.contains("another process makes this tree"), "{error}");
    assert!(draft.join("names/deep/file").exists());
    drop(lock);
    succeeded(&machine.pull(&fake.reference("x"), "tree", &[]));
    assert!(!draft.exists());
    assert_eq!(std::fs::read_dir(machine.tree("tree")).unwrap().count(), FILES.len());
}

/// Failures that pass are tried again, when the registry says so.
#[test]
fn a_registry_that_is_busy_is_asked_again() {
    let Some(machine) = Machine::with_store() else { return };
    let served = Served::tree(&FILES);
    let count = Arc::new(AtomicUsize::new(0));
    let fake = Fake::new(move |request| match count.fetch_add(1, Ordering::Relaxed) {
        0 => status(503, "", b""),
        1 => status(429, "retry-after: 1\r\n", b""),
        // A connection that breaks.
        2 => Reply::Bytes(Vec::new()),
        3 => Reply::Bytes(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{\"".to_vec()),
        _ => served.answer(request),
    });
    let begin = std::time::Instant::now();
    succeeded(&machine.pull(&fake.reference("x"), "tree", &["--jobs", "1"]));
    assert!(begin.elapsed() >= std::time::Duration::from_secs(1));
    assert_eq!(fake.lines().iter().filter(|line| line.contains("/manifests/")).count(), 5);
}
