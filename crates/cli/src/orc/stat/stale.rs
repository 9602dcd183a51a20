//! Programs that have an object in memory whose file has other bytes by now: they run what an update has replaced.
//!
//! `/proc/PID/maps` shows the object, which was not deleted, so that tools that look for deleted files do not find them.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use orrery_orc_client::ObjectId;
use orrery_orc_client::report::{Report, ReportedObject};
use orrery_orc_store::measure::mappings;
use serde::Serialize;

/// A program, and a file that it would find other bytes in.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct Stale {
    pub(super) pid: i32,
    pub(super) program: String,
    pub(super) file: String,
    /// Whether there is no such file any more.
    pub(super) is_gone: bool,
}

/// Finds all of them, as far as this user may look into processes.
///
/// # Errors
/// If `/proc` cannot be read.
pub(super) fn find(report: &Report) -> Result<Vec<Stale>> {
    let of_files = report.objects.iter().filter(|object| !object.files.is_empty());
    let known: HashMap<(&str, u64), &ReportedObject> =
        of_files.map(|object| ((object.device.as_str(), object.inode), object)).collect();
    let mut contents = Contents::default();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("cannot read /proc")?.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let maps = fs::read_to_string(entry.path().join("maps")).unwrap_or_default();
        if !maps.contains("orc:") {
            continue;
        }
        let mut mapped: Vec<_> = mappings(pid)
            .unwrap_or_default()
            .iter()
            .filter_map(|area| known.get(&(area.device.as_str(), area.inode)).copied())
            .collect();
        mapped.sort_by(|a, b| a.id.cmp(&b.id));
        mapped.dedup_by(|a, b| a.id == b.id);
        let program = fs::read_to_string(entry.path().join("comm")).unwrap_or_default().trim().to_owned();
        for object in mapped {
            if let Some((file, is_gone)) = contents.is_replaced(&entry.path().join("root"), object) {
                found.push(Stale { pid, program: program.clone(), file, is_gone });
            }
        }
    }
    found.sort();
    Ok(found)
}

/// What the files are that were read before.
#[derive(Default)]
struct Contents(HashMap<(u64, u64, u64), Option<ObjectId>>);

impl Contents {
    /// Returns the path of an object's file, if no file that has its bytes is left in a process' root directory, and whether
    /// there is no file at all.
    fn is_replaced(&mut self, root: &Path, object: &ReportedObject) -> Option<(String, bool)> {
        let mut replaced = None;
        for path in &object.files {
            let path = path.trim_end_matches(" (deleted)");
            let at: PathBuf = root.join(path.trim_start_matches('/'));
            match self.content(&at, object.length) {
                Some(id) if id.to_string() == object.id => return None,
                // Files of other trees may not be there.
                None if replaced.is_some() => {}
                content => replaced = Some((path.to_owned(), content.is_none())),
            }
        }
        replaced
    }

    /// Returns the hash of the first bytes of a file, the rest of whose last page is zeros.
    fn content(&mut self, path: &Path, length: u64) -> Option<ObjectId> {
        let found = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
        let key = (found.dev(), found.ino(), length);
        *self.0.entry(key).or_insert_with(|| {
            let mut bytes = Vec::new();
            File::open(path).ok()?.take(length).read_to_end(&mut bytes).ok()?;
            bytes.resize(usize::try_from(length).ok()?, 0);
            Some(ObjectId::of(&bytes))
        })
    }
}
