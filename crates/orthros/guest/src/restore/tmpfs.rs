//! Files outside the service's disk. They are in memory file systems (`/tmp`, `/run`, `/dev/shm`, and what was changed
//! in the image), and so in the dead memory: they are created again under the same names, with the same contents,
//! owners and times.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use orrery_kimage::{MemoryFile, Task, Time};
use orrery_orthros_wire::TmpfsFiles;
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, Timespec, Timestamps, Uid, chownat, mknodat, utimensat};

/// A file that a guest creates when it has booted: what is older came with the image.
pub(crate) const BOOT_MARKER: &[&str] = &["etc", "orrery", "booted"];
/// Names that belong to the running kernel.
const SYSTEM: &[&str] = &["/run/orrery", "/dev", "/proc", "/sys", "/modules"];
/// The one directory in `/dev` whose files are the service's.
const SHARED_MEMORY: &str = "/dev/shm";
const MOST_CONTENT: u64 = 1 << 30;

/// Returns whether a file is the service's.
fn is_of_service(path: &Path) -> bool {
    if path.starts_with(SHARED_MEMORY) {
        return path != Path::new(SHARED_MEMORY);
    }
    let text = path.to_string_lossy();
    !SYSTEM.iter().any(|own| path.starts_with(own)) && !text.starts_with("/run/criu.")
}

/// Creates the files again that the service with the process `root` had in memory file systems.
pub(crate) fn restore(root: &Task<'_>, remarks: &mut Vec<String>) -> TmpfsFiles {
    let walk = root.memory_files(BOOT_MARKER);
    remarks.extend(walk.problems.iter().map(|problem| format!("left out {problem}")));
    let mut carried = TmpfsFiles::default();
    let mut known: HashMap<(u32, u64), PathBuf> = HashMap::new();
    let mut directories: Vec<(PathBuf, &MemoryFile<'_>)> = Vec::new();
    // The directory that the disk is mounted on: under its name there is the disk, which has an owner of its own.
    let covered = crate::disk::mount_point();
    for file in &walk.found {
        let path = PathBuf::from(std::ffi::OsStr::from_bytes(&file.path));
        if !is_of_service(&path) || covered.as_ref() == Some(&path) {
            continue;
        }
        match create(file, &path, &mut known) {
            Ok(None) => {}
            Ok(Some(bytes)) => {
                carried.files += 1;
                carried.bytes += bytes;
                if path.is_dir() {
                    directories.push((path, file));
                }
            }
            Err(error) => remarks.push(format!("left out {}: {error:#}", path.display())),
        }
    }
    // A file that is created in a directory changes its times.
    for (path, file) in directories.into_iter().rev() {
        let _ = set_times(&path, file);
    }
    carried
}

/// Creates a file, and returns the size of its content; `None` for a socket, which is created when criu binds it.
fn create(
    file: &MemoryFile<'_>,
    path: &Path,
    known: &mut HashMap<(u32, u64), PathBuf>,
) -> Result<Option<u64>> {
    let attributes = &file.attributes;
    let kind = FileType::from_raw_mode(attributes.mode);
    if kind == FileType::Socket {
        // The socket that is bound to it makes it.
        return Ok(None);
    }
    if kind == FileType::Directory {
        match fs::create_dir(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error.into()),
            _ => return set_owner(file, path).map(|()| Some(0)),
        }
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    if attributes.links > 1 {
        if let Some(other) = known.get(&(file.device, attributes.number)) {
            fs::hard_link(other, path)?;
            return Ok(Some(0));
        }
        known.insert((file.device, attributes.number), path.to_owned());
    }
    let mut size = 0;
    match kind {
        FileType::RegularFile => {
            let content = file.content(MOST_CONTENT)?;
            size = content.len() as u64;
            fs::write(path, content)?;
        }
        FileType::Symlink => {
            let target = file.content(4096)?;
            std::os::unix::fs::symlink(std::ffi::OsStr::from_bytes(&target), path)?;
        }
        kind => {
            let device = libc::makedev(attributes.device >> 20, attributes.device & 0xf_ffff);
            mknodat(CWD, path, kind, Mode::from_raw_mode(attributes.mode & 0o7777), device)?;
        }
    }
    set_owner(file, path)?;
    set_times(path, file)?;
    Ok(Some(size))
}

/// Sets the owner and permissions of a file.
fn set_owner(file: &MemoryFile<'_>, path: &Path) -> Result<()> {
    let attributes = &file.attributes;
    let (uid, gid) = (Uid::from_raw(attributes.uid), Gid::from_raw(attributes.gid));
    chownat(CWD, path, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW).context("its owner")?;
    if FileType::from_raw_mode(attributes.mode) != FileType::Symlink {
        rustix::fs::chmod(path, Mode::from_raw_mode(attributes.mode & 0o7777)).context("its permissions")?;
    }
    Ok(())
}

fn set_times(path: &Path, file: &MemoryFile<'_>) -> Result<()> {
    let time = |(seconds, nanoseconds): Time| Timespec { tv_sec: seconds, tv_nsec: i64::from(nanoseconds) };
    let times = Timestamps {
        last_access: time(file.attributes.accessed),
        last_modification: time(file.attributes.modified),
    };
    utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).context("its times")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_system_are_left_alone() {
        for own in [
            "/run/orrery/images/core-1.img",
            "/run/criu.kdat",
            "/dev/null",
            "/dev/shm",
            "/proc/1",
            "/modules/1",
        ] {
            assert!(!is_of_service(Path::new(own)), "{own}");
        }
        for wanted in ["/run/text", "/tmp/x", "/dev/shm/PostgreSQL.17", "/etc/passwd", "/run/criteria"] {
            assert!(is_of_service(Path::new(wanted)), "{wanted}");
        }
    }
}
