//! `orrery orc image`: a file tree that virtual machines share.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use orrery_orc_rootfs::image::{self, Image};
use orrery_policy::values::shown_size;
use serde_json::json;

/// The version of the JSON.
const SCHEMA: u32 = 1;

/// Write an image of file trees that all virtual machines of this host have in memory once.
///
/// The image is a read-only file system (EROFS), which a guest maps as persistent memory (virtio-pmem, DAX) in place of reading it into its
/// own memory. Printed are QEMU's options and the guest's command. The file is immutable; the original trees are not needed any more.
/// Equal trees have equal images.
#[derive(Args)]
pub(super) struct Arguments {
    /// The file of the image, on ext4, XFS, Btrfs or tmpfs
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Remove the image
    #[arg(long, conflicts_with_all = ["trees", "json"])]
    remove: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    /// The tree; of several trees each is a directory of the image
    #[arg(required_unless_present = "remove")]
    trees: Vec<PathBuf>,
}

/// Makes or removes the image.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let absolute = |path: &Path| std::path::absolute(path).context("cannot find the working directory");
    let output = absolute(&arguments.output)?;
    if arguments.remove {
        return Ok(image::remove(&output)?);
    }
    if output.symlink_metadata().is_ok() {
        bail!("cannot make {0}: it is there; remove it with --output {0} --remove", output.display());
    }
    if output.file_name().is_none() {
        bail!("cannot name an image like {}", output.display());
    }
    let mut trees: Vec<(String, PathBuf)> = Vec::new();
    for tree in &arguments.trees {
        let tree = absolute(tree)?;
        let name = tree.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        if name.is_empty() && arguments.trees.len() > 1 {
            bail!("cannot name a directory of the image like {}", tree.display());
        }
        if trees.iter().any(|(other, _)| *other == name) {
            bail!("cannot make two trees with the name {name}: rename one");
        }
        if !tree.is_dir() {
            bail!("cannot share {}: it is no directory", tree.display());
        }
        trees.push((name, tree));
    }
    let image = image::write(&trees, &output)?;
    print(arguments.json, &output, &image);
    Ok(())
}

/// Prints what was made and how it is used.
fn print(as_json: bool, output: &Path, image: &Image) {
    let Image { id, uuid, size: length, files, bytes } = image;
    // Where a comma separates, two stand for one.
    let path = output.display().to_string().replace(',', ",,");
    let object = format!("memory-backend-file,id=image,share=on,readonly=on,size={length},mem-path={path}");
    let device = "virtio-pmem-pci,memdev=image";
    let mount = "mount -t erofs -o ro,dax=always /dev/pmem0 /mnt";
    if as_json {
        let qemu = ["-object", &object, "-device", device];
        let row = json!({
            "schema": SCHEMA, "image": output.display().to_string(), "size": length, "blake3": id.to_string(), "uuid": uuid,
            "files": files, "bytes": bytes, "qemu": qemu, "mount": mount,
        });
        println!("{row}");
        return;
    }
    println!(
        "{}: {files} files, {}, in an image of {}",
        output.display(),
        shown_size(*bytes),
        shown_size(*length)
    );
    println!("  blake3: {id}");
    println!("  qemu:   -object {object} -device {device}");
    println!("  guest:  {mount}");
}
