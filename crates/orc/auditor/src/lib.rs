//! The auditor: what makes unmodified programs share (rtld-audit(7)).
//!
//! The dynamic loader calls it when it has mapped the objects of a program; it asks the store for objects with the bytes of
//! their read-only segments and puts these in their place. Its source is `auditor/auditor.c`, as it must do without any C
//! library.

use std::fs::{self, DirBuilder};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::StatVfsMountFlags;

/// The shared object.
const BYTES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/liborrery-orc.so"));
/// Its name in the store's folder.
pub const NAME: &str = "liborrery-orc.so";

/// Where it lies in a folder that is used for this alone: others may not see what else is there.
const FOLDER: &str = "auditor";

/// Puts the auditor into the store's folder, where programs find it, and containers have it mounted.
///
/// Where no code can be run from there, as from `/run` of many machines (`noexec` in mount(8)), it lies in the first of `elsewhere` from
/// which it can, and the store's folder has a link to it.
///
/// # Errors
/// Those of writing there; `PermissionDenied` where there is no folder that code can be run from.
pub fn install(folder: &Path, elsewhere: &[PathBuf]) -> io::Result<PathBuf> {
    if can_run_from(folder)? {
        return put(folder);
    }
    let mut tried = folder.display().to_string();
    for other in elsewhere {
        let home = other.join(FOLDER);
        let made = [other, &home].into_iter().try_for_each(|folder| make_folder(folder));
        let made = made.and_then(|()| can_run_from(&home));
        if made.is_ok_and(|can| can)
            && let Ok(path) = put(&home)
        {
            let draft = folder.join(format!("{NAME}.{}", std::process::id()));
            let _ = fs::remove_file(&draft);
            std::os::unix::fs::symlink(&path, &draft)?;
            fs::rename(&draft, folder.join(NAME))?;
            return Ok(path);
        }
        tried = format!("{tried}, nor from {}", home.display());
    }
    Err(not_from(&tried))
}

/// Makes a folder that all can pass through, whatever the umask, where there is none.
fn make_folder(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
    fs::set_permissions(folder, std::os::unix::fs::PermissionsExt::from_mode(0o755))
}

fn not_from(folders: &str) -> io::Error {
    let text = format!("no code can be run from {folders} (mounted noexec?): choose another folder");
    io::Error::new(io::ErrorKind::PermissionDenied, text)
}

fn can_run_from(folder: &Path) -> io::Result<bool> {
    Ok(!rustix::fs::statvfs(folder)?.f_flag.contains(StatVfsMountFlags::NOEXEC))
}

fn put(folder: &Path) -> io::Result<PathBuf> {
    let path = folder.join(NAME);
    let is_file = fs::symlink_metadata(&path).is_ok_and(|found| found.is_file());
    if is_file && fs::read(&path).is_ok_and(|there| there == BYTES) {
        return Ok(path);
    }
    // Whole or not at all: programs may be starting.
    let draft = folder.join(format!("{NAME}.{}", std::process::id()));
    let _ = fs::remove_file(&draft);
    let mut file = fs::File::options().write(true).create_new(true).mode(0o644).open(&draft)?;
    file.write_all(BYTES)?;
    fs::set_permissions(&draft, std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
    fs::rename(&draft, &path)?;
    Ok(path)
}

/// The auditor in the store's folder, or where a link there says, if it is one to be trusted: it will run in programs of
/// this user.
///
/// # Errors
/// `NotFound` where there is none; `PermissionDenied` where others than the superuser and this user could have written it,
/// or no code can be run from there.
pub fn find(folder: &Path) -> io::Result<PathBuf> {
    let trusted = [0, rustix::process::geteuid().as_raw()];
    let refused = |path: &Path| {
        let text = format!("{} may have been written by another user", path.display());
        io::Error::new(io::ErrorKind::PermissionDenied, text)
    };
    let mut path = fs::canonicalize(folder)?.join(NAME);
    let mut found = fs::symlink_metadata(&path)?;
    if found.is_symlink() && trusted.contains(&found.uid()) {
        path = fs::canonicalize(&path)?;
        found = fs::symlink_metadata(&path)?;
    }
    if !found.is_file() || !trusted.contains(&found.uid()) || found.mode() & 0o022 != 0 {
        return Err(refused(&path));
    }
    let folder = path.parent().ok_or(io::ErrorKind::NotFound)?;
    if can_run_from(folder)? { Ok(path) } else { Err(not_from(&folder.display().to_string())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_installed_once_and_trusted_only_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(find(folder.path()).unwrap_err().kind(), io::ErrorKind::NotFound);
        let path = install(folder.path(), &[]).unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        install(folder.path(), &[]).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode, "programs have it mapped");
        assert!(find(folder.path()).unwrap().ends_with(NAME));
        assert!(fs::read(&path).unwrap().starts_with(b"\x7fELF"));
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
        assert_eq!(find(folder.path()).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        fs::write(&path, "something else").unwrap();
        install(folder.path(), &[]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), BYTES);
    }
}
