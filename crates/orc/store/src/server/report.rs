//! What a client may know of the store.

use std::collections::{BTreeMap, HashMap};

use std::os::fd::AsFd as _;

use rustix::fs::{fstat, major, minor};

use crate::objects::backing_file::resident;
use crate::state::state::State;
use crate::trust_domain::Realm;
use orrery_orc_wire::ObjectId;
use orrery_orc_wire::report::{Report, ReportedObject};

/// Writes what a client of `realm` may know, in JSON.
pub(crate) fn write(state: &State, realm: &Realm, everything: bool) -> Vec<u8> {
    let may_know = |other: &Realm| everything || other == realm;
    let mut holders: HashMap<(Realm, ObjectId), BTreeMap<i32, usize>> = HashMap::new();
    let mut connections = 0;
    for (number, connection) in &state.connections {
        if may_know(&connection.peer.realm) {
            connections += 1;
            for (place, id, _) in state.table.holds_of(*number) {
                *holders.entry((place, id)).or_default().entry(connection.peer.pid).or_insert(0) += 1;
            }
        }
    }
    let mut objects = Vec::new();
    for (place, of_realm) in state.table.realms() {
        if *place != Realm::Public && !may_know(place) {
            continue;
        }
        for (id, entry) in of_realm.iter() {
            let Ok(stat) = fstat(&entry.object.memory.fd) else { continue };
            objects.push(ReportedObject {
                id: id.to_string(),
                realm: place.to_string(),
                length: entry.object.length,
                charged: entry.bytes,
                executable: entry.executable,
                offset: entry.object.offset,
                device: format!("{:02x}:{:02x}", major(stat.st_dev), minor(stat.st_dev)),
                inode: stat.st_ino,
                resident: resident(entry.object.memory.fd.as_fd(), stat.st_blocks),
                // How often others asked for what is public is nobody's business.
                served: if *place == *realm || everything { entry.served } else { 0 },
                holders: holders.remove(&(place.clone(), *id)).unwrap_or_default(),
            });
        }
    }
    objects.sort_by(|a, b| (&a.realm, &a.id).cmp(&(&b.realm, &b.id)));
    let report = Report { pid: std::process::id(), connections, quota: state.config.quota, objects };
    serde_json::to_vec(&report).unwrap_or_default()
}
