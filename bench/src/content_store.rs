//! File trees of one content store, as composefs makes them: every distinct file is once in the store, named by its hash, and
//! each tree is an overlay (overlayfs) of names without bytes, whose bytes come from there. So the trees have inodes of
//! their own and yet one page cache. Composefs has the names in an EROFS image, which spares inodes; the bytes are found the
//! same way.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use orrery_orc_client::ObjectId;
use rustix::fs::XattrFlags;

use crate::contender::Skipped;

/// Mounts that are undone with this object.
#[derive(Debug, Default)]
pub struct ContentStore {
    mounted: Vec<PathBuf>,
    store: PathBuf,
}

impl ContentStore {
    /// Makes a store of `files`, and a tree of it at each of `trees`, in `directory`.
    ///
    /// # Errors
    /// [`Skipped`] where overlays of data-only layers (Linux 6.5) cannot be mounted; those of copying.
    pub fn create_tree(directory: &Path, trees: &[PathBuf], files: &[PathBuf]) -> Result<Self> {
        let store = directory.join("content");
        fs::create_dir_all(&store)?;
        let mut names = Vec::new();
        for file in files {
            let digest = ObjectId::of(&fs::read(file)?).to_string();
            fs::copy(file, store.join(&digest))
                .with_context(|| format!("cannot store {}", file.display()))?;
            names.push((file.file_name().context("a file without a name")?, digest));
        }
        let mut this = Self { mounted: Vec::new(), store };
        for tree in trees {
            let layer = tree.with_extension("names");
            for directory in [tree, &layer] {
                fs::create_dir_all(directory)?;
            }
            for (name, digest) in &names {
                let stored = fs::metadata(this.store.join(digest))?;
                let path = layer.join(name);
                let empty = File::create(&path)?;
                empty.set_len(stored.len())?;
                empty.set_permissions(fs::Permissions::from_mode(stored.permissions().mode()))?;
                let refused = |errno| Skipped(format!("no trusted attributes can be set here: {errno}"));
                let flags = XattrFlags::empty();
                rustix::fs::fsetxattr(&empty, "trusted.overlay.metacopy", b"", flags).map_err(refused)?;
                let at = format!("/{digest}");
                rustix::fs::fsetxattr(&empty, "trusted.overlay.redirect", at.as_bytes(), flags)
                    .map_err(refused)?;
            }
            this.mount(tree, &layer)?;
        }
        Ok(this)
    }

    fn mount(&mut self, tree: &Path, layer: &Path) -> Result<()> {
        let options =
            format!("metacopy=on,redirect_dir=follow,lowerdir={}::{}", layer.display(), self.store.display());
        let (place, options) = (CString::new(tree.as_os_str().as_bytes())?, CString::new(options)?);
        let kind = c"overlay".as_ptr();
        // SAFETY: C strings that live until the call is done.
        let mounted =
            unsafe { libc::mount(kind, place.as_ptr(), kind, libc::MS_RDONLY, options.as_ptr().cast()) };
        if mounted != 0 {
            let why = std::io::Error::last_os_error();
            return Err(Skipped(format!("no overlay of a content store can be mounted here: {why}")).into());
        }
        self.mounted.push(tree.to_owned());
        Ok(())
    }

    /// Returns where the bytes are stored.
    pub fn store(&self) -> &Path {
        &self.store
    }
}

impl Drop for ContentStore {
    fn drop(&mut self) {
        for tree in &self.mounted {
            if let Ok(place) = CString::new(tree.as_os_str().as_bytes()) {
                // SAFETY: a C string; what is still in use there goes when it is done with.
                unsafe { libc::umount2(place.as_ptr(), libc::MNT_DETACH) };
            }
        }
    }
}
