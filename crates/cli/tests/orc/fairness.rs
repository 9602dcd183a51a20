//! One user's requests cost that user's turns, and nobody else's.

use std::fs::{self, File};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::Command;

use orrery_orc_client::protocol::{FileRange, Reply, Request, decode_reply};
use orrery_orc_client::{Client, Flags, Refusal};
use rustix::net::RecvFlags;

use crate::confidential::as_user;
use crate::hostile::{raw_at, send};
use crate::stuck_files::{Overlay, StuckFiles};
use crate::{Store, bytes, eventually, refusal};
use orrery_testing::Killed;

/// A user whose files are never read.
const STUCK: u32 = 65_528;

/// Asks for a page of each of the files, each in a connection of its own of the user [`STUCK`].
fn ask_for_each(store: &Store, files: &[File]) -> Vec<OwnedFd> {
    let path = store.path().join("socket");
    let many = files.len();
    let sockets = as_user(STUCK, move || (0..many).map(|_| raw_at(&path)).collect::<Vec<_>>());
    for (socket, file) in sockets.iter().zip(files) {
        let range = FileRange { flags: 0, offset: 0, length: 4096 };
        send(socket, &Request::Files(vec![range]).encode(1), &[file.as_fd()]).unwrap();
    }
    sockets
}

/// The refusal of the file that was asked for, where there is an answer.
fn answer(socket: &OwnedFd) -> Option<Option<Refusal>> {
    let mut buffer = vec![0; 65_536];
    let (length, _) = rustix::net::recv(socket, &mut buffer[..], RecvFlags::DONTWAIT).ok()?;
    match decode_reply(&buffer[..length]) {
        Some((_, Reply::FileRanges(answers))) => Some(answers[0].refusal),
        other => panic!("{other:?}"),
    }
}

#[test]
fn files_that_are_never_read_hold_up_nobody_else() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can mount file systems and become another user");
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let [stuck, lower, merged] = ["stuck", "lower", "merged"].map(|name| work.path().join(name));
    for directory in [&stuck, &lower, &merged] {
        fs::create_dir(directory).unwrap();
    }
    // What hangs in a read can be ended by the file system only, which therefore ends first.
    let store = Store::new(&[]);
    let server = match StuckFiles::mount(&stuck) {
        Ok(server) => server,
        Err(error) => {
            orrery_testing::skipped!("no FUSE: {error}");
            return;
        }
    };
    // An overlay is local by its name, whatever is below it.
    let overlay = match Overlay::mount(&[&stuck, &lower], &merged) {
        Ok(overlay) => overlay,
        Err(error) => {
            orrery_testing::skipped!("no overlay over FUSE: {error}");
            return;
        }
    };
    let files: Vec<File> =
        (0..12).map(|number| File::open(merged.join(format!("file{number}"))).unwrap()).collect();
    let _ = store.client();
    let sockets = ask_for_each(&store, &files);
    eventually("the store reads", || server.waiting() >= 2);
    std::thread::sleep(std::time::Duration::from_millis(300));
    // Everything goes on for others.
    let client = store.client();
    let object = client.register(&bytes(9000, 1), Flags::none()).unwrap();
    let path = work.path().join("own");
    fs::write(&path, bytes(9 << 20, 2)).unwrap();
    client.open(&path).map(drop).unwrap();
    assert_eq!(client.request(object.id()).unwrap().len(), 9000);
    assert_eq!(client.report().unwrap().objects.len(), 2);
    // It was not that the store gave up first.
    let given_up = sockets.iter().filter_map(answer).filter(|refusal| *refusal == Some(Refusal::FileSystem));
    assert_eq!(given_up.count(), 0);
    drop((overlay, server));
}

#[test]
fn all_trust_domains_have_a_bound_together() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can become another user");
        return;
    }
    let store = Store::new(&["--memory", "8M", "--quota", "8M", "--keep", "100000"]);
    let _ = store.client();
    let mut held = Vec::new();
    for uid in 65_510..65_516 {
        let path = store.path().to_owned();
        let objects = as_user(uid, move || {
            let client = Client::connect_to(&path).unwrap();
            let register =
                |seed| client.register(&bytes(200 << 10, u64::from(uid) * 1000 + seed), Flags::none());
            let objects: Vec<_> = (0..50).map_while(|seed| register(seed).ok()).collect();
            assert_eq!(refusal(register(99)), Refusal::Quota);
            objects
        });
        assert!(!objects.is_empty(), "{uid}: each that comes finds room");
        held.push(objects);
    }
    let charged: u64 = store.client().report().unwrap().objects.iter().map(|object| object.charged).sum();
    assert!(charged <= 8 << 20, "{charged}");
    // The shares are what they were when a new server answers.
    let server = store.server();
    crate::signal(server, libc::SIGKILL);
    eventually("a new server", || store.server() != server);
    let path = store.path().to_owned();
    as_user(65_510, move || {
        let client = Client::connect_to(&path).unwrap();
        assert_eq!(refusal(client.register(&bytes(200 << 10, 1), Flags::none())), Refusal::Quota);
    });
    let after: u64 = store.client().report().unwrap().objects.iter().map(|object| object.charged).sum();
    assert_eq!(after, charged, "nothing was lost");
}

/// A user namespace of an ordinary user's, with further user IDs; it ends when this is dropped.
struct UserNamespace(Killed);

impl UserNamespace {
    fn new(owner: u32, map: &str) -> Option<Self> {
        let mut command = Command::new("setpriv");
        command.args([&format!("--reuid={owner}"), "--clear-groups", "unshare", "--user", "sleep", "1000"]);
        let child = Self(Killed(command.spawn().ok()?));
        let pid = child.0.0.id();
        let mut is_there = false;
        for _ in 0..2000 {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            is_there = name == "sleep\n";
            if is_there || name.is_empty() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let write = |file: &str| fs::write(format!("/proc/{pid}/{file}"), map);
        (is_there && write("uid_map").is_ok() && write("gid_map").is_ok()).then_some(child)
    }
}

#[test]
fn user_ids_of_a_users_namespace_share_one_account() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can map user IDs");
        return;
    }
    let Some(namespace) = UserNamespace::new(65_527, "0 0 1\n1 100001 5\n") else {
        orrery_testing::skipped!("no user namespace can be made here");
        return;
    };
    let bin = orrery_testing::PublicDirectory::new();
    let orrery = bin.copy(env!("CARGO_BIN_EXE_orrery"));
    // A share has room for the C library once.
    let store = Store::new(&["--memory", "12M", "--keep", "100000"]);
    let _ = store.client();
    for id in ["1", "2"] {
        let output = Command::new("nsenter")
            .arg(format!("--user=/proc/{}/ns/user", namespace.0.0.id()))
            .args(["--setuid", id, "--setgid", id])
            .arg(&orrery)
            .args(["orc", "run", "--verbose", "--directory"])
            .arg(store.path())
            .args(["--", "/bin/true"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(said.contains("the quota is used up"), id == "2", "{said}");
    }
    let objects = store.client().report().unwrap().objects;
    let charged: u64 = objects.iter().map(|object| object.charged).sum();
    assert!(charged <= 3 << 20, "{objects:?}");
    assert!(objects.iter().any(|object| object.trust_domain == "user 100001"), "{objects:?}");
}

/// Returns how many bytes of a file are in the page cache; `None` where the kernel does not say (cachestat(2), Linux
/// 6.5).
fn cached(file: &File) -> Option<u64> {
    let (whole, mut counted) = ([0_u64; 2], [0_u64; 5]);
    let fd = std::os::fd::AsRawFd::as_raw_fd(file);
    // SAFETY: cachestat reads a range of two words and writes a result of five words, which are the arrays here.
    let result = unsafe { libc::syscall(451, fd, whole.as_ptr(), counted.as_mut_ptr(), 0) };
    (result == 0).then_some(counted[0] * 4096)
}

/// The first bytes of a file, mapped and read.
struct Mapping(*mut std::ffi::c_void, usize);

impl Mapping {
    fn new(file: &File, length: usize) -> Self {
        use rustix::mm::{MapFlags, ProtFlags, mmap};

        // SAFETY: the kernel chooses the address, and the pages are only read.
        let start =
            unsafe { mmap(std::ptr::null_mut(), length, ProtFlags::READ, MapFlags::PRIVATE, file, 0) }
                .unwrap();
        for offset in (0..length).step_by(4096) {
            // SAFETY: within the mapping, whose file has so many bytes.
            unsafe { start.cast::<u8>().add(offset).read_volatile() };
        }
        Self(start, length)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping any more.
        let _ = unsafe { rustix::mm::munmap(self.0, self.1) };
    }
}

#[test]
fn the_store_drops_the_pages_of_files_that_it_has_read() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let store = Store::new(&[]);
    let client = store.client();
    let files = [1, 2].map(|number| {
        let path = directory.path().join(format!("file{number}"));
        // The second one has the bytes of the first.
        fs::write(&path, bytes(400 << 10, 77)).unwrap();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        (path, file)
    });
    if files.iter().any(|(_, file)| cached(file).is_none_or(|bytes| bytes < 400 << 10)) {
        orrery_testing::skipped!("the kernel does not count the cached pages of files, or has dropped them");
        return;
    }
    for (_, file) in &files {
        // As a program has mapped it that is given up later.
        let mapping = Mapping::new(file, 400 << 10);
        let range = FileRange { flags: 0, offset: 0, length: 400 << 10 };
        let (answers, _) = client.files(&[(range, file.as_fd())]).unwrap();
        assert!(answers[0].refusal.is_none());
        assert!(cached(file).unwrap() >= 64 << 10, "which is mapped");
        drop(mapping);
        eventually("the pages are dropped", || cached(file).unwrap() < 64 << 10);
    }
}
