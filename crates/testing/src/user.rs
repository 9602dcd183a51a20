//! Running parts of a test as another user, who may not enter the checkout (`/root` is closed to others).

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::copy_program;

/// A temporary directory that every user can enter and read; dropping it removes it.
#[derive(Debug)]
pub struct PublicDirectory(tempfile::TempDir);

impl PublicDirectory {
    /// Makes an empty directory with mode 0755 in `/tmp`.
    ///
    /// # Panics
    /// If it cannot be made.
    #[must_use]
    pub fn new() -> Self {
        let mut builder = tempfile::Builder::new();
        let made =
            builder.prefix("orrery-test-").permissions(Permissions::from_mode(0o755)).tempdir_in("/tmp");
        Self(made.unwrap_or_else(|error| panic!("cannot make a public directory in /tmp: {error}")))
    }

    /// Returns its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Copies a file into it, with mode 0755, and returns the path of the copy.
    ///
    /// # Panics
    /// If it cannot be copied.
    #[must_use]
    pub fn copy(&self, file: impl AsRef<Path>) -> PathBuf {
        let file = file.as_ref();
        let name = file.file_name().unwrap_or_else(|| panic!("{} names no file", file.display()));
        let copy = self.path().join(name);
        copy_program(file, &copy);
        let changed = std::fs::set_permissions(&copy, Permissions::from_mode(0o755));
        changed.unwrap_or_else(|error| panic!("cannot open {} to others: {error}", copy.display()));
        copy
    }

    /// Makes a directory `name` in it that belongs to a user, and returns its path.
    ///
    /// # Panics
    /// If it cannot be made, or not be given to the user.
    #[must_use]
    pub fn directory_of(&self, uid: u32, name: &str) -> PathBuf {
        let directory = self.path().join(name);
        let made = std::fs::create_dir(&directory)
            .and_then(|()| std::os::unix::fs::chown(&directory, Some(uid), None));
        made.unwrap_or_else(|error| panic!("cannot make {} for user {uid}: {error}", directory.display()));
        directory
    }
}

impl Default for PublicDirectory {
    fn default() -> Self {
        Self::new()
    }
}
