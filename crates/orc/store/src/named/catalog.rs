//! All that programs find without asking: named objects, the indexes that list them, and the addresses of libraries.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::{EXECUTABLE, PlacementRequest, RelocatedData};
use orrery_orc_wire::sealed_file::WrittenFile;

use crate::config::Config;
use crate::host_secret::HostSecret;
use crate::libraries::placement_table::PlacementTable;
use crate::libraries::{elf, prelink};
use crate::named::index::{self, Key};
use crate::named::object_directory::{self, ObjectDirectories};
use crate::named::open_tracker::OpenTracker;
use crate::objects::backing_file::BackingFile;
use crate::trust_domain::TrustDomain;

/// What programs of each trust domain find without asking.
#[derive(Debug)]
pub(crate) struct Catalog {
    secret: HostSecret,
    directories: ObjectDirectories,
    placement_tables: HashMap<TrustDomain, PlacementTable>,
    /// Backing files that have names, by their numbers, and the object that each is.
    files: HashMap<u64, (Arc<BackingFile>, TrustDomain, ObjectId)>,
    /// `None` if this user may have no inotify instance: then objects count as used only while they are open.
    tracker: Option<OpenTracker>,
}

impl Catalog {
    /// Creates an empty catalog.
    pub(crate) fn new(secret: HostSecret, tracker: Option<OpenTracker>) -> Self {
        Self {
            secret,
            directories: ObjectDirectories::default(),
            placement_tables: HashMap::new(),
            files: HashMap::new(),
            tracker,
        }
    }
}

/// Backing files with names.
impl Catalog {
    /// Returns whether it is known if the trust domain has a directory.
    pub(crate) fn has_looked_at(&self, domain: &TrustDomain) -> bool {
        self.directories.has_looked_at(domain)
    }

    /// Makes the directory of a trust domain. A failure is remembered, and not tried again.
    ///
    /// # Errors
    /// If there can be no directory, or the trust domain has no placement table yet.
    pub(crate) fn make_directory(&mut self, config: &Config, domain: &TrustDomain) -> io::Result<()> {
        let table = self.placement_tables.get(domain).ok_or(io::ErrorKind::NotFound)?;
        self.directories.make(config, &self.secret, domain, table.span())
    }

    /// Returns the directory in which objects of a trust domain get names, if it has one.
    pub(crate) fn object_directory(&self, domain: &TrustDomain) -> Option<PathBuf> {
        self.directories.path(domain)
    }

    /// Seals a file, and gives it a name if it was written in the trust domain's directory; returns its path then.
    ///
    /// # Errors
    /// Those of rename(2) and of sealing.
    pub(crate) fn seal(
        &self,
        domain: &TrustDomain,
        (id, label): (ObjectId, &str),
        written: WrittenFile,
    ) -> rustix::io::Result<(OwnedFd, Option<PathBuf>)> {
        let directory = self.directories.path(domain).filter(|_| written.is_named());
        let Some(directory) = directory else { return Ok((written.seal()?, None)) };
        let path = directory.join(object_directory::file_name(label, id));
        object_directory::remove_stale(&path);
        Ok((written.seal_as(&path)?, Some(path)))
    }

    /// Notes the object that a backing file is, if the file has a name.
    pub(crate) fn note_file(&mut self, file: &Arc<BackingFile>, domain: &TrustDomain, id: ObjectId) {
        if file.path.is_some() {
            self.files.insert(file.number, (Arc::clone(file), domain.clone(), id));
            self.await_open(file.number);
        }
    }

    /// Removes the name of a backing file, so that no program finds the object any more.
    pub(crate) fn forget_file(&mut self, number: u64) {
        if let Some((file, ..)) = self.files.remove(&number) {
            remove_name(&file);
        }
    }

    /// Removes the name of a backing file that became no object.
    pub(crate) fn remove_unless_noted(&self, file: &BackingFile) {
        if !self.files.contains_key(&file.number) {
            remove_name(file);
        }
    }

    /// Has the next open(2) of a file reported. If it cannot be, the file counts as used only while it is open.
    fn await_open(&mut self, number: u64) {
        let path = self.files.get(&number).and_then(|(file, ..)| file.path.as_deref());
        if let (Some(tracker), Some(path)) = (&mut self.tracker, path) {
            let _ = tracker.watch(number, path);
        }
    }

    /// Returns the objects that programs have opened by their names since the last call, also those of programs that have
    /// ended.
    pub(crate) fn take_opened(&mut self) -> Vec<(Arc<BackingFile>, TrustDomain, ObjectId)> {
        let numbers = self.tracker.as_mut().map(OpenTracker::take).unwrap_or_default();
        let opened: Vec<_> =
            numbers.into_iter().filter_map(|number| self.files.get(&number).cloned()).collect();
        for (file, ..) in &opened {
            self.await_open(file.number);
        }
        opened
    }
}

/// Addresses of libraries.
impl Catalog {
    /// Creates the placement table of a trust domain that has none; returns whether it had none.
    ///
    /// # Errors
    /// If there is no memory or no descriptor left.
    pub(crate) fn open_placement_table(&mut self, domain: &TrustDomain) -> io::Result<bool> {
        if self.placement_tables.contains_key(domain) {
            return Ok(false);
        }
        let table = PlacementTable::new(&self.secret, domain)?;
        self.placement_tables.insert(domain.clone(), table);
        Ok(true)
    }

    /// Copies the placement table that the server before this one had.
    ///
    /// # Errors
    /// If the memory is no placement table; if there is no memory or no descriptor left.
    pub(crate) fn copy_placement_table(
        &mut self,
        domain: &TrustDomain,
        old: BorrowedFd<'_>,
    ) -> io::Result<BorrowedFd<'_>> {
        let table = PlacementTable::copy(old, &self.secret, domain)?;
        self.placement_tables.insert(domain.clone(), table);
        self.placement_table(domain).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Returns the memory of a trust domain's placement table.
    pub(crate) fn placement_table(&self, domain: &TrustDomain) -> Option<BorrowedFd<'_>> {
        self.placement_tables.get(domain).map(PlacementTable::fd)
    }

    /// Returns the memory of all placement tables.
    pub(crate) fn placement_tables(&self) -> impl Iterator<Item = (&TrustDomain, BorrowedFd<'_>)> {
        self.placement_tables.iter().map(|(domain, table)| (domain, table.fd()))
    }

    /// Returns the address of a library, and publishes it in the index.
    pub(crate) fn place(&mut self, domain: &TrustDomain, library: &PlacementRequest) -> Option<u64> {
        let address = self.placement_tables.get_mut(domain)?.place(library)?;
        let key = [index::PLACEMENT, library.key, 0, 0, 0, 0, 0, 0];
        self.directories.publish(domain, &key, [address, 0, 0], None);
        Some(address)
    }
}

/// Entries of the index.
impl Catalog {
    /// Publishes that a file is to be had from an object that shows its first `length` bytes.
    pub(crate) fn publish_file(
        &mut self,
        domain: &TrustDomain,
        key: &Key,
        length: u64,
        (file, executable): (&BackingFile, bool),
    ) {
        let executable = u64::from(if executable { EXECUTABLE } else { 0 });
        let flags = executable | elf::flags(file.fd.as_fd(), length);
        self.directories.publish(domain, key, [length, flags, 0], Some(file));
    }

    /// Publishes the data of a library as they were relocated for its address, if it is loaded from `object`.
    pub(crate) fn publish_prelinked(
        &mut self,
        domain: &TrustDomain,
        library: &prelink::Library,
        address: u64,
        (object, file): (ObjectId, &BackingFile),
    ) {
        let key = [index::PRELINKED, library.placement.key, address, library.start, 0, 0, 0, 0];
        let value = [library.length, library.count, prelink::tag(object)];
        self.directories.publish(domain, &key, value, Some(file));
    }

    /// Publishes the relocated data of a library.
    pub(crate) fn publish_relocated(
        &mut self,
        domain: &TrustDomain,
        data: &RelocatedData,
        file: &BackingFile,
    ) {
        let key = [index::RELOCATED, data.key, data.address, data.start, data.length, 0, 0, 0];
        self.directories.publish(domain, &key, [data.length, 0, 0], Some(file));
    }
}

fn remove_name(file: &BackingFile) {
    if let Some(path) = &file.path {
        // A name that cannot be removed is found, and the object is what the name says.
        let _ = object_directory::remove(&file.fd, path);
    }
}
