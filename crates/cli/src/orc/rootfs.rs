//! `orrery orc rootfs`: file trees whose equal files are in memory once, for every program.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use orrery_orc_rootfs::overlay::{self, Upper};
use orrery_orc_rootfs::{Content, Error, Summary, links, names};

use super::size;

/// Where contents are by default.
pub(super) const CONTENT: &str = "/var/lib/orrery/content";

/// Make file trees, such as root file systems, whose equal files are in memory and on disk once.
///
/// Every program shares then what it reads or maps, without an auditor: static ones, those of other C libraries, archives, interpreted
/// code, data. For each TREE a tree of its name is made in the output directory: an overlay that is mounted, or hard links where the
/// kernel has no overlays with data-only layers. Run it again after a restart of the machine. The original trees are not needed any more.
#[derive(Args)]
pub(super) struct Arguments {
    /// The directory for the trees
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
    /// The directory of the contents, on ext4, XFS, Btrfs or tmpfs [default: /var/lib/orrery/content]
    #[arg(long, value_name = "DIR", default_value = CONTENT, hide_default_value = true)]
    content: PathBuf,
    /// Let programs write to the trees; what they write is each tree's own
    #[arg(long, conflicts_with = "links")]
    writable: bool,
    /// Make hard links to immutable files, which need no mount
    #[arg(long)]
    links: bool,
    /// Unmount and remove the trees of these names
    #[arg(long, conflicts_with_all = ["writable", "links"])]
    remove: bool,
    /// The trees to share
    #[arg(required = true)]
    trees: Vec<PathBuf>,
}

/// The paths of one tree in the output directory.
pub(super) struct TreeLayout {
    pub(super) tree: PathBuf,
    layers: PathBuf,
}

impl TreeLayout {
    /// Returns the paths of the tree of this name.
    pub(super) fn new(output: &Path, name: &str) -> Self {
        Self { tree: output.join(name), layers: output.join(format!(".{name}.layers")) }
    }

    fn names(&self) -> PathBuf {
        self.layers.join("names")
    }

    /// Makes the names of `tree`, and mounts it.
    pub(super) fn mount(&self, content: &Content, tree: &Path, is_writable: bool) -> Result<Summary> {
        fs::create_dir_all(&self.layers)
            .with_context(|| format!("cannot create {}", self.layers.display()))?;
        let summary = names::write(content, tree, &self.names())?;
        self.mount_again(content, is_writable)?;
        Ok(summary)
    }

    fn mount_again(&self, content: &Content, is_writable: bool) -> Result<()> {
        let [upper, work] = ["upper", "work"].map(|name| self.layers.join(name));
        let create = |path: &Path| {
            fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))
        };
        create(&self.tree)?;
        let layer = Upper { upper: &upper, work: &work };
        if is_writable {
            create(&upper)?;
            create(&work)?;
            let mode = fs::metadata(self.names()).context("cannot find the names of the tree")?.permissions();
            fs::set_permissions(&upper, mode).context("cannot set the mode of the upper layer")?;
        }
        Ok(overlay::mount(content, &self.names(), is_writable.then_some(layer), &self.tree)?)
    }

    /// Unmounts and removes everything but contents.
    pub(super) fn remove(&self) -> Result<()> {
        overlay::unmount(&self.tree)?;
        if self.layers.exists() {
            names::remove(&self.layers)?;
            let _ = fs::remove_dir(&self.tree);
            return Ok(());
        }
        Ok(links::remove(&self.tree)?)
    }
}

/// Makes or removes the trees.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let absolute = |path: &Path| std::path::absolute(path).context("cannot find the working directory");
    let output = absolute(&arguments.output)?;
    let mut layouts = Vec::new();
    for tree in &arguments.trees {
        let name = absolute(tree)?;
        let name = name.file_name().and_then(|name| name.to_str());
        let name = name.with_context(|| format!("cannot name a tree like {}", tree.display()))?.to_owned();
        if layouts.iter().any(|(_, other, _)| *other == name) {
            bail!("cannot make two trees with the name {name}: rename one");
        }
        let layout = TreeLayout::new(&output, &name);
        layouts.push((tree, name, layout));
    }
    if arguments.remove {
        return layouts.iter().try_for_each(|(_, _, layout)| layout.remove());
    }
    for (tree, name, layout) in &layouts {
        let is_taken =
            layout.tree.exists() && fs::read_dir(&layout.tree).is_ok_and(|mut all| all.next().is_some());
        if is_taken {
            bail!("cannot make {}: it is there; remove it with --remove {name}", layout.tree.display());
        }
        if !layout.names().exists() && !tree.is_dir() {
            bail!("cannot share {}: it is no directory", tree.display());
        }
    }
    let content = Content::open(&absolute(&arguments.content)?)?;
    fs::create_dir_all(&output).with_context(|| format!("cannot create {}", output.display()))?;
    for (tree, _, layout) in &layouts {
        if layout.names().exists() {
            layout.mount_again(&content, arguments.writable)?;
            println!("{}: mounted", layout.tree.display());
            continue;
        }
        let summary = make(arguments, &content, tree, layout);
        if summary.is_err() {
            // Half a tree is none.
            let _ = layout.remove();
        }
        let Summary { files, bytes, new_bytes } = summary?;
        println!(
            "{}: {files} files, {}, of which {} were there",
            layout.tree.display(),
            size(bytes),
            size(bytes - new_bytes)
        );
    }
    Ok(())
}

fn make(arguments: &Arguments, content: &Content, tree: &Path, layout: &TreeLayout) -> Result<Summary> {
    if !arguments.links {
        match layout.mount(content, tree, arguments.writable) {
            Err(error)
                if !arguments.writable
                    && matches!(error.downcast_ref(), Some(Error::NoDataOnlyLayers { .. })) =>
            {
                eprintln!("orrery orc rootfs: {error:#}: hard links are made instead");
                layout.remove()?;
            }
            other => return other,
        }
    }
    Ok(links::write(content, tree, &layout.tree)?)
}
