//! Trees of hard links, where there are no data-only layers: files with equal bytes, owner, mode and time of change are one immutable
//! file. Such a tree needs no mount, and nobody can write to its files.

use std::fs::{self, File, Metadata};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use orrery_orc_wire::ObjectId;

use crate::content::{Content, remove_immutable, set_immutable};
use crate::error::{Error, Result};
use crate::{Summary, attributes, walk};

/// Makes a tree at `to`, which must not exist, of hard links into the content directory, which is on the same file system.
///
/// # Errors
/// [`Error::File`], also if a file has too many names. What was made stays: [`remove`] it.
pub fn write(content: &Content, tree: &Path, to: &Path) -> Result<Summary> {
    let mut summary = Summary::default();
    walk::copy(tree, to, |from, to, found| {
        let bytes = fs::read(from).map_err(Error::file("read", from))?;
        summary.files += 1;
        summary.bytes += found.len();
        let path = content.directory().join(name(ObjectId::of(&bytes), found));
        if !path.exists() {
            add(content, from, found, &bytes, &path)?;
            summary.new_bytes += found.len();
        }
        link(&path, to).map_err(Error::file("link", to))
    })?;
    Ok(summary)
}

/// Returns the path, in the content directory, of a file with these bytes and attributes.
fn name(id: ObjectId, found: &Metadata) -> PathBuf {
    let text = id.to_string();
    let (mode, uid, gid) = (found.mode() & 0o7777, found.uid(), found.gid());
    let time = (found.mtime(), found.mtime_nsec());
    Path::new(&text[..2]).join(format!("{}.{mode:o}.{uid}.{gid}.{}.{}", &text[2..], time.0, time.1))
}

fn add(content: &Content, from: &Path, found: &Metadata, bytes: &[u8], path: &Path) -> Result<()> {
    let (draft, draft_path) = content.draft()?;
    let parent = path.parent().unwrap_or(content.directory());
    let placed = fs::create_dir_all(parent)
        .and_then(|()| std::io::Write::write_all(&mut &draft, bytes))
        .map_err(Error::file("store", path))
        .and_then(|()| attributes::copy(from, &draft_path, found))
        .and_then(|()| {
            let renamed = draft.sync_data().and_then(|()| fs::rename(&draft_path, path));
            renamed.and_then(|()| Ok(set_immutable(draft.as_fd(), true)?)).map_err(Error::file("store", path))
        });
    if placed.is_err() {
        let _ = fs::remove_file(&draft_path);
    }
    placed
}

/// Gives an immutable file a further name, for which it must be changeable.
fn link(file: &Path, to: &Path) -> std::io::Result<()> {
    let open = File::open(file)?;
    set_immutable(open.as_fd(), false)?;
    let linked = fs::hard_link(file, to);
    set_immutable(open.as_fd(), true)?;
    linked
}

/// Removes a tree of hard links, or as much as there is of it.
///
/// # Errors
/// [`Error::File`].
pub fn remove(tree: &Path) -> Result<()> {
    let mut waiting = vec![tree.to_owned()];
    while let Some(directory) = waiting.pop() {
        let entries = match fs::read_dir(&directory) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(Error::file("list", &directory))?,
        };
        for entry in entries.flatten() {
            let (path, kind) = (entry.path(), entry.file_type());
            let kind = kind.map_err(Error::file("look at", &path))?;
            if kind.is_dir() {
                waiting.push(path);
            } else if kind.is_file() {
                remove_immutable(&path).map_err(Error::file("remove", &path))?;
            }
        }
    }
    fs::remove_dir_all(tree).map_err(Error::file("remove", tree))
}
