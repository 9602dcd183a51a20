//! All that a running store knows, under one lock, with the keeper told of every change before any client is.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::client_file::FileKey;
use crate::config::Config;
use crate::event_log::Audit;
use crate::host_secret::Secret;
use crate::libraries::elf;
use crate::libraries::placement_table::Book;
use crate::libraries::prelink;
use crate::named::directory::{self, Shelves};
use crate::named::index::{self, Key as IndexKey};
use crate::named::open_tracker::Openings;
use crate::objects::backing_file::{Memory, Object, exhausted, whole_pages};
use crate::objects::small_objects::Pack;
use crate::objects::table::{Change, Full, Holder, Limits, Table};
use crate::supervisor::process::{Launcher, Message, Part, hear, prepare, tell};
use crate::supervisor::records::{ConnectionRecord, Key, ObjectRecord};
use crate::trust_domain::Realm;
use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::{EXECUTABLE, Refusal, Relocated, Room};
use orrery_orc_wire::sealed_file::Closed;

/// Most files of a realm that are remembered.
const MOST_FILES: usize = 65_536;

/// Somebody who is connected.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) socket: OwnedFd,
    pub(crate) peer: ConnectionRecord,
}

/// A socket that clients connect to.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: OwnedFd,
    pub(crate) tenant: Option<String>,
}

/// Everything.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) config: Arc<Config>,
    pub(crate) listeners: Arc<Vec<Listener>>,
    pub(crate) table: Table<Object>,
    pub(crate) connections: HashMap<Holder, Arc<Connection>>,
    /// Which bytes a file's pieces have, for each realm that has shown the file.
    pub(crate) files: HashMap<Realm, HashMap<FileKey, ObjectId>>,
    pub(crate) packs: HashMap<Realm, Pack>,
    /// Which objects libraries' relocated data are.
    pub(crate) relocated: HashMap<Realm, HashMap<Relocated, ObjectId>>,
    books: HashMap<Realm, Book>,
    shelves: Shelves,
    secret: Secret,
    /// Files that have names, and the object that each is.
    named: HashMap<u64, (Arc<Memory>, Realm, ObjectId)>,
    /// None where this machine has no more of them: then programs that have ended did not use anything.
    openings: Option<Openings>,
    /// How many objects lie in each memory file.
    inhabitants: HashMap<u64, usize>,
    /// Where each object lies.
    places: HashMap<(Realm, ObjectId), u64>,
    /// Descriptors that each realm has: its memory files and its connections.
    descriptors: HashMap<Realm, usize>,
    /// Descriptors that all realms may have together.
    most_descriptors: usize,
    /// The next number of a memory file or connection.
    next: u64,
    /// Held for as long as there is a store.
    locks: Vec<OwnedFd>,
    link: Option<OwnedFd>,
    launcher: Launcher,
    audit: Arc<Audit>,
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    // These types have no state that cannot be written.
    postcard::to_stdvec(value).unwrap_or_default()
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    postcard::from_bytes(bytes).map_err(io::Error::other)
}

impl State {
    /// Takes up what the keeper has.
    ///
    /// # Errors
    /// Where the keeper is gone, or its records make no sense.
    pub(crate) fn receive(link: OwnedFd, launcher: Launcher) -> io::Result<(Self, Arc<Audit>)> {
        let link = prepare(link)?;
        let mut records = Vec::new();
        let mut buffer = Vec::new();
        loop {
            let more = hear(link.as_fd(), &mut buffer, |message, fd| match message {
                Message::Put(key, value) => decode::<Key>(key).map(|key| {
                    records.push((key, value.to_vec(), fd));
                    true
                }),
                Message::End => Ok(false),
                Message::Delete(_) | Message::Stop => {
                    Err(io::Error::other("the keeper said what it should not"))
                }
            })?;
            if !more.ok_or_else(|| io::Error::other("the keeper is gone"))?? {
                break;
            }
        }
        Self::rebuild(link, launcher, records)
    }

    fn rebuild(
        link: OwnedFd,
        launcher: Launcher,
        records: Vec<(Key, Vec<u8>, Option<OwnedFd>)>,
    ) -> io::Result<(Self, Arc<Audit>)> {
        let missing = || io::Error::other("a record came without its descriptor or its configuration");
        let mut records = records.into_iter();
        let Some((Key::Config, config, _)) = records.next() else { return Err(missing()) };
        let config: Arc<Config> = Arc::new(serde_json::from_slice(&config)?);
        let audit = Arc::new(Audit::open(config.log.as_deref())?);
        let limits = Limits { bytes: config.quota, objects: config.objects };
        let secret = config.secret.as_deref().map_or_else(Secret::passing, Secret::of)?;
        let mut state = Self {
            config,
            listeners: Arc::default(),
            table: Table::new(limits, is_in_use),
            connections: HashMap::new(),
            files: HashMap::new(),
            packs: HashMap::new(),
            relocated: HashMap::new(),
            books: HashMap::new(),
            shelves: Shelves::new(),
            secret,
            named: HashMap::new(),
            openings: Openings::new()
                .inspect_err(|error| audit.note("openings", None, None, &error.to_string()))
                .ok(),
            inhabitants: HashMap::new(),
            places: HashMap::new(),
            descriptors: HashMap::new(),
            // What was there before stays.
            most_descriptors: usize::MAX,
            next: 1,
            locks: Vec::new(),
            link: None,
            launcher,
            audit: Arc::clone(&audit),
        };
        let mut listeners = Vec::new();
        let mut memories = HashMap::new();
        let mut books = Vec::new();
        for (key, value, fd) in records {
            match key {
                Key::Config => {}
                Key::Listener(_) => {
                    listeners.push(Listener { socket: fd.ok_or_else(missing)?, tenant: decode(&value)? });
                }
                Key::Lock(_) => state.locks.push(fd.ok_or_else(missing)?),
                Key::Memory(number) => {
                    state.next = state.next.max(number + 1);
                    let memory = Memory::new(number, fd.ok_or_else(missing)?, directory::decode(value));
                    if memory.path.is_some() {
                        directory::give_back_lease(memory.fd.as_fd());
                    }
                    memories.insert(number, Arc::new(memory));
                }
                Key::Object(realm, id) => {
                    let record: ObjectRecord = decode(&value)?;
                    let memory = Arc::clone(memories.get(&record.memory).ok_or_else(missing)?);
                    let object = Object { memory, offset: record.offset, length: record.length };
                    // It was within the quota before.
                    let _ = state.enter(&realm, id, object, record.bytes, record.executable, 0);
                }
                Key::Connection(number) => {
                    state.next = state.next.max(number + 1);
                    let peer: ConnectionRecord = decode(&value)?;
                    state.count(&peer.realm, 1);
                    let connection = Connection { socket: fd.ok_or_else(missing)?, peer };
                    state.connections.insert(number, Arc::new(connection));
                }
                Key::Hold(number, realm, id) => {
                    let _ = state.table.hold(number, &realm, id, decode(&value)?);
                }
                Key::Book(realm) => {
                    books.push((realm, fd.ok_or_else(missing)?));
                }
            }
        }
        // The keeper knows all of this.
        let _ = state.table.take_changes();
        state.listeners = Arc::new(listeners);
        state.link = Some(link);
        for (realm, old) in books {
            // Nobody else can write to it, nor can we any more.
            let book = Book::copy(old.as_fd(), &state.secret, &realm)?;
            state.put(&Key::Book(realm.clone()), &[], Some(book.fd()));
            state.books.insert(realm, book);
        }
        state.most_descriptors = crate::descriptor_limit::for_clients();
        Ok((state, audit))
    }

    fn count(&mut self, realm: &Realm, more: isize) {
        let count = self.descriptors.entry(realm.clone()).or_insert(0);
        *count = count.saturating_add_signed(more);
        if *count == 0 {
            self.descriptors.remove(realm);
        }
    }

    /// Whether `realm` may have another descriptor: as long as it has fewer than are left. So one realm alone gets half of all, the
    /// next one half of the rest, and whoever comes later still finds some.
    pub(crate) fn may_have_descriptor(&self, realm: &Realm) -> bool {
        self.descriptors_to_free(realm) == 0
    }

    /// How many descriptors `realm` has to give back before it may have another.
    fn descriptors_to_free(&self, realm: &Realm) -> usize {
        let used: usize = self.descriptors.values().sum();
        let own = self.descriptors.get(realm).copied().unwrap_or(0);
        let left = self.most_descriptors.saturating_sub(used);
        // Each that is given back is one less of its own, and one more that is left.
        if own < left { 0 } else { (own - left) / 2 + 1 }
    }

    /// A number that no memory file and no connection has had.
    pub(crate) fn number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        number
    }

    /// The link to the keeper.
    pub(crate) fn link(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().map(AsFd::as_fd)
    }

    fn put(&mut self, key: &Key, value: &[u8], fd: Option<BorrowedFd<'_>>) {
        self.tell_keeper(&Message::Put(&encode(key), value), fd);
    }

    fn delete(&mut self, key: &Key) {
        self.tell_keeper(&Message::Delete(&encode(key)), None);
    }

    fn tell_keeper(&mut self, message: &Message<'_>, fd: Option<BorrowedFd<'_>>) {
        if let Some(link) = &self.link
            && tell(link.as_fd(), message, fd).is_err()
        {
            self.link = None;
        }
    }

    /// Starts a new keeper where there is none any more, and gives it everything; whether there is a new one.
    ///
    /// # Errors
    /// Where no process can be started; the store goes on without.
    pub(crate) fn replace_keeper(&mut self) -> io::Result<bool> {
        if self.link.is_some() {
            return Ok(false);
        }
        let (link, mut child) = self.launcher.start(Part::Keeper)?;
        // Whoever reaps it, it must not stay a zombie.
        std::thread::spawn(move || child.wait());
        self.link = Some(link);
        let config = serde_json::to_vec(&*self.config)?;
        self.put(&Key::Config, &config, None);
        for (number, listener) in (0..).zip(Arc::clone(&self.listeners).iter()) {
            self.put(&Key::Listener(number), &encode(&listener.tenant), Some(listener.socket.as_fd()));
        }
        let locks = core::mem::take(&mut self.locks);
        for (number, lock) in (0..).zip(&locks) {
            self.put(&Key::Lock(number), &[], Some(lock.as_fd()));
        }
        self.locks = locks;
        let mut objects = Vec::new();
        for (realm, of_realm) in self.table.realms() {
            for (id, entry) in of_realm.iter() {
                let record = record(&entry.object, entry.bytes, entry.executable);
                objects.push((Key::Object(realm.clone(), *id), record, Arc::clone(&entry.object.memory)));
            }
        }
        for (key, record, memory) in objects {
            let path = directory::encode(memory.path.as_deref());
            self.put(&Key::Memory(memory.number), &path, Some(memory.fd.as_fd()));
            self.put(&key, &encode(&record), None);
        }
        let connections: Vec<_> = self.connections.iter().map(|(n, c)| (*n, Arc::clone(c))).collect();
        for (number, connection) in connections {
            let key = Key::Connection(number);
            self.put(&key, &encode(&connection.peer), Some(connection.socket.as_fd()));
            for (realm, id, count) in self.table.holds_of(number) {
                self.put(&Key::Hold(number, realm, id), &encode(&count), None);
            }
        }
        let books = core::mem::take(&mut self.books);
        for (realm, book) in &books {
            self.put(&Key::Book(realm.clone()), &[], Some(book.fd()));
        }
        self.books = books;
        self.tell_keeper(&Message::End, None);
        Ok(self.link.is_some())
    }

    /// The keeper is gone.
    pub(crate) fn lose_keeper(&mut self) {
        self.link = None;
    }

    /// Enters somebody who has connected.
    pub(crate) fn connect(&mut self, socket: OwnedFd, peer: ConnectionRecord) -> (Holder, Arc<Connection>) {
        let number = self.number();
        self.put(&Key::Connection(number), &encode(&peer), Some(socket.as_fd()));
        self.count(&peer.realm, 1);
        let connection = Arc::new(Connection { socket, peer });
        self.connections.insert(number, Arc::clone(&connection));
        (number, connection)
    }

    /// Forgets somebody.
    pub(crate) fn disconnect(&mut self, number: Holder, now: u64) {
        if let Some(connection) = self.connections.remove(&number) {
            self.audit.did(&connection.peer, "leave", None, None);
            self.count(&connection.peer.realm, -1);
            self.table.leave(number, now);
            self.settle();
            self.delete(&Key::Connection(number));
        }
    }

    /// Enters an object, or drops it where its realm has it already.
    ///
    /// # Errors
    /// [`Full`].
    pub(crate) fn enter(
        &mut self,
        realm: &Realm,
        id: ObjectId,
        object: Object,
        bytes: u64,
        executable: bool,
        now: u64,
    ) -> Result<(), Full> {
        let known = self.table.of(realm, id).is_some();
        let is_alone = !known && !self.inhabitants.contains_key(&object.memory.number);
        if is_alone && self.descriptors_to_free(realm) > self.table.idle(realm) {
            return Err(Full);
        }
        while is_alone && !self.may_have_descriptor(realm) {
            self.table.evict_oldest(realm)?;
            self.settle();
        }
        self.table.insert(realm, id, object.clone(), bytes, executable, now)?;
        // What had to make room goes first.
        self.settle();
        let number = object.memory.number;
        if !known {
            self.places.insert((realm.clone(), id), number);
            let count = self.inhabitants.entry(number).or_insert(0);
            *count += 1;
            if *count == 1 {
                self.count(realm, 1);
                let path = directory::encode(object.memory.path.as_deref());
                self.put(&Key::Memory(number), &path, Some(object.memory.fd.as_fd()));
                if object.memory.path.is_some() {
                    self.named.insert(number, (Arc::clone(&object.memory), realm.clone(), id));
                    self.await_opening(number);
                }
            }
        }
        if let Some(entry) = self.table.of(realm, id) {
            let record = record(&entry.object, entry.bytes, entry.executable);
            self.put(&Key::Object(realm.clone(), id), &encode(&record), None);
        }
        Ok(())
    }

    /// Tells the keeper and the log what changed in the table.
    pub(crate) fn settle(&mut self) {
        for change in self.table.take_changes() {
            match change {
                Change::Held(holder, realm, id, 0) => self.delete(&Key::Hold(holder, realm, id)),
                Change::Held(holder, realm, id, count) => {
                    self.put(&Key::Hold(holder, realm, id), &encode(&count), None);
                }
                Change::Evicted(realm, id) => self.evicted(realm, id),
            }
        }
    }

    fn evicted(&mut self, realm: Realm, id: ObjectId) {
        self.audit.note("evict", Some(&realm), Some(id), "");
        if let Some(number) = self.places.remove(&(realm.clone(), id)) {
            let left = self.inhabitants.get(&number).map_or(0, |count| count - 1);
            if left == 0 {
                self.inhabitants.remove(&number);
                self.count(&realm, -1);
                self.delete(&Key::Memory(number));
                if let Some((memory, ..)) = self.named.remove(&number) {
                    forget_name(&memory);
                }
                if self.packs.get(&realm).is_some_and(|pack| pack.memory.number == number) {
                    self.packs.remove(&realm);
                }
            } else {
                self.inhabitants.insert(number, left);
            }
        }
        self.delete(&Key::Object(realm, id));
    }

    /// Remembers what a piece of a file is.
    pub(crate) fn remember(&mut self, realm: &Realm, key: FileKey, id: ObjectId) {
        let files = self.files.entry(realm.clone()).or_default();
        if files.len() >= MOST_FILES {
            files.clear();
        }
        files.insert(key, id);
    }
}

/// Takes the name away, so that nobody finds the object any more.
fn forget_name(memory: &Memory) {
    if let Some(path) = &memory.path {
        // What cannot be removed is found, and is what it says it is.
        let _ = directory::remove(&memory.fd, path);
    }
}

/// Whether programs use an object that they had without asking.
fn is_in_use(object: &Object) -> bool {
    object.memory.path.is_some() && directory::is_in_use(object.memory.fd.as_fd())
}

/// What programs find without asking.
impl State {
    /// The folder in which objects of a realm get names, if there can be one.
    pub(crate) fn shelf(&mut self, realm: &Realm) -> Option<PathBuf> {
        if !self.shelves.knows(realm) {
            let config = Arc::clone(&self.config);
            let span = self.open_book(realm).map(|book| book.span());
            let made = span.and_then(|span| self.shelves.make(&config, &self.secret, realm, span));
            if let Err(error) = made {
                let note = format!("objects have no names here: {error}");
                self.audit.note("names", Some(realm), None, &note);
            }
        }
        self.shelves.folder(realm)
    }

    /// Gives what was copied a name if it is to have one, and enters it where it is not known yet.
    ///
    /// # Errors
    /// Out of quota, memory, descriptors.
    pub(crate) fn keep(
        &mut self,
        realm: &Realm,
        (id, label): (ObjectId, &str),
        copy: Closed,
        length: u64,
        executable: bool,
        now: u64,
    ) -> Result<(), Refusal> {
        let known = self.table.of(realm, id).map(|entry| entry.object.clone());
        let object = match known {
            Some(object) => object,
            None => {
                let folder = self.shelves.folder(realm).filter(|_| copy.is_named());
                let path = folder.map(|folder| folder.join(directory::name_of(label, id)));
                let fd = match &path {
                    Some(path) => {
                        directory::remove_stale(path);
                        copy.seal_as(path)
                    }
                    None => copy.seal(),
                };
                let number = self.number();
                let memory = Memory::new(number, fd.map_err(exhausted)?, path);
                Object { memory: Arc::new(memory), offset: 0, length }
            }
        };
        let memory = Arc::clone(&object.memory);
        self.enter(realm, id, object, whole_pages(length), executable, now).map_err(|Full| {
            if !self.named.contains_key(&memory.number) {
                forget_name(&memory);
            }
            Refusal::Quota
        })
    }

    /// Writes down that the file, whose beginning the object shows, is to be had without asking.
    pub(crate) fn publish_file(&mut self, realm: &Realm, key: &IndexKey, length: u64, id: ObjectId) {
        let Some(entry) = self.table.of(realm, id) else { return };
        let memory = Arc::clone(&entry.object.memory);
        let executable = u64::from(if entry.executable { EXECUTABLE } else { 0 });
        let flags = executable | elf::flags(memory.fd.as_fd(), length);
        self.shelves.enter(realm, key, [length, flags, 0], Some(&memory));
    }

    /// Has the next time noted that a program opens this file. What cannot be noted counts as used while it is in use.
    fn await_opening(&mut self, number: u64) {
        let path = self.named.get(&number).and_then(|(memory, ..)| memory.path.as_deref());
        if let (Some(openings), Some(path)) = (&mut self.openings, path) {
            let _ = openings.wait_for(number, path);
        }
    }

    /// Has what programs have opened by its name count as used now, also where they have ended.
    pub(crate) fn note_opened(&mut self, now: u64) {
        for number in self.openings.as_mut().map(Openings::take).unwrap_or_default() {
            if let Some((memory, realm, id)) = self.named.get(&number) {
                memory.opened.store(now, Ordering::Relaxed);
                self.table.refresh(realm, *id, now);
                self.await_opening(number);
            }
        }
    }

    /// Has what others use without asking count as used.
    pub(crate) fn spare_used(&mut self, before: u64, now: u64) {
        for (realm, id) in self.table.idle_since(before) {
            if self.table.of(&realm, id).is_some_and(|entry| is_in_use(&entry.object)) {
                // Not idle at `before`, whatever the time.
                self.table.refresh(&realm, id, now.max(before + 1));
            }
        }
    }

    fn open_book(&mut self, realm: &Realm) -> io::Result<&mut Book> {
        if !self.books.contains_key(realm) {
            let book = Book::new(&self.secret, realm)?;
            self.put(&Key::Book(realm.clone()), &[], Some(book.fd()));
            self.books.insert(realm.clone(), book);
        }
        self.books.get_mut(realm).ok_or_else(|| io::Error::other("no book"))
    }

    /// The realm's book, with a place for the library if there is any more room in it.
    ///
    /// # Errors
    /// Out of memory or descriptors.
    pub(crate) fn book(&mut self, realm: &Realm, room: &Room) -> io::Result<&Book> {
        self.place(realm, room)?;
        self.open_book(realm).map(|book| &*book)
    }

    /// The place of a library, if there is any more room in the realm's book.
    ///
    /// # Errors
    /// Out of memory or descriptors.
    pub(crate) fn place(&mut self, realm: &Realm, room: &Room) -> io::Result<Option<u64>> {
        let place = self.open_book(realm)?.find_place(room);
        if let Some(address) = place {
            let key = [index::PLACE, room.key, 0, 0, 0, 0, 0, 0];
            self.shelves.enter(realm, &key, [address, 0, 0], None);
        }
        Ok(place)
    }

    /// Writes down what the data of a library are as they were prepared for its place: `content`, where the library itself is loaded
    /// from `object`.
    pub(crate) fn publish_prepared(
        &mut self,
        realm: &Realm,
        library: &prelink::Library,
        place: u64,
        (object, content): (ObjectId, ObjectId),
    ) {
        let Some(entry) = self.table.of(realm, content) else { return };
        let memory = Arc::clone(&entry.object.memory);
        let key = [index::PREPARED, library.room.key, place, library.start, 0, 0, 0, 0];
        let value = [library.length, library.count, prelink::tag(object)];
        self.shelves.enter(realm, &key, value, Some(&memory));
    }

    /// Writes down what a library's relocated data are.
    pub(crate) fn publish_relocated(&mut self, realm: &Realm, name: &Relocated, id: ObjectId) {
        let Some(entry) = self.table.of(realm, id) else { return };
        let memory = Arc::clone(&entry.object.memory);
        let key = [index::RELOCATED, name.key, name.address, name.start, name.length, 0, 0, 0];
        self.shelves.enter(realm, &key, [name.length, 0, 0], Some(&memory));
    }

    /// Remembers what a library's relocated data are.
    pub(crate) fn remember_relocated(&mut self, realm: &Realm, name: Relocated, id: ObjectId) {
        self.publish_relocated(realm, &name, id);
        let names = self.relocated.entry(realm.clone()).or_default();
        if names.len() >= MOST_FILES {
            names.clear();
        }
        names.insert(name, id);
    }
}

fn record(object: &Object, bytes: u64, executable: bool) -> ObjectRecord {
    ObjectRecord {
        memory: object.memory.number,
        offset: object.offset,
        length: object.length,
        bytes,
        executable,
    }
}
