//! The host's secret, from which the places of libraries are derived (see [`book`](crate::libraries::placement_table)).
//!
//! It lies in a file that only the store can read, so that a store that is started again finds the same places. Hosts that are
//! given the same file agree about them.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

/// What nobody else knows.
#[derive(Clone)]
pub(crate) struct Secret([u8; 32]);

impl core::fmt::Debug for Secret {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// One that is forgotten when the store ends.
    ///
    /// # Errors
    /// Where there are no random numbers.
    pub(crate) fn passing() -> io::Result<Self> {
        let mut bytes = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// That of a file, which is made where there is none.
    ///
    /// # Errors
    /// `PermissionDenied` where others can read it or have made it, `InvalidData` where it has not 32 bytes; those of reading
    /// and writing.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        match Self::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        let fresh = Self::passing()?;
        let mut file = match File::options().write(true).create_new(true).mode(0o600).open(path) {
            // Another store was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Self::read(path),
            other => other?,
        };
        file.write_all(&fresh.0)?;
        Ok(fresh)
    }

    fn read(path: &Path) -> io::Result<Self> {
        let error = |kind, what: &str| io::Error::new(kind, format!("the secret {}: {what}", path.display()));
        let file = File::options().read(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
        let found = file.metadata()?;
        if found.uid() != rustix::process::geteuid().as_raw() || found.mode() & 0o077 != 0 {
            let what = "others may know it: it must be the store's own, with mode 0600";
            return Err(error(io::ErrorKind::PermissionDenied, what));
        }
        let mut bytes = Vec::new();
        file.take(64).read_to_end(&mut bytes)?;
        let bytes =
            bytes.try_into().map_err(|_| error(io::ErrorKind::InvalidData, "it must have 32 bytes"))?;
        Ok(Self(bytes))
    }

    /// A number that cannot be told from a random one by whoever does not know the secret: keyed BLAKE3 of the parts.
    pub(crate) fn number(&self, parts: &[&[u8]]) -> u64 {
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
    fn a_secret_is_made_once_and_known_to_nobody_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let first = Secret::of(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let again = Secret::of(&path).unwrap();
        assert_eq!(first.number(&[b"a", b"b"]), again.number(&[b"a", b"b"]));
        assert_ne!(first.number(&[b"a", b"b"]), first.number(&[b"ab", b""]), "parts are parts");
        let other = Secret::passing().unwrap();
        assert_ne!(first.number(&[b"a"]), other.number(&[b"a"]));
        assert_eq!(format!("{first:?}"), "Secret(..)");
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
        assert_eq!(Secret::of(&path).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::write(&path, "short").unwrap();
        assert_eq!(Secret::of(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
