//! Loading an extension into a manager that runs, from the other end of a connection.

use std::fs;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
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
    let file = |path: &Path, cause| ExtensionError::File { path: path.display().to_string(), cause };
    let text = fs::read_to_string(manifest).map_err(|cause| file(manifest, cause))?;
    let parsed = Manifest::parse(&manifest.display().to_string(), &text)?;
    let module = manifest.parent().unwrap_or(Path::new("")).join(&parsed.module);
    let bytes = fs::read(&module).map_err(|cause| file(&module, cause))?;
    let memory = sealed(&bytes).map_err(|cause| file(&module, cause))?;
    match client.ask_with(&Request::Load { manifest: text }, &[memory.as_fd()])? {
        (Reply::Loaded { number }, _) => Ok(number),
        _ => Err(ClientError::Reply.into()),
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
