//! Bytes out of descriptors that clients send, which may be anything and may change under the reader's hands.
//!
//! The bytes are read into the memory that will be sealed, and hashed there, where nobody else can write: what was hashed
//! is what is handed out. They are read by pread(2), never through a mapping of the client's file, which could
//! be cut short under us.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use rustix::fs::{FileType, OFlags, Stat, StatVfsMountFlags};

use crate::named::index;
use crate::objects::backing_file::exhausted;
use crate::trust_domain::Realm;
use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::{Piece, Refusal};
use orrery_orc_wire::sealed_file::Draft;
use orrery_sys::PAGE;

/// The shortest piece that is worth a file of its own.
const ON_DISK: usize = 256 << 10;
/// Bytes read and hashed at a time.
const CHUNK: usize = 1 << 20;
/// How long a file may take to be read.
const PATIENCE: Duration = Duration::from_secs(30);
/// How many readers of a realm may hang before it is told no.
const MOST_STUCK: usize = 2;

/// File systems that answer by themselves (statfs(2)): ext2 to ext4, XFS, Btrfs, tmpfs, ramfs, overlayfs, squashfs, EROFS,
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
const TMPFS: u64 = 0x0102_1994;

/// Where copies are put.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    /// The folder of objects that have names; where there is none, or no room in it, the next.
    pub(crate) named: Option<PathBuf>,
    /// The folder on disk for large ones that have none; else memory serves.
    pub(crate) disk: Option<PathBuf>,
}

impl Places {
    /// Room for `length` bytes.
    pub(crate) fn draft(&self, label: &str, length: usize) -> Result<Draft, Refusal> {
        let named = self.named.as_deref().map(|folder| Draft::named(folder, length));
        if let Some(Ok(draft)) = named {
            return Ok(draft);
        }
        let disk = self.disk.as_deref().filter(|_| length >= ON_DISK);
        match disk.map(|folder| Draft::on_disk(folder, label, length)) {
            Some(Ok(draft)) => Ok(draft),
            // A full disk, say: memory is as good.
            Some(Err(_)) | None => Draft::new(label, length).map_err(exhausted),
        }
    }
}

/// A part of a file in a certain state: as long as all of this is the same, so are the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileKey {
    device: u64,
    inode: u64,
    size: i64,
    modified: (i64, u64),
    changed: (i64, u64),
    offset: u64,
    length: u64,
}

impl FileKey {
    /// Bytes of the whole file.
    pub(crate) fn size(&self) -> u64 {
        self.size.cast_unsigned()
    }

    /// What the file is known by in a realm's index, and how many bytes of it are known; none where they are not the first
    /// ones.
    pub(crate) fn in_index(&self) -> Option<(index::Key, u64)> {
        let time = |(seconds, nanoseconds): (i64, u64)| {
            seconds.cast_unsigned().wrapping_mul(1_000_000_000).wrapping_add(nanoseconds)
        };
        let size = self.size.cast_unsigned();
        let key = [index::FILE, self.device, self.inode, size, time(self.modified), time(self.changed), 0, 0];
        (self.offset == 0).then_some((key, self.length))
    }

    fn of(stat: &Stat, piece: &Piece) -> Self {
        #[expect(clippy::unnecessary_cast, reason = "the types of these fields differ between architectures")]
        Self {
            device: stat.st_dev as u64,
            inode: stat.st_ino,
            size: stat.st_size,
            modified: (stat.st_mtime as i64, stat.st_mtime_nsec as u64),
            changed: (stat.st_ctime as i64, stat.st_ctime_nsec as u64),
            offset: piece.offset,
            length: piece.length,
        }
    }
}

/// A piece that may be read: what it is, and whose.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shown {
    pub(crate) key: FileKey,
    pub(crate) owner: u32,
    pub(crate) mode: u32,
    /// Whether no code may be run from where it was opened: the same file may be reached through another mount, too.
    pub(crate) noexec: bool,
}

fn file_system(fd: BorrowedFd<'_>) -> u64 {
    #[expect(clippy::cast_sign_loss, reason = "a magic number, whatever its type")]
    rustix::fs::fstatfs(fd).map_or(0, |found| found.f_type as u64)
}

/// Whether the file lies where reading it comes to an end.
pub(crate) fn is_local(fd: BorrowedFd<'_>) -> bool {
    LOCAL.contains(&file_system(fd))
}

fn readable(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| !flags.intersects(OFlags::WRONLY | OFlags::PATH))
}

/// Looks at a piece without reading it.
pub(crate) fn examine(fd: BorrowedFd<'_>, piece: &Piece, largest: u64) -> Result<Shown, Refusal> {
    let stat = rustix::fs::fstat(fd).map_err(|_| Refusal::Descriptor)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || !readable(fd) {
        return Err(Refusal::Descriptor);
    }
    let page = PAGE as u64;
    if piece.length == 0 || piece.length > largest {
        return Err(Refusal::Size);
    }
    if !piece.offset.is_multiple_of(page) || !piece.length.is_multiple_of(page) {
        return Err(Refusal::Malformed);
    }
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if piece.offset.checked_add(piece.length).is_none_or(|end| end > size.next_multiple_of(page)) {
        return Err(Refusal::Changed);
    }
    if !is_local(fd) {
        return Err(Refusal::FileSystem);
    }
    let mount = rustix::fs::fstatvfs(fd).map_err(|_| Refusal::Descriptor)?;
    let noexec = mount.f_flag.contains(StatVfsMountFlags::NOEXEC);
    Ok(Shown { key: FileKey::of(&stat, piece), owner: stat.st_uid, mode: stat.st_mode, noexec })
}

/// Copies the first `length` bytes of a memory file, to be shown as `label`; gives their name and the copy.
pub(crate) fn from_memory(
    fd: BorrowedFd<'_>,
    label: &str,
    length: u64,
    largest: u64,
    places: &Places,
) -> Result<(ObjectId, Draft), Refusal> {
    if length == 0 || length > largest {
        return Err(Refusal::Size);
    }
    if rustix::fs::fcntl_get_seals(fd).is_err() || file_system(fd) != TMPFS || !readable(fd) {
        return Err(Refusal::Descriptor);
    }
    let size = rustix::fs::fstat(fd).map_err(|_| Refusal::Descriptor)?.st_size;
    // Before memory is taken for what is not there.
    if u64::try_from(size).unwrap_or(0) < length {
        return Err(Refusal::Changed);
    }
    let draft = places.draft(label, usize::try_from(length).map_err(|_| Refusal::Size)?)?;
    read(fd, draft, 0, length)
}

/// Reads `there` bytes from `offset` into a draft, and hashes all of it.
fn read(fd: BorrowedFd<'_>, mut draft: Draft, offset: u64, there: u64) -> Result<(ObjectId, Draft), Refusal> {
    let length = draft.length();
    let there = usize::try_from(there).map_err(|_| Refusal::Size)?.min(length);
    let mut hash = blake3::Hasher::new();
    let mut buffer = Vec::new();
    if draft.bytes().is_empty() {
        buffer.resize(CHUNK, 0);
    }
    let mut filled = 0;
    while filled < there {
        let end = there.min(filled + CHUNK);
        // Into memory at once; files are written from here, hashed as they are written.
        let chunk = match draft.bytes().get_mut(filled..end) {
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
            draft.put(filled, &buffer[..count]).map_err(exhausted)?;
        }
        filled += count;
    }
    // Behind the end there are zeros.
    while filled < length {
        let zeros = (length - filled).min(PAGE);
        hash.update(&[0; PAGE][..zeros]);
        filled += zeros;
    }
    Ok((ObjectId(*hash.finalize().as_bytes()), draft))
}

/// Reads pieces of files, each in a thread of its own that may hang: whoever can mount file systems can make reading last for
/// ever, even through one of the [`LOCAL`] kind.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    stuck: Arc<Mutex<HashMap<Realm, usize>>>,
}

impl Readers {
    /// Copies a piece that was examined; gives its name and the copy.
    pub(crate) fn read(
        &self,
        realm: &Realm,
        fd: OwnedFd,
        piece: Piece,
        shown: Shown,
        places: Places,
    ) -> Result<(ObjectId, Draft), Refusal> {
        self.within(realm, PATIENCE, move || piece_of(&fd, &piece, &shown, &places))
    }

    /// The name of a piece that was examined, without a copy: enough where there is one already.
    pub(crate) fn name(
        &self,
        realm: &Realm,
        fd: OwnedFd,
        piece: Piece,
        shown: Shown,
    ) -> Result<ObjectId, Refusal> {
        self.within(realm, PATIENCE, move || name_of(&fd, &piece, &shown))
    }

    fn within<T: Send + 'static>(
        &self,
        realm: &Realm,
        patience: Duration,
        job: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        fn lock(stuck: &Mutex<HashMap<Realm, usize>>) -> std::sync::MutexGuard<'_, HashMap<Realm, usize>> {
            stuck.lock().unwrap_or_else(PoisonError::into_inner)
        }
        {
            let mut stuck = lock(&self.stuck);
            let count = stuck.entry(realm.clone()).or_insert(0);
            // One for each that is under way; those that are not stuck are soon done.
            if *count >= MOST_STUCK + 2 {
                return Err(Refusal::Busy);
            }
            *count += 1;
        }
        let (answer, result) = mpsc::sync_channel(1);
        let (shared, of) = (Arc::clone(&self.stuck), realm.clone());
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
            // Only now: whoever hears of it may ask again at once.
            let _ = answer.send(done);
        });
        if started.is_err() {
            if let Some(count) = lock(&self.stuck).get_mut(realm) {
                *count -= 1;
            }
            return Err(Refusal::Exhausted);
        }
        result.recv_timeout(patience).unwrap_or(Err(Refusal::FileSystem))
    }
}

/// What `/proc/PID/maps` shows of a piece: the name of the file that it was first read from.
pub(crate) fn file_label(fd: &OwnedFd) -> String {
    let path = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap_or_default();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let plain = name.chars().filter(|c| c.is_ascii_graphic()).take(100);
    format!("orc:{}", plain.collect::<String>())
}

/// How much of a piece lies within the file.
fn there(piece: &Piece, shown: &Shown) -> u64 {
    let size = u64::try_from(shown.key.size).unwrap_or(0);
    size.saturating_sub(piece.offset).min(piece.length)
}

fn is_unchanged(fd: &OwnedFd, piece: &Piece, shown: &Shown) -> Result<(), Refusal> {
    let after = rustix::fs::fstat(fd).map_err(|_| Refusal::Descriptor)?;
    if FileKey::of(&after, piece) == shown.key { Ok(()) } else { Err(Refusal::Changed) }
}

fn piece_of(
    fd: &OwnedFd,
    piece: &Piece,
    shown: &Shown,
    places: &Places,
) -> Result<(ObjectId, Draft), Refusal> {
    let length = usize::try_from(piece.length).map_err(|_| Refusal::Size)?;
    let draft = places.draft(&file_label(fd), length)?;
    let read = read(fd.as_fd(), draft, piece.offset, there(piece, shown))?;
    is_unchanged(fd, piece, shown)?;
    Ok(read)
}

fn name_of(fd: &OwnedFd, piece: &Piece, shown: &Shown) -> Result<ObjectId, Refusal> {
    let (mut hash, mut buffer) = (blake3::Hasher::new(), vec![0; CHUNK]);
    let (mut done, end) = (0, there(piece, shown));
    while done < end {
        let most = usize::try_from(end - done).unwrap_or(CHUNK).min(CHUNK);
        let count =
            rustix::io::retry_on_intr(|| rustix::io::pread(fd, &mut buffer[..most], piece.offset + done))
                .map_err(|_| Refusal::Descriptor)?;
        if count == 0 {
            return Err(Refusal::Changed);
        }
        hash.update(&buffer[..count]);
        done += count as u64;
    }
    // Behind the end there are zeros, less than a page.
    let zeros = usize::try_from(piece.length - done).unwrap_or(0).min(PAGE);
    hash.update(&[0; PAGE][..zeros]);
    is_unchanged(fd, piece, shown)?;
    Ok(ObjectId(*hash.finalize().as_bytes()))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_piece_is_the_pages_of_the_file() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 5000]).unwrap();
        let piece = Piece { flags: 0, offset: 4096, length: 4096 };
        let shown = examine(file.as_fd(), &piece, 1 << 20).unwrap();
        let readers = Readers::default();
        let (id, _) = readers
            .read(&Realm::User(1), file.try_clone().unwrap().into(), piece, shown, Places::default())
            .unwrap();
        let name = readers.name(&Realm::User(1), file.try_clone().unwrap().into(), piece, shown);
        assert_eq!(name, Ok(id));
        let mut page = vec![7; 904];
        page.resize(4096, 0);
        assert_eq!(id, ObjectId::of(&page));
        file.write_all(b"more").unwrap();
        let changed =
            readers.read(&Realm::User(1), file.try_clone().unwrap().into(), piece, shown, Places::default());
        assert_eq!(changed.unwrap_err(), Refusal::Changed);
        let refused =
            |offset, length| examine(file.as_fd(), &Piece { flags: 0, offset, length }, 1 << 20).unwrap_err();
        assert_eq!(refused(1, 4096), Refusal::Malformed);
        assert_eq!(refused(0, 0), Refusal::Size);
        assert_eq!(refused(0, 2 << 20), Refusal::Size);
        assert_eq!(refused(8192, 4096), Refusal::Changed);
        assert_eq!(refused(u64::MAX - 4095, 4096), Refusal::Changed);
    }

    #[test]
    fn other_descriptors_are_refused() {
        let piece = Piece { flags: 0, offset: 0, length: 4096 };
        let (pipe, _writer) = std::io::pipe().unwrap();
        assert_eq!(examine(pipe.as_fd(), &piece, 1 << 20).unwrap_err(), Refusal::Descriptor);
        let proc = std::fs::File::open("/proc/self/exe").unwrap();
        let only_named = rustix::fs::open("/proc/self/exe", OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        assert_eq!(examine(only_named.as_fd(), &piece, 1 << 20).unwrap_err(), Refusal::Descriptor);
        assert!(examine(proc.as_fd(), &piece, 1 << 20).is_ok());
        assert_eq!(
            from_memory(pipe.as_fd(), "test", 1, 10, &Places::default()).unwrap_err(),
            Refusal::Descriptor
        );
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(
            from_memory(memory.as_fd(), "test", 1, 10, &Places::default()).unwrap_err(),
            Refusal::Changed,
            "shorter than told"
        );
        assert_eq!(
            from_memory(memory.as_fd(), "test", 11, 10, &Places::default()).unwrap_err(),
            Refusal::Size
        );
    }

    #[test]
    fn readers_that_are_done_do_not_count() {
        let readers = Readers::default();
        for _ in 0..200 {
            assert_eq!(readers.within(&Realm::User(1), PATIENCE, || Ok(())), Ok(()));
            assert!(readers.stuck.lock().unwrap().is_empty());
        }
    }

    #[test]
    fn readers_that_hang_cost_their_own_realm() {
        let readers = Readers::default();
        let (hang, wait) = mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let (bad, good) = (Realm::User(1), Realm::User(2));
        for _ in 0..MOST_STUCK + 2 {
            let wait = Arc::clone(&wait);
            let stuck = move || {
                let _ = wait.lock().unwrap().recv();
                Ok(())
            };
            assert_eq!(readers.within(&bad, Duration::from_millis(1), stuck), Err(Refusal::FileSystem));
        }
        assert_eq!(readers.within(&bad, PATIENCE, || Ok(())), Err(Refusal::Busy));
        assert_eq!(readers.within(&good, PATIENCE, || Ok(5)), Ok(5));
        drop(hang);
        while readers.within(&bad, PATIENCE, || Ok(())) == Err(Refusal::Busy) {
            std::thread::yield_now();
        }
    }
}
