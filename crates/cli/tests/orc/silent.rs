//! Descriptors whose file system never answers: they are examined, refused, closed, and discarded with a connection.

use std::fs::{self, File};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use orrery_orc_client::Client;
use orrery_orc_client::protocol::{Content, FileRange, RelocatedData, Reply, Request, decode_reply};
use orrery_testing::Killed;
use rustix::fs::{AtFlags, StatxFlags};
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketType};

use crate::confidential::as_user;
use crate::hostile::{raw_at, send};
use crate::stuck_files::{Overlay, Silence, StuckFiles};
use crate::{Store, bytes, children, connect, eventually, signal, start, zombie};

/// A user whose files hang, and another one.
const STUCK: u32 = 65_526;
const OTHER: u32 = 65_525;
/// How long another user may have to wait: long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
const PAGE: FileRange = FileRange { flags: 0, offset: 0, length: 4096 };

/// Runs `act` as a user, in a thread that is given up if it does not return.
fn within_patience<T: Send + 'static>(what: &str, uid: u32, act: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, done) = mpsc::channel();
    std::thread::spawn(move || sender.send(as_user(uid, act)));
    done.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{what}: not in {} s", PATIENCE.as_secs()))
}

/// A store, and a directory with files that hang.
struct Trial {
    store: Store,
    work: tempfile::TempDir,
    inherited: OwnedFd,
}

impl Trial {
    fn new() -> Self {
        let work = tempfile::tempdir().unwrap();
        let inherited = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::bind(&inherited, &SocketAddrUnix::new(work.path().join("inherited")).unwrap()).unwrap();
        rustix::net::listen(&inherited, 8).unwrap();
        let store = Store::new(&[]);
        fs::set_permissions(work.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        for directory in ["stuck", "lower", "merged"] {
            fs::create_dir(work.path().join(directory)).unwrap();
        }
        fs::write(work.path().join("own"), bytes(40_960, 3)).unwrap();
        // The store learns here that the file system of the local files is local.
        let _ = store.client().open(&work.path().join("own")).map(drop);
        Self { store, work, inherited }
    }

    /// Has a connection made at the listening socket that the store has inherited from here.
    fn is_inherited_used(&self) {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::connect(&socket, &rustix::net::getsockname(&self.inherited).unwrap()).unwrap();
        rustix::net::accept(&self.inherited).unwrap();
    }

    fn at(&self, name: &str) -> PathBuf {
        self.work.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.store.path().join("socket")
    }

    /// Sends a message of the user [`STUCK`] with descriptors of these files, through a connection of its own.
    fn send(&self, message: Vec<u8>, files: &[PathBuf]) -> OwnedFd {
        let path = self.socket();
        let socket = within_patience("a connection", STUCK, move || raw_at(&path));
        // They are closed at once: nothing of a file system that hangs is left open here.
        let files: Vec<File> = files.iter().map(|path| File::open(path).unwrap()).collect();
        let descriptors: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
        send(&socket, &message, &descriptors).unwrap();
        socket
    }

    /// Sends descriptors of files in every way in which a client can, `rounds` times.
    fn send_all(&self, directory: &Path, rounds: usize) -> Vec<OwnedFd> {
        let files: Vec<PathBuf> = (0..4).map(|number| directory.join(format!("file{number}"))).collect();
        let name = RelocatedData { key: 7, address: 1 << 40, start: 4096, length: 4096 };
        let content = Content::Descriptor { length: 4096 };
        let messages = [
            (Request::Files(vec![PAGE; 4]).encode(1), 4),
            // Too many descriptors, none that is needed, none that is of use, and no message.
            (Request::Files(vec![PAGE; 3]).encode(1), 4),
            (Request::Report.encode(1), 2),
            (Request::Register { flags: 0, expected: None, content }.encode(1), 1),
            (Request::RegisterRelocated(name).encode(1), 1),
            (vec![1; 40], 2),
        ];
        let all = (0..rounds).flat_map(|_| messages.iter());
        all.map(|(message, many)| self.send(message.clone(), &files[..*many])).collect()
    }

    /// Returns whether the store can know that the local files hang on nothing: other files of an account that hangs
    /// have no thread.
    fn has_local_mount(&self) -> bool {
        const UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
        const OVERLAYFS: i64 = 0x794c_7630;
        let found = rustix::fs::statx(rustix::fs::CWD, self.work.path(), AtFlags::empty(), UNIQUE).unwrap();
        let kind = rustix::fs::statfs(self.work.path()).unwrap().f_type;
        let is_known = found.stx_mask & UNIQUE.bits() != 0 && kind != OVERLAYFS;
        if !is_known {
            orrery_testing::skipped!(
                "mounts have no unique numbers here, or temporary files lie in an overlay"
            );
        }
        is_known
    }

    /// Has a local file served to a user.
    fn is_served(&self, uid: u32, seed: u64) {
        let (path, socket) = (self.at(&format!("own{seed}")), self.socket());
        fs::write(&path, bytes(20_480, seed)).unwrap();
        within_patience("a local file", uid, move || {
            let (socket, file) = (raw_at(&socket), File::open(&path).unwrap());
            send(&socket, &Request::Files(vec![PAGE]).encode(5), &[file.as_fd()]).unwrap();
            let mut buffer = vec![0; 65_536];
            let (length, _) = rustix::net::recv(&socket, &mut buffer[..], RecvFlags::empty()).unwrap();
            match decode_reply(&buffer[..length]) {
                Some((5, Reply::FileRanges(replies))) => assert_eq!(replies[0].refusal, None),
                other => panic!("{other:?}"),
            }
        });
    }

    /// Returns the server that answers when `server` does not any more.
    fn wait_for_other_server(&self, server: i32) -> i32 {
        let path = self.store.path().to_owned();
        within_patience("a new server", 0, move || {
            loop {
                let report = connect(&path).report();
                match report.ok().and_then(|report| i32::try_from(report.pid).ok()) {
                    Some(pid) if pid != server => return pid,
                    _ => std::thread::sleep(Duration::from_millis(20)),
                }
            }
        })
    }

    fn server(&self) -> i32 {
        let path = self.store.path().to_owned();
        within_patience("a report", 0, move || {
            i32::try_from(Client::connect_to(&path).unwrap().report().unwrap().pid).unwrap()
        })
    }
}

/// The threads of a process that are for clients' files.
fn readers(pid: i32) -> usize {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let name = |task: &fs::DirEntry| fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    tasks.filter(|task| name(task) == "reader\n").count()
}

/// Returns whether a process has a file open, other than some.
fn has_open(path: &Path, except: &[i32]) -> bool {
    let processes = fs::read_dir("/proc").unwrap().flatten().filter(|process| {
        let number = process.file_name().to_str().and_then(|name| name.parse().ok());
        number.is_some_and(|number: i32| !except.contains(&number))
    });
    processes
        .flat_map(|process| fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten())
        .any(|descriptor| fs::read_link(descriptor.path()).is_ok_and(|target| target == path))
}

/// A process that does nothing until this is dropped.
struct Stopped(i32);

impl Stopped {
    fn new(pid: i32) -> Self {
        signal(pid, libc::SIGSTOP);
        let stopped = Self(pid);
        eventually("the process stops", || {
            let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
            let stat = |task: fs::DirEntry| fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            tasks.map(stat).all(|stat| stat.rsplit(')').next().unwrap_or_default().starts_with(" T"))
        });
        stopped
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        signal(self.0, libc::SIGCONT);
    }
}

fn is_gone(pid: i32) -> bool {
    !Path::new(&format!("/proc/{pid}")).exists() || zombie(pid) && readers(pid) == 0
}

/// What hangs, and whether the store sees it through an overlay.
const KINDS: [(Silence, bool); 5] = [
    (Silence::Attributes, false),
    (Silence::FileSystem, false),
    (Silence::Flushes, false),
    (Silence::Attributes, true),
    (Silence::Flushes, true),
];

/// Runs `test` with each kind of file system that can be mounted here.
fn for_each_kind(test: impl Fn(&mut Trial, &Path, StuckFiles)) {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can mount file systems and become another user");
        return;
    }
    for (silence, is_below_overlay) in KINDS {
        eprintln!("{silence:?}, below an overlay: {is_below_overlay}");
        let mut trial = Trial::new();
        let files = match StuckFiles::silent(&trial.at("stuck"), silence) {
            Ok(files) => files,
            Err(error) => {
                orrery_testing::skipped!("no FUSE: {error}");
                return;
            }
        };
        if !is_below_overlay {
            let directory = trial.at("stuck");
            test(&mut trial, &directory, files);
            continue;
        }
        let (lower, merged) = ([trial.at("stuck"), trial.at("lower")], trial.at("merged"));
        match Overlay::mount(&[&lower[0], &lower[1]], &merged) {
            Ok(overlay) => {
                test(&mut trial, &merged, files);
                drop(overlay);
            }
            Err(error) => orrery_testing::skipped!("no overlay over FUSE: {error}"),
        }
    }
}

/// Without that, a child that another test makes at that moment would hang for good: it holds the daemon's device, too.
#[test]
fn children_that_inherit_a_file_for_a_moment_execute_their_programs() {
    for_each_kind(|_, directory, files| {
        let inherited = File::open(directory.join("file")).unwrap();
        let mut child = Killed(std::process::Command::new("true").spawn().unwrap());
        eventually("the child ends", || child.0.try_wait().unwrap().is_some());
        assert_eq!(files.waiting(), 0);
        drop(inherited);
    });
}

#[test]
fn daemons_that_never_answer_delay_no_other_user() {
    for_each_kind(|trial, directory, files| {
        let few = trial.send_all(directory, 2);
        eventually("the store hangs", || files.waiting() >= 1);
        trial.is_served(OTHER, 10);
        if trial.has_local_mount() {
            trial.is_served(STUCK, 11);
        }
        // More than the store has threads for.
        let mut many = trial.send_all(directory, 12);
        trial.is_served(OTHER, 12);
        many.extend(trial.send_all(directory, 1));
        trial.is_served(OTHER, 13);
        let server = trial.server();
        // Those that have read a local file end soon.
        eventually("the account has four threads at most", || readers(server) <= 4);
        // When the daemon is gone everything is as it was.
        drop(files);
        eventually("no thread is left", || readers(server) == 0);
        trial.is_served(STUCK, 14);
        assert_eq!(trial.server(), server, "the same one");
        drop((few, many));
    });
}

#[test]
fn a_server_that_hangs_is_replaced_and_a_store_that_hangs_ends() {
    for_each_kind(|trial, directory, files| {
        let client = trial.store.client();
        let object = client.register(&bytes(9000, 20), orrery_orc_client::Flags::none()).unwrap();
        let sockets = trial.send_all(directory, 1);
        eventually("the store hangs", || files.waiting() >= 1);
        let killed = trial.server();
        signal(killed, libc::SIGKILL);
        let server = trial.wait_for_other_server(killed);
        assert!(readers(killed) > 0, "the old one still hangs");
        trial.is_inherited_used();
        // The connection goes on, with its holds, and others come.
        let id = object.id();
        let (client, length) = within_patience("an object", 0, move || {
            let length = client.request(id).unwrap().len();
            (client, length)
        });
        assert_eq!(length, 9000);
        trial.is_served(OTHER, 21);
        // Of those that the first server had, none is left without an end when its client is disconnected.
        let unanswered = files.waiting();
        let more = trial.send_all(directory, 1);
        eventually("the new store hangs", || files.waiting() > unanswered);
        signal(i32::try_from(trial.store.supervisor.id()).unwrap(), libc::SIGTERM);
        eventually("the store ends", || trial.store.supervisor.try_wait().unwrap().is_some());
        for (number, socket) in sockets.iter().chain(&more).enumerate() {
            let mut buffer = [0; 4096];
            let end =
                || rustix::net::recv(socket, &mut buffer[..], RecvFlags::DONTWAIT).map(|(length, _)| length);
            let mut end = end;
            eventually(&format!("the end of connection {number}"), || {
                matches!(end(), Ok(0) | Err(rustix::io::Errno::CONNRESET))
            });
        }
        trial.is_inherited_used();
        // Another one can use the directory.
        trial.store.supervisor = start(trial.store.path(), &[]);
        trial.wait_for_other_server(server);
        drop(client);
        drop(files);
        eventually("the old ones are gone", || is_gone(killed) && is_gone(server));
    });
}

#[test]
fn a_supervisor_that_the_server_has_started_replaces_a_server_that_hangs() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can mount file systems and become another user");
        return;
    }
    let mut trial = Trial::new();
    let files = match StuckFiles::silent(&trial.at("stuck"), Silence::Flushes) {
        Ok(files) => files,
        Err(error) => {
            orrery_testing::skipped!("no FUSE: {error}");
            return;
        }
    };
    let server = trial.server();
    trial.store.supervisor.kill().unwrap();
    trial.store.supervisor.wait().unwrap();
    eventually("a new supervisor", || !children(server).is_empty());
    // The new one has everything before the next request is handled.
    assert_eq!(trial.server(), server);
    let sockets = trial.send_all(&trial.at("stuck"), 1);
    eventually("the store hangs", || files.waiting() >= 1);
    signal(server, libc::SIGKILL);
    trial.wait_for_other_server(server);
    assert!(readers(server) > 0, "the old one still hangs");
    trial.is_served(OTHER, 40);
    drop(files);
    eventually("the old one is gone", || is_gone(server));
    drop(sockets);
}

#[test]
fn discarded_messages_delay_no_other_user() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can mount file systems and become another user");
        return;
    }
    let trial = Trial::new();
    // It ends when the daemon has, and so it has to be dropped later.
    let writer;
    let files = match StuckFiles::silent(&trial.at("stuck"), Silence::Writes) {
        Ok(files) => files,
        Err(error) => {
            orrery_testing::skipped!("no FUSE: {error}");
            return;
        }
    };
    let server = trial.server();
    let stopped = Stopped::new(server);
    let path = trial.at("stuck").join("file");
    let sockets: Vec<OwnedFd> = (0..8)
        .map(|_| {
            // A farewell, after which nothing more is received.
            let socket = trial.send(Vec::new(), &[]);
            let file = File::open(&path).unwrap();
            send(&socket, b"more", &[file.as_fd()]).unwrap();
            socket
        })
        .collect();
    // Children of other tests that inherited the file would wait, too, while they execute their programs.
    eventually("no child has the file", || !has_open(&path, &[std::process::id().cast_signed(), server]));
    // It waits for the daemon when it ends, as all do now that close the last descriptor of the file.
    let write = format!("exec head -c 4096 /dev/zero 1<>{}", path.display());
    writer = Killed(std::process::Command::new("sh").args(["-c", &write]).spawn().unwrap());
    eventually("the writer hangs", || files.waiting() >= 1);
    drop(stopped);
    for socket in &sockets {
        let mut buffer = [0; 16];
        let mut receive =
            || rustix::net::recv(socket, &mut buffer[..], RecvFlags::DONTWAIT).map(|found| found.0);
        let is_end = |found| matches!(found, Ok(0) | Err(rustix::io::Errno::CONNRESET));
        eventually("the end of the connection", || is_end(receive()));
    }
    eventually("a thread discards messages", || readers(server) > 0);
    trial.is_served(OTHER, 30);
    if trial.has_local_mount() {
        trial.is_served(STUCK, 31);
    }
    // Neither does the supervisor wait.
    signal(server, libc::SIGKILL);
    trial.wait_for_other_server(server);
    trial.is_served(OTHER, 32);
    drop(files);
    drop(writer);
    eventually("the old one is gone", || is_gone(server));
    let server = trial.server();
    eventually("no thread is left", || readers(server) == 0);
}

#[test]
fn reports_show_how_many_threads_hang() {
    for_each_kind(|trial, directory, files| {
        let stuck = || {
            let socket = raw_at(&trial.socket());
            send(&socket, &Request::Report.encode(3), &[]).unwrap();
            let mut buffer = vec![0; 4096];
            let received =
                orrery_sys::scm::receive(socket.as_fd(), &mut buffer, 1, RecvFlags::empty()).unwrap();
            let Some((3, Reply::Report { length })) = decode_reply(&buffer[..received.length]) else {
                panic!("no report");
            };
            let mut text = vec![0; usize::try_from(length).unwrap()];
            rustix::io::pread(&received.fds[0], &mut text[..], 0).unwrap();
            let report: serde_json::Value = serde_json::from_slice(&text).unwrap();
            report["stuck_threads"].as_u64().unwrap()
        };
        assert_eq!(stuck(), 0);
        let sockets = trial.send_all(directory, 1);
        let printed = || {
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_orrery"));
            let output = command.args(["orc", "stat", "--directory"]).arg(trial.socket()).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        assert!(!printed().contains("answer"), "{}", printed());
        eventually("a thread hangs", || stuck() > 0);
        let text = printed();
        let said = ["1 thread of the store waits for a file", "threads of the store wait for files"];
        assert!(said.iter().any(|said| text.contains(said)), "{text}");
        drop(files);
        eventually("none hangs", || stuck() == 0);
        drop(sockets);
    });
}
