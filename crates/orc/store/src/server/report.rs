//! Reports: what a client may know of the store.
//!
//! What a report needs of the state is copied in one transaction. It is written afterwards, while others change the state.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use rustix::fs::{fstat, major, minor};

use crate::objects::backing_file::{Object, resident};
use crate::objects::table::Entry;
use crate::state::store_state::State;
use crate::trust_domain::TrustDomain;
use orrery_orc_wire::ObjectId;
use orrery_orc_wire::report::{Report, ReportedObject};

/// What a client may know, as it was in one transaction.
#[derive(Debug)]
pub(crate) struct Snapshot {
    trust_domain: String,
    quota: u64,
    connections: usize,
    objects: Vec<(TrustDomain, Vec<SnapshotObject>)>,
    /// Who holds which object: a PID.
    holds: Vec<(TrustDomain, ObjectId, i32)>,
}

#[derive(Debug)]
struct SnapshotObject {
    id: ObjectId,
    object: Object,
    bytes: u64,
    executable: bool,
    served: u64,
    files: Vec<PathBuf>,
}

impl Snapshot {
    /// Copies what a client of `domain` may know, or everything.
    pub(crate) fn take(state: &State, domain: &TrustDomain, everything: bool) -> Self {
        let may_know = |other: &TrustDomain| everything || other == domain;
        let mut holds = Vec::new();
        let mut connections = 0;
        for (number, connection) in state.clients().iter().filter(|(_, client)| may_know(&client.peer.domain))
        {
            connections += 1;
            let pid = connection.peer.pid;
            holds.extend(state.holds_of(number).into_iter().map(|(owner, id, _)| (owner, id, pid)));
        }
        let domains =
            state.trust_domains().filter(|(owner, _)| **owner == TrustDomain::Public || may_know(owner));
        let objects = domains.map(|(owner, of_domain)| {
            // How often others request a public object is not disclosed.
            let may_know_served = *owner == *domain || everything;
            let copy = |(id, entry): (&ObjectId, &Entry<Object>)| SnapshotObject {
                id: *id,
                object: entry.object.clone(),
                bytes: entry.bytes,
                executable: entry.executable,
                served: if may_know_served { entry.served } else { 0 },
                files: state.origins().paths(owner, *id),
            };
            (owner.clone(), of_domain.iter().map(copy).collect())
        });
        Self {
            trust_domain: domain.to_string(),
            quota: state.quota(domain),
            connections,
            objects: objects.collect(),
            holds,
        }
    }

    /// Writes it in JSON, with the number of threads that hang.
    pub(crate) fn write(self, stuck_threads: usize) -> Vec<u8> {
        let mut holders: HashMap<(TrustDomain, ObjectId), BTreeMap<i32, usize>> = HashMap::new();
        for (owner, id, pid) in self.holds {
            *holders.entry((owner, id)).or_default().entry(pid).or_insert(0) += 1;
        }
        let mut objects = Vec::new();
        for (owner, of_domain) in self.objects {
            let trust_domain = owner.to_string();
            for SnapshotObject { id, object, bytes, executable, served, files } in of_domain {
                let Ok(stat) = fstat(&object.file.fd) else { continue };
                objects.push(ReportedObject {
                    id: id.to_string(),
                    trust_domain: trust_domain.clone(),
                    length: object.length,
                    charged: bytes,
                    executable,
                    offset: object.offset,
                    device: format!("{:02x}:{:02x}", major(stat.st_dev), minor(stat.st_dev)),
                    inode: stat.st_ino,
                    resident: resident(object.file.fd.as_fd(), stat.st_blocks),
                    served,
                    files: files.iter().map(|path| path.to_string_lossy().into_owned()).collect(),
                    holders: holders.remove(&(owner.clone(), id)).unwrap_or_default(),
                });
            }
        }
        objects.sort_by(|a, b| (&a.trust_domain, &a.id).cmp(&(&b.trust_domain, &b.id)));
        let report = Report {
            pid: std::process::id(),
            trust_domain: self.trust_domain,
            connections: self.connections,
            quota: self.quota,
            stuck_threads,
            objects,
        };
        serde_json::to_vec(&report).unwrap_or_default()
    }
}
