//! Decides about one request: checks it against the policy, reads what the client sent, changes the state in transactions,
//! and returns the response.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::{
    Content, EXECUTABLE, FileRange, FileRangeReply, Handle, OWN_PAGES, PUBLIC, PlacementRequest, Refusal,
    RelocatedData, Reply, Request,
};
use orrery_orc_wire::sealed_file::WrittenFile;
use orrery_sys::PAGE;

use crate::client_file::{self, ClientFile, CopyDestination, ExaminedRange};
use crate::config::Executables;
use crate::libraries::{placement_table, prelink};
use crate::named::object_directory;
use crate::objects::backing_file::{BackingFile, Object, may_execute, sealed_copy, whole_pages};
use crate::objects::table::Holder;
use crate::objects::{huge_pages, small_objects};
use crate::server::report::Snapshot;
use crate::server::service::Service;
use crate::state::clients::Connection;
use crate::state::store_state::State;
use crate::supervisor::records::PeerRecord;
use crate::trust_domain::TrustDomain;

/// A reply, and the descriptors that go with it.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) reply: Reply,
    pub(crate) files: Vec<Arc<BackingFile>>,
    pub(crate) attachment: Option<OwnedFd>,
}

impl Response {
    fn new(reply: Reply) -> Self {
        Self { reply, files: Vec::new(), attachment: None }
    }
}

impl From<Refusal> for Response {
    fn from(refusal: Refusal) -> Self {
        Self::new(Reply::Refused(refusal))
    }
}

/// Handles a request that came through connection `holder`.
pub(crate) fn handle(
    service: &Service,
    holder: Holder,
    connection: &Connection,
    request: &Request<'_>,
    descriptors: Vec<ClientFile>,
) -> Response {
    let handler = RequestHandler { service, holder, peer: &connection.peer };
    let result = match request {
        Request::Register { flags, expected, content } => {
            handler.register(*flags, *expected, *content, &descriptors)
        }
        Request::Request(id) => handler.hand_out(&mut service.begin(), &connection.peer.domain, *id),
        Request::Release(id) => handler.release(*id),
        Request::Files(ranges) => handler.files(ranges, descriptors),
        Request::Report => handler.report(),
        Request::PlacementTable(library) => handler.placement_table(library),
        Request::FindRelocated(names) => Ok(handler.find_relocated(names)),
        Request::RegisterRelocated(name) => handler.register_relocated(*name, &descriptors),
    };
    handler.log(request, &result);
    result.unwrap_or_else(Response::from)
}

/// One request's client.
struct RequestHandler<'a> {
    service: &'a Service,
    holder: Holder,
    peer: &'a PeerRecord,
}

impl RequestHandler<'_> {
    /// Returns whether the client is root or the store's own user, and not only so within a container.
    fn is_administrator(&self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        self.peer.is_of_host && matches!(self.peer.domain, TrustDomain::User(uid) if uid == 0 || uid == own)
    }

    fn may_publish(&self) -> bool {
        let publishers = &self.service.config.publishers;
        let is_named = self.peer.is_of_host
            && matches!(self.peer.domain, TrustDomain::User(uid) if publishers.contains(&uid));
        is_named || self.is_administrator()
    }

    fn register(
        &self,
        flags: u32,
        expected: Option<ObjectId>,
        content: Content<'_>,
        descriptors: &[ClientFile],
    ) -> Result<Response, Refusal> {
        let executable = flags & EXECUTABLE != 0;
        let public = flags & PUBLIC != 0;
        let config = &self.service.config;
        if executable && config.executables != Executables::Any || public && !self.may_publish() {
            return Err(Refusal::Denied);
        }
        let domain = if public { TrustDomain::Public } else { self.peer.domain.clone() };
        match content {
            Content::Inline(bytes) => {
                let length = bytes.len() as u64;
                if bytes.is_empty() || length > config.largest {
                    return Err(Refusal::Size);
                }
                let id = ObjectId::of(bytes);
                check_expected(expected, id)?;
                let is_small =
                    bytes.len() <= small_objects::MAX_LENGTH && flags & (OWN_PAGES | EXECUTABLE) == 0;
                let mut state = self.service.begin();
                if state.object(&domain, id).is_none() {
                    if is_small {
                        state.enter_small(&domain, id, bytes)?;
                    } else {
                        state.enter_sealed(&domain, id, sealed_copy(id, bytes)?, length, executable)?;
                    }
                } else if executable {
                    state.allow_execution(&domain, id)?;
                }
                self.hand_out(&mut state, &domain, id)
            }
            Content::Descriptor { length } => {
                let destination = CopyDestination::default();
                let (id, copy) =
                    self.copy_memory(&domain, "orc:object", length, descriptors, &destination)?;
                check_expected(expected, id)?;
                let mut state = self.service.begin();
                state.enter_written(&domain, (id, ""), copy, length, executable)?;
                self.hand_out(&mut state, &domain, id)
            }
        }
    }

    /// Copies the first bytes of the memory file that came with the message.
    fn copy_memory(
        &self,
        domain: &TrustDomain,
        label: &str,
        length: u64,
        descriptors: &[ClientFile],
        destination: &CopyDestination,
    ) -> Result<(ObjectId, WrittenFile), Refusal> {
        let [file] = descriptors else { return Err(Refusal::Descriptor) };
        let largest = self.service.config.largest;
        if length == 0 || length > largest {
            return Err(Refusal::Size);
        }
        let _slot = self.service.copy_slot(&self.peer.account, length)?;
        // The quota is checked before anything is copied.
        self.service.begin().make_room(domain, whole_pages(length))?;
        let (id, copy) = client_file::copy_memory(file, label, length, largest, destination)?;
        Ok((id, copy.finish()))
    }

    fn hand_out(&self, state: &mut State, domain: &TrustDomain, id: ObjectId) -> Result<Response, Refusal> {
        let (owner, entry) = state.hand_out(self.holder, domain, id).ok_or(Refusal::NotFound)?;
        let mut flags = 0;
        if entry.executable {
            flags |= EXECUTABLE;
        }
        if owner == TrustDomain::Public {
            flags |= PUBLIC;
        }
        let Object { file, offset, length } = entry.object.clone();
        let reply = Reply::Handle(Handle { id, offset, length, flags });
        Ok(Response { reply, files: vec![file], attachment: None })
    }

    fn release(&self, id: ObjectId) -> Result<Response, Refusal> {
        let was_held = self.service.begin().release(self.holder, &self.peer.domain, id);
        if was_held { Ok(Response::new(Reply::Released)) } else { Err(Refusal::NotHeld) }
    }

    fn files(&self, ranges: &[FileRange], descriptors: Vec<ClientFile>) -> Result<Response, Refusal> {
        if descriptors.len() != ranges.len() {
            return Err(Refusal::Descriptor);
        }
        let Service { config, readers, .. } = self.service;
        let examined =
            client_file::examine_all(readers, &self.peer.account, ranges, descriptors, config.largest);
        let mut files = Vec::new();
        let object = |range, examined: Result<_, _>| {
            examined.and_then(|(file, found)| self.file_range(range, file, found))
        };
        let replies = ranges
            .iter()
            .zip(examined)
            .map(|(range, examined)| match object(range, examined) {
                Ok((object, duplicate)) => {
                    files.push(object.file);
                    FileRangeReply { refusal: None, duplicate, offset: object.offset }
                }
                Err(refusal) => FileRangeReply { refusal: Some(refusal), duplicate: false, offset: 0 },
            })
            .collect();
        Ok(Response { reply: Reply::FileRanges(replies), files, attachment: None })
    }

    /// Returns the object with the bytes of a range, and whether the file's own cached pages have just become useless.
    fn file_range(
        &self,
        range: &FileRange,
        mut file: ClientFile,
        examined: ExaminedRange,
    ) -> Result<(Object, bool), Refusal> {
        let config = &self.service.config;
        let executable = range.flags & EXECUTABLE != 0;
        let is_allowed = || {
            !examined.noexec && may_execute(config.executables, examined.owner, examined.mode, self.peer.uid)
        };
        if executable && !is_allowed() {
            return Err(Refusal::Denied);
        }
        let known = examined
            .is_lasting
            .then(|| self.known_file(&mut self.service.begin(), &examined, executable))
            .flatten();
        if let Some(object) = known {
            return Ok((object, false));
        }
        let domain = &self.peer.domain;
        let slot = self.service.copy_slot(&self.peer.account, range.length)?;
        if self.service.begin().has_length(domain, range.length) {
            // It may have the bytes of another file, of which no copy is needed.
            let id;
            (file, id) = client_file::hash(file, *range, examined)?;
            let mut state = self.service.begin();
            if state.object(domain, id).is_some() {
                if executable {
                    state.allow_execution(domain, id)?;
                }
                state.remember_file(domain, examined.key, id, client_file::file_path(&file));
                let object = self.known_file(&mut state, &examined, executable).ok_or(Refusal::NotFound)?;
                drop(state);
                self.service.duplicates.drop_pages(file, examined.key.size());
                self.prelink(id, &object, &examined);
                return Ok((object, true));
            }
        }
        self.service.begin().make_room(domain, range.length)?;
        let label = client_file::file_label(&file);
        // Only memory has huge pages.
        let wants_huge_pages = config.huge && is_large_code(range);
        let destination =
            if wants_huge_pages { CopyDestination::default() } else { self.copy_destination(domain) };
        let (file, (id, copy)) = client_file::copy(file, *range, examined, destination)?;
        let copy = copy.finish();
        drop(slot);
        let mut state = self.service.begin();
        // A public object serves the trust domain, too.
        let public = state.object(&TrustDomain::Public, id);
        if !public.is_some_and(|entry| entry.executable || !executable) {
            state.enter_written(domain, (id, &label), copy, range.length, executable)?;
        }
        state.remember_file(domain, examined.key, id, client_file::file_path(&file));
        let object = self.known_file(&mut state, &examined, executable).ok_or(Refusal::NotFound)?;
        drop(state);
        self.service.duplicates.drop_pages(file, examined.key.size());
        self.prelink(id, &object, &examined);
        self.service.cache_dropper.add(Arc::clone(&object.file));
        if wants_huge_pages {
            self.service.collapser.collapse(object.file.fd.as_fd());
        }
        Ok((object, true))
    }

    /// Relocates the data of a library that programs load from an object. If that cannot be done, the loader does it.
    fn prelink(&self, id: ObjectId, object: &Object, examined: &ExaminedRange) -> Option<()> {
        const LABEL: &str = "orc:prelinked";
        object.file.path.as_ref().filter(|_| examined.key.in_index().is_some())?;
        let domain = &self.peer.domain;
        let fd = object.file.fd.as_fd();
        let library = prelink::Library::examine(fd, examined.key.size())?;
        let address = self.service.begin().place(domain, &library.placement).ok()??;
        let bytes = library.relocate(fd, address)?;
        let destination = CopyDestination { disk: None, ..self.copy_destination(domain) };
        let mut copy = destination.create(LABEL, bytes.len()).ok()?;
        copy.write_at(0, &bytes).ok()?;
        let (content, length) = (ObjectId::of(&bytes), bytes.len() as u64);
        let mut state = self.service.begin();
        state.enter_written(domain, (content, LABEL), copy.finish(), length, false).ok()?;
        state.publish_prelinked(domain, &library, address, (id, content));
        Some(())
    }

    /// Returns the object of a range that was read before, with a hold on it.
    fn known_file(&self, state: &mut State, examined: &ExaminedRange, executable: bool) -> Option<Object> {
        let domain = &self.peer.domain;
        let id = state.known_files().get(domain, &examined.key)?;
        let owners = [domain, &TrustDomain::Public];
        let entry = owners.into_iter().find_map(|owner| state.object(owner, id));
        if !entry.is_some_and(|entry| entry.executable || !executable) {
            // It was evicted, or is not executable yet: the file has to be read again.
            state.known_files().remove(domain, &examined.key);
            return None;
        }
        let object = state.hand_out(self.holder, domain, id)?.1.object.clone();
        if let Some((key, length)) = examined.key.in_index()
            && object.file.path.is_some()
            && examined.is_lasting
            && self.is_for_all(examined)
            && !examined.noexec
        {
            state.publish_file(domain, &key, length, id);
        }
        Some(object)
    }

    /// Returns whether all clients of the trust domain may have what this one may have.
    fn is_for_all(&self, examined: &ExaminedRange) -> bool {
        let trusted = [0, rustix::process::geteuid().as_raw()];
        let is_readable = examined.mode & 0o444 == 0o444;
        matches!(self.peer.domain, TrustDomain::User(_)) || is_readable && trusted.contains(&examined.owner)
    }

    fn copy_destination(&self, domain: &TrustDomain) -> CopyDestination {
        CopyDestination {
            named: self.service.begin().object_directory(domain),
            disk: object_directory::unnamed(&self.service.config),
        }
    }

    fn report(&self) -> Result<Response, Refusal> {
        let everything = self.is_administrator();
        let text = self.service.pace_reports(&self.peer.account, || {
            let snapshot = Snapshot::take(&self.service.begin(), &self.peer.domain, everything);
            let account = (!everything).then_some(&self.peer.account);
            snapshot.write(self.service.readers.stuck(account))
        });
        let fd = sealed_copy(ObjectId::of(&text), &text)?;
        let reply = Reply::Report { length: text.len() as u64 };
        Ok(Response { reply, files: Vec::new(), attachment: Some(fd) })
    }

    fn placement_table(&self, library: &PlacementRequest) -> Result<Response, Refusal> {
        let shared = self.service.begin().place_and_share(&self.peer.domain, library);
        let fd = shared.map_err(|_| Refusal::Exhausted)?;
        let reply = Reply::PlacementTable { length: placement_table::BYTES };
        Ok(Response { reply, files: Vec::new(), attachment: Some(fd) })
    }

    fn find_relocated(&self, names: &[RelocatedData]) -> Response {
        let domain = &self.peer.domain;
        let mut state = self.service.begin();
        let mut files = Vec::new();
        let mut replies = Vec::new();
        for name in names {
            let id = state.known_relocated().get(domain, name);
            let found = id.and_then(|id| Some(state.hand_out(self.holder, domain, id)?.1.object.clone()));
            let refusal = if found.is_some() { None } else { Some(Refusal::NotFound) };
            let offset = found.as_ref().map_or(0, |object| object.offset);
            if let Some(id) = id {
                state.publish_relocated(domain, name, id);
            }
            files.extend(found.map(|object| object.file));
            replies.push(FileRangeReply { refusal, duplicate: false, offset });
        }
        Response { reply: Reply::FileRanges(replies), files, attachment: None }
    }

    fn register_relocated(
        &self,
        name: RelocatedData,
        descriptors: &[ClientFile],
    ) -> Result<Response, Refusal> {
        const LABEL: &str = "orc:relocated";
        if !name.length.is_multiple_of(PAGE as u64) {
            return Err(Refusal::Malformed);
        }
        let domain = &self.peer.domain;
        let destination = CopyDestination { disk: None, ..self.copy_destination(domain) };
        let (id, copy) = self.copy_memory(domain, LABEL, name.length, descriptors, &destination)?;
        let mut state = self.service.begin();
        state.enter_written(domain, (id, LABEL), copy, name.length, false)?;
        state.publish_relocated(domain, &name, id);
        state.known_relocated().insert(domain, name, id);
        self.hand_out(&mut state, domain, id)
    }

    fn log(&self, request: &Request<'_>, result: &Result<Response, Refusal>) {
        let log = &self.service.event_log;
        if !log.is_on() {
            return;
        }
        let (event, requested) = match request {
            Request::Register { expected, .. } => ("register", *expected),
            Request::Request(id) => ("request", Some(*id)),
            Request::Release(id) => ("release", Some(*id)),
            Request::Files(_) => ("files", None),
            Request::Report => ("report", None),
            Request::PlacementTable(_) => ("placement-table", None),
            Request::FindRelocated(_) => ("find-relocated", None),
            Request::RegisterRelocated(_) => ("register-relocated", None),
        };
        let (object, note) = match result.as_ref().map(|response| &response.reply) {
            Ok(Reply::Handle(handle)) => (Some(handle.id), None),
            Ok(Reply::FileRanges(replies)) if event == "files" => (None, refusals(replies)),
            Ok(_) => (requested, None),
            Err(refusal) => (requested, Some(refusal.to_string())),
        };
        log.did(self.peer, event, object, note.as_deref());
    }
}

/// Returns how many ranges were refused, and why the first one was.
fn refusals(replies: &[FileRangeReply]) -> Option<String> {
    let refused: Vec<Refusal> = replies.iter().filter_map(|reply| reply.refusal).collect();
    let first = refused.first()?;
    Some(format!("{} of {} refused: {first}", refused.len(), replies.len()))
}

fn is_large_code(range: &FileRange) -> bool {
    range.flags & EXECUTABLE != 0 && range.length >= huge_pages::MIN_LENGTH
}

fn check_expected(expected: Option<ObjectId>, id: ObjectId) -> Result<(), Refusal> {
    if expected.is_none_or(|expected| expected == id) { Ok(()) } else { Err(Refusal::Mismatch) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expected_name_has_to_be_that_of_the_bytes() {
        assert!(check_expected(None, ObjectId([1; 32])).is_ok());
        assert_eq!(check_expected(Some(ObjectId([2; 32])), ObjectId([1; 32])), Err(Refusal::Mismatch));
    }
}
