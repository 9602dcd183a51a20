//! Capabilities of a stock kernel: memory files that nobody can change any more (memfd_create(2), `F_ADD_SEALS` in
//! fcntl(2)).
//!
//! A descriptor of such a file can be had only from somebody who has one, and shows the same bytes for ever: with
//! `F_SEAL_WRITE` no mapping, no write and no hole can change them, with `F_SEAL_SHRINK` no access ever runs into an end
//! that was not there before, and `F_SEAL_SEAL` says that this is all. `MFD_NOEXEC_SEAL` (Linux 6.3) adds that the
//! file can never be run as a program. Where that is absent, the file is made without.
//!
//! Memory files are in memory whole. A file on disk with `FS_IMMUTABLE_FL` (ioctl_iflags(2)), which has no name any more, shows the
//! same bytes as long as nobody with `CAP_LINUX_IMMUTABLE` interferes, and only those pages of it are in memory that
//! somebody needs. One that keeps its name can be had without asking the store (`store/shelf.rs`).

use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use core::ptr::NonNull;
use rustix::fs::{AtFlags, IFlags, MemfdFlags, Mode, OFlags, SealFlags, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use orrery_sys::PAGE;

/// What no object may be without.
const FOR_GOOD: SealFlags = SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW);
/// What memory may be without that still takes in more objects: bytes that are there stay, as only the store can write.
const FILLING: SealFlags = SealFlags::FUTURE_WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW);

/// Bytes that a file is written by at a time. The kernel caches what one call writes in large folios, which are mapped with fewer and
/// shorter faults than pages that came one by one; but a folio of which a program maps one page can no longer be given back to the
/// kernel (`store/trimmer.rs`). So this is what one fault maps (`fault_around_bytes`): larger ones would be no faster, and
/// would keep in memory what nobody needs.
const PORTION: usize = 64 << 10;

/// Memory of our own, writable until it is sealed.
#[derive(Debug)]
pub struct Draft {
    fd: OwnedFd,
    /// Of memory. Files are written by pwrite(2), in portions of [`PORTION`].
    window: Option<Window>,
    length: usize,
    kind: Kind,
}

/// Who may open a draft by its name: its maker.
const OWN: Mode = Mode::RUSR;
/// Who may open what it becomes: whoever can come by its folder.
const ALL: Mode = Mode::RUSR.union(Mode::RGRP).union(Mode::ROTH);

/// Where a draft is, and so what makes it immutable.
#[derive(Debug)]
enum Kind {
    Memory,
    Unnamed,
    Named(Name),
}

/// A draft's name, which goes with it.
#[derive(Debug)]
struct Name(PathBuf);

impl Drop for Name {
    fn drop(&mut self) {
        let _ = rustix::fs::unlink(&self.0);
    }
}

/// A draft that is written, and not yet sealed.
#[derive(Debug)]
pub struct Closed {
    fd: OwnedFd,
    kind: Kind,
}

static DRAFTS: AtomicU64 = AtomicU64::new(0);

/// A new file in `folder`, for nobody else yet: its bytes may be a part of what they are to be, or what another client must not see.
fn create(folder: &Path, name: &str, length: usize) -> rustix::io::Result<(OwnedFd, PathBuf)> {
    let number = DRAFTS.fetch_add(1, Ordering::Relaxed);
    let path = folder.join(format!("{name}.{}-{number}", std::process::id()));
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let fd = rustix::fs::open(&path, flags, OWN)?;
    // Room for all of it before it is written: a mapping has no way of saying that the disk is full.
    match rustix::fs::fallocate(&fd, rustix::fs::FallocateFlags::empty(), 0, length as u64) {
        Ok(()) => Ok((fd, path)),
        Err(errno) => {
            let _ = rustix::fs::unlink(&path);
            Err(errno)
        }
    }
}

impl Draft {
    /// Makes `length` bytes of zeros; `name` is what `/proc/PID/maps` shows of it.
    pub fn new(name: &str, length: usize) -> rustix::io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
            other => other,
        }?;
        rustix::fs::ftruncate(&fd, length as u64)?;
        let window = Window::new(fd.as_fd(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED)?;
        Ok(Self { fd, window: Some(window), length, kind: Kind::Memory })
    }

    /// The same in a file of `folder`, which has a name for a moment only.
    pub fn on_disk(folder: &Path, name: &str, length: usize) -> rustix::io::Result<Self> {
        let (fd, path) = create(folder, name, length)?;
        rustix::fs::unlink(&path)?;
        Ok(Self { fd, window: None, length, kind: Kind::Unnamed })
    }

    /// The same in a file of `folder` that is to have a name: see [`Closed::seal_as`].
    pub fn named(folder: &Path, length: usize) -> rustix::io::Result<Self> {
        let (fd, path) = create(folder, "draft", length)?;
        Ok(Self { fd, window: None, length, kind: Kind::Named(Name(path)) })
    }

    /// How many bytes it has.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Its bytes, to be filled, where it is memory. Files have none: see [`Draft::put`].
    pub fn bytes(&mut self) -> &mut [u8] {
        let Some(window) = &self.window else { return &mut [] };
        // SAFETY: the file is ours alone, nobody else has a descriptor of it yet, and `self` is borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(window.start.as_ptr(), window.length) }
    }

    /// Writes `bytes` at `offset`.
    pub fn put(&mut self, offset: usize, bytes: &[u8]) -> rustix::io::Result<()> {
        if offset.checked_add(bytes.len()).is_none_or(|end| end > self.length) {
            return Err(Errno::RANGE);
        }
        if let Some(window) = &self.window {
            return window.fill(offset, bytes);
        }
        let mut written = 0;
        while written < bytes.len() {
            let at = offset + written;
            let portion = bytes.len().min(written + PORTION - at % PORTION);
            let put = || rustix::io::pwrite(&self.fd, &bytes[written..portion], at as u64);
            written += rustix::io::retry_on_intr(put)?;
        }
        Ok(())
    }

    /// Makes it what it is for good.
    pub fn seal(self) -> rustix::io::Result<OwnedFd> {
        self.close().seal()
    }

    /// Ends the writing.
    pub fn close(self) -> Closed {
        // A writable mapping is in the way of the seal.
        let Self { fd, window, kind, .. } = self;
        drop(window);
        Closed { fd, kind }
    }

    /// Takes the right to write from everybody but the holder of what this returns.
    pub fn seal_for_others(self) -> rustix::io::Result<(OwnedFd, Window)> {
        let Self { fd, window: Some(window), .. } = self else { return Err(Errno::INVAL) };
        rustix::fs::fcntl_add_seals(&fd, FILLING)?;
        Ok((fd, window))
    }
}

impl Closed {
    /// Whether it is to have a name.
    pub fn is_named(&self) -> bool {
        matches!(self.kind, Kind::Named(_))
    }

    /// Makes it what it is for good. What was to have a name has none.
    pub fn seal(self) -> rustix::io::Result<OwnedFd> {
        let Self { fd, kind } = self;
        if !matches!(kind, Kind::Memory) {
            drop(kind);
            return immutable(&fd);
        }
        rustix::fs::fcntl_add_seals(&fd, FOR_GOOD | SealFlags::SEAL)?;
        Ok(fd)
    }

    /// Gives what was to have a name this one, in its folder, and makes it what it is for good.
    pub fn seal_as(self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let Self { fd, kind: Kind::Named(name) } = self else { return Err(Errno::INVAL) };
        rustix::fs::rename(&name.0, path)?;
        // Nothing has that name any more.
        drop(name);
        immutable(&fd).inspect_err(|_| drop(Name(path.to_owned())))
    }
}

/// Makes a file immutable, for all to read; the descriptor that this returns can only read it.
fn immutable(fd: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    // Whatever the umask. An immutable file's mode cannot be changed any more.
    rustix::fs::fchmod(fd, ALL)?;
    rustix::fs::ioctl_setflags(fd, rustix::fs::ioctl_getflags(fd)? | IFlags::IMMUTABLE)?;
    // The descriptor at hand may still write.
    let again = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::open(again, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// A mapping of a memory file.
#[derive(Debug)]
pub struct Window {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; who writes through it answers for that separately.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    /// Maps the first `length` bytes of `fd` where there is room.
    pub fn new(
        fd: BorrowedFd<'_>,
        length: usize,
        access: ProtFlags,
        flags: MapFlags,
    ) -> rustix::io::Result<Self> {
        Self::at(fd, 0, length, access, flags)
    }

    /// Maps `length` bytes of `fd` from `offset`, a multiple of the page size, where there is room.
    pub fn at(
        fd: BorrowedFd<'_>,
        offset: u64,
        length: usize,
        access: ProtFlags,
        flags: MapFlags,
    ) -> rustix::io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice takes nothing from anybody.
        let start = unsafe { rustix::mm::mmap(core::ptr::null_mut(), length, access, flags, fd, offset) }?;
        Ok(Self { start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?, length })
    }

    /// Maps the first `length` bytes of `fd`, which others may have mapped too, at a multiple of `alignment`.
    pub fn aligned(
        fd: BorrowedFd<'_>,
        length: usize,
        alignment: usize,
        access: ProtFlags,
    ) -> rustix::io::Result<Self> {
        let room = length + alignment;
        // SAFETY: a new mapping at an address of the kernel's choice, which nobody can touch.
        let reserved = unsafe {
            rustix::mm::mmap_anonymous(core::ptr::null_mut(), room, ProtFlags::empty(), MapFlags::PRIVATE)
        }?;
        let skip = reserved.addr().next_multiple_of(alignment) - reserved.addr();
        // SAFETY: all of it lies within the reservation, which is ours and has no references; what is left over at both ends is
        // given back.
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

    /// Its first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Writes `bytes` at `offset`, where nobody reads yet.
    pub fn fill(&self, offset: usize, bytes: &[u8]) -> rustix::io::Result<()> {
        if offset.checked_add(bytes.len()).is_none_or(|end| end > self.length) {
            return Err(Errno::RANGE);
        }
        // SAFETY: in bounds; the range was handed to nobody yet, so no reader races with us, and the caller holds the
        // lock under which ranges are given out.
        unsafe {
            core::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(offset), bytes.len());
        }
        Ok(())
    }

    /// Gives the mapping up without undoing it.
    pub fn leave(self) {
        core::mem::forget(self);
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and with the handle goes the last use of it.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// How far a descriptor can be relied upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strength {
    /// Nobody can change it.
    ForGood,
    /// Nobody but who made it can, and that one only before it was handed out.
    ByItsMaker,
}

/// Whether the first `end` bytes of `fd` are there to stay, and how sure that is; `None` where they are not.
pub fn strength(fd: BorrowedFd<'_>, end: u64) -> Option<Strength> {
    // A file in a tmpfs has seals, too, of which none matters.
    let seals = match rustix::fs::fcntl_get_seals(fd) {
        Ok(seals) if seals.contains(FILLING) || seals.contains(FOR_GOOD) => seals,
        _ if is_immutable(fd) => FOR_GOOD,
        _ => return None,
    };
    let size = u64::try_from(rustix::fs::fstat(fd).ok()?.st_size).ok()?;
    // A mapping shows the last page whole.
    if end > size.next_multiple_of(PAGE as u64) {
        return None;
    }
    if seals.contains(FOR_GOOD) {
        Some(Strength::ForGood)
    } else {
        seals.contains(FILLING).then_some(Strength::ByItsMaker)
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
    fn what_is_sealed_stays() {
        let mut draft = Draft::new("test", 5000).unwrap();
        draft.bytes()[4999] = 7;
        assert_eq!(strength(draft.fd.as_fd(), 1), None, "not yet");
        let fd = draft.seal().unwrap();
        assert_eq!(strength(fd.as_fd(), 5000), Some(Strength::ForGood));
        assert_eq!(strength(fd.as_fd(), 8193), None, "too short");
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&fd, 0), Err(Errno::PERM));
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        assert_eq!(rustix::fs::fallocate(&fd, punch, 0, 4096), Err(Errno::PERM));
        let writable = ProtFlags::READ | ProtFlags::WRITE;
        assert_eq!(Window::new(fd.as_fd(), 4096, writable, MapFlags::SHARED).unwrap_err(), Errno::PERM);
        assert_eq!(rustix::fs::fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE), Err(Errno::PERM));
        let mut byte = [0];
        assert_eq!(rustix::io::pread(&fd, &mut byte, 4999), Ok(1));
        assert_eq!(byte, [7]);
    }

    #[test]
    fn what_is_immutable_stays() {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let mut draft = Draft::on_disk(folder.path(), "test", 8192).unwrap();
        draft.put(8191, &[7]).unwrap();
        assert_eq!((draft.put(8191, &[7; 2]), draft.length()), (Err(Errno::RANGE), 8192));
        assert!(draft.bytes().is_empty());
        assert_eq!(strength(draft.fd.as_fd(), 1), None, "not yet");
        let fd = match draft.seal() {
            Ok(fd) => fd,
            Err(errno) => {
                orrery_testing::skipped!("no file can be made immutable in /var/tmp: {errno}");
                return;
            }
        };
        assert_eq!(strength(fd.as_fd(), 8192), Some(Strength::ForGood));
        assert_eq!(strength(fd.as_fd(), 8193), None, "too short");
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::BADF));
        let again = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let opened = rustix::fs::open(again, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        assert_eq!(opened.unwrap_err(), Errno::PERM, "not even by the superuser");
        let mut byte = [0];
        assert_eq!(rustix::io::pread(&fd, &mut byte, 8191), Ok(1));
        assert_eq!(byte, [7]);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "it has no name");
    }

    #[test]
    fn what_has_a_name_can_be_opened_and_stays() {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        drop(Draft::named(folder.path(), 4096).unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "a draft's name goes with it");
        let path = folder.path().join("object");
        let mode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_mode & 0o777;
        let mut draft = Draft::named(folder.path(), 4096).unwrap();
        draft.put(0, &[7]).unwrap();
        let closed = draft.close();
        assert!(closed.is_named() && mode(closed.fd.as_fd()) == 0o400, "it is nobody's business yet");
        let fd = match closed.seal_as(&path) {
            Ok(fd) => fd,
            Err(errno) => {
                assert!(!path.exists());
                orrery_testing::skipped!("no file can be made immutable in /var/tmp: {errno}");
                return;
            }
        };
        assert_eq!(strength(fd.as_fd(), 4096), Some(Strength::ForGood));
        assert_eq!(mode(fd.as_fd()), 0o444);
        let other = std::fs::File::open(&path).unwrap();
        assert_eq!(strength(other.as_fd(), 4096), Some(Strength::ForGood));
        assert!(std::fs::File::options().write(true).open(&path).is_err());
        assert!(std::fs::remove_file(&path).is_err());
        // Nor can another take its name.
        let second = Draft::named(folder.path(), 4096).unwrap().close().seal_as(&path);
        assert_eq!(second.unwrap_err(), Errno::PERM);
        let memory = Draft::new("test", 4096).unwrap();
        assert_eq!(memory.close().seal_as(&path).unwrap_err(), Errno::INVAL);
        rustix::fs::ioctl_setflags(&fd, rustix::fs::ioctl_getflags(&fd).unwrap() - IFlags::IMMUTABLE)
            .unwrap();
    }

    #[test]
    fn what_is_filled_is_written_by_its_maker_only() {
        let (fd, window) = Draft::new("test", 8192).unwrap().seal_for_others().unwrap();
        window.fill(4096, b"abc").unwrap();
        assert_eq!(window.fill(8190, b"abc"), Err(Errno::RANGE));
        assert_eq!(strength(fd.as_fd(), 8192), Some(Strength::ByItsMaker));
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::PERM));
        let writable = ProtFlags::READ | ProtFlags::WRITE;
        assert_eq!(Window::new(fd.as_fd(), 4096, writable, MapFlags::SHARED).unwrap_err(), Errno::PERM);
        let mut bytes = [0; 3];
        assert_eq!(rustix::io::pread(&fd, &mut bytes, 4096), Ok(3));
        assert_eq!(&bytes, b"abc");
    }
}
