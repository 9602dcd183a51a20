//! Files that nobody can change any more: sealed memory files (memfd_create(2), `F_ADD_SEALS` in fcntl(2)), and immutable files
//! on disk.
//!
//! A descriptor of such a file is a capability: it can be had only from a process that has one, and shows the same bytes
//! forever. With `F_SEAL_WRITE` no mapping, write or hole punching can change them, with `F_SEAL_SHRINK` no access runs into a
//! new end of the file, and `F_SEAL_SEAL` keeps the seals as they are. `MFD_NOEXEC_SEAL` (Linux 6.3) adds that the file can
//! never be run as a program; older kernels create it without.
//!
//! A memory file is in memory whole. A file on disk with `FS_IMMUTABLE_FL` (ioctl_iflags(2)) shows the same bytes as long as no
//! process with `CAP_LINUX_IMMUTABLE` interferes, and only the pages that programs need are in memory. One that keeps its name
//! can be opened without asking the store.

use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, IFlags, MemfdFlags, Mode, OFlags, SealFlags, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::ptr::NonNull;

use orrery_sys::PAGE;

/// The seals without which no descriptor is accepted.
const PERMANENT: SealFlags = SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW);
/// The seals of a file that still takes in objects: bytes that are there stay, because only the store can write.
const APPENDABLE: SealFlags = SealFlags::FUTURE_WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW);

/// How many bytes one call writes to a file on disk. The kernel caches them in large folios, which are mapped with fewer and
/// shorter faults than single pages. But the cache of a folio cannot be dropped while a program maps one page of it. So this
/// is what one fault maps (`fault_around_bytes`): larger portions would not be faster, and would keep unused pages in memory.
const PORTION: usize = 64 << 10;

/// A new file, writable until it is sealed.
#[derive(Debug)]
pub struct UnsealedFile {
    fd: OwnedFd,
    /// The mapping of a memory file. Files on disk are written by pwrite(2), in portions of [`PORTION`].
    mapping: Option<FileMapping>,
    length: usize,
    kind: Kind,
}

/// The mode of an unsealed file: only its owner may open it.
const OWN: Mode = Mode::RUSR;
/// The mode of a sealed file: all users may open it who can enter its directory.
const ALL: Mode = Mode::RUSR.union(Mode::RGRP).union(Mode::ROTH);

/// Where a file is, which decides how it is made immutable.
#[derive(Debug)]
enum Kind {
    Memory,
    Unnamed,
    Named(TemporaryName),
}

/// The name of a file, which is removed when this is dropped.
#[derive(Debug)]
struct TemporaryName(PathBuf);

impl Drop for TemporaryName {
    fn drop(&mut self) {
        let _ = rustix::fs::unlink(&self.0);
    }
}

/// A file that is completely written, and not yet sealed.
#[derive(Debug)]
pub struct WrittenFile {
    fd: OwnedFd,
    kind: Kind,
}

static CREATED: AtomicU64 = AtomicU64::new(0);

/// Creates a file in `directory`, which no other user can read yet: its bytes may be incomplete, or of another client.
fn create(directory: &Path, name: &str, length: usize) -> rustix::io::Result<(OwnedFd, PathBuf)> {
    let number = CREATED.fetch_add(1, Ordering::Relaxed);
    let path = directory.join(format!("{name}.{}-{number}", std::process::id()));
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let fd = rustix::fs::open(&path, flags, OWN)?;
    // Disk space is reserved before anything is written.
    match rustix::fs::fallocate(&fd, rustix::fs::FallocateFlags::empty(), 0, length as u64) {
        Ok(()) => Ok((fd, path)),
        Err(errno) => {
            let _ = rustix::fs::unlink(&path);
            Err(errno)
        }
    }
}

impl UnsealedFile {
    /// Creates a memory file of `length` zero bytes; `/proc/PID/maps` shows it as `name`.
    ///
    /// # Errors
    /// Those of memfd_create(2) and mmap(2).
    pub fn new(name: &str, length: usize) -> rustix::io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
            other => other,
        }?;
        rustix::fs::ftruncate(&fd, length as u64)?;
        let mapping =
            FileMapping::new(fd.as_fd(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED)?;
        Ok(Self { fd, mapping: Some(mapping), length, kind: Kind::Memory })
    }

    /// Creates a file without a name on the disk of `directory`.
    ///
    /// # Errors
    /// Those of open(2), fallocate(2) and unlink(2).
    pub fn on_disk(directory: &Path, name: &str, length: usize) -> rustix::io::Result<Self> {
        let (fd, path) = create(directory, name, length)?;
        rustix::fs::unlink(&path)?;
        Ok(Self { fd, mapping: None, length, kind: Kind::Unnamed })
    }

    /// Creates a file in `directory` that is to have a name: see [`WrittenFile::seal_as`].
    ///
    /// # Errors
    /// Those of open(2) and fallocate(2).
    pub fn named(directory: &Path, length: usize) -> rustix::io::Result<Self> {
        let (fd, path) = create(directory, "file", length)?;
        Ok(Self { fd, mapping: None, length, kind: Kind::Named(TemporaryName(path)) })
    }

    /// Returns its length.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Returns the bytes of a memory file. Files on disk have none here: see [`UnsealedFile::write_at`].
    pub fn bytes(&mut self) -> &mut [u8] {
        let Some(mapping) = &self.mapping else { return &mut [] };
        // SAFETY: the mapping has `length` bytes, no other process or mapping has the file yet, and `self` is borrowed
        // exclusively as long as the slice.
        unsafe { std::slice::from_raw_parts_mut(mapping.start.as_ptr(), mapping.length) }
    }

    /// Writes `bytes` at `offset`.
    ///
    /// # Errors
    /// `ERANGE` if they do not fit; those of pwrite(2).
    pub fn write_at(&mut self, offset: usize, bytes: &[u8]) -> rustix::io::Result<()> {
        if offset.checked_add(bytes.len()).is_none_or(|end| end > self.length) {
            return Err(Errno::RANGE);
        }
        if let Some(mapping) = &self.mapping {
            return mapping.write(offset, bytes);
        }
        let mut written = 0;
        while written < bytes.len() {
            let at = offset + written;
            let portion = bytes.len().min(written + PORTION - at % PORTION);
            let write = || rustix::io::pwrite(&self.fd, &bytes[written..portion], at as u64);
            written += rustix::io::retry_on_intr(write)?;
        }
        Ok(())
    }

    /// Seals it: nobody can change it any more.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn seal(self) -> rustix::io::Result<OwnedFd> {
        self.finish().seal()
    }

    /// Ends writing, so that it can be sealed.
    pub fn finish(self) -> WrittenFile {
        // A file with a writable mapping cannot be sealed.
        let Self { fd, mapping, kind, .. } = self;
        drop(mapping);
        WrittenFile { fd, kind }
    }

    /// Seals a memory file so that it can be written only through the mapping that this returns.
    ///
    /// # Errors
    /// `EINVAL` for a file on disk; those of fcntl(2).
    pub fn seal_future_writes(self) -> rustix::io::Result<(OwnedFd, FileMapping)> {
        let Self { fd, mapping: Some(mapping), .. } = self else { return Err(Errno::INVAL) };
        rustix::fs::fcntl_add_seals(&fd, APPENDABLE)?;
        Ok((fd, mapping))
    }
}

impl WrittenFile {
    /// Returns whether it is to have a name.
    pub fn is_named(&self) -> bool {
        matches!(self.kind, Kind::Named(_))
    }

    /// Seals it. It has no name, even if it was to have one.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn seal(self) -> rustix::io::Result<OwnedFd> {
        let Self { fd, kind } = self;
        if !matches!(kind, Kind::Memory) {
            drop(kind);
            return immutable(&fd);
        }
        rustix::fs::fcntl_add_seals(&fd, PERMANENT | SealFlags::SEAL)?;
        Ok(fd)
    }

    /// Renames it to `path`, in its directory, and seals it.
    ///
    /// # Errors
    /// `EINVAL` if it is not to have a name; those of rename(2); if the kernel refuses to make it immutable.
    pub fn seal_as(self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let Self { fd, kind: Kind::Named(name) } = self else { return Err(Errno::INVAL) };
        rustix::fs::rename(&name.0, path)?;
        // The old name is gone; nothing has to be removed.
        drop(name);
        immutable(&fd).inspect_err(|_| drop(TemporaryName(path.to_owned())))
    }
}

/// Makes a file immutable and readable for all users; the returned descriptor can only read it.
fn immutable(fd: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    // The umask may have cleared bits, and the mode of an immutable file cannot be changed.
    rustix::fs::fchmod(fd, ALL)?;
    rustix::fs::ioctl_setflags(fd, rustix::fs::ioctl_getflags(fd)? | IFlags::IMMUTABLE)?;
    // `fd` can still write.
    let again = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::open(again, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// A mapping of a file, which is unmapped when this is dropped.
#[derive(Debug)]
pub struct FileMapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread, and `start` and `length` never change.
unsafe impl Send for FileMapping {}
// SAFETY: shared references only read `start` and `length`; `write` has a rule for its callers.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps the first `length` bytes of `fd` at an address that the kernel chooses.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn new(
        fd: BorrowedFd<'_>,
        length: usize,
        access: ProtFlags,
        flags: MapFlags,
    ) -> rustix::io::Result<Self> {
        Self::at(fd, 0, length, access, flags)
    }

    /// Maps `length` bytes of `fd` from `offset`, a multiple of the page size, at an address that the kernel chooses.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn at(
        fd: BorrowedFd<'_>,
        offset: u64,
        length: usize,
        access: ProtFlags,
        flags: MapFlags,
    ) -> rustix::io::Result<Self> {
        // SAFETY: the kernel chooses an address at which nothing is mapped.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, access, flags, fd, offset) }?;
        Ok(Self { start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?, length })
    }

    /// Maps the first `length` bytes of `fd`, shared with other processes, at a multiple of `alignment`.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn aligned(
        fd: BorrowedFd<'_>,
        length: usize,
        alignment: usize,
        access: ProtFlags,
    ) -> rustix::io::Result<Self> {
        let room = length + alignment;
        // SAFETY: the kernel chooses an address at which nothing is mapped.
        let reserved = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), room, ProtFlags::empty(), MapFlags::PRIVATE)
        }?;
        let skip = reserved.addr().next_multiple_of(alignment) - reserved.addr();
        // SAFETY: `start..start + length` is within the reservation, which no reference points to. Only the parts of the
        // reservation before and behind it are unmapped.
        let start = unsafe {
            let start = reserved.byte_add(skip);
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            let mapped = rustix::mm::mmap(start, length, access, flags, fd, 0);
            if skip > 0 {
                let _ = rustix::mm::munmap(reserved, skip);
            }
            if mapped.is_err() {
                let _ = rustix::mm::munmap(start, room - skip);
            } else if room > skip + length {
                let _ = rustix::mm::munmap(start.byte_add(length), room - skip - length);
            }
            mapped?
        };
        Ok(Self { start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?, length })
    }

    /// Returns the address of its first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Writes `bytes` at `offset`, in a range that no other process or thread accesses yet.
    ///
    /// # Errors
    /// `ERANGE` if they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> rustix::io::Result<()> {
        if offset.checked_add(bytes.len()).is_none_or(|end| end > self.length) {
            return Err(Errno::RANGE);
        }
        // SAFETY: the range is within the mapping, as was checked. No reader races with this write: no handle of the range was
        // sent yet, and the caller has exclusive access to the file that it belongs to.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(offset), bytes.len());
        }
        Ok(())
    }

    /// Leaves the mapping in place for good.
    pub fn leak(self) {
        std::mem::forget(self);
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: this handle owns the mapping, and slices of it borrow the handle.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// Who can still change a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Immutability {
    /// No process can change the file.
    Permanent,
    /// Its creator only, and not the bytes that were handed out.
    ExceptWriter,
}

/// Returns who can still change the first `end` bytes of `fd`; `None` if other processes can, or the file is shorter.
pub fn immutability(fd: BorrowedFd<'_>, end: u64) -> Option<Immutability> {
    // A file in a tmpfs has seals, too, but not these.
    let seals = match rustix::fs::fcntl_get_seals(fd) {
        Ok(seals) if seals.contains(APPENDABLE) || seals.contains(PERMANENT) => seals,
        _ if is_immutable(fd) => PERMANENT,
        _ => return None,
    };
    let size = u64::try_from(rustix::fs::fstat(fd).ok()?.st_size).ok()?;
    // A mapping shows the whole last page.
    if end > size.next_multiple_of(PAGE as u64) {
        return None;
    }
    if seals.contains(PERMANENT) {
        Some(Immutability::Permanent)
    } else {
        seals.contains(APPENDABLE).then_some(Immutability::ExceptWriter)
    }
}

fn is_immutable(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).is_ok_and(|found| {
        found.stx_attributes_mask & found.stx_attributes & StatxAttributes::IMMUTABLE
            != StatxAttributes::empty()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_file_cannot_change() {
        let mut file = UnsealedFile::new("test", 5000).unwrap();
        file.bytes()[4999] = 7;
        assert_eq!(immutability(file.fd.as_fd(), 1), None, "not yet");
        let fd = file.seal().unwrap();
        assert_eq!(immutability(fd.as_fd(), 5000), Some(Immutability::Permanent));
        assert_eq!(immutability(fd.as_fd(), 8193), None, "too short");
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&fd, 0), Err(Errno::PERM));
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        assert_eq!(rustix::fs::fallocate(&fd, punch, 0, 4096), Err(Errno::PERM));
        let writable = ProtFlags::READ | ProtFlags::WRITE;
        assert_eq!(FileMapping::new(fd.as_fd(), 4096, writable, MapFlags::SHARED).unwrap_err(), Errno::PERM);
        assert_eq!(rustix::fs::fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE), Err(Errno::PERM));
        let mut byte = [0];
        assert_eq!(rustix::io::pread(&fd, &mut byte, 4999), Ok(1));
        assert_eq!(byte, [7]);
    }

    #[test]
    fn an_immutable_file_cannot_change() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let mut file = UnsealedFile::on_disk(directory.path(), "test", 8192).unwrap();
        file.write_at(8191, &[7]).unwrap();
        assert_eq!((file.write_at(8191, &[7; 2]), file.length()), (Err(Errno::RANGE), 8192));
        assert!(file.bytes().is_empty());
        assert_eq!(immutability(file.fd.as_fd(), 1), None, "not yet");
        let fd = match file.seal() {
            Ok(fd) => fd,
            Err(errno) => {
                orrery_testing::skipped!("no file can be made immutable in /var/tmp: {errno}");
                return;
            }
        };
        assert_eq!(immutability(fd.as_fd(), 8192), Some(Immutability::Permanent));
        assert_eq!(immutability(fd.as_fd(), 8193), None, "too short");
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::BADF));
        let again = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let opened = rustix::fs::open(again, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        assert_eq!(opened.unwrap_err(), Errno::PERM, "not even by the superuser");
        let mut byte = [0];
        assert_eq!(rustix::io::pread(&fd, &mut byte, 8191), Ok(1));
        assert_eq!(byte, [7]);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "it has no name");
    }

    #[test]
    fn a_named_file_can_be_opened_and_cannot_change() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        drop(UnsealedFile::named(directory.path(), 4096).unwrap());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "its name is removed with it");
        let path = directory.path().join("object");
        let mode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_mode & 0o777;
        let mut file = UnsealedFile::named(directory.path(), 4096).unwrap();
        file.write_at(0, &[7]).unwrap();
        let written_file = file.finish();
        assert!(
            written_file.is_named() && mode(written_file.fd.as_fd()) == 0o400,
            "nobody else may read it yet"
        );
        let fd = match written_file.seal_as(&path) {
            Ok(fd) => fd,
            Err(errno) => {
                assert!(!path.exists());
                orrery_testing::skipped!("no file can be made immutable in /var/tmp: {errno}");
                return;
            }
        };
        assert_eq!(immutability(fd.as_fd(), 4096), Some(Immutability::Permanent));
        assert_eq!(mode(fd.as_fd()), 0o444);
        let other = std::fs::File::open(&path).unwrap();
        assert_eq!(immutability(other.as_fd(), 4096), Some(Immutability::Permanent));
        assert!(std::fs::File::options().write(true).open(&path).is_err());
        assert!(std::fs::remove_file(&path).is_err());
        // Nor can another take its name.
        let second = UnsealedFile::named(directory.path(), 4096).unwrap().finish().seal_as(&path);
        assert_eq!(second.unwrap_err(), Errno::PERM);
        let memory = UnsealedFile::new("test", 4096).unwrap();
        assert_eq!(memory.finish().seal_as(&path).unwrap_err(), Errno::INVAL);
        rustix::fs::ioctl_setflags(&fd, rustix::fs::ioctl_getflags(&fd).unwrap() - IFlags::IMMUTABLE)
            .unwrap();
    }

    #[test]
    fn what_is_filled_is_written_by_its_maker_only() {
        let (fd, mapping) = UnsealedFile::new("test", 8192).unwrap().seal_future_writes().unwrap();
        mapping.write(4096, b"abc").unwrap();
        assert_eq!(mapping.write(8190, b"abc"), Err(Errno::RANGE));
        assert_eq!(immutability(fd.as_fd(), 8192), Some(Immutability::ExceptWriter));
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::PERM));
        let writable = ProtFlags::READ | ProtFlags::WRITE;
        assert_eq!(FileMapping::new(fd.as_fd(), 4096, writable, MapFlags::SHARED).unwrap_err(), Errno::PERM);
        let mut bytes = [0; 3];
        assert_eq!(rustix::io::pread(&fd, &mut bytes, 4096), Ok(3));
        assert_eq!(&bytes, b"abc");
    }
}
