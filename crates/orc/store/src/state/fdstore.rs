//! The server's side of the supervisor's records: everything that must outlive the server is stored there first.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::supervisor::channel::{Message, send};
use crate::supervisor::launcher::{Launcher, Part};
use crate::supervisor::records::Key;

/// The connection to the supervisor, if there is one.
#[derive(Debug)]
pub(crate) struct FdStore {
    link: Option<OwnedFd>,
    launcher: Launcher,
}

/// Encodes the value of a record.
pub(super) fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    // These types have no value that cannot be encoded.
    postcard::to_stdvec(value).unwrap_or_default()
}

/// Decodes a key or the value of a record.
///
/// # Errors
/// If the bytes are not an encoded `T`.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    postcard::from_bytes(bytes).map_err(io::Error::other)
}

impl FdStore {
    /// Creates one that stores nothing until it is [connected](Self::connect).
    pub(super) fn disconnected(launcher: Launcher) -> Self {
        Self { link: None, launcher }
    }

    /// Stores records at the other end of `link` from now on.
    pub(super) fn connect(&mut self, link: OwnedFd) {
        self.link = Some(link);
    }

    /// Closes the connection: the supervisor is gone.
    pub(super) fn disconnect(&mut self) {
        self.link = None;
    }

    /// Returns the socket to the supervisor.
    pub(super) fn link(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().map(AsFd::as_fd)
    }

    /// Stores a record in place of the one with the same key.
    pub(super) fn put(&mut self, key: &Key, value: &[u8], fd: Option<BorrowedFd<'_>>) {
        self.send(&Message::Put(&encode(key), value), fd);
    }

    /// Deletes a record.
    pub(super) fn delete(&mut self, key: &Key) {
        self.send(&Message::Delete(&encode(key)), None);
    }

    /// Reports that all records have been stored.
    pub(super) fn end(&mut self) {
        self.send(&Message::End, None);
    }

    fn send(&mut self, message: &Message<'_>, fd: Option<BorrowedFd<'_>>) {
        if let Some(link) = &self.link
            && send(link.as_fd(), message, fd).is_err()
        {
            self.link = None;
        }
    }

    /// Starts a new supervisor, which has no records yet.
    ///
    /// # Errors
    /// If no process can be started.
    pub(super) fn start_supervisor(&mut self) -> io::Result<()> {
        let (link, mut child) = self.launcher.start(Part::Supervisor)?;
        // It must not stay a zombie when it ends.
        std::thread::spawn(move || child.wait());
        self.link = Some(link);
        Ok(())
    }
}
