//! Where a tree and its layers lie in the file system.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::draft::Draft;
use crate::error::{Error, Result};
use crate::overlay::{self, Upper};
use crate::{Content, Summary, Tree, links, names};

/// How a tree that was described elsewhere is made.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Whether it has a layer of its own for what is written.
    pub is_writable: bool,
    /// Whether its set-user-ID programs, file capabilities and devices have an effect.
    pub is_trusted: bool,
    /// Whether it consists of hard links, and is not mounted.
    pub links: bool,
}

/// The paths of one tree: `OUTPUT/NAME`, and `OUTPUT/.NAME.layers` with its names and what is written to it.
#[derive(Clone, Debug)]
pub struct Layout {
    tree: PathBuf,
    layers: PathBuf,
    draft: PathBuf,
}

impl Layout {
    /// Returns the paths of the tree of this name in the directory `output`.
    pub fn new(output: &Path, name: &str) -> Self {
        let beside = |what: &str| output.join(format!(".{name}.{what}"));
        Self { tree: output.join(name), layers: beside("layers"), draft: beside("draft") }
    }

    /// Returns the path at which the tree is seen.
    pub fn tree(&self) -> &Path {
        &self.tree
    }

    /// Returns whether the tree has names already, which need only be mounted.
    pub fn has_names(&self) -> bool {
        self.names().exists()
    }

    /// Returns whether there is something at the tree's path.
    pub fn is_taken(&self) -> bool {
        match fs::read_dir(&self.tree) {
            Ok(mut entries) => entries.next().is_some(),
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        }
    }

    fn names(&self) -> PathBuf {
        self.layers.join("names")
    }

    /// The mark of a tree whose set-user-ID programs and devices have no effect.
    fn mark(directory: &Path) -> PathBuf {
        directory.join("nosuid")
    }

    /// Makes the names of the directory `tree`, and mounts it.
    ///
    /// # Errors
    /// Those of [`names::write`] and [`overlay::mount`]; what was made stays: [`remove`](Self::remove) it.
    pub fn mount(&self, content: &Content, tree: &Path, is_writable: bool) -> Result<Summary> {
        create(&self.layers)?;
        let summary = names::write(content, tree, &self.names())?;
        self.mount_again(content, is_writable)?;
        Ok(summary)
    }

    /// Mounts a tree that has names.
    ///
    /// # Errors
    /// Those of [`overlay::mount`].
    pub fn mount_again(&self, content: &Content, is_writable: bool) -> Result<()> {
        let [upper, work] = ["upper", "work"].map(|name| self.layers.join(name));
        create(&self.tree)?;
        let layer = Upper { upper: &upper, work: &work };
        if is_writable {
            create(&upper)?;
            create(&work)?;
            let found = fs::metadata(self.names()).map_err(Error::file("look at", &self.names()))?;
            let failed = Error::file("set the owner and the mode of", &upper);
            std::os::unix::fs::chown(&upper, Some(found.uid()), Some(found.gid()))
                .and_then(|()| fs::set_permissions(&upper, found.permissions()))
                .map_err(failed)?;
        }
        let is_trusted = !Self::mark(&self.layers).exists();
        overlay::mount(content, &self.names(), is_writable.then_some(layer), is_trusted, &self.tree)
    }

    /// Makes a tree of a description, whose contents are all there: the whole tree or nothing, whatever happens meanwhile.
    ///
    /// # Errors
    /// [`Error::Busy`] if another process makes this tree; [`Error::File`] with `EEXIST` if it is there; those of [`names::write_tree`],
    /// [`links::write_tree`] and [`overlay::mount`].
    pub fn make(&self, content: &Content, tree: &Tree, options: Options) -> Result<()> {
        let mut draft = Draft::new(&self.draft)?;
        if self.is_taken() || self.layers.exists() {
            let exists = io::Error::from_raw_os_error(libc::EEXIST);
            return Err(Error::file("create", &self.tree)(exists));
        }
        if options.links {
            let made = self.draft.join("tree");
            links::write_tree(content, tree, &made)?;
            draft.sync()?;
            return fs::rename(&made, &self.tree).map_err(Error::file("create", &self.tree));
        }
        names::write_tree(content, tree, &self.draft.join("names"))?;
        if !options.is_trusted {
            let mark = Self::mark(&self.draft);
            File::create(&mark).map_err(Error::file("create", &mark))?;
        }
        draft.sync()?;
        fs::rename(&self.draft, &self.layers).map_err(Error::file("create", &self.layers))?;
        draft.is_moved = true;
        let mounted = self.mount_again(content, options.is_writable);
        if mounted.is_err() {
            // Half a tree is none.
            let _ = self.remove();
        }
        mounted
    }

    /// Unmounts and removes everything but contents.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn remove(&self) -> Result<()> {
        overlay::unmount(&self.tree)?;
        if self.layers.exists() {
            names::remove(&self.layers)?;
            let _ = fs::remove_dir(&self.tree);
            return Ok(());
        }
        links::remove(&self.tree)
    }
}

fn create(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(Error::file("create", path))
}
