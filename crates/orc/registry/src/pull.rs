//! `orrery orc pull`: fetches what the store does not have, and makes a tree of it.

use std::collections::HashSet;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result, anyhow, bail};
use orrery_orc_registry::command::Pull;
use orrery_orc_registry::digest::Digest;
use orrery_orc_registry::image::Image;
use orrery_orc_registry::listing::{Content, Listing, MAX_LISTING};
use orrery_orc_registry::manifest::{Descriptor, Document, LISTING, MAX_MANIFEST, Manifest, Platform};
use orrery_orc_registry::{archive, record};
use orrery_orc_rootfs::tree::{Kind, Tree};
use orrery_orc_rootfs::{Content as Store, Layout, Options};
use orrery_policy::values::shown_size;
use serde_json::json;

use crate::client::Client;
use crate::interrupt;
use crate::parallel::{Progress, each};

/// What was fetched, and what was there.
#[derive(Clone, Copy, Default)]
struct Fetched {
    blobs: u64,
    bytes: u64,
    present: u64,
}

/// Pulls a tree, and prints what was fetched.
///
/// # Errors
/// What a user can do something about; there is no tree then.
pub(crate) fn run(arguments: &Pull, is_verbose: bool) -> Result<()> {
    let (layout, path) = layout(&arguments.tree)?;
    let store = Store::open(&std::path::absolute(&arguments.content)?)?;
    let reference = &arguments.reference;
    let client = Client::new(reference, &arguments.connection, false, &[], is_verbose)?;
    let pulled = pull(arguments, &client, &store).with_context(|| format!("cannot pull {reference}"))?;
    let Pulled { digest, tree, fetched } = pulled;
    if arguments.links && !arguments.suid {
        refuse_privileges(&tree)?;
    }
    let options =
        Options { is_writable: arguments.writable, is_trusted: arguments.suid, links: arguments.links };
    interrupt::uninterrupted(|| layout.make(&store, &tree, options))
        .with_context(|| format!("cannot pull {reference}"))?;
    let of_files = tree.entries().iter().filter_map(|entry| match entry.kind {
        Kind::File { length, .. } => Some(length),
        _ => None,
    });
    let (files, bytes) = of_files.fold((0_u64, 0), |(files, bytes), length| (files + 1, bytes + length));
    if arguments.connection.json {
        let result = json!({
            "schema": 1,
            "reference": reference.to_string(),
            "digest": digest,
            "tree": path,
            "files": files,
            "bytes": bytes,
            "fetched": {"blobs": fetched.blobs, "bytes": fetched.bytes},
            "present": fetched.present,
            "requests": client.requests(),
        });
        println!("{result}");
    } else {
        println!(
            "{}: {files} files, {}, for which {} in {} blobs were fetched",
            path.display(),
            shown_size(bytes),
            shown_size(fetched.bytes),
            fetched.blobs
        );
    }
    Ok(())
}

/// Returns where a tree is made, which must be free.
fn layout(tree: &Path) -> Result<(Layout, PathBuf)> {
    let path = std::path::absolute(tree).context("cannot find the working directory")?;
    let name = path.file_name().and_then(|name| name.to_str());
    let (Some(name), Some(output)) = (name, path.parent()) else {
        bail!("cannot name a tree like {}", tree.display());
    };
    let layout = Layout::new(output, name);
    if layout.is_taken() {
        bail!(
            "cannot make {0}: it is there; remove it with `orrery orc rootfs --output {1} --remove {name}`",
            path.display(),
            output.display()
        );
    }
    if layout.has_names() {
        bail!(
            "cannot make {0}: it was made before, and is not mounted; mount it with `orrery orc rootfs --output {1} {name}`, \
             or remove it with `--remove`",
            path.display(),
            output.display()
        );
    }
    let layout_path = path.clone();
    Ok((layout, layout_path))
}

/// Refuses what would give privileges where it lies in a file system that is not mounted for it.
fn refuse_privileges(tree: &Tree) -> Result<()> {
    let gives = |kind: &Kind, mode: u32, extended: &[(Vec<u8>, Vec<u8>)]| {
        let is_file = matches!(kind, Kind::File { .. });
        matches!(kind, Kind::Device { .. })
            || is_file
                && (mode & 0o6000 != 0 || extended.iter().any(|(name, _)| name == b"security.capability"))
    };
    let found = tree
        .entries()
        .iter()
        .find(|entry| gives(&entry.kind, entry.attributes.mode, &entry.attributes.extended));
    match found {
        Some(entry) => bail!(
            "cannot make hard links: {} is set-user-ID, has capabilities or is a device; pass --suid if you trust the registry",
            entry.path.display()
        ),
        None => Ok(()),
    }
}

struct Pulled {
    digest: Digest,
    tree: Tree,
    fetched: Fetched,
}

fn pull(arguments: &Pull, client: &Client, store: &Store) -> Result<Pulled> {
    let (digest, bytes) = client.manifest(&arguments.reference.manifest())?;
    let parse = |bytes: &[u8]| Document::parse(bytes).context("cannot read the manifest");
    let manifest = match parse(&bytes)? {
        Document::Manifest(manifest) => manifest,
        Document::Index(index) => {
            let platform = arguments.platform.clone().unwrap_or_else(Platform::here);
            let chosen = index.choose(&platform).with_context(|| {
                format!("it has no image for {}/{}; see --platform", platform.os, platform.architecture)
            })?;
            if chosen.size > MAX_MANIFEST {
                bail!("the manifest {} has more than 4 MiB", chosen.digest);
            }
            let (_, bytes) = client.manifest(&chosen.digest.to_string())?;
            match parse(&bytes)? {
                Document::Manifest(manifest) => manifest,
                Document::Index(_) => bail!("an index names another index"),
            }
        }
    };
    let (tree, fetched) = if manifest.config.media_type == LISTING {
        pull_tree(arguments, client, store, &manifest.config)?
    } else {
        pull_image(arguments, client, store, &manifest)?
    };
    Ok(Pulled { digest, tree, fetched })
}

/// Fetches the contents of a tree of Orrery's.
fn pull_tree(
    arguments: &Pull,
    client: &Client,
    store: &Store,
    config: &Descriptor,
) -> Result<(Tree, Fetched)> {
    if config.size > MAX_LISTING {
        bail!("its listing has {} bytes, more than 64 MiB", config.size);
    }
    let bytes = client.blob(config.digest, config.size, |reader| {
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes)?;
        Ok(bytes)
    })?;
    let listing = Listing::parse(&bytes).context("cannot read its listing")?;
    drop(bytes);
    let total: u64 = listing.contents().iter().map(|content| content.size).sum();
    if total > arguments.limit {
        bail!("its files have {}, more than --limit {}", shown_size(total), shown_size(arguments.limit));
    }
    let missing: Vec<&Content> =
        listing.contents().iter().filter(|content| !store.contains(content.id, content.size)).collect();
    check_room(store, missing.iter().map(|content| content.size).sum())?;
    let progress = Progress::new("fetched", missing.len());
    each(arguments.connection.jobs, &missing, |content| {
        fetch(client, store, content)?;
        progress.add(content.size);
        Ok(())
    })?;
    let fetched = Fetched {
        blobs: missing.len() as u64 + 1,
        bytes: progress.bytes() + config.size,
        present: (listing.contents().len() - missing.len()) as u64,
    };
    Ok((listing.tree().clone(), fetched))
}

fn fetch(client: &Client, store: &Store, content: &Content) -> Result<()> {
    let incoming = client.blob(content.digest, content.size, |reader| {
        let mut incoming = store.receive()?;
        io::copy(reader, &mut incoming).with_context(|| cannot_store(store))?;
        Ok(incoming)
    })?;
    if incoming.id() != content.id {
        bail!(
            "cannot store the blob {}: its BLAKE3 hash is {}, and the listing claims {}",
            content.digest,
            incoming.id(),
            content.id
        );
    }
    incoming.finish()?;
    Ok(())
}

fn cannot_store(store: &Store) -> String {
    format!("cannot write to {}", store.directory().display())
}

/// Checks that there is room for so many bytes, before any of them is fetched.
fn check_room(store: &Store, bytes: u64) -> Result<()> {
    let found = rustix::fs::statvfs(store.directory())
        .with_context(|| format!("cannot find the room in {}", store.directory().display()))?;
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    if bytes > free {
        bail!("it needs {}, and {} has {}", shown_size(bytes), store.directory().display(), shown_size(free));
    }
    Ok(())
}

/// Whether a layer is an archive.
fn is_archive(media_type: &str) -> bool {
    let known = [
        "application/vnd.oci.image.layer.v1.tar",
        "application/vnd.oci.image.layer.nondistributable.v1.tar",
        "application/vnd.docker.image.rootfs.diff.tar",
        "application/vnd.docker.image.rootfs.foreign.diff.tar",
    ];
    let plain = media_type.trim_end_matches("+gzip").trim_end_matches("+zstd");
    known.contains(&plain.trim_end_matches(".gzip").trim_end_matches(".zstd"))
}

/// Fetches the layers of an image.
fn pull_image(
    arguments: &Pull,
    client: &Client,
    store: &Store,
    manifest: &Manifest,
) -> Result<(Tree, Fetched)> {
    if let Some(other) = manifest.layers.iter().find(|layer| !is_archive(&layer.media_type)) {
        bail!(
            "it is no image: a layer is of the type {:?}",
            other.media_type.chars().take(100).collect::<String>()
        );
    }
    if manifest.layers.len() > 512 {
        bail!("it has {} layers, more than 512", manifest.layers.len());
    }
    let total = manifest.layers.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.size));
    if total > arguments.limit {
        bail!("its layers have {}, more than --limit {}", shown_size(total), shown_size(arguments.limit));
    }
    // Some images have a layer, such as an empty one, twice.
    let mut seen = HashSet::new();
    let layers: Vec<&Descriptor> = manifest.layers.iter().filter(|layer| seen.insert(layer.digest)).collect();
    let missing: Vec<&Descriptor> =
        layers.iter().filter(|layer| record::load(store, layer.digest).is_none()).copied().collect();
    let progress = Progress::new("fetched", missing.len());
    let left = AtomicU64::new(arguments.limit);
    let writing = Mutex::new(());
    each(arguments.connection.jobs, &missing, |layer| {
        let changes = client.blob(layer.digest, layer.size, |reader| {
            let read = archive::read(reader, |file| {
                let mut incoming = store.receive().map_err(io::Error::other)?;
                copy(file, &mut incoming, &left)?;
                if incoming.length() == 0 {
                    return Ok((incoming.id(), 0));
                }
                let stored = incoming.finish().map_err(io::Error::other)?;
                Ok((stored.id, stored.length))
            });
            read.context("cannot read it as an archive")
        })?;
        let _one_by_one = writing.lock().unwrap_or_else(PoisonError::into_inner);
        record::save(store, layer.digest, &changes)?;
        progress.add(layer.size);
        Ok(())
    })?;
    let mut image = Image::default();
    for layer in &manifest.layers {
        let changes = record::load(store, layer.digest).with_context(|| {
            format!("the contents of the layer {} went while it was pulled", layer.digest)
        })?;
        image.apply(changes).with_context(|| format!("cannot apply the layer {}", layer.digest))?;
    }
    let fetched = Fetched {
        blobs: missing.len() as u64,
        bytes: progress.bytes(),
        present: (layers.len() - missing.len()) as u64,
    };
    let tree = image.into_tree().map_err(|error| anyhow!("cannot make its tree: {error}"))?;
    Ok((tree, fetched))
}

/// Copies a file, as long as there is room for it.
fn copy(mut from: impl Read, to: &mut impl io::Write, left: &AtomicU64) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            return Ok(());
        }
        let take = |left: u64| left.checked_sub(count as u64);
        if left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
            return Err(io::Error::other("the files of the image have more bytes than --limit"));
        }
        to.write_all(&buffer[..count])?;
    }
}
