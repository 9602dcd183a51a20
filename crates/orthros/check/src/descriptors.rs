//! Descriptors that cannot be carried over, or not as they are.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::fs;
use std::io::Read as _;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::peers::peers;
use crate::process::Process;
use crate::report::{Findings, Verdict};
use crate::sockets::{self, Socket};

const MOST_LOOKS: usize = 5;
const ESTABLISHED: u32 = 1;
const CLOSED: u32 = 7;
const LISTENING: u32 = 10;
/// Devices that hold nothing.
const DEVICES: &[&str] = &["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];
/// What the kernel knows without a file, and the rescue rebuilds.
const ANONYMOUS: &[&str] = &["[eventfd]", "[eventpoll]", "[timerfd]", "[signalfd]", "inotify", "[inotify]"];
/// File systems whose unwritten contents are carried over: ext4 by writing them back, those in memory by copying.
const EXT4: i64 = 0xef53;
const IN_MEMORY: &[i64] = &[0x0102_1994, 0x8584_58f6];
/// Those that hold nothing of their own: proc, sysfs, cgroup2, cgroup, devtmpfs' siblings.
const VIRTUAL: &[i64] = &[0x9fa0, 0x6265_6572, 0x6367_7270, 0x0027_e0eb, 0x1cd1];
const PROC: i64 = 0x9fa0;
/// Those to whose files no path leads: nsfs, and that of message queues.
const NOWHERE: &[i64] = &[0x6e73_6673, 0x1980_0202];
const HUGE: i64 = 0x9584_58f6;
/// A file without a name may hold so many bytes.
pub(crate) const MOST_NAMELESS: u64 = 64 << 20;

/// An open file of a process.
pub(crate) struct Descriptor {
    pid: i32,
    number: u32,
    link: PathBuf,
    /// The way to it that `/proc` offers.
    place: PathBuf,
    info: String,
    pub(crate) inode: u64,
}

impl Descriptor {
    fn name(&self) -> String {
        format!("descriptor {} ({})", self.number, self.link.display())
    }

    /// Returns a number in its `fdinfo`.
    fn info(&self, name: &str) -> Option<u64> {
        let line = self.info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().parse().ok()
    }

    /// `O_RDONLY`, `O_WRONLY` or `O_RDWR`.
    fn access(&self) -> i32 {
        let line = self.info.lines().find_map(|line| line.strip_prefix("flags:"));
        line.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok()).unwrap_or(0) & libc::O_ACCMODE
    }
}

/// The descriptors of all processes; those of `root` must be readable.
pub(crate) fn all(processes: &[Process], root: i32) -> Result<Vec<Descriptor>> {
    let mut found = Vec::new();
    for process in processes.iter().filter(|process| !process.has_ended()) {
        let path = process.path("fd");
        let entries = match fs::read_dir(&path) {
            Ok(entries) => entries,
            Err(error) if process.pid == root => return Err(Error::Read { path, error }),
            Err(_) => continue,
        };
        for entry in entries.flatten() {
            let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            let place = entry.path();
            let Ok(link) = fs::read_link(&place) else { continue };
            let info = process.text(&format!("fdinfo/{number}"));
            let inode = fs::metadata(&place).map_or(0, |metadata| metadata.ino());
            found.push(Descriptor { pid: process.pid, number, link, place, info, inode });
        }
    }
    Ok(found)
}

/// A finding without its process: verdict, reason, way out.
type Judged = Option<(Verdict, String, &'static str)>;

fn hung_up(why: impl Into<String>, way_out: &'static str) -> Judged {
    Some((Verdict::HungUp, why.into(), way_out))
}

fn lost(why: impl Into<String>, way_out: &'static str) -> Judged {
    Some((Verdict::Lost, why.into(), way_out))
}

/// What judging a descriptor takes to know about all of them.
struct Known<'s> {
    processes: &'s [Process],
    descriptors: &'s [Descriptor],
    /// The inodes of all files that some process of the service has open.
    inodes: BTreeSet<u64>,
    sockets: BTreeMap<u64, Socket>,
    peers: BTreeMap<u64, u64>,
    /// Terminals of which the service has the side that serves, and those of which it has the other.
    masters: BTreeSet<u64>,
    slaves: BTreeSet<u64>,
    /// Pipes that the service reads, and those that it writes.
    read: BTreeSet<u64>,
    written: BTreeSet<u64>,
}

/// Checks the file descriptors of all processes. What a process has twice is reported once.
pub(crate) fn check(processes: &[Process], descriptors: &[Descriptor], findings: &mut Findings) {
    let mut known = Known {
        processes,
        descriptors,
        inodes: descriptors.iter().map(|descriptor| descriptor.inode).collect(),
        sockets: BTreeMap::new(),
        peers: BTreeMap::new(),
        masters: BTreeSet::new(),
        slaves: BTreeSet::new(),
        read: BTreeSet::new(),
        written: BTreeSet::new(),
    };
    known.find_sockets();
    let keeper = processes.first().and_then(Process::keeper);
    for entry in keeper.and_then(|path| fs::read_dir(path.join("fd")).ok()).into_iter().flatten().flatten() {
        // It reads what the service prints.
        known.read.extend(fs::metadata(entry.path()).map(|metadata| metadata.ino()));
    }
    for descriptor in descriptors {
        let link = descriptor.link.to_string_lossy();
        known.masters.extend(descriptor.info("tty-index"));
        known.slaves.extend(link.strip_prefix("/dev/pts/").and_then(|number| number.parse::<u64>().ok()));
        if link.starts_with("pipe:") {
            let access = descriptor.access();
            if access != libc::O_WRONLY {
                known.read.insert(descriptor.inode);
            }
            if access != libc::O_RDONLY {
                known.written.insert(descriptor.inode);
            }
        }
    }
    let mut reported = BTreeSet::new();
    for descriptor in descriptors {
        if let Some((verdict, why, way_out)) = known.judge(descriptor)
            && reported.insert((descriptor.pid, descriptor.inode, descriptor.link.clone()))
        {
            findings.add(descriptor.pid, descriptor.name(), verdict, why, way_out);
        }
    }
}

impl Known<'_> {
    /// Looks the sockets up. Tables that change while they are read may leave some out: those are looked for again.
    fn find_sockets(&mut self) {
        let Some(root) = self.processes.first() else { return };
        for _ in 0..MOST_LOOKS {
            self.sockets.extend(sockets::of(root));
            self.peers.extend(peers().unwrap_or_default());
            self.sockets.extend(self.peers.keys().map(|&inode| (inode, Socket::Unix)));
            let is_known = |descriptor: &Descriptor| {
                !descriptor.link.to_string_lossy().starts_with("socket:")
                    || self.sockets.contains_key(&descriptor.inode)
            };
            if self.descriptors.iter().all(is_known) {
                return;
            }
        }
    }

    fn judge(&self, descriptor: &Descriptor) -> Judged {
        let link = descriptor.link.to_string_lossy();
        if let Some(name) = link.strip_prefix("anon_inode:") {
            return anonymous(name, descriptor);
        }
        if link.starts_with("socket:") {
            return self.socket(descriptor);
        }
        if link.starts_with("pipe:") {
            let both = self.read.contains(&descriptor.inode) && self.written.contains(&descriptor.inode);
            return if both {
                None
            } else {
                lost(
                    "nobody of the service has the other end of this pipe",
                    "give the service a file, or /dev/null",
                )
            };
        }
        let Ok(metadata) = fs::metadata(&descriptor.place) else { return None };
        let kind = metadata.file_type();
        if kind.is_block_device() {
            return hung_up("devices are not carried over", "use files");
        }
        if kind.is_char_device() {
            return self.device(descriptor, &link);
        }
        file(descriptor, &link, &metadata)
    }

    fn device(&self, descriptor: &Descriptor, link: &str) -> Judged {
        let away = "nobody of the service has the other side of this terminal";
        let way_out = "let the service serve its terminal (orrery-guest terminal), or give it /dev/null";
        if let Some(index) = descriptor.info("tty-index") {
            return if self.slaves.contains(&index) { None } else { hung_up(away, way_out) };
        }
        if let Some(Ok(index)) = link.strip_prefix("/dev/pts/").map(str::parse::<u64>) {
            return if self.masters.contains(&index) { None } else { hung_up(away, way_out) };
        }
        if DEVICES.contains(&link) {
            None
        } else {
            hung_up("devices are not carried over", "keep devices out of the service")
        }
    }

    fn socket(&self, descriptor: &Descriptor) -> Judged {
        // Its first path stands in the table of TCP sockets with the same inode.
        if protocol(&descriptor.place).as_deref() == Some("MPTCP") {
            return hung_up(
                "MPTCP is not carried over",
                "guests of a pair offer TCP in its place; elsewhere, set net.mptcp.enabled=0 before the program starts",
            );
        }
        match self.sockets.get(&descriptor.inode) {
            Some(Socket::Tcp { state: LISTENING, waiting }) if *waiting > 0 => lost(
                format!("{waiting} connections wait to be accepted"),
                "accept sooner; their clients get a reset, and may connect again",
            ),
            Some(Socket::Tcp { state: ESTABLISHED | CLOSED | LISTENING, .. }) => None,
            Some(Socket::Tcp { state, .. }) => hung_up(
                format!("a TCP connection that is being opened or closed (state {state})"),
                "wait, or close it",
            ),
            Some(Socket::Udp { waiting }) if *waiting > 0 => {
                lost(format!("{waiting} bytes were not read; what came over IPv6 is lost"), "read sooner")
            }
            Some(Socket::Udp { .. }) => None,
            Some(Socket::Unix) => match self.peers.get(&descriptor.inode) {
                Some(&peer) if peer != 0 && !self.inodes.contains(&peer) => hung_up(
                    "it is connected to another than the service",
                    "the program must be able to connect again",
                ),
                _ => None,
            },
            Some(Socket::Other(what)) => {
                hung_up(format!("{what} is not carried over"), "the program must be able to open it again")
            }
            None => hung_up(
                "a socket of a family that is not carried over",
                "the program must be able to open it again",
            ),
        }
    }
}

fn anonymous(name: &str, descriptor: &Descriptor) -> Judged {
    if !ANONYMOUS.contains(&name) {
        let why = format!("{name} is not carried over");
        return hung_up(why, "the program must be able to do without it, or to open it again");
    }
    if name == "[timerfd]" && descriptor.info("clockid").is_some_and(|clock| clock > 7) {
        return hung_up("its clock wakes the machine up", "use CLOCK_MONOTONIC or CLOCK_BOOTTIME");
    }
    None
}

fn file(descriptor: &Descriptor, link: &str, metadata: &fs::Metadata) -> Judged {
    let system = file_system(&descriptor.place);
    let is_gone = metadata.nlink() == 0;
    if system == Some(HUGE) {
        let why = "large pages that are asked for by name are not carried over";
        return Some((Verdict::Refused, why.to_owned(), "use transparent large pages"));
    }
    if system.is_some_and(|system| NOWHERE.contains(&system)) {
        return hung_up("namespaces and message queues are not carried over", "open it again");
    }
    if system == Some(PROC) && is_about_gone_process(descriptor, link) {
        return hung_up("the process that it tells about is gone", "close it");
    }
    let is_memfd = link.starts_with("/memfd:");
    match system {
        _ if is_gone && metadata.is_file() && metadata.len() > MOST_NAMELESS && !is_memfd => {
            let why = "it has no name any more, and is too large to be put beside the images";
            Some((Verdict::Refused, why.to_owned(), "keep its name while it is open"))
        }
        Some(system) if IN_MEMORY.contains(&system) || VIRTUAL.contains(&system) => None,
        Some(EXT4) => None,
        _ if is_memfd => None,
        _ if descriptor.access() == libc::O_RDONLY && !is_gone => None,
        _ => lost(
            "what was written to it and not to its disk yet: only ext4 and memory are written back",
            "put it on an ext4, or call fsync",
        ),
    }
}

/// Returns whether a file of `/proc` is about a process that is gone. Its path may be that of another one here: PIDs
/// are those of a namespace.
fn is_about_gone_process(descriptor: &Descriptor, link: &str) -> bool {
    let is_of_process =
        link.strip_prefix("/proc/").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let cannot_read = || {
        let read = fs::File::open(&descriptor.place).and_then(|mut file| file.read(&mut [0]));
        read.is_err_and(|error| error.raw_os_error() == Some(libc::ESRCH))
    };
    is_of_process && (link.ends_with(" (deleted)") || cannot_read())
}

/// Returns the name of a socket's protocol, which the kernel offers as an extended attribute.
fn protocol(place: &Path) -> Option<String> {
    let path = CString::new(place.as_os_str().as_bytes()).ok()?;
    let mut name = [0_u8; 64];
    // SAFETY: both strings end with a zero, and the call writes at most as many bytes as the array has.
    let length = unsafe {
        libc::getxattr(path.as_ptr(), c"system.sockprotoname".as_ptr(), name.as_mut_ptr().cast(), name.len())
    };
    let name = name.get(..usize::try_from(length).ok()?)?;
    Some(String::from_utf8_lossy(name).trim_end_matches('\0').to_owned())
}

/// The type of the file system that a file is on, as `statfs` gives it.
fn file_system(place: &Path) -> Option<i64> {
    let path = CString::new(place.as_os_str().as_bytes()).ok()?;
    let mut found = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the path ends with a zero, the structure is writable, and zeros are one.
    let (result, found) = unsafe { (libc::statfs(path.as_ptr(), found.as_mut_ptr()), found.assume_init()) };
    (result == 0).then_some(found.f_type)
}
