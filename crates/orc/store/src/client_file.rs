//! Reads descriptors that clients send, which may be of any kind and whose bytes may change meanwhile.
//!
//! The bytes are read into the file that will be sealed, and hashed there, because nobody else can write to it: what was
//! hashed is what is handed out. They are read by pread(2), never through a mapping of the client's file, which the client
//! could truncate.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, mpsc};
use std::time::Duration;

use rustix::fs::{AtFlags, FileType, OFlags, Stat, StatVfsMountFlags, StatxFlags};

use crate::named::index;
use crate::objects::backing_file::exhausted;
use crate::trust_domain::TrustDomain;
use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::{FileRange, Refusal};
use orrery_orc_wire::sealed_file::UnsealedFile;
use orrery_sys::PAGE;

/// Shorter objects without names lie in memory, even if there is a disk.
const MIN_ON_DISK: usize = 256 << 10;
/// Bytes read and hashed at a time.
const CHUNK: usize = 1 << 20;
/// How long reading a file may take.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// How many readers of an account may hang before it is refused.
const MAX_STUCK: usize = 4;

/// File systems that reply by themselves (statfs(2)): ext2 to ext4, XFS, Btrfs, tmpfs, ramfs, overlayfs, squashfs, EROFS,
/// F2FS, ZFS, bcachefs, ISO 9660.
const LOCAL: [u64; 12] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0x0102_1994,
    0x8584_58f6,
    0x794c_7630,
    0x7371_7368,
    0xe0f5_e1e2,
    0xf2f5_2010,
    0x2fc1_2fc1,
    0xca45_1a4e,
    0x9660,
];
/// Of these, those whose files have inodes and times from an image, which another image may have as well: squashfs, EROFS, ISO 9660,
/// and overlayfs, which may lie over them.
const FROM_IMAGES: [u64; 4] = [0x7371_7368, 0xe0f5_e1e2, 0x9660, 0x794c_7630];
const TMPFS: u64 = 0x0102_1994;

/// Where a copy is created.
#[derive(Clone, Debug, Default)]
pub(crate) struct CopyDestination {
    /// The directory of objects with names; the next one serves if there is none, or no room in it.
    pub(crate) named: Option<PathBuf>,
    /// The directory on disk for large objects without names; memory serves if there is none.
    pub(crate) disk: Option<PathBuf>,
}

impl CopyDestination {
    /// Creates a file for `length` bytes.
    ///
    /// # Errors
    /// [`Refusal::Exhausted`].
    pub(crate) fn create(&self, label: &str, length: usize) -> Result<UnsealedFile, Refusal> {
        let named = self.named.as_deref().map(|directory| UnsealedFile::named(directory, length));
        if let Some(Ok(copy)) = named {
            return Ok(copy);
        }
        let disk = self.disk.as_deref().filter(|_| length >= MIN_ON_DISK);
        match disk.map(|directory| UnsealedFile::on_disk(directory, label, length)) {
            Some(Ok(copy)) => Ok(copy),
            // The disk may be full.
            Some(Err(_)) | None => UnsealedFile::new(label, length).map_err(exhausted),
        }
    }
}

/// Identifies a range of a file in its present state: as long as all of this is the same, so are the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileKey {
    mount: Mount,
    device: u64,
    inode: u64,
    size: i64,
    modified: (i64, u64),
    changed: (i64, u64),
    offset: u64,
    length: u64,
}

/// The mount through which a file was opened. Device numbers are used again, and an image has its inodes and times from where it
/// was made: without the mount, the files of an image would be taken for those of the image that it replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Mount {
    /// A number that no other mount gets until the machine is started again (`STATX_MNT_ID_UNIQUE`, Linux 6.8).
    Unique(u64),
    /// A number that is used again when the mount has gone; 0 if there is none.
    Reused(u64),
}

impl Mount {
    fn of(fd: BorrowedFd<'_>) -> Self {
        /// `STATX_MNT_ID_UNIQUE`.
        const UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
        // Tests ask for what older kernels have, as of the auditor.
        static IS_OLD: LazyLock<bool> =
            LazyLock::new(|| std::env::var_os("ORRERY_ORC_KERNEL").is_some_and(|kernel| kernel == "old"));
        if *IS_OLD {
            return Self::Reused(0);
        }
        let wanted = StatxFlags::MNT_ID | UNIQUE;
        match rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, wanted) {
            Ok(found) if found.stx_mask & UNIQUE.bits() != 0 => Self::Unique(found.stx_mnt_id),
            Ok(found) if found.stx_mask & StatxFlags::MNT_ID.bits() != 0 => Self::Reused(found.stx_mnt_id),
            _ => Self::Reused(0),
        }
    }
}

impl FileKey {
    /// Returns whether another file never has the same key, now or later.
    ///
    /// On kernels without unique numbers of mounts this relies on the time of change, which a file system that is mounted for
    /// writing has from the clock.
    pub(crate) fn is_lasting(&self, fd: BorrowedFd<'_>) -> bool {
        let is_written = || {
            let mount = rustix::fs::fstatvfs(fd);
            mount.is_ok_and(|mount| !mount.f_flag.contains(StatVfsMountFlags::RDONLY))
        };
        matches!(self.mount, Mount::Unique(_)) || !FROM_IMAGES.contains(&file_system(fd)) && is_written()
    }

    /// Returns the device and the inode.
    pub(crate) fn file(&self) -> (u64, u64) {
        (self.device, self.inode)
    }

    /// Returns the size of the whole file.
    pub(crate) fn size(&self) -> u64 {
        self.size.cast_unsigned()
    }

    /// Returns the file's key in the index, and how many bytes of it are known; `None` if they are not its first ones.
    pub(crate) fn in_index(&self) -> Option<(index::Key, u64)> {
        let time = |(seconds, nanoseconds): (i64, u64)| {
            seconds.cast_unsigned().wrapping_mul(1_000_000_000).wrapping_add(nanoseconds)
        };
        let size = self.size.cast_unsigned();
        let (Mount::Unique(mount) | Mount::Reused(mount)) = self.mount;
        let (modified, changed) = (time(self.modified), time(self.changed));
        let key = [index::FILE, self.device, self.inode, size, modified, changed, mount, 0];
        (self.offset == 0).then_some((key, self.length))
    }

    fn of(fd: BorrowedFd<'_>, stat: &Stat, range: &FileRange) -> Self {
        #[expect(clippy::unnecessary_cast, reason = "the types of these fields differ between architectures")]
        Self {
            mount: Mount::of(fd),
            device: stat.st_dev as u64,
            inode: stat.st_ino,
            size: stat.st_size,
            modified: (stat.st_mtime as i64, stat.st_mtime_nsec as u64),
            changed: (stat.st_ctime as i64, stat.st_ctime_nsec as u64),
            offset: range.offset,
            length: range.length,
        }
    }
}

/// A range that may be read, and the owner and mode of its file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExaminedRange {
    pub(crate) key: FileKey,
    pub(crate) owner: u32,
    pub(crate) mode: u32,
    /// Whether no code may be run from the mount through which it was opened.
    pub(crate) noexec: bool,
    /// Whether the key is that of no other file, so that what was read may be remembered by it.
    pub(crate) is_lasting: bool,
}

fn file_system(fd: BorrowedFd<'_>) -> u64 {
    #[expect(clippy::cast_sign_loss, reason = "a magic number, whatever its type")]
    rustix::fs::fstatfs(fd).map_or(0, |found| found.f_type as u64)
}

/// Returns whether reading the file depends on no other process or host.
pub(crate) fn is_local(fd: BorrowedFd<'_>) -> bool {
    LOCAL.contains(&file_system(fd))
}

fn readable(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| !flags.intersects(OFlags::WRONLY | OFlags::PATH))
}

/// Checks a range without reading it.
///
/// # Errors
/// The refusal that the client gets.
pub(crate) fn examine(fd: BorrowedFd<'_>, range: &FileRange, largest: u64) -> Result<ExaminedRange, Refusal> {
    let stat = rustix::fs::fstat(fd).map_err(|_| Refusal::Descriptor)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || !readable(fd) {
        return Err(Refusal::Descriptor);
    }
    let page = PAGE as u64;
    if range.length == 0 || range.length > largest {
        return Err(Refusal::Size);
    }
    if !range.offset.is_multiple_of(page) || !range.length.is_multiple_of(page) {
        return Err(Refusal::Malformed);
    }
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if range.offset.checked_add(range.length).is_none_or(|end| end > size.next_multiple_of(page)) {
        return Err(Refusal::Changed);
    }
    if !is_local(fd) {
        return Err(Refusal::FileSystem);
    }
    let mount = rustix::fs::fstatvfs(fd).map_err(|_| Refusal::Descriptor)?;
    let noexec = mount.f_flag.contains(StatVfsMountFlags::NOEXEC);
    let key = FileKey::of(fd, &stat, range);
    let is_lasting = key.is_lasting(fd);
    Ok(ExaminedRange { key, owner: stat.st_uid, mode: stat.st_mode, noexec, is_lasting })
}

/// Copies the first `length` bytes of a memory file into one that `/proc/PID/maps` shows as `label`; returns their name and the
/// copy.
///
/// # Errors
/// The refusal that the client gets.
pub(crate) fn copy_memory(
    fd: BorrowedFd<'_>,
    label: &str,
    length: u64,
    largest: u64,
    destination: &CopyDestination,
) -> Result<(ObjectId, UnsealedFile), Refusal> {
    if length == 0 || length > largest {
        return Err(Refusal::Size);
    }
    if rustix::fs::fcntl_get_seals(fd).is_err() || file_system(fd) != TMPFS || !readable(fd) {
        return Err(Refusal::Descriptor);
    }
    let size = rustix::fs::fstat(fd).map_err(|_| Refusal::Descriptor)?.st_size;
    // No memory is allocated for bytes that are not there.
    if u64::try_from(size).unwrap_or(0) < length {
        return Err(Refusal::Changed);
    }
    let copy = destination.create(label, usize::try_from(length).map_err(|_| Refusal::Size)?)?;
    read(fd, copy, 0, length)
}

/// Reads `there` bytes from `offset` into a copy, which may be longer, and hashes all of it.
fn read(
    fd: BorrowedFd<'_>,
    mut copy: UnsealedFile,
    offset: u64,
    there: u64,
) -> Result<(ObjectId, UnsealedFile), Refusal> {
    let length = copy.length();
    let there = usize::try_from(there).map_err(|_| Refusal::Size)?.min(length);
    let mut hash = blake3::Hasher::new();
    let mut buffer = Vec::new();
    if copy.bytes().is_empty() {
        buffer.resize(CHUNK, 0);
    }
    let mut filled = 0;
    while filled < there {
        let end = there.min(filled + CHUNK);
        // A copy in memory is read into directly; one on disk is written from the buffer.
        let chunk = match copy.bytes().get_mut(filled..end) {
            Some(bytes) => bytes,
            None => buffer.get_mut(..end - filled).ok_or(Refusal::Size)?,
        };
        let count = rustix::io::retry_on_intr(|| rustix::io::pread(fd, &mut *chunk, offset + filled as u64))
            .map_err(|_| Refusal::Descriptor)?;
        if count == 0 {
            return Err(Refusal::Changed);
        }
        hash.update(&chunk[..count]);
        if !buffer.is_empty() {
            copy.write_at(filled, &buffer[..count]).map_err(exhausted)?;
        }
        filled += count;
    }
    // The rest is zeros.
    while filled < length {
        let zeros = (length - filled).min(PAGE);
        hash.update(&[0; PAGE][..zeros]);
        filled += zeros;
    }
    Ok((ObjectId(*hash.finalize().as_bytes()), copy))
}

/// Reads ranges of files, each in a thread of its own that may hang: a user who can mount file systems can make reading last
/// forever, even through one of the [`LOCAL`] kind.
#[derive(Debug, Default)]
pub(crate) struct ReaderThreads {
    stuck: Arc<Mutex<HashMap<TrustDomain, usize>>>,
}

impl ReaderThreads {
    /// Copies a range that was examined; returns its name and the copy.
    ///
    /// # Errors
    /// The refusal that the client gets.
    pub(crate) fn copy(
        &self,
        account: &TrustDomain,
        fd: OwnedFd,
        range: FileRange,
        examined: ExaminedRange,
        destination: CopyDestination,
    ) -> Result<(ObjectId, UnsealedFile), Refusal> {
        self.within(account, READ_TIMEOUT, move || copy_range(&fd, &range, &examined, &destination))
    }

    /// Returns the name of a range that was examined, without a copy.
    ///
    /// # Errors
    /// The refusal that the client gets.
    pub(crate) fn hash(
        &self,
        account: &TrustDomain,
        fd: OwnedFd,
        range: FileRange,
        examined: ExaminedRange,
    ) -> Result<ObjectId, Refusal> {
        self.within(account, READ_TIMEOUT, move || hash_range(&fd, &range, &examined))
    }

    fn within<T: Send + 'static>(
        &self,
        account: &TrustDomain,
        timeout: Duration,
        job: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        fn lock(
            stuck: &Mutex<HashMap<TrustDomain, usize>>,
        ) -> std::sync::MutexGuard<'_, HashMap<TrustDomain, usize>> {
            stuck.lock().unwrap_or_else(PoisonError::into_inner)
        }
        {
            let mut stuck = lock(&self.stuck);
            let count = stuck.entry(account.clone()).or_insert(0);
            // Each request under way counts; those that do not hang are soon done.
            if *count >= MAX_STUCK {
                return Err(Refusal::Busy);
            }
            *count += 1;
        }
        let (reply, result) = mpsc::sync_channel(1);
        let (shared, of) = (Arc::clone(&self.stuck), account.clone());
        let started = std::thread::Builder::new().name("reader".into()).spawn(move || {
            let done = job();
            let mut stuck = lock(&shared);
            let left = stuck.get(&of).map_or(0, |count| count - 1);
            if left == 0 {
                stuck.remove(&of);
            } else {
                stuck.insert(of, left);
            }
            drop(stuck);
            // Last, because the client may send its next request at once.
            let _ = reply.send(done);
        });
        if started.is_err() {
            if let Some(count) = lock(&self.stuck).get_mut(account) {
                *count -= 1;
            }
            return Err(Refusal::Exhausted);
        }
        result.recv_timeout(timeout).unwrap_or(Err(Refusal::FileSystem))
    }
}

/// Returns the path of a file in the mount namespace in which it was opened.
pub(crate) fn file_path(fd: &OwnedFd) -> PathBuf {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap_or_default()
}

/// Returns the name that `/proc/PID/maps` shows of a copy: that of the file it was first read from.
pub(crate) fn file_label(fd: &OwnedFd) -> String {
    let path = file_path(fd);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let plain = name.chars().filter(|c| c.is_ascii_graphic()).take(100);
    format!("orc:{}", plain.collect::<String>())
}

/// Returns how many bytes of a range lie within the file.
fn length_in_file(range: &FileRange, examined: &ExaminedRange) -> u64 {
    let size = u64::try_from(examined.key.size).unwrap_or(0);
    size.saturating_sub(range.offset).min(range.length)
}

fn check_unchanged(fd: &OwnedFd, range: &FileRange, examined: &ExaminedRange) -> Result<(), Refusal> {
    let after = rustix::fs::fstat(fd).map_err(|_| Refusal::Descriptor)?;
    if FileKey::of(fd.as_fd(), &after, range) == examined.key { Ok(()) } else { Err(Refusal::Changed) }
}

fn copy_range(
    fd: &OwnedFd,
    range: &FileRange,
    examined: &ExaminedRange,
    destination: &CopyDestination,
) -> Result<(ObjectId, UnsealedFile), Refusal> {
    let length = usize::try_from(range.length).map_err(|_| Refusal::Size)?;
    let copy = destination.create(&file_label(fd), length)?;
    let read = read(fd.as_fd(), copy, range.offset, length_in_file(range, examined))?;
    check_unchanged(fd, range, examined)?;
    Ok(read)
}

fn hash_range(fd: &OwnedFd, range: &FileRange, examined: &ExaminedRange) -> Result<ObjectId, Refusal> {
    let (mut hash, mut buffer) = (blake3::Hasher::new(), vec![0; CHUNK]);
    let (mut done, end) = (0, length_in_file(range, examined));
    while done < end {
        let most = usize::try_from(end - done).unwrap_or(CHUNK).min(CHUNK);
        let count =
            rustix::io::retry_on_intr(|| rustix::io::pread(fd, &mut buffer[..most], range.offset + done))
                .map_err(|_| Refusal::Descriptor)?;
        if count == 0 {
            return Err(Refusal::Changed);
        }
        hash.update(&buffer[..count]);
        done += count as u64;
    }
    // The rest of the last page is zeros.
    let zeros = usize::try_from(range.length - done).unwrap_or(0).min(PAGE);
    hash.update(&[0; PAGE][..zeros]);
    check_unchanged(fd, range, examined)?;
    Ok(ObjectId(*hash.finalize().as_bytes()))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_range_is_the_pages_of_the_file() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 5000]).unwrap();
        let range = FileRange { flags: 0, offset: 4096, length: 4096 };
        let examined = examine(file.as_fd(), &range, 1 << 20).unwrap();
        let readers = ReaderThreads::default();
        let (id, _) = readers
            .copy(
                &TrustDomain::User(1),
                file.try_clone().unwrap().into(),
                range,
                examined,
                CopyDestination::default(),
            )
            .unwrap();
        let name = readers.hash(&TrustDomain::User(1), file.try_clone().unwrap().into(), range, examined);
        assert_eq!(name, Ok(id));
        let mut page = vec![7; 904];
        page.resize(4096, 0);
        assert_eq!(id, ObjectId::of(&page));
        file.write_all(b"more").unwrap();
        let changed = readers.copy(
            &TrustDomain::User(1),
            file.try_clone().unwrap().into(),
            range,
            examined,
            CopyDestination::default(),
        );
        assert_eq!(changed.unwrap_err(), Refusal::Changed);
        let refused = |offset, length| {
            examine(file.as_fd(), &FileRange { flags: 0, offset, length }, 1 << 20).unwrap_err()
        };
        assert_eq!(refused(1, 4096), Refusal::Malformed);
        assert_eq!(refused(0, 0), Refusal::Size);
        assert_eq!(refused(0, 2 << 20), Refusal::Size);
        assert_eq!(refused(8192, 4096), Refusal::Changed);
        assert_eq!(refused(u64::MAX - 4095, 4096), Refusal::Changed);
    }

    #[test]
    fn other_descriptors_are_refused() {
        let range = FileRange { flags: 0, offset: 0, length: 4096 };
        let (pipe, _writer) = std::io::pipe().unwrap();
        assert_eq!(examine(pipe.as_fd(), &range, 1 << 20).unwrap_err(), Refusal::Descriptor);
        let proc = std::fs::File::open("/proc/self/exe").unwrap();
        let only_named = rustix::fs::open("/proc/self/exe", OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        assert_eq!(examine(only_named.as_fd(), &range, 1 << 20).unwrap_err(), Refusal::Descriptor);
        assert!(examine(proc.as_fd(), &range, 1 << 20).is_ok());
        assert_eq!(
            copy_memory(pipe.as_fd(), "test", 1, 10, &CopyDestination::default()).unwrap_err(),
            Refusal::Descriptor
        );
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(
            copy_memory(memory.as_fd(), "test", 1, 10, &CopyDestination::default()).unwrap_err(),
            Refusal::Changed,
            "shorter than told"
        );
        assert_eq!(
            copy_memory(memory.as_fd(), "test", 11, 10, &CopyDestination::default()).unwrap_err(),
            Refusal::Size
        );
    }

    #[test]
    fn readers_that_are_done_do_not_count() {
        let readers = ReaderThreads::default();
        for _ in 0..200 {
            assert_eq!(readers.within(&TrustDomain::User(1), READ_TIMEOUT, || Ok(())), Ok(()));
            assert!(readers.stuck.lock().unwrap().is_empty());
        }
    }

    #[test]
    fn readers_that_hang_cost_their_own_account() {
        let readers = ReaderThreads::default();
        let (hang, wait) = mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let (bad, good) = (TrustDomain::User(1), TrustDomain::User(2));
        for _ in 0..MAX_STUCK {
            let wait = Arc::clone(&wait);
            let stuck = move || {
                let _ = wait.lock().unwrap().recv();
                Ok(())
            };
            assert_eq!(readers.within(&bad, Duration::from_millis(1), stuck), Err(Refusal::FileSystem));
        }
        assert_eq!(readers.within(&bad, READ_TIMEOUT, || Ok(())), Err(Refusal::Busy));
        assert_eq!(readers.within(&good, READ_TIMEOUT, || Ok(5)), Ok(5));
        drop(hang);
        while readers.within(&bad, READ_TIMEOUT, || Ok(())) == Err(Refusal::Busy) {
            std::thread::yield_now();
        }
    }
}
