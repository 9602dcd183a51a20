//! One request, one answer.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};

use crate::client_file::{self, Places, Shown};
use crate::config::Executables;
use crate::libraries::placement_table;
use crate::libraries::prelink;
use crate::named::directory;
use crate::objects::backing_file::{Memory, Object, copy, may_execute, whole_pages};
use crate::objects::huge_pages;
use crate::objects::small_objects::{self, Pack};
use crate::objects::table::{Entry, Full, Holder};
use crate::server::event_loop::Server;
use crate::server::report;
use crate::state::state::{Connection, State};
use crate::supervisor::records::ConnectionRecord;
use crate::trust_domain::Realm;
use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::{
    ALONE, Content, EXECUTABLE, Handle, PUBLIC, Piece, PieceAnswer, Refusal, Relocated, Reply, Request, Room,
};
use orrery_orc_wire::sealed_file::Closed;
use orrery_sys::PAGE;

/// Objects larger than this are taken by some of the workers only, so that the others can go on answering.
const LARGE: u64 = 4 << 20;

/// What to send.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) reply: Reply,
    pub(crate) memories: Vec<Arc<Memory>>,
    pub(crate) report: Option<OwnedFd>,
}

impl From<Refusal> for Answer {
    fn from(refusal: Refusal) -> Self {
        Self { reply: Reply::Refused(refusal), memories: Vec::new(), report: None }
    }
}

/// A place among those who copy large objects.
struct Turn<'a>(&'a AtomicUsize);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Works on a request that came through connection `holder`.
pub(crate) fn answer(
    server: &Server,
    holder: Holder,
    connection: &Connection,
    request: &Request<'_>,
    descriptors: Vec<OwnedFd>,
) -> Answer {
    let asking = Asking { server, holder, peer: &connection.peer };
    let result = match request {
        Request::Register { flags, expected, content } => {
            asking.register(*flags, *expected, *content, &descriptors)
        }
        Request::Request(id) => asking.request(*id),
        Request::Release(id) => asking.release(*id),
        Request::Files(pieces) => asking.files(pieces, descriptors),
        Request::Report => asking.report(),
        Request::Book(room) => asking.book(room),
        Request::Recall(names) => Ok(asking.recall(names)),
        Request::Remember(name) => asking.remember(*name, &descriptors),
    };
    asking.log(request, &result);
    result.unwrap_or_else(Answer::from)
}

/// Somebody with a request.
struct Asking<'a> {
    server: &'a Server,
    holder: Holder,
    peer: &'a ConnectionRecord,
}

impl Asking<'_> {
    fn state(&self) -> MutexGuard<'_, State> {
        self.server.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this is the superuser or the store's own user, and nobody who is so in a container only.
    fn is_administrator(&self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        matches!(self.peer.realm, Realm::User(uid) if uid == 0 || uid == own)
    }

    fn may_publish(&self) -> bool {
        let named =
            matches!(self.peer.realm, Realm::User(uid) if self.server.config.publishers.contains(&uid));
        named || self.is_administrator()
    }

    /// A turn to copy so many bytes.
    fn turn(&self, length: u64) -> Result<Option<Turn<'_>>, Refusal> {
        if length <= LARGE {
            return Ok(None);
        }
        let large = &self.server.large;
        let most = (self.server.config.workers / 2).max(1);
        large
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| (count < most).then_some(count + 1))
            .map_err(|_| Refusal::Busy)?;
        Ok(Some(Turn(large)))
    }

    fn register(
        &self,
        flags: u32,
        expected: Option<ObjectId>,
        content: Content<'_>,
        descriptors: &[OwnedFd],
    ) -> Result<Answer, Refusal> {
        let executable = flags & EXECUTABLE != 0;
        let public = flags & PUBLIC != 0;
        if executable && self.server.config.executables != Executables::Any || public && !self.may_publish() {
            return Err(Refusal::Denied);
        }
        let realm = if public { Realm::Public } else { self.peer.realm.clone() };
        let largest = self.server.config.largest;
        match content {
            Content::Inline(bytes) => {
                let length = bytes.len() as u64;
                if bytes.is_empty() || length > largest {
                    return Err(Refusal::Size);
                }
                let id = ObjectId::of(bytes);
                agree(expected, id)?;
                let small = bytes.len() <= small_objects::LONGEST && flags & (ALONE | EXECUTABLE) == 0;
                let mut state = self.state();
                if state.table.of(&realm, id).is_none() {
                    if small {
                        self.pack(&mut state, &realm, id, bytes)?;
                    } else {
                        self.enter(&mut state, &realm, id, copy(id, bytes)?, length, executable)?;
                    }
                } else if executable {
                    self.allow_execution(&mut state, &realm, id)?;
                }
                self.hand_out(&mut state, &realm, id)
            }
            Content::Descriptor { length } => {
                let places = Places::default();
                let (id, copy) = self.take_memory(&realm, "orc:object", length, descriptors, &places)?;
                agree(expected, id)?;
                let mut state = self.state();
                state.keep(&realm, (id, ""), copy, length, executable, self.server.clock())?;
                self.hand_out(&mut state, &realm, id)
            }
        }
    }

    /// Copies the first bytes of the memory file that came with the message.
    fn take_memory(
        &self,
        realm: &Realm,
        label: &str,
        length: u64,
        descriptors: &[OwnedFd],
        places: &Places,
    ) -> Result<(ObjectId, Closed), Refusal> {
        let [fd] = descriptors else { return Err(Refusal::Descriptor) };
        let largest = self.server.config.largest;
        if length == 0 || length > largest {
            return Err(Refusal::Size);
        }
        let _turn = self.turn(length)?;
        self.room(realm, whole_pages(length))?;
        let (id, draft) = client_file::from_memory(fd.as_fd(), label, length, largest, places)?;
        Ok((id, draft.close()))
    }

    /// Asks whether there would be room, before anything is copied.
    fn room(&self, realm: &Realm, bytes: u64) -> Result<(), Refusal> {
        let mut state = self.state();
        let result = state.table.make_room(realm, bytes);
        state.settle();
        result.map_err(|Full| Refusal::Quota)
    }

    fn enter(
        &self,
        state: &mut State,
        realm: &Realm,
        id: ObjectId,
        memory: OwnedFd,
        length: u64,
        executable: bool,
    ) -> Result<(), Refusal> {
        let number = state.number();
        let memory = Memory::new(number, memory, None);
        let object = Object { memory: Arc::new(memory), offset: 0, length };
        state
            .enter(realm, id, object, whole_pages(length), executable, self.server.clock())
            .map_err(|Full| Refusal::Quota)
    }

    fn allow_execution(&self, state: &mut State, realm: &Realm, id: ObjectId) -> Result<(), Refusal> {
        let entry = state.table.of(realm, id).ok_or(Refusal::NotFound)?;
        let (object, bytes) = (entry.object.clone(), entry.bytes);
        state.enter(realm, id, object, bytes, true, self.server.clock()).map_err(|Full| Refusal::Quota)
    }

    /// Puts a small object among others of its realm.
    fn pack(&self, state: &mut State, realm: &Realm, id: ObjectId, bytes: &[u8]) -> Result<(), Refusal> {
        let size = small_objects::room(bytes.len()) as u64;
        let room = state.table.make_room(realm, size);
        state.settle();
        room.map_err(|Full| Refusal::Quota)?;
        let packed = state.packs.get_mut(realm).and_then(|pack| pack.add(bytes));
        let object = match packed {
            Some(object) => object,
            None => {
                let mut fresh = Pack::new(state.number())?;
                let object = fresh.add(bytes).ok_or(Refusal::Size)?;
                if let Some(full) = state.packs.insert(realm.clone(), fresh) {
                    full.close();
                }
                object
            }
        };
        let now = self.server.clock();
        state.enter(realm, id, object, size, false, now).map_err(|Full| Refusal::Quota)
    }

    /// Gives the client a hold on an object. One that was just made has to be handed out under the lock under which it was
    /// made, or it may be gone.
    fn hand_out(&self, state: &mut State, realm: &Realm, id: ObjectId) -> Result<Answer, Refusal> {
        let (place, entry) = state.table.find(self.holder, realm, id).ok_or(Refusal::NotFound)?;
        let answer = handle(id, &place, entry);
        state.settle();
        Ok(answer)
    }

    fn request(&self, id: ObjectId) -> Result<Answer, Refusal> {
        self.hand_out(&mut self.state(), &self.peer.realm, id)
    }

    fn release(&self, id: ObjectId) -> Result<Answer, Refusal> {
        let mut state = self.state();
        let held = state.table.release(self.holder, &self.peer.realm, id, self.server.clock());
        state.settle();
        if held {
            Ok(Answer { reply: Reply::Released, memories: Vec::new(), report: None })
        } else {
            Err(Refusal::NotHeld)
        }
    }

    fn files(&self, pieces: &[Piece], descriptors: Vec<OwnedFd>) -> Result<Answer, Refusal> {
        if descriptors.len() != pieces.len() {
            return Err(Refusal::Descriptor);
        }
        let mut memories = Vec::new();
        let answers = pieces
            .iter()
            .zip(descriptors)
            .map(|(piece, fd)| match self.piece(piece, fd) {
                Ok((object, duplicate)) => {
                    memories.push(object.memory);
                    PieceAnswer { refusal: None, duplicate, offset: object.offset }
                }
                Err(refusal) => PieceAnswer { refusal: Some(refusal), duplicate: false, offset: 0 },
            })
            .collect();
        Ok(Answer { reply: Reply::Pieces(answers), memories, report: None })
    }

    /// The object of a piece, and whether the file's own pages have just become useless.
    fn piece(&self, piece: &Piece, fd: OwnedFd) -> Result<(Object, bool), Refusal> {
        let shown = client_file::examine(fd.as_fd(), piece, self.server.config.largest)?;
        let executable = piece.flags & EXECUTABLE != 0;
        let policy = self.server.config.executables;
        if executable && (shown.noexec || !may_execute(policy, shown.owner, shown.mode, self.peer.uid)) {
            return Err(Refusal::Denied);
        }
        let known = self.known(&mut self.state(), &shown, executable);
        if let Some(object) = known {
            return Ok((object, false));
        }
        let realm = &self.peer.realm;
        let turn = self.turn(piece.length)?;
        let readers = &self.server.readers;
        if self.state().table.has_length(realm, piece.length) {
            // Perhaps the same bytes from another file, of which no copy is needed.
            let again = fd.try_clone().map_err(|_| Refusal::Exhausted)?;
            let id = readers.name(realm, again, *piece, shown)?;
            let mut state = self.state();
            if state.table.of(realm, id).is_some() {
                if executable {
                    self.allow_execution(&mut state, realm, id)?;
                }
                state.remember(realm, shown.key, id);
                let object = self.known(&mut state, &shown, executable).ok_or(Refusal::NotFound)?;
                drop(state);
                self.prepare(id, &object, &shown);
                return Ok((object, true));
            }
        }
        self.room(realm, piece.length)?;
        let label = client_file::file_label(&fd);
        // Only memory has huge pages.
        let is_huge = self.server.config.huge && is_large_code(piece);
        let places = if is_huge { Places::default() } else { self.places(realm) };
        let (id, draft) = readers.read(realm, fd, *piece, shown, places)?;
        let copy = draft.close();
        drop(turn);
        let mut state = self.state();
        // What is public need not be there twice.
        let public = state.table.of(&Realm::Public, id).is_some_and(|entry| entry.executable || !executable);
        if !public {
            let now = self.server.clock();
            state.keep(realm, (id, &label), copy, piece.length, executable, now)?;
        }
        state.remember(realm, shown.key, id);
        let object = self.known(&mut state, &shown, executable).ok_or(Refusal::NotFound)?;
        drop(state);
        self.prepare(id, &object, &shown);
        if self.server.config.disk.is_some() {
            self.server.trimmer.trim(Arc::clone(&object.memory));
        }
        if is_huge {
            self.server.collapser.collapse(object.memory.fd.as_fd());
        }
        Ok((object, true))
    }

    /// Prepares the relocated data of a library that programs load from an object, if it is one. Where that cannot be done the
    /// loader does it.
    fn prepare(&self, id: ObjectId, object: &Object, shown: &Shown) -> Option<()> {
        const LABEL: &str = "orc:prepared";
        object.memory.path.as_ref().filter(|_| shown.key.in_index().is_some())?;
        let realm = &self.peer.realm;
        let fd = object.memory.fd.as_fd();
        let library = prelink::Library::examine(fd, shown.key.size())?;
        let place = self.state().place(realm, &library.room).ok()??;
        let bytes = library.prepare(fd, place)?;
        let places = Places { disk: None, ..self.places(realm) };
        let mut draft = places.draft(LABEL, bytes.len()).ok()?;
        draft.put(0, &bytes).ok()?;
        let (content, length) = (ObjectId::of(&bytes), bytes.len() as u64);
        let mut state = self.state();
        state.keep(realm, (content, LABEL), draft.close(), length, false, self.server.clock()).ok()?;
        state.publish_prepared(realm, &library, place, (id, content));
        state.settle();
        Some(())
    }

    /// The object of a piece that was read before, with a hold on it.
    fn known(&self, state: &mut State, shown: &Shown, executable: bool) -> Option<Object> {
        let realm = &self.peer.realm;
        let id = *state.files.get(realm)?.get(&shown.key)?;
        let fit = |entry: &Entry<Object>| entry.executable || !executable;
        let suits =
            [realm, &Realm::Public].into_iter().find_map(|realm| state.table.of(realm, id)).is_some_and(fit);
        if !suits {
            // Evicted, or not executable so far: to be read again.
            if let Some(files) = state.files.get_mut(realm) {
                files.remove(&shown.key);
            }
            return None;
        }
        let object = state.table.find(self.holder, realm, id)?.1.object.clone();
        state.settle();
        if let Some((key, length)) = shown.key.in_index()
            && object.memory.path.is_some()
            && self.is_for_all(shown)
            && !shown.noexec
        {
            state.publish_file(realm, &key, length, id);
        }
        Some(object)
    }

    /// Whether what this client may have all of its realm may have, too.
    fn is_for_all(&self, shown: &Shown) -> bool {
        let own = [0, rustix::process::geteuid().as_raw()];
        let readable = shown.mode & 0o444 == 0o444;
        matches!(self.peer.realm, Realm::User(_)) || readable && own.contains(&shown.owner)
    }

    /// Where copies for this realm are put.
    fn places(&self, realm: &Realm) -> Places {
        Places { named: self.state().shelf(realm), disk: directory::drafts(&self.server.config) }
    }

    fn report(&self) -> Result<Answer, Refusal> {
        let text = report::write(&self.state(), &self.peer.realm, self.is_administrator());
        let fd = copy(ObjectId::of(&text), &text)?;
        let reply = Reply::Report { length: text.len() as u64 };
        Ok(Answer { reply, memories: Vec::new(), report: Some(fd) })
    }

    fn book(&self, room: &Room) -> Result<Answer, Refusal> {
        let mut state = self.state();
        let book = state.book(&self.peer.realm, room).map_err(|_| Refusal::Exhausted)?;
        let fd = book.fd().try_clone_to_owned().map_err(|_| Refusal::Exhausted)?;
        let reply = Reply::Book { length: placement_table::BYTES };
        Ok(Answer { reply, memories: Vec::new(), report: Some(fd) })
    }

    fn recall(&self, names: &[Relocated]) -> Answer {
        let realm = &self.peer.realm;
        let mut state = self.state();
        let mut memories = Vec::new();
        let mut answers = Vec::new();
        for name in names {
            let id = state.relocated.get(realm).and_then(|of_realm| of_realm.get(name)).copied();
            let found = id.and_then(|id| Some(state.table.find(self.holder, realm, id)?.1.object.clone()));
            let refusal = if found.is_some() { None } else { Some(Refusal::NotFound) };
            let offset = found.as_ref().map_or(0, |object| object.offset);
            if let Some(id) = id {
                state.publish_relocated(realm, name, id);
            }
            memories.extend(found.map(|object| object.memory));
            answers.push(PieceAnswer { refusal, duplicate: false, offset });
        }
        state.settle();
        Answer { reply: Reply::Pieces(answers), memories, report: None }
    }

    fn remember(&self, name: Relocated, descriptors: &[OwnedFd]) -> Result<Answer, Refusal> {
        if !name.length.is_multiple_of(PAGE as u64) {
            return Err(Refusal::Malformed);
        }
        let realm = &self.peer.realm;
        const LABEL: &str = "orc:relocated";
        let places = Places { disk: None, ..self.places(realm) };
        let (id, copy) = self.take_memory(realm, LABEL, name.length, descriptors, &places)?;
        let mut state = self.state();
        state.keep(realm, (id, LABEL), copy, name.length, false, self.server.clock())?;
        state.remember_relocated(realm, name, id);
        self.hand_out(&mut state, realm, id)
    }

    fn log(&self, request: &Request<'_>, result: &Result<Answer, Refusal>) {
        if !self.server.audit.is_on() {
            return;
        }
        let (event, wanted) = match request {
            Request::Register { expected, .. } => ("register", *expected),
            Request::Request(id) => ("request", Some(*id)),
            Request::Release(id) => ("release", Some(*id)),
            Request::Files(_) => ("files", None),
            Request::Report => ("report", None),
            Request::Book(_) => ("book", None),
            Request::Recall(_) => ("recall", None),
            Request::Remember(_) => ("remember", None),
        };
        let (object, note) = match result.as_ref().map(|answer| &answer.reply) {
            Ok(Reply::Handle(handle)) => (Some(handle.id), None),
            Ok(Reply::Pieces(answers)) if event == "files" => (None, refusals(answers)),
            Ok(_) => (wanted, None),
            Err(refusal) => (wanted, Some(refusal.to_string())),
        };
        self.server.audit.did(self.peer, event, object, note.as_deref());
    }
}

/// What of several pieces was refused, in words.
fn refusals(answers: &[PieceAnswer]) -> Option<String> {
    let refused: Vec<Refusal> = answers.iter().filter_map(|answer| answer.refusal).collect();
    let first = refused.first()?;
    Some(format!("{} of {} refused: {first}", refused.len(), answers.len()))
}

fn is_large_code(piece: &Piece) -> bool {
    piece.flags & EXECUTABLE != 0 && piece.length >= huge_pages::WORTH_IT
}

fn agree(expected: Option<ObjectId>, id: ObjectId) -> Result<(), Refusal> {
    if expected.is_none_or(|expected| expected == id) { Ok(()) } else { Err(Refusal::Mismatch) }
}

fn handle(id: ObjectId, place: &Realm, entry: &Entry<Object>) -> Answer {
    let mut flags = 0;
    if entry.executable {
        flags |= EXECUTABLE;
    }
    if *place == Realm::Public {
        flags |= PUBLIC;
    }
    let Object { memory, offset, length } = entry.object.clone();
    Answer {
        reply: Reply::Handle(Handle { id, offset, length, flags }),
        memories: vec![memory],
        report: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_was_expected_has_to_be_the_one() {
        assert!(agree(None, ObjectId([1; 32])).is_ok());
        assert_eq!(agree(Some(ObjectId([2; 32])), ObjectId([1; 32])), Err(Refusal::Mismatch));
    }
}
