//! A descriptor that a client sent.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::FileType;

use crate::client_file::mount::{FileSystem, Mount};
use crate::client_file::reader_threads::ReaderThreads;
use crate::trust_domain::TrustDomain;

/// A descriptor that a client sent, of any kind.
///
/// Closing one may never return: close(2) of a file on FUSE asks the daemon (`FUSE_FLUSH`), for each descriptor, and closing the
/// last one of a socket may wait for what it has not sent (`SO_LINGER` in socket(7)). So one that is not known to be harmless is closed
/// by a thread that its account pays for ([`ReaderThreads`]).
#[derive(Debug)]
pub(crate) struct ClientFile {
    /// `None` when it has been closed.
    fd: Option<OwnedFd>,
    pub(super) mount: Mount,
    kind: FileType,
    account: TrustDomain,
    threads: ReaderThreads,
}

impl ClientFile {
    /// Takes a descriptor that a client of `account` sent.
    pub(super) fn new(fd: OwnedFd, account: &TrustDomain, threads: &ReaderThreads) -> Self {
        let (mount, kind) = Mount::of(fd.as_fd());
        Self { fd: Some(fd), mount, kind, account: account.clone(), threads: threads.clone() }
    }

    /// Returns whether it is a regular file of a file system that is known to depend on no other process or host, so that no call
    /// waits for one.
    pub(crate) fn is_known_local(&self) -> bool {
        self.kind == FileType::RegularFile && self.threads.local_mounts().has(self.mount)
    }

    /// Returns whether it is a file in memory (memfd_create(2), tmpfs(5)). The kernel knows that by itself.
    fn is_in_memory(&self) -> bool {
        self.fd.as_ref().is_some_and(|fd| rustix::fs::fcntl_get_seals(fd).is_ok())
    }

    /// Returns its file system, and remembers whether the mount is local. It may never return, so it is for [`ReaderThreads`]
    /// and for files that [are local](Self::is_known_local).
    pub(super) fn file_system(&self) -> FileSystem {
        let found = FileSystem::of(self.as_fd());
        self.threads.local_mounts().note(self.mount, found);
        found
    }

    /// Returns the account of the client that sent it.
    pub(super) fn account(&self) -> &TrustDomain {
        &self.account
    }

    /// Returns the threads in which it may be used.
    pub(super) fn threads(&self) -> &ReaderThreads {
        &self.threads
    }

    /// Closes it in the calling thread, which may never return: for [`ReaderThreads`] alone.
    pub(crate) fn close_here(mut self) {
        self.fd = None;
    }

    /// Lets `job` use the file, in a thread of the account if anything may hang. If the account has no thread left the file is
    /// closed.
    pub(crate) fn use_apart(self, job: impl FnOnce(Self) + Send + 'static) {
        if self.is_known_local() {
            job(self);
        } else {
            let (threads, account) = (self.threads.clone(), self.account.clone());
            threads.start(&account, move || job(self));
        }
    }
}

impl AsFd for ClientFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.fd {
            Some(fd) => fd.as_fd(),
            None => unreachable!("only a function that consumes the file closes it"),
        }
    }
}

impl Drop for ClientFile {
    fn drop(&mut self) {
        let is_harmless = self.fd.is_some() && (self.is_known_local() || self.is_in_memory());
        if let Some(fd) = self.fd.take()
            && !is_harmless
        {
            self.threads.close(&self.account, fd);
        }
    }
}
