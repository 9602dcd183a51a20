//! Directories that the system makes at boot for packages, tmpfiles.d(5): a unit's program expects them, and no setting names them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use orrery_orthros_wire::Directory;

use super::text_file::read_text;
use super::users::{User, Users};

/// Where the descriptions lie; a file hides those of the same name in the directories before it.
const PLACES: [&str; 3] = ["/usr/lib/tmpfiles.d", "/run/tmpfiles.d", "/etc/tmpfiles.d"];

/// The directories of a unit with this prefix (its name up to the `@`) and user: those that descriptions of its name have, and those
/// that are made for its user.
pub(super) fn directories(prefix: &str, user: Option<&User>, users: &Users) -> Vec<Directory> {
    within(PLACES.iter().map(Path::new), prefix, user, users)
}

fn within<'p>(
    places: impl Iterator<Item = &'p Path>,
    prefix: &str,
    user: Option<&User>,
    users: &Users,
) -> Vec<Directory> {
    let mut files: BTreeMap<String, PathBuf> = BTreeMap::new();
    for place in places {
        for entry in fs::read_dir(place).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if let Some(stem) = name.strip_suffix(".conf") {
                files.insert(stem.to_owned(), entry.path());
            }
        }
    }
    let mut found: Vec<Directory> = Vec::new();
    for (stem, path) in files {
        let text = read_text(&path).unwrap_or_default();
        for directory in text.lines().filter_map(|line| parse(line, users)) {
            let is_its_users = user.is_some_and(|user| user.uid != 0 && user.uid == directory.uid);
            if (stem.starts_with(prefix) || is_its_users)
                && found.iter().all(|other| other.path != directory.path)
            {
                found.push(directory);
            }
        }
    }
    found
}

/// The directory that a line describes; nothing where it is another kind of line, or cannot be understood.
fn parse(line: &str, users: &Users) -> Option<Directory> {
    let mut words = line.split_whitespace();
    let kind = words.next()?.trim_end_matches(['+', '!', '-', '=', '~', '^', '$', '?']);
    let path = words.next().filter(|path| path.starts_with('/') && !path.contains(['%', '"']))?;
    if !["d", "D"].contains(&kind) {
        return None;
    }
    let mut value = |default: &'static str| match words.next() {
        None | Some("-") => default,
        Some(word) => word.trim_start_matches([':', '~']),
    };
    let mode = u32::from_str_radix(value("0755"), 8).ok().filter(|mode| *mode <= 0o7777)?;
    let uid = users.user(value("0")).ok()?.uid;
    let gid = users.group(value("0")).ok()?;
    let path = path.trim_end_matches('/');
    let path = path.strip_prefix("/var/run/").map_or_else(|| path.to_owned(), |rest| format!("/run/{rest}"));
    Some(Directory { path, mode, uid, gid, chown_existing: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_make_directories_are_understood() {
        let users = Users::read().unwrap();
        let of = |line| parse(line, &users).map(|it| (it.path, it.mode, it.uid, it.gid));
        assert_eq!(of("d /run/x 2775 daemon daemon - -"), Some(("/run/x".to_owned(), 0o2775, 1, 1)));
        assert_eq!(of("D! /var/run/x/ - - -"), Some(("/run/x".to_owned(), 0o755, 0, 0)));
        assert_eq!(of("d /run/x :0700 65534"), Some(("/run/x".to_owned(), 0o700, 65534, 0)));
        for line in [
            "",
            "# d /run/x",
            "f /run/x 0644",
            "d run/x",
            "d /run/%U",
            "d /run/x 0755 nobody-at-all",
            "d /run/x 9",
        ] {
            assert_eq!(of(line), None, "{line}");
        }
    }

    #[test]
    fn those_of_the_units_name_and_user_are_taken() {
        let directory = tempfile::tempdir().unwrap();
        let at = |place: &str, name: &str, text: &str| {
            fs::create_dir_all(directory.path().join(place)).unwrap();
            fs::write(directory.path().join(place).join(name), text).unwrap();
        };
        at("lib", "it-common.conf", "d /run/it 0750\nd /var/log/it\nL /run/link - - - - /x\n");
        at("lib", "other.conf", "d /run/other\nd /run/daemons 0700 daemon\nd /run/it 0711 daemon\n");
        at("lib", "it.conf", "d /run/hidden\n");
        at("etc", "it.conf", "d /run/seen\n");
        at("etc", "it.text", "d /run/no\n");
        let users = Users::read().unwrap();
        let places = ["lib", "etc"].map(|place| directory.path().join(place));
        let paths = |user: Option<&User>| {
            let found = within(places.iter().map(PathBuf::as_path), "it", user, &users);
            found.into_iter().map(|it| (it.path, it.mode)).collect::<Vec<_>>()
        };
        let own = [("/run/seen", 0o755), ("/run/it", 0o750), ("/var/log/it", 0o755)];
        let own = own.map(|(path, mode)| (path.to_owned(), mode)).to_vec();
        assert_eq!(paths(None), own);
        assert_eq!(paths(Some(users.user("root").unwrap())), own);
        let with_users = [own, vec![("/run/daemons".to_owned(), 0o700)]].concat();
        assert_eq!(paths(Some(users.user("daemon").unwrap())), with_users);
    }
}
