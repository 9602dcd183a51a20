//! The event log: which client requested what, and the outcome.
//!
//! A log that has become too long is renamed to `FILE.1`, in place of an older one, and a new one begins: so both together have a bound,
//! whatever clients do.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
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
    /// The user ID of the process.
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
    file: Option<Mutex<LogFile>>,
}

#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    file: File,
    length: u64,
    most: u64,
}

impl LogFile {
    fn open(path: &Path, most: u64) -> std::io::Result<Self> {
        let file = File::options().append(true).create(true).mode(0o600).open(path)?;
        let length = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), file, length, most })
    }

    /// Writes a line. If neither it nor a new file can be written, the line is lost.
    fn write(&mut self, line: &[u8]) {
        if self.length > 0 && self.length + line.len() as u64 > self.most {
            let mut older = self.path.clone().into_os_string();
            older.push(".1");
            let renamed = std::fs::rename(&self.path, older);
            match renamed.and_then(|()| Self::open(&self.path, self.most)) {
                Ok(fresh) => *self = fresh,
                Err(_) => return,
            }
        }
        // In one write, so that lines of several processes do not mix.
        if self.file.write_all(line).is_ok() {
            self.length += line.len() as u64;
        }
    }
}

impl EventLog {
    /// Opens the log for appending, for the store's user alone; it has `most` bytes at most.
    ///
    /// # Errors
    /// Those of open(2).
    pub(crate) fn open(path: Option<&Path>, most: u64) -> std::io::Result<Self> {
        Ok(Self { file: path.map(|path| LogFile::open(path, most)).transpose()?.map(Mutex::new) })
    }

    /// Writes a line. A full disk does not stop the store.
    pub(crate) fn write(&self, event: &Event<'_>) {
        let Some(file) = &self.file else { return };
        if let Ok(mut line) = serde_json::to_vec(event) {
            line.push(b'\n');
            file.lock().unwrap_or_else(PoisonError::into_inner).write(&line);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_has_a_bound() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let log = EventLog::open(Some(&path), 1000).unwrap();
        for number in 0..100 {
            log.note("evict", None, None, &number.to_string());
        }
        let read = |path: &Path| std::fs::read_to_string(path).unwrap();
        let (older, newer) = (read(&directory.path().join("log.1")), read(&path));
        assert!(older.len() <= 1000 && newer.len() <= 1000 && older.len() > 800);
        let last: serde_json::Value = serde_json::from_str(newer.lines().last().unwrap()).unwrap();
        assert_eq!(last["note"], "99", "what is new is there");
        let lines: Vec<u64> = older
            .lines()
            .chain(newer.lines())
            .map(|line| {
                let line: serde_json::Value = serde_json::from_str(line).unwrap();
                line["note"].as_str().unwrap().parse().unwrap()
            })
            .collect();
        assert!(lines.windows(2).all(|pair| pair[1] == pair[0] + 1), "{lines:?}");
        // What was there counts.
        drop(log);
        let log = EventLog::open(Some(&path), 1000).unwrap();
        (0..20).for_each(|_| log.note("evict", None, None, ""));
        assert!(read(&path).len() <= 1000);
    }
}
