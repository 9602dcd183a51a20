//! Trees of hard links, where there are no data-only layers: files with equal bytes, owner, mode and time of change are one immutable
//! file. Such a tree needs no mount, and nobody can write to its files.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use orrery_orc_wire::ObjectId;

use crate::content::{Content, remove_immutable, set_immutable};
use crate::error::{Error, Result};
use crate::tree::{Entry, Kind, Tree};
use crate::{Attributes, Summary, attributes, walk};

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
        let attributes = Attributes::read(from, found)?;
        let path = content.directory().join(name(ObjectId::of(&bytes), &attributes));
        if !path.exists() {
            add(content, &bytes, &path, |draft| attributes::copy(from, draft, found))?;
            summary.new_bytes += found.len();
        }
        link(&path, to).map_err(Error::file("link", to))
    })?;
    Ok(summary)
}

/// Makes a tree of a description at `to`, which must not exist, of hard links. Its contents are all there; of each there is a copy more
/// with the owner, mode and time that its files have.
///
/// # Errors
/// [`Error::NoContent`] if one is not there; [`Error::File`], also if a file has too many names. What was made stays: [`remove`] it.
pub fn write_tree(content: &Content, tree: &Tree, to: &Path) -> Result<()> {
    let place = |path: &Path, entry: &Entry, id: ObjectId, length: u64| {
        if !content.contains(id, length) {
            return Err(Error::NoContent { path: path.to_owned(), id });
        }
        let kept = content.directory().join(name(id, &entry.attributes));
        if !kept.exists() {
            let bytes = content.directory().join(Content::relative(id));
            let bytes = fs::read(&bytes).map_err(Error::file("read", &bytes))?;
            add(content, &bytes, &kept, |draft| entry.attributes.set(draft, false, None))?;
        }
        link(&kept, path).map_err(Error::file("link", path))
    };
    tree.write(to, place, |first, path, entry| match entry.kind {
        // An immutable file gets further names from its place only.
        Kind::File { id, length } => place(path, entry, id, length),
        _ => fs::hard_link(first, path).map_err(Error::file("link", path)),
    })
}

/// Returns the path, in the content directory, of a file with these bytes and attributes. Extended attributes are part of it only where
/// there are some: security.capability makes another program of the same bytes.
fn name(id: ObjectId, attributes: &Attributes) -> PathBuf {
    let text = id.to_string();
    let Attributes { mode, uid, gid, modified: time, extended } = attributes;
    let mut more = String::new();
    if !extended.is_empty() {
        let mut hash = blake3::Hasher::new();
        for part in extended.iter().flat_map(|(name, value)| [name, value]) {
            hash.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        more = format!(".{}", &hash.finalize().to_hex()[..32]);
    }
    Path::new(&text[..2]).join(format!("{}.{mode:o}.{uid}.{gid}.{}.{}{more}", &text[2..], time.0, time.1))
}

fn add(
    content: &Content,
    bytes: &[u8],
    path: &Path,
    attribute: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let (draft, draft_path) = content.draft()?;
    let parent = path.parent().unwrap_or(content.directory());
    let placed = fs::create_dir_all(parent)
        .and_then(|()| std::io::Write::write_all(&mut &draft, bytes))
        .map_err(Error::file("store", path))
        .and_then(|()| attribute(&draft_path))
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
    remove_below(tree)?;
    match fs::remove_dir(tree) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(Error::file("remove", tree)),
    }
}

/// Removes what is in a tree of hard links, but not its top directory.
pub(crate) fn remove_below(tree: &Path) -> Result<()> {
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
    for entry in fs::read_dir(tree).map_err(Error::file("list", tree))?.flatten() {
        let path = entry.path();
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let removed = if is_directory { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.map_err(Error::file("remove", &path))?;
    }
    Ok(())
}
