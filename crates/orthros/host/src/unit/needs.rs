//! What a unit's program finds of this host in the guests: files that the unit names, configuration, and empty
//! directories to write to.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use orrery_orthros_wire::Directory;

use crate::error::{Error, Result, file};

/// What is a guest's own.
const GUESTS: [&str; 5] = ["/dev", "/proc", "/sys", "/run", "/tmp"];
const CONFIGURATION: &str = "/etc";
/// They are in the memory of both machines.
const MOST: u64 = 32 << 20;

/// Files and directories of this host.
#[derive(Debug, Default)]
pub(super) struct Needs {
    /// Those that are taken along.
    pub(super) taken: Vec<PathBuf>,
    /// Those of them that are programs.
    pub(super) programs: Vec<String>,
    /// Directories that are made empty.
    pub(super) directories: Vec<Directory>,
    /// Where the service's disk is: what is there is not this host's.
    disk: Option<PathBuf>,
    bytes: u64,
}

/// The path that a word of a command line names: all of it, what comes after `=`, or after the letter of an option.
pub(super) fn named(word: &str) -> Option<&Path> {
    let value = match word.split_once('=') {
        _ if word.starts_with('/') => word,
        Some((_, value)) => value,
        None if word.starts_with('-') && word.chars().nth(2) == Some('/') => word.get(2..)?,
        None => return None,
    };
    value.starts_with('/').then(|| Path::new(value))
}

impl Needs {
    /// None yet, for a service with a disk mounted there.
    pub(super) fn beside(disk: Option<&Path>) -> Self {
        Self { disk: disk.map(Path::to_owned), ..Self::default() }
    }

    /// A file that is there is taken along, and a directory of configuration with what is in it; any other directory is
    /// made empty.
    pub(super) fn add(&mut self, path: &Path) -> Result<()> {
        let Ok(real) = fs::canonicalize(path) else { return Ok(()) };
        let leads_back = path.components().any(|part| part == Component::ParentDir);
        let path = if leads_back { &real } else { path };
        let of_guests = |path: &Path| GUESTS.iter().any(|own| path.starts_with(own));
        let on_disk = self.disk.as_deref().is_some_and(|disk| path.starts_with(disk));
        if of_guests(path) || of_guests(&real) || real == Path::new("/") {
            return Ok(());
        }
        let metadata = fs::metadata(&real).map_err(file("open", path))?;
        if metadata.is_dir() {
            if path.starts_with(CONFIGURATION) && path != Path::new(CONFIGURATION) && !on_disk {
                return self.take_all(path);
            }
            let path = path.to_string_lossy().trim_end_matches('/').to_owned();
            if !self.directories.iter().any(|directory| directory.path == path) {
                let (mode, uid, gid) = (metadata.mode() & 0o7777, metadata.uid(), metadata.gid());
                self.directories.push(Directory { path, mode, uid, gid, chown_existing: false });
            }
            return Ok(());
        }
        if !on_disk && metadata.is_file() {
            self.take(path, &metadata)?;
        }
        Ok(())
    }

    fn take(&mut self, path: &Path, metadata: &fs::Metadata) -> Result<()> {
        if self.taken.iter().any(|taken| taken == path) {
            return Ok(());
        }
        if metadata.is_file() {
            self.bytes += metadata.len();
            if self.bytes > MOST {
                return Err(Error::Unit {
                    place: path.display().to_string(),
                    why: format!(
                        "the files that the unit names take more than {} MiB, and would lie in the memory of both machines; give \
                         them to the service on a disk (--disk, --mount, --content)",
                        MOST >> 20
                    ),
                });
            }
            if metadata.mode() & 0o111 != 0 {
                self.programs.push(path.to_string_lossy().into_owned());
            }
        }
        self.taken.push(path.to_owned());
        Ok(())
    }

    /// A directory with all that is in it.
    fn take_all(&mut self, directory: &Path) -> Result<()> {
        let metadata = fs::metadata(directory).map_err(file("open", directory))?;
        self.take(directory, &metadata)?;
        let mut paths = Vec::new();
        for entry in fs::read_dir(directory).map_err(file("read", directory))? {
            paths.push(entry.map_err(file("read", directory))?.path());
        }
        paths.sort();
        for path in paths {
            // Links stand for the files that they lead to; one to a directory might lead back.
            let is_link = path.symlink_metadata().is_ok_and(|metadata| metadata.is_symlink());
            match fs::metadata(&path) {
                Ok(metadata) if metadata.is_dir() && !is_link => self.take_all(&path)?,
                Ok(metadata) if metadata.is_file() => self.take(&path, &metadata)?,
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_found_in_words() {
        let cases = [
            ("/etc/x.conf", Some("/etc/x.conf")),
            ("/a=b", Some("/a=b")),
            ("--config=/etc/x", Some("/etc/x")),
            ("-f/etc/x", Some("/etc/x")),
            ("--daemonize", None),
            ("a/b", None),
            ("--url=http://x/y", None),
        ];
        for (word, path) in cases {
            let found = named(word).and_then(Path::to_str);
            assert_eq!(found, path, "{word}");
        }
    }

    #[test]
    fn files_come_along_and_directories_are_made() {
        let directory = tempfile::Builder::new().tempdir_in("/var/tmp").unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("data")).unwrap();
        fs::write(at("data/rows"), "1").unwrap();
        fs::write(at("conf"), "1").unwrap();
        let mut needs = Needs::default();
        for path in ["data", "data", "data/rows", "conf", "data/../conf", "absent"] {
            needs.add(&at(path)).unwrap();
        }
        for path in ["/proc/version", "/dev/null", "/", "/var/run"] {
            needs.add(Path::new(path)).unwrap();
        }
        assert_eq!(needs.taken, [at("data/rows"), at("conf")]);
        let made: Vec<&str> = needs.directories.iter().map(|directory| directory.path.as_str()).collect();
        assert_eq!(made, [at("data").to_str().unwrap()]);
        // What is where the disk is comes with the disk.
        let mut needs = Needs::beside(Some(&at("data")));
        needs.add(&at("data/rows")).unwrap();
        needs.add(&at("data")).unwrap();
        assert!(needs.taken.is_empty() && needs.directories.len() == 1);
        let large = fs::File::create(at("large")).unwrap();
        large.set_len(MOST).unwrap();
        let message = needs.add(&at("large")).and_then(|()| needs.add(&at("conf"))).unwrap_err().to_string();
        assert!(message.contains("32 MiB") && message.contains("--content"), "{message}");
    }
}
