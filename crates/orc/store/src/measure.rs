//! Measures what sharing saves: the kernel's own count of the pages that each process maps (`/proc/PID/smaps` in
//! proc_pid_smaps(5)).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;

use serde::{Deserialize, Serialize};

use orrery_orc_wire::report::Report;

/// The path prefix of objects in memory files.
const MEMORY_OBJECT: &str = "/memfd:orc:";
/// The path of placement tables, which are shared memory and no objects.
const PLACEMENT_TABLE: &str = "/memfd:orc:placement-table";
/// The beginning of the names of objects that are files.
const NAMED_OBJECT: &str = "/orc:";

/// The page counts of one mapping of a process. Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MappingUsage {
    /// Its addresses, as `start-end` in hexadecimal digits.
    pub range: String,
    /// `rwxp` or `rwxs`, with `-` for what is not allowed.
    pub access: String,
    /// Its offset in its file.
    pub offset: u64,
    /// The file's device, `major:minor`.
    pub device: String,
    /// The file's inode; 0 if there is none.
    pub inode: u64,
    /// The file's path, a name in brackets, or nothing.
    pub name: String,
    /// The size of its address range.
    pub size: u64,
    /// Bytes that are in memory (RSS).
    pub resident: u64,
    /// The same, each page divided by the number of processes that map it (PSS).
    pub proportional: u64,
    /// Bytes in memory that no other process maps.
    pub private: u64,
    /// Bytes in memory without a file, or copied from one when they were written.
    pub anonymous: u64,
}

impl MappingUsage {
    /// Returns whether it shows an object of a store.
    pub fn is_object(&self) -> bool {
        self.name.starts_with(MEMORY_OBJECT) && !self.name.starts_with(PLACEMENT_TABLE)
            || self.name.rsplit_once('/').is_some_and(|(_, name)| name.starts_with(&NAMED_OBJECT[1..]))
    }
}

/// Returns the mappings of a process.
///
/// # Errors
/// Those of reading `/proc/PID/smaps`: no such process, or not this user's.
pub fn mappings(pid: i32) -> io::Result<Vec<MappingUsage>> {
    Ok(parse(&fs::read_to_string(format!("/proc/{pid}/smaps"))?))
}

fn parse(text: &str) -> Vec<MappingUsage> {
    let mut mappings: Vec<MappingUsage> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else { continue };
        if let Some(field) = first.strip_suffix(':') {
            let kib = words.next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
            let Some(mapping) = mappings.last_mut() else { continue };
            match field {
                "Size" => mapping.size = kib << 10,
                "Rss" => mapping.resident = kib << 10,
                "Pss" => mapping.proportional = kib << 10,
                "Private_Clean" | "Private_Dirty" => mapping.private += kib << 10,
                "Anonymous" => mapping.anonymous = kib << 10,
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
        mappings.push(MappingUsage {
            range: first.to_owned(),
            access,
            offset,
            device,
            inode,
            name,
            ..MappingUsage::default()
        });
    }
    mappings
}

/// What processes map of a store's objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// The number of processes.
    pub processes: usize,
    /// The number of objects that they map; small ones that share a memory file count as one.
    pub objects: usize,
    /// Bytes of objects that they have in memory, counted once for each process.
    pub mapped: u64,
    /// `mapped` less their share of these pages, each page divided by the number of its mappings: the memory that copies of their
    /// own would take in addition.
    pub saved: u64,
}

/// What one program maps of a store's objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Objects of all trust domains.
    #[serde(flatten)]
    pub all: Usage,
    /// Objects of each trust domain.
    pub trust_domains: BTreeMap<String, Usage>,
}

/// What one trust domain has, and saves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainUsage {
    /// The number of objects.
    pub objects: usize,
    /// Bytes of memory that the objects take.
    pub stored: u64,
    /// Bytes of objects that processes have in memory, counted once for each process.
    pub mapped: u64,
    /// What programs would take that do not share, less `stored`. For each object of files that is what the program that maps most of it
    /// has in memory, once for each file: all programs have the pages of one file once anyway. For other objects, which are copies of
    /// programs' own memory, it is what all have mapped. It is negative if unused objects are kept.
    pub saved: i64,
}

/// The usage of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Measurement {
    /// The usage of memory by trust domain.
    pub trust_domains: BTreeMap<String, DomainUsage>,
    /// By the name of the program.
    pub programs: BTreeMap<String, Program>,
    /// The number of processes that this user may not examine.
    pub unreadable: usize,
}

/// What an object would take if programs did not share it.
#[derive(Debug, Default)]
struct WithoutSharing {
    /// How many files have its bytes.
    files: u64,
    /// Bytes that all processes together map, and that the process that maps most of it does.
    all: u64,
    most: u64,
}

impl WithoutSharing {
    fn add(&mut self, mapped: u64) {
        self.all += mapped;
        self.most = self.most.max(mapped);
    }

    fn bytes(&self) -> u64 {
        if self.files > 0 { (self.most * self.files).min(self.all.max(self.most)) } else { self.all }
    }
}

/// Counts what processes map of the objects in `report`, as far as this user may examine them.
///
/// # Errors
/// If `/proc` cannot be read.
pub fn measure(report: &Report) -> io::Result<Measurement> {
    let mut measurement = Measurement::default();
    // Small objects share a memory file: that counts once.
    let mut files: BTreeMap<(&str, u64), (&str, usize)> = BTreeMap::new();
    let mut without: Vec<WithoutSharing> = Vec::new();
    for object in &report.objects {
        let usage = measurement.trust_domains.entry(object.trust_domain.clone()).or_default();
        usage.objects += 1;
        let known = files.entry((&object.device, object.inode)).or_insert_with(|| {
            usage.stored += object.resident;
            without.push(WithoutSharing::default());
            (&object.trust_domain, without.len() - 1)
        });
        without[known.1].files += object.files.len() as u64;
    }
    // Which of them each program maps, however many of its processes do.
    let mut known: BTreeSet<(String, String, u64)> = BTreeSet::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        match fs::read_to_string(format!("/proc/{pid}/maps")) {
            // Reading the mappings is fast; counting their pages takes longer.
            Ok(maps) if !maps.contains(MEMORY_OBJECT) && !maps.contains(NAMED_OBJECT) => continue,
            Ok(_) => {}
            Err(error) => {
                measurement.unreadable += usize::from(error.kind() == io::ErrorKind::PermissionDenied);
                continue;
            }
        }
        let Ok(mappings) = mappings(pid) else { continue };
        // By trust domain, what is mapped and what is saved of it.
        let mut of_process: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        let mut mapped_files = BTreeSet::new();
        let mut mapped_of: BTreeMap<usize, u64> = BTreeMap::new();
        for mapping in mappings.iter().filter(|mapping| mapping.is_object()) {
            let Some((domain, file)) = files.get(&(mapping.device.as_str(), mapping.inode)).copied() else {
                continue;
            };
            let mapped = mapping.resident.saturating_sub(mapping.anonymous);
            if mapped == 0 {
                continue;
            }
            let share = mapping.proportional.saturating_sub(mapping.anonymous);
            let sums = of_process.entry(domain).or_default();
            sums.0 += mapped;
            *mapped_of.entry(file).or_insert(0) += mapped;
            sums.1 += mapped.saturating_sub(share);
            mapped_files.insert((mapping.device.clone(), mapping.inode, domain));
            if let Some(usage) = measurement.trust_domains.get_mut(domain) {
                usage.mapped += mapped;
            }
        }
        for (file, mapped) in mapped_of {
            without[file].add(mapped);
        }
        if of_process.is_empty() {
            continue;
        }
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned();
        let program = measurement.programs.entry(name.clone()).or_default();
        program.all.processes += 1;
        for (domain, (mapped, saved)) in of_process {
            let of_domain = program.trust_domains.entry(domain.to_owned()).or_default();
            of_domain.processes += 1;
            for sum in [&mut program.all, of_domain] {
                sum.mapped += mapped;
                sum.saved += saved;
            }
        }
        for (device, inode, domain) in mapped_files {
            if known.insert((name.clone(), device, inode)) {
                program.all.objects += 1;
                program.trust_domains.entry(domain.to_owned()).or_default().objects += 1;
            }
        }
    }
    for (domain, file) in files.values() {
        if let Some(usage) = measurement.trust_domains.get_mut(*domain) {
            usage.saved += i64::try_from(without[*file].bytes()).unwrap_or(i64::MAX);
        }
    }
    for usage in measurement.trust_domains.values_mut() {
        usage.saved -= i64::try_from(usage.stored).unwrap_or(i64::MAX);
    }
    Ok(measurement)
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
        let mappings = parse(TEXT);
        assert_eq!(mappings.len(), 2);
        assert!(mappings[0].is_object() && mappings[0].offset == 0x1000 && mappings[0].inode == 77);
        assert_eq!((mappings[0].resident, mappings[0].proportional, mappings[0].private), (8192, 4096, 0));
        assert_eq!((mappings[1].private, mappings[1].anonymous, mappings[1].name.as_str()), (4096, 4096, ""));
    }

    #[test]
    fn what_is_saved_depends_on_the_files() {
        let of = |files: u64, mapped: &[u64]| {
            let mut without = WithoutSharing { files, ..WithoutSharing::default() };
            mapped.iter().for_each(|bytes| without.add(*bytes));
            without.bytes()
        };
        assert_eq!(of(1, &[10, 12, 8]), 12, "one file is in memory once anyway");
        assert_eq!(of(2, &[10, 12, 8]), 24);
        assert_eq!(of(9, &[10, 12, 8]), 30, "of files that nobody uses any more nothing is in memory");
        assert_eq!(of(0, &[10, 12, 8]), 30, "memory of the programs' own");
        assert_eq!(of(3, &[]), 0);
    }

    #[test]
    fn this_process_has_a_stack_and_code() {
        let mappings = mappings(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert!(mappings.iter().any(|mapping| mapping.name == "[stack]" && mapping.resident > 0));
        assert!(mappings.iter().any(|mapping| mapping.access == "r-xp" && mapping.inode != 0));
    }
}
