//! The auditor: what makes unmodified programs share (rtld-audit(7)).
//!
//! The dynamic loader calls it when it has mapped the objects of a program; it asks the store for objects with the bytes of
//! their read-only segments and puts these in their place. Its source is `auditor/auditor.c`, as it must do without any C
//! library.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// The shared object.
const BYTES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/liborrery-orc.so"));
/// Its name in the store's folder.
pub(crate) const NAME: &str = "liborrery-orc.so";

/// Puts the auditor into the store's folder, where programs find it, and containers have it mounted.
///
/// # Errors
/// Those of writing there.
pub fn install(folder: &Path) -> io::Result<PathBuf> {
    let path = folder.join(NAME);
    if fs::read(&path).is_ok_and(|there| there == BYTES) {
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

/// The auditor in the store's folder, if it is one to be trusted: it will run in programs of this user.
///
/// # Errors
/// `NotFound` where there is none; `PermissionDenied` where others than the superuser and this user could have written it.
pub fn find(folder: &Path) -> io::Result<PathBuf> {
    let path = fs::canonicalize(folder)?.join(NAME);
    let found = fs::symlink_metadata(&path)?;
    let trusted = [0, rustix::process::geteuid().as_raw()];
    if !found.is_file() || !trusted.contains(&found.uid()) || found.mode() & 0o022 != 0 {
        let text = format!("{} may have been written by another user", path.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_installed_once_and_trusted_only_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(find(folder.path()).unwrap_err().kind(), io::ErrorKind::NotFound);
        let path = install(folder.path()).unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        install(folder.path()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode, "programs have it mapped");
        assert!(find(folder.path()).unwrap().ends_with(NAME));
        assert!(fs::read(&path).unwrap().starts_with(b"\x7fELF"));
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
        assert_eq!(find(folder.path()).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        fs::write(&path, "something else").unwrap();
        install(folder.path()).unwrap();
        assert_eq!(fs::read(&path).unwrap(), BYTES);
    }
}
