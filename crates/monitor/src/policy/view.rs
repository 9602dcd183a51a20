//! What of the file system a program sees: the section `[view]`.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};

use orrery_policy::Fault;
use toml::Spanned;

use super::text::{absolute, of, real, size};

/// What differs from the file system as it is.
#[derive(Clone, Debug)]
pub(crate) struct View {
    /// By path: a directory comes before what lies in it.
    pub(crate) changes: BTreeMap<PathBuf, Change>,
    /// Bytes that each private directory can hold.
    pub(crate) size: Option<u64>,
}

/// What becomes of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// An empty directory takes its place.
    Private,
    /// It stays, in a directory that does not.
    Shown,
}

/// Reads the section.
pub(super) fn read(section: &orrery_policy::View) -> Result<View, Fault> {
    let mut changes = BTreeMap::new();
    for entry in &section.private {
        changes.insert(of(entry, private)?, Change::Private);
    }
    for entry in &section.show {
        let path = of(entry, |text| shown(text, &changes))?;
        match changes.entry(path) {
            Entry::Vacant(place) => place.insert(Change::Shown),
            Entry::Occupied(place) if *place.get() == Change::Shown => continue,
            Entry::Occupied(_) => {
                let message = format!("{:?} is under private, too", entry.get_ref());
                return Err(Fault { span: Spanned::span(entry), message });
            }
        };
    }
    Ok(View { changes, size: size(section.size.as_ref())? })
}

fn private(text: &str) -> Result<PathBuf, String> {
    let path = real(&absolute(text)?);
    if path == Path::new("/") || path.starts_with("/proc") {
        return Err(format!("{text:?} cannot be private: programs and the monitor find each other there"));
    }
    match path.metadata() {
        Ok(found) if found.is_dir() => Ok(path),
        Ok(_) => Err(format!("{text:?} is no directory; [files] deny is for files")),
        Err(error) => Err(format!("{text:?} cannot be private: {error}")),
    }
}

fn shown(text: &str, changes: &BTreeMap<PathBuf, Change>) -> Result<PathBuf, String> {
    let path = real(&absolute(text)?);
    let within = |(above, change): (&PathBuf, &Change)| *change == Change::Private && path.starts_with(above);
    if !changes.iter().any(within) {
        return Err(format!("{text:?} is shown anyway: it lies in no directory under private"));
    }
    match path.metadata() {
        Ok(_) => Ok(path),
        Err(error) => Err(format!("{text:?} cannot be shown: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use crate::Policy;

    #[test]
    fn what_cannot_be_is_told_with_its_place() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().canonicalize().unwrap();
        std::fs::write(base.join("file"), "").unwrap();
        for (section, message) in [
            ("private = ['/']", "p:2:12: \"/\" cannot be private"),
            ("private = ['/proc/self']", "p:2:12: \"/proc/self\" cannot be private"),
            ("private = ['BASE/file']", "p:2:12: \"BASE/file\" is no directory"),
            ("private = ['BASE/none']", "p:2:12: \"BASE/none\" cannot be private: No such file"),
            ("show = ['BASE']", "p:2:9: \"BASE\" is shown anyway"),
            (
                "private = ['BASE']\nshow = ['BASE/none']",
                "p:3:9: \"BASE/none\" cannot be shown: No such file",
            ),
            ("private = ['BASE']\nshow = ['BASE']", "p:3:9: \"BASE\" is under private, too"),
            ("private = ['BASE']\nsize = 'much'", "p:3:8: \"much\" is no size"),
            ("hide = []", "p:2:1: unknown field `hide`"),
        ] {
            let in_place = |text: &str| text.replace("BASE", base.to_str().unwrap());
            let said =
                Policy::parse_named(&format!("[view]\n{}", in_place(section)), "p").unwrap_err().to_string();
            assert!(said.starts_with(&in_place(message)), "{section}: {said}");
        }
    }
}
