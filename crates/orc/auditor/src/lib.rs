//! The auditor: what makes unmodified programs share (rtld-audit(7)).
//!
//! The dynamic loader calls it when it has mapped the objects of a program; it asks the store for objects with the bytes of
//! their read-only segments and puts these in their place. Its source is `auditor/auditor.c`, as it must do without any C
//! library.

pub mod container;
pub mod environment;

use std::fs::{self, DirBuilder};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::StatVfsMountFlags;

/// The shared object.
const BYTES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/liborrery-orc.so"));
/// Its name in the store's directory.
pub const NAME: &str = "liborrery-orc.so";

/// What 32-bit programs find in its place; empty if it could not be built.
const STUB: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/stub.so"));
/// What the loader puts in place of `$LIB` (ld.so(8)), in programs of this processor, on Debian.
const MULTIARCH: &str =
    if cfg!(target_arch = "aarch64") { "lib/aarch64-linux-gnu" } else { "lib/x86_64-linux-gnu" };
/// The same on Debian, Fedora and Arch Linux.
const LIBRARY_DIRECTORIES: [&str; 3] = [MULTIARCH, "lib64", "lib"];
/// The same in 32-bit programs: of Debian's i386 packages, and of those that Debian has for other processors, as Arch Linux. Fedora's is the
/// name that is Arch Linux' for 64 bits.
const LIBRARY_DIRECTORIES_32: [&str; 2] = ["lib/i386-linux-gnu", "lib32"];

/// Where it is in a directory that is used for this alone: others may not see what else is there.
const DIRECTORY: &str = "auditor";

/// Puts the auditor into the store's directory, where programs find it, and containers have it mounted.
///
/// Where no code can be run from there, as from `/run` of many machines (`noexec` in mount(8)), it is in the first of `elsewhere` from
/// which it can, and the store's directory has a link to it.
///
/// # Errors
/// Those of writing there; `PermissionDenied` where there is no directory that code can be run from.
pub fn install(directory: &Path, elsewhere: &[PathBuf]) -> io::Result<PathBuf> {
    if can_run_from(directory)? {
        return put(directory);
    }
    let mut tried = directory.display().to_string();
    for other in elsewhere {
        let home = other.join(DIRECTORY);
        let made = [other, &home].into_iter().try_for_each(|directory| make_directory(directory));
        let made = made.and_then(|()| can_run_from(&home));
        if made.is_ok_and(|can| can)
            && let Ok(path) = put(&home)
        {
            let draft = directory.join(format!("{NAME}.{}", std::process::id()));
            let _ = fs::remove_file(&draft);
            std::os::unix::fs::symlink(&path, &draft)?;
            fs::rename(&draft, directory.join(NAME))?;
            return Ok(path);
        }
        tried = format!("{tried}, nor from {}", home.display());
    }
    Err(not_from(&tried))
}

/// Makes a directory that all can pass through, whatever the umask, where there is none.
fn make_directory(directory: &Path) -> io::Result<()> {
    if directory.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
    fs::set_permissions(directory, std::os::unix::fs::PermissionsExt::from_mode(0o755))
}

fn not_from(directories: &str) -> io::Error {
    let text = format!("no code can be run from {directories} (mounted noexec?): choose another directory");
    io::Error::new(io::ErrorKind::PermissionDenied, text)
}

fn can_run_from(directory: &Path) -> io::Result<bool> {
    Ok(!rustix::fs::statvfs(directory)?.f_flag.contains(StatVfsMountFlags::NOEXEC))
}

fn put(directory: &Path) -> io::Result<PathBuf> {
    for name in LIBRARY_DIRECTORIES {
        make_directory(&directory.join(name))?;
        put_file(&directory.join(name), BYTES)?;
    }
    if !STUB.is_empty() {
        for name in LIBRARY_DIRECTORIES_32 {
            make_directory(&directory.join(name))?;
            put_file(&directory.join(name), STUB)?;
        }
    }
    put_file(directory, BYTES)
}

/// Returns the path of an auditor that was [found](find), as the loaders of all programs are to have it (`LD_AUDIT`): with `$LIB`, so that
/// each finds what is for its processor.
pub fn path_for_loaders(auditor: &Path) -> PathBuf {
    let directory = auditor.parent().unwrap_or(Path::new("/"));
    if LIBRARY_DIRECTORIES.iter().all(|name| directory.join(name).join(NAME).is_file()) {
        directory.join("$LIB").join(NAME)
    } else {
        auditor.to_owned()
    }
}

fn put_file(directory: &Path, bytes: &[u8]) -> io::Result<PathBuf> {
    let path = directory.join(NAME);
    let is_file = fs::symlink_metadata(&path).is_ok_and(|found| found.is_file());
    if is_file && fs::read(&path).is_ok_and(|there| there == bytes) {
        return Ok(path);
    }
    // Whole or not at all: programs may be starting.
    let draft = directory.join(format!("{NAME}.{}", std::process::id()));
    let _ = fs::remove_file(&draft);
    let mut file = fs::File::options().write(true).create_new(true).mode(0o644).open(&draft)?;
    file.write_all(bytes)?;
    fs::set_permissions(&draft, std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
    fs::rename(&draft, &path)?;
    Ok(path)
}

/// The auditor in the store's directory, or where a link there says, if it is one to be trusted: it will run in programs of
/// this user.
///
/// # Errors
/// `NotFound` where there is none; `PermissionDenied` where others than the superuser and this user could have written it,
/// or no code can be run from there.
pub fn find(directory: &Path) -> io::Result<PathBuf> {
    let trusted = [0, rustix::process::geteuid().as_raw()];
    let refused = |path: &Path| {
        let text = format!("{} may have been written by another user", path.display());
        io::Error::new(io::ErrorKind::PermissionDenied, text)
    };
    let mut path = fs::canonicalize(directory)?.join(NAME);
    let mut found = fs::symlink_metadata(&path)?;
    if found.is_symlink() && trusted.contains(&found.uid()) {
        path = fs::canonicalize(&path)?;
        found = fs::symlink_metadata(&path)?;
    }
    if !found.is_file() || !trusted.contains(&found.uid()) || found.mode() & 0o022 != 0 {
        return Err(refused(&path));
    }
    let directory = path.parent().ok_or(io::ErrorKind::NotFound)?;
    if can_run_from(directory)? { Ok(path) } else { Err(not_from(&directory.display().to_string())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_installed_once_and_trusted_only_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(find(directory.path()).unwrap_err().kind(), io::ErrorKind::NotFound);
        let path = install(directory.path(), &[]).unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        install(directory.path(), &[]).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode, "programs have it mapped");
        assert!(find(directory.path()).unwrap().ends_with(NAME));
        assert!(fs::read(&path).unwrap().starts_with(b"\x7fELF"));
        let for_loaders = path_for_loaders(&path);
        assert!(for_loaders.ends_with(Path::new("$LIB").join(NAME)), "{}", for_loaders.display());
        assert_eq!(path_for_loaders(Path::new("/elsewhere/a.so")), Path::new("/elsewhere/a.so"));
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
        assert_eq!(find(directory.path()).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        fs::write(&path, "something else").unwrap();
        install(directory.path(), &[]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), BYTES);
    }
}
