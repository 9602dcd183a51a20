//! `orrery orc rootfs`: file trees whose equal files are in memory once, for every program.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use orrery_orc_rootfs::{Content, Error, Layout, Summary, links};
use orrery_policy::values::shown_size;

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
        let layout = Layout::new(&output, &name);
        layouts.push((tree, name, layout));
    }
    if arguments.remove {
        return layouts.iter().try_for_each(|(_, _, layout)| Ok(layout.remove()?));
    }
    for (tree, name, layout) in &layouts {
        if layout.is_taken() {
            bail!("cannot make {}: it is there; remove it with --remove {name}", layout.tree().display());
        }
        if !layout.has_names() && !tree.is_dir() {
            bail!("cannot share {}: it is no directory", tree.display());
        }
    }
    let content = Content::open(&absolute(&arguments.content)?)?;
    fs::create_dir_all(&output).with_context(|| format!("cannot create {}", output.display()))?;
    for (tree, _, layout) in &layouts {
        if layout.has_names() {
            layout.mount_again(&content, arguments.writable)?;
            println!("{}: mounted", layout.tree().display());
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
            layout.tree().display(),
            shown_size(bytes),
            shown_size(bytes - new_bytes)
        );
    }
    Ok(())
}

fn make(arguments: &Arguments, content: &Content, tree: &Path, layout: &Layout) -> Result<Summary> {
    if !arguments.links {
        match layout.mount(content, tree, arguments.writable) {
            Err(error @ Error::NoDataOnlyLayers { .. }) if !arguments.writable => {
                eprintln!("orrery orc rootfs: {error}: hard links are made instead");
                layout.remove()?;
            }
            other => return Ok(other?),
        }
    }
    Ok(links::write(content, tree, layout.tree())?)
}
