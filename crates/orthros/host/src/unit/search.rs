//! Where a unit's files lie, systemd.unit(5): the first directory that has it, links that give it other names, and
//! drop-ins from all directories, in the order of their names.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::name::{Name, SUFFIX};
use crate::error::{Error, Result, file};

/// In the order in which they count.
const DIRECTORIES: [&str; 13] = [
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/run/systemd/generator.early",
    "/etc/systemd/system",
    "/etc/systemd/system.attached",
    "/run/systemd/system",
    "/run/systemd/system.attached",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    // The same, unless it is a directory of its own.
    "/lib/systemd/system",
    "/run/systemd/generator.late",
];
/// Directories that count before these, or instead of them; as systemd has it, an empty last one stands for them.
const VARIABLE: &str = "SYSTEMD_UNIT_PATH";

/// Directories that may have units.
pub(super) struct Places {
    directories: Vec<PathBuf>,
}

/// A unit's files.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) name: Name,
    /// The unit itself.
    pub(super) file: PathBuf,
    pub(super) drop_ins: Vec<PathBuf>,
}

impl Places {
    pub(super) fn of_system() -> Self {
        Self::given(std::env::var(VARIABLE).ok().as_deref())
    }

    fn given(variable: Option<&str>) -> Self {
        let variable = variable.filter(|text| !text.is_empty()).unwrap_or(":");
        let mut directories: Vec<PathBuf> =
            variable.split(':').filter(|directory| !directory.is_empty()).map(PathBuf::from).collect();
        if variable.ends_with(':') {
            directories.extend(DIRECTORIES.map(PathBuf::from));
        }
        Self { directories }
    }

    /// The files of a unit that is named, or whose file is, by its absolute path.
    pub(super) fn find(&self, which: &str) -> Result<Found> {
        let path = Path::new(which);
        let wrong = |why: String| Error::Unit { place: format!("unit {which}"), why };
        if path.is_absolute() {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if !name.ends_with(SUFFIX) {
                return Err(wrong(format!("a service's file ends with {SUFFIX}")));
            }
            let name = Name::parse(&name).map_err(wrong)?;
            let (file, name) = settle(path, name)?;
            let mut beside = path.as_os_str().to_owned();
            beside.push(".d");
            return Ok(Found {
                drop_ins: drop_ins([PathBuf::from(beside)])?,
                name: whole(name, which)?,
                file,
            });
        }
        let asked = whole(Name::parse(which).map_err(wrong)?, which)?;
        let names = std::iter::once(asked.full.clone()).chain(asked.template());
        let Some(path) = names.flat_map(|name| self.all(&name)).find(|path| path.symlink_metadata().is_ok())
        else {
            let looked: Vec<String> =
                self.directories.iter().map(|directory| directory.display().to_string()).collect();
            return Err(wrong(format!(
                "no directory has a {} ({}); install its package, or name the unit's file by its absolute path",
                asked.full,
                looked.join(", ")
            )));
        };
        let (file, name) = settle(&path, asked.clone())?;
        let mut names: BTreeSet<Name> = self.aliases(&file);
        names.insert(asked);
        names.remove(&name);
        let mut directories = Vec::new();
        for name in std::iter::once(&name).chain(&names) {
            let relatives = name.relatives();
            for directory in &self.directories {
                directories.extend(relatives.iter().map(|relative| directory.join(format!("{relative}.d"))));
            }
        }
        directories.extend(self.directories.iter().map(|directory| directory.join("service.d")));
        Ok(Found { drop_ins: drop_ins(directories)?, name, file })
    }

    fn all(&self, name: &str) -> Vec<PathBuf> {
        self.directories.iter().map(|directory| directory.join(name)).collect()
    }

    /// Names of links to a unit's file.
    fn aliases(&self, unit: &Path) -> BTreeSet<Name> {
        let entries =
            self.directories.iter().filter_map(|directory| fs::read_dir(directory).ok()).flatten().flatten();
        let links = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_symlink()));
        let same = links.filter(|link| fs::canonicalize(link.path()).is_ok_and(|path| path == unit));
        let names = same.filter_map(|link| Name::parse(link.file_name().to_str()?).ok());
        names.filter(|name| !name.is_template()).collect()
    }
}

fn whole(name: Name, which: &str) -> Result<Name> {
    if name.is_template() {
        let why = format!("it is a template; name an instance of it ({}@INSTANCE)", name.prefix);
        return Err(Error::Unit { place: format!("unit {which}"), why });
    }
    Ok(name)
}

/// The file behind a name, and the name that it has there, if it has one.
fn settle(path: &Path, name: Name) -> Result<(PathBuf, Name)> {
    let masked = || {
        let why =
            "the unit is masked; unmask it (systemctl unmask), or name another file by its absolute path";
        Error::Unit { place: path.display().to_string(), why: why.to_owned() }
    };
    let real = fs::canonicalize(path).map_err(file("open", path))?;
    if real == Path::new("/dev/null") {
        return Err(masked());
    }
    let metadata = fs::metadata(&real).map_err(file("open", path))?;
    if !metadata.is_file() {
        let why = "a unit is described in a file, and this is none".to_owned();
        return Err(Error::Unit { place: path.display().to_string(), why });
    }
    if metadata.len() == 0 {
        return Err(masked());
    }
    let text = real.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match Name::parse(text) {
        Ok(other) if text.ends_with(SUFFIX) && !other.is_template() => Ok((real, other)),
        // A link to another template: the instance stays.
        Ok(other) if text.ends_with(SUFFIX) && name.instance.is_some() => {
            let full = format!("{}@{}{SUFFIX}", other.prefix, name.instance.as_deref().unwrap_or_default());
            Ok((real, Name { full, prefix: other.prefix, instance: name.instance }))
        }
        _ => Ok((real, name)),
    }
}

/// Returns the drop-ins of directories, of which an earlier one hides those of the same name in later ones.
fn drop_ins(directories: impl IntoIterator<Item = PathBuf>) -> Result<Vec<PathBuf>> {
    let mut found: BTreeMap<OsString, PathBuf> = BTreeMap::new();
    for directory in directories {
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(file("read", &directory)(error)),
        };
        for entry in entries.flatten() {
            if entry.path().extension().is_some_and(|kind| kind == "conf") {
                found.entry(entry.file_name()).or_insert_with(|| entry.path());
            }
        }
    }
    Ok(found.into_values().collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    struct Host(tempfile::TempDir, Places);

    impl Host {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let directories = ["etc", "run", "lib"].map(|name| directory.path().join(name)).to_vec();
            directories.iter().for_each(|directory| fs::create_dir(directory).unwrap());
            Self(directory, Places { directories })
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn link(&self, path: &str, to: &str) {
            symlink(to, self.0.path().join(path)).unwrap();
        }

        fn found(&self, which: &str) -> (String, String, Vec<String>) {
            let root = fs::canonicalize(self.0.path()).unwrap();
            let show = |path: &PathBuf| {
                let path = fs::canonicalize(path.parent().unwrap()).unwrap().join(path.file_name().unwrap());
                path.strip_prefix(&root).unwrap().display().to_string()
            };
            let found = self.1.find(which).unwrap();
            (found.name.full, show(&found.file), found.drop_ins.iter().map(show).collect())
        }

        fn message(&self, which: &str) -> String {
            self.1.find(which).unwrap_err().to_string()
        }
    }

    #[test]
    fn the_first_directory_counts_and_drop_ins_come_by_their_names() {
        let host = Host::new();
        host.write("lib/a-b.service", "x");
        host.write("run/a-b.service", "x");
        host.write("lib/a-b.service.d/20.conf", "");
        host.write("etc/a-b.service.d/30.conf", "");
        host.write("run/a-b.service.d/30.conf", "hidden");
        host.write("run/a-.service.d/10.conf", "");
        host.write("lib/service.d/15.conf", "");
        host.write("lib/service.d/20.conf", "hidden");
        host.write("lib/a-b.service.d/note.txt", "");
        let (name, file, drop_ins) = host.found("a-b");
        assert_eq!((name.as_str(), file.as_str()), ("a-b.service", "run/a-b.service"));
        let expected = [
            "run/a-.service.d/10.conf",
            "lib/service.d/15.conf",
            "lib/a-b.service.d/20.conf",
            "etc/a-b.service.d/30.conf",
        ];
        assert_eq!(drop_ins, expected);
    }

    #[test]
    fn templates_and_other_names_lead_to_the_unit() {
        let host = Host::new();
        host.write("lib/t@.service", "x");
        host.write("etc/t@.service.d/1.conf", "");
        host.write("etc/t@one.service.d/2.conf", "");
        let drop_ins = ["etc/t@.service.d/1.conf", "etc/t@one.service.d/2.conf"].map(str::to_owned).to_vec();
        assert_eq!(host.found("t@one"), ("t@one.service".to_owned(), "lib/t@.service".to_owned(), drop_ins));
        assert!(host.message("t@").contains("t@INSTANCE"));
        host.write("lib/real.service", "x");
        host.link("etc/other.service", "../lib/real.service");
        host.write("etc/other.service.d/1.conf", "");
        host.write("lib/real.service.d/2.conf", "");
        let drop_ins =
            ["etc/other.service.d/1.conf", "lib/real.service.d/2.conf"].map(str::to_owned).to_vec();
        // By either name.
        for which in ["other", "real"] {
            let found = host.found(which);
            assert_eq!(found, ("real.service".to_owned(), "lib/real.service".to_owned(), drop_ins.clone()));
        }
        host.link("etc/u@.service", "../lib/t@.service");
        assert_eq!(host.found("u@two").0, "t@two.service");
        // An absolute path has the drop-ins beside it.
        host.write("mine/x.service", "x");
        host.write("mine/x.service.d/1.conf", "");
        let path = host.0.path().join("mine/x.service");
        let drop_ins = vec!["mine/x.service.d/1.conf".to_owned()];
        assert_eq!(
            host.found(path.to_str().unwrap()),
            ("x.service".to_owned(), "mine/x.service".to_owned(), drop_ins)
        );
    }

    #[test]
    fn what_is_no_unit_is_told() {
        let host = Host::new();
        host.link("etc/masked.service", "/dev/null");
        host.write("lib/masked.service", "x");
        host.write("run/empty.service", "");
        host.link("etc/dangling.service", "nowhere");
        assert!(host.message("masked").contains("etc/masked.service: the unit is masked"));
        assert!(host.message("empty").contains("the unit is masked"));
        assert!(host.message("dangling").contains("cannot open"));
        let message = host.message("absent");
        assert!(
            message.contains("absent.service")
                && message.contains("absolute path")
                && message.contains("/etc"),
            "{message}"
        );
        assert!(host.message("/dev/null").contains("ends with .service"));
        assert!(host.message("/no/such.service").contains("/no/such.service"));
        assert!(host.message("a.timer").contains("a timer runs no program"));
    }

    #[test]
    fn the_variable_says_where_to_look() {
        let directories = |variable| Places::given(variable).directories;
        assert_eq!(directories(Some("/a:/b")), ["/a", "/b"].map(PathBuf::from));
        let more = directories(Some("/a:"));
        assert_eq!((more[0].as_path(), more.len()), (Path::new("/a"), DIRECTORIES.len() + 1));
        assert_eq!(directories(None), DIRECTORIES.map(PathBuf::from));
        assert_eq!(directories(Some("")), directories(None));
    }
}
