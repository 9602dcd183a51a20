//! Reads descriptors that clients send, which may be of any kind and whose bytes may change meanwhile.
//!
//! The bytes are read into the file that will be sealed, and hashed there, because nobody else can write to it: what was
//! hashed is what is handed out. They are read by pread(2), never through a mapping of the client's file, which the client
//! could truncate.

mod mount;
mod reader_threads;
mod received;

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{FileType, OFlags, Stat, StatVfsMountFlags};

pub(crate) use crate::client_file::reader_threads::ReaderThreads;
pub(crate) use crate::client_file::received::ClientFile;

use crate::client_file::mount::{FileSystem, Mount};
use crate::client_file::reader_threads::Purpose;
use crate::named::index;
use crate::objects::backing_file::exhausted;
use crate::trust_domain::TrustDomain;
use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::{FileRange, Refusal};
use orrery_orc_wire::sealed_file::UnsealedFile;
use orrery_sys::PAGE;

/// Shorter objects without names are in memory, even if there is a disk.
const MIN_ON_DISK: usize = 256 << 10;
/// Bytes read and hashed at a time.
const CHUNK: usize = 1 << 20;
/// How long examining the files of a request, or reading one, may take.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
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

impl FileKey {
    /// Returns whether another file never has the same key, now or later.
    ///
    /// On kernels without unique numbers of mounts this relies on the time of change, which a file system that is mounted for
    /// writing has from the clock.
    fn is_lasting(&self, file: &ClientFile, mounted: StatVfsMountFlags) -> bool {
        let is_written = !mounted.contains(StatVfsMountFlags::RDONLY);
        matches!(self.mount, Mount::Unique(_)) || !file.file_system().is_from_image() && is_written
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

    fn of(mount: Mount, stat: &Stat, range: &FileRange) -> Self {
        #[expect(clippy::unnecessary_cast, reason = "the types of these fields differ between architectures")]
        Self {
            mount,
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

/// Returns whether reading the file depends on no other process or host.
pub(crate) fn is_local(fd: BorrowedFd<'_>) -> bool {
    FileSystem::of(fd).is_local()
}

fn readable(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| !flags.intersects(OFlags::WRONLY | OFlags::PATH))
}

/// Checks a range without reading it.
///
/// # Errors
/// The refusal that the client gets.
fn examine(file: &ClientFile, range: &FileRange, largest: u64) -> Result<ExaminedRange, Refusal> {
    let stat = rustix::fs::fstat(file).map_err(|_| Refusal::Descriptor)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || !readable(file.as_fd()) {
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
    if !file.is_known_local() && !file.file_system().is_local() {
        return Err(Refusal::FileSystem);
    }
    let mounted = rustix::fs::fstatvfs(file).map_err(|_| Refusal::Descriptor)?.f_flag;
    let noexec = mounted.contains(StatVfsMountFlags::NOEXEC);
    let key = FileKey::of(file.mount, &stat, range);
    let is_lasting = key.is_lasting(file, mounted);
    Ok(ExaminedRange { key, owner: stat.st_uid, mode: stat.st_mode, noexec, is_lasting })
}

/// A file whose range may be read, or the refusal that the client gets.
type Examined = Result<(ClientFile, ExaminedRange), Refusal>;

/// Checks ranges, each of one file, without reading them. Files of which it is not known that nothing can hang are examined one after
/// the other in a thread of `account`; those that it does not reach in time are refused.
pub(crate) fn examine_all(
    threads: &ReaderThreads,
    account: &TrustDomain,
    ranges: &[FileRange],
    files: Vec<ClientFile>,
    largest: u64,
) -> Vec<Examined> {
    let mut results = Vec::new();
    let mut unknown = Vec::new();
    for (number, (range, file)) in ranges.iter().zip(files).enumerate() {
        if file.is_known_local() {
            results.push(examine(&file, range, largest).map(|examined| (file, examined)));
        } else {
            // It stays so if the thread does not come to it.
            results.push(Err(Refusal::FileSystem));
            unknown.push((number, *range, file));
        }
    }
    if unknown.is_empty() {
        return results;
    }
    let slots: Vec<usize> = unknown.iter().map(|(number, ..)| *number).collect();
    let started = threads.results(account, Purpose::Other, unknown.len(), move |sender| {
        for (number, range, file) in unknown {
            // If the request has been given up, the file is closed with the message.
            match examine(&file, &range, largest) {
                Ok(examined) => drop(sender.send((number, Ok((file, examined))))),
                Err(refusal) => {
                    let _ = sender.send((number, Err(refusal)));
                    file.close_here();
                }
            }
        }
    });
    let examined = match started {
        Ok(examined) => examined,
        Err(refusal) => {
            slots.iter().for_each(|number| results[*number] = Err(refusal));
            return results;
        }
    };
    let due = Instant::now() + READ_TIMEOUT;
    for _ in 0..slots.len() {
        let left = due.saturating_duration_since(Instant::now());
        let Ok((number, result)) = examined.recv_timeout(left) else { break };
        results[number] = result;
    }
    results
}

/// Copies the first `length` bytes of a memory file into one that `/proc/PID/maps` shows as `label`; returns their name and the
/// copy.
///
/// # Errors
/// The refusal that the client gets.
pub(crate) fn copy_memory(
    file: &ClientFile,
    label: &str,
    length: u64,
    largest: u64,
    destination: &CopyDestination,
) -> Result<(ObjectId, UnsealedFile), Refusal> {
    if length == 0 || length > largest {
        return Err(Refusal::Size);
    }
    let fd = file.as_fd();
    // What has seals is in memory, so that the next calls wait for no other process or host.
    if rustix::fs::fcntl_get_seals(fd).is_err() || !FileSystem::of(fd).is_tmpfs() || !readable(fd) {
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

/// Copies a range that was examined, in a thread of the account; returns the file, with the name of the range and the copy.
///
/// # Errors
/// The refusal that the client gets.
pub(crate) fn copy(
    file: ClientFile,
    range: FileRange,
    examined: ExaminedRange,
    destination: CopyDestination,
) -> Result<(ClientFile, (ObjectId, UnsealedFile)), Refusal> {
    read_apart(file, move |file| copy_range(file, &range, &examined, &destination))
}

/// Returns a file and the name of a range of it that was examined, without a copy.
///
/// # Errors
/// The refusal that the client gets.
pub(crate) fn hash(
    file: ClientFile,
    range: FileRange,
    examined: ExaminedRange,
) -> Result<(ClientFile, ObjectId), Refusal> {
    read_apart(file, move |file| hash_range(file, &range, &examined))
}

/// Reads a file in a thread of its account; returns it with the result.
fn read_apart<T: Send + 'static>(
    file: ClientFile,
    read: impl FnOnce(&ClientFile) -> Result<T, Refusal> + Send + 'static,
) -> Result<(ClientFile, T), Refusal> {
    let (threads, account) = (file.threads().clone(), file.account().clone());
    let purpose = if file.is_known_local() { Purpose::Local } else { Purpose::Other };
    threads.within(&account, purpose, READ_TIMEOUT, move |sender| match read(&file) {
        Ok(result) => drop(sender.send(Ok((file, result)))),
        Err(refusal) => {
            let _ = sender.send(Err(refusal));
            file.close_here();
        }
    })
}

/// Returns the path of a file in the mount namespace in which it was opened.
/// The kernel has it in memory.
pub(crate) fn file_path(file: &ClientFile) -> PathBuf {
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())).unwrap_or_default()
}

/// Returns the name that `/proc/PID/maps` shows of a copy: that of the file it was first read from.
pub(crate) fn file_label(file: &ClientFile) -> String {
    let path = file_path(file);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let plain = name.chars().filter(|c| c.is_ascii_graphic()).take(100);
    format!("orc:{}", plain.collect::<String>())
}

/// Returns how many bytes of a range are within the file.
fn length_in_file(range: &FileRange, examined: &ExaminedRange) -> u64 {
    let size = u64::try_from(examined.key.size).unwrap_or(0);
    size.saturating_sub(range.offset).min(range.length)
}

fn check_unchanged(file: &ClientFile, range: &FileRange, examined: &ExaminedRange) -> Result<(), Refusal> {
    let after = rustix::fs::fstat(file).map_err(|_| Refusal::Descriptor)?;
    if FileKey::of(file.mount, &after, range) == examined.key { Ok(()) } else { Err(Refusal::Changed) }
}

fn copy_range(
    file: &ClientFile,
    range: &FileRange,
    examined: &ExaminedRange,
    destination: &CopyDestination,
) -> Result<(ObjectId, UnsealedFile), Refusal> {
    let length = usize::try_from(range.length).map_err(|_| Refusal::Size)?;
    let copy = destination.create(&file_label(file), length)?;
    let read = read(file.as_fd(), copy, range.offset, length_in_file(range, examined))?;
    check_unchanged(file, range, examined)?;
    Ok(read)
}

fn hash_range(file: &ClientFile, range: &FileRange, examined: &ExaminedRange) -> Result<ObjectId, Refusal> {
    let (mut hash, mut buffer) = (blake3::Hasher::new(), vec![0; CHUNK]);
    let (mut done, end) = (0, length_in_file(range, examined));
    while done < end {
        let most = usize::try_from(end - done).unwrap_or(CHUNK).min(CHUNK);
        let count =
            rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut buffer[..most], range.offset + done))
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
    check_unchanged(file, range, examined)?;
    Ok(ObjectId(*hash.finalize().as_bytes()))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::fd::OwnedFd;

    use super::*;

    const ACCOUNT: TrustDomain = TrustDomain::User(1);

    fn received(readers: &ReaderThreads, fd: impl Into<OwnedFd>) -> ClientFile {
        readers.receive(&ACCOUNT, vec![fd.into()]).remove(0)
    }

    fn examine_one(
        readers: &ReaderThreads,
        fd: impl Into<OwnedFd>,
        range: FileRange,
        largest: u64,
    ) -> Result<(ClientFile, ExaminedRange), Refusal> {
        let file = received(readers, fd);
        examine_all(readers, &ACCOUNT, &[range], vec![file], largest).remove(0)
    }

    #[test]
    fn a_range_is_the_pages_of_the_file() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 5000]).unwrap();
        let range = FileRange { flags: 0, offset: 4096, length: 4096 };
        let readers = ReaderThreads::default();
        let (sent, examined) = examine_one(&readers, file.try_clone().unwrap(), range, 1 << 20).unwrap();
        let (sent, (id, _)) = copy(sent, range, examined, CopyDestination::default()).unwrap();
        let (sent, name) = hash(sent, range, examined).unwrap();
        assert_eq!(name, id);
        let mut page = vec![7; 904];
        page.resize(4096, 0);
        assert_eq!(id, ObjectId::of(&page));
        file.write_all(b"more").unwrap();
        let changed = copy(sent, range, examined, CopyDestination::default());
        assert_eq!(changed.unwrap_err(), Refusal::Changed);
        let refused = |offset, length| {
            let range = FileRange { flags: 0, offset, length };
            examine_one(&readers, file.try_clone().unwrap(), range, 1 << 20).unwrap_err()
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
        let readers = ReaderThreads::default();
        let refused = |fd: OwnedFd| examine_one(&readers, fd, range, 1 << 20).unwrap_err();
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(refused(pipe), Refusal::Descriptor);
        let only_named = rustix::fs::open("/proc/self/exe", OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        assert_eq!(refused(only_named), Refusal::Descriptor);
        let proc = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(examine_one(&readers, proc, range, 1 << 20).is_ok());
        let copied = |fd: OwnedFd, length| {
            copy_memory(&received(&readers, fd), "test", length, 10, &CopyDestination::default()).unwrap_err()
        };
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(copied(pipe, 1), Refusal::Descriptor);
        let memory = || rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(copied(memory(), 1), Refusal::Changed, "shorter than the message says");
        assert_eq!(copied(memory(), 11), Refusal::Size);
    }

    #[test]
    fn files_of_known_local_mounts_need_no_thread() {
        let readers = ReaderThreads::default();
        let directory = tempfile::tempdir().unwrap();
        let open = || std::fs::File::open(directory.path().join("file")).unwrap();
        std::fs::write(directory.path().join("file"), [1; 4096]).unwrap();
        let range = FileRange { flags: 0, offset: 0, length: 4096 };
        assert!(!received(&readers, open()).is_known_local());
        let (file, _) = examine_one(&readers, open(), range, 1 << 20).unwrap();
        if !matches!(file.mount, Mount::Unique(_)) || !FileSystem::of(file.as_fd()).is_bottom() {
            orrery_testing::skipped!(
                "mounts have no unique numbers here, or temporary files lie in an overlay"
            );
            return;
        }
        assert!(file.is_known_local() && received(&readers, open()).is_known_local());
        // Directories and devices are never closed without a thread.
        let directory = received(&readers, std::fs::File::open(directory.path()).unwrap());
        assert!(!directory.is_known_local());
    }
}
