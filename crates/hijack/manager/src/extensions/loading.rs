//! Loading an extension into a manager that runs, from the other end of a connection.

use std::fs;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use orrery_extension::Manifest;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::ExtensionError;
use crate::client::{Client, ClientError};
use crate::protocol::{Reply, Request};

/// Loads the extension of a manifest: it acts with the rights of the connection. Returns its number.
///
/// # Errors
/// [`ExtensionError`] with what is wrong with the files, and what the manager refuses.
pub fn load(client: &Client, manifest: &Path) -> Result<u64, ExtensionError> {
    Package::read(manifest)?.load(client)
}

/// An extension as connections present it: its manifest and its module, as they were when they were read, in memory that nobody can
/// change any more. Whoever holds it can load it again into another manager.
#[derive(Debug)]
pub struct Package {
    manifest: OwnedFd,
    module: OwnedFd,
}

impl Package {
    /// Reads a manifest, and the module that it names.
    ///
    /// # Errors
    /// What is wrong with the files.
    pub fn read(manifest: &Path) -> Result<Self, ExtensionError> {
        let file = |path: &Path, cause| ExtensionError::File { path: path.display().to_string(), cause };
        let text = fs::read_to_string(manifest).map_err(|cause| file(manifest, cause))?;
        let parsed = Manifest::parse(&manifest.display().to_string(), &text)?;
        let path = manifest.parent().unwrap_or(Path::new("")).join(&parsed.module);
        let bytes = fs::read(&path).map_err(|cause| file(&path, cause))?;
        let module = sealed(&bytes).map_err(|cause| file(&path, cause))?;
        let manifest = sealed(text.as_bytes()).map_err(|cause| file(manifest, cause))?;
        Ok(Self { manifest, module })
    }

    /// Returns one whose descriptors another process has passed on, manifest and module.
    #[must_use]
    pub fn from_fds([manifest, module]: [OwnedFd; 2]) -> Self {
        Self { manifest, module }
    }

    /// Returns its descriptors: manifest and module.
    #[must_use]
    pub fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.manifest.as_fd(), self.module.as_fd()]
    }

    /// Returns the name in the manifest, for messages.
    #[must_use]
    pub fn name(&self) -> String {
        let manifest = self.text().ok().and_then(|text| Manifest::parse("manifest", &text).ok());
        manifest.map(|manifest| manifest.name).unwrap_or_default()
    }

    /// Loads it: it acts with the rights of the connection. Returns its number.
    ///
    /// # Errors
    /// What the manager refuses, and those of the connection.
    pub fn load(&self, client: &Client) -> Result<u64, ExtensionError> {
        let file = |cause| ExtensionError::File { path: "the manifest".to_owned(), cause };
        let manifest = self.text().map_err(file)?;
        match client.ask_with(&Request::Load { manifest }, &[self.module.as_fd()])? {
            (Reply::Loaded { number }, _) => Ok(number),
            _ => Err(ClientError::Reply.into()),
        }
    }

    fn text(&self) -> io::Result<String> {
        let mut file = fs::File::from(self.manifest.try_clone()?);
        let mut text = String::new();
        file.rewind()?;
        file.read_to_string(&mut text)?;
        Ok(text)
    }
}

/// Returns memory with these bytes that nobody can change: the manager reads no files of others.
fn sealed(bytes: &[u8]) -> io::Result<OwnedFd> {
    let memory = memfd_create("orrery-extension", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = fs::File::from(memory);
    file.write_all(bytes)?;
    let all = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&file, all)?;
    Ok(file.into())
}
