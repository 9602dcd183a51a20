//! Object stores, asked for their reports. What sharing saves takes longer to count; `orrery orc stat` shows it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Result;
use orrery_orc_client::report::{Report, ReportedObject};
use orrery_orc_client::{Client, SOCKET, default_directory};

use super::describe::{describe, shown};
use super::processes::Processes;
use crate::status::model::{Figures, Item, Kind, Part};

/// Where the service `orrery-orc` listens.
const OF_THE_SERVICE: &str = "/run/orrery/orc";

pub(super) fn usual_sockets() -> Vec<PathBuf> {
    [default_directory(), OF_THE_SERVICE.into()].map(|directory| directory.join(SOCKET)).into()
}

pub(super) fn ask(socket: &Path, processes: &Processes) -> Result<Item> {
    let report = Client::connect_to(socket)?.report()?;
    let mut item = item(socket, &report);
    describe(&mut item, Some(report.pid).filter(|pid| *pid > 0), processes);
    Ok(item)
}

fn item(socket: &Path, report: &Report) -> Item {
    let mut item = Item::new(Kind::Orc, shown(socket), "serves");
    let all: Vec<&ReportedObject> = report.objects.iter().collect();
    add(&mut item.figures, &all);
    let help = "Connections of the reported trust domains.";
    item.figures.add("connections", report.connections, help);
    item.figures.add("quota_bytes", report.quota, "Bytes that the trust domain of this user may have.");
    let mut trust_domains: BTreeMap<&str, Vec<&ReportedObject>> = BTreeMap::new();
    for object in &report.objects {
        trust_domains.entry(&object.trust_domain).or_default().push(object);
    }
    for (name, objects) in trust_domains {
        let mut figures = Figures::default();
        add(&mut figures, &objects);
        item.parts.push(Part {
            role: "trust_domain",
            name: name.to_owned(),
            pid: None,
            state: "serves",
            figures,
        });
    }
    item
}

fn add(figures: &mut Figures, objects: &[&ReportedObject]) {
    // Small objects share a backing file, whose bytes count once.
    let files: BTreeSet<(&str, u64, u64)> =
        objects.iter().map(|object| (object.device.as_str(), object.inode, object.resident)).collect();
    let holders: BTreeSet<i32> = objects.iter().flat_map(|object| object.holders.keys().copied()).collect();
    let sum = |of: fn(&ReportedObject) -> u64| objects.iter().map(|object| of(object)).sum::<u64>();
    figures.add("objects", objects.len(), "Objects.");
    figures.add("object_bytes", sum(|object| object.length), "Bytes of the objects.");
    figures.add("charged_bytes", sum(|object| object.charged), "Bytes that count against quotas.");
    let resident = files.iter().map(|(_, _, resident)| resident).sum::<u64>();
    figures.add("resident_bytes", resident, "Bytes of the objects' files that are in memory or swap.");
    figures.add("holders", holders.len(), "Processes that hold objects.");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_summed_by_trust_domain() {
        let object = |domain: &str, inode, holder| ReportedObject {
            id: String::new(),
            trust_domain: domain.to_owned(),
            length: 1000,
            charged: 4096,
            executable: false,
            offset: 0,
            device: "0:1".to_owned(),
            inode,
            resident: 8192,
            served: 1,
            files: Vec::new(),
            holders: BTreeMap::from([(holder, 1)]),
        };
        let objects = vec![object("public", 1, 5), object("public", 1, 5), object("user 0", 2, 6)];
        let report = Report {
            pid: 7,
            trust_domain: "user 0".to_owned(),
            connections: 2,
            quota: 1 << 30,
            stuck_threads: 0,
            objects,
        };
        let item = item(Path::new("/o/socket"), &report);
        let of = |figures: &Figures, name: &str| figures.get(name).unwrap();
        assert_eq!(of(&item.figures, "objects"), 3_u64.into());
        assert_eq!(of(&item.figures, "resident_bytes"), 16384_u64.into(), "two share a file");
        assert_eq!(of(&item.figures, "holders"), 2_u64.into());
        let names: Vec<_> = item.parts.iter().map(|part| part.name.as_str()).collect();
        assert_eq!(names, ["public", "user 0"]);
        assert_eq!(of(&item.parts[0].figures, "object_bytes"), 2000_u64.into());
    }
}
