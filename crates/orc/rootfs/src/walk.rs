//! Goes through a tree: what is on its own file system, directories before what is in them.

use std::collections::HashMap;
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use crate::attributes;
use crate::error::{Error, Result};

/// Copies a tree to `to`, but for its regular files with bytes, for each of which `file` is called with its path, the path of the copy
/// and what it is. Further hard links of a file become hard links of the copy.
///
/// # Errors
/// [`Error::File`], and those of `file`.
pub(crate) fn copy(
    tree: &Path,
    to: &Path,
    mut file: impl FnMut(&Path, &Path, &Metadata) -> Result<()>,
) -> Result<()> {
    let look = |path: &Path| fs::symlink_metadata(path).map_err(Error::file("look at", path));
    let top = look(tree)?;
    let mut linked: HashMap<u64, PathBuf> = HashMap::new();
    let mut directories = vec![(tree.to_owned(), to.to_owned(), top.clone())];
    let mut waiting = vec![(tree.to_owned(), to.to_owned())];
    fs::create_dir(to).map_err(Error::file("create", to))?;
    while let Some((from, to)) = waiting.pop() {
        let entries = fs::read_dir(&from).map_err(Error::file("list", &from))?;
        for entry in entries {
            let name = entry.map_err(Error::file("list", &from))?.file_name();
            let (from, to) = (from.join(&name), to.join(&name));
            let found = look(&from)?;
            let kind = found.file_type();
            if kind.is_dir() {
                fs::create_dir(&to).map_err(Error::file("create", &to))?;
                directories.push((from.clone(), to.clone(), found.clone()));
                // What is mounted there is no part of the tree.
                if found.dev() == top.dev() {
                    waiting.push((from, to));
                }
                continue;
            }
            if found.nlink() > 1 && !kind.is_symlink() {
                // An immutable file gets no further names: it is found by its content again.
                if linked.get(&found.ino()).is_some_and(|first| fs::hard_link(first, &to).is_ok()) {
                    continue;
                }
                linked.insert(found.ino(), to.clone());
            }
            if kind.is_file() && found.len() > 0 {
                file(&from, &to, &found)?;
                continue;
            }
            if kind.is_symlink() {
                let target = fs::read_link(&from).map_err(Error::file("read", &from))?;
                std::os::unix::fs::symlink(target, &to).map_err(Error::file("create", &to))?;
            } else if kind.is_socket() {
                // Nobody listens there.
                continue;
            } else {
                attributes::make_node(&to, &found).map_err(Error::file("create", &to))?;
            }
            attributes::copy(&from, &to, &found)?;
        }
    }
    // Last, as entries change the times.
    for (from, to, found) in directories.iter().rev() {
        attributes::copy(from, to, found)?;
    }
    Ok(())
}
