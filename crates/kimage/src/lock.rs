//! Locks on files: `flock`, and those of `fcntl`. Source: Linux `fs/locks.c`, `include/linux/filelock.h`.

use crate::error::Result;
use crate::file::OpenFile;
use crate::list;
use crate::object::Object;
use crate::task::Task;

/// `OFFSET_MAX`: to the end of the file, wherever that will be.
const END: u64 = i64::MAX.cast_unsigned();

/// A lock that a process, or an open file, has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileLock {
    /// `FL_POSIX` (1) or `FL_FLOCK` (2), and other flags, such as `FL_OFDLCK` (1024).
    pub flags: u32,
    /// `F_RDLCK` (0) or `F_WRLCK` (1).
    pub kind: u32,
    /// The first byte.
    pub start: u64,
    /// How many bytes; 0 up to the end.
    pub length: u64,
}

impl OpenFile<'_> {
    /// The locks that `task` has on this file through this open description.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn locks(&self, task: &Task<'_>) -> Result<Vec<FileLock>> {
        let inode = self.inode()?;
        // Since 6.3 in a structure of its own name; the member has kept its.
        let Some(context) = inode.pointer("i_flctx", "file_lock_context")? else { return Ok(Vec::new()) };
        let owner = task.object().u64("files")?;
        let mut found = Vec::new();
        for (path, by_file) in [("flc_flock", true), ("flc_posix", false)] {
            let kind = "file_lock";
            // Since 6.9 the common part of locks and leases is a member.
            let link = if context.kernel().types().has(kind, "fl_list") { "fl_list" } else { "c.flc_list" };
            let all = list::members(context.embedded(path, "list_head")?, kind, link);
            if let Some(problem) = all.problems.into_iter().next() {
                return Err(problem.error);
            }
            for lock in all.found {
                let holder = if by_file {
                    member(lock, "fl_file", "c.flc_file")?
                } else {
                    member(lock, "fl_owner", "c.flc_owner")?
                };
                // A lock of an open description (`F_OFD_SETLK`) has that as its owner.
                let mine = holder == self.object().address() || (!by_file && holder == owner);
                if mine {
                    found.push(read(lock)?);
                }
            }
        }
        Ok(found)
    }
}

fn member(lock: Object<'_>, old: &'static str, new: &'static str) -> Result<u64> {
    lock.u64(if lock.has(old) { old } else { new })
}

fn read(lock: Object<'_>) -> Result<FileLock> {
    let (start, end) = (lock.u64("fl_start")?, lock.u64("fl_end")?);
    let low = |value: u64| u32::try_from(value & 0xffff_ffff).unwrap_or(0);
    Ok(FileLock {
        flags: low(member(lock, "fl_flags", "c.flc_flags")?),
        kind: low(member(lock, "fl_type", "c.flc_type")?) & 0xff,
        start,
        length: if end >= END { 0 } else { (end + 1).saturating_sub(start) },
    })
}
