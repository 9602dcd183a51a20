//! Reports: what a client may know of the store.

use std::collections::{BTreeMap, HashMap};

use std::os::fd::AsFd as _;

use rustix::fs::{fstat, major, minor};

use crate::objects::backing_file::resident;
use crate::state::store_state::State;
use crate::trust_domain::TrustDomain;
use orrery_orc_wire::ObjectId;
use orrery_orc_wire::report::{Report, ReportedObject};

/// Returns what a client of `domain` may know, in JSON.
pub(crate) fn write(state: &State, quota: u64, domain: &TrustDomain, everything: bool) -> Vec<u8> {
    let may_know = |other: &TrustDomain| everything || other == domain;
    let mut holders: HashMap<(TrustDomain, ObjectId), BTreeMap<i32, usize>> = HashMap::new();
    let mut connections = 0;
    for (number, connection) in state.clients().iter() {
        if may_know(&connection.peer.domain) {
            connections += 1;
            for (owner, id, _) in state.holds_of(number) {
                *holders.entry((owner, id)).or_default().entry(connection.peer.pid).or_insert(0) += 1;
            }
        }
    }
    let mut objects = Vec::new();
    for (owner, of_domain) in state.trust_domains() {
        if *owner != TrustDomain::Public && !may_know(owner) {
            continue;
        }
        for (id, entry) in of_domain.iter() {
            let Ok(stat) = fstat(&entry.object.file.fd) else { continue };
            objects.push(ReportedObject {
                id: id.to_string(),
                trust_domain: owner.to_string(),
                length: entry.object.length,
                charged: entry.bytes,
                executable: entry.executable,
                offset: entry.object.offset,
                device: format!("{:02x}:{:02x}", major(stat.st_dev), minor(stat.st_dev)),
                inode: stat.st_ino,
                resident: resident(entry.object.file.fd.as_fd(), stat.st_blocks),
                // How often others request a public object is not disclosed.
                served: if *owner == *domain || everything { entry.served } else { 0 },
                holders: holders.remove(&(owner.clone(), *id)).unwrap_or_default(),
            });
        }
    }
    objects.sort_by(|a, b| (&a.trust_domain, &a.id).cmp(&(&b.trust_domain, &b.id)));
    let report = Report { pid: std::process::id(), connections, quota, objects };
    serde_json::to_vec(&report).unwrap_or_default()
}
