//! A file system whose files can be opened, and for whose server (fuse(4)) the kernel waits forever when they are used.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const RELEASEDIR: u32 = 29;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;
/// The size of each file, in bytes.
const SIZE: u64 = 1 << 20;

/// What the server never answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Silence {
    /// read(2), of any process.
    Reads,
    /// fstat(2) of other processes than the test.
    Attributes,
    /// fstatfs(2) of other processes than the test.
    FileSystem,
    /// close(2) of other processes than the test.
    Flushes,
    /// Writing out what was written, which stays in memory until then (`FUSE_WRITEBACK_CACHE`): close(2) of any process, also of the
    /// last descriptor in a message.
    Writes,
}

impl Silence {
    /// Returns whether a request is left unanswered, of the thread `tid`. The test itself has to be able to open the
    /// files and to close them: the server is a thread of it. So have children that threads of it have made and that execute their program
    /// just now, which closes what they inherited: they have the thread's name until that is done, and would hang within
    /// execve(2), and reading their `/proc/PID/stat` would hang, too.
    fn includes(self, operation: u32, tid: u32) -> bool {
        let is_other = || {
            let name = |thread: PathBuf| std::fs::read(thread.join("comm")).unwrap_or_default();
            let own = Path::new("/proc/self/task");
            let asks = name(Path::new("/proc").join(tid.to_string()));
            let mut threads = own.read_dir().into_iter().flatten().flatten();
            !own.join(tid.to_string()).exists() && !threads.any(|thread| name(thread.path()) == asks)
        };
        match self {
            Self::Reads => operation == READ,
            Self::Attributes => operation == GETATTR && is_other(),
            Self::FileSystem => operation == STATFS && is_other(),
            Self::Flushes => operation == FLUSH && is_other(),
            Self::Writes => operation == WRITE,
        }
    }
}

/// The mounted file system. Each name in it is a file of 1 MiB that belongs to root; dropping it ends all that waits with an error.
#[derive(Debug)]
pub(crate) struct StuckFiles {
    path: PathBuf,
    unanswered: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
    server: Option<JoinHandle<()>>,
}

impl StuckFiles {
    /// Mounts it at `path`; returns why it cannot be mounted otherwise, as to users without the right to.
    ///
    /// # Errors
    /// Those of opening `/dev/fuse` and of mount(2).
    pub(crate) fn mount(path: &Path) -> std::io::Result<Self> {
        Self::silent(path, Silence::Reads)
    }

    /// Mounts one that never answers requests of one kind.
    ///
    /// # Errors
    /// As for [`mount`](Self::mount).
    pub(crate) fn silent(path: &Path, silence: Silence) -> std::io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt as _;

        let device =
            File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/fuse")?;
        let fd = device.as_raw_fd();
        mount("fuse", path, &format!("fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other"))?;
        let unanswered = Arc::new(AtomicUsize::new(0));
        let is_over = Arc::new(AtomicBool::new(false));
        let (counted, ends) = (Arc::clone(&unanswered), Arc::clone(&is_over));
        let server = std::thread::spawn(move || serve(&device, silence, &counted, &ends));
        // A server that knows no FUSE_FLUSH: the kernel learns that here, as it could wait for one when this process is killed.
        drop(File::open(path.join("first")));
        Ok(Self { path: path.to_owned(), unanswered, is_over, server: Some(server) })
    }

    /// Returns how many requests were left without an answer.
    pub(crate) fn waiting(&self) -> usize {
        self.unanswered.load(Ordering::Acquire)
    }
}

impl Drop for StuckFiles {
    fn drop(&mut self) {
        // The kernel ends all requests when nobody has the device open any more.
        self.is_over.store(true, Ordering::Release);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
        unmount(&self.path);
    }
}

fn serve(device: &File, silence: Silence, unanswered: &AtomicUsize, is_over: &AtomicBool) {
    let mut inodes: HashMap<Vec<u8>, u64> = HashMap::new();
    let mut buffer = vec![0; 1 << 20];
    while !is_over.load(Ordering::Acquire) {
        let length = match (&*device).read(&mut buffer) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(2));
                continue;
            }
            Ok(length) if length >= 40 => length,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            // A request that was interrupted before it was read.
            Err(error) if error.raw_os_error() == Some(2) => continue,
            _ => return,
        };
        let word = |at: usize| u32::from_le_bytes(buffer[at..at + 4].try_into().unwrap_or_default());
        let long = |at: usize| u64::from_le_bytes(buffer[at..at + 8].try_into().unwrap_or_default());
        let (operation, unique, node) = (word(4), long(8), long(16));
        if silence.includes(operation, word(32)) {
            unanswered.fetch_add(1, Ordering::AcqRel);
            continue;
        }
        // Attributes that never hold are asked for each time.
        let valid = if silence == Silence::Attributes { 0 } else { 3600_u64 };
        let answer = match operation {
            INIT => Some(initialized(silence)),
            LOOKUP => {
                let name = buffer[40..length - 1].to_vec();
                let next = inodes.len() as u64 + 2;
                let inode = *inodes.entry(name).or_insert(next);
                // nodeid, generation, entry_valid, attr_valid, the parts of seconds: zeros.
                let mut entry: Vec<u8> =
                    [inode, 0, 3600, valid].iter().flat_map(|word| word.to_le_bytes()).collect();
                entry.extend([0; 8]);
                entry.extend(attributes(inode));
                Some(entry)
            }
            GETATTR => {
                let mut found = valid.to_le_bytes().to_vec();
                found.extend([0; 8]);
                found.extend(attributes(node));
                Some(found)
            }
            OPEN | OPENDIR => Some(vec![0; 16]),
            STATFS => Some(vec![0; 80]),
            RELEASE | RELEASEDIR => Some(Vec::new()),
            // Otherwise it is not known, which the kernel learns when the first file is closed.
            FLUSH if silence == Silence::Flushes => Some(Vec::new()),
            FORGET | BATCH_FORGET | INTERRUPT => continue,
            _ => None,
        };
        let body = answer.as_deref().unwrap_or_default();
        let error: i32 = if answer.is_some() { 0 } else { -libc::ENOSYS };
        let mut reply = u32::try_from(16 + body.len()).unwrap_or(16).to_le_bytes().to_vec();
        reply.extend(error.to_le_bytes());
        reply.extend(unique.to_le_bytes());
        reply.extend(body);
        if (&*device).write_all(&reply).is_err() {
            return;
        }
    }
}

/// `struct fuse_init_out`: version 7.31, reads of up to 128 KiB.
fn initialized(silence: Silence) -> Vec<u8> {
    const WRITEBACK_CACHE: u32 = 1 << 16;
    let flags = if silence == Silence::Writes { WRITEBACK_CACHE } else { 0 };
    let mut reply = Vec::new();
    for word in [7_u32, 31, 0, flags, 0, 1 << 17, 1] {
        reply.extend(word.to_le_bytes());
    }
    reply.resize(64, 0);
    reply
}

/// `struct fuse_attr`: the directory 1, and files.
fn attributes(inode: u64) -> Vec<u8> {
    let (mode, size) = if inode == 1 { (0o40_755, 0) } else { (0o100_644, SIZE) };
    let mut found = Vec::new();
    for word in [inode, size, size / 512, 1, 1, 1] {
        found.extend(word.to_le_bytes());
    }
    for word in [0_u32, 0, 0, mode, 1, 0, 0, 0, 4096, 0] {
        found.extend(word.to_le_bytes());
    }
    found
}

fn mount(kind: &str, path: &Path, options: &str) -> std::io::Result<()> {
    let text = |text: &str| std::ffi::CString::new(text).map_err(std::io::Error::other);
    let (kind, path, options) = (text(kind)?, text(&path.to_string_lossy())?, text(options)?);
    // SAFETY: all are strings that end in a zero byte and live until the call returns.
    let result =
        unsafe { libc::mount(kind.as_ptr(), path.as_ptr(), kind.as_ptr(), 0, options.as_ptr().cast()) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

fn unmount(path: &Path) {
    if let Ok(path) = std::ffi::CString::new(path.to_string_lossy().as_bytes()) {
        // SAFETY: the path is a string that ends in a zero byte and lives until the call returns.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    }
}

/// Mounts an overlay (`overlay` in the kernel's documentation) that shows `lower`, read-only; unmounted when it is dropped.
#[derive(Debug)]
pub(crate) struct Overlay(PathBuf);

impl Overlay {
    /// Mounts it at `path`.
    ///
    /// # Errors
    /// Those of mount(2).
    pub(crate) fn mount(lower: &[&Path], path: &Path) -> std::io::Result<Self> {
        let lower: Vec<String> = lower.iter().map(|path| path.display().to_string()).collect();
        mount("overlay", path, &format!("lowerdir={}", lower.join(":")))?;
        Ok(Self(path.to_owned()))
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        unmount(&self.0);
    }
}
