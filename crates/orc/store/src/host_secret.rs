//! The host's secret, from which the addresses of libraries and the names of directories are derived.
//!
//! It is in a file that only the store can read, so that a store that is started again derives the same addresses. Hosts
//! that have the same file derive the same ones.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

/// The key of the hashes.
#[derive(Clone)]
pub(crate) struct HostSecret([u8; 32]);

impl core::fmt::Debug for HostSecret {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("HostSecret(..)")
    }
}

impl HostSecret {
    /// Creates a secret that lasts as long as the store.
    ///
    /// # Errors
    /// If there are no random numbers.
    pub(crate) fn ephemeral() -> io::Result<Self> {
        let mut bytes = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// Loads the secret of a file, which is created if it is not there.
    ///
    /// # Errors
    /// `PermissionDenied` if other users can read it or have created it, `InvalidData` if it is not 32 bytes long; those of
    /// reading and writing.
    pub(crate) fn load_or_create(path: &Path) -> io::Result<Self> {
        match Self::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        let fresh = Self::ephemeral()?;
        let mut file = match File::options().write(true).create_new(true).mode(0o600).open(path) {
            // Another store was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Self::read(path),
            other => other?,
        };
        file.write_all(&fresh.0)?;
        Ok(fresh)
    }

    fn read(path: &Path) -> io::Result<Self> {
        let error = |kind, what: &str| {
            io::Error::new(kind, format!("cannot use the secret {}: {what}", path.display()))
        };
        let file = File::options().read(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
        let found = file.metadata()?;
        if found.uid() != rustix::process::geteuid().as_raw() || found.mode() & 0o077 != 0 {
            let what = "others may have read it; it must belong to the store's user, with mode 0600";
            return Err(error(io::ErrorKind::PermissionDenied, what));
        }
        let mut bytes = Vec::new();
        file.take(64).read_to_end(&mut bytes)?;
        let bytes =
            bytes.try_into().map_err(|_| error(io::ErrorKind::InvalidData, "it is not 32 bytes long"))?;
        Ok(Self(bytes))
    }

    /// Returns the first word of the keyed BLAKE3 hash of the parts, which nobody can predict without the secret.
    pub(crate) fn keyed_hash(&self, parts: &[&[u8]]) -> u64 {
        let mut hash = blake3::Hasher::new_keyed(&self.0);
        for part in parts {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let mut word = [0; 8];
        word.copy_from_slice(&hash.finalize().as_bytes()[..8]);
        u64::from_le_bytes(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_created_once_and_only_its_owner_can_read_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        let first = HostSecret::load_or_create(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let again = HostSecret::load_or_create(&path).unwrap();
        assert_eq!(first.keyed_hash(&[b"a", b"b"]), again.keyed_hash(&[b"a", b"b"]));
        assert_ne!(first.keyed_hash(&[b"a", b"b"]), first.keyed_hash(&[b"ab", b""]), "parts are parts");
        let other = HostSecret::ephemeral().unwrap();
        assert_ne!(first.keyed_hash(&[b"a"]), other.keyed_hash(&[b"a"]));
        assert_eq!(format!("{first:?}"), "HostSecret(..)");
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
        assert_eq!(HostSecret::load_or_create(&path).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::write(&path, "short").unwrap();
        assert_eq!(HostSecret::load_or_create(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
