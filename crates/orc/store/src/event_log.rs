//! The event log: which client requested what, and the outcome.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::supervisor::records::PeerRecord;
use crate::trust_domain::TrustDomain;
use orrery_orc_wire::ObjectId;

/// One line of the log.
#[derive(Debug, Serialize)]
pub(crate) struct Event<'a> {
    /// Milliseconds since 1970.
    pub(crate) time: u64,
    /// `connect`, `register`, `request`, `release`, `files`, `placement-table`, `find-relocated`, `register-relocated`,
    /// `report`, `leave`; `evict`, `refuse`, `names`, `restart`, `supervisor`.
    pub(crate) event: &'static str,
    /// The trust domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) trust_domain: Option<String>,
    /// The process, as it was when it connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pid: Option<i32>,
    /// Its user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) uid: Option<u32>,
    /// The object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) object: Option<String>,
    /// The reason of a refusal, or other details.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<&'a str>,
}

/// The file that events are written to, if there is one.
#[derive(Debug, Default)]
pub(crate) struct EventLog {
    file: Option<Mutex<File>>,
}

impl EventLog {
    /// Opens the log for appending, for the store's user alone.
    ///
    /// # Errors
    /// Those of open(2).
    pub(crate) fn open(path: Option<&Path>) -> std::io::Result<Self> {
        let open = |path| File::options().append(true).create(true).mode(0o600).open(path);
        Ok(Self { file: path.map(open).transpose()?.map(Mutex::new) })
    }

    /// Writes a line. A full disk does not stop the store.
    pub(crate) fn write(&self, event: &Event<'_>) {
        let Some(file) = &self.file else { return };
        if let Ok(mut line) = serde_json::to_vec(event) {
            line.push(b'\n');
            // In one write, so that lines of several threads do not mix.
            let _ = file.lock().unwrap_or_else(PoisonError::into_inner).write_all(&line);
        }
    }

    /// Writes an event that no client caused.
    pub(crate) fn note(
        &self,
        event: &'static str,
        domain: Option<&TrustDomain>,
        object: Option<ObjectId>,
        note: &str,
    ) {
        if self.file.is_some() {
            let domain = domain.map(ToString::to_string);
            let object = object.map(|id| id.to_string());
            let note = Some(note).filter(|note| !note.is_empty());
            self.write(&Event {
                time: now(),
                event,
                trust_domain: domain,
                pid: None,
                uid: None,
                object,
                note,
            });
        }
    }

    /// Writes what a client did, and the outcome.
    pub(crate) fn did(
        &self,
        peer: &PeerRecord,
        event: &'static str,
        object: Option<ObjectId>,
        note: Option<&str>,
    ) {
        if self.is_on() {
            self.write(&Event {
                time: now(),
                event,
                trust_domain: Some(peer.domain.to_string()),
                pid: Some(peer.pid),
                uid: Some(peer.uid),
                object: object.map(|id| id.to_string()),
                note,
            });
        }
    }

    /// Returns whether there is a log.
    pub(crate) fn is_on(&self) -> bool {
        self.file.is_some()
    }
}

/// Returns milliseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
