//! What another user of the machine can see of a store: nothing that is somebody's, at no time.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use orrery_orc_client::protocol::{EXECUTABLE, FileRange};
use orrery_orc_client::{Client, Flags};

use crate::tracer::{can_trace, trace_all};
use crate::{Store, bytes, connect, signal};

const USER: u32 = 65_530;
const STRANGER: u32 = 65_529;
/// Bytes of the files that are shown.
const LENGTH: usize = 400 << 10;

/// Does something as another user, who has no rights and belongs to no group.
pub(crate) fn as_user<T: Send + 'static>(uid: u32, act: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::spawn(move || {
        // SAFETY: the bare system calls change this thread alone, which ends soon.
        unsafe {
            assert_eq!(libc::syscall(libc::SYS_setgroups, 0, 0), 0);
            assert_eq!(libc::syscall(libc::SYS_setresgid, uid, uid, uid), 0);
            assert_eq!(libc::syscall(libc::SYS_setresuid, uid, uid, uid), 0);
        }
        act()
    });
    thread.join().unwrap()
}

/// All that is below a directory, with it, as far as who asks may list it.
fn below(directory: &Path, into: &mut Vec<PathBuf>) {
    into.push(directory.to_owned());
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            below(&entry.path(), into);
        } else {
            into.push(entry.path());
        }
    }
}

fn can_open(path: &Path) -> bool {
    File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW).open(path).is_ok()
}

/// Returns which of these a stranger can read or list.
fn opened(paths: Vec<PathBuf>) -> Vec<PathBuf> {
    as_user(STRANGER, move || paths.into_iter().filter(|path| can_open(path)).collect())
}

/// A store with a disk, a log, a trust domain whose socket others cannot reach, and directories that others may pass through.
struct House {
    store: Store,
    disk: PathBuf,
    socket: PathBuf,
    log: PathBuf,
    room: tempfile::TempDir,
}

impl House {
    fn new() -> Self {
        let room = tempfile::tempdir().unwrap();
        let open = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        open(room.path(), 0o755);
        let private = room.path().join("acme");
        fs::create_dir(&private).unwrap();
        open(&private, 0o700);
        let (socket, disk, log) = (private.join("socket"), room.path().join("disk"), room.path().join("log"));
        let named = format!("acme={}", socket.display());
        let [disk_path, log_path] = [&disk, &log].map(|path| path.to_str().unwrap().to_owned());
        let store = Store::new(&["--trust-domain", &named, "--disk", &disk_path, "--log", &log_path]);
        let _ = (store.client(), connect(&socket));
        Self { store, disk, socket, log, room }
    }

    /// Returns what everybody may open.
    fn is_public(&self, path: &Path) -> bool {
        // The auditor is there, once more for each name that loaders have for its directory.
        let auditors = ["lib", "lib32", "lib64"].map(|name| self.store.path().join(name));
        [self.store.path(), self.room.path(), &self.store.path().join("liborrery-orc.so")].contains(&path)
            || auditors.iter().any(|directory| path.starts_with(directory))
    }

    /// Everything that there is, as the superuser sees it.
    fn everything(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        below(self.store.path(), &mut found);
        below(self.room.path(), &mut found);
        found
    }

    /// Shows the store a new file.
    fn show(client: &Client, seed: u64) {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &bytes(LENGTH, seed)).unwrap();
        let piece = FileRange { flags: 0, offset: 0, length: LENGTH as u64 };
        let (answers, _) = client.files(&[(piece, file.as_fd())]).unwrap();
        assert!(answers[0].refusal.is_none(), "{answers:?}");
    }
}

impl Drop for House {
    fn drop(&mut self) {
        crate::sweep(&self.disk);
        crate::sweep(self.socket.parent().unwrap());
    }
}

fn is_superuser() -> bool {
    let is = rustix::process::geteuid().is_root();
    if !is {
        orrery_testing::skipped!("only root can become another user");
    }
    is
}

/// An object of a trust domain's on the disk: who knows the number in its directory's name is told by the trust domain's index.
fn is_behind_a_number(path: &Path) -> bool {
    let part = path.components().find_map(|part| part.as_os_str().to_str()?.strip_prefix("named-"));
    part.is_some_and(|number| number.len() == 16 && number.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

#[test]
fn strangers_see_nothing_of_what_others_have() {
    if !is_superuser() {
        return;
    }
    let house = House::new();
    let named = connect(&house.socket);
    House::show(&named, 1);
    named.register(&bytes(LENGTH, 2), Flags::none()).unwrap();
    let directory = house.store.path().to_owned();
    as_user(USER, move || House::show(&Client::connect_to(&directory).unwrap(), 3));
    let all = house.everything();
    for private in [&house.log, &house.disk.join("drafts")] {
        assert!(all.contains(private), "{private:?} {all:?}");
    }
    // Of a trust domain's objects only the directory's name is in the way, which a stranger has from nowhere.
    let (numbered, known): (Vec<_>, Vec<_>) = all.into_iter().partition(|path| is_behind_a_number(path));
    let named = known.iter().chain(&numbered).filter(|path| path.to_string_lossy().contains("/orc:"));
    if named.count() < 2 {
        orrery_testing::skipped!("objects have no names here: there is less to be seen");
    }
    let open: Vec<_> = opened(known).into_iter().filter(|path| !house.is_public(path)).collect();
    assert!(open.is_empty(), "{open:?}");
    // Nor can one list a trust domain's directory whose name one has learned.
    let directories: Vec<_> = numbered.into_iter().filter(|path| path.is_dir()).collect();
    assert!(opened(directories).is_empty());
    let (own, room) = (house.store.path().to_owned(), house.room.path().to_owned());
    let mut listed = as_user(STRANGER, move || {
        let mut found = Vec::new();
        below(&own, &mut found);
        below(&room, &mut found);
        found
    });
    listed.retain(|path| path.to_string_lossy().contains("/orc:") || is_behind_a_number(path));
    assert!(listed.is_empty(), "{listed:?}");
    // Nor what the store's processes hold.
    let server = house.store.server();
    let of_process = ["fd", "maps", "mem", "map_files", "environ"];
    let of_process = of_process.map(|name| PathBuf::from(format!("/proc/{server}/{name}")));
    let read = as_user(STRANGER, move || {
        let reads = |path: &PathBuf| fs::read_dir(path).is_ok() || can_open(path) && fs::read(path).is_ok();
        of_process.into_iter().filter(reads).collect::<Vec<_>>()
    });
    assert!(read.is_empty(), "{read:?}");
}

#[test]
fn what_is_being_made_is_seen_by_nobody() {
    if !is_superuser() || !can_trace() {
        return;
    }
    let house = House::new();
    let server = house.store.server();
    let (ready, begun) = mpsc::channel();
    std::thread::scope(|scope| {
        let tracer = scope.spawn(|| {
            let (mut drafts, mut open) = (0, Vec::new());
            let is_draft = |path: &Path| {
                let name = path.file_name().unwrap().to_string_lossy();
                name.starts_with("draft.") || path.starts_with(house.disk.join("drafts"))
            };
            let look = |_| {
                let mut all = house.everything();
                all.retain(|path| is_draft(path) || !is_behind_a_number(path));
                drafts += all.iter().filter(|path| is_draft(path)).count();
                open.extend(opened(all).into_iter().filter(|path| !house.is_public(path)));
            };
            trace_all(server, move || ready.send(()).unwrap(), look).unwrap();
            (drafts, open)
        });
        begun.recv().unwrap();
        House::show(&connect(&house.socket), 1);
        let directory = house.store.path().to_owned();
        as_user(USER, move || House::show(&Client::connect_to(&directory).unwrap(), 2));
        signal(server, libc::SIGKILL);
        let (drafts, open) = tracer.join().unwrap();
        assert!(drafts > 0, "there were none");
        assert!(open.is_empty(), "{open:?}");
    });
}

#[test]
fn trust_domains_whose_sockets_share_a_directory_share_no_names() {
    let room = tempfile::tempdir().unwrap();
    let option = |name: &str| format!("{name}={}", room.path().join(name).display());
    let store = Store::new(&["--trust-domain", &option("a"), "--trust-domain", &option("b")]);
    let _ = store.client();
    for name in ["a", "b"] {
        House::show(&connect(&room.path().join(name)), 1);
    }
    assert!(!room.path().join("objects").exists(), "who can read one's could read the other's");
    let objects = store.client().report().unwrap().objects;
    assert_eq!(objects.len(), 2, "they have them nevertheless: {objects:?}");
}

/// A file system that can be reached by two mounts, of which one is `noexec`.
#[test]
fn what_cannot_be_run_where_it_lies_becomes_no_code() {
    let room = tempfile::tempdir().unwrap();
    let Some(mount) = crate::noexec::Mount::again(room.path()) else { return };
    let store = Store::new(&[]);
    let client = store.client();
    let piece = |flags| FileRange { flags, offset: 0, length: LENGTH as u64 };
    let show = |path: &Path, flags| {
        let file = File::open(path).unwrap();
        client.files(&[(piece(flags), file.as_fd())]).unwrap().0[0].refusal
    };
    for seed in [1, 2] {
        let name = format!("code{seed}");
        fs::write(room.path().join(&name), bytes(LENGTH, seed)).unwrap();
        let (here, there) = (room.path().join(&name), mount.path().join(&name));
        if seed == 1 {
            assert_eq!(show(&there, EXECUTABLE), Some(orrery_orc_client::Refusal::Denied));
        }
        assert_eq!(show(&there, 0), None, "as data it is shared");
        assert_eq!(show(&here, EXECUTABLE), None);
        assert_eq!(
            show(&there, EXECUTABLE),
            Some(orrery_orc_client::Refusal::Denied),
            "although it is known"
        );
    }
}
