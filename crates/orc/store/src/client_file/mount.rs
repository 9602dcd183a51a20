//! The mount through which a file was opened, and which mounts are of file systems that depend on no other process or host.

use std::collections::HashSet;
use std::os::fd::BorrowedFd;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, FileType, StatxFlags};

/// File systems that reply by themselves (statfs(2)): ext2 to ext4, XFS, Btrfs, tmpfs, ramfs, overlayfs, squashfs, EROFS,
/// F2FS, ZFS, bcachefs, ISO 9660.
const LOCAL: [u64; 12] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0x0102_1994,
    0x8584_58f6,
    OVERLAYFS,
    0x7371_7368,
    0xe0f5_e1e2,
    0xf2f5_2010,
    0x2fc1_2fc1,
    0xca45_1a4e,
    0x9660,
];
/// Of these, the one that shows files of others, which may be FUSE.
const OVERLAYFS: u64 = 0x794c_7630;
/// Of these, those whose files have inodes and times from an image, which another image may have as well: squashfs, EROFS, ISO 9660,
/// and overlayfs, which may be over them.
const FROM_IMAGES: [u64; 4] = [0x7371_7368, 0xe0f5_e1e2, 0x9660, OVERLAYFS];
/// The file system of memory files.
const TMPFS: u64 = 0x0102_1994;
/// How many mounts are remembered at most. Beyond that they are forgotten, and found out once more.
const MAX_MOUNTS: usize = 1024;

/// A file system, by its number in statfs(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileSystem(u64);

impl FileSystem {
    /// Returns that of a file. FUSE asks its daemon (`FUSE_STATFS`), so that this may never return.
    pub(crate) fn of(fd: BorrowedFd<'_>) -> Self {
        #[expect(clippy::cast_sign_loss, reason = "a magic number of any type")]
        Self(rustix::fs::fstatfs(fd).map_or(0, |found| found.f_type as u64))
    }

    /// Returns whether reading its files depends on no other process or host, unless it is over one where it does.
    pub(crate) fn is_local(self) -> bool {
        LOCAL.contains(&self.0)
    }

    /// Returns whether it shows no files of other file systems.
    pub(super) fn is_bottom(self) -> bool {
        self.0 != OVERLAYFS
    }

    /// Returns whether another mount of it may have files with the same inodes and times.
    pub(super) fn is_from_image(self) -> bool {
        FROM_IMAGES.contains(&self.0)
    }

    pub(super) fn is_tmpfs(self) -> bool {
        self.0 == TMPFS
    }
}

/// The mount through which a file was opened. Device numbers are used again, and an image has its inodes and times from where it
/// was made: without the mount, the files of an image would be taken for those of the image that it replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Mount {
    /// A number that no other mount gets until the machine is started again (`STATX_MNT_ID_UNIQUE`, Linux 6.8).
    Unique(u64),
    /// A number that is used again when the mount has gone; 0 if there is none.
    Reused(u64),
}

impl Mount {
    /// Returns the mount through which a file was opened, and the kind of the file as far as the kernel has it in memory. No
    /// file system that a user can mount asks a daemon or a host for this (`AT_STATX_DONT_SYNC` in statx(2)).
    pub(super) fn of(fd: BorrowedFd<'_>) -> (Self, FileType) {
        /// `STATX_MNT_ID_UNIQUE`.
        const UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
        // Tests ask for what older kernels have, as of the auditor.
        static IS_OLD: LazyLock<bool> =
            LazyLock::new(|| std::env::var_os("ORRERY_ORC_KERNEL").is_some_and(|kernel| kernel == "old"));
        if *IS_OLD {
            return (Self::Reused(0), FileType::Unknown);
        }
        let wanted = StatxFlags::TYPE | StatxFlags::MNT_ID | UNIQUE;
        let Ok(found) = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, wanted)
        else {
            return (Self::Reused(0), FileType::Unknown);
        };
        let has = |what: StatxFlags| found.stx_mask & what.bits() != 0;
        let mount = match found.stx_mnt_id {
            number if has(UNIQUE) => Self::Unique(number),
            number if has(StatxFlags::MNT_ID) => Self::Reused(number),
            _ => Self::Reused(0),
        };
        let kind = if has(StatxFlags::TYPE) {
            FileType::from_raw_mode(found.stx_mode.into())
        } else {
            FileType::Unknown
        };
        (mount, kind)
    }
}

/// Mounts of local file systems that are over no others: their files are examined and closed without a thread.
///
/// A mount shows the same file system as long as it exists, and its unique number is never used again, so nothing that is
/// remembered becomes wrong.
#[derive(Debug, Default)]
pub(super) struct LocalMounts(Mutex<HashSet<u64>>);

impl LocalMounts {
    fn lock(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the mount is known to be one of them.
    pub(super) fn has(&self, mount: Mount) -> bool {
        matches!(mount, Mount::Unique(number) if self.lock().contains(&number))
    }

    /// Remembers a mount if `file_system`, which was found there, makes it one of them.
    pub(super) fn note(&self, mount: Mount, file_system: FileSystem) {
        let Mount::Unique(number) = mount else { return };
        if file_system.is_local() && file_system.is_bottom() {
            let mut mounts = self.lock();
            if mounts.len() >= MAX_MOUNTS {
                mounts.clear();
            }
            mounts.insert(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_local_file_systems_are_remembered_within_a_bound() {
        let mounts = LocalMounts::default();
        mounts.note(Mount::Unique(1), FileSystem(OVERLAYFS));
        mounts.note(Mount::Unique(2), FileSystem(0x6573_5546));
        mounts.note(Mount::Reused(3), FileSystem(TMPFS));
        assert!(
            ![Mount::Unique(1), Mount::Unique(2), Mount::Unique(3), Mount::Reused(3)]
                .into_iter()
                .any(|mount| mounts.has(mount))
        );
        for number in 0..=MAX_MOUNTS as u64 {
            mounts.note(Mount::Unique(number), FileSystem(TMPFS));
        }
        assert!(mounts.has(Mount::Unique(MAX_MOUNTS as u64)));
        assert!(mounts.lock().len() <= MAX_MOUNTS);
    }
}
