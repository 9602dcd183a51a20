//! All that a running store knows.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::{PlacementRequest, Refusal, RelocatedData};
use orrery_orc_wire::sealed_file::WrittenFile;

use crate::client_file::FileKey;
use crate::config::Config;
use crate::event_log::EventLog;
use crate::libraries::prelink;
use crate::named::catalog::Catalog;
use crate::named::index::Key as IndexKey;
use crate::objects::backing_file::{BackingFile, Object, exhausted, whole_pages};
use crate::objects::small_objects::{self, SmallObjectFile};
use crate::objects::table::{Change, Entry, Holder, Objects, QuotaExceeded, Table};
use crate::state::clients::{Clients, Connection};
use crate::state::descriptor_budget::DescriptorBudget;
use crate::state::fdstore::{FdStore, encode};
use crate::state::file_occupancy::FileOccupancy;
use crate::state::known_content::KnownContent;
use crate::state::origins::Origins;
use crate::supervisor::records::{AccountRecord, Key, ObjectRecord, PeerRecord, encode_path};
use crate::trust_domain::TrustDomain;

/// Everything that requests change.
#[derive(Debug)]
pub(crate) struct State {
    pub(super) config: Arc<Config>,
    pub(super) event_log: Arc<EventLog>,
    pub(super) objects: Table<Object>,
    pub(super) clients: Clients,
    pub(super) catalog: Catalog,
    pub(super) fdstore: FdStore,
    pub(super) descriptors: DescriptorBudget,
    /// The next number of a backing file or a connection.
    pub(super) next_number: u64,
    /// Locks that say that each socket has a store, held as long as there is one.
    pub(super) locks: Vec<OwnedFd>,
    occupancy: FileOccupancy,
    small_objects: HashMap<TrustDomain, SmallObjectFile>,
    known_files: KnownContent<FileKey>,
    known_relocated: KnownContent<RelocatedData>,
    origins: Origins,
    /// Seconds since the store started, when the transaction began; what was restored came at 0.
    clock: u64,
}

/// Creation, and what ends a transaction.
impl State {
    /// Creates the state of a store that has nothing yet.
    pub(super) fn new(
        config: Arc<Config>,
        event_log: Arc<EventLog>,
        objects: Table<Object>,
        catalog: Catalog,
        fdstore: FdStore,
    ) -> Self {
        Self {
            config,
            event_log,
            objects,
            clients: Clients::default(),
            catalog,
            fdstore,
            // What was there before stays.
            descriptors: DescriptorBudget::unlimited(),
            next_number: 1,
            locks: Vec::new(),
            occupancy: FileOccupancy::default(),
            small_objects: HashMap::new(),
            known_files: KnownContent::new(),
            known_relocated: KnownContent::new(),
            origins: Origins::default(),
            clock: 0,
        }
    }

    /// Sets the time at which the transaction happens.
    pub(super) fn set_clock(&mut self, seconds: u64) {
        self.clock = seconds;
    }

    /// Sends the changes of the object table to the supervisor and the log.
    pub(super) fn record_changes(&mut self) {
        for change in self.objects.take_changes() {
            match change {
                Change::Held(holder, domain, id, 0) => self.fdstore.delete(&Key::Hold(holder, domain, id)),
                Change::Held(holder, domain, id, count) => {
                    self.fdstore.put(&Key::Hold(holder, domain, id), &encode(&count), None);
                }
                Change::Evicted(domain, id) => self.forget_evicted(domain, id),
            }
        }
    }

    fn forget_evicted(&mut self, domain: TrustDomain, id: ObjectId) {
        self.event_log.note("evict", Some(&domain), Some(id), "");
        if let Some(file) = self.occupancy.remove(&domain, id) {
            self.descriptors.remove(self.objects.accounts().of(&domain));
            self.fdstore.delete(&Key::BackingFile(file));
            self.catalog.forget_file(file);
            if self.small_objects.get(&domain).is_some_and(|small| small.number() == file) {
                self.small_objects.remove(&domain);
            }
        }
        self.origins.remove(&domain, id);
        self.fdstore.delete(&Key::Object(domain, id));
    }

    fn take_number(&mut self) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        number
    }
}

/// Clients and the supervisor.
impl State {
    /// Returns all connected clients.
    pub(crate) fn clients(&self) -> &Clients {
        &self.clients
    }

    /// Returns whether a trust domain may have another descriptor.
    pub(crate) fn may_have_descriptor(&self, domain: &TrustDomain) -> bool {
        self.descriptors.to_free(self.objects.accounts().of(domain)) == 0
    }

    /// Returns the account of a trust domain.
    pub(crate) fn account<'a>(&'a self, domain: &'a TrustDomain) -> &'a TrustDomain {
        self.objects.accounts().of(domain)
    }

    /// Returns the bytes that a trust domain may have.
    pub(crate) fn quota(&self, domain: &TrustDomain) -> u64 {
        self.objects.accounts().share(domain).min(self.config.quota)
    }

    /// Enters a trust domain that is not known into `account`.
    pub(crate) fn admit(&mut self, domain: &TrustDomain, account: &TrustDomain) {
        if let Some(share) = self.objects.accounts_mut().admit(domain, account) {
            let record = AccountRecord { account: account.clone(), share };
            self.fdstore.put(&Key::Account(domain.clone()), &encode(&record), None);
        }
    }

    /// Forgets trust domains that have no objects and no clients.
    fn forget_unused_domains(&mut self) {
        let accounts = self.objects.accounts();
        let is_unused = |domain: &TrustDomain| !self.objects.has_any(domain) && !self.clients.has_any(domain);
        let unused: Vec<TrustDomain> =
            accounts.iter().map(|(domain, ..)| domain).filter(|domain| is_unused(domain)).cloned().collect();
        for domain in unused {
            self.objects.accounts_mut().forget(&domain);
            self.fdstore.delete(&Key::Account(domain));
        }
    }

    /// Adds a client that has connected.
    pub(crate) fn connect(&mut self, socket: OwnedFd, peer: PeerRecord) -> (Holder, Arc<Connection>) {
        let number = self.take_number();
        self.fdstore.put(&Key::Connection(number), &encode(&peer), Some(socket.as_fd()));
        self.descriptors.add(&peer.account);
        let connection = Arc::new(Connection { socket, peer });
        self.clients.insert(number, Arc::clone(&connection));
        (number, connection)
    }

    /// Removes a client and all its holds.
    pub(crate) fn disconnect(&mut self, number: Holder) {
        if let Some(connection) = self.clients.remove(number) {
            self.event_log.did(&connection.peer, "leave", None, None);
            // A server that was killed may still have the socket open: one of its threads hangs.
            let _ = rustix::net::shutdown(&connection.socket, rustix::net::Shutdown::Both);
            self.descriptors.remove(&connection.peer.account);
            self.objects.remove_holder(number, self.clock);
            // Its holds go first: a server that dies in between must not find holds of nobody.
            self.record_changes();
            self.fdstore.delete(&Key::Connection(number));
        }
    }

    /// Returns the socket to the supervisor, if there is one.
    pub(crate) fn supervisor_link(&self) -> Option<BorrowedFd<'_>> {
        self.fdstore.link()
    }

    /// Closes the socket to a supervisor that is gone.
    pub(crate) fn lose_supervisor(&mut self) {
        self.fdstore.disconnect();
    }
}

/// Objects.
impl State {
    /// Returns the object of exactly this trust domain.
    pub(crate) fn object(&self, domain: &TrustDomain, id: ObjectId) -> Option<&Entry<Object>> {
        self.objects.get(domain, id)
    }

    /// Returns whether a trust domain has an object that takes so many bytes.
    pub(crate) fn has_length(&self, domain: &TrustDomain, bytes: u64) -> bool {
        self.objects.has_length(domain, bytes)
    }

    /// Returns the objects of all trust domains.
    pub(crate) fn trust_domains(&self) -> impl Iterator<Item = (&TrustDomain, &Objects<Object>)> {
        self.objects.trust_domains()
    }

    /// Returns which objects a client holds.
    pub(crate) fn holds_of(&self, holder: Holder) -> Vec<(TrustDomain, ObjectId, u64)> {
        self.objects.holds_of(holder)
    }

    /// Makes room for `bytes` more in a trust domain by evicting objects that nobody holds.
    ///
    /// # Errors
    /// [`Refusal::Quota`].
    pub(crate) fn make_room(&mut self, domain: &TrustDomain, bytes: u64) -> Result<(), Refusal> {
        self.admit(domain, domain);
        self.objects.make_room(domain, bytes).map_err(|QuotaExceeded| Refusal::Quota)
    }

    /// Enters an object, or drops it if its trust domain has it already.
    pub(super) fn enter(
        &mut self,
        domain: &TrustDomain,
        id: ObjectId,
        object: Object,
        bytes: u64,
        executable: bool,
    ) -> Result<(), QuotaExceeded> {
        // The public has no client that was admitted.
        self.admit(domain, domain);
        let is_new = self.objects.get(domain, id).is_none();
        let needs_descriptor = is_new && !self.occupancy.is_occupied(object.file.number);
        if needs_descriptor
            && self.descriptors.to_free(self.objects.accounts().of(domain)) > self.objects.idle(domain)
        {
            return Err(QuotaExceeded);
        }
        while needs_descriptor && !self.may_have_descriptor(domain) {
            self.objects.evict_oldest(domain)?;
            self.record_changes();
        }
        self.objects.insert(domain, id, object.clone(), bytes, executable, self.clock)?;
        // What was evicted to make room goes first: it may be an object of the same name.
        self.record_changes();
        if is_new && self.occupancy.enter(domain, id, object.file.number) {
            self.descriptors.add(self.objects.accounts().of(domain));
            let key = Key::BackingFile(object.file.number);
            self.fdstore.put(&key, &encode_path(object.file.path.as_deref()), Some(object.file.fd.as_fd()));
            self.catalog.note_file(&object.file, domain, id);
        }
        if let Some(entry) = self.objects.get(domain, id) {
            self.fdstore.put(&Key::Object(domain.clone(), id), &encode(&record(entry)), None);
        }
        Ok(())
    }

    /// Enters bytes that were copied into a sealed file of their own.
    ///
    /// # Errors
    /// [`Refusal::Quota`].
    pub(crate) fn enter_sealed(
        &mut self,
        domain: &TrustDomain,
        id: ObjectId,
        fd: OwnedFd,
        length: u64,
        executable: bool,
    ) -> Result<(), Refusal> {
        let file = Arc::new(BackingFile::new(self.take_number(), fd, None));
        let object = Object { file, offset: 0, length };
        let entered = self.enter(domain, id, object, whole_pages(length), executable);
        entered.map_err(|QuotaExceeded| Refusal::Quota)
    }

    /// Enters a small object, in a file that it shares with others of its trust domain.
    ///
    /// # Errors
    /// [`Refusal::Quota`], [`Refusal::Exhausted`].
    pub(crate) fn enter_small(
        &mut self,
        domain: &TrustDomain,
        id: ObjectId,
        bytes: &[u8],
    ) -> Result<(), Refusal> {
        let size = small_objects::occupied_length(bytes.len()) as u64;
        self.make_room(domain, size)?;
        // Eviction may have removed the file.
        self.record_changes();
        let added = self.small_objects.get_mut(domain).and_then(|small| small.add(bytes));
        let object = match added {
            Some(object) => object,
            None => {
                let mut fresh = SmallObjectFile::new(self.take_number())?;
                let object = fresh.add(bytes).ok_or(Refusal::Size)?;
                if let Some(full) = self.small_objects.insert(domain.clone(), fresh) {
                    full.seal();
                }
                object
            }
        };
        self.enter(domain, id, object, size, false).map_err(|QuotaExceeded| Refusal::Quota)
    }

    /// Seals what was written, under a name if it is to have one, and enters it if it is not known yet.
    ///
    /// # Errors
    /// [`Refusal::Quota`], [`Refusal::Exhausted`].
    pub(crate) fn enter_written(
        &mut self,
        domain: &TrustDomain,
        (id, label): (ObjectId, &str),
        written: WrittenFile,
        length: u64,
        executable: bool,
    ) -> Result<(), Refusal> {
        let known = self.objects.get(domain, id).map(|entry| entry.object.clone());
        let object = match known {
            Some(object) => object,
            None => {
                let (fd, path) = self.catalog.seal(domain, (id, label), written).map_err(exhausted)?;
                let file = Arc::new(BackingFile::new(self.take_number(), fd, path));
                Object { file, offset: 0, length }
            }
        };
        let file = Arc::clone(&object.file);
        self.enter(domain, id, object, whole_pages(length), executable).map_err(|QuotaExceeded| {
            self.catalog.remove_unless_noted(&file);
            Refusal::Quota
        })
    }

    /// Lets programs map an object executable.
    ///
    /// # Errors
    /// [`Refusal::NotFound`].
    pub(crate) fn allow_execution(&mut self, domain: &TrustDomain, id: ObjectId) -> Result<(), Refusal> {
        let entry = self.objects.get(domain, id).ok_or(Refusal::NotFound)?;
        let (object, bytes) = (entry.object.clone(), entry.bytes);
        self.enter(domain, id, object, bytes, true).map_err(|QuotaExceeded| Refusal::Quota)
    }

    /// Gives a client a hold on the object that its trust domain, or the public, has under this name; returns it with the
    /// trust domain that owns it.
    ///
    /// An object that was just entered has to be handed out in the same transaction, or it may be evicted.
    pub(crate) fn hand_out(
        &mut self,
        holder: Holder,
        domain: &TrustDomain,
        id: ObjectId,
    ) -> Option<(TrustDomain, &Entry<Object>)> {
        self.objects.hand_out(holder, domain, id)
    }

    /// Takes one hold from a client; returns whether it had one.
    pub(crate) fn release(&mut self, holder: Holder, domain: &TrustDomain, id: ObjectId) -> bool {
        self.objects.release(holder, domain, id, self.clock)
    }

    /// Evicts objects that nobody has held or used for `seconds`.
    pub(crate) fn evict_unused_for(&mut self, seconds: u64) {
        for (file, domain, id) in self.catalog.take_opened() {
            file.opened.store(self.clock, Ordering::Relaxed);
            self.objects.refresh(&domain, id, self.clock);
        }
        let Some(before) = self.clock.checked_sub(seconds) else { return };
        for (domain, id) in self.objects.idle_since(before) {
            if self.objects.get(&domain, id).is_some_and(|entry| entry.object.is_in_use()) {
                // Not idle at `before`, even if no second has passed since.
                self.objects.refresh(&domain, id, self.clock.max(before + 1));
            }
        }
        self.objects.expire(before);
        self.record_changes();
        self.forget_unused_domains();
    }
}

/// What was read before, and what programs find without asking.
impl State {
    /// Returns what the bytes of files are.
    pub(crate) fn known_files(&mut self) -> &mut KnownContent<FileKey> {
        &mut self.known_files
    }

    /// Returns from which files objects were read.
    pub(crate) fn origins(&self) -> &Origins {
        &self.origins
    }

    /// Remembers which object the bytes of a file are.
    pub(crate) fn remember_file(&mut self, domain: &TrustDomain, key: FileKey, id: ObjectId, path: PathBuf) {
        self.origins.insert(domain, id, key.file(), path);
        self.known_files.insert(domain, key, id);
    }

    /// Returns what libraries' relocated data are.
    pub(crate) fn known_relocated(&mut self) -> &mut KnownContent<RelocatedData> {
        &mut self.known_relocated
    }

    /// Returns the directory in which objects of a trust domain get names, if there can be one.
    pub(crate) fn object_directory(&mut self, domain: &TrustDomain) -> Option<PathBuf> {
        let made = if self.catalog.has_looked_at(domain) {
            Ok(())
        } else {
            let opened = self.placement_table(domain).map(drop);
            opened.and_then(|()| self.catalog.make_directory(&self.config, domain))
        };
        if let Err(error) = made {
            self.event_log.note("names", Some(domain), None, &format!("objects have no names here: {error}"));
        }
        self.catalog.object_directory(domain)
    }

    fn placement_table(&mut self, domain: &TrustDomain) -> io::Result<BorrowedFd<'_>> {
        let is_new = self.catalog.open_placement_table(domain)?;
        let fd = self.catalog.placement_table(domain).ok_or(io::ErrorKind::NotFound)?;
        if is_new {
            self.fdstore.put(&Key::PlacementTable(domain.clone()), &[], Some(fd));
        }
        Ok(fd)
    }

    /// Returns the address at which a library is to be loaded, if the trust domain's table has room for it.
    ///
    /// # Errors
    /// If there is no memory or no descriptor left.
    pub(crate) fn place(
        &mut self,
        domain: &TrustDomain,
        library: &PlacementRequest,
    ) -> io::Result<Option<u64>> {
        self.placement_table(domain)?;
        Ok(self.catalog.place(domain, library))
    }

    /// Places a library and returns the memory of the trust domain's table.
    ///
    /// # Errors
    /// If there is no memory or no descriptor left.
    pub(crate) fn place_and_share(
        &mut self,
        domain: &TrustDomain,
        library: &PlacementRequest,
    ) -> io::Result<OwnedFd> {
        self.place(domain, library)?;
        self.placement_table(domain)?.try_clone_to_owned()
    }

    /// Publishes in the index that a file, whose beginning the object shows, is to be had without asking.
    pub(crate) fn publish_file(&mut self, domain: &TrustDomain, key: &IndexKey, length: u64, id: ObjectId) {
        if let Some(entry) = self.objects.get(domain, id) {
            self.catalog.publish_file(domain, key, length, (&entry.object.file, entry.executable));
        }
    }

    /// Publishes in the index what a library's data are, as they were relocated for its address: `content`, if the library
    /// itself is loaded from `object`.
    pub(crate) fn publish_prelinked(
        &mut self,
        domain: &TrustDomain,
        library: &prelink::Library,
        address: u64,
        (object, content): (ObjectId, ObjectId),
    ) {
        if let Some(entry) = self.objects.get(domain, content) {
            self.catalog.publish_prelinked(domain, library, address, (object, &entry.object.file));
        }
    }

    /// Publishes in the index what a library's relocated data are.
    pub(crate) fn publish_relocated(&mut self, domain: &TrustDomain, data: &RelocatedData, id: ObjectId) {
        if let Some(entry) = self.objects.get(domain, id) {
            self.catalog.publish_relocated(domain, data, &entry.object.file);
        }
    }
}

/// Returns what the supervisor stores of an object.
pub(super) fn record(entry: &Entry<Object>) -> ObjectRecord {
    ObjectRecord {
        file: entry.object.file.number,
        offset: entry.object.offset,
        length: entry.object.length,
        bytes: entry.bytes,
        executable: entry.executable,
    }
}
