//! Restores the state from the supervisor's records.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use crate::config::Config;
use crate::descriptor_limit;
use crate::event_log::EventLog;
use crate::host_secret::HostSecret;
use crate::named::catalog::Catalog;
use crate::named::lease;
use crate::named::open_tracker::OpenTracker;
use crate::objects::accounts::Accounts;
use crate::objects::backing_file::{BackingFile, Object};
use crate::objects::shares::Shares;
use crate::objects::table::{Limits, Table};
use crate::state::clients::{Connection, Listener};
use crate::state::fdstore::{FdStore, decode};
use crate::state::store_state::State;
use crate::state::transaction::Fixed;
use crate::supervisor::channel::{Message, prepare, receive};
use crate::supervisor::launcher::Launcher;
use crate::supervisor::records::{AccountRecord, Key, ObjectRecord, PeerRecord, decode_path};
use crate::trust_domain::TrustDomain;

type Record = (Key, Vec<u8>, Option<OwnedFd>);

/// Receives the supervisor's records, and builds the state that they describe.
///
/// # Errors
/// If the supervisor is gone, or its records are malformed.
pub(super) fn restore(link: OwnedFd, launcher: Launcher) -> io::Result<(State, Fixed)> {
    let link = prepare(link)?;
    let records = receive_records(&link)?;
    build(link, launcher, records)
}

fn receive_records(link: &OwnedFd) -> io::Result<Vec<Record>> {
    let mut records = Vec::new();
    let mut buffer = Vec::new();
    loop {
        let received = receive(link.as_fd(), &mut buffer, |message, fd| match message {
            Message::Put(key, value) => decode::<Key>(key).map(|key| {
                records.push((key, value.to_vec(), fd));
                true
            }),
            Message::End => Ok(false),
            Message::Delete(_) | Message::Stop => {
                Err(io::Error::other("the supervisor sent an unexpected message"))
            }
        })?;
        if !received.ok_or_else(|| io::Error::other("the supervisor is gone"))?? {
            return Ok(records);
        }
    }
}

fn missing() -> io::Error {
    io::Error::other("a record came without its descriptor or its configuration")
}

fn build(link: OwnedFd, launcher: Launcher, records: Vec<Record>) -> io::Result<(State, Fixed)> {
    let mut records = records.into_iter();
    let Some((Key::Config, config, _)) = records.next() else { return Err(missing()) };
    let config: Arc<Config> = Arc::new(serde_json::from_slice(&config)?);
    let event_log = Arc::new(EventLog::open(config.log.as_deref(), config.log_size)?);
    let secret = config.secret.as_deref().map_or_else(HostSecret::ephemeral, HostSecret::load_or_create)?;
    let tracker =
        OpenTracker::new().inspect_err(|error| event_log.note("names", None, None, &error.to_string()));
    let limits = Limits { bytes: config.quota, objects: config.objects };
    let named: Vec<_> =
        config.named_domains.iter().map(|named| TrustDomain::Named(named.name.clone())).collect();
    let accounts = Accounts::new(Shares::new(config.memory, config.quota, &named));
    let mut state = State::new(
        Arc::clone(&config),
        Arc::clone(&event_log),
        Table::new(limits, accounts, Object::is_in_use),
        Catalog::new(secret, tracker.ok()),
        FdStore::disconnected(launcher),
    );
    let mut listeners = Vec::new();
    let mut files = HashMap::new();
    let mut placement_tables = Vec::new();
    for (key, value, fd) in records {
        match key {
            Key::Config => {}
            Key::Listener(_) => {
                listeners.push(Listener { socket: fd.ok_or_else(missing)?, domain: decode(&value)? });
            }
            Key::Lock(_) => state.locks.push(fd.ok_or_else(missing)?),
            Key::Account(domain) => {
                let AccountRecord { account, share } = decode(&value)?;
                state.objects.accounts_mut().restore(&domain, &account, share);
            }
            Key::BackingFile(number) => {
                state.next_number = state.next_number.max(number + 1);
                let file = BackingFile::new(number, fd.ok_or_else(missing)?, decode_path(value));
                if file.path.is_some() {
                    // The server that was killed may have left one behind, for which others would have to wait.
                    lease::release(file.fd.as_fd());
                }
                files.insert(number, Arc::new(file));
            }
            Key::Object(domain, id) => {
                let record: ObjectRecord = decode(&value)?;
                let file = Arc::clone(files.get(&record.file).ok_or_else(missing)?);
                let object = Object { file, offset: record.offset, length: record.length };
                // It was within the quota before.
                let _ = state.enter(&domain, id, object, record.bytes, record.executable);
            }
            Key::Connection(number) => {
                state.next_number = state.next_number.max(number + 1);
                let peer: PeerRecord = decode(&value)?;
                state.descriptors.add(&peer.account);
                let connection = Connection { socket: fd.ok_or_else(missing)?, peer };
                state.clients.insert(number, Arc::new(connection));
            }
            Key::Hold(number, domain, id) => {
                let _ = state.objects.hold(number, &domain, id, decode(&value)?);
            }
            Key::PlacementTable(domain) => placement_tables.push((domain, fd.ok_or_else(missing)?)),
        }
    }
    // The supervisor knows all of this.
    let _ = state.objects.take_changes();
    state.fdstore.connect(link);
    for (domain, old) in placement_tables {
        // Nobody can write to the old one any more, not even this process.
        let copy = state.catalog.copy_placement_table(&domain, old.as_fd())?;
        state.fdstore.put(&Key::PlacementTable(domain), &[], Some(copy));
    }
    state.descriptors.set_limit(descriptor_limit::for_clients());
    Ok((state, Fixed { config, listeners: Arc::new(listeners), event_log }))
}
