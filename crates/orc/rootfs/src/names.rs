//! The names of a tree: a layer of an overlay whose regular files have no bytes, but the name of a content that has them
//! (`metacopy` and `redirect` in the kernel's documentation of overlayfs).

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::path::Path;

use orrery_orc_wire::ObjectId;
use rustix::fs::XattrFlags;

use crate::content::Content;
use crate::error::{Error, Result};
use crate::{Summary, Tree, attributes, walk};

/// Writes the names of `tree` to the directory `to`, which must not exist, and adds the contents that are not there yet.
///
/// # Errors
/// [`Error::Changes`] if a file changes meanwhile; [`Error::File`], also on file systems without trusted attributes. What was
/// written stays.
pub fn write(content: &Content, tree: &Path, to: &Path) -> Result<Summary> {
    let mut summary = Summary::default();
    walk::copy(tree, to, |from, to, found| {
        let stored = content.add(from)?;
        if stored.length != found.len() {
            return Err(Error::Changes(from.to_owned()));
        }
        summary.files += 1;
        summary.bytes += stored.length;
        summary.new_bytes += if stored.is_new { stored.length } else { 0 };
        name(to, stored.id, stored.length)?;
        attributes::copy(from, to, found)
    })?;
    Ok(summary)
}

/// Writes the names that a description has to the directory `to`, which must not exist, and whose contents are all there.
///
/// # Errors
/// [`Error::NoContent`] if one is not there; [`Error::File`], also on file systems without trusted attributes. What was written stays.
pub fn write_tree(content: &Content, tree: &Tree, to: &Path) -> Result<()> {
    tree.write(
        to,
        |path, entry, id, length| {
            if !content.contains(id, length) {
                return Err(Error::NoContent { path: path.to_owned(), id });
            }
            name(path, id, length)?;
            entry.attributes.set(path, false, None)
        },
        |first, path, _| fs::hard_link(first, path).map_err(Error::file("link", path)),
    )
}

/// Creates a file without bytes that has a content's.
fn name(to: &Path, id: ObjectId, length: u64) -> Result<()> {
    let file = File::create_new(to).map_err(Error::file("create", to))?;
    file.set_len(length).map_err(Error::file("create", to))?;
    let redirect = Path::new("/").join(Content::relative(id));
    let set =
        |name: &str, value: &[u8]| rustix::fs::fsetxattr(file.as_fd(), name, value, XattrFlags::empty());
    set("trusted.overlay.metacopy", b"")
        .and_then(|()| set("trusted.overlay.redirect", redirect.as_os_str().as_encoded_bytes()))
        .map_err(Error::file("name the content of", to))
}

/// Removes names that were written, or as much as there is of them.
///
/// # Errors
/// Those of removing a directory.
pub fn remove(names: &Path) -> Result<()> {
    match fs::remove_dir_all(names) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::file("remove", names)(error))
        }
        _ => Ok(()),
    }
}
