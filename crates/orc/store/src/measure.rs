//! What sharing saves, measured: the kernel's own count of the pages that each process maps (`/proc/PID/smaps` in
//! proc_pid_smaps(5)).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;

use serde::{Deserialize, Serialize};

use orrery_orc_wire::report::Report;

/// What the kernel puts before the name of a memory file.
const OBJECTS: &str = "/memfd:orc:";
/// The store's book of places, which is shared memory and no object.
const BOOK: &str = "/memfd:orc:book";
/// How the names of objects begin that are files.
const ON_DISK: &str = "/orc:";

/// One mapping of a process, with its pages counted. Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Area {
    /// Its addresses, as `start-end` in hexadecimal digits.
    pub range: String,
    /// `rwxp` or `rwxs`, with `-` for what is not allowed.
    pub access: String,
    /// Where it begins in its file.
    pub offset: u64,
    /// The file's device, `major:minor`.
    pub device: String,
    /// The file's inode; 0 where there is none.
    pub inode: u64,
    /// The file's path, a name in brackets, or nothing.
    pub name: String,
    /// How much address space it covers.
    pub size: u64,
    /// What of it is in memory.
    pub resident: u64,
    /// The same, each page divided by the number of processes that map it.
    pub proportional: u64,
    /// What of it is in memory and mapped by no other process.
    pub private: u64,
    /// What of it is in memory and has no file, or was copied from one to be written.
    pub anonymous: u64,
}

impl Area {
    /// Whether it shows an object of a store.
    pub fn is_object(&self) -> bool {
        self.name.starts_with(OBJECTS) && !self.name.starts_with(BOOK)
            || self.name.rsplit_once('/').is_some_and(|(_, name)| name.starts_with(&ON_DISK[1..]))
    }
}

/// All mappings of a process.
///
/// # Errors
/// Those of reading `/proc/PID/smaps`: no such process, or not this user's.
pub fn areas(pid: i32) -> io::Result<Vec<Area>> {
    Ok(parse(&fs::read_to_string(format!("/proc/{pid}/smaps"))?))
}

fn parse(text: &str) -> Vec<Area> {
    let mut areas: Vec<Area> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else { continue };
        if let Some(field) = first.strip_suffix(':') {
            let kib = words.next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
            let Some(area) = areas.last_mut() else { continue };
            match field {
                "Size" => area.size = kib << 10,
                "Rss" => area.resident = kib << 10,
                "Pss" => area.proportional = kib << 10,
                "Private_Clean" | "Private_Dirty" => area.private += kib << 10,
                "Anonymous" => area.anonymous = kib << 10,
                _ => {}
            }
            continue;
        }
        let mut next = || words.next().unwrap_or_default();
        let access = next().to_owned();
        let offset = u64::from_str_radix(next(), 16).unwrap_or(0);
        let device = next().to_owned();
        let inode = next().parse().unwrap_or(0);
        let name = words.collect::<Vec<_>>().join(" ");
        areas.push(Area { range: first.to_owned(), access, offset, device, inode, name, ..Area::default() });
    }
    areas
}

/// What processes map of a store's objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Use {
    /// How many processes.
    pub processes: usize,
    /// Objects that they map; small ones that share a memory file count as one.
    pub objects: usize,
    /// Bytes of objects that they have in memory, counted once for each process.
    pub mapped: u64,
    /// `mapped` less their share of these pages, each page divided by the number of mappings that it has: what copies of their own
    /// would have cost them more.
    pub saved: u64,
}

/// What one program maps of a store's objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// All together.
    #[serde(flatten)]
    pub all: Use,
    /// The same by the trust domain of the objects.
    pub realms: BTreeMap<String, Use>,
}

/// What one trust domain has, and saves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saving {
    /// Objects.
    pub objects: usize,
    /// Bytes of memory that the objects take.
    pub stored: u64,
    /// Bytes of objects that processes have in memory, counted once for each process.
    pub mapped: u64,
    /// `mapped` less `stored`: what copies of their own would have cost more. Negative where objects wait for users.
    pub saved: i64,
}

/// A store, measured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Measured {
    /// By trust domain.
    pub realms: BTreeMap<String, Saving>,
    /// By the name of the program.
    pub programs: BTreeMap<String, Program>,
    /// Processes that could not be looked into.
    pub unseen: usize,
}

/// Counts what all processes that may be looked into map of the objects in `report`.
///
/// # Errors
/// Where `/proc` cannot be read.
pub fn measure(report: &Report) -> io::Result<Measured> {
    let mut measured = Measured::default();
    // Small objects share a memory file: that counts once.
    let mut files: BTreeMap<(&str, u64), &str> = BTreeMap::new();
    for object in &report.objects {
        let saving = measured.realms.entry(object.realm.clone()).or_default();
        saving.objects += 1;
        if files.insert((&object.device, object.inode), &object.realm).is_none() {
            saving.stored += object.resident;
        }
    }
    // Which of them each program maps, however many of its processes do.
    let mut known: BTreeSet<(String, String, u64)> = BTreeSet::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        match fs::read_to_string(format!("/proc/{pid}/maps")) {
            // The quick look first: counting pages takes longer.
            Ok(maps) if !maps.contains(OBJECTS) && !maps.contains(ON_DISK) => continue,
            Ok(_) => {}
            Err(error) => {
                measured.unseen += usize::from(error.kind() == io::ErrorKind::PermissionDenied);
                continue;
            }
        }
        let Ok(areas) = areas(pid) else { continue };
        // By realm, what is mapped and what is saved of it.
        let mut of_process: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        let mut mapped_files = BTreeSet::new();
        for area in areas.iter().filter(|area| area.is_object()) {
            let Some(realm) = files.get(&(area.device.as_str(), area.inode)).copied() else { continue };
            let mapped = area.resident.saturating_sub(area.anonymous);
            if mapped == 0 {
                continue;
            }
            let share = area.proportional.saturating_sub(area.anonymous);
            let sums = of_process.entry(realm).or_default();
            sums.0 += mapped;
            sums.1 += mapped.saturating_sub(share);
            mapped_files.insert((area.device.clone(), area.inode, realm));
            if let Some(saving) = measured.realms.get_mut(realm) {
                saving.mapped += mapped;
            }
        }
        if of_process.is_empty() {
            continue;
        }
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned();
        let program = measured.programs.entry(name.clone()).or_default();
        program.all.processes += 1;
        for (realm, (mapped, saved)) in of_process {
            let of_realm = program.realms.entry(realm.to_owned()).or_default();
            of_realm.processes += 1;
            for sum in [&mut program.all, of_realm] {
                sum.mapped += mapped;
                sum.saved += saved;
            }
        }
        for (device, inode, realm) in mapped_files {
            if known.insert((name.clone(), device, inode)) {
                program.all.objects += 1;
                program.realms.entry(realm.to_owned()).or_default().objects += 1;
            }
        }
    }
    for saving in measured.realms.values_mut() {
        saving.saved = i64::try_from(saving.mapped).unwrap_or(i64::MAX)
            - i64::try_from(saving.stored).unwrap_or(i64::MAX);
    }
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
7f0000000000-7f0000002000 r-xp 00001000 00:01 77                         /memfd:orc:0123456789abcdef (deleted)
Size:                  8 kB
Rss:                   8 kB
Pss:                   4 kB
Shared_Clean:          8 kB
Private_Clean:         0 kB
Private_Dirty:         0 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
7f0000002000-7f0000003000 rw-p 00000000 00:00 0
Size:                  4 kB
Rss:                   4 kB
Pss:                   4 kB
Private_Clean:         1 kB
Private_Dirty:         3 kB
Anonymous:             4 kB
";

    #[test]
    fn the_kernels_table_is_read() {
        let areas = parse(TEXT);
        assert_eq!(areas.len(), 2);
        assert!(areas[0].is_object() && areas[0].offset == 0x1000 && areas[0].inode == 77);
        assert_eq!((areas[0].resident, areas[0].proportional, areas[0].private), (8192, 4096, 0));
        assert_eq!((areas[1].private, areas[1].anonymous, areas[1].name.as_str()), (4096, 4096, ""));
    }

    #[test]
    fn this_process_has_a_stack_and_code() {
        let areas = areas(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert!(areas.iter().any(|area| area.name == "[stack]" && area.resident > 0));
        assert!(areas.iter().any(|area| area.access == "r-xp" && area.inode != 0));
    }
}
