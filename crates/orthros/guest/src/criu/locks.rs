//! Locks on files, which `criu restore --file-locks` takes again.

use std::path::Path;

use anyhow::Result;
use orrery_kimage::{Descriptor, Task};

use super::object_messages::FileLock;
use super::writer::{ImageFile, Kind};

/// `FL_FLOCK` and `FL_OFDLCK` of the kernel.
const FLOCK: u32 = 2;
const OF_DESCRIPTION: u32 = 1024;

/// All locks; one of an open description, which processes may share, once.
#[derive(Default)]
pub(super) struct Locks {
    all: Vec<FileLock>,
    descriptions: Vec<(u64, u32, u64)>,
}

impl Locks {
    /// Adds the locks that a process has on a file.
    pub(super) fn add(&mut self, process: &Task<'_>, pid: u32, descriptor: &Descriptor<'_>) -> Result<()> {
        for lock in descriptor.file.locks(process)? {
            let of_process = lock.flags & (FLOCK | OF_DESCRIPTION) == 0;
            let flag = match lock.flags {
                flags if flags & FLOCK != 0 => 2,
                flags if flags & OF_DESCRIPTION != 0 => 4,
                _ => 1,
            };
            let key = (descriptor.file.object().address(), flag, lock.start);
            let (pid, start) = (i32::try_from(pid)?, i64::try_from(lock.start)?);
            let known = if of_process {
                // Another descriptor of the same file shows the same lock.
                let inode = descriptor.file.inode()?.address();
                let own = (inode, u32::try_from(pid)? << 3, lock.start);
                let known = self.descriptions.contains(&own);
                self.descriptions.push(own);
                known
            } else {
                let known = self.descriptions.contains(&key);
                self.descriptions.push(key);
                known
            };
            if !known {
                let fd = i32::try_from(descriptor.number)?;
                let len = i64::try_from(lock.length)?;
                self.all.push(FileLock { flag, kind: lock.kind, pid, fd, start, len });
            }
        }
        Ok(())
    }

    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let mut image = ImageFile::create(folder, "filelocks", Kind::FileLocks)?;
        for lock in &self.all {
            image.put(lock)?;
        }
        image.finish()
    }
}
